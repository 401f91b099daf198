//! The functions of [candle-flash-attn](https://docs.rs/candle-flash-attn), computed by Hopper Attention.
//!
//! A drop-in replacement for candle's crate: the name, the version and the functions are the same.
//! `[patch.crates-io]` in the root `Cargo.toml` of a workspace puts this crate in its place. The models of
//! candle-transformers then run on our kernels unchanged:
//!
//! ```toml
//! [patch.crates-io]
//! candle-flash-attn = { path = "../hopper-attention/integrations/candle-flash-attn" }
//! ```
//!
//! What is different:
//!
//! - Gradients flow through the functions that are computed here.
//! - Tensors in host memory are computed too, in f32 as well.
//! - Pages are not there yet. A call that asks for them is an error that names them.
//! - `seqlens_q` and `seqlens_k` may be in host memory where the tensors are on a GPU. They are then checked.
//! - By default the kernels are those for Hopper. The feature `sm80` adds those for older GPUs.
//! - The struct `FlashAttn` is left out.
//! - [`flash_attn_sinks`] and [`flash_attn_sinks_varlen`] are there beside candle's functions. Their signatures are
//!   mistral.rs's.
//!
//! Q is `[batch, seqlen_q, heads_q, head_dim]`, K and V are `[batch, seqlen_kv, heads_kv, head_dim]`. `heads_q` is a
//! multiple of `heads_kv`. Masks are bottom-right aligned: with a causal mask, query `i` sees keys up to
//! `i + seqlen_kv - seqlen_q`.

#![deny(missing_docs)]

mod sinks;

use candle_core::{Result, Tensor};
use hopper_attention_candle::hopper_attention::Error;
use hopper_attention_candle::{
    Mask, Options, attention, attention_varlen, attention_varlen_with_alibi, attention_with_alibi, refusal,
};
pub use sinks::{flash_attn_sinks, flash_attn_sinks_varlen};

/// Attention to all keys, or with a causal mask.
///
/// # Errors
/// As [`hopper_attention_candle::attention`].
pub fn flash_attn(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, causal: bool) -> Result<Tensor> {
    flash_attn_windowed(q, k, v, softmax_scale, None, causal.then_some(0))
}

/// Attention to the keys from `window_size_left` before the query's position to `window_size_right` after it. The
/// position of query `i` is key `i + seqlen_kv - seqlen_q`. `None` means all keys on that side.
///
/// # Errors
/// As [`hopper_attention_candle::attention`].
pub fn flash_attn_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    attention(q, k, v, &options(softmax_scale, window_size_left, window_size_right))
}

fn options(softmax_scale: f32, window_size_left: Option<usize>, window_size_right: Option<usize>) -> Options {
    let mask = match (window_size_left, window_size_right) {
        (None, None) => Mask::Full,
        (None, Some(0)) => Mask::causal(),
        (left, right) => Mask::window(left, right),
    };
    Options::new().mask(mask).softmax_scale(softmax_scale)
}

/// As [`flash_attn`], with linear biases: see [`flash_attn_alibi_windowed_softcap`].
///
/// # Errors
/// As [`hopper_attention_candle::attention_with_alibi`].
pub fn flash_attn_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    flash_attn_alibi_windowed(q, k, v, alibi_slopes, softmax_scale, None, causal.then_some(0))
}

/// As [`flash_attn_windowed`], with linear biases: see [`flash_attn_alibi_windowed_softcap`].
///
/// # Errors
/// As [`hopper_attention_candle::attention_with_alibi`].
pub fn flash_attn_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    attention_with_alibi(q, k, v, alibi_slopes, &options(softmax_scale, window_size_left, window_size_right))
}

/// As [`flash_attn_windowed`], with linear biases and with scores that are capped before the mask.
///
/// - The cap comes first: `softcap * tanh(softmax_scale * q . k / softcap)`. A softcap of 0 is none.
/// - `alibi_slopes` is `[heads_q]` or `[batch, heads_q]`. A score then loses `slope * |i + seqlen_kv - seqlen_q - j|`. Slopes have
///   no gradient.
///
/// # Errors
/// As [`hopper_attention_candle::attention_with_alibi`].
#[allow(clippy::too_many_arguments, reason = "the signature is candle's")]
pub fn flash_attn_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let options = options(softmax_scale, window_size_left, window_size_right).softcap(softcap);
    match alibi_slopes {
        Some(slopes) => attention_with_alibi(q, k, v, slopes, &options),
        None => attention(q, k, v, &options),
    }
}

/// What is said to be there instead of pages.
const PACKED: &str = "flash_attn_varlen and flash_attn_varlen_windowed, without pages";

