//! The gradients: are they supported, plan, describe, run.

use std::ffi::c_char;

use hopper_attention::raw::RawArgs;
use hopper_attention::{BackwardPlan, BackwardProblem, Device, DeviceFacts, Operands, Result};

use crate::abi::{CUstream_st, hattn_backward_args, hattn_backward_problem, hattn_device};
use crate::convert;
use crate::pass::pass;
use crate::status::{Outcome, hattn_status};

pass! {
    Backward,
    hattn_backward_problem -> BackwardProblem by |given| convert::backward_problem(given),
    hattn_backward_args by convert::backward_arguments,
    BackwardPlan of problem;

    /// How the gradients of one problem are computed on one device. Made once and run as often as wanted, by any threads and
    /// on any streams of the device at once. Holds no device memory.
    struct hattn_backward_plan;

    /// Whether hattn_backward_plan_create would find a kernel for the problem on the device; as hattn_forward_supported.
    ///
    /// # Safety
    /// `problem` is null, which is refused, or points to a struct of the size that it says.
    fn hattn_backward_supported;

    /// Picks a kernel and loads it, and writes the plan to `*plan`; null there on failure. On a GPU this opens its primary
    /// context, as hattn_forward_plan_create does.
    ///
    /// # Safety
    /// `problem` is as for hattn_backward_supported; `plan` is null, which is refused, or valid for writing.
    fn hattn_backward_plan_create;

    /// Frees a plan; null is fine. Work that was enqueued with it goes on.
    ///
    /// # Safety
    /// `plan` is null, or came from hattn_backward_plan_create and is used nowhere, now or later.
    fn hattn_backward_plan_destroy;

    /// Says in words what the plan computes and how, as hattn_forward_plan_describe does.
    ///
    /// # Safety
    /// `plan` is null, which is refused, or a live plan; `text` is valid for writing `capacity` bytes, null when that is 0;
    /// `length` is null, when it is not wanted, or valid for writing.
    fn hattn_backward_plan_describe;

    /// Writes to `*bytes` how large a workspace the plan needs: exact. 0 on the CPU; on a GPU it holds the sums of dQ in f32.
    ///
    /// # Safety
    /// `plan` is null, which is refused, or a live plan; `bytes` is null, which is refused, or valid for writing.
    fn hattn_backward_plan_workspace_size;

    /// Computes the gradients of the plan's problem. Outputs are overwritten, not added to. Checks, streams and lifetimes are
    /// those of hattn_forward_run.
    ///
    /// # Safety
    /// As for hattn_forward_run, with a live plan of hattn_backward_plan_create; `d_lse` is the tensor that may be null, and
    /// the outputs are `d_q`, `d_k` and `d_v`.
    fn hattn_backward_run;
}
