//! Hopper Attention (`crates/hopper-attention` of this repository) on the tensors of
//! [candle](https://docs.rs/candle-core).
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use hopper_attention_candle::{Mask, Options, attention};
//!
//! # fn main() -> candle_core::Result<()> {
//! let device = Device::Cpu; // or Device::new_cuda(0)?, with tensors in bf16 or f16
//! let q = Var::randn(0f32, 1.0, (2, 16, 8, 64), &device)?; // [batch, seqlen, heads, head_dim]
//! let k = Tensor::randn(0f32, 1.0, (2, 16, 2, 64), &device)?; // four query heads read one KV head
//! let v = Tensor::randn(0f32, 1.0, (2, 16, 2, 64), &device)?;
//! let o = attention(&q, &k, &v, &Options::new().mask(Mask::causal()))?;
//! assert_eq!(o.dims(), [2, 16, 8, 64]);
//!
//! let gradients = o.sum_all()?.backward()?;
//! assert_eq!(gradients.get(&q).unwrap().dims(), q.dims());
//! # Ok(()) }
//! ```
//!
//! # What it computes
//!
//! `O = softmax(mask(softmax_scale * Q K^T)) V`, as the crate `hopper_attention` defines it. That crate's
//! documentation says what masks, grouped heads and queries without keys mean. [`Options`] has a softcap and dropout.
//! [`Modifiers`] has an additive bias, sinks, ALiBi and a block-sparse mask.
//!
//! - Q is `[batch, seqlen_q, heads_q, head_dim]`, K and V are `[batch, seqlen_kv, heads_kv, head_dim]`. `heads_q` is a
//!   multiple of `heads_kv`. V may have a head dim of its own. A tensor of candle that is `[batch, heads, seqlen,
//!   head_dim]` becomes one of ours with `transpose(1, 2)`, which copies nothing.
//! - On the CPU the types are f32, bf16 and f16, and any head dims will do. On a GPU the types are bf16 and f16, and the
//!   kernels of the build decide which head dims there are. Q, K and V have one type, which is that of O.
//! - Nothing is copied. The innermost stride must be 1. The other strides are free. On a GPU, addresses and strides
//!   must be multiples of 16 bytes. Other tensors are refused: `contiguous()` makes a copy that is taken.
//!
//! # Gradients
//!
//! [`attention`] takes part in candle's autograd, as do the other functions but [`attention_with_lse`]. If one of Q, K,
//! V, the sinks and the bias is a variable or depends on one, the forward pass keeps the log-sum-exp (LSE) for the
//! backward pass: 4 bytes a query and head. The score matrix is never held in memory. A gradient of a gradient is
//! refused.
//!
//! # On a GPU
//!
//! Work is enqueued on the stream of the tensors' candle device, in that device's context. Outputs and workspaces come
//! from candle's allocator, and are freed in the order of that stream. Plans are kept in the process, up to 256 for
//! each pass.
//!
//! # Errors
//!
//! A call that the library cannot compute returns an error that names the argument. Nothing is launched. [`cause`]
//! returns the `hopper_attention::Error` inside a candle error. So a caller can compute an unsupported problem
//! elsewhere.

#![deny(missing_docs)]

mod alibi;
mod blocks;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod error;
mod knot;
mod modifiers;
mod offsets;
mod op;
mod problem;

use candle_core::{Result, Tensor};

pub use blocks::BlockLists;
pub use error::{cause, refusal};
pub use hopper_attention;
pub use hopper_attention::{Arch, Corner, Dropout, Mask};
use knot::Held;
pub use modifiers::Modifiers;
use offsets::{Lengths, Offsets, Packing, Queries};
use op::Attention;
pub use problem::Options;

/// The output O of attention, of the shape `[batch, seqlen_q, heads_q, head_dim_vo]`, in memory of its own without
/// gaps.
///
/// candle's autograd can compute gradients through O.
///
/// # Errors
/// - A tensor does not have four dimensions, the shapes do not fit each other, or types differ.
/// - An innermost stride is not 1. On a GPU: an address or a stride is not a multiple of 16 bytes.
/// - There is no kernel for the problem ([`Unsupported`](hopper_attention::Error::Unsupported)).
/// - The tensors are not on one device, or on a device of Apple's.
/// - The driver failed, or there is no memory.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, options: &Options) -> Result<Tensor> {
    attend(q, k, v, Modifiers::new(), None, options)
}

