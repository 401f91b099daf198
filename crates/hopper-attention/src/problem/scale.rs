//! Floats that a problem holds, and the range of the cap of the scores.

use std::f32::consts::LOG2_E;
use std::hash::{Hash, Hasher};

use crate::error::{Error, Result};

/// A finite number of a problem. Two of them are equal when their bits are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale(pub f32);

impl PartialEq for Scale {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for Scale {}

impl Hash for Scale {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

/// What a cap may be.
pub(super) const ALLOWED: &str =
    "0 (none), or finite and above 0, with softmax_scale / softcap and softcap * log2(e) normal f32 numbers";

/// The cap as a problem holds it. -0 is 0.
///
/// # Errors
/// [`Error::Value`] for a cap that is out of range.
pub(super) fn softcap(softcap: f32, softmax_scale: f32) -> Result<Scale> {
    if softcap == 0.0 {
        return Ok(Scale(0.0));
    }
    let refuse = |got| Err(Error::Value { what: "softcap", got, allowed: ALLOWED.into() });
    if !(softcap.is_finite() && softcap > 0.0) {
        return refuse(softcap.to_string());
    }
    // Kernels multiply with the ratio. Without a normal one all scores would be 0 or NaN.
    if !((softmax_scale / softcap).is_normal() && (softcap * LOG2_E).is_normal()) {
        return refuse(format!("{softcap:e} with softmax_scale {softmax_scale:e}"));
    }
    Ok(Scale(softcap))
}
