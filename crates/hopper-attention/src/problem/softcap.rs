//! The cap of the scores: what it means.

use std::fmt;

use super::forward::{ForwardProblem, ForwardProblemBuilder};

impl ForwardProblemBuilder {
    /// The cap `c` of the scores (default: 0, none). Finite and above 0, or 0.
    ///
    /// ```text
    /// S' = c * tanh(softmax_scale * q . k / c)
    /// ```
    ///
    /// takes the place of `softmax_scale * q . k`. (Gemma 2 has a cap of 50, Grok-1 one of 30.) So scores are between -c and c.
    ///
    /// - The cap comes before the mask: a hidden key stays hidden.
    /// - A product `q . k` that is infinite gives a score of c or -c. A NaN stays one.
    /// - [`sinks`](Self::sinks) are not capped.
    /// - A backward pass made from this problem multiplies the gradient of a score by `1 - tanh^2`.
    /// - A cap far above the scores changes little, and costs accuracy: tanh in f32 has an error of about 2^-24, so a score has
    ///   one of `c * 2^-22` at most.
    /// - `softmax_scale / c` and `c * log2(e)` must be normal f32 numbers.
    /// - With e4m3 operands a score is that of the real values, with their factors in it. A GPU computes such problems with scores in
    ///   f32, also where [`half_scores`](Self::half_scores) are allowed.
    pub fn softcap(mut self, softcap: f32) -> Self {
        self.softcap = softcap;
        self
    }
}

impl ForwardProblem {
    /// The cap of the scores. 0 where there is none.
    pub fn softcap(&self) -> f32 {
        self.softcap.0
    }

    /// Prints the cap, if there is one.
    pub(super) fn softcap_text(&self) -> impl fmt::Display {
        if self.softcap.0 == 0.0 { String::new() } else { format!(" softcap {}", self.softcap.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::scale::ALLOWED;
    use super::*;
    use crate::dtype::DType;
    use crate::mask::Mask;
    use crate::problem::{BackwardProblem, Dims};

    fn options() -> ForwardProblemBuilder {
        ForwardProblem::builder(DType::BF16, Dims::new(2, 5, 6, 16)).mask(Mask::causal())
    }

    #[test]
    fn the_cap_is_a_part_of_the_problem() {
        let problem = options().softcap(50.0).build().unwrap();
        let text = "forward bf16 batch 2 seqlen 5x5 heads 6/6 head_dim 16/16 causal softcap 50 scale 0.25";
        assert_eq!((problem.softcap(), problem.to_string()), (50.0, text.into()));
        assert_eq!(problem.to_builder().build().unwrap(), problem);
        assert_eq!(problem.of_sequence(3, 2).softcap(), 50.0);
        let plain = options().build().unwrap();
        assert_eq!((plain.softcap(), problem.to_builder().softcap(-0.0).build().unwrap()), (0.0, plain.clone()));
        // Another kernel may be the fastest, so a tuning is of one or the other.
        assert!(problem.shape() != plain.shape() && problem != options().softcap(30.0).build().unwrap());
        let backward = BackwardProblem::builder(&problem).build().unwrap();
        assert_eq!(backward.forward().softcap(), 50.0);
        assert!(backward.to_string().contains("causal softcap 50 scale 0.25"), "{backward}");
    }

    #[test]
    fn what_no_cap_can_be_is_refused_by_name() {
        let refused = |options: ForwardProblemBuilder| options.build().unwrap_err().to_string();
        for (cap, got) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf"), (-50.0, "-50")] {
            assert_eq!(refused(options().softcap(cap)), format!("softcap: {got}; allowed: {ALLOWED}"));
        }
        // softmax_scale / softcap overflows, is subnormal; softcap * log2(e) overflows.
        for (cap, scale) in [(1e-38, 1e3), (1e30, 1e-10), (3e38, 1e3)] {
            let text = format!("softcap: {cap:e} with softmax_scale {scale:e}; allowed: {ALLOWED}");
            assert_eq!(refused(options().softcap(cap).softmax_scale(scale)), text);
        }
        assert!(options().softcap(1e-30).build().is_ok() && options().softcap(1e30).build().is_ok());
    }
}
