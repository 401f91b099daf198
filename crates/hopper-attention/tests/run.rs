//! Plans on the CPU through the public API: results against the oracle, and every refusal.

use hopper_attention::reference::{Expected, Tensor};
use hopper_attention::{
    Args, DType, Device, Dims, Error, Float, ForwardArgs, ForwardPlan, ForwardProblem, Layout, Mask, OutputOf, Result,
    Slot, Stream, TensorMut, TensorRef, Workspace, bf16, f16,
};
use proptest::prelude::*;

mod common;

use common::{DIMS, dense, masks, spread, values};

fn plan(dtype: DType, dims: Dims) -> ForwardPlan {
    ForwardProblem::builder(dtype, dims).build().unwrap().plan(&Device::cpu()).unwrap()
}

fn run<'a>(plan: &ForwardPlan, args: impl Into<Args<'a>>) -> Result<()> {
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?;
    plan.run(&Stream::Cpu, &mut workspace, args)
}

/// Runs a problem with poisoned outputs inside of guard bands, and holds it against the tolerance.
fn check<T: Float + OutputOf<T>>(problem: &ForwardProblem, heads_outside: bool, gap: usize) {
    const GUARD: usize = 16;
    let layout = |shape| spread(shape, heads_outside, gap);
    let (q_layout, k_layout, v_layout) =
        (layout(problem.q_shape()), layout(problem.k_shape()), layout(problem.v_shape()));
    let q = values::<T>(q_layout.span(), 1);
    let k = values::<T>(k_layout.span(), 2);
    let v = values::<T>(v_layout.span(), 3);
    let o_layout = layout(problem.o_shape());
    let lse_layout = dense(problem.lse_shape());
    let mut o = vec![T::from_f32(f32::NAN); o_layout.span() + 2 * GUARD];
    let mut lse = vec![f32::NAN; lse_layout.span() + 2 * GUARD];
    let mut args = ForwardArgs::new(
        TensorRef::host(&q, q_layout).unwrap(),
        TensorRef::host(&k, k_layout).unwrap(),
        TensorRef::host(&v, v_layout).unwrap(),
        TensorMut::host(&mut o[GUARD..], o_layout).unwrap(),
    );
    if problem.wants_lse() {
        args = args.lse(TensorMut::host(&mut lse[GUARD..], lse_layout).unwrap());
    }
    run(&problem.plan(&Device::cpu()).unwrap(), args).unwrap();

    let written = o.iter().filter(|x| !x.to_f32().is_nan()).count();
    assert_eq!(written, problem.o_shape().iter().product::<usize>(), "every element is written, and nothing else");
    let lse_written = lse.iter().filter(|x| !x.is_nan()).count();
    assert_eq!(lse_written, if problem.wants_lse() { problem.lse_shape().iter().product() } else { 0 });
    let wide = |data: &[T], layout: &Layout<4>| Tensor::from_strided(data, layout);
    let expected = Expected::new(problem, &wide(&q, &q_layout), &wide(&k, &k_layout), &wide(&v, &v_layout)).unwrap();
    let lse: Vec<f64> = lse[GUARD..GUARD + lse_layout.span()].iter().map(|&x| f64::from(x)).collect();
    let report =
        expected.check(&Tensor::from_strided(&o[GUARD..], &o_layout), problem.wants_lse().then_some(&lse[..])).unwrap();
    assert!(report.passed(), "{problem}: {report:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.min(64), ..common::kept() })]
    #[test]
    fn results_keep_the_tolerance(
        batch in 0usize..3, seqlen_q in 0usize..80, seqlen_kv in 0usize..150, heads_kv in 1usize..3,
        group in 1usize..4, head_dim_qk in 1usize..40, head_dim_vo in 1usize..40, mask in masks(),
        (heads_outside, gap, lse, dtype) in (any::<bool>(), 0usize..5, any::<bool>(), 0..3),
    ) {
        let dims = Dims::new(batch, seqlen_q, heads_kv * group, head_dim_qk).with_seqlen_kv(seqlen_kv).with_heads_kv(heads_kv).with_head_dim_vo(head_dim_vo);
        let problem = |dtype| ForwardProblem::builder(dtype, dims).mask(mask).lse(lse).build().unwrap();
        match dtype {
            0 => check::<f16>(&problem(DType::F16), heads_outside, gap),
            1 => check::<bf16>(&problem(DType::BF16), heads_outside, gap),
            _ => check::<f32>(&problem(DType::F32), heads_outside, gap),
        }
    }
}

#[test]
fn inputs_may_be_broadcast() {
    let plan = plan(DType::F32, DIMS);
    let problem = plan.problem();
    let q = values::<f32>(2 * 5 * 4 * 16, 1);
    let (k, v) = (values::<f32>(2 * 7 * 16, 2), values::<f32>(2 * 7 * 8, 3));
    let q_layout = dense(problem.q_shape());
    // One key head for both.
    let k_layout = Layout::with_strides(problem.k_shape(), [7 * 16, 16, 0, 1]).unwrap();
    let v_layout = Layout::with_strides(problem.v_shape(), [7 * 8, 8, 0, 1]).unwrap();
    let o_layout = dense(problem.o_shape());
    let mut o = vec![f32::NAN; o_layout.span()];
    let args = ForwardArgs::new(
        TensorRef::host(&q, q_layout).unwrap(),
        TensorRef::host(&k, k_layout).unwrap(),
        TensorRef::host(&v, v_layout).unwrap(),
        TensorMut::host(&mut o, o_layout).unwrap(),
    );
    run(&plan, args).unwrap();
    let expected = Expected::new(
        problem,
        &Tensor::from_strided(&q, &q_layout),
        &Tensor::from_strided(&k, &k_layout),
        &Tensor::from_strided(&v, &v_layout),
    );
    assert!(expected.unwrap().check(&Tensor::from_strided(&o, &o_layout), None).unwrap().passed());
}

/// Memory for [`DIMS`], so that each refusal below changes one thing.
struct Memory<T> {
    q: Vec<T>,
    kv: Vec<T>,
    o: Vec<T>,
    lse: Vec<f32>,
}

impl<T: Float + OutputOf<T>> Memory<T> {
    fn new() -> Self {
        Self { q: values(640, 1), kv: values(640, 2), o: vec![T::from_f32(-7.0); 640], lse: vec![-7.0; 40] }
    }

    fn args(&mut self) -> ForwardArgs<'_> {
        let (args, lse) = self.args_and_lse();
        args.lse(lse)
    }

    fn args_and_lse(&mut self) -> (ForwardArgs<'_>, TensorMut<'_, f32, 3>) {
        let args = ForwardArgs::new(
            TensorRef::host(&self.q, dense([2, 5, 4, 16])).unwrap(),
            TensorRef::host(&self.kv, dense([2, 7, 2, 16])).unwrap(),
            TensorRef::host(&self.kv, dense([2, 7, 2, 8])).unwrap(),
            TensorMut::host(&mut self.o, dense([2, 5, 4, 8])).unwrap(),
        );
        (args, TensorMut::host(&mut self.lse, dense([2, 4, 5])).unwrap())
    }

    fn is_untouched(&self) -> bool {
        self.o.iter().all(|x| x.to_f32() == -7.0) && self.lse.iter().all(|&x| x == -7.0)
    }
}

