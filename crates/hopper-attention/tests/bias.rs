//! The additive bias and its gradient on the CPU through the public API: results against the oracle, the oracle against the
//! definition and finite differences for each shared dimension, a bias that is ALiBi or a mask, hidden rows, NaN, strides, refusals.

use hopper_attention::reference::{self, BackwardExpected, BackwardPlain, Expected, Modifiers, Tensor};
use hopper_attention::{
    AlibiSlopes, Args, BackwardProblem, Bias, Corner, DType, Device, Dims, Element, Float, ForwardArgs, ForwardProblem,
    ForwardProblemBuilder, Layout, Lengths, Mask, OutputOf, SequenceOffsets, SequenceRows, Slot, Stream, TensorRef,
    UsedLengths, bf16, f16,
};

mod common;

use common::{DIMS, into, of, read, values, wide, widened, workspace, write};

const HIDDEN: f32 = f32::NEG_INFINITY;

/// Every form of a bias.
fn forms(dtype: DType) -> impl Iterator<Item = Bias> {
    (0..8).map(move |bits| Bias::new(dtype).per_batch(bits & 1 != 0).per_head(bits & 2 != 0).per_query(bits & 4 != 0))
}

/// Between -3 and 3. Some hide their pair, and all those of a row in each 13.
fn some_hidden(shape: [usize; 4]) -> Vec<f32> {
    let keys = shape[3].max(1);
    let hidden = |i: usize| i % 5 == 3 || (i / keys) % 13 == 4;
    let numbers = values::<f32>(shape.iter().product(), 77).into_iter().enumerate();
    numbers.map(|(i, x)| if hidden(i) { HIDDEN } else { 3.0 * x }).collect()
}

/// Inputs, and what a run made of them. `B` is the type of the bias.
struct Case<T, B> {
    forward: ForwardProblem,
    bias: Vec<B>,
    sinks: Vec<f32>,
    slopes: Vec<f32>,
    inputs: [Vec<T>; 3],
    o: Vec<T>,
    lse: Vec<f32>,
    max_logits: Vec<f32>,
}

/// dQ, dK, dV, dSink and dBias.
type Gradients<T, B> = ([Vec<T>; 3], Vec<f32>, Vec<B>);

impl<T: Float + OutputOf<T>, B: Element> Case<T, B> {
    fn new(forward: ForwardProblem) -> Self {
        let bias = some_hidden(forward.bias_shape()).into_iter().map(B::from_f32).collect();
        Self::with(forward, bias)
    }

    fn with(forward: ForwardProblem, bias: Vec<B>) -> Self {
        let shapes = [forward.q_shape(), forward.k_shape(), forward.v_shape()];
        Self::of(forward, bias, [0, 1, 2].map(|i| values(shapes[i].iter().product(), 1 + i as u32)))
    }

    fn of(forward: ForwardProblem, bias: Vec<B>, inputs: [Vec<T>; 3]) -> Self {
        let heads = forward.dims().heads_q;
        let sinks: Vec<f32> = if forward.sinks().is_some() { values(heads, 9) } else { vec![] };
        let slopes: Vec<f32> = if forward.alibi().is_some() { values(heads, 10) } else { vec![] };
        let (o, lse) = (vec![T::from_f32(f32::NAN); forward.o_shape().iter().product()], vec![]);
        let mut case = Self { forward, bias, sinks, slopes, inputs, o, lse, max_logits: vec![] };
        case.run();
        case
    }

    fn run(&mut self) {
        let forward = &self.forward;
        let (mut o, mut lse) = (self.o.clone(), vec![f32::NAN; forward.lse_shape().iter().product()]);
        let mut max_logits = vec![f32::NAN; forward.dims().heads_q];
        let shapes = [forward.q_shape(), forward.k_shape(), forward.v_shape()];
        let args = self.add_modifiers(Args::new(), forward.sinks().is_some());
        let args = args
            .read(Slot::Q, of(&self.inputs[0], shapes[0]))
            .read(Slot::K, of(&self.inputs[1], shapes[1]))
            .read(Slot::V, of(&self.inputs[2], shapes[2]))
            .write(Slot::O, into(&mut o, forward.o_shape()))
            .write(Slot::Lse, into(&mut lse, forward.lse_shape()))
            .write(Slot::MaxLogits, into(&mut max_logits, [forward.dims().heads_q]));
        forward.plan(&Device::cpu()).unwrap().run(&Stream::Cpu, &mut workspace(), args).unwrap();
        (self.o, self.lse, self.max_logits) = (o, lse, max_logits);
    }

    fn add_modifiers<'a>(&'a self, mut args: Args<'a>, sinks: bool) -> Args<'a> {
        let heads = self.forward.dims().heads_q;
        if self.forward.bias().is_some() {
            args = args.read(Slot::Bias, of(&self.bias, self.forward.bias_shape()));
        }
        if sinks {
            args = args.read(Slot::Sinks, of(&self.sinks, [heads]));
        }
        if self.forward.alibi().is_some() { args.read(Slot::AlibiSlopes, of(&self.slopes, [heads])) } else { args }
    }

    fn tensors(&self) -> [Tensor; 3] {
        let shapes = [self.forward.q_shape(), self.forward.k_shape(), self.forward.v_shape()];
        [0, 1, 2].map(|i| wide(&self.inputs[i], shapes[i]))
    }