/// As [`attention`], with an attention sink for each query head: `sinks` is `[heads_q]`, in f32 or bf16.
///
/// A sink is a logit that takes part in the softmax of every row of its head, and has no value. The softmax scale does not
/// multiply it, and no mask hides it. A query without keys has the output 0. A sink of -inf changes nothing. gpt-oss has such
/// sinks. [`ForwardProblemBuilder::sinks`](hopper_attention::ForwardProblemBuilder::sinks) has the formula.
///
/// candle's autograd can compute gradients through O, also that of the sinks. It is summed in f64 in a fixed order, so that
/// it repeats, and rounded to the sinks' type.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use hopper_attention_candle::{Mask, Options, attention_with_sinks};
///
/// # fn main() -> candle_core::Result<()> {
/// let qkv = Tensor::randn(0f32, 1.0, (1, 16, 8, 64), &Device::Cpu)?;
/// let sinks = Var::zeros(8, candle_core::DType::F32, &Device::Cpu)?;
/// let o = attention_with_sinks(&qkv, &qkv, &qkv, &sinks, &Options::new().mask(Mask::causal()))?;
/// assert_eq!(o.sum_all()?.backward()?.get(&sinks).unwrap().dims(), [8]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`attention`]. Also: the sinks are not `[heads_q]`, of another type, or on another device than Q, K and V.
pub fn attention_with_sinks(q: &Tensor, k: &Tensor, v: &Tensor, sinks: &Tensor, options: &Options) -> Result<Tensor> {
    attention_with(q, k, v, Modifiers::new().sinks(sinks), options)
}

/// As [`attention`], with linear biases (ALiBi): the score of query `i` and key `j` loses
/// `slope * |i + seqlen_kv - seqlen_q - j|`, after the softcap and before the mask. `alibi_slopes` is `[heads_q]` or
/// `[batch, heads_q]`, and is computed with in f32.
///
/// [`ForwardProblemBuilder::alibi`](hopper_attention::ForwardProblemBuilder::alibi) says what the distance is where a mask is
/// top-left. candle's autograd can compute gradients through O, but none of the slopes.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use hopper_attention_candle::{Mask, Options, attention_with_alibi};
///
/// # fn main() -> candle_core::Result<()> {
/// let qkv = Tensor::randn(0f32, 1.0, (1, 16, 4, 64), &Device::Cpu)?;
/// let slopes = Tensor::new(&[0.25f32, 0.0625, 0.015625, 0.00390625], &Device::Cpu)?;
/// let o = attention_with_alibi(&qkv, &qkv, &qkv, &slopes, &Options::new().mask(Mask::causal()))?;
/// assert_eq!(o.dims(), [1, 16, 4, 64]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`attention`]. Also: the slopes have another shape, are on another device, or want a gradient.
pub fn attention_with_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    options: &Options,
) -> Result<Tensor> {
    attention_with(q, k, v, Modifiers::new().alibi_slopes(alibi_slopes), options)
}

/// As [`attention`], with an additive bias: a number of each pair of a query and a key, which is added to its score
/// after scale and softcap, and before the mask.
///
/// `bias` is `[1 or batch, 1 or heads_q, 1 or seqlen_q, seqlen_kv]`, in f32, bf16 or f16, whatever the type of Q, K
/// and V. A dimension of 1 is shared. A bias of -inf hides its pair as a mask does, and a query whose pairs are all
/// hidden has the output 0. Nothing is copied: the innermost stride must be 1, and the other strides are free.
/// [`hopper_attention::Bias`] says more. Packed sequences have [`attention_varlen_with_bias`].
///
/// candle's autograd can compute gradients through O, also that of the bias, in its shape and type. It is summed over
/// the shared dimensions in a fixed order, so that it repeats.
///
/// A GPU has no gradients beside a softcap, and refuses them by name.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use hopper_attention_candle::{Mask, Options, attention_with_bias};
///
/// # fn main() -> candle_core::Result<()> {
/// let qkv = Tensor::randn(0f32, 1.0, (2, 16, 4, 64), &Device::Cpu)?;
/// let bias = Var::randn(0f32, 1.0, (1, 4, 16, 16), &Device::Cpu)?; // one for both batch entries
/// let o = attention_with_bias(&qkv, &qkv, &qkv, &bias, &Options::new().mask(Mask::causal()))?;
/// assert_eq!(o.sum_all()?.backward()?.get(&bias).unwrap().dims(), [1, 4, 16, 16]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`attention`]. Also: the bias has another shape or type, is on another device than Q, K and V, or has another
/// innermost stride than 1.
pub fn attention_with_bias(q: &Tensor, k: &Tensor, v: &Tensor, bias: &Tensor, options: &Options) -> Result<Tensor> {
    attention_with(q, k, v, Modifiers::new().bias(bias), options)
}

