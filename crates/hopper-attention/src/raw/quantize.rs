//! Quantising by address.

use std::ffi::c_void;

use super::gpu::{self, Factors, KernelTensor};
use super::{RawTensor, RawWorkspace, check_place, check_written, cpu};
use crate::plan::{Gpu, Target};
use crate::quantize::{Choice, NAMES, Name, check_counts, check_tensor};
use crate::{DType, QuantizePlan, Result, checks};

/// What a quantiser reads and writes, by address: any of Q, K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawQuantize {
    /// Queries.
    pub q: Option<RawQuantizeTensor>,
    /// Keys.
    pub k: Option<RawQuantizeTensor>,
    /// Values.
    pub v: Option<RawQuantizeTensor>,
    /// f32 `[3, 2]`, written: as [`QuantizeArgs::counts`](crate::QuantizeArgs::counts).
    pub counts: Option<RawTensor<2>>,
    /// Scratch memory.
    pub workspace: RawWorkspace,
}

/// One tensor to quantise, `[batch, seqlen, heads, head_dim]` in the shape that the problem has for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawQuantizeTensor {
    /// What is read, of the quantizer's source type.
    pub values: RawTensor<4>,
    /// e4m3, written.
    pub stored: RawTensor<4>,
    /// f32 `[batch, heads, blocks]` as [`Scaling`](crate::Scaling) says.
    pub descale: RawTensor<3>,
    /// Whether the factors are read; else they are written, from the largest finite magnitudes.
    pub given: bool,
}

impl QuantizePlan {
    /// [`run`](Self::run) by address. On a GPU it enqueues the kernels on the stream and returns, without allocating,
    /// waiting or loading anything, and leaves the thread's current CUDA context as it was. On the CPU it is done on
    /// return, and neither the stream nor the workspace is looked at.
    ///
    /// # Errors
    /// As [`run`](Self::run); beyond that [`Error::Layout`](crate::Error::Layout) for an address that is not a multiple
    /// of the element's size (of 16 bytes on a GPU, those of f32 tensors of 4), for an output that uses an element twice,
    /// and on the CPU for an output whose range of addresses meets another tensor's;
    /// [`Error::Device`](crate::Error::Device) for a tensor that is not in the plan's place, and for a stream of another
    /// context than the primary one of the plan's GPU; [`Error::Workspace`](crate::Error::Workspace) for one that is too
    /// small or at address 0.
    ///
    /// # Safety
    /// - Each tensor's memory is where it says, and valid from now until the work is done, for every element that its
    ///   layout reaches. What is read is initialised by then.
    /// - The workspace is valid for as long, in the plan's place.
    /// - Nothing writes what is read, and nothing else reads or writes what is written and the workspace, until then.
    /// - What is written and the workspace share no element with each other or with what is read.
    /// - `stream` is a live `CUstream` (or `cudaStream_t`), or null for the default stream.
    pub unsafe fn run_raw(&self, args: &RawQuantize, stream: *mut c_void) -> Result<()> {
        check(self, args)?;
        match self.target() {
            // SAFETY: the caller's promise; `check` compared types, shapes and places with the problem.
            Target::Cpu => unsafe { cpu::quantize(self, args) },
            // SAFETY: as above.
            Target::Gpu(gpu) => unsafe { run(self, gpu, args, stream) },
        }
    }
}

/// Types, shapes, and that the memory is where the plan is.
fn check(plan: &QuantizePlan, args: &RawQuantize) -> Result<()> {
    let problem = plan.quantizer().problem();
    for (of, tensor) in NAMES.iter().zip([&args.q, &args.k, &args.v]) {
        let Some(RawQuantizeTensor { values, stored, descale, given }) = tensor else { continue };
        check_tensor(of, problem, values.layout, stored.layout, descale.layout)?;
        checks::dtype(of.values, values.dtype, plan.quantizer().source(), "the quantizer's source")?;
        checks::dtype(of.stored, stored.dtype, DType::E4M3, "as every operand that is made here")?;
        checks::dtype(of.descale, descale.dtype, DType::F32, "as every factor and amax")?;
        check_place(plan.target(), of.values, values.place)?;
        check_place(plan.target(), of.stored, stored.place)?;
        check_place(plan.target(), of.descale, descale.place)?;
        check_written(of.stored, stored.layout)?;
        if !given {
            check_written(of.descale, descale.layout)?;
        }
    }
    if let Some(counts) = &args.counts {
        check_counts(counts.layout.shape())?;
        checks::dtype("counts", counts.dtype, DType::F32, "as all counts")?;
        check_place(plan.target(), "counts", counts.place)?;
        check_written("counts", counts.layout)?;
    }
    Ok(())
}

/// What the kernels read and write: aligned, and with regular strides in dimensions that have no second element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "read by the launch"))]
pub(crate) struct QuantizeKernelArgs {
    pub tensors: [Option<QuantizeKernelTensor>; 3],
    /// Address and stride of the counts; address 0 where they are not wanted.
    pub counts: (u64, i64),
    pub workspace: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "read by the launch"))]
pub(crate) struct QuantizeKernelTensor {
    pub values: KernelTensor,
    pub stored: KernelTensor,
    pub descale: Factors,
    pub given: bool,
}

/// Enqueues the plan's kernels.
///
/// # Safety
/// As [`QuantizePlan::run_raw`], whose checks of types, shapes and places were made.
unsafe fn run(plan: &QuantizePlan, gpu: &Gpu<Choice>, args: &RawQuantize, stream: *mut c_void) -> Result<()> {
    let args = kernel_args(args, plan.workspace_bytes())?;
    #[cfg(feature = "cuda")]
    {
        let device = gpu.device.as_ref().ok_or_else(|| gpu::not_on_a_gpu(plan.target()))?;
        // The CUDA runtime inside the kernels' launchers launches into the thread's current context.
        let _current = device.make_current()?;
        device.check_stream(stream)?;
        // SAFETY: the caller's promise, and `kernel_args` for the alignment; the plan for everything else.
        unsafe { crate::sys::quantize(plan.quantizer(), gpu.choice(), &args, stream) }
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (gpu, args, stream);
        Err(gpu::not_on_a_gpu(plan.target()))
    }
}

fn kernel_args(args: &RawQuantize, workspace_bytes: usize) -> Result<QuantizeKernelArgs> {
    let [of_q, of_k, of_v] = &NAMES;
    let tensor =
        |of: &Name, raw: &Option<RawQuantizeTensor>| raw.as_ref().map(|raw| kernel_tensor(of, raw)).transpose();
    let counts = args.counts.as_ref();
    Ok(QuantizeKernelArgs {
        tensors: [tensor(of_q, &args.q)?, tensor(of_k, &args.k)?, tensor(of_v, &args.v)?],
        counts: match counts {
            Some(counts) => (gpu::f32_address("counts", counts)?, counts.layout.stride()[0]),
            None => (0, 0),
        },
        workspace: gpu::workspace(args.workspace, workspace_bytes)?,
    })
}

fn kernel_tensor(of: &Name, raw: &RawQuantizeTensor) -> Result<QuantizeKernelTensor> {
    Ok(QuantizeKernelTensor {
        values: gpu::tensor(of.values, &raw.values)?,
        stored: gpu::tensor(of.stored, &raw.stored)?,
        descale: gpu::factors(of.descale, &raw.descale)?,
        given: raw.given,
    })
}
