//! What every pass does with cudarc's views between its arguments and its launch.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, CudaView, CudaViewMut, DeviceSlice, sys};

use crate::cuda::{CudaDevice, driver};
use crate::{Element, Error, Result, TensorMut, TensorRef};

/// Makes the stream's context the thread's, and refuses a capture that cudarc's events would break.
pub(crate) fn before_launch(stream: &CudaStream) -> Result<()> {
    let context = stream.context();
    context.bind_to_thread().map_err(driver("before the launch"))?;
    if context.is_managing_stream_synchronization() {
        let allowed = "capturing with cudarc's event tracking off, or on the only stream of its context";
        refuse_capture(stream, "launching while cudarc tracks events", allowed)?;
    }
    Ok(())
}

/// A wait for an earlier use that failed was only noted in the context; without it the kernel would race.
pub(crate) fn no_wait_failed(stream: &CudaStream) -> Result<()> {
    stream.context().check_err().map_err(driver("waiting for earlier uses of the tensors"))
}

/// An input's view, which must be of the stream's context.
pub(crate) fn input<'t, 'a, T: Element, const R: usize>(
    what: &'static str,
    tensor: &'t TensorRef<'a, T, R>,
    stream: &CudaStream,
) -> Result<&'t CudaView<'a, T>> {
    let view = tensor.as_cuda().ok_or_else(|| on_the_host(what, stream))?;
    same_context(what, view.stream().context(), stream)?;
    Ok(view)
}

/// An output's view, likewise.
pub(crate) fn output<'t, 'a, T: Element, const R: usize>(
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
pub(crate) fn same_gpu(device: &CudaDevice, stream: &CudaStream) -> Result<()> {
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
