//! Attention sinks on the CPU through the public API: results against the oracle, the oracle against finite differences, packed
//! sequences, FP8, and every refusal.

use hopper_attention::reference::{self, BackwardExpected, Expected, Modifiers, Tensor};
use hopper_attention::{
    Args, BackwardArgs, BackwardProblem, Corner, DType, Device, Dims, E4M3, Element, Float, ForwardArgs,
    ForwardProblem, Layout, Lengths, Mask, OutputOf, Slot, Stream, TensorMut, TensorRef, Workspace, bf16, f16,
};

mod common;

use common::{DIMS, values};

/// Masks of every kind.
fn masks() -> [Mask; 4] {
    let top_left = Mask::Causal { corner: Corner::TopLeft };
    [Mask::Full, Mask::causal(), top_left, Mask::window(Some(2), Some(1))]
}

const INF: f32 = f32::INFINITY;
/// A sink for each head: nothing, neutral, above most scores, and what only a comparison with the row's maximum survives.
const KINDS: [f32; 8] = [-INF, 0.0, 10.0, -10.0, 1000.0, -1000.0, 88.5, INF];

/// The sinks of a problem's heads: one kind after the other, from `first` on.
fn sinks<T: Element>(heads: usize, first: usize) -> Vec<T> {
    (0..heads).map(|head| T::from_f32(KINDS[(first + head) % KINDS.len()])).collect()
}

fn widened<T: Element>(values: &[T]) -> Vec<f64> {
    values.iter().map(|x| f64::from(x.to_f32())).collect()
}

fn list<T>(data: &[T]) -> TensorRef<'_, T, 1>
where
    T: Element,
{
    TensorRef::host(data, Layout::contiguous([data.len()]).unwrap()).unwrap()
}

/// Inputs of a problem without packed tensors, its outputs, and its gradients.
struct Case<T> {
    forward: ForwardProblem,
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    o: Vec<T>,
    lse: Vec<f32>,
    d_o: Vec<T>,
    d_lse: Vec<f32>,
}

impl<T: Float + OutputOf<T>> Case<T> {
    /// Runs the forward pass.
    fn new<S: Element>(forward: &ForwardProblem, sinks: &[S]) -> Self {
        let of = |shape: [usize; 4], seed| values(shape.iter().product(), seed);
        let mut case = Self {
            forward: forward.clone(),
            q: of(forward.q_shape(), 1),
            k: of(forward.k_shape(), 2),
            v: of(forward.v_shape(), 3),
            o: vec![T::from_f32(f32::NAN); forward.o_shape().iter().product()],
            lse: vec![f32::NAN; forward.lse_shape().iter().product()],
            d_o: of(forward.o_shape(), 4),
            d_lse: values(forward.lse_shape().iter().product(), 5),
        };
        let layout = |shape| Layout::contiguous(shape).unwrap();
        let read = |data, shape| TensorRef::host(data, layout(shape)).unwrap();
        let args = ForwardArgs::new(
            read(&case.q, forward.q_shape()),
            read(&case.k, forward.k_shape()),
            read(&case.v, forward.v_shape()),
            TensorMut::host(&mut case.o, layout(forward.o_shape())).unwrap(),
        );
        let rows = Layout::contiguous(forward.lse_shape()).unwrap();
        let args = args.lse(TensorMut::host(&mut case.lse, rows).unwrap()).sinks(list(sinks));
        let plan = forward.plan(&Device::cpu()).unwrap();
        plan.run(&Stream::Cpu, &mut Workspace::alloc(&Stream::Cpu, 0).unwrap(), args).unwrap();
        case
    }

    fn tensor(data: &[T], shape: [usize; 4]) -> Tensor {
        Tensor::from_strided(data, &Layout::contiguous(shape).unwrap())
    }

    fn inputs(&self) -> [Tensor; 3] {
        let forward = &self.forward;
        [(&self.q, forward.q_shape()), (&self.k, forward.k_shape()), (&self.v, forward.v_shape())]
            .map(|(data, shape)| Self::tensor(data, shape))
    }

