//! The cap of scores: `c * tanh(s / c)`. Masked pairs are left out before, since their scores are no numbers of the softmax.

/// Caps scores in place. A cap of 0 is none.
pub(super) fn cap(softcap: f32, scores: &mut [f32]) {
    if softcap != 0.0 {
        scores.iter_mut().for_each(|score| *score = capped(softcap, *score).0);
    }
}

/// A capped score, and its derivative with respect to the score: `1 - tanh^2`.
pub(super) fn capped(softcap: f32, score: f32) -> (f32, f32) {
    let t = (score / softcap).tanh();
    // The product keeps more bits near 1 than `1 - t * t` does.
    (softcap * t, (1.0 - t) * (1.0 + t))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caps_by_hand() {
        let mut scores = [0.0, 1e-3, -1e30, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 50.0];
        cap(50.0, &mut scores);
        assert_eq!(scores[..5], [0.0, 1e-3, -50.0, 50.0, -50.0]);
        assert!(scores[5].is_nan() && (scores[6] - 50.0 * 1f32.tanh()).abs() < 1e-5);
        let mut same = [3.0, f32::NEG_INFINITY];
        cap(0.0, &mut same);
        assert_eq!(same, [3.0, f32::NEG_INFINITY]);
        assert_eq!([0.0, 1e9, -f32::INFINITY].map(|score| capped(15.0, score).1), [1.0, 0.0, 0.0]);
        // Against the difference quotient in f64.
        for score in [-40.0, -7.5, 0.5, 3.0, 22.0, 60.0_f64] {
            let f = |x: f64| 15.0 * (x / 15.0).tanh();
            let want = (f(score + 1e-5) - f(score - 1e-5)) / 2e-5;
            let got = f64::from(capped(15.0, score as f32).1);
            assert!((got - want).abs() < 1e-6, "{score}: {got}, {want}");
        }
    }
}
