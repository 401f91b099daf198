//! A backward pass from cudarc's views. As in the forward a kernel outlives the borrows that it was given, and the order
//! of the lines is what makes that sound: the crate's documentation has the argument.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};

use super::Layouts;
use crate::raw::{Place, RawBackward, RawTensor, RawWorkspace};
use crate::views::{before_launch, input, no_wait_failed, output};
use crate::{BackwardArgs, BackwardPlan, DType, Layout, Operand, Result, Workspace};

/// Enqueues the plan's kernels. The caller has compared shapes, and the stream's GPU with the plan's.
pub(super) fn run<T: Operand<Out = T>>(
    plan: &BackwardPlan,
    stream: &Arc<CudaStream>,
    workspace: &mut Workspace,
    mut args: BackwardArgs<'_, T>,
) -> Result<()> {
    // Copied out first: the views are borrowed mutably when they are needed.
    let layouts = Layouts::of(&args);
    let workspace_bytes = workspace.bytes();
    let q = input("q", &args.q, stream)?;
    let k = input("k", &args.k, stream)?;
    let v = input("v", &args.v, stream)?;
    let o = input("o", &args.o, stream)?;
    let lse = input("lse", &args.lse, stream)?;
    let d_o = input("d_o", &args.d_o, stream)?;
    let d_lse = args.d_lse.as_ref().map(|d_lse| input("d_lse", d_lse, stream)).transpose()?;
    let d_q = output("d_q", &mut args.d_q, stream)?;
    let d_k = output("d_k", &mut args.d_k, stream)?;
    let d_v = output("d_v", &mut args.d_v, stream)?;
    if plan.problem().is_empty() {
        return Ok(());
    }
    before_launch(stream)?;

    // From here to the end of the launch every guard lives: each makes the stream wait for earlier uses of the memory
    // now, and records this use when it is dropped.
    let (q_address, _q) = q.device_ptr(stream);
    let (k_address, _k) = k.device_ptr(stream);
    let (v_address, _v) = v.device_ptr(stream);
    let (o_address, _o) = o.device_ptr(stream);
    let (lse_address, _lse) = lse.device_ptr(stream);
    let (d_o_address, _d_o) = d_o.device_ptr(stream);
    let (d_lse_address, _d_lse) = d_lse.map(|d_lse| d_lse.device_ptr(stream)).unzip();
    let (d_q_address, _d_q) = d_q.device_ptr_mut(stream);
    let (d_k_address, _d_k) = d_k.device_ptr_mut(stream);
    let (d_v_address, _d_v) = d_v.device_ptr_mut(stream);
    let (scratch_address, _scratch) = workspace.as_cuda().map(|scratch| scratch.device_ptr_mut(stream)).unzip();
    no_wait_failed(stream)?;

    let place = Place::Cuda(stream.context().ordinal());
    let tensor = |address, layout: Layout<4>| RawTensor { address, dtype: T::DTYPE, place, layout };
    let row_values = |address, layout: Layout<3>| RawTensor { address, dtype: DType::F32, place, layout };
    let raw = RawBackward {
        q: tensor(q_address, layouts.q),
        k: tensor(k_address, layouts.k),
        v: tensor(v_address, layouts.v),
        o: tensor(o_address, layouts.o),
        lse: row_values(lse_address, layouts.lse),
        d_o: tensor(d_o_address, layouts.d_o),
        d_lse: d_lse_address.zip(layouts.d_lse).map(|(address, layout)| row_values(address, layout)),
        d_q: tensor(d_q_address, layouts.d_q),
        d_k: tensor(d_k_address, layouts.d_k),
        d_v: tensor(d_v_address, layouts.d_v),
        workspace: RawWorkspace { address: scratch_address.unwrap_or(0), bytes: workspace_bytes },
    };
    // SAFETY: views keep memory within the layouts (checked where tensors are made), outputs are injective and borrowed
    // exclusively, the guards order this use against every other one, and stream and memory are of the plan's GPU.
    unsafe { plan.run_raw(&raw, stream.cu_stream().cast()) }
}
