//! From a backward problem to how it is computed: [`BackwardPlan`].

use std::fmt;

use super::Target;
use crate::{BackwardProblem, Device, DeviceFacts, Error, Result};

/// How the gradients of one problem are computed on one device: made once, and run as often as wanted, from any thread.
/// It holds no memory, and prints itself.
#[derive(Clone, Debug)]
pub struct BackwardPlan {
    problem: BackwardProblem,
}

impl BackwardProblem {
    /// Picks how the device computes this problem.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on a GPU, which has no kernel for it yet; the CPU computes every problem.
    pub fn plan(&self, device: &Device) -> Result<BackwardPlan> {
        match device {
            Device::Cpu => Ok(BackwardPlan { problem: self.clone() }),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => self.plan_for(&device.info().facts),
        }
    }

    /// The plan that [`plan`](Self::plan) makes on a GPU with these facts.
    ///
    /// # Errors
    /// [`Error::Unsupported`] as for [`plan`](Self::plan).
    pub fn plan_for(&self, facts: &DeviceFacts) -> Result<BackwardPlan> {
        let wanted = format!("the backward pass on a GPU of {}", facts.arch);
        Err(Error::Unsupported { wanted, nearest: "Device::cpu()".into() })
    }
}

impl BackwardPlan {
    /// What it computes.
    pub fn problem(&self) -> &BackwardProblem {
        &self.problem
    }

    /// What a [`Workspace`](crate::Workspace) must hold, in bytes. Exact.
    pub fn workspace_bytes(&self) -> usize {
        0
    }

    pub(crate) fn target(&self) -> &Target {
        &Target::Cpu
    }
}

impl fmt::Display for BackwardPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cpu, tiled recomputation in two passes, workspace {} bytes", self.workspace_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Dims, ForwardProblem, Mask};

    const DIMS: Dims =
        Dims { batch: 1, seqlen_q: 64, seqlen_kv: 64, heads_q: 2, heads_kv: 1, head_dim_qk: 64, head_dim_vo: 64 };

    #[test]
    fn the_cpu_takes_every_problem() {
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            let forward = ForwardProblem::new(dtype, DIMS).unwrap().mask(Mask::causal());
            let problem = BackwardProblem::of(&forward).d_lse(true).deterministic(true);
            let plan = problem.plan(&Device::cpu()).unwrap();
            assert_eq!(plan.to_string(), "cpu, tiled recomputation in two passes, workspace 0 bytes");
            assert_eq!((plan.problem(), plan.workspace_bytes()), (&problem, 0));
        }
    }

    #[test]
    fn a_gpu_is_refused_by_name() {
        let problem = BackwardProblem::of(&ForwardProblem::new(DType::BF16, DIMS).unwrap());
        let error = problem.plan_for(&DeviceFacts::h100_sxm()).unwrap_err();
        assert_eq!(error.to_string(), "unsupported: the backward pass on a GPU of sm_90; nearest: Device::cpu()");
    }
}
