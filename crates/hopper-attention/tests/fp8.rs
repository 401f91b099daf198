//! Problems with e4m3 operands on the CPU through the public API: results against the oracle on what the operands stand
//! for, and every refusal.

use hopper_attention::reference::{Expected, Tensor};
use hopper_attention::{
    Args, DType, Device, DeviceFacts, Dims, E4M3, E4M3_HALF_SCORES_MAX, Element, Error, ForwardArgs, ForwardPlan,
    ForwardProblem, ForwardProblemBuilder, Layout, Mask, OutputOf, Result, SCALE_BLOCK, Scaling, Slot, Stream,
    TensorMut, TensorRef, Workspace, bf16, f16,
};
use proptest::prelude::*;

mod common;

use common::{DIMS, dense, masks, spread, values};

/// Operands with their factors, and memory for what comes out.
struct Memory<O> {
    q: (Vec<E4M3>, Layout<4>),
    k: (Vec<E4M3>, Layout<4>),
    v: (Vec<E4M3>, Layout<4>),
    descale_q: (Vec<f32>, Layout<3>),
    descale_k: (Vec<f32>, Layout<3>),
    descale_v: (Vec<f32>, Layout<3>),
    o: (Vec<O>, Layout<4>),
    lse: Option<(Vec<f32>, Layout<3>)>,
    scale_o: Option<[f32; 1]>,
    amax: Option<[f32; 1]>,
}

/// Factors that differ by up to 2 to the `powers`, with a gap after each head's.
fn factors(shape: [usize; 3], size: f32, powers: i32, seed: u32) -> (Vec<f32>, Layout<3>) {
    let [_, heads, blocks] = shape.map(|size| size as i64);
    let layout = Layout::with_strides(shape, [heads * (blocks + 2), blocks + 2, 1]).unwrap();
    let drawn = values::<f32>(layout.span(), seed);
    (drawn.iter().map(|x| size * (x * powers as f32 * 0.5).exp2()).collect(), layout)
}

impl<O: OutputOf<E4M3>> Memory<O> {
    fn new(problem: &ForwardProblem, heads_outside: bool, gap: usize, powers: i32) -> Self {
        let operand = |shape, seed| {
            let layout = spread(shape, heads_outside, gap);
            // Between -448 and 448, or small enough for scores in f16.
            let stored = values::<f32>(layout.span(), seed).into_iter();
            let most = if seed < 3 && problem.allows_half_scores() { E4M3_HALF_SCORES_MAX } else { 448.0 };
            (stored.map(|x| <E4M3 as Element>::from_f32(most * x)).collect::<Vec<_>>(), layout)
        };
        let size = if problem.allows_half_scores() { 1.0 / 4.0 } else { 1.0 / 128.0 };
        let o = spread(problem.o_shape(), heads_outside, gap);
        let lse = Layout::contiguous(problem.lse_shape()).unwrap();
        Self {
            q: operand(problem.q_shape(), 1),
            k: operand(problem.k_shape(), 2),
            v: operand(problem.v_shape(), 3),
            descale_q: factors(problem.descale_q_shape(), size, powers.min(2), 4),
            descale_k: factors(problem.descale_k_shape(), size, powers.min(2), 5),
            descale_v: factors(problem.descale_v_shape(), 1.0 / 128.0, powers, 6),
            o: (vec![O::from_f32(f32::NAN); o.span()], o),
            lse: problem.wants_lse().then(|| (vec![f32::NAN; lse.span()], lse)),
            scale_o: problem.takes_scale_o().then_some([90.0]),
            amax: problem.wants_amax().then_some([f32::NAN]),
        }
    }

