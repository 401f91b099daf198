//! The oracle of the gradients agrees with finite differences and with numbers by hand. The tolerance passes correct gradients,
//! and fails wrong ones.

use super::super::super::sample::{Given, normal};
use super::super::super::{BackwardPlain, DropoutMask, backward, backward_plain};
use super::*;
use crate::{BackwardProblem, Dropout};

const SMALL: Dims =
    Dims { batch: 2, seqlen_q: 7, seqlen_kv: 9, heads_q: 4, heads_kv: 2, head_dim_qk: 5, head_dim_vo: 3 };

fn backward_problem(dtype: DType, dims: Dims, mask: Mask) -> BackwardProblem {
    BackwardProblem::builder(&problem(dtype, dims, mask)).d_lse(true).build().unwrap()
}

/// A tensor-core kernel in scalar code: O and the LSE of the forward kernel, exp2 with the scale folded in, P and dS rounded
/// before the products, and sums over blocks of `tile` tokens added up in f32.
fn backward_kernel(problem: &BackwardProblem, given: &Given, tile: usize) -> BackwardPlain {
    let d = problem.dims();
    let Given { q, k, v, d_o, d_lse } = given;
    let (o, lse) = kernel(problem.forward(), q, k, v, tile);
    let (scale, log2_e) = (problem.softmax_scale(), std::f32::consts::LOG2_E);
    let to_type = |x: f32| round(problem.dtype(), f64::from(x)) as f32;
    let product = |a: &[f64], b: &[f64]| {
        a.chunks(16)
            .zip(b.chunks(16))
            .fold(0.0_f32, |sum, (a, b)| truncate(f64::from(sum) + a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>()))
    };
    let mut sums = [problem.d_q_shape(), problem.d_k_shape(), problem.d_v_shape()].map(Tensor::zeros);
    for (batch, head) in (0..d.batch * d.heads_q).map(|i| (i / d.heads_q, i % d.heads_q)) {
        let head_kv = head / problem.forward().group_size();
        for (first_q, first_k) in (0..d.seqlen_q)
            .step_by(tile)
            .flat_map(|first_q| (0..d.seqlen_kv).step_by(tile).map(move |first_k| (first_q, first_k)))
        {
            let mut block = sums.clone().map(|sum| Tensor::zeros(sum.shape()));
            for query in first_q..d.seqlen_q.min(first_q + tile) {
                let row = (batch * d.heads_q + head) * d.seqlen_q + query;
                let (q_row, d_o_row) = (q.row(batch, query, head), d_o.row(batch, query, head));
                let row_lse = lse[row] as f32;
                let delta = o.row(batch, query, head).iter().zip(d_o_row).map(|(o, d_o)| (o * d_o) as f32).sum::<f32>()
                    - d_lse.as_ref().map_or(0.0, |d_lse| d_lse[row] as f32);
                for key in first_k..d.seqlen_kv.min(first_k + tile) {
                    if row_lse == f32::NEG_INFINITY || !problem.mask().keep(query, key, d.seqlen_q, d.seqlen_kv) {
                        continue;
                    }
                    let (k_row, v_row) = (k.row(batch, key, head_kv), v.row(batch, key, head_kv));
                    let p = product(q_row, k_row).mul_add(scale * log2_e, -row_lse * log2_e).exp2();
                    let d_s = to_type(p * (product(d_o_row, v_row) - delta));
                    let [d_q, d_k, d_v] = &mut block;
                    let p = to_type(p);
                    for (sum, weight, vector) in [
                        (d_q.row_mut(batch, query, head), d_s, k_row),
                        (d_k.row_mut(batch, key, head_kv), d_s, q_row),
                        (d_v.row_mut(batch, key, head_kv), p, d_o_row),
                    ] {
                        sum.iter_mut()
                            .zip(vector)
                            .for_each(|(sum, x)| *sum = f64::from(truncate(*sum + f64::from(weight) * x)));
                    }
                }
            }
            for (sum, block) in sums.iter_mut().zip(&block) {
                let pairs = sum.data_mut().iter_mut().zip(block.data());
                pairs.for_each(|(sum, block)| *sum = f64::from((*sum + block) as f32));
            }
        }
    }
    let [d_q, d_k, d_v] = sums;
    let finished = |mut sum: Tensor, scale: f32| {
        sum.data_mut().iter_mut().for_each(|x| *x = round(problem.dtype(), f64::from(scale * *x as f32)));
        sum
    };
    let (d_q, d_k, d_v) = (finished(d_q, scale), finished(d_k, scale), finished(d_v, 1.0));
    BackwardPlain { d_q, d_k, d_v, d_sinks: vec![], d_bias: vec![] }
}

