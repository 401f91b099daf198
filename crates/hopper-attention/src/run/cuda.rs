//! A run on a GPU from cudarc's views.
//!
//! The kernel outlives the borrows of its memory. The order of the lines below makes that sound. The crate's documentation
//! (section "Soundness") has the argument.

use std::sync::Arc;

use arrayvec::ArrayVec;
use cudarc::driver::{CudaStream, DevicePtrMut, SyncOnDrop};

use super::Args;
use crate::device::{driver, refuse_capture, same_context};
use crate::error::{Error, Result};
use crate::launch::{Launch, Place, RawArgs, RawTensor, describe};
use crate::operand::MAX_OPERANDS;
use crate::plan::{Gpu, not_on_a_gpu};
use crate::tensor::Memory;
use crate::workspace::Workspace;

/// Enqueues the plan's kernels. The caller has checked the operands, the stream's context and the workspace against the plan.
pub(super) fn run<P: Launch>(
    plan: &P,
    gpu: &Gpu<P::Choice>,
    stream: &Arc<CudaStream>,
    workspace: &mut Workspace<'_>,
    mut args: Args<'_>,
) -> Result<()> {
    let device = gpu.device.as_ref().ok_or_else(|| not_on_a_gpu(&plan.planned().target))?;
    for (slot, tensor) in args.0.iter() {
        let context = match &tensor.memory {
            Memory::Cuda(view) => view.context(),
            Memory::CudaMut(view) => view.context(),
            Memory::Host(..) => return Err(on_the_host(slot.name(), stream)),
        };
        same_context(slot.name(), context, stream)?;
    }
    if plan.has_nothing_to_do() {
        return Ok(());
    }
    // The launchers use the CUDA runtime, which launches into the thread's current context.
    let _current = device.make_current()?;
    if stream.context().is_managing_stream_synchronization() {
        let allowed = "capturing with cudarc's event tracking off, or on the only stream of its context";
        refuse_capture(stream, "launching while cudarc tracks events", allowed)?;
    }

    // A plan that needs no workspace leaves it alone. Otherwise the stream would wait for earlier uses of the workspace.
    let bytes = workspace.bytes();
    let mut scratch = if plan.planned().workspace_bytes > 0 { workspace.as_cuda() } else { None };
    let mut raw = RawArgs::new();
    // Each `device_ptr` call below makes the stream wait for earlier uses of the memory, and returns a guard. A guard
    // records this use when it is dropped. So every guard must live from here to the end of the launch.
    let mut guards: ArrayVec<SyncOnDrop<'_>, { MAX_OPERANDS + 1 }> = ArrayVec::new();
    if let Some(scratch) = &mut scratch {
        let (address, guard) = scratch.device_ptr_mut(stream);
        guards.push(guard);
        raw = raw.with_workspace(address, bytes);
    }
    let place = Place::Cuda(stream.context().ordinal());
    for (slot, tensor) in args.0.iter_mut() {
        let (address, guard) = match &mut tensor.memory {
            Memory::Cuda(view) => view.device_ptr(stream),
            Memory::CudaMut(view) => view.device_ptr_mut(stream),
            Memory::Host(..) => return Err(on_the_host(slot.name(), stream)),
        };
        guards.push(guard);
        raw.tensors.set(*slot, RawTensor { address, dtype: tensor.dtype, place, layout: tensor.layout });
    }
    // If one of those waits could not be enqueued, cudarc has only noted the error in the context. Without the wait the
    // kernel would race with the earlier use.
    stream.context().check_err().map_err(driver("waiting for earlier uses of the tensors"))?;

    let described = describe(&raw, plan.planned().workspace_bytes)?;
    // SAFETY: each layout lies within its view (checked when the tensor was made). Outputs are injective and borrowed
    // exclusively. The guards order this use against every other use. Stream and memory belong to the plan's GPU.
    unsafe { plan.on_gpu(&gpu.choice, &described, stream.cu_stream().cast()) }
}

fn on_the_host(what: &'static str, stream: &CudaStream) -> Error {
    let allowed = format!("cuda:{}, the stream's", stream.context().ordinal());
    Error::Device { what, got: "cpu".into(), allowed }
}