/// As [`attention`], with any of a bias, sinks, ALiBi and a block-sparse mask together.
///
/// # Errors
/// As [`attention_with_bias`], [`attention_with_sinks`], [`attention_with_alibi`] and [`attention_with_blocks`] for
/// what is given. On a GPU also: there is no kernel for what is given together.
pub fn attention_with(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    modifiers: Modifiers<'_>,
    options: &Options,
) -> Result<Tensor> {
    attend(q, k, v, modifiers, None, options)
}

/// As [`attention`], with a block-sparse mask beside that of `options`: a pair is kept if both keep it. Blocks of 128 queries
/// and 128 keys that no list has take no time.
///
/// [`BlockLists::from_mask`] makes the lists of a mask of u8, and [`BlockLists::new`] takes lists as FlexAttention's `BlockMask`
/// has them. [`BlockLists::from_owned`] takes those that were made without a dense mask. candle's autograd can compute
/// gradients through O.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use hopper_attention_candle::{BlockLists, Options, attention_with_blocks};
///
/// # fn main() -> candle_core::Result<()> {
/// let qkv = Tensor::randn(0f32, 1.0, (1, 300, 4, 64), &Device::Cpu)?;
/// let documents = Tensor::arange(0u32, 300, &Device::Cpu)?.ge(100u32)?; // two, of 100 and 200 tokens
/// let mask = documents.reshape((300, 1))?.broadcast_eq(&documents.reshape((1, 300))?)?;
/// let blocks = BlockLists::from_mask(&mask.reshape((1, 1, 300, 300))?)?; // once, for all layers
/// let o = attention_with_blocks(&qkv, &qkv, &qkv, &blocks, &Options::new())?;
/// assert_eq!(o.dims(), [1, 300, 4, 64]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`attention`]. Also: the lists are of other sizes, or on another device, than Q, K and V. On the CPU: they hold what no
/// lists can hold. On a GPU: gradients with a head dim above 128.
pub fn attention_with_blocks(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    blocks: &BlockLists,
    options: &Options,
) -> Result<Tensor> {
    attention_with(q, k, v, Modifiers::new().blocks(blocks), options)
}

/// What all calls with gradients do.
fn attend(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    Modifiers { bias, sinks, slopes, blocks }: Modifiers<'_>,
    packing: Option<Packing>,
    options: &Options,
) -> Result<Tensor> {
    if let Some(blocks) = blocks {
        blocks::check(blocks, q)?;
    }
    if let Some(bias) = bias {
        modifiers::check_bias(bias, q, k, packing.as_ref())?;
    }
    let sinks = sinks.map(|sinks| modifiers::sinks(sinks, q)).transpose()?;
    let slopes = slopes.map(|slopes| alibi::slopes(slopes, q)).transpose()?;
    let has_gradients = [q, k, v].into_iter().chain(&sinks).chain(bias).any(|tensor| tensor.track_op());
    let op = Attention::new(options, has_gradients, packing).with_slopes(slopes).with_blocks(blocks.cloned());
    match Held::new(k, sinks.as_ref(), bias)? {
        None => q.apply_op3(k, v, op),
        Some((held, knot)) => q.apply_op3(&knot, v, op.with_held(held)),
    }
}