fn judged(expected: &BackwardExpected, got: &BackwardPlain) -> BackwardReport {
    expected.check(&got.d_q, &got.d_k, &got.d_v).unwrap()
}

/// The gradients are the derivatives of `sum(dO * O) + sum(dLSE * LSE)`, taken as central differences of the f64 forward pass.
#[test]
fn finite_differences() {
    const STEP: f64 = 1e-5;
    for (mask, d_lse) in masks().into_iter().flat_map(|mask| [(mask, false), (mask, true)]) {
        for dims in [SMALL, Dims { seqlen_q: 9, seqlen_kv: 4, ..SMALL }] {
            let problem = backward_problem(DType::F32, dims, mask).to_builder().d_lse(d_lse).build().unwrap();
            let given = Given::normal(&problem, 31);
            let loss = |q: &Tensor, k: &Tensor, v: &Tensor| {
                let oracle = forward(problem.forward(), q, k, v).unwrap();
                let of_o: f64 = oracle.o.data().iter().zip(given.d_o.data()).map(|(o, d_o)| o * d_o).sum();
                let of_lse = oracle.lse.iter().zip(given.d_lse.iter().flatten()).filter(|(lse, _)| lse.is_finite());
                of_o + of_lse.map(|(lse, d_lse)| lse * d_lse).sum::<f64>()
            };
            let exact = given.expected(&problem).oracle().clone();
            for (which, gradient) in [&exact.d_q, &exact.d_k, &exact.d_v].into_iter().enumerate() {
                for i in 0..gradient.data().len() {
                    let at = |step: f64| {
                        let mut moved = [given.q.clone(), given.k.clone(), given.v.clone()];
                        moved[which].data_mut()[i] += step;
                        let [q, k, v] = &moved;
                        loss(q, k, v)
                    };
                    let difference = (at(STEP) - at(-STEP)) / (2.0 * STEP);
                    let error = (difference - gradient.data()[i]).abs();
                    assert!(error < 1e-7, "{problem}: input {which} element {i}: {difference} {}", gradient.data()[i]);
                }
            }
        }
    }
}

#[test]
fn gradients_by_hand() {
    // Two keys with scores 0 and ln 3 under scale 1, so weights 1/4 and 3/4. Their values are 0 and 4, so O is 3.
    let dims = Dims { batch: 1, seqlen_q: 1, seqlen_kv: 2, heads_q: 1, heads_kv: 1, head_dim_qk: 1, head_dim_vo: 1 };
    let forward = problem(DType::F32, dims, Mask::Full).to_builder().softmax_scale(1.0).build().unwrap();
    let problem = BackwardProblem::builder(&forward).d_lse(true).build().unwrap();
    let ln_3 = f64::from(3.0_f32.ln());
    let one = Tensor::from_fn([1, 1, 1, 1], |_| 1.0);
    let k = Tensor::from_fn([1, 2, 1, 1], |[_, s, _, _]| s as f64 * ln_3);
    let v = Tensor::from_fn([1, 2, 1, 1], |[_, s, _, _]| 4.0 * s as f64);
    let d_o = Tensor::from_fn([1, 1, 1, 1], |_| 2.0);
    // dS = p * (2 v - 6 + 8): 1/4 * 2 and 3/4 * 10.
    let exact = backward(&problem, &one, &k, &v, &d_o, Some(&[8.0])).unwrap();
    let near = |got: &Tensor, want: &[f64]| got.data().iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-6);
    assert!(near(&exact.d_v, &[0.5, 1.5]), "{:?}", exact.d_v);
    assert!(near(&exact.d_k, &[0.5, 7.5]), "{:?}", exact.d_k);
    assert!(near(&exact.d_q, &[7.5 * ln_3]), "{:?}", exact.d_q);
}

