//! The unsafe layer: addresses instead of borrowed tensors, for C, for stacks with memory of their own, and for stacks on
//! another version of cudarc, none of whose types appears here.
//!
//! Problems and plans are the safe ones, and so is every check that numbers allow: types, shapes, strides, alignment,
//! places and sizes are compared with the problem before anything is launched. What an address leads to cannot be
//! checked; that is the caller's promise. With another cudarc, say, whose `CudaContext::new` retains the same primary
//! context as [`Device::cuda`](crate::Device::cuda) does:
//!
//! ```
//! use hopper_attention::raw::{Place, RawForward, RawTensor, RawWorkspace};
//! use hopper_attention::{DType, ForwardPlan, Layout, Result};
//!
//! /// The four addresses and the workspace's, from `device_ptr(&stream).0` there, whose guards live until this returns;
//! /// `stream` from `stream.cu_stream().cast()`.
//! unsafe fn attention(plan: &ForwardPlan, [q, k, v, o, scratch]: [u64; 5], stream: *mut std::ffi::c_void) -> Result<()> {
//!     let problem = plan.problem();
//!     let place = Place::Cuda(0);
//!     let tensor = |address, shape| {
//!         Ok(RawTensor { address, dtype: DType::BF16, place, layout: Layout::contiguous(shape)? })
//!     };
//!     let args = RawForward {
//!         q: tensor(q, problem.q_shape())?,
//!         k: tensor(k, problem.k_shape())?,
//!         v: tensor(v, problem.v_shape())?,
//!         o: tensor(o, problem.o_shape())?,
//!         lse: None,
//!         fp8: None,
//!         workspace: RawWorkspace { address: scratch, bytes: plan.workspace_bytes() },
//!     };
//!     // SAFETY: the caller's promise.
//!     unsafe { plan.run_raw(&args, stream) }
//! }
//! ```

mod backward;
mod cpu;
mod gpu;
mod quantize;

use std::ffi::c_void;
use std::fmt;

use crate::plan::Target;
use crate::{DType, Error, ForwardPlan, Layout, Result, checks};

pub use backward::RawBackward;
pub use quantize::{RawQuantize, RawQuantizeTensor};

#[cfg(feature = "cuda")]
pub(crate) use backward::BackwardKernelArgs;
#[cfg(feature = "cuda")]
pub(crate) use gpu::{Factors, KernelArgs, KernelFp8, KernelTensor, RowValues, not_on_a_gpu};
#[cfg(feature = "cuda")]
pub(crate) use quantize::{QuantizeKernelArgs, QuantizeKernelTensor};

/// Where an address leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Memory that the cores of this machine read.
    Cpu,
    /// Memory that the GPU with this ordinal reads.
    Cuda(usize),
}

/// A tensor by the address of its first element. The logical order is `[batch, seqlen, heads, head_dim]`, that of the
/// log-sum-exp `[batch, heads, seqlen]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawTensor<const R: usize> {
    /// Of the first element; anything when there is none.
    pub address: u64,
    /// The type of the elements.
    pub dtype: DType,
    /// Where the memory is.
    pub place: Place,
    /// Shape and strides.
    pub layout: Layout<R>,
}

/// Scratch memory where the plan is, of 16-byte alignment on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawWorkspace {
    /// Of its first byte; 0 where the plan needs none.
    pub address: u64,
    /// At least the plan's [`workspace_bytes`](ForwardPlan::workspace_bytes).
    pub bytes: usize,
}

/// What a forward pass reads and writes, by address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawForward {
    /// `[batch, seqlen_q, heads_q, head_dim_qk]`.
    pub q: RawTensor<4>,
    /// `[batch, seqlen_kv, heads_kv, head_dim_qk]`.
    pub k: RawTensor<4>,
    /// `[batch, seqlen_kv, heads_kv, head_dim_vo]`.
    pub v: RawTensor<4>,
    /// `[batch, seqlen_q, heads_q, head_dim_vo]`, written, of the problem's output type.
    pub o: RawTensor<4>,
    /// f32 `[batch, heads_q, seqlen_q]`, written; given exactly when the problem asks for it.
    pub lse: Option<RawTensor<3>>,
    /// Given exactly when the operands are e4m3.
    pub fp8: Option<RawFp8>,
    /// Scratch memory.
    pub workspace: RawWorkspace,
}

/// What a forward pass of e4m3 operands reads and writes beside them, by address: as
/// [`Fp8ForwardArgs`](crate::Fp8ForwardArgs), all f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawFp8 {
    /// `[batch, heads, blocks]`, the problem's `descale_q_shape()`.
    pub descale_q: RawTensor<3>,
    /// `[batch, heads, blocks]`, the problem's `descale_k_shape()`.
    pub descale_k: RawTensor<3>,
    /// `[batch, heads, blocks]`, the problem's `descale_v_shape()`.
    pub descale_v: RawTensor<3>,
    /// `[1]`; given exactly when the output is e4m3.
    pub scale_o: Option<RawTensor<1>>,
    /// `[1]`, written; given exactly when the problem asks for it.
    pub amax: Option<RawTensor<1>>,
}

