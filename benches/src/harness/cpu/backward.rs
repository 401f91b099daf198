//! The gradients on the CPU: the backend, and the naive computation.

use anyhow::{Context as _, Result};
use hopper_attention::reference::{BackwardPlain, Tensor, backward_plain};
use hopper_attention::{
    BackwardArgs, BackwardPlan, BackwardProblem, Device, Layout, Operand, Stream, TensorMut, TensorRef, Workspace,
};

use super::{NAIVE, narrow};
use crate::Role;
use crate::harness::contest::{Contestant, Outputs, Pool, Refusal, Task};

/// The CPU backend through the safe API.
pub(in crate::harness) struct Backend<'a, T> {
    pool: &'a Pool<T>,
    plan: Option<(BackwardPlan, Workspace)>,
    /// dQ, dK and dV.
    gradients: [Vec<T>; 3],
}

impl<'a, T> Backend<'a, T> {
    pub(in crate::harness) fn new(pool: &'a Pool<T>) -> Self {
        Self { pool, plan: None, gradients: [vec![], vec![], vec![]] }
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
        let plan = task.point.backward_problem()?.plan(&Device::cpu())?;
        let workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?;
        self.plan = Some((plan, workspace));
        self.gradients = [task.q, task.kv, task.kv].map(|layout| vec![T::from_f32(f32::NAN); layout.span()]);
        Ok(())
    }

    fn call(&mut self, task: &Task<'_, T>) -> Result<(), Refusal> {
        let (plan, workspace) = self.plan.as_mut().context("not prepared")?;
        let saved = task.saved()?;
        let o = saved.tensors.first().context("the forward left no O")?;
        let [d_q, d_k, d_v] = &mut self.gradients;
        let args = BackwardArgs::<T> {
            q: TensorRef::host(&self.pool.q, task.q)?,
            k: TensorRef::host(&self.pool.k, task.kv)?,
            v: TensorRef::host(&self.pool.v, task.kv)?,
            o: TensorRef::host(o, task.q)?,
            lse: TensorRef::host(&saved.lse, task.lse)?,
            d_o: TensorRef::host(&self.pool.d_o, task.q)?,
            d_lse: None,
            d_q: TensorMut::host(d_q, task.q)?,
            d_k: TensorMut::host(d_k, task.kv)?,
            d_v: TensorMut::host(d_v, task.kv)?,
        };
        Ok(plan.run(&Stream::Cpu, workspace, args)?)
    }

    fn outputs(&mut self) -> Result<Outputs<T>> {
        Ok(Outputs { tensors: self.gradients.to_vec(), lse: vec![] })
    }
}

/// The plain computation of the reference, which computes O and the LSE anew.
pub(super) struct Naive<'a, T> {
    pool: &'a Pool<T>,
    inputs: Option<(BackwardProblem, [Tensor; 4])>,
    plain: Option<BackwardPlain>,
    /// Where dQ, dK and dV lie.
    layouts: Option<[Layout<4>; 3]>,
}

impl<'a, T> Naive<'a, T> {
    pub(super) fn new(pool: &'a Pool<T>) -> Self {
        Self { pool, inputs: None, plain: None, layouts: None }
    }
}

impl<T: Operand<Out = T>> Contestant<T> for Naive<'_, T> {
    fn name(&self) -> &str {
        NAIVE
    }

    fn role(&self) -> Role {
        Role::Peer
    }

    fn prepare(&mut self, task: &Task<'_, T>) -> Result<(), Refusal> {
        let Pool { q, k, v, d_o } = self.pool;
        let tensors = [(q, &task.q), (k, &task.kv), (v, &task.kv), (d_o, &task.q)];
        self.inputs =
            Some((task.point.backward_problem()?, tensors.map(|(data, layout)| Tensor::from_strided(data, layout))));
        (self.plain, self.layouts) = (None, Some([task.q, task.kv, task.kv]));
        Ok(())
    }

    fn call(&mut self, _: &Task<'_, T>) -> Result<(), Refusal> {
        let (problem, [q, k, v, d_o]) = self.inputs.as_ref().context("not prepared")?;
        self.plain = Some(backward_plain(problem, q, k, v, d_o, None)?);
        Ok(())
    }

    fn outputs(&mut self) -> Result<Outputs<T>> {
        let (plain, layouts) = self.plain.as_ref().zip(self.layouts.as_ref()).context("it was not called")?;
        let gradients = [&plain.d_q, &plain.d_k, &plain.d_v].into_iter().zip(layouts);
        Ok(Outputs { tensors: gradients.map(|(tensor, layout)| narrow(tensor, layout)).collect(), lse: vec![] })
    }
}
