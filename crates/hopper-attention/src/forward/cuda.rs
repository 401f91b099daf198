//! A forward pass from cudarc's views. Here a kernel outlives the borrows that it was given, and the order of the lines
//! is what makes that sound: the crate's documentation has the argument.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};

use crate::raw::{Place, RawForward, RawTensor, RawWorkspace};
use crate::views::{before_launch, input, no_wait_failed, output};
use crate::{DType, Element, ForwardArgs, ForwardPlan, Layout, Operand, Result, TensorMut, Workspace};

/// Enqueues the plan's kernel. The caller has compared shapes, and the stream's GPU with the plan's.
pub(super) fn run<T: Operand>(
    plan: &ForwardPlan,
    stream: &Arc<CudaStream>,
    workspace: &mut Workspace,
    mut args: ForwardArgs<'_, T>,
) -> Result<()> {
    let layouts = Layouts::of(&args);
    let workspace_bytes = workspace.bytes();
    let q = input("q", &args.q, stream)?;
    let k = input("k", &args.k, stream)?;
    let v = input("v", &args.v, stream)?;
    let o = output("o", &mut args.o, stream)?;
    let lse = match &mut args.lse {
        Some(lse) => Some(output("lse", lse, stream)?),
        None => None,
    };
    if plan.problem().is_empty() {
        return Ok(());
    }
    before_launch(stream)?;

    // From here to the end of the launch every guard lives: each makes the stream wait for earlier uses of the memory
    // now, and records this use when it is dropped.
    let (q_address, _q) = q.device_ptr(stream);
    let (k_address, _k) = k.device_ptr(stream);
    let (v_address, _v) = v.device_ptr(stream);
    let (o_address, _o) = o.device_ptr_mut(stream);
    let (lse_address, _lse) = lse.map(|lse| lse.device_ptr_mut(stream)).unzip();
    // A plan that needs no workspace does not wait for one.
    let scratch = if plan.workspace_bytes() > 0 { workspace.as_cuda() } else { None };
    let (scratch_address, _scratch) = scratch.map(|scratch| scratch.device_ptr_mut(stream)).unzip();
    no_wait_failed(stream)?;

    let place = Place::Cuda(stream.context().ordinal());
    let tensor = |address, layout| RawTensor { address, dtype: T::DTYPE, place, layout };
    let raw = RawForward {
        q: tensor(q_address, layouts.q),
        k: tensor(k_address, layouts.k),
        v: tensor(v_address, layouts.v),
        o: RawTensor { dtype: T::Out::DTYPE, ..tensor(o_address, layouts.o) },
        lse: lse_address.zip(layouts.lse).map(|(address, layout)| RawTensor {
            address,
            dtype: DType::F32,
            place,
            layout,
        }),
        fp8: None,
        workspace: RawWorkspace { address: scratch_address.unwrap_or(0), bytes: workspace_bytes },
    };
    // SAFETY: views keep memory within the layouts (checked where tensors are made), outputs are injective and borrowed
    // exclusively, the guards order this use against every other one, and stream and memory are of the plan's GPU.
    unsafe { plan.run_raw(&raw, stream.cu_stream().cast()) }
}

/// Layouts are copied out first: the views are borrowed mutably when they are needed.
struct Layouts {
    q: Layout<4>,
    k: Layout<4>,
    v: Layout<4>,
    o: Layout<4>,
    lse: Option<Layout<3>>,
}

impl Layouts {
    fn of<T: Operand>(args: &ForwardArgs<'_, T>) -> Self {
        Self {
            q: args.q.layout(),
            k: args.k.layout(),
            v: args.v.layout(),
            o: args.o.layout(),
            lse: args.lse.as_ref().map(TensorMut::layout),
        }
    }
}
