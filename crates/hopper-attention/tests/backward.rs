//! Backward plans on the CPU through the public API: derivatives of losses, results against the oracle, and every refusal.

use hopper_attention::reference::{self, BackwardExpected, Tensor};
use hopper_attention::{
    Args, BackwardArgs, BackwardPlan, BackwardProblem, BackwardProblemBuilder, DType, Device, DeviceFacts, Dims,
    Element, Error, Float, ForwardArgs, ForwardProblem, Layout, Mask, OutputOf, Result, Slot, Stream, TensorMut,
    TensorRef, Workspace, bf16, f16,
};
use proptest::prelude::*;

mod common;

use common::{DIMS, dense, masks, spread, values};

/// Elements of NaN before and after every output.
const GUARD: usize = 16;

/// Strides that put the dimensions in some order and leave gaps after heads and sequences.
#[derive(Clone, Copy, Debug)]
struct Spread {
    heads_outside: bool,
    gap: usize,
}

impl Spread {
    const DENSE: Self = Self { heads_outside: false, gap: 0 };

    fn layout(self, shape: [usize; 4]) -> Layout<4> {
        spread(shape, self.heads_outside, self.gap)
    }

    fn rows(self, shape: [usize; 3]) -> Layout<3> {
        let [_, h, s] = shape.map(|size| size as i64);
        let head = s.max(1) + self.gap as i64;
        Layout::with_strides(shape, [h * head + self.gap as i64, head, 1]).unwrap()
    }
}

/// Memory of a tensor, inside of guard bands.
struct Guarded<T, const R: usize> {
    data: Vec<T>,
    layout: Layout<R>,
}

impl<T: Element, const R: usize> Guarded<T, R> {
    fn new(layout: Layout<R>, inner: Vec<T>) -> Self {
        let guard = || std::iter::repeat_n(T::from_f32(f32::NAN), GUARD);
        Self { data: guard().chain(inner).chain(guard()).collect(), layout }
    }

    fn poisoned(layout: Layout<R>) -> Self {
        Self::new(layout, vec![T::from_f32(f32::NAN); layout.span()])
    }

    fn inner(&self) -> &[T] {
        &self.data[GUARD..self.data.len() - GUARD]
    }

    fn read(&self) -> TensorRef<'_, T, R> {
        TensorRef::host(self.inner(), self.layout).unwrap()
    }

    fn write(&mut self) -> TensorMut<'_, T, R> {
        let end = self.data.len() - GUARD;
        TensorMut::host(&mut self.data[GUARD..end], self.layout).unwrap()
    }

    /// Every element was written with a number, and nothing else was written.
    fn check_written(&self, name: &str) {
        let written = self.data.iter().filter(|x| !x.to_f32().is_nan()).count();
        assert_eq!(written, self.layout.shape().iter().product::<usize>(), "{name}");
    }
}

impl<T: Element> Guarded<T, 4> {
    fn tensor(&self) -> Tensor {
        Tensor::from_strided(self.inner(), &self.layout)
    }
}

impl Guarded<f32, 3> {
    /// In logical order.
    fn numbers(&self) -> Vec<f64> {
        let ([b, h, s], [b_step, h_step, _]) = (self.layout.shape(), self.layout.stride());
        let rows = (0..b).flat_map(|b| (0..h).map(move |h| b * b_step as usize + h * h_step as usize));
        rows.flat_map(|start| (0..s).map(move |s| f64::from(self.inner()[start + s]))).collect()
    }
}

/// A backward pass with everything that it reads and writes.
struct Pass<T> {
    problem: BackwardProblem,
    q: Guarded<T, 4>,
    k: Guarded<T, 4>,
    v: Guarded<T, 4>,
    o: Guarded<T, 4>,
    lse: Guarded<f32, 3>,
    d_o: Guarded<T, 4>,
    d_lse: Option<Guarded<f32, 3>>,
    d_q: Guarded<T, 4>,
    d_k: Guarded<T, 4>,
    d_v: Guarded<T, 4>,
}