    /// Calls `with` with the modifiers.
    fn modified<R>(&self, with: impl FnOnce(Modifiers<'_>) -> R) -> R {
        let (slopes, sinks) = (widened(&self.slopes), widened(&self.sinks));
        let bias: Vec<f64> = self.bias.iter().map(|x| f64::from(x.to_f32())).collect();
        with(Modifiers {
            bias: self.forward.bias().map(|_| &bias[..]),
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
        let report = expected.check_with(&o, Some(&lse), &widened(&self.max_logits)).unwrap();
        assert!(report.passed(), "{}: {report}", self.forward);
    }

    fn backward(&self) -> BackwardProblem {
        let options = BackwardProblem::builder(&self.forward).d_lse(true).d_sinks(self.forward.sinks().is_some());
        options.d_bias(self.forward.bias().is_some()).build().unwrap()
    }

    fn d_o(&self) -> Vec<T> {
        values(self.o.len(), 4)
    }

    /// The gradients, which keep the tolerance.
    fn gradients(&self) -> Gradients<T, B> {
        let problem = self.backward();
        let (out, d_sinks, d_bias) = self.unjudged();
        let (d_o, d_lse) = (wide(&self.d_o(), problem.d_o_shape()), widened(&values(self.lse.len(), 5)));
        let [q, k, v] = &self.tensors();
        let expected = self.modified(|modifiers| {
            let inputs = [q, k, v, &d_o];
            BackwardExpected::with(&problem, &Lengths::default(), inputs, Some(&d_lse), modifiers, None).unwrap()
        });
        let shapes = [problem.d_q_shape(), problem.d_k_shape(), problem.d_v_shape()];
        let [d_q, d_k, d_v] = [0, 1, 2].map(|i| wide(&out[i], shapes[i]));
        let wide_bias: Vec<f64> = d_bias.iter().map(|x| f64::from(x.to_f32())).collect();
        let got = BackwardPlain { d_q, d_k, d_v, d_sinks: widened(&d_sinks), d_bias: wide_bias };
        let report = expected.check_all(&got).unwrap();
        assert!(report.passed(), "{problem}: {report}");
        assert_eq!(report.d_bias.is_some(), self.forward.bias().is_some());
        (out, d_sinks, d_bias)
    }

    fn unjudged(&self) -> Gradients<T, B> {
        let problem = self.backward();
        let d_o = self.d_o();
        let d_lse: Vec<f32> = values(self.lse.len(), 5);
        let shapes = [problem.d_q_shape(), problem.d_k_shape(), problem.d_v_shape()];
        let mut out = shapes.map(|shape| vec![T::from_f32(f32::NAN); shape.iter().product()]);
        let mut d_sinks = vec![f32::NAN; self.sinks.len()];
        let bias_shape = self.forward.bias_shape();
        let mut d_bias = vec![B::from_f32(f32::NAN); bias_shape.iter().product()];
        let [d_q, d_k, d_v] = &mut out;
        let [q, k, v] = &self.inputs;
        let args = self.add_modifiers(Args::new(), problem.wants_d_sinks());
        let mut args = args
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
        if problem.wants_d_sinks() {
            args = args.write(Slot::DSinks, into(&mut d_sinks, [self.sinks.len()]));
        }
        if problem.wants_d_bias() {
            args = args.write(Slot::DBias, into(&mut d_bias, bias_shape));
        }
        problem.plan(&Device::cpu()).unwrap().run(&Stream::Cpu, &mut workspace(), args).unwrap();
        (out, d_sinks, d_bias)
    }
}

fn options(dtype: DType, dims: Dims, mask: Mask) -> ForwardProblemBuilder {
    ForwardProblem::builder(dtype, dims).mask(mask).lse(true).max_logits(true)
}

fn bits<T: Element>(numbers: &[T]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_f32().to_bits()).collect()
}

fn both_passes<T: Float + OutputOf<T>, B: Element>(dims: Dims, mask: Mask) {
    for (turn, bias) in forms(B::DTYPE).enumerate() {
        let options = options(T::DTYPE, dims, mask).bias(Some(bias));
        let options = if turn % 3 == 1 { options.softcap(2.0) } else { options };
        let options = if turn % 4 == 2 { options.alibi(AlibiSlopes::PerHead) } else { options };
        let options = if turn % 2 == 1 { options.sinks(DType::F32) } else { options };
        let case = Case::<T, B>::new(options.build().unwrap());
        case.check();
        case.gradients();
    }
}

#[test]
fn both_passes_keep_the_tolerance() {
    let top_left = Mask::Causal { corner: Corner::TopLeft };
    for mask in [Mask::Full, Mask::causal(), top_left, Mask::window(Some(2), Some(1)), Mask::prefix(3)] {
        both_passes::<f32, f32>(DIMS, mask);
        both_passes::<bf16, bf16>(DIMS, mask);
        both_passes::<f16, f32>(DIMS, mask);
        both_passes::<f32, f16>(DIMS, mask);
    }
    // More than one block of queries and keys, rows without keys, and no keys at all.
    let long = Dims::new(2, 150, 3, 16).with_seqlen_kv(70);
    both_passes::<bf16, f32>(long, Mask::causal());
    both_passes::<f32, bf16>(long.with_seqlen_kv(600), Mask::window(Some(40), Some(3)));
    both_passes::<f16, f16>(long.with_seqlen_kv(300), Mask::Full);
    both_passes::<f32, f32>(long.with_seqlen_kv(0), Mask::Full);
}

/// The place of a pair's bias, worked out from the form.
fn place(bias: Bias, dims: Dims, [batch, head, query, key]: [usize; 4]) -> usize {
    let mut at = if bias.is_per_batch() { batch } else { 0 };
    at = if bias.is_per_head() { at * dims.heads_q + head } else { at };
    at = if bias.is_per_query() { at * dims.seqlen_q + query } else { at };
    at * dims.seqlen_kv + key
}

/// Scores by the definition, one by one, for each shared dimension.
#[test]
fn the_oracle_follows_the_definition() {
    let dims = Dims::new(2, 4, 4, 3).with_seqlen_kv(7).with_heads_kv(2);
    for (bias, (mask, cap)) in
        forms(DType::F32).flat_map(|bias| [(Mask::Full, 1.5), (Mask::causal(), 0.0)].map(|other| (bias, other)))
    {
        let options = options(DType::F32, dims, mask).bias(Some(bias)).softcap(cap).softmax_scale(0.8);
        let forward = options.alibi(AlibiSlopes::PerHead).build().unwrap();
        let case = Case::<f32, f32>::new(forward.clone());
        let [q, k, v] = case.tensors();
        let oracle = case.modified(|modifiers| {
            reference::forward_with(&forward, &Lengths::default(), [&q, &k, &v], modifiers).unwrap()
        });
        let mut max = [f64::NEG_INFINITY; 4];
        for (batch, head, query) in (0..2).flat_map(|b| (0..4).flat_map(move |h| (0..4).map(move |q| (b, h, q)))) {
            let of_key = |key| f64::from(case.bias[place(bias, dims, [batch, head, query, key])]);
            let score = |key: usize| {
                let product: f64 = (0..3).map(|d| q.row(batch, query, head)[d] * k.row(batch, key, head / 2)[d]).sum();
                let score = f64::from(0.8_f32) * product;
                let capped = if cap == 0.0 { score } else { f64::from(cap) * (score / f64::from(cap)).tanh() };
                capped + of_key(key) - f64::from(case.slopes[head]) * (query as f64 + 3.0 - key as f64).abs()
            };
            let kept = |&key: &usize| mask.keep(query, key, 4, 7) && of_key(key) > f64::NEG_INFINITY;
            let keys: Vec<usize> = (0..7).filter(kept).collect();
            let sum: f64 = keys.iter().map(|&key| score(key).exp()).sum();
            let i = (batch * 4 + head) * 4 + query;
            if keys.is_empty() {
                assert_eq!(oracle.lse[i], f64::NEG_INFINITY);
                assert!(oracle.o.row(batch, query, head).iter().all(|&o| o == 0.0));
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
            assert!(oracle.max_logits[head].value == max || (oracle.max_logits[head].value - max).abs() < 1e-12);
        }
    }
}

/// The oracle's gradient of the bias against the quotients of its own loss: not multiplied by a cap's derivative, nor by the scale.
#[test]
fn finite_differences() {
    let dims = Dims::new(2, 3, 2, 5).with_seqlen_kv(4).with_heads_kv(1);
    for bias in forms(DType::F32) {
        let options = options(DType::F32, dims, Mask::causal()).bias(Some(bias)).softcap(1.0).softmax_scale(0.7);
        let forward = options.alibi(AlibiSlopes::PerHead).build().unwrap();
        let case = Case::<f32, f32>::new(forward.clone());
        let problem = BackwardProblem::builder(&forward).d_bias(true).d_lse(true).build().unwrap();
        let [q, k, v] = &case.tensors();
        let (d_o, lengths) = (wide(&case.d_o(), forward.o_shape()), Lengths::default());
        let d_lse = widened(&values(case.lse.len(), 5));
        let loss = |numbers: &[f64]| {
            let oracle = case.modified(|modifiers| {
                let modifiers = Modifiers { bias: Some(numbers), ..modifiers };
                reference::forward_with(&forward, &lengths, [q, k, v], modifiers).unwrap()
            });
            let of_lse = oracle.lse.iter().zip(&d_lse).filter(|(lse, _)| lse.is_finite()).map(|(a, b)| a * b);
            oracle.o.data().iter().zip(d_o.data()).map(|(a, b)| a * b).sum::<f64>() + of_lse.sum::<f64>()
        };
        let exact = case.modified(|modifiers| {
            reference::backward_with(&problem, &lengths, [q, k, v, &d_o], Some(&d_lse), modifiers).unwrap()
        });
        let mut numbers = widened(&case.bias);
        assert_eq!(exact.d_bias.len(), numbers.len());
        for at in 0..numbers.len() {
            if numbers[at] == f64::NEG_INFINITY {
                assert_eq!(exact.d_bias[at], 0.0, "{forward} {at}");
                continue;
            }
            let before = numbers[at];
            let mut quotient = 0.0;
            for step in [1e-5, -1e-5] {
                numbers[at] = before + step;
                quotient += loss(&numbers) / (2.0 * step);
            }
            numbers[at] = before;
            assert!((quotient - exact.d_bias[at]).abs() < 1e-6, "{forward} {at}: {quotient}, {}", exact.d_bias[at]);
        }
    }
}

/// The gradient of a shared bias is the sum of the gradients of a bias that nothing shares, and the same every time.
#[test]
fn a_shared_gradient_is_a_sum() {
    let dims = Dims::new(2, 70, 4, 16).with_seqlen_kv(90).with_heads_kv(2);
    for bias in forms(DType::F32) {
        let of = |bias| options(DType::F32, dims, Mask::causal()).bias(Some(bias)).softcap(3.0).build().unwrap();
        let shared = Case::<f32, f32>::new(of(bias));
        let all = Bias::new(DType::F32).per_batch(true).per_head(true).per_query(true);
        let mut numbers = vec![0.0; of(all).bias_shape().iter().product()];
        let places: Vec<[usize; 4]> =
            (0..numbers.len()).map(|i| [i / 90 / 70 / 4, i / 90 / 70 % 4, i / 90 % 70, i % 90]).collect();
        for (number, &at) in numbers.iter_mut().zip(&places) {
            *number = shared.bias[place(bias, dims, at)];
        }
        let own = Case::<f32, f32>::with(of(all), numbers);
        assert!(bits(&own.o) == bits(&shared.o) && bits(&own.lse) == bits(&shared.lse));
        let (gradients, _, d_bias) = shared.gradients();
        let (same, _, of_pairs) = own.gradients();
        assert!(gradients.iter().zip(&same).all(|(a, b)| bits(a) == bits(b)));
        let mut sums = vec![0.0; d_bias.len()];
        for (x, &at) in of_pairs.iter().zip(&places) {
            sums[place(bias, dims, at)] += f64::from(*x);
        }
        for (got, want) in d_bias.iter().zip(&sums) {
            assert!((f64::from(*got) - want).abs() < 1e-5, "{bias}: {got}, {want}");
        }
        assert!(bits(&shared.unjudged().2) == bits(&d_bias));
    }
}

/// A bias that holds what ALiBi subtracts gives the same bits.
#[test]
fn a_bias_that_is_alibi() {
    let dims = Dims::new(2, 70, 4, 16).with_seqlen_kv(90).with_heads_kv(2);
    for (mask, offset) in [(Mask::causal(), 20), (Mask::Full, 20), (Mask::Causal { corner: Corner::TopLeft }, 0)] {
        let with_alibi = options(DType::F32, dims, mask).alibi(AlibiSlopes::PerHead).softcap(5.0).build().unwrap();
        let alibi = Case::<f32, f32>::with(with_alibi.clone(), vec![]);
        let form = Bias::new(DType::F32).per_head(true).per_query(true);
        let with_bias = options(DType::F32, dims, mask).bias(Some(form)).softcap(5.0).build().unwrap();
        let distance = |i: usize| (i as i32 / 90 % 70 + offset - i as i32 % 90).abs() as f32;
        let numbers = (0..4 * 70 * 90).map(|i| -(alibi.slopes[i / 90 / 70] * distance(i))).collect();
        let bias = Case::<f32, f32>::with(with_bias, numbers);
        assert!(bits(&bias.o) == bits(&alibi.o) && bits(&bias.lse) == bits(&alibi.lse));
        assert!(bits(&bias.max_logits) == bits(&alibi.max_logits));
        let (got, want) = (bias.gradients().0, alibi.gradients().0);
        assert!(got.iter().zip(&want).all(|(a, b)| bits(a) == bits(b)));
    }
}

/// A bias of 0 and -inf is a mask: also where what it hides is NaN.
#[test]
fn a_bias_that_is_a_mask() {
    let dims = Dims::new(2, 90, 4, 16).with_seqlen_kv(140).with_heads_kv(2);
    let blocks: fn(usize, usize) -> bool = |query, key| (query / 30 + key / 20) % 3 != 0;
    for (mask, keep) in
        [(Some(Mask::causal()), None), (Some(Mask::window(Some(9), Some(4))), None), (None, Some(blocks))]
    {
        let kept = |query, key| match (mask, keep) {
            (Some(mask), _) => mask.keep(query, key, 90, 140),
            (_, Some(keep)) => keep(query, key),
            _ => true,
        };
        let form = Bias::new(DType::F32).per_query(true);
        let numbers: Vec<f32> = (0..90 * 140).map(|i| if kept(i / 140, i % 140) { 0.0 } else { HIDDEN }).collect();
        let biased = Case::<f32, f32>::with(
            options(DType::F32, dims, Mask::Full).bias(Some(form)).build().unwrap(),
            numbers.clone(),
        );
        biased.check();
        biased.gradients();
        let Some(mask) = mask else { continue };
        let masked = Case::<f32, f32>::with(options(DType::F32, dims, mask).build().unwrap(), vec![]);
        let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a == b || (a - b).abs() < 2e-5);
        assert!(near(&biased.o, &masked.o) && near(&biased.lse, &masked.lse), "{mask}");
        assert!(near(&biased.max_logits, &masked.max_logits), "{mask}");
        let (got, _, d_bias) = biased.unjudged();
        assert!(got.iter().zip(&masked.gradients().0).all(|(a, b)| near(a, b)), "{mask}");
        for (i, d_bias) in d_bias.iter().enumerate() {
            assert!(kept(i / 140, i % 140) || *d_bias == 0.0, "{mask} {i}: {d_bias}");
        }
    }
}

/// What a bias hides reaches nothing, NaN included: keys and values that all queries hide, and queries that hide all keys.
#[test]
fn what_is_hidden_reaches_nothing() {
    let dims = Dims::new(2, 70, 2, 16).with_seqlen_kv(90).with_heads_kv(1);
    let form = Bias::new(DType::F32).per_query(true);
    let hides = |query: usize, key: usize| [3, 64, 89].contains(&key) || [0, 40, 69].contains(&query);
    let numbers: Vec<f32> = values::<f32>(70 * 90, 3)
        .into_iter()
        .enumerate()
        .map(|(i, x)| if hides(i / 90, i % 90) { HIDDEN } else { x })
        .collect();
    for sinks in [false, true] {
        let options = options(DType::F32, dims, Mask::causal()).bias(Some(form));
        let options = if sinks { options.sinks(DType::F32) } else { options };
        let forward = options.build().unwrap();
        let clean = Case::<f32, f32>::with(forward.clone(), numbers.clone());
        clean.check();
        for poison in [f32::NAN, f32::INFINITY] {
            let mut inputs = clean.inputs.clone();
            let spoil = |data: &mut Vec<f32>, seqlen: usize, heads: usize, tokens: [usize; 3]| {
                for (batch, token) in (0..2).flat_map(|batch| tokens.map(|token| (batch, token))) {
                    data[(batch * seqlen + token) * heads * 16..][..heads * 16].fill(poison);
                }
            };
            spoil(&mut inputs[0], 70, 2, [0, 40, 69]);
            spoil(&mut inputs[1], 90, 1, [3, 64, 89]);
            spoil(&mut inputs[2], 90, 1, [3, 64, 89]);
            let spoilt = Case::of(forward.clone(), numbers.clone(), inputs);
            // Sums of what is not finite leave out pair by pair, in another order.
            let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a == b || (a - b).abs() < 2e-5);
            assert!(near(&spoilt.o, &clean.o) && bits(&spoilt.lse) == bits(&clean.lse), "{poison}");
            assert!(bits(&spoilt.max_logits) == bits(&clean.max_logits), "{poison}");
            let (a, b) = (spoilt.unjudged(), clean.gradients());
            assert!(a.0.iter().zip(&b.0).all(|(a, b)| near(a, b)), "{poison}");
            assert!(near(&a.1, &b.1) && near(&a.2, &b.2), "{poison}");
        }
        let ([d_q, ..], _, d_bias) = clean.gradients();
        for (batch, query, head) in
            (0..2).flat_map(|b| [0, 40, 69].into_iter().flat_map(move |q| [(b, q, 0), (b, q, 1)]))
        {
            let row = ((batch * 70 + query) * 2 + head) * 16;
            assert!(clean.o[row..row + 16].iter().chain(&d_q[row..row + 16]).all(|&x| x == 0.0));
            let lse = if sinks { clean.sinks[head] } else { HIDDEN };
            assert_eq!(clean.lse[(batch * 2 + head) * 70 + query], lse);
        }
        assert!((0..70 * 90).all(|i| !hides(i / 90, i % 90) || d_bias[i] == 0.0));
    }
}

/// A bias of NaN or inf makes the results of its query NaN, and of no other. Under the mask it is not read.
#[test]
fn a_bias_that_is_not_a_number() {
    let dims = Dims::new(1, 70, 2, 16).with_seqlen_kv(90);
    let form = Bias::new(DType::F32).per_head(true).per_query(true);
    let forward = options(DType::F32, dims, Mask::causal()).bias(Some(form)).build().unwrap();
    let clean = Case::<f32, f32>::new(forward.clone());
    for wrong in [f32::NAN, f32::INFINITY] {
        let mut numbers = clean.bias.clone();
        // Head 1, query 33, key 20; and a pair that the mask hides.
        numbers[(70 + 33) * 90 + 20] = wrong;
        numbers[(70 + 5) * 90 + 80] = wrong;
        let case = Case::<f32, f32>::with(forward.clone(), numbers);
        case.check();
        for (i, (o, clean)) in case.o.iter().zip(&clean.o).enumerate() {
            let of_row = i / 16 == 33 * 2 + 1;
            assert!(if of_row { o.is_nan() } else { o.to_bits() == clean.to_bits() }, "{wrong} {i}: {o} {clean}");
        }
        for (i, (lse, clean)) in case.lse.iter().zip(&clean.lse).enumerate() {
            assert!(if i == 70 + 33 { lse.is_nan() } else { lse.to_bits() == clean.to_bits() }, "{wrong} {i}: {lse}");
        }
        let (_, _, d_bias) = case.gradients();
        for (i, x) in d_bias.iter().enumerate() {
            let (row, key) = (i / 90, i % 90);
            let kept = row == 70 + 33 && key <= 33 + 20 && case.bias[i] != HIDDEN;
            assert_eq!(x.is_nan(), kept, "{wrong} {i}: {x}");
        }
    }
}

/// Any strides: gaps, another order of the dimensions, and dimensions that repeat.
#[test]
fn strides() {
    let dims = Dims::new(2, 5, 3, 8).with_seqlen_kv(7);
    let form = Bias::new(DType::BF16).per_batch(true).per_head(true).per_query(true);
    let forward = options(DType::BF16, dims, Mask::Full).bias(Some(form)).build().unwrap();
    let shape = forward.bias_shape();
    for strides in [[105, 35, 7, 1], [400, 100, 11, 1], [10, 200, 30, 1], [0, 0, 9, 1], [0, 50, 0, 1]] {
        let layout = Layout::with_strides(shape, strides).unwrap();
        let memory: Vec<bf16> = values(layout.span(), 5);
        let at = |i: usize| {
            let [b, h, q, k] = [i / 7 / 5 / 3, i / 7 / 5 % 3, i / 7 % 5, i % 7];
            memory[(b as i64 * strides[0] + h as i64 * strides[1] + q as i64 * strides[2]) as usize + k]
        };
        let dense = Case::<bf16, bf16>::with(forward.clone(), (0..2 * 3 * 5 * 7).map(at).collect());
        let mut o = vec![bf16::NAN; dense.o.len()];
        let (mut lse, mut max_logits) = (vec![f32::NAN; dense.lse.len()], vec![f32::NAN; 3]);
        let args = Args::new()
            .read(Slot::Q, of(&dense.inputs[0], forward.q_shape()))
            .read(Slot::K, of(&dense.inputs[1], forward.k_shape()))
            .read(Slot::V, of(&dense.inputs[2], forward.v_shape()))
            .read(Slot::Bias, TensorRef::host(&memory, layout).unwrap())
            .write(Slot::O, into(&mut o, forward.o_shape()))
            .write(Slot::Lse, into(&mut lse, forward.lse_shape()))
            .write(Slot::MaxLogits, into(&mut max_logits, [3]));
        forward.plan(&Device::cpu()).unwrap().run(&Stream::Cpu, &mut workspace(), args).unwrap();
        assert!(bits(&o) == bits(&dense.o) && bits(&lse) == bits(&dense.lse), "{strides:?}");
    }
}

/// What is not what the problem says is refused by name.
#[test]
fn refusals() {
    let dims = Dims::new(2, 5, 3, 8).with_seqlen_kv(7);
    let form = Bias::new(DType::F16).per_head(true);
    let forward = ForwardProblem::builder(DType::F32, dims).bias(Some(form)).build().unwrap();
    let inputs: [Vec<f32>; 3] = [1, 2, 3].map(|seed| values(2 * 7 * 3 * 8, seed));
    let refused = |forward: &ForwardProblem, add: &dyn for<'a> Fn(Args<'a>) -> Args<'a>| {
        let mut o = vec![0.0f32; 2 * 5 * 3 * 8];
        let args = Args::new()
            .read(Slot::Q, of(&inputs[0][..240], forward.q_shape()))
            .read(Slot::K, of(&inputs[1], forward.k_shape()))
            .read(Slot::V, of(&inputs[2], forward.v_shape()))
            .write(Slot::O, into(&mut o, forward.o_shape()));
        let plan = forward.plan(&Device::cpu()).unwrap();
        plan.run(&Stream::Cpu, &mut workspace(), add(args)).unwrap_err().to_string()
    };
    static HALVES: [f16; 21] = [f16::ZERO; 21];
    static FLOATS: [f32; 21] = [0.0; 21];
    assert_eq!(
        refused(&forward, &|args| args),
        "bias: missing; allowed: the tensor that the problem, made with bias, reads"
    );
    let text = refused(&forward, &|args| args.read(Slot::Bias, of(&FLOATS, [1, 3, 1, 7])));
    assert_eq!(text, "bias: dtype f32; allowed: f16, the problem's");
    let text = refused(&forward, &|args| args.read(Slot::Bias, of(&HALVES, [3, 1, 1, 7])));
    assert_eq!(text, "bias: shape [3, 1, 1, 7], expected [1, 3, 1, 7] [batch, heads, seqlen_q, seqlen_kv]");
    let plain = forward.to_builder().bias(None).build().unwrap();
    let text = refused(&plain, &|args| args.read(Slot::Bias, of(&HALVES, [1, 3, 1, 7])));
    assert_eq!(text, "bias: given; allowed: none, since the problem was made without bias");
}

