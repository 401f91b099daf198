//! The tolerance passes correct results, and fails wrong ones, even slightly wrong ones.

mod backward;

use super::super::forward;
use super::super::plain::round_e4m3;
use super::super::sample::{inputs, normal, round};
use super::*;
use crate::dtype::{E4M3, Element};
use crate::mask::{Corner, Mask};
use crate::problem::Dims;

const DIMS: Dims =
    Dims { batch: 2, seqlen_q: 70, seqlen_kv: 131, heads_q: 4, heads_kv: 2, head_dim_qk: 64, head_dim_vo: 64 };

fn problem(dtype: DType, dims: Dims, mask: Mask) -> ForwardProblem {
    ForwardProblem::builder(dtype, dims).mask(mask).lse(true).build().unwrap()
}

/// A tensor-core kernel in scalar code: blocks of keys, exp2 with the scale folded in, P rounded while it is relative to the
/// running maximum, and scores accumulated 16 products at a time with truncation.
fn kernel(problem: &ForwardProblem, q: &Tensor, k: &Tensor, v: &Tensor, tile_n: usize) -> (Tensor, Vec<f64>) {
    kernel_with(problem, [q, k, v], tile_n, exact_tanh)
}

/// tanh of an exponential in f32: its absolute error is some 2^-24.
fn exact_tanh(y: f32) -> f32 {
    1.0 - 2.0 / (1.0 + (2.0 * std::f32::consts::LOG2_E * y).exp2())
}

/// As [`kernel`], with this tanh where scores are capped.
fn kernel_with(
    problem: &ForwardProblem,
    [q, k, v]: [&Tensor; 3],
    tile_n: usize,
    tanh: fn(f32) -> f32,
) -> (Tensor, Vec<f64>) {
    let d = problem.dims();
    // A score without the softmax scale.
    let capped = |score: f32| match problem.softcap() {
        0.0 => score,
        cap => cap / problem.softmax_scale() * tanh(score * (problem.softmax_scale() / cap)),
    };
    let scale_log2 = problem.softmax_scale() * std::f32::consts::LOG2_E;
    let (mut o, mut lse) = (Tensor::zeros(problem.o_shape()), Vec::new());
    for row in 0..d.batch * d.heads_q * d.seqlen_q {
        let (batch, head, query) = (row / d.seqlen_q / d.heads_q, row / d.seqlen_q % d.heads_q, row % d.seqlen_q);
        let head_kv = head / problem.group_size();
        let (mut max, mut sum, mut acc) = (f32::NEG_INFINITY, 0.0_f32, vec![0.0_f32; d.head_dim_vo]);
        for block in (0..d.seqlen_kv).step_by(tile_n) {
            let keys: Vec<usize> = (block..d.seqlen_kv.min(block + tile_n))
                .filter(|&key| problem.mask().keep(query, key, d.seqlen_q, d.seqlen_kv))
                .collect();
            let scores: Vec<f32> = keys
                .iter()
                .map(|&key| {
                    let (q, k) = (q.row(batch, query, head), k.row(batch, key, head_kv));
                    q.chunks(16).zip(k.chunks(16)).fold(0.0_f32, |sum, (q, k)| {
                        truncate(f64::from(sum) + q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>())
                    })
                })
                .map(capped)
                .collect();
            let new_max = scores.iter().copied().fold(max, f32::max);
            if new_max == f32::NEG_INFINITY {
                continue;
            }
            let correction = ((max - new_max) * scale_log2).exp2();
            sum *= correction;
            acc.iter_mut().for_each(|acc| *acc *= correction);
            for (&key, &score) in keys.iter().zip(&scores) {
                let p = score.mul_add(scale_log2, -new_max * scale_log2).exp2();
                sum += p;
                let p = round(problem.dtype(), f64::from(p)) as f32;
                for (acc, &v) in acc.iter_mut().zip(v.row(batch, key, head_kv)) {
                    *acc += p * v as f32;
                }
            }
            max = new_max;
        }
        for (o, acc) in o.row_mut(batch, query, head).iter_mut().zip(acc) {
            *o = if sum == 0.0 { 0.0 } else { round(problem.dtype(), f64::from(acc / sum)) };
        }
        let row_lse = max * problem.softmax_scale() + sum.ln();
        lse.push(f64::from(if sum == 0.0 { f32::NEG_INFINITY } else { row_lse }));
    }
    (o, lse)
}

