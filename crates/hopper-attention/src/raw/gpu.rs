//! From checked numbers to a launch: what kernels ask of addresses and strides.

use std::ffi::c_void;

use super::{RawForward, RawFp8, RawTensor, RawWorkspace};
use crate::plan::{Gpu, Target};
use crate::{Error, ForwardPlan, Result};

/// Tensor maps and their moves count in units of this many bytes.
const ALIGNMENT: u64 = 16;
/// A tensor map's strides end here, in bytes.
const STRIDE_END: i64 = 1 << 40;

/// What a kernel reads and writes: aligned, and with regular strides in dimensions that have no second element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelArgs {
    pub q: KernelTensor,
    pub k: KernelTensor,
    pub v: KernelTensor,
    pub o: KernelTensor,
    pub lse: Option<RowValues>,
    pub fp8: Option<KernelFp8>,
    pub workspace: u64,
}

/// What e4m3 operands need beside them: the factors of Q, K and V, and the addresses of what there is one of, or 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct KernelFp8 {
    pub descale: [Factors; 3],
    pub scale_o: u64,
    pub amax: u64,
}

/// Factors `[batch, heads, blocks]`; strides count elements, 0 where there is no second one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Factors {
    pub address: u64,
    pub stride_batch: i64,
    pub stride_head: i64,
    pub stride_block: i64,
}

/// Unit stride in `head_dim`; strides count elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelTensor {
    pub address: u64,
    pub stride_batch: i64,
    pub stride_seqlen: i64,
    pub stride_head: i64,
}

/// A value for each query of each head: address, and strides of batch and heads in elements.
pub(crate) type RowValues = (u64, i64, i64);

/// Enqueues the plan's kernel.
///
/// # Safety
/// As [`ForwardPlan::run_raw`], whose checks of types, shapes and places were made.
pub(super) unsafe fn run(plan: &ForwardPlan, gpu: &Gpu, args: &RawForward, stream: *mut c_void) -> Result<()> {
    let args = kernel_args(args, plan.workspace_bytes())?;
    #[cfg(feature = "cuda")]
    {
        let device = gpu.device.as_ref().ok_or_else(|| not_on_a_gpu(plan.target()))?;
        // The largest magnitude of nothing is written, too.
        if plan.problem().is_empty() && args.fp8.is_none_or(|fp8| fp8.amax == 0) {
            return Ok(());
        }
        // The CUDA runtime inside the kernels' launchers launches into the thread's current context.
        let _current = device.make_current()?;
        device.check_stream(stream)?;
        // SAFETY: the caller's promise, and `kernel_args` for the alignment; the plan for everything else.
        unsafe { crate::sys::launch(plan.problem(), gpu.choice(), &args, stream) }
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (gpu, args, stream);
        Err(not_on_a_gpu(plan.target()))
    }
}

pub(crate) fn not_on_a_gpu<C>(target: &Target<C>) -> Error {
    Error::Device { what: "plan", got: target.to_string(), allowed: "a plan that was made on a GPU".into() }
}

fn kernel_args(args: &RawForward, workspace_bytes: usize) -> Result<KernelArgs> {
    Ok(KernelArgs {
        q: tensor("q", &args.q)?,
        k: tensor("k", &args.k)?,
        v: tensor("v", &args.v)?,
        o: tensor("o", &args.o)?,
        lse: args.lse.as_ref().map(|lse| row_values("lse", lse)).transpose()?,
        fp8: args.fp8.as_ref().map(kernel_fp8).transpose()?,
        workspace: workspace(args.workspace, workspace_bytes)?,
    })
}

pub(super) fn workspace(workspace: RawWorkspace, need: usize) -> Result<u64> {
    let RawWorkspace { address, bytes } = workspace;
    if bytes < need || (need > 0 && address == 0) {
        return Err(Error::Workspace { need, have: if address == 0 { 0 } else { bytes } });
    }
    if need > 0 && !address.is_multiple_of(ALIGNMENT) {
        return Err(Error::Layout {
            tensor: "workspace",
            got: format!("address {address:#x}"),
            allowed: "multiples of 16 bytes".into(),
        });
    }
    Ok(address)
}

