//! Plans by shape.

use std::sync::{Arc, Mutex, PoisonError};

use hopper_attention::{Device, ForwardPlan, ForwardProblem, Result};

/// The plans of one device that were used last. Threads share it, and the plans that it gives.
///
/// A plan is small and holds no device memory, so that a bound on their number is there for programs whose lengths
/// never repeat, not for the sake of memory.
pub struct PlanCache {
    device: Device,
    capacity: usize,
    // A problem is all that a plan on one device is a function of, and comparing a few dozen is quicker than hashing one.
    // The one used last is at the end.
    plans: Mutex<Vec<(ForwardProblem, Arc<ForwardPlan>)>>,
}

impl PlanCache {
    /// An empty cache for a device, of at least one plan.
    pub fn new(device: Device, capacity: usize) -> Self {
        Self { device, capacity: capacity.max(1), plans: Mutex::default() }
    }

    /// The device that the plans are for.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// How many plans are kept.
    pub fn len(&self) -> usize {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether no plan has been asked for yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The plan for a problem, made now if it is not there. Making one loads its kernel, which must not happen while a
    /// stream is captured: ask for the plans of a graph before its capture begins.
    ///
    /// # Errors
    /// As [`ForwardProblem::plan`]; what was refused is asked for again the next time.
    pub fn plan(&self, problem: &ForwardProblem) -> Result<Arc<ForwardPlan>> {
        // Held while the plan is made, so that threads that come at once with one shape make one plan. The cache is whole
        // at every point where a panic could leave the lock.
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = plans.iter().position(|(known, _)| known == problem) {
            let found = plans.remove(at);
            let plan = found.1.clone();
            plans.push(found);
            return Ok(plan);
        }
        let plan = Arc::new(problem.plan(&self.device)?);
        if plans.len() == self.capacity {
            // Whoever runs it still holds it.
            plans.remove(0);
        }
        plans.push((problem.clone(), plan.clone()));
        Ok(plan)
    }
}

#[cfg(test)]
mod tests {
    use hopper_attention::{DType, Dims};

    use super::*;

    fn problem(seqlen_kv: usize) -> ForwardProblem {
        let dims = Dims { batch: 1, seqlen_q: 1, seqlen_kv, heads_q: 1, heads_kv: 1, head_dim_qk: 8, head_dim_vo: 8 };
        ForwardProblem::new(DType::F32, dims).unwrap()
    }

    #[test]
    fn a_problem_has_one_plan() {
        let cache = PlanCache::new(Device::cpu(), 4);
        let plans: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| cache.plan(&problem(3)).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(plans.iter().all(|plan| Arc::ptr_eq(plan, &plans[0])));
        assert!(!Arc::ptr_eq(&plans[0], &cache.plan(&problem(3).lse(true)).unwrap()));
        assert_eq!(cache.len(), 2);
    }

    #[test]
    fn the_one_not_used_for_longest_goes() {
        let cache = PlanCache::new(Device::cpu(), 2);
        let first = cache.plan(&problem(1)).unwrap();
        for seqlen_kv in [2, 1, 3] {
            cache.plan(&problem(seqlen_kv)).unwrap();
        }
        assert_eq!(cache.len(), 2);
        assert!(Arc::ptr_eq(&first, &cache.plan(&problem(1)).unwrap()), "the one used just now went");
    }
}
