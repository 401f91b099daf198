//! Running a plan on the CPU, by the wall clock.

use std::time::{Duration, Instant};

use anyhow::Result;
use hopper_attention::{
    BackwardArgs, BackwardPlan, Descale, E4M3, ForwardArgs, ForwardPlan, Fp8ForwardArgs, Fp8Output, Layout, Quantize,
    QuantizeArgs, QuantizePlan, Stream, TensorMut, TensorRef, Workspace,
};

use super::tensors::{Computed, Gradients, Inputs, Layouts, Operands, median};
use crate::values::{Qkv, Value};

/// Computes `repeat` times, into what `computed` begins with.
pub fn forward<T: Value>(
    plan: &ForwardPlan,
    layouts: &Layouts,
    qkv: &Qkv<T>,
    mut computed: Computed<T>,
    repeat: u32,
) -> Result<Computed<T>> {
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?;
    let [q, k, v] = &qkv.data;
    computed.time = timed(repeat, || {
        let args = ForwardArgs {
            q: TensorRef::host(q, layouts.q)?,
            k: TensorRef::host(k, layouts.k)?,
            v: TensorRef::host(v, layouts.v)?,
            o: TensorMut::host(&mut computed.o, layouts.o)?,
            lse: Some(TensorMut::host(&mut computed.lse, layouts.lse)?),
        };
        let start = Instant::now();
        plan.run(&Stream::Cpu, &mut workspace, args)?;
        Ok(start.elapsed())
    })?;
    Ok(computed)
}

/// As [`forward`], of operands that are quantised here first; their factors lie as `of_factors`.
pub fn forward_fp8<T: Value + Fp8Output>(
    (quantise, plan): (&QuantizePlan, &ForwardPlan),
    layouts: &Layouts,
    of_factors: [Layout<3>; 3],
    qkv: &Qkv<T>,
    mut computed: Computed<T>,
    repeat: u32,
) -> Result<Computed<T>> {
    let operands = quantised(quantise, layouts, of_factors, qkv)?;
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?;
    let [q, k, v] = &operands.stored;
    let [descale_q, descale_k, descale_v] = &operands.descale;
    let [of_q, of_k, of_v] = of_factors;
    computed.time = timed(repeat, || {
        let args = Fp8ForwardArgs {
            q: TensorRef::host(q, layouts.q)?,
            k: TensorRef::host(k, layouts.k)?,
            v: TensorRef::host(v, layouts.v)?,
            descale_q: TensorRef::host(descale_q, of_q)?,
            descale_k: TensorRef::host(descale_k, of_k)?,
            descale_v: TensorRef::host(descale_v, of_v)?,
            o: TensorMut::host(&mut computed.o, layouts.o)?,
            lse: Some(TensorMut::host(&mut computed.lse, layouts.lse)?),
            scale_o: None,
            amax: None,
        };
        let start = Instant::now();
        plan.run_fp8(&Stream::Cpu, &mut workspace, args)?;
        Ok(start.elapsed())
    })?;
    computed.operands = Some(operands);
    Ok(computed)
}

fn quantised<T: Value>(
    plan: &QuantizePlan,
    layouts: &Layouts,
    of_factors: [Layout<3>; 3],
    qkv: &Qkv<T>,
) -> Result<Operands> {
    let mut operands = Operands::zeros(qkv, of_factors)?;
    let [q, k, v] = &qkv.data;
    let [stored_q, stored_k, stored_v] = &mut operands.stored;
    let [descale_q, descale_k, descale_v] = &mut operands.descale;
    let [of_q, of_k, of_v] = of_factors;
    let args = QuantizeArgs {
        q: Some(tensor(q, stored_q, layouts.q, descale_q, of_q)?),
        k: Some(tensor(k, stored_k, layouts.k, descale_k, of_k)?),
        v: Some(tensor(v, stored_v, layouts.v, descale_v, of_v)?),
        counts: None,
    };
    plan.run(&Stream::Cpu, &mut Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?, args)?;
    Ok(operands)
}

fn tensor<'a, T: Value>(
    values: &'a [T],
    stored: &'a mut [E4M3],
    layout: Layout<4>,
    descale: &'a mut [f32],
    of_descale: Layout<3>,
) -> Result<Quantize<'a, T>> {
    Ok(Quantize {
        values: TensorRef::host(values, layout)?,
        stored: TensorMut::host(stored, layout)?,
        descale: Descale::FromAmax(TensorMut::host(descale, of_descale)?),
    })
}

/// As [`forward`], for the gradients.
pub fn backward<T: Value>(
    plan: &BackwardPlan,
    layouts: &Layouts,
    inputs: &Inputs<'_, T>,
    mut gradients: Gradients<T>,
    repeat: u32,
) -> Result<Gradients<T>> {
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?;
    let Inputs { qkv, given, forward } = inputs;
    let ([q, k, v], [d_q, d_k, d_v]) = (&qkv.data, &mut gradients.data);
    gradients.time = timed(repeat, || {
        let args = BackwardArgs {
            q: TensorRef::host(q, layouts.q)?,
            k: TensorRef::host(k, layouts.k)?,
            v: TensorRef::host(v, layouts.v)?,
            o: TensorRef::host(&forward.o, layouts.o)?,
            lse: TensorRef::host(&forward.lse, layouts.lse)?,
            d_o: TensorRef::host(&given.d_o, layouts.o)?,
            d_lse: given.d_lse.as_ref().map(|d_lse| TensorRef::host(d_lse, layouts.lse)).transpose()?,
            d_q: TensorMut::host(d_q, layouts.q)?,
            d_k: TensorMut::host(d_k, layouts.k)?,
            d_v: TensorMut::host(d_v, layouts.v)?,
        };
        let start = Instant::now();
        plan.run(&Stream::Cpu, &mut workspace, args)?;
        Ok(start.elapsed())
    })?;
    Ok(gradients)
}

/// The median of `repeat` runs, each of which says how long it took.
fn timed(repeat: u32, run: impl FnMut() -> Result<Duration>) -> Result<Duration> {
    let times: Result<Vec<Duration>> = std::iter::repeat_with(run).take(repeat as usize).collect();
    Ok(median(times?))
}
