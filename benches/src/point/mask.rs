//! The masks of points.

use std::str::FromStr;

use serde::Serialize;

/// Which keys a point's queries see; on a command line `full`, `causal` or `window:1024`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PointMask {
    /// Every key.
    Full,
    /// The keys up to their own.
    Causal,
    /// Their own and so many keys before it.
    Window(usize),
}

impl PointMask {
    /// Whether a point is causal, and its window.
    pub(crate) fn bounds(self) -> (bool, Option<usize>) {
        match self {
            Self::Full => (false, None),
            Self::Causal => (true, None),
            Self::Window(keys) => (true, Some(keys)),
        }
    }
}

impl FromStr for PointMask {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match (text, text.strip_prefix("window:").map(str::parse)) {
            ("full", _) => Ok(Self::Full),
            ("causal", _) => Ok(Self::Causal),
            (_, Some(Ok(keys))) => Ok(Self::Window(keys)),
            _ => Err("full, causal, or window:N for a query's own key and N keys before it".into()),
        }
    }
}
