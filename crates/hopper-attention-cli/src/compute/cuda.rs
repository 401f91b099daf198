//! A GPU's copies of tensors, and its time.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use hopper_attention::cudarc::driver::sys::CUevent_flags;
use hopper_attention::cudarc::driver::{CudaSlice, CudaStream};
use hopper_attention::{Args, Element, Layout, Operand, Slot, Stream, TensorRef};

use super::buffer::{Buffer, Memory};
use crate::args::FileLayout;
use crate::blocks::is_list;

/// A host tensor and its copy.
pub struct OnGpu<'h, T> {
    host: &'h mut [T],
    copy: CudaSlice<T>,
    stream: Arc<CudaStream>,
}

impl<'h, T: Element> OnGpu<'h, T> {
    /// Copies it to the GPU. An empty tensor has no memory there; one element stands in for it.
    pub fn new(host: &'h mut [T], stream: &Arc<CudaStream>) -> Result<Self> {
        let stand_in = [T::default()];
        let values = if host.is_empty() { &stand_in } else { &*host };
        let copy = stream.clone_htod(values).context("copying to the GPU")?;
        Ok(Self { host, copy, stream: stream.clone() })
    }
}

impl<T: Element> Buffer for OnGpu<'_, T> {
    fn lend<'a>(&'a mut self, args: Args<'a>, operand: &Operand, layout: FileLayout) -> Result<Args<'a>> {
        Memory::Cuda(&mut self.copy).lend(args, operand, layout)
    }

    fn fetch(&mut self) -> Result<()> {
        if self.host.is_empty() {
            return Ok(());
        }
        self.stream.memcpy_dtoh(&self.copy, &mut *self.host).context("copying from the GPU")
    }
}

/// Offsets or used lengths on the GPU. They were checked when the request was made.
pub struct ListOnGpu(CudaSlice<i32>);

impl ListOnGpu {
    /// Copies a list to the GPU.
    pub fn new(list: &[i32], stream: &Arc<CudaStream>) -> Result<Self> {
        let stand_in = [0];
        let list = if list.is_empty() { &stand_in } else { list };
        Ok(Self(stream.clone_htod(list).context("copying to the GPU")?))
    }
}

impl Buffer for ListOnGpu {
    fn lend<'a>(&'a mut self, args: Args<'a>, operand: &Operand, layout: FileLayout) -> Result<Args<'a>> {
        if is_list(operand.slot()) || operand.slot() == Slot::DropoutState {
            // Wrong contents of lists of blocks have a rule, and dropout takes any numbers. No memory outside of the tensors is
            // used.
            return Memory::Cuda(&mut self.0).lend(args, operand, layout);
        }
        let layout = Layout::contiguous([operand.shape().iter().product()])?;
        let list = TensorRef::cuda(self.0.slice(..), layout)?;
        // SAFETY: a request checks its lists (`Request::new`), and nothing writes to this copy.
        Ok(unsafe { args.lengths_unchecked(operand.slot(), list) })
    }

    fn fetch(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Runs once to warm up, then `repeat` times between events: the times.
pub fn times(
    stream: &Arc<CudaStream>,
    repeat: u32,
    run: &mut dyn FnMut() -> Result<Duration>,
) -> Result<Vec<Duration>> {
    run()?;
    let mut events = Vec::new();
    for _ in 0..repeat {
        let event = || stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).context("recording an event");
        let start = event()?;
        run()?;
        events.push((start, event()?));
    }
    Stream::Cuda(stream.clone()).synchronize()?;
    let elapsed = events.iter().map(|(start, end)| {
        let milliseconds = start.elapsed_ms(end).context("reading events")?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    });
    elapsed.collect()
}