    fn check(&self, sinks: &[f64]) {
        let [q, k, v] = &self.inputs();
        let modifiers = Modifiers { sinks: Some(sinks), ..Modifiers::default() };
        let problem = &self.forward;
        let expected = Expected::with(problem, &Lengths::default(), [q, k, v], modifiers, 1.0, None).unwrap();
        let o = Self::tensor(&self.o, problem.o_shape());
        let report = expected.check(&o, Some(&widened(&self.lse))).unwrap();
        assert!(report.passed(), "{problem} {sinks:?}: {report}");
        // Those of a problem without sinks are far off, where a sink has a part in a row that has keys.
        let plain = problem.to_builder().operand(Slot::Sinks, false).build().unwrap();
        let without = Expected::new(&plain, q, k, v).unwrap().check(&o, None).unwrap();
        let matters = sinks.iter().any(|&sink| sink > -5.0) && problem.dims().seqlen_kv > 0;
        assert_eq!(without.passed(), !matters, "{problem} {sinks:?}: {without}");
    }

    /// Runs the backward pass. The gradients of Q, K, V and the sinks.
    fn gradients<S: Element>(&self, problem: &BackwardProblem, sinks: &[S]) -> ([Vec<T>; 3], Vec<f32>) {
        let layout = |shape| Layout::contiguous(shape).unwrap();
        let read = |data, shape| TensorRef::host(data, layout(shape)).unwrap();
        let forward = &self.forward;
        let shapes = [forward.q_shape(), forward.k_shape(), forward.v_shape()];
        let mut out = shapes.map(|shape| vec![T::from_f32(f32::NAN); shape.iter().product()]);
        let mut d_sinks = vec![f32::NAN; sinks.len()];
        let [d_q, d_k, d_v] = &mut out;
        let write = |data, shape| TensorMut::host(data, layout(shape)).unwrap();
        let rows = Layout::contiguous(forward.lse_shape()).unwrap();
        let args = BackwardArgs::new(
            [read(&self.q, shapes[0]), read(&self.k, shapes[1]), read(&self.v, shapes[2])],
            read(&self.o, forward.o_shape()),
            TensorRef::host(&self.lse, rows).unwrap(),
            read(&self.d_o, forward.o_shape()),
            [write(d_q, shapes[0]), write(d_k, shapes[1]), write(d_v, shapes[2])],
        );
        let args = args.d_lse(TensorRef::host(&self.d_lse, rows).unwrap());
        let args = match problem.wants_d_sinks() {
            true => {
                let of_sinks = Layout::contiguous([d_sinks.len()]).unwrap();
                args.sinks(list(sinks)).d_sinks(TensorMut::host(&mut d_sinks, of_sinks).unwrap())
            }
            false => args,
        };
        problem
            .plan(&Device::cpu())
            .unwrap()
            .run(&Stream::Cpu, &mut Workspace::alloc(&Stream::Cpu, 0).unwrap(), args)
            .unwrap();
        (out, d_sinks)
    }

    fn check_gradients<S: Element>(&self, sinks: &[S]) {
        let problem = BackwardProblem::builder(&self.forward).d_lse(true).d_sinks(true).build().unwrap();
        let ([d_q, d_k, d_v], d_sinks) = self.gradients(&problem, sinks);
        let [q, k, v] = &self.inputs();
        let d_o = &Self::tensor(&self.d_o, problem.d_o_shape());
        let wide = widened(sinks);
        let expected = BackwardExpected::with(
            &problem,
            &Lengths::default(),
            [q, k, v, d_o],
            Some(&widened(&self.d_lse)),
            Modifiers { sinks: Some(&wide), ..Modifiers::default() },
            None,
        );
        let expected = expected.unwrap();
        let [d_q_t, d_k_t, d_v_t] =
            [(&d_q, problem.d_q_shape()), (&d_k, problem.d_k_shape()), (&d_v, problem.d_v_shape())]
                .map(|(data, shape)| Self::tensor(data, shape));
        let report = expected.check_with(&d_q_t, &d_k_t, &d_v_t, &widened(&d_sinks)).unwrap();
        assert!(report.passed(), "{problem} {wide:?}: {report}");
        // What is 2% off fails, and so does a gradient without that of the LSE.
        if let Some(head) = d_sinks.iter().position(|x| x.abs() > 0.05) {
            let mut off = widened(&d_sinks);
            off[head] *= 1.02;
            let report = expected.check_with(&d_q_t, &d_k_t, &d_v_t, &off).unwrap();
            assert!(!report.passed() || problem.dtype() != DType::F32, "{problem}: {report}");
        }
        // Without the gradient of the sinks the others have the same bits.
        let others = self.gradients(&problem.to_builder().d_sinks(false).build().unwrap(), sinks).0;
        let bits = |x: &[T]| x.iter().map(|x| x.to_f32().to_bits()).collect::<Vec<_>>();
        assert_eq!([&d_q, &d_k, &d_v].map(|x| bits(x)), [0, 1, 2].map(|i| bits(&others[i])), "{problem}");
    }
}