#[test]
fn honest_gradients_pass_and_are_not_far_from_the_bound() {
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let mut worst = 0.0_f64;
        for (i, mask) in masks().into_iter().enumerate() {
            for dims in [
                Dims { batch: 1, ..DIMS },
                Dims { batch: 1, seqlen_q: 131, seqlen_kv: 70, head_dim_vo: 8, ..DIMS },
                Dims { batch: 1, seqlen_q: 33, seqlen_kv: 400, heads_q: 3, heads_kv: 1, head_dim_qk: 8, ..DIMS },
                Dims { seqlen_q: 300, seqlen_kv: 3, head_dim_qk: 8, head_dim_vo: 8, ..DIMS },
            ] {
                let problem = backward_problem(dtype, dims, mask).to_builder().d_lse(i % 2 == 0).build().unwrap();
                let given = Given::normal(&problem, 40 + i as u64);
                let report = judged(&given.expected(&problem), &backward_kernel(&problem, &given, 64));
                assert!(report.passed(), "{problem}: {report}");
                worst = worst.max(report.worst_ratio());
            }
        }
        // If correct results were never near the bound, the tolerance would be too wide.
        let near = if dtype == DType::F32 { 0.15 } else { 0.25 };
        assert!(worst > near, "{dtype}: {worst}");
    }
}

#[test]
fn large_scores_and_uneven_gradients_pass() {
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for (deviation, of_v, of_d_o) in [
            (30.0, 1.0, 1.0),
            (1.0, 100.0, 1.0),
            (6.0, 0.01, 1.0),
            (0.001, 0.001, 1.0),
            (1.0, 1.0, 1e-3),
            (2.0, 1.0, 30.0),
        ] {
            let dims = Dims { batch: 1, ..DIMS };
            let problem = backward_problem(dtype, dims, Mask::causal());
            let mut given = Given::normal(&problem, 50);
            given.q = normal(dtype, problem.d_q_shape(), deviation, 1);
            given.k = normal(dtype, problem.d_k_shape(), deviation, 2);
            // One column of V is much larger. The plain error of a row is then one sample of noise.
            given.v.data_mut().iter_mut().step_by(64).for_each(|x| *x = round(dtype, *x * of_v));
            given.d_o.data_mut().iter_mut().for_each(|x| *x = round(dtype, *x * of_d_o));
            let report = judged(&given.expected(&problem), &backward_kernel(&problem, &given, 32));
            assert!(report.passed(), "{problem} deviation {deviation} v {of_v} d_o {of_d_o}: {report}");
        }
    }
}

