//! The harness on the CPU: the backend against the naive computation, by the wall clock.

mod backward;

#[cfg(test)]
pub(super) use backward::Backend as BackwardBackend;

use std::time::Instant;

use anyhow::Result;
use hopper_attention::reference::{Plain, Tensor, forward_plain};
use hopper_attention::{
    Device, ForwardArgs, ForwardPlan, ForwardProblem, Layout, Operand, Stream, TensorMut, TensorRef, Workspace,
};

use super::contest::{Clock, Contestant, Contestants, Outputs, Place, Pool, Refusal, Task};
use super::{Event, FLOPS, Harness, Job, Ready, Sink, WARM_UPS, turns};
use crate::Role;
use crate::report::Library;

/// Our CPU backend against what a careful author without any tiling would write.
pub struct Cpu;

/// The name of the naive computation.
const NAIVE: &str = "naive";

impl Harness for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn run(&mut self, job: &Job, sink: Sink<'_>) -> Result<()> {
        turns::sixteen_bits(job)?;
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let library = |name: &str, role, file: &str| Library {
            name: name.into(),
            role,
            file: file.into(),
            sha256: None,
            version: Some(env!("CARGO_PKG_VERSION").into()),
        };
        sink(Event::Ready(Ready {
            device: format!("CPU, {threads} threads"),
            uuid: None,
            versions: [("hopper-attention".into(), env!("CARGO_PKG_VERSION").into())].into(),
            method: format!(
                "in turn, iteration by iteration, one process, order rotating; wall clock around the call, median of {} after \
                 {WARM_UPS} warm-ups; unit-variance normal inputs; {FLOPS}",
                job.iters
            ),
            libraries: vec![
                library(crate::NAME, Role::Ours, "the CPU backend"),
                library(
                    NAIVE,
                    Role::Peer,
                    "hopper_attention::reference: forward_plain, and backward_plain, which computes the forward anew",
                ),
            ],
            missing: vec![],
            cupti: None,
        }))?;
        turns::run(self, job, sink)
    }
}

impl Place for Cpu {
    type Clock = WallClock;

    fn clock(&self) -> Result<WallClock> {
        Ok(WallClock::default())
    }

    fn forwards<'a, T: Operand<Out = T>>(&'a self, pool: &'a Pool<T>) -> Result<Contestants<'a, T>> {
        Ok(vec![Box::new(Backend::new(pool)), Box::new(Naive { pool, inputs: None, plain: None, layout: None })])
    }

    fn backwards<'a, T: Operand<Out = T>>(&'a self, pool: &'a Pool<T>) -> Result<Contestants<'a, T>> {
        Ok(vec![Box::new(backward::Backend::new(pool)), Box::new(backward::Naive::new(pool))])
    }
}

/// Calls here are done when they return. Caches are left as the neighbour left them.
#[derive(Default)]
pub(super) struct WallClock {
    ms: Vec<f64>,
}

impl Clock for WallClock {
    fn time(&mut self, call: &mut dyn FnMut() -> Result<(), Refusal>) -> Result<(), Refusal> {
        let start = Instant::now();
        let called = call();
        self.ms.push(start.elapsed().as_secs_f64() * 1e3);
        called
    }

    fn wait(&mut self) -> Result<Vec<f64>> {
        Ok(std::mem::take(&mut self.ms))
    }
}

/// The CPU backend through the safe API.
pub(super) struct Backend<'a, T> {
    pool: &'a Pool<T>,
    plan: Option<(ForwardPlan, Workspace)>,
    o: Vec<T>,
    lse: Vec<f32>,
}

impl<'a, T> Backend<'a, T> {
    pub(super) fn new(pool: &'a Pool<T>) -> Self {
        Self { pool, plan: None, o: vec![], lse: vec![] }
    }
}

impl<T: Operand<Out = T>> Contestant<T> for Backend<'_, T> {
    fn name(&self) -> &str {
        crate::NAME
    }

    fn role(&self) -> Role {
        Role::Ours
    }

    fn prepare(&mut self, task: &Task<'_, T>) -> Result<(), Refusal> {
        let plan = task.point.problem()?.plan(&Device::cpu())?;
        let workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?;
        self.plan = Some((plan, workspace));
        self.o = vec![T::from_f32(f32::NAN); task.q.span()];
        self.lse = vec![f32::NAN; task.lse.span()];
        Ok(())
    }

    fn call(&mut self, task: &Task<'_, T>) -> Result<(), Refusal> {
        let Some((plan, workspace)) = &mut self.plan else { return Err(Refusal::Failed("not prepared".into())) };
        let args = ForwardArgs::<T> {
            q: TensorRef::host(&self.pool.q, task.q)?,
            k: TensorRef::host(&self.pool.k, task.kv)?,
            v: TensorRef::host(&self.pool.v, task.kv)?,
            o: TensorMut::host(&mut self.o, task.q)?,
            lse: Some(TensorMut::host(&mut self.lse, task.lse)?),
        };
        Ok(plan.run(&Stream::Cpu, workspace, args)?)
    }

    fn outputs(&mut self) -> Result<Outputs<T>> {
        Ok(Outputs { tensors: vec![self.o.clone()], lse: self.lse.clone() })
    }
}

/// The plain computation of the reference, a query at a time.
struct Naive<'a, T> {
    pool: &'a Pool<T>,
    inputs: Option<(ForwardProblem, [Tensor; 3])>,
    plain: Option<Plain>,
    /// Where O lies.
    layout: Option<Layout<4>>,
}

impl<T: Operand<Out = T>> Contestant<T> for Naive<'_, T> {
    fn name(&self) -> &str {
        NAIVE
    }

    fn role(&self) -> Role {
        Role::Peer
    }

    fn prepare(&mut self, task: &Task<'_, T>) -> Result<(), Refusal> {
        let Pool { q, k, v, .. } = self.pool;
        let tensors = [(q, &task.q), (k, &task.kv), (v, &task.kv)].map(|(x, at)| Tensor::from_strided(x, at));
        self.inputs = Some((task.point.problem()?, tensors));
        (self.plain, self.layout) = (None, Some(task.q));
        Ok(())
    }

    fn call(&mut self, _: &Task<'_, T>) -> Result<(), Refusal> {
        let Some((problem, [q, k, v])) = &self.inputs else { return Err(Refusal::Failed("not prepared".into())) };
        self.plain = Some(forward_plain(problem, q, k, v)?);
        Ok(())
    }

    fn outputs(&mut self) -> Result<Outputs<T>> {
        let (Some(plain), Some(layout)) = (&self.plain, &self.layout) else { anyhow::bail!("it was not called") };
        let lse = plain.lse.iter().map(|&lse| lse as f32).collect();
        Ok(Outputs { tensors: vec![narrow(&plain.o, layout)], lse })
    }
}

/// A tensor of the reference as it would lie in memory.
fn narrow<T: Operand>(tensor: &Tensor, layout: &Layout<4>) -> Vec<T> {
    let mut data = vec![T::from_f32(f32::NAN); layout.span()];
    let [batch, seqlen, heads, _] = tensor.shape();
    for (b, s, h) in (0..batch).flat_map(|b| (0..seqlen).flat_map(move |s| (0..heads).map(move |h| (b, s, h)))) {
        for (d, &value) in tensor.row(b, s, h).iter().enumerate() {
            if let Some(to) = layout.offset([b, s, h, d]).and_then(|at| data.get_mut(at)) {
                *to = T::from_f32(value as f32);
            }
        }
    }
    data
}
