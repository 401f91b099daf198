//! The quantiser on the CPU through the public API, against the rule written down a second time, and its refusals.

use hopper_attention::{
    Args, DType, Descale, Device, Dims, E4M3, E4M3_HALF_SCORES_MAX, Element, Float, ForwardProblem, Layout,
    QuantizeArgs, QuantizePlan, Quantizer, Result, SCALE_BLOCK, Scaling, Slot, Stream, TensorMut, TensorRef, Workspace,
    bf16, f16,
};
use proptest::prelude::*;

mod common;

use common::{DIMS, dense, spread, values};

/// A tensor to quantise, with memory for what comes out.
struct Memory<T> {
    values: (Vec<T>, Layout<4>),
    stored: (Vec<E4M3>, Layout<4>),
    descale: (Vec<f32>, Layout<3>),
}

/// What the setters of [`QuantizeArgs`] take: values, what is stored, and factors.
type Tensor<'a, T> = (TensorRef<'a, T, 4>, TensorMut<'a, E4M3, 4>, Descale<'a>);

impl<T: Float> Memory<T> {
    fn new(shape: [usize; 4], factors: [usize; 3], gap: usize, seed: u32) -> Self {
        let heads_outside = gap.is_multiple_of(2);
        let layout = spread(shape, !heads_outside, gap);
        // Of sizes that differ from place to place by some powers of ten.
        let sizes = values::<f32>(layout.span(), seed + 50);
        let data = values::<f32>(layout.span(), seed).into_iter().zip(sizes);
        let data = data.map(|(x, size)| T::from_f32(x * (3.0 * size).exp())).collect();
        let stored = spread(shape, heads_outside, 1);
        let descale = Layout::contiguous(factors).unwrap();
        Self {
            values: (data, layout),
            stored: (vec![E4M3::from_bits(0x7f); stored.span()], stored),
            descale: (vec![f32::NAN; descale.span()], descale),
        }
    }

    fn computed(&mut self) -> Tensor<'_, T> {
        let descale = TensorMut::host(&mut self.descale.0, self.descale.1).unwrap();
        (
            TensorRef::host(&self.values.0, self.values.1).unwrap(),
            TensorMut::host(&mut self.stored.0, self.stored.1).unwrap(),
            Descale::FromAmax(descale),
        )
    }

    fn given(&mut self) -> Tensor<'_, T> {
        (
            TensorRef::host(&self.values.0, self.values.1).unwrap(),
            TensorMut::host(&mut self.stored.0, self.stored.1).unwrap(),
            Descale::Given(TensorRef::host(&self.descale.0, self.descale.1).unwrap()),
        )
    }

    /// Every element in logical order: value, what is stored, and where its factor is.
    fn elements(&self, scaling: Scaling, group: usize) -> Vec<(f32, E4M3, usize)> {
        let [batch, seqlen, heads, dim] = self.values.1.shape();
        let mut elements = Vec::new();
        for (b, s, h, d) in (0..batch)
            .flat_map(|b| (0..seqlen).map(move |s| (b, s)))
            .flat_map(|(b, s)| (0..heads).flat_map(move |h| (0..dim).map(move |d| (b, s, h, d))))
        {
            let index = match scaling {
                Scaling::PerTensor => [0, 0, 0],
                Scaling::PerHead => [b, h / group, 0],
                _ => [b, h, s / SCALE_BLOCK],
            };
            let at = |layout: &Layout<4>| layout.offset([b, s, h, d]).unwrap();
            let (value, stored) = (self.values.0[at(&self.values.1)], self.stored.0[at(&self.stored.1)]);
            elements.push((Element::to_f32(value), stored, self.descale.1.offset(index).unwrap()));
        }
        elements
    }
}

fn run<'a>(plan: &QuantizePlan, args: impl Into<Args<'a>>) -> Result<()> {
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?;
    plan.run(&Stream::Cpu, &mut workspace, args)
}

