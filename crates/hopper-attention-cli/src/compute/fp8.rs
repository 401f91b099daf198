//! Attention in FP8: q, k and v are quantised on the way.

use std::time::Instant;

use anyhow::{Result, bail};
#[cfg(feature = "cuda")]
use hopper_attention::Device;
use hopper_attention::reference::Tensor;
use hopper_attention::{
    Descale, E4M3, ForwardProblem, Fp8ForwardArgs, Fp8Output, Layout, Quantize, QuantizeArgs, QuantizePlan, Stream,
    TensorMut, TensorRef, Workspace,
};

use super::{Computed, Layouts, filled, median};
use crate::args::FileLayout;
use crate::input::{Qkv, Value};
use crate::request::{Choice, Request};

/// What q, k and v were quantised to, in the file's order of dimensions, with their factors `[batch, heads, blocks]`.
pub struct Operands {
    pub(super) stored: [Vec<E4M3>; 3],
    pub(super) descale: [Vec<f32>; 3],
}

/// Quantises once, then computes `repeat` times.
pub fn forward<T: Value + Fp8Output>(
    choice: &Choice,
    request: &Request,
    qkv: &Qkv<T>,
    repeat: u32,
) -> Result<Computed<T>> {
    let problem = &request.problem;
    let layouts = Layouts::new(problem, request.layout)?;
    let Some(quantise) = &choice.quantise else { bail!("a problem of {} without a quantiser", problem.dtype()) };
    let (o, lse) = (filled(T::from_f32(f32::NAN), layouts.o.span())?, filled(f32::NAN, layouts.lse.span())?);
    let of_factors = factors(problem)?;
    match &choice.device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            super::cuda::forward_fp8(device, (quantise, &choice.plan), &layouts, of_factors, qkv, (o, lse), repeat)
        }
        _ => {
            let operands = quantised(quantise, &layouts, of_factors, qkv)?;
            let computed = on_cpu(choice, &layouts, (&operands, of_factors), (o, lse), repeat)?;
            Ok(Computed { operands: Some(operands), ..computed })
        }
    }
}

fn on_cpu<T: Value + Fp8Output>(
    choice: &Choice,
    layouts: &Layouts,
    (operands, of_factors): (&Operands, [Layout<3>; 3]),
    (mut o, mut lse): (Vec<T>, Vec<f32>),
    repeat: u32,
) -> Result<Computed<T>> {
    let stream = Stream::Cpu;
    let mut workspace = Workspace::alloc(&stream, choice.plan.workspace_bytes())?;
    let [q, k, v] = &operands.stored;
    let [descale_q, descale_k, descale_v] = &operands.descale;
    let [of_q, of_k, of_v] = of_factors;
    let mut times = Vec::new();
    for _ in 0..repeat {
        let args = Fp8ForwardArgs {
            q: TensorRef::host(q, layouts.q)?,
            k: TensorRef::host(k, layouts.k)?,
            v: TensorRef::host(v, layouts.v)?,
            descale_q: TensorRef::host(descale_q, of_q)?,
            descale_k: TensorRef::host(descale_k, of_k)?,
            descale_v: TensorRef::host(descale_v, of_v)?,
            o: TensorMut::host(&mut o, layouts.o)?,
            lse: Some(TensorMut::host(&mut lse, layouts.lse)?),
            scale_o: None,
            amax: None,
        };
        let start = Instant::now();
        choice.plan.run_fp8(&stream, &mut workspace, args)?;
        times.push(start.elapsed());
    }
    Ok(Computed { o, lse, time: median(times), operands: None })
}

fn quantised<T: Value>(
    plan: &QuantizePlan,
    layouts: &Layouts,
    [of_q, of_k, of_v]: [Layout<3>; 3],
    qkv: &Qkv<T>,
) -> Result<Operands> {
    let zero = E4M3::from_bits(0);
    let [q, k, v] = &qkv.data;
    let [mut stored_q, mut stored_k, mut stored_v] =
        [filled(zero, q.len())?, filled(zero, k.len())?, filled(zero, v.len())?];
    let [mut descale_q, mut descale_k, mut descale_v] =
        [filled(0.0, of_q.span())?, filled(0.0, of_k.span())?, filled(0.0, of_v.span())?];
    let args = QuantizeArgs {
        q: Some(tensor(q, &mut stored_q, layouts.q, &mut descale_q, of_q)?),
        k: Some(tensor(k, &mut stored_k, layouts.k, &mut descale_k, of_k)?),
        v: Some(tensor(v, &mut stored_v, layouts.v, &mut descale_v, of_v)?),
        counts: None,
    };
    plan.run(&Stream::Cpu, &mut Workspace::alloc(&Stream::Cpu, plan.workspace_bytes())?, args)?;
    Ok(Operands { stored: [stored_q, stored_k, stored_v], descale: [descale_q, descale_k, descale_v] })
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

/// Where the factors of q, k and v lie.
fn factors(problem: &ForwardProblem) -> hopper_attention::Result<[Layout<3>; 3]> {
    Ok([
        Layout::contiguous(problem.descale_q_shape())?,
        Layout::contiguous(problem.descale_k_shape())?,
        Layout::contiguous(problem.descale_v_shape())?,
    ])
}

impl Operands {
    /// The real values that they stand for.
    pub fn real(&self, problem: &ForwardProblem, layout: FileLayout) -> Result<[Tensor; 3]> {
        let Layouts { q, k, v, .. } = Layouts::new(problem, layout)?;
        let ([stored_q, stored_k, stored_v], [of_q, of_k, of_v]) = (&self.stored, factors(problem)?);
        let [descale_q, descale_k, descale_v] = &self.descale;
        let scaling = problem.scaling_value().unwrap_or_default();
        let real = |stored: &[E4M3], layout: Layout<4>, descale: &[f32], of: Layout<3>, group: usize| {
            Tensor::from_strided(stored, &layout).descaled(|[batch, token, head]| {
                let place = of.offset(scaling.index(batch, head, group, token));
                place.map_or(f32::NAN, |place| descale[place])
            })
        };
        Ok([
            real(stored_q, q, descale_q, of_q, problem.group_size()),
            real(stored_k, k, descale_k, of_k, 1),
            real(stored_v, v, descale_v, of_v, 1),
        ])
    }
}