fn options(dtype: DType, dims: Dims, mask: Mask, sinks: DType) -> ForwardProblem {
    ForwardProblem::builder(dtype, dims).mask(mask).sinks(sinks).lse(true).build().unwrap()
}

fn both_passes<T: Float + OutputOf<T>, S: Element>(dims: Dims, mask: Mask, first: usize) {
    let sinks = sinks::<S>(dims.heads_q, first);
    let case = Case::<T>::new(&options(T::DTYPE, dims, mask, S::DTYPE), &sinks);
    case.check(&widened(&sinks));
    case.check_gradients(&sinks);
}

#[test]
fn both_passes_keep_the_tolerance() {
    for (i, mask) in masks().into_iter().enumerate() {
        for first in [0, 1, 2, 4, 6] {
            both_passes::<f32, f32>(DIMS, mask, first + i);
            both_passes::<bf16, f32>(DIMS, mask, first + i);
            both_passes::<f16, bf16>(DIMS, mask, first + i);
        }
    }
    // More than one block of queries and keys, and rows without keys.
    let long = Dims::new(1, 150, 3, 16).with_seqlen_kv(70);
    both_passes::<bf16, bf16>(long, Mask::causal(), 1);
    both_passes::<f32, f32>(long.with_seqlen_kv(600), Mask::window(Some(40), Some(3)), 1);
    both_passes::<f32, f32>(long.with_seqlen_kv(0), Mask::Full, 1);
}

/// A sink that is the largest score of a row.
#[test]
fn a_sink_may_be_a_rows_maximum() {
    let problem = options(DType::F32, Dims::new(1, 1, 1, 8).with_seqlen_kv(40), Mask::Full, DType::F32);
    let case = Case::<f32>::new(&problem, &[f32::NEG_INFINITY]);
    let [q, k, v] = &case.inputs();
    let modifiers = Modifiers { sinks: Some(&[f64::NEG_INFINITY]), ..Modifiers::default() };
    let oracle = reference::forward_with(&problem, &Lengths::default(), [q, k, v], modifiers).unwrap();
    let sink = oracle.scales[0].row_max as f32;
    let case = Case::<f32>::new(&problem, &[sink]);
    case.check(&[f64::from(sink)]);
    case.check_gradients(&[sink]);
}

#[test]
fn special_sinks() {
    // Of six queries in each head, the first four have no key.
    let dims = Dims::new(1, 6, 4, 8).with_seqlen_kv(2).with_heads_kv(2);
    let problem = options(DType::BF16, dims, Mask::causal(), DType::F32);
    let case = Case::<bf16>::new(&problem, &[-INF, 2.5, INF, f32::NAN]);
    let row = |head: usize, query: usize| {
        let start = (query * 4 + head) * 8;
        (case.lse[head * 6 + query], case.o[start..start + 8].iter().map(|x| x.to_f32()).collect::<Vec<_>>())
    };
    for query in 0..6 {
        let has_keys = query >= 4;
        let (lse, o) = row(0, query);
        assert!(lse.is_finite() == has_keys && (o == [0.0; 8]) != has_keys);
        let (lse, o) = row(1, query);
        assert!((lse == 2.5) != has_keys && (o == [0.0; 8]) != has_keys);
        assert_eq!(row(2, query), (INF, vec![0.0; 8]));
        let (lse, o) = row(3, query);
        assert!(lse.is_nan() && o.iter().all(|x| x.is_nan()));
    }
    case.check(&[f64::NEG_INFINITY, 2.5, f64::INFINITY, f64::NAN]);
    let backward = BackwardProblem::builder(&problem).d_lse(true).d_sinks(true).build().unwrap();
    let (_, d_sinks) = case.gradients(&backward, &[-INF, 2.5, INF, f32::NAN]);
    // Where the sink has all of the weight, the gradient is that of the LSE.
    let of_head = |head: usize| case.d_lse[head * 6..(head + 1) * 6].iter().map(|&x| f64::from(x)).sum::<f64>() as f32;
    assert_eq!((d_sinks[0], d_sinks[2]), (0.0, of_head(2)));
    assert!(d_sinks[1].is_finite() && d_sinks[1] != 0.0 && d_sinks[3].is_nan());
}

