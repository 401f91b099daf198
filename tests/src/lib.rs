//! What the GPU tests and the CPU tests share: the grid of problems, the runner and its table, and ways to break results on
//! purpose. Cases, guarded memory and the judging are those of `hopper-attention-verify`, which `hattn fuzz` uses too.

#![deny(missing_docs)]

pub mod accuracy;
pub mod alibi;
pub mod allocations;
pub mod backward;
pub mod bias;
pub mod blocks;
pub mod c;
pub mod dropout;
pub mod edges;
pub mod fp8;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod gradients;
pub mod layers;
pub mod long;
pub mod modifiers;
pub mod mutations;
pub mod packed;
pub mod problems;
pub mod runner;
pub mod sequences;
pub mod sinks;
pub mod softcap;
pub mod training;

pub use hopper_attention_verify::{case, data, inputs, layouts, packing, ready};

use std::io::Write;

/// Prints a line past the test harness, which would hide it when the test passes.
pub fn say(line: &str) {
    // A closed stderr is no reason to fail a test.
    let _ = writeln!(std::io::stderr(), "{line}");
}