/// The mistakes that a kernel is likely to make. Each wrong result is a correct computation of something else.
#[test]
fn wrong_gradients_fail() {
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let right = backward_problem(dtype, Dims { batch: 1, ..DIMS }, Mask::causal());
        let given = Given::normal(&right, 60);
        let expected = given.expected(&right);
        let honest = given.plain(&right);
        assert!(judged(&expected, &honest).passed());

        let other = |mask: Mask| {
            BackwardProblem::builder(&right.forward().to_builder().mask(mask).build().unwrap())
                .d_lse(true)
                .build()
                .unwrap()
        };
        let scaled = |tensor: &Tensor, factor: f64| {
            let mut tensor = tensor.clone();
            tensor.data_mut().iter_mut().for_each(|x| *x *= factor);
            tensor
        };
        let with_d_lse = |factor: f64| {
            let d_lse = given.d_lse.as_ref().map(|d_lse| d_lse.iter().map(|x| x * factor).collect());
            Given { d_lse, ..given.clone() }.plain(&right)
        };
        // Moves all tokens by one, cyclically.
        let rolled = |t: &Tensor| {
            let seqlen = t.shape()[1];
            Tensor::from_fn(t.shape(), |[b, s, h, d]| t.row(b, (s + 1) % seqlen, h)[d])
        };
        let wrong: Vec<(&str, BackwardPlain)> = vec![
            ("mask forgotten", given.plain(&other(Mask::Full))),
            ("wrong corner", given.plain(&other(Mask::Causal { corner: Corner::TopLeft }))),
            ("diagonal off by one", given.plain(&other(Mask::window(None, Some(1))))),
            ("d_q unscaled", BackwardPlain { d_q: scaled(&honest.d_q, 8.0), ..honest.clone() }),
            ("d_k unscaled", BackwardPlain { d_k: scaled(&honest.d_k, 8.0), ..honest.clone() }),
            ("d_v with the scale", BackwardPlain { d_v: scaled(&honest.d_v, 0.125), ..honest.clone() }),
            ("d_lse forgotten", with_d_lse(0.0)),
            ("d_lse with the other sign", with_d_lse(-1.0)),
            ("d_o by one row", Given { d_o: rolled(&given.d_o), ..given.clone() }.plain(&right)),
            ("d_k by one row", BackwardPlain { d_k: rolled(&honest.d_k), ..honest.clone() }),
            ("d_q added twice", BackwardPlain { d_q: scaled(&honest.d_q, 2.0), ..honest.clone() }),
            ("d_q a little off", BackwardPlain { d_q: scaled(&honest.d_q, 1.02), ..honest.clone() }),
        ];
        for (what, got) in &wrong {
            let report = judged(&expected, got);
            assert!(!report.passed(), "{dtype} {what}: {report}");
        }
    }
}

/// Equal values have a dQ of 0, as sums of terms that cancel: what is left are roundings. Their signs may be those of the f64
/// oracle's own, which is no common factor. Larger errors fail, and so does a factor of what is more than noise.
#[test]
fn noise_has_no_common_factor() {
    for (dropout, seqlen_kv) in [(0.0, 131), (0.999, 2000)] {
        let dims = Dims { batch: 1, seqlen_q: 400, seqlen_kv, heads_q: 2, heads_kv: 1, ..DIMS };
        let dropout = Dropout::new(dropout).unwrap();
        let forward = problem(DType::F16, dims, Mask::Full).to_builder().softcap(1.0).dropout(Some(dropout));
        let forward = forward.build().unwrap();
        let problem = BackwardProblem::builder(&forward).build().unwrap();
        let given = Given::normal(&problem, 65);
        let same = |shape| Tensor::from_fn(shape, |_| 0.75);
        // With dropped pairs dQ is only 0 where all keys are alike.
        let drops = dropout.dropped() > 0;
        let of_k = if drops { same(problem.d_k_shape()) } else { given.k };
        let of_v = same(problem.d_v_shape());
        let mask = DropoutMask::of(&forward, Some(crate::dropout_state(3, 5)));
        let modifiers = Modifiers { dropout: mask, ..Modifiers::default() };
        let inputs = [&given.q, &of_k, &of_v, &given.d_o];
        let expected = BackwardExpected::with(&problem, &Lengths::default(), inputs, None, modifiers, None).unwrap();
        let (oracle, honest) = (expected.oracle(), expected.plain());
        assert!(judged(&expected, honest).passed());
        let with_errors = |times: f64| {
            let mut got = honest.clone();
            let sizes = oracle.d_q_noise.deviation.data().iter().zip(oracle.d_q.data());
            for (got, (size, exact)) in got.d_q.data_mut().iter_mut().zip(sizes) {
                *got = exact + (times * ROUNDING * size).copysign(*exact);
            }
            judged(&expected, &got)
        };
        let report = with_errors(1.0);
        let largest = oracle.d_q.data().iter().fold(0.0_f64, |max, x| max.max(x.abs()));
        assert!(report.d_q.rms > 100.0 * largest, "{report}, {largest:e}");
        assert!(report.passed(), "{report}");
        assert!(!with_errors(20.0).passed());
        let mut got = honest.clone();
        got.d_v.data_mut().iter_mut().for_each(|x| *x *= 1.005);
        let report = judged(&expected, &got);
        assert!(drops || report.d_v.ratios.common > 1.0, "{report}");
    }
}

