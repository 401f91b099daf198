//! Runs in GPU memory, on the stream of candle's device.

use std::hash::Hash;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaSlice, DeviceRepr};
use candle_core::cuda_backend::{CudaDType, CudaDevice, CudaStorageSlice};
use candle_core::{CudaStorage, DType, Layout, Result};
use hopper_attention::{
    Args, BackwardPlan, BackwardProblem, Device, Element, Float, ForwardPlan, ForwardProblem, Slot, Stream, TensorMut,
    TensorRef, Workspace, bf16,
};
use lru::LruCache;

use crate::blocks::Lists;
use crate::error::refusal;
use crate::offsets::is_packed;
use crate::problem::{beyond, by_rank, by_type, contiguous, dims, elements, ours};

/// A tensor of candle's in GPU memory.
pub type Given<'a> = (&'a CudaStorage, &'a Layout);

/// How many plans each pass keeps. A plan is small and holds no GPU memory. The bound is for programs whose lengths
/// never repeat.
const PLANS: NonZeroUsize = NonZeroUsize::new(256).expect("not 0");

/// Enqueues the computation of O, and of the LSE if the problem wants it.
pub fn forward<T: Float + CudaDType + DeviceRepr>(
    problem: &ForwardProblem,
    lists: Lists<'_>,
    [q, k, v]: [Given<'_>; 3],
    [sinks, slopes, bias]: [Option<Given<'_>>; 3],
) -> Result<(CudaStorage, Option<CudaStorage>)> {
    static CACHE: Plans<ForwardProblem, ForwardPlan> = Plans::new();
    let device = &q.0.device;
    let plan = CACHE.plan(device, problem, |device| problem.plan(device))?;
    let ([is_packed, _], o_shape, lse_shape) = (is_packed(lists.packing), problem.o_shape(), problem.lse_shape());
    let (of_o, of_lse) = (dims(&o_shape, is_packed), dims(&lse_shape, is_packed));
    let mut o = uninitialised::<T>(device, elements(of_o)?)?;
    let mut lse = if problem.wants_lse() { Some(uninitialised::<f32>(device, elements(of_lse)?)?) } else { None };
    let mut scratch = scratch(device, plan.workspace_bytes())?;
    let mut args = read::<T>(Args::new(), Slot::Q, q)?;
    args = read::<T>(read::<T>(args, Slot::K, k)?, Slot::V, v)?;
    args = read_bias(read_slopes(read_sinks(args, sinks)?, slopes)?, bias)?;
    args = write(args, Slot::O, &mut o, of_o)?;
    if let Some(lse) = &mut lse {
        args = write(args, Slot::Lse, lse, of_lse)?;
    }
    let args = lists.lend(args)?;
    plan.run(&Stream::Cuda(device.cuda_stream()), &mut workspace(&mut scratch)?, args).map_err(refusal)?;
    let stored = |lse| CudaStorage::wrap_cuda_slice(lse, device.clone());
    Ok((CudaStorage::wrap_cuda_slice(o, device.clone()), lse.map(stored)))
}

/// Enqueues the computation of the gradients of Q, K and V, and of those of the sinks and of the bias if the problem
/// wants them.
pub fn backward<T: Float + CudaDType + DeviceRepr>(
    problem: &BackwardProblem,
    lists: Lists<'_>,
    [q, k, v]: [Given<'_>; 3],
    [sinks, slopes, bias]: [Option<Given<'_>>; 3],
    o: Given<'_>,
    lse: &CudaStorage,
    d_o: Given<'_>,
) -> Result<([CudaStorage; 3], [Option<CudaStorage>; 2])> {
    static CACHE: Plans<BackwardProblem, BackwardPlan> = Plans::new();
    let device = &q.0.device;
    let plan = CACHE.plan(device, problem, |device| problem.plan(device))?;
    let shapes = [problem.d_q_shape(), problem.d_k_shape(), problem.d_v_shape()];
    let [q_is_packed, kv_is_packed] = is_packed(lists.packing);
    let (of_q, of_k) = (dims(&shapes[0], q_is_packed), dims(&shapes[1], kv_is_packed));
    let of_v = dims(&shapes[2], kv_is_packed);
    let mut d_q = uninitialised::<T>(device, elements(of_q)?)?;
    let mut d_k = uninitialised::<T>(device, elements(of_k)?)?;
    let mut d_v = uninitialised::<T>(device, elements(of_v)?)?;
    let heads = problem.dims().heads_q;
    let mut d_sinks = if problem.wants_d_sinks() { Some(uninitialised::<f32>(device, heads)?) } else { None };
    let bias_shape = problem.forward().bias_shape();
    let d_bias = bias.filter(|_| problem.wants_d_bias()).map(|(bias, _)| bias.dtype());
    let mut d_bias =
        d_bias.map(|dtype| by_type!(dtype, stored_uninitialised(device, elements(&bias_shape)?))).transpose()?;
    let mut scratch = scratch(device, plan.workspace_bytes())?;
    let lse_shape = problem.forward().lse_shape();
    let (lse, of_lse) = (lse.as_cuda_slice::<f32>()?, dims(&lse_shape, q_is_packed));
    let mut args = read_bias(read_slopes(Args::new(), slopes)?, bias)?;
    for (slot, tensor) in [(Slot::Q, q), (Slot::K, k), (Slot::V, v), (Slot::O, o), (Slot::DO, d_o)] {
        args = read::<T>(args, slot, tensor)?;
    }
    args = by_rank!(of_lse.len(), R => {
        args.read(Slot::Lse, TensorRef::cuda(lse.as_view(), contiguous::<R>(of_lse)?).map_err(refusal)?)
    });
    args = write(args, Slot::DQ, &mut d_q, of_q)?;
    args = write(args, Slot::DK, &mut d_k, of_k)?;
    args = write(args, Slot::DV, &mut d_v, of_v)?;
    if let Some(d_sinks) = &mut d_sinks {
        let d_sinks = TensorMut::cuda(d_sinks.as_view_mut(), contiguous::<1>(&[heads])?).map_err(refusal)?;
        args = read_sinks(args, sinks)?.write(Slot::DSinks, d_sinks);
    }
    args = match d_bias.as_mut().map(|d_bias| &mut d_bias.slice) {
        Some(CudaStorageSlice::F16(d_bias)) => write(args, Slot::DBias, d_bias, &bias_shape)?,
        Some(CudaStorageSlice::BF16(d_bias)) => write(args, Slot::DBias, d_bias, &bias_shape)?,
        Some(CudaStorageSlice::F32(d_bias)) => write(args, Slot::DBias, d_bias, &bias_shape)?,
        // No bias has another type.
        _ => args,
    };
    let args = lists.lend(args)?;
    plan.run(&Stream::Cuda(device.cuda_stream()), &mut workspace(&mut scratch)?, args).map_err(refusal)?;
    let d_sinks = d_sinks.map(|gradient| CudaStorage::wrap_cuda_slice(gradient, device.clone()));
    Ok(([d_q, d_k, d_v].map(|gradient| CudaStorage::wrap_cuda_slice(gradient, device.clone())), [d_sinks, d_bias]))
}

/// Adds the sinks, if there are any: one dimension without gaps, f32 or bf16. The problem has refused other types.
fn read_sinks<'a>(args: Args<'a>, sinks: Option<Given<'a>>) -> Result<Args<'a>> {
    fn typed<'a, T: Element + CudaDType + DeviceRepr>(
        args: Args<'a>,
        (storage, layout): Given<'a>,
    ) -> Result<Args<'a>> {
        let data = storage.as_cuda_slice::<T>()?;
        let view = data.try_slice(layout.start_offset()..).ok_or_else(|| beyond("sinks", layout, data.len()))?;
        Ok(args.read(Slot::Sinks, TensorRef::cuda(view, contiguous::<1>(layout.dims())?).map_err(refusal)?))
    }
    match sinks {
        None => Ok(args),
        Some(sinks) if sinks.0.dtype() == DType::BF16 => typed::<bf16>(args, sinks),
        Some(sinks) => typed::<f32>(args, sinks),
    }
}

/// Adds the bias, if there is one: f16, bf16 or f32. The problem has refused other types.
fn read_bias<'a>(args: Args<'a>, bias: Option<Given<'a>>) -> Result<Args<'a>> {
    match bias {
        None => Ok(args),
        Some(bias) => by_type!(bias.0.dtype(), read(args, Slot::Bias, bias)),
    }
}

/// Adds ALiBi's slopes, if there are any: one or two dimensions without gaps, f32.
fn read_slopes<'a>(args: Args<'a>, slopes: Option<Given<'a>>) -> Result<Args<'a>> {
    let Some((storage, layout)) = slopes else { return Ok(args) };
    let data = storage.as_cuda_slice::<f32>()?;
    let view = data.try_slice(layout.start_offset()..).ok_or_else(|| beyond("alibi_slopes", layout, data.len()))?;
    let slot = Slot::AlibiSlopes;
    Ok(match layout.dims().len() {
        1 => args.read(slot, TensorRef::cuda(view, contiguous::<1>(layout.dims())?).map_err(refusal)?),
        _ => args.read(slot, TensorRef::cuda(view, contiguous::<2>(layout.dims())?).map_err(refusal)?),
    })
}

/// Adds the memory that a tensor of candle's has.
fn read<'a, T: Float + CudaDType + DeviceRepr>(
    args: Args<'a>,
    slot: Slot,
    (storage, layout): Given<'a>,
) -> Result<Args<'a>> {
    let (name, data) = (slot.name(), storage.as_cuda_slice::<T>()?);
    let view = data.try_slice(layout.start_offset()..).ok_or_else(|| beyond(name, layout, data.len()))?;
    by_rank!(layout.dims().len(), R => {
        Ok(args.read(slot, TensorRef::cuda(view, ours::<R>(slot, layout)?).map_err(refusal)?))
    })
}

/// Adds the memory of an output.
fn write<'a, T: Float + DeviceRepr>(
    args: Args<'a>,
    slot: Slot,
    memory: &'a mut CudaSlice<T>,
    shape: &[usize],
) -> Result<Args<'a>> {
    by_rank!(shape.len(), R => {
        Ok(args.write(slot, TensorMut::cuda(memory.as_view_mut(), contiguous::<R>(shape)?).map_err(refusal)?))
    })
}

/// Memory for an output that a run writes in full.
fn uninitialised<T: Float + DeviceRepr>(device: &CudaDevice, elements: usize) -> Result<CudaSlice<T>> {
    // SAFETY: every bit pattern is a value of `T`, a float. Nothing reads the memory before the run has written it:
    // the run is the next use of it, and if the run fails the memory is dropped.
    unsafe { device.alloc::<T>(elements) }
}

/// As [`uninitialised`], as memory of candle's.
fn stored_uninitialised<T: Float + CudaDType + DeviceRepr>(
    device: &CudaDevice,
    elements: usize,
) -> Result<CudaStorage> {
    Ok(CudaStorage::wrap_cuda_slice(uninitialised::<T>(device, elements)?, device.clone()))
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
