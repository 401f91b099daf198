//! The CPU backend, under the tolerance: both passes of the grid, and e4m3 operands. `cpu_more` has what is beside them.
//!
//! One program has the tests of several files: what they share is compiled and linked once, and a long test leaves no core
//! without work while others wait for their program.

mod accuracy;
mod backward;
mod edges;
mod forward;
mod fp8;
mod modifiers;
mod sequences;
