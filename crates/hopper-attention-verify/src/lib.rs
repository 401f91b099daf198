//! Random attention problems, computed in guarded memory and judged against the f64 oracle of [`hopper_attention`].
//!
//! `hattn fuzz` runs them, and so do the tests of this project. A [`case::Case`] says the sizes, the mask, where the tensors lie
//! and what they hold. [`forward::Prepared`], [`backward::Prepared`] and [`fp8::Operands`] are a case with its inputs in
//! memory and what must come out. [`fuzz`] draws problems, runs them, and makes a failure smaller.

#![deny(missing_docs)]

pub mod alibi;
pub mod backward;
pub mod bias;
pub mod blocks;
pub mod case;
pub mod data;
pub mod dropout;
pub mod forward;
pub mod fp8;
pub mod fuzz;

#[cfg(feature = "cuda")]
pub mod gpu;
pub mod inputs;
pub mod layouts;
mod modifying;
pub mod packing;
pub mod ready;
pub mod sinks;
