//! Timings on a GPU: CUDA events around the call, with L2 emptied before it.

use std::sync::Arc;

use anyhow::Result;
use hopper_attention::cudarc::driver::sys::CUevent_flags;
use hopper_attention::cudarc::driver::{CudaEvent, CudaSlice, CudaStream};
use hopper_attention::{CudaDevice, ForwardArgs, Operand, Stream, TensorMut, TensorRef, Workspace};

use super::{Job, Place, Pool};

/// Several times any L2.
const EVICT_BYTES: usize = 256 << 20;

/// Device memory for the largest point, and what timing needs.
pub(super) struct Gpu<T> {
    stream: Arc<CudaStream>,
    start: CudaEvent,
    end: CudaEvent,
    evict: CudaSlice<u8>,
    q: CudaSlice<T>,
    k: CudaSlice<T>,
    v: CudaSlice<T>,
    o: CudaSlice<T>,
    lse: CudaSlice<f32>,
    workspace: Workspace,
}

impl<T: Operand<Out = T>> Gpu<T> {
    pub(super) fn new(gpu: &CudaDevice, pool: &Pool<T>) -> Result<Self> {
        let context = gpu.context();
        // The default stream: with one stream, cudarc records no events of its own into the timed region.
        let stream = context.default_stream();
        let event = || context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        Ok(Self {
            start: event()?,
            end: event()?,
            evict: stream.alloc_zeros(EVICT_BYTES)?,
            q: stream.clone_htod(&pool.q)?,
            k: stream.clone_htod(&pool.k)?,
            v: stream.clone_htod(&pool.v)?,
            o: stream.clone_htod(&[T::from_f32(f32::NAN)])?,
            lse: stream.clone_htod(&[f32::NAN])?,
            workspace: Workspace::alloc(&Stream::Cuda(stream.clone()), 0)?,
            stream,
        })
    }
}

impl<T: Operand<Out = T>> Place<T> for Gpu<T> {
    fn prepare(&mut self, job: &Job<'_>) -> Result<()> {
        let elements = job.point.elements(job.point.heads_q);
        self.o = self.stream.clone_htod(&vec![T::from_f32(f32::NAN); elements])?;
        self.lse = self.stream.clone_htod(&vec![f32::NAN; job.lse_elements()])?;
        self.workspace = Workspace::alloc(&Stream::Cuda(self.stream.clone()), job.plan.workspace_bytes())?;
        Ok(())
    }

    fn forward(&mut self, job: &Job<'_>) -> Result<f64> {
        self.stream.memset_zeros(&mut self.evict)?;
        let args = ForwardArgs::<T> {
            q: TensorRef::cuda(self.q.as_view(), job.q)?,
            k: TensorRef::cuda(self.k.as_view(), job.kv)?,
            v: TensorRef::cuda(self.v.as_view(), job.kv)?,
            o: TensorMut::cuda(self.o.as_view_mut(), job.q)?,
            lse: Some(TensorMut::cuda(self.lse.as_view_mut(), job.lse)?),
        };
        let stream = Stream::Cuda(self.stream.clone());
        self.start.record(&self.stream)?;
        job.plan.run(&stream, &mut self.workspace, args)?;
        self.end.record(&self.stream)?;
        Ok(f64::from(self.start.elapsed_ms(&self.end)?))
    }

    fn outputs(&mut self) -> Result<(Vec<T>, Vec<f32>)> {
        Ok((self.stream.clone_dtoh(&self.o)?, self.stream.clone_dtoh(&self.lse)?))
    }
}
