//! The harness on the CPU: the backend against the naive computation, by the wall clock.

mod backward;

#[cfg(test)]
pub(super) use backward::Backend as BackwardBackend;

use std::time::Instant;

use anyhow::{Context as _, Result};
use hopper_attention::reference::{DropoutMask, Modifiers, Plain, Tensor, forward_plain_with};
use hopper_attention::{
    Args, Device, Element, Float, ForwardPlan, ForwardProblem, Layout, Lengths, SequenceOffsets, Slot, Stream,
    TensorMut, TensorRef, Workspace,
};

use super::contest::{Clock, Contestant, Contestants, Outputs, Place, Pool, Refusal, Task};
use super::{Event, FLOPS, Harness, Job, ORDER, Ready, Sink, WARM_UPS, inputs, turns};
use crate::point::BiasTensor;
use crate::report::Library;
use crate::{FullBlocks, Packed, Point, Role, memory};

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
                "in turn, iteration by iteration, one process, {ORDER}; wall clock around the call, median of {} after \
                 {WARM_UPS} warm-ups; {}; {FLOPS}",
                job.iters,
                inputs(job)
            ),
            libraries: vec![
                library(crate::NAME, Role::Ours, "the CPU backend"),
                library(
                    NAIVE,
                    Role::Peer,
                    "hopper_attention::reference: forward_plain_with, and backward_plain_with, which computes the forward again",
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

    fn forwards<'a, T: Float>(&'a self, pool: &'a Pool<T>) -> Result<Contestants<'a, T>> {
        Ok(vec![Box::new(OnCpu::<T, Backend>::new(pool)), Box::new(OnCpu::<T, Naive>::new(pool))])
    }

    fn backwards<'a, T: Float>(&'a self, pool: &'a Pool<T>) -> Result<Contestants<'a, T>> {
        Ok(vec![Box::new(OnCpu::<T, backward::Backend>::new(pool)), Box::new(OnCpu::<T, backward::Naive>::new(pool))])
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

/// A way of computing a pass on the CPU.
pub(super) trait Way<T> {
    /// What it needs for a point, its outputs among it, which are full of NaN at first.
    type Ready;
    /// Ours or a peer's, and the name.
    const WHO: (Role, &'static str);

    fn prepare(pool: &Pool<T>, task: &Task<'_, T>) -> Result<Self::Ready, Refusal>;
    fn call(ready: &mut Self::Ready, pool: &Pool<T>, task: &Task<'_, T>) -> Result<(), Refusal>;
    fn outputs(ready: &Self::Ready) -> Result<Outputs<T>>;
}

/// A way as the harness takes it.
pub(super) struct OnCpu<'a, T, W: Way<T>> {
    pool: &'a Pool<T>,
    ready: Option<W::Ready>,
}

impl<'a, T, W: Way<T>> OnCpu<'a, T, W> {
    pub(super) fn new(pool: &'a Pool<T>) -> Self {
        Self { pool, ready: None }
    }
}

impl<T, W: Way<T>> Contestant<T> for OnCpu<'_, T, W> {
    fn name(&self) -> &str {
        W::WHO.1
    }

    fn role(&self) -> Role {
        W::WHO.0
    }

    fn prepare(&mut self, task: &Task<'_, T>) -> Result<(), Refusal> {
        self.ready = Some(W::prepare(self.pool, task)?);
        Ok(())
    }

    fn call(&mut self, task: &Task<'_, T>) -> Result<(), Refusal> {
        W::call(self.ready.as_mut().context("not prepared")?, self.pool, task)
    }

    fn outputs(&mut self) -> Result<Outputs<T>> {
        W::outputs(self.ready.as_ref().context("not prepared")?)
    }
}

/// The offsets of a point's packed sequences.
fn offsets(point: &Point) -> hopper_attention::Result<Option<SequenceOffsets>> {
    let offsets = point.packed.as_ref().map(Packed::offsets);
    offsets.map(|offsets| SequenceOffsets::new(&Stream::Cpu, &offsets)).transpose()
}

/// As the reference takes them.
fn lengths(offsets: &Option<SequenceOffsets>) -> Lengths<'_> {
    let offsets = offsets.as_ref().map(SequenceOffsets::numbers);
    Lengths { cu_seqlens_q: offsets, cu_seqlens_kv: offsets, ..Lengths::default() }
}

/// The modifiers of a point for the reference.
fn modifiers<'a>(
    slopes: &'a Option<Vec<f64>>,
    blocks: &'a Option<FullBlocks>,
    dropout: Option<DropoutMask>,
    bias: &'a Option<Vec<f64>>,
) -> Modifiers<'a> {
    let blocks = blocks.as_ref().map(FullBlocks::borrowed);
    Modifiers { alibi_slopes: slopes.as_deref(), blocks, dropout, bias: bias.as_deref(), ..Modifiers::default() }
}

/// ALiBi's slopes of a point as the reference takes them.
fn wide_slopes(point: &Point) -> Option<Vec<f64>> {
    Some(point.slopes()?.into_iter().map(f64::from).collect())
}

/// The bias of a point as the reference takes it.
fn wide_bias<T>(task: &Task<'_, T>) -> Result<Option<Vec<f64>>> {
    task.bias.map(BiasTensor::widened).transpose()
}

/// The arguments of a run. With offsets the tensors have no batch.
struct Given<'a> {
    args: Args<'a>,
    packed: bool,
}

