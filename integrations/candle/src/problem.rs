//! From candle's layouts to problems.

use candle_core::{DType, Layout, Result, Tensor};
use hopper_attention::{
    AlibiSlopes, Arch, BackwardProblem, Bias, BlockMask, Dims, Dropout, Error, ForwardProblem, Mask, Slot,
    dropout_state,
};

use crate::error::refusal;
use crate::offsets::{Packing, is_packed};

/// What a problem has beside its tensors: sinks of this type, these slopes, and a bias and a block-sparse mask of
/// these forms.
#[derive(Clone, Copy, Default)]
pub(crate) struct Beside {
    pub sinks: Option<DType>,
    pub alibi: Option<AlibiSlopes>,
    pub bias: Option<Bias>,
    pub blocks: Option<BlockMask>,
}

/// What attention computes, beside its tensors.
///
/// ```
/// use hopper_attention_candle::{Mask, Options};
/// let options = Options::new().mask(Mask::window(Some(1023), Some(0))).softmax_scale(0.1).deterministic(true);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[must_use]
pub struct Options {
    mask: Mask,
    softmax_scale: Option<f32>,
    softcap: f32,
    /// With the words of the seed and the offset.
    dropout: Option<(Dropout, [i32; 4])>,
    deterministic: bool,
    arch: Option<Arch>,
    sm_margin: usize,
    workspace_limit: Option<u64>,
    max_seqlens: [Option<usize>; 2],
}

impl Options {
    /// Every query attends to every key, and scores are divided by the root of the head dim.
    pub fn new() -> Self {
        Self::default()
    }

    /// Which keys a query attends to (default: every key).
    pub fn mask(self, mask: Mask) -> Self {
        Self { mask, ..self }
    }

    /// The factor on `Q K^T`, finite and above 0 (default: `1 / sqrt(head_dim)`).
    pub fn softmax_scale(self, softmax_scale: f32) -> Self {
        Self { softmax_scale: Some(softmax_scale), ..self }
    }

    /// The cap `c` of the scores, finite and above 0 (default: 0, none): `c * tanh(softmax_scale * q . k / c)`, before the mask.
    /// Gradients are those of the capped scores.
    ///
    /// See [`ForwardProblemBuilder::softcap`](hopper_attention::ForwardProblemBuilder::softcap).
    pub fn softcap(self, softcap: f32) -> Self {
        Self { softcap, ..self }
    }

    /// Dropout of the weights (default: none): random ones become 0, and the others are multiplied by `1 / (1 - p)`. Which ones
    /// follows from a seed and an offset. So give each call another offset, as a counter does. Gradients have the mask of
    /// their forward pass.
    ///
    /// See [`ForwardProblemBuilder::dropout`](hopper_attention::ForwardProblemBuilder::dropout).
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use hopper_attention_candle::{Dropout, Options, attention};
    ///
    /// # fn main() -> candle_core::Result<()> {
    /// let qkv = Tensor::randn(0f32, 1.0, (1, 16, 4, 64), &Device::Cpu)?;
    /// let dropout = Dropout::new(0.1).map_err(candle_core::Error::wrap)?;
    /// let [first, second] = [0, 1].map(|step| attention(&qkv, &qkv, &qkv, &Options::new().dropout(dropout, 299, step)));
    /// assert!((first? - second?)?.abs()?.sum_all()?.to_scalar::<f32>()? > 1.0);
    /// # Ok(()) }
    /// ```
    pub fn dropout(self, dropout: Dropout, seed: u64, offset: u64) -> Self {
        Self { dropout: Some((dropout, dropout_state(seed, offset))), ..self }
    }

    /// The seed and the offset of dropout, where there is any.
    pub(crate) fn dropout_state(&self) -> Option<&[i32; 4]> {
        self.dropout.as_ref().map(|(_, state)| state)
    }

    /// Whether gradients on a GPU are the same bits in every run (default: no). It takes a few percent more time.
    /// Everything else repeats in any case.
    pub fn deterministic(self, wanted: bool) -> Self {
        Self { deterministic: wanted, ..self }
    }

    /// Restricts a GPU to kernels of one instruction set (default: the newest one that it runs). The CPU refuses it.
    pub fn arch(self, arch: Arch) -> Self {
        Self { arch: Some(arch), ..self }
    }

    /// The number of multiprocessors of a Hopper GPU that the kernels leave to others (default: 0). Gradients leave as many.
    /// Kernels for sm80 refuse a margin above 0. The CPU ignores it.
    ///
    /// See [`ForwardProblemBuilder::sm_margin`](hopper_attention::ForwardProblemBuilder::sm_margin).
    pub fn sm_margin(self, multiprocessors: usize) -> Self {
        Self { sm_margin: multiprocessors, ..self }
    }