/// Any of q, k and v, and the counts.
fn args<'a, T: Float>(tensors: [Option<Tensor<'a, T>>; 3], counts: Option<&'a mut [f32; 6]>) -> QuantizeArgs<'a> {
    let [q, k, v] = tensors;
    let mut args = QuantizeArgs::new();
    if let Some((values, stored, descale)) = q {
        args = args.q(values, stored, descale);
    }
    if let Some((values, stored, descale)) = k {
        args = args.k(values, stored, descale);
    }
    if let Some((values, stored, descale)) = v {
        args = args.v(values, stored, descale);
    }
    match counts {
        Some(counts) => args.counts(TensorMut::host(counts, dense([3, 2])).unwrap()),
        None => args,
    }
}

fn plan(problem: &ForwardProblem, source: DType) -> QuantizePlan {
    Quantizer::builder(problem, source).build().unwrap().plan(&Device::cpu()).unwrap()
}

/// How far a number is from the nearest e4m3 up to a magnitude (of all 254 that are numbers).
fn distance(x: f64, most: f32) -> f64 {
    let codes = (0..=u8::MAX).map(E4M3::from_bits).filter(|code| !code.is_nan());
    codes
        .filter(|code| Element::to_f32(*code).abs() <= most)
        .map(|code| (x - f64::from(Element::to_f32(code))).abs())
        .fold(f64::INFINITY, f64::min)
}

/// Factors are those of the largest magnitudes, and what is stored is the nearest there is.
fn follows_the_rule<T: Float>(memory: &Memory<T>, scaling: Scaling, group: usize, most: f32) {
    let elements = memory.elements(scaling, group);
    let mut amax = vec![0.0_f32; memory.descale.0.len()];
    for (value, _, place) in &elements {
        amax[*place] = amax[*place].max(value.abs());
    }
    for (amax, descale) in amax.iter().zip(&memory.descale.0) {
        assert_eq!((amax / most).max(f32::MIN_POSITIVE), *descale);
    }
    for (value, stored, place) in elements {
        let scaled = f64::from(value) / f64::from(memory.descale.0[place]);
        let error = (scaled - f64::from(Element::to_f32(stored))).abs();
        assert!(
            error <= distance(scaled, most) + 1e-6 * scaled.abs(),
            "{value} with {}: {stored}",
            memory.descale.0[place]
        );
    }
}

fn check<T: Float>(problem: &ForwardProblem, gap: usize) {
    let plan = plan(problem, T::DTYPE);
    let mut q = Memory::<T>::new(problem.q_shape(), problem.descale_q_shape(), gap, 1);
    let mut k = Memory::<T>::new(problem.k_shape(), problem.descale_k_shape(), gap, 2);
    let mut v = Memory::<T>::new(problem.v_shape(), problem.descale_v_shape(), gap, 3);
    let mut counts = [f32::NAN; 6];
    let all = [Some(q.computed()), Some(k.computed()), Some(v.computed())];
    run(&plan, args(all, Some(&mut counts))).unwrap();
    assert_eq!(counts, [0.0; 6]);
    let scaling = problem.scaling().unwrap();
    let most = if problem.allows_half_scores() { E4M3_HALF_SCORES_MAX } else { 448.0 };
    follows_the_rule(&q, scaling, problem.group_size(), most);
    follows_the_rule(&k, scaling, 1, most);
    follows_the_rule(&v, scaling, 1, 448.0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.min(24), ..common::kept() })]
    #[test]
    fn what_is_stored_is_the_nearest(
        batch in 0usize..3, seqlen_q in 0usize..140, seqlen_kv in 0usize..270, heads_kv in 1usize..3,
        group in 1usize..4, head_dim_qk in 1usize..9, head_dim_vo in 1usize..9,
        (scaling, source, gap, half_scores) in (0..3usize, 0..3, 0usize..4, any::<bool>()),
    ) {
        let dims = Dims::new(batch, seqlen_q, heads_kv * group, head_dim_qk).with_seqlen_kv(seqlen_kv).with_heads_kv(heads_kv).with_head_dim_vo(head_dim_vo);
        let problem = ForwardProblem::builder(DType::E4M3, dims).scaling(Scaling::ALL[scaling]).half_scores(half_scores).build().unwrap();
        match source {
            0 => check::<bf16>(&problem, gap),
            1 => check::<f16>(&problem, gap),
            _ => check::<f32>(&problem, gap),
        }
    }
}