pub(super) fn tensor(name: &'static str, raw: &RawTensor<4>) -> Result<KernelTensor> {
    let (shape, strides) = (raw.layout.shape(), raw.layout.stride());
    // Where there is no second element any stride is right; this one is always a legal one.
    let regular = i64::try_from(shape[3]).unwrap_or(i64::MAX);
    let [mut stride_batch, mut stride_seqlen, mut stride_head] = [regular; 3];
    if !raw.layout.is_empty() {
        if raw.address == 0 || !raw.address.is_multiple_of(ALIGNMENT) {
            return Err(Error::Layout {
                tensor: name,
                got: format!("address {:#x}", raw.address),
                allowed: "multiples of 16 bytes, not 0".into(),
            });
        }
        let outer = [("batch", &mut stride_batch), ("seqlen", &mut stride_seqlen), ("heads", &mut stride_head)];
        for (axis, (axis_name, slot)) in outer.into_iter().enumerate() {
            if shape[axis] > 1 {
                *slot = stride(name, axis_name, strides[axis], raw)?;
            }
        }
    }
    Ok(KernelTensor { address: raw.address, stride_batch, stride_seqlen, stride_head })
}

fn stride(tensor: &'static str, axis: &str, stride: i64, raw: &RawTensor<4>) -> Result<i64> {
    let bytes = stride.checked_mul(raw.dtype.bytes() as i64);
    match bytes {
        Some(bytes) if (0..STRIDE_END).contains(&bytes) && bytes % ALIGNMENT as i64 == 0 => Ok(stride),
        _ => Err(Error::Layout {
            tensor,
            got: format!("stride {stride} in {axis}, of {} elements", raw.dtype),
            allowed: format!(
                "on a GPU, multiples of {} elements (16 bytes) from 0 to below 2^40 bytes",
                ALIGNMENT as usize / raw.dtype.bytes()
            ),
        }),
    }
}

fn kernel_fp8(raw: &RawFp8) -> Result<KernelFp8> {
    let one = |tensor, raw: Option<RawTensor<1>>| raw.map_or(Ok(0), |raw| f32_address(tensor, &raw));
    Ok(KernelFp8 {
        descale: [
            factors("descale_q", &raw.descale_q)?,
            factors("descale_k", &raw.descale_k)?,
            factors("descale_v", &raw.descale_v)?,
        ],
        scale_o: one("scale_o", raw.scale_o)?,
        amax: one("amax", raw.amax)?,
    })
}

pub(super) fn factors(tensor: &'static str, raw: &RawTensor<3>) -> Result<Factors> {
    let (shape, strides) = (raw.layout.shape(), raw.layout.stride());
    let [stride_batch, stride_head, stride_block] =
        [0, 1, 2].map(|axis| if shape[axis] > 1 { strides[axis] } else { 0 });
    Ok(Factors { address: f32_address(tensor, raw)?, stride_batch, stride_head, stride_block })
}

pub(super) fn f32_address<const R: usize>(tensor: &'static str, raw: &RawTensor<R>) -> Result<u64> {
    if !raw.layout.is_empty() && (raw.address == 0 || !raw.address.is_multiple_of(size_of::<f32>() as u64)) {
        return Err(Error::Layout {
            tensor,
            got: format!("address {:#x}", raw.address),
            allowed: "multiples of 4 bytes, not 0".into(),
        });
    }
    Ok(raw.address)
}