impl<'a> Given<'a> {
    fn new(
        offsets: &'a Option<SequenceOffsets>,
        slopes: &'a Option<Vec<f32>>,
        blocks: &'a Option<FullBlocks>,
        state: &'a Option<[i32; 4]>,
        bias: Option<&'a BiasTensor>,
    ) -> hopper_attention::Result<Self> {
        let args = match slopes {
            None => Args::new(),
            Some(slopes) => {
                let slopes = TensorRef::host(slopes, Layout::contiguous([slopes.len()])?)?;
                Args::new().read(Slot::AlibiSlopes, slopes)
            }
        };
        let args = match blocks {
            None => args,
            Some(blocks) => blocks.add_to(args)?,
        };
        let args = match state {
            None => args,
            Some(state) => args.read(Slot::DropoutState, TensorRef::host(state, Layout::contiguous([4])?)?),
        };
        let args = match bias {
            None => args,
            Some(bias) => bias.add_to(args)?,
        };
        let args = match offsets {
            None => args,
            Some(offsets) => args.offsets(Slot::CuSeqlensQ, offsets).offsets(Slot::CuSeqlensKv, offsets),
        };
        Ok(Self { args, packed: offsets.is_some() })
    }

    fn read<T: Element, const R: usize>(
        self,
        slot: Slot,
        data: &'a [T],
        at: &Layout<R>,
    ) -> hopper_attention::Result<Self> {
        let args = match (self.packed, R) {
            (false, _) => self.args.read(slot, TensorRef::host(data, *at)?),
            (true, 4) => self.args.read(slot, TensorRef::host(data, without_batch::<R, 3>(at)?)?),
            (true, _) => self.args.read(slot, TensorRef::host(data, without_batch::<R, 2>(at)?)?),
        };
        Ok(Self { args, ..self })
    }

    fn write<T: Element, const R: usize>(
        self,
        slot: Slot,
        data: &'a mut [T],
        at: &Layout<R>,
    ) -> hopper_attention::Result<Self> {
        let args = match (self.packed, R) {
            (false, _) => self.args.write(slot, TensorMut::host(data, *at)?),
            (true, 4) => self.args.write(slot, TensorMut::host(data, without_batch::<R, 3>(at)?)?),
            (true, _) => self.args.write(slot, TensorMut::host(data, without_batch::<R, 2>(at)?)?),
        };
        Ok(Self { args, ..self })
    }
}

/// The only batch element of a tensor.
fn without_batch<const R: usize, const S: usize>(at: &Layout<R>) -> hopper_attention::Result<Layout<S>> {
    let (shape, stride) = (at.shape(), at.stride());
    Layout::with_strides(std::array::from_fn(|i| shape[i + 1]), std::array::from_fn(|i| stride[i + 1]))
}

/// The CPU backend through the safe API.
pub(super) struct Backend;

/// Its plan, and what it writes.
pub(super) struct Planned<P, O> {
    plan: P,
    offsets: Option<SequenceOffsets>,
    slopes: Option<Vec<f32>>,
    blocks: Option<FullBlocks>,
    state: Option<[i32; 4]>,
    workspace: Workspace<'static>,
    written: O,
}

