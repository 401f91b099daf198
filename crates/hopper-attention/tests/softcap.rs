//! A cap of the scores on the CPU through the public API: results against the oracle, the oracle against the definition and finite
//! differences, packed sequences, and what a cap must not change.

use hopper_attention::reference::{self, BackwardExpected, Expected, Modifiers, Tensor};
use hopper_attention::{
    Args, BackwardArgs, BackwardProblem, DType, Device, Dims, Float, ForwardArgs, ForwardProblem, Lengths, Mask,
    OutputOf, SequenceOffsets, Slot, Stream, bf16, f16,
};

mod common;

use common::{DIMS, into, of, values, wide, widened, workspace};

/// Inputs, and the O and the LSE of a run.
struct Case<T> {
    forward: ForwardProblem,
    inputs: [Vec<T>; 3],
    o: Vec<T>,
    lse: Vec<f32>,
}

impl<T: Float + OutputOf<T>> Case<T> {
    fn new(forward: ForwardProblem) -> Self {
        let shapes = [forward.q_shape(), forward.k_shape(), forward.v_shape()];
        let inputs = [0, 1, 2].map(|i| values(shapes[i].iter().product(), 1 + i as u32));
        Self::of(forward, inputs)
    }

    fn of(forward: ForwardProblem, inputs: [Vec<T>; 3]) -> Self {
        let mut o = vec![T::from_f32(f32::NAN); forward.o_shape().iter().product()];
        let mut lse = vec![f32::NAN; forward.lse_shape().iter().product()];
        let [q, k, v] = &inputs;
        let args = ForwardArgs::new(
            of(q, forward.q_shape()),
            of(k, forward.k_shape()),
            of(v, forward.v_shape()),
            into(&mut o, forward.o_shape()),
        );
        let plan = forward.plan(&Device::cpu()).unwrap();
        plan.run(&Stream::Cpu, &mut workspace(), args.lse(into(&mut lse, forward.lse_shape()))).unwrap();
        Self { forward, inputs, o, lse }
    }

    fn tensors(&self) -> [Tensor; 3] {
        let shapes = [self.forward.q_shape(), self.forward.k_shape(), self.forward.v_shape()];
        [0, 1, 2].map(|i| wide(&self.inputs[i], shapes[i]))
    }

    fn check(&self) {
        let [q, k, v] = &self.tensors();
        let expected = Expected::new(&self.forward, q, k, v).unwrap();
        let o = wide(&self.o, self.forward.o_shape());
        let report = expected.check(&o, Some(&widened(&self.lse))).unwrap();
        assert!(report.passed(), "{}: {report}", self.forward);
    }

    fn gradients(&self) -> [Vec<T>; 3] {
        let problem = BackwardProblem::builder(&self.forward).d_lse(true).build().unwrap();
        let d_o: Vec<T> = values(self.o.len(), 4);
        let d_lse: Vec<f32> = values(self.lse.len(), 5);
        let shapes = [problem.d_q_shape(), problem.d_k_shape(), problem.d_v_shape()];
        let mut out = shapes.map(|shape| vec![T::from_f32(f32::NAN); shape.iter().product()]);
        let [d_q, d_k, d_v] = &mut out;
        let args = BackwardArgs::new(
            [0, 1, 2].map(|i| of(&self.inputs[i], shapes[i])),
            of(&self.o, self.forward.o_shape()),
            of(&self.lse, self.forward.lse_shape()),
            of(&d_o, problem.d_o_shape()),
            [into(d_q, shapes[0]), into(d_k, shapes[1]), into(d_v, shapes[2])],
        );
        let args = args.d_lse(of(&d_lse, self.forward.lse_shape()));
        problem.plan(&Device::cpu()).unwrap().run(&Stream::Cpu, &mut workspace(), args).unwrap();
        let [q, k, v] = &self.tensors();
        let expected =
            BackwardExpected::new(&problem, q, k, v, &wide(&d_o, problem.d_o_shape()), Some(&widened(&d_lse))).unwrap();
        let [d_q, d_k, d_v] = [0, 1, 2].map(|i| wide(&out[i], shapes[i]));
        let report = expected.check(&d_q, &d_k, &d_v).unwrap();
        assert!(report.passed(), "{problem}: {report}");
        out
    }
}

