//! Some thirty points of the forward for criterion, which tells whether a change moved them since its last run.
//!
//! On a GPU the measurement is CUDA events around each call with L2 emptied before it; without one, or without the
//! feature `cuda`, the same shapes, smaller, on the CPU backend by the wall clock.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::measurement::{Measurement, ValueFormatter};
use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput};
#[cfg(feature = "cuda")]
use hopper_attention::CudaDevice;
use hopper_attention::{
    Args, DType, Device, Dims, Float, ForwardProblem, Layout, Mask, Slot, Stream, TensorMut, TensorRef, Workspace,
    bf16, f16,
};
#[cfg(feature = "cuda")]
use hopper_attention_benches::EventClock;

/// Milliseconds, whoever measured them: criterion's loops ask a clock only through `iter_custom` here.
struct Milliseconds;

impl Measurement for Milliseconds {
    type Intermediate = Instant;
    type Value = f64;

    fn start(&self) -> Instant {
        Instant::now()
    }

    fn end(&self, start: Instant) -> f64 {
        start.elapsed().as_secs_f64() * 1e3
    }

    fn add(&self, a: &f64, b: &f64) -> f64 {
        a + b
    }

    fn zero(&self) -> f64 {
        0.0
    }

    fn to_f64(&self, value: &f64) -> f64 {
        *value
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        &Format
    }
}

/// Milliseconds as times, and as rates where the work is known.
struct Format;

impl ValueFormatter for Format {
    fn scale_values(&self, typical_ms: f64, values: &mut [f64]) -> &'static str {
        let (factor, unit) = if typical_ms < 1.0 { (1e3, "us") } else { (1.0, "ms") };
        values.iter_mut().for_each(|value| *value *= factor);
        unit
    }

    fn scale_throughputs(&self, _: f64, throughput: &Throughput, values: &mut [f64]) -> &'static str {
        let (Throughput::Elements(operations) | Throughput::Bytes(operations)) = throughput else { return "ms" };
        values.iter_mut().for_each(|ms| *ms = *operations as f64 / *ms * 1e-9);
        "TFLOP/s"
    }

    fn scale_for_machines(&self, _: &mut [f64]) -> &'static str {
        "ms"
    }
}

/// A shape: the sizes of a GPU's points, which a CPU divides.
#[derive(Clone, Copy)]
struct Shape {
    dtype: DType,
    mask: Mask,
    head_dim: usize,
    seqlen_q: usize,
    seqlen_kv: usize,
    group: usize,
}

fn shapes() -> Vec<Shape> {
    let base = Shape { dtype: DType::BF16, mask: Mask::Full, head_dim: 128, seqlen_q: 2048, seqlen_kv: 2048, group: 1 };
    let mut shapes = Vec::new();
    for head_dim in [64, 128] {
        for mask in [Mask::Full, Mask::causal(), Mask::window(Some(512), Some(0))] {
            for seqlen in [512, 2048, 8192] {
                shapes.push(Shape { mask, head_dim, seqlen_q: seqlen, seqlen_kv: seqlen, ..base });
            }
        }
    }
    for mask in [Mask::Full, Mask::causal()] {
        // The other type, grouped heads, head dims between the kernels', lengths between the tiles.
        shapes.push(Shape { dtype: DType::F16, mask, ..base });
        shapes.push(Shape { dtype: DType::F16, mask, head_dim: 64, ..base });
        shapes.push(Shape { mask, group: 8, ..base });
        shapes.push(Shape { mask, head_dim: 96, ..base });
        shapes.push(Shape { mask, seqlen_q: 2000, seqlen_kv: 2000, ..base });
        // Few queries against many keys, as in a chunk of a prompt.
        shapes.push(Shape { mask, seqlen_q: 256, seqlen_kv: 8192, ..base });
    }
    shapes
}

