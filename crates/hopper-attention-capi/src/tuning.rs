//! What was measured to be the fastest, for plans.

use std::ffi::c_char;

use hopper_attention::plan::Tuning;

use crate::status::{Failure, Outcome, entry, hattn_status};

/// Which kernel was measured to be the fastest, by version of the library, card and shape: what the program `hattn tune`
/// writes. Used by any threads at once.
pub struct hattn_tuning {
    tuning: Tuning,
}

/// Reads the text that `hattn tune` wrote, `length` bytes of it, and writes it to `*tuning`; null there on failure. The
/// library itself opens no file.
///
/// # Safety
/// `text` is valid for reading `length` bytes, null when that is 0; `tuning` is null, which is refused, or valid for
/// writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_tuning_create(
    text: *const c_char,
    length: usize,
    tuning: *mut *mut hattn_tuning,
) -> hattn_status {
    entry(|| {
        if tuning.is_null() {
            return Err(Failure::argument("tuning", "a null pointer", "where to write the tuning"));
        }
        // SAFETY: not null, so the caller says it is valid.
        unsafe { tuning.write(std::ptr::null_mut()) };
        let bytes = match length {
            0 => &[],
            _ if text.is_null() => return Err(Failure::argument("text", "a null pointer", "`length` bytes of text")),
            // SAFETY: not null, so the caller says that `length` bytes can be read.
            _ => unsafe { std::slice::from_raw_parts(text.cast::<u8>(), length) },
        };
        let words = std::str::from_utf8(bytes);
        let words = words.map_err(|error| Failure::argument("text", &error.to_string(), "UTF-8"))?;
        let made = hattn_tuning { tuning: words.parse()? };
        // SAFETY: as above.
        unsafe { tuning.write(Box::into_raw(Box::new(made))) };
        Ok(())
    })
}

/// Frees a tuning; null is fine. Plans that were made with it go on.
///
/// # Safety
/// `tuning` is null, or came from hattn_tuning_create and is used nowhere, now or later.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_tuning_destroy(tuning: *mut hattn_tuning) {
    if !tuning.is_null() {
        // SAFETY: the caller's promise.
        let tuning = unsafe { Box::from_raw(tuning) };
        entry(|| {
            drop(tuning);
            Ok(())
        });
    }
}

/// # Safety
/// `tuning` is null or a live tuning.
pub(crate) unsafe fn live<'a>(tuning: *const hattn_tuning) -> Outcome<&'a Tuning> {
    // SAFETY: the caller's promise.
    match unsafe { tuning.as_ref() } {
        Some(live) => Ok(&live.tuning),
        None => Err(Failure::argument("tuning", "a null pointer", "one from hattn_tuning_create")),
    }
}