/// Weights below the smallest normal f32 may all be flushed to 0, which is one error of one sign for each pair.
#[test]
fn flushed_weights_pass() {
    let dims = Dims { seqlen_q: 400, seqlen_kv: 8, heads_q: 4, heads_kv: 1, batch: 1, ..SMALL };
    let problem = backward_problem(DType::BF16, dims, Mask::Full);
    let mut given = Given::normal(&problem, 62);
    // Key 0 scores 88.5 nats below the others: its weights are some 2^-127.
    let scale = f64::from(problem.forward().softmax_scale());
    given.q = Tensor::from_fn(problem.forward().q_shape(), |[_, _, _, d]| f64::from(d == 0));
    given.k = Tensor::from_fn(problem.forward().k_shape(), |[_, s, _, d]| {
        if s == 0 && d == 0 { round(DType::BF16, -86.4 / scale) } else { 0.0 }
    });
    given.d_o = Tensor::from_fn(problem.forward().o_shape(), |_| 1.0);
    let expected = given.expected(&problem);
    let mut got = given.plain(&problem);
    let flushed = expected.oracle().d_v.row(0, 0, 0).to_vec();
    assert!(flushed.iter().all(|&x| x > 0.0 && x < 1600.0 * f64::from(f32::MIN_POSITIVE)), "{flushed:?}");
    for gradient in [&mut got.d_k, &mut got.d_v] {
        gradient.row_mut(0, 0, 0).fill(0.0);
    }
    let report = judged(&expected, &got);
    assert!(report.worst_ratio() < 0.77, "{report}");
}

#[test]
fn one_wrong_element_of_a_gradient_fails() {
    let problem = backward_problem(DType::BF16, Dims { batch: 1, ..DIMS }, Mask::Full);
    let given = Given::normal(&problem, 61);
    let (expected, honest) = (given.expected(&problem), given.plain(&problem));
    for which in 0..3 {
        for value in [0.5, f64::NAN, f64::INFINITY] {
            let mut got = honest.clone();
            let tensor = [&mut got.d_q, &mut got.d_k, &mut got.d_v].into_iter().nth(which).unwrap();
            let row = tensor.row_mut(0, 69, 1);
            let size = row.iter().fold(0.0_f64, |a, b| a.max(b.abs()));
            row[63] += value * size;
            let report = judged(&expected, &got);
            assert!(!report.passed(), "{which} {value}: {report}");
            let figures = [&report.d_q, &report.d_k, &report.d_v][which];
            assert_eq!(figures.worst_at, [0, 69, 1, 63], "{which} {value}");
        }
    }
}

#[test]
fn gradients_without_pairs_must_be_exact() {
    // Under the causal mask five queries stand before the first key. Under the window the first three keys stand before every
    // query's keys.
    for (dims, mask, rows) in [
        (Dims { seqlen_q: 9, seqlen_kv: 4, ..DIMS }, Mask::causal(), (0, 5)),
        (Dims { seqlen_q: 4, seqlen_kv: 9, ..DIMS }, Mask::window(Some(2), Some(0)), (1, 3)),
    ] {
        let problem = backward_problem(DType::F16, Dims { batch: 1, ..dims }, mask);
        let given = Given::normal(&problem, 62);
        let (expected, honest) = (given.expected(&problem), given.plain(&problem));
        assert!(judged(&expected, &honest).passed());
        for token in 0..rows.1 {
            for bad in [1e-30, f64::NAN] {
                let mut got = honest.clone();
                let tensor = if rows.0 == 0 { &mut got.d_q } else { &mut got.d_k };
                assert!(tensor.row(0, token, 0).iter().all(|&x| x == 0.0));
                tensor.row_mut(0, token, 0)[3] = bad;
                assert!(!judged(&expected, &got).passed(), "{problem}: {token} {bad}");
            }
        }
    }
}