fn of_v<'a>(v: Tensor<'a, f32>, counts: &'a mut [f32; 6]) -> QuantizeArgs<'a> {
    args([None, None, Some(v)], Some(counts))
}

/// One head with one key and eight values.
fn eight_values() -> ForwardProblem {
    let dims = Dims::new(1, 1, 1, 1).with_head_dim_vo(8);
    ForwardProblem::builder(DType::E4M3, dims).build().unwrap()
}

#[test]
fn what_is_too_large_saturates_and_is_counted() {
    let problem = eight_values();
    let mut v = Memory::<f32>::new(problem.v_shape(), [1; 3], 0, 1);
    v.values.0 = vec![448.0, -464.0, 464.1, -1e30, 1.0, f32::MAX, 0.0, 449.0];
    v.descale.0 = vec![1.0];
    let mut counts = [f32::NAN; 6];
    run(&plan(&problem, DType::F32), of_v(v.given(), &mut counts)).unwrap();
    let stored: Vec<f32> = v.stored.0.iter().map(|&x| Element::to_f32(x)).collect();
    assert_eq!(stored, [448.0, -448.0, 448.0, -448.0, 1.0, 448.0, 0.0, 448.0]);
    assert_eq!(counts, [0.0, 0.0, 0.0, 0.0, 3.0, 0.0]);
    // The largest magnitude takes care of itself, however large.
    run(&plan(&problem, DType::F32), of_v(v.computed(), &mut counts)).unwrap();
    assert_eq!((counts[4], v.descale.0[0]), (0.0, f32::MAX / 448.0));
}

/// With scores in f16 Q and K end at 14, a power of two below 448, and V does not: the same bits but for the exponent.
#[test]
fn half_scores_end_at_14() {
    let dims = Dims::new(1, 1, 1, 8);
    let plain = ForwardProblem::builder(DType::E4M3, dims).build().unwrap();
    let half = plain.to_builder().half_scores(true).build().unwrap();
    assert_eq!(E4M3_HALF_SCORES_MAX, 448.0 / 32.0);
    assert_eq!(
        Quantizer::builder(&half, DType::F32).build().unwrap().to_string(),
        "quantise f32 to e4m3 per-tensor half-scores"
    );
    let all = |problem: &ForwardProblem, values: [f32; 8], descale: Option<f32>| {
        let mut memory = [1, 2, 3].map(|seed| Memory::<f32>::new([1, 1, 1, 8], [1; 3], 0, seed));
        for memory in &mut memory {
            memory.values.0 = values.to_vec();
            memory.descale.0 = vec![descale.unwrap_or(f32::NAN)];
        }
        let mut counts = [f32::NAN; 6];
        let tensors = memory.each_mut();
        let tensors = tensors.map(|memory| Some(if descale.is_some() { memory.given() } else { memory.computed() }));
        run(&plan(problem, DType::F32), args(tensors, Some(&mut counts))).unwrap();
        let stored = |memory: &Memory<f32>| memory.stored.0.iter().map(|&x| Element::to_f32(x)).collect::<Vec<_>>();
        (memory.each_ref().map(stored), memory.map(|memory| memory.descale.0[0]), counts)
    };
    let values = [14.0, -14.5, 14.6, -1e30, 1.0, f32::MAX, 0.0, 15.0];
    let ([q, k, v], _, counts) = all(&half, values, Some(1.0));
    assert_eq!(q, [14.0, -14.0, 14.0, -14.0, 1.0, 14.0, 0.0, 14.0]);
    assert_eq!((k, v[2], v[3]), (q, 15.0, -448.0));
    assert_eq!(counts, [4.0, 0.0, 4.0, 0.0, 2.0, 0.0]);
    // The inverse of such a factor is infinite: 0 times it is a NaN, and what is not 0 the largest there is.
    let ([q, ..], _, counts) = all(&half, [0.0, 1e-30, -2.0, f32::NAN, f32::INFINITY, 1.0, 1.0, 1.0], Some(1e-40));
    assert!([0, 3, 4].iter().all(|&i| q[i].is_nan()) && q[1..3] == [14.0, -14.0], "{q:?}");
    assert_eq!(counts[..2], [5.0, 2.0]);

    let values = [3.0, -7.0, 0.1, 1.25, 6.9, -0.77, 0.0, 5.5];
    let (of_half, descale_half, counts) = all(&half, values, None);
    let (of_plain, descale_plain, _) = all(&plain, values, None);
    assert_eq!((descale_half, counts), ([0.5, 0.5, 7.0 / 448.0], [0.0; 6]));
    for i in 0..2 {
        assert_eq!(descale_half[i], 32.0 * descale_plain[i]);
        assert!(of_half[i].iter().zip(&of_plain[i]).all(|(half, plain)| 32.0 * half == *plain), "{of_half:?}");
    }
    assert_eq!((&of_half[2], descale_half[2]), (&of_plain[2], descale_plain[2]));
}

