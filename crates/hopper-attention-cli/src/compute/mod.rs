//! Running a plan on host tensors and timing it, on the device that was chosen: any pass, by its list of operands.

mod buffer;
#[cfg(feature = "cuda")]
mod cuda;

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use hopper_attention::{
    Access, Args, BackwardPlan, Device, ForwardPlan, Operands, Presence, QuantizePlan, Stream, Workspace,
};

use crate::args::FileLayout;
use crate::operands::{QUANTISED, outputs};
use crate::values::{Tensors, Values, each};
use buffer::{Buffer, OnHost};
#[cfg(feature = "cuda")]
use cuda::{ListOnGpu, OnGpu};

/// A plan of any pass.
pub trait Plan {
    fn operands(&self) -> &Operands;
    fn workspace_bytes(&self) -> usize;
    fn run(&self, stream: &Stream, workspace: &mut Workspace<'_>, args: Args<'_>) -> hopper_attention::Result<()>;
}

macro_rules! plans {
    ($($plan:ty),*) => {$(
        impl Plan for $plan {
            fn operands(&self) -> &Operands {
                self.operands()
            }

            fn workspace_bytes(&self) -> usize {
                self.workspace_bytes()
            }

            fn run(
                &self,
                stream: &Stream,
                workspace: &mut Workspace<'_>,
                args: Args<'_>,
            ) -> hopper_attention::Result<()> {
                self.run(stream, workspace, args)
            }
        }
    )*};
}

plans!(ForwardPlan, BackwardPlan, QuantizePlan);

/// Computes `repeat` times, on a GPU after a run to warm up, and adds what is written to the tensors. Gives the median time:
/// wall time on a CPU, time between CUDA events on a GPU; copies are not counted.
pub fn compute(
    plan: &dyn Plan,
    device: &Device,
    layout: FileLayout,
    tensors: &mut Tensors,
    repeat: u32,
) -> Result<Duration> {
    for operand in outputs(plan.operands()) {
        let values = Values::unwritten(operand.dtype(), operand.shape()).with_context(|| operand.slot().to_string())?;
        tensors.insert(operand.slot(), values);
    }
    let stream = device.new_stream()?;
    let mut buffers = Vec::new();
    for (slot, values) in tensors {
        if let Some(operand) = plan.operands().find(*slot).filter(|operand| operand.presence() != Presence::Refused) {
            buffers.push((operand, buffer(values, &stream)?));
        }
    }
    let mut workspace = Workspace::alloc(&stream, plan.workspace_bytes())?;
    let mut run = || {
        let mut args = Args::new();
        for (operand, buffer) in &mut buffers {
            args = buffer.lend(args, operand, layout)?;
        }
        let start = Instant::now();
        plan.run(&stream, &mut workspace, args)?;
        Ok(start.elapsed())
    };
    let mut times = match &stream {
        #[cfg(feature = "cuda")]
        Stream::Cuda(stream) => cuda::times(stream, repeat, &mut run)?,
        _ => std::iter::repeat_with(&mut run).take(repeat as usize).collect::<Result<Vec<_>>>()?,
    };
    for (operand, buffer) in &mut buffers {
        if operand.access() == Access::Write {
            buffer.fetch()?;
        }
    }
    stream.synchronize()?;
    times.sort_unstable();
    Ok(times.get(times.len() / 2).copied().unwrap_or_default())
}

/// A host tensor where the stream's device reads and writes it.
fn buffer<'h>(values: &'h mut Values, stream: &Stream) -> Result<Box<dyn Buffer + 'h>> {
    Ok(match stream {
        #[cfg(feature = "cuda")]
        Stream::Cuda(stream) => match values {
            Values::I32(list) => Box::new(ListOnGpu::new(list, stream)?),
            values => each!(values, elements => Box::new(OnGpu::new(elements, stream)?)),
        },
        _ => each!(values, elements => Box::new(OnHost(elements))),
    })
}

/// Quantises q, k and v, which go by the names of values from then on.
pub fn quantise(plan: &QuantizePlan, device: &Device, layout: FileLayout, tensors: &mut Tensors) -> Result<()> {
    let rename = |tensors: &mut Tensors, from, to| tensors.remove(&from).map(|values| tensors.insert(to, values));
    for names in &QUANTISED {
        rename(tensors, names.tensor, names.values);
    }
    compute(plan, device, layout, tensors, 1)?;
    for names in &QUANTISED {
        rename(tensors, names.stored, names.tensor);
        rename(tensors, names.descale, names.factors);
    }
    Ok(())
}

/// Whether a device is a GPU.
pub fn on_gpu(device: &Device) -> bool {
    !matches!(device, Device::Cpu)
}

/// A device's name for the report.
pub fn device_name(device: &Device) -> String {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => device.to_string(),
        _ => {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            format!("cpu, {threads} threads")
        }
    }
}
