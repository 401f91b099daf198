//! Running a plan on host data and timing it, on the device that was chosen.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod tensors;

pub use tensors::{Computed, GRADIENTS, Gradients};

use anyhow::{Context, Result};
use hopper_attention::{BackwardProblem, Device, Fp8Output};

use crate::args::FileLayout;
use crate::request::{Choice, Request};
use crate::values::{GivenGradients, Qkv, Value};
use tensors::{Inputs, Layouts, factors};

/// Computes `repeat` times.
pub fn forward<T: Value>(choice: &Choice, request: &Request, qkv: &Qkv<T>, repeat: u32) -> Result<Computed<T>> {
    let layouts = Layouts::new(&request.problem, request.layout)?;
    let computed = Computed::poisoned(&layouts)?;
    match &choice.device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => cuda::forward(device, &choice.plan, &layouts, qkv, computed, repeat),
        _ => cpu::forward(&choice.plan, &layouts, qkv, computed, repeat),
    }
}

/// Quantises q, k and v once, then computes `repeat` times.
pub fn forward_fp8<T: Value + Fp8Output>(
    choice: &Choice,
    request: &Request,
    qkv: &Qkv<T>,
    repeat: u32,
) -> Result<Computed<T>> {
    let problem = &request.problem;
    let layouts = Layouts::new(problem, request.layout)?;
    let quantise = choice.quantise.as_ref();
    let quantise = quantise.with_context(|| format!("a problem of {} without a quantiser", problem.dtype()))?;
    let plans = (quantise, &choice.plan);
    let computed = Computed::poisoned(&layouts)?;
    let of_factors = factors(problem)?;
    match &choice.device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => cuda::forward_fp8(device, plans, &layouts, of_factors, qkv, computed, repeat),
        _ => cpu::forward_fp8(plans, &layouts, of_factors, qkv, computed, repeat),
    }
}

/// Computes the gradients `repeat` times, from what the forward pass gave.
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
    let gradients = Gradients::poisoned(&layouts)?;
    match &choice.device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => cuda::backward(device, plan, &layouts, &inputs, gradients, repeat),
        _ => cpu::backward(plan, &layouts, &inputs, gradients, repeat),
    }
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
