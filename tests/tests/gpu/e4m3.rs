//! Cases through rows of e4m3 operands: what the tests of sinks and caps share.

use hopper_attention::internal::plan_with_shares;
use hopper_attention::reference::Expected;
use hopper_attention::{DType, ForwardPlan, ForwardProblem, KernelInfo, Scaling, Workspace, bf16};
use hopper_attention_tests::fp8::{Operands, Output, for_row};
use hopper_attention_tests::gpu::Gpu;
use hopper_attention_tests::gpu::fp8::{OnDevice, takes};
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::runner::{Runner, Verdict};
use rayon::prelude::*;

/// Takes the cases whose head dims e4m3 kernels have. Scalings take turns. `shares` says how many CTAs share a tile of the case of
/// a turn; `None`: it is not for this row.
///
/// The oracle takes long. There is one for scores in f32 and one for scores in f16, for all rows with such scores. Cases have
/// theirs at the same time, on all cores, and results are judged so too.
pub(crate) fn take_e4m3(
    gpu: &Gpu,
    rows: &[KernelInfo],
    cases: &[Case],
    what: &str,
    shares: impl Fn(usize, &KernelInfo) -> Option<usize>,
) {
    assert!(!rows.is_empty());
    let mut runner = Runner::new(rows);
    let problem_of =
        |case: &Case, scaling| case.options(DType::E4M3).lse(true).amax(true).scaling(scaling).build().unwrap();
    let planned: Vec<_> = cases
        .iter()
        .enumerate()
        .filter(|(_, case)| takes(&problem_of(case, Scaling::ALL[0])))
        .map(|(turn, case)| {
            let problem = problem_of(case, Scaling::ALL[turn % 3]);
            let plan = |(i, row)| {
                let problem = for_row(problem.clone(), row);
                let plan = plan_with_shares(&problem, &gpu.device, row, shares(turn, row)?).ok()?;
                Some((i, problem, plan))
            };
            (case, rows.iter().enumerate().filter_map(plan).collect::<Vec<_>>())
        })
        .collect();
    // A few cases at a time: what is expected of all would be gigabytes.
    for some in planned.chunks(32) {
        let prepare = |(case, plans): &(&Case, Vec<(usize, ForwardProblem, ForwardPlan)>)| {
            [false, true].map(|half| {
                let (_, problem, _) = plans.iter().find(|(_, problem, _)| problem.allows_half_scores() == half)?;
                let operands = Operands::of_case(case, problem, None);
                let expected = operands.expected();
                Some((operands, expected))
            })
        };
        let prepared: Vec<_> = some.par_iter().map(prepare).collect();
        let mut outputs = Vec::new();
        for ((case, plans), prepared) in some.iter().zip(&prepared) {
            for (i, problem, plan) in plans {
                let half = usize::from(problem.allows_half_scores());
                let (operands, expected) = prepared[half].as_ref().expect("prepared for each kind of scores");
                let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
                let on_device = OnDevice::new(&gpu.stream, operands);
                let written = on_device.run::<bf16>(&gpu.stream, &mut workspace, plan, None);
                outputs.push((*i, *case, expected, written.map(|written| written.output(problem))));
            }
        }
        let judge = |(i, case, expected, output): (usize, &Case, &Expected, Result<Output, String>)| {
            let judged = output.map(|(o, lse)| Verdict::from(&expected.check(&o, Some(&lse)).unwrap()));
            (i, case.clone(), judged.unwrap_or_else(Verdict::failed))
        };
        let verdicts: Vec<_> = outputs.into_par_iter().map(judge).collect();
        verdicts.into_iter().for_each(|(i, case, verdict)| runner.take(i, &case, DType::E4M3, verdict));
    }
    runner.record(what, Grid::from_env(), &gpu.card(), &gpu.driver());
    runner.finish();
}
