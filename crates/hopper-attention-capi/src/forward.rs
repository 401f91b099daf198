//! The forward pass: the functions of C and their documentation. `pass.rs` has what they do.

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

    /// How one forward problem is computed on one device: which kernel, which tiles, in which order. It holds no device memory.
    /// A plan is made once and run as often as wanted. Many threads may run it at once, on any streams of the device.
    struct hattn_forward_plan;

    /// Whether hattn_forward_plan_create would find a kernel for the problem on the device. Creates no context and loads
    /// nothing.
    ///
    /// HATTN_OK: it would. HATTN_ERROR_UNSUPPORTED: there is no kernel. HATTN_ERROR_NO_DEVICE: there is no such device.
    /// Any other status says what is wrong with the problem.
    ///
    /// # Safety
    /// `problem` is null, or points to a struct of the size that the struct says.
    fn hattn_forward_supported;

    /// Makes a plan: chooses a kernel and loads it. Writes the plan to `*plan`, or null on failure.
    ///
    /// On a GPU this retains the primary context, the one that cudaSetDevice uses. The thread's current context stays as it
    /// was. hattn_forward_plan_destroy frees the plan.
    ///
    /// # Safety
    /// `problem` is null, or points to a struct of the size that the struct says. `plan` is null, or can be written.
    fn hattn_forward_plan_create;

    also {
        /// The same as hattn_forward_plan_create, with the kernel that was measured to be the fastest.
        ///
        /// If the tuning has no entry for this problem on this card, the plan is the same as without it. The tuning may be
        /// destroyed after the call.
        ///
        /// # Safety
        /// `problem` and `plan` are as for hattn_forward_plan_create. `tuning` is null or live.
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

    /// Frees a plan. `plan` may be null. Work that was enqueued with the plan still completes.
    ///
    /// # Safety
    /// `plan` is null, or live and not used by any other call, now or later.
    fn hattn_forward_plan_destroy;

    /// Describes the plan: what it computes, with which kernel, and in which order.
    ///
    /// Writes the length of the text to `*length`, in bytes without the final 0. Writes as much of the text as fits to
    /// `text`, with a final 0. `text` may be null if `capacity` is 0. `length` may be null.
    ///
    /// # Safety
    /// `plan` is null or live. `capacity` bytes of `text` and all of `length` can be written, unless they are null.
    fn hattn_forward_plan_describe;

    /// Writes the size of the workspace that each run of the plan needs, in bytes, to `*bytes`. It is often 0.
    ///
    /// # Safety
    /// `plan` is null or live. `bytes` is null, or can be written.
    fn hattn_forward_plan_workspace_size;

    /// Computes the plan's problem.
    ///
    /// The call checks types, shapes, strides, alignment, devices and the size of the workspace before it launches anything.
    /// It cannot check the memory behind an address.
    ///
    /// On a GPU:
    /// - The work is enqueued on `stream`. A null stream is the default stream.
    /// - The call allocates nothing, loads nothing and does not wait for the GPU. A CUDA graph can capture it.
    /// - The thread's current context stays as it was.
    ///
    /// On the CPU:
    /// - All cores compute, and the work is done on return. `stream` is not used.
    /// - The address range of an output, gaps included, must overlap no other tensor's.
    ///
    /// # Safety
    /// - `plan` is null or live.
    /// - `args` and what it points to are null, or structs of the sizes that the structs say.
    /// - Every element that a tensor's shape and strides reach is valid memory on the tensor's device. So is the workspace.
    /// - Until the work is done, this memory stays valid. Nothing writes the inputs. Nothing else uses the outputs and the
    ///   workspace.
    /// - The outputs and the workspace share no element with each other or with an input.
    /// - `stream` is null or live. On the CPU it may be anything.
    fn hattn_forward_run;
}