/// The inverse of such a factor is infinite: what is not 0 saturates, and 0 times it is a NaN, the one that a GPU stores.
#[test]
fn a_given_factor_that_is_next_to_nothing() {
    let problem = eight_values();
    let mut v = Memory::<f32>::new(problem.v_shape(), [1; 3], 0, 1);
    v.values.0 = vec![0.0, -0.0, 1e-30, -1.0, f32::NAN, 1e-45, 7.0, -7.0];
    v.descale.0 = vec![1e-40];
    let mut counts = [f32::NAN; 6];
    run(&plan(&problem, DType::F32), of_v(v.given(), &mut counts)).unwrap();
    let bits: Vec<u8> = v.stored.0.iter().map(|x| x.to_bits()).collect();
    assert_eq!(bits, [0x7f, 0x7f, 0x7e, 0xfe, 0x7f, 0x7e, 0x7e, 0xfe]);
    assert_eq!(counts[4..], [5.0, 1.0]);
}

#[test]
fn what_is_not_finite_is_nan_and_no_part_of_the_factor() {
    let problem = eight_values();
    let mut v = Memory::<f32>::new(problem.v_shape(), [1; 3], 0, 1);
    v.values.0 = vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN, 7.0, -3.5, 0.0, 1e-30];
    let mut counts = [f32::NAN; 6];
    run(&plan(&problem, DType::F32), of_v(v.computed(), &mut counts)).unwrap();
    assert_eq!(v.descale.0, [7.0 / 448.0]);
    assert_eq!(counts, [0.0, 0.0, 0.0, 0.0, 0.0, 4.0]);
    assert!(v.stored.0[..4].iter().all(|x| x.to_bits() == 0x7f));
    assert_eq!(v.stored.0[4..].iter().map(|&x| Element::to_f32(x)).collect::<Vec<_>>(), [448.0, -224.0, 0.0, 0.0]);
}

#[test]
fn zeros_and_the_smallest_numbers_have_a_factor() {
    let problem = eight_values();
    for value in [0.0, 1e-45, f32::MIN_POSITIVE] {
        let mut v = Memory::<f32>::new(problem.v_shape(), [1; 3], 0, 1);
        v.values.0 = vec![value; 8];
        run(&plan(&problem, DType::F32), of_v(v.computed(), &mut [0.0; 6])).unwrap();
        assert_eq!(v.descale.0, [f32::MIN_POSITIVE]);
        assert!(v.stored.0.iter().all(|&x| Element::to_f32(x) == if value < 1e-40 { 0.0 } else { 1.0 }));
    }
}

