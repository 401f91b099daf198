//! e4m3 operands through the CPU backend, under the tolerance; and what the tolerance must notice.

use hopper_attention::reference::Tensor;
use hopper_attention::{DType, E4M3, Element, ForwardProblemBuilder, Mask, Scaling};
use hopper_attention_tests::data::Input;
use hopper_attention_tests::fp8::{MUTATIONS, Operands, forget_dust};
use hopper_attention_tests::mutations::{self, Subject, masks};
use hopper_attention_tests::problems::{Case, Grid, Tiles, cases, wide, wide_packed};
use hopper_attention_tests::runner::{Runner, Verdict};
use rayon::prelude::*;

/// The problem of a case.
fn options(case: &Case, scaling: Scaling) -> ForwardProblemBuilder {
    case.options(DType::E4M3).lse(true).scaling(scaling)
}

fn operands(case: &Case, scaling: Scaling, hadamard: Option<u64>) -> Operands {
    Operands::of_case(case, &options(case, scaling).build().unwrap(), hadamard)
}

/// Cases on the CPU, with every scaling in turn.
fn keep_the_tolerance(cases: &[Case]) {
    let mut runner = Runner::new(Scaling::ALL.map(|scaling| format!("cpu e4m3 {scaling}")));
    let scalings = || Scaling::ALL.into_iter().enumerate().cycle();
    let verdicts: Vec<Verdict> = cases
        .par_iter()
        .zip(scalings().take(cases.len()).collect::<Vec<_>>())
        .map(|(case, (_, scaling))| {
            // Those of scores in f16 take turns with the others, out of step with the rotation.
            let problem = options(case, scaling).half_scores(case.seed % 4 > 1).build().unwrap();
            let operands = Operands::of_case(case, &problem, (case.seed % 2 == 1).then_some(case.seed));
            let (o, lse) = operands.run();
            Verdict::from(&operands.expected().check(&o, Some(&lse)).unwrap())
        })
        .collect();
    for ((case, (row, _)), verdict) in cases.iter().zip(scalings()).zip(verdicts) {
        runner.take(row, case, DType::E4M3, verdict);
    }
    runner.finish();
}

#[test]
fn every_case_keeps_the_tolerance() {
    let tiles = Tiles { m: vec![64, 128], n: vec![128] };
    // The grid is that of every type; what e4m3 has of its own are the factors.
    let some: Vec<Case> = cases(Grid::from_env(), &tiles).into_iter().step_by(7).collect();
    keep_the_tolerance(&some);
}

/// Head dims above those of kernels, which the quantiser and its rotation take too.
#[test]
fn wide_head_dims() {
    keep_the_tolerance(&[wide(), wide_packed()].concat());
}

/// Zeros have the smallest factors, whose product is 0: every key weighs the same, masked ones nothing.
#[test]
fn keys_of_zeros_weigh_the_same() {
    for (mask, scaling) in [Mask::Full, Mask::causal(), Mask::window(Some(150), Some(3))].into_iter().zip(Scaling::ALL)
    {
        let case = Case::new(300, 333, 64, mask).heads(2, 4, 2);
        let operands = Operands::of_zeros(&case, &options(&case, scaling).build().unwrap());
        let (o, lse) = operands.run();
        let report = operands.expected().check(&o, Some(&lse)).unwrap();
        assert!(report.passed(), "{mask} {scaling}: {report}");
        assert!(lse.iter().all(|lse| *lse <= 333.0_f64.ln() + 1e-6), "{mask} {scaling}: {lse:?}");
    }
}

/// Five powers of two less range for Q and K cost next to nothing: what was the same but for its exponent gives the same
/// bits, and what was too small for three bits moves a result by far less than quantising did.
#[test]
fn half_scores_are_as_accurate() {
    for (mask, scaling) in [Mask::Full, Mask::causal(), Mask::window(Some(150), Some(3))].into_iter().zip(Scaling::ALL)
    {
        let case = Case::new(200, 333, 64, mask).heads(1, 4, 2);
        let of = |half| {
            let problem = options(&case, scaling).half_scores(half).build().unwrap();
            let operands = Operands::of_case(&case, &problem, Some(5));
            let (o, lse) = operands.run();
            assert!(operands.expected().check(&o, Some(&lse)).unwrap().passed());
            (operands, o, lse)
        };
        let ((plain, plain_o, plain_lse), (half, half_o, half_lse)) = (of(false), of(true));
        let most = |codes: &[E4M3]| codes.iter().map(|x| Element::to_f32(*x).abs()).fold(0.0, f32::max);
        assert_eq!(half.stored().each_ref().map(|codes| most(codes)), [14.0, 14.0, 448.0]);
        assert_eq!(half.stored()[2], plain.stored()[2]);
        let same = |i: usize| {
            let codes = plain.stored()[i].iter().zip(&half.stored()[i]);
            let same = codes.filter(|(a, b)| Element::to_f32(**a) == 32.0 * Element::to_f32(**b)).count();
            same as f64 / plain.stored()[i].len() as f64
        };
        assert!(same(0) > 0.95 && same(1) > 0.95, "{} {}", same(0), same(1));
        let squares = |x: &Tensor| x.data().iter().map(|x| x * x).sum::<f64>();
        let apart = plain_o.data().iter().zip(half_o.data()).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
        assert!((apart / squares(&plain_o)).sqrt() < 0.02, "{mask} {scaling}");
        assert!(plain_lse.iter().zip(&half_lse).all(|(a, b)| a == b || (a - b).abs() < 0.02), "{mask} {scaling}");
    }
}

