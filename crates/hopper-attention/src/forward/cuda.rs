//! A forward pass from cudarc's views. Here a kernel outlives the borrows that it was given, and the order of the lines
//! is what makes that sound: the crate's documentation has the argument.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, sys};

use crate::cuda::{CudaDevice, driver};
use crate::raw::{Place, RawForward, RawTensor, RawWorkspace};
use crate::{
    DType, Element, Error, ForwardArgs, ForwardPlan, Layout, Operand, Result, TensorMut, TensorRef, Workspace,
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
    let context = stream.context();
    context.bind_to_thread().map_err(driver("before the launch"))?;
    if context.is_managing_stream_synchronization() {
        let allowed = "capturing with cudarc's event tracking off, or on the only stream of its context";
        refuse_capture(stream, "launching while cudarc tracks events", allowed)?;
    }

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
    // A wait that failed was only noted in the context; without it the kernel would race.
    context.check_err().map_err(driver("waiting for earlier uses of the tensors"))?;

    let place = Place::Cuda(context.ordinal());
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

fn input<'t, 'a, T: Element>(
    what: &'static str,
    tensor: &'t TensorRef<'a, T, 4>,
    stream: &CudaStream,
) -> Result<&'t CudaView<'a, T>> {
    let view = tensor.as_cuda().ok_or_else(|| on_the_host(what, stream))?;
    same_context(what, view.stream().context(), stream)?;
    Ok(view)
}

fn output<'t, 'a, T: Element, const R: usize>(
    what: &'static str,
    tensor: &'t mut TensorMut<'a, T, R>,
    stream: &CudaStream,
) -> Result<&'t mut CudaViewMut<'a, T>> {
    let view = tensor.as_cuda().ok_or_else(|| on_the_host(what, stream))?;
    same_context(what, view.stream().context(), stream)?;
    Ok(view)
}

fn on_the_host(what: &'static str, stream: &CudaStream) -> Error {
    let allowed = format!("cuda:{}, the stream's", stream.context().ordinal());
    Error::Device { what, got: "cpu".into(), allowed }
}

/// Whether memory and stream are ordered by one context object. Two objects of one GPU's primary context are equal, but
/// each counts its own streams and so decides alone whether to record events: a kernel on a stream of one would not be
/// seen when memory of the other is freed.
pub(crate) fn same_context(what: &'static str, context: &Arc<CudaContext>, stream: &CudaStream) -> Result<()> {
    if Arc::ptr_eq(context, stream.context()) {
        return Ok(());
    }
    let of = |ordinal: usize| format!("cuda:{ordinal}");
    let same_gpu = **context == **stream.context();
    Err(Error::Device {
        what,
        got: of(context.ordinal()) + if same_gpu { " of another CudaContext" } else { "" },
        allowed: of(stream.context().ordinal()) + ", with the stream's own CudaContext",
    })
}

/// Whether the stream is of the GPU (and context) for which the plan's kernel was loaded.
pub(super) fn same_gpu(device: &CudaDevice, stream: &CudaStream) -> Result<()> {
    if **device.context() == **stream.context() {
        return Ok(());
    }
    Err(Error::Device {
        what: "stream",
        got: format!("cuda:{}", stream.context().ordinal()),
        allowed: format!("{device}, and the context that the plan was made with"),
    })
}

/// Refuses what would break a capture, or what a capture would break.
pub(crate) fn refuse_capture(stream: &CudaStream, what: &str, allowed: &str) -> Result<()> {
    match stream.capture_status().map_err(driver("asking whether the stream is captured"))? {
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(()),
        _ => Err(Error::Capture { got: what.into(), allowed: allowed.into() }),
    }
}
