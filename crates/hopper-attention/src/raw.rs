//! The unsafe layer: addresses instead of tensors, for C, for stacks with memory of their own, and for stacks on another
//! version of cudarc, none of whose types appears here. The safe [`run`](ForwardPlan::run) ends here too.

use std::ffi::c_void;

use crate::plan::Target;
use crate::{DType, Error, ForwardPlan, ForwardProblem, Result};

/// A tensor `[batch, seqlen, heads, head_dim]` in device memory, with unit stride in `head_dim`. Strides count elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawTensor {
    /// The address of the first element.
    pub address: u64,
    /// From one sequence to the next.
    pub stride_batch: i64,
    /// From one position to the next.
    pub stride_seqlen: i64,
    /// From one head to the next.
    pub stride_head: i64,
}

/// The log-sum-exp, f32 `[batch, heads_q, seqlen_q]` in device memory, with unit stride in `seqlen_q`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawLse {
    /// The address of the first element.
    pub address: u64,
    /// From one sequence to the next, in elements.
    pub stride_batch: i64,
    /// From one head to the next, in elements.
    pub stride_head: i64,
}

/// What a forward pass reads and writes, by address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawForward {
    /// `[batch, seqlen_q, heads_q, head_dim_qk]`.
    pub q: RawTensor,
    /// `[batch, seqlen_kv, heads_kv, head_dim_qk]`.
    pub k: RawTensor,
    /// `[batch, seqlen_kv, heads_kv, head_dim_vo]`.
    pub v: RawTensor,
    /// `[batch, seqlen_q, heads_q, head_dim_vo]`, written.
    pub o: RawTensor,
    /// Written when the problem asks for it.
    pub lse: Option<RawLse>,
}

/// Tensor maps and their moves count in units of this many bytes.
const ALIGNMENT: u64 = 16;
/// A tensor map's strides end here, in bytes.
const STRIDE_END: i64 = 1 << 40;

impl ForwardPlan {
    /// [`run_raw_with_workspace`](Self::run_raw_with_workspace) for a plan that needs no workspace.
    ///
    /// # Errors
    /// As there; [`Error::Workspace`] when the plan's [`workspace_bytes`](Self::workspace_bytes) is not 0.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn run_raw(&self, args: &RawForward, stream: *mut c_void) -> Result<()> {
        // SAFETY: the caller's promise; without a workspace there is nothing more to promise.
        unsafe { self.run_raw_with_workspace(args, 0, stream) }
    }

    /// Enqueues the forward pass on a CUDA stream and returns. `workspace` is the address of
    /// [`workspace_bytes`](Self::workspace_bytes) bytes of device memory, 0 when that is 0. Alignment, strides and the presence of the LSE are
    /// checked; that the memory is there is not.
    ///
    /// # Errors
    /// [`Error::Layout`] for addresses or strides (in bytes) that are not multiples of 16, strides that are negative or
    /// reach 2^40 bytes; [`Error::Value`] when the LSE is given but not asked for or the reverse; [`Error::Device`] for
    /// a plan that was not made on a GPU; [`Error::Workspace`] for address 0 where a workspace is needed; [`Error::Driver`] and [`Error::Launch`] when the launch fails.
    ///
    /// # Safety
    /// - Each tensor's memory is valid on the plan's GPU, of the problem's dtype, from now until the work that was
    ///   enqueued is done, for every element that its shape and strides reach.
    /// - The workspace is valid for as long, on the same GPU.
    /// - Nothing writes the inputs, and nothing else reads or writes the outputs and the workspace, until then.
    /// - No two elements of an output share memory; outputs and workspace share none with each other or with an input.
    /// - `stream` is a live `CUstream` (or `cudaStream_t`) of the primary context of the plan's GPU, or null.
    pub unsafe fn run_raw_with_workspace(&self, args: &RawForward, workspace: u64, stream: *mut c_void) -> Result<()> {
        let Target::Gpu(gpu) = self.target() else {
            return Err(not_on_a_gpu(self.target()));
        };
        let args = checked(self.problem(), args)?;
        check_workspace(workspace, self.workspace_bytes())?;
        #[cfg(feature = "cuda")]
        {
            let device = gpu.device.as_ref().ok_or_else(|| not_on_a_gpu(self.target()))?;
            if self.problem().is_empty() {
                return Ok(());
            }
            // The CUDA runtime inside the kernels' launchers launches into the thread's current context.
            device.context().bind_to_thread().map_err(crate::cuda::driver("making the GPU current"))?;
            // SAFETY: the caller's promise, and `checked` for the alignment; the plan for everything else.
            unsafe { crate::sys::launch(self.problem(), gpu.choice(), &args, workspace, stream) }
        }
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (gpu, args, stream);
            Err(not_on_a_gpu(self.target()))
        }
    }
}

