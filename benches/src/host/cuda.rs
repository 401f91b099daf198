//! On a GPU: plans, runs through each layer, and the bare launches that none of them can do without.

use std::ffi::{CStr, c_void};
use std::path::Path;

use anyhow::Result;
use hopper_attention::cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _, result, sys};
use hopper_attention::raw::{Place, RawArgs, RawTensor};
use hopper_attention::{
    CudaDevice, DType, Device, ForwardArgs, ForwardPlan, Layout, Slot, Stream, TensorMut, TensorRef, Workspace, bf16,
};
use hopper_attention_capi as capi;

use super::cupti::Counter;
use super::{HostCall, HostCost, problems, quartiles};
use crate::{Order, Point};

/// Calls over which the driver's calls are counted.
const COUNTED: usize = 50;

/// Measures on a GPU; `cupti` is where CUPTI may be, besides where the system finds it.
///
/// # Errors
/// When the driver or a call fails.
pub fn on_gpu(gpu: &CudaDevice, cupti: Option<&Path>) -> Result<HostCost> {
    let mut cost = HostCost::default();
    let counter = Counter::open(cupti);
    if let Err(why) = &counter {
        cost.notes.push(format!("the driver's calls were not counted: {why}"));
    }
    cost.notes.push("launch: an empty kernel, after a memset of 4 bytes where the plan has a counter".into());
    // The default stream, for which cudarc keeps no events.
    let stream = gpu.context().default_stream();
    for point in problems() {
        let bench = Bench::new(gpu, &stream, &point)?;
        let mut measure = |what: &str, call: &mut dyn FnMut() -> Result<()>| -> Result<()> {
            let us = quartiles(&mut *call, || Ok(gpu.context().synchronize()?))?;
            // Afterwards, as counting makes every call slower.
            let driver_calls = match &counter {
                Ok(counter) => Some(counter.count(COUNTED, call)?),
                Err(_) => None,
            };
            gpu.context().synchronize()?;
            cost.calls.push(HostCall { what: what.into(), problem: point.to_string(), us, driver_calls });
            Ok(())
        };
        let device = Device::Cuda(gpu.clone());
        let problem = point.problem()?;
        measure("plan", &mut || {
            std::hint::black_box(problem.plan(&device)?);
            Ok(())
        })?;
        bench.safe(&stream, &mut |call| measure("run", call))?;
        let raw = bench.raw(gpu.info().ordinal);
        // SAFETY: the buffers live as long as `bench`, and the stream is waited for before that.
        measure("run_raw", &mut || Ok(unsafe { bench.plan.run_raw(&raw, stream.cu_stream().cast()) }?))?;
        bench.c(gpu.info().ordinal, &mut |call| measure("hattn_forward_run", call))?;
        let launch = Launch::new(&stream)?;
        let zeroed = bench.plan.workspace_bytes() > 0;
        measure("launch", &mut || launch.call(zeroed.then_some(&bench.workspace)))?;
        // While a context has a stream of its own, cudarc keeps two events for each allocation.
        let own = gpu.context().new_stream()?;
        Bench::new(gpu, &own, &point)?.safe(&own, &mut |call| measure("run_with_events", call))?;
    }
    Ok(cost)
}

/// Takes a call and measures it.
type Measure<'a> = &'a mut dyn FnMut(&mut dyn FnMut() -> Result<()>) -> Result<()>;

/// A problem's plan and memory.
struct Bench {
    plan: ForwardPlan,
    q: Layout<4>,
    lse: Layout<3>,
    stream: std::sync::Arc<CudaStream>,
    buffers: [CudaSlice<bf16>; 4],
    sums: CudaSlice<f32>,
    workspace: CudaSlice<u8>,
}

impl Bench {
    fn new(gpu: &CudaDevice, stream: &std::sync::Arc<CudaStream>, point: &Point) -> Result<Self> {
        let plan = point.problem()?.plan(&Device::Cuda(gpu.clone()))?;
        let q = point.q_layout(Order::Bshd)?;
        let lse = Layout::contiguous([point.batch, point.heads_q, point.seqlen])?;
        let buffer = || stream.alloc_zeros::<bf16>(q.span());
        Ok(Self {
            buffers: [buffer()?, buffer()?, buffer()?, buffer()?],
            sums: stream.alloc_zeros(lse.span())?,
            workspace: stream.alloc_zeros(plan.workspace_bytes().max(16))?,
            stream: stream.clone(),
            plan,
            q,
            lse,
        })
    }

    /// The safe API: tensors made anew for each run, as a caller's would be.
    fn safe(&self, stream: &std::sync::Arc<CudaStream>, measure: Measure<'_>) -> Result<()> {
        let (mut o, mut lse) = (self.buffers[3].clone(), self.sums.clone());
        let stream = Stream::Cuda(stream.clone());
        let mut workspace = Workspace::alloc(&stream, self.plan.workspace_bytes())?;
        measure(&mut || {
            let args = ForwardArgs::new(
                TensorRef::cuda(self.buffers[0].as_view(), self.q)?,
                TensorRef::cuda(self.buffers[1].as_view(), self.q)?,
                TensorRef::cuda(self.buffers[2].as_view(), self.q)?,
                TensorMut::cuda(o.as_view_mut(), self.q)?,
            );
            let args = args.lse(TensorMut::cuda(lse.as_view_mut(), self.lse)?);
            Ok(self.plan.run(&stream, &mut workspace, args)?)
        })
    }