    fn args(&mut self) -> ForwardArgs<'_> {
        let mut args = ForwardArgs::new(
            TensorRef::host(&self.q.0, self.q.1).unwrap(),
            TensorRef::host(&self.k.0, self.k.1).unwrap(),
            TensorRef::host(&self.v.0, self.v.1).unwrap(),
            TensorMut::host(&mut self.o.0, self.o.1).unwrap(),
        );
        args = args.descale(
            TensorRef::host(&self.descale_q.0, self.descale_q.1).unwrap(),
            TensorRef::host(&self.descale_k.0, self.descale_k.1).unwrap(),
            TensorRef::host(&self.descale_v.0, self.descale_v.1).unwrap(),
        );
        if let Some((lse, layout)) = &mut self.lse {
            args = args.lse(TensorMut::host(lse, *layout).unwrap());
        }
        if let Some(scale_o) = &self.scale_o {
            args = args.scale_o(TensorRef::host(scale_o, dense([1])).unwrap());
        }
        if let Some(amax) = &mut self.amax {
            args = args.amax(TensorMut::host(amax, dense([1])).unwrap());
        }
        args
    }

    /// What the operands stand for. The rule of the factors is written down here a second time.
    fn real(&self, problem: &ForwardProblem) -> [Tensor; 3] {
        let group = problem.group_size();
        let real = |(data, layout): &(Vec<E4M3>, Layout<4>), (factors, of): &(Vec<f32>, Layout<3>), group: usize| {
            Tensor::from_strided(data, layout).descaled(|[batch, token, head]| {
                let index = match problem.scaling().unwrap() {
                    Scaling::PerTensor => [0, 0, 0],
                    Scaling::PerHead => [batch, head / group, 0],
                    _ => [batch, head, token / SCALE_BLOCK],
                };
                factors[of.offset(index).unwrap()]
            })
        };
        let (q, k) = (real(&self.q, &self.descale_q, group), real(&self.k, &self.descale_k, 1));
        [q, k, real(&self.v, &self.descale_v, 1)]
    }

    /// The output's real values.
    fn output(&self) -> Tensor {
        let scale_o = f64::from(self.scale_o.map_or(1.0, |[scale_o]| scale_o));
        let mut o = Tensor::from_strided(&self.o.0, &self.o.1);
        o.data_mut().iter_mut().for_each(|o| *o /= scale_o);
        o
    }
}

fn run<'a>(plan: &ForwardPlan, args: impl Into<Args<'a>>) -> Result<()> {
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?;
    plan.run(&Stream::Cpu, &mut workspace, args)
}

/// Runs a problem with poisoned outputs and holds it against the tolerance.
fn check<O: OutputOf<E4M3>>(problem: &ForwardProblem, heads_outside: bool, gap: usize, powers: i32) {
    let mut memory = Memory::<O>::new(problem, heads_outside, gap, powers);
    run(&problem.plan(&Device::cpu()).unwrap(), memory.args()).unwrap();
    let [q, k, v] = memory.real(problem);
    let scale_o = memory.scale_o.map_or(1.0, |[scale_o]| scale_o);
    let expected = Expected::with_scale_o(problem, &q, &k, &v, scale_o).unwrap();
    let lse: Option<Vec<f64>> = memory.lse.as_ref().map(|(lse, _)| lse.iter().map(|&x| x.into()).collect());
    let report = expected.check(&memory.output(), lse.as_deref()).unwrap();
    assert!(report.passed(), "{problem}: {report}");
    if let Some([amax]) = memory.amax {
        let exact = expected.oracle().o.data().iter().fold(0.0, |amax: f64, o| amax.max(o.abs()));
        let error = (f64::from(amax) - exact).abs();
        assert!(error <= report.o.max + 0.07 * exact + 1e-6, "amax {amax}, exact {exact}");
    }
}

fn options(scaling: Scaling, dims: Dims) -> ForwardProblemBuilder {
    ForwardProblem::builder(DType::E4M3, dims).scaling(scaling)
}

fn problem(scaling: Scaling, dims: Dims) -> ForwardProblem {
    options(scaling, dims).build().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.min(96), ..common::kept() })]
    #[test]
    fn results_keep_the_tolerance(
        batch in 0usize..3, seqlen_q in 0usize..150, seqlen_kv in 0usize..400, heads_kv in 1usize..3,
        group in 1usize..4, head_dim_qk in 1usize..40, head_dim_vo in 1usize..40, mask in masks(),
        (heads_outside, gap, lse, amax) in (any::<bool>(), 0usize..5, any::<bool>(), any::<bool>()),
        (scaling, output, powers, half_scores) in (0..3usize, 0..3, 0..14, any::<bool>()),
        softcap in prop_oneof![2 => Just(0.0f32), 1 => Just(0.5), 1 => Just(15.0)],
    ) {
        let dims = Dims::new(batch, seqlen_q, heads_kv * group, head_dim_qk).with_seqlen_kv(seqlen_kv).with_heads_kv(heads_kv).with_head_dim_vo(head_dim_vo);
        let options = options(Scaling::ALL[scaling], dims).mask(mask).lse(lse).amax(amax).half_scores(half_scores).softcap(softcap);
        match output {
            0 => check::<bf16>(&options.build().unwrap(), heads_outside, gap, powers),
            1 => check::<f16>(&options.output(DType::F16).build().unwrap(), heads_outside, gap, powers),
            _ => check::<E4M3>(&options.output(DType::E4M3).build().unwrap(), heads_outside, gap, powers),
        }
    }
}

