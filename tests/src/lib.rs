//! The runner that kernels hand themselves to: problems, inputs in guarded memory, and results held against the
//! oracle under the library's one tolerance. The GPU tests and the CPU tests share all of it.

#![deny(missing_docs)]

pub mod allocations;
pub mod backward;
pub mod c;
pub mod data;
pub mod fp8;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod layouts;
pub mod long;
pub mod mutations;
pub mod problems;
pub mod runner;
pub mod training;

use std::io::Write;

/// Prints a line past the test harness, which would hide it when the test passes.
pub fn say(line: &str) {
    // A closed stderr is no reason to fail a test.
    let _ = writeln!(std::io::stderr(), "{line}");
}
