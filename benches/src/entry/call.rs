//! One way for every pass: a call's tensors by address, and the plan that is kept for its problem.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use hopper_attention::cudarc::driver::sys;
use hopper_attention::internal::{candidates, plan_with_shares};
use hopper_attention::raw::{Place, RawArgs, RawTensor};
use hopper_attention::{
    BackwardPlan, BackwardProblem, CudaDevice, DType, Device, Error, ForwardPlan, ForwardProblem, Layout, Operands,
    Presence, Slot, kernels,
};

use super::{FAILED, Packing, Refused};

/// What a caller asks for.
pub(super) struct Call<const N: usize> {
    pub problem: Problem,
    pub packing: Packing,
    pub tensors: [Given; N],
    pub workspace: *mut c_void,
    pub workspace_bytes: u64,
    pub stream: *mut c_void,
}

/// A tensor of a caller: its first element, and its strides of batch, token and head where it is not contiguous.
pub(super) struct Given {
    slot: Slot,
    data: *const c_void,
    stride: Option<[i64; 3]>,
}

impl Given {
    pub fn strided(slot: Slot, data: *const c_void, stride: [i64; 3]) -> Self {
        Self { slot, data, stride: Some(stride) }
    }

    pub fn contiguous<T>(slot: Slot, data: *const T) -> Self {
        Self { slot, data: data.cast(), stride: None }
    }

    /// Lists of full blocks: counts, indices, and counts of partial blocks, which are 0. The indices of partial blocks are never
    /// read, so that those of full ones stand in for them.
    pub fn lists([full_counts, full, counts]: [*const i32; 3]) -> [Self; 5] {
        [
            Self::contiguous(Slot::MaskBlockCnt, counts),
            Self::contiguous(Slot::MaskBlockIdx, full),
            Self::contiguous(Slot::MaskBits, std::ptr::null::<i32>()),
            Self::contiguous(Slot::FullBlockCnt, full_counts),
            Self::contiguous(Slot::FullBlockIdx, full),
        ]
    }
}

impl<const N: usize> Call<N> {
    /// Enqueues it on its stream.
    ///
    /// # Safety
    /// The caller vouches for addresses, strides and sizes, for the workspace, and for the stream.
    pub unsafe fn run(&self) -> Result<(), Refused> {
        let ordinal = current_device()?;
        let plan = self.problem.kept(ordinal)?;
        let args = self.raw(plan.operands(), Place::Cuda(ordinal))?;
        // SAFETY: the caller's promise.
        Ok(unsafe { plan.run_raw(&args, self.stream) }?)
    }

    /// Does it on the CPU, whatever its stream.
    ///
    /// # Safety
    /// As for [`run`](Self::run), with memory of the host.
    #[cfg(test)]
    pub unsafe fn run_on_cpu(&self) -> Result<(), Refused> {
        let plan = self.problem.plan(&Device::cpu())?;
        let args = self.raw(plan.operands(), Place::Cpu)?;
        // SAFETY: the caller's promise.
        Ok(unsafe { plan.run_raw(&args, std::ptr::null_mut()) }?)
    }

    /// Its tensors as these operands.
    fn raw(&self, operands: &Operands, place: Place) -> hopper_attention::Result<RawArgs> {
        let bytes = usize::try_from(self.workspace_bytes).unwrap_or(usize::MAX);
        let mut args = RawArgs::new().with_workspace(self.workspace as u64, bytes);
        for operand in operands.iter().filter(|operand| operand.presence() != Presence::Refused) {
            let (slot, dtype) = (operand.slot(), operand.dtype());
            if let (Slot::CuSeqlensQ | Slot::CuSeqlensKv, &[count]) = (slot, operand.shape()) {
                let list = Layout::contiguous([count])?;
                args = args.with(slot, RawTensor::new(self.packing.cu_seqlens as u64, dtype, place, list));
                continue;
            }
            let Some(given) = self.tensors.iter().find(|given| given.slot == slot) else { continue };
            let address = given.data as u64;
            let tensor = match (operand.shape(), given.stride) {
                (&[a, b, c, d], Some([batch, token, head])) => {
                    RawTensor::new(address, dtype, place, Layout::with_strides([a, b, c, d], [batch, token, head, 1])?)
                }
                // Packed tensors have no batch.
                (&[a, b, c], Some([_, token, head])) => {
                    RawTensor::new(address, dtype, place, Layout::with_strides([a, b, c], [token, head, 1])?)
                }
                (&[a, b, c, d], None) => RawTensor::new(address, dtype, place, Layout::contiguous([a, b, c, d])?),
                (&[a], None) => RawTensor::new(address, dtype, place, Layout::contiguous([a])?),
                (&[a, b], None) => RawTensor::new(address, dtype, place, Layout::contiguous([a, b])?),
                (&[a, b, c], None) => RawTensor::new(address, dtype, place, Layout::contiguous([a, b, c])?),
                (shape, _) => {
                    let (got, allowed) = (format!("shape {shape:?}"), "up to four dimensions".into());
                    return Err(Error::Layout { tensor: slot.name(), got, allowed });
                }
            };
            args = args.with(slot, tensor);
        }
        Ok(args)
    }
}