/// A block of V whose values are next to nothing beside another's, or beyond them, costs neither the normalisation nor the
/// other's precision.
#[test]
fn factors_of_v_may_differ_by_any_power() {
    let dims = Dims::new(1, 3, 1, 8).with_seqlen_kv(300);
    let problem = options(Scaling::PerBlock, dims).lse(true).build().unwrap();
    for [a, b, c] in [[1e-38, 1.0, 1e30], [1e30, 1e-38, 1.0], [1.0, 1e-38, 1e-38], [1e-38; 3], [1e35, 1e35, 1e-3]] {
        let mut memory = Memory::<bf16>::new(&problem, false, 0, 0);
        memory.descale_v.0[..3].copy_from_slice(&[a, b, c]);
        run(&problem.plan(&Device::cpu()).unwrap(), memory.args()).unwrap();
        let [q, k, v] = memory.real(&problem);
        let expected = Expected::new(&problem, &q, &k, &v).unwrap();
        let lse: Vec<f64> = memory.lse.as_ref().unwrap().0.iter().map(|&x| x.into()).collect();
        let report = expected.check(&memory.output(), Some(&lse)).unwrap();
        assert!(report.passed(), "{a} {b} {c}: {report}");
    }
}

/// The factors of V have no part in the LSE, also where a query sees one block of keys, whose factor is far below another's.
#[test]
fn factors_of_v_leave_the_lse_alone() {
    let dims = Dims::new(1, 300, 1, 8);
    for softcap in [0.0, 0.5] {
        let problem = options(Scaling::PerBlock, dims).mask(Mask::chunked(128)).softcap(softcap).lse(true);
        let problem = problem.build().unwrap();
        let lse = |factors: [f32; 3]| {
            let mut memory = Memory::<bf16>::new(&problem, false, 0, 0);
            memory.descale_v.0[..3].copy_from_slice(&factors);
            run(&problem.plan(&Device::cpu()).unwrap(), memory.args()).unwrap();
            memory.lse.unwrap().0
        };
        for (row, (alike, own)) in lse([1.0; 3]).into_iter().zip(lse([1.0, 1.1e-6, 0.7e-17])).enumerate() {
            assert!((alike - own).abs() <= 4.0 * f32::EPSILON * alike.abs().max(1.0), "{row}: {alike} and {own}");
        }
    }
}

/// Equal keys give every value the same weight; factors multiply what is stored.
#[test]
fn a_result_by_hand() {
    let dims = Dims::new(1, 1, 1, 2).with_seqlen_kv(2).with_head_dim_vo(1);
    let problem = options(Scaling::PerTensor, dims).lse(true).amax(true).output(DType::E4M3).build().unwrap();
    let mut memory = Memory::<E4M3>::new(&problem, false, 0, 0);
    let e4m3 = <E4M3 as Element>::from_f32;
    memory.q.0 = [2.0, 1.0].map(e4m3).to_vec();
    memory.k.0 = [1.0, 3.0, 1.0, 3.0].map(e4m3).to_vec();
    memory.v.0 = [10.0, -30.0].map(e4m3).to_vec();
    memory.descale_q.0[0] = 0.5;
    memory.descale_k.0[0] = 4.0;
    memory.descale_v.0[0] = 0.25;
    memory.scale_o = Some([4.0]);
    run(&problem.plan(&Device::cpu()).unwrap(), memory.args()).unwrap();
    // The mean of 2.5 and -7.5; the score is 0.5 * 4 * (2 + 3) / sqrt(2).
    assert_eq!((Element::to_f32(memory.o.0[0]), memory.amax), (-10.0, Some([2.5])));
    let score = 10.0 / 2f32.sqrt();
    let lse = memory.lse.as_ref().unwrap().0[0];
    assert!((lse - (score + 2f32.ln())).abs() < 1e-5, "{lse}");
    // A cap is of the real score, with all factors.
    let capped = problem.to_builder().softcap(3.0).build().unwrap();
    run(&capped.plan(&Device::cpu()).unwrap(), memory.args()).unwrap();
    let lse = memory.lse.unwrap().0[0];
    assert!((lse - (3.0 * (score / 3.0).tanh() + 2f32.ln())).abs() < 1e-5, "{lse}");
}

