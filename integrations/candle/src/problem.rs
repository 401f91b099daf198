//! From candle's layouts to problems.

use candle_core::{DType, Layout, Result};
use hopper_attention::{Arch, BackwardProblem, Dims, Error, ForwardProblem, Mask};

use crate::error::refusal;

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
    deterministic: bool,
    arch: Option<Arch>,
    sm_margin: usize,
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

    /// The forward problem of tensors with these layouts.
    pub(crate) fn forward(&self, dtype: DType, [q, k, v]: [&Layout; 3], lse: bool) -> Result<ForwardProblem> {
        let dtype = match dtype {
            DType::F16 => hopper_attention::DType::F16,
            DType::BF16 => hopper_attention::DType::BF16,
            DType::F32 => hopper_attention::DType::F32,
            other => {
                let (got, allowed) = (format!("dtype {other:?}").to_lowercase(), "f16, bf16, f32".into());
                return Err(refusal(Error::Value { what: "q, k and v", got, allowed }));
            }
        };
        let ([batch, seqlen_q, heads_q, head_dim], [_, seqlen_kv, heads_kv, _]) = (four("q", q)?, four("k", k)?);
        let [.., head_dim_vo] = four("v", v)?;
        let dims = Dims::new(batch, seqlen_q, heads_q, head_dim)
            .with_seqlen_kv(seqlen_kv)
            .with_heads_kv(heads_kv)
            .with_head_dim_vo(head_dim_vo);
        let mut problem = ForwardProblem::builder(dtype, dims).mask(self.mask).lse(lse).sm_margin(self.sm_margin);
        if let Some(softmax_scale) = self.softmax_scale {
            problem = problem.softmax_scale(softmax_scale);
        }
        if let Some(arch) = self.arch {
            problem = problem.arch(arch);
        }
        problem.build().map_err(refusal)
    }

    /// The gradients of that problem.
    pub(crate) fn backward(&self, dtype: DType, qkv: [&Layout; 3]) -> Result<BackwardProblem> {
        let forward = self.forward(dtype, qkv, true)?;
        BackwardProblem::builder(&forward).deterministic(self.deterministic).build().map_err(refusal)
    }
}

/// The sizes of a tensor with four dimensions.
fn four(tensor: &'static str, layout: &Layout) -> Result<[usize; 4]> {
    layout.dims().try_into().map_err(|_| {
        let got = format!("{} dimensions, {:?}", layout.dims().len(), layout.dims());
        refusal(Error::Value { what: tensor, got, allowed: "4, [batch, seqlen, heads, head_dim]".into() })
    })
}

/// The same shape and strides as a layout of ours. Its first element is at candle's `start_offset`.
///
/// A dimension of size 1 never uses its stride. candle leaves there what a view happens to have.
pub(crate) fn ours(tensor: &'static str, layout: &Layout) -> Result<hopper_attention::Layout<4>> {
    let shape = four(tensor, layout)?;
    let mut stride = [1; 4];
    for (axis, (stride, &given)) in stride.iter_mut().zip(layout.stride()).enumerate() {
        if shape[axis] != 1 {
            *stride = i64::try_from(given).unwrap_or(i64::MAX);
        }
    }
    if stride[3] != 1 {
        let got = format!("stride {} in head_dim", stride[3]);
        return Err(refusal(Error::Layout { tensor, got, allowed: "stride 1, as contiguous() makes it".into() }));
    }
    hopper_attention::Layout::with_strides(shape, stride).map_err(refusal)
}

/// The layout of an output: no gaps.
pub(crate) fn contiguous<const R: usize>(shape: [usize; R]) -> Result<hopper_attention::Layout<R>> {
    hopper_attention::Layout::contiguous(shape).map_err(refusal)
}

/// The error for a layout that begins behind the end of its memory. candle makes no such layout.
pub(crate) fn beyond(tensor: &'static str, layout: &Layout, elements: usize) -> candle_core::Error {
    let got = format!("a first element at {}", layout.start_offset());
    refusal(Error::Layout { tensor, got, allowed: format!("up to the {elements} of its memory") })
}
