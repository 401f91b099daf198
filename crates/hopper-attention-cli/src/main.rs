//! Placeholder, replaced before the first commit.
fn main() {}
