//! The quantising kernel: the CPU's bytes and factors, whatever the shapes, strides and values; and streams, graphs and
//! allocations as for the forward pass.

use hopper_attention::{
    DType, Descale, Device, Dims, E4M3, Error, Float, ForwardProblem, ForwardProblemBuilder, Layout, Mask,
    QuantizeArgs, Quantizer, Scaling, Stream, TensorMut, TensorRef, Workspace, bf16, f16,
};
use hopper_attention_tests::allocations::counted;
use hopper_attention_tests::gpu::fp8::{Inputs, Outputs};
use hopper_attention_tests::gpu::quantize::{Kind, Like, OnDevice, Sample};
use hopper_attention_tests::gpu::{Gpu, MODE, NO_FLAGS};
use hopper_attention_tests::layouts::Placement;
use hopper_attention_tests::problems::{self, Grid};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::with_dtype;

/// Values may lie in any way, what is written in those that use no element twice.
pub(crate) const STORED: [Placement; 6] =
    [Placement::Bshd, Placement::Bhsd, Placement::BshdGaps, Placement::BhsdGaps, Placement::Sbhd, Placement::WildUnits];

fn options(dims: Dims, scaling: Scaling) -> ForwardProblemBuilder {
    ForwardProblem::builder(DType::E4M3, dims).scaling(scaling)
}

fn problem(dims: Dims, scaling: Scaling) -> ForwardProblem {
    options(dims, scaling).build().unwrap()
}

fn quantizer(problem: &ForwardProblem, source: DType, hadamard: Option<u64>) -> Quantizer {
    let options = Quantizer::builder(problem, source);
    hadamard.map_or(options.clone(), |seed| options.hadamard(seed)).build().unwrap()
}

/// Runs a sample and compares.
pub(crate) fn follows_the_cpu<T: Float>(gpu: &Gpu, sample: &Sample<T>, what: &str) {
    let plan = sample.quantizer.plan(&Device::Cuda(gpu.device.clone())).unwrap();
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let mut on_device = OnDevice::new(&gpu.stream, sample);
    on_device.run(&gpu.stream, &mut workspace, &plan, sample).unwrap();
    let (got, want) = (on_device.outcome(&gpu.stream), sample.on_cpu());
    assert!(got == want, "{what}, {}: {}", sample.quantizer, got.difference(&want));
}

#[test]
fn the_gpu_makes_the_cpus_bytes() {
    let Some(gpu) = Gpu::open("the_gpu_makes_the_cpus_bytes") else { return };
    let first = problems::random::seed();
    for seed in (0..Grid::from_env().pick(12, 300)).map(|i| first.wrapping_add(i)) {
        let source = if seed % 2 == 0 { DType::BF16 } else { DType::F16 };
        with_dtype!(source, random(&gpu, seed));
    }
}

fn random<T: Float>(gpu: &Gpu, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut pick = |from: &[usize]| *from.choose(&mut rng).unwrap();
    let heads_kv = pick(&[1, 2, 3]);
    let (batch, seqlen_q) = (pick(&[1, 1, 2, 3, 0]), pick(&[0, 1, 7, 127, 128, 129, 300, 1000, 2500]));
    let (seqlen_kv, group) = (pick(&[1, 63, 128, 255, 257, 777, 1500]), pick(&[1, 1, 2, 4]));
    let head_dim_qk = pick(&[16, 32, 48, 64, 80, 96, 112, 128, 144, 176, 192, 208, 240, 256, 64, 128, 192, 256]);
    let head_dim_vo = pick(&[16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256]);
    let dims = Dims::new(batch, seqlen_q, heads_kv * group, head_dim_qk).with_seqlen_kv(seqlen_kv);
    let dims = dims.with_heads_kv(heads_kv).with_head_dim_vo(head_dim_vo);
    let hadamard = rng.random_bool(0.6).then(|| rng.random());
    let mut kind = || {
        rng.random_bool(0.8).then(|| Kind {
            values: *Placement::ALL.choose(&mut rng).unwrap(),
            stored: *STORED.choose(&mut rng).unwrap(),
            given: rng.random_bool(0.3),
            like: *Like::ALL.choose(&mut rng).unwrap(),
        })
    };
    let kinds = [kind(), kind(), kind()];
    let counts = rng.random_bool(0.5);
    let scaling = Scaling::ALL[rng.random_range(0..3)];
    let problem = options(dims, scaling).half_scores(rng.random_bool(0.5)).build().unwrap();
    let quantizer = quantizer(&problem, T::DTYPE, hadamard);
    follows_the_cpu(
        gpu,
        &Sample::<T>::new(quantizer, kinds, counts, seed),
        &format!("seed {seed}, {dims:?}, {kinds:?}"),
    );
}

