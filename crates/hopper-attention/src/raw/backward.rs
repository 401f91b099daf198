//! A backward pass by address.

use std::ffi::c_void;

use super::gpu::{self, KernelTensor, RowValues};
use super::{RawTensor, RawWorkspace, check_place, check_row_values, check_written, cpu};
use crate::backward::Layouts;
use crate::plan::{BackwardChoice, Gpu, Target};
use crate::{BackwardPlan, Result, checks};

/// What a backward pass reads and writes, by address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawBackward {
    /// `[batch, seqlen_q, heads_q, head_dim_qk]`.
    pub q: RawTensor<4>,
    /// `[batch, seqlen_kv, heads_kv, head_dim_qk]`.
    pub k: RawTensor<4>,
    /// `[batch, seqlen_kv, heads_kv, head_dim_vo]`.
    pub v: RawTensor<4>,
    /// `[batch, seqlen_q, heads_q, head_dim_vo]`, what the forward pass gave.
    pub o: RawTensor<4>,
    /// f32 `[batch, heads_q, seqlen_q]`, what the forward pass gave.
    pub lse: RawTensor<3>,
    /// `[batch, seqlen_q, heads_q, head_dim_vo]`.
    pub d_o: RawTensor<4>,
    /// f32 `[batch, heads_q, seqlen_q]`; given exactly when the problem announces it.
    pub d_lse: Option<RawTensor<3>>,
    /// `[batch, seqlen_q, heads_q, head_dim_qk]`, written.
    pub d_q: RawTensor<4>,
    /// `[batch, seqlen_kv, heads_kv, head_dim_qk]`, written.
    pub d_k: RawTensor<4>,
    /// `[batch, seqlen_kv, heads_kv, head_dim_vo]`, written.
    pub d_v: RawTensor<4>,
    /// Scratch memory.
    pub workspace: RawWorkspace,
}

impl BackwardPlan {
    /// [`run`](Self::run) by address. On a GPU it enqueues the backward pass on the stream and returns, without
    /// allocating, waiting or loading anything, and leaves the thread's current CUDA context as it was. On the CPU it is
    /// done on return, and neither the stream nor the workspace is looked at.
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
    ///   layout reaches. Inputs are initialised by then.
    /// - The workspace is valid for as long, in the plan's place.
    /// - Nothing writes the inputs, and nothing else reads or writes the outputs and the workspace, until then.
    /// - Outputs and workspace share no element with each other or with an input.
    /// - `stream` is a live `CUstream` (or `cudaStream_t`), or null for the default stream.
    pub unsafe fn run_raw(&self, args: &RawBackward, stream: *mut c_void) -> Result<()> {
        check(self, args)?;
        match self.target() {
            // SAFETY: the caller's promise; `check` compared types, shapes and places with the problem.
            Target::Cpu => unsafe { cpu::backward(self, args) },
            // SAFETY: as above.
            Target::Gpu(gpu) => unsafe { on_gpu(self, gpu, args, stream) },
        }
    }
}

/// What a backward kernel reads and writes: aligned, and with regular strides in dimensions that have no second element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BackwardKernelArgs {
    pub q: KernelTensor,
    pub k: KernelTensor,
    pub v: KernelTensor,
    pub o: KernelTensor,
    pub lse: RowValues,
    pub d_o: KernelTensor,
    pub d_lse: Option<RowValues>,
    pub d_q: KernelTensor,
    pub d_k: KernelTensor,
    pub d_v: KernelTensor,
    pub workspace: u64,
}

