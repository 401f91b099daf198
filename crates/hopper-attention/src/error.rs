//! What can go wrong, as data: what was wrong, what it was, and what is allowed.

use std::fmt;
use std::sync::Arc;

use crate::dtype::DType;

/// Why a call was refused or failed.
///
/// Everything but [`Driver`](Self::Driver) and [`Launch`](Self::Launch) is found before anything is launched, so the
/// outputs are untouched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor's shape is not the one that the problem asks for.
    #[error("{tensor}: shape {got:?}, expected {want:?} {axes}")]
    Shape {
        /// The tensor's name, as [`Slot::name`](crate::Slot::name) has it.
        tensor: &'static str,
        /// Its shape.
        got: Vec<usize>,
        /// The shape that the problem has.
        want: Vec<usize>,
        /// The names of the dimensions, such as `[batch, seqlen, heads, head_dim]`.
        axes: &'static str,
    },
    /// A tensor's strides, bounds or address are not usable.
    #[error("{tensor}: {got}; allowed: {allowed}")]
    Layout {
        /// The tensor's name, or `layout` and `view` where none is known yet.
        tensor: &'static str,
        /// What was found.
        got: String,
        /// What would have been accepted.
        allowed: String,
    },
    /// An element type that does not fit here.
    #[error("{what}: dtype {got}; allowed: {allowed}")]
    Dtype {
        /// What has the type.
        what: &'static str,
        /// The type.
        got: DType,
        /// What would have been accepted.
        allowed: String,
    },
    /// A number or option that is out of range, or an argument that is missing or not wanted.
    #[error("{what}: {got}; allowed: {allowed}")]
    Value {
        /// The name of the number or option.
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
        /// The nearest thing that is there.
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
    /// Tensors, workspace, stream and plan are not on one device (one CUDA context).
    #[error("{what}: on {got}; allowed: {allowed}")]
    Device {
        /// What is in the wrong place.
        what: &'static str,
        /// Where it is.
        got: String,
        /// Where it should be.
        allowed: String,
    },
    /// Not possible while the stream is captured into a graph.
    #[error("stream capture: {got}; allowed: {allowed}")]
    Capture {
        /// What stands in the way.
        got: String,
        /// How to capture instead.
        allowed: String,
    },
    /// The CUDA driver returned an error, from this call or from earlier work that only now reports it.
    #[error("CUDA driver, {what}: {text} (CUresult {code})")]
    #[non_exhaustive]
    Driver {
        /// What was being done.
        what: &'static str,
        /// The driver's `CUresult`.
        code: u32,
        /// The driver's own words.
        text: String,
        /// The error as cudarc gave it.
        source: Option<ErrorSource>,
    },
    /// The kernel could not be loaded or launched.
    #[error("{what} of {kernel}: {text}")]
    #[non_exhaustive]
    Launch {
        /// `prepare` (load the module) or `launch`.
        what: &'static str,
        /// The kernel, as its row prints itself.
        kernel: String,
        /// What the CUDA runtime or the driver said.
        text: String,
    },
    /// The device that was asked for is not there.
    #[error("no device: {wanted}; {found}")]
    #[non_exhaustive]
    NoDevice {
        /// The device that was asked for.
        wanted: String,
        /// What was found instead.
        found: String,
        /// The driver's error, where there is a driver and it does not start.
        source: Option<ErrorSource>,
    },
}

/// The error of another library that led to an [`Error`]: what [`std::error::Error::source`] returns.
///
/// Two of them are equal when they say the same.
#[derive(Clone)]
pub struct ErrorSource(Arc<dyn std::error::Error + Send + Sync>);

impl ErrorSource {
    /// Keeps an error.
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
        let driver = |source| Error::Driver { what: "opening", code: 1, text: "no".into(), source };
        let error = driver(Some(parse("x")));
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