#[test]
fn nan_reaches_the_gradients_of_its_pairs_and_no_others() {
    let dims = Dims { batch: 1, seqlen_q: 6, seqlen_kv: 6, heads_q: 2, heads_kv: 1, ..SMALL };
    let problem = backward_problem(DType::F32, dims, Mask::window(Some(1), Some(0)));
    let clean = Given::normal(&problem, 63);
    let nan_rows =
        |t: &Tensor, head| (0..6).filter(|&s| t.row(0, s, head).iter().any(|x| x.is_nan())).collect::<Vec<_>>();
    let exact = |edit: &dyn Fn(&mut Given)| {
        let mut given = clean.clone();
        edit(&mut given);
        given.expected(&problem).oracle().clone()
    };
    // Query 3 of head 1 keeps keys 2 and 3.
    let bad = exact(&|given| given.q.row_mut(0, 3, 1)[2] = f64::NAN);
    assert_eq!((nan_rows(&bad.d_q, 0), nan_rows(&bad.d_q, 1)), (vec![], vec![3]));
    assert_eq!((nan_rows(&bad.d_k, 0), nan_rows(&bad.d_v, 0)), (vec![2, 3], vec![2, 3]));
    // Key 3 is kept by queries 3 and 4, which keep keys 2 to 4.
    for bad in
        [exact(&|given| given.k.row_mut(0, 3, 0)[2] = f64::NAN), exact(&|given| given.v.row_mut(0, 3, 0)[2] = f64::NAN)]
    {
        assert_eq!((nan_rows(&bad.d_q, 0), nan_rows(&bad.d_q, 1)), (vec![3, 4], vec![3, 4]));
        assert_eq!(nan_rows(&bad.d_k, 0), [2, 3, 4]);
    }
    let bad = exact(&|given| given.d_o.row_mut(0, 3, 0)[1] = f64::NAN);
    assert_eq!((nan_rows(&bad.d_q, 0), nan_rows(&bad.d_v, 0)), (vec![3], vec![2, 3]));
    assert!(bad.d_v.row(0, 2, 0)[0].is_finite() && bad.d_v.row(0, 2, 0)[1].is_nan());
}

#[test]
fn empty_backward_problems_and_wrong_inputs() {
    for dims in [Dims { batch: 0, ..DIMS }, Dims { seqlen_q: 0, ..DIMS }, Dims { batch: 1, seqlen_kv: 0, ..DIMS }] {
        let problem = backward_problem(DType::BF16, dims, Mask::causal());
        let given = Given::normal(&problem, 64);
        let zeros = [problem.d_q_shape(), problem.d_k_shape(), problem.d_v_shape()].map(Tensor::zeros);
        let [d_q, d_k, d_v] = &zeros;
        let expected = given.expected(&problem);
        assert_eq!(expected.check(d_q, d_k, d_v).unwrap().worst_ratio(), 0.0);
        let other = Tensor::zeros([1, 2, 3, 4]);
        for error in [
            expected.check(&other, d_k, d_v).unwrap_err(),
            expected.check(d_q, &other, d_v).unwrap_err(),
            expected.check(d_q, d_k, &other).unwrap_err(),
            backward(&problem, &given.q, &given.k, &given.v, &other, given.d_lse.as_deref()).unwrap_err(),
            backward_plain(&problem, &given.q, &given.k, &other, &given.d_o, given.d_lse.as_deref()).unwrap_err(),
            backward(&problem, &given.q, &given.k, &given.v, &given.d_o, Some(&[0.0; 3])).unwrap_err(),
        ] {
            assert!(matches!(error, Error::Shape { .. }), "{error}");
        }
        let error = backward(&problem, &given.q, &given.k, &given.v, &given.d_o, None).unwrap_err();
        assert!(error.to_string().starts_with("d_lse: missing"), "{error}");
    }
}