impl Shape {
    fn problem(&self, small: bool) -> ForwardProblem {
        let (divisor, tokens, hidden) = if small { (16, 256, 256) } else { (1, 16384, 2048) };
        let seqlen = |seqlen: usize| (seqlen / divisor).max(1);
        let heads_q = (hidden / self.head_dim).max(1);
        let batch = (tokens / seqlen(self.seqlen_kv)).max(1);
        let dims = Dims::new(batch, seqlen(self.seqlen_q), heads_q, self.head_dim)
            .with_seqlen_kv(seqlen(self.seqlen_kv))
            .with_heads_kv((heads_q / self.group).max(1));
        let mask = match self.mask {
            Mask::Window { left, right, corner } => Mask::Window { left: left.map(seqlen), right, corner },
            other => other,
        };
        let options = ForwardProblem::builder(self.dtype, dims).mask(mask).lse(true);
        options.build().expect("sizes that a problem may have")
    }

    fn name(&self) -> String {
        let mask = match self.mask {
            Mask::Full => "full",
            Mask::Causal { .. } => "causal",
            _ => "window",
        };
        let lengths = if self.seqlen_q == self.seqlen_kv {
            format!("s{}", self.seqlen_q)
        } else {
            format!("s{}x{}", self.seqlen_q, self.seqlen_kv)
        };
        let group = if self.group == 1 { String::new() } else { format!("/gqa{}", self.group) };
        format!("{}/d{}/{mask}/{lengths}{group}", self.dtype, self.head_dim)
    }
}

/// Operations over the pairs that the mask keeps.
fn flops(problem: &ForwardProblem) -> u64 {
    let d = problem.dims();
    let mask = problem.mask();
    let kept = |q: usize| (0..d.seqlen_kv).filter(|&kv| mask.keep(q, kv, d.seqlen_q, d.seqlen_kv)).count();
    let pairs: usize = (0..d.seqlen_q).map(kept).sum();
    (2 * d.batch * d.heads_q * pairs * (d.head_dim_qk + d.head_dim_vo)) as u64
}

/// Bits that look like values between -2 and 2, for either 16-bit type: a full exponent range is no realistic input.
fn values(count: usize, from: impl Fn(f32) -> u16) -> Vec<u16> {
    (0..count).map(|i| from((i as f32 * 0.7548777).fract() * 4.0 - 2.0)).collect()
}

/// What a benchmark runs on.
enum Bench {
    Cpu,
    #[cfg(feature = "cuda")]
    Gpu(CudaDevice),
}

fn place() -> Bench {
    #[cfg(feature = "cuda")]
    match Device::cuda(0) {
        Ok(Device::Cuda(device)) => return Bench::Gpu(device),
        Ok(_) => (),
        Err(error) => eprintln!("{error}: on the CPU backend"),
    }
    Bench::Cpu
}

fn on_cpu(criterion: &mut Criterion<Milliseconds>, shape: &Shape) {
    match shape.dtype {
        DType::F16 => on_cpu_as::<f16>(criterion, shape, |x| f16::from_f32(x).to_bits(), f16::from_bits),
        _ => on_cpu_as::<bf16>(criterion, shape, |x| bf16::from_f32(x).to_bits(), bf16::from_bits),
    }
}

fn on_cpu_as<T: Float>(criterion: &mut Criterion<Milliseconds>, shape: &Shape, to: fn(f32) -> u16, from: fn(u16) -> T) {
    let problem = shape.problem(true);
    let plan = problem.plan(&Device::cpu()).expect("the CPU computes every problem");
    let layout = |shape| Layout::contiguous(shape).expect("a small shape");
    let data = |shape: [usize; 4]| values(shape.iter().product(), to).into_iter().map(from).collect::<Vec<T>>();
    let (q, k, v) = (data(problem.q_shape()), data(problem.k_shape()), data(problem.v_shape()));
    let mut o = data(problem.o_shape());
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes()).expect("a small workspace");
    let lse_layout = Layout::contiguous(problem.lse_shape()).expect("a small shape");
    let mut lse = vec![0.0; lse_layout.span()];
    group(criterion, shape, &problem, |calls| {
        let start = Instant::now();
        for _ in 0..calls {
            let mut run = || -> hopper_attention::Result<()> {
                let args = Args::new()
                    .read(Slot::Q, TensorRef::host(black_box(&q), layout(problem.q_shape()))?)
                    .read(Slot::K, TensorRef::host(&k, layout(problem.k_shape()))?)
                    .read(Slot::V, TensorRef::host(&v, layout(problem.v_shape()))?)
                    .write(Slot::O, TensorMut::host(&mut o, layout(problem.o_shape()))?)
                    .write(Slot::Lse, TensorMut::host(&mut lse, lse_layout)?);
                plan.run(&Stream::Cpu, &mut workspace, args)
            };
            run().expect("a planned run");
        }
        start.elapsed().as_secs_f64() * 1e3
    });
}

