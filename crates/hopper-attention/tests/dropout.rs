//! Dropout on the CPU through the public API: results against the oracle, the oracle against the definition and finite
//! differences, the mask and its statistics, packed sequences, NaN, refusals.

use hopper_attention::reference::{self, BackwardExpected, DropoutMask, Expected, Modifiers, Tensor};
use hopper_attention::{
    AlibiSlopes, Args, BackwardProblem, DType, Device, Dims, Dropout, Float, ForwardProblem, ForwardProblemBuilder,
    Lengths, Mask, OutputOf, SequenceOffsets, Slot, Stream, bf16, dropout_state, f16,
};

mod common;

use common::{DIMS, into, of, values, wide, widened, workspace};

const STATE: [i32; 4] = dropout_state(0x0123_4567_89ab_cdef, 0x1_0000_0005);

fn options(dtype: DType, dims: Dims, mask: Mask, p: f32) -> ForwardProblemBuilder {
    let options = ForwardProblem::builder(dtype, dims).mask(mask).lse(true);
    options.dropout(Some(Dropout::new(p).unwrap()))
}

/// The operands beside Q, K and V that a problem reads.
struct Extra {
    slopes: Vec<f32>,
    sinks: Vec<f32>,
    state: [i32; 4],
}

impl Extra {
    fn new(problem: &ForwardProblem, state: [i32; 4]) -> Self {
        let count = |there| if there { problem.dims().heads_q } else { 0 };
        let slopes = (0..count(problem.alibi().is_some())).map(|head| 0.25 / (1 + head) as f32).collect();
        Self { slopes, sinks: values(count(problem.sinks().is_some()), 9), state }
    }

    fn add_to<'a>(&'a self, mut args: Args<'a>, problem: &ForwardProblem, sinks: bool) -> Args<'a> {
        if !self.slopes.is_empty() {
            args = args.read(Slot::AlibiSlopes, of(&self.slopes, [self.slopes.len()]));
        }
        if sinks && !self.sinks.is_empty() {
            args = args.read(Slot::Sinks, of(&self.sinks, [self.sinks.len()]));
        }
        if problem.dropout().is_some() {
            args = args.read(Slot::DropoutState, of(&self.state, [4]));
        }
        args
    }

    fn modified<R>(&self, problem: &ForwardProblem, with: impl FnOnce(Modifiers<'_>) -> R) -> R {
        let (slopes, sinks) = (widened(&self.slopes), widened(&self.sinks));
        with(Modifiers {
            alibi_slopes: problem.alibi().map(|_| &slopes[..]),
            sinks: problem.sinks().map(|_| &sinks[..]),
            dropout: DropoutMask::of(problem, Some(self.state)),
            ..Modifiers::default()
        })
    }
}

/// Inputs, and what a run made of them.
struct Case<T> {
    forward: ForwardProblem,
    extra: Extra,
    inputs: [Vec<T>; 3],
    o: Vec<T>,
    lse: Vec<f32>,
}

impl<T: Float + OutputOf<T>> Case<T> {
    fn new(forward: ForwardProblem, state: [i32; 4]) -> Self {
        let shapes = [forward.q_shape(), forward.k_shape(), forward.v_shape()];
        Self::of(forward, state, [0, 1, 2].map(|i| values(shapes[i].iter().product(), 1 + i as u32)))
    }

    fn of(forward: ForwardProblem, state: [i32; 4], inputs: [Vec<T>; 3]) -> Self {
        let extra = Extra::new(&forward, state);
        let mut o = vec![T::from_f32(f32::NAN); forward.o_shape().iter().product()];
        let mut lse = vec![f32::NAN; forward.lse_shape().iter().product()];
        let [q, k, v] = &inputs;
        let args = Args::new()
            .read(Slot::Q, of(q, forward.q_shape()))
            .read(Slot::K, of(k, forward.k_shape()))
            .read(Slot::V, of(v, forward.v_shape()))
            .write(Slot::O, into(&mut o, forward.o_shape()))
            .write(Slot::Lse, into(&mut lse, forward.lse_shape()));
        let args = extra.add_to(args, &forward, true);
        forward.plan(&Device::cpu()).unwrap().run(&Stream::Cpu, &mut workspace(), args).unwrap();
        Self { forward, extra, inputs, o, lse }
    }

