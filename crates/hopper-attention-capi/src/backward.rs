//! The gradients: the functions of C and their documentation. `pass.rs` has what they do.

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

    /// How the gradients of one problem are computed on one device. Plans are used as hattn_forward_plan.
    struct hattn_backward_plan;

    /// Whether hattn_backward_plan_create would find kernels for the problem on the device, as hattn_forward_supported.
    ///
    /// # Safety
    /// `problem` is null, or points to a struct of the size that the struct says.
    fn hattn_backward_supported;

    /// Makes a plan: chooses kernels and loads them. Writes the plan to `*plan`, or null on failure.
    ///
    /// It uses contexts as hattn_forward_plan_create does. hattn_backward_plan_destroy frees the plan.
    ///
    /// # Safety
    /// `problem` is as for hattn_backward_supported. `plan` is null, or can be written.
    fn hattn_backward_plan_create;

    /// Frees a plan. `plan` may be null. Work that was enqueued with the plan still completes.
    ///
    /// # Safety
    /// `plan` is null, or live and not used by any other call, now or later.
    fn hattn_backward_plan_destroy;

    /// Describes the plan, as hattn_forward_plan_describe.
    ///
    /// # Safety
    /// As for hattn_forward_plan_describe.
    fn hattn_backward_plan_describe;

    /// Writes the size of the workspace that each run of the plan needs, in bytes, to `*bytes`. It is 0 on the CPU. On a GPU
    /// the workspace holds the sums of dQ in single precision.
    ///
    /// # Safety
    /// `plan` is null or live. `bytes` is null, or can be written.
    fn hattn_backward_plan_workspace_size;

    /// Computes the gradients of the plan's problem. Outputs are overwritten, not added to. Checks, streams and lifetimes are
    /// those of hattn_forward_run.
    ///
    /// # Safety
    /// As for hattn_forward_run. The outputs are `d_q`, `d_k` and `d_v`.
    fn hattn_backward_run;
}
