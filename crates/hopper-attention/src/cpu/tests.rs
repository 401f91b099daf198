//! The CPU backend's results keep the tolerance against the oracle.

use proptest::prelude::*;

mod backward;

use super::*;
use crate::dtype::{DType, Element, bf16, f16};
use crate::layout::Layout;
use crate::mask::{Corner, Mask};
use crate::problem::Dims;
use crate::reference::{Expected, Report, Tensor, sample};

const DIMS: Dims =
    Dims { batch: 1, seqlen_q: 3, seqlen_kv: 3, heads_q: 2, heads_kv: 1, head_dim_qk: 16, head_dim_vo: 16 };

/// How a test lays out a tensor in memory, with unused elements (gaps) in between.
#[derive(Clone, Copy, Debug, Default)]
struct Gaps {
    /// Whether the memory order is `[batch, heads, seqlen, head_dim]`, and not `[batch, seqlen, heads, head_dim]`.
    heads_first: bool,
    /// Unused elements after each vector.
    dim: usize,
    /// Unused elements after each token (or head, if heads come first) and after each sequence.
    outer: usize,
}

impl Gaps {
    fn layout(self, shape: [usize; 4]) -> Layout<4> {
        let [_, s, h, d] = shape;
        let row = (d + self.dim) as i64;
        let (seq, head, all) = if self.heads_first {
            let head = row * s as i64 + self.outer as i64;
            (row, head, head * h as i64)
        } else {
            let seq = row * h as i64 + self.outer as i64;
            (seq, row, seq * s as i64)
        };
        Layout::with_strides(shape, [all + self.outer as i64, seq, head, 1]).unwrap()
    }
}

/// A buffer with a tensor's values where a layout puts them, and NaN in the gaps.
fn place<T: Element>(values: &Tensor, layout: &Layout<4>) -> Vec<T> {
    let mut data = vec![T::from_f32(f32::NAN); layout.span()];
    let [batch, seqlen, heads, _] = values.shape();
    for (b, s, h) in (0..batch * seqlen * heads).map(|i| (i / heads / seqlen, i / heads % seqlen, i % heads)) {
        let start = layout.offset([b, s, h, 0]).unwrap();
        for (to, from) in data[start..].iter_mut().zip(values.row(b, s, h)) {
            *to = T::from_f32(*from as f32);
        }
    }
    data
}

/// Runs a problem. Gaps and outputs are filled with NaN first. Returns O, the LSE, and whether the gaps still hold NaN.
fn run<T: Float>(problem: &ForwardProblem, [q, k, v]: [&Tensor; 3], gaps: Gaps) -> (Tensor, Vec<f64>, bool) {
    let layouts = [q, k, v].map(|t| gaps.layout(t.shape()));
    let [q, k, v] = [(q, layouts[0]), (k, layouts[1]), (v, layouts[2])].map(|(t, layout)| place::<T>(t, &layout));
    let o_layout = gaps.layout(problem.o_shape());
    let lse_layout = Layout::contiguous(problem.lse_shape()).unwrap();
    let mut o = vec![T::from_f32(f32::NAN); o_layout.span()];
    let mut lse = vec![f32::NAN; lse_layout.span()];
    let inputs = Inputs {
        q: HostRef::of(&q, layouts[0]),
        k: HostRef::of(&k, layouts[1]),
        v: HostRef::of(&v, layouts[2]),
        lengths: Lengths::default(),
        sinks: Sinks::None,
        bias: Additive::None,
        alibi: None,
        lists: None,
        dropout_state: None,
    };
    let outputs =
        Outputs { o: HostMut::of(&mut o, o_layout), lse: Some(HostMut::of(&mut lse, lse_layout)), max_logits: None };
    forward::<T>(problem, &inputs, outputs).unwrap();
    let values = Tensor::from_strided(&o, &o_layout);
    let written = values.data().len();
    let gaps_kept = o.iter().filter(|x| x.to_f32().is_nan()).count()
        == o.len() - written + values.data().iter().filter(|x| x.is_nan()).count();
    (values, lse.into_iter().map(f64::from).collect(), gaps_kept)
}

