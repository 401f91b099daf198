//! Errors as data: what was wrong, what was found, and what is allowed.

use std::fmt;
use std::sync::Arc;

use crate::dtype::DType;

/// Why a call was refused or failed.
///
/// Every error except [`Driver`](Self::Driver) and [`Launch`](Self::Launch) is found before anything is launched. The
/// outputs are then untouched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor's shape is not the one that the problem asks for.
    #[error("{tensor}: shape {got:?}, expected {want:?} {axes}")]
    Shape {
        /// The tensor's name, as in [`Slot::name`](crate::Slot::name).
        tensor: &'static str,
        /// The tensor's shape.
        got: Vec<usize>,
        /// The shape that the problem asks for.
        want: Vec<usize>,
        /// The names of the dimensions, such as `[batch, seqlen, heads, head_dim]`.
        axes: &'static str,
    },
    /// A tensor's strides, bounds or address cannot be used.
    #[error("{tensor}: {got}; allowed: {allowed}")]
    Layout {
        /// The tensor's name. It is `layout` or `view` where the tensor has no name yet.
        tensor: &'static str,
        /// What was found.
        got: String,
        /// What would have been accepted.
        allowed: String,
    },
    /// An element type that is not allowed here.
    #[error("{what}: dtype {got}; allowed: {allowed}")]
    Dtype {
        /// The name of the tensor or argument that has the type.
        what: &'static str,
        /// The type that was found.
        got: DType,
        /// What would have been accepted.
        allowed: String,
    },
    /// A number or option is out of range, or an argument is missing or was not asked for.
    #[error("{what}: {got}; allowed: {allowed}")]
    Value {
        /// The name of the number, option or argument.
        what: &'static str,
        /// What was found.
        got: String,
        /// What would have been accepted.
        allowed: String,
    },
    /// A legal problem for which this build has no kernel on this device.
    #[error("unsupported: {wanted}; nearest: {nearest}")]
    Unsupported {
        /// What was asked for.
        wanted: String,
        /// The nearest alternative that exists.
        nearest: String,
    },
    /// The workspace is smaller than the plan's `workspace_bytes()`.
    #[error("workspace: have {have} bytes, need {need}")]
    Workspace {
        /// What the plan needs, in bytes.
        need: usize,
        /// What the workspace holds, in bytes.
        have: usize,
    },
    /// The host has no memory for what the call must allocate.
    ///
    /// A run on the CPU allocates its buffers before it writes an output. It allocates a few kilobytes more for its threads;
    /// where even these are missing, the program ends as any Rust program does without memory.
    #[error("no memory: {need} bytes for {what}, which the host does not give")]
    Memory {
        /// What the memory is for.
        what: &'static str,
        /// The size of the allocation that failed, in bytes.
        need: usize,
    },
    /// The threads of the CPU backend cannot be started. A later run tries again.
    #[error("no threads: the system refuses to start those of the CPU backend{}", because(.source))]
    #[non_exhaustive]
    Threads {
        /// The system's error.
        source: Option<ErrorSource>,
    },
    /// Tensors, workspace, stream and plan are not all on one device and in one CUDA context.
    #[error("{what}: on {got}; allowed: {allowed}")]
    Device {
        /// The argument that is in the wrong place.
        what: &'static str,
        /// The place where the argument is.
        got: String,
        /// The place where the argument should be.
        allowed: String,
    },
    /// The call is not possible while the stream is captured into a CUDA graph.
    #[error("stream capture: {got}; allowed: {allowed}")]
    Capture {
        /// What prevents the capture.
        got: String,
        /// How to capture instead.
        allowed: String,
    },
    /// The CUDA driver returned an error, for this call or for earlier work whose error only surfaces now.
    ///
    /// A kernel that accesses wrong memory is such earlier work. It breaks the context: from then on every call on that GPU in
    /// this process fails with the same code.
    #[error("CUDA driver, {what}: {name} ({code}): {text}")]
    #[non_exhaustive]
    Driver {
        /// What the library was doing.
        what: &'static str,
        /// The driver's `CUresult`.
        code: u32,
        /// The name of that code, such as `CUDA_ERROR_ILLEGAL_ADDRESS`.
        name: String,
        /// The driver's text for that code.
        text: String,
        /// The error as cudarc gave it.
        source: Option<ErrorSource>,
    },
    /// The kernel could not be loaded or launched.
    #[error("{what} of {kernel}: {text}")]
    #[non_exhaustive]
    Launch {
        /// `prepare` (loading the kernel) or `launch`.
        what: &'static str,
        /// The kernel, as [`KernelInfo`](crate::KernelInfo) prints it.
        kernel: String,
        /// What the CUDA runtime or the driver said.
        text: String,
    },
    /// The device that was asked for does not exist.
    #[error("no device: {wanted}; {found}")]
    #[non_exhaustive]
    NoDevice {
        /// The device that was asked for.
        wanted: String,
        /// What was found instead.
        found: String,
        /// The driver's error, if there is a driver that does not start.
        source: Option<ErrorSource>,
    },
}

/// The error of another library that led to an [`Error`]. [`std::error::Error::source`] returns it.
///
/// Two sources are equal when their texts are equal.
#[derive(Clone)]
pub struct ErrorSource(Arc<dyn std::error::Error + Send + Sync>);

impl ErrorSource {
    /// Wraps an error.
    pub fn new(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self(Arc::new(error))
    }
}

impl std::error::Error for ErrorSource {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

impl fmt::Display for ErrorSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for ErrorSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl PartialEq for ErrorSource {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Eq for ErrorSource {}

/// The end of a message that has a source.
fn because(source: &Option<ErrorSource>) -> String {
    source.as_ref().map_or_else(String::new, |source| format!(" ({source})"))
}

/// [`std::result::Result`] with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_say_what_got_and_allowed() {
        let text = Error::Shape { tensor: "k", got: vec![1, 2], want: vec![1, 3], axes: "[batch, seqlen]" }.to_string();
        assert_eq!(text, "k: shape [1, 2], expected [1, 3] [batch, seqlen]");
        let text = Error::Workspace { need: 8, have: 4 }.to_string();
        assert_eq!(text, "workspace: have 4 bytes, need 8");
    }

    #[test]
    fn an_error_keeps_its_source() {
        use std::error::Error as _;
        let parse = |text: &str| ErrorSource::new(text.parse::<i32>().unwrap_err());
        let driver = |source| {
            let (name, text) = ("CUDA_ERROR_INVALID_VALUE".into(), "invalid argument".into());
            Error::Driver { what: "opening", code: 1, name, text, source }
        };
        let error = driver(Some(parse("x")));
        assert_eq!(error.to_string(), "CUDA driver, opening: CUDA_ERROR_INVALID_VALUE (1): invalid argument");
        assert_eq!(error.source().unwrap().to_string(), "invalid digit found in string");
        assert_eq!(error, driver(Some(parse("y"))));
        assert_ne!(error, driver(Some(parse(""))));
        assert!(driver(None).source().is_none());
    }

    const _: () = {
        const fn shared<T: Send + Sync + 'static>() {}
        shared::<Error>();
    };
}
