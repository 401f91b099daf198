//! Whether the tolerance says the truth: it is given results that are right, and must say so.
//!
//! `HATTN_JUDGE_CASES` and `HATTN_JUDGE_SEED` make a longer run of other random problems, which prints all that fails.

use hopper_attention::reference::{BackwardPlain, Expected, Modifiers, Plain, Tensor, backward_with};
use hopper_attention::{BackwardProblem, Bias, DType, Dims, Element, ForwardProblem, Lengths, Mask, bf16, f16};
use hopper_attention_verify::blocks::Blocks;
use hopper_attention_verify::case::Case;
use hopper_attention_verify::data::{Input, Poison, Values};
use hopper_attention_verify::fp8::Operands;
use hopper_attention_verify::fuzz::{Fuzz, Pass, Problem};
use hopper_attention_verify::packing::Packing;
use hopper_attention_verify::ready::{Ready, Verdict};
use hopper_attention_verify::sinks::Sinks;
use hopper_attention_verify::{backward, forward};

/// An honest computation.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Honest {
    /// The plain one.
    Plain,
    /// The plain one, judged as if the plain one had no errors.
    Unlucky,
    /// The exact results, rounded.
    Exact,
    /// The exact results, rounded, with 0 in place of subnormal f32.
    Flushed,
    /// The CPU backend.
    Cpu,
}

fn round(dtype: DType, honest: Honest, x: f64) -> f64 {
    let narrow = x as f32;
    let narrow = if honest == Honest::Flushed && narrow.abs() < f32::MIN_POSITIVE { 0.0 } else { narrow };
    match dtype {
        DType::BF16 => f64::from(<bf16 as Element>::from_f32(narrow).to_f32()),
        DType::F16 => f64::from(<f16 as Element>::from_f32(narrow).to_f32()),
        _ => f64::from(narrow),
    }
}

fn rounded(dtype: DType, honest: Honest, values: &[f64]) -> Vec<f64> {
    values.iter().map(|&x| round(dtype, honest, x)).collect()
}

fn rounded_tensor(dtype: DType, honest: Honest, tensor: &Tensor) -> Tensor {
    let mut tensor = tensor.clone();
    tensor.data_mut().iter_mut().for_each(|x| *x = round(dtype, honest, *x));
    tensor
}

fn judged(expected: &Expected, dtype: DType, honest: Honest) -> Verdict {
    let exact = expected.oracle();
    let logits: Vec<f64> = exact.max_logits.iter().map(|logit| logit.value).collect();
    let got = match honest {
        Honest::Plain | Honest::Unlucky => expected.plain().clone(),
        _ => Plain {
            o: rounded_tensor(dtype, honest, &exact.o),
            lse: rounded(DType::F32, honest, &exact.lse),
            max_logits: rounded(DType::F32, honest, &logits),
        },
    };
    let judge = if honest == Honest::Unlucky { expected.clone().with_exact_plain() } else { expected.clone() };
    let report = match got.max_logits.is_empty() {
        true => judge.check(&got.o, Some(&got.lse)),
        false => judge.check_with(&got.o, Some(&got.lse), &got.max_logits),
    };
    (&report.unwrap()).into()
}

fn of_forward<T: Poison>(problem: &Problem, honest: Honest) -> Verdict {
    let prepared = forward::Prepared::<T>::of(&problem.case);
    if honest == Honest::Cpu { prepared.verdict_on_cpu() } else { judged(&prepared.expected, T::DTYPE, honest) }
}

