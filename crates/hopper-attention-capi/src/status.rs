//! Statuses, the text of a thread's last failure, and the wall that no panic crosses.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use hopper_attention::Error;

/// HATTN_OK, or why nothing was done; hattn_last_error has the words.
pub type hattn_status = i32;
/// It was done, or enqueued.
pub const HATTN_OK: hattn_status = 0;
/// A null pointer, or a number that is none of the constants for its place.
pub const HATTN_ERROR_ARGUMENT: hattn_status = 1;
/// A struct of a size or version that this library does not know.
pub const HATTN_ERROR_ABI: hattn_status = 2;
/// A tensor's shape is not the problem's.
pub const HATTN_ERROR_SHAPE: hattn_status = 3;
/// A tensor's strides, alignment or range of addresses.
pub const HATTN_ERROR_LAYOUT: hattn_status = 4;
/// An element type that does not fit there.
pub const HATTN_ERROR_DTYPE: hattn_status = 5;
/// A number out of range, or an argument that is missing or not wanted.
pub const HATTN_ERROR_VALUE: hattn_status = 6;
/// A legal problem for which this library has no kernel on this device.
pub const HATTN_ERROR_UNSUPPORTED: hattn_status = 7;
/// The workspace is missing or too small.
pub const HATTN_ERROR_WORKSPACE: hattn_status = 8;
/// A tensor or the stream is not where the plan is.
pub const HATTN_ERROR_DEVICE: hattn_status = 9;
/// Not possible while the stream is captured.
pub const HATTN_ERROR_CAPTURE: hattn_status = 10;
/// The CUDA driver returned an error, possibly that of earlier work.
pub const HATTN_ERROR_DRIVER: hattn_status = 11;
/// The kernel could not be loaded or launched.
pub const HATTN_ERROR_LAUNCH: hattn_status = 12;
/// No such GPU, no driver, or a library built without CUDA.
pub const HATTN_ERROR_NO_DEVICE: hattn_status = 13;
/// A bug of this library.
pub const HATTN_ERROR_INTERNAL: hattn_status = 14;

const NAMES: [&CStr; 15] = [
    c"HATTN_OK",
    c"HATTN_ERROR_ARGUMENT",
    c"HATTN_ERROR_ABI",
    c"HATTN_ERROR_SHAPE",
    c"HATTN_ERROR_LAYOUT",
    c"HATTN_ERROR_DTYPE",
    c"HATTN_ERROR_VALUE",
    c"HATTN_ERROR_UNSUPPORTED",
    c"HATTN_ERROR_WORKSPACE",
    c"HATTN_ERROR_DEVICE",
    c"HATTN_ERROR_CAPTURE",
    c"HATTN_ERROR_DRIVER",
    c"HATTN_ERROR_LAUNCH",
    c"HATTN_ERROR_NO_DEVICE",
    c"HATTN_ERROR_INTERNAL",
];

/// The name of a status, such as "HATTN_ERROR_SHAPE"; "HATTN_ERROR_?" for a number that is none.
#[unsafe(no_mangle)]
pub extern "C" fn hattn_status_name(status: hattn_status) -> *const c_char {
    let name = usize::try_from(status).ok().and_then(|index| NAMES.get(index));
    name.map_or(c"HATTN_ERROR_?".as_ptr(), |name| name.as_ptr())
}

