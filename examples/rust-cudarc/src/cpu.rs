//! The same calls in host memory.

use hopper_attention::{ForwardArgs, Layout, Result, TensorMut, TensorRef, Workspace, bf16};

use crate::{Call, Outcome, PlanCache};

/// Computes the calls one after another, with one workspace for all of them.
///
/// # Errors
/// What planning or running a call refuses.
pub fn run(cache: &PlanCache, calls: &[Call]) -> Result<Vec<Outcome>> {
    let stream = cache.device().default_stream();
    let plans = calls.iter().map(|call| cache.plan(&call.problem)).collect::<Result<Vec<_>>>()?;
    let largest = plans.iter().map(|plan| plan.workspace_bytes()).max().unwrap_or(0);
    let mut workspace = Workspace::alloc(&stream, largest)?;
    let mut outcomes = Vec::new();
    for (call, plan) in calls.iter().zip(plans) {
        let problem = &call.problem;
        let (o_layout, lse_layout) = (Layout::contiguous(problem.o_shape())?, Layout::contiguous(problem.lse_shape())?);
        let mut o = vec![bf16::NAN; o_layout.span()];
        let mut lse = vec![f32::NAN; lse_layout.span()];
        let args = ForwardArgs::new(
            TensorRef::host(&call.q, Layout::contiguous(problem.q_shape())?)?,
            TensorRef::host(&call.k, Layout::contiguous(problem.k_shape())?)?,
            TensorRef::host(&call.v, Layout::contiguous(problem.v_shape())?)?,
            TensorMut::host(&mut o, o_layout)?,
        );
        plan.run(&stream, &mut workspace, args.lse(TensorMut::host(&mut lse, lse_layout)?))?;
        outcomes.push(Outcome { o, lse });
    }
    Ok(outcomes)
}

#[cfg(test)]
mod tests {
    use hopper_attention::Device;

    use crate::{PlanCache, check, step};

    #[test]
    fn the_cpu_computes_the_step() {
        let cache = PlanCache::new(Device::cpu(), 8);
        let calls = step(1).unwrap();
        let mut outcomes = super::run(&cache, &calls).unwrap();
        for (call, outcome) in calls.iter().zip(&outcomes) {
            let report = check(call, outcome).unwrap();
            assert!(report.passed(), "{}: {report}", call.problem);
        }
        assert_eq!(cache.len(), 3, "two layers have one shape");
        // The check is able to fail.
        outcomes.swap(0, 1);
        assert!(!check(&calls[0], &outcomes[0]).unwrap().passed());
    }
}
