//! Plans on the CPU through the public API: results against the oracle, and every refusal.

use hopper_attention::reference::{Expected, Tensor};
use hopper_attention::{
    DType, Device, Dims, Error, ForwardArgs, ForwardPlan, ForwardProblem, Layout, Mask, Operand, Result, Stream,
    TensorMut, TensorRef, Workspace, bf16, f16,
};
use proptest::prelude::*;

mod common;

use common::{DIMS, masks, spread, values};

fn plan(dtype: DType, dims: Dims) -> ForwardPlan {
    ForwardProblem::new(dtype, dims).unwrap().plan(&Device::cpu()).unwrap()
}

fn run<T: Operand>(plan: &ForwardPlan, args: ForwardArgs<'_, T>) -> Result<()> {
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?;
    plan.run(&Stream::Cpu, &mut workspace, args)
}

/// Runs a problem with poisoned outputs inside of guard bands, and holds it against the law.
fn check<T: Operand>(problem: &ForwardProblem, heads_outside: bool, gap: usize) {
    const GUARD: usize = 16;
    let layout = |shape| spread(shape, heads_outside, gap);
    let (q_layout, k_layout, v_layout) =
        (layout(problem.q_shape()), layout(problem.k_shape()), layout(problem.v_shape()));
    let q = values::<T>(q_layout.span(), 1);
    let k = values::<T>(k_layout.span(), 2);
    let v = values::<T>(v_layout.span(), 3);
    let o_layout = layout(problem.o_shape());
    let lse_layout = Layout::contiguous(problem.lse_shape()).unwrap();
    let mut o = vec![<T::Out as hopper_attention::Element>::from_f32(f32::NAN); o_layout.span() + 2 * GUARD];
    let mut lse = vec![f32::NAN; lse_layout.span() + 2 * GUARD];
    let args = ForwardArgs::<T> {
        q: TensorRef::host(&q, q_layout).unwrap(),
        k: TensorRef::host(&k, k_layout).unwrap(),
        v: TensorRef::host(&v, v_layout).unwrap(),
        o: TensorMut::host(&mut o[GUARD..], o_layout).unwrap(),
        lse: problem.wants_lse().then(|| TensorMut::host(&mut lse[GUARD..], lse_layout).unwrap()),
    };
    run(&problem.plan(&Device::cpu()).unwrap(), args).unwrap();

    use hopper_attention::Element as _;
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
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn results_obey_the_law(
        batch in 0usize..3, seqlen_q in 0usize..80, seqlen_kv in 0usize..150, heads_kv in 1usize..3,
        group in 1usize..4, head_dim_qk in 1usize..40, head_dim_vo in 1usize..40, mask in masks(),
        (heads_outside, gap, lse, dtype) in (any::<bool>(), 0usize..5, any::<bool>(), 0..3),
    ) {
        let dims = Dims { batch, seqlen_q, seqlen_kv, heads_q: heads_kv * group, heads_kv, head_dim_qk, head_dim_vo };
        let problem = |dtype| ForwardProblem::new(dtype, dims).unwrap().mask(mask).lse(lse);
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
    let q_layout = Layout::contiguous(problem.q_shape()).unwrap();
    // One key head for both.
    let k_layout = Layout::with_strides(problem.k_shape(), [7 * 16, 16, 0, 1]).unwrap();
    let v_layout = Layout::with_strides(problem.v_shape(), [7 * 8, 8, 0, 1]).unwrap();
    let o_layout = Layout::contiguous(problem.o_shape()).unwrap();
    let mut o = vec![f32::NAN; o_layout.span()];
    let args = ForwardArgs {
        q: TensorRef::host(&q, q_layout).unwrap(),
        k: TensorRef::host(&k, k_layout).unwrap(),
        v: TensorRef::host(&v, v_layout).unwrap(),
        o: TensorMut::host(&mut o, o_layout).unwrap(),
        lse: None,
    };
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
struct Memory<T: Operand> {
    q: Vec<T>,
    kv: Vec<T>,
    o: Vec<T::Out>,
    lse: Vec<f32>,
}

impl<T: Operand> Memory<T> {
    fn new() -> Self {
        Self { q: values(640, 1), kv: values(640, 2), o: vec![Default::default(); 640], lse: vec![0.0; 40] }
    }

    fn args(&mut self) -> ForwardArgs<'_, T> {
        let dense = |shape| Layout::contiguous(shape).unwrap();
        ForwardArgs {
            q: TensorRef::host(&self.q, dense([2, 5, 4, 16])).unwrap(),
            k: TensorRef::host(&self.kv, dense([2, 7, 2, 16])).unwrap(),
            v: TensorRef::host(&self.kv, dense([2, 7, 2, 8])).unwrap(),
            o: TensorMut::host(&mut self.o, dense([2, 5, 4, 8])).unwrap(),
            lse: Some(TensorMut::host(&mut self.lse, Layout::contiguous([2, 4, 5]).unwrap()).unwrap()),
        }
    }
}

#[test]
fn what_does_not_fit_the_problem_is_refused() {
    let problem = ForwardProblem::new(DType::F32, DIMS).unwrap().lse(true);
    let plan = problem.plan(&Device::cpu()).unwrap();
    let mut memory = Memory::<f32>::new();
    run(&plan, memory.args()).unwrap();

    let other = values::<f32>(640, 4);
    let wrong = |shape| TensorRef::host(&other, Layout::contiguous(shape).unwrap()).unwrap();
    fn refusal(plan: &ForwardPlan, args: ForwardArgs<'_, f32>) -> String {
        run(plan, args).unwrap_err().to_string()
    }
    assert_eq!(
        refusal(&plan, ForwardArgs { q: wrong([2, 4, 5, 16]), ..memory.args() }),
        "q: shape [2, 4, 5, 16], expected [2, 5, 4, 16] [batch, seqlen, heads, head_dim]"
    );
    assert!(refusal(&plan, ForwardArgs { k: wrong([2, 7, 2, 8]), ..memory.args() }).starts_with("k: shape"));
    assert!(refusal(&plan, ForwardArgs { v: wrong([2, 7, 2, 16]), ..memory.args() }).starts_with("v: shape"));
    let mut out = vec![0f32; 640];
    let o = TensorMut::host(&mut out, Layout::contiguous([2, 5, 4, 16]).unwrap()).unwrap();
    assert!(refusal(&plan, ForwardArgs { o, ..memory.args() }).starts_with("o: shape"));
    let lse = TensorMut::host(&mut out, Layout::contiguous([2, 5, 4]).unwrap()).unwrap();
    assert_eq!(
        refusal(&plan, ForwardArgs { lse: Some(lse), ..memory.args() }),
        "lse: shape [2, 5, 4], expected [2, 4, 5] [batch, heads, seqlen]"
    );
    assert!(refusal(&plan, ForwardArgs { lse: None, ..memory.args() }).starts_with("lse: missing"));
    let without = problem.lse(false).plan(&Device::cpu()).unwrap();
    assert!(run(&without, memory.args()).unwrap_err().to_string().starts_with("lse: given"));

    let error = run(&plan, Memory::<f16>::new().args()).unwrap_err();
    assert_eq!(error.to_string(), "q, k and v: dtype f16; allowed: f32, the problem's");
}

#[test]
fn empty_problems_succeed_and_write_what_is_theirs() {
    for dims in [Dims { batch: 0, ..DIMS }, Dims { seqlen_q: 0, ..DIMS }, Dims { seqlen_kv: 0, ..DIMS }] {
        let problem = ForwardProblem::new(DType::BF16, dims).unwrap().mask(Mask::causal()).lse(true);
        check::<bf16>(&problem, false, 0);
    }
    let problem = ForwardProblem::new(DType::BF16, Dims { seqlen_kv: 0, ..DIMS }).unwrap().lse(true);
    let mut memory = Memory::<bf16>::new();
    let mut args = memory.args();
    let none = |shape| TensorRef::host(&[], Layout::contiguous(shape).unwrap()).unwrap();
    (args.k, args.v) = (none([2, 0, 2, 16]), none([2, 0, 2, 8]));
    run(&problem.plan(&Device::cpu()).unwrap(), args).unwrap();
    assert!(memory.lse.iter().all(|&lse| lse == f32::NEG_INFINITY));
    assert!(memory.o[..320].iter().all(|&o| o == bf16::ZERO));
}

#[test]
fn a_described_gpu_has_no_kernels_to_run_here() {
    let problem = ForwardProblem::new(DType::BF16, DIMS).unwrap().lse(true);
    match problem.plan_for(&hopper_attention::DeviceFacts::h100_sxm()) {
        Ok(plan) => {
            let error = run(&plan, Memory::<bf16>::new().args()).unwrap_err();
            assert!(matches!(error, Error::Device { what: "stream", .. }), "{error}");
        }
        Err(error) => assert!(matches!(error, Error::Unsupported { .. }), "{error}"),
    }
}

const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Device>();
    shared::<Stream>();
    shared::<ForwardProblem>();
    shared::<ForwardPlan>();
    shared::<Workspace>();
    shared::<Layout<4>>();
    shared::<TensorRef<'static, bf16, 4>>();
    shared::<TensorMut<'static, bf16, 4>>();
    shared::<ForwardArgs<'static, f16>>();
    shared::<Error>();
    shared::<hopper_attention::KernelInfo>();
    shared::<hopper_attention::DeviceInfo>();
};
