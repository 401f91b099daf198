//! Runs in GPU memory, on the stream of candle's device.

use std::hash::Hash;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaSlice, DeviceRepr};
use candle_core::cuda_backend::{CudaDType, CudaDevice};
use candle_core::{CudaStorage, Layout, Result};
use hopper_attention::{
    BackwardArgs, BackwardPlan, BackwardProblem, Device, Float, ForwardArgs, ForwardPlan, ForwardProblem, Stream,
    TensorMut, TensorRef, Workspace,
};
use lru::LruCache;

use crate::error::refusal;
use crate::problem::{beyond, contiguous, ours};

/// A tensor of candle's in GPU memory.
pub type Given<'a> = (&'a CudaStorage, &'a Layout);

/// How many plans each pass keeps. A plan is small and holds no GPU memory. The bound is for programs whose lengths
/// never repeat.
const PLANS: NonZeroUsize = NonZeroUsize::new(256).expect("not 0");

/// Enqueues the computation of O, and of the LSE if the problem wants it.
pub fn forward<T: Float + CudaDType + DeviceRepr>(
    problem: &ForwardProblem,
    [q, k, v]: [Given<'_>; 3],
) -> Result<(CudaStorage, Option<CudaStorage>)> {
    static CACHE: Plans<ForwardProblem, ForwardPlan> = Plans::new();
    let device = &q.0.device;
    let plan = CACHE.plan(device, problem, |device| problem.plan(device))?;
    let (of_o, of_lse) = (contiguous(problem.o_shape())?, contiguous(problem.lse_shape())?);
    let mut o = uninitialised::<T>(device, of_o.span())?;
    let mut lse = if problem.wants_lse() { Some(uninitialised::<f32>(device, of_lse.span())?) } else { None };
    let mut scratch = scratch(device, plan.workspace_bytes())?;
    let o_tensor = TensorMut::cuda(o.as_view_mut(), of_o).map_err(refusal)?;
    let mut args = ForwardArgs::new(tensor::<T>("q", q)?, tensor::<T>("k", k)?, tensor::<T>("v", v)?, o_tensor);
    if let Some(lse) = &mut lse {
        args = args.lse(TensorMut::cuda(lse.as_view_mut(), of_lse).map_err(refusal)?);
    }
    plan.run(&Stream::Cuda(device.cuda_stream()), &mut workspace(&mut scratch)?, args).map_err(refusal)?;
    let stored = |lse| CudaStorage::wrap_cuda_slice(lse, device.clone());
    Ok((CudaStorage::wrap_cuda_slice(o, device.clone()), lse.map(stored)))
}

/// Enqueues the computation of the gradients of Q, K and V.
pub fn backward<T: Float + CudaDType + DeviceRepr>(
    problem: &BackwardProblem,
    [q, k, v]: [Given<'_>; 3],
    o: Given<'_>,
    lse: &CudaStorage,
    d_o: Given<'_>,
) -> Result<[CudaStorage; 3]> {
    static CACHE: Plans<BackwardProblem, BackwardPlan> = Plans::new();
    let device = &q.0.device;
    let plan = CACHE.plan(device, problem, |device| problem.plan(device))?;
    let shapes = [problem.d_q_shape(), problem.d_k_shape(), problem.d_v_shape()];
    let [of_q, of_k, of_v] = [contiguous(shapes[0])?, contiguous(shapes[1])?, contiguous(shapes[2])?];
    let mut d_q = uninitialised::<T>(device, of_q.span())?;
    let mut d_k = uninitialised::<T>(device, of_k.span())?;
    let mut d_v = uninitialised::<T>(device, of_v.span())?;
    let mut scratch = scratch(device, plan.workspace_bytes())?;
    let lse = lse.as_cuda_slice::<f32>()?;
    let args = BackwardArgs::new(
        [tensor::<T>("q", q)?, tensor("k", k)?, tensor("v", v)?],
        tensor("o", o)?,
        TensorRef::cuda(lse.as_view(), contiguous(problem.forward().lse_shape())?).map_err(refusal)?,
        tensor("d_o", d_o)?,
        [
            TensorMut::cuda(d_q.as_view_mut(), of_q).map_err(refusal)?,
            TensorMut::cuda(d_k.as_view_mut(), of_k).map_err(refusal)?,
            TensorMut::cuda(d_v.as_view_mut(), of_v).map_err(refusal)?,
        ],
    );
    plan.run(&Stream::Cuda(device.cuda_stream()), &mut workspace(&mut scratch)?, args).map_err(refusal)?;
    Ok([d_q, d_k, d_v].map(|gradient| CudaStorage::wrap_cuda_slice(gradient, device.clone())))
}

/// The memory that a tensor of candle's has, as a tensor of ours.
fn tensor<'a, T: Float + CudaDType + DeviceRepr>(
    name: &'static str,
    (storage, layout): Given<'a>,
) -> Result<TensorRef<'a, T, 4>> {
    let data = storage.as_cuda_slice::<T>()?;
    let view = data.try_slice(layout.start_offset()..).ok_or_else(|| beyond(name, layout, data.len()))?;
    TensorRef::cuda(view, ours(name, layout)?).map_err(refusal)
}

