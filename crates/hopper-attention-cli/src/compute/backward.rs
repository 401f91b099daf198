//! The gradients of what was computed.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use hopper_attention::{BackwardArgs, BackwardPlan, BackwardProblem, Stream, TensorMut, TensorRef, Workspace};

use super::{Computed, Layouts, filled, median};
use crate::args::FileLayout;
use crate::input::{GivenGradients, Qkv, Value};
use crate::request::Choice;

/// What came out, each laid out as the input that it is the gradient of.
pub struct Gradients<T> {
    /// d_q, d_k and d_v.
    pub data: [Vec<T>; 3],
    /// As [`Computed::time`].
    pub time: Duration,
}

/// What a backward pass reads.
pub(super) struct Inputs<'a, T> {
    pub qkv: &'a Qkv<T>,
    pub given: &'a GivenGradients<T>,
    pub forward: &'a Computed<T>,
}

/// Computes `repeat` times, from what the forward pass gave.
pub fn backward<T: Value>(
    choice: &Choice,
    problem: &BackwardProblem,
    layout: FileLayout,
    (qkv, given, forward): (&Qkv<T>, &GivenGradients<T>, &Computed<T>),
    repeat: u32,
) -> Result<Gradients<T>> {
    let plan = choice.backward.as_ref().context("the gradients were not planned")?;
    let layouts = Layouts::new(problem.forward(), layout)?;
    let inputs = Inputs { qkv, given, forward };
    // NaN, as in the forward.
    let poisoned = |elements| filled(T::from_f32(f32::NAN), elements);
    let data = [poisoned(layouts.q.span())?, poisoned(layouts.k.span())?, poisoned(layouts.v.span())?];
    match &choice.device {
        #[cfg(feature = "cuda")]
        hopper_attention::Device::Cuda(device) => super::cuda::backward(device, plan, &layouts, &inputs, data, repeat),
        _ => on_cpu(plan, &layouts, &inputs, data, repeat),
    }
}

fn on_cpu<T: Value>(
    plan: &BackwardPlan,
    layouts: &Layouts,
    inputs: &Inputs<'_, T>,
    mut data: [Vec<T>; 3],
    repeat: u32,
) -> Result<Gradients<T>> {
    let stream = Stream::Cpu;
    let mut workspace = Workspace::alloc(&stream, plan.workspace_bytes())?;
    let Inputs { qkv, given, forward } = inputs;
    let ([q, k, v], [d_q, d_k, d_v]) = (&qkv.data, &mut data);
    let mut times = Vec::new();
    for _ in 0..repeat {
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
        plan.run(&stream, &mut workspace, args)?;
        times.push(start.elapsed());
    }
    Ok(Gradients { data, time: median(times) })
}