/// What the kernels are timed on, where tiles of many multiprocessors share factors.
fn several_rounds(scaling: Scaling) -> ForwardProblem {
    let dims = Dims::new(2, 8192, 8, 128).with_seqlen_kv(3000).with_heads_kv(4).with_head_dim_vo(64);
    let small = dims.with_seqlen_q(700).with_seqlen_kv(300);
    problem(Grid::from_env().pick(small, dims), scaling)
}

fn dense(like: Like) -> [Option<Kind>; 3] {
    [Some(Kind { values: Placement::Bshd, stored: Placement::Bshd, given: false, like }); 3]
}

#[test]
fn many_tiles_share_a_factor() {
    let Some(gpu) = Gpu::open("many_tiles_share_a_factor") else { return };
    for scaling in Scaling::ALL {
        for values in [Placement::Bshd, Placement::Bhsd] {
            let kinds = [Some(Kind { values, stored: values, given: false, like: Like::Uneven }); 3];
            let problem = several_rounds(scaling).to_builder().half_scores(values == Placement::Bhsd).build().unwrap();
            let quantizer = quantizer(&problem, DType::BF16, Some(3));
            follows_the_cpu(&gpu, &Sample::<bf16>::new(quantizer, kinds, true, 5), &format!("{values:?}"));
        }
    }
}

/// More tiles to a factor than all multiprocessors can hold, for several factors: some are read the second time while others
/// are read the first time.
#[test]
fn more_tiles_share_a_factor_than_are_held() {
    let Some(gpu) = Gpu::open("more_tiles_share_a_factor_than_are_held") else { return };
    let dims = Dims::new(2, 60000, 2, 128).with_seqlen_kv(300).with_head_dim_vo(64);
    let small = Grid::from_env().pick(true, false);
    if small {
        hopper_attention_tests::say("skipped: more tiles than are held, a few instead (HATTN_TEST_GRID=small)");
    }
    let problem = problem(if small { dims.with_seqlen_q(600) } else { dims }, Scaling::PerHead);
    for hadamard in [Some(7), None] {
        let quantizer = quantizer(&problem, DType::BF16, hadamard);
        let sample = Sample::<bf16>::new(quantizer, dense(Like::Uneven), true, 6);
        follows_the_cpu(&gpu, &sample, &format!("{hadamard:?}"));
    }
}

