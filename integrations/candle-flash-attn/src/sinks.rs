//! Attention sinks, with the names, arguments and layouts of mistral.rs.
//!
//! candle's crate has no sinks. mistral.rs has two functions in its crate `mistralrs-paged-attn`
//! (`src/cuda/flash_attn_sinks.rs`), which its `attention/backends/sinks.rs` calls for gpt-oss. Those here have the same
//! signatures, so that an import is all that changes.

use candle_core::{DType, Result, Tensor};
use hopper_attention_candle::{Mask, Options, attention, attention_padded_q, attention_with_sinks};

/// Causal attention with a sink for each query head: mistral.rs's `flash_attn_sinks`.
///
/// - `q` is `[batch, heads_q, seqlen_q, head_dim]`, `k` and `v` are `[batch, heads_kv, seqlen_kv, head_dim]`. O has the shape
///   of `q`. It is a view whose memory is `[batch, seqlen_q, heads_q, head_dim]`, so that `transpose(1, 2)` makes a contiguous
///   tensor of it. Nothing is copied where the innermost strides are 1.
/// - `sinks` is `[heads_q]` in any float type, and is computed with in f32. `None` is attention without sinks.
/// - The mask is always causal: the last query stands at the last key. A `window_size` above 0 leaves each query that many keys:
///   its own and those before it.
///
/// Gradients flow through the output, also to the sinks.
///
/// # Errors
/// As [`attention_with_sinks`].
pub fn flash_attn_sinks(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sinks: Option<&Tensor>,
    softmax_scale: f32,
    window_size: usize,
) -> Result<Tensor> {
    let [q, k, v] = [q, k, v].map(rows);
    let (q, k, v, options) = (q?, k?, v?, options(softmax_scale, window_size));
    match sinks {
        Some(sinks) => attention_with_sinks(&q, &k, &v, &sinks.to_dtype(DType::F32)?, &options),
        None => attention(&q, &k, &v, &options),
    }?
    .transpose(1, 2)
}

/// As [`flash_attn_sinks`], of sequences with different lengths: mistral.rs's `flash_attn_sinks_varlen`. Queries are padded,
/// keys and values are packed.
///
/// - `q` is `[batch, heads_q, max_seqlen_q, head_dim]`, `k` and `v` are `[total_kv, heads_kv, head_dim]`. O has the shape of
///   `q`, and zeros in the rows of padding.
/// - `cu_seqlens_q` and `cu_seqlens_k` are u32, `[batch + 1]`, and say how long each sequence is. The keys of sequence `i` are
///   the rows from entry `i` of `cu_seqlens_k` to below entry `i + 1`.
///
/// # Errors
/// As [`attention_padded_q`].
#[allow(clippy::too_many_arguments, reason = "the signature is mistral.rs's")]
pub fn flash_attn_sinks_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sinks: Option<&Tensor>,
    cu_seqlens_q: &Tensor,
    cu_seqlens_k: &Tensor,
    softmax_scale: f32,
    window_size: usize,
) -> Result<Tensor> {
    let sinks = sinks.map(|sinks| sinks.to_dtype(DType::F32)).transpose()?;
    let options = options(softmax_scale, window_size);
    let o = attention_padded_q(&rows(q)?, k, v, sinks.as_ref(), cu_seqlens_q, cu_seqlens_k, &options)?;
    o.transpose(1, 2)
}

/// A tensor with its rows in front of its heads. One with another number of dimensions is handed on as it is, and then refused
/// by name.
fn rows(tensor: &Tensor) -> Result<Tensor> {
    if tensor.dims().len() == 4 { tensor.transpose(1, 2) } else { Ok(tensor.clone()) }
}

fn options(softmax_scale: f32, window_size: usize) -> Options {
    let mask = match window_size {
        0 => Mask::causal(),
        keys => Mask::window(Some(keys - 1), Some(0)),
    };
    Options::new().mask(mask).softmax_scale(softmax_scale)
}
