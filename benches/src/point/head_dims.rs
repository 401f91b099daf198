//! The head dims of a point.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// The head dim of Q and K, and that of V and O. On a command line and in names `128`, or `192x128` where they differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadDims {
    /// Of Q and K.
    pub qk: usize,
    /// Of V and O.
    pub vo: usize,
}

impl From<usize> for HeadDims {
    fn from(head_dim: usize) -> Self {
        Self { qk: head_dim, vo: head_dim }
    }
}

impl FromStr for HeadDims {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (qk, vo) = text.split_once('x').unwrap_or((text, text));
        match (qk.parse(), vo.parse()) {
            (Ok(qk), Ok(vo)) => Ok(Self { qk, vo }),
            _ => Err("a head dim such as 128, or 192x128 for Q and K of 192 and V of 128".into()),
        }
    }
}

impl fmt::Display for HeadDims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { qk, vo } = self;
        if qk == vo { write!(f, "{qk}") } else { write!(f, "{qk}x{vo}") }
    }
}

impl Serialize for HeadDims {
    /// A number where both are equal, as in reports from before there were pairs.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.qk == self.vo { serializer.serialize_u64(self.qk as u64) } else { serializer.collect_str(self) }
    }
}