/// Sequences of a batch that lie further apart than 32 bits count.
#[test]
fn strides_are_of_64_bits() {
    let Some(gpu) = Gpu::open("strides_are_of_64_bits") else { return };
    if Grid::from_env().pick(true, false) {
        hopper_attention_tests::say("skipped: strides_are_of_64_bits (HATTN_TEST_GRID=small)");
        return;
    }
    const APART: usize = (1 << 32) + 4096;
    let dims = Dims::new(2, 1, 1, 16).with_seqlen_kv(200).with_head_dim_vo(64);
    let problem = problem(dims, Scaling::PerBlock);
    let near = problem.v_shape();
    let far = Layout::with_strides(near, [APART as i64, 64, 64, 1]).unwrap();
    let entry = near[1] * near[3];
    let numbers: Vec<f16> = (0..2 * entry).map(|i| f16::from_f32((i * 37 % 1001) as f32 - 500.0)).collect();
    let mut values = gpu.stream.alloc_zeros::<f16>(far.span()).unwrap();
    let mut stored = gpu.stream.alloc_zeros::<E4M3>(far.span()).unwrap();
    let mut descale = gpu.stream.alloc_zeros::<f32>(4).unwrap();
    for (i, numbers) in numbers.chunks(entry).enumerate() {
        gpu.stream.memcpy_htod(numbers, &mut values.slice_mut(i * APART..i * APART + entry)).unwrap();
    }
    let quantizer = quantizer(&problem, DType::F16, None);
    let of_descale = Layout::contiguous(problem.descale_v_shape()).unwrap();
    let plan = quantizer.plan(&Device::Cuda(gpu.device.clone())).unwrap();
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let args = QuantizeArgs::new().v(
        TensorRef::cuda(values.slice(..), far).unwrap(),
        TensorMut::cuda(stored.slice_mut(..), far).unwrap(),
        Descale::FromAmax(TensorMut::cuda(descale.slice_mut(..), of_descale).unwrap()),
    );
    plan.run(&gpu.lane(), &mut workspace, args).unwrap();
    let (mut want, mut want_descale) = (vec![E4M3::from_bits(0x7f); 2 * entry], [f32::NAN; 4]);
    let layout = Layout::contiguous(near).unwrap();
    let args = QuantizeArgs::new().v(
        TensorRef::host(&numbers, layout).unwrap(),
        TensorMut::host(&mut want, layout).unwrap(),
        Descale::FromAmax(TensorMut::host(&mut want_descale, of_descale).unwrap()),
    );
    let on_cpu = quantizer.plan(&Device::cpu()).unwrap();
    on_cpu.run(&Stream::Cpu, &mut Workspace::alloc(&Stream::Cpu, 0).unwrap(), args).unwrap();
    for (i, want) in want.chunks(entry).enumerate() {
        let got = gpu.stream.clone_dtoh(&stored.slice(i * APART..i * APART + entry)).unwrap();
        assert!(got.iter().zip(want).all(|(got, want)| got.to_bits() == want.to_bits()), "batch entry {i}");
    }
    assert_eq!(gpu.stream.clone_dtoh(&descale).unwrap(), want_descale);
}

/// The same bits on every run and on any stream, whatever the workspace held, without waiting in between.
#[test]
fn reruns_and_a_second_stream() {
    let Some(gpu) = Gpu::open("reruns_and_a_second_stream (quantiser)") else { return };
    let second = gpu.device.context().new_stream().unwrap();
    for scaling in Scaling::ALL {
        let quantizer = quantizer(&several_rounds(scaling), DType::F16, Some(9));
        let sample = Sample::<f16>::new(quantizer, dense(Like::NotFinite), true, 8);
        let plan = sample.quantizer.plan(&Device::Cuda(gpu.device.clone())).unwrap();
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        let mut on_device = OnDevice::new(&gpu.stream, &sample);
        on_device.run(&gpu.stream, &mut workspace, &plan, &sample).unwrap();
        let first = on_device.outcome(&gpu.stream);
        for run in 0..Grid::from_env().pick(3, 20) {
            // Memory that one stream has written is used on the other at once: the library has to order that.
            let (here, there) = if run % 2 == 0 { (&gpu.stream, &second) } else { (&second, &gpu.stream) };
            on_device.write(here, &sample);
            on_device.run(there, &mut workspace, &plan, &sample).unwrap();
            assert!(on_device.outcome(there) == first, "{plan}: run {run} differs");
        }
        // Memory is given back while the kernels that read it may still run, and taken again.
        let mut dropped = OnDevice::new(&gpu.stream, &sample);
        dropped.run(&second, &mut workspace, &plan, &sample).unwrap();
        drop(dropped);
        let mut next = OnDevice::new(&gpu.stream, &sample);
        next.run(&gpu.stream, &mut workspace, &plan, &sample).unwrap();
        assert!(next.outcome(&gpu.stream) == first, "{plan}: after memory was freed");
    }
}