/// A broken kernel must fail the suite: every mutation of a correct result is caught, under every scaling.
#[test]
fn broken_results_are_caught() {
    let scalings = Scaling::ALL.into_iter().flat_map(|scaling| [(scaling, false), (scaling, true)]);
    let settings: Vec<(Case, Scaling, bool)> = masks::ALL
        .into_iter()
        .flat_map(|mask| [Case::new(200, 200, 64, mask).heads(3, 4, 2), Case::new(150, 300, 128, mask).heads(2, 4, 4)])
        .flat_map(|case| scalings.clone().map(move |(scaling, half)| (case.clone(), scaling, half)))
        .collect();
    let applied: Vec<Vec<&str>> = settings
        .par_iter()
        .with_max_len(1)
        .map(|(case, scaling, half)| {
            let problem = options(case, *scaling).half_scores(*half).build().unwrap();
            let operands = Operands::of_case(case, &problem, None);
            let expected = operands.expected();
            let (o, lse) = operands.run();
            let [q, k, v] = operands.real();
            let subject = Subject { problem: operands.problem(), q: &q, k: &k, v: &v, o: &o, lse: &lse };
            assert!(expected.check(&o, Some(&lse)).unwrap().passed());
            let caught = |name: &'static str, broken: Option<(Tensor, Vec<f64>)>| {
                let (o, lse) = broken?;
                let report = expected.check(&o, Some(&lse)).unwrap();
                assert!(!report.passed(), "not caught: {name}, {}, {case}: {report}", operands.problem());
                Some(name)
            };
            let of_all = mutations::ALL.iter().filter_map(|m| caught(m.name, (m.apply)(subject)));
            of_all.chain(MUTATIONS.iter().filter_map(|m| caught(m.name, (m.apply)(&operands)))).collect()
        })
        .collect();
    for name in mutations::ALL.iter().map(|m| m.name).chain(MUTATIONS.iter().map(|m| m.name)) {
        let applied = applied.iter().flatten().filter(|applied| **applied == name).count();
        assert!(applied >= 4, "{name} applied to {applied} cases only");
    }
}

/// What the output alone, without the log-sum-exp, gives away: zeros, another mask's result, V's factors.
#[test]
fn a_wrong_output_is_caught_without_the_lse() {
    let case = Case::new(150, 300, 64, Mask::causal()).heads(1, 2, 1);
    let operands = operands(&case, Scaling::PerBlock, Some(3));
    let expected = operands.expected();
    let (o, _) = operands.run();
    let report = expected.check(&o, None).unwrap();
    assert!(report.passed() && report.worst_ratio() > 0.1, "{report}");
    assert!(!expected.check(&Tensor::zeros(o.shape()), None).unwrap().passed());
    let mut late = o.clone();
    late.data_mut().rotate_right(64);
    assert!(!expected.check(&late, None).unwrap().passed());
    for mutation in MUTATIONS {
        let (o, _) = (mutation.apply)(&operands).unwrap_or_else(|| panic!("{} does not apply", mutation.name));
        assert!(!expected.check(&o, None).unwrap().passed(), "not caught: {}", mutation.name);
    }
}

/// A softmax scale below the normal range of f32, beside factors so large that scores are ordinary, and beside small ones, with which
/// every key weighs the same.
#[test]
fn a_scale_below_the_normal_range_is_exact_enough() {
    for (mask, scaling) in [Mask::Full, Mask::causal(), Mask::window(Some(70), Some(3))].into_iter().zip(Scaling::ALL) {
        for (scale, by) in [(8e-39, [1e18, 4e18]), (f32::from_bits(1), [1e18, 4e18]), (8e-39, [1.0, 1.0])] {
            let case = Case { scale: Some(scale), ..Case::new(150, 290, 64, mask).heads(1, 4, 2) };
            let operands = operands(&case, scaling, None);
            let operands = operands.with_factors_times(Input::Q, by[0]).with_factors_times(Input::K, by[1]);
            let (o, lse) = operands.run();
            let report = operands.expected().check(&o, Some(&lse)).unwrap();
            assert!(report.passed(), "{mask} {scaling} {scale:e}: {report}");
            // Scores of ordinary size differ from key to key, so that a lost scale would be seen.
            let even = (1..=290).map(|keys| f64::from(keys).ln()).collect::<Vec<_>>();
            let is_even = |lse: &f64| *lse == f64::NEG_INFINITY || even.iter().any(|even| (lse - even).abs() < 1e-4);
            assert_eq!(lse.iter().all(is_even), scale != 8e-39 || by[0] == 1.0, "{mask} {scaling} {scale:e}: {lse:?}");
        }
    }
}

/// Factors of 0 and -0 make zeros of their block, as on a GPU. (What is no factor is refused: `tests/fp8.rs` of the crate.)
#[test]
fn factors_of_zero_make_zeros() {
    for mask in [Mask::Full, Mask::causal(), Mask::window(Some(70), Some(3)), Mask::chunked(70), Mask::prefix(90)] {
        let case = Case::new(300, 420, 64, mask).heads(1, 4, 2);
        let clean = operands(&case, Scaling::PerBlock, None);
        let check = |what: &str, operands: &Operands| {
            let (mut o, lse) = operands.run();
            forget_dust(&mut o);
            let report = operands.expected().check(&o, Some(&lse)).unwrap();
            assert!(report.passed(), "{mask}: {what}: {report}");
        };
        for zero in [0.0, -0.0] {
            for (input, block) in [(Input::Q, 1), (Input::K, 0), (Input::K, 3), (Input::V, 0), (Input::V, 3)] {
                let operands = clean.clone().with_factor(input, [0, 1, block], zero);
                check(&format!("{zero:?} for {input:?}, block {block}"), &operands);
            }
            check(&format!("{zero:?} for all of V"), &clean.clone().with_factors_times(Input::V, zero));
        }
    }
}
