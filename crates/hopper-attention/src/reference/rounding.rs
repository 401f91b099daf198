//! How large rounding errors are. The oracle makes its scales of these numbers, and the tolerance its bounds.

use super::Tensor;
use crate::dtype::DType;
use crate::problem::ForwardProblem;

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

/// The unit roundoff `s` of a whole score of 16-bit products in f32. They are summed in steps of 16, each of which cuts off the sum
/// so far at about 2^-23. The mean loss is half of that. If all products have one sign, all steps together lose `head_dim / 32`
/// times 2^-24. At head dim 128 that is the 4 that the tolerance has.
pub(super) fn score_roundoff_16_bits(head_dim: usize) -> f64 {
    U32 * (head_dim as f64 / 128.0).max(1.0)
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

/// What a weight of a key stays below in a kernel for these operands, before the division by the row's sum.
///
/// A kernel need not make a row's largest weight 1 (`kernels/common/softmax.hpp`): a sum that a lane adds in one block stays
/// below the limit of the type, and with it every weight. sm90 has 2^32 for bf16 without a mask and 2^15 else, sm80 2^15, FP8 448. The
/// CPU, which alone computes f32, has 1.
pub(super) fn weight_limit(dtype: DType) -> f64 {
    match dtype {
        DType::E4M3 => LARGEST_E4M3,
        DType::BF16 => (1u64 << 32) as f64,
        DType::F16 => (1 << 15) as f64,
        DType::F32 | DType::I32 => 1.0,
    }
}

/// The least magnitude that rounds to infinity in a type. Infinity for one that has none: it saturates.
pub(super) fn overflow(dtype: DType) -> f64 {
    let largest_power = match dtype {
        DType::F16 => 15,
        DType::BF16 | DType::F32 => 127,
        DType::E4M3 | DType::I32 => return f64::INFINITY,
    };
    (2.0 - unit_roundoff(dtype)) * 2.0_f64.powi(largest_power)
}

/// The least error of an element of O with dropout ([`tolerance`](super::tolerance) says why). 0 without.
pub(super) fn least_with_dropout(problem: &ForwardProblem, v: &Tensor) -> f64 {
    let Some(dropout) = problem.drops() else { return 0.0 };
    let least = match problem.dtype() {
        DType::F16 => half_subnormal(DType::F16),
        DType::BF16 => SMALLEST_NORMAL * weight_limit(DType::BF16),
        _ => return 0.0,
    };
    let finite = v.data().iter().map(|v| v.abs()).filter(|v| v.is_finite());
    dropout.factor() * least * finite.fold(0.0, f64::max)
}

/// The largest e4m3 number.
pub(super) const LARGEST_E4M3: f64 = 448.0;

/// `sqrt(a^2 + b^2)`, as `f64::hypot`. That costs several times as much, to be right where squares overflow or underflow.
pub(super) fn hypot(a: f64, b: f64) -> f64 {
    let square = a * a + b * b;
    if (1e-280..1e300).contains(&square) {
        square.sqrt()
    } else if b == 0.0 {
        // Most of them.
        a.abs()
    } else {
        a.hypot(b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::{bf16, f16};

    #[test]
    fn the_first_number_that_rounds_to_infinity() {
        assert_eq!(overflow(DType::F16), 65520.0);
        assert!(f16::from_f64(65520.0).is_infinite() && f16::from_f64(65519.0).is_finite());
        let of_bf16 = overflow(DType::BF16) as f32;
        assert!(bf16::from_f32(of_bf16).is_infinite());
        assert!(bf16::from_f32(f32::from_bits(of_bf16.to_bits() - 1)).is_finite());
        let of_f32 = overflow(DType::F32);
        assert!((of_f32 as f32).is_infinite() && ((of_f32 * (1.0 - 1e-15)) as f32).is_finite());
        assert_eq!(overflow(DType::E4M3), f64::INFINITY);
    }

    #[test]
    fn hypot_of_any_numbers() {
        let numbers = [0.0, -0.0, 5e-324, 1e-200, -1e-141, 3.0, -4.0, 1e149, -1e200, f64::MAX, f64::INFINITY, f64::NAN];
        for (a, b) in numbers.into_iter().flat_map(|a| numbers.map(|b| (a, b))) {
            let (got, want) = (hypot(a, b), a.hypot(b));
            assert!(got == want || (got / want - 1.0).abs() < 4e-16 || got.is_nan() && want.is_nan(), "{a} {b}: {got}");
        }
    }
}
