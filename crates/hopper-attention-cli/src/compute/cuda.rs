//! Running a plan on a GPU: copies in, timed runs, copies out.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use hopper_attention::cudarc::driver::sys::CUevent_flags;
use hopper_attention::cudarc::driver::{CudaSlice, CudaStream};
use hopper_attention::{
    BackwardArgs, BackwardPlan, CudaDevice, Descale, Device, E4M3, Element, ForwardArgs, ForwardPlan, Fp8ForwardArgs,
    Fp8Output, Layout, Quantize, QuantizeArgs, QuantizePlan, Stream, TensorMut, TensorRef, Workspace,
};

use super::tensors::{Computed, Gradients, Inputs, Layouts, Operands, median};
use crate::values::{Qkv, Value};

/// Computes once to warm up, then `repeat` times between events. `computed` holds what the device's copies begin with.
pub fn forward<T: Value>(
    device: &CudaDevice,
    plan: &ForwardPlan,
    layouts: &Layouts,
    qkv: &Qkv<T>,
    mut computed: Computed<T>,
    repeat: u32,
) -> Result<Computed<T>> {
    let (handle, stream) = &new_stream(device)?;
    let [q, k, v] = upload_three(stream, &qkv.data)?;
    let (mut device_o, mut device_lse) = (upload(stream, &computed.o)?, upload(stream, &computed.lse)?);
    let mut workspace = Workspace::alloc(handle, plan.workspace_bytes())?;

    let mut run = || -> Result<()> {
        let args = ForwardArgs {
            q: TensorRef::cuda(q.slice(..), layouts.q)?,
            k: TensorRef::cuda(k.slice(..), layouts.k)?,
            v: TensorRef::cuda(v.slice(..), layouts.v)?,
            o: TensorMut::cuda(device_o.slice_mut(..), layouts.o)?,
            lse: Some(TensorMut::cuda(device_lse.slice_mut(..), layouts.lse)?),
        };
        Ok(plan.run(handle, &mut workspace, args)?)
    };
    computed.time = timed(handle, stream, repeat, &mut run)?;
    download(stream, &device_o, &mut computed.o)?;
    download(stream, &device_lse, &mut computed.lse)?;
    handle.synchronize()?;
    Ok(computed)
}

/// As [`forward`], of operands that are quantised here first; their factors lie as `of_factors`.
pub fn forward_fp8<T: Value + Fp8Output>(
    device: &CudaDevice,
    (quantise, plan): (&QuantizePlan, &ForwardPlan),
    layouts: &Layouts,
    of_factors: [Layout<3>; 3],
    qkv: &Qkv<T>,
    mut computed: Computed<T>,
    repeat: u32,
) -> Result<Computed<T>> {
    let (handle, stream) = &new_stream(device)?;
    let mut operands = Operands::zeros(qkv, of_factors)?;
    let [mut q, mut k, mut v] = upload_three(stream, &operands.stored)?;
    let [mut descale_q, mut descale_k, mut descale_v] = upload_three(stream, &operands.descale)?;
    let [of_q, of_k, of_v] = of_factors;
    {
        let [values_q, values_k, values_v] = upload_three(stream, &qkv.data)?;
        let mut workspace = Workspace::alloc(handle, quantise.workspace_bytes())?;
        let args = QuantizeArgs {
            q: Some(quantize(&values_q, &mut q, layouts.q, &mut descale_q, of_q)?),
            k: Some(quantize(&values_k, &mut k, layouts.k, &mut descale_k, of_k)?),
            v: Some(quantize(&values_v, &mut v, layouts.v, &mut descale_v, of_v)?),
            counts: None,
        };
        quantise.run(handle, &mut workspace, args)?;
    }
    let (mut device_o, mut device_lse) = (upload(stream, &computed.o)?, upload(stream, &computed.lse)?);
    let mut workspace = Workspace::alloc(handle, plan.workspace_bytes())?;

    let mut run = || -> Result<()> {
        let args = Fp8ForwardArgs {
            q: TensorRef::cuda(q.slice(..), layouts.q)?,
            k: TensorRef::cuda(k.slice(..), layouts.k)?,
            v: TensorRef::cuda(v.slice(..), layouts.v)?,
            descale_q: TensorRef::cuda(descale_q.slice(..), of_q)?,
            descale_k: TensorRef::cuda(descale_k.slice(..), of_k)?,
            descale_v: TensorRef::cuda(descale_v.slice(..), of_v)?,
            o: TensorMut::cuda(device_o.slice_mut(..), layouts.o)?,
            lse: Some(TensorMut::cuda(device_lse.slice_mut(..), layouts.lse)?),
            scale_o: None,
            amax: None,
        };
        Ok(plan.run_fp8(handle, &mut workspace, args)?)
    };
    computed.time = timed(handle, stream, repeat, &mut run)?;
    download(stream, &device_o, &mut computed.o)?;
    download(stream, &device_lse, &mut computed.lse)?;
    download_three(stream, [&q, &k, &v], &mut operands.stored)?;
    download_three(stream, [&descale_q, &descale_k, &descale_v], &mut operands.descale)?;
    handle.synchronize()?;
    computed.operands = Some(operands);
    Ok(computed)
}