/// Memory for an output that a run writes in full.
fn uninitialised<T: Float + DeviceRepr>(device: &CudaDevice, elements: usize) -> Result<CudaSlice<T>> {
    // SAFETY: every bit pattern is a value of `T`, a float. Nothing reads the memory before the run has written it:
    // the run is the next use of it, and if the run fails the memory is dropped.
    unsafe { device.alloc::<T>(elements) }
}

/// Memory for a workspace. `None` if the plan needs none.
fn scratch(device: &CudaDevice, bytes: usize) -> Result<Option<CudaSlice<u8>>> {
    if bytes == 0 {
        return Ok(None);
    }
    // SAFETY: every bit pattern is a `u8`, and a run overwrites its workspace before it reads it.
    unsafe { device.alloc::<u8>(bytes) }.map(Some)
}

fn workspace(scratch: &mut Option<CudaSlice<u8>>) -> Result<Workspace<'_>> {
    match scratch {
        Some(scratch) => Ok(Workspace::cuda(scratch.as_view_mut())),
        None => Ok(Workspace::host(&mut [])),
    }
}

/// The plans of one pass that were used last, for all contexts of the process.
struct Plans<Problem, Plan>(OnceLock<Mutex<Cache<Problem, Plan>>>);

/// Plans by the address of a context and the problem. The entry holds the context, so that no other context gets its
/// address.
type Cache<Problem, Plan> = LruCache<(usize, Problem), (Arc<CudaContext>, Arc<Plan>)>;

impl<Problem: Clone + Eq + Hash, Plan> Plans<Problem, Plan> {
    const fn new() -> Self {
        Self(OnceLock::new())
    }

    /// The plan for a problem on a device, made by `make` if it is not there.
    fn plan(
        &self,
        device: &CudaDevice,
        problem: &Problem,
        make: impl FnOnce(&Device) -> hopper_attention::Result<Plan>,
    ) -> Result<Arc<Plan>> {
        let stream = device.cuda_stream();
        let context = stream.context();
        let key = (Arc::as_ptr(context) as usize, problem.clone());
        let cache = self.0.get_or_init(|| Mutex::new(LruCache::new(PLANS)));
        // Held while the plan is made, so that threads that come at once with one problem make one plan. The cache is
        // whole wherever a panic could leave the lock.
        let mut plans = cache.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, plan)) = plans.get(&key) {
            return Ok(plan.clone());
        }
        let device = hopper_attention::CudaDevice::from_context(context.clone()).map_err(refusal)?;
        let plan = Arc::new(make(&Device::Cuda(device)).map_err(refusal)?);
        plans.put(key, (context.clone(), plan.clone()));
        Ok(plan)
    }
}
