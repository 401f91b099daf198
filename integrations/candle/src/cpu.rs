//! Runs in host memory.

use candle_core::{CpuStorage, Layout, Result, WithDType};
use hopper_attention::{
    BackwardArgs, BackwardProblem, Device, Float, ForwardArgs, ForwardProblem, Stream, TensorMut, TensorRef, Workspace,
};

use crate::error::refusal;
use crate::problem::{beyond, contiguous, ours};

/// A tensor of candle's in host memory.
pub type Given<'a> = (&'a CpuStorage, &'a Layout);

/// Computes O, and the LSE if the problem wants it.
pub fn forward<T: Float + WithDType>(
    problem: &ForwardProblem,
    [q, k, v]: [Given<'_>; 3],
) -> Result<(CpuStorage, Option<CpuStorage>)> {
    let (of_o, of_lse) = (contiguous(problem.o_shape())?, contiguous(problem.lse_shape())?);
    let (mut o, mut lse) = (vec![T::default(); of_o.span()], vec![0f32; of_lse.span()]);
    let o_tensor = TensorMut::host(&mut o, of_o).map_err(refusal)?;
    let mut args = ForwardArgs::new(tensor::<T>("q", q)?, tensor::<T>("k", k)?, tensor::<T>("v", v)?, o_tensor);
    if problem.wants_lse() {
        args = args.lse(TensorMut::host(&mut lse, of_lse).map_err(refusal)?);
    }
    let plan = problem.plan(&Device::Cpu).map_err(refusal)?;
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes()).map_err(refusal)?;
    plan.run(&Stream::Cpu, &mut workspace, args).map_err(refusal)?;
    Ok((T::to_cpu_storage_owned(o), problem.wants_lse().then_some(CpuStorage::F32(lse))))
}

/// Computes the gradients of Q, K and V.
pub fn backward<T: Float + WithDType>(
    problem: &BackwardProblem,
    [q, k, v]: [Given<'_>; 3],
    o: Given<'_>,
    lse: &CpuStorage,
    d_o: Given<'_>,
) -> Result<[CpuStorage; 3]> {
    let shapes = [problem.d_q_shape(), problem.d_k_shape(), problem.d_v_shape()];
    let [of_q, of_k, of_v] = [contiguous(shapes[0])?, contiguous(shapes[1])?, contiguous(shapes[2])?];
    let [mut d_q, mut d_k, mut d_v] = [of_q, of_k, of_v].map(|layout| vec![T::default(); layout.span()]);
    let lse = lse.as_slice::<f32>()?;
    let args = BackwardArgs::new(
        [tensor::<T>("q", q)?, tensor("k", k)?, tensor("v", v)?],
        tensor("o", o)?,
        TensorRef::host(lse, contiguous(problem.forward().lse_shape())?).map_err(refusal)?,
        tensor("d_o", d_o)?,
        [
            TensorMut::host(&mut d_q, of_q).map_err(refusal)?,
            TensorMut::host(&mut d_k, of_k).map_err(refusal)?,
            TensorMut::host(&mut d_v, of_v).map_err(refusal)?,
        ],
    );
    let plan = problem.plan(&Device::Cpu).map_err(refusal)?;
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes()).map_err(refusal)?;
    plan.run(&Stream::Cpu, &mut workspace, args).map_err(refusal)?;
    Ok([d_q, d_k, d_v].map(T::to_cpu_storage_owned))
}

/// The memory that a tensor of candle's has, as a tensor of ours.
fn tensor<'a, T: Float + WithDType>(name: &'static str, (storage, layout): Given<'a>) -> Result<TensorRef<'a, T, 4>> {
    let data = storage.as_slice::<T>()?;
    let data = data.get(layout.start_offset()..).ok_or_else(|| beyond(name, layout, data.len()))?;
    TensorRef::host(data, ours(name, layout)?).map_err(refusal)
}