/// Whatever rounding does to the weights of a row, they sum to one; nearly so with factors per block.
#[test]
fn equal_values_give_themselves() {
    let dims = Dims::new(2, 70, 2, 24).with_seqlen_kv(333).with_heads_kv(1).with_head_dim_vo(3);
    for (scaling, softmax_scale) in Scaling::ALL.into_iter().flat_map(|scaling| [0.003, 0.2, 3.0].map(|s| (scaling, s)))
    {
        let problem = options(scaling, dims).mask(Mask::causal()).softmax_scale(softmax_scale).build().unwrap();
        let mut memory = Memory::<bf16>::new(&problem, false, 0, 0);
        memory.v.0.fill(<E4M3 as Element>::from_f32(-3.25));
        memory.descale_v.0.fill(0.5);
        run(&problem.plan(&Device::cpu()).unwrap(), memory.args()).unwrap();
        let error = if scaling == Scaling::PerBlock { 0.03 } else { 0.0 };
        assert!(memory.o.0.iter().all(|o| (o.to_f32() + 1.625).abs() <= error), "{scaling} {softmax_scale}");
    }
}

#[test]
fn an_output_beyond_448_saturates_and_amax_tells() {
    let dims = Dims::new(1, 1, 1, 1);
    let problem = options(Scaling::PerTensor, dims).amax(true).output(DType::E4M3).build().unwrap();
    let mut memory = Memory::<E4M3>::new(&problem, false, 0, 0);
    memory.v.0[0] = <E4M3 as Element>::from_f32(-96.0);
    memory.descale_v.0[0] = 1.0;
    memory.scale_o = Some([5.0]);
    run(&problem.plan(&Device::cpu()).unwrap(), memory.args()).unwrap();
    assert_eq!((Element::to_f32(memory.o.0[0]), memory.amax), (-448.0, Some([96.0])));
}

#[test]
fn a_nan_reaches_the_rows_that_it_touches_and_no_others() {
    let options = options(Scaling::PerBlock, DIMS.with_seqlen_q(7)).mask(Mask::causal()).lse(true);
    let plan = options.amax(true).build().unwrap().plan(&Device::cpu()).unwrap();
    let nan = E4M3::from_bits(0x7f);
    let result = |edit: fn(&mut Memory<bf16>, E4M3)| {
        let mut memory = Memory::<bf16>::new(plan.problem(), false, 0, 4);
        edit(&mut memory, nan);
        run(&plan, memory.args()).unwrap();
        let rows: Vec<bool> = memory.o.0.chunks(8).map(|row| row.iter().any(|o| o.is_nan())).collect();
        assert_eq!(memory.amax.unwrap()[0].is_nan(), rows.contains(&true));
        rows
    };
    assert!(result(|_, _| ()).iter().all(|&nan| !nan));
    // Rows of O are [batch][query][head]: the second query's third head.
    let rows = result(|memory, nan| memory.q.0[(4 + 2) * 16 + 3] = nan);
    assert_eq!(rows.iter().enumerate().filter(|(_, nan)| **nan).map(|(i, _)| i).collect::<Vec<_>>(), [6]);
    // The last key of the last batch element's second head: the last query keeps it, heads 2 and 3 read it.
    for edit in [(|memory, nan| *memory.k.0.last_mut().unwrap() = nan) as fn(&mut Memory<bf16>, E4M3), |memory, nan| {
        *memory.v.0.last_mut().unwrap() = nan
    }] {
        let rows = result(edit);
        assert_eq!(rows.iter().enumerate().filter(|(_, nan)| **nan).map(|(i, _)| i).collect::<Vec<_>>(), [54, 55]);
    }
}

