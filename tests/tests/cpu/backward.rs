//! The grid's backward passes through the CPU backend, under the tolerance.

use hopper_attention::{Mask, bf16, f16};
use hopper_attention_tests::backward::Prepared;
use hopper_attention_tests::data::Values;
use hopper_attention_tests::mutations::masks;
use hopper_attention_tests::problems::{Case, Grid, HEAD_DIMS, Tiles, cases, random, wide, wide_packed};
use hopper_attention_tests::runner::{Runner, Verdict, catch_on_cpu, on_cpu};
use proptest::prelude::*;

/// The CPU backend's own blocks, and those of a typical kernel.
fn tiles() -> Tiles {
    Tiles { m: vec![64, 128], n: vec![64, 256] }
}

/// The oracle of the gradients is what limits them: long cases are left out, and of the others one type takes every eleventh,
/// the others every 43rd.
#[test]
fn cases_keep_the_tolerance() {
    let cost = |case: &Case| case.dims.batch * case.dims.heads_q * case.dims.seqlen_q * case.dims.seqlen_kv;
    let all: Vec<Case> = cases(Grid::from_env(), &tiles()).into_iter().filter(|case| cost(case) < 250_000).collect();
    let mut runner = Runner::new(["cpu backward bf16", "cpu backward f16", "cpu backward f32"]);
    let some = |first, step| all.iter().skip(first).step_by(step).cloned().collect::<Vec<_>>();
    runner.take_cpu::<Prepared<bf16>>(0, &some(0, 11));
    runner.take_cpu::<Prepared<f16>>(1, &some(1, 43));
    runner.take_cpu::<Prepared<f32>>(2, &some(2, 43));
    runner.finish();
}

/// Few heads of K for many of Q, and sequences of many tiles. The grid's longest take too long here.
#[test]
fn wide_groups_of_long_sequences() {
    let case = |mask| Case::new(700, 777, 32, mask).heads(1, 8, 1);
    Runner::all_on_cpu::<Prepared<bf16>>("cpu backward", &[Mask::causal(), Mask::window(Some(200), Some(0))].map(case));
}

/// Head dims that no kernel takes are the CPU's too.
#[test]
fn any_head_dim() {
    let mut runner = Runner::new(["cpu backward bf16"]);
    let cases = HEAD_DIMS.map(|head_dim| Case::new(70, 33, head_dim, Mask::causal()));
    runner.take_cpu::<Prepared<bf16>>(0, &cases);
    runner.finish();
}

/// Head dims above those of kernels. The CPU's gradients take them, too.
#[test]
fn wide_head_dims() {
    let mut runner = Runner::new(["cpu backward wide bf16", "cpu backward wide f16", "cpu backward wide f32"]);
    let all = [wide(), wide_packed()].concat();
    let some = |first, step| all.iter().skip(first).step_by(step).cloned().collect::<Vec<_>>();
    runner.take_cpu::<Prepared<bf16>>(0, &some(0, 3));
    runner.take_cpu::<Prepared<f16>>(1, &some(1, 7));
    runner.take_cpu::<Prepared<f32>>(2, &some(2, 7));
    runner.finish();
}

/// By type: bf16, f16, f32.
const ON_CPU: [fn(&Case) -> Verdict; 3] = [on_cpu::<Prepared<bf16>>, on_cpu::<Prepared<f16>>, on_cpu::<Prepared<f32>>];

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.min(64), max_shrink_iters: 64, ..random::kept() })]
    #[test]
    fn random_cases_keep_the_tolerance(case in random::case(64, 8), dtype in 0..3usize) {
        let verdict = ON_CPU[dtype](&case);
        prop_assert!(verdict.wrong.is_none(), "{}: {}", case, verdict.wrong.unwrap_or_default());
    }
}

/// A broken kernel must fail the suite: every mutation of correct gradients is caught, in every kind of case.
#[test]
fn broken_gradients_are_caught() {
    let cases = || {
        masks::ALL.into_iter().flat_map(|mask| {
            [
                Case::new(131, 170, 64, mask).heads(1, 4, 2),
                Case::new(170, 90, 40, mask),
                Case { values: Values::Offset, ..Case::new(131, 170, 64, mask) },
            ]
        })
    };
    catch_on_cpu::<Prepared<bf16>>(cases());
    catch_on_cpu::<Prepared<f16>>(cases());
    catch_on_cpu::<Prepared<f32>>(cases());
}