/// Rounds to f32 towards zero.
fn truncate(x: f64) -> f32 {
    let nearest = x as f32;
    if f64::from(nearest).abs() > x.abs() { f32::from_bits(nearest.to_bits() - 1) } else { nearest }
}

fn masks() -> [Mask; 6] {
    [
        Mask::Full,
        Mask::causal(),
        Mask::Causal { corner: Corner::TopLeft },
        Mask::window(Some(5), Some(3)),
        Mask::window(Some(0), Some(0)),
        Mask::Window { left: Some(17), right: None, corner: Corner::TopLeft },
    ]
}

#[test]
fn honest_kernels_pass_and_are_not_far_from_the_bound() {
    let mut worst = 0.0_f64;
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for (i, mask) in masks().into_iter().enumerate() {
            for dims in [
                DIMS,
                Dims { seqlen_q: 131, seqlen_kv: 70, ..DIMS },
                Dims { batch: 1, seqlen_q: 33, seqlen_kv: 900, head_dim_vo: 8, ..DIMS },
                Dims { seqlen_q: 300, seqlen_kv: 3, head_dim_qk: 8, head_dim_vo: 8, ..DIMS },
            ] {
                let problem = problem(dtype, dims, mask);
                let [q, k, v] = inputs(&problem, i as u64);
                let expected = Expected::new(&problem, &q, &k, &v).unwrap();
                let (o, lse) = kernel(&problem, &q, &k, &v, 64);
                let report = expected.check(&o, Some(&lse)).unwrap();
                assert!(report.passed(), "{problem}: {report}");
                worst = worst.max(report.worst_ratio());
            }
        }
    }
    // If correct results were never near the bound, the tolerance would be too wide.
    assert!(worst > 0.25, "{worst}");
}

/// A tanh that is exact to f32 passes, with scores that a cap hardly bends, bends and cuts off. One of 11 bits, as a GPU's
/// fast instruction has, does not: an LSE with its errors is no LSE to merge parts by.
#[test]
fn capped_scores_need_an_exact_tanh() {
    let of_11_bits = |y: f32| f32::from_bits(y.tanh().to_bits() & !0x1fff);
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for (i, mask) in masks().into_iter().enumerate() {
            for (cap, deviation) in [(1.0, 1.0), (15.0, 2.0), (50.0, 1.0), (50.0, 9.0)] {
                let problem = problem(dtype, DIMS, mask).to_builder().softcap(cap).build().unwrap();
                let [q, k, v] = [1, 2, 3].map(|seed| {
                    let shape = [problem.q_shape(), problem.k_shape(), problem.v_shape()][seed as usize - 1];
                    normal(dtype, shape, if seed == 3 { 1.0 } else { deviation }, seed + 10 * i as u64)
                });
                let expected = Expected::new(&problem, &q, &k, &v).unwrap();
                let passed = |tanh| {
                    let (o, lse) = kernel_with(&problem, [&q, &k, &v], 64, tanh);
                    expected.check(&o, Some(&lse)).unwrap()
                };
                assert!(passed(exact_tanh).passed(), "{problem} {deviation}: {}", passed(exact_tanh));
                assert!(!passed(of_11_bits).passed(), "{problem} {deviation}: {}", passed(of_11_bits));
            }
        }
    }
}

