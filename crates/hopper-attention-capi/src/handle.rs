//! Opaque structs that C holds by a pointer, such as plans: how they are made, read and freed. Also how results are written
//! through C's pointers.

use std::ffi::c_char;
use std::fmt;

use crate::status::{Failure, Outcome, entry};

/// An opaque struct of the ABI.
pub(crate) trait Handle {
    /// The value in the struct.
    type Held;
    /// The name that arguments and errors use, such as `plan`.
    const WHAT: &'static str;
    /// The function of C that makes one.
    const MADE_BY: &'static str;

    fn held(&self) -> &Self::Held;
}

/// Makes a handle and writes it to `*place`. Writes null on failure.
///
/// # Safety
/// `place` is null, which is refused, or valid for writing.
pub(crate) unsafe fn create<H: Handle>(place: *mut *mut H, make: impl FnOnce() -> Outcome<H>) -> Outcome {
    not_null(H::WHAT, place, format_args!("where to write the {}", H::WHAT))?;
    // SAFETY: not null, so the caller promises that it is valid.
    unsafe { place.write(std::ptr::null_mut()) };
    let made = make()?;
    // SAFETY: as above.
    unsafe { place.write(Box::into_raw(Box::new(made))) };
    Ok(())
}

/// Frees a handle. It may be null.
///
/// # Safety
/// `handle` is null, or came from [`create`] and is used nowhere, now or later.
pub(crate) unsafe fn destroy<H: Handle>(handle: *mut H) {
    if !handle.is_null() {
        // SAFETY: the caller's promise.
        let handle = unsafe { Box::from_raw(handle) };
        entry(|| {
            drop(handle);
            Ok(())
        });
    }
}

/// # Safety
/// `handle` is null, which is refused, or live.
pub(crate) unsafe fn live<'a, H: Handle + 'a>(handle: *const H) -> Outcome<&'a H::Held> {
    // SAFETY: the caller's promise.
    match unsafe { handle.as_ref() } {
        Some(live) => Ok(live.held()),
        None => Err(Failure::argument(H::WHAT, "a null pointer", format_args!("one from {}", H::MADE_BY))),
    }
}

/// Writes a value to `*place`. `words` says what the value is, for an error.
///
/// # Safety
/// `place` is null, which is refused, or valid for writing.
pub(crate) unsafe fn put<T>(what: &str, place: *mut T, words: &str, value: T) -> Outcome {
    not_null(what, place, format_args!("where to write {words}"))?;
    // SAFETY: not null, so the caller promises that it is valid.
    unsafe { place.write(value) };
    Ok(())
}

/// Writes as much of the text as fits into `capacity` bytes, with a final 0. Writes the length of the whole text, without
/// the 0, to `*length`.
///
/// # Safety
/// `text` is null, which is refused unless `capacity` is 0, or valid for writing `capacity` bytes. `length` is null, or valid
/// for writing.
pub(crate) unsafe fn put_text(words: &str, text: *mut c_char, capacity: usize, length: *mut usize) -> Outcome {
    if capacity > 0 {
        not_null("text", text, "where to write `capacity` bytes")?;
    }
    if !length.is_null() {
        // SAFETY: not null, so the caller promises that it is valid.
        unsafe { length.write(words.len()) };
    }
    if let Some(most) = capacity.checked_sub(1) {
        let fits = words.len().min(most);
        // SAFETY: `fits` bytes and a 0 are within `capacity`.
        unsafe {
            std::ptr::copy_nonoverlapping(words.as_ptr(), text.cast::<u8>(), fits);
            text.add(fits).write(0);
        }
    }
    Ok(())
}

fn not_null<T>(what: &str, pointer: *mut T, allowed: impl fmt::Display) -> Outcome {
    if pointer.is_null() { Err(Failure::argument(what, "a null pointer", allowed)) } else { Ok(()) }
}