/// Quantised and attended to on one stream: launched, captured in one graph and replayed on other values.
#[test]
fn a_chain_of_quantiser_and_forward() {
    let Some(gpu) = Gpu::open("a_chain_of_quantiser_and_forward") else { return };
    // SAFETY: everything of this context object happens on one stream, in its order; nothing relies on events.
    unsafe { gpu.device.context().disable_event_tracking() };
    let device = Device::Cuda(gpu.device.clone());
    // The default stream cannot be captured.
    let stream = gpu.device.context().new_stream().unwrap();
    let lane = Stream::Cuda(stream.clone());
    for (scaling, half) in Scaling::ALL.into_iter().flat_map(|scaling| [(scaling, false), (scaling, true)]) {
        let dims = Dims::new(2, 517, 4, 96).with_seqlen_kv(300).with_heads_kv(2);
        let problem = options(dims, scaling).mask(Mask::causal()).lse(true).half_scores(half).build().unwrap();
        let quantizer = quantizer(&problem, DType::BF16, Some(11));
        let sample = |seed| Sample::<bf16>::new(quantizer.clone(), dense(Like::Uneven), true, seed);
        let first = sample(1);
        let quantise = quantizer.plan(&device).unwrap();
        let forward = problem.plan(&device).unwrap();
        let mut scratch = Workspace::alloc(&lane, quantise.workspace_bytes()).unwrap();
        let mut workspace = Workspace::alloc(&lane, forward.workspace_bytes()).unwrap();
        let mut on_device = OnDevice::new(&stream, &first);
        let mut outputs = Outputs::<bf16>::new(&stream, &problem, None);
        stream.synchronize().unwrap();

        // The very first launches of these plans are the captured ones: planning has loaded all there is to load.
        stream.begin_capture(MODE).unwrap();
        let quantised = on_device.run(&stream, &mut scratch, &quantise, &first);
        let attended = forward.run(&lane, &mut workspace, outputs.args(on_device.operands(&first)));
        let graph = stream.end_capture(NO_FLAGS).unwrap().expect("a graph");
        quantised.unwrap();
        attended.unwrap();
        let mut seen = Vec::new();
        for seed in [1, 2, 3] {
            let sample = sample(seed);
            on_device.write(&stream, &sample);
            outputs.poison(&stream);
            graph.launch().unwrap();
            graph.launch().unwrap();
            let (replayed, want) = (on_device.outcome(&stream), sample.on_cpu());
            assert!(replayed == want, "{quantise}, seed {seed}: {}", replayed.difference(&want));
            let written = outputs.written(&stream).unwrap();
            assert!(written.o.iter().all(|o| o.is_finite()), "{forward}: what was not written or is not a number");
            // Launched without a graph, and with operands that the CPU made, the bits are the same.
            on_device.write(&stream, &sample);
            outputs.poison(&stream);
            on_device.run(&stream, &mut scratch, &quantise, &sample).unwrap();
            let Inputs { stored, descale } = on_device.operands(&sample);
            forward.run(&lane, &mut workspace, outputs.args(Inputs { stored, descale })).unwrap();
            assert!(on_device.outcome(&stream) == want, "{quantise}: a replay and a launch differ");
            assert!(outputs.written(&stream).unwrap().same_bits(&written), "{forward}: a replay and a launch differ");
            assert!(seen.iter().all(|other| *other != written.o), "a replay did not see new values");
            seen.push(written.o);
        }
    }
}