#[test]
fn large_scores_and_uneven_values_pass() {
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for (deviation, heavy) in [(30.0, 1.0), (1.0, 100.0), (6.0, 0.01), (0.001, 1.0)] {
            let problem = problem(dtype, DIMS, Mask::causal());
            let q = normal(dtype, problem.q_shape(), deviation, 1);
            let k = normal(dtype, problem.k_shape(), deviation, 2);
            let mut v = normal(dtype, problem.v_shape(), 1.0, 3);
            // One column of V is much larger. The plain error of a row is then one sample of noise.
            v.data_mut().iter_mut().step_by(64).for_each(|x| *x = round(dtype, *x * heavy));
            let expected = Expected::new(&problem, &q, &k, &v).unwrap();
            let (o, lse) = kernel(&problem, &q, &k, &v, 32);
            let report = expected.check(&o, Some(&lse)).unwrap();
            assert!(report.passed(), "{problem} deviation {deviation} heavy {heavy}: {report}");
        }
    }
}

/// The mistakes that a kernel is likely to make. Each wrong result is a correct computation of another problem.
#[test]
fn wrong_results_fail() {
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let right = problem(dtype, DIMS, Mask::causal());
        let [q, k, v] = inputs(&right, 7);
        let expected = Expected::new(&right, &q, &k, &v).unwrap();
        let honest = kernel(&right, &q, &k, &v, 64);
        assert!(expected.check(&honest.0, Some(&honest.1)).unwrap().passed());

        // Moves all keys by one, cyclically, so that shapes and magnitudes stay the same.
        let roll = |t: &Tensor| {
            let seqlen = t.shape()[1];
            Tensor::from_fn(t.shape(), |[b, s, h, d]| t.row(b, (s + 1) % seqlen, h)[d])
        };
        let swap_heads = |t: &Tensor| Tensor::from_fn(t.shape(), |[b, s, h, d]| t.row(b, s, h ^ 1)[d]);
        let drop_last = |t: &Tensor| {
            let [batch, seqlen, heads, dim] = t.shape();
            Tensor::from_fn([batch, seqlen - 1, heads, dim], |[b, s, h, d]| t.row(b, s, h)[d])
        };
        let top_left = right.to_builder().mask(Mask::Causal { corner: Corner::TopLeft }).build().unwrap();
        let one_more = right.to_builder().mask(Mask::window(None, Some(1))).build().unwrap();
        let one_key_less =
            ForwardProblem::builder(dtype, Dims { seqlen_kv: DIMS.seqlen_kv - 1, ..DIMS }).build().unwrap();
        let full = right.to_builder().mask(Mask::Full).build().unwrap();
        let unscaled = right.to_builder().softmax_scale(1.0).build().unwrap();
        let nearly_scaled = right.to_builder().softmax_scale(0.125 * 1.01).build().unwrap();
        let zeros = (Tensor::zeros(right.o_shape()), vec![0.0; honest.1.len()]);
        let base_2 = honest.1.iter().map(|lse| lse * std::f64::consts::LOG2_E).collect();
        let without_max = |(o, lse): (Tensor, Vec<f64>)| (o, lse.iter().map(|lse| lse - 1.0).collect());
        let wrong: Vec<(&str, (Tensor, Vec<f64>))> = vec![
            ("zeros", zeros),
            ("k shifted by one key", kernel(&right, &q, &roll(&k), &v, 64)),
            ("v shifted by one key", kernel(&right, &q, &k, &roll(&v), 64)),
            ("unscaled", kernel(&unscaled, &q, &k, &v, 64)),
            ("scale off by a hundredth", kernel(&nearly_scaled, &q, &k, &v, 64)),
            ("mask forgotten", kernel(&full, &q, &k, &v, 64)),
            ("wrong corner", kernel(&top_left, &q, &k, &v, 64)),
            ("diagonal off by one", kernel(&one_more, &q, &k, &v, 64)),
            (
                "last key dropped",
                kernel(
                    &one_key_less.to_builder().mask(Mask::window(None, Some(1))).build().unwrap(),
                    &q,
                    &drop_last(&k),
                    &drop_last(&v),
                    64,
                ),
            ),
            ("key heads swapped", kernel(&right, &q, &swap_heads(&k), &swap_heads(&v), 64)),
            ("output heads swapped", (swap_heads(&honest.0), honest.1.clone())),
            ("lse in base 2", (honest.0.clone(), base_2)),
            ("lse off by one", without_max(honest.clone())),
        ];
        for (what, (o, lse)) in &wrong {
            let report = expected.check(o, Some(lse)).unwrap();
            assert!(!report.passed(), "{dtype} {what}: {report}");
        }
        // Most of these mistakes are found in O alone.
        for (what, (o, _)) in wrong.iter().filter(|(what, _)| !what.starts_with("lse")) {
            let report = expected.check(o, None).unwrap();
            assert!(!report.passed(), "{dtype} {what}, O alone: {report}");
        }
    }
}