fn of_backward<T: Poison>(problem: &Problem, honest: Honest) -> Verdict {
    let prepared = backward::Prepared::<T>::of(&problem.case);
    let exact = prepared.expected.oracle();
    let bias = prepared.problem.forward().bias().map_or(DType::F32, |bias| bias.dtype());
    let got = match honest {
        Honest::Cpu => return prepared.verdict_on_cpu(),
        Honest::Plain | Honest::Unlucky => prepared.expected.plain().clone(),
        _ => {
            let [d_q, d_k, d_v] = [&exact.d_q, &exact.d_k, &exact.d_v].map(|x| rounded_tensor(T::DTYPE, honest, x));
            let d_bias = rounded(bias, honest, &exact.d_bias);
            BackwardPlain { d_q, d_k, d_v, d_sinks: rounded(DType::F32, honest, &exact.d_sinks), d_bias }
        }
    };
    let judge = prepared.expected.compute().clone();
    let judge = if honest == Honest::Unlucky { judge.with_exact_plain() } else { judge };
    (&judge.check_all(&got).unwrap()).into()
}

fn verdict(problem: &Problem, honest: Honest) -> Verdict {
    match (problem.pass, problem.dtype) {
        (Pass::Forward, DType::BF16) => of_forward::<bf16>(problem, honest),
        (Pass::Forward, DType::F16) => of_forward::<f16>(problem, honest),
        (Pass::Forward, _) => of_forward::<f32>(problem, honest),
        (Pass::Backward, DType::BF16) => of_backward::<bf16>(problem, honest),
        (Pass::Backward, DType::F16) => of_backward::<f16>(problem, honest),
        (Pass::Backward, _) => of_backward::<f32>(problem, honest),
        (_, dtype) => {
            let operands = Operands::of_case(&problem.case, &problem.forward(), problem.fp8.hadamard);
            if honest != Honest::Cpu {
                return judged(&operands.expected(), dtype, honest);
            }
            let (o, lse) = operands.run();
            (&operands.expected().check(&o, Some(&lse)).unwrap()).into()
        }
    }
}