impl<T: Float + OutputOf<T>> Pass<T> {
    /// Inputs, O and the LSE of the forward pass, and outputs of NaN.
    fn new(problem: &BackwardProblem, spread: Spread) -> Self {
        let forward = problem.forward();
        let input = |shape, seed| {
            let layout = spread.layout(shape);
            Guarded::new(layout, values(layout.span(), seed))
        };
        let rows = spread.rows(problem.d_lse_shape());
        let mut pass = Self {
            problem: problem.clone(),
            q: input(forward.q_shape(), 1),
            k: input(forward.k_shape(), 2),
            v: input(forward.v_shape(), 3),
            o: Guarded::poisoned(spread.layout(forward.o_shape())),
            lse: Guarded::poisoned(rows),
            d_o: input(problem.d_o_shape(), 4),
            d_lse: problem.takes_d_lse().then(|| Guarded::new(rows, values(rows.span(), 5))),
            d_q: Guarded::poisoned(spread.layout(problem.d_q_shape())),
            d_k: Guarded::poisoned(spread.layout(problem.d_k_shape())),
            d_v: Guarded::poisoned(spread.layout(problem.d_v_shape())),
        };
        let args = ForwardArgs::new(pass.q.read(), pass.k.read(), pass.v.read(), pass.o.write());
        let args = args.lse(pass.lse.write());
        let plan = forward.plan(&Device::cpu()).unwrap();
        plan.run(&Stream::Cpu, &mut Workspace::alloc(&Stream::Cpu, plan.workspace_bytes()).unwrap(), args).unwrap();
        pass
    }

    fn args(&mut self) -> BackwardArgs<'_> {
        let args = BackwardArgs::new(
            [self.q.read(), self.k.read(), self.v.read()],
            self.o.read(),
            self.lse.read(),
            self.d_o.read(),
            [self.d_q.write(), self.d_k.write(), self.d_v.write()],
        );
        match &self.d_lse {
            Some(d_lse) => args.d_lse(d_lse.read()),
            None => args,
        }
    }

    fn run(&mut self) {
        let plan = self.problem.plan(&Device::cpu()).unwrap();
        run(&plan, self.args()).unwrap();
    }

    /// Runs it, and holds the gradients against the tolerance.
    fn check(mut self) {
        self.run();
        self.d_q.check_written("d_q");
        self.d_k.check_written("d_k");
        self.d_v.check_written("d_v");
        let [q, k, v, d_o] = [&self.q, &self.k, &self.v, &self.d_o].map(Guarded::tensor);
        let d_lse = self.d_lse.as_ref().map(Guarded::numbers);
        let expected = BackwardExpected::new(&self.problem, &q, &k, &v, &d_o, d_lse.as_deref()).unwrap();
        let report = expected.check(&self.d_q.tensor(), &self.d_k.tensor(), &self.d_v.tensor()).unwrap();
        assert!(report.passed(), "{}: {report}", self.problem);
    }
}

fn run<'a>(plan: &BackwardPlan, args: impl Into<Args<'a>>) -> Result<()> {
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?;
    plan.run(&Stream::Cpu, &mut workspace, args)
}

fn options(dtype: DType, dims: Dims, mask: Mask) -> BackwardProblemBuilder {
    BackwardProblem::builder(&ForwardProblem::builder(dtype, dims).mask(mask).build().unwrap())
}

fn problem(dtype: DType, dims: Dims, mask: Mask) -> BackwardProblem {
    options(dtype, dims, mask).build().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.min(64), ..common::kept() })]
    #[test]
    fn gradients_keep_the_tolerance(
        batch in 0usize..3, seqlen_q in 0usize..150, seqlen_kv in 0usize..80, heads_kv in 1usize..3,
        group in 1usize..4, head_dim_qk in 1usize..40, head_dim_vo in 1usize..40, mask in masks(),
        (heads_outside, gap, d_lse, deterministic, dtype) in
            (any::<bool>(), 0usize..5, any::<bool>(), any::<bool>(), 0..3),
    ) {
        let dims = Dims::new(batch, seqlen_q, heads_kv * group, head_dim_qk).with_seqlen_kv(seqlen_kv).with_heads_kv(heads_kv).with_head_dim_vo(head_dim_vo);
        let problem = |dtype| options(dtype, dims, mask).d_lse(d_lse).deterministic(deterministic).build().unwrap();
        let spread = Spread { heads_outside, gap };
        match dtype {
            0 => Pass::<f16>::new(&problem(DType::F16), spread).check(),
            1 => Pass::<bf16>::new(&problem(DType::BF16), spread).check(),
            _ => Pass::<f32>::new(&problem(DType::F32), spread).check(),
        }
    }
}

