//! Where a plan was made for, and what it loaded there.

use std::fmt;

#[cfg(feature = "cuda")]
use crate::device::CudaDevice;
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::workspace::Workspace;

/// Where a plan is, with the choice that was made for a GPU.
#[derive(Clone, Debug)]
pub(crate) enum Target<C> {
    Cpu,
    Gpu(Gpu<C>),
}

/// A choice of kernels, and the GPU they were loaded on.
#[derive(Clone, Debug)]
pub(crate) struct Gpu<C> {
    pub choice: C,
    /// `None` for a plan that was made from a GPU's facts alone.
    #[cfg(feature = "cuda")]
    pub device: Option<CudaDevice>,
}

impl<C> Gpu<C> {
    /// `None` for a GPU that was only described.
    pub fn ordinal(&self) -> Option<usize> {
        #[cfg(feature = "cuda")]
        return self.device.as_ref().map(|device| device.info().ordinal);
        #[cfg(not(feature = "cuda"))]
        None
    }
}

impl<C> Target<C> {
    /// A GPU's facts alone: nothing is loaded.
    pub fn described(choice: C) -> Self {
        Self::Gpu(Gpu {
            choice,
            #[cfg(feature = "cuda")]
            device: None,
        })
    }

    /// A GPU, on which `prepare` loads the choice's kernels. A run loads nothing more.
    #[cfg(feature = "cuda")]
    pub fn loaded(choice: C, device: &CudaDevice, prepare: impl FnOnce(&C) -> Result<()>) -> Result<Self> {
        let _current = device.make_current()?;
        device.look_up_driver()?;
        prepare(&choice)?;
        Ok(Self::Gpu(Gpu { choice, device: Some(device.clone()) }))
    }

    /// The choice for a GPU; `None` on the CPU.
    pub fn choice(&self) -> Option<&C> {
        match self {
            Self::Cpu => None,
            Self::Gpu(gpu) => Some(&gpu.choice),
        }
    }

    /// Whether a stream is of the place that the plan was made for, and a workspace is there and holds as many bytes.
    pub fn accept(&self, stream: &Stream, workspace: &Workspace<'_>, bytes: usize) -> Result<()> {
        match (self, stream) {
            (Self::Cpu, Stream::Cpu) => {}
            #[cfg(feature = "cuda")]
            (Self::Gpu(gpu), Stream::Cuda(cuda)) => {
                gpu.device.as_ref().ok_or_else(|| not_on_a_gpu(self))?.check_context(cuda)?;
            }
            (target, stream) => {
                return Err(Error::Device {
                    what: "stream",
                    got: stream.to_string(),
                    allowed: format!("{target}, which the plan was made for"),
                });
            }
        }
        workspace.check(bytes, stream)
    }
}

/// Why a plan that was made from facts alone does not run.
pub(crate) fn not_on_a_gpu<C>(target: &Target<C>) -> Error {
    Error::Device { what: "plan", got: target.to_string(), allowed: "a plan that was made on a GPU".into() }
}

impl<C> fmt::Display for Target<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            #[cfg(feature = "cuda")]
            Self::Gpu(Gpu { device: Some(device), .. }) => write!(f, "{device}"),
            Self::Gpu(_) => f.write_str("a GPU that was only described"),
        }
    }
}