    fn tensors(&self) -> [Tensor; 3] {
        let shapes = [self.forward.q_shape(), self.forward.k_shape(), self.forward.v_shape()];
        [0, 1, 2].map(|i| wide(&self.inputs[i], shapes[i]))
    }

    fn check(&self) {
        let [q, k, v] = &self.tensors();
        let expected = self.extra.modified(&self.forward, |modifiers| {
            Expected::with(&self.forward, &Lengths::default(), [q, k, v], modifiers, 1.0, None).unwrap()
        });
        let report = expected.check(&wide(&self.o, self.forward.o_shape()), Some(&widened(&self.lse))).unwrap();
        assert!(report.passed(), "{}: {report}", self.forward);
    }

    /// The gradients with this gradient of O, and one of the LSE.
    fn gradients(&self, d_o: &[T]) -> [Vec<T>; 3] {
        let sinks = self.forward.sinks().is_some();
        let problem = BackwardProblem::builder(&self.forward).d_lse(true).d_sinks(sinks).build().unwrap();
        let d_lse: Vec<f32> = values(self.lse.len(), 5);
        let shapes = [problem.d_q_shape(), problem.d_k_shape(), problem.d_v_shape()];
        let mut out = shapes.map(|shape| vec![T::from_f32(f32::NAN); shape.iter().product()]);
        let mut d_sinks = vec![f32::NAN; self.extra.sinks.len()];
        let [d_q, d_k, d_v] = &mut out;
        let [q, k, v] = &self.inputs;
        let mut args = Args::new()
            .read(Slot::Q, of(q, shapes[0]))
            .read(Slot::K, of(k, shapes[1]))
            .read(Slot::V, of(v, shapes[2]))
            .read(Slot::O, of(&self.o, self.forward.o_shape()))
            .read(Slot::Lse, of(&self.lse, self.forward.lse_shape()))
            .read(Slot::DO, of(d_o, problem.d_o_shape()))
            .read(Slot::DLse, of(&d_lse, self.forward.lse_shape()))
            .write(Slot::DQ, into(d_q, shapes[0]))
            .write(Slot::DK, into(d_k, shapes[1]))
            .write(Slot::DV, into(d_v, shapes[2]));
        if sinks {
            let heads = d_sinks.len();
            args = args.write(Slot::DSinks, into(&mut d_sinks, [heads]));
        }
        let args = self.extra.add_to(args, &self.forward, true);
        problem.plan(&Device::cpu()).unwrap().run(&Stream::Cpu, &mut workspace(), args).unwrap();
        if d_o.iter().any(|x| x.to_f32().is_nan()) || self.o.iter().any(|x| x.to_f32().is_nan()) {
            return out;
        }
        let [q, k, v] = &self.tensors();
        let (d_o, d_lse) = (wide(d_o, problem.d_o_shape()), widened(&d_lse));
        let expected = self.extra.modified(&self.forward, |modifiers| {
            let inputs = [q, k, v, &d_o];
            BackwardExpected::with(&problem, &Lengths::default(), inputs, Some(&d_lse), modifiers, None).unwrap()
        });
        let [d_q, d_k, d_v] = [0, 1, 2].map(|i| wide(&out[i], shapes[i]));
        let report = match sinks {
            true => expected.check_with(&d_q, &d_k, &d_v, &widened(&d_sinks)).unwrap(),
            false => expected.check(&d_q, &d_k, &d_v).unwrap(),
        };
        assert!(report.passed(), "{problem}: {report}");
        out
    }

