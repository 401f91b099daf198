//! The only file that names `hopper_attention_sys`: its parameter structs, its launch tables, and launches that return this
//! crate's errors.

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
    dtype, to_dtype: ffi::DType = DType { F16, BF16, E4M3, F32 }
    mask_class, to_mask_class: ffi::MaskClass = MaskClass { Full, Causal, Window }
    scaling, to_scaling: ffi::Scaling = Scaling { PerTensor, PerHead, PerBlock }
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
    match status.code {
        ffi::StatusCode::Ok => Ok(()),
        _ => Err(Error::Launch { what, kernel: kernel.to_string(), text: ffi::status_text(status) }),
    }
}
