//! What the forward pass, the backward pass and the quantiser have in common.
//!
//! Each has the same six functions: supported, plan_create, plan_destroy, plan_describe, plan_workspace_size, run. What they
//! do is here, once, as generic functions over a [`Pass`]. `forward.rs`, `backward.rs` and `quantize.rs` have the types, the
//! names and the documentation. They declare the functions by [`pass!`].

use std::ffi::c_char;

use hopper_attention::raw::RawArgs;
use hopper_attention::{Device, DeviceFacts, Operands, Result};

use crate::abi::{CUstream_st, Versioned, hattn_device, read};
use crate::devices;
use crate::handle::{self, Handle, live};
use crate::status::{Outcome, entry, hattn_status};

/// A pass of the ABI: its structs, and the calls of the safe crate that compute it.
pub(crate) trait Pass {
    /// The struct of the problem.
    type Given: Versioned;
    /// The struct of the arguments.
    type Args: Versioned;
    /// The problem of the safe crate.
    type Problem;
    /// The plan of the safe crate.
    type Plan;
    /// What C holds of a plan.
    type Handle: Handle<Held = Self::Plan> + From<Self::Plan>;

    /// The problem that a struct describes, with all of the safe crate's checks.
    ///
    /// # Safety
    /// What the struct points to is as [`read`] asks.
    unsafe fn problem(given: &Self::Given) -> Outcome<Self::Problem>;

    /// A plan for an open device.
    fn plan(problem: &Self::Problem, device: &Device) -> Result<Self::Plan>;

    /// A plan for the facts of a GPU. Nothing is loaded.
    fn plan_for(problem: &Self::Problem, facts: &DeviceFacts) -> Result<Self::Plan>;

    /// The description of a plan: its problem, its kernel and its order.
    fn words(plan: &Self::Plan) -> String;

    /// The size of the workspace that a run needs.
    fn workspace_bytes(plan: &Self::Plan) -> usize;

    /// The tensors that a run reads and writes.
    fn operands(plan: &Self::Plan) -> &Operands;

    /// The arguments of a run, from their struct.
    ///
    /// # Safety
    /// What the struct points to is as [`read`] asks.
    unsafe fn arguments(args: &Self::Args, operands: &Operands) -> Outcome<RawArgs>;

    /// Checks the arguments and runs the plan.
    ///
    /// # Safety
    /// As `run_raw` of the plan.
    unsafe fn run(plan: &Self::Plan, args: &RawArgs, stream: *mut CUstream_st) -> Result<()>;
}

/// Whether a plan would find a kernel.
///
/// # Safety
/// `problem` is null, which is refused, or as [`read`] asks, and so is what it points to.
pub(crate) unsafe fn supported<P: Pass>(problem: *const P::Given, device: hattn_device) -> hattn_status {
    entry(|| {
        // SAFETY: the caller's promise.
        let problem = unsafe { P::problem(&read("problem", problem)?) }?;
        match devices::facts(device)? {
            Some(facts) => P::plan_for(&problem, &facts)?,
            // A plan for the CPU loads nothing.
            None => P::plan(&problem, &Device::cpu())?,
        };
        Ok(())
    })
}

/// Makes a plan with `make` and writes its handle to `*plan`.
///
/// # Safety
/// `problem` is as for [`supported`]; `plan` is null, which is refused, or valid for writing.
pub(crate) unsafe fn create<P: Pass>(
    problem: *const P::Given,
    device: hattn_device,
    plan: *mut *mut P::Handle,
    make: impl FnOnce(&P::Problem, &Device) -> Outcome<P::Plan>,
) -> hattn_status {
    entry(|| {
        let made = || {
            // SAFETY: the caller's promise.
            let problem = unsafe { P::problem(&read("problem", problem)?) }?;
            Ok(make(&problem, &devices::open(device)?)?.into())
        };
        // SAFETY: the caller's promise.
        unsafe { handle::create(plan, made) }
    })
}

