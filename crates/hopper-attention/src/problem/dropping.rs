//! Dropout of a problem: what it means, and the operand with the state of the random numbers.

use super::dropout::Dropout;
use super::forward::{ForwardProblem, ForwardProblemBuilder};
use crate::dtype::DType;
use crate::operand::{Operand, Slot};

impl ForwardProblemBuilder {
    /// Dropout of the weights (default: none): random weights become 0, and the others are multiplied by `1 / (1 - p)`.
    ///
    /// ```text
    /// O  = (P * Z) V / (1 - p)                 P: the softmax probabilities, Z: 1 where a pair is kept, 0 where it is dropped
    /// dV = (P * Z)^T dO / (1 - p)
    /// dS = P * (Z * dP / (1 - p) - delta)      delta = rowsum(dO * O) - dLSE, as without dropout
    /// ```
    ///
    /// - `p` is [`Dropout::probability`]. With a probability of 0 the results are those without dropout, bit for bit.
    /// - Only the weights are dropped. The log-sum-exp, the [maximum logit](Self::max_logits) and the part of
    ///   [`sinks`](Self::sinks) in the softmax are as without dropout.
    /// - A dropped pair adds nothing to O and dV, also where its value or its dO is NaN. Its score counts in the log-sum-exp. So
    ///   a NaN in its query or its key reaches the whole row, as without dropout.
    /// - Which pairs are dropped follows from the seed, the offset, the number of the batch entry (where sequences are packed, of
    ///   the sequence), the query head, and the positions of query and key in the sequence. It does not depend on the device, on
    ///   the mask, nor on how sequences are packed. [`reference::DropoutMask`](crate::reference::DropoutMask) says for each pair
    ///   whether it is kept.
    /// - A backward pass made from this problem must read the same seed and offset as the forward pass.
    /// - The CPU computes dropout, and so do GPUs for bf16 and f16. `build` refuses e4m3 operands. On a Hopper GPU some forward
    ///   problems run in sm80 kernels (`docs/numerics.md` lists them). A plan that [asks](Self::arch) for sm90 kernels there is
    ///   refused.
    ///
    /// A run reads the operand [`Slot::DropoutState`]: the seed and the offset, as four `i32` words
    /// ([`dropout_state`](crate::dropout_state)). On a GPU they may be in its memory: then they are read while the pass computes, so
    /// that a CUDA graph may have others at each launch. Or they may be in host memory: then the call reads them, and a graph keeps
    /// them. Use another offset (or seed) for each forward pass whose masks must differ.
    pub fn dropout(mut self, dropout: Option<Dropout>) -> Self {
        self.dropout = dropout;
        self
    }
}

impl ForwardProblem {
    /// The dropout of the weights. `None` where there is none.
    pub fn dropout(&self) -> Option<Dropout> {
        self.dropout
    }

    /// The dropout that drops anything: `None` also for a probability of 0.
    pub(crate) fn drops(&self) -> Option<Dropout> {
        self.dropout.filter(|dropout| dropout.dropped() > 0)
    }

    /// The operand with the seed and the offset, which every pass of the problem reads.
    pub(super) fn dropout_operand(&self) -> Operand {
        Operand::read(Slot::DropoutState, DType::I32, [4]).when(self.dropout.is_some(), "dropout")
    }

    /// What the weights are multiplied by that dropout keeps: 1 without dropout.
    pub(crate) fn dropout_factor(&self) -> f32 {
        self.dropout.map_or(1.0, |dropout| dropout.factor() as f32)
    }

    /// Prints the probability, if there is dropout.
    pub(super) fn dropout_text(&self) -> String {
        self.dropout.map_or(String::new(), |dropout| format!(" {dropout}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::Mask;
    use crate::operand::Presence;
    use crate::problem::{BackwardProblem, Dims};

    fn options() -> ForwardProblemBuilder {
        ForwardProblem::builder(DType::BF16, Dims::new(2, 5, 6, 16)).mask(Mask::causal())
    }

    #[test]
    fn the_state_is_an_operand_of_both_passes() {
        let dropout = Dropout::new(0.25).unwrap();
        let problem = options().dropout(Some(dropout)).build().unwrap();
        let plain = options().build().unwrap();
        assert_eq!((problem.dropout(), plain.dropout()), (Some(dropout), None));
        assert!(problem.to_string().contains("causal dropout 0.25 scale 0.25"), "{problem}");
        assert_eq!(problem.to_builder().build().unwrap(), problem);
        assert_eq!(problem.to_builder().dropout(None).build().unwrap(), plain);
        assert_eq!(problem.of_sequence(3, 2).dropout(), Some(dropout));
        assert!(problem.shape() != plain.shape());
        let backward = BackwardProblem::builder(&problem).build().unwrap();
        assert!(backward.to_string().contains(" dropout 0.25 "), "{backward}");
        for operands in [problem.operands(), backward.operands()] {
            let row = operands.find(Slot::DropoutState).unwrap();
            assert_eq!((row.shape(), row.dtype(), row.presence()), (&[4][..], DType::I32, Presence::Required));
        }
        assert_eq!(plain.operands().find(Slot::DropoutState).unwrap().presence(), Presence::Refused);
        // A probability of 0 is dropout, too: its runs read a state.
        let none = options().dropout(Some(Dropout::new(0.0).unwrap())).build().unwrap();
        assert!(none != plain && none.operands() == problem.operands());
        // The slot alone does not say how many are dropped.
        let error = options().operand(Slot::DropoutState, true).build().unwrap_err().to_string();
        assert!(error.starts_with("dropout_state: asked for; allowed: lse,"), "{error}");
    }

    #[test]
    fn e4m3_operands_are_refused_by_name() {
        let fp8 = ForwardProblem::builder(DType::E4M3, Dims::new(2, 5, 6, 16));
        let error = fp8.dropout(Some(Dropout::new(0.1).unwrap())).build().unwrap_err();
        let text = "unsupported: dropout with e4m3 operands; nearest: bf16, f16 or f32 operands, or no dropout";
        assert_eq!(error.to_string(), text);
    }
}