/// A problem of any pass.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) enum Problem {
    Forward(ForwardProblem),
    /// With a kernel that a measurement names, in place of the plan's choice.
    Wished(ForwardProblem, Wish),
    Backward(BackwardProblem),
}

/// Which kernel of a forward: the first that is so, in the order of plans. `None`: any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Wish {
    pub scores: Option<DType>,
    pub tile_m: Option<usize>,
    /// CTAs that share a tile. 1: none do.
    pub shares: Option<usize>,
}

impl Wish {
    fn plan(&self, problem: &ForwardProblem, device: &CudaDevice) -> hopper_attention::Result<ForwardPlan> {
        let rows = candidates(problem, &device.info().facts, kernels())?;
        let is_wished = |row: &&hopper_attention::KernelInfo| {
            self.scores.is_none_or(|scores| row.scores() == scores)
                && self.tile_m.is_none_or(|tile_m| row.tile_m() == tile_m)
                && self.shares.is_none_or(|shares| row.most_shares() >= shares)
        };
        let Some(row) = rows.iter().find(is_wished) else {
            let nearest = rows.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            return Err(Error::Unsupported { wanted: format!("{self:?} for {problem}"), nearest });
        };
        match self.shares {
            Some(shares) => plan_with_shares(problem, device, row, shares),
            None => problem.plan_with_row(device, row),
        }
    }
}

impl Problem {
    pub fn plan(&self, device: &Device) -> hopper_attention::Result<Plan> {
        Ok(match self {
            Self::Forward(problem) => Plan::Forward(problem.plan(device)?),
            Self::Wished(problem, wish) => Plan::Forward(match device {
                Device::Cuda(device) => wish.plan(problem, device)?,
                _ => problem.plan(device)?, // the CPU has one way
            }),
            Self::Backward(problem) => Plan::Backward(problem.plan(device)?),
        })
    }

    /// Its plan on a GPU, made once.
    fn kept(&self, ordinal: usize) -> Result<Arc<Plan>, Refused> {
        static PLANS: LazyLock<Mutex<Plans>> = LazyLock::new(Default::default);
        let plans = || PLANS.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (ordinal, self.clone());
        let known = plans().get(&key).cloned();
        if let Some(plan) = known {
            return Ok(plan);
        }
        let plan = Arc::new(self.plan(&Device::shared_cuda(ordinal)?)?);
        plans().insert(key, plan.clone());
        Ok(plan)
    }

    /// The scratch that its plan needs on the current GPU.
    pub fn workspace_bytes(&self) -> Result<usize, Refused> {
        Ok(match &*self.kept(current_device()?)? {
            Plan::Forward(plan) => plan.workspace_bytes(),
            Plan::Backward(plan) => plan.workspace_bytes(),
        })
    }
}

/// How a problem is computed.
pub(super) enum Plan {
    Forward(ForwardPlan),
    Backward(BackwardPlan),
}

impl Plan {
    pub fn operands(&self) -> &Operands {
        match self {
            Self::Forward(plan) => plan.operands(),
            Self::Backward(plan) => plan.operands(),
        }
    }

    /// # Safety
    /// As for [`ForwardPlan::run_raw`].
    pub unsafe fn run_raw(&self, args: &RawArgs, stream: *mut c_void) -> hopper_attention::Result<()> {
        match self {
            // SAFETY: the caller's promise.
            Self::Forward(plan) => unsafe { plan.run_raw(args, stream) },
            // SAFETY: the caller's promise.
            Self::Backward(plan) => unsafe { plan.run_raw(args, stream) },
        }
    }
}

/// Plans by the ordinal of their GPU and their problem, for the life of the process.
type Plans = HashMap<(usize, Problem), Arc<Plan>>;

/// The ordinal of the GPU whose context is current.
fn current_device() -> Result<usize, Refused> {
    // cudarc panics on its first call where there is no driver.
    static DRIVER: LazyLock<bool> = LazyLock::new(|| !Device::available().is_empty());
    if !*DRIVER {
        return Err(Refused(FAILED, "this machine has no CUDA driver, or no GPU".to_owned()));
    }
    let mut ordinal = 0;
    // SAFETY: writes one int.
    let code = unsafe { sys::cuCtxGetDevice(&mut ordinal) };
    if code != sys::CUresult::CUDA_SUCCESS {
        return Err(Refused(FAILED, format!("no current CUDA context ({code:?})")));
    }
    Ok(usize::try_from(ordinal).unwrap_or_default())
}
