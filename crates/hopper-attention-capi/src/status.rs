//! Statuses, the text of a thread's last failure, and how panics become failures.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use hopper_attention::Error;

/// How a call ended: HATTN_OK, or one of HATTN_ERROR_. hattn_last_error gives the text of an error.
pub type hattn_status = i32;
/// The work is done, or enqueued on the stream.
pub const HATTN_OK: hattn_status = 0;
/// A null pointer, or a number that is not one of the constants of its type.
pub const HATTN_ERROR_ARGUMENT: hattn_status = 1;
/// A struct with a size or a version that the library does not know.
pub const HATTN_ERROR_ABI: hattn_status = 2;
/// A tensor has another shape than the problem says.
pub const HATTN_ERROR_SHAPE: hattn_status = 3;
/// The strides, the alignment or the address range of a tensor are not allowed.
pub const HATTN_ERROR_LAYOUT: hattn_status = 4;
/// An element type that is not allowed for this tensor or option.
pub const HATTN_ERROR_DTYPE: hattn_status = 5;
/// A number out of range, or a tensor that is missing or must be null.
pub const HATTN_ERROR_VALUE: hattn_status = 6;
/// The problem is valid, but the library has no kernel for it on this device.
pub const HATTN_ERROR_UNSUPPORTED: hattn_status = 7;
/// The workspace is null or too small.
pub const HATTN_ERROR_WORKSPACE: hattn_status = 8;
/// A tensor or the stream is on another device than the plan.
pub const HATTN_ERROR_DEVICE: hattn_status = 9;
/// The call is not possible while the stream is captured into a CUDA graph.
pub const HATTN_ERROR_CAPTURE: hattn_status = 10;
/// The CUDA driver returned an error. It may come from earlier work.
pub const HATTN_ERROR_DRIVER: hattn_status = 11;
/// A kernel could not be loaded or launched.
pub const HATTN_ERROR_LAUNCH: hattn_status = 12;
/// There is no such GPU, or no driver, or the library was built without CUDA.
pub const HATTN_ERROR_NO_DEVICE: hattn_status = 13;
/// A bug of the library.
pub const HATTN_ERROR_INTERNAL: hattn_status = 14;
/// The host has no memory for the buffers of a run on the CPU. Nothing was written.
pub const HATTN_ERROR_MEMORY: hattn_status = 15;
/// The threads of the CPU backend cannot be started. Nothing was written. A later run tries again.
pub const HATTN_ERROR_THREADS: hattn_status = 16;

const NAMES: [&CStr; 17] = [
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
    c"HATTN_ERROR_MEMORY",
    c"HATTN_ERROR_THREADS",
];

/// The name of a status, such as "HATTN_ERROR_SHAPE". "HATTN_ERROR_?" for any other number. The string is static.
#[unsafe(no_mangle)]
pub extern "C" fn hattn_status_name(status: hattn_status) -> *const c_char {
    let name = usize::try_from(status).ok().and_then(|index| NAMES.get(index));
    name.map_or(c"HATTN_ERROR_?".as_ptr(), |name| name.as_ptr())
}

/// The text of this thread's last failure: what was wrong, what it was, and what is allowed. "" before the first failure.
///
/// The string stays valid until the next failure of this thread, or its end.
#[unsafe(no_mangle)]
pub extern "C" fn hattn_last_error() -> *const c_char {
    // A thread that is ending may have lost its text.
    LAST_ERROR.try_with(|text| text.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
    /// Whether this thread is inside a function of the ABI.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    /// The message of the panic that ends this call.
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Why a call failed.
#[derive(Debug)]
pub(crate) enum Failure {
    Argument(String),
    Abi(String),
    Library(Error),
}

pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    pub fn argument(what: &str, got: impl fmt::Display, allowed: impl fmt::Display) -> Self {
        Self::Argument(format!("{what}: {got}; allowed: {allowed}"))
    }

    pub fn abi(what: &str, got: impl fmt::Display, allowed: impl fmt::Display) -> Self {
        Self::Abi(format!("{what}: {got}; allowed: {allowed}"))
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
                Error::Memory { .. } => HATTN_ERROR_MEMORY,
                Error::Threads { .. } => HATTN_ERROR_THREADS,
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

/// Runs the body of a function of the ABI. A failure or a panic becomes a status and this thread's text.
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
    // Our texts have no 0 byte. One in a name that a driver gave would end the text early.
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    let _ = LAST_ERROR.try_with(|last| last.replace(text));
    status
}

/// Keeps panics inside the ABI's functions from being printed, because a library must not write to its host's stderr.
/// Panics elsewhere go to the hook that was there before.
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
        assert_eq!(
            (name(HATTN_ERROR_MEMORY), name(HATTN_ERROR_THREADS)),
            ("HATTN_ERROR_MEMORY", "HATTN_ERROR_THREADS")
        );
        assert_eq!((name(-1), name(17)), ("HATTN_ERROR_?", "HATTN_ERROR_?"));
    }
}