/// Central differences of a loss of O and the LSE, in f64.
#[test]
fn the_oracles_gradient_is_that_of_a_loss() {
    let dims = Dims::new(2, 7, 4, 8).with_seqlen_kv(5).with_heads_kv(2);
    for mask in masks() {
        let forward = options(DType::F32, dims, mask, DType::F32);
        let problem = BackwardProblem::builder(&forward).d_lse(true).d_sinks(true).build().unwrap();
        let sinks = [0.3, -1.2, 1.5, 0.0];
        let case = Case::<f32>::new(&forward, &sinks.map(|x| x as f32));
        let [q, k, v] = &case.inputs();
        let d_o = Case::<f32>::tensor(&case.d_o, problem.d_o_shape());
        let d_lse = widened(&case.d_lse);
        let lengths = Lengths::default();
        let loss = |sinks: &[f64]| {
            let modifiers = Modifiers { sinks: Some(sinks), ..Modifiers::default() };
            let oracle = reference::forward_with(&forward, &lengths, [q, k, v], modifiers).unwrap();
            let of_o: f64 = oracle.o.data().iter().zip(d_o.data()).map(|(a, b)| a * b).sum();
            of_o + oracle.lse.iter().zip(&d_lse).filter(|(lse, _)| lse.is_finite()).map(|(a, b)| a * b).sum::<f64>()
        };
        let modifiers = Modifiers { sinks: Some(&sinks), ..Modifiers::default() };
        let inputs = [q, k, v, &d_o];
        let exact = reference::backward_with(&problem, &lengths, inputs, Some(&d_lse), modifiers).unwrap();
        for head in 0..4 {
            let moved = |by: f64| {
                let mut moved = sinks;
                moved[head] += by;
                loss(&moved)
            };
            let slope = (moved(1e-4) - moved(-1e-4)) / 2e-4;
            assert!((slope - exact.d_sinks[head]).abs() < 1e-6, "{mask}: {slope} {}", exact.d_sinks[head]);
        }
    }
}

