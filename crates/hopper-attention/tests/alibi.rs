//! ALiBi and the maximum logit on the CPU through the public API: results against the oracle, the oracle against the definition,
//! finite differences and a problem without ALiBi that has the same scores, packed sequences, long distances, refusals.

use hopper_attention::reference::{self, BackwardExpected, Expected, Modifiers, Tensor};
use hopper_attention::{
    AlibiSlopes, Args, BackwardProblem, Corner, DType, Device, Dims, Float, ForwardProblem, ForwardProblemBuilder,
    Lengths, Mask, OutputOf, SequenceOffsets, Slot, Stream, bf16, f16,
};

mod common;

use common::{DIMS, into, of, values, wide, widened, workspace};

/// The slopes that models use: 2^(-8 h / heads), h from 1 on.
fn standard(heads: usize) -> Vec<f32> {
    (1..=heads).map(|h| (-8.0 * h as f32 / heads as f32).exp2()).collect()
}

/// Slopes of a problem, with those of `kind`.
fn slopes(problem: &ForwardProblem, kind: usize) -> Vec<f32> {
    let heads = problem.dims().heads_q;
    let batches = if problem.alibi() == Some(AlibiSlopes::PerBatch) { problem.dims().batch } else { 1 };
    let of = |batch: usize| match kind {
        0 => standard(heads),
        1 => (0..heads).map(|h| [3.0, -0.25, 0.0, 40.0][(batch + h) % 4]).collect(),
        _ => (0..heads).map(|h| 0.01 * (batch * heads + h) as f32 - 0.03).collect(),
    };
    (0..batches).flat_map(of).collect()
}

fn add_slopes<'a>(args: Args<'a>, problem: &ForwardProblem, slopes: &'a [f32]) -> Args<'a> {
    let dims = problem.dims();
    match problem.alibi() {
        None => args,
        Some(AlibiSlopes::PerBatch) => args.read(Slot::AlibiSlopes, of(slopes, [dims.batch, dims.heads_q])),
        Some(_) => args.read(Slot::AlibiSlopes, of(slopes, [dims.heads_q])),
    }
}

/// Inputs, and what a run made of them.
struct Case<T> {
    forward: ForwardProblem,
    slopes: Vec<f32>,
    sinks: Vec<f32>,
    inputs: [Vec<T>; 3],
    o: Vec<T>,
    lse: Vec<f32>,
    max_logits: Vec<f32>,
}

impl<T: Float + OutputOf<T>> Case<T> {
    fn new(forward: ForwardProblem, kind: usize) -> Self {
        let shapes = [forward.q_shape(), forward.k_shape(), forward.v_shape()];
        let inputs = [0, 1, 2].map(|i| values(shapes[i].iter().product(), 1 + i as u32));
        let slopes = if forward.alibi().is_some() { slopes(&forward, kind) } else { vec![] };
        Self::of(forward, slopes, inputs)
    }

    fn of(forward: ForwardProblem, slopes: Vec<f32>, inputs: [Vec<T>; 3]) -> Self {
        let heads = forward.dims().heads_q;
        let sinks: Vec<f32> = if forward.sinks().is_some() { values(heads, 9) } else { vec![] };
        let mut o = vec![T::from_f32(f32::NAN); forward.o_shape().iter().product()];
        let mut lse = vec![f32::NAN; forward.lse_shape().iter().product()];
        let mut max_logits = vec![f32::NAN; if forward.wants_max_logits() { heads } else { 0 }];
        let [q, k, v] = &inputs;
        let mut args = Args::new()
            .read(Slot::Q, of(q, forward.q_shape()))
            .read(Slot::K, of(k, forward.k_shape()))
            .read(Slot::V, of(v, forward.v_shape()))
            .write(Slot::O, into(&mut o, forward.o_shape()))
            .write(Slot::Lse, into(&mut lse, forward.lse_shape()));
        args = add_slopes(args, &forward, &slopes);
        if forward.sinks().is_some() {
            args = args.read(Slot::Sinks, of(&sinks, [heads]));
        }
        if forward.wants_max_logits() {
            args = args.write(Slot::MaxLogits, into(&mut max_logits, [heads]));
        }
        forward.plan(&Device::cpu()).unwrap().run(&Stream::Cpu, &mut workspace(), args).unwrap();
        Self { forward, slopes, sinks, inputs, o, lse, max_logits }
    }

    fn tensors(&self) -> [Tensor; 3] {
        let shapes = [self.forward.q_shape(), self.forward.k_shape(), self.forward.v_shape()];
        [0, 1, 2].map(|i| wide(&self.inputs[i], shapes[i]))
    }

