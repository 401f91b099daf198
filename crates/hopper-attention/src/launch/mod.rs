//! From addresses to work: what is given is checked once, described for the kernels, and enqueued (on the CPU: computed).
//! Every pass goes this one way; what differs is a [`Launch`].

mod backward;
mod check;
mod describe;
mod forward;
mod quantize;
mod raw;

use std::ffi::c_void;

use crate::cpu::{HostMut, HostRef};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::operand::Slot;
use crate::plan::{Planned, Target, not_on_a_gpu};

pub(crate) use check::Given;
#[cfg(feature = "cuda")]
pub(crate) use describe::KernelArgs;
pub(crate) use describe::describe;
pub use raw::{Place, RawArgs, RawTensor};

/// What a plan must tell for its pass to be launched.
pub(crate) trait Launch {
    /// What was chosen for a GPU.
    type Choice;

    /// Where it was planned, with what it reads, writes and needs there.
    fn planned(&self) -> &Planned<Self::Choice>;

    /// Whether every operand that is written is empty.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "asked before a launch"))]
    fn has_nothing_to_do(&self) -> bool;

    /// What the list of operands cannot say: which of the optional ones belong together. `is_given` tells of each whether it
    /// was given.
    fn check_together(&self, is_given: &dyn Fn(Slot) -> bool) -> Result<()> {
        let _ = is_given;
        Ok(())
    }

    /// Computes on the cores of this machine.
    ///
    /// # Safety
    /// As [`run_raw`], with arguments that were checked as it does.
    unsafe fn on_cpu(&self, args: &RawArgs) -> Result<()>;

    /// Enqueues in the thread's current context, which is the plan's.
    ///
    /// # Safety
    /// As [`run_raw`], with arguments that were checked as it does, and a choice that was made for this plan's problem.
    #[cfg(feature = "cuda")]
    unsafe fn on_gpu(&self, choice: &Self::Choice, args: &KernelArgs, stream: *mut c_void) -> Result<()>;
}

/// Whether what is given is what the plan's problem asks for.
pub(crate) fn check<'g, P: Launch>(plan: &P, given: impl Iterator<Item = Given<'g>> + Clone) -> Result<()> {
    check::operands(plan.planned(), given.clone())?;
    plan.check_together(&|slot| given.clone().any(|given| given.slot == slot))
}

/// Checks, and enqueues on the stream (on the CPU: computes).
///
/// # Safety
/// - Each tensor's memory is where it says, and valid from now until the work is done, for every element that its layout
///   reaches. What is read is initialised by then.
/// - The workspace is valid for as long, in the plan's place.
/// - Until then nothing writes what is read, and nothing else reads or writes what is written and the workspace.
/// - What is written and the workspace share no element with each other or with what is read.
/// - `stream` is a live `CUstream` (or `cudaStream_t`), or null for the default stream.
pub(crate) unsafe fn run_raw<P: Launch>(plan: &P, args: &RawArgs, stream: *mut c_void) -> Result<()> {
    check(plan, args.tensors.iter().map(Given::from))?;
    let Planned { target, operands, workspace_bytes } = plan.planned();
    match target {
        Target::Cpu => {
            check::apart(operands, args)?;
            // SAFETY: the caller's promise, and the checks above.
            unsafe { plan.on_cpu(args) }
        }
        Target::Gpu(gpu) => {
            let args = describe(args, *workspace_bytes)?;
            #[cfg(feature = "cuda")]
            {
                let device = gpu.device.as_ref().ok_or_else(|| not_on_a_gpu(target))?;
                if plan.has_nothing_to_do() {
                    return Ok(());
                }
                // The CUDA runtime inside the kernels' launchers launches into the thread's current context.
                let _current = device.make_current()?;
                device.check_stream(stream)?;
                // SAFETY: the caller's promise, and the checks above.
                unsafe { plan.on_gpu(&gpu.choice, &args, stream) }
            }
            #[cfg(not(feature = "cuda"))]
            {
                let _ = (gpu, args, stream);
                Err(not_on_a_gpu(target))
            }
        }
    }
}

impl RawArgs {
    /// An operand that the CPU reads; `None` where it was not given.
    ///
    /// # Safety
    /// As [`run_raw`], of which the operand's type and shape were checked.
    unsafe fn read<'a, T, const R: usize>(&self, slot: Slot) -> Option<HostRef<'a, T, R>> {
        let tensor = self.get(slot)?;
        // SAFETY: the caller's promise.
        Some(unsafe { HostRef::new(tensor.address as usize as *const T, tensor.layout.typed()?) })
    }

    /// An operand that the CPU writes; `None` where it was not given.
    ///
    /// # Safety
    /// As [`read`](Self::read).
    unsafe fn write<'a, T, const R: usize>(&self, slot: Slot) -> Option<HostMut<'a, T, R>> {
        let tensor = self.get(slot)?;
        // SAFETY: the caller's promise.
        Some(unsafe { HostMut::new(tensor.address as usize as *mut T, tensor.layout.typed()?) })
    }
}

/// An operand that the checks have found to be there.
fn required<T>(slot: Slot, operand: Option<T>) -> Result<T> {
    let missing = || Error::Value { what: slot.name(), got: "missing".into(), allowed: "the operand".into() };
    operand.ok_or_else(missing)
}

/// Why the CPU does not compute with a type.
fn not_on_the_cpu(got: DType) -> Error {
    Error::Dtype { what: "q, k and v", got, allowed: "f16, bf16, f32".into() }
}

/// Problems are checked to be this small; an error all the same, since a wrapped number would address wild memory.
#[cfg(feature = "cuda")]
fn small(what: &'static str, value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::Value { what, got: value.to_string(), allowed: "below 2^31".into() })
}

#[cfg(feature = "cuda")]
impl From<describe::Descriptor> for crate::sys::TensorDesc {
    fn from(descriptor: describe::Descriptor) -> Self {
        let describe::Descriptor { address, stride_batch, stride_row, stride_head } = descriptor;
        Self { address, stride_batch, stride_row, stride_head }
    }
}