/// As [`attention`], of packed sequences: each query attends to the keys of its own sequence alone.
///
/// - `q` is `[total_q, heads_q, head_dim]`, `k` and `v` are `[total_kv, heads_kv, head_dim]`. O has the shape
///   `[total_q, heads_q, head_dim_vo]`.
/// - `seqlens_q` and `seqlens_kv` are u32, `[batch + 1]`. Sequence `i` has the rows from entry `i` to below entry
///   `i + 1`. A sequence may be empty. Each has its own mask: its last query stands at its last key.
/// - Rows of O and of gradients that belong to no sequence are 0.
/// - [`Options::max_seqlens`] is a hint for speed.
///
/// Offsets in host memory are checked. For tensors on a GPU they are copied there, which waits. Offsets on a GPU are not
/// looked at, and nothing waits: the kernels clamp entries that decrease or are larger than the tensors. Results are then
/// wrong, and no memory outside of the tensors is used.
///
/// candle's autograd can compute gradients through O.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use hopper_attention_candle::{Mask, Options, attention_varlen};
///
/// # fn main() -> candle_core::Result<()> {
/// let qkv = Tensor::randn(0f32, 1.0, (8, 2, 64), &Device::Cpu)?;
/// let seqlens = Tensor::new(&[0u32, 3, 8], &Device::Cpu)?; // 3 rows, and 5 rows
/// let options = Options::new().mask(Mask::causal()).max_seqlens(5, 5);
/// let o = attention_varlen(&qkv, &qkv, &qkv, &seqlens, &seqlens, &options)?;
/// assert_eq!(o.dims(), [8, 2, 64]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// - A tensor does not have three dimensions. The rest is as for [`attention`].
/// - `seqlens_q` or `seqlens_kv` is not of u32, does not have one dimension, or has no entry. They have different numbers
///   of entries. They are on a GPU, and the tensors are not.
/// - In host memory: an entry is below the one before it, larger than the number of rows, or 2^31 or more.
pub fn attention_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_kv: &Tensor,
    options: &Options,
) -> Result<Tensor> {
    attention_varlen_with(q, k, v, Modifiers::new(), seqlens_q, seqlens_kv, options)
}

/// As [`attention_varlen`], with an additive bias: see [`attention_with_bias`].
///
/// `bias` is `[1 or batch, 1 or heads_q, 1 or queries, keys]`, where `batch` is the number of sequences. Query 0 and key 0
/// of the bias are the first of each sequence. `queries` and `keys` are at least the lengths of the longest sequence. So one
/// bias for all sequences, such as T5's, is `[1, heads_q, longest, longest]`. Where `queries` is 1, all queries share their
/// numbers, and a sequence may have any number of queries.
///
/// Offsets on a GPU are not looked at. A sequence that is longer than the bias then ends where the bias ends: its other
/// rows are 0 in O and in gradients.
///
/// candle's autograd can compute gradients through O, also that of the bias, in its shape and type. It is summed over
/// the sequences that share the bias. Numbers that no sequence uses have the gradient 0.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use hopper_attention_candle::{Mask, Options, attention_varlen_with_bias};
///
/// # fn main() -> candle_core::Result<()> {
/// let qkv = Tensor::randn(0f32, 1.0, (8, 2, 64), &Device::Cpu)?;
/// let seqlens = Tensor::new(&[0u32, 3, 8], &Device::Cpu)?; // 3 rows, and 5 rows
/// let bias = Var::zeros((1, 2, 5, 5), DType::F32, &Device::Cpu)?; // one for both sequences
/// let options = Options::new().mask(Mask::causal());
/// let o = attention_varlen_with_bias(&qkv, &qkv, &qkv, &bias, &seqlens, &seqlens, &options)?;
/// assert_eq!(o.sum_all()?.backward()?.get(&bias).unwrap().dims(), [1, 2, 5, 5]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`attention_varlen`], and as [`attention_with_bias`] for the bias. With offsets in host memory also: a sequence has more
/// queries or keys than the bias. The error names the offsets.
pub fn attention_varlen_with_bias(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    bias: &Tensor,
    seqlens_q: &Tensor,
    seqlens_kv: &Tensor,
    options: &Options,
) -> Result<Tensor> {
    attention_varlen_with(q, k, v, Modifiers::new().bias(bias), seqlens_q, seqlens_kv, options)
}

/// As [`attention_varlen`], with any of a bias, sinks and ALiBi together.
///
/// # Errors
/// As [`attention_varlen_with_bias`], [`attention_varlen_with_sinks`] and [`attention_varlen_with_alibi`] for what is
/// given. A block-sparse mask is refused. On a GPU also: there is no kernel for what is given together.
pub fn attention_varlen_with(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    modifiers: Modifiers<'_>,
    seqlens_q: &Tensor,
    seqlens_kv: &Tensor,
    options: &Options,
) -> Result<Tensor> {
    attend(q, k, v, modifiers, Some(packed(q, seqlens_q, seqlens_kv)?), options)
}