/// The last failure of this thread: what was wrong, what it was, and what is allowed. "" before the first one. Valid
/// until the thread's next failure.
#[unsafe(no_mangle)]
pub extern "C" fn hattn_last_error() -> *const c_char {
    // A thread that is ending may have lost its text.
    LAST_ERROR.try_with(|text| text.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
    /// Whether this thread is inside of an entry.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    /// What the panic of this entry said.
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Why an entry did nothing.
#[derive(Debug)]
pub(crate) enum Failure {
    Argument(String),
    Abi(String),
    Library(Error),
}

pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    pub fn argument(what: &str, got: &str, allowed: impl fmt::Display) -> Self {
        Self::Argument(format!("{what}: {got}; allowed: {allowed}"))
    }

    pub fn status(&self) -> hattn_status {
        match self {
            Self::Argument(_) => HATTN_ERROR_ARGUMENT,
            Self::Abi(_) => HATTN_ERROR_ABI,
            Self::Library(error) => match error {
                Error::Shape { .. } => HATTN_ERROR_SHAPE,
                Error::Layout { .. } => HATTN_ERROR_LAYOUT,
                Error::Dtype { .. } => HATTN_ERROR_DTYPE,
                Error::Value { .. } => HATTN_ERROR_VALUE,
                Error::Unsupported { .. } => HATTN_ERROR_UNSUPPORTED,
                Error::Workspace { .. } => HATTN_ERROR_WORKSPACE,
                Error::Device { .. } => HATTN_ERROR_DEVICE,
                Error::Capture { .. } => HATTN_ERROR_CAPTURE,
                Error::Driver { .. } => HATTN_ERROR_DRIVER,
                Error::Launch { .. } => HATTN_ERROR_LAUNCH,
                Error::NoDevice { .. } => HATTN_ERROR_NO_DEVICE,
                // A variant that was added to the safe crate and forgotten here.
                _ => HATTN_ERROR_INTERNAL,
            },
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Argument(text) | Self::Abi(text) => f.write_str(text),
            Self::Library(error) => error.fmt(f),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Library(error)
    }
}

/// Runs an entry: its failure becomes a status and this thread's text, and so does a panic.
pub(crate) fn entry(body: impl FnOnce() -> Outcome) -> hattn_status {
    silence_panics();
    let inside = INSIDE.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(body));
    INSIDE.set(inside);
    let (status, text) = match outcome {
        Ok(Ok(())) => return HATTN_OK,
        Ok(Err(failure)) => (failure.status(), failure.to_string()),
        Err(_) => (HATTN_ERROR_INTERNAL, format!("a bug of the library, {}", PANIC.take())),
    };
    // There is no 0 in our texts; one in a name that a driver gave would end the text early.
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    let _ = LAST_ERROR.try_with(|last| last.replace(text));
    status
}

/// Keeps panics inside of entries from being printed: a library has no business on its host's stderr. Panics elsewhere
/// go to whatever hook was there.
fn silence_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let elsewhere = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if INSIDE.try_with(Cell::get).unwrap_or(false) {
                PANIC.set(panic.to_string());
            } else {
                elsewhere(panic);
            }
        }));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last_error() -> String {
        // SAFETY: a string of this thread, which does not fail meanwhile.
        unsafe { CStr::from_ptr(hattn_last_error()) }.to_string_lossy().into_owned()
    }

    #[test]
    fn a_panic_becomes_a_status_and_is_not_printed() {
        assert_eq!(last_error(), "");
        let status = entry(|| panic!("at the {}", "disco"));
        assert_eq!(status, HATTN_ERROR_INTERNAL);
        let text = last_error();
        assert!(text.starts_with("a bug of the library, panicked at ") && text.ends_with("at the disco"), "{text}");
        assert!(!INSIDE.get());
        // The text of a failure outlives a success.
        assert_eq!(entry(|| Ok(())), HATTN_OK);
        assert_eq!(last_error(), text);
    }

    #[test]
    fn each_thread_has_its_text() {
        assert_eq!(entry(|| Err(Failure::argument("a", "b", "c"))), HATTN_ERROR_ARGUMENT);
        std::thread::spawn(|| assert_eq!(last_error(), "")).join().unwrap();
        assert_eq!(last_error(), "a: b; allowed: c");
    }

    #[test]
    fn statuses_have_names() {
        // SAFETY: strings of the program.
        let name = |status| unsafe { CStr::from_ptr(hattn_status_name(status)) }.to_str().unwrap();
        assert_eq!((name(HATTN_OK), name(HATTN_ERROR_INTERNAL)), ("HATTN_OK", "HATTN_ERROR_INTERNAL"));
        assert_eq!(
            (name(HATTN_ERROR_LAYOUT), name(HATTN_ERROR_NO_DEVICE)),
            ("HATTN_ERROR_LAYOUT", "HATTN_ERROR_NO_DEVICE")
        );
        assert_eq!((name(-1), name(15)), ("HATTN_ERROR_?", "HATTN_ERROR_?"));
    }
}
