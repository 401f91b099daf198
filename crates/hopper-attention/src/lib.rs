//! Exact fused attention for NVIDIA Hopper, with a CPU backend.

#![deny(missing_docs)]

mod cpu;
mod dtype;
mod error;
mod layout;
mod mask;
mod problem;
pub mod reference;
mod tensor;

#[cfg(feature = "cuda")]
pub use cudarc;

pub use dtype::{DType, Element, Operand, bf16, f16};
pub use error::{Error, Result};
pub use layout::Layout;
pub use mask::{Band, Corner, Mask};
pub use problem::{Dims, ForwardProblem};
pub use tensor::{TensorMut, TensorRef};
