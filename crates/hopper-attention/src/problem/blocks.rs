//! Block-sparse masks of a problem: the option, and the operands.

use super::block_mask::{BlockMask, MASK_BLOCK_WORDS};
use super::forward::{ForwardProblem, ForwardProblemBuilder};
use crate::dtype::DType;
use crate::operand::{Operand, Slot};

impl ForwardProblemBuilder {
    /// Lists of blocks that keep pairs, beside the mask (default: none). See [`BlockMask`].
    pub fn block_mask(mut self, block_mask: Option<BlockMask>) -> Self {
        self.block_mask = block_mask;
        self
    }
}

impl ForwardProblem {
    /// The form of the lists of blocks. `None` where there are none.
    pub fn block_mask(&self) -> Option<BlockMask> {
        self.block_mask
    }

    /// The operands with the lists, which every pass of the problem reads.
    pub(super) fn block_operands(&self) -> [Operand; 5] {
        let given = self.block_mask.is_some();
        let lists = self.block_mask.unwrap_or(BlockMask::new(0));
        let [batch, heads, queries, keys] = if given { lists.shape(&self.dims()) } else { [0; 4] };
        let full = lists.has_full_blocks();
        let list = |slot, last| Operand::read(slot, DType::I32, [batch, heads, queries, last]);
        let count = |slot| Operand::read(slot, DType::I32, [batch, heads, queries]);
        [
            count(Slot::MaskBlockCnt).when(given, "block_mask"),
            list(Slot::MaskBlockIdx, keys).when(given, "block_mask"),
            list(Slot::MaskBits, lists.most_partial() * MASK_BLOCK_WORDS).when(given, "block_mask"),
            count(Slot::FullBlockCnt).when(full, "full blocks of a block_mask"),
            list(Slot::FullBlockIdx, keys).when(full, "full blocks of a block_mask"),
        ]
    }

    /// The text of the lists, where there are any.
    pub(super) fn block_mask_text(&self) -> String {
        self.block_mask.map_or(String::new(), |block_mask| block_mask.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::Mask;
    use crate::operand::Presence;
    use crate::problem::{BackwardProblem, Dims};

    fn options() -> ForwardProblemBuilder {
        ForwardProblem::builder(DType::BF16, Dims::new(2, 300, 6, 16).with_seqlen_kv(520).with_heads_kv(2))
    }

    #[test]
    fn the_lists_are_operands_of_both_passes() {
        let mask = BlockMask::new(3).per_batch(true).per_head(true).full_blocks(true);
        let problem = options().mask(Mask::causal()).block_mask(Some(mask)).build().unwrap();
        assert_eq!(problem.to_builder().build().unwrap(), problem);
        let backward = BackwardProblem::builder(&problem).build().unwrap();
        for operands in [problem.operands(), backward.operands()] {
            let shape = |slot| operands.find(slot).unwrap().shape().to_vec();
            assert_eq!((shape(Slot::MaskBlockCnt), shape(Slot::MaskBlockIdx)), (vec![2, 6, 3], vec![2, 6, 3, 5]));
            assert_eq!((shape(Slot::FullBlockCnt), shape(Slot::MaskBits)), (vec![2, 6, 3], vec![2, 6, 3, 1536]));
            assert_eq!(operands.find(Slot::FullBlockIdx).unwrap().presence(), Presence::Required);
        }
        let text = "causal block_mask of up to 3 partial and full blocks per batch per head scale 0.25";
        assert!(problem.to_string().ends_with(text), "{problem}");
        let shared = options().block_mask(Some(BlockMask::new(0))).build().unwrap();
        let operands = shared.operands();
        assert_eq!(operands.find(Slot::MaskBlockIdx).unwrap().shape(), &[1, 1, 3, 5]);
        assert_eq!(operands.find(Slot::MaskBits).unwrap().shape(), &[1, 1, 3, 0]);
        assert_eq!(operands.find(Slot::FullBlockIdx).unwrap().presence(), Presence::Refused);
        assert!(shared != problem && shared.block_mask() == Some(BlockMask::new(0)));
    }

    #[test]
    fn what_lists_do_not_go_with_is_refused_by_name() {
        let with =
            |options: ForwardProblemBuilder, mask| options.block_mask(Some(mask)).build().unwrap_err().to_string();
        let text = "block_mask.most_partial: 6; allowed: 0 to 5, the blocks of keys";
        assert_eq!(with(options(), BlockMask::new(6)), text);
        let text = "unsupported: a block mask with packed sequences or used lengths; nearest: no block mask, or one sequence \
                    whose block mask keeps documents apart";
        assert_eq!(with(options().packed(true), BlockMask::new(1)), text);
        let fp8 = ForwardProblem::builder(DType::E4M3, Dims::new(1, 128, 1, 64)).block_mask(Some(BlockMask::new(1)));
        assert_eq!(fp8.build().unwrap().block_mask(), Some(BlockMask::new(1)));
    }
}
