//! ALiBi and maximum logits through the CPU backend, under the tolerance; and what the tolerance must notice.

use hopper_attention::reference::{self, Modifiers, Tensor};
use hopper_attention::{Mask, bf16, f16};
use hopper_attention_tests::alibi::{
    Alibi, AlibiImage, MISTAKES, Mistake, cases, empty_sequences, garbage_in_scores, packed_cases,
};
use hopper_attention_tests::backward;
use hopper_attention_tests::case::random;
use hopper_attention_tests::data::{Garbage, Image, Poison, Values};
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::runner::{Prepared, Ready, Runner};

/// Every 43rd case, from this one on: 43 divides none of the numbers of sizes, masks and kinds, so that these have all of them.
/// The oracle takes too long for all cases here. The kernels' tests take them.
fn some(first: usize) -> Vec<Case> {
    let grid = Grid::from_env();
    [cases(grid), packed_cases(grid)].concat().into_iter().skip(first).step_by(43).collect()
}

#[test]
fn the_forward_keeps_the_tolerance() {
    crate::forwards(some);
}

#[test]
fn the_backward_keeps_the_tolerance() {
    crate::backwards(some);
}

/// What `hattn fuzz` draws.
#[test]
fn random_cases_keep_the_tolerance() {
    use proptest::strategy::{Strategy as _, ValueTree as _};
    let mut runner = random::runner(hopper_attention_tests::problems::random::seed());
    let strategy = (random::case(128, 8), random::packing(), random::sinks(), random::softcap(), random::biases());
    let drawn = std::iter::repeat_with(|| {
        let (case, packing, sinks, softcap, (alibi, max_logits)) = strategy.new_tree(&mut runner).unwrap().current();
        random::capped(Case { sinks, alibi, max_logits, ..random::packed(case, packing) }, softcap)
    });
    let drawn = drawn.filter(|case| !case.alibi.is_none() || case.max_logits);
    let drawn: Vec<_> = drawn.take(Grid::from_env().pick(15, 30)).collect();
    crate::both_passes(&drawn);
}

/// Results with other slopes fail, in O, in the LSE and in the gradients.
#[test]
fn wrong_slopes_are_noticed() {
    // Heads whose slopes are neither 0 nor so large that nothing but the nearest key counts.
    for (mask, kind) in [(Mask::Full, Alibi::Standard), (Mask::causal(), Alibi::PerBatch)] {
        let case = Case::new(110, 130, 32, mask).heads(2, 4, 2).alibi(kind).max_logits(true);
        noticed::<bf16>(&case);
        noticed::<f16>(&case);
        noticed::<f32>(&case);
    }
}

fn noticed<T: Poison>(case: &Case) {
    let of_o = Prepared::<T>::new(case);
    let of_gradients = backward::Prepared::<T>::new(case);
    let d_lse = of_gradients.d_lse.as_ref().map(Image::values);
    let lengths = hopper_attention::Lengths::default();
    let [q, k, v] = &of_o.tensors();
    let scale = f64::from(of_o.problem.softmax_scale());
    let slopes = of_o.alibi.as_ref().map(AlibiImage::values).expect("slopes");
    let heads = case.dims.heads_q;
    let none: Mistake = ("right", |slope, _, _| slope);
    for (what, mistake) in [none].into_iter().chain(MISTAKES) {
        let next = |i: usize| slopes[i / heads * heads + (i + 1) % heads];
        let wrong: Vec<f64> = slopes.iter().enumerate().map(|(i, &slope)| mistake(slope, scale, next(i))).collect();
        let modifiers = Modifiers { alibi_slopes: Some(&wrong), ..Modifiers::default() };
        let got = reference::forward_with(&of_o.problem, &lengths, [q, k, v], modifiers).unwrap();
        let max_logits: Vec<f64> = got.max_logits.iter().map(|logit| logit.value).collect();
        let report = of_o.expected.check_with(&got.o, Some(&got.lse), &max_logits).unwrap();
        let right = what == "right";
        let bad = |figures: &reference::tolerance::Figures| figures.worst_ratio > 1.0;
        let lse = report.lse.as_ref().expect("an LSE");
        assert!(bad(&report.o) != right && bad(lse) != right, "{what}, {}, {case}: {report}", T::DTYPE);
        let d_o = of_gradients.d_o.tensor();
        let inputs = [q, k, v, &d_o];
        let problem = &of_gradients.problem;
        let got = reference::backward_with(problem, &lengths, inputs, d_lse.as_deref(), modifiers).unwrap();
        let report = of_gradients.expected.check(&got.d_q, &got.d_k, &got.d_v).unwrap();
        for figures in [&report.d_q, &report.d_k, &report.d_v] {
            assert!(bad(figures) != right, "{what}, {}, {case}: {report}", T::DTYPE);
        }
    }
    // FlashAttention 2 leaves the part of the bias that all keys of a row share out of the LSE.
    let exact = of_o.expected.oracle();
    let [_, heads, queries] = of_o.problem.lse_shape();
    let offset = (case.dims.seqlen_kv - case.dims.seqlen_q) as f64;
    let slope = |row: usize| slopes[(row / queries) % slopes.len().max(heads)];
    let without = |(row, lse): (usize, &f64)| lse + slope(row) * ((row % queries) as f64 + offset);
    let lse: Vec<f64> = exact.lse.iter().enumerate().map(without).collect();
    assert!(!of_o.expected.check(&exact.o, Some(&lse)).unwrap().passed(), "{case}");
}

