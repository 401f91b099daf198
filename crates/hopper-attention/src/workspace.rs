//! Scratch memory that the caller owns.

use crate::{Error, Result, Stream};

/// Scratch memory for plans, made once and lent to every [`run`](crate::ForwardPlan::run). It may be larger than a plan
/// needs, so that the largest of several plans decides. It is the only thing of this crate that allocates device memory.
#[derive(Debug)]
pub struct Workspace {
    memory: Memory,
    bytes: usize,
}

#[derive(Debug)]
enum Memory {
    /// Of no device, since there is nothing to be anywhere.
    Nothing,
    Host(#[allow(dead_code, reason = "held for what will use it")] Vec<u8>),
    #[cfg(feature = "cuda")]
    Cuda(cudarc::driver::CudaSlice<u8>),
}

impl Workspace {
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
                crate::views::refuse_capture(stream, "allocating a workspace", "allocating before the capture begins")?;
                Memory::Cuda(stream.alloc_zeros(bytes).map_err(crate::cuda::driver("allocating a workspace"))?)
            }
        };
        Ok(Self { memory, bytes })
    }

    /// How large it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its memory when it is on a GPU.
    #[cfg(feature = "cuda")]
    pub(crate) fn as_cuda(&mut self) -> Option<&mut cudarc::driver::CudaSlice<u8>> {
        match &mut self.memory {
            Memory::Nothing | Memory::Host(_) => None,
            Memory::Cuda(slice) => Some(slice),
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
            (Memory::Nothing, _) | (Memory::Host(_), Stream::Cpu) => Ok(()),
            #[cfg(feature = "cuda")]
            (Memory::Cuda(slice), Stream::Cuda(stream)) => {
                crate::views::same_context("workspace", slice.context(), stream)
            }
            #[cfg(feature = "cuda")]
            (Memory::Host(_), Stream::Cuda(_)) => Err(elsewhere("cpu".into())),
            #[cfg(feature = "cuda")]
            (Memory::Cuda(slice), Stream::Cpu) => Err(elsewhere(format!("cuda:{}", slice.ordinal()))),
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
    fn more_than_there_is_is_an_error() {
        let error = Workspace::alloc(&Stream::Cpu, usize::MAX).unwrap_err();
        assert!(matches!(error, Error::Workspace { need: usize::MAX, have: 0 }), "{error}");
    }
}
