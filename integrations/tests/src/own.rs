//! Attention made of candle's own operations, which ours is compared with.

use candle_core::{D, Device, Result, Tensor};
use hopper_attention_candle::Mask;

/// `softmax(mask(scale * Q K^T)) V` on tensors `[batch, seqlen, heads, head_dim]`, with the whole matrix of scores in
/// memory.
///
/// # Errors
/// Shapes do not fit.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, mask: Mask, scale: f64) -> Result<Tensor> {
    attention_with_sinks(q, k, v, None, mask, scale)
}

/// As [`attention`], with a key more that has no value: the logit of each query head, `[heads]`.
///
/// # Errors
/// Shapes do not fit.
pub fn attention_with_sinks(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sinks: Option<&Tensor>,
    mask: Mask,
    scale: f64,
) -> Result<Tensor> {
    let group = q.dim(2)? / k.dim(2)?;
    let (k, v) = (repeated(k, group)?, repeated(v, group)?);
    let [q, k, v] = [q, &k, &v].map(|tensor| tensor.transpose(1, 2)?.contiguous());
    let (q, k, v) = (q?, k?, v?);
    let scores = (q.matmul(&k.t()?)? * scale)?;
    let scores = scores.broadcast_add(&bias(mask, q.dim(2)?, k.dim(2)?, q.device())?.to_dtype(q.dtype())?)?;
    let weights = match sinks {
        None => candle_nn::ops::softmax(&scores, D::Minus1)?,
        Some(sinks) => {
            let (batch, heads, seqlen_q, seqlen_kv) = scores.dims4()?;
            let sinks = sinks.to_dtype(scores.dtype())?.reshape((1, heads, 1, 1))?;
            let scores = Tensor::cat(&[&scores, &sinks.broadcast_as((batch, heads, seqlen_q, 1))?], 3)?;
            candle_nn::ops::softmax(&scores, D::Minus1)?.narrow(3, 0, seqlen_kv)?.contiguous()?
        }
    };
    weights.matmul(&v)?.transpose(1, 2)
}

/// Each head of keys or values once for every query head that reads it.
fn repeated(tensor: &Tensor, group: usize) -> Result<Tensor> {
    let (batch, seqlen, heads, head_dim) = tensor.dims4()?;
    let repeated = tensor.unsqueeze(3)?.broadcast_as((batch, seqlen, heads, group, head_dim))?;
    repeated.reshape((batch, seqlen, heads * group, head_dim))
}

/// 0 for the pairs that the mask keeps, minus infinity for the others: `[seqlen_q, seqlen_kv]`.
fn bias(mask: Mask, seqlen_q: usize, seqlen_kv: usize, device: &Device) -> Result<Tensor> {
    let pairs = (0..seqlen_q).flat_map(|q| (0..seqlen_kv).map(move |kv| (q, kv)));
    let bias = pairs.map(|(q, kv)| if mask.keep(q, kv, seqlen_q, seqlen_kv) { 0f32 } else { f32::NEG_INFINITY });
    Tensor::from_iter(bias, device)?.reshape((seqlen_q, seqlen_kv))
}
