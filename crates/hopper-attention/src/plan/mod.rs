//! From a problem to how it is computed: [`ForwardPlan`] and [`BackwardPlan`].

mod backward;
mod select;
mod tuning;

use std::fmt;

#[cfg(feature = "cuda")]
use crate::cuda::CudaDevice;
use crate::{Device, DeviceFacts, ForwardProblem, Result, Stream, kernels};

pub use backward::{BackwardChoice, BackwardPlan, select_backward};
#[cfg(feature = "cuda")]
pub(crate) use select::FALLBACK_COUNTER_OFFSET;
pub use select::{Choice, Fallback, candidates, mask_class, select};
pub use tuning::Tuning;

/// How one problem is computed on one device: made once, and run as often as wanted, from any thread and on any stream
/// of the device. It holds no device memory, and prints itself.
#[derive(Clone, Debug)]
pub struct ForwardPlan {
    problem: ForwardProblem,
    target: Target,
}

/// Where a plan is, with the choice that was made for a GPU.
#[derive(Clone, Debug)]
pub(crate) enum Target<C = Choice> {
    Cpu,
    Gpu(Gpu<C>),
}

/// A kernel, and the GPU it was loaded on.
#[derive(Clone, Debug)]
pub(crate) struct Gpu<C = Choice> {
    choice: C,
    /// `None` for a plan that was made from a GPU's facts alone.
    #[cfg(feature = "cuda")]
    pub device: Option<CudaDevice>,
}

impl<C> Gpu<C> {
    /// On a GPU, where the choice's kernels were loaded.
    #[cfg(feature = "cuda")]
    pub fn loaded(choice: C, device: CudaDevice) -> Self {
        Self { choice, device: Some(device) }
    }

    /// From a GPU's facts alone.
    pub fn described(choice: C) -> Self {
        Self {
            choice,
            #[cfg(feature = "cuda")]
            device: None,
        }
    }

    pub fn choice(&self) -> &C {
        &self.choice
    }

    /// `None` for a GPU that was only described.
    pub fn ordinal(&self) -> Option<usize> {
        #[cfg(feature = "cuda")]
        return self.device.as_ref().map(|device| device.info().ordinal);
        #[cfg(not(feature = "cuda"))]
        None
    }
}

impl ForwardProblem {
    /// Picks how the device computes this problem, and loads the kernel, so that a later run loads nothing.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) when the GPU has no kernel for it, with the nearest that it
    /// has; the CPU computes every problem that asks for no instruction set of a GPU. [`Error::Driver`](crate::Error::Driver) and
    /// [`Error::Launch`](crate::Error::Launch) when the kernel cannot be loaded.
    pub fn plan(&self, device: &Device) -> Result<ForwardPlan> {
        self.plan_tuned(device, &Tuning::default())
    }

    /// As [`plan`](Self::plan), but with the kernel that `tuning` holds for this problem on this card, where it holds one.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn plan_tuned(&self, device: &Device, tuning: &Tuning) -> Result<ForwardPlan> {
        let target = match device {
            Device::Cpu => select::cpu(self)?,
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                let info = device.info();
                return self.plan_chosen(device, tuning.select(self, &info.name, &info.facts, kernels())?);
            }
        };
        #[cfg(not(feature = "cuda"))]
        let _ = tuning; // the CPU has one way
        Ok(ForwardPlan { problem: self.clone(), target })
    }

    /// The plan with one row of [`kernels()`] in place of the one that [`plan`](Self::plan) picks: for tests and
    /// benches, which want every row to work.
    ///
    /// # Errors
    /// As [`plan`](Self::plan) on a GPU, when this row is not one that computes the problem.
    #[cfg(feature = "cuda")]
    pub fn plan_with_row(&self, device: &CudaDevice, row: &crate::KernelInfo) -> Result<ForwardPlan> {
        self.plan_chosen(device, select::select_row(self, &device.info().facts, row, kernels())?)
    }

    #[cfg(feature = "cuda")]
    fn plan_chosen(&self, device: &CudaDevice, choice: Choice) -> Result<ForwardPlan> {
        load(device, &choice.kernel)?;
        if let Some(fallback) = &choice.fallback {
            load(device, &fallback.kernel)?;
        }
        let target = Target::Gpu(Gpu::loaded(choice, device.clone()));
        Ok(ForwardPlan { problem: self.clone(), target })
    }

    /// The plan that [`plan`](Self::plan) makes on a GPU with these facts. It can be looked at and printed, and needs no
    /// GPU; running it is refused, since it was loaded nowhere.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) as for [`plan`](Self::plan).
    pub fn plan_for(&self, facts: &DeviceFacts) -> Result<ForwardPlan> {
        let choice = select(self, facts, kernels())?;
        Ok(ForwardPlan { problem: self.clone(), target: Target::Gpu(Gpu::described(choice)) })
    }
}

