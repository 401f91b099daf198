//! How one device computes a forward pass: [`ForwardPlan`].

use std::fmt;

use super::fitting;
use super::select::{Choice, select};
use super::target::{Planned, Target};
use super::tuning::Tuning;
use crate::arch::DeviceFacts;
#[cfg(feature = "cuda")]
use crate::device::CudaDevice;
use crate::device::Device;
use crate::error::Result;
use crate::operand::Operands;
use crate::problem::ForwardProblem;
#[cfg(feature = "cuda")]
use crate::sys;
use crate::table::{KernelInfo, kernels};
#[cfg(feature = "cuda")]
use crate::{arch::Pass, plan::key_shares::Sharing, plan::select::select_row};

/// How one device computes one forward problem.
///
/// A plan is made once and run any number of times, from any thread and on any stream of the device. It holds no device
/// memory. Printed, it names the kernel and the schedule.
#[derive(Clone, Debug)]
pub struct ForwardPlan {
    problem: ForwardProblem,
    planned: Planned<Choice>,
}

impl ForwardProblem {
    /// Makes the plan for a device. On a GPU it chooses the kernel and loads it, so that a later run loads nothing.
    ///
    /// # Errors
    /// - [`Error::Unsupported`](crate::Error::Unsupported): the GPU has no kernel for the problem. The error names the nearest
    ///   that the GPU has. The CPU refuses only a problem that asks for a GPU's instruction set.
    /// - [`Error::Value`](crate::Error::Value): the problem's `sm_margin` leaves no multiprocessor of the GPU, or its `workspace_limit` is
    ///   below what the plan needs without cut tiles.
    /// - [`Error::Driver`](crate::Error::Driver) or [`Error::Launch`](crate::Error::Launch): the kernel cannot be loaded.
    pub fn plan(&self, device: &Device) -> Result<ForwardPlan> {
        self.plan_tuned(device, &Tuning::default())
    }

    /// As [`plan`](Self::plan), but takes the kernel that `tuning` has for this problem on this GPU, if it has one.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn plan_tuned(&self, device: &Device, tuning: &Tuning) -> Result<ForwardPlan> {
        #[cfg(not(feature = "cuda"))]
        let _ = tuning; // The CPU has one way to compute a problem.
        match device {
            Device::Cpu => Ok(self.planned(fitting::cpu(self)?)),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                let info = device.info();
                self.plan_chosen(device, tuning.select(self, &info.name, &info.facts, kernels())?)
            }
        }
    }

    /// As [`plan`](Self::plan), but takes this row of [`kernels()`]. For tests and benches, which run every row.
    ///
    /// # Errors
    /// As [`plan`](Self::plan) on a GPU that has no other kernel than this row. Also [`Error::Value`](crate::Error::Value): the
    /// row is not one of [`kernels()`].
    #[cfg(feature = "cuda")]
    pub fn plan_with_row(&self, device: &CudaDevice, row: &KernelInfo) -> Result<ForwardPlan> {
        self.plan_chosen(device, select_row(self, &device.info().facts, row, None, kernels())?)
    }

    /// As [`plan_with_row`](Self::plan_with_row), with so many shares of a tile in so many clusters, where the row's tiles can be shared.
    #[cfg(feature = "cuda")]
    pub(crate) fn plan_with_shares(
        &self,
        device: &CudaDevice,
        row: &KernelInfo,
        shares: usize,
        splits: usize,
    ) -> Result<ForwardPlan> {
        let sharing = Sharing { shares, splits };
        self.plan_chosen(device, select_row(self, &device.info().facts, row, Some(sharing), kernels())?)
    }

    #[cfg(feature = "cuda")]
    fn plan_chosen(&self, device: &CudaDevice, choice: Choice) -> Result<ForwardPlan> {
        let prepare = |choice: &Choice| {
            let kernels = [Some(&choice.kernel), choice.fallback.as_ref().map(|fallback| &fallback.kernel)];
            kernels.into_iter().flatten().try_for_each(|kernel| {
                fitting::check_row(kernel, Pass::Forward)?;
                sys::prepare(kernel.pass, kernel.row, kernel)
            })
        };
        Ok(self.planned(Target::loaded(choice, device, prepare)?))
    }

    /// The plan that [`plan`](Self::plan) makes on a GPU with these facts. This needs no GPU.
    ///
    /// The plan can be inspected and printed. It cannot be run, because its kernel was not loaded.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) and [`Error::Value`](crate::Error::Value), as [`plan`](Self::plan).
    pub fn plan_for(&self, facts: &DeviceFacts) -> Result<ForwardPlan> {
        Ok(self.planned(Target::described(select(self, facts, kernels())?)))
    }

    fn planned(&self, target: Target<Choice>) -> ForwardPlan {
        let planned = Planned::new(target, self.operands(), Choice::workspace_bytes);
        ForwardPlan { problem: self.clone(), planned }
    }
}

impl ForwardPlan {
    /// The problem that the plan computes.
    pub fn problem(&self) -> &ForwardProblem {
        &self.problem
    }

    /// The tensors that a run reads and writes.
    pub fn operands(&self) -> &Operands {
        &self.planned.operands
    }

    /// The kernel. `None` on the CPU.
    pub fn kernel(&self) -> Option<&KernelInfo> {
        self.choice().map(|choice| &choice.kernel)
    }

    /// The kernel and its schedule. `None` on the CPU.
    pub(crate) fn choice(&self) -> Option<&Choice> {
        self.planned.target.choice()
    }

    /// The size of the [`Workspace`](crate::Workspace) that a run needs, in bytes. It is exact, and often 0.
    ///
    /// On a GPU, with packed sequences or used lengths: 32, 48 for each sequence, and 4 for each tile of `tile_m` queries that a head
    /// can have. Above 1024 sequences 48 more for each.
    pub fn workspace_bytes(&self) -> usize {
        self.planned.workspace_bytes
    }

    pub(crate) fn planned(&self) -> &Planned<Choice> {
        &self.planned
    }
}

impl fmt::Display for ForwardPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.choice() {
            None => f.write_str("cpu, tiled online softmax")?,
            Some(choice) => write!(f, "{choice}")?,
        }
        write!(f, ", workspace {} bytes", self.workspace_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::error::Error;
    use crate::problem::Dims;

    fn problem() -> ForwardProblem {
        ForwardProblem::builder(DType::BF16, Dims::new(1, 64, 2, 64).with_heads_kv(1)).build().unwrap()
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
