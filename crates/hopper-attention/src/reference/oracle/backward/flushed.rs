//! What a GPU makes 0 of in a gradient, since it has no subnormal f32.

use super::super::super::rounding::SMALLEST_NORMAL;

/// A GPU makes 0 of P and dS below the smallest normal f32. The error of a score may make P twice as small.
pub(super) const FLUSHED: f64 = 2.0 * SMALLEST_NORMAL;

/// The magnitude of what is flushed. 0 of what is so small that no sum of it counts.
pub(super) fn counted(flushed: f64) -> f64 {
    if (1e-12 * FLUSHED..f64::INFINITY).contains(&flushed.abs()) { flushed.abs() } else { 0.0 }
}

/// Adds the magnitudes of a vector, of what is finite.
pub(super) fn add_magnitudes(weight: f64, vector: &[f64], sums: &mut [f64]) {
    let pairs = sums.iter_mut().zip(vector).filter(|(_, x)| x.is_finite());
    pairs.for_each(|(sum, x)| *sum += weight * x.abs());
}