/// Loads a kernel on a GPU, and all that a run will ask the driver for.
#[cfg(feature = "cuda")]
fn load(device: &CudaDevice, kernel: &crate::KernelInfo) -> Result<()> {
    let _current = device.make_current()?;
    device.look_up_driver()?;
    crate::sys::prepare(kernel)
}

impl ForwardPlan {
    /// What it computes.
    pub fn problem(&self) -> &ForwardProblem {
        &self.problem
    }

    /// The kernel and its schedule; `None` on the CPU.
    pub fn choice(&self) -> Option<&Choice> {
        match &self.target {
            Target::Cpu => None,
            Target::Gpu(gpu) => Some(&gpu.choice),
        }
    }

    /// What a [`Workspace`](crate::Workspace) must hold, in bytes. Exact, and often 0.
    pub fn workspace_bytes(&self) -> usize {
        self.choice().map_or(0, Choice::workspace_bytes)
    }

    pub(crate) fn target(&self) -> &Target {
        &self.target
    }
}

impl<C> Target<C> {
    /// Whether a stream is of the place that the plan was made for, and a workspace is there and holds as many bytes.
    pub(crate) fn accept(&self, stream: &Stream, workspace: &crate::Workspace, bytes: usize) -> Result<()> {
        match (self, stream) {
            (Self::Cpu, Stream::Cpu) => {}
            #[cfg(feature = "cuda")]
            (Self::Gpu(gpu), Stream::Cuda(cuda)) => {
                let device = gpu.device.as_ref().ok_or_else(|| crate::raw::not_on_a_gpu(self))?;
                crate::views::same_gpu(device, cuda)?;
            }
            (target, stream) => {
                return Err(crate::Error::Device {
                    what: "stream",
                    got: stream.to_string(),
                    allowed: format!("{target}, which the plan was made for"),
                });
            }
        }
        workspace.check(bytes, stream)
    }
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

impl fmt::Display for ForwardPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.target {
            Target::Cpu => f.write_str("cpu, tiled online softmax")?,
            Target::Gpu(gpu) => write!(f, "{}", gpu.choice)?,
        }
        write!(f, ", workspace {} bytes", self.workspace_bytes())
    }
}

#[cfg(test)]
mod tests {
    use crate::{DType, Device, DeviceFacts, Dims, Error, ForwardProblem, kernels};

    fn problem() -> ForwardProblem {
        let dims =
            Dims { batch: 1, seqlen_q: 64, seqlen_kv: 64, heads_q: 2, heads_kv: 1, head_dim_qk: 64, head_dim_vo: 64 };
        ForwardProblem::new(DType::BF16, dims).unwrap()
    }

    #[test]
    fn the_cpu_takes_every_problem() {
        let plan = problem().plan(&Device::cpu()).unwrap();
        assert_eq!(plan.to_string(), "cpu, tiled online softmax, workspace 0 bytes");
        assert_eq!((plan.problem(), plan.choice()), (&problem(), None));
    }

    #[test]
    fn a_described_gpu_is_planned_for_with_the_kernels_of_the_build() {
        match problem().plan_for(&DeviceFacts::h100_sxm()) {
            Ok(plan) => assert!(kernels().contains(&plan.choice().unwrap().kernel)),
            Err(error) => assert!(matches!(error, Error::Unsupported { .. }) && kernels().is_empty(), "{error}"),
        }
    }
}