#[cfg(feature = "cuda")]
fn on_gpu_as<T: Float>(
    criterion: &mut Criterion<Milliseconds>,
    shape: &Shape,
    gpu: &CudaDevice,
    to: fn(f32) -> u16,
    from: fn(u16) -> T,
) {
    let problem = shape.problem(false);
    let plan = match problem.plan(&Device::Cuda(gpu.clone())) {
        Ok(plan) => plan,
        Err(error) => return eprintln!("{}: skipped: {error}", shape.name()),
    };
    let stream = gpu.context().default_stream();
    let layout = |shape| Layout::contiguous(shape).expect("a shape that fits the GPU");
    let data = |shape: [usize; 4]| {
        let host: Vec<T> = values(shape.iter().product(), to).into_iter().map(from).collect();
        stream.clone_htod(&host).expect("memory for a tensor")
    };
    let (q, k, v) = (data(problem.q_shape()), data(problem.k_shape()), data(problem.v_shape()));
    let mut o = data(problem.o_shape());
    let lse_layout = Layout::contiguous(problem.lse_shape()).expect("a shape that fits the GPU");
    let mut lse = stream.alloc_zeros::<f32>(lse_layout.span()).expect("memory for the LSE");
    let on = Stream::Cuda(stream.clone());
    let mut workspace = Workspace::alloc(&on, plan.workspace_bytes()).expect("memory for the workspace");
    let mut clock = EventClock::new(stream.clone()).expect("memory to empty L2 with");
    group(criterion, shape, &problem, |calls| {
        let mut total = 0.0;
        for call in 0..calls {
            let run = || -> anyhow::Result<()> {
                let args = Args::new()
                    .read(Slot::Q, TensorRef::cuda(q.as_view(), layout(problem.q_shape()))?)
                    .read(Slot::K, TensorRef::cuda(k.as_view(), layout(problem.k_shape()))?)
                    .read(Slot::V, TensorRef::cuda(v.as_view(), layout(problem.v_shape()))?)
                    .write(Slot::O, TensorMut::cuda(o.as_view_mut(), layout(problem.o_shape()))?)
                    .write(Slot::Lse, TensorMut::cuda(lse.as_view_mut(), lse_layout)?);
                Ok(plan.run(&on, &mut workspace, args)?)
            };
            clock.between(run).expect("a planned run");
            if call % 16 == 15 {
                total += clock.elapsed().expect("work that succeeds").iter().sum::<f64>();
            }
        }
        total + clock.elapsed().expect("work that succeeds").iter().sum::<f64>()
    });
}

/// Hands the milliseconds of so many calls to criterion.
fn group(
    criterion: &mut Criterion<Milliseconds>,
    shape: &Shape,
    problem: &ForwardProblem,
    mut time: impl FnMut(u64) -> f64,
) {
    let mut group = criterion.benchmark_group("forward");
    group.throughput(Throughput::Elements(flops(problem))).sampling_mode(SamplingMode::Flat);
    group.bench_function(BenchmarkId::from_parameter(shape.name()), |bencher| bencher.iter_custom(&mut time));
    group.finish();
}

fn main() {
    let mut criterion = Criterion::default()
        .with_measurement(Milliseconds)
        .sample_size(15)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600))
        .configure_from_args();
    let place = place();
    for shape in shapes() {
        match &place {
            Bench::Cpu => on_cpu(&mut criterion, &shape),
            #[cfg(feature = "cuda")]
            Bench::Gpu(gpu) => match shape.dtype {
                DType::F16 => on_gpu_as(&mut criterion, &shape, gpu, |x| f16::from_f32(x).to_bits(), f16::from_bits),
                _ => on_gpu_as(&mut criterion, &shape, gpu, |x| bf16::from_f32(x).to_bits(), bf16::from_bits),
            },
        }
    }
    criterion.final_summary();
}