/// As [`attention_varlen`], with linear biases: see [`attention_with_alibi`]. Distances are those of each sequence, and slopes
/// `[batch, heads_q]` are those of each sequence.
///
/// # Errors
/// As [`attention_varlen`], and as [`attention_with_alibi`] for the slopes.
pub fn attention_varlen_with_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_kv: &Tensor,
    options: &Options,
) -> Result<Tensor> {
    attention_varlen_with(q, k, v, Modifiers::new().alibi_slopes(alibi_slopes), seqlens_q, seqlens_kv, options)
}

/// As [`attention_varlen`], with a sink for each query head, which all sequences share: see [`attention_with_sinks`].
///
/// Rows of O that belong to no sequence are 0, and have no part in the gradient of the sinks.
///
/// # Errors
/// As [`attention_varlen`], and as [`attention_with_sinks`] for the sinks.
pub fn attention_varlen_with_sinks(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sinks: &Tensor,
    seqlens_q: &Tensor,
    seqlens_kv: &Tensor,
    options: &Options,
) -> Result<Tensor> {
    attention_varlen_with(q, k, v, Modifiers::new().sinks(sinks), seqlens_q, seqlens_kv, options)
}

fn packed(q: &Tensor, seqlens_q: &Tensor, seqlens_kv: &Tensor) -> Result<Packing> {
    let of_q = Queries::Packed(Offsets::new("seqlens_q", seqlens_q, q.device())?);
    Ok(Packing { q: of_q, kv: Offsets::new("seqlens_kv", seqlens_kv, q.device())? })
}

/// Attention of padded queries to packed keys, with or without sinks: `q` is `[batch, seqlen_q, heads_q, head_dim]`, `k` and
/// `v` are `[total_kv, heads_kv, head_dim]`.
///
/// - `seqlens_q` and `seqlens_kv` are as for [`attention_varlen`]. Sequence `i` has the first rows of entry `i` of Q: as many
///   as from entry `i` of `seqlens_q` to entry `i + 1`.
/// - The rows of Q after them are padding. They are 0 in O and in the gradient of Q.
/// - [`Options::max_seqlens`] is a hint for speed.
///
/// # Errors
/// As [`attention_varlen`] and [`attention_with_sinks`], with four dimensions of Q. In host memory also: a sequence has more
/// queries than Q has rows.
pub fn attention_padded_q(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sinks: Option<&Tensor>,
    seqlens_q: &Tensor,
    seqlens_kv: &Tensor,
    options: &Options,
) -> Result<Tensor> {
    let lengths = Lengths::new("seqlens_q", seqlens_q, q.dims().get(1).copied().unwrap_or(0), q.device())?;
    let packing = Packing { q: Queries::Padded(lengths), kv: Offsets::new("seqlens_kv", seqlens_kv, q.device())? };
    attend(q, k, v, Modifiers { sinks, ..Modifiers::new() }, Some(packing), options)
}

/// As [`attention`], with the log-sum-exp of each query beside O: natural logarithm, f32, `[batch, heads_q,
/// seqlen_q]`. For inference: it merges the outputs of attention to parts of the keys. (So it takes no sinks: merged parts
/// would count a sink more than once.)
///
/// # Errors
/// As [`attention`]. Also: Q, K or V is a variable or depends on one. The gradient of the LSE would be lost;
/// `detach()` says that it is not wanted.
pub fn attention_with_lse(q: &Tensor, k: &Tensor, v: &Tensor, options: &Options) -> Result<(Tensor, Tensor)> {
    if [q, k, v].iter().any(|tensor| tensor.track_op()) {
        return Err(refusal(hopper_attention::Error::Value {
            what: "q, k and v",
            got: "part of a graph with gradients".into(),
            allowed: "detached tensors, since the LSE has no gradient here".into(),
        }));
    }
    let op = Attention::new(options, true, None);
    let o = q.apply_op3_no_bwd(k, v, &op)?;
    Ok((o, op.into_lse()?))
}