fn check(problem: &ForwardProblem, inputs: [&Tensor; 3], gaps: Gaps) -> Report {
    let (o, lse, gaps_kept) = match problem.dtype() {
        DType::F16 => run::<f16>(problem, inputs, gaps),
        DType::BF16 => run::<bf16>(problem, inputs, gaps),
        _ => run::<f32>(problem, inputs, gaps),
    };
    assert!(gaps_kept, "{problem}: a gap was written");
    let [q, k, v] = inputs;
    Expected::new(problem, q, k, v).unwrap().check(&o, Some(&lse)).unwrap()
}

fn problem(dtype: DType, dims: Dims, mask: Mask) -> ForwardProblem {
    ForwardProblem::builder(dtype, dims).mask(mask).lse(true).build().unwrap()
}

#[test]
fn block_edges() {
    for (seqlen_q, seqlen_kv) in [(1, 1), (63, 255), (64, 256), (65, 257), (129, 513), (257, 64), (200, 1), (1, 700)] {
        for mask in
            [Mask::Full, Mask::causal(), Mask::Causal { corner: Corner::TopLeft }, Mask::window(Some(70), Some(9))]
        {
            let problem = problem(DType::BF16, Dims { seqlen_q, seqlen_kv, ..DIMS }, mask);
            let [q, k, v] = sample::inputs(&problem, 11);
            let report = check(&problem, [&q, &k, &v], Gaps::default());
            assert!(report.passed(), "{problem}: {report}");
        }
    }
}

/// Head dims of Q and K with those of V and O: the least multiple of 8, those of models, pairs, 512, one above it, and one that
/// is no multiple of 8.
const HEAD_DIMS: [(usize, usize); 9] =
    [(8, 8), (136, 136), (192, 128), (128, 192), (256, 256), (512, 512), (8, 512), (520, 520), (12, 12)];

#[test]
fn any_head_dims() {
    let masks = [Mask::Full, Mask::causal(), Mask::window(Some(70), Some(9))];
    for ((head_dim_qk, head_dim_vo), mask) in HEAD_DIMS.into_iter().zip(masks.into_iter().cycle()) {
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            let dims = Dims { seqlen_q: 33, seqlen_kv: 259, head_dim_qk, head_dim_vo, ..DIMS };
            let problem = problem(dtype, dims, mask);
            let [q, k, v] = sample::inputs(&problem, 15);
            let gaps = Gaps { heads_first: head_dim_qk > head_dim_vo, dim: 3, outer: 5 };
            let report = check(&problem, [&q, &k, &v], gaps);
            assert!(report.passed(), "{problem}: {report}");
        }
    }
}

#[test]
fn nan_stays_in_the_rows_that_see_it() {
    let dims = Dims { seqlen_q: 300, seqlen_kv: 300, ..DIMS };
    for mask in [Mask::Full, Mask::causal(), Mask::window(Some(20), Some(4))] {
        for bad in [f64::NAN, f64::INFINITY] {
            let problem = problem(DType::F32, dims, mask);
            let [q, k, v] = sample::inputs(&problem, 12);
            for which in 0..3 {
                let mut inputs = [q.clone(), k.clone(), v.clone()];
                inputs[which].row_mut(0, 130, 0)[5] = bad;
                // Infinite Q and K are left out: they give scores of +inf or -inf. Only NaN scores are tested here.
                if which < 2 && bad.is_infinite() {
                    continue;
                }
                let [q, k, v] = &inputs;
                let report = check(&problem, [q, k, v], Gaps::default());
                assert!(report.passed(), "{problem} with {bad} in {which}: {report}");
            }
        }
    }
}

#[test]
fn the_same_inputs_give_the_same_bits_on_any_number_of_threads() {
    let dims = Dims { batch: 2, seqlen_q: 200, seqlen_kv: 333, heads_q: 4, heads_kv: 2, ..DIMS };
    let problem = problem(DType::F32, dims, Mask::causal());
    let [q, k, v] = sample::inputs(&problem, 13);
    let on = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| run::<f32>(&problem, [&q, &k, &v], Gaps::default()))
    };
    let first = on(1);
    for threads in [1, 2, 5] {
        assert!(on(threads) == first);
    }
}

