//! The cap of scores in f64, and what it does to their errors.

use super::rounding::{SCORE_ROUNDOFFS, U32};
use crate::problem::ForwardProblem;

/// `c * tanh(s / c)`, or nothing where `c` is 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct Softcap {
    /// The cap. 0 where there is none. (A unit roundoff of it is the size of the error of a capped score that tanh makes.)
    pub cap: f64,
}

impl Softcap {
    pub fn of(problem: &ForwardProblem) -> Self {
        Self { cap: f64::from(problem.softcap()) }
    }

    /// The capped score.
    pub fn score(self, score: f64) -> f64 {
        if self.cap == 0.0 { score } else { self.cap * (score / self.cap).tanh() }
    }

    /// The derivative of the capped score: `1 - tanh^2`.
    pub fn slope(self, score: f64) -> f64 {
        if self.cap == 0.0 { 1.0 } else { (score / self.cap).cosh().powi(-2) }
    }

    /// The largest derivative where a score of terms of this size may be: how much of the score's error is left.
    ///
    /// A size that is not finite is that of an infinite key, whose score has no error.
    pub fn steepest(self, score: f64, size: f64) -> f64 {
        if self.cap == 0.0 {
            return 1.0;
        }
        let error = SCORE_ROUNDOFFS * U32 * size;
        if error.is_finite() { self.slope((score.abs() - error).max(0.0)) } else { 0.0 }
    }

    /// The error of the derivative, as a computation in f32 makes it of tanh: of the score's error, of tanh and of the
    /// subtraction from 1. 0 where there is no cap.
    pub fn slope_noise(self, score: f64, size: f64) -> f64 {
        if self.cap == 0.0 {
            return 0.0;
        }
        let of_score = self.steepest(score, size) * size / self.cap;
        let of_score = if of_score.is_finite() { of_score } else { 0.0 };
        2.0 * (score / self.cap).tanh().abs() * SCORE_ROUNDOFFS * U32 * (1.0 + of_score) + U32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cap_flattens_scores_and_their_errors() {
        let (none, capped) = (Softcap { cap: 0.0 }, Softcap { cap: 15.0 });
        assert_eq!((none.score(70.0), none.slope(70.0), none.steepest(70.0, 1e9)), (70.0, 1.0, 1.0));
        assert_eq!((capped.score(0.0), capped.slope(0.0), none.slope_noise(3.0, 9.0)), (0.0, 1.0, 0.0));
        assert_eq!((capped.score(f64::INFINITY), capped.slope(f64::INFINITY)), (15.0, 0.0));
        assert!(capped.score(f64::NAN).is_nan() && capped.slope(f64::NAN).is_nan());
        for score in [-40.0, -3.0, 8.0, 33.0] {
            let quotient = (capped.score(score + 1e-4) - capped.score(score - 1e-4)) / 2e-4;
            assert!((quotient - capped.slope(score)).abs() < 1e-8, "{score}");
            // With small errors the derivative where the score is.
            assert!((capped.steepest(score, 100.0) / capped.slope(score) - 1.0).abs() < 1e-4, "{score}");
        }
        // So large an error may bring a saturated score down to where it is not.
        assert!(capped.slope(600.0) < 1e-30 && capped.steepest(600.0, 2e9) > 1e-10);
        assert_eq!((capped.steepest(600.0, 1e12), capped.steepest(600.0, f64::INFINITY)), (1.0, 0.0));
    }
}
