//! Attention sinks through the CPU backend, under the tolerance; and what the tolerance must notice.

use hopper_attention::reference::{self, BackwardPlain, Modifiers};
use hopper_attention::{BackwardProblem, DType, Lengths, Mask, Scaling, bf16, f16};
use hopper_attention_tests::backward;
use hopper_attention_tests::case::random;
use hopper_attention_tests::fp8::Operands;
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::runner::{Prepared, Runner, Verdict};
use hopper_attention_tests::sinks::{MISTAKES, Sinks, SinksImage, cases, packed_cases};
use rayon::prelude::*;

/// Every 23rd case, from this one on: 23 divides none of the numbers of sizes, masks and kinds, so that these have all of them.
/// The oracle takes too long for all cases here. The kernels' tests take them.
fn some(first: usize) -> Vec<Case> {
    let grid = Grid::from_env();
    [cases(grid), packed_cases(grid)].concat().into_iter().skip(first).step_by(23).collect()
}

#[test]
fn the_forward_keeps_the_tolerance() {
    Runner::all_on_cpu::<Prepared<f32>>("cpu f32", &some(0));
    Runner::all_on_cpu::<Prepared<bf16>>("cpu bf16", &some(1));
}

#[test]
fn the_backward_keeps_the_tolerance() {
    Runner::all_on_cpu::<backward::Prepared<f32>>("cpu f32 backward", &some(2));
    Runner::all_on_cpu::<backward::Prepared<f16>>("cpu f16 backward", &some(3));
}

#[test]
fn fp8_keeps_the_tolerance() {
    let scaled = |case: &Case| {
        let scaling = Scaling::ALL[case.seed as usize % 3];
        let problem = case.options(DType::E4M3).lse(true).scaling(scaling).build().unwrap();
        let operands = Operands::of_case(case, &problem, None);
        let (o, lse) = operands.run();
        Verdict::from(&operands.expected().check(&o, Some(&lse)).unwrap())
    };
    let mut runner = Runner::new(["cpu e4m3"]);
    let cases = some(4);
    let verdicts: Vec<_> = cases.par_iter().map(scaled).collect();
    for (case, verdict) in cases.iter().zip(verdicts) {
        runner.take(0, case, DType::E4M3, verdict);
    }
    runner.finish();
}

/// A kernel that takes another sink, of one head, fails: by O and by the LSE, and by the gradient of the sink.
#[test]
fn wrong_sinks_are_noticed() {
    for mask in [Mask::Full, Mask::causal(), Mask::window(Some(70), Some(9))] {
        let mut case = Case::new(197, 290, 64, mask).heads(2, 4, 2);
        case.sinks = Sinks::Normal;
        for seed in [4, 5] {
            case.seed = seed;
            noticed(&case);
        }
    }
}

fn noticed(case: &Case) {
    let prepared = Prepared::<bf16>::new(case);
    let of_gradients = backward::Prepared::<bf16>::new(case);
    let [q, k, v] = &prepared.tensors();
    let sinks = prepared.sinks.as_ref().map(SinksImage::values).unwrap();
    // A sink that is near 0 is much the same with the other sign: the one that is farthest from it is taken.
    let head = (0..sinks.len()).max_by(|&a, &b| sinks[a].abs().total_cmp(&sinks[b].abs())).unwrap();
    let problem = BackwardProblem::builder(&prepared.problem).d_lse(true).d_sinks(true).build().unwrap();
    let d_lse = of_gradients.d_lse.as_ref().map(hopper_attention_tests::data::Image::values);
    let inputs = [q, k, v, &of_gradients.d_o.tensor()];
    for (name, mistake) in MISTAKES {
        let mut wrong = sinks.clone();
        wrong[head] = mistake(sinks[head], f64::from(prepared.problem.softmax_scale()));
        let modifiers = Modifiers { sinks: Some(&wrong), ..Modifiers::default() };
        let lengths = Lengths::default();
        let plain = reference::forward_plain_with(&prepared.problem, &lengths, [q, k, v], modifiers).unwrap();
        let report = prepared.expected.check(&plain.o, Some(&plain.lse)).unwrap();
        assert!(!report.passed(), "{name}, {case}: {report}");
        let BackwardPlain { d_sinks, .. } =
            reference::backward_plain_with(&problem, &lengths, inputs, d_lse.as_deref(), modifiers).unwrap();
        let honest = of_gradients.expected.plain();
        let report = of_gradients.expected.check_with(&honest.d_q, &honest.d_k, &honest.d_v, &d_sinks).unwrap();
        assert!(!report.passed(), "dSink of a sink {name}, {case}: {report}");
    }
    let honest = of_gradients.expected.plain();
    let report = of_gradients.expected.check_with(&honest.d_q, &honest.d_k, &honest.d_v, &honest.d_sinks).unwrap();
    assert!(report.passed(), "{case}: {report}");
}

/// What `hattn fuzz` draws has sinks of every kind.
#[test]
fn random_cases_keep_the_tolerance() {
    use proptest::strategy::{Strategy as _, ValueTree as _};
    let mut runner = random::runner(hopper_attention_tests::problems::random::seed());
    let strategy = (random::case(128, 8), random::packing(), random::sinks());
    let drawn: Vec<_> = (0..Grid::from_env().pick(15, 30))
        .map(|_| {
            let (case, packing, sinks) = strategy.new_tree(&mut runner).unwrap().current();
            Case { sinks, ..random::packed(case, packing) }
        })
        .collect();
    Runner::all_on_cpu::<Prepared<bf16>>("cpu bf16", &drawn);
    Runner::all_on_cpu::<backward::Prepared<bf16>>("cpu bf16 backward", &drawn);
}