#[test]
fn no_keys_and_no_queries() {
    for dims in [Dims { seqlen_kv: 0, ..DIMS }, Dims { seqlen_q: 0, ..DIMS }, Dims { batch: 0, ..DIMS }] {
        let problem = problem(DType::BF16, dims, Mask::causal());
        let [q, k, v] = sample::inputs(&problem, 14);
        assert_eq!(check(&problem, [&q, &k, &v], Gaps::default()).worst_ratio(), 0.0);
    }
}

#[test]
fn broadcast_inputs() {
    // With stride 0 all keys of the sequence are one key. All weights are equal, and O is the value of that key.
    let problem = problem(DType::F32, DIMS, Mask::Full);
    let [q, k, v] = [[0.5_f32; 96], [0.25; 96], std::array::from_fn(|i| (i % 16) as f32)];
    let dense = |heads| Layout::contiguous([1, 3, heads, 16]).unwrap();
    let repeat = Layout::with_strides([1, 3, 1, 16], [0, 0, 16, 1]).unwrap();
    let mut o = [f32::NAN; 96];
    let (k, v) = (HostRef::of(&k[..16], repeat), HostRef::of(&v[..16], repeat));
    let q = HostRef::of(&q, dense(2));
    let (lengths, bias) = (Lengths::default(), Additive::None);
    let inputs = Inputs { q, k, v, lengths, sinks: Sinks::None, bias, alibi: None, lists: None, dropout_state: None };
    forward::<f32>(&problem, &inputs, Outputs { o: HostMut::of(&mut o, dense(2)), lse: None, max_logits: None })
        .unwrap();
    for (i, o) in o.iter().enumerate() {
        assert!((o - (i % 16) as f32).abs() < 1e-5, "{i}: {o}");
    }
}

fn masks() -> impl Strategy<Value = Mask> {
    let corner = || prop_oneof![Just(Corner::BottomRight), Just(Corner::TopLeft)];
    let bound = || prop_oneof![Just(None), (0usize..40).prop_map(Some), Just(Some(1000))];
    prop_oneof![
        Just(Mask::Full),
        corner().prop_map(|corner| Mask::Causal { corner }),
        (bound(), bound(), corner()).prop_map(|(left, right, corner)| Mask::Window { left, right, corner }),
        (1usize..50, corner()).prop_map(|(chunk, corner)| Mask::Chunked { chunk, corner }),
        (0usize..50, corner()).prop_map(|(keys, corner)| Mask::Prefix { keys, corner }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.min(96), ..ProptestConfig::default() })]
    #[test]
    fn keeps_the_tolerance(
        dtype in prop_oneof![Just(DType::BF16), Just(DType::F16), Just(DType::F32)],
        (batch, heads_kv, group) in (1usize..3, 1usize..3, 1usize..4),
        (seqlen_q, seqlen_kv) in (0usize..150, prop_oneof![0usize..150, 250usize..280]),
        (head_dim_qk, head_dim_vo) in (1usize..70, 1usize..70),
        mask in masks(),
        scale in prop_oneof![Just(None), (0.01f32..2.0).prop_map(Some)],
        gaps in (any::<bool>(), 0usize..5, 0usize..9),
        seed in 0u64..1 << 40,
    ) {
        let dims = Dims { batch, seqlen_q, seqlen_kv, heads_q: heads_kv * group, heads_kv, head_dim_qk, head_dim_vo };
        let mut problem = problem(dtype, dims, mask);
        if let Some(scale) = scale {
            problem = problem.to_builder().softmax_scale(scale).build().unwrap();
        }
        let [q, k, v] = sample::inputs(&problem, seed);
        let gaps = Gaps { heads_first: gaps.0, dim: gaps.1, outer: gaps.2 };
        let report = check(&problem, [&q, &k, &v], gaps);
        prop_assert!(report.passed(), "{}: {}", problem, report);
    }
}
