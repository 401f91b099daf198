//! The CPU backend's gradients keep the tolerance against the oracle. O and the LSE are those of the CPU's forward pass.

use super::*;
use crate::problem::BackwardProblem;
use crate::reference::BackwardReport;
use crate::reference::sample::Given;

/// The results of a run, to be compared bit by bit.
#[derive(Debug, PartialEq)]
struct Gradients {
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
}

/// Runs a problem. Gaps and outputs are filled with NaN first. Afterwards the gaps must still hold NaN.
fn run<T: Float>(problem: &BackwardProblem, given: &Given, gaps: Gaps) -> Gradients {
    let forward = problem.forward();
    let (o, lse, _) = super::run::<T>(forward, [&given.q, &given.k, &given.v], gaps);
    let input = |tensor: &Tensor| {
        let layout = gaps.layout(tensor.shape());
        (place::<T>(tensor, &layout), layout)
    };
    let [q, k, v, o, d_o] = [&given.q, &given.k, &given.v, &o, &given.d_o].map(input);
    let rows = Layout::contiguous(problem.d_lse_shape()).unwrap();
    let narrow = |values: &[f64]| values.iter().map(|&x| x as f32).collect::<Vec<_>>();
    let (lse, d_lse) = (narrow(&lse), given.d_lse.as_deref().map(narrow));
    let poisoned = |shape| {
        let layout = gaps.layout(shape);
        (vec![T::from_f32(f32::NAN); layout.span()], layout)
    };
    let [mut d_q, mut d_k, mut d_v] = [problem.d_q_shape(), problem.d_k_shape(), problem.d_v_shape()].map(poisoned);
    fn host<T>((data, layout): &(Vec<T>, Layout<4>)) -> HostRef<'_, T, 4> {
        HostRef::of(data, *layout)
    }
    fn host_mut<T>((data, layout): &mut (Vec<T>, Layout<4>)) -> HostMut<'_, T, 4> {
        HostMut::of(data, *layout)
    }
    let inputs = BackwardInputs {
        q: host(&q),
        k: host(&k),
        v: host(&v),
        o: host(&o),
        lse: HostRef::of(&lse, rows),
        d_o: host(&d_o),
        d_lse: d_lse.as_deref().map(|data| HostRef::of(data, rows)),
        lengths: Lengths::default(),
        sinks: Sinks::None,
        bias: Additive::None,
        alibi: None,
        lists: None,
        dropout_state: None,
    };
    let (d_q_out, d_k_out, d_v_out) = (host_mut(&mut d_q), host_mut(&mut d_k), host_mut(&mut d_v));
    let outputs = BackwardOutputs { d_q: d_q_out, d_k: d_k_out, d_v: d_v_out, d_sinks: None, d_bias: None };
    backward::<T>(problem, &inputs, outputs).unwrap();
    let [d_q, d_k, d_v] = [d_q, d_k, d_v].map(|(data, layout)| {
        let values = Tensor::from_strided(&data, &layout);
        let nans = |values: &mut dyn Iterator<Item = bool>| values.filter(|&nan| nan).count();
        let of_values = nans(&mut values.data().iter().map(|x| x.is_nan()));
        let of_all = nans(&mut data.iter().map(|x| x.to_f32().is_nan()));
        assert_eq!(of_all, data.len() - values.data().len() + of_values, "{problem}: a gap was written");
        values
    });
    Gradients { d_q, d_k, d_v }
}

fn check(problem: &BackwardProblem, given: &Given, gaps: Gaps) -> BackwardReport {
    let got = match problem.dtype() {
        DType::F16 => run::<f16>(problem, given, gaps),
        DType::BF16 => run::<bf16>(problem, given, gaps),
        _ => run::<f32>(problem, given, gaps),
    };
    given.expected(problem).check(&got.d_q, &got.d_k, &got.d_v).unwrap()
}

fn problem(dtype: DType, dims: Dims, mask: Mask) -> BackwardProblem {
    BackwardProblem::builder(&super::problem(dtype, dims, mask)).build().unwrap()
}

#[test]
fn block_edges() {
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for (seqlen_q, seqlen_kv) in [(1, 1), (63, 65), (64, 256), (65, 257), (255, 63), (257, 129), (200, 1), (1, 300)]
        {
            for mask in
                [Mask::Full, Mask::causal(), Mask::Causal { corner: Corner::TopLeft }, Mask::window(Some(70), Some(9))]
            {
                let problem = problem(dtype, Dims { seqlen_q, seqlen_kv, ..DIMS }, mask)
                    .to_builder()
                    .d_lse(seqlen_q % 2 == 1)
                    .build()
                    .unwrap();
                let report = check(&problem, &Given::normal(&problem, 21), Gaps::default());
                assert!(report.passed(), "{problem}: {report}");
            }
        }
    }
}

