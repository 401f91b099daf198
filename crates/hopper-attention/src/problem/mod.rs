//! What is to be computed, as numbers: [`ForwardProblem`], [`BackwardProblem`] and [`Quantizer`].
//!
//! A problem is checked when it is built. It holds no memory. It lists its operands (the tensors that it reads and writes).

mod alibi;
mod backward;
mod bias;
mod biased;
mod block_mask;
mod blocks;
mod dims;
mod dropout;
mod dropping;
mod forward;
mod fp8;
mod limit;
mod margin;
mod max_logits;
mod modifiers;
mod packing;
mod quantize;
mod scale;
mod sinks;
mod softcap;

pub use backward::{BackwardProblem, BackwardProblemBuilder};
pub use bias::Bias;
pub use block_mask::{BlockMask, MASK_BLOCK, MASK_BLOCK_WORDS};
pub use dims::Dims;
pub use dropout::{Dropout, dropout_state};
pub use forward::{ForwardProblem, ForwardProblemBuilder};
pub use modifiers::AlibiSlopes;
pub use quantize::{Quantizer, QuantizerBuilder};
pub(crate) use quantize::{Source, TENSORS};