/// Three sequences. The last has no keys.
const OFFSETS: [[i32; 4]; 2] = [[1, 6, 40, 43], [0, 20, 71, 71]];
/// How many of their rows are used, where that is asked for.
const USED: [[i32; 3]; 2] = [[5, 30, 2], [11, 51, 0]];

/// A problem of these sequences, and the same with used lengths: packed, and each side dense.
fn of_sequences(bias: Bias, packed: [bool; 2], used: bool) -> ForwardProblem {
    let rows = |side: usize| if packed[side] { 75 } else { 53 };
    let dims = Dims::new(3, rows(0), 4, 16).with_seqlen_kv(rows(1)).with_heads_kv(2);
    let covered = |side: usize| if packed[side] { [37, 54][side] } else { 53 };
    let options = options(DType::F32, dims, Mask::causal()).max_logits(false).sinks(DType::F32).softcap(2.0);
    let options =
        options.packed_q(packed[0]).packed_kv(packed[1]).used_q(used || !packed[0]).used_kv(used || !packed[1]);
    options.bias(Some(bias.covering(covered(0), covered(1)))).build().unwrap()
}

/// A sequence has the bits of a problem of its own, with its part of the bias, and the gradient of the bias is the sum of theirs.
#[test]
fn sequences_have_their_part_of_a_bias() {
    for ((bias, packed), used) in forms(DType::F32)
        .flat_map(|bias| [[true, true], [true, false], [false, true], [false, false]].map(|packed| (bias, packed)))
        .flat_map(|of| [(of, false), (of, true)])
    {
        let forward = of_sequences(bias, packed, used);
        let lists = [0, 1].map(|side| (packed[side].then_some(OFFSETS[side]), USED[side]));
        let lengths = Lengths {
            cu_seqlens_q: lists[0].0.as_ref().map(|list| &list[..]),
            cu_seqlens_kv: lists[1].0.as_ref().map(|list| &list[..]),
            seqused_q: (used || !packed[0]).then_some(&lists[0].1[..]),
            seqused_kv: (used || !packed[1]).then_some(&lists[1].1[..]),
        };
        let all = Packed::new(forward.clone(), &lengths);
        let mut sums = vec![0.0_f32; all.d_bias.len()];
        for [q, kv] in lengths.sequences(&forward) {
            // The sequence alone.
            let [batch, heads, queries, keys] = forward.bias_shape();
            let dims = forward.dims().with_batch(1).with_seqlen_q(q.len).with_seqlen_kv(kv.len);
            let options = options(DType::F32, dims, Mask::causal()).max_logits(false).sinks(DType::F32).softcap(2.0);
            let alone = options.bias(Some(bias.per_batch(false))).build().unwrap();
            let [_, own_heads, own_queries, _] = alone.bias_shape();
            let places: Vec<usize> = (0..own_heads * own_queries)
                .flat_map(|i| {
                    let sequence = if batch == 1 { 0 } else { q.sequence };
                    let row = (sequence * heads + i / own_queries) * queries + i % own_queries;
                    row * keys..row * keys + kv.len
                })
                .collect();
            let cut = |slot: usize, rows: SequenceRows, heads: usize| -> Vec<f32> {
                let (shape, data) = (all.shapes[slot], &all.tensors[slot]);
                let of_row = heads * 16;
                let first = (rows.batch * shape[1] + rows.begin) * of_row;
                data[first..first + rows.len * of_row].to_vec()
            };
            let inputs = [cut(0, q, 4), cut(1, kv, 2), cut(2, kv, 2), cut(3, q, 4)];
            let d_lse = all.of_rows(&all.d_lse, q);
            let own = places.iter().map(|&at| all.bias[at]).collect();
            let one = Packed::run(alone, &Lengths::default(), inputs, own, d_lse, all.sinks.clone());
            assert!(bits(&all.of_rows(&all.lse, q)) == bits(&one.lse), "{forward}: LSE of {q:?}");
            for (slot, rows, heads) in [(4, q, 4), (5, q, 4), (6, kv, 2), (7, kv, 2)] {
                assert!(
                    bits(&cut(slot, rows, heads)) == bits(&one.tensors[slot]),
                    "{forward}: tensor {slot} of {rows:?}"
                );
            }
            places.iter().zip(&one.d_bias).for_each(|(&at, x)| sums[at] += x);
        }
        for (i, (got, sum)) in all.d_bias.iter().zip(&sums).enumerate() {
            assert!((got - sum).abs() < 1e-5, "{forward}: dBias {i}: {got}, {sum}");
        }
        all.check(&lengths);
    }
}