/// Enqueues the plan's kernels.
///
/// # Safety
/// As [`BackwardPlan::run_raw`], whose checks of types, shapes and places were made.
unsafe fn on_gpu(
    plan: &BackwardPlan,
    gpu: &Gpu<BackwardChoice>,
    args: &RawBackward,
    stream: *mut c_void,
) -> Result<()> {
    let args = BackwardKernelArgs {
        q: gpu::tensor("q", &args.q)?,
        k: gpu::tensor("k", &args.k)?,
        v: gpu::tensor("v", &args.v)?,
        o: gpu::tensor("o", &args.o)?,
        lse: gpu::row_values("lse", &args.lse)?,
        d_o: gpu::tensor("d_o", &args.d_o)?,
        d_lse: args.d_lse.as_ref().map(|d_lse| gpu::row_values("d_lse", d_lse)).transpose()?,
        d_q: gpu::tensor("d_q", &args.d_q)?,
        d_k: gpu::tensor("d_k", &args.d_k)?,
        d_v: gpu::tensor("d_v", &args.d_v)?,
        workspace: gpu::workspace(args.workspace, plan.workspace_bytes())?,
    };
    #[cfg(feature = "cuda")]
    {
        let device = gpu.device.as_ref().ok_or_else(|| gpu::not_on_a_gpu(plan.target()))?;
        if plan.problem().is_empty() {
            return Ok(());
        }
        // The CUDA runtime inside the kernels' launchers launches into the thread's current context.
        let _current = device.make_current()?;
        device.check_stream(stream)?;
        // SAFETY: the caller's promise, and the lines above for the alignment; the plan for everything else.
        unsafe { crate::sys::launch_backward(plan.problem(), gpu.choice(), &args, stream) }
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (gpu, args, stream);
        Err(gpu::not_on_a_gpu(plan.target()))
    }
}

