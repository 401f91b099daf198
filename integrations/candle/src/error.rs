//! Errors of `hopper_attention` as candle's.

use std::fmt;

use candle_core::Error;

/// An error of ours within one of candle. candle prints the cause of an error with `Debug`, which here is the readable
/// text.
struct Refusal(hopper_attention::Error);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl std::error::Error for Refusal {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

/// The error of candle that says what `error` says. [`cause`] gives `error` back.
pub fn refusal(error: hopper_attention::Error) -> Error {
    Error::WrappedContext { wrapped: Box::new(Refusal(error)), context: "hopper-attention".into() }.bt()
}

/// The error for what a pass has not left. No pass of this crate does so.
pub(crate) fn missing(what: &'static str) -> Error {
    let (got, allowed) = ("missing".into(), "gradients after a forward pass that kept the LSE".into());
    refusal(hopper_attention::Error::Value { what, got, allowed })
}

/// The `hopper_attention::Error` inside a candle error. `None` if there is none inside.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use hopper_attention_candle::{Options, attention, cause, hopper_attention::Error};
///
/// # fn main() -> candle_core::Result<()> {
/// let q = Tensor::zeros((1, 4, 3, 8), DType::F32, &Device::Cpu)?;
/// let k = Tensor::zeros((1, 4, 2, 8), DType::F32, &Device::Cpu)?; // 3 query heads for 2 KV heads
/// let error = attention(&q, &k, &k, &Options::new()).unwrap_err();
/// assert!(matches!(cause(&error), Some(Error::Value { what: "heads_q", .. })));
/// # Ok(()) }
/// ```
pub fn cause(error: &Error) -> Option<&hopper_attention::Error> {
    match error {
        Error::WrappedContext { wrapped, .. } => wrapped.downcast_ref::<Refusal>().map(|refusal| &refusal.0),
        Error::WithBacktrace { inner, .. } | Error::WithPath { inner, .. } | Error::Context { inner, .. } => {
            cause(inner)
        }
        _ => None,
    }
}
