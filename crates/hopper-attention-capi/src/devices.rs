//! Devices, and the versions of the library.

use std::ffi::c_char;
use std::fmt;

use hopper_attention::{Device, DeviceFacts};

use crate::abi::{HATTN_ABI_VERSION, HATTN_CPU, hattn_device};
use crate::handle;
use crate::status::{Failure, Outcome, entry, hattn_status};

/// The version of the ABI that the library has. A program that was compiled with this header needs HATTN_ABI_VERSION.
#[unsafe(no_mangle)]
pub extern "C" fn hattn_abi_version() -> u32 {
    HATTN_ABI_VERSION
}

/// The version of the library, such as "0.2.0". The string is static: do not free it.
#[unsafe(no_mangle)]
pub extern "C" fn hattn_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Writes the number of GPUs that the CUDA driver shows to `*count`, with or without kernels for them. Creates no context.
///
/// The number is 0 if there is no driver, or if the library was built without CUDA.
///
/// # Safety
/// `count` is null, or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_device_count(count: *mut i32) -> hattn_status {
    entry(|| {
        let found = i32::try_from(Device::available().len()).unwrap_or(i32::MAX);
        // SAFETY: the caller's promise.
        unsafe { handle::put("count", count, "it", found) }
    })
}

/// The ordinal of a GPU, or `None` for the CPU. `what` and `got` say what had the number, for an error.
pub(crate) fn ordinal(what: &str, got: impl fmt::Display, device: hattn_device) -> Outcome<Option<usize>> {
    match usize::try_from(device) {
        Ok(ordinal) => Ok(Some(ordinal)),
        Err(_) if device == HATTN_CPU => Ok(None),
        Err(_) => Err(Failure::argument(what, got, "HATTN_CPU (-1), or the ordinal of a GPU, 0 and above")),
    }
}

/// A device. A GPU is opened at its first use and stays open, so that its primary context outlives the plans.
pub(crate) fn open(device: hattn_device) -> Outcome<Device> {
    match ordinal("device", device, device)? {
        None => Ok(Device::cpu()),
        Some(ordinal) => Ok(Device::shared_cuda(ordinal)?),
    }
}

/// The facts of a GPU, without opening it. `None` for the CPU.
pub(crate) fn facts(device: hattn_device) -> Outcome<Option<DeviceFacts>> {
    let Some(ordinal) = ordinal("device", device, device)? else { return Ok(None) };
    let mut found = Device::available();
    match found.iter().position(|info| info.ordinal == ordinal) {
        Some(index) => Ok(Some(found.swap_remove(index).facts)),
        // The GPU is not there, or does not answer. The error of opening it says which.
        None => Ok(Device::cuda(ordinal)?.info().map(|info| info.facts)),
    }
}
