//! The only file that names `hopper_attention_sys`: its parameter structs, its launch tables, and launches that return this
//! crate's errors.

use std::ffi::c_void;
use std::fmt::Display;

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;
use hopper_attention_sys as ffi;

use crate::arch::{Arch, MaskClass, Modifiers, Pass};
use crate::device::driver;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::ForwardProblem;
use crate::scaling::Scaling;

pub(crate) use ffi::{
    BlockLists, BwdParams, Dropout, FwdParams, MaskEdges, QuantizeParams, QuantizeRowInfo, QuantizeTensor, RowInfo,
    Sequences, TensorDesc, bwd_rows, fwd_rows, quantize_rows,
};

/// Conversions between an enum of the cxx bridge and the enum of this crate, value by value. `None` for a value of the bridge
/// that this crate does not know.
macro_rules! same_values {
    ($($from:ident, $into:ident: ffi::$theirs:ident = $ours:ty { $($value:ident),* })*) => {$(
        #[allow(dead_code, reason = "not every enum goes both ways")]
        pub(crate) fn $from(theirs: ffi::$theirs) -> Option<$ours> {
            match theirs {
                $(ffi::$theirs::$value => Some(<$ours>::$value),)*
                _ => None,
            }
        }

        #[allow(dead_code, reason = "not every enum goes both ways")]
        pub(crate) fn $into(ours: $ours) -> ffi::$theirs {
            match ours {
                $(<$ours>::$value => ffi::$theirs::$value,)*
            }
        }
    )*};
}

same_values! {
    arch, to_arch: ffi::Arch = Arch { Sm80, Sm90 }
    mask_class, to_mask_class: ffi::MaskClass = MaskClass { Full, Causal, Window, Blocks }
    scaling, to_scaling: ffi::Scaling = Scaling { PerTensor, PerHead, PerBlock }
    modifiers, to_modifiers: ffi::Modifiers = Modifiers { Never, Either, Always }
}

/// An element type of the kernels. `None` for a value that this crate does not know.
pub(crate) fn dtype(dtype: ffi::DType) -> Option<DType> {
    match dtype {
        ffi::DType::F16 => Some(DType::F16),
        ffi::DType::BF16 => Some(DType::BF16),
        ffi::DType::E4M3 => Some(DType::E4M3),
        ffi::DType::F32 => Some(DType::F32),
        _ => None,
    }
}

/// An element type as the kernels know it. `None` for the type of offsets and lengths, which no kernel computes with.
pub(crate) fn to_dtype(dtype: DType) -> Option<ffi::DType> {
    match dtype {
        DType::F16 => Some(ffi::DType::F16),
        DType::BF16 => Some(ffi::DType::BF16),
        DType::E4M3 => Some(ffi::DType::E4M3),
        DType::F32 => Some(ffi::DType::F32),
        DType::I32 => None,
    }
}

/// The element type of a problem's sinks, as the kernels know it. Any where there are none.
pub(crate) fn sinks_dtype(problem: &ForwardProblem) -> ffi::DType {
    problem.sinks().and_then(to_dtype).unwrap_or(ffi::DType::F32)
}

/// The element type of a problem's additive bias, as the kernels know it. Any where there is none.
pub(crate) fn bias_dtype(problem: &ForwardProblem) -> ffi::DType {
    problem.bias().and_then(|bias| to_dtype(bias.dtype())).unwrap_or(ffi::DType::F32)
}

/// The type in which a kernel sums scores. `None` for a value that this crate does not know.
pub(crate) fn scores(scores: ffi::Scores) -> Option<DType> {
    match scores {
        ffi::Scores::F32 => Some(DType::F32),
        ffi::Scores::F16 => Some(DType::F16),
        _ => None,
    }
}

/// Loads a kernel in the thread's current context. A launch then loads nothing.
pub(crate) fn prepare(pass: Pass, row: u32, kernel: &impl Display) -> Result<()> {
    let status = match pass {
        Pass::Forward => ffi::fwd_prepare(row),
        Pass::Backward => ffi::bwd_prepare(row),
    };
    check("prepare", kernel, status)
}

/// Loads all kernels of a row of the quantiser's table in the thread's current context.
pub(crate) fn prepare_quantize(row: u32, kernel: &impl Display) -> Result<()> {
    check("prepare", kernel, ffi::quantize_prepare(row))
}

/// Enqueues a forward kernel in the thread's current context.
///
/// # Safety
/// - `params` satisfies what `hopper-attention-sys/src/params.rs` says for this row.
/// - The addresses in `params` are device memory of the current context, valid until the kernel has run.
/// - `stream` is a live stream of the current context, or null.
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
    match (status.code, of_earlier_work(status.detail)) {
        (ffi::StatusCode::Ok, _) => Ok(()),
        (ffi::StatusCode::Cuda, Some(error)) => {
            Err(driver("loading or launching a kernel after earlier work broke the context")(DriverError(error)))
        }
        _ => Err(Error::Launch { what, kernel: kernel.to_string(), text: ffi::status_text(status) }),
    }
}

/// The driver's error, if it is one that no launch makes by itself: a kernel that ran before has failed and broken the context,
/// or the context is gone. Such errors have the same number in the runtime and in the driver.
fn of_earlier_work(code: i32) -> Option<CUresult> {
    const BROKEN: [CUresult; 12] = [
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
        CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
        CUresult::CUDA_ERROR_LAUNCH_TIMEOUT,
        CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
        CUresult::CUDA_ERROR_ASSERT,
        CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR,
        CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION,
        CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
        CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE,
        CUresult::CUDA_ERROR_INVALID_PC,
        CUresult::CUDA_ERROR_LAUNCH_FAILED,
    ];
    BROKEN.into_iter().find(|error| *error as i32 == code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_earlier_work_are_told_from_errors_of_a_launch() {
        // cudaErrorIllegalAddress, cudaErrorLaunchFailure, cudaErrorContextIsDestroyed.
        assert_eq!(of_earlier_work(700), Some(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
        assert_eq!(of_earlier_work(719), Some(CUresult::CUDA_ERROR_LAUNCH_FAILED));
        assert_eq!(of_earlier_work(709), Some(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED));
        // cudaErrorInvalidValue, cudaErrorMemoryAllocation, cudaErrorInvalidDeviceFunction.
        assert_eq!([1, 2, 98].map(of_earlier_work), [None; 3]);
    }
}
