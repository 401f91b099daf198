//! How large rounding errors are. The oracle makes its scales of these numbers, and the tolerance its bounds.

use crate::dtype::DType;

/// The error that a score may have, in unit roundoffs of the sum of the magnitudes of its terms.
pub(super) const SCORE_ROUNDOFFS: f64 = 4.0;
/// The standard deviation of rounding a number, in unit roundoffs of it ([`tolerance`](super::tolerance) says for which numbers).
pub(super) const ROUNDING: f64 = 0.42;
/// The unit roundoff of f32.
pub(super) const U32: f64 = 1.0 / (1 << 24) as f64;

/// The unit roundoff of a type: half an ulp of 1, the largest relative error of rounding.
pub(super) fn unit_roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::E4M3 => 1.0 / 16.0,
        DType::BF16 => 1.0 / 256.0,
        DType::F16 => 1.0 / 2048.0,
        // No problem has operands of i32, which rounds nothing.
        DType::F32 | DType::I32 => U32,
    }
}

/// The smallest normal f32. A GPU may flush smaller numbers to 0.
pub(super) const SMALLEST_NORMAL: f64 = f32::MIN_POSITIVE as f64;

/// The largest error of rounding numbers near 0: half the smallest subnormal of the type, but at least [`SMALLEST_NORMAL`].
pub(super) fn half_subnormal(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 1.0 / (1 << 25) as f64,
        DType::E4M3 => 1.0 / 1024.0,
        DType::BF16 | DType::F32 | DType::I32 => SMALLEST_NORMAL,
    }
}