#[test]
fn what_does_not_fit_the_problem_is_refused_and_nothing_is_written() {
    let problem = ForwardProblem::builder(DType::F32, DIMS).lse(true).build().unwrap();
    let plan = problem.plan(&Device::cpu()).unwrap();
    let mut memory = Memory::<f32>::new();
    let other = values::<f32>(640, 4);
    let wrong = |shape| TensorRef::host(&other, dense(shape)).unwrap();
    let refusal = |plan: &ForwardPlan, args: Args<'_>| run(plan, args).unwrap_err().to_string();
    assert_eq!(
        refusal(&plan, Args::from(memory.args()).read(Slot::Q, wrong([2, 4, 5, 16]))),
        "q: shape [2, 4, 5, 16], expected [2, 5, 4, 16] [batch, seqlen, heads, head_dim]"
    );
    let text = refusal(&plan, Args::from(memory.args()).read(Slot::K, wrong([2, 7, 2, 8])));
    assert!(text.starts_with("k: shape [2, 7, 2, 8], expected [2, 7, 2, 16]"), "{text}");
    let text = refusal(&plan, Args::from(memory.args()).read(Slot::V, wrong([2, 7, 2, 16])));
    assert!(text.starts_with("v: shape [2, 7, 2, 16], expected [2, 7, 2, 8]"), "{text}");
    let mut out = vec![-7f32; 640];
    let o = TensorMut::host(&mut out, dense([2, 5, 4, 16])).unwrap();
    let text = refusal(&plan, Args::from(memory.args()).write(Slot::O, o));
    assert!(text.starts_with("o: shape [2, 5, 4, 16], expected [2, 5, 4, 8]"), "{text}");
    let lse = TensorMut::host(&mut out, dense([2, 5, 4])).unwrap();
    assert_eq!(
        refusal(&plan, memory.args().lse(lse).into()),
        "lse: shape [2, 5, 4], expected [2, 4, 5] [batch, heads, seqlen]"
    );
    // Another rank is another shape.
    let lse = TensorMut::host(&mut out, dense([2, 4, 5, 1])).unwrap();
    assert_eq!(
        refusal(&plan, Args::from(memory.args()).write(Slot::Lse, lse)),
        "lse: shape [2, 4, 5, 1], expected [2, 4, 5] [batch, heads, seqlen]"
    );
    assert_eq!(
        refusal(&plan, memory.args_and_lse().0.into()),
        "lse: missing; allowed: the tensor that the problem, made with lse, writes"
    );
    assert_eq!(refusal(&plan, Args::new()), "q: missing; allowed: the tensor that the problem reads");
    let without = problem.to_builder().lse(false).build().unwrap().plan(&Device::cpu()).unwrap();
    assert_eq!(
        refusal(&without, memory.args().into()),
        "lse: given; allowed: none, since the problem was made without lse"
    );
    // The operands of another pass.
    assert_eq!(
        refusal(&plan, Args::from(memory.args()).read(Slot::DO, wrong([2, 5, 4, 8]))),
        "d_o: given; allowed: the operands of this problem: q, k, v, o, lse, descale_q, descale_k, descale_v, scale_o, amax, \
             cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, sinks, alibi_slopes, max_logits, \
             mask_block_cnt, mask_block_idx, mask_bits, full_block_cnt, full_block_idx, bias, dropout_state"
    );

    let mut halves = Memory::<f16>::new();
    assert_eq!(refusal(&plan, halves.args().into()), "q: dtype f16; allowed: f32, the problem's");
    let o = TensorMut::host(&mut halves.o, dense([2, 5, 4, 8])).unwrap();
    assert_eq!(
        refusal(&plan, Args::from(memory.args()).write(Slot::O, o)),
        "o: dtype f16; allowed: f32, the problem's"
    );
    assert!(memory.is_untouched() && halves.is_untouched() && out.iter().all(|&x| x == -7.0));
    run(&plan, memory.args()).unwrap();
}

