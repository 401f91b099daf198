//! Tunings: which kernels were measured to be the fastest.

use std::ffi::c_char;

use hopper_attention::Tuning;

use crate::handle::{self, Handle};
use crate::status::{Failure, entry, hattn_status};

/// Which kernel was measured to be the fastest, for each version of the library, card and problem.
/// The program `hattn tune` measures and writes it as text. Many threads may use a tuning at once.
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

/// Makes a tuning of `length` bytes of text, which `hattn tune` wrote. Writes it to `*tuning`, or null on failure.
///
/// The library opens no file: the caller reads the text. `text` may be null if `length` is 0. hattn_tuning_destroy frees
/// the tuning.
///
/// # Safety
/// `text` is null, or `length` bytes of it can be read. `tuning` is null, or can be written.
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
            // SAFETY: not null, so the caller promises that `length` bytes can be read.
            _ => unsafe { std::slice::from_raw_parts(text.cast::<u8>(), length) },
        };
        let words = std::str::from_utf8(bytes);
        let words = words.map_err(|error| Failure::argument("text", error, "UTF-8"))?;
        Ok(hattn_tuning { tuning: words.parse()? })
    };
    // SAFETY: the caller's promise.
    entry(|| unsafe { handle::create(tuning, make) })
}

/// Frees a tuning. `tuning` may be null. Plans that were made with it stay valid.
///
/// # Safety
/// `tuning` is null, or live and not used by any other call, now or later.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hattn_tuning_destroy(tuning: *mut hattn_tuning) {
    // SAFETY: the caller's promise.
    unsafe { handle::destroy(tuning) };
}