#[test]
fn one_wrong_element_fails() {
    let problem = problem(DType::BF16, DIMS, Mask::Full);
    let [q, k, v] = inputs(&problem, 3);
    let expected = Expected::new(&problem, &q, &k, &v).unwrap();
    let honest = expected.plain().clone();
    let place = [1, 69, 3, 63];
    let size = honest.o.row(1, 69, 3).iter().fold(0.0_f64, |a, b| a.max(b.abs()));
    for value in [0.5 * size + 0.01, f64::NAN, f64::INFINITY, -3.0] {
        let mut o = honest.o.clone();
        o.row_mut(1, 69, 3)[63] += value;
        let report = expected.check(&o, Some(&honest.lse)).unwrap();
        assert!(!report.passed(), "{value}: {report}");
        assert_eq!(report.o.worst_at, place, "{value}");
    }
    let mut lse = honest.lse.clone();
    lse[5] += 1e-4;
    let report = expected.check(&honest.o, Some(&lse)).unwrap();
    assert!(!report.passed() && report.lse.unwrap().worst_at == [0, 0, 5]);
}

/// A small row beside large ones. The bound on the tensor alone would pass any value of the small row.
#[test]
fn a_large_row_does_not_excuse_a_small_one() {
    let problem = problem(DType::BF16, Dims { batch: 1, seqlen_q: 70, seqlen_kv: 70, ..DIMS }, Mask::causal());
    let [q, k, mut v] = inputs(&problem, 4);
    for s in 0..70 {
        for h in 0..2 {
            v.row_mut(0, s, h).iter_mut().for_each(|x| *x *= if s == 0 { 1.0 / 1024.0 } else { 64.0 });
        }
    }
    let expected = Expected::new(&problem, &q, &k, &v).unwrap();
    let mut o = expected.plain().o.clone();
    o.row_mut(0, 0, 0).fill(0.0);
    let report = expected.check(&o, None).unwrap();
    assert!(!report.passed() && report.o.worst_bound == Bound::Row, "{report}");
    assert_eq!(report.o.worst_at[..3], [0, 0, 0]);
}