#[test]
fn quantising_allocates_no_host_memory_and_is_refused_in_a_capture_with_events() {
    let Some(gpu) = Gpu::open("quantising_allocates_no_host_memory") else { return };
    let quantizer = quantizer(&several_rounds(Scaling::PerHead), DType::BF16, None);
    let sample = Sample::<bf16>::new(quantizer, dense(Like::Uneven), true, 2);
    let plan = sample.quantizer.plan(&Device::Cuda(gpu.device.clone())).unwrap();
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let mut on_device = OnDevice::new(&gpu.stream, &sample);
    for run in 0..3 {
        let args = on_device.args(&sample);
        let (ran, calls) = counted(|| plan.run(&gpu.lane(), &mut workspace, args));
        ran.unwrap();
        assert_eq!(calls, 0, "{plan}: run {run} called the allocator");
    }
    assert!(on_device.outcome(&gpu.stream) == sample.on_cpu(), "{plan}");

    let stream = gpu.device.context().new_stream().unwrap();
    assert!(gpu.device.context().is_managing_stream_synchronization(), "a context of two streams tracks events");
    stream.begin_capture(MODE).unwrap();
    let ran = on_device.run(&stream, &mut workspace, &plan, &sample);
    let graph = stream.end_capture(NO_FLAGS);
    assert!(matches!(ran, Err(Error::Capture { .. })), "{ran:?}");
    graph.unwrap();
}

#[test]
fn what_the_gpu_does_not_take_is_refused() {
    let Some(gpu) = Gpu::open("what_the_gpu_does_not_take_is_refused (quantiser)") else { return };
    let device = Device::Cuda(gpu.device.clone());
    let dims = Dims::new(1, 5, 2, 64).with_seqlen_kv(9);
    let text =
        |dims, source| quantizer(&problem(dims, Scaling::PerHead), source, None).plan(&device).unwrap_err().to_string();
    assert!(text(dims, DType::F32).ends_with("nearest: bf16, f16"), "{}", text(dims, DType::F32));
    let odd = text(dims.with_head_dim_qk(40), DType::BF16);
    assert!(odd.contains("head_dim 40") && odd.ends_with("nearest: multiples of 16 up to 256"), "{odd}");

    // Memory and streams of another context object, a workspace that is too small, a stream of the CPU.
    let sample = Sample::<bf16>::new(
        quantizer(&problem(dims, Scaling::PerHead), DType::BF16, None),
        dense(Like::Uneven),
        false,
        1,
    );
    let plan = sample.quantizer.plan(&device).unwrap();
    let mut on_device = OnDevice::new(&gpu.stream, &sample);
    let mut small = Workspace::alloc(&gpu.lane(), plan.workspace_bytes() - 1).unwrap();
    let error = on_device.run(&gpu.stream, &mut small, &plan, &sample).unwrap_err();
    assert!(matches!(error, Error::Workspace { .. }), "{error}");
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let error = plan.run(&Stream::Cpu, &mut workspace, on_device.args(&sample)).unwrap_err();
    assert!(matches!(error, Error::Device { what: "stream", .. }), "{error}");
    let other = hopper_attention::cudarc::driver::CudaContext::new(0).unwrap().default_stream();
    let mut elsewhere = OnDevice::new(&other, &sample);
    let error = elsewhere.run(&gpu.stream, &mut workspace, &plan, &sample).unwrap_err();
    assert!(matches!(error, Error::Device { what: "q.values", .. }), "{error}");
    // Rows that are not 16 bytes apart.
    let values = gpu.stream.alloc_zeros::<bf16>(4096).unwrap();
    let mut stored = gpu.stream.alloc_zeros::<E4M3>(4096).unwrap();
    let descale = gpu.stream.alloc_zeros::<f32>(2).unwrap();
    let shape = plan.quantizer().problem().q_shape();
    let apart = Layout::with_strides(shape, [1, 136, 66, 1]).unwrap();
    let args = QuantizeArgs::new().q(
        TensorRef::cuda(values.slice(..), Layout::contiguous(shape).unwrap()).unwrap(),
        TensorMut::cuda(stored.slice_mut(..), apart).unwrap(),
        Descale::Given(TensorRef::cuda(descale.slice(..), Layout::contiguous([1, 2, 1]).unwrap()).unwrap()),
    );
    let text = plan.run(&gpu.lane(), &mut workspace, args).unwrap_err().to_string();
    assert!(text.starts_with("q.stored: stride 136 in seqlen"), "{text}");
}