#[test]
fn what_does_not_fit_the_problem_is_refused_and_nothing_is_written() {
    let problem = options(Scaling::PerHead, DIMS).amax(true).output(DType::E4M3).build().unwrap();
    let plan = problem.plan(&Device::cpu()).unwrap();
    let mut memory = Memory::<E4M3>::new(&problem, false, 0, 2);
    let refusal = |plan: &ForwardPlan, args: Args<'_>| run(plan, args).unwrap_err().to_string();

    let ones = [1f32; 64];
    let wrong = |shape| TensorRef::host(&ones, dense(shape)).unwrap();
    for (slot, shape) in [(Slot::DescaleQ, [2, 4, 1]), (Slot::DescaleK, [1, 1, 1]), (Slot::DescaleV, [2, 2, 2])] {
        assert_eq!(
            refusal(&plan, Args::from(memory.args()).read(slot, wrong(shape))),
            format!("{slot}: shape {shape:?}, expected [2, 2, 1] [batch, heads, blocks]")
        );
        let halves = [f16::ONE; 4];
        let half = TensorRef::host(&halves, dense([2, 2, 1])).unwrap();
        let text = refusal(&plan, Args::from(memory.args()).read(slot, half));
        assert_eq!(text, format!("{slot}: dtype f16; allowed: f32"));
    }
    let two = TensorRef::host(&ones, dense([2])).unwrap();
    assert_eq!(refusal(&plan, memory.args().scale_o(two).into()), "scale_o: shape [2], expected [1] [number]");
    memory.scale_o = None;
    assert_eq!(
        refusal(&plan, memory.args().into()),
        "scale_o: missing; allowed: the tensor that the problem, made with an e4m3 output, reads"
    );
    memory.scale_o = Some([1.0]);
    let amax = memory.amax.take();
    assert_eq!(
        refusal(&plan, memory.args().into()),
        "amax: missing; allowed: the tensor that the problem, made with amax, writes"
    );
    memory.amax = amax;
    let without_factors = ForwardArgs::new(
        TensorRef::host(&memory.q.0, memory.q.1).unwrap(),
        TensorRef::host(&memory.k.0, memory.k.1).unwrap(),
        TensorRef::host(&memory.v.0, memory.v.1).unwrap(),
        TensorMut::host(&mut memory.o.0, memory.o.1).unwrap(),
    );
    assert_eq!(
        refusal(&plan, without_factors.into()),
        "descale_q: missing; allowed: the tensor that the problem, made with e4m3 operands, reads"
    );

    for bad in [-1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (name, slot) in [("descale_q", 0), ("descale_k", 1), ("descale_v", 2)] {
            let factors = |memory: &mut Memory<E4M3>, value| {
                let Memory { descale_q, descale_k, descale_v, .. } = memory;
                let (factors, layout) = [descale_q, descale_k, descale_v].into_iter().nth(slot).unwrap();
                factors[layout.offset([1, 0, 0]).unwrap()] = value;
            };
            factors(&mut memory, bad);
            let text = refusal(&plan, memory.args().into());
            assert_eq!(text, format!("{name}: {bad} at [1, 0, 0]; allowed: finite and 0 or more"));
            factors(&mut memory, 1.0);
        }
    }
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        memory.scale_o = Some([bad]);
        assert_eq!(refusal(&plan, memory.args().into()), format!("scale_o: {bad}; allowed: finite and above 0"));
        memory.scale_o = Some([1.0]);
    }
    assert!(memory.o.0.iter().all(|o| o.is_nan()) && memory.amax.unwrap()[0].is_nan());
    run(&plan, memory.args()).unwrap();
    assert!(memory.o.0.iter().all(|o| !o.is_nan()) && !memory.amax.unwrap()[0].is_nan());

    let plain = problem.to_builder().output(DType::BF16).amax(false).build().unwrap();
    let plan = plain.plan(&Device::cpu()).unwrap();
    assert_eq!(refusal(&plan, memory.args().into()), "o: dtype e4m3; allowed: bf16, the problem's");
    let mut memory = Memory::<bf16>::new(&plain, false, 0, 2);
    memory.scale_o = Some([1.0]);
    assert_eq!(
        refusal(&plan, memory.args().into()),
        "scale_o: given; allowed: none, since the problem was made without an e4m3 output"
    );
    memory.scale_o = None;
    memory.amax = Some([-7.0]);
    assert_eq!(
        refusal(&plan, memory.args().into()),
        "amax: given; allowed: none, since the problem was made without amax"
    );
    assert!(memory.o.0.iter().all(|o| o.is_nan()) && memory.amax == Some([-7.0]));
}

/// Scores that may be in f16 change no bit of the CPU's results, however large Q and K are.
#[test]
fn half_scores_change_nothing_on_the_cpu() {
    let plain = options(Scaling::PerBlock, DIMS).lse(true).build().unwrap();
    let half = plain.to_builder().half_scores(true).build().unwrap();
    let mut memory = Memory::<bf16>::new(&half, true, 3, 2);
    let (last_q, last_k) = (memory.q.1.offset([1, 4, 3, 15]).unwrap(), memory.k.1.offset([1, 6, 1, 0]).unwrap());
    for bits in [0x56, 0x57, 0xfe, 0x7f] {
        memory.q.0[last_q] = E4M3::from_bits(bits);
        memory.k.0[last_k] = E4M3::from_bits(bits);
        let [of_half, of_plain] = [&half, &plain].map(|problem| {
            run(&problem.plan(&Device::cpu()).unwrap(), memory.args()).unwrap();
            let lse: Vec<u32> = memory.lse.as_ref().unwrap().0.iter().map(|x| x.to_bits()).collect();
            (memory.output().data().iter().map(|x| x.to_bits()).collect::<Vec<_>>(), lse)
        });
        assert_eq!(of_half, of_plain, "{bits:#x}");
    }
}