/// A sink far above all scores: what a GPU flushes passes, up to the bound. A wrong value above it fails, and so does one that is
/// larger than what it stands for.
#[test]
fn a_sink_may_flush_what_it_leaves_next_to_nothing() {
    for dtype in [DType::E4M3, DType::BF16, DType::F16] {
        let dims = Dims { batch: 1, seqlen_q: 70, seqlen_kv: 131, ..DIMS };
        let output = if dtype == DType::F16 { DType::F16 } else { DType::BF16 };
        let problem = problem(dtype, dims, Mask::Full).to_builder().sinks(DType::F32);
        let problem = if dtype == DType::E4M3 { problem.output(output) } else { problem }.build().unwrap();
        let [q, k, v] = inputs(&problem, 5);
        let judge = |sink: f64| {
            let sinks = vec![sink; dims.heads_q];
            let modifiers = Modifiers { sinks: Some(&sinks), ..Modifiers::default() };
            Expected::with(&problem, &Lengths::default(), [&q, &k, &v], modifiers, 1.0, None).unwrap()
        };
        // What the kernels do: a factor below 2^-126 is 0, and with it all of the row. The factor is relative to a reference that
        // makes the largest weight `weight`, and V is stored as `v / descale`.
        let flushing = |expected: &Expected, sink: f64, weight: f64, descale: f64| {
            let mut o = expected.plain().o.clone();
            let mut zeros = 0;
            for (row, scale) in expected.oracle().scales.iter().enumerate() {
                let [batch, head, query] = place(expected.shape, row);
                let factor = (scale.row_max - sink).exp() / weight;
                if factor < SMALLEST_NORMAL || factor * descale < SMALLEST_NORMAL {
                    o.row_mut(batch, query, head).fill(0.0);
                    zeros += 1;
                }
            }
            (o, zeros)
        };
        let rows = dims.heads_q * dims.seqlen_q;
        let most = weight_limit(dtype) * 0.9;
        let descales: &[f64] = if dtype == DType::E4M3 { &[1.0, 0.01, 30.0] } else { &[1.0] };
        for &descale in descales {
            for weight in [0.25, 1.0, 8.0, most] {
                // From where nothing is flushed to where all is.
                let edge = 126.0 * std::f64::consts::LN_2 - weight.ln() + f64::min(descale.ln(), 0.0);
                let mut some = false;
                for nats in [-6.0, 0.0, 2.0, 4.0, 6.0, 10.0, 30.0, 500.0] {
                    let expected = judge(edge + nats);
                    let (o, zeros) = flushing(&expected, edge + nats, weight, descale);
                    some |= zeros > 0 && zeros < rows;
                    let report = expected.check(&o, None).unwrap();
                    assert!(report.passed(), "{dtype} {weight} {descale} {nats}, {zeros} rows are 0: {report}");
                }
                assert!(some, "{dtype} {weight}");
            }
        }
        // f16 has no such small numbers as output: all of them are 0 in any case.
        if dtype == DType::F16 {
            continue;
        }
        // Above the bound zeros fail, whatever the weight. (Of ordinary V, 131 keys: 2^-126 W 131 (|v| + 448).)
        let bound = SMALLEST_NORMAL * weight_limit(dtype) * 131.0 * if dtype == DType::E4M3 { 460.0 } else { 5.0 };
        let above = judge(-(8.0 * bound).ln());
        for (what, factor) in [("0", 0.0), ("half", 0.5), ("a quarter more", 1.25), ("minus", -1.0)] {
            let mut o = above.plain().o.clone();
            o.row_mut(0, 3, 1).iter_mut().for_each(|x| *x *= factor);
            let report = above.check(&o, None).unwrap();
            assert!(!report.passed() && report.o.worst_at[..3] == [0, 3, 1], "{dtype} {what}: {report}");
        }
        // Below it no value may be much larger than what is lost.
        let below = judge(-(1e-3 * SMALLEST_NORMAL * weight_limit(dtype)).ln());
        for factor in [6.0, -5.0, 1e6] {
            let mut o = below.plain().o.clone();
            o.row_mut(0, 3, 1).iter_mut().for_each(|x| *x *= factor);
            let report = below.check(&o, None).unwrap();
            assert!(!report.passed(), "{dtype} {factor}: {report}");
        }
    }
}