fn quantize<'a, T: Value>(
    values: &'a CudaSlice<T>,
    stored: &'a mut CudaSlice<E4M3>,
    layout: Layout<4>,
    descale: &'a mut CudaSlice<f32>,
    of_descale: Layout<3>,
) -> Result<Quantize<'a, T>> {
    Ok(Quantize {
        values: TensorRef::cuda(values.slice(..), layout)?,
        stored: TensorMut::cuda(stored.slice_mut(..), layout)?,
        descale: Descale::FromAmax(TensorMut::cuda(descale.slice_mut(..), of_descale)?),
    })
}

/// As [`forward`], for the gradients: `gradients` holds what the device's copies begin with.
pub fn backward<T: Value>(
    device: &CudaDevice,
    plan: &BackwardPlan,
    layouts: &Layouts,
    inputs: &Inputs<'_, T>,
    mut gradients: Gradients<T>,
    repeat: u32,
) -> Result<Gradients<T>> {
    let (handle, stream) = &new_stream(device)?;
    let Inputs { qkv, given, forward } = inputs;
    let [q, k, v] = upload_three(stream, &qkv.data)?;
    let (o, lse, d_o) = (upload(stream, &forward.o)?, upload(stream, &forward.lse)?, upload(stream, &given.d_o)?);
    let d_lse = given.d_lse.as_ref().map(|d_lse| upload(stream, d_lse)).transpose()?;
    let [mut d_q, mut d_k, mut d_v] = upload_three(stream, &gradients.data)?;
    let mut workspace = Workspace::alloc(handle, plan.workspace_bytes())?;

    let mut run = || -> Result<()> {
        let args = BackwardArgs {
            q: TensorRef::cuda(q.slice(..), layouts.q)?,
            k: TensorRef::cuda(k.slice(..), layouts.k)?,
            v: TensorRef::cuda(v.slice(..), layouts.v)?,
            o: TensorRef::cuda(o.slice(..), layouts.o)?,
            lse: TensorRef::cuda(lse.slice(..), layouts.lse)?,
            d_o: TensorRef::cuda(d_o.slice(..), layouts.o)?,
            d_lse: d_lse.as_ref().map(|d_lse| TensorRef::cuda(d_lse.slice(..), layouts.lse)).transpose()?,
            d_q: TensorMut::cuda(d_q.slice_mut(..), layouts.q)?,
            d_k: TensorMut::cuda(d_k.slice_mut(..), layouts.k)?,
            d_v: TensorMut::cuda(d_v.slice_mut(..), layouts.v)?,
        };
        Ok(plan.run(handle, &mut workspace, args)?)
    };
    gradients.time = timed(handle, stream, repeat, &mut run)?;
    download_three(stream, [&d_q, &d_k, &d_v], &mut gradients.data)?;
    handle.synchronize()?;
    Ok(gradients)
}

/// A stream of its own, as the library takes it and as cudarc does.
fn new_stream(device: &CudaDevice) -> Result<(Stream, Arc<CudaStream>)> {
    match Device::Cuda(device.clone()).new_stream()? {
        Stream::Cuda(stream) => Ok((Stream::Cuda(stream.clone()), stream)),
        Stream::Cpu => bail!("a GPU gave a stream of the CPU"),
    }
}

/// Runs once to warm up, then `repeat` times between events; the median.
fn timed(
    handle: &Stream,
    stream: &Arc<CudaStream>,
    repeat: u32,
    run: &mut dyn FnMut() -> Result<()>,
) -> Result<Duration> {
    run()?;
    let mut events = Vec::new();
    for _ in 0..repeat {
        let event = || stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).context("recording an event");
        let start = event()?;
        run()?;
        events.push((start, event()?));
    }
    handle.synchronize()?;
    let times: Result<Vec<Duration>> = events
        .iter()
        .map(|(start, end)| {
            let milliseconds = start.elapsed_ms(end).context("reading events")?;
            Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
        })
        .collect();
    Ok(median(times?))
}

/// Enqueues copies of three tensors to the host.
fn download_three<T: Element>(
    stream: &Arc<CudaStream>,
    device: [&CudaSlice<T>; 3],
    host: &mut [Vec<T>; 3],
) -> Result<()> {
    device.into_iter().zip(host).try_for_each(|(device, host)| download(stream, device, host))
}

/// Enqueues a copy to the host.
fn download<T: Element>(stream: &Arc<CudaStream>, device: &CudaSlice<T>, host: &mut [T]) -> Result<()> {
    if host.is_empty() {
        return Ok(());
    }
    stream.memcpy_dtoh(&device.slice(..host.len()), host).context("copying from the GPU")
}

/// Copies the values of three tensors to the device.
fn upload_three<T: Element>(stream: &Arc<CudaStream>, [a, b, c]: &[Vec<T>; 3]) -> Result<[CudaSlice<T>; 3]> {
    Ok([upload(stream, a)?, upload(stream, b)?, upload(stream, c)?])
}

/// Copies values to the device. An empty tensor has no memory there; one element stands in for it.
fn upload<T: Element>(stream: &Arc<CudaStream>, values: &[T]) -> Result<CudaSlice<T>> {
    let stand_in = [T::from_f32(0.0)];
    stream.clone_htod(if values.is_empty() { &stand_in[..] } else { values }).context("copying to the GPU")
}
