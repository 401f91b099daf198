//! The quantiser: is it supported, plan, describe, run.

use std::ffi::c_char;

use hopper_attention::raw::RawArgs;
use hopper_attention::{Device, DeviceFacts, Operands, QuantizePlan, Quantizer, Result};

use crate::abi::{CUstream_st, hattn_device, hattn_quantize_args, hattn_quantize_problem};
use crate::convert;
use crate::pass::pass;
use crate::status::{Outcome, hattn_status};

pass! {
    Quantize,
    hattn_quantize_problem -> Quantizer by |given| {
        // SAFETY: the caller's promise.
        unsafe { convert::quantizer(given) }
    },
    hattn_quantize_args by convert::quantize_arguments,
    QuantizePlan of quantizer;

    /// How Q, K and V are taken to HATTN_E4M3 on one device. Made once and run as often as wanted, by any threads and on any
    /// streams of the device at once. Holds no device memory.
    struct hattn_quantize_plan;

    /// Whether hattn_quantize_plan_create would find kernels for the problem on the device; as hattn_forward_supported.
    ///
    /// # Safety
    /// `problem` is null, which is refused, or points to a struct of the size that it says, and so does its `forward`.
    fn hattn_quantize_supported;

    /// Picks kernels and loads them, and writes the plan to `*plan`; null there on failure. On a GPU this opens its primary
    /// context, as hattn_forward_plan_create does.
    ///
    /// # Safety
    /// `problem` is as for hattn_quantize_supported; `plan` is null, which is refused, or valid for writing.
    fn hattn_quantize_plan_create;

    /// Frees a plan; null is fine. Work that was enqueued with it goes on.
    ///
    /// # Safety
    /// `plan` is null, or came from hattn_quantize_plan_create and is used nowhere, now or later.
    fn hattn_quantize_plan_destroy;

    /// Says in words what the plan does and how, as hattn_forward_plan_describe.
    ///
    /// # Safety
    /// As for hattn_forward_plan_describe, with a plan of quantising.
    fn hattn_quantize_plan_describe;

    /// Writes to `*bytes` how large a workspace the plan needs: none on the CPU.
    ///
    /// # Safety
    /// `plan` is null, which is refused, or a live plan; `bytes` is null, which is refused, or valid for writing.
    fn hattn_quantize_plan_workspace_size;

    /// Quantises what is given, under the rules of hattn_forward_run. What it writes may be read by a forward pass that is
    /// enqueued on the same stream afterwards.
    ///
    /// # Safety
    /// `plan` is null, which is refused, or a live plan; `args` points to a struct of the size that it says or is null, which is
    /// refused, and so do q, k, v, counts (where null is fine) and their tensors. Otherwise as for hattn_forward_run.
    fn hattn_quantize_run;
}
