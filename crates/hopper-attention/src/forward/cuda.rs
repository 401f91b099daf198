//! A forward pass from cudarc's views. Here a kernel outlives the borrows that it was given, and the order of the lines
//! is what makes that sound: the crate's documentation has the argument.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};

use crate::raw::{Place, RawForward, RawFp8, RawTensor, RawWorkspace};
use crate::views::{before_launch, input, no_wait_failed, output};
use crate::{
    DType, Element, ForwardArgs, ForwardPlan, Fp8ForwardArgs, Fp8Output, Layout, Operand, Result, TensorMut, TensorRef,
    Workspace,
};

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

/// The same for e4m3 operands.
pub(super) fn run_fp8<O: Fp8Output>(
    plan: &ForwardPlan,
    stream: &Arc<CudaStream>,
    workspace: &mut Workspace,
    mut args: Fp8ForwardArgs<'_, O>,
) -> Result<()> {
    let (of_q, of_k, of_v, of_o) = (args.q.layout(), args.k.layout(), args.v.layout(), args.o.layout());
    let of_factors = [args.descale_q.layout(), args.descale_k.layout(), args.descale_v.layout()];
    let (of_lse, of_scale_o) = (args.lse.as_ref().map(TensorMut::layout), args.scale_o.as_ref().map(TensorRef::layout));
    let of_amax = args.amax.as_ref().map(TensorMut::layout);
    let workspace_bytes = workspace.bytes();
    let q = input("q", &args.q, stream)?;
    let k = input("k", &args.k, stream)?;
    let v = input("v", &args.v, stream)?;
    let descale_q = input("descale_q", &args.descale_q, stream)?;
    let descale_k = input("descale_k", &args.descale_k, stream)?;
    let descale_v = input("descale_v", &args.descale_v, stream)?;
    let scale_o = args.scale_o.as_ref().map(|scale_o| input("scale_o", scale_o, stream)).transpose()?;
    let o = output("o", &mut args.o, stream)?;
    let lse = args.lse.as_mut().map(|lse| output("lse", lse, stream)).transpose()?;
    let amax = args.amax.as_mut().map(|amax| output("amax", amax, stream)).transpose()?;
    before_launch(stream)?;

    // As above: every guard lives until after the launch.
    let (q_address, _q) = q.device_ptr(stream);
    let (k_address, _k) = k.device_ptr(stream);
    let (v_address, _v) = v.device_ptr(stream);
    let (descale_q_address, _descale_q) = descale_q.device_ptr(stream);
    let (descale_k_address, _descale_k) = descale_k.device_ptr(stream);
    let (descale_v_address, _descale_v) = descale_v.device_ptr(stream);
    let (scale_o_address, _scale_o) = scale_o.map(|scale_o| scale_o.device_ptr(stream)).unzip();
    let (o_address, _o) = o.device_ptr_mut(stream);
    let (lse_address, _lse) = lse.map(|lse| lse.device_ptr_mut(stream)).unzip();
    let (amax_address, _amax) = amax.map(|amax| amax.device_ptr_mut(stream)).unzip();
    let scratch = if plan.workspace_bytes() > 0 { workspace.as_cuda() } else { None };
    let (scratch_address, _scratch) = scratch.map(|scratch| scratch.device_ptr_mut(stream)).unzip();
    no_wait_failed(stream)?;

    let place = Place::Cuda(stream.context().ordinal());
    let operand = |address, layout| RawTensor { address, dtype: DType::E4M3, place, layout };
    let descale = |address, layout| RawTensor { address, dtype: DType::F32, place, layout };
    let one = |address, layout| RawTensor::<1> { address, dtype: DType::F32, place, layout };
    let raw = RawForward {
        q: operand(q_address, of_q),
        k: operand(k_address, of_k),
        v: operand(v_address, of_v),
        o: RawTensor { address: o_address, dtype: O::DTYPE, place, layout: of_o },
        lse: lse_address.zip(of_lse).map(|(address, layout)| descale(address, layout)),
        fp8: Some(RawFp8 {
            descale_q: descale(descale_q_address, of_factors[0]),
            descale_k: descale(descale_k_address, of_factors[1]),
            descale_v: descale(descale_v_address, of_factors[2]),
            scale_o: scale_o_address.zip(of_scale_o).map(|(address, layout)| one(address, layout)),
            amax: amax_address.zip(of_amax).map(|(address, layout)| one(address, layout)),
        }),
        workspace: RawWorkspace { address: scratch_address.unwrap_or(0), bytes: workspace_bytes },
    };
    // SAFETY: as in `run`.
    unsafe { plan.run_raw(&raw, stream.cu_stream().cast()) }
}