/// Both passes of a problem of several sequences. Tensors are Q, K, V, dO, O, dQ, dK and dV.
struct Packed {
    problem: BackwardProblem,
    shapes: [[usize; 4]; 8],
    tensors: Vec<Vec<f32>>,
    bias: Vec<f32>,
    sinks: Vec<f32>,
    lse: Vec<f32>,
    d_lse: Vec<f32>,
    d_bias: Vec<f32>,
}

impl Packed {
    fn new(forward: ForwardProblem, lengths: &Lengths<'_>) -> Self {
        let count = |shape: [usize; 4]| shape.iter().product();
        let shapes = [forward.q_shape(), forward.k_shape(), forward.v_shape(), forward.o_shape()];
        let inputs = [0, 1, 2, 3].map(|i| values(count(shapes[i]), 20 + i as u32));
        let bias = some_hidden(forward.bias_shape());
        let d_lse = values(forward.lse_shape().iter().product(), 30);
        Self::run(forward, lengths, inputs, bias, d_lse, values(4, 31))
    }

    fn run(
        forward: ForwardProblem,
        lengths: &Lengths<'_>,
        inputs: [Vec<f32>; 4],
        bias: Vec<f32>,
        d_lse: Vec<f32>,
        sinks: Vec<f32>,
    ) -> Self {
        let problem = BackwardProblem::builder(&forward).d_lse(true).d_bias(true).build().unwrap();
        let [q, k, v, d_o] = [problem.d_q_shape(), problem.d_k_shape(), problem.d_v_shape(), problem.d_o_shape()];
        let shapes = [q, k, v, d_o, forward.o_shape(), q, k, v];
        let mut tensors: Vec<Vec<f32>> = inputs.into();
        tensors.extend(shapes[4..].iter().map(|shape| vec![0.0; shape.iter().product()]));
        let (lse, d_bias) = (vec![0.0; d_lse.len()], vec![f32::NAN; bias.len()]);
        let mut all = Self { problem, shapes, tensors, bias, sinks, lse, d_lse, d_bias };
        all.passes(&forward, lengths);
        all
    }

