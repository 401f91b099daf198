//! The largest score of each query head, as an output.

use super::forward::{ForwardProblem, ForwardProblemBuilder};
use crate::operand::Slot;

impl ForwardProblemBuilder {
    /// Whether the largest score of each query head is an output: f32, `[heads_q]` (default: no).
    ///
    /// It is the maximum over batches, queries and the keys that the mask keeps, of all sequences. (Optimisers that bound the
    /// scores of each head, such as MuonClip, read it.)
    ///
    /// - A score is what enters the softmax: `softmax_scale * q . k`, after the [`softcap`](Self::softcap), the
    ///   [`bias`](Self::bias) and [`alibi`](Self::alibi). [`sinks`](Self::sinks) are not counted.
    /// - A head without any kept key has -inf. A score that is NaN is not counted.
    /// - A score that overflows f32 is infinite, and counted. With a softcap it is the cap, or minus that.
    /// - The same inputs give the same bits.
    /// - A backward problem that is made from this one does not have this output. e4m3 operands do not have it yet.
    ///
    /// A run writes the operand [`Slot::MaxLogits`].
    pub fn max_logits(self, wanted: bool) -> Self {
        self.operand(Slot::MaxLogits, wanted)
    }
}

impl ForwardProblem {
    /// Whether the largest score of each query head is an output.
    pub fn wants_max_logits(&self) -> bool {
        self.wants(Slot::MaxLogits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::operand::{Access, Presence};
    use crate::problem::{BackwardProblem, Dims};

    #[test]
    fn the_output_is_one_number_for_each_query_head() {
        let options = || ForwardProblem::builder(DType::F16, Dims::new(2, 5, 6, 16).with_heads_kv(2));
        let problem = options().max_logits(true).build().unwrap();
        let row = *problem.operands().find(Slot::MaxLogits).unwrap();
        assert_eq!((row.shape(), row.dtype(), row.access()), (&[6][..], DType::F32, Access::Write));
        assert!(problem.wants_max_logits() && row.presence() == Presence::Required);
        assert!(problem.to_string().contains("head_dim 16/16 full max_logits scale 0.25"), "{problem}");
        assert_eq!(problem.to_builder().build().unwrap(), problem);
        let plain = options().build().unwrap();
        assert_eq!(problem.to_builder().max_logits(false).build().unwrap(), plain);
        // Another kernel computes it.
        assert!(problem.shape() != plain.shape());
        assert_eq!(plain.operands().find(Slot::MaxLogits).unwrap().presence(), Presence::Refused);
    }

    #[test]
    fn a_backward_problem_does_not_have_it() {
        let forward = ForwardProblem::builder(DType::F16, Dims::new(2, 5, 6, 16)).max_logits(true).build().unwrap();
        let backward = BackwardProblem::builder(&forward).build().unwrap();
        assert!(!backward.forward().wants_max_logits() && backward.operands().find(Slot::MaxLogits).is_none());
        let error = BackwardProblem::builder(&forward).operand(Slot::MaxLogits, true).build().unwrap_err();
        assert!(error.to_string().starts_with("max_logits: asked for; allowed: d_lse, d_sinks"), "{error}");
    }

    #[test]
    fn e4m3_operands_are_refused_by_name() {
        let fp8 = ForwardProblem::builder(DType::E4M3, Dims::new(2, 5, 6, 16)).max_logits(true);
        let text = "unsupported: max_logits with e4m3 operands; nearest: bf16, f16 or f32 operands, or no max_logits";
        assert_eq!(fp8.build().unwrap_err().to_string(), text);
    }
}