    /// Calls `with` with the modifiers.
    fn modified<R>(&self, with: impl FnOnce(Modifiers<'_>) -> R) -> R {
        let (slopes, sinks) = (widened(&self.slopes), widened(&self.sinks));
        with(Modifiers {
            alibi_slopes: self.forward.alibi().map(|_| &slopes[..]),
            sinks: self.forward.sinks().map(|_| &sinks[..]),
            ..Modifiers::default()
        })
    }

    fn check(&self) {
        let [q, k, v] = &self.tensors();
        let expected = self.modified(|modifiers| {
            Expected::with(&self.forward, &Lengths::default(), [q, k, v], modifiers, 1.0, None).unwrap()
        });
        let (o, lse) = (wide(&self.o, self.forward.o_shape()), widened(&self.lse));
        let report = match self.forward.wants_max_logits() {
            true => expected.check_with(&o, Some(&lse), &widened(&self.max_logits)).unwrap(),
            false => expected.check(&o, Some(&lse)).unwrap(),
        };
        assert!(report.passed(), "{}: {report}", self.forward);
    }

    fn gradients(&self) -> [Vec<T>; 3] {
        let problem = BackwardProblem::builder(&self.forward).d_lse(true).build().unwrap();
        let d_o: Vec<T> = values(self.o.len(), 4);
        let d_lse: Vec<f32> = values(self.lse.len(), 5);
        let shapes = [problem.d_q_shape(), problem.d_k_shape(), problem.d_v_shape()];
        let mut out = shapes.map(|shape| vec![T::from_f32(f32::NAN); shape.iter().product()]);
        let [d_q, d_k, d_v] = &mut out;
        let [q, k, v] = &self.inputs;
        let args = Args::new()
            .read(Slot::Q, of(q, shapes[0]))
            .read(Slot::K, of(k, shapes[1]))
            .read(Slot::V, of(v, shapes[2]))
            .read(Slot::O, of(&self.o, self.forward.o_shape()))
            .read(Slot::Lse, of(&self.lse, self.forward.lse_shape()))
            .read(Slot::DO, of(&d_o, problem.d_o_shape()))
            .read(Slot::DLse, of(&d_lse, self.forward.lse_shape()))
            .write(Slot::DQ, into(d_q, shapes[0]))
            .write(Slot::DK, into(d_k, shapes[1]))
            .write(Slot::DV, into(d_v, shapes[2]));
        let args = add_slopes(args, &self.forward, &self.slopes);
        problem.plan(&Device::cpu()).unwrap().run(&Stream::Cpu, &mut workspace(), args).unwrap();
        let [q, k, v] = &self.tensors();
        let (d_o, d_lse) = (wide(&d_o, problem.d_o_shape()), widened(&d_lse));
        let expected = self.modified(|modifiers| {
            let inputs = [q, k, v, &d_o];
            BackwardExpected::with(&problem, &Lengths::default(), inputs, Some(&d_lse), modifiers, None).unwrap()
        });
        let [d_q, d_k, d_v] = [0, 1, 2].map(|i| wide(&out[i], shapes[i]));
        let report = expected.check(&d_q, &d_k, &d_v).unwrap();
        assert!(report.passed(), "{problem}: {report}");
        out
    }
}

fn options(dtype: DType, dims: Dims, mask: Mask) -> ForwardProblemBuilder {
    ForwardProblem::builder(dtype, dims).mask(mask).lse(true).max_logits(true)
}

fn both_passes<T: Float + OutputOf<T>>(dims: Dims, mask: Mask) {
    for (kind, slopes, cap, sinks) in [
        (0, AlibiSlopes::PerHead, 0.0, false),
        (1, AlibiSlopes::PerBatch, 0.0, false),
        (2, AlibiSlopes::PerHead, 15.0, false),
        (2, AlibiSlopes::PerBatch, 0.0, true),
        (1, AlibiSlopes::PerHead, 1.0, true),
    ] {
        let options = options(T::DTYPE, dims, mask).alibi(slopes).softcap(cap);
        let options = if sinks { options.sinks(DType::F32) } else { options };
        let case = Case::<T>::new(options.build().unwrap(), kind);
        case.check();
        case.gradients();
    }
}

#[test]
fn both_passes_keep_the_tolerance() {
    let top_left = Mask::Causal { corner: Corner::TopLeft };
    for mask in [Mask::Full, Mask::causal(), top_left, Mask::window(Some(2), Some(1)), Mask::prefix(3)] {
        both_passes::<f32>(DIMS, mask);
        both_passes::<bf16>(DIMS, mask);
        both_passes::<f16>(DIMS, mask);
    }
    // More than one block of queries and keys, rows without keys, and no keys at all.
    let long = Dims::new(1, 150, 3, 16).with_seqlen_kv(70);
    both_passes::<bf16>(long, Mask::causal());
    both_passes::<f32>(long.with_seqlen_kv(600), Mask::window(Some(40), Some(3)));
    both_passes::<f16>(long.with_seqlen_kv(600), Mask::Full);
    both_passes::<f32>(long.with_seqlen_kv(0), Mask::Full);
}

/// The maximum logit of a problem without other modifiers, and one that is off is noticed.
#[test]
fn maximum_logits_alone() {
    for (dtype, mask) in [(DType::F32, Mask::Full), (DType::BF16, Mask::causal())] {
        let problem = options(dtype, DIMS, mask).build().unwrap();
        if dtype == DType::F32 { Case::<f32>::new(problem, 0).check() } else { Case::<bf16>::new(problem, 0).check() }
    }
    let case = Case::<f32>::new(options(DType::F32, DIMS, Mask::causal()).softmax_scale(3.0).build().unwrap(), 0);
    let [q, k, v] = &case.tensors();
    let expected = Expected::new(&case.forward, q, k, v).unwrap();
    let o = wide(&case.o, case.forward.o_shape());
    let ratio = |off: f64| {
        let max_logits: Vec<f64> = widened(&case.max_logits).iter().map(|x| x * off).collect();
        expected.check_with(&o, None, &max_logits).unwrap().max_logits.unwrap().worst_ratio
    };
    assert!(ratio(1.0) <= 1.0 && ratio(1.0 + 1e-4) > 1.0 && ratio(f64::NAN) > 1.0);
    assert!(expected.check_with(&o, None, &[0.0]).is_err());
}

/// Scores by the definition, one by one.
#[test]
fn the_oracle_follows_the_definition() {
    let dims = Dims::new(2, 4, 4, 3).with_seqlen_kv(7).with_heads_kv(2);
    let top_left = Mask::Window { left: Some(3), right: Some(2), corner: Corner::TopLeft };
    for (mask, offset) in [(Mask::Full, 3), (Mask::causal(), 3), (Mask::window(None, Some(1)), 3), (top_left, 0)] {
        for (cap, alibi) in [(0.0, AlibiSlopes::PerHead), (1.5, AlibiSlopes::PerBatch)] {
            let forward = options(DType::F32, dims, mask).alibi(alibi).softcap(cap).softmax_scale(0.8).build().unwrap();
            let case = Case::<f32>::new(forward.clone(), 1);
            let [q, k, v] = case.tensors();
            let oracle = case.modified(|modifiers| {
                reference::forward_with(&forward, &Lengths::default(), [&q, &k, &v], modifiers).unwrap()
            });
            let mut max = [f64::NEG_INFINITY; 4];
            for (batch, head, query) in (0..2).flat_map(|b| (0..4).flat_map(move |h| (0..4).map(move |q| (b, h, q)))) {
                let slope = match alibi {
                    AlibiSlopes::PerBatch => case.slopes[batch * 4 + head],
                    _ => case.slopes[head],
                };
                let score = |key: usize| {
                    let product: f64 =
                        (0..3).map(|d| q.row(batch, query, head)[d] * k.row(batch, key, head / 2)[d]).sum();
                    let score = f64::from(0.8_f32) * product;
                    let capped = if cap == 0.0 { score } else { f64::from(cap) * (score / f64::from(cap)).tanh() };
                    capped - f64::from(slope) * (query as f64 + f64::from(offset) - key as f64).abs()
                };
                let keys: Vec<usize> = (0..7).filter(|&key| mask.keep(query, key, 4, 7)).collect();
                let sum: f64 = keys.iter().map(|&key| score(key).exp()).sum();
                let i = (batch * 4 + head) * 4 + query;
                if keys.is_empty() {
                    assert_eq!(oracle.lse[i], f64::NEG_INFINITY);
                    continue;
                }
                assert!((oracle.lse[i] - sum.ln()).abs() < 1e-10, "{forward} {i}: {} {}", oracle.lse[i], sum.ln());
                for d in 0..3 {
                    let o: f64 = keys.iter().map(|&key| score(key).exp() / sum * v.row(batch, key, head / 2)[d]).sum();
                    assert!((oracle.o.row(batch, query, head)[d] - o).abs() < 1e-10);
                }
                max[head] = keys.iter().map(|&key| score(key)).fold(max[head], f64::max);
            }
            for (head, max) in max.into_iter().enumerate() {
                assert!((oracle.max_logits[head].value - max).abs() < 1e-12, "{forward} {head}");
            }
        }
    }
}

/// With a causal mask the bias is a product of two more elements of Q and K. So a problem without ALiBi has the same results.
#[test]
fn the_oracle_agrees_with_a_problem_that_has_the_bias_in_q_and_k() {
    let dims = Dims::new(2, 6, 4, 5).with_seqlen_kv(9).with_heads_kv(4);
    let scale = 0.7_f32;
    let options = |dims| ForwardProblem::builder(DType::F32, dims).mask(Mask::causal()).softmax_scale(scale).lse(true);
    let forward = options(dims).alibi(AlibiSlopes::PerBatch).build().unwrap();
    let case = Case::<f32>::new(forward.clone(), 1);
    let [q, k, v] = case.tensors();
    let wider = options(dims.with_head_dim_qk(7)).build().unwrap();
    let q_wide = Tensor::from_fn(wider.q_shape(), |[b, s, h, d]| {
        let slope = f64::from(case.slopes[b * 4 + h]) / f64::from(scale);
        match d {
            5 => -slope * (s + 3) as f64,
            6 => slope,
            _ => q.row(b, s, h)[d],
        }
    });
    let k_wide = Tensor::from_fn(wider.k_shape(), |[b, s, h, d]| match d {
        5 => 1.0,
        6 => s as f64,
        _ => k.row(b, s, h)[d],
    });
    let lengths = Lengths::default();
    let d_o = wide(&values::<f32>(forward.o_shape().iter().product(), 4), forward.o_shape());
    let d_lse = widened(&values::<f32>(2 * 4 * 6, 5));
    let backward = |forward| BackwardProblem::builder(forward).d_lse(true).build().unwrap();
    let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
    let (with, gradients) = case.modified(|modifiers| {
        let inputs = [&q, &k, &v, &d_o];
        let gradients = reference::backward_with(&backward(&forward), &lengths, inputs, Some(&d_lse), modifiers);
        (reference::forward_with(&forward, &lengths, [&q, &k, &v], modifiers).unwrap(), gradients.unwrap())
    });
    let without = reference::forward(&wider, &q_wide, &k_wide, &v).unwrap();
    assert!(with.lse.iter().zip(&without.lse).all(|(&a, &b)| near(a, b)));
    assert!(with.o.data().iter().zip(without.o.data()).all(|(&a, &b)| near(a, b)));
    let wanted = reference::backward(&backward(&wider), &q_wide, &k_wide, &v, &d_o, Some(&d_lse)).unwrap();
    for (got, want) in [(&gradients.d_q, &wanted.d_q), (&gradients.d_k, &wanted.d_k), (&gradients.d_v, &wanted.d_v)] {
        let [batch, seqlen, heads, dim] = got.shape();
        for (b, s, h) in (0..batch).flat_map(|b| (0..seqlen).flat_map(move |s| (0..heads).map(move |h| (b, s, h)))) {
            assert!((0..dim).all(|d| near(got.row(b, s, h)[d], want.row(b, s, h)[d])), "{b} {s} {h}");
        }
    }
}

/// The oracle's gradients against the quotients of its own loss, with a cap and without a mask.
#[test]
fn finite_differences() {
    let dims = Dims::new(1, 4, 2, 5).with_seqlen_kv(6).with_heads_kv(1);
    let forward = options(DType::F32, dims, Mask::Full).alibi(AlibiSlopes::PerHead).softcap(1.0).build().unwrap();
    let problem = BackwardProblem::builder(&forward).build().unwrap();
    let (slopes, lengths) = ([0.3, -0.1], Lengths::default());
    let modifiers = Modifiers { alibi_slopes: Some(&slopes), ..Modifiers::default() };
    let of = |shape: [usize; 4], seed| wide(&values::<f32>(shape.iter().product(), seed), shape);
    let mut inputs = [of(forward.q_shape(), 1), of(forward.k_shape(), 2), of(forward.v_shape(), 3)];
    let d_o = of(forward.o_shape(), 4);
    let [q, k, v] = &inputs;
    let exact = reference::backward_with(&problem, &lengths, [q, k, v, &d_o], None, modifiers).unwrap();
    let loss = |[q, k, v]: &[Tensor; 3]| {
        let oracle = reference::forward_with(&forward, &lengths, [q, k, v], modifiers).unwrap();
        oracle.o.data().iter().zip(d_o.data()).map(|(a, b)| a * b).sum::<f64>()
    };
    for (i, gradient) in [&exact.d_q, &exact.d_k, &exact.d_v].into_iter().enumerate() {
        for at in 0..gradient.data().len() {
            let mut quotient = 0.0;
            for step in [1e-5, -1e-5] {
                inputs[i].data_mut()[at] += step;
                quotient += loss(&inputs) / (2.0 * step);
                inputs[i].data_mut()[at] -= step;
            }
            assert!((quotient - gradient.data()[at]).abs() < 1e-6, "{i} {at}: {quotient}, {}", gradient.data()[at]);
        }
    }
}

/// Two queries and three keys. The last query stands at the last key.
#[test]
fn by_hand() {
    let dims = Dims::new(1, 2, 1, 1).with_seqlen_kv(3);
    let forward = options(DType::F32, dims, Mask::Full).alibi(AlibiSlopes::PerHead).softmax_scale(1.0).build().unwrap();
    let case =
        Case::of(forward, vec![2.0], [vec![1.0_f32, 0.0], vec![0.0, 3.0, f32::NEG_INFINITY], vec![1.0, 2.0, 4.0]]);
    // Query 0 stands at key 1: scores 0 - 2, 3 and -inf. Query 1 at key 2: 0 - 4, 0 - 2 and 0 * -inf.
    let [a, b] = [-2.0, 3.0].map(f64::exp);
    assert!((f64::from(case.o[0]) - (a + 2.0 * b) / (a + b)).abs() < 1e-6, "{:?}", case.o);
    assert!((f64::from(case.lse[0]) - (a + b).ln()).abs() < 1e-6 && case.lse[1].is_nan(), "{:?}", case.lse);
    assert_eq!(case.max_logits, [3.0]);
    case.check();
}

/// A slope of 0 changes no bit, and the maximum logit none of the other outputs.
#[test]
fn what_changes_nothing() {
    let plain = Case::<f32>::new(ForwardProblem::builder(DType::F32, DIMS).lse(true).build().unwrap(), 0);
    let zero = options(DType::F32, DIMS, Mask::Full).alibi(AlibiSlopes::PerHead).build().unwrap();
    let zero = Case::<f32>::of(zero, vec![0.0; DIMS.heads_q], plain.inputs.clone());
    assert!(zero.o == plain.o && zero.lse == plain.lse && zero.gradients() == plain.gradients());
}

/// At 128k keys no bit of the bias is lost: two halves of the keys give the whole.
#[test]
fn long_distances() {
    let keys = 1 << 17;
    let dims = Dims::new(1, 1, 2, 1).with_seqlen_kv(keys).with_heads_kv(1);
    let slopes = vec![0.5, 1e-4];
    let whole = options(DType::F32, dims, Mask::causal()).alibi(AlibiSlopes::PerHead).build().unwrap();
    let inputs = [values::<f32>(2, 1), values(keys, 2), values(keys, 3)];
    let all = Case::of(whole.clone(), slopes.clone(), inputs.clone());
    all.check();
    let half = options(DType::F32, dims.with_seqlen_kv(keys / 2), Mask::causal()).alibi(AlibiSlopes::PerHead);
    let half = half.build().unwrap();
    let part = |at: usize| {
        let keys = at * keys / 2..(at + 1) * keys / 2;
        let inputs = [inputs[0].clone(), inputs[1][keys.clone()].to_vec(), inputs[2][keys].to_vec()];
        Case::of(half.clone(), slopes.clone(), inputs)
    };
    let [early, late] = [0, 1].map(part);
    for (head, slope) in slopes.iter().enumerate() {
        // In the half the query stands at the last key of it, half of all keys nearer.
        let shift = f64::from(*slope) * (keys / 2) as f64;
        let [a, b] = [f64::from(early.lse[head]) - shift, f64::from(late.lse[head])];
        let lse = a.max(b) + (-(a - b).abs()).exp().ln_1p();
        let o = f64::from(early.o[head]) * (a - lse).exp() + f64::from(late.o[head]) * (b - lse).exp();
        assert!((lse - f64::from(all.lse[head])).abs() < 2e-6 * lse.abs().max(1.0), "{lse} {}", all.lse[head]);
        assert!((o - f64::from(all.o[head])).abs() < 1e-5, "{o} {}", all.o[head]);
    }
    // A query that keeps far keys alone: the LSE is some 5e4, and right to its last bits.
    let far = Mask::Window { left: None, right: Some(9), corner: Corner::TopLeft };
    let far = options(DType::F32, dims.with_seqlen_q(keys).with_heads_q(1).with_seqlen_kv(40), far);
    let far = far.alibi(AlibiSlopes::PerHead).build().unwrap();
    let case = Case::<f32>::of(far.clone(), vec![0.5], [values(keys, 1), values(40, 2), values(40, 3)]);
    assert!(case.lse[keys - 1] < -6.5e4 && case.lse[keys - 1] > -6.6e4);
    case.check();
}

/// A head whose kept scores are all NaN or -inf, or that has no keys, has -inf. Nothing masked counts.
#[test]
fn maximum_logits_of_what_is_no_number() {
    let dims = Dims::new(1, 2, 2, 1).with_heads_kv(2);
    let forward = options(DType::F32, dims, Mask::causal()).softmax_scale(1.0).build().unwrap();
    let nan = f32::NAN;
    // Keys of head 0: NaN and 5, of head 1: 2 and a masked 100 for query 0, and query 1 is 0.
    let case = Case::of(forward.clone(), vec![], [vec![1.0, 1.0, 1.0, 0.0], vec![nan, 2.0, 5.0, 100.0], vec![1.0; 4]]);
    assert_eq!(case.max_logits, [5.0, 2.0]);
    let case =
        Case::of(forward, vec![], [vec![1.0; 4], vec![nan, f32::NEG_INFINITY, nan, f32::NEG_INFINITY], vec![1.0; 4]]);
    assert_eq!(case.max_logits, [f32::NEG_INFINITY; 2]);
    for dims in [dims.with_seqlen_kv(0), dims.with_seqlen_q(0), dims.with_batch(0)] {
        let empty = options(DType::F32, dims, Mask::causal()).build().unwrap();
        assert_eq!(Case::<f32>::new(empty, 0).max_logits, [f32::NEG_INFINITY; 2], "{dims:?}");
    }
}

/// Infinite scores count, and those that overflow are infinite: with a cap they are it. Scores of products that are infinite with
/// both signs, or 0 times infinity, are NaN, and do not count.
#[test]
fn maximum_logits_of_infinite_scores() {
    let (inf, max) = (f32::INFINITY, f32::MAX);
    // One query, three keys.
    let dims = Dims::new(1, 1, 1, 2).with_seqlen_kv(3);
    let of = |cap: Option<f32>, q: [f32; 2], k: [f32; 6]| {
        let options = options(DType::F32, dims, Mask::Full).softmax_scale(1.0);
        let options = if let Some(cap) = cap { options.softcap(cap) } else { options };
        let case = Case::of(options.build().unwrap(), vec![], [q.to_vec(), k.to_vec(), vec![1.0; 6]]);
        let got = case.max_logits[0];
        // The judge knows: it takes this, and nothing that is wrong.
        let [q, k, v] = &case.tensors();
        let expected = Expected::new(&case.forward, q, k, v).unwrap();
        let (o, lse) = (wide(&case.o, case.forward.o_shape()), widened(&case.lse));
        let passes = |logit: f32| {
            let report = expected.check_with(&o, Some(&lse), &[f64::from(logit)]).unwrap();
            report.max_logits.unwrap().worst_ratio <= 1.0
        };
        assert!(passes(got) && ![f32::NAN, 1e36, -1e36].into_iter().any(passes), "{got}");
        let others = [inf, -inf, 1.0, -1.0, 5.0].into_iter().filter(|&x| x != got);
        (got, others.filter(|&x| passes(x)).collect::<Vec<_>>())
    };
    // Infinite keys: with one sign, with both, and times 0.
    assert_eq!(of(None, [1.0, 1.0], [1.0, 2.0, inf, 2.0, 1.0, 4.0]), (inf, vec![]));
    assert_eq!(of(None, [1.0, 1.0], [1.0, 2.0, inf, -inf, 1.0, 4.0]), (5.0, vec![]));
    assert_eq!(of(None, [1.0, 0.0], [1.0, inf, 5.0, 2.0, -inf, 4.0]), (5.0, vec![]));
    assert_eq!(of(None, [1.0, 1.0], [-inf, 2.0, -inf, -2.0, -inf, -inf]), (-inf, vec![]));
    // The cap is what is left of an infinity.
    assert_eq!(of(Some(1.0), [1.0, 1.0], [-inf, 2.0, -inf, -2.0, -inf, -inf]), (-1.0, vec![]));
    assert_eq!(of(Some(5.0), [1.0, 1.0], [1.0, 2.0, inf, 2.0, 1.0, 4.0]), (5.0, vec![]));
    // Sums that overflow in every order, and one that does beside a product of the other sign, in some orders.
    assert_eq!(of(None, [max, 1.0], [-3.0, 1.0, 3.0, 2.0, -2.0, 2.0]), (inf, vec![]));
    assert_eq!(of(Some(1.0), [max, 1.0], [-3.0, 1.0, -4.0, 2.0, -2.0, 2.0]), (-1.0, vec![]));
    // (Where it does not, nothing is left of it but its error.)
    let (got, others) = of(None, [max, max], [1.0, -1.0, 0.0, 0.0, 0.0, 0.0]);
    assert!(got == 0.0 || got == inf, "{got}");
    assert!(others == [1.0, 5.0] || others == [inf, 1.0, 5.0], "{others:?}");
    let (got, others) = of(Some(3.0), [max, max], [1.0, -1.0, 0.0, 0.0, 0.0, 0.0]);
    assert!(got == 0.0 || got == 3.0, "{got}");
    assert_eq!(others, [1.0]);
}

/// Without queries the maximum logits are -inf, and are written: no rows at all, and rows of no sequence.
#[test]
fn maximum_logits_of_empty_sequences() {
    for (rows, fills) in [(0, false), (0, true), (6, false), (6, true)] {
        let dims = Dims::new(3, rows, 2, 8).with_seqlen_kv(6);
        for alibi in [None, Some(AlibiSlopes::PerBatch)] {
            let options = options(DType::F32, dims, Mask::causal()).packed(true).fill_gaps(fills);
            let packed = if let Some(alibi) = alibi { options.alibi(alibi) } else { options }.build().unwrap();
            let slopes = if alibi.is_some() { slopes(&packed, 1) } else { vec![] };
            let [q, k, v] = [(rows, 1), (6, 2), (6, 3)].map(|(rows, seed)| values::<f32>(rows * 16, seed));
            let (mut o, mut lse, mut max_logits) = (vec![7.0; rows * 16], vec![7.0; rows * 2], [f32::NAN; 2]);
            let lists = [[0, 0, 0, 0], [0, 2, 2, 6]].map(|list| SequenceOffsets::new(&Stream::Cpu, &list).unwrap());
            let args = Args::new()
                .read(Slot::Q, of(&q, [rows, 2, 8]))
                .read(Slot::K, of(&k, [6, 2, 8]))
                .read(Slot::V, of(&v, [6, 2, 8]))
                .write(Slot::O, into(&mut o, [rows, 2, 8]))
                .write(Slot::Lse, into(&mut lse, [2, rows]))
                .write(Slot::MaxLogits, into(&mut max_logits, [2]))
                .offsets(Slot::CuSeqlensQ, &lists[0])
                .offsets(Slot::CuSeqlensKv, &lists[1]);
            let args = add_slopes(args, &packed, &slopes);
            packed.plan(&Device::cpu()).unwrap().run(&Stream::Cpu, &mut workspace(), args).unwrap();
            assert_eq!(max_logits, [f32::NEG_INFINITY; 2], "{packed}");
            let (of_o, of_lse) = if fills { (0.0, f32::NEG_INFINITY) } else { (7.0, 7.0) };
            assert!(o.iter().all(|&x| x == of_o) && lse.iter().all(|&x| x == of_lse), "{packed}");
        }
    }
}

/// Sequences that follow each other, each with its own lengths and slopes.
#[test]
fn packed_sequences() {
    let dims = Dims::new(3, 9, 4, 8).with_seqlen_kv(14).with_heads_kv(2);
    let offsets = [[0, 4, 4, 9], [0, 6, 9, 14]];
    for (alibi, mask) in [
        (AlibiSlopes::PerHead, Mask::causal()),
        (AlibiSlopes::PerBatch, Mask::Full),
        (AlibiSlopes::PerBatch, Mask::Causal { corner: Corner::TopLeft }),
    ] {
        let packed = options(DType::F32, dims, mask).packed(true).alibi(alibi).build().unwrap();
        let slopes = slopes(&packed, 1);
        let [q, k, v] = [packed.q_shape(), packed.k_shape(), packed.v_shape()];
        let inputs = [(q, 1), (k, 2), (v, 3)].map(|(shape, seed)| values::<f32>(shape.iter().product(), seed));
        let mut o = vec![f32::NAN; packed.o_shape().iter().product()];
        let mut lse = vec![f32::NAN; packed.lse_shape().iter().product()];
        let mut max_logits = vec![f32::NAN; 4];
        let lists = offsets.map(|offsets| SequenceOffsets::new(&Stream::Cpu, &offsets).unwrap());
        let rows = |[_, rows, heads, dim]: [usize; 4]| [rows, heads, dim];
        let args = Args::new()
            .read(Slot::Q, of(&inputs[0], rows(q)))
            .read(Slot::K, of(&inputs[1], rows(k)))
            .read(Slot::V, of(&inputs[2], rows(v)))
            .write(Slot::O, into(&mut o, rows(packed.o_shape())))
            .write(Slot::Lse, into(&mut lse, [4, 9]))
            .write(Slot::MaxLogits, into(&mut max_logits, [4]))
            .offsets(Slot::CuSeqlensQ, &lists[0])
            .offsets(Slot::CuSeqlensKv, &lists[1]);
        let args = add_slopes(args, &packed, &slopes);
        packed.plan(&Device::cpu()).unwrap().run(&Stream::Cpu, &mut workspace(), args).unwrap();
        let lengths =
            Lengths { cu_seqlens_q: Some(&offsets[0]), cu_seqlens_kv: Some(&offsets[1]), ..Lengths::default() };
        let wide_slopes = widened(&slopes);
        let modifiers = Modifiers { alibi_slopes: Some(&wide_slopes), ..Modifiers::default() };
        let tensors = [(0, q), (1, k), (2, v)].map(|(i, shape)| wide(&inputs[i], shape));
        let [q, k, v] = &tensors;
        let expected = Expected::with(&packed, &lengths, [q, k, v], modifiers, 1.0, None).unwrap();
        let tensor = wide(&o, packed.o_shape());
        let report = expected.check_with(&tensor, Some(&widened(&lse)), &widened(&max_logits)).unwrap();
        assert!(report.passed(), "{packed}: {report}");
        // The last sequence by itself has the same bits.
        let alone = options(DType::F32, dims.with_batch(1).with_seqlen_q(5).with_seqlen_kv(5), mask);
        let alone = alone.alibi(AlibiSlopes::PerHead).build().unwrap();
        let own = slopes[slopes.len() - 4..].to_vec();
        let case = Case::of(
            alone,
            own,
            [&inputs[0][4 * 32..], &inputs[1][9 * 16..], &inputs[2][9 * 16..]].map(<[f32]>::to_vec),
        );
        assert_eq!(case.o, o[4 * 32..], "{packed}");
    }
}

#[test]
fn slopes_of_another_shape_are_refused() {
    let forward = options(DType::F32, DIMS, Mask::Full).max_logits(false).alibi(AlibiSlopes::PerBatch).build().unwrap();
    let [q, k, v] = [forward.q_shape(), forward.k_shape(), forward.v_shape()];
    let run = |forward: &ForwardProblem, slopes: Option<&[f32]>, per_batch: bool| {
        let inputs = [q, k, v].map(|shape| values::<f32>(shape.iter().product(), 1));
        let mut o = vec![0.0; forward.o_shape().iter().product()];
        let mut lse = vec![0.0; forward.lse_shape().iter().product()];
        let mut args = Args::new()
            .read(Slot::Q, of(&inputs[0], q))
            .read(Slot::K, of(&inputs[1], k))
            .read(Slot::V, of(&inputs[2], v))
            .write(Slot::O, into(&mut o, forward.o_shape()))
            .write(Slot::Lse, into(&mut lse, forward.lse_shape()));
        if let Some(slopes) = slopes {
            args = match per_batch {
                true => args.read(Slot::AlibiSlopes, of(slopes, [1, slopes.len()])),
                false => args.read(Slot::AlibiSlopes, of(slopes, [slopes.len()])),
            };
        }
        forward.plan(&Device::cpu()).unwrap().run(&Stream::Cpu, &mut workspace(), args).unwrap_err().to_string()
    };
    let heads = DIMS.heads_q;
    let text = "alibi_slopes: missing; allowed: the tensor that the problem, made with alibi, reads";
    assert_eq!(run(&forward, None, false), text);
    let text = format!("alibi_slopes: shape [{heads}], expected [{}, {heads}] [batch, heads]", DIMS.batch);
    assert_eq!(run(&forward, Some(&vec![0.5; heads]), false), text);
    let shared = forward.to_builder().alibi(AlibiSlopes::PerHead).build().unwrap();
    let text = format!("alibi_slopes: shape [1, {heads}], expected [{heads}] [heads]");
    assert_eq!(run(&shared, Some(&vec![0.5; heads]), true), text);
    let plain = forward.to_builder().operand(Slot::AlibiSlopes, false).build().unwrap();
    let text = "alibi_slopes: given; allowed: none, since the problem was made without alibi";
    assert_eq!(run(&plain, Some(&vec![0.5; heads]), false), text);
}
