//! Plans by shape.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hopper_attention::{Device, ForwardPlan, ForwardProblem, Result};
use lru::LruCache;

/// The plans of one device that were used last. Threads share it, and the plans that it gives.
///
/// A plan is small and holds no device memory, so that a bound on their number is there for programs whose lengths
/// never repeat, not for the sake of memory.
pub struct PlanCache {
    device: Device,
    // A problem is all that a plan on one device is a function of: it is the key.
    plans: Mutex<LruCache<ForwardProblem, Arc<ForwardPlan>>>,
}

impl PlanCache {
    /// An empty cache for a device, of at least one plan.
    pub fn new(device: Device, capacity: usize) -> Self {
        let capacity = NonZeroUsize::new(capacity).unwrap_or(NonZeroUsize::MIN);
        Self { device, plans: Mutex::new(LruCache::new(capacity)) }
    }

    /// The device that the plans are for.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// How many plans are kept.
    pub fn len(&self) -> usize {
        self.plans().len()
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
        // Held while the plan is made, so that threads that come at once with one shape make one plan.
        let mut plans = self.plans();
        plans.try_get_or_insert_ref(problem, || Ok(Arc::new(problem.plan(&self.device)?))).cloned()
    }

    /// The cache is whole at every point where a panic could leave the lock.
    fn plans(&self) -> MutexGuard<'_, LruCache<ForwardProblem, Arc<ForwardPlan>>> {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use hopper_attention::{DType, Dims};

    use super::*;

    fn problem(seqlen_kv: usize) -> ForwardProblem {
        ForwardProblem::builder(DType::F32, Dims::new(1, 1, 1, 8).with_seqlen_kv(seqlen_kv)).build().unwrap()
    }

    #[test]
    fn a_problem_has_one_plan() {
        let cache = PlanCache::new(Device::cpu(), 4);
        let plans: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| cache.plan(&problem(3)).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(plans.iter().all(|plan| Arc::ptr_eq(plan, &plans[0])));
        assert!(!Arc::ptr_eq(&plans[0], &cache.plan(&problem(3).to_builder().lse(true).build().unwrap()).unwrap()));
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
