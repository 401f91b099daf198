//! Running a plan on host data and timing it.

mod backward;
#[cfg(feature = "cuda")]
mod cuda;
mod fp8;

pub use backward::{Gradients, backward};
pub use fp8::{Operands, forward as forward_fp8};

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use hopper_attention::{Device, ForwardArgs, ForwardProblem, Layout, Stream, TensorMut, TensorRef, Workspace};

use crate::args::FileLayout;
use crate::input::{Qkv, Value};
use crate::request::{Choice, Request, strided};

/// What came out, in the file's order of dimensions.
pub struct Computed<T> {
    /// As `problem.o_shape()`, laid out like the input.
    pub o: Vec<T>,
    /// `[batch, heads_q, seqlen_q]`.
    pub lse: Vec<f32>,
    /// The median over the runs: wall time on a CPU, time between CUDA events on a GPU; copies are not counted.
    pub time: Duration,
    /// With `--fp8`, what q, k and v were quantised to.
    pub operands: Option<Operands>,
}

/// Where the tensors of a problem lie; a gradient lies as what it is of.
struct Layouts {
    q: Layout<4>,
    k: Layout<4>,
    v: Layout<4>,
    o: Layout<4>,
    lse: Layout<3>,
}

impl Layouts {
    fn new(problem: &ForwardProblem, layout: FileLayout) -> Result<Self> {
        Ok(Self {
            q: strided(layout, problem.q_shape())?,
            k: strided(layout, problem.k_shape())?,
            v: strided(layout, problem.v_shape())?,
            o: strided(layout, problem.o_shape())?,
            lse: Layout::contiguous(problem.lse_shape())?,
        })
    }
}

/// Computes `repeat` times.
pub fn forward<T: Value>(choice: &Choice, request: &Request, qkv: &Qkv<T>, repeat: u32) -> Result<Computed<T>> {
    let layouts = Layouts::new(&request.problem, request.layout)?;
    // NaN, so that an element that is never written cannot pass for a result.
    let o = filled(T::from_f32(f32::NAN), layouts.o.span())?;
    let lse = filled(f32::NAN, layouts.lse.span())?;
    match &choice.device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => cuda::forward(device, &choice.plan, &layouts, qkv, o, lse, repeat),
        _ => on_cpu(choice, &layouts, qkv, o, lse, repeat),
    }
}

fn on_cpu<T: Value>(
    choice: &Choice,
    layouts: &Layouts,
    qkv: &Qkv<T>,
    mut o: Vec<T>,
    mut lse: Vec<f32>,
    repeat: u32,
) -> Result<Computed<T>> {
    let stream = Stream::Cpu;
    let mut workspace = Workspace::alloc(&stream, choice.plan.workspace_bytes())?;
    let [q, k, v] = &qkv.data;
    let mut times = Vec::new();
    for _ in 0..repeat {
        let args = ForwardArgs {
            q: TensorRef::host(q, layouts.q)?,
            k: TensorRef::host(k, layouts.k)?,
            v: TensorRef::host(v, layouts.v)?,
            o: TensorMut::host(&mut o, layouts.o)?,
            lse: Some(TensorMut::host(&mut lse, layouts.lse)?),
        };
        let start = Instant::now();
        choice.plan.run(&stream, &mut workspace, args)?;
        times.push(start.elapsed());
    }
    Ok(Computed { o, lse, time: median(times), operands: None })
}

/// Whether a device is a GPU.
pub fn on_gpu(device: &Device) -> bool {
    !matches!(device, Device::Cpu)
}

/// A device's name for the report.
pub fn device_name(device: &Device) -> String {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => device.to_string(),
        _ => {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            format!("cpu, {threads} threads")
        }
    }
}

/// A vector of `len` copies of `value`; an allocation that the system refuses is an error, not an abort.
pub fn filled<T: Clone>(value: T, len: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values
        .try_reserve_exact(len)
        .with_context(|| format!("out of memory: {len} elements of {} bytes", size_of::<T>()))?;
    values.resize(len, value);
    Ok(values)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
