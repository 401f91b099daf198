//! The device that a plan was made for, and what the plan holds for it.

use std::fmt;

#[cfg(feature = "cuda")]
use crate::device::CudaDevice;
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::operand::Operands;
use crate::workspace::Workspace;

/// What every plan holds besides its problem. `C` is the pass's choice for a GPU: the kernels and their schedule.
#[derive(Clone, Debug)]
pub(crate) struct Planned<C> {
    pub target: Target<C>,
    /// The tensors that a run reads and writes.
    pub operands: Operands,
    /// The workspace that a run needs, in bytes.
    pub workspace_bytes: usize,
}

/// The device that a plan was made for, with the choice if the device is a GPU.
#[derive(Clone, Debug)]
pub(crate) enum Target<C> {
    Cpu,
    Gpu(Gpu<C>),
}

/// A choice of kernels, and the GPU on which they were loaded.
#[derive(Clone, Debug)]
pub(crate) struct Gpu<C> {
    pub choice: C,
    /// `None` for a plan that was made from a GPU's facts alone (`plan_for`).
    #[cfg(feature = "cuda")]
    pub device: Option<CudaDevice>,
}

impl<C> Gpu<C> {
    /// The GPU's ordinal. `None` for a plan that was made from a GPU's facts alone.
    pub fn ordinal(&self) -> Option<usize> {
        #[cfg(feature = "cuda")]
        return self.device.as_ref().map(|device| device.info().ordinal);
        #[cfg(not(feature = "cuda"))]
        None
    }
}

impl<C> Target<C> {
    /// The target of a plan that is made from a GPU's facts alone. Nothing is loaded.
    pub fn described(choice: C) -> Self {
        Self::Gpu(Gpu {
            choice,
            #[cfg(feature = "cuda")]
            device: None,
        })
    }

    /// The target of a plan on a GPU. `prepare` loads the choice's kernels, so that a run loads nothing.
    #[cfg(feature = "cuda")]
    pub fn loaded(choice: C, device: &CudaDevice, prepare: impl FnOnce(&C) -> Result<()>) -> Result<Self> {
        let _current = device.make_current()?;
        device.look_up_driver()?;
        prepare(&choice)?;
        Ok(Self::Gpu(Gpu { choice, device: Some(device.clone()) }))
    }

    /// The choice for a GPU. `None` on the CPU.
    pub fn choice(&self) -> Option<&C> {
        match self {
            Self::Cpu => None,
            Self::Gpu(gpu) => Some(&gpu.choice),
        }
    }
}

impl<C> Planned<C> {
    /// `workspace_bytes` gives the size of the workspace that a choice for a GPU needs. The CPU needs none.
    pub fn new(target: Target<C>, operands: Operands, workspace_bytes: impl FnOnce(&C) -> usize) -> Self {
        let workspace_bytes = target.choice().map_or(0, workspace_bytes);
        Self { target, operands, workspace_bytes }
    }

    /// Refuses a stream that is not on the plan's device, and a workspace that is in another place or too small.
    pub fn accept(&self, stream: &Stream, workspace: &Workspace<'_>) -> Result<()> {
        match (&self.target, stream) {
            (Target::Cpu, Stream::Cpu) => {}
            #[cfg(feature = "cuda")]
            (Target::Gpu(gpu), Stream::Cuda(cuda)) => {
                gpu.device.as_ref().ok_or_else(|| not_on_a_gpu(&self.target))?.check_context(cuda)?;
            }
            (target, stream) => {
                return Err(Error::Device {
                    what: "stream",
                    got: stream.to_string(),
                    allowed: format!("{target}, which the plan was made for"),
                });
            }
        }
        workspace.check(self.workspace_bytes, stream)
    }
}

/// The error for a run of a plan that was made from a GPU's facts alone.
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
