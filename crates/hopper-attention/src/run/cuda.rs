//! A run on a GPU from cudarc's views.
//!
//! The kernel outlives the borrows of its memory. The order of the lines below makes that sound. docs/soundness.md has the
//! argument.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtrMut, DeviceSlice};

use super::Args;
use super::order::Order;
use crate::device::{OthersError, same_context};
use crate::dtype::event;
use crate::error::{Error, Result};
use crate::launch::{Launch, Place, RawArgs, RawTensor, describe};
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
            Memory::Host(..) if slot.may_be_on_the_host() => continue,
            Memory::Host(..) => return Err(on_the_host(slot.name(), stream)),
        };
        same_context(slot.name(), context, stream)?;
    }
    if plan.has_nothing_to_do() {
        return Ok(());
    }
    // The launchers use the CUDA runtime, which launches into the thread's current context.
    let _current = device.make_current()?;
    // A plan that needs no workspace leaves it alone. Otherwise the stream would wait for earlier uses of the workspace.
    let bytes = workspace.bytes();
    let mut scratch = if plan.planned().workspace_bytes > 0 { workspace.as_cuda() } else { None };
    let mut order = Order::on(stream)?;
    let mut others = OthersError::set_aside(stream.context());
    let mut raw = RawArgs::new();
    // Each `device_ptr` call below makes the stream wait for earlier uses of the memory.
    if let Some(scratch) = &mut scratch {
        let allocated_on = scratch.stream().cu_stream();
        let (address, guard) = scratch.device_ptr_mut(stream);
        order.write(allocated_on, event(guard));
        raw = raw.with_workspace(address, bytes);
    }
    let gpu_place = Place::Cuda(stream.context().ordinal());
    for (slot, tensor) in args.0.iter_mut() {
        let mut place = gpu_place;
        let address = match &mut tensor.memory {
            Memory::Cuda(view) => {
                let (address, event) = view.device_ptr(stream);
                order.read(view.stream().cu_stream(), event);
                address
            }
            Memory::CudaMut(view) => {
                let allocated_on = view.stream().cu_stream();
                let (address, event) = view.device_ptr_mut(stream);
                order.write(allocated_on, event);
                address
            }
            Memory::Host(address, _) => {
                place = Place::Cpu;
                *address
            }
        };
        raw.tensors.set(*slot, RawTensor { address, dtype: tensor.dtype, place, layout: tensor.layout });
    }
    // SAFETY: the tensors are borrowed, and their layouts, types and shapes were checked. The host's may be there (above).
    let described = unsafe { describe(&raw, plan.planned().workspace_bytes)? };
    order.before(!others.has_another())?;
    // SAFETY: each layout lies within its view (checked when the tensor was made). Outputs are injective and borrowed
    // exclusively. `order` orders this use against every other use. Stream and memory belong to the plan's GPU.
    let launched = unsafe { plan.on_gpu(&gpu.choice, &described, stream.cu_stream().cast()) };
    // A launch that failed may have enqueued some of its kernels.
    let ordered = order.after();
    launched.and(ordered)
}

fn on_the_host(what: &'static str, stream: &CudaStream) -> Error {
    let allowed = format!("cuda:{}, the stream's", stream.context().ordinal());
    Error::Device { what, got: "cpu".into(), allowed }
}
