//! Runs our forward at a point: poisoned outputs, a check, then timings.

use std::time::Instant;

use anyhow::{Context as _, Result};
use hopper_attention::{
    DType, Device, Error, ForwardArgs, ForwardPlan, Layout, Operand, Stream, TensorMut, TensorRef, Workspace,
};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use rand_distr::StandardNormal;

use crate::check::{Inputs, check};
use crate::{Layouts, Point, PointReport, Role, Run, RunStatus, Summary};

#[cfg(feature = "cuda")]
mod cuda;

/// Calls before the first timing: module load, first-touch of memory, clocks.
const WARM_UPS: usize = 3;

/// What all points of a sweep have in common.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Type of Q, K, V and O.
    pub dtype: DType,
    /// Storage order.
    pub layouts: Layouts,
    /// Timings a point.
    pub iters: usize,
    /// Seed of the inputs.
    pub seed: u64,
}

/// How timings on a device are taken, in words.
pub fn method(device: &Device, iters: usize) -> String {
    let how = match device {
        Device::Cpu => "wall clock around the call",
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => "CUDA events around the call, 256 MiB written before each to empty L2, a wait after each",
    };
    format!(
        "{how}; median of {iters} after {WARM_UPS} warm-ups; unit-variance normal inputs; \
         forward FLOPs 4*s*s*d*h*b, halved when causal"
    )
}

/// Measures our forward at every point, in order, on the CPU with the wall clock, on a GPU with CUDA events; `each` sees a result as soon as it is there.
///
/// A point that is wrong, unsupported or fails is reported as such and not timed.
///
/// # Errors
/// When memory runs out, a driver fails, or the setting's dtype is not one of f16, bf16 and f32.
pub fn measure(
    device: &Device,
    points: &[Point],
    setting: &Setting,
    each: impl FnMut(&PointReport),
) -> Result<Vec<PointReport>> {
    match setting.dtype {
        DType::F16 => measure_as::<hopper_attention::f16>(device, points, setting, each),
        DType::BF16 => measure_as::<hopper_attention::bf16>(device, points, setting, each),
        DType::F32 => measure_as::<f32>(device, points, setting, each),
        other => anyhow::bail!("dtype {other}; allowed: f16, bf16, f32"),
    }
}

/// One point, planned.
struct Job<'a> {
    point: &'a Point,
    plan: ForwardPlan,
    /// Of Q and O.
    q: Layout<4>,
    /// Of K and V.
    kv: Layout<4>,
    lse: Layout<3>,
}

impl<'a> Job<'a> {
    fn new(point: &'a Point, setting: &Setting, device: &Device) -> hopper_attention::Result<Self> {
        Ok(Self {
            point,
            plan: point.problem(setting.dtype)?.plan(device)?,
            q: point.layout(point.heads_q, setting.layouts)?,
            kv: point.layout(point.heads_kv, setting.layouts)?,
            lse: Layout::contiguous([point.batch, point.heads_q, point.seqlen])?,
        })
    }

    fn lse_elements(&self) -> usize {
        self.point.batch * self.point.heads_q * self.point.seqlen
    }
}

/// Unit-variance normal Q, K and V, as many as the largest point needs: every point takes the front.
struct Pool<T> {
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
}

impl<T: Operand> Pool<T> {
    fn new(points: &[Point], seed: u64) -> Self {
        let most = |heads: fn(&Point) -> usize| points.iter().map(|p| p.elements(heads(p))).max().unwrap_or(0);
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut draw = |count| (0..count).map(|_| T::from_f32(rng.sample(StandardNormal))).collect();
        Self { q: draw(most(|p| p.heads_q)), k: draw(most(|p| p.heads_kv)), v: draw(most(|p| p.heads_kv)) }
    }
}

