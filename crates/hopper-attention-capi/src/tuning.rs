//! What was measured to be the fastest, for plans.

use std::ffi::c_char;

use hopper_attention::Tuning;

use crate::handle::{self, Handle};
use crate::status::{Failure, entry, hattn_status};

/// Which kernel was measured to be the fastest, by version of the library, card and shape: what the program `hattn tune`
/// writes. Used by any threads at once.
pub struct hattn_tuning {
    tuning: Tuning,
}

impl Handle for hattn_tuning {
    type Held = Tuning;
    const WHAT: &'static str = "tuning";
    const MADE_BY: &'static str = "hattn_tuning_create";

    fn held(&self) -> &Tuning {
        &self.tuning
    }
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
    let make = || {
        let bytes = match length {
            0 => &[],
            _ if text.is_null() => return Err(Failure::argument("text", "a null pointer", "`length` bytes of text")),
            // SAFETY: not null, so the caller says that `length` bytes can be read.
            _ => unsafe { std::slice::from_raw_parts(text.cast::<u8>(), length) },
        };
        let words = std::str::from_utf8(bytes);
        let words = words.map_err(|error| Failure::argument("text", &error.to_string(), "UTF-8"))?;
        Ok(hattn_tuning { tuning: words.parse()? })
    };
    // SAFETY: the caller's promise.
    entry(|| unsafe { handle::create(tuning, make) })
}

/// Frees a tuning; null is fine. Plans that were made with it go on.
///
/// # Safety
/// `tuning` is null, or came from hattn_tuning_create and is used nowhere, now or later.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_tuning_destroy(tuning: *mut hattn_tuning) {
    // SAFETY: the caller's promise.
    unsafe { handle::destroy(tuning) };
}
