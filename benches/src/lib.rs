//! Placeholder, replaced before the first commit.
