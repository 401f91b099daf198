//! The gradients on the CPU: the backend, and the naive computation.

use anyhow::{Context as _, Result};
use hopper_attention::reference::{BackwardPlain, DropoutMask, Tensor, backward_plain_with};
use hopper_attention::{BackwardPlan, BackwardProblem, Device, Float, Layout, Slot, Stream, Workspace};

use super::{Given, NAIVE, Plainly, Planned, Way, lengths, modifiers, narrow, offsets, probe, wide_bias, wide_slopes};
use crate::harness::contest::{Outputs, Pool, Refusal, Task};
use crate::point::BiasTensor;
use crate::{Role, memory};

/// The CPU backend through the safe API.
pub(in crate::harness) struct Backend;

impl<T: Float> Way<T> for Backend {
    /// With dQ, dK and dV, and the gradient of the bias.
    type Ready = Planned<BackwardPlan, ([Vec<T>; 3], Option<BiasTensor>)>;
    const WHO: (Role, &'static str) = (Role::Ours, crate::NAME);

    fn prepare(_: &Pool<T>, task: &Task<'_, T>) -> Result<Self::Ready, Refusal> {
        let plan = task.point.backward_problem()?.plan(&Device::cpu())?;
        let workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?;
        let unwritten = |layout: &Layout<4>| memory::filled(layout.span(), T::from_f32(f32::NAN));
        let written = [unwritten(&task.q)?, unwritten(&task.k)?, unwritten(&task.v)?];
        let written = (written, task.point.bias_gradient()?);
        let (slopes, blocks) = (task.point.slopes(), task.point.full_blocks());
        let (offsets, state) = (offsets(task.point)?, task.point.dropout_state());
        Ok(Planned { plan, offsets, slopes, blocks, state, workspace, written })
    }

    fn call(ready: &mut Self::Ready, pool: &Pool<T>, task: &Task<'_, T>) -> Result<(), Refusal> {
        let Planned { plan, offsets, slopes, blocks, state, workspace, written: ([d_q, d_k, d_v], d_bias) } = ready;
        let saved = task.saved()?;
        let o = saved.tensors.first().context("the forward left no O")?;
        let given = Given::new(offsets, slopes, blocks, state, task.bias)?
            .read(Slot::Q, &pool.q, &task.q)?
            .read(Slot::K, &pool.k, &task.k)?
            .read(Slot::V, &pool.v, &task.v)?
            .read(Slot::O, o, &task.o)?
            .read(Slot::Lse, &saved.lse, &task.lse)?
            .read(Slot::DO, &pool.d_o, &task.o)?
            .write(Slot::DQ, d_q, &task.q)?
            .write(Slot::DK, d_k, &task.k)?
            .write(Slot::DV, d_v, &task.v)?;
        let args = match d_bias {
            None => given.args,
            Some(d_bias) => d_bias.add_gradient_to(given.args)?,
        };
        Ok(plan.run(&Stream::Cpu, workspace, args)?)
    }

    fn outputs(ready: &Self::Ready) -> Result<Outputs<T>> {
        let (gradients, d_bias) = &ready.written;
        let tensors = gradients.iter().map(|tensor| memory::copied(tensor)).collect::<Result<_>>()?;
        Ok(Outputs { tensors, lse: vec![], d_bias: d_bias.as_ref().map(BiasTensor::copied).transpose()? })
    }
}

/// The plain computation of the reference, which computes O and the LSE again.
pub(super) struct Naive;

impl<T: Float> Way<T> for Naive {
    type Ready = Plainly<BackwardProblem, BackwardPlain, 4, 3>;
    const WHO: (Role, &'static str) = (Role::Peer, NAIVE);

    fn prepare(Pool { q, k, v, d_o }: &Pool<T>, task: &Task<'_, T>) -> Result<Self::Ready, Refusal> {
        probe([&task.q, &task.k, &task.v, &task.o], [&task.q, &task.k, &task.v])?;
        let inputs = [(q, &task.q), (k, &task.k), (v, &task.v), (d_o, &task.o)];
        let inputs = inputs.map(|(data, layout)| Tensor::from_strided(data, layout));
        let (problem, offsets) = (task.point.backward_problem()?, offsets(task.point)?);
        let (slopes, blocks) = (wide_slopes(task.point), task.point.full_blocks());
        let dropout = DropoutMask::of(problem.forward(), task.point.dropout_state());
        let (bias, d_bias, layouts) = (wide_bias(task)?, task.point.bias_gradient()?, [task.q, task.k, task.v]);
        Ok(Plainly { problem, offsets, slopes, blocks, dropout, bias, d_bias, inputs, plain: None, layouts })
    }

    fn call(ready: &mut Self::Ready, _: &Pool<T>, _: &Task<'_, T>) -> Result<(), Refusal> {
        let modifiers = modifiers(&ready.slopes, &ready.blocks, ready.dropout, &ready.bias);
        let lengths = lengths(&ready.offsets);
        let inputs = ready.inputs.each_ref();
        ready.plain = Some(backward_plain_with(&ready.problem, &lengths, inputs, None, modifiers)?);
        Ok(())
    }

    fn outputs(ready: &Self::Ready) -> Result<Outputs<T>> {
        let plain = ready.plain.as_ref().context("it was not called")?;
        let gradients = [&plain.d_q, &plain.d_k, &plain.d_v].into_iter().zip(&ready.layouts);
        let tensors = gradients.map(|(tensor, layout)| narrow(tensor, layout)).collect::<Result<_>>()?;
        let d_bias = ready.d_bias.as_ref().map(|memory| memory.holding(&plain.d_bias)).transpose()?;
        Ok(Outputs { tensors, lse: vec![], d_bias })
    }
}