#[test]
fn empty_problems_succeed_and_write_what_is_theirs() {
    for dims in [DIMS.with_batch(0), DIMS.with_seqlen_q(0), DIMS.with_seqlen_kv(0)] {
        let problem = ForwardProblem::builder(DType::BF16, dims).mask(Mask::causal()).lse(true).build().unwrap();
        check::<bf16>(&problem, false, 0);
    }
    let problem = ForwardProblem::builder(DType::BF16, DIMS.with_seqlen_kv(0)).lse(true).build().unwrap();
    let mut memory = Memory::<bf16>::new();
    let none = |shape| TensorRef::host(&[] as &[bf16], dense(shape)).unwrap();
    let args = Args::from(memory.args()).read(Slot::K, none([2, 0, 2, 16])).read(Slot::V, none([2, 0, 2, 8]));
    run(&problem.plan(&Device::cpu()).unwrap(), args).unwrap();
    assert!(memory.lse.iter().all(|&lse| lse == f32::NEG_INFINITY));
    assert!(memory.o[..320].iter().all(|&o| o == bf16::ZERO));
}

#[test]
fn a_described_gpu_has_no_kernels_to_run_here() {
    let problem = ForwardProblem::builder(DType::BF16, DIMS).lse(true).build().unwrap();
    match problem.plan_for(&hopper_attention::DeviceFacts::h100_sxm()) {
        Ok(plan) => {
            let error = run(&plan, Memory::<bf16>::new().args()).unwrap_err();
            assert!(matches!(error, Error::Device { what: "stream", .. }), "{error}");
        }
        Err(error) => assert!(matches!(error, Error::Unsupported { .. }), "{error}"),
    }
}