#[test]
fn masked_rows_must_be_exact() {
    let dims = Dims { batch: 1, seqlen_q: 9, seqlen_kv: 4, ..DIMS };
    let problem = problem(DType::BF16, dims, Mask::causal());
    let [q, k, v] = inputs(&problem, 5);
    let expected = Expected::new(&problem, &q, &k, &v).unwrap();
    let (o, lse) = (&expected.plain().o, &expected.plain().lse);
    assert_eq!((o.row(0, 4, 0)[0], lse[4], expected.oracle().lse[4]), (0.0, f64::NEG_INFINITY, f64::NEG_INFINITY));
    assert!(lse[5].is_finite());
    assert!(expected.check(o, Some(lse)).unwrap().passed());
    for bad in [0.0, f64::MIN, f64::NAN, f64::INFINITY] {
        let mut lse = lse.clone();
        lse[4] = bad;
        assert!(!expected.check(o, Some(&lse)).unwrap().passed(), "{bad}");
    }
    for bad in [1e-30, f64::NAN] {
        let mut o = o.clone();
        o.row_mut(0, 4, 0)[0] = bad;
        assert!(!expected.check(&o, Some(lse)).unwrap().passed(), "{bad}");
    }
    // A masked row must not widen the bound of the others.
    let mut lse = lse.clone();
    lse[8] += 1e-3;
    assert!(!expected.check(o, Some(&lse)).unwrap().passed());
}

#[test]
fn nan_reaches_the_rows_that_see_it_and_no_others() {
    let dims = Dims { batch: 1, seqlen_q: 6, seqlen_kv: 6, heads_q: 2, heads_kv: 1, ..DIMS };
    let problem = problem(DType::F16, dims, Mask::causal());
    let [q, k, v] = inputs(&problem, 6);
    let (mut bad_k, mut bad_v) = (k.clone(), v.clone());
    bad_k.row_mut(0, 3, 0)[7] = f64::NAN;
    bad_v.row_mut(0, 4, 0)[9] = f64::NAN;
    let with_k = Expected::new(&problem, &q, &bad_k, &v).unwrap();
    let with_v = Expected::new(&problem, &q, &k, &bad_v).unwrap();
    for query in 0..6 {
        for head in 0..2 {
            assert_eq!(with_k.oracle().o.row(0, query, head).iter().all(|x| x.is_nan()), query >= 3);
            assert_eq!(with_k.oracle().lse[head * 6 + query].is_nan(), query >= 3);
            for (d, x) in with_v.oracle().o.row(0, query, head).iter().enumerate() {
                assert_eq!(x.is_nan(), query >= 4 && d == 9);
            }
            assert!(with_v.oracle().lse[head * 6 + query].is_finite());
        }
    }
    for expected in [&with_k, &with_v] {
        let (o, lse) = (&expected.plain().o, &expected.plain().lse);
        assert!(expected.check(o, Some(lse)).unwrap().passed());
        let clean = Expected::new(&problem, &q, &k, &v).unwrap();
        assert!(!expected.check(&clean.plain().o, Some(lse)).unwrap().passed());
        assert!(!clean.check(o, None).unwrap().passed());
    }
}

#[test]
fn by_hand() {
    // Two keys with scores 0 and ln 3 under scale 1: weights 1/4 and 3/4.
    let dims = Dims { batch: 1, seqlen_q: 1, seqlen_kv: 2, heads_q: 1, heads_kv: 1, head_dim_qk: 1, head_dim_vo: 2 };
    let problem = problem(DType::F32, dims, Mask::Full).to_builder().softmax_scale(1.0).build().unwrap();
    let ln_3 = f64::from(3.0_f32.ln());
    let q = Tensor::from_fn([1, 1, 1, 1], |_| 1.0);
    let k = Tensor::from_fn([1, 2, 1, 1], |[_, s, _, _]| s as f64 * ln_3);
    let v = Tensor::from_fn([1, 2, 1, 2], |[_, s, _, d]| if d == 0 { 4.0 * s as f64 } else { 8.0 });
    let oracle = forward(&problem, &q, &k, &v).unwrap();
    assert!((oracle.o.data()[0] - 3.0).abs() < 1e-6 && (oracle.o.data()[1] - 8.0).abs() < 1e-12);
    assert!((oracle.lse[0] - 4.0_f64.ln()).abs() < 1e-6);
}