#[test]
fn nan_stays_in_the_gradients_that_it_reaches() {
    let dims = Dims { seqlen_q: 150, seqlen_kv: 150, ..DIMS };
    for mask in [Mask::Full, Mask::causal(), Mask::window(Some(20), Some(4))] {
        let problem = problem(DType::F32, dims, mask).to_builder().d_lse(true).build().unwrap();
        let clean = Given::normal(&problem, 22);
        for which in 0..5 {
            let mut given = clean.clone();
            match which {
                0 => given.q.row_mut(0, 70, 1)[5] = f64::NAN,
                1 => given.k.row_mut(0, 70, 0)[5] = f64::NAN,
                2 => given.v.row_mut(0, 70, 0)[5] = f64::NAN,
                3 => given.d_o.row_mut(0, 70, 1)[5] = f64::NAN,
                _ => given.d_lse.as_mut().unwrap()[70] = f64::NAN,
            }
            let report = check(&problem, &given, Gaps::default());
            assert!(report.passed(), "{problem} with NaN in {which}: {report}");
        }
    }
}

#[test]
fn rows_without_keys_have_no_part_whatever_their_gradient() {
    // The first five queries stand before the first key.
    let problem = problem(DType::BF16, Dims { seqlen_q: 9, seqlen_kv: 4, ..DIMS }, Mask::causal())
        .to_builder()
        .d_lse(true)
        .build()
        .unwrap();
    let mut given = Given::normal(&problem, 23);
    let clean = run::<bf16>(&problem, &given, Gaps::default());
    for query in 0..5 {
        given.d_o.row_mut(0, query, 0).fill(f64::NAN);
        given.d_lse.as_mut().unwrap()[query] = f64::INFINITY;
    }
    let got = run::<bf16>(&problem, &given, Gaps::default());
    assert_eq!(got, clean);
    assert!((0..5).all(|query| got.d_q.row(0, query, 0).iter().all(|&x| x == 0.0)));
    assert!(got.d_q.row(0, 5, 0).iter().chain(got.d_v.data()).any(|&x| x != 0.0));
    assert!(check(&problem, &given, Gaps::default()).passed());
}

#[test]
fn the_same_inputs_give_the_same_bits_on_any_number_of_threads() {
    let dims = Dims { batch: 2, seqlen_q: 200, seqlen_kv: 333, heads_q: 4, heads_kv: 2, ..DIMS };
    let problem = problem(DType::F32, dims, Mask::causal());
    let given = Given::normal(&problem, 24);
    let on = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| run::<f32>(&problem, &given, Gaps::default()))
    };
    let first = on(1);
    for threads in [1, 2, 5] {
        assert!(on(threads) == first);
    }
}

#[test]
fn any_head_dims() {
    let masks = [Mask::causal(), Mask::window(Some(70), Some(9)), Mask::Full];
    for ((head_dim_qk, head_dim_vo), mask) in super::HEAD_DIMS.into_iter().zip(masks.into_iter().cycle()) {
        let dims = Dims { seqlen_q: 67, seqlen_kv: 90, head_dim_qk, head_dim_vo, ..DIMS };
        let problem = problem(DType::BF16, dims, mask);
        let report = check(&problem, &Given::normal(&problem, 26), Gaps::default());
        assert!(report.passed(), "{problem}: {report}");
    }
}

#[test]
fn no_keys_and_no_queries() {
    for dims in [Dims { seqlen_kv: 0, ..DIMS }, Dims { seqlen_q: 0, ..DIMS }, Dims { batch: 0, ..DIMS }] {
        let problem = problem(DType::BF16, dims, Mask::causal()).to_builder().d_lse(true).build().unwrap();
        let report = check(&problem, &Given::normal(&problem, 25), Gaps::default());
        assert_eq!(report.worst_ratio(), 0.0, "{report}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.min(96), ..ProptestConfig::default() })]
    #[test]
    fn gradients_keep_the_tolerance(
        dtype in prop_oneof![Just(DType::BF16), Just(DType::F16), Just(DType::F32)],
        (batch, heads_kv, group) in (1usize..3, 1usize..3, 1usize..4),
        (seqlen_q, seqlen_kv) in (prop_oneof![0usize..100, 250usize..280], 0usize..150),
        (head_dim_qk, head_dim_vo) in (1usize..70, 1usize..70),
        mask in masks(),
        scale in prop_oneof![Just(None), (0.01f32..2.0).prop_map(Some)],
        gaps in (any::<bool>(), 0usize..5, 0usize..9),
        d_lse in any::<bool>(),
        seed in 0u64..1 << 40,
    ) {
        let dims = Dims { batch, seqlen_q, seqlen_kv, heads_q: heads_kv * group, heads_kv, head_dim_qk, head_dim_vo };
        let mut forward = super::problem(dtype, dims, mask);
        if let Some(scale) = scale {
            forward = forward.to_builder().softmax_scale(scale).build().unwrap();
        }
        let problem = BackwardProblem::builder(&forward).d_lse(d_lse).build().unwrap();
        let gaps = Gaps { heads_first: gaps.0, dim: gaps.1, outer: gaps.2 };
        let report = check(&problem, &Given::normal(&problem, seed), gaps);
        prop_assert!(report.passed(), "{}: {}", problem, report);
    }
}
