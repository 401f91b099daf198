//! Runs in host memory.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Layout, Result, WithDType};
use hopper_attention::{
    Args, BackwardProblem, Device, Element, Float, ForwardProblem, Slot, Stream, TensorMut, TensorRef, Workspace, bf16,
};

use crate::blocks::Lists;
use crate::error::refusal;
use crate::offsets::is_packed;
use crate::problem::{beyond, by_rank, by_type, contiguous, dims, elements, ours};

/// A tensor of candle's in host memory.
pub type Given<'a> = (&'a CpuStorage, &'a Layout);

/// Computes O, and the LSE if the problem wants it.
pub fn forward<T: Float + WithDType>(
    problem: &ForwardProblem,
    lists: Lists<'_>,
    [q, k, v]: [Given<'_>; 3],
    [sinks, slopes, bias]: [Option<Given<'_>>; 3],
) -> Result<(CpuStorage, Option<CpuStorage>)> {
    let ([is_packed, _], o_shape, lse_shape) = (is_packed(lists.packing), problem.o_shape(), problem.lse_shape());
    let (of_o, of_lse) = (dims(&o_shape, is_packed), dims(&lse_shape, is_packed));
    let (mut o, mut lse) = (vec![T::default(); elements(of_o)?], vec![0f32; elements(of_lse)?]);
    let mut args = read::<T>(Args::new(), Slot::Q, q)?;
    args = read::<T>(read::<T>(args, Slot::K, k)?, Slot::V, v)?;
    args = read_bias(read_slopes(read_sinks(args, sinks)?, slopes)?, bias)?;
    args = write(args, Slot::O, &mut o, of_o)?;
    if problem.wants_lse() {
        args = write(args, Slot::Lse, &mut lse, of_lse)?;
    }
    let args = lists.lend(args)?;
    let plan = problem.plan(&Device::Cpu).map_err(refusal)?;
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes()).map_err(refusal)?;
    plan.run(&Stream::Cpu, &mut workspace, args).map_err(refusal)?;
    Ok((T::to_cpu_storage_owned(o), problem.wants_lse().then_some(CpuStorage::F32(lse))))
}

/// Computes the gradients of Q, K and V, and those of the sinks and of the bias if the problem wants them.
pub fn backward<T: Float + WithDType>(
    problem: &BackwardProblem,
    lists: Lists<'_>,
    [q, k, v]: [Given<'_>; 3],
    [sinks, slopes, bias]: [Option<Given<'_>>; 3],
    o: Given<'_>,
    lse: &CpuStorage,
    d_o: Given<'_>,
) -> Result<([CpuStorage; 3], [Option<CpuStorage>; 2])> {
    let shapes = [problem.d_q_shape(), problem.d_k_shape(), problem.d_v_shape()];
    let [q_is_packed, kv_is_packed] = is_packed(lists.packing);
    let (of_q, of_k) = (dims(&shapes[0], q_is_packed), dims(&shapes[1], kv_is_packed));
    let of_v = dims(&shapes[2], kv_is_packed);
    let mut d_q = vec![T::default(); elements(of_q)?];
    let mut d_k = vec![T::default(); elements(of_k)?];
    let mut d_v = vec![T::default(); elements(of_v)?];
    let mut d_sinks = vec![0f32; problem.dims().heads_q];
    let bias_shape = problem.forward().bias_shape();
    let d_bias = bias.filter(|_| problem.wants_d_bias());
    let mut d_bias = d_bias.map(|(bias, _)| by_type!(bias.dtype(), zeros(elements(&bias_shape)?))).transpose()?;
    let lse_shape = problem.forward().lse_shape();
    let (lse, of_lse) = (lse.as_slice::<f32>()?, dims(&lse_shape, q_is_packed));
    let mut args = read_bias(read_slopes(Args::new(), slopes)?, bias)?;
    for (slot, tensor) in [(Slot::Q, q), (Slot::K, k), (Slot::V, v), (Slot::O, o), (Slot::DO, d_o)] {
        args = read::<T>(args, slot, tensor)?;
    }
    args = by_rank!(of_lse.len(), R => {
        args.read(Slot::Lse, TensorRef::host(lse, contiguous::<R>(of_lse)?).map_err(refusal)?)
    });
    args = write(args, Slot::DQ, &mut d_q, of_q)?;
    args = write(args, Slot::DK, &mut d_k, of_k)?;
    args = write(args, Slot::DV, &mut d_v, of_v)?;
    if problem.wants_d_sinks() {
        let layout = contiguous::<1>(&[problem.dims().heads_q])?;
        args = read_sinks(args, sinks)?.write(Slot::DSinks, TensorMut::host(&mut d_sinks, layout).map_err(refusal)?);
    }
    args = match &mut d_bias {
        Some(CpuStorage::F16(d_bias)) => write(args, Slot::DBias, d_bias, &bias_shape)?,
        Some(CpuStorage::BF16(d_bias)) => write(args, Slot::DBias, d_bias, &bias_shape)?,
        Some(CpuStorage::F32(d_bias)) => write(args, Slot::DBias, d_bias, &bias_shape)?,
        // No bias has another type.
        _ => args,
    };
    let args = lists.lend(args)?;
    let plan = problem.plan(&Device::Cpu).map_err(refusal)?;
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes()).map_err(refusal)?;
    plan.run(&Stream::Cpu, &mut workspace, args).map_err(refusal)?;
    let d_sinks = problem.wants_d_sinks().then_some(CpuStorage::F32(d_sinks));
    Ok(([d_q, d_k, d_v].map(T::to_cpu_storage_owned), [d_sinks, d_bias]))
}

/// Adds the sinks, if there are any: one dimension without gaps, f32 or bf16. The problem has refused other types.
fn read_sinks<'a>(args: Args<'a>, sinks: Option<Given<'a>>) -> Result<Args<'a>> {
    fn typed<'a, T: Element + WithDType>(args: Args<'a>, (storage, layout): Given<'a>) -> Result<Args<'a>> {
        let data = storage.as_slice::<T>()?;
        let data = data.get(layout.start_offset()..).ok_or_else(|| beyond("sinks", layout, data.len()))?;
        Ok(args.read(Slot::Sinks, TensorRef::host(data, contiguous::<1>(layout.dims())?).map_err(refusal)?))
    }
    match sinks {
        None => Ok(args),
        Some(sinks) if sinks.0.dtype() == DType::BF16 => typed::<bf16>(args, sinks),
        Some(sinks) => typed::<f32>(args, sinks),
    }
}

/// Adds the bias, if there is one: f16, bf16 or f32. The problem has refused other types.
fn read_bias<'a>(args: Args<'a>, bias: Option<Given<'a>>) -> Result<Args<'a>> {
    match bias {
        None => Ok(args),
        Some(bias) => by_type!(bias.0.dtype(), read(args, Slot::Bias, bias)),
    }
}

/// Adds ALiBi's slopes, if there are any: one or two dimensions without gaps, f32.
fn read_slopes<'a>(args: Args<'a>, slopes: Option<Given<'a>>) -> Result<Args<'a>> {
    let Some((storage, layout)) = slopes else { return Ok(args) };
    let data = storage.as_slice::<f32>()?;
    let data = data.get(layout.start_offset()..).ok_or_else(|| beyond("alibi_slopes", layout, data.len()))?;
    let slot = Slot::AlibiSlopes;
    Ok(match layout.dims().len() {
        1 => args.read(slot, TensorRef::host(data, contiguous::<1>(layout.dims())?).map_err(refusal)?),
        _ => args.read(slot, TensorRef::host(data, contiguous::<2>(layout.dims())?).map_err(refusal)?),
    })
}

/// Adds the memory that a tensor of candle's has.
fn read<'a, T: Float + WithDType>(args: Args<'a>, slot: Slot, (storage, layout): Given<'a>) -> Result<Args<'a>> {
    let (name, data) = (slot.name(), storage.as_slice::<T>()?);
    let data = data.get(layout.start_offset()..).ok_or_else(|| beyond(name, layout, data.len()))?;
    by_rank!(layout.dims().len(), R => {
        Ok(args.read(slot, TensorRef::host(data, ours::<R>(slot, layout)?).map_err(refusal)?))
    })
}

/// Adds the memory of an output.
fn write<'a, T: Element>(args: Args<'a>, slot: Slot, memory: &'a mut [T], shape: &[usize]) -> Result<Args<'a>> {
    by_rank!(shape.len(), R => {
        Ok(args.write(slot, TensorMut::host(memory, contiguous::<R>(shape)?).map_err(refusal)?))
    })
}

/// Memory of candle's for an output.
fn zeros<T: Float + WithDType>(elements: usize) -> Result<CpuStorage> {
    Ok(T::to_cpu_storage_owned(vec![T::default(); elements]))
}