    fn d_o(&self) -> Vec<T> {
        values(self.o.len(), 4)
    }
}

fn both_passes<T: Float + OutputOf<T>>(dims: Dims, mask: Mask) {
    for (p, alibi, cap, sinks) in
        [(0.1, false, 0.0, false), (0.5, true, 0.0, false), (0.3, false, 2.0, true), (0.97, true, 15.0, true)]
    {
        let options = options(T::DTYPE, dims, mask, p).softcap(cap);
        let options = if sinks { options.sinks(DType::F32) } else { options };
        let options = if alibi { options.alibi(AlibiSlopes::PerHead) } else { options };
        let case = Case::<T>::new(options.build().unwrap(), STATE);
        case.check();
        case.gradients(&case.d_o());
    }
}

#[test]
fn both_passes_keep_the_tolerance() {
    for mask in [Mask::Full, Mask::causal(), Mask::window(Some(2), Some(1)), Mask::prefix(3), Mask::chunked(3)] {
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

/// The mask of a head as matrices of weights show it: keys are alike, and values are one key each.
fn dropped(dims: Dims, p: f32, state: [i32; 4]) -> impl Fn(usize, usize, usize, usize) -> bool {
    let problem = options(DType::F32, dims, Mask::Full, p).build().unwrap();
    let v = Tensor::from_fn(problem.v_shape(), |[_, key, _, d]| f64::from(u8::from(key == d)));
    let v = v.data().iter().map(|&x| x as f32).collect();
    let zeros = |shape: [usize; 4]| vec![0.0; shape.iter().product()];
    let case = Case::of(problem.clone(), state, [zeros(problem.q_shape()), zeros(problem.k_shape()), v]);
    let weight = problem.dropout().unwrap().factor() as f32 / dims.seqlen_kv as f32;
    assert!(case.o.iter().all(|&o| o == 0.0 || (o / weight - 1.0).abs() < 1e-6));
    // With equal scores the LSE is the logarithm of the number of keys, whatever is dropped.
    assert!(case.lse.iter().all(|lse| (lse - (dims.seqlen_kv as f32).ln()).abs() < 1e-5));
    let o = wide(&case.o, problem.o_shape());
    move |batch, head, query, key| o.row(batch, query, head)[key] == 0.0
}

/// Rows of a mask that a few lines of Python made of the definition.
#[test]
fn the_mask_is_the_documented_one() {
    let dims = Dims::new(2, 20, 3, 64).with_seqlen_kv(64);
    let dropped = dropped(dims, 0.3, STATE);
    for (query, row) in [
        (0, "......x..x.xx.x..x..xx.x...x.....xx..x....x...xxxx..xx....x....."),
        (3, "xxx.x..xx.....x..x....xx.x.........x.....x.x.x...........xxx..x."),
        (8, "....x.xx.xx....x........x.x..xxx..x..x.x...xx.....xxxxx.x..x...."),
        (11, "x..x..x..x.x......x......x........xxxx...x...x.x.x....x.x.xxx..."),
        (16, "...xxxx...x..x......x........x.xx.........x..x..x..x...xx....x.x"),
    ] {
        let got: String = (0..64).map(|key| if dropped(1, 2, query, key) { 'x' } else { '.' }).collect();
        assert_eq!(got, row, "query {query}");
    }
    let mask = DropoutMask::new(Dropout::new(0.3).unwrap(), 3, STATE);
    for (batch, head, query) in (0..2).flat_map(|b| (0..3).flat_map(move |h| (0..20).map(move |q| (b, h, q)))) {
        assert!((0..64).all(|key| dropped(batch, head, query, key) != mask.keeps(batch, head, query, key)));
    }
}

/// Rates within 5 standard deviations (of some hundred rates none is farther away by chance, in 1 of 10000 masks).
#[test]
fn pairs_are_dropped_at_random() {
    for p in [0.1_f32, 0.5, 0.9] {
        let dropout = Dropout::new(p).unwrap();
        let rate = f64::from(dropout.probability());
        let mask = DropoutMask::new(dropout, 2, STATE);
        const SIZE: usize = 512;
        let bits: Vec<f64> = (0..2 * SIZE * SIZE)
            .map(|i| f64::from(u8::from(!mask.keeps(0, i / SIZE / SIZE, i / SIZE % SIZE, i % SIZE))))
            .collect();
        let at = |head: usize, query: usize, key: usize| bits[(head * SIZE + query) * SIZE + key];
        let fits = |what: &str, sum: f64, count: usize, rate: f64| {
            let deviation = (count as f64 * rate * (1.0 - rate)).sqrt();
            let off = (sum - count as f64 * rate) / deviation;
            assert!(off.abs() < 5.0, "{what}, p {p}: {sum} of {count}, {off} deviations");
        };
        fits("all", bits.iter().sum(), bits.len(), rate);
        for i in 0..SIZE {
            fits(&format!("query {i}"), (0..SIZE).map(|j| at(0, i, j)).sum(), SIZE, rate);
            fits(&format!("key {i}"), (0..SIZE).map(|j| at(0, j, i)).sum(), SIZE, rate);
        }
        // Each of the eight decisions of a call, and each lane of a patch.
        for (dq, dk) in (0..16).flat_map(|dq| (0..32).map(move |dk| (dq, dk))) {
            let places = (0..SIZE * SIZE / 512).map(|i| (i / (SIZE / 32) * 16 + dq, i % (SIZE / 32) * 32 + dk));
            fits(
                &format!("place {dq} {dk}"),
                places.map(|(query, key)| at(0, query, key)).sum(),
                SIZE * SIZE / 512,
                rate,
            );
        }
        // Neighbours, decisions of one call, and the other head know nothing of each other: both are dropped in p^2 of all.
        let both = rate * rate;
        for (what, head, dq, dk) in [
            ("next key", 0, 0, 1),
            ("next query", 0, 1, 0),
            ("other half of the word", 0, 8, 0),
            ("next word", 0, 0, 8),
            ("next word, other half", 0, 8, 8),
            ("last word", 0, 0, 24),
            ("next patch of keys", 0, 0, 32),
            ("next patch of queries", 0, 16, 0),
            ("other head", 1, 0, 0),
        ] {
            let pairs = (0..(SIZE - dq) * (SIZE - dk)).map(|i| (i / (SIZE - dk), i % (SIZE - dk)));
            let sum = pairs.clone().map(|(query, key)| at(0, query, key) * at(head, query + dq, key + dk)).sum();
            fits(what, sum, pairs.count(), both);
        }
    }
}

/// Another offset, seed, head or batch entry has another mask: of 400 pairs each, about half differ.
#[test]
fn other_states_have_other_masks() {
    let dropout = Dropout::new(0.5).unwrap();
    let (seed, offset) = (5_u64, 9_u64);
    let base = DropoutMask::new(dropout, 4, dropout_state(seed, offset));
    let differ = |other: &DropoutMask, batch: usize, head: usize| {
        (0..400).filter(|i| base.keeps(0, 0, i / 20, i % 20) != other.keeps(batch, head, i / 20, i % 20)).count()
    };
    assert_eq!(differ(&base, 0, 0), 0);
    for (batch, head) in [(0, 1), (1, 0), (3, 3)] {
        assert!((140..260).contains(&differ(&base, batch, head)), "{batch} {head}");
    }
    for (seed, offset) in
        [(seed, offset + 1), (seed + 1, offset), (seed, offset + (1 << 32)), (seed + (1 << 32), offset)]
    {
        let other = DropoutMask::new(dropout, 4, dropout_state(seed, offset));
        assert!((140..260).contains(&differ(&other, 0, 0)), "{seed} {offset}");
    }
    let run = |state| Case::<f32>::new(options(DType::F32, DIMS, Mask::Full, 0.5).build().unwrap(), state);
    let [a, b, again] = [dropout_state(1, 2), dropout_state(1, 3), dropout_state(1, 2)].map(run);
    assert!(a.o != b.o && a.lse == b.lse && a.o == again.o);
}

/// With a probability of 0 all bits are those without dropout.
#[test]
fn a_probability_of_0_changes_nothing() {
    for (dims, mask) in [(DIMS, Mask::causal()), (Dims::new(1, 90, 2, 16).with_seqlen_kv(300), Mask::Full)] {
        let with = Case::<bf16>::new(options(DType::BF16, dims, mask, 0.0).build().unwrap(), STATE);
        let without = Case::<bf16>::new(with.forward.to_builder().dropout(None).build().unwrap(), STATE);
        assert_eq!((&with.o, &with.lse), (&without.o, &without.lse));
        assert_eq!(with.gradients(&with.d_o()), without.gradients(&with.d_o()));
        // And the LSE is without dropout in any case.
        let half = Case::<bf16>::new(options(DType::BF16, dims, mask, 0.5).build().unwrap(), STATE);
        assert!(half.lse == without.lse && half.o != without.o);
    }
}

/// Matrices of the definition: P, Z, and what follows from them.
#[test]
fn the_oracle_follows_the_definition() {
    let dims = Dims::new(2, 5, 4, 3).with_seqlen_kv(7).with_heads_kv(2).with_head_dim_vo(2);
    for (mask, p) in [(Mask::Full, 0.3), (Mask::causal(), 0.5), (Mask::window(Some(3), Some(0)), 0.2)] {
        let forward = options(DType::F32, dims, mask, p).softmax_scale(0.7).build().unwrap();
        let case = Case::<f32>::new(forward.clone(), STATE);
        let [q, k, v] = &case.tensors();
        let d_o = &wide(&case.d_o(), forward.o_shape());
        let problem = BackwardProblem::builder(&forward).build().unwrap();
        let lengths = Lengths::default();
        let (got, gradients) = case.extra.modified(&forward, |modifiers| {
            (
                reference::forward_with(&forward, &lengths, [q, k, v], modifiers).unwrap(),
                reference::backward_with(&problem, &lengths, [q, k, v, d_o], None, modifiers).unwrap(),
            )
        });
        let drops = DropoutMask::new(Dropout::new(p).unwrap(), 4, STATE);
        let (scale, left) =
            (f64::from(forward.softmax_scale()), 1.0 - f64::from(forward.dropout().unwrap().probability()));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let mut o = Tensor::zeros(forward.o_shape());
        let [mut d_q, mut d_k, mut d_v] = [q, k, v].map(|like| Tensor::zeros(like.shape()));
        for (b, h, i) in (0..2).flat_map(|b| (0..4).flat_map(move |h| (0..5).map(move |i| (b, h, i)))) {
            let keys: Vec<usize> = (0..7).filter(|&j| mask.keep(i, j, 5, 7)).collect();
            let exp = |j: usize| (scale * dot(q.row(b, i, h), k.row(b, j, h / 2))).exp();
            let sum: f64 = keys.iter().map(|&j| exp(j)).sum();
            let z = |j: usize| if drops.keeps(b, h, i, j) { 1.0 / left } else { 0.0 };
            for &j in &keys {
                for d in 0..2 {
                    o.row_mut(b, i, h)[d] += exp(j) / sum * z(j) * v.row(b, j, h / 2)[d];
                    d_v.row_mut(b, j, h / 2)[d] += exp(j) / sum * z(j) * d_o.row(b, i, h)[d];
                }
            }
            let delta = dot(o.row(b, i, h), d_o.row(b, i, h));
            for &j in &keys {
                let d_s = exp(j) / sum * (z(j) * dot(d_o.row(b, i, h), v.row(b, j, h / 2)) - delta);
                for d in 0..3 {
                    d_q.row_mut(b, i, h)[d] += scale * d_s * k.row(b, j, h / 2)[d];
                    d_k.row_mut(b, j, h / 2)[d] += scale * d_s * q.row(b, i, h)[d];
                }
            }
            assert!((got.lse[(b * 4 + h) * 5 + i] - sum.ln()).abs() < 1e-12, "{forward}");
        }
        for (what, got, want) in [
            ("o", &got.o, &o),
            ("dq", &gradients.d_q, &d_q),
            ("dk", &gradients.d_k, &d_k),
            ("dv", &gradients.d_v, &d_v),
        ] {
            let off = got.data().iter().zip(want.data()).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(off < 1e-12, "{forward} {what}: {off}");
        }
    }
}

/// The gradients are the derivatives of a loss, with the mask of the forward pass.
#[test]
fn gradients_are_differences_with_the_mask_fixed() {
    let dims = Dims::new(2, 3, 2, 3).with_seqlen_kv(5).with_heads_kv(1).with_head_dim_vo(2);
    let forward = options(DType::F32, dims, Mask::causal(), 0.4).sinks(DType::F32).softcap(1.5).build().unwrap();
    let case = Case::<f32>::new(forward.clone(), STATE);
    let problem = BackwardProblem::builder(&forward).d_lse(true).d_sinks(true).build().unwrap();
    let (d_o, d_lse) = (wide(&case.d_o(), forward.o_shape()), widened(&values(case.lse.len(), 5)));
    case.extra.modified(&forward, |modifiers| {
        let loss = |inputs: &[Tensor; 3], sinks: &[f64]| {
            let [q, k, v] = inputs;
            let modifiers = Modifiers { sinks: Some(sinks), ..modifiers };
            let got = reference::forward_with(&forward, &Lengths::default(), [q, k, v], modifiers).unwrap();
            let of_o: f64 = got.o.data().iter().zip(d_o.data()).map(|(a, b)| a * b).sum();
            of_o + got.lse.iter().zip(&d_lse).map(|(a, b)| a * b).sum::<f64>()
        };
        let inputs = case.tensors();
        let [q, k, v] = &inputs;
        let all = [q, k, v, &d_o];
        let got = reference::backward_with(&problem, &Lengths::default(), all, Some(&d_lse), modifiers).unwrap();
        let sinks = modifiers.sinks.unwrap();
        let step = 1e-5;
        for (which, gradient) in [&got.d_q, &got.d_k, &got.d_v].into_iter().enumerate() {
            for (at, &gradient) in gradient.data().iter().enumerate() {
                let moved = |by: f64| {
                    let mut inputs = inputs.clone();
                    inputs[which].data_mut()[at] += by;
                    loss(&inputs, sinks)
                };
                let difference = (moved(step) - moved(-step)) / (2.0 * step);
                assert!((difference - gradient).abs() < 1e-8, "{which} {at}: {difference}, {gradient}");
            }
        }
        for (head, &gradient) in got.d_sinks.iter().enumerate() {
            let moved = |by: f64| {
                let mut sinks = sinks.to_vec();
                sinks[head] += by;
                loss(&inputs, &sinks)
            };
            let difference = (moved(step) - moved(-step)) / (2.0 * step);
            assert!((difference - gradient).abs() < 1e-8, "sink {head}: {difference}, {gradient}");
        }
    });
}

/// Sequences that follow each other have the masks of batch entries, so that all bits are those of batch entries.
#[test]
fn packed_sequences_are_batch_entries() {
    let dims = Dims::new(3, 40, 4, 8).with_seqlen_kv(50).with_heads_kv(2);
    for mask in [Mask::Full, Mask::causal()] {
        let padded = Case::<f32>::new(options(DType::F32, dims, mask, 0.3).build().unwrap(), STATE);
        let packed = options(DType::F32, dims.with_seqlen_q(120).with_seqlen_kv(150), mask, 0.3).packed(true);
        let packed = packed.build().unwrap();
        let lists =
            [[0, 40, 80, 120], [0, 50, 100, 150]].map(|list| SequenceOffsets::new(&Stream::Cpu, &list).unwrap());
        let rows = |[_, rows, heads, dim]: [usize; 4]| [rows, heads, dim];
        let [q, k, v] = &padded.inputs;
        let (mut o, mut lse) = (vec![f32::NAN; padded.o.len()], vec![f32::NAN; padded.lse.len()]);
        let shapes = [packed.q_shape(), packed.k_shape(), packed.v_shape()].map(rows);
        let args = Args::new()
            .read(Slot::Q, of(q, shapes[0]))
            .read(Slot::K, of(k, shapes[1]))
            .read(Slot::V, of(v, shapes[2]))
            .write(Slot::O, into(&mut o, rows(packed.o_shape())))
            .write(Slot::Lse, into(&mut lse, [4, 120]))
            .read(Slot::DropoutState, of(&STATE, [4]))
            .offsets(Slot::CuSeqlensQ, &lists[0])
            .offsets(Slot::CuSeqlensKv, &lists[1]);
        packed.plan(&Device::cpu()).unwrap().run(&Stream::Cpu, &mut workspace(), args).unwrap();
        assert_eq!(o, padded.o, "{packed}");

        let backward = BackwardProblem::builder(&packed).d_lse(true).build().unwrap();
        let d_o = padded.d_o();
        let want = padded.gradients(&d_o);
        // The LSE and its gradient are [heads, total] here, and [batch, heads, seqlen] there.
        let of_batches: Vec<f32> = values(padded.lse.len(), 5);
        let d_lse: Vec<f32> = (0..480).map(|i| of_batches[(i % 120 / 40 * 4 + i / 120) * 40 + i % 40]).collect();
        let mut got = [q, k, v].map(|like| vec![f32::NAN; like.len()]);
        let [d_q, d_k, d_v] = &mut got;
        let args = Args::new()
            .read(Slot::Q, of(q, shapes[0]))
            .read(Slot::K, of(k, shapes[1]))
            .read(Slot::V, of(v, shapes[2]))
            .read(Slot::O, of(&o, rows(packed.o_shape())))
            .read(Slot::Lse, of(&lse, [4, 120]))
            .read(Slot::DO, of(&d_o, rows(packed.o_shape())))
            .read(Slot::DLse, of(&d_lse, [4, 120]))
            .write(Slot::DQ, into(d_q, shapes[0]))
            .write(Slot::DK, into(d_k, shapes[1]))
            .write(Slot::DV, into(d_v, shapes[2]))
            .read(Slot::DropoutState, of(&STATE, [4]))
            .offsets(Slot::CuSeqlensQ, &lists[0])
            .offsets(Slot::CuSeqlensKv, &lists[1]);
        backward.plan(&Device::cpu()).unwrap().run(&Stream::Cpu, &mut workspace(), args).unwrap();
        assert_eq!(got, want, "{packed}");
    }
}

/// A dropped pair adds nothing to O and dV, also where its value or its dO is NaN. Its score is not dropped.
#[test]
fn nan_of_dropped_pairs_stays_out() {
    let dims = Dims::new(1, 70, 2, 8).with_seqlen_kv(90).with_heads_kv(1);
    let problem = options(DType::F32, dims, Mask::Full, 0.5).build().unwrap();
    let clean = Case::<f32>::new(problem.clone(), STATE);
    let drops = DropoutMask::of(&problem, Some(STATE)).unwrap();
    let (nan_key, nan_query) = (33, 20);
    let nan = |row: &[f32]| {
        assert!(row.iter().all(|x| x.is_nan()) || row.iter().all(|x| x.is_finite()));
        row[0].is_nan()
    };
    for infinity in [f32::NAN, f32::INFINITY] {
        let [q, k, mut v] = clean.inputs.clone();
        v[nan_key * 8..(nan_key + 1) * 8].fill(infinity);
        let case = Case::of(problem.clone(), STATE, [q, k, v]);
        for (query, head) in (0..70).flat_map(|query| [(query, 0), (query, 1)]) {
            let (row, before) = ((query * 2 + head) * 8, &clean.o);
            if drops.keeps(0, head, query, nan_key) {
                assert!(!case.o[row].is_finite(), "{query} {head}");
            } else {
                let off = (0..8).map(|d| (case.o[row + d] - before[row + d]).abs()).fold(0.0, f32::max);
                assert!(off < 1e-5, "{query} {head}: {off}");
            }
        }
        assert_eq!(case.lse, clean.lse);
    }
    // The gradients of rows without a part in it stay numbers.
    let [q, k, mut v] = clean.inputs.clone();
    v[nan_key * 8..(nan_key + 1) * 8].fill(f32::NAN);
    let case = Case::of(problem.clone(), STATE, [q, k, v]);
    let [d_q, _, d_v] = case.gradients(&clean.d_o());
    for (query, head) in (0..70).flat_map(|query| [(query, 0), (query, 1)]) {
        let row = &d_q[(query * 2 + head) * 8..][..8];
        assert_eq!(nan(row), drops.keeps(0, head, query, nan_key), "dq {query} {head}");
    }
    assert!(d_v.iter().all(|x| x.is_finite()));
    // NaN in dO reaches dV of the keys that its query does not drop.
    let mut d_o = clean.d_o();
    d_o[nan_query * 16..nan_query * 16 + 8].fill(f32::NAN);
    let [_, d_k, d_v] = clean.gradients(&d_o);
    for key in 0..90 {
        assert_eq!(nan(&d_v[key * 8..][..8]), drops.keeps(0, 0, nan_query, key), "dv {key}");
        assert!(nan(&d_k[key * 8..][..8]), "dk {key}");
    }
    // NaN in a key reaches every row.
    let [q, mut k, v] = clean.inputs.clone();
    k[nan_key * 8] = f32::NAN;
    let case = Case::of(problem, STATE, [q, k, v]);
    assert!(case.o.iter().all(|x| x.is_nan()) && case.lse.iter().all(|x| x.is_nan()));
}

#[test]
fn the_state_is_there_exactly_with_dropout() {
    let with = options(DType::F32, DIMS, Mask::Full, 0.5).build().unwrap();
    let without = with.to_builder().dropout(None).build().unwrap();
    let run = |problem: &ForwardProblem, state: &[i32]| {
        let shapes = [problem.q_shape(), problem.k_shape(), problem.v_shape()];
        let inputs = shapes.map(|shape| values::<f32>(shape.iter().product(), 1));
        let mut o = vec![0.0; problem.o_shape().iter().product()];
        let mut lse = vec![0.0; problem.lse_shape().iter().product()];
        let mut args = Args::new()
            .read(Slot::Q, of(&inputs[0], shapes[0]))
            .read(Slot::K, of(&inputs[1], shapes[1]))
            .read(Slot::V, of(&inputs[2], shapes[2]))
            .write(Slot::O, into(&mut o, problem.o_shape()))
            .write(Slot::Lse, into(&mut lse, problem.lse_shape()));
        if !state.is_empty() {
            args = args.read(Slot::DropoutState, of(state, [state.len()]));
        }
        let done = problem.plan(&Device::cpu()).unwrap().run(&Stream::Cpu, &mut workspace(), args);
        done.err().map(|error| error.to_string())
    };
    assert_eq!((run(&with, &STATE), run(&without, &[])), (None, None));
    let text = "dropout_state: missing; allowed: the tensor that the problem, made with dropout, reads";
    assert_eq!(run(&with, &[]).unwrap(), text);
    let text = "dropout_state: given; allowed: none, since the problem was made without dropout";
    assert_eq!(run(&without, &STATE).unwrap(), text);
    let text = "dropout_state: shape [2], expected [4] [words of seed and offset]";
    assert_eq!(run(&with, &STATE[..2]).unwrap(), text);
}
