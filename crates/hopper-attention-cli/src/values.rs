//! What the tensors of a problem are made of, on the host.

use anyhow::{Context, Result};
use bytemuck::Pod;
use hopper_attention::{Element, Operand, bf16, f16};

/// What q, k, v and d_o may be made of, both in the file and on a device.
pub trait Value: Operand<Out = Self> + Pod {}
impl Value for bf16 {}
impl Value for f16 {}
impl Value for f32 {}

/// The tensors of one attention problem, in the file's order of dimensions.
pub struct Qkv<T> {
    /// Values of q, k, v.
    pub data: [Vec<T>; 3],
}

/// The gradients that a backward pass begins with, in the file's order of dimensions.
pub struct GivenGradients<T> {
    /// Of o.
    pub d_o: Vec<T>,
    /// Of lse, where the file has one.
    pub d_lse: Option<Vec<f32>>,
}

/// A vector of `len` copies of `value`; an allocation that the system refuses is an error, not an abort.
pub fn filled<T: Clone>(value: T, len: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values
        .try_reserve_exact(len)
        .with_context(|| format!("out of memory: {len} elements of {} bytes", size_of::<T>()))?;
    values.resize(len, value);
    Ok(values)
}

/// How many values are NaN, and how many are infinite.
pub fn count_nonfinite<T: Element>(values: &[T]) -> (usize, usize) {
    values.iter().fold((0, 0), |(nan, infinite), value| {
        let value = value.to_f32();
        (nan + usize::from(value.is_nan()), infinite + usize::from(value.is_infinite()))
    })
}
