//! The whole grid through the CPU backend, under the tolerance.

use hopper_attention::{DType, Mask, bf16, f16};
use hopper_attention_tests::data::{Poison, Values};
use hopper_attention_tests::layouts::Placement;
use hopper_attention_tests::mutations::masks;
use hopper_attention_tests::problems::{Case, Grid, HEAD_DIMS, Tiles, cases, random, wide, wide_packed};
use hopper_attention_tests::runner::{Prepared, Ready, Runner, Verdict, catch_on_cpu, on_cpu};
use proptest::prelude::*;

/// The CPU backend's own blocks, and those of a typical kernel.
fn tiles() -> Tiles {
    Tiles { m: vec![64, 128], n: vec![128, 256] }
}

#[test]
fn every_case_keeps_the_tolerance() {
    let all = cases(Grid::from_env(), &tiles());
    // One type takes everything, the others every fifth case.
    let some: Vec<Case> = all.iter().step_by(5).cloned().collect();
    let mut runner = Runner::new(["cpu bf16", "cpu f16", "cpu f32"]);
    runner.take_cpu::<Prepared<bf16>>(0, &all);
    runner.take_cpu::<Prepared<f16>>(1, &some);
    // Scores of 100 are rounded to 2^-18 in f32, and so are exponents. The tolerance knows the rounding of one plain
    // computation, and that of another is up to 1.2 of the bound then. 16-bit types have larger errors of other kinds.
    let moderate: Vec<Case> = some
        .into_iter()
        .filter(|case| !matches!(case.values, Values::Sloped { first, last } if first == last))
        .collect();
    runner.take_cpu::<Prepared<f32>>(2, &moderate);
    runner.finish();
}

/// Head dims that no kernel takes are the CPU's too.
#[test]
fn any_head_dim() {
    let mut runner = Runner::new(["cpu bf16"]);
    let cases = HEAD_DIMS.map(|head_dim| Case::new(33, 70, head_dim, Mask::causal()));
    runner.take_cpu::<Prepared<bf16>>(0, &cases);
    runner.finish();
}

/// Head dims above those of kernels and pairs of them, dense and packed.
#[test]
fn wide_head_dims() {
    let mut runner = Runner::new(["cpu wide bf16", "cpu wide f16", "cpu wide f32"]);
    let all = [wide(), wide_packed()].concat();
    let some = |first| all.iter().skip(first).step_by(3).cloned().collect::<Vec<_>>();
    runner.take_cpu::<Prepared<bf16>>(0, &all);
    runner.take_cpu::<Prepared<f16>>(1, &some(0));
    runner.take_cpu::<Prepared<f32>>(2, &some(1));
    runner.finish();
}

/// By type: bf16, f16, f32.
const ON_CPU: [fn(&Case) -> Verdict; 3] = [on_cpu::<Prepared<bf16>>, on_cpu::<Prepared<f16>>, on_cpu::<Prepared<f32>>];

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.min(128), max_shrink_iters: 64, ..random::kept() })]
    #[test]
    fn random_cases_keep_the_tolerance(mut case in random::case_on_cpu(), dtype in 0..3usize) {
        // f32 and scores in the thousands: as above.
        if dtype == 2 && matches!(case.values, Values::Sloped { .. }) {
            case.scale = None;
        }
        let verdict = ON_CPU[dtype](&case);
        prop_assert!(verdict.wrong.is_none(), "{}: {}", case, verdict.wrong.unwrap_or_default());
    }
}

/// A broken kernel must fail the suite: every mutation of a correct result is caught, in every kind of case.
#[test]
fn broken_results_are_caught() {
    let cases = || {
        masks::ALL.into_iter().flat_map(|mask| {
            [
                Case::new(131, 200, 64, mask).heads(2, 4, 2),
                Case::new(300, 150, 128, mask),
                Case { values: Values::Offset, ..Case::new(131, 200, 64, mask) },
                Case::new(70, 1500, 64, mask),
            ]
        })
    };
    // The tolerance is no wider where head dims are larger.
    let wide = |mask| {
        let mut case = Case::new(70, 90, 512, mask).heads(2, 4, 2);
        case.dims.head_dim_vo = 136;
        case
    };
    catch_on_cpu::<Prepared<bf16>>(cases().chain(masks::ALL.map(wide)));
    catch_on_cpu::<Prepared<f16>>(cases());
    catch_on_cpu::<Prepared<f32>>(cases());
}

/// What watches the memory must itself be able to fail.
#[test]
fn guards_see_every_stray_write() {
    let case = Case { placement: Placement::BshdGaps, ..Case::new(5, 5, 8, Mask::Full) };
    let prepared = Prepared::<bf16>::new(&case);
    let outputs = prepared.on_cpu().unwrap();
    let honest = outputs.o.data().to_vec();
    for place in 0..honest.len() {
        let mut image = prepared.outputs().o;
        let mut data = honest.clone();
        // A write where there was none, or none where there was to be one.
        data[place] = if data[place].is_poison() { bf16::ONE } else { bf16::POISON };
        assert!(image.take_output(data).is_err(), "{place}");
    }
    let mut after = prepared.q.data().to_vec();
    after[3] = bf16::ZERO;
    assert!(prepared.q.check_unchanged(&after).is_err());
}

#[test]
#[should_panic(expected = "rows that took no case")]
fn a_row_without_cases_fails() {
    let mut runner = Runner::new(["busy", "idle"]);
    runner.take(0, &Case::new(1, 1, 8, Mask::Full), DType::BF16, Verdict::default());
    runner.finish();
}

#[test]
#[should_panic(expected = "cases failed")]
fn a_failed_case_fails() {
    let case = Case::new(2, 3, 8, Mask::Full);
    let prepared = Prepared::<f32>::new(&case);
    let mut outputs = prepared.on_cpu().unwrap();
    outputs.o.inner_mut().fill(0.0);
    let mut runner = Runner::new(["broken"]);
    runner.take(0, &case, DType::F32, prepared.verdict(&outputs));
    runner.finish();
}
