//! Scratch memory that the caller owns.

#[cfg(feature = "cuda")]
use cudarc::driver::{CudaSlice, CudaViewMut, DeviceSlice};

use crate::device::Stream;
#[cfg(feature = "cuda")]
use crate::device::{driver, refuse_capture, same_context};
use crate::error::{Error, Result};

/// Scratch memory for plans, made once and lent to every [`run`](crate::ForwardPlan::run). It may be larger than a plan
/// needs, so that the largest of several plans decides. [`alloc`](Self::alloc) is the only thing of this crate that allocates
/// device memory; [`host`](Self::host) and [`cuda`](Self::cuda) use the caller's own.
#[derive(Debug)]
pub struct Workspace<'a> {
    memory: Memory<'a>,
    bytes: usize,
}

/// What a host workspace holds is not read: no CPU plan needs one yet.
#[derive(Debug)]
enum Memory<'a> {
    /// Of no device, since there is nothing to be anywhere.
    Nothing,
    Host(#[allow(dead_code, reason = "held for what will use it")] Vec<u8>),
    BorrowedHost(#[allow(dead_code, reason = "held for what will use it")] &'a mut [u8]),
    #[cfg(feature = "cuda")]
    Cuda(CudaSlice<u8>),
    #[cfg(feature = "cuda")]
    BorrowedCuda(CudaViewMut<'a, u8>),
}

impl Workspace<'static> {
    /// Zeroed memory on the stream's device. With 0 bytes nothing is allocated, and it serves every device.
    ///
    /// # Errors
    /// [`Error::Workspace`] when the host has not that much memory, [`Error::Driver`] when a GPU has not,
    /// [`Error::Capture`] while the stream is captured.
    pub fn alloc(stream: &Stream, bytes: usize) -> Result<Self> {
        let memory = match stream {
            _ if bytes == 0 => Memory::Nothing,
            Stream::Cpu => {
                let mut memory = Vec::new();
                memory.try_reserve_exact(bytes).map_err(|_| Error::Workspace { need: bytes, have: 0 })?;
                memory.resize(bytes, 0);
                Memory::Host(memory)
            }
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream) => {
                refuse_capture(stream, "allocating a workspace", "allocating before the capture begins")?;
                Memory::Cuda(stream.alloc_zeros(bytes).map_err(driver("allocating a workspace"))?)
            }
        };
        Ok(Self { memory, bytes })
    }
}

impl<'a> Workspace<'a> {
    /// The caller's own memory on the host. Its contents are overwritten.
    pub fn host(memory: &'a mut [u8]) -> Self {
        let bytes = memory.len();
        Self { memory: if bytes == 0 { Memory::Nothing } else { Memory::BorrowedHost(memory) }, bytes }
    }

    /// The caller's own memory on a GPU, such as a part of a pool. Its contents are overwritten. It must begin at a multiple of
    /// 16 bytes, which [`run`](crate::ForwardPlan::run) checks.
    #[cfg(feature = "cuda")]
    pub fn cuda(memory: CudaViewMut<'a, u8>) -> Self {
        let bytes = memory.len();
        Self { memory: if bytes == 0 { Memory::Nothing } else { Memory::BorrowedCuda(memory) }, bytes }
    }

    /// How large it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its memory when it is on a GPU.
    #[cfg(feature = "cuda")]
    pub(crate) fn as_cuda(&mut self) -> Option<CudaViewMut<'_, u8>> {
        match &mut self.memory {
            Memory::Nothing | Memory::Host(_) | Memory::BorrowedHost(_) => None,
            Memory::Cuda(slice) => Some(slice.as_view_mut()),
            Memory::BorrowedCuda(view) => Some(view.slice_mut(..)),
        }
    }

    /// Whether a plan that needs `need` bytes may use it on `stream`.
    pub(crate) fn check(&self, need: usize, stream: &Stream) -> Result<()> {
        if self.bytes < need {
            return Err(Error::Workspace { need, have: self.bytes });
        }
        #[cfg(feature = "cuda")]
        let elsewhere =
            |got: String| Error::Device { what: "workspace", got, allowed: format!("{stream}, the stream's") };
        match (&self.memory, stream) {
            (Memory::Nothing, _) | (Memory::Host(_) | Memory::BorrowedHost(_), Stream::Cpu) => Ok(()),
            #[cfg(feature = "cuda")]
            (Memory::Host(_) | Memory::BorrowedHost(_), Stream::Cuda(_)) => Err(elsewhere("cpu".into())),
            #[cfg(feature = "cuda")]
            (Memory::Cuda(slice), Stream::Cuda(stream)) => same_context("workspace", slice.context(), stream),
            #[cfg(feature = "cuda")]
            (Memory::Cuda(slice), Stream::Cpu) => Err(elsewhere(format!("cuda:{}", slice.ordinal()))),
            #[cfg(feature = "cuda")]
            (Memory::BorrowedCuda(view), Stream::Cuda(stream)) => {
                same_context("workspace", view.stream().context(), stream)
            }
            #[cfg(feature = "cuda")]
            (Memory::BorrowedCuda(view), Stream::Cpu) => {
                Err(elsewhere(format!("cuda:{}", view.stream().context().ordinal())))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workspace_is_large_enough_or_refused() {
        let workspace = Workspace::alloc(&Stream::Cpu, 16).unwrap();
        assert_eq!(workspace.bytes(), 16);
        assert!(workspace.check(16, &Stream::Cpu).is_ok());
        assert_eq!(workspace.check(17, &Stream::Cpu).unwrap_err(), Error::Workspace { need: 17, have: 16 });
        let nothing = Workspace::alloc(&Stream::Cpu, 0).unwrap();
        assert!(nothing.check(0, &Stream::Cpu).is_ok() && nothing.check(1, &Stream::Cpu).is_err());
    }

    #[test]
    fn the_callers_own_memory_serves_too() {
        let mut memory = [7u8; 16];
        let workspace = Workspace::host(&mut memory);
        assert_eq!(workspace.bytes(), 16);
        assert!(workspace.check(16, &Stream::Cpu).is_ok() && workspace.check(17, &Stream::Cpu).is_err());
        assert!(Workspace::host(&mut []).check(0, &Stream::Cpu).is_ok());
    }

    #[test]
    fn more_than_there_is_is_an_error() {
        let error = Workspace::alloc(&Stream::Cpu, usize::MAX).unwrap_err();
        assert!(matches!(error, Error::Workspace { need: usize::MAX, have: 0 }), "{error}");
    }
}