    /// The most bytes of scratch memory that each pass may take on a GPU (default: any number). Gradients then cut tiles into fewer
    /// shares. A pass that needs more even so is an error. The CPU takes none.
    ///
    /// See [`ForwardProblemBuilder::workspace_limit`](hopper_attention::ForwardProblemBuilder::workspace_limit).
    pub fn workspace_limit(self, bytes: u64) -> Self {
        Self { workspace_limit: Some(bytes), ..self }
    }

    /// About how many queries and keys the longest of packed sequences has (default: unknown). A hint for speed: results do
    /// not depend on it. [`attention_varlen`](crate::attention_varlen) alone takes it.
    pub fn max_seqlens(self, queries: usize, keys: usize) -> Self {
        Self { max_seqlens: [Some(queries), Some(keys)], ..self }
    }

    /// The forward problem of tensors with these layouts, and of what is beside them. A packed tensor has no dimension `batch`.
    ///
    /// Rows that belong to no sequence are filled, so that every output is written in full.
    pub(crate) fn forward(
        &self,
        dtype: DType,
        [q, k, v]: [&Layout; 3],
        Beside { sinks, alibi, bias, blocks }: Beside,
        lse: bool,
        packing: Option<&Packing>,
    ) -> Result<ForwardProblem> {
        let dtype = our_dtype("q, k and v", dtype)?;
        let [q_is_packed, _] = is_packed(packing);
        let sequences = packing.map(Packing::sequences);
        let [batch, seqlen_q, heads_q, head_dim] = sizes("q", q, sequences.filter(|_| q_is_packed))?;
        let [_, seqlen_kv, heads_kv, _] = sizes("k", k, sequences)?;
        let [.., head_dim_vo] = sizes("v", v, sequences)?;
        let dims = Dims::new(batch, seqlen_q, heads_q, head_dim)
            .with_seqlen_kv(seqlen_kv)
            .with_heads_kv(heads_kv)
            .with_head_dim_vo(head_dim_vo);
        let mut problem = ForwardProblem::builder(dtype, dims).mask(self.mask).softcap(self.softcap);
        problem = problem.lse(lse).sm_margin(self.sm_margin).workspace_limit(self.workspace_limit);
        if let Some(softmax_scale) = self.softmax_scale {
            problem = problem.softmax_scale(softmax_scale);
        }
        if let Some(arch) = self.arch {
            problem = problem.arch(arch);
        }
        if packing.is_some() {
            problem = problem.packed_q(q_is_packed).used_q(!q_is_packed).packed_kv(true).fill_gaps(true);
        }
        if let Some(slopes) = alibi {
            problem = problem.alibi(slopes);
        }
        problem = problem.bias(bias).block_mask(blocks).dropout(self.dropout.map(|(dropout, _)| dropout));
        problem = match sinks {
            None => problem,
            Some(DType::F32) => problem.sinks(hopper_attention::DType::F32),
            Some(DType::BF16) => problem.sinks(hopper_attention::DType::BF16),
            Some(other) => {
                let (got, allowed) = (format!("dtype {other:?}").to_lowercase(), "f32, bf16".into());
                return Err(refusal(Error::Value { what: "sinks", got, allowed }));
            }
        };
        let [queries, keys] = self.max_seqlens;
        if let Some(queries) = queries {
            problem = problem.max_seqlen_q(queries);
        }
        if let Some(keys) = keys {
            problem = problem.max_seqlen_kv(keys);
        }
        problem.build().map_err(refusal)
    }

    /// The gradients of that problem, and those of its sinks and its bias if they are wanted.
    pub(crate) fn backward(
        &self,
        dtype: DType,
        qkv: [&Layout; 3],
        beside: Beside,
        [wants_d_sinks, wants_d_bias]: [bool; 2],
        packing: Option<&Packing>,
    ) -> Result<BackwardProblem> {
        let forward = self.forward(dtype, qkv, beside, true, packing)?;
        let options = BackwardProblem::builder(&forward).deterministic(self.deterministic);
        options.d_sinks(wants_d_sinks).d_bias(wants_d_bias).build().map_err(refusal)
    }
}

/// The type of floats of ours.
fn our_dtype(what: &'static str, dtype: DType) -> Result<hopper_attention::DType> {
    match dtype {
        DType::F16 => Ok(hopper_attention::DType::F16),
        DType::BF16 => Ok(hopper_attention::DType::BF16),
        DType::F32 => Ok(hopper_attention::DType::F32),
        other => {
            let (got, allowed) = (format!("dtype {other:?}").to_lowercase(), "f16, bf16, f32".into());
            Err(refusal(Error::Value { what, got, allowed }))
        }
    }
}

