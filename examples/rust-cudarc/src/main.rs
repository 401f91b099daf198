//! Computes a step of a small model on the GPU, or on the CPU where there is none, and checks it.

use anyhow::{Result, ensure};
use hopper_attention::Device;
use hopper_attention_example_cudarc::{Call, Outcome, PlanCache, check, cpu, step};

fn main() -> Result<()> {
    let (first, second) = (step(1)?, step(2)?);
    #[cfg(feature = "cuda")]
    if let Some(ordinal) = hopper_attention_example_cudarc::gpu::find() {
        return on_gpu(ordinal, &first, &second);
    }
    let why = if cfg!(feature = "cuda") { "no GPU for its kernels" } else { "built without the feature cuda" };
    println!("computing on the CPU: {why}");
    let cache = PlanCache::new(Device::cpu(), 8);
    for calls in [&first, &second] {
        judge(calls, &cpu::run(&cache, calls)?)?;
    }
    println!("{} plans for {} calls", cache.len(), first.len() + second.len());
    Ok(())
}

#[cfg(feature = "cuda")]
fn on_gpu(ordinal: usize, first: &[Call], second: &[Call]) -> Result<()> {
    use hopper_attention_example_cudarc::gpu::{Gpu, Step};

    let gpu = Gpu::open(ordinal)?;
    println!("computing on {}", gpu.device.info());
    let cache = PlanCache::new(Device::Cuda(gpu.device.clone()), 8);
    let mut step = Step::new(&gpu, &cache, first)?;
    step.capture()?;
    for calls in [first, second] {
        step.write(calls)?;
        step.replay()?;
        judge(calls, &step.outcomes()?)?;
    }
    println!("{} plans and one graph for {} calls", cache.len(), first.len() + second.len());
    Ok(())
}

fn judge(calls: &[Call], outcomes: &[Outcome]) -> Result<()> {
    for (call, outcome) in calls.iter().zip(outcomes) {
        let report = check(call, outcome)?;
        println!("{}: {report}", call.problem);
        ensure!(report.passed(), "an error exceeds the tolerance");
    }
    Ok(())
}
