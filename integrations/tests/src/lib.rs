//! Models for the tests of the adapters: candle's own attention, a sentence encoder, and a small language model that
//! is trained.

pub mod causal;
pub mod gradients;
pub mod language;
pub mod minilm;
pub mod own;
pub mod packed_bias;
pub mod sinks;
pub mod varlen;

use candle_core::{DType, Result, Tensor};

/// Attention on tensors `[batch, seqlen, heads, head_dim]`.
pub type Attend<'a> = &'a dyn Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;

/// Prints a line that a reader of the log looks for.
pub fn say(line: &str) {
    println!("{line}");
}

/// The largest difference of two tensors' elements, and the largest magnitude of the second one's, in f32.
///
/// # Errors
/// The shapes differ.
pub fn difference(got: &Tensor, want: &Tensor) -> Result<(f32, f32)> {
    let host = |tensor: &Tensor| tensor.to_device(&candle_core::Device::Cpu)?.to_dtype(DType::F32);
    let (got, want) = (host(got)?, host(want)?);
    let largest = |tensor: Tensor| tensor.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
    Ok((largest((got - &want)?)?, largest(want)?))
}
