//! What is to be computed, as numbers: [`ForwardProblem`], [`BackwardProblem`] and [`Quantizer`]. A problem is checked when
//! it is built, holds no memory, and lists its operands.

mod backward;
mod dims;
mod forward;
mod fp8;
mod quantize;

pub use backward::{BackwardProblem, BackwardProblemBuilder};
pub use dims::Dims;
pub use forward::{ForwardProblem, ForwardProblemBuilder};
pub use quantize::{Quantizer, QuantizerBuilder};
pub(crate) use quantize::{Source, TENSORS};