/// Types, shapes, and that the memory is where the plan is.
fn check(plan: &BackwardPlan, args: &RawBackward) -> Result<()> {
    let problem = plan.problem();
    let RawBackward { q, k, v, o, lse, d_o, d_lse, d_q, d_k, d_v, .. } = *args;
    Layouts {
        q: q.layout,
        k: k.layout,
        v: v.layout,
        o: o.layout,
        lse: lse.layout,
        d_o: d_o.layout,
        d_lse: d_lse.map(|d_lse| d_lse.layout),
        d_q: d_q.layout,
        d_k: d_k.layout,
        d_v: d_v.layout,
    }
    .check(problem)?;
    let outputs = [("d_q", d_q), ("d_k", d_k), ("d_v", d_v)];
    for (what, tensor) in [("q", q), ("k", k), ("v", v), ("o", o), ("d_o", d_o)].into_iter().chain(outputs) {
        checks::dtype(what, tensor.dtype, problem.dtype(), "the problem's")?;
        check_place(plan.target(), what, tensor.place)?;
    }
    check_row_values(plan.target(), "lse", lse)?;
    d_lse.map_or(Ok(()), |d_lse| check_row_values(plan.target(), "d_lse", d_lse))?;
    outputs.into_iter().try_for_each(|(what, tensor)| check_written(what, tensor.layout))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::Place;
    use crate::{BackwardProblem, DType, Device, Dims, ForwardProblem, Layout};

    const DIMS: Dims =
        Dims { batch: 1, seqlen_q: 2, seqlen_kv: 3, heads_q: 2, heads_kv: 1, head_dim_qk: 2, head_dim_vo: 2 };

    /// Every key is alike, so every weight is a third.
    struct Memory {
        /// Q, O and dO.
        ones: Vec<f32>,
        kv: Vec<f32>,
        lse: Vec<f32>,
        d_lse: Vec<f32>,
        d_q: Vec<f32>,
        d_k: Vec<f32>,
        d_v: Vec<f32>,
    }

    impl Memory {
        fn new() -> Self {
            Self {
                ones: vec![1.0; 8],
                kv: vec![0.0; 6],
                lse: vec![3f32.ln(); 4],
                d_lse: vec![1.0; 4],
                d_q: vec![-7.0; 8],
                d_k: vec![-7.0; 6],
                d_v: vec![-7.0; 6],
            }
        }

        fn args(&mut self) -> RawBackward {
            fn raw<const R: usize>(address: *const f32, shape: [usize; R]) -> RawTensor<R> {
                let layout = Layout::contiguous(shape).unwrap();
                RawTensor { address: address as u64, dtype: DType::F32, place: Place::Cpu, layout }
            }
            let problem = problem();
            let forward = problem.forward();
            RawBackward {
                q: raw(self.ones.as_ptr(), forward.q_shape()),
                k: raw(self.kv.as_ptr(), forward.k_shape()),
                v: raw(self.kv.as_ptr(), forward.v_shape()),
                o: raw(self.ones.as_ptr(), forward.o_shape()),
                lse: raw(self.lse.as_ptr(), forward.lse_shape()),
                d_o: raw(self.ones.as_ptr(), problem.d_o_shape()),
                d_lse: Some(raw(self.d_lse.as_ptr(), problem.d_lse_shape())),
                d_q: raw(self.d_q.as_mut_ptr(), problem.d_q_shape()),
                d_k: raw(self.d_k.as_mut_ptr(), problem.d_k_shape()),
                d_v: raw(self.d_v.as_mut_ptr(), problem.d_v_shape()),
                workspace: RawWorkspace::default(),
            }
        }

        /// Runs, and says what was refused; nothing may have been written then.
        fn refused(&mut self, edit: impl FnOnce(&mut RawBackward)) -> String {
            let mut args = self.args();
            edit(&mut args);
            let plan = problem().plan(&Device::cpu()).unwrap();
            // SAFETY: the addresses are those of live vectors, or refused before they are used.
            let error = unsafe { plan.run_raw(&args, std::ptr::null_mut()) }.unwrap_err();
            assert!(self.d_q.iter().chain(&self.d_k).chain(&self.d_v).all(|&x| x == -7.0), "{error}");
            error.to_string()
        }
    }

    fn problem() -> BackwardProblem {
        BackwardProblem::of(&ForwardProblem::new(DType::F32, DIMS).unwrap().softmax_scale(0.5).unwrap()).d_lse(true)
    }

    #[test]
    fn it_computes() {
        let mut memory = Memory::new();
        let plan = problem().plan(&Device::cpu()).unwrap();
        let args = memory.args();
        // SAFETY: the addresses are those of live vectors, and outputs have vectors of their own.
        unsafe { plan.run_raw(&args, std::ptr::null_mut()) }.unwrap();
        // dP is 0 and delta 2 - 1, so dS is -1/3; four rows of it, times the scale, reach every key.
        let near = |got: &[f32], want: f32| got.iter().all(|x| (x - want).abs() < 1e-6);
        assert!(near(&memory.d_q, 0.0), "{:?}", memory.d_q);
        assert!(near(&memory.d_k, -2.0 / 3.0), "{:?}", memory.d_k);
        assert!(near(&memory.d_v, 4.0 / 3.0), "{:?}", memory.d_v);
    }

    #[test]
    fn what_is_wrong_is_refused_and_nothing_is_written() {
        let mut memory = Memory::new();
        let text = memory.refused(|args| args.d_o.address += 2);
        assert!(
            text.starts_with("d_o: address 0x") && text.ends_with("allowed: multiples of 4 bytes, not 0"),
            "{text}"
        );
        let text = memory.refused(|args| args.o.dtype = DType::BF16);
        assert_eq!(text, "o: dtype bf16; allowed: f32, the problem's");
        let text = memory.refused(|args| args.d_lse.as_mut().unwrap().dtype = DType::F16);
        assert_eq!(text, "d_lse: dtype f16; allowed: f32, as every log-sum-exp");
        let text = memory.refused(|args| args.lse.place = Place::Cuda(0));
        assert_eq!(text, "lse: on cuda:0; allowed: cpu, the plan's");
        let text = memory.refused(|args| args.d_v.place = Place::Cuda(1));
        assert_eq!(text, "d_v: on cuda:1; allowed: cpu, the plan's");
        let text = memory.refused(|args| args.d_lse = None);
        assert!(text.starts_with("d_lse: missing"), "{text}");
        let text = memory.refused(|args| args.d_k.layout = args.d_q.layout);
        assert!(text.starts_with("d_k: shape [1, 2, 2, 2], expected [1, 3, 1, 2]"), "{text}");
    }

    #[test]
    fn outputs_have_memory_of_their_own() {
        let mut memory = Memory::new();
        let text = memory.refused(|args| args.d_q.address = args.q.address);
        assert!(text.starts_with("d_q: addresses 0x") && text.contains("meet those of q"), "{text}");
        let text = memory.refused(|args| args.d_v.address = args.d_k.address);
        assert!(text.starts_with("d_v: addresses 0x") && text.contains("meet those of d_k"), "{text}");
        let text = memory.refused(|args| args.lse.address = args.d_k.address + 4);
        assert!(text.starts_with("d_k: addresses 0x") && text.contains("meet those of lse"), "{text}");
        let text = memory.refused(|args| {
            args.d_q.layout = Layout::with_strides([1, 2, 2, 2], [0, 0, 2, 1]).unwrap();
        });
        assert!(text.starts_with("d_q: shape") && text.contains("uses elements twice"), "{text}");
    }
}