pub(super) fn row_values(tensor: &'static str, raw: &RawTensor<3>) -> Result<RowValues> {
    let address = f32_address(tensor, raw)?;
    let [stride_batch, stride_head, _] = raw.layout.stride();
    Ok((address, stride_batch, stride_head))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::Place;
    use crate::{DType, DeviceFacts, Dims, ForwardProblem, Layout, kernels};

    const DIMS: Dims =
        Dims { batch: 2, seqlen_q: 3, seqlen_kv: 5, heads_q: 4, heads_kv: 1, head_dim_qk: 64, head_dim_vo: 64 };

    fn problem(dims: Dims) -> ForwardProblem {
        ForwardProblem::new(DType::BF16, dims).unwrap()
    }

    fn dense(shape: [usize; 4]) -> RawTensor<4> {
        let layout = Layout::contiguous(shape).unwrap();
        RawTensor { address: 0x1000, dtype: DType::BF16, place: Place::Cuda(0), layout }
    }

    fn args(dims: Dims) -> RawForward {
        let problem = problem(dims);
        RawForward {
            q: dense(problem.q_shape()),
            k: dense(problem.k_shape()),
            v: dense(problem.v_shape()),
            o: dense(problem.o_shape()),
            lse: None,
            fp8: None,
            workspace: RawWorkspace::default(),
        }
    }

    fn refused(args: RawForward) -> String {
        kernel_args(&args, 0).unwrap_err().to_string()
    }

    fn strided(stride: [i64; 4]) -> Layout<4> {
        Layout::with_strides(problem(DIMS).v_shape(), stride).unwrap()
    }

    #[test]
    fn dense_tensors_pass_unchanged() {
        let args = kernel_args(&args(DIMS), 0).unwrap();
        let dense = |stride_batch, stride_seqlen| KernelTensor {
            address: 0x1000,
            stride_batch,
            stride_seqlen,
            stride_head: 64,
        };
        assert_eq!((args.q, args.k), (dense(768, 256), dense(320, 64)));
        assert_eq!((args.q, args.k), (args.o, args.v));
    }

    #[test]
    fn addresses_are_aligned() {
        let mut args = args(DIMS);
        args.k.address = 0x1008;
        assert_eq!(refused(args), "k: address 0x1008; allowed: multiples of 16 bytes, not 0");
        args.k.address = 0;
        assert!(refused(args).starts_with("k: address 0x0"));
        // Without keys there is nothing at the address.
        args.k.layout = Layout::contiguous([2, 0, 1, 64]).unwrap();
        assert!(kernel_args(&args, 0).is_ok());
    }

    #[test]
    fn strides_are_aligned_where_they_are_used() {
        let mut args = args(DIMS);
        args.v.layout = strided([340, 68, 64, 1]);
        assert_eq!(
            refused(args),
            "v: stride 340 in batch, of bf16 elements; allowed: on a GPU, multiples of 8 elements (16 bytes) \
             from 0 to below 2^40 bytes"
        );
        // Every key has the same value, which is legal to read; one head has no second one to step to.
        args.v.layout = strided([320, 0, 3, 1]);
        assert_eq!(kernel_args(&args, 0).unwrap().v.stride_head, 64);
        args.v.layout = strided([1 << 39, 64, 64, 1]);
        assert!(refused(args).starts_with("v: stride 549755813888 in batch"));
    }

    #[test]
    fn the_lse_is_aligned() {
        let layout = Layout::contiguous([2, 4, 3]).unwrap();
        let raw = RawTensor { address: 0x104, dtype: DType::F32, place: Place::Cuda(0), layout };
        assert_eq!(row_values("lse", &raw), Ok((0x104, 12, 3)));
        let text = row_values("lse", &RawTensor { address: 0x102, ..raw }).unwrap_err().to_string();
        assert_eq!(text, "lse: address 0x102; allowed: multiples of 4 bytes, not 0");
    }

    #[test]
    fn a_workspace_is_there_aligned_and_large_enough() {
        let at = |address, bytes| RawWorkspace { address, bytes };
        assert_eq!(workspace(at(0, 0), 0), Ok(0));
        assert_eq!(workspace(at(0x100, 8), 4), Ok(0x100));
        assert_eq!(workspace(at(0, 4), 4), Err(Error::Workspace { need: 4, have: 0 }));
        assert_eq!(workspace(at(0x100, 3), 4), Err(Error::Workspace { need: 4, have: 3 }));
        let text = workspace(at(0x104, 4), 4).unwrap_err().to_string();
        assert_eq!(text, "workspace: address 0x104; allowed: multiples of 16 bytes");
    }

    #[test]
    fn a_plan_for_a_described_gpu_has_no_raw_launch() {
        let Ok(plan) = problem(DIMS).plan_for(&DeviceFacts::h100_sxm()) else {
            assert!(kernels().is_empty());
            return;
        };
        // SAFETY: refused before any address is used.
        let error = unsafe { plan.run_raw(&args(DIMS), std::ptr::null_mut()) }.unwrap_err();
        assert_eq!(error.to_string(), "plan: on a GPU that was only described; allowed: a plan that was made on a GPU");
    }
}