/// Packed sequences give what each gives by itself, and gaps have no sink.
#[test]
fn packed_sequences_have_sinks_of_their_own_rows() {
    let (heads, dim) = (3, 8);
    let offsets_q = [1, 1, 6, 15, 20];
    let offsets_kv = [0, 4, 4, 30, 31];
    let dims = Dims::new(4, 22, heads, dim).with_seqlen_kv(33);
    let sinks = [0.5_f32, 10.0, -INF];
    let forward = ForwardProblem::builder(DType::F32, dims).mask(Mask::causal()).packed(true).fill_gaps(true);
    let forward = forward.sinks(DType::F32).lse(true).build().unwrap();
    let backward = BackwardProblem::builder(&forward).d_lse(true).d_sinks(true).build().unwrap();
    let lengths = Lengths { cu_seqlens_q: Some(&offsets_q), cu_seqlens_kv: Some(&offsets_kv), ..Lengths::default() };

    let (rows_q, rows_kv) = (22 * heads * dim, 33 * heads * dim);
    let (q, k, v, d_o) = (values(rows_q, 1), values(rows_kv, 2), values(rows_kv, 3), values(rows_q, 4));
    let d_lse: Vec<f32> = values(22 * heads, 5);
    let (mut o, mut lse) = (vec![f32::NAN; rows_q], vec![f32::NAN; 22 * heads]);
    let of_q = Layout::contiguous([22, heads, dim]).unwrap();
    let of_kv = Layout::contiguous([33, heads, dim]).unwrap();
    let of_lse = Layout::contiguous([heads, 22]).unwrap();
    fn read<const R: usize>(data: &[f32], layout: Layout<R>) -> TensorRef<'_, f32, R> {
        TensorRef::host(data, layout).unwrap()
    }
    fn write<const R: usize>(data: &mut [f32], layout: Layout<R>) -> TensorMut<'_, f32, R> {
        TensorMut::host(data, layout).unwrap()
    }
    let args = ForwardArgs::packed(read(&q, of_q), read(&k, of_kv), read(&v, of_kv), write(&mut o, of_q));
    let args: Args<'_> = args.lse_packed(write(&mut lse, of_lse)).sinks(list(&sinks)).into();
    let args = args.read(Slot::CuSeqlensQ, list(&offsets_q)).read(Slot::CuSeqlensKv, list(&offsets_kv));
    forward
        .plan(&Device::cpu())
        .unwrap()
        .run(&Stream::Cpu, &mut Workspace::alloc(&Stream::Cpu, 0).unwrap(), args)
        .unwrap();
    assert_eq!((lse[0], &o[..heads * dim]), (-INF, &vec![0.0; heads * dim][..]));
    // Sequence 1 has queries, and no keys.
    assert_eq!((lse[3], lse[22 + 3], lse[44 + 3]), (0.5, 10.0, -INF));

    let tensor = |data: &[f32], rows| Tensor::from_strided(data, &Layout::contiguous([1, rows, heads, dim]).unwrap());
    let inputs = [tensor(&q, 22), tensor(&k, 33), tensor(&v, 33), tensor(&d_o, 22)];
    let [q_t, k_t, v_t, d_o_t] = &inputs;
    let wide = widened(&sinks);
    let modifiers = Modifiers { sinks: Some(&wide), ..Modifiers::default() };
    let expected = Expected::with(&forward, &lengths, [q_t, k_t, v_t], modifiers, 1.0, None).unwrap();
    let report = expected.check(&tensor(&o, 22), Some(&widened(&lse))).unwrap();
    assert!(report.passed(), "{report}");

    let [mut d_q, mut d_k, mut d_v] = [rows_q, rows_kv, rows_kv].map(|len| vec![f32::NAN; len]);
    let mut d_sinks = [f32::NAN; 3];
    let args = BackwardArgs::packed(
        [read(&q, of_q), read(&k, of_kv), read(&v, of_kv)],
        read(&o, of_q),
        read(&lse, of_lse),
        read(&d_o, of_q),
        [write(&mut d_q, of_q), write(&mut d_k, of_kv), write(&mut d_v, of_kv)],
    );
    let args = args.d_lse_packed(read(&d_lse, of_lse)).sinks(list(&sinks));
    let args: Args<'_> = args.d_sinks(write(&mut d_sinks, Layout::contiguous([heads]).unwrap())).into();
    let args = args.read(Slot::CuSeqlensQ, list(&offsets_q)).read(Slot::CuSeqlensKv, list(&offsets_kv));
    backward
        .plan(&Device::cpu())
        .unwrap()
        .run(&Stream::Cpu, &mut Workspace::alloc(&Stream::Cpu, 0).unwrap(), args)
        .unwrap();
    let given = [q_t, k_t, v_t, d_o_t];
    let expected = BackwardExpected::with(&backward, &lengths, given, Some(&widened(&d_lse)), modifiers, None).unwrap();
    let report = expected.check_with(&tensor(&d_q, 22), &tensor(&d_k, 33), &tensor(&d_v, 33), &widened(&d_sinks));
    let report = report.unwrap();
    assert!(report.passed(), "{report}");
    assert!(d_sinks[0] != 0.0 && d_sinks[1] != 0.0 && d_sinks[2] == 0.0);
}