    /// Those of Q, K, V and O, of the LSE, and of the workspace.
    fn addresses(&self) -> ([u64; 4], u64, u64) {
        let stream = &self.stream;
        let tensors = self.buffers.each_ref().map(|buffer| buffer.device_ptr(stream).0);
        (tensors, self.sums.device_ptr(stream).0, self.workspace.device_ptr(stream).0)
    }

    fn raw(&self, ordinal: usize) -> RawArgs {
        let (tensors, lse, workspace) = self.addresses();
        let place = Place::Cuda(ordinal);
        let args = RawArgs::new()
            .with(Slot::Lse, RawTensor::new(lse, DType::F32, place, self.lse))
            .with_workspace(workspace, self.workspace.len());
        let tensors = [Slot::Q, Slot::K, Slot::V, Slot::O].into_iter().zip(tensors);
        tensors.fold(args, |args, (slot, at)| args.with(slot, RawTensor::new(at, DType::BF16, place, self.q)))
    }

    /// The C ABI, its structs made once, as a C program would.
    fn c(&self, ordinal: usize, measure: Measure<'_>) -> Result<()> {
        let [batch, seqlen, heads, head_dim] = self.q.shape().map(|n| n as i64);
        let (ordinal, (tensors, lse, workspace)) = (ordinal as i32, self.addresses());
        let tensor = |address: u64, dtype, ndim, shape, stride| capi::hattn_tensor {
            struct_size: size_of::<capi::hattn_tensor>() as u32,
            abi_version: capi::HATTN_ABI_VERSION,
            data: address as *mut c_void,
            dtype,
            device: ordinal,
            ndim,
            reserved: 0,
            shape,
            stride,
        };
        let [q, k, v, o] =
            tensors.map(|at| tensor(at, capi::HATTN_BF16, 4, [batch, seqlen, heads, head_dim], self.q.stride()));
        let lse = tensor(lse, capi::HATTN_F32, 3, [batch, heads, seqlen, 0], [heads * seqlen, seqlen, 1, 0]);
        let problem = capi::hattn_forward_problem {
            struct_size: size_of::<capi::hattn_forward_problem>() as u32,
            abi_version: capi::HATTN_ABI_VERSION,
            dtype: capi::HATTN_BF16,
            mask: if self.plan.problem().mask() == hopper_attention::Mask::Full {
                capi::HATTN_MASK_FULL
            } else {
                capi::HATTN_MASK_CAUSAL
            },
            corner: capi::HATTN_BOTTOM_RIGHT,
            lse: 1,
            batch,
            seqlen_q: seqlen,
            seqlen_kv: seqlen,
            heads_q: heads,
            heads_kv: heads,
            head_dim_qk: head_dim,
            head_dim_vo: head_dim,
            window_left: capi::HATTN_UNBOUNDED,
            window_right: capi::HATTN_UNBOUNDED,
            softmax_scale: 0.0,
            ..Default::default()
        };
        let mut plan = std::ptr::null_mut();
        // SAFETY: both are live structs.
        told(unsafe { capi::hattn_forward_plan_create(&problem, ordinal, &mut plan) })?;
        let args = capi::hattn_forward_args {
            struct_size: size_of::<capi::hattn_forward_args>() as u32,
            abi_version: capi::HATTN_ABI_VERSION,
            q: &q,
            k: &k,
            v: &v,
            o: &o,
            lse: &lse,
            workspace: workspace as *mut c_void,
            workspace_bytes: self.workspace.len(),
            ..Default::default()
        };
        let stream = self.stream.cu_stream();
        // SAFETY: a live plan; the buffers live as long as `self`, and the stream is waited for before that.
        let measured = measure(&mut || told(unsafe { capi::hattn_forward_run(plan, &args, stream.cast()) }));
        // SAFETY: made above, and used no more.
        unsafe { capi::hattn_forward_plan_destroy(plan) };
        measured
    }
}

fn told(status: capi::hattn_status) -> Result<()> {
    if status == capi::HATTN_OK {
        return Ok(());
    }
    // SAFETY: a string of this thread, valid until its next failure.
    let text = unsafe { CStr::from_ptr(capi::hattn_last_error()) };
    anyhow::bail!(text.to_string_lossy().into_owned())
}

/// A kernel that does nothing.
struct Launch<'a> {
    function: sys::CUfunction,
    stream: &'a CudaStream,
}

impl<'a> Launch<'a> {
    fn new(stream: &'a CudaStream) -> Result<Self> {
        const PTX: &CStr = c".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry nothing() { ret; }\n";
        // SAFETY: PTX, ended by a 0. The module is kept for the life of the process.
        let module = unsafe { result::module::load_data(PTX.as_ptr().cast()) }?;
        // SAFETY: a live module.
        let function = unsafe { result::module::get_function(module, c"nothing".to_owned()) }?;
        Ok(Self { function, stream })
    }

    /// The launch, after the memset that zeroes a counter where there is one.
    fn call(&self, counter: Option<&CudaSlice<u8>>) -> Result<()> {
        let stream = self.stream.cu_stream();
        if let Some(counter) = counter {
            // SAFETY: the counter has more than 4 bytes, and only this stream uses it.
            unsafe { sys::cuMemsetD8Async(counter.device_ptr(self.stream).0, 0, 4, stream) }.result()?;
        }
        let none = std::ptr::null_mut();
        // SAFETY: a kernel without parameters.
        unsafe { sys::cuLaunchKernel(self.function, 1, 1, 1, 128, 1, 1, 0, stream, none, none) }.result()?;
        Ok(())
    }
}