    fn passes(&mut self, forward: &ForwardProblem, lengths: &Lengths<'_>) {
        let Self { problem, tensors, bias, sinks, lse, d_lse, d_bias, .. } = self;
        let (inputs, outputs) = tensors.split_at_mut(4);
        let (o, gradients) = outputs.split_at_mut(1);
        let lists = [
            (Slot::CuSeqlensQ, lengths.cu_seqlens_q),
            (Slot::CuSeqlensKv, lengths.cu_seqlens_kv),
            (Slot::SequsedQ, lengths.seqused_q),
            (Slot::SequsedKv, lengths.seqused_kv),
        ];
        let operands = problem.operands();
        let shape = |slot| operands.find(slot).unwrap().shape();
        let args = || {
            let args = lists
                .iter()
                .filter_map(|(slot, list)| Some((*slot, (*list)?)))
                .fold(Args::new(), |args, (slot, list)| args.read(slot, of(list, [list.len()])));
            let numbered = [Slot::Q, Slot::K, Slot::V].into_iter().zip(&*inputs);
            let args = numbered.fold(args, |args, (slot, data)| read(args, slot, data, shape(slot)));
            read(args, Slot::Bias, bias, shape(Slot::Bias))
        };
        let of_forward = write(args(), Slot::O, &mut o[0], shape(Slot::O));
        let of_forward = write(of_forward, Slot::Lse, lse, shape(Slot::Lse)).read(Slot::Sinks, of(&sinks[..], [4]));
        forward.plan(&Device::cpu()).unwrap().run(&Stream::Cpu, &mut workspace(), of_forward).unwrap();
        let of_backward = [(Slot::O, &o[0]), (Slot::Lse, &*lse), (Slot::DO, &inputs[3]), (Slot::DLse, &*d_lse)]
            .into_iter()
            .fold(args(), |args, (slot, data)| read(args, slot, data, shape(slot)));
        let of_backward = [Slot::DQ, Slot::DK, Slot::DV]
            .into_iter()
            .zip(gradients)
            .fold(of_backward, |args, (slot, data)| write(args, slot, data, shape(slot)));
        let of_backward = write(of_backward, Slot::DBias, d_bias, shape(Slot::DBias));
        problem.plan(&Device::cpu()).unwrap().run(&Stream::Cpu, &mut workspace(), of_backward).unwrap();
    }