#[test]
fn fp8_takes_sinks() {
    let dims = Dims::new(2, 70, 4, 32).with_seqlen_kv(300).with_heads_kv(2);
    for (first, mask) in [(0, Mask::Full), (1, Mask::causal()), (3, Mask::window(Some(20), None))] {
        let options = ForwardProblem::builder(DType::E4M3, dims).mask(mask).lse(true).amax(true);
        let problem = options.sinks(DType::F32).build().unwrap();
        let sinks = sinks::<f32>(4, first);
        let of = |shape: [usize; 4], seed| values::<E4M3>(shape.iter().product(), seed);
        let (q, k, v) = (of(problem.q_shape(), 1), of(problem.k_shape(), 2), of(problem.v_shape(), 3));
        let mut o = vec![bf16::from_f32(f32::NAN); problem.o_shape().iter().product()];
        let mut lse = vec![f32::NAN; problem.lse_shape().iter().product()];
        let (mut amax, factor) = ([f32::NAN], [1.0_f32]);
        let layout = |shape: [usize; 4]| Layout::contiguous(shape).unwrap();
        let read = |data, shape| TensorRef::host(data, layout(shape)).unwrap();
        let one = || TensorRef::host(&factor, Layout::contiguous([1, 1, 1]).unwrap()).unwrap();
        let args = ForwardArgs::new(
            read(&q, problem.q_shape()),
            read(&k, problem.k_shape()),
            read(&v, problem.v_shape()),
            TensorMut::host(&mut o, layout(problem.o_shape())).unwrap(),
        );
        let args = args.descale(one(), one(), one()).sinks(list(&sinks));
        let args = args.lse(TensorMut::host(&mut lse, Layout::contiguous(problem.lse_shape()).unwrap()).unwrap());
        let args = args.amax(TensorMut::host(&mut amax, Layout::contiguous([1]).unwrap()).unwrap());
        problem
            .plan(&Device::cpu())
            .unwrap()
            .run(&Stream::Cpu, &mut Workspace::alloc(&Stream::Cpu, 0).unwrap(), args)
            .unwrap();
        let tensor = |data: &[E4M3], shape| Tensor::from_strided(data, &layout(shape));
        let [q, k, v] = [tensor(&q, problem.q_shape()), tensor(&k, problem.k_shape()), tensor(&v, problem.v_shape())];
        let modifiers = Modifiers { sinks: Some(&widened(&sinks)), ..Modifiers::default() };
        let expected = Expected::with(&problem, &Lengths::default(), [&q, &k, &v], modifiers, 1.0, None).unwrap();
        let o = Tensor::from_strided(&o, &layout(problem.o_shape()));
        let report = expected.check(&o, Some(&widened(&lse))).unwrap();
        assert!(report.passed(), "{problem} {sinks:?}: {report}");
        let largest = o.data().iter().fold(0.0, |a: f64, b| a.max(b.abs()));
        assert!((f64::from(amax[0]) / largest - 1.0).abs() < 0.01, "{} {largest}", amax[0]);
    }
}

/// Q, K, V and O of one head dim.
const SAME: Dims = DIMS.with_head_dim_vo(16);

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let plain = ForwardProblem::builder(DType::F32, SAME).build().unwrap();
    let text = BackwardProblem::builder(&plain).d_sinks(true).build().unwrap_err().to_string();
    assert_eq!(text, "d_sinks: asked for; allowed: with a forward problem that was made with sinks only");
    let problem = ForwardProblem::builder(DType::F32, SAME).sinks(DType::BF16).build().unwrap();
    let [q, kv]: [Vec<f32>; 2] = [problem.q_shape(), problem.k_shape()].map(|shape| values(shape.iter().product(), 1));
    let run = |problem: &ForwardProblem, add: &dyn for<'a> Fn(ForwardArgs<'a>) -> ForwardArgs<'a>| {
        let layout = |shape| Layout::contiguous(shape).unwrap();
        let mut o = vec![f32::NAN; problem.o_shape().iter().product()];
        let kv = || TensorRef::host(&kv, layout(problem.k_shape())).unwrap();
        let o_out = TensorMut::host(&mut o, layout(problem.o_shape())).unwrap();
        let args = add(ForwardArgs::new(TensorRef::host(&q, layout(problem.q_shape())).unwrap(), kv(), kv(), o_out));
        let plan = problem.plan(&Device::cpu()).unwrap();
        let error =
            plan.run(&Stream::Cpu, &mut Workspace::alloc(&Stream::Cpu, 0).unwrap(), args).unwrap_err().to_string();
        assert!(o.iter().all(|x| x.is_nan()));
        error
    };
    let text = run(&problem, &|args| args);
    assert_eq!(text, "sinks: missing; allowed: the tensor that the problem, made with sinks, reads");
    static WIDE: [f32; 4] = [0.0; 4];
    let text = run(&problem, &|args| args.sinks(list(&WIDE)));
    assert_eq!(text, "sinks: dtype f32; allowed: bf16");
    let text = run(&plain, &|args| args.sinks(list(&WIDE)));
    assert_eq!(text, "sinks: given; allowed: none, since the problem was made without sinks");
    let wide = ForwardProblem::builder(DType::F32, SAME).sinks(DType::F32).build().unwrap();
    let text = run(&wide, &|args| args.sinks(list(&WIDE[..3])));
    assert!(text.starts_with("sinks: shape [3]"), "{text}");
    let [q, k] = [problem.q_shape(), problem.k_shape()].map(Tensor::zeros);
    let missing = reference::forward(&problem, &q, &k, &k).unwrap_err().to_string();
    assert_eq!(missing, "sinks: missing; allowed: the sinks, which the problem reads");
}
