//! The clock of a GPU: CUDA events around a call, with L2 emptied before it.

use std::sync::Arc;

use anyhow::Result;
use hopper_attention::cudarc::driver::sys::CUevent_flags;
use hopper_attention::cudarc::driver::{CudaEvent, CudaSlice, CudaStream};

use super::contest::{Clock, Refusal};

/// Several times any L2.
pub const EVICT_BYTES: usize = 256 << 20;

/// CUDA events around each call.
pub struct EventClock {
    stream: Arc<CudaStream>,
    evict: CudaSlice<u8>,
    spare: Vec<(CudaEvent, CudaEvent)>,
    pending: Vec<(CudaEvent, CudaEvent)>,
}

impl EventClock {
    /// On a stream.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn new(stream: Arc<CudaStream>) -> Result<Self> {
        Ok(Self { evict: stream.alloc_zeros(EVICT_BYTES)?, stream, spare: vec![], pending: vec![] })
    }

    /// Empties L2, then makes a call between two events.
    ///
    /// # Errors
    /// When the driver or the call fails.
    pub fn between<E: From<anyhow::Error>>(&mut self, call: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let event = || self.stream.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        let pair = match self.spare.pop() {
            Some(pair) => pair,
            None => (event().map_err(anyhow::Error::from)?, event().map_err(anyhow::Error::from)?),
        };
        self.stream.memset_zeros(&mut self.evict).map_err(anyhow::Error::from)?;
        pair.0.record(&self.stream).map_err(anyhow::Error::from)?;
        call()?;
        pair.1.record(&self.stream).map_err(anyhow::Error::from)?;
        self.pending.push(pair);
        Ok(())
    }

    /// Waits; the milliseconds of each call since the last time.
    ///
    /// # Errors
    /// When the work failed.
    pub fn elapsed(&mut self) -> Result<Vec<f64>> {
        self.stream.synchronize()?;
        let ms = self.pending.iter().map(|(start, end)| Ok(f64::from(start.elapsed_ms(end)?))).collect();
        self.spare.append(&mut self.pending);
        ms
    }
}

impl Clock for EventClock {
    fn time(&mut self, call: &mut dyn FnMut() -> Result<(), Refusal>) -> Result<(), Refusal> {
        self.between(call)
    }

    fn wait(&mut self) -> Result<Vec<f64>> {
        self.elapsed()
    }
}
