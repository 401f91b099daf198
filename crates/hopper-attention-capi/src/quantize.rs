//! The quantiser: is it supported, plan, describe, run.

use std::ffi::c_char;

use hopper_attention::raw::RawArgs;
use hopper_attention::{Device, DeviceFacts, Operands, QuantizePlan, Quantizer, Result};

use crate::abi::{CUstream_st, hattn_device, hattn_quantize_args, hattn_quantize_problem};
use crate::convert;
use crate::handle::{self, Handle};
use crate::pass::{self, Pass};
use crate::status::{Outcome, hattn_status};

/// How Q, K and V are taken to HATTN_E4M3 on one device. Made once and run as often as wanted, by any threads and on any
/// streams of the device at once. Holds no device memory.
pub struct hattn_quantize_plan {
    plan: QuantizePlan,
}

impl Handle for hattn_quantize_plan {
    type Held = QuantizePlan;
    const WHAT: &'static str = "plan";
    const MADE_BY: &'static str = "hattn_quantize_plan_create";

    fn held(&self) -> &QuantizePlan {
        &self.plan
    }
}

impl From<QuantizePlan> for hattn_quantize_plan {
    fn from(plan: QuantizePlan) -> Self {
        Self { plan }
    }
}

struct Quantize {}

impl Pass for Quantize {
    type Given = hattn_quantize_problem;
    type Args = hattn_quantize_args;
    type Problem = Quantizer;
    type Plan = QuantizePlan;
    type Handle = hattn_quantize_plan;

    unsafe fn problem(given: &Self::Given) -> Outcome<Quantizer> {
        // SAFETY: the caller's promise.
        unsafe { convert::quantizer(given) }
    }

    fn plan(problem: &Quantizer, device: &Device) -> Result<QuantizePlan> {
        problem.plan(device)
    }

    fn plan_for(problem: &Quantizer, facts: &DeviceFacts) -> Result<QuantizePlan> {
        problem.plan_for(facts)
    }

    fn words(plan: &QuantizePlan) -> String {
        pass::words(plan.quantizer(), plan)
    }

    fn workspace_bytes(plan: &QuantizePlan) -> usize {
        plan.workspace_bytes()
    }

    fn operands(plan: &QuantizePlan) -> &Operands {
        plan.operands()
    }

    unsafe fn arguments(args: &Self::Args, operands: &Operands) -> Outcome<RawArgs> {
        // SAFETY: the caller's promise.
        unsafe { convert::quantize_arguments(args, operands) }
    }

    unsafe fn run(plan: &QuantizePlan, args: &RawArgs, stream: *mut CUstream_st) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { plan.run_raw(args, stream.cast()) }
    }
}

/// Whether hattn_quantize_plan_create would find kernels for the problem on the device; as hattn_forward_supported.
///
/// # Safety
/// `problem` is null, which is refused, or points to a struct of the size that it says, and so does its `forward`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_quantize_supported(
    problem: *const hattn_quantize_problem,
    device: hattn_device,
) -> hattn_status {
    // SAFETY: the caller's promise.
    unsafe { pass::supported::<Quantize>(problem, device) }
}

/// Picks kernels and loads them, and writes the plan to `*plan`; null there on failure. On a GPU this opens its primary
/// context, as hattn_forward_plan_create does.
///
/// # Safety
/// `problem` is as for hattn_quantize_supported; `plan` is null, which is refused, or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_quantize_plan_create(
    problem: *const hattn_quantize_problem,
    device: hattn_device,
    plan: *mut *mut hattn_quantize_plan,
) -> hattn_status {
    // SAFETY: the caller's promise.
    unsafe { pass::create::<Quantize>(problem, device, plan, |problem, device| Ok(problem.plan(device)?)) }
}

/// Frees a plan; null is fine. Work that was enqueued with it goes on.
///
/// # Safety
/// `plan` is null, or came from hattn_quantize_plan_create and is used nowhere, now or later.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_quantize_plan_destroy(plan: *mut hattn_quantize_plan) {
    // SAFETY: the caller's promise.
    unsafe { handle::destroy(plan) };
}

/// Says in words what the plan does and how, as hattn_forward_plan_describe.
///
/// # Safety
/// As for hattn_forward_plan_describe, with a plan of quantising.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_quantize_plan_describe(
    plan: *const hattn_quantize_plan,
    text: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> hattn_status {
    // SAFETY: the caller's promise.
    unsafe { pass::describe::<Quantize>(plan, text, capacity, length) }
}

/// Writes to `*bytes` how large a workspace the plan needs: none on the CPU.
///
/// # Safety
/// `plan` is null, which is refused, or a live plan; `bytes` is null, which is refused, or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_quantize_plan_workspace_size(
    plan: *const hattn_quantize_plan,
    bytes: *mut usize,
) -> hattn_status {
    // SAFETY: the caller's promise.
    unsafe { pass::workspace_size::<Quantize>(plan, bytes) }
}

/// Quantises what is given, under the rules of hattn_forward_run. What it writes may be read by a forward pass that is
/// enqueued on the same stream afterwards.
///
/// # Safety
/// `plan` is null, which is refused, or a live plan; `args` points to a struct of the size that it says or is null, which is
/// refused, and so do q, k, v, counts (where null is fine) and their tensors. Otherwise as for hattn_forward_run.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_quantize_run(
    plan: *const hattn_quantize_plan,
    args: *const hattn_quantize_args,
    stream: *mut CUstream_st,
) -> hattn_status {
    // SAFETY: the caller's promise.
    unsafe { pass::run::<Quantize>(plan, args, stream) }
}