#[test]
fn problems_and_arguments_of_other_types_do_not_mix() {
    let fp8 = problem(Scaling::PerTensor, DIMS);
    let (q, kv, mut o) = (values::<bf16>(640, 1), values::<bf16>(640, 2), vec![bf16::ZERO; 640]);
    let wide = ForwardArgs::new(
        TensorRef::host(&q, dense(fp8.q_shape())).unwrap(),
        TensorRef::host(&kv, dense(fp8.k_shape())).unwrap(),
        TensorRef::host(&kv, dense(fp8.v_shape())).unwrap(),
        TensorMut::host(&mut o, dense(fp8.o_shape())).unwrap(),
    );
    let refusal = |plan: &ForwardPlan, args: Args<'_>| run(plan, args).unwrap_err().to_string();
    let fp8_plan = fp8.plan(&Device::cpu()).unwrap();

    let bf16_plan = ForwardProblem::builder(DType::BF16, DIMS).build().unwrap().plan(&Device::cpu()).unwrap();
    let mut memory = Memory::<bf16>::new(&fp8, false, 0, 0);
    assert_eq!(refusal(&bf16_plan, memory.args().into()), "q: dtype e4m3; allowed: bf16, the problem's");
    let one = TensorRef::host(&memory.descale_q.0, memory.descale_q.1).unwrap();
    assert_eq!(
        refusal(&bf16_plan, wide.descale(one.clone(), one.clone(), one).into()),
        "descale_q: given; allowed: none, since the problem was made without e4m3 operands"
    );
    let wide = ForwardArgs::new(
        TensorRef::host(&q, dense(fp8.q_shape())).unwrap(),
        TensorRef::host(&kv, dense(fp8.k_shape())).unwrap(),
        TensorRef::host(&kv, dense(fp8.v_shape())).unwrap(),
        TensorMut::host(&mut o, dense(fp8.o_shape())).unwrap(),
    );
    assert_eq!(refusal(&fp8_plan, wide.into()), "q: dtype bf16; allowed: e4m3, the problem's");
    // One operand of the other type.
    let k = TensorRef::host(&kv, dense(fp8.k_shape())).unwrap();
    assert_eq!(
        refusal(&fp8_plan, Args::from(memory.args()).read(Slot::K, k)),
        "k: dtype bf16; allowed: e4m3, the problem's"
    );
}

/// A build without kernels says so; one with them has rows for every head dim up to 256 that is a multiple of 16.
#[test]
fn a_gpu_is_planned_for_or_refused_by_name() {
    let planned = |head_dim| {
        let dims = DIMS.with_head_dim_qk(head_dim).with_head_dim_vo(head_dim);
        problem(Scaling::PerBlock, dims).plan_for(&DeviceFacts::h100_sxm())
    };
    if !hopper_attention::kernels().iter().any(|kernel| kernel.dtype() == DType::E4M3) {
        let error = planned(64).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        return;
    }
    for head_dim in (16..=256).step_by(16) {
        let kernel = *planned(head_dim).unwrap().kernel().unwrap();
        let want = [64, 128, 256].into_iter().find(|&row| row >= head_dim).unwrap();
        assert_eq!((kernel.dtype(), kernel.head_dim_qk()), (DType::E4M3, want), "{head_dim}: {kernel}");
    }
    let text = planned(24).unwrap_err().to_string();
    assert!(text.contains("head_dim_qk 24 on a GPU; nearest: 32 (multiples of 16"), "{text}");
}

#[test]
fn the_same_bits_on_any_number_of_threads() {
    let dims = Dims::new(2, 200, 4, 32).with_seqlen_kv(300).with_heads_kv(2).with_head_dim_vo(16);
    let problem = options(Scaling::PerBlock, dims).lse(true).build().unwrap();
    let plan = problem.plan(&Device::cpu()).unwrap();
    let compute = || {
        let mut memory = Memory::<bf16>::new(&problem, false, 0, 6);
        run(&plan, memory.args()).unwrap();
        (memory.o.0, memory.lse)
    };
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap().install(compute);
    let three = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap().install(compute);
    assert_eq!(one, three);
}
