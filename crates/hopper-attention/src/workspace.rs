//! Scratch memory that the caller owns: [`Workspace`].

#[cfg(feature = "cuda")]
use cudarc::driver::{CudaSlice, CudaViewMut, DeviceSlice};

use crate::device::Stream;
#[cfg(feature = "cuda")]
use crate::device::{alloc_zeros, same_context};
use crate::error::{Error, Result};

/// Scratch memory for plans. The caller makes it once and lends it to every [`run`](crate::ForwardPlan::run).
///
/// A workspace may be larger than a plan needs, so one workspace of the largest size serves several plans.
/// [`alloc`](Self::alloc) is the only function of this crate that allocates device memory. [`host`](Self::host) and
/// [`cuda`](Self::cuda) use memory of the caller.
#[derive(Debug)]
pub struct Workspace<'a> {
    memory: Memory<'a>,
    bytes: usize,
}

/// The memory of a workspace. No code reads host memory here yet, because no CPU plan needs a workspace.
#[derive(Debug)]
enum Memory<'a> {
    /// 0 bytes, which serve every device.
    Nothing,
    Host(#[allow(dead_code, reason = "held for what will use it")] Vec<u8>),
    BorrowedHost(#[allow(dead_code, reason = "held for what will use it")] &'a mut [u8]),
    #[cfg(feature = "cuda")]
    Cuda(CudaSlice<u8>),
    #[cfg(feature = "cuda")]
    BorrowedCuda(CudaViewMut<'a, u8>),
}

impl Workspace<'static> {
    /// Allocates zeroed memory on the stream's device. With 0 bytes nothing is allocated, and the workspace serves every
    /// device.
    ///
    /// # Errors
    /// - [`Error::Memory`] when the host does not have that much memory.
    /// - [`Error::Driver`] when the GPU does not have that much memory.
    /// - [`Error::Capture`] while the stream is captured into a CUDA graph.
    pub fn alloc(stream: &Stream, bytes: usize) -> Result<Self> {
        let memory = match stream {
            _ if bytes == 0 => Memory::Nothing,
            Stream::Cpu => {
                let mut memory = Vec::new();
                let refuse = |_| Error::Memory { what: "a workspace", need: bytes };
                memory.try_reserve_exact(bytes).map_err(refuse)?;
                memory.resize(bytes, 0);
                Memory::Host(memory)
            }
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream) => Memory::Cuda(alloc_zeros(stream, bytes)?),
        };
        Ok(Self { memory, bytes })
    }
}

impl<'a> Workspace<'a> {
    /// A workspace in the caller's own host memory. Runs overwrite the contents.
    pub fn host(memory: &'a mut [u8]) -> Self {
        let bytes = memory.len();
        Self { memory: if bytes == 0 { Memory::Nothing } else { Memory::BorrowedHost(memory) }, bytes }
    }

    /// A workspace in the caller's own GPU memory, such as a part of a pool. Runs overwrite the contents.
    ///
    /// The memory must begin at a multiple of 16 bytes. [`run`](crate::ForwardPlan::run) checks that.
    #[cfg(feature = "cuda")]
    pub fn cuda(memory: CudaViewMut<'a, u8>) -> Self {
        let bytes = memory.len();
        Self { memory: if bytes == 0 { Memory::Nothing } else { Memory::BorrowedCuda(memory) }, bytes }
    }

    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The memory of a workspace on a GPU. `None` for a workspace on the host or of 0 bytes.
    #[cfg(feature = "cuda")]
    pub(crate) fn as_cuda(&mut self) -> Option<CudaViewMut<'_, u8>> {
        match &mut self.memory {
            Memory::Nothing | Memory::Host(_) | Memory::BorrowedHost(_) => None,
            Memory::Cuda(slice) => Some(slice.as_view_mut()),
            Memory::BorrowedCuda(view) => Some(view.slice_mut(..)),
        }
    }

    /// Refuses a workspace that is smaller than `need` bytes or in another place than `stream`.
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
        assert_eq!(error, Error::Memory { what: "a workspace", need: usize::MAX });
    }
}
