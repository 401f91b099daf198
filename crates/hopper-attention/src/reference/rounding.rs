//! What rounding to a type costs: the numbers of which the oracle makes its scales, and the tolerance its bounds.

use crate::dtype::DType;

/// Unit roundoffs that a score may be off by, as a multiple of the magnitudes summed for it.
pub(super) const SCORE_ROUNDOFFS: f64 = 4.0;
/// The unit roundoff of f32.
pub(super) const U32: f64 = 1.0 / (1 << 24) as f64;

/// Half an ulp of 1: the largest relative error of rounding to a type.
pub(super) fn unit_roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::E4M3 => 1.0 / 16.0,
        DType::BF16 => 1.0 / 256.0,
        DType::F16 => 1.0 / 2048.0,
        DType::F32 => U32,
    }
}

/// The smallest normal f32: what is below it may be flushed to 0.
pub(super) const SMALLEST_NORMAL: f64 = f32::MIN_POSITIVE as f64;

/// What rounding to a type moves numbers near 0 by.
pub(super) fn half_subnormal(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 1.0 / (1 << 25) as f64,
        DType::E4M3 => 1.0 / 1024.0,
        DType::BF16 | DType::F32 => SMALLEST_NORMAL,
    }
}
