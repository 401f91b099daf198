//! The forward pass: is it supported, plan, describe, run.

use std::ffi::c_char;

use hopper_attention::raw::RawArgs;
use hopper_attention::{Device, DeviceFacts, ForwardPlan, ForwardProblem, Operands, Result};

use crate::abi::{CUstream_st, hattn_device, hattn_forward_args, hattn_forward_problem};
use crate::convert;
use crate::handle::live;
use crate::pass::{self, pass};
use crate::status::{Outcome, hattn_status};
use crate::tuning::hattn_tuning;

pass! {
    Forward,
    hattn_forward_problem -> ForwardProblem by |given| convert::forward_problem(given),
    hattn_forward_args by convert::forward_arguments,
    ForwardPlan of problem;

    /// How one problem is computed on one device. Made once and run as often as wanted, by any threads and on any streams of
    /// the device at once. Holds no device memory.
    struct hattn_forward_plan;

    /// Whether hattn_forward_plan_create would find a kernel for the problem on the device: HATTN_OK,
    /// HATTN_ERROR_UNSUPPORTED, HATTN_ERROR_NO_DEVICE, or what is wrong with the problem. Opens no context and loads nothing.
    ///
    /// # Safety
    /// `problem` is null, which is refused, or points to a struct of the size that it says.
    fn hattn_forward_supported;

    /// Picks a kernel and loads it, and writes the plan to `*plan`; null there on failure. On a GPU this opens its primary
    /// context, the one that cudaSetDevice uses, and leaves the thread's current context as it was.
    ///
    /// # Safety
    /// `problem` is as for hattn_forward_supported; `plan` is null, which is refused, or valid for writing.
    fn hattn_forward_plan_create;

    also {
        /// As hattn_forward_plan_create, but with the kernel that the tuning holds for this problem on this card, where it holds
        /// one. The tuning may be freed afterwards.
        ///
        /// # Safety
        /// As for hattn_forward_plan_create; `tuning` is null, which is refused, or a live tuning.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn hattn_forward_plan_create_tuned(
            problem: *const hattn_forward_problem,
            device: hattn_device,
            tuning: *const hattn_tuning,
            plan: *mut *mut hattn_forward_plan,
        ) -> hattn_status {
            // SAFETY: the caller's promise.
            unsafe {
                pass::create::<Forward>(problem, device, plan, |problem, device| Ok(problem.plan_tuned(device, live(tuning)?)?))
            }
        }
    }

    /// Frees a plan; null is fine. Work that was enqueued with it goes on.
    ///
    /// # Safety
    /// `plan` is null, or came from hattn_forward_plan_create and is used nowhere, now or later.
    fn hattn_forward_plan_destroy;

    /// Says in words what the plan computes and how. `*length` becomes the length of the text without its final 0; as much
    /// of it as fits `capacity` is written to `text`, always with a final 0.
    ///
    /// # Safety
    /// `plan` is null, which is refused, or a live plan; `text` is valid for writing `capacity` bytes, null when that is 0;
    /// `length` is null, when it is not wanted, or valid for writing.
    fn hattn_forward_plan_describe;

    /// Writes to `*bytes` how large a workspace the plan needs: exact, and often 0.
    ///
    /// # Safety
    /// `plan` is null, which is refused, or a live plan; `bytes` is null, which is refused, or valid for writing.
    fn hattn_forward_plan_workspace_size;

    /// Computes the plan's problem. Types, shapes, strides, alignment and places are checked before anything is launched;
    /// what the addresses lead to cannot be.
    ///
    /// On a GPU it is enqueued on the stream, null for the default one, without allocating, waiting or loading anything, so
    /// that it can be captured in a graph; the thread's current context is left as it was. Memory must stay as it is until
    /// the stream has done the work. On the CPU it is done on return, on all cores; the stream is not looked at, and outputs
    /// must have a range of addresses of their own.
    ///
    /// # Safety
    /// `plan` is null, which is refused, or a live plan; `args` and its tensors are null, which is refused but for `lse`, `scale_o`, `amax`
    /// and the factors, or
    /// point to structs of the sizes that they say. Each tensor's memory is valid where it says for every element that its
    /// shape and strides reach, and so is the workspace. Nothing writes the inputs, and nothing else uses outputs and
    /// workspace, until the work is done; outputs and workspace share no element with anything else. The stream is live.
    fn hattn_forward_run;
}
