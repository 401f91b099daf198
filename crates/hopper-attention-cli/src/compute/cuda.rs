//! Running a plan on a GPU: copies in, timed runs, copies out.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use hopper_attention::cudarc::driver::sys::CUevent_flags;
use hopper_attention::cudarc::driver::{CudaSlice, CudaStream};
use hopper_attention::{CudaDevice, Device, ForwardArgs, ForwardPlan, Stream, TensorMut, TensorRef, Workspace};

use super::{Computed, Layouts, median};
use crate::input::{Qkv, Value};

/// Computes once to warm up, then `repeat` times between events. `o` and `lse` hold what the device's copies begin with.
pub fn forward<T: Value>(
    device: &CudaDevice,
    plan: &ForwardPlan,
    layouts: &Layouts,
    qkv: &Qkv<T>,
    mut o: Vec<T>,
    mut lse: Vec<f32>,
    repeat: u32,
) -> Result<Computed<T>> {
    let handle = Device::Cuda(device.clone()).new_stream()?;
    let Stream::Cuda(stream) = &handle else { bail!("a GPU gave a stream of the CPU") };
    let [q, k, v] = &qkv.data;
    let (q, k, v) = (upload(stream, q)?, upload(stream, k)?, upload(stream, v)?);
    let (mut device_o, mut device_lse) = (upload(stream, &o)?, upload(stream, &lse)?);
    let mut workspace = Workspace::alloc(&handle, plan.workspace_bytes())?;

    let mut run = || -> Result<()> {
        let args = ForwardArgs {
            q: TensorRef::cuda(q.slice(..), layouts.q)?,
            k: TensorRef::cuda(k.slice(..), layouts.k)?,
            v: TensorRef::cuda(v.slice(..), layouts.v)?,
            o: TensorMut::cuda(device_o.slice_mut(..), layouts.o)?,
            lse: Some(TensorMut::cuda(device_lse.slice_mut(..), layouts.lse)?),
        };
        Ok(plan.run(&handle, &mut workspace, args)?)
    };
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

    let copied = "copying from the GPU";
    if !o.is_empty() {
        stream.memcpy_dtoh(&device_o.slice(..o.len()), &mut o).context(copied)?;
    }
    if !lse.is_empty() {
        stream.memcpy_dtoh(&device_lse.slice(..lse.len()), &mut lse).context(copied)?;
    }
    handle.synchronize()?;
    Ok(Computed { o, lse, time: median(times?) })
}

/// Copies values to the device. An empty tensor has no memory there; one element stands in for it.
fn upload<T: Value>(stream: &Arc<CudaStream>, values: &[T]) -> Result<CudaSlice<T>> {
    let stand_in = [T::zeroed()];
    stream.clone_htod(if values.is_empty() { &stand_in[..] } else { values }).context("copying to the GPU")
}