pub(crate) fn not_on_a_gpu(target: &Target) -> Error {
    Error::Device { what: "plan", got: target.to_string(), allowed: "a plan that was made on a GPU".into() }
}

/// The arguments as kernels want them: checked, and with regular strides in dimensions that have no second element.
fn checked(problem: &ForwardProblem, args: &RawForward) -> Result<RawForward> {
    crate::forward::check_lse_presence(problem, args.lse.is_some())?;
    let dtype = problem.dtype();
    let lse = match args.lse {
        Some(lse) => Some(checked_lse(lse, problem.lse_shape())?),
        None => None,
    };
    Ok(RawForward {
        q: checked_tensor("q", args.q, problem.q_shape(), dtype)?,
        k: checked_tensor("k", args.k, problem.k_shape(), dtype)?,
        v: checked_tensor("v", args.v, problem.v_shape(), dtype)?,
        o: checked_tensor("o", args.o, problem.o_shape(), dtype)?,
        lse,
    })
}

fn check_workspace(address: u64, need: usize) -> Result<()> {
    if need > 0 && address == 0 {
        return Err(Error::Workspace { need, have: 0 });
    }
    if !address.is_multiple_of(ALIGNMENT) {
        return Err(Error::Layout {
            tensor: "workspace",
            got: format!("address {address:#x}"),
            allowed: "multiples of 16 bytes".into(),
        });
    }
    Ok(())
}

fn checked_tensor(tensor: &'static str, raw: RawTensor, shape: [usize; 4], dtype: DType) -> Result<RawTensor> {
    let [batch, seqlen, heads, head_dim] = shape;
    // Where there is no second element any stride is right; this one is always a legal one.
    let regular = i64::try_from(head_dim).unwrap_or(i64::MAX);
    if shape.contains(&0) {
        return Ok(RawTensor { stride_batch: regular, stride_seqlen: regular, stride_head: regular, ..raw });
    }
    if raw.address == 0 || !raw.address.is_multiple_of(ALIGNMENT) {
        return Err(Error::Layout {
            tensor,
            got: format!("address {:#x}", raw.address),
            allowed: "multiples of 16 bytes, not 0".into(),
        });
    }
    let stride = |axis: &str, size: usize, stride: i64| {
        if size <= 1 {
            return Ok(regular);
        }
        let bytes = stride.checked_mul(dtype.bytes() as i64);
        match bytes {
            Some(bytes) if (0..STRIDE_END).contains(&bytes) && bytes % ALIGNMENT as i64 == 0 => Ok(stride),
            _ => Err(Error::Layout {
                tensor,
                got: format!("stride {stride} in {axis}, of {dtype} elements"),
                allowed: format!(
                    "on a GPU, multiples of {} elements (16 bytes) from 0 to below 2^40 bytes",
                    ALIGNMENT as usize / dtype.bytes()
                ),
            }),
        }
    };
    Ok(RawTensor {
        address: raw.address,
        stride_batch: stride("batch", batch, raw.stride_batch)?,
        stride_seqlen: stride("seqlen", seqlen, raw.stride_seqlen)?,
        stride_head: stride("heads", heads, raw.stride_head)?,
    })
}