fn capped(dtype: DType, dims: Dims, mask: Mask, cap: f32, scale: f32) -> ForwardProblem {
    ForwardProblem::builder(dtype, dims).mask(mask).softcap(cap).softmax_scale(scale).lse(true).build().unwrap()
}

fn both_passes<T: Float + OutputOf<T>>(dims: Dims, mask: Mask) {
    // Scores that the cap hardly bends, bends, and cuts off.
    for (cap, scale) in [(50.0, 0.25), (15.0, 4.0), (1.0, 0.5), (1.0, 30.0), (50.0, 500.0)] {
        let case = Case::<T>::new(capped(T::DTYPE, dims, mask, cap, scale));
        case.check();
        case.gradients();
        let seen = case.lse.iter().filter(|lse| lse.is_finite()).all(|lse| lse.abs() <= cap + 10.0);
        assert!(seen, "{}: {:?}", case.forward, case.lse);
    }
}

#[test]
fn both_passes_keep_the_tolerance() {
    for mask in [Mask::Full, Mask::causal(), Mask::window(Some(2), Some(1))] {
        both_passes::<f32>(DIMS, mask);
        both_passes::<bf16>(DIMS, mask);
        both_passes::<f16>(DIMS, mask);
    }
    // More than one block of queries and keys, rows without keys, and no keys at all.
    let long = Dims::new(1, 150, 3, 16).with_seqlen_kv(70);
    both_passes::<bf16>(long, Mask::causal());
    both_passes::<f32>(long.with_seqlen_kv(600), Mask::window(Some(40), Some(3)));
    both_passes::<f32>(long.with_seqlen_kv(0), Mask::Full);
}

/// The oracle's gradients against the quotients of its own loss.
#[test]
fn finite_differences() {
    let dims = Dims::new(1, 4, 2, 5).with_seqlen_kv(6).with_heads_kv(1);
    for (cap, scale) in [(1.0, 0.4), (15.0, 3.0)] {
        let forward = capped(DType::F32, dims, Mask::causal(), cap, scale);
        let problem = BackwardProblem::builder(&forward).d_lse(true).build().unwrap();
        let of = |shape: [usize; 4], seed| wide(&values::<f32>(shape.iter().product(), seed), shape);
        let mut inputs = [of(forward.q_shape(), 1), of(forward.k_shape(), 2), of(forward.v_shape(), 3)];
        let d_o = of(forward.o_shape(), 4);
        let d_lse = widened(&values::<f32>(8, 5));
        let [q, k, v] = &inputs;
        let exact = reference::backward(&problem, q, k, v, &d_o, Some(&d_lse)).unwrap();
        let loss = |[q, k, v]: &[Tensor; 3]| {
            let oracle = reference::forward(&forward, q, k, v).unwrap();
            let of_o: f64 = oracle.o.data().iter().zip(d_o.data()).map(|(a, b)| a * b).sum();
            of_o + oracle.lse.iter().zip(&d_lse).map(|(a, b)| a * b).sum::<f64>()
        };
        for (i, gradient) in [&exact.d_q, &exact.d_k, &exact.d_v].into_iter().enumerate() {
            for at in 0..gradient.data().len() {
                let mut moved = |step: f64| {
                    inputs[i].data_mut()[at] += step;
                    let loss = loss(&inputs);
                    inputs[i].data_mut()[at] -= step;
                    loss
                };
                let want = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                assert!(
                    (gradient.data()[at] - want).abs() < 1e-7,
                    "{forward}, {i} {at}: {want}, {}",
                    gradient.data()[at]
                );
            }
        }
    }
}