impl<T: Float> Way<T> for Backend {
    type Ready = Planned<ForwardPlan, (Vec<T>, Vec<f32>)>;
    const WHO: (Role, &'static str) = (Role::Ours, crate::NAME);

    fn prepare(_: &Pool<T>, task: &Task<'_, T>) -> Result<Self::Ready, Refusal> {
        let plan = task.point.problem()?.plan(&Device::cpu())?;
        let workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?;
        let written =
            (memory::filled(task.o.span(), T::from_f32(f32::NAN))?, memory::filled(task.lse.span(), f32::NAN)?);
        let (slopes, blocks) = (task.point.slopes(), task.point.full_blocks());
        let (offsets, state) = (offsets(task.point)?, task.point.dropout_state());
        Ok(Planned { plan, offsets, slopes, blocks, state, workspace, written })
    }

    fn call(ready: &mut Self::Ready, pool: &Pool<T>, task: &Task<'_, T>) -> Result<(), Refusal> {
        let Planned { plan, offsets, slopes, blocks, state, workspace, written: (o, lse) } = ready;
        let given = Given::new(offsets, slopes, blocks, state, task.bias)?
            .read(Slot::Q, &pool.q, &task.q)?
            .read(Slot::K, &pool.k, &task.k)?
            .read(Slot::V, &pool.v, &task.v)?
            .write(Slot::O, o, &task.o)?
            .write(Slot::Lse, lse, &task.lse)?;
        Ok(plan.run(&Stream::Cpu, workspace, given.args)?)
    }

    fn outputs(Planned { written: (o, lse), .. }: &Self::Ready) -> Result<Outputs<T>> {
        Ok(Outputs { tensors: vec![memory::copied(o)?], lse: memory::copied(lse)?, d_bias: None })
    }
}

/// The plain computation of the reference, a query at a time.
pub(super) struct Naive;

/// Its problem and inputs, what came out, and where that lies.
pub(super) struct Plainly<P, R, const INPUTS: usize, const OUTPUTS: usize> {
    problem: P,
    offsets: Option<SequenceOffsets>,
    slopes: Option<Vec<f64>>,
    blocks: Option<FullBlocks>,
    dropout: Option<DropoutMask>,
    bias: Option<Vec<f64>>,
    /// Where the gradient of the bias belongs.
    d_bias: Option<BiasTensor>,
    inputs: [Tensor; INPUTS],
    plain: Option<R>,
    layouts: [Layout<4>; OUTPUTS],
}

impl<T: Float> Way<T> for Naive {
    type Ready = Plainly<ForwardProblem, Plain, 3, 1>;
    const WHO: (Role, &'static str) = (Role::Peer, NAIVE);

    fn prepare(Pool { q, k, v, .. }: &Pool<T>, task: &Task<'_, T>) -> Result<Self::Ready, Refusal> {
        probe([&task.q, &task.k, &task.v], [&task.o])?;
        let inputs = [(q, &task.q), (k, &task.k), (v, &task.v)].map(|(x, at)| Tensor::from_strided(x, at));
        let (problem, offsets) = (task.point.problem()?, offsets(task.point)?);
        let (slopes, blocks) = (wide_slopes(task.point), task.point.full_blocks());
        let dropout = DropoutMask::of(&problem, task.point.dropout_state());
        let (bias, layouts) = (wide_bias(task)?, [task.o]);
        Ok(Plainly { problem, offsets, slopes, blocks, dropout, bias, d_bias: None, inputs, plain: None, layouts })
    }

    fn call(ready: &mut Self::Ready, _: &Pool<T>, _: &Task<'_, T>) -> Result<(), Refusal> {
        let [q, k, v] = &ready.inputs;
        let modifiers = modifiers(&ready.slopes, &ready.blocks, ready.dropout, &ready.bias);
        let lengths = lengths(&ready.offsets);
        ready.plain = Some(forward_plain_with(&ready.problem, &lengths, [q, k, v], modifiers)?);
        Ok(())
    }

    fn outputs(ready: &Self::Ready) -> Result<Outputs<T>> {
        let plain = ready.plain.as_ref().context("it was not called")?;
        let lse = plain.lse.iter().map(|&lse| lse as f32).collect();
        Ok(Outputs { tensors: vec![narrow(&plain.o, &ready.layouts[0])?], lse, d_bias: None })
    }
}

/// Whether there is memory for what the reference holds in f64: inputs, outputs, and as much again meanwhile.
fn probe<const INPUTS: usize, const OUTPUTS: usize>(
    inputs: [&Layout<4>; INPUTS],
    outputs: [&Layout<4>; OUTPUTS],
) -> Result<()> {
    let elements: usize = inputs.into_iter().chain(outputs).map(Layout::span).sum();
    memory::probe(2 * size_of::<f64>() * elements).context("the naive computation, in f64")
}

/// A tensor of the reference as it would lie in memory.
fn narrow<T: Float>(tensor: &Tensor, layout: &Layout<4>) -> Result<Vec<T>> {
    let mut data = memory::filled(layout.span(), T::from_f32(f32::NAN))?;
    let [batch, seqlen, heads, _] = tensor.shape();
    for (b, s, h) in (0..batch).flat_map(|b| (0..seqlen).flat_map(move |s| (0..heads).map(move |h| (b, s, h)))) {
        for (d, &value) in tensor.row(b, s, h).iter().enumerate() {
            if let Some(to) = layout.offset([b, s, h, d]).and_then(|at| data.get_mut(at)) {
                *to = T::from_f32(value as f32);
            }
        }
    }
    Ok(data)
}
