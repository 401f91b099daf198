//! The only file that names `hopper_attention_sys`: its parameters and rows, and launches that return our errors.

use std::ffi::c_void;
use std::fmt::Display;

use hopper_attention_sys as ffi;

use crate::arch::{Arch, MaskClass, Pass};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::scaling::Scaling;

pub(crate) use ffi::{
    BwdParams, FwdParams, QuantizeParams, QuantizeRowInfo, QuantizeTensor, RowInfo, TensorDesc, bwd_rows, fwd_rows,
    quantize_rows,
};

/// `None` for an instruction set that is not known here.
pub(crate) fn arch(arch: ffi::Arch) -> Option<Arch> {
    match arch {
        ffi::Arch::Sm80 => Some(Arch::Sm80),
        ffi::Arch::Sm90 => Some(Arch::Sm90),
        _ => None,
    }
}

/// `None` for a type that is not known here.
pub(crate) fn dtype(dtype: ffi::DType) -> Option<DType> {
    match dtype {
        ffi::DType::F16 => Some(DType::F16),
        ffi::DType::BF16 => Some(DType::BF16),
        ffi::DType::E4M3 => Some(DType::E4M3),
        ffi::DType::F32 => Some(DType::F32),
        _ => None,
    }
}

/// `None` for a class that is not known here.
pub(crate) fn mask_class(mask: ffi::MaskClass) -> Option<MaskClass> {
    match mask {
        ffi::MaskClass::Full => Some(MaskClass::Full),
        ffi::MaskClass::Causal => Some(MaskClass::Causal),
        ffi::MaskClass::Window => Some(MaskClass::Window),
        _ => None,
    }
}

/// `None` for sums that are not known here.
pub(crate) fn scores(scores: ffi::Scores) -> Option<DType> {
    match scores {
        ffi::Scores::F32 => Some(DType::F32),
        ffi::Scores::F16 => Some(DType::F16),
        _ => None,
    }
}

pub(crate) fn to_dtype(dtype: DType) -> ffi::DType {
    match dtype {
        DType::F16 => ffi::DType::F16,
        DType::BF16 => ffi::DType::BF16,
        DType::E4M3 => ffi::DType::E4M3,
        DType::F32 => ffi::DType::F32,
    }
}

pub(crate) fn to_scaling(scaling: Scaling) -> ffi::Scaling {
    match scaling {
        Scaling::PerTensor => ffi::Scaling::PerTensor,
        Scaling::PerHead => ffi::Scaling::PerHead,
        Scaling::PerBlock => ffi::Scaling::PerBlock,
    }
}

/// Loads a kernel on the thread's current context, so that launching it loads nothing.
pub(crate) fn prepare(pass: Pass, row: u32, kernel: &impl Display) -> Result<()> {
    let status = match pass {
        Pass::Forward => ffi::fwd_prepare(row),
        Pass::Backward => ffi::bwd_prepare(row),
    };
    check("prepare", kernel, status)
}

/// The same of all kernels of a quantising row.
pub(crate) fn prepare_quantize(row: u32, kernel: &impl Display) -> Result<()> {
    check("prepare", kernel, ffi::quantize_prepare(row))
}

/// Enqueues a forward kernel in the thread's current context.
///
/// # Safety
/// `params` satisfies what `kernels.hpp` says for this row. Its addresses are device memory of the current context that is
/// valid until the kernel has run. `stream` is a live stream of that context, or null.
pub(crate) unsafe fn launch_forward(
    row: u32,
    kernel: &impl Display,
    params: &FwdParams,
    stream: *mut c_void,
) -> Result<()> {
    // SAFETY: the caller's promise.
    check("launch", kernel, unsafe { ffi::fwd_launch(row, params, stream.cast()) })
}

/// Enqueues a backward pass in the thread's current context.
///
/// # Safety
/// As [`launch_forward`].
pub(crate) unsafe fn launch_backward(
    row: u32,
    kernel: &impl Display,
    params: &BwdParams,
    stream: *mut c_void,
) -> Result<()> {
    // SAFETY: the caller's promise.
    check("launch", kernel, unsafe { ffi::bwd_launch(row, params, stream.cast()) })
}

/// Enqueues the quantisation of up to three tensors in the thread's current context.
///
/// # Safety
/// As [`launch_forward`].
pub(crate) unsafe fn launch_quantize(
    row: u32,
    kernel: &impl Display,
    params: &QuantizeParams,
    stream: *mut c_void,
) -> Result<()> {
    // SAFETY: the caller's promise.
    check("launch", kernel, unsafe { ffi::quantize_launch(row, params, stream.cast()) })
}

fn check(what: &'static str, kernel: &impl Display, status: ffi::Status) -> Result<()> {
    match status.code {
        ffi::StatusCode::Ok => Ok(()),
        _ => Err(Error::Launch { what, kernel: kernel.to_string(), text: ffi::status_text(status) }),
    }
}