/// One query and two keys: scores of 3 and an infinity become 2 tanh(1.5) and 2, and the masked key has no part.
#[test]
fn by_hand() {
    let dims = Dims::new(1, 1, 1, 1).with_seqlen_kv(3);
    let forward = capped(DType::F32, dims, Mask::window(Some(1), None), 2.0, 1.0);
    let case = Case::of(forward, [vec![1.0], vec![f32::NAN, 3.0, f32::INFINITY], vec![f32::NAN, 1.0, 5.0]]);
    let [a, b] = [2.0 * 1.5_f64.tanh(), 2.0].map(f64::exp);
    assert!((f64::from(case.o[0]) - (a + 5.0 * b) / (a + b)).abs() < 1e-6, "{:?}", case.o);
    assert!((f64::from(case.lse[0]) - (a + b).ln()).abs() < 1e-6, "{:?}", case.lse);
    case.check();
}

/// A cap far above the scores changes them by no more than its error, and 0 changes no bit.
#[test]
fn a_large_cap_is_nearly_none() {
    let problem = |cap| capped(DType::F32, DIMS, Mask::causal(), cap, 0.25);
    let [without, large] = [0.0, 1000.0].map(|cap| Case::<f32>::new(problem(cap)));
    let plain = ForwardProblem::builder(DType::F32, DIMS).mask(Mask::causal()).softmax_scale(0.25).lse(true);
    assert_eq!(Case::<f32>::new(plain.build().unwrap()).o, without.o);
    let far = without.o.iter().zip(&large.o).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(far < 1e-3 && far > 0.0, "{far}");
}

/// Sequences that follow each other are computed as each by itself, bit for bit, with sinks too.
#[test]
fn packed_sequences_and_sinks() {
    let dims = Dims::new(2, 9, 4, 8).with_seqlen_kv(11).with_heads_kv(2);
    let sinks = [0.5_f32, -1.0, 2.0, f32::NEG_INFINITY];
    let options = |dims| {
        let options = ForwardProblem::builder(DType::F32, dims).mask(Mask::causal()).softcap(1.5);
        options.softmax_scale(1.0).sinks(DType::F32).lse(true)
    };
    let packed = options(dims).packed(true).build().unwrap();
    let offsets = [[0, 4, 9], [0, 6, 11]];
    let [q, k, v] = [packed.q_shape(), packed.k_shape(), packed.v_shape()];
    let inputs = [(q, 1), (k, 2), (v, 3)].map(|(shape, seed)| values::<f32>(shape.iter().product(), seed));
    let mut o = vec![f32::NAN; packed.o_shape().iter().product()];
    let mut lse = vec![f32::NAN; packed.lse_shape().iter().product()];
    let lists = offsets.map(|offsets| SequenceOffsets::new(&Stream::Cpu, &offsets).unwrap());
    let rows = |[_, rows, heads, dim]: [usize; 4]| [rows, heads, dim];
    let args = Args::new()
        .read(Slot::Q, of(&inputs[0], rows(q)))
        .read(Slot::K, of(&inputs[1], rows(k)))
        .read(Slot::V, of(&inputs[2], rows(v)))
        .write(Slot::O, into(&mut o, rows(packed.o_shape())))
        .write(Slot::Lse, into(&mut lse, [4, 9]))
        .read(Slot::Sinks, of(&sinks, [4]))
        .offsets(Slot::CuSeqlensQ, &lists[0])
        .offsets(Slot::CuSeqlensKv, &lists[1]);
    packed.plan(&Device::cpu()).unwrap().run(&Stream::Cpu, &mut workspace(), args).unwrap();
    let lengths = Lengths { cu_seqlens_q: Some(&offsets[0]), cu_seqlens_kv: Some(&offsets[1]), ..Lengths::default() };
    let sinks = widened(&sinks);
    let modifiers = Modifiers { sinks: Some(&sinks), ..Modifiers::default() };
    let [q, k, v] = [(0, q), (1, k), (2, v)].map(|(i, shape)| wide(&inputs[i], shape));
    let expected = Expected::with(&packed, &lengths, [&q, &k, &v], modifiers, 1.0, None).unwrap();
    let o = wide(&o, packed.o_shape());
    let report = expected.check(&o, Some(&widened(&lse))).unwrap();
    assert!(report.passed(), "{report}");
    let without = packed.to_builder().softcap(0.0).build().unwrap();
    let without = Expected::with(&without, &lengths, [&q, &k, &v], modifiers, 1.0, None).unwrap();
    assert!(!without.check(&o, None).unwrap().passed());
}