    /// A sequence's part of a list `[batch, heads_q, seqlen_q]`.
    fn of_rows(&self, list: &[f32], rows: SequenceRows) -> Vec<f32> {
        let [_, heads, seqlen] = self.problem.forward().lse_shape();
        let of_head = |head: usize| {
            let first = (rows.batch * heads + head) * seqlen + rows.begin;
            list[first..first + rows.len].to_vec()
        };
        (0..heads).flat_map(of_head).collect()
    }

    /// Against the oracle.
    fn check(&self, lengths: &Lengths<'_>) {
        let wide = |i: usize| wide(&self.tensors[i], self.shapes[i]);
        let (bias, sinks, d_lse) = (widened(&self.bias), widened(&self.sinks), widened(&self.d_lse));
        let modifiers = Modifiers { bias: Some(&bias), sinks: Some(&sinks), ..Modifiers::default() };
        let forward = self.problem.forward();
        let [q, k, v, d_o] = [wide(0), wide(1), wide(2), wide(3)];
        let expected = Expected::with(forward, lengths, [&q, &k, &v], modifiers, 1.0, None).unwrap();
        let report = expected.check(&wide(4), Some(&widened(&self.lse))).unwrap();
        assert!(report.passed(), "{forward}: {report}");
        let inputs = [&q, &k, &v, &d_o];
        let expected = BackwardExpected::with(&self.problem, lengths, inputs, Some(&d_lse), modifiers, None).unwrap();
        let (d_sinks, d_bias) = (vec![], widened(&self.d_bias));
        let got = BackwardPlain { d_q: wide(5), d_k: wide(6), d_v: wide(7), d_sinks, d_bias };
        let report = expected.check_all(&got).unwrap();
        assert!(report.passed() && report.d_bias.is_some(), "{}: {report}", self.problem);
    }
}