/// Writes the description of a plan.
///
/// # Safety
/// `plan` is null, which is refused, or live; the rest is as for [`handle::put_text`].
pub(crate) unsafe fn describe<P: Pass>(
    plan: *const P::Handle,
    text: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> hattn_status {
    // SAFETY: the caller's promise.
    entry(|| unsafe { handle::put_text(&P::words(live(plan)?), text, capacity, length) })
}

/// Writes the size of the workspace that a run needs.
///
/// # Safety
/// `plan` is null, which is refused, or live; `bytes` is null, which is refused, or valid for writing.
pub(crate) unsafe fn workspace_size<P: Pass>(plan: *const P::Handle, bytes: *mut usize) -> hattn_status {
    // SAFETY: the caller's promise.
    entry(|| unsafe { handle::put("bytes", bytes, "the size", P::workspace_bytes(live(plan)?)) })
}

/// Computes the plan's problem.
///
/// # Safety
/// `plan` is null, which is refused, or live; `args` is as [`read`] asks, and so is what it points to; the rest is as for
/// `run_raw` of the plan.
pub(crate) unsafe fn run<P: Pass>(
    plan: *const P::Handle,
    args: *const P::Args,
    stream: *mut CUstream_st,
) -> hattn_status {
    entry(|| {
        // SAFETY: the caller's promise.
        unsafe {
            let plan = live(plan)?;
            let args = P::arguments(&read("args", args)?, P::operands(plan))?;
            Ok(P::run(plan, &args, stream)?)
        }
    })
}

/// Declares items, and keeps their text in the constant `TEXT` of a type. cbindgen does not expand macros, so
/// `tests/header.rs` gives it the texts.
///
/// `written! { hattn_thing: pub struct hattn_thing; }` becomes
///
/// ```text
/// pub struct hattn_thing;
/// impl hattn_thing {
///     pub const TEXT: &'static str = "pub struct hattn_thing;";
/// }
/// ```
macro_rules! written {
    ($name:ident: $($item:tt)*) => {
        $($item)*

        impl $name {
            /// The declarations in Rust.
            #[doc(hidden)]
            pub const TEXT: &'static str = stringify!($($item)*);
        }
    };
}
pub(crate) use written;

/// Declares a pass: its [`Pass`], its opaque plan, and its six functions, in the order of the header.
///
/// ```text
/// pass! {
///     Forward,                                                       // the type that implements Pass
///     hattn_forward_problem -> ForwardProblem by |given| ..,         // the problem: struct, type, conversion
///     hattn_forward_args by convert::forward_arguments,              // the arguments: struct, conversion
///     ForwardPlan of problem;                                        // the plan, and its method that gives the problem
///
///     struct hattn_forward_plan;                                     // names, each with its documentation
///     fn hattn_forward_supported;
///     ..
/// }
/// ```
///
/// A name becomes a function that calls the generic one of this file:
///
/// ```text
/// #[unsafe(no_mangle)]
/// pub unsafe extern "C" fn hattn_forward_supported(
///     problem: *const hattn_forward_problem,
///     device: hattn_device,
/// ) -> hattn_status {
///     unsafe { crate::pass::supported::<Forward>(problem, device) }
/// }
/// ```
///
/// `also { .. }` has a function that only this pass has.
macro_rules! pass {
    (
        $pass:ident,
        $given:ident -> $problem:ident by |$from:ident| $to_problem:expr,
        $args:ident by $to_arguments:path,
        $plan:ident of $problem_of:ident;

        $(#[$of_handle:meta])* struct $handle:ident;
        $(#[$of_supported:meta])* fn $supported:ident;
        $(#[$of_create:meta])* fn $create:ident;
        $(also { $($also:tt)* })?
        $(#[$of_destroy:meta])* fn $destroy:ident;
        $(#[$of_describe:meta])* fn $describe:ident;
        $(#[$of_workspace_size:meta])* fn $workspace_size:ident;
        $(#[$of_run:meta])* fn $run:ident;
    ) => {
        $crate::pass::written! {
            $handle:

            $(#[$of_handle])*
            pub struct $handle {
                plan: $plan,
            }

            $(#[$of_supported])*
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $supported(problem: *const $given, device: hattn_device) -> hattn_status {
                // SAFETY: the caller's promise.
                unsafe { crate::pass::supported::<$pass>(problem, device) }
            }

            $(#[$of_create])*
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $create(
                problem: *const $given,
                device: hattn_device,
                plan: *mut *mut $handle,
            ) -> hattn_status {
                // SAFETY: the caller's promise.
                unsafe {
                    crate::pass::create::<$pass>(problem, device, plan, |problem, device| Ok(problem.plan(device)?))
                }
            }

            $($($also)*)?

            $(#[$of_destroy])*
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $destroy(plan: *mut $handle) {
                // SAFETY: the caller's promise.
                unsafe { crate::handle::destroy(plan) };
            }

            $(#[$of_describe])*
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $describe(
                plan: *const $handle,
                text: *mut c_char,
                capacity: usize,
                length: *mut usize,
            ) -> hattn_status {
                // SAFETY: the caller's promise.
                unsafe { crate::pass::describe::<$pass>(plan, text, capacity, length) }
            }

            $(#[$of_workspace_size])*
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $workspace_size(plan: *const $handle, bytes: *mut usize) -> hattn_status {
                // SAFETY: the caller's promise.
                unsafe { crate::pass::workspace_size::<$pass>(plan, bytes) }
            }

            $(#[$of_run])*
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $run(
                plan: *const $handle,
                args: *const $args,
                stream: *mut CUstream_st,
            ) -> hattn_status {
                // SAFETY: the caller's promise.
                unsafe { crate::pass::run::<$pass>(plan, args, stream) }
            }
        }

        impl $crate::handle::Handle for $handle {
            type Held = $plan;
            const WHAT: &'static str = "plan";
            const MADE_BY: &'static str = stringify!($create);

            fn held(&self) -> &$plan {
                &self.plan
            }
        }

        impl From<$plan> for $handle {
            fn from(plan: $plan) -> Self {
                Self { plan }
            }
        }

        struct $pass;

        impl $crate::pass::Pass for $pass {
            type Given = $given;
            type Args = $args;
            type Problem = $problem;
            type Plan = $plan;
            type Handle = $handle;

            unsafe fn problem($from: &$given) -> Outcome<$problem> {
                $to_problem
            }

            fn plan(problem: &$problem, device: &Device) -> Result<$plan> {
                problem.plan(device)
            }

            fn plan_for(problem: &$problem, facts: &DeviceFacts) -> Result<$plan> {
                problem.plan_for(facts)
            }

            fn words(plan: &$plan) -> String {
                format!("{}: {plan}", plan.$problem_of())
            }

            fn workspace_bytes(plan: &$plan) -> usize {
                plan.workspace_bytes()
            }

            fn operands(plan: &$plan) -> &Operands {
                plan.operands()
            }

            unsafe fn arguments(args: &$args, operands: &Operands) -> Outcome<RawArgs> {
                // SAFETY: the caller's promise.
                unsafe { $to_arguments(args, operands) }
            }

            unsafe fn run(plan: &$plan, args: &RawArgs, stream: *mut CUstream_st) -> Result<()> {
                // SAFETY: the caller's promise.
                unsafe { plan.run_raw(args, stream.cast()) }
            }
        }
    };
}

pub(crate) use pass;
