//! ALiBi: what it means, and the operand with its slopes.

use super::forward::{ForwardProblem, ForwardProblemBuilder};
use super::modifiers::AlibiSlopes;
use crate::dtype::DType;
use crate::operand::{Operand, Slot};

impl ForwardProblemBuilder {
    /// Attention with linear biases (ALiBi; default: none): scores fall with the distance of query and key.
    ///
    /// ```text
    /// S' = S - slope[head] * |i + offset - j|        of query i and key j
    /// ```
    ///
    /// takes the place of the score `S`, which is `softmax_scale * q . k`, capped where there is a [`softcap`](Self::softcap).
    /// (BLOOM, MPT and Falcon RW have such biases.)
    ///
    /// - `offset` is where query 0 stands: `seqlen_kv - seqlen_q` for a mask that is bottom-right and for no mask, so that the
    ///   last query has distance 0 from the last key; 0 for a mask that is top-left. Where sequences are packed or have used
    ///   lengths, both lengths are those of the sequence.
    /// - Slopes are f32, of any sign. They are read as they are: a NaN or an infinity does what arithmetic does.
    /// - The softmax scale does not multiply a bias, the softcap does not cap it, and the mask comes after it.
    /// - The LSE has the whole bias in it. (That of FlashAttention-2 leaves `slope * (i + offset)` out where the mask is
    ///   causal.)
    /// - A backward pass made from this problem reads the slopes, too. It computes no gradient of them.
    /// - e4m3 operands have no ALiBi yet. The sm80 backward has no softcap and ALiBi together.
    ///
    /// A run reads the operand [`Slot::AlibiSlopes`].
    pub fn alibi(self, slopes: AlibiSlopes) -> Self {
        let mut with_alibi = self.operand(Slot::AlibiSlopes, true);
        with_alibi.alibi = slopes;
        with_alibi
    }
}

impl ForwardProblem {
    /// Which ALiBi slopes there are. `None` where there are none.
    pub fn alibi(&self) -> Option<AlibiSlopes> {
        self.alibi
    }

    /// The key at which query 0 stands in the distances of ALiBi, for sequences of these lengths.
    pub(crate) fn alibi_offset(&self, seqlen_q: usize, seqlen_kv: usize) -> i64 {
        self.mask().corner().unwrap_or_default().offset(seqlen_q, seqlen_kv)
    }

    /// The operand with the slopes, which every pass of the problem reads.
    pub(super) fn alibi_operand(&self) -> Operand {
        let shared = self.alibi != Some(AlibiSlopes::PerBatch);
        let batch = if shared { 1 } else { self.dims().batch };
        let slopes = Operand::read(Slot::AlibiSlopes, DType::F32, [batch, self.dims().heads_q]);
        slopes.shared(shared).when(self.alibi.is_some(), "alibi")
    }

    /// Prints which slopes there are, if any.
    pub(super) fn alibi_text(&self) -> &'static str {
        match self.alibi {
            None => "",
            Some(AlibiSlopes::PerHead) => " alibi",
            Some(AlibiSlopes::PerBatch) => " alibi per batch",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::{Corner, Mask};
    use crate::operand::Presence;
    use crate::problem::{BackwardProblem, Dims};

    fn options() -> ForwardProblemBuilder {
        let dims = Dims::new(2, 5, 6, 16).with_seqlen_kv(9).with_heads_kv(3);
        ForwardProblem::builder(DType::BF16, dims).mask(Mask::causal())
    }

    #[test]
    fn slopes_are_an_operand_of_both_passes() {
        let problem = options().alibi(AlibiSlopes::PerHead).softcap(50.0).build().unwrap();
        let row = *problem.operands().find(Slot::AlibiSlopes).unwrap();
        assert_eq!((row.shape(), row.axes(), row.dtype()), (&[6][..], "[heads]", DType::F32));
        assert!(problem.to_string().contains("causal softcap 50 alibi scale 0.25"), "{problem}");
        let per_batch = options().alibi(AlibiSlopes::PerBatch).build().unwrap();
        let row = *per_batch.operands().find(Slot::AlibiSlopes).unwrap();
        assert_eq!((row.shape(), row.axes()), (&[2, 6][..], "[batch, heads]"));
        assert!(per_batch.to_string().contains("causal alibi per batch scale 0.25"), "{per_batch}");
        let plain = options().build().unwrap();
        assert_eq!(plain.operands().find(Slot::AlibiSlopes).unwrap().presence(), Presence::Refused);
        assert_eq!(per_batch.to_builder().operand(Slot::AlibiSlopes, false).build().unwrap(), plain);
        let by_name = options().operand(Slot::AlibiSlopes, true).build().unwrap();
        assert_eq!(by_name.alibi(), Some(AlibiSlopes::PerHead));
        // Another kernel computes it.
        assert!(by_name.shape() != plain.shape() && by_name != per_batch);
        for forward in [problem, per_batch] {
            assert_eq!(forward.to_builder().build().unwrap(), forward);
            assert_eq!(forward.of_sequence(3, 2).alibi(), forward.alibi());
            let backward = BackwardProblem::builder(&forward).build().unwrap();
            let row = *backward.operands().find(Slot::AlibiSlopes).unwrap();
            assert_eq!(Some(&row), forward.operands().find(Slot::AlibiSlopes));
            assert!(backward.to_string().contains(" alibi"), "{backward}");
        }
    }

    #[test]
    fn the_last_query_stands_at_the_last_key_unless_the_mask_says_otherwise() {
        let offset = |mask| options().mask(mask).build().unwrap().alibi_offset(5, 9);
        assert_eq!((offset(Mask::Full), offset(Mask::causal())), (4, 4));
        assert_eq!(offset(Mask::Causal { corner: Corner::TopLeft }), 0);
        assert_eq!(options().build().unwrap().alibi_offset(9, 5), -4);
    }

    #[test]
    fn e4m3_operands_are_refused_by_name() {
        let fp8 = ForwardProblem::builder(DType::E4M3, Dims::new(2, 5, 6, 16)).alibi(AlibiSlopes::PerHead);
        let text = "unsupported: alibi with e4m3 operands; nearest: bf16, f16 or f32 operands, or no alibi";
        assert_eq!(fp8.build().unwrap_err().to_string(), text);
    }
}