/// Products of rotated queries and keys are those of the originals, and an outlier no longer sets the factor.
#[test]
fn the_rotation_leaves_products_as_they_are() {
    for head_dim in [16, 48, 80, 112, 128, 136, 192, 256, 512] {
        let dims = DIMS.with_seqlen_q(9).with_seqlen_kv(9).with_head_dim_qk(head_dim);
        let problem = ForwardProblem::builder(DType::E4M3, dims).scaling(Scaling::PerBlock).build().unwrap();
        let stored = |seed: Option<u64>| {
            let options = Quantizer::builder(&problem, DType::F32);
            let quantizer = seed.map_or(options.clone(), |seed| options.hadamard(seed)).build().unwrap();
            assert_eq!(quantizer.hadamard(), seed);
            let mut q = Memory::<f32>::new(problem.q_shape(), problem.descale_q_shape(), 0, 1);
            let mut k = Memory::<f32>::new(problem.k_shape(), problem.descale_k_shape(), 0, 2);
            q.values.0.iter_mut().step_by(97).for_each(|x| *x = 300.0);
            let q_and_k = args([Some(q.computed()), Some(k.computed()), None], None);
            run(&quantizer.plan(&Device::cpu()).unwrap(), q_and_k).unwrap();
            let real = |memory: &Memory<f32>| -> (Vec<f32>, Vec<f64>) {
                let elements = memory.elements(Scaling::PerBlock, 1);
                let real = |stored: E4M3, place: usize| {
                    f64::from(Element::to_f32(stored)) * f64::from(memory.descale.0[place])
                };
                elements.into_iter().map(|(value, stored, place)| (value, real(stored, place))).unzip()
            };
            (real(&q), real(&k), q.descale.0.iter().copied().fold(0.0, f32::max))
        };
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let norm = |a: &[f64]| dot(a, a).sqrt();
        let (plain_q, plain_k, plain_factor) = stored(None);
        for seed in [0, 7, u64::MAX] {
            let (q, k, factor) = stored(Some(seed));
            let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
            for (((q, exact_q), k), exact_k) in
                q.1.chunks(head_dim)
                    .zip(wide(&q.0).chunks(head_dim))
                    .zip(k.1.chunks(head_dim))
                    .zip(wide(&k.0).chunks(head_dim))
            {
                let error = (dot(q, k) - dot(exact_q, exact_k)).abs();
                assert!(error < 0.08 * norm(exact_q) * norm(exact_k), "{head_dim}: {error}");
            }
            assert!(factor < 0.7 * plain_factor, "{head_dim}: {factor}, {plain_factor}");
            assert_ne!(q.1, plain_q.1);
            assert_ne!(k.1, plain_k.1);
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_and_nothing_is_written() {
    let bf16_problem = ForwardProblem::builder(DType::BF16, DIMS).build().unwrap();
    let text = Quantizer::builder(&bf16_problem, DType::BF16).build().unwrap_err().to_string();
    assert_eq!(text, "forward problem: dtype bf16; allowed: e4m3, the type that the quantiser makes");
    let problem = ForwardProblem::builder(DType::E4M3, DIMS).scaling(Scaling::PerHead).build().unwrap();
    let text = Quantizer::builder(&problem, DType::E4M3).build().unwrap_err().to_string();
    assert_eq!(text, "source: dtype e4m3; allowed: bf16, f16, f32");
    let quantizer = Quantizer::builder(&problem, DType::F32).hadamard(5).build().unwrap();
    assert_eq!(quantizer.to_string(), "quantise f32 to e4m3 per-head hadamard 5");

    let plan = quantizer.plan(&Device::cpu()).unwrap();
    let refusal = |args: Args<'_>| run(&plan, args).unwrap_err().to_string();
    let mut k = Memory::<f32>::new(problem.k_shape(), problem.descale_k_shape(), 0, 1);
    let mut v = Memory::<f32>::new(problem.v_shape(), [1, 1, 1], 0, 1);
    assert_eq!(
        refusal(args([None, Some(k.computed()), Some(v.computed())], None).into()),
        "v.descale: shape [1, 1, 1], expected [2, 2, 1] [batch, heads, blocks]"
    );
    let mut other = Memory::<f32>::new(problem.q_shape(), problem.descale_v_shape(), 0, 1);
    let text = refusal(args([None, Some(k.computed()), Some(other.computed())], None).into());
    assert!(text.starts_with("v.values: shape [2, 5, 4, 16], expected [2, 7, 2, 8]"), "{text}");
    let mut v = Memory::<f32>::new(problem.v_shape(), problem.descale_v_shape(), 0, 1);
    v.descale.0 = vec![1.0, 1.0, -2.0, 1.0];
    assert_eq!(
        refusal(args([None, Some(k.computed()), Some(v.given())], None).into()),
        "v.descale: -2 at [1, 0, 0]; allowed: finite and above 0"
    );
    let mut halves = Memory::<f16>::new(problem.k_shape(), problem.descale_k_shape(), 0, 1);
    assert_eq!(
        refusal(args([None, Some(halves.computed()), None], None).into()),
        "k.values: dtype f16; allowed: f32, the problem's"
    );
    let mut counts = [-7f32; 6];
    let wrong = TensorMut::host(&mut counts, dense([2, 3])).unwrap();
    assert_eq!(
        refusal(args([None, Some(k.computed()), None], None).counts(wrong).into()),
        "counts: shape [2, 3], expected [3, 2] [q k v, saturated and not finite]"
    );

    // The operands of a tensor belong together.
    let values = || TensorRef::host(&v.values.0, v.values.1).unwrap();
    let factors = || TensorRef::host(&v.descale.0, v.descale.1).unwrap();
    let mut stored = vec![E4M3::from_bits(0x7f); v.stored.1.span()];
    let mut written = vec![f32::NAN; v.descale.1.span()];
    fn of_k<'a>(k: Tensor<'a, f32>) -> Args<'a> {
        args([None, Some(k), None], None).into()
    }
    let text = refusal(of_k(k.computed()).read(Slot::VValues, values()));
    assert_eq!(text, "v.stored: missing; allowed: where v.values is stored");
    let to = TensorMut::host(&mut stored, v.stored.1).unwrap();
    let text = refusal(of_k(k.computed()).write(Slot::VStored, to));
    assert_eq!(text, "v.values: missing; allowed: what v.stored and v.descale are made of");
    let to = TensorMut::host(&mut written, v.descale.1).unwrap();
    let text = refusal(of_k(k.computed()).write(Slot::VDescale, to));
    assert_eq!(text, "v.values: missing; allowed: what v.stored and v.descale are made of");
    let to = TensorMut::host(&mut stored, v.stored.1).unwrap();
    let text = refusal(of_k(k.computed()).read(Slot::VValues, values()).write(Slot::VStored, to));
    assert_eq!(text, "v.descale: missing; allowed: the factors of v.values");
    let to = TensorMut::host(&mut stored, v.stored.1).unwrap();
    let both = of_k(k.computed()).read(Slot::VValues, values()).write(Slot::VStored, to);
    let both = both.write(Slot::VDescale, TensorMut::host(&mut written, v.descale.1).unwrap());
    let text = refusal(both.read(Slot::VDescaleGiven, factors()));
    assert_eq!(text, "v.descale: given twice; allowed: factors to be written, or to be read");
    let text = refusal(of_k(k.computed()).read(Slot::V, values()));
    assert_eq!(
        text,
        "v: given; allowed: the operands of this problem: q.values, q.stored, q.descale, k.values, k.stored, k.descale, v.values, v.stored, v.descale, counts, \
             cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv"
    );

    let untouched = |stored: &[E4M3]| stored.iter().all(|x| x.is_nan());
    assert!(untouched(&k.stored.0) && untouched(&stored) && untouched(&halves.stored.0) && untouched(&v.stored.0));
    assert!(k.descale.0.iter().chain(&written).all(|x| x.is_nan()) && counts == [-7.0; 6]);
}

#[test]
fn nothing_to_quantise_is_counted_as_nothing() {
    let problem = eight_values();
    let mut counts = [f32::NAN; 6];
    run(&plan(&problem, DType::F32), args::<f32>([None, None, None], Some(&mut counts))).unwrap();
    assert_eq!(counts, [0.0; 6]);
    run(&plan(&problem, DType::F32), QuantizeArgs::new()).unwrap();
}