fn lacks<T>(wanted: impl Into<String>, nearest: &str) -> Result<T> {
    Err(refusal(Error::Unsupported { wanted: wanted.into(), nearest: nearest.into() }))
}

/// Attention of packed sequences to all keys of their own, or with a causal mask.
///
/// Shapes and offsets are those of [`flash_attn_varlen_windowed`].
///
/// # Errors
/// As [`hopper_attention_candle::attention_varlen`].
#[allow(clippy::too_many_arguments, reason = "the signature is candle's")]
pub fn flash_attn_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let right = causal.then_some(0);
    flash_attn_varlen_windowed(q, k, v, seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, None, right)
}

/// As [`flash_attn_windowed`], of packed sequences, each with a mask of its own.
///
/// `q` is `[total_q, heads_q, head_dim]`, `k` and `v` are `[total_kv, heads_kv, head_dim]`. `seqlens_q` and `seqlens_k`
/// are u32, `[batch + 1]`: sequence `i` has the rows from entry `i` to below entry `i + 1`. The two longest lengths are
/// hints for speed. A wrong one changes no result.
///
/// # Errors
/// As [`hopper_attention_candle::attention_varlen`].
#[allow(clippy::too_many_arguments, reason = "the signature is candle's")]
pub fn flash_attn_varlen_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let options = options(softmax_scale, window_size_left, window_size_right).max_seqlens(max_seqlen_q, max_seqlen_k);
    attention_varlen(q, k, v, seqlens_q, seqlens_k, &options)
}

/// Refused: pages of K and V are not there yet.
///
/// # Errors
/// Always.
#[allow(clippy::too_many_arguments, reason = "the signature is candle's")]
pub fn flash_attn_varlen_paged_windowed(
    _q: &Tensor,
    _k: &Tensor,
    _v: &Tensor,
    _seqlens_q: &Tensor,
    _seqlens_k: &Tensor,
    _block_table: &Tensor,
    _mm_prefix_ranges: Option<&Tensor>,
    _max_seqlen_q: usize,
    _max_seqlen_k: usize,
    _softmax_scale: f32,
    _window_size_left: Option<usize>,
    _window_size_right: Option<usize>,
    _page_block_size: usize,
    _softcap: Option<f32>,
) -> Result<Tensor> {
    lacks("flash_attn_varlen_paged_windowed: block_table (pages of K and V)", PACKED)
}

/// As [`flash_attn_varlen`], with linear biases: see [`flash_attn_varlen_alibi_windowed_softcap`].
///
/// # Errors
/// As [`hopper_attention_candle::attention_varlen_with_alibi`].
#[allow(clippy::too_many_arguments, reason = "the signature is candle's")]
pub fn flash_attn_varlen_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let (slopes, right, longest) = (Some(alibi_slopes), causal.then_some(0), [max_seqlen_q, max_seqlen_k]);
    varlen([q, k, v], slopes, [seqlens_q, seqlens_k], longest, options(softmax_scale, None, right))
}

/// As [`flash_attn_varlen_windowed`], with linear biases: see [`flash_attn_varlen_alibi_windowed_softcap`].
///
/// # Errors
/// As [`hopper_attention_candle::attention_varlen_with_alibi`].
#[allow(clippy::too_many_arguments, reason = "the signature is candle's")]
pub fn flash_attn_varlen_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let options = options(softmax_scale, window_size_left, window_size_right);
    varlen([q, k, v], Some(alibi_slopes), [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k], options)
}

/// Attention of packed sequences, with slopes or without.
fn varlen(
    [q, k, v]: [&Tensor; 3],
    alibi_slopes: Option<&Tensor>,
    [seqlens_q, seqlens_k]: [&Tensor; 2],
    [longest_q, longest_k]: [usize; 2],
    options: Options,
) -> Result<Tensor> {
    let options = options.max_seqlens(longest_q, longest_k);
    match alibi_slopes {
        Some(slopes) => attention_varlen_with_alibi(q, k, v, slopes, seqlens_q, seqlens_k, &options),
        None => attention_varlen(q, k, v, seqlens_q, seqlens_k, &options),
    }
}

/// As [`flash_attn_varlen_windowed`], with linear biases and capped scores as in [`flash_attn_alibi_windowed_softcap`]. Distances
/// are those of each sequence.
///
/// # Errors
/// As [`hopper_attention_candle::attention_varlen_with_alibi`].
#[allow(clippy::too_many_arguments, reason = "the signature is candle's")]
pub fn flash_attn_varlen_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let options = options(softmax_scale, window_size_left, window_size_right).softcap(softcap);
    varlen([q, k, v], alibi_slopes, [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k], options)
}
