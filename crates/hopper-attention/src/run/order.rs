//! The order of a run on a GPU among all other uses of its memory.
//!
//! cudarc keeps that order with two events for each allocation: its latest read and its latest write. A use waits for them,
//! and then records one of them. Four gaps of cudarc (0.19) are closed here:
//!
//! - *Two readers.* The second read overwrites the event of the first. So the stream of a run waits for the earlier read before
//!   it records its own. The new event then stands for both.
//! - *The last stream of `new_stream` is dropped.* From then on cudarc neither records events nor waits for them, though work
//!   may still run. What goes on without events is the default stream, and per-thread default streams. They wait for the run.
//! - *Per-thread default streams.* They are one handle, and a stream in each thread. Without events nothing orders these
//!   streams. The default stream orders them: it waits for all of them, and they wait for it.
//! - *Errors of other code* make cudarc leave out a wait or a record. So events are recorded here. Where a wait may be missing,
//!   the run waits for the whole context instead.

use std::sync::{Mutex, PoisonError};

use arrayvec::ArrayVec;
use cudarc::driver::sys::{self, CUevent_wait_flags};
use cudarc::driver::{CudaEvent, CudaStream, DriverError, result};

use crate::device::{driver, is_captured};
use crate::error::{Error, Result};
use crate::operand::MAX_OPERANDS;

/// The default stream of the current context, which orders all streams but those of `new_stream`.
const DEFAULT: sys::CUstream = std::ptr::null_mut();

/// What a stream's handle says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The default stream: null, or `CU_STREAM_LEGACY`.
    Default,
    /// `CU_STREAM_PER_THREAD`: a stream of the thread that uses the handle.
    PerThread,
    /// A stream that somebody made.
    Made,
}

impl Kind {
    fn of(handle: sys::CUstream) -> Self {
        match handle as usize {
            0 | 1 => Self::Default,
            2 => Self::PerThread,
            _ => Self::Made,
        }
    }
}

/// The uses of memory by one run.
pub(super) struct Order<'a> {
    stream: &'a CudaStream,
    /// Whether the library keeps the order. Otherwise the caller does, who has turned event tracking off, or replays a graph.
    keeps: bool,
    reads: ArrayVec<&'a CudaEvent, MAX_OPERANDS>,
    /// One more than the operands: the workspace.
    writes: ArrayVec<&'a CudaEvent, { MAX_OPERANDS + 1 }>,
    /// Whether a use of the memory may come that waits for no event.
    outlives_events: bool,
}

impl<'a> Order<'a> {
    /// The order of a run on this stream, whose context is current.
    pub fn on(stream: &'a CudaStream) -> Result<Self> {
        let context = stream.context();
        let is_managed = context.is_managing_stream_synchronization();
        let kind = Kind::of(stream.cu_stream());
        // On the default stream of a context without other streams nothing is to be done, and nothing is asked.
        let asks = context.is_event_tracking() && (is_managed || kind != Kind::Default);
        let is_captured = asks && is_captured(stream)?;
        if is_captured && is_managed {
            return Err(Error::Capture {
                got: "launching while cudarc tracks events".into(),
                allowed: "capturing with cudarc's event tracking off".into(),
            });
        }
        let (reads, writes) = (ArrayVec::new(), ArrayVec::new());
        let outlives_events = kind == Kind::PerThread;
        Ok(Self { stream, keeps: asks && !is_captured, reads, writes, outlives_events })
    }

    /// Adds memory that the run reads: the stream on which it was allocated, and the event of its latest read.
    pub fn read(&mut self, allocated_on: sys::CUstream, event: Option<&'a CudaEvent>) {
        self.reads.extend(event);
        self.add(allocated_on);
    }

    /// Adds memory that the run writes: the stream on which it was allocated, and the event of its latest write.
    pub fn write(&mut self, allocated_on: sys::CUstream, event: Option<&'a CudaEvent>) {
        self.writes.extend(event);
        self.add(allocated_on);
    }

    /// Memory keeps the stream on which it was allocated. If that is one of `new_stream`, cudarc's events last as long as the
    /// memory.
    fn add(&mut self, allocated_on: sys::CUstream) {
        let here = Kind::of(self.stream.cu_stream());
        self.outlives_events |= here == Kind::Made && Kind::of(allocated_on) != Kind::Made;
    }

    /// Makes the stream wait for what no event stands for. `is_certain` says that it waits for all events.
    ///
    /// An event of written memory serves as the event of the default stream: the run has that memory for itself.
    pub fn before(&self, is_certain: bool) -> Result<()> {
        if !is_certain {
            return result::ctx::synchronize().map_err(driver("waiting for earlier uses of the tensors"));
        }
        let context = self.stream.context();
        let without_events = self.keeps && !context.is_managing_stream_synchronization();
        match self.writes.first() {
            Some(event) if without_events && Kind::of(self.stream.cu_stream()) == Kind::PerThread => {
                let joined = record(event, DEFAULT).and_then(|()| wait(self.stream.cu_stream(), event));
                joined.map_err(driver("waiting for the default stream"))
            }
            _ => Ok(()),
        }
    }

    /// Makes later uses wait for the run. Must be called after a launch, even after one that failed.
    pub fn after(&self) -> Result<()> {
        if self.is_recorded().is_ok() {
            return Ok(());
        }
        // SAFETY: the `CudaStream` keeps the stream alive.
        let done = unsafe { result::stream::synchronize(self.stream.cu_stream()) };
        done.map_err(driver("waiting for a run that could not be recorded"))
    }

    fn is_recorded(&self) -> std::result::Result<(), DriverError> {
        let (context, stream) = (self.stream.context(), self.stream.cu_stream());
        // Asked anew: another thread may have made the context's second stream meanwhile. If it does so from here on,
        // `new_stream` waits for this run.
        let is_managed = context.is_managing_stream_synchronization();
        if is_managed && (self.keeps || !is_captured(self.stream).unwrap_or(true)) {
            // Before the waits below, so that who reads the outputs does not wait for other readers of the inputs.
            self.writes.iter().try_for_each(|event| record(event, stream))?;
            // Two threads that read the same memory would otherwise wait for the same event, and record it one after the other.
            static IN_TURN: Mutex<()> = Mutex::new(());
            let _turn = IN_TURN.lock().unwrap_or_else(PoisonError::into_inner);
            self.reads.iter().try_for_each(|event| wait(stream, event))?;
            self.reads.iter().try_for_each(|event| record(event, stream))?;
        }
        match self.writes.first() {
            Some(event) if self.keeps && self.outlives_events => {
                if !is_managed {
                    record(event, stream)?;
                }
                wait(DEFAULT, event)
            }
            _ => Ok(()),
        }
    }
}

fn record(event: &CudaEvent, stream: sys::CUstream) -> std::result::Result<(), DriverError> {
    // SAFETY: the borrow keeps the event alive. The stream is the run's, or the default stream of the current context.
    unsafe { result::event::record(event.cu_event(), stream) }
}

fn wait(stream: sys::CUstream, event: &CudaEvent) -> std::result::Result<(), DriverError> {
    // SAFETY: as in `record`.
    unsafe { result::stream::wait_event(stream, event.cu_event(), CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_handles_are_no_streams_that_somebody_made() {
        let kinds = [0, 1, 2, 3, 0x5581_0000_1000].map(|handle: usize| Kind::of(handle as sys::CUstream));
        assert_eq!(kinds, [Kind::Default, Kind::Default, Kind::PerThread, Kind::Made, Kind::Made]);
    }
}
