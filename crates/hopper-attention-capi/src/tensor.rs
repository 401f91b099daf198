//! What fills in a tensor's struct.

use crate::abi::{hattn_tensor, read};
use crate::convert::contiguous_stride;
use crate::status::{entry, hattn_status};

/// Fills in the strides of a row-major tensor without gaps. Set `ndim` and `shape` before the call.
///
/// The stride of a dimension is the product of the sizes behind it, and 1 for the last dimension. A size of 0 counts as 1.
/// Nothing is written on failure:
///
/// - HATTN_ERROR_ARGUMENT: `ndim` is not 1 to 4.
/// - HATTN_ERROR_LAYOUT: a size is negative, or the tensor has 2^63 elements or more.
///
/// # Safety
/// `tensor` is null, or points to a struct of the size that the struct says, which can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_tensor_contiguous(tensor: *mut hattn_tensor) -> hattn_status {
    entry(|| {
        // SAFETY: the caller's promise.
        let stride = contiguous_stride("tensor", &unsafe { read("tensor", tensor.cast_const()) }?)?;
        // SAFETY: neither null nor misaligned, since `read` refuses both. Every size of the struct that `read` takes holds
        // the strides. The caller promises that they can be written.
        unsafe { (&raw mut (*tensor).stride).write(stride) };
        Ok(())
    })
}