fn checked_lse(raw: RawLse, [batch, heads, seqlen]: [usize; 3]) -> Result<RawLse> {
    let refuse = |got: String, allowed: &str| Error::Layout { tensor: "lse", got, allowed: allowed.into() };
    let empty = batch == 0 || heads == 0 || seqlen == 0;
    if !empty && (raw.address == 0 || !raw.address.is_multiple_of(size_of::<f32>() as u64)) {
        return Err(refuse(format!("address {:#x}", raw.address), "multiples of 4 bytes, not 0"));
    }
    for (axis, size, stride) in [("batch", batch, raw.stride_batch), ("heads", heads, raw.stride_head)] {
        if !empty && size > 1 && stride < 0 {
            return Err(refuse(format!("stride {stride} in {axis}"), "0 and above"));
        }
    }
    Ok(raw)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, Dims};

    const DIMS: Dims =
        Dims { batch: 2, seqlen_q: 3, seqlen_kv: 5, heads_q: 4, heads_kv: 1, head_dim_qk: 64, head_dim_vo: 64 };

    fn problem(dims: Dims) -> ForwardProblem {
        ForwardProblem::new(DType::BF16, dims).unwrap()
    }

    fn args() -> RawForward {
        let dense = |seqlen: i64, heads: i64| RawTensor {
            address: 0x1000,
            stride_batch: seqlen * heads * 64,
            stride_seqlen: heads * 64,
            stride_head: 64,
        };
        RawForward { q: dense(3, 4), k: dense(5, 1), v: dense(5, 1), o: dense(3, 4), lse: None }
    }

    fn refused(dims: Dims, args: RawForward) -> String {
        checked(&problem(dims), &args).unwrap_err().to_string()
    }

    #[test]
    fn dense_tensors_pass_unchanged() {
        assert_eq!(checked(&problem(DIMS), &args()).unwrap(), args());
    }

    #[test]
    fn addresses_are_aligned() {
        let mut args = args();
        args.k.address = 0x1008;
        assert_eq!(refused(DIMS, args), "k: address 0x1008; allowed: multiples of 16 bytes, not 0");
        args.k.address = 0;
        assert!(refused(DIMS, args).starts_with("k: address 0x0"));
        // Without keys there is nothing at the address.
        assert!(checked(&problem(Dims { seqlen_kv: 0, ..DIMS }), &args).is_ok());
    }

    #[test]
    fn strides_are_aligned_where_they_are_used() {
        let mut args = args();
        args.v.stride_seqlen = 68;
        assert_eq!(
            refused(DIMS, args),
            "v: stride 68 in seqlen, of bf16 elements; allowed: on a GPU, multiples of 8 elements (16 bytes) \
             from 0 to below 2^40 bytes"
        );
        args.v.stride_seqlen = 0; // every key has the same value: legal to read
        args.v.stride_head = 3; // one head: no second one to step to
        assert_eq!(checked(&problem(DIMS), &args).unwrap().v, RawTensor { stride_head: 64, ..args.v });
        for stride in [-64, i64::MAX / 8 * 8, 1 << 39] {
            args.o.stride_batch = stride;
            assert!(refused(DIMS, args).starts_with(&format!("o: stride {stride} in batch")), "{stride}");
        }
    }

    #[test]
    fn the_lse_is_given_exactly_when_asked_for() {
        let with = |lse| RawForward { lse, ..args() };
        let lse = RawLse { address: 0x104, stride_batch: 12, stride_head: 3 };
        assert!(refused(DIMS, with(Some(lse))).starts_with("lse: given"));
        let wanted = problem(DIMS).lse(true);
        assert!(checked(&wanted, &with(Some(lse))).is_ok());
        assert!(checked(&wanted, &args()).unwrap_err().to_string().starts_with("lse: missing"));
        let text = |lse| checked(&wanted, &with(Some(lse))).unwrap_err().to_string();
        assert_eq!(text(RawLse { address: 0x102, ..lse }), "lse: address 0x102; allowed: multiples of 4 bytes, not 0");
        assert_eq!(text(RawLse { stride_head: -3, ..lse }), "lse: stride -3 in heads; allowed: 0 and above");
    }

    #[test]
    fn a_workspace_is_there_and_aligned() {
        assert_eq!(check_workspace(0, 0), Ok(()));
        assert_eq!(check_workspace(0x100, 4), Ok(()));
        assert_eq!(check_workspace(0, 4), Err(Error::Workspace { need: 4, have: 0 }));
        let text = check_workspace(0x104, 4).unwrap_err().to_string();
        assert_eq!(text, "workspace: address 0x104; allowed: multiples of 16 bytes");
    }

    #[test]
    fn a_plan_for_the_cpu_has_no_raw_launch() {
        let plan = problem(DIMS).plan(&Device::cpu()).unwrap();
        // SAFETY: refused before any address is used.
        let error = unsafe { plan.run_raw(&args(), std::ptr::null_mut()) }.unwrap_err();
        assert_eq!(error.to_string(), "plan: on cpu; allowed: a plan that was made on a GPU");
    }
}
