//! What changes the scores or the softmax, beside Q, K and V: a bias, sinks, ALiBi's slopes and lists of blocks.

use candle_core::{DType, Result, Tensor};
use hopper_attention::Error;

use crate::blocks::BlockLists;
use crate::error::refusal;
use crate::offsets::Packing;

/// Tensors that change the scores or the softmax of [`attention_with`](crate::attention_with) and of
/// [`attention_varlen_with`](crate::attention_varlen_with), alone or together.
///
/// A score is scaled and capped, then the bias is added and ALiBi's term subtracted, then masks hide it. The sink of
/// the head joins in the softmax.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use hopper_attention_candle::{Mask, Modifiers, Options, attention_with};
///
/// # fn main() -> candle_core::Result<()> {
/// let qkv = Tensor::randn(0f32, 1.0, (1, 16, 4, 64), &Device::Cpu)?;
/// let bias = Tensor::randn(0f32, 1.0, (1, 4, 16, 16), &Device::Cpu)?;
/// let sinks = Tensor::zeros(4, DType::F32, &Device::Cpu)?;
/// let modifiers = Modifiers::new().bias(&bias).sinks(&sinks);
/// let o = attention_with(&qkv, &qkv, &qkv, modifiers, &Options::new().mask(Mask::causal()))?;
/// assert_eq!(o.dims(), [1, 16, 4, 64]);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[must_use]
pub struct Modifiers<'a> {
    pub(crate) bias: Option<&'a Tensor>,
    pub(crate) sinks: Option<&'a Tensor>,
    pub(crate) slopes: Option<&'a Tensor>,
    pub(crate) blocks: Option<&'a BlockLists>,
}

impl<'a> Modifiers<'a> {
    /// None of them.
    pub fn new() -> Self {
        Self::default()
    }

    /// An additive bias: see [`attention_with_bias`](crate::attention_with_bias), and for packed sequences
    /// [`attention_varlen_with_bias`](crate::attention_varlen_with_bias).
    pub fn bias(self, bias: &'a Tensor) -> Self {
        Self { bias: Some(bias), ..self }
    }

    /// Attention sinks: see [`attention_with_sinks`](crate::attention_with_sinks).
    pub fn sinks(self, sinks: &'a Tensor) -> Self {
        Self { sinks: Some(sinks), ..self }
    }

    /// Linear biases: see [`attention_with_alibi`](crate::attention_with_alibi).
    pub fn alibi_slopes(self, alibi_slopes: &'a Tensor) -> Self {
        Self { slopes: Some(alibi_slopes), ..self }
    }

    /// A block-sparse mask: see [`attention_with_blocks`](crate::attention_with_blocks). Packed sequences take none.
    pub fn blocks(self, blocks: &'a BlockLists) -> Self {
        Self { blocks: Some(blocks), ..self }
    }
}

/// Sinks as a run reads them: one dimension without gaps. The problem looks at their type.
///
/// # Errors
/// The sinks do not have one dimension, or are on another device than `like`.
pub fn sinks(sinks: &Tensor, like: &Tensor) -> Result<Tensor> {
    if sinks.dims().len() != 1 {
        let got = format!("{} dimensions, {:?}", sinks.dims().len(), sinks.dims());
        return Err(refusal(Error::Value { what: "sinks", got, allowed: "1, [heads_q]".into() }));
    }
    on_one_device("sinks", sinks, like)?;
    sinks.contiguous()
}

/// Refuses a bias that does not go with Q, K and the sequences that are packed. A run refuses sequences that are longer
/// than the bias.
///
/// # Errors
/// The bias has another shape or type, or is on another device than Q.
pub fn check_bias(bias: &Tensor, q: &Tensor, k: &Tensor, packing: Option<&Packing>) -> Result<()> {
    let refuse = |got: String, allowed: String| Err(refusal(Error::Value { what: "bias", got, allowed }));
    if !matches!(bias.dtype(), DType::F32 | DType::BF16 | DType::F16) {
        return refuse(format!("dtype {:?}", bias.dtype()).to_lowercase(), "f32, bf16, f16".into());
    }
    let &[batch, heads, queries, keys] = bias.dims() else {
        let got = format!("{} dimensions, {:?}", bias.dims().len(), bias.dims());
        let sizes = packing.map_or("1 or seqlen_q, seqlen_kv", |_| "1 or queries, keys");
        return refuse(got, format!("4, [1 or batch, 1 or heads_q, {sizes}]"));
    };
    on_one_device("bias", bias, q)?;
    let fits = |got: usize, size: usize| got == 1 || got == size;
    // The problem refuses a Q or a K with another number of dimensions.
    let (fits, allowed) = match (packing, q.dims(), k.dims()) {
        (None, &[of_batch, seqlen_q, heads_q, _], &[_, seqlen_kv, ..]) => (
            fits(batch, of_batch) && fits(heads, heads_q) && fits(queries, seqlen_q) && keys == seqlen_kv,
            format!("[1 or {of_batch}, 1 or {heads_q}, 1 or {seqlen_q}, {seqlen_kv}]"),
        ),
        (Some(packing), &[.., heads_q, _], _) => {
            let sequences = packing.sequences();
            let allowed = format!("[1 or {sequences} (sequences), 1 or {heads_q}, 1 or queries, keys]");
            (fits(batch, sequences) && fits(heads, heads_q), allowed)
        }
        _ => return Ok(()),
    };
    if fits { Ok(()) } else { refuse(format!("shape {:?}", bias.dims()), allowed) }
}

/// Refuses a tensor on another device than `like`.
pub fn on_one_device(what: &'static str, tensor: &Tensor, like: &Tensor) -> Result<()> {
    if tensor.device().same_device(like.device()) {
        return Ok(());
    }
    let (got, allowed) = ("another device".into(), "the device of q, k and v".into());
    Err(refusal(Error::Device { what, got, allowed }))
}