/// Memory on a device, and the forward on it.
trait Place<T> {
    /// Fresh outputs full of NaN, and the plan's workspace.
    fn prepare(&mut self, job: &Job<'_>) -> Result<()>;
    /// One forward that has finished when this returns; its time in milliseconds.
    fn forward(&mut self, job: &Job<'_>) -> Result<f64>;
    /// O and LSE, on the host.
    fn outputs(&mut self) -> Result<(Vec<T>, Vec<f32>)>;
}

/// The CPU backend's memory.
struct Host<'a, T> {
    pool: &'a Pool<T>,
    o: Vec<T>,
    lse: Vec<f32>,
    workspace: Workspace,
}

impl<T: Operand<Out = T>> Place<T> for Host<'_, T> {
    fn prepare(&mut self, job: &Job<'_>) -> Result<()> {
        self.o = vec![T::from_f32(f32::NAN); job.point.elements(job.point.heads_q)];
        self.lse = vec![f32::NAN; job.lse_elements()];
        self.workspace = Workspace::alloc(&Stream::Cpu, job.plan.workspace_bytes())?;
        Ok(())
    }

    fn forward(&mut self, job: &Job<'_>) -> Result<f64> {
        let start = Instant::now();
        let args = ForwardArgs::<T> {
            q: TensorRef::host(&self.pool.q, job.q)?,
            k: TensorRef::host(&self.pool.k, job.kv)?,
            v: TensorRef::host(&self.pool.v, job.kv)?,
            o: TensorMut::host(&mut self.o, job.q)?,
            lse: Some(TensorMut::host(&mut self.lse, job.lse)?),
        };
        job.plan.run(&Stream::Cpu, &mut self.workspace, args)?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    }

    fn outputs(&mut self) -> Result<(Vec<T>, Vec<f32>)> {
        Ok((self.o.clone(), self.lse.clone()))
    }
}

fn measure_as<T: Operand<Out = T>>(
    device: &Device,
    points: &[Point],
    setting: &Setting,
    mut each: impl FnMut(&PointReport),
) -> Result<Vec<PointReport>> {
    let pool = Pool::<T>::new(points, setting.seed);
    let mut place: Box<dyn Place<T> + '_> = match device {
        Device::Cpu => {
            let workspace = Workspace::alloc(&Stream::Cpu, 0)?;
            Box::new(Host { pool: &pool, o: vec![], lse: vec![], workspace })
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => Box::new(cuda::Gpu::new(gpu, &pool)?),
    };
    let mut reports = Vec::with_capacity(points.len());
    for point in points {
        let run =
            measure_point(point, setting, device, &pool, place.as_mut()).with_context(|| format!("at {point:?}"))?;
        let report = PointReport { point: point.clone(), flops: point.forward_flops(), runs: vec![run] };
        each(&report);
        reports.push(report);
    }
    Ok(reports)
}

fn measure_point<T: Operand<Out = T>>(
    point: &Point,
    setting: &Setting,
    device: &Device,
    pool: &Pool<T>,
    place: &mut dyn Place<T>,
) -> Result<Run> {
    let mut run = Run {
        name: crate::NAME.into(),
        role: Role::Ours,
        status: RunStatus::Ok,
        error: None,
        plan: None,
        check: Default::default(),
        summary: None,
    };
    let job = match Job::new(point, setting, device) {
        Ok(job) => job,
        Err(error) => {
            let unsupported = matches!(error, Error::Unsupported { .. });
            run.status = if unsupported { RunStatus::Unsupported } else { RunStatus::Failed };
            run.error = Some(error.to_string());
            return Ok(run);
        }
    };
    run.plan = Some(job.plan.to_string());
    place.prepare(&job)?;
    if let Err(error) = place.forward(&job) {
        run.status = RunStatus::Failed;
        run.error = Some(format!("{error:#}"));
        return Ok(run);
    }
    let (o, lse) = place.outputs()?;
    let inputs = Inputs { q: &pool.q, k: &pool.k, v: &pool.v, q_layout: job.q, kv_layout: job.kv };
    (run.check, run.error) = check(point, &inputs, &o, &lse);
    if run.error.is_some() {
        run.status = RunStatus::Wrong;
        return Ok(run);
    }
    let mut ms = Vec::with_capacity(setting.iters);
    for i in 0..WARM_UPS + setting.iters {
        let time = place.forward(&job)?;
        if i >= WARM_UPS {
            ms.push(time);
        }
    }
    run.summary = Summary::new(ms, point.forward_flops());
    Ok(run)
}