/// Queries and keys with stored values up to 14, with one sign or both. Products are summed 32 at a time, and rounded to f16.
#[test]
fn scores_in_f16_are_as_honest_as_fp8_sums() {
    let e4m3 = |x: f64| f64::from(Element::to_f32(<E4M3 as Element>::from_f32(x as f32)));
    for (head_dim_qk, positive, scale) in [
        (128, false, 0.005),
        (128, true, 0.0002),
        (128, true, 0.005),
        (256, false, 0.005),
        (256, true, 0.0001),
        (256, true, 0.005),
    ] {
        let dims = Dims { batch: 1, head_dim_qk, ..DIMS };
        let problem = problem(DType::E4M3, dims, Mask::Full).to_builder().half_scores(true).build().unwrap();
        let problem = problem.to_builder().softmax_scale(scale).build().unwrap();
        let stored = |shape, seed| {
            let drawn = normal(DType::F32, shape, 4.0, seed);
            let sign = |x: f64| if positive { x.abs() } else { x };
            Tensor::from_fn(shape, |[b, s, h, d]| e4m3(sign(drawn.row(b, s, h)[d]).clamp(-14.0, 14.0)))
        };
        let (q, k, v) = (stored(problem.q_shape(), 1), stored(problem.k_shape(), 2), stored(problem.v_shape(), 3));
        let expected = Expected::new(&problem, &q, &k, &v).unwrap();
        let (mut o, mut lse) = (Tensor::zeros(problem.o_shape()), Vec::new());
        for (head, query) in (0..dims.heads_q).flat_map(|head| (0..dims.seqlen_q).map(move |query| (head, query))) {
            let (queries, head_kv) = (q.row(0, query, head), head / problem.group_size());
            let scores: Vec<f64> = (0..dims.seqlen_kv)
                .map(|key| {
                    let steps = queries.chunks(32).zip(k.row(0, key, head_kv).chunks(32));
                    let sum = steps.fold(0.0, |sum, (q, k)| {
                        round(DType::F16, sum + q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>())
                    });
                    f64::from(scale) * sum
                })
                .collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
            let rounded: Vec<f64> = weights.iter().map(|p| e4m3(256.0 * p)).collect();
            let (sum, divisor) = (weights.iter().sum::<f64>(), rounded.iter().sum::<f64>());
            for (d, o) in o.row_mut(0, query, head).iter_mut().enumerate() {
                let products = rounded.iter().enumerate().map(|(key, p)| p * v.row(0, key, head_kv)[d]);
                *o = round(DType::BF16, products.sum::<f64>() / divisor);
            }
            lse.push(max + sum.ln());
        }
        let report = expected.check(&o, Some(&lse)).unwrap();
        assert!(report.passed(), "{head_dim_qk} {positive} {scale}: {report}");
    }
}

/// The LSE's least bound for scores in f16 holds where the problem allows such scores, and nowhere else.
#[test]
fn an_lse_of_scores_in_f16_has_a_least_bound() {
    let of = |half| problem(DType::E4M3, DIMS, Mask::Full).to_builder().half_scores(half).build().unwrap();
    let (q, k, v) =
        (Tensor::zeros(of(true).q_shape()), inputs(&of(true), 1)[1].clone(), inputs(&of(true), 1)[2].clone());
    for (off, with_half, without) in [(1e-7, true, true), (0.0031, true, false), (0.0033, false, false)] {
        for (half, passes) in [(true, with_half), (false, without)] {
            let expected = Expected::new(&of(half), &q, &k, &v).unwrap();
            let lse: Vec<f64> = expected.oracle().lse.iter().map(|lse| lse + off).collect();
            let report = expected.check(&expected.plain().o, Some(&lse)).unwrap();
            assert_eq!(report.passed(), passes, "{off} {half}: {report}");
        }
    }
}

