//! The quantiser: the functions of C and their documentation. `pass.rs` has what they do.

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

    /// How Q, K and V are quantised to HATTN_E4M3 on one device. Plans are used as hattn_forward_plan.
    struct hattn_quantize_plan;

    /// Whether hattn_quantize_plan_create would find kernels for the problem on the device, as hattn_forward_supported.
    ///
    /// # Safety
    /// `problem` and its `forward` are null, or point to structs of the sizes that the structs say.
    fn hattn_quantize_supported;

    /// Makes a plan: chooses kernels and loads them. Writes the plan to `*plan`, or null on failure.
    ///
    /// It uses contexts as hattn_forward_plan_create does. hattn_quantize_plan_destroy frees the plan.
    ///
    /// # Safety
    /// `problem` is as for hattn_quantize_supported. `plan` is null, or can be written.
    fn hattn_quantize_plan_create;

    /// Frees a plan. `plan` may be null. Work that was enqueued with the plan still completes.
    ///
    /// # Safety
    /// `plan` is null, or live and not used by any other call, now or later.
    fn hattn_quantize_plan_destroy;

    /// Describes the plan, as hattn_forward_plan_describe.
    ///
    /// # Safety
    /// As for hattn_forward_plan_describe.
    fn hattn_quantize_plan_describe;

    /// Writes the size of the workspace that each run of the plan needs, in bytes, to `*bytes`. It is 0 on the CPU.
    ///
    /// # Safety
    /// `plan` is null or live. `bytes` is null, or can be written.
    fn hattn_quantize_plan_workspace_size;

    /// Quantises the given tensors. Checks, streams and lifetimes are those of hattn_forward_run. A forward pass on the same
    /// stream may read the results without waiting.
    ///
    /// # Safety
    /// As for hattn_forward_run. The outputs are `stored`, `counts`, and `descale` unless it is given.
    fn hattn_quantize_run;
}
