//! Where a plan was made for, and what it loaded there.

use std::fmt;

#[cfg(feature = "cuda")]
use crate::device::CudaDevice;
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::operand::Operands;
use crate::workspace::Workspace;

/// What every plan holds beside its problem.
#[derive(Clone, Debug)]
pub(crate) struct Planned<C> {
    pub target: Target<C>,
    /// What a run reads and writes.
    pub operands: Operands,
    /// What a run needs of a workspace.
    pub workspace_bytes: usize,
}

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
}

impl<C> Planned<C> {
    /// On a GPU a plan needs what the choice does; on the CPU it needs none.
    pub fn new(target: Target<C>, operands: Operands, workspace_bytes: impl FnOnce(&C) -> usize) -> Self {
        let workspace_bytes = target.choice().map_or(0, workspace_bytes);
        Self { target, operands, workspace_bytes }
    }

    /// Whether a stream is of the place that the plan was made for, and a workspace is there and large enough.
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