/// A problem that takes a moment: the same with fewer rows, or none if it is a packed one that is larger.
fn small(mut problem: Problem) -> Option<Problem> {
    let dims = problem.case.dims;
    if problem.pass == Pass::Quantize {
        return None;
    }
    if dims.batch * dims.heads_q * dims.seqlen_q * dims.seqlen_kv > 60_000 {
        if !problem.case.packing.is_none() {
            return None;
        }
        let (queries, keys) = (dims.seqlen_q.min(40), dims.seqlen_kv.min(100));
        problem.case.dims = dims.with_batch(1).with_seqlen_q(queries).with_seqlen_kv(keys);
    }
    let dims = problem.case.dims;
    let head_dims = (dims.head_dim_qk.min(64), dims.head_dim_vo.min(32));
    problem.case.dims = dims.with_head_dim_qk(head_dims.0).with_head_dim_vo(head_dims.1);
    Some(problem)
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

#[test]
fn honest_results_are_right() {
    let mut fuzz = Fuzz::new(number("HATTN_JUDGE_SEED", 3), true);
    let all = std::env::var("HATTN_JUDGE_UNLUCKY").is_ok();
    let (cases, mut wrong) = (number("HATTN_JUDGE_CASES", 200), 0);
    for _ in 0..cases {
        let Some(problem) = small(fuzz.draw().unwrap().problem()) else { continue };
        let unlucky = all.then_some(Honest::Unlucky);
        for honest in [Honest::Plain, Honest::Exact, Honest::Flushed, Honest::Cpu].into_iter().chain(unlucky) {
            if let Some(why) = verdict(&problem, honest).wrong {
                wrong += 1;
                println!("WRONG {honest:?} {problem}: {why}");
            }
        }
    }
    assert_eq!(wrong, 0, "of {cases} cases");
}

/// The verdict on results of the backward pass: the exact ones, rounded, and changed.
fn backward_verdict<T: Poison>(prepared: &backward::Prepared<T>, change: impl FnOnce(&mut BackwardPlain)) -> Verdict {
    let exact = prepared.expected.oracle();
    let [d_q, d_k, d_v] = [&exact.d_q, &exact.d_k, &exact.d_v].map(|x| rounded_tensor(T::DTYPE, Honest::Exact, x));
    let mut got = BackwardPlain { d_q, d_k, d_v, d_sinks: exact.d_sinks.clone(), d_bias: exact.d_bias.clone() };
    change(&mut got);
    (&prepared.expected.check_all(&got).unwrap()).into()
}

/// dV of one key, which all queries give all of their weight, is the sum of dO.
#[test]
fn what_is_beyond_the_type_may_be_infinite() {
    let of_sum = |values: [f64; 2], got: f64| {
        let prepared = backward::Prepared::<f16>::edited(&Case::new(2, 1, 8, Mask::Full).heads(1, 1, 1), |input, x| {
            if input == Input::DO {
                (0..2).for_each(|query| x.row_mut(0, query, 0).fill(values[query]));
            }
        });
        let exact = prepared.expected.oracle().d_v.data()[3];
        assert_eq!(exact, values[0] + values[1]);
        backward_verdict(&prepared, |gradients| gradients.d_v.data_mut()[3] = got).wrong
    };
    let inf = f64::INFINITY;
    for (values, right, wrong) in [
        // Beyond the largest number, 65504, by far; and not beyond what rounds to it.
        ([6e4, 6e4], vec![inf], vec![-inf, 65504.0, f64::NAN]),
        ([-6e4, -1.2e4], vec![-inf], vec![inf, -65504.0]),
        ([6e4, 5508.0], vec![65504.0, inf], vec![-inf, 65024.0]),
        ([6e4, 4.0], vec![60000.0], vec![inf, 65504.0]),
        ([1.0, 4.0], vec![5.0], vec![inf, -inf]),
    ] {
        for got in right {
            let found = of_sum(values, got);
            assert!(found.is_none(), "{got} of {values:?}: {found:?}");
        }
        for got in wrong {
            assert!(of_sum(values, got).is_some(), "{got} of {values:?}");
        }
    }
}

/// A GPU makes 0 of a P below the smallest normal f32, and with it of all that a key has. Of a larger one it must not.
#[test]
fn weights_that_are_flushed_may_leave_nothing() {
    for (length, right) in [(43.75, true), (45.0, true), (41.0, false), (20.0, false)] {
        // The second key scores 2 * length less than the first.
        let prepared = backward::Prepared::<bf16>::edited(
            &Case::new(80, 2, 16, Mask::Full).heads(1, 1, 1),
            |input, x| match input {
                Input::Q => x.data_mut().chunks_mut(16).for_each(|row| row[0] = 8.0),
                Input::K => {
                    x.data_mut().fill(0.0);
                    x.row_mut(0, 1, 0)[0] = -length;
                }
                _ => {}
            },
        );
        let exact = prepared.expected.oracle();
        assert!(exact.d_k.row(0, 1, 0).iter().chain(exact.d_v.row(0, 1, 0)).all(|&x| x != 0.0));
        let wrong = backward_verdict(&prepared, |gradients| {
            gradients.d_k.row_mut(0, 1, 0).fill(0.0);
            gradients.d_v.row_mut(0, 1, 0).fill(0.0);
        });
        assert_eq!(wrong.wrong.is_none(), right, "{length}: {}", wrong.report);
    }
}

/// O is 0 where there is no key, whatever dO is: the gradient of a sink is as if that were any other number.
#[test]
fn the_d_o_of_rows_without_keys_has_no_part() {
    let masked = Case::new(9, 4, 16, Mask::causal());
    let packing =
        Packing { cu_seqlens_q: Some(vec![0, 3, 7, 9]), cu_seqlens_kv: Some(vec![0, 2, 2, 4]), ..Packing::default() };
    let packed = Case { packing, ..Case::new(9, 4, 16, Mask::Full).heads(3, 2, 1) };
    let cases: [(Case, &[usize]); 4] = [
        (Case::new(9, 0, 16, Mask::Full), &[0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (masked.clone(), &[0, 1, 2, 3, 4]),
        (packed, &[3, 4, 5, 6]),
        (Case::new(9, 4, 16, Mask::Full).blocks(Blocks::Nothing), &[0, 1, 2, 3, 4, 5, 6, 7, 8]),
    ];
    for ((case, rows), lse) in cases.into_iter().flat_map(|case| [(case.clone(), false), (case, true)]) {
        let case = Case { sinks: Sinks::Normal, lse, ..case };
        let clean = backward::Prepared::<bf16>::new(&case);
        for garbage in [f64::NAN, f64::INFINITY] {
            let prepared = backward::Prepared::<bf16>::edited(&case, |input, x| {
                if input == Input::DO {
                    (0..2).for_each(|head| rows.iter().for_each(|&row| x.row_mut(0, row, head).fill(garbage)));
                }
            });
            let (exact, plain) = (prepared.expected.oracle(), prepared.expected.plain());
            assert_eq!(exact.d_sinks, clean.expected.oracle().d_sinks, "{case}");
            assert_eq!(plain.d_sinks, clean.expected.plain().d_sinks, "{case}");
            assert!(lse || rows.len() < 9 || exact.d_sinks == [0.0; 2], "{case}");
            assert!(!lse || exact.d_sinks.iter().all(|x| *x != 0.0 && x.is_finite()), "{case}");
            let [got, of_clean] = [&prepared, &clean].map(|prepared| prepared.on_cpu().unwrap().tensors().d_sinks);
            assert_eq!(got, of_clean, "{case}");
            let wrong = prepared.verdict_on_cpu().wrong;
            assert!(wrong.is_none(), "{case}: {wrong:?}");
        }
        // That of a row with keys has.
        let other = backward::Prepared::<bf16>::edited(&case, |input, x| {
            if input == Input::DO {
                x.data_mut().fill(f64::NAN);
            }
        });
        assert_eq!(rows.len() < 9, other.expected.oracle().d_sinks[0].is_nan(), "{case}");
    }
}

/// Values next to the least number of f16 are rounded in steps of its size. That is no common factor. A factor is.
#[test]
fn steps_of_the_least_number_are_no_factor() {
    for seed in 0..12 {
        let case = Case { values: Values::Tiny, seed, ..Case::new(120, 185, 24, Mask::Full).heads(2, 4, 2) };
        let prepared = forward::Prepared::<f16>::new(&case);
        let verdict = judged(&prepared.expected.clone(), DType::F16, Honest::Exact);
        assert!(verdict.wrong.is_none(), "{seed}: {verdict:?}");
        let exact = prepared.expected.oracle();
        let mut larger = exact.o.clone();
        larger.data_mut().iter_mut().for_each(|x| *x = round(DType::F16, Honest::Exact, 1.01 * *x));
        assert!(!prepared.expected.check(&larger, None).unwrap().passed(), "{seed}");
    }
}

/// Beside a bias of -1e30 an LSE has no bits for the number of keys, but P is what it is.
#[test]
fn weights_beside_a_large_bias_have_a_sum_of_one() {
    let dims = Dims::new(1, 1, 1, 8).with_seqlen_kv(4);
    let forward = ForwardProblem::builder(DType::F32, dims).bias(Some(Bias::new(DType::F32))).build().unwrap();
    let problem = BackwardProblem::builder(&forward).build().unwrap();
    let q = Tensor::from_fn([1, 1, 1, 8], |[.., d]| d as f64);
    let k = Tensor::from_fn([1, 4, 1, 8], |[_, key, _, d]| (key * d) as f64 / 8.0);
    let modifiers = Modifiers { bias: Some(&[-1e30; 4]), ..Modifiers::default() };
    let oracle = backward_with(&problem, &Lengths::default(), [&q, &k, &k, &q], None, modifiers).unwrap();
    assert_eq!(oracle.d_v.row(0, 2, 0), q.data().iter().map(|x| x / 4.0).collect::<Vec<_>>());
}