impl ForwardPlan {
    /// [`run`](Self::run), or [`run_fp8`](Self::run_fp8), by address. On a GPU it enqueues the forward pass on the stream
    /// and returns, without allocating, waiting or loading anything, and leaves the thread's current CUDA context as it
    /// was. On the CPU it is done on return, and the stream is not looked at.
    ///
    /// # Errors
    /// As [`run`](Self::run); beyond that [`Error::Layout`] for an address that is not a multiple of the element's size
    /// (of 16 bytes on a GPU, the LSE's of 4), and on the CPU for an output whose range of addresses meets another
    /// tensor's; [`Error::Device`] for a tensor that is not in the plan's place, and for a stream of another context
    /// than the primary one of the plan's GPU; [`Error::Workspace`] for one that is too small or at address 0.
    ///
    /// # Safety
    /// - Each tensor's memory is where it says, and valid from now until the work that was enqueued is done, for every
    ///   element that its layout reaches. Inputs are initialised by then.
    /// - The workspace is valid for as long, in the plan's place.
    /// - Nothing writes the inputs, and nothing else reads or writes the outputs and the workspace, until then.
    /// - Outputs and workspace share no element with each other or with an input.
    /// - `stream` is a live `CUstream` (or `cudaStream_t`), or null for the default stream.
    pub unsafe fn run_raw(&self, args: &RawForward, stream: *mut c_void) -> Result<()> {
        check(self, args)?;
        match self.target() {
            // SAFETY: the caller's promise; `check` compared types, shapes and places with the problem.
            Target::Cpu => unsafe { cpu::forward(self, args) },
            // SAFETY: as above.
            Target::Gpu(gpu) => unsafe { gpu::run(self, gpu, args, stream) },
        }
    }
}

/// Types, shapes, and that the memory is where the plan is.
fn check(plan: &ForwardPlan, args: &RawForward) -> Result<()> {
    let problem = plan.problem();
    let layouts = [args.q.layout, args.k.layout, args.v.layout, args.o.layout];
    crate::forward::check_shapes(problem, layouts, args.lse.map(|lse| lse.layout))?;
    let tensors = [("q", args.q), ("k", args.k), ("v", args.v), ("o", args.o)];
    for (what, tensor) in tensors {
        let want = if what == "o" { problem.output_dtype() } else { problem.dtype() };
        checks::dtype(what, tensor.dtype, want, "the problem's")?;
    }
    check_fp8(plan, args.fp8.as_ref())?;
    if let Some(lse) = args.lse {
        check_row_values(plan.target(), "lse", lse)?;
    }
    tensors.into_iter().try_for_each(|(what, tensor)| check_place(plan.target(), what, tensor.place))?;
    check_written("o", args.o.layout)?;
    args.lse.map_or(Ok(()), |lse| check_written("lse", lse.layout))
}

/// Whether what e4m3 operands need is there, as the problem has it, and nothing where it does not belong.
fn check_fp8(plan: &ForwardPlan, fp8: Option<&RawFp8>) -> Result<()> {
    let problem = plan.problem();
    let refuse = |got: &str, allowed: &str| Err(Error::Value { what: "fp8", got: got.into(), allowed: allowed.into() });
    let fp8 = match (problem.scaling_value(), fp8) {
        (Some(_), Some(fp8)) => fp8,
        (Some(_), None) => return refuse("missing", "the factors of e4m3 operands"),
        (None, Some(_)) => return refuse("given", "none, since the operands are not e4m3"),
        (None, None) => return Ok(()),
    };
    let RawFp8 { descale_q, descale_k, descale_v, scale_o, amax } = fp8;
    let layouts = [descale_q.layout, descale_k.layout, descale_v.layout];
    let (of_scale_o, of_amax) = (scale_o.map(|scale_o| scale_o.layout), amax.map(|amax| amax.layout));
    crate::forward::check_factors(problem, layouts, of_scale_o, of_amax)?;
    for (what, tensor) in [("descale_q", descale_q), ("descale_k", descale_k), ("descale_v", descale_v)] {
        check_factor(plan.target(), what, tensor)?;
    }
    for (what, tensor) in [("scale_o", scale_o), ("amax", amax)] {
        tensor.map_or(Ok(()), |tensor| check_factor(plan.target(), what, &tensor))?;
    }
    Ok(())
}

fn check_factor<C, const R: usize>(target: &Target<C>, what: &'static str, tensor: &RawTensor<R>) -> Result<()> {
    checks::dtype(what, tensor.dtype, DType::F32, "as every factor and amax")?;
    check_place(target, what, tensor.place)
}

/// A log-sum-exp, or its gradient: f32 where the plan is.
fn check_row_values<C>(target: &Target<C>, what: &'static str, tensor: RawTensor<3>) -> Result<()> {
    checks::dtype(what, tensor.dtype, DType::F32, "as every log-sum-exp")?;
    check_place(target, what, tensor.place)
}

/// Whether what is written uses no element twice.
fn check_written<const R: usize>(tensor: &'static str, layout: Layout<R>) -> Result<()> {
    crate::tensor::without_overlap(layout).map_err(|error| match error {
        Error::Layout { got, allowed, .. } => Error::Layout { tensor, got, allowed },
        other => other,
    })
}

fn check_place<C>(target: &Target<C>, what: &'static str, place: Place) -> Result<()> {
    let same = match target {
        Target::Cpu => place == Place::Cpu,
        Target::Gpu(gpu) => gpu.ordinal().is_none_or(|ordinal| place == Place::Cuda(ordinal)),
    };
    if same {
        return Ok(());
    }
    Err(Error::Device { what, got: place.to_string(), allowed: format!("{target}, the plan's") })
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}