/// Sequences that are longer than the bias are refused, by the name of the offsets, where the numbers are known.
#[test]
fn sequences_longer_than_the_bias() {
    let stream = Stream::Cpu;
    let offsets = [0, 1].map(|side| SequenceOffsets::new(&stream, &OFFSETS[side]).unwrap());
    let used = [0, 1].map(|side| UsedLengths::new(&stream, &USED[side]).unwrap());
    let dims = Dims::new(3, 75, 2, 8).with_seqlen_kv(75);
    let run = |bias: Bias, covered: [usize; 2], with_used: bool| {
        let options = ForwardProblem::builder(DType::F32, dims).packed(true).used_q(with_used).used_kv(with_used);
        let problem = options.bias(Some(bias.covering(covered[0], covered[1]))).build().unwrap();
        let inputs: [Vec<f32>; 3] = [1, 2, 3].map(|seed| values(75 * 2 * 8, seed));
        let bias: Vec<f32> = values(problem.bias_shape().iter().product(), 4);
        let mut o = vec![0.0f32; 75 * 2 * 8];
        let shape = [75, 2, 8];
        let [q, k, v] = &inputs;
        let args = ForwardArgs::packed(of(q, shape), of(k, shape), of(v, shape), into(&mut o, shape));
        let args = args.bias(of(&bias, problem.bias_shape())).cu_seqlens_q(&offsets[0]).cu_seqlens_kv(&offsets[1]);
        let args = if with_used { args.seqused_q(&used[0]).seqused_kv(&used[1]) } else { args };
        problem.plan(&Device::cpu()).unwrap().run(&stream, &mut workspace(), args).map_err(|error| error.to_string())
    };
    let form = Bias::new(DType::F32).per_query(true);
    let refused = |what: &str, most: usize, len: usize| {
        Err(format!("{what}: {len} rows at 1; allowed: at most {most}, which the bias has numbers for"))
    };
    assert_eq!(run(form, [34, 51], false), Ok(()));
    assert_eq!(run(form, [33, 51], false), refused("cu_seqlens_q", 33, 34));
    assert_eq!(run(form, [34, 50], false), refused("cu_seqlens_kv", 50, 51));
    // Queries that share their numbers, and used lengths that are short enough.
    assert_eq!(run(form.per_query(false), [0, 51], false), Ok(()));
    assert_eq!(run(form, [30, 51], true), Ok(()));
    assert_eq!(run(form, [29, 51], true), refused("cu_seqlens_q", 29, 30));
}

/// A gradient that batches share is 0 where there is no batch, and no query.
#[test]
fn nothing_to_sum() {
    for (batch, seqlen_q) in [(0, 4), (2, 0)] {
        let dims = Dims::new(batch, seqlen_q, 2, 8).with_seqlen_kv(6);
        let form = Bias::new(DType::F32).per_head(true);
        let case = Case::<f32, f32>::new(options(DType::F32, dims, Mask::Full).bias(Some(form)).build().unwrap());
        let (_, _, d_bias) = case.gradients();
        assert_eq!(d_bias, [0.0; 12]);
    }
}
