//! The calls on a GPU, all of them in one CUDA graph.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use hopper_attention::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use hopper_attention::cudarc::driver::{CudaContext, CudaGraph, CudaSlice, CudaStream};
use hopper_attention::{
    CudaDevice, Device, ForwardArgs, ForwardPlan, Layout, Stream, TensorMut, TensorRef, Workspace, bf16, kernels,
};

use crate::{Call, Outcome, PlanCache};

/// cudarc has no name for "no flags".
const NO_FLAGS: CUgraphInstantiate_flags = CUgraphInstantiate_flags(0);

/// The first GPU that runs a kernel of this build, if any. Opens nothing.
pub fn find() -> Option<usize> {
    let runs = |facts| kernels().iter().any(|row| row.runs_on(facts));
    Device::available().iter().find(|gpu| runs(&gpu.facts)).map(|gpu| gpu.ordinal)
}

/// A GPU as this stack uses it: one context, and one stream for everything.
pub struct Gpu {
    /// What plans are made for.
    pub device: CudaDevice,
    /// The stream. Not the default one, which cannot be captured.
    pub stream: Arc<CudaStream>,
}

impl Gpu {
    /// Opens a GPU's primary context, and makes the stream.
    ///
    /// # Errors
    /// When the driver does not give them.
    pub fn open(ordinal: usize) -> Result<Self> {
        let context = CudaContext::new(ordinal)?;
        // cudarc's events order uses of memory on several streams, and cannot go into a graph.
        // SAFETY: nothing here relies on them. All work on memory of this context object is put on the one stream made below
        // (uploads, calls, replays, downloads and frees), whose order is the order of the program.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream()?;
        Ok(Self { device: CudaDevice::from_context(context)?, stream })
    }
}

/// A call's tensors in device memory, at addresses that do not change.
struct Buffers {
    q: CudaSlice<bf16>,
    k: CudaSlice<bf16>,
    v: CudaSlice<bf16>,
    o: CudaSlice<bf16>,
    lse: CudaSlice<f32>,
}

impl Buffers {
    fn new(stream: &Arc<CudaStream>, call: &Call) -> Result<Self> {
        let problem = &call.problem;
        Ok(Self {
            q: stream.clone_htod(&call.q)?,
            k: stream.clone_htod(&call.k)?,
            v: stream.clone_htod(&call.v)?,
            o: stream.alloc_zeros(problem.o_shape().iter().product())?,
            lse: stream.alloc_zeros(problem.lse_shape().iter().product())?,
        })
    }

    fn args(&mut self, plan: &ForwardPlan) -> hopper_attention::Result<ForwardArgs<'_>> {
        let problem = plan.problem();
        let args = ForwardArgs::new(
            TensorRef::cuda(self.q.slice(..), Layout::contiguous(problem.q_shape())?)?,
            TensorRef::cuda(self.k.slice(..), Layout::contiguous(problem.k_shape())?)?,
            TensorRef::cuda(self.v.slice(..), Layout::contiguous(problem.v_shape())?)?,
            TensorMut::cuda(self.o.slice_mut(..), Layout::contiguous(problem.o_shape())?)?,
        );
        Ok(args.lse(TensorMut::cuda(self.lse.slice_mut(..), Layout::contiguous(problem.lse_shape())?)?))
    }
}

/// The attention calls of a model's step: their plans, their memory, and the graph of all of them.
///
/// The graph holds addresses and keeps nothing alive. So it lives in one value with what it points at, which nobody can
/// take out, and whose memory is freed on the same stream: after the last replay, however soon the value is dropped.
pub struct Step {
    graph: Option<CudaGraph>,
    plans: Vec<Arc<ForwardPlan>>,
    buffers: Vec<Buffers>,
    workspace: Workspace<'static>,
    stream: Arc<CudaStream>,
}

impl Step {
    /// Plans the calls and allocates all they need. From here on nothing is planned, loaded or allocated.
    ///
    /// # Errors
    /// What planning refuses, and what the driver says.
    pub fn new(gpu: &Gpu, cache: &PlanCache, calls: &[Call]) -> Result<Self> {
        let plans = calls.iter().map(|call| cache.plan(&call.problem)).collect::<hopper_attention::Result<Vec<_>>>()?;
        let buffers = calls.iter().map(|call| Buffers::new(&gpu.stream, call)).collect::<Result<Vec<_>>>()?;
        // The calls follow each other on the stream, so that one workspace serves them all.
        let largest = plans.iter().map(|plan| plan.workspace_bytes()).max().unwrap_or(0);
        let workspace = Workspace::alloc(&Stream::Cuda(gpu.stream.clone()), largest)?;
        Ok(Self { graph: None, plans, buffers, workspace, stream: gpu.stream.clone() })
    }

    /// Writes other inputs, of the same shapes, where the first ones were.
    ///
    /// # Errors
    /// When the calls are others, and what the driver says.
    pub fn write(&mut self, calls: &[Call]) -> Result<()> {
        let same = calls.iter().map(|call| &call.problem).eq(self.plans.iter().map(|plan| plan.problem()));
        ensure!(same, "the calls are not those that the step was made for");
        for (buffers, call) in self.buffers.iter_mut().zip(calls) {
            self.stream.memcpy_htod(&call.q, &mut buffers.q)?;
            self.stream.memcpy_htod(&call.k, &mut buffers.k)?;
            self.stream.memcpy_htod(&call.v, &mut buffers.v)?;
        }
        Ok(())
    }

    /// Enqueues the calls, one launch each.
    ///
    /// # Errors
    /// What a run refuses, and what the driver says.
    pub fn launch(&mut self) -> Result<()> {
        let lane = Stream::Cuda(self.stream.clone());
        for (plan, buffers) in self.plans.iter().zip(&mut self.buffers) {
            plan.run(&lane, &mut self.workspace, buffers.args(plan)?)?;
        }
        Ok(())
    }

    /// Records the calls in a graph, without computing them.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub fn capture(&mut self) -> Result<()> {
        // Of this thread alone: others may go on allocating.
        self.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        let launched = self.launch();
        // A capture is ended whatever happened in it, or the stream would be lost.
        let graph = self.stream.end_capture(NO_FLAGS);
        launched?;
        let graph = graph?.context("the capture recorded nothing")?;
        graph.upload()?;
        self.graph = Some(graph);
        Ok(())
    }

    /// Enqueues the whole graph: one launch for all calls, on whatever the buffers then hold.
    ///
    /// # Errors
    /// When nothing was captured, and what the driver says.
    pub fn replay(&mut self) -> Result<()> {
        Ok(self.graph.as_ref().context("capture comes before replay")?.launch()?)
    }

    /// Waits, and copies the outputs back.
    ///
    /// # Errors
    /// What the driver says, of the calls too.
    pub fn outcomes(&self) -> Result<Vec<Outcome>> {
        let copied = self.buffers.iter().map(|buffers| {
            Ok(Outcome { o: self.stream.clone_dtoh(&buffers.o)?, lse: self.stream.clone_dtoh(&buffers.lse)? })
        });
        let outcomes = copied.collect::<Result<Vec<_>>>()?;
        self.stream.synchronize()?;
        Ok(outcomes)
    }

    /// Zeroes the outputs.
    ///
    /// # Errors
    /// What the driver says.
    pub fn clear(&mut self) -> Result<()> {
        for buffers in &mut self.buffers {
            self.stream.memset_zeros(&mut buffers.o)?;
            self.stream.memset_zeros(&mut buffers.lse)?;
        }
        Ok(())
    }
}