/// Maximum logits of other keys fail: of those that the mask hides, and of scores without ALiBi.
#[test]
fn wrong_maximum_logits_are_noticed() {
    let case =
        Case::new(90, 130, 32, Mask::window(Some(20), Some(0))).heads(2, 4, 2).alibi(Alibi::Standard).max_logits(true);
    let prepared = Prepared::<bf16>::new(&case);
    let exact = prepared.expected.oracle();
    let [q, k, v] = &prepared.tensors();
    let checked = |max_logits: &[f64]| prepared.expected.check_with(&exact.o, Some(&exact.lse), max_logits).unwrap();
    let of = |problem: hopper_attention::ForwardProblem| {
        let slopes = prepared.alibi.as_ref().map(AlibiImage::values);
        let alibi_slopes = slopes.as_deref().filter(|_| problem.alibi().is_some());
        let modifiers = Modifiers { alibi_slopes, ..Modifiers::default() };
        let inputs: [&Tensor; 3] = [q, k, v];
        let oracle =
            reference::forward_with(&problem, &hopper_attention::Lengths::default(), inputs, modifiers).unwrap();
        oracle.max_logits.iter().map(|logit| logit.value).collect::<Vec<_>>()
    };
    let options = || prepared.problem.to_builder();
    assert!(checked(&of(prepared.problem.clone())).passed());
    for (what, problem) in [
        ("hidden keys count", options().mask(Mask::Full)),
        ("without ALiBi", options().operand(hopper_attention::Slot::AlibiSlopes, false)),
        ("capped", options().softcap(1.0)),
    ] {
        let report = checked(&of(problem.build().unwrap()));
        assert!(report.max_logits.as_ref().expect("figures").worst_ratio > 1.0, "{what}: {report}");
    }
    let off: Vec<f64> = exact.max_logits.iter().map(|logit| logit.value + 1e-3).collect();
    assert!(!checked(&off).passed());
}

/// Scores of garbage count, unless they are NaN. A result that leaves out infinite scores is wrong, and so is one with NaN.
#[test]
fn maximum_logits_of_garbage() {
    let cases = garbage_in_scores(Mask::causal(), 24);
    Runner::all_on_cpu::<Prepared<f32>>("cpu f32", &cases);
    Runner::all_on_cpu::<Prepared<bf16>>("cpu bf16", &cases);
    Runner::all_on_cpu::<Prepared<f16>>("cpu f16", &cases);
    // Of infinite garbage all is known: no order of a sum makes another score of it. And f16 has no numbers whose sums overflow.
    let known = |case: &&Case| matches!(case.values, Values::Garbage(_, Garbage::Infinity | Garbage::MinusInfinity));
    let noticed: usize = cases.iter().filter(known).map(left_out::<bf16>).sum();
    assert!(noticed > 10, "{noticed}");
    let noticed: usize = cases.iter().map(left_out::<f16>).sum();
    assert!(noticed > 15, "{noticed}");
}

/// Whether the maximum logits are others without the garbage. Then these fail.
fn left_out<T: Poison>(case: &Case) -> usize {
    let Values::Garbage(input, _) = case.values else { panic!("{case}") };
    let prepared = Prepared::<T>::new(case);
    let without = Prepared::<T>::new(&Case { values: Values::Garbage(input, Garbage::Nan), ..case.clone() });
    let of = |prepared: &Prepared<T>| -> Vec<f64> {
        prepared.expected.oracle().max_logits.iter().map(|logit| logit.value).collect()
    };
    let exact = prepared.expected.oracle();
    let passes = |max_logits: &[f64]| {
        let report = prepared.expected.check_with(&exact.o, Some(&exact.lse), max_logits).unwrap();
        report.max_logits.as_ref().expect("figures").worst_ratio <= 1.0
    };
    let (right, wrong) = (of(&prepared), of(&without));
    assert!(passes(&right), "{case}");
    let nan: Vec<f64> = right.iter().map(|_| f64::NAN).collect();
    assert!(!passes(&nan), "{case}");
    let differ = right.iter().zip(&wrong).any(|(a, b)| a != b && (a - b).abs() >= 1e-3 * b.abs());
    assert!(!differ || !passes(&wrong), "{}, {case}: {right:?}, {wrong:?}", T::DTYPE);
    usize::from(differ)
}

/// Without queries the maximum logits are -inf.
#[test]
fn maximum_logits_of_empty_sequences() {
    let cases = empty_sequences(24);
    Runner::all_on_cpu::<Prepared<bf16>>("cpu bf16", &cases);
    Runner::all_on_cpu::<Prepared<f32>>("cpu f32", &cases);
    for case in cases {
        let prepared = Prepared::<bf16>::of(&case);
        let max_logits = prepared.on_cpu().unwrap().max_logits.expect("maximum logits").values();
        assert_eq!(max_logits, [f64::NEG_INFINITY; 4], "{case}");
    }
}
