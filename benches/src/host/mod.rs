//! What our calls cost on the host: a stack that launches thousands of kernels a second pays it each time.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::Result;
use hopper_attention::Device;
use serde::{Deserialize, Serialize};

use crate::{Direction, HeadDims, Point, Precision, quantile};

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod cupti;

#[cfg(feature = "cuda")]
pub use cuda::on_gpu;

/// Calls of each kind that are timed.
const CALLS: usize = 400;

/// The host's side of a machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostCost {
    /// What was measured.
    pub calls: Vec<HostCall>,
    /// What could not be, and how the rest was.
    pub notes: Vec<String>,
}

/// One kind of call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostCall {
    /// `plan`, `run` (safe API), `run_raw`, `hattn_forward_run` (C ABI), `launch` (the same number of bare launches), or
    /// `run_with_events` (safe API, on a stream of `new_stream`, for which cudarc keeps events).
    pub what: String,
    /// The problem, as a point's name.
    pub problem: String,
    /// Quartiles, in microseconds.
    pub us: [f64; 3],
    /// Calls of the driver that one such call makes, by name, where they could be counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_calls: Option<BTreeMap<String, f64>>,
}

impl HostCost {
    /// The median of a kind of call, in microseconds.
    pub fn median(&self, what: &str, problem: &str) -> Option<f64> {
        self.calls.iter().find(|call| call.what == what && call.problem == problem).map(|call| call.us[1])
    }

    /// The problems, each once.
    pub fn problems(&self) -> Vec<&str> {
        let mut problems: Vec<&str> = self.calls.iter().map(|call| call.problem.as_str()).collect();
        problems.dedup();
        problems
    }
}

/// Short enough that the GPU keeps up with the host; causal problems need a counter set to zero before the kernel.
fn problems() -> [Point; 2] {
    let (kind, head_dims) = ((Direction::Fwd, Precision::Bf16), HeadDims { qk: 128, vo: 128 });
    [false, true].map(|causal| Point { causal, ..Point::plain(kind, [4, 4], head_dims, [1, 128]) })
}

/// Times calls, waiting with `drain` every few of them so that no queue fills.
fn quartiles(mut call: impl FnMut() -> Result<()>, mut drain: impl FnMut() -> Result<()>) -> Result<[f64; 3]> {
    let mut us = Vec::with_capacity(CALLS);
    for i in 0..CALLS + CALLS / 4 {
        if i % 16 == 0 {
            drain()?;
        }
        let start = Instant::now();
        call()?;
        let took = start.elapsed().as_secs_f64() * 1e6;
        if i >= CALLS / 4 {
            us.push(took);
        }
    }
    drain()?;
    Ok([0.25, 0.5, 0.75].map(|q| quantile(&us, q).unwrap_or(f64::NAN)))
}

/// On the CPU a run is the computation itself: only planning is the host's.
///
/// # Errors
/// When planning fails.
pub fn on_cpu() -> Result<HostCost> {
    let calls = problems().into_iter().map(|point| {
        let problem = point.problem()?;
        let plan = || {
            std::hint::black_box(problem.plan(&Device::cpu())?);
            Ok(())
        };
        Ok(HostCall {
            what: "plan".into(),
            problem: point.to_string(),
            us: quartiles(plan, || Ok(()))?,
            driver_calls: None,
        })
    });
    Ok(HostCost {
        calls: calls.collect::<Result<_>>()?,
        notes: vec!["on the CPU a run is the computation itself: only plan is host cost".into()],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planning_on_the_cpu_is_measured() {
        let cost = on_cpu().unwrap();
        assert_eq!(cost.problems().len(), 2);
        for problem in cost.problems() {
            assert!(cost.median("plan", problem).is_some_and(|us| us > 0.0 && us < 1e6), "{cost:?}");
        }
        assert_eq!(cost.median("run", cost.problems()[0]), None);
    }

    #[test]
    fn the_queue_is_drained() {
        let (mut waiting, mut most) = (std::cell::Cell::new(0), 0);
        let us = quartiles(
            || {
                waiting.set(waiting.get() + 1);
                most = most.max(waiting.get());
                Ok(())
            },
            || {
                waiting.set(0);
                Ok(())
            },
        );
        assert!(us.is_ok_and(|[q1, median, q3]| q1 <= median && median <= q3));
        assert_eq!((most, *waiting.get_mut()), (16, 0));
    }
}