/// A loss of O and the LSE, as a model has it: the gradients are its derivatives with respect to Q, K and V, by central
/// differences of the f64 forward pass.
#[test]
fn derivatives_of_a_composed_loss() {
    const STEP: f64 = 1e-4;
    for mask in [Mask::Full, Mask::causal(), Mask::window(Some(2), Some(1))] {
        let problem = options(DType::F32, DIMS, mask).d_lse(true).build().unwrap();
        let forward = problem.forward();
        let mut pass = Pass::<f32>::new(&problem, Spread { heads_outside: true, gap: 3 });
        let inputs = [&pass.q, &pass.k, &pass.v].map(Guarded::tensor);
        // sum(tanh(O)) + sum(LSE^2) / 2, so dO is 1 - tanh(O)^2 and dLSE the LSE itself.
        let loss = |[q, k, v]: &[Tensor; 3]| {
            let oracle = reference::forward(forward, q, k, v).unwrap();
            let of_lse = oracle.lse.iter().filter(|lse| lse.is_finite()).map(|lse| 0.5 * lse * lse);
            oracle.o.data().iter().map(|o| o.tanh()).sum::<f64>() + of_lse.sum::<f64>()
        };
        for (d_o, o) in pass.d_o.data.iter_mut().zip(&pass.o.data) {
            *d_o = 1.0 - o.tanh().powi(2);
        }
        if let Some(d_lse) = &mut pass.d_lse {
            d_lse.data.clone_from(&pass.lse.data);
        }
        pass.run();
        for (which, gradient) in [&pass.d_q, &pass.d_k, &pass.d_v].map(Guarded::tensor).into_iter().enumerate() {
            for (i, got) in gradient.data().iter().enumerate().step_by(3) {
                let at = |step: f64| {
                    let mut moved = inputs.clone();
                    moved[which].data_mut()[i] += step;
                    loss(&moved)
                };
                let difference = (at(STEP) - at(-STEP)) / (2.0 * STEP);
                assert!((got - difference).abs() < 2e-6, "{problem}: input {which} element {i}: {got} {difference}");
            }
        }
    }
}

#[test]
fn reruns_give_the_same_bits_and_overwrite() {
    let dims = DIMS.with_seqlen_q(130).with_seqlen_kv(300);
    let problem = options(DType::BF16, dims, Mask::causal()).deterministic(true).build().unwrap();
    let mut pass = Pass::<bf16>::new(&problem, Spread::DENSE);
    let mut bits = || {
        pass.run();
        [&pass.d_q, &pass.d_k, &pass.d_v].map(|out| out.inner().iter().map(|x| x.to_bits()).collect::<Vec<_>>())
    };
    let first = bits();
    for _ in 0..3 {
        assert!(bits() == first);
    }
}

#[test]
fn inputs_may_be_broadcast() {
    // dO is often one number for all, as the gradient of a sum is.
    let problem = problem(DType::F32, DIMS, Mask::Full);
    let mut dense = Pass::<f32>::new(&problem, Spread::DENSE);
    dense.d_o.data.fill(0.5);
    dense.run();
    let mut broadcast = Pass::<f32>::new(&problem, Spread::DENSE);
    let repeated = Layout::with_strides(problem.d_o_shape(), [0, 0, 0, 1]).unwrap();
    broadcast.d_o = Guarded::new(repeated, vec![0.5; repeated.span()]);
    broadcast.run();
    assert!(dense.d_q.inner() == broadcast.d_q.inner() && dense.d_v.inner() == broadcast.d_v.inner());
}

#[test]
fn empty_problems_write_zeros_where_there_is_something_to_write() {
    for dims in [DIMS.with_batch(0), DIMS.with_seqlen_q(0), DIMS.with_seqlen_kv(0)] {
        let mut pass =
            Pass::<bf16>::new(&options(DType::BF16, dims, Mask::causal()).d_lse(true).build().unwrap(), Spread::DENSE);
        pass.run();
        for out in [&pass.d_q, &pass.d_k, &pass.d_v] {
            out.check_written("zeros");
            assert!(out.inner().iter().all(|&x| x == bf16::ZERO), "{dims:?}");
        }
        pass.check();
    }
}