/// Division by the sum of the rounded weights is correct. One key with value 0 has almost half of the row's weight. The other
/// keys have weights of 1.25, which e4m3 holds exactly. All weights are multiplied by a factor for which the large weight is
/// rounded down and the others are rounded up.
#[test]
fn a_divisor_of_rounded_weights_is_honest() {
    let dims = Dims { batch: 1, heads_q: 1, heads_kv: 1, ..DIMS };
    let scale = (128.0_f32 / 1.25).ln();
    let problem = problem(DType::E4M3, dims, Mask::Full).to_builder().softmax_scale(scale).build().unwrap();
    let q = Tensor::from_fn(problem.q_shape(), |[_, _, _, d]| f64::from(d == 0));
    let k = Tensor::from_fn(problem.k_shape(), |[_, s, _, d]| f64::from(s == 0 && d == 0));
    let v = Tensor::from_fn(problem.v_shape(), |[_, s, _, _]| f64::from(s > 0));
    let expected = Expected::new(&problem, &q, &k, &v).unwrap();
    let others = (dims.seqlen_kv - 1) as f64;
    let of_weights = |heavy: f64, other: f64| {
        let o = round(DType::BF16, others * other / (heavy + others * other));
        expected.check(&Tensor::from_fn(problem.o_shape(), |_| o), None).unwrap()
    };
    let [heavy, other] = [128.0, 1.25].map(|weight| round_e4m3(1.062 * weight));
    assert_eq!([heavy, other], [128.0, 1.375]);
    let report = of_weights(heavy, other);
    assert!(report.passed() && report.worst_ratio() > 0.3, "{report}");
    // Neither an error of a quarter in a weight nor an output of zero is a rounding error.
    assert!(!of_weights(0.75 * 128.0, 1.25).passed() && !of_weights(1.0, 0.0).passed());
}

/// Where all inputs are alike, all weights are rounded alike, and all elements of O. They may all be an ulp off, but not four.
#[test]
fn equal_elements_are_rounded_alike() {
    for dtype in [DType::BF16, DType::F16] {
        let problem = problem(dtype, DIMS, Mask::causal());
        let value = 0.75;
        let [q, k, v] =
            [problem.q_shape(), problem.k_shape(), problem.v_shape()].map(|shape| Tensor::from_fn(shape, |_| value));
        let expected = Expected::new(&problem, &q, &k, &v).unwrap();
        let off = |ulps: f64| {
            let o = value - ulps * unit_roundoff(dtype);
            expected.check(&Tensor::from_fn(problem.o_shape(), |_| o), None).unwrap().worst_ratio()
        };
        assert!(off(1.0) < 0.77 && off(4.0) > 1.0, "{dtype}: {} {}", off(1.0), off(4.0));
    }
}

#[test]
fn empty_problems_and_wrong_shapes() {
    for dims in [Dims { batch: 0, ..DIMS }, Dims { seqlen_q: 0, ..DIMS }, Dims { batch: 1, seqlen_kv: 0, ..DIMS }] {
        let problem = problem(DType::BF16, dims, Mask::causal());
        let [q, k, v] = inputs(&problem, 1);
        let expected = Expected::new(&problem, &q, &k, &v).unwrap();
        let lse = vec![f64::NEG_INFINITY; dims.batch * dims.heads_q * dims.seqlen_q];
        let report = expected.check(&Tensor::zeros(problem.o_shape()), Some(&lse)).unwrap();
        assert!(report.worst_ratio() == 0.0, "{report}");
        assert!(expected.check(&Tensor::zeros([1, 2, 3, 4]), None).is_err());
        assert!(expected.check(&Tensor::zeros(problem.o_shape()), Some(&[0.0])).is_err());
        assert!(Expected::new(&problem, &Tensor::zeros([9, 1, 1, 1]), &k, &v).is_err());
    }
}