/// The form of a bias `[1 or batch, 1 or heads_q, 1 or queries, keys]`. Where a size is 1 on both sides, both forms have
/// one shape. A bias of dense tensors has all their queries and keys. With packed sequences it says how many it has.
pub(crate) fn bias_form(bias: &Tensor, packing: Option<&Packing>) -> Result<Bias> {
    let (dtype, (batch, heads, queries, keys)) = (our_dtype("bias", bias.dtype())?, bias.dims4()?);
    let form = Bias::new(dtype).per_batch(batch != 1).per_head(heads != 1).per_query(queries != 1);
    Ok(if packing.is_some() { form.covering(queries, keys) } else { form })
}

/// The sizes `[batch, seqlen, heads, head_dim]` of a tensor. A packed one has all rows as `seqlen`, and no dimension `batch`.
fn sizes(tensor: &'static str, layout: &Layout, sequences: Option<usize>) -> Result<[usize; 4]> {
    match (layout.dims(), sequences) {
        (&[batch, seqlen, heads, head_dim], None) => Ok([batch, seqlen, heads, head_dim]),
        (&[total, heads, head_dim], Some(sequences)) => Ok([sequences, total, heads, head_dim]),
        (dims, sequences) => {
            let got = format!("{} dimensions, {dims:?}", dims.len());
            let axes = sequences.map_or("4, [batch, seqlen, heads, head_dim]", |_| "3, [total, heads, head_dim]");
            Err(refusal(Error::Value { what: tensor, got, allowed: axes.into() }))
        }
    }
}

/// The same shape and strides as a layout of ours. Its first element is at candle's `start_offset`.
///
/// A dimension of size 1 never uses its stride. candle leaves there what a view happens to have.
pub(crate) fn ours<const R: usize>(slot: Slot, layout: &Layout) -> Result<hopper_attention::Layout<R>> {
    // The problem was made of these dimensions. So there are as many.
    let shape: [usize; R] = layout.dims().try_into().map_err(candle_core::Error::wrap)?;
    let mut stride = [1; R];
    for (axis, (stride, &given)) in stride.iter_mut().zip(layout.stride()).enumerate() {
        if shape[axis] != 1 {
            *stride = i64::try_from(given).unwrap_or(i64::MAX);
        }
    }
    if stride[R - 1] != 1 {
        let axis = if slot == Slot::Bias { "seqlen_kv" } else { "head_dim" };
        let (tensor, got) = (slot.name(), format!("stride {} in {axis}", stride[R - 1]));
        return Err(refusal(Error::Layout { tensor, got, allowed: "stride 1, as contiguous() makes it".into() }));
    }
    hopper_attention::Layout::with_strides(shape, stride).map_err(refusal)
}

/// Computes an expression with the number of dimensions as a constant: 2, 3 or 4.
macro_rules! by_rank {
    ($rank:expr, $R:ident => $body:expr) => {
        match $rank {
            2 => {
                const $R: usize = 2;
                $body
            }
            3 => {
                const $R: usize = 3;
                $body
            }
            _ => {
                const $R: usize = 4;
                $body
            }
        }
    };
}
pub(crate) use by_rank;

/// Calls a function for the type of the elements. The problem has refused other types than these three.
macro_rules! by_type {
    ($dtype:expr, $($function:ident)::+ ($($argument:expr),*)) => {
        match $dtype {
            candle_core::DType::F16 => $($function)::+::<hopper_attention::f16>($($argument),*),
            candle_core::DType::BF16 => $($function)::+::<hopper_attention::bf16>($($argument),*),
            _ => $($function)::+::<f32>($($argument),*),
        }
    };
}
pub(crate) use by_type;

/// The dimensions that a tensor of a run has, of a shape with `batch` in front. A packed one has no `batch`.
pub(crate) fn dims(shape: &[usize], is_packed: bool) -> &[usize] {
    &shape[usize::from(is_packed)..]
}

/// The layout of an output: no gaps.
pub(crate) fn contiguous<const R: usize>(shape: &[usize]) -> Result<hopper_attention::Layout<R>> {
    let shape: [usize; R] = shape.try_into().map_err(candle_core::Error::wrap)?;
    hopper_attention::Layout::contiguous(shape).map_err(refusal)
}

/// The number of elements of an output.
pub(crate) fn elements(shape: &[usize]) -> Result<usize> {
    by_rank!(shape.len(), R => Ok(contiguous::<R>(shape)?.span()))
}

/// The error for a layout that begins behind the end of its memory. candle makes no such layout.
pub(crate) fn beyond(tensor: &'static str, layout: &Layout, elements: usize) -> candle_core::Error {
    let got = format!("a first element at {}", layout.start_offset());
    refusal(Error::Layout { tensor, got, allowed: format!("up to the {elements} of its memory") })
}