#[test]
fn what_does_not_fit_the_problem_is_refused_and_nothing_is_written() {
    let problem = options(DType::F32, DIMS, Mask::causal()).d_lse(true).build().unwrap();
    let plan = problem.plan(&Device::cpu()).unwrap();
    let other = values::<f32>(1280, 6);
    let wrong = |shape| TensorRef::host(&other, dense(shape)).unwrap();
    let mut out = vec![-7f32; 1280];
    let mut pass = Pass::<f32>::new(&problem, Spread::DENSE);
    let refusal = |plan: &BackwardPlan, args: Args<'_>| run(plan, args).unwrap_err().to_string();
    let read = |pass: &mut Pass<f32>, slot, shape| refusal(&plan, Args::from(pass.args()).read(slot, wrong(shape)));
    let four = "[batch, seqlen, heads, head_dim]";
    assert_eq!(
        read(&mut pass, Slot::Q, [2, 4, 5, 16]),
        format!("q: shape [2, 4, 5, 16], expected [2, 5, 4, 16] {four}")
    );
    assert!(read(&mut pass, Slot::K, [2, 7, 2, 8]).starts_with("k: shape [2, 7, 2, 8], expected"));
    assert!(read(&mut pass, Slot::V, [2, 7, 2, 16]).starts_with("v: shape [2, 7, 2, 16], expected"));
    assert!(read(&mut pass, Slot::O, [2, 5, 4, 16]).starts_with("o: shape [2, 5, 4, 16], expected"));
    assert_eq!(
        read(&mut pass, Slot::DO, [2, 5, 2, 8]),
        format!("d_o: shape [2, 5, 2, 8], expected [2, 5, 4, 8] {four}")
    );
    let rows = || TensorRef::host(&other, dense([2, 5, 4])).unwrap();
    assert_eq!(
        refusal(&plan, Args::from(pass.args()).read(Slot::Lse, rows())),
        "lse: shape [2, 5, 4], expected [2, 4, 5] [batch, heads, seqlen]"
    );
    let text = refusal(&plan, pass.args().d_lse(rows()).into());
    assert!(text.starts_with("d_lse: shape [2, 5, 4]"), "{text}");
    let given = pass.d_lse.take();
    assert_eq!(
        refusal(&plan, pass.args().into()),
        "d_lse: missing; allowed: the tensor that the problem, made with d_lse, reads"
    );
    pass.d_lse = given;
    let without = problem.to_builder().d_lse(false).build().unwrap().plan(&Device::cpu()).unwrap();
    assert_eq!(
        refusal(&without, pass.args().into()),
        "d_lse: given; allowed: none, since the problem was made without d_lse"
    );
    let mut write = |pass: &mut Pass<f32>, slot, shape| {
        let wrong = TensorMut::host(&mut out, dense(shape)).unwrap();
        refusal(&plan, Args::from(pass.args()).write(slot, wrong))
    };
    let text = write(&mut pass, Slot::DQ, [2, 5, 4, 8]);
    assert!(text.starts_with("d_q: shape [2, 5, 4, 8], expected [2, 5, 4, 16]"), "{text}");
    // Gradients of K and V have key heads, not query heads.
    let text = write(&mut pass, Slot::DK, [2, 7, 4, 16]);
    assert!(text.starts_with("d_k: shape [2, 7, 4, 16], expected [2, 7, 2, 16]"), "{text}");
    let text = write(&mut pass, Slot::DV, [2, 7, 2, 16]);
    assert!(text.starts_with("d_v: shape [2, 7, 2, 16], expected [2, 7, 2, 8]"), "{text}");
    // The operands of another pass.
    assert_eq!(
        write(&mut pass, Slot::Amax, [1, 1, 1, 1]),
        "amax: given; allowed: the operands of this problem: q, k, v, o, lse, d_o, d_lse, d_q, d_k, d_v, \
         cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, sinks, d_sinks, alibi_slopes, \
         mask_block_cnt, mask_block_idx, mask_bits, full_block_cnt, full_block_idx, bias, dbias, dropout_state"
    );
    let half = options(DType::F16, DIMS, Mask::causal()).d_lse(true).build().unwrap();
    assert_eq!(
        refusal(&half.plan(&Device::cpu()).unwrap(), pass.args().into()),
        "q: dtype f32; allowed: f16, the problem's"
    );
    let halves = values::<f16>(640, 7);
    for (slot, shape) in [(Slot::O, problem.forward().o_shape()), (Slot::DO, problem.d_o_shape())] {
        let mixed = Args::from(pass.args()).read(slot, TensorRef::host(&halves, dense(shape)).unwrap());
        assert_eq!(refusal(&plan, mixed), format!("{slot}: dtype f16; allowed: f32, the problem's"));
    }
    // What the forward pass is given, and no gradient.
    let forward = ForwardArgs::new(pass.q.read(), pass.k.read(), pass.v.read(), pass.o.write());
    assert_eq!(refusal(&plan, forward.into()), "lse: missing; allowed: the tensor that the problem reads");

    assert!(out.iter().all(|&x| x == -7.0));
    for untouched in [&pass.d_q, &pass.d_k, &pass.d_v] {
        assert!(untouched.data.iter().all(|x| x.is_nan()));
    }
}

#[test]
fn what_has_no_kernel_is_refused_by_name() {
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let planned = problem(dtype, DIMS, Mask::Full).plan_for(&DeviceFacts::h100_sxm());
        // The kernels are for 16-bit types, in a build that has them.
        if cfg!(feature = "cuda") && dtype != DType::F32 {
            assert!(planned.is_ok(), "{dtype}: {planned:?}");
        } else {
            let error = planned.unwrap_err();
            assert!(matches!(error, Error::Unsupported { .. }), "{dtype}: {error}");
        }
    }
    let text = options(DType::E4M3, DIMS, Mask::Full).build().unwrap_err().to_string();
    assert_eq!(text, "q, k and v: dtype e4m3; allowed: bf16, f16, f32");
}
