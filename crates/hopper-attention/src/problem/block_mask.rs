//! The form of a block-sparse mask.

use std::fmt;

use super::dims::Dims;
use super::packing::LENGTHS;
use crate::error::{Error, Result};
#[cfg(doc)]
use crate::operand::Slot;
use crate::operand::SlotSet;

/// The queries of a block of a block-sparse mask, and its keys.
pub const MASK_BLOCK: usize = 128;
/// The i32 words that hold the bits of a partial block: 128 queries of 128 bits.
pub const MASK_BLOCK_WORDS: usize = MASK_BLOCK * MASK_BLOCK / 32;

/// The form of a block-sparse mask: which lists of blocks a run reads. FlexAttention's `BlockMask` has these lists.
/// [`OwnedBlockLists`](crate::OwnedBlockLists) makes them of slices, documents, prefixes and spans.
///
/// A block is 128 queries and 128 keys. For each block of queries there are lists of the blocks of keys that these queries attend
/// to. A pair of a query and a key is kept if the problem's [`Mask`](crate::Mask) keeps it, and the lists keep it:
///
/// - A *full* block keeps all its pairs.
/// - A *partial* block keeps the pairs whose bit is set.
/// - A block that is in no list keeps nothing.
///
/// With `B` lists in the dimension of batch entries (1 or `batch`), `H` lists in that of heads (1 or `heads_q`),
/// `Qb = ceil(seqlen_q / 128)` and `Kb = ceil(seqlen_kv / 128)` a run reads, all of i32:
///
/// | operand | shape | what it is |
/// | --- | --- | --- |
/// | [`Slot::MaskBlockCnt`] | `[B, H, Qb]` | how many partial blocks a block of queries has |
/// | [`Slot::MaskBlockIdx`] | `[B, H, Qb, Kb]` | which blocks of keys: the first so many entries of the last dimension |
/// | [`Slot::MaskBits`] | `[B, H, Qb, most_partial * 512]` | their bits, in the order of the list |
/// | [`Slot::FullBlockCnt`] | `[B, H, Qb]` | as above, of full blocks |
/// | [`Slot::FullBlockIdx`] | `[B, H, Qb, Kb]` | as above, of full blocks |
///
/// The bits of a partial block are 512 words: 4 for each of its 128 queries. Bit `j % 32` of word `j / 32` of a query is key `j`.
/// Bits of queries and keys past the end of the sequences are not used.
///
/// # What takes lists
///
/// Not packed sequences and used lengths: `build` refuses them. Lists can say the same:
///
/// - Packed, and each sequence has as many queries as keys: take all tokens as one sequence, with
///   [`from_documents`](crate::OwnedBlockLists::from_documents).
/// - Packed otherwise: write the rule, with [`from_predicate`](crate::OwnedBlockLists::from_predicate). (Under a causal mask, each
///   sequence has its own corner.)
/// - Used lengths: padding gets a negative document number.
///
/// A GPU computes the forward up to head dim 256, the backward up to 128, and up to 2^21 queries and keys.
///
/// # Wrong contents
///
/// The lists may hold wrong numbers. The CPU then refuses the run ([`Error::Value`]). A GPU uses them by the rule below. Nothing
/// outside of the tensors is read or written in any case.
///
/// - A count below 0 is 0. A count above `Kb` (full blocks) or `most_partial` (partial blocks) is that number.
/// - An index that is no block of keys is left out.
/// - Of a block that is listed twice, the first place counts. A block in both lists is full.
///
/// [`Error::Value`]: crate::Error::Value
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use]
pub struct BlockMask {
    most_partial: usize,
    per_batch: bool,
    per_head: bool,
    full_blocks: bool,
}

impl BlockMask {
    /// Lists that all batch entries and heads share, of at most so many partial blocks for a block of queries. No full blocks.
    pub fn new(most_partial: usize) -> Self {
        Self { most_partial, per_batch: false, per_head: false, full_blocks: false }
    }

    /// Whether each batch entry has lists of its own (default: no).
    pub fn per_batch(self, own: bool) -> Self {
        Self { per_batch: own, ..self }
    }

    /// Whether each query head has lists of its own (default: no).
    pub fn per_head(self, own: bool) -> Self {
        Self { per_head: own, ..self }
    }

    /// Whether there are lists of full blocks (default: no).
    pub fn full_blocks(self, given: bool) -> Self {
        Self { full_blocks: given, ..self }
    }

    /// The most partial blocks of a block of queries.
    pub fn most_partial(&self) -> usize {
        self.most_partial
    }

    /// Whether each batch entry has lists of its own.
    pub fn is_per_batch(&self) -> bool {
        self.per_batch
    }

    /// Whether each query head has lists of its own.
    pub fn is_per_head(&self) -> bool {
        self.per_head
    }

    /// Whether there are lists of full blocks.
    pub fn has_full_blocks(&self) -> bool {
        self.full_blocks
    }

    /// The shape of the indices, for these sizes: `[B, H, Qb, Kb]`.
    pub(crate) fn shape(&self, dims: &Dims) -> [usize; 4] {
        let batch = if self.per_batch { dims.batch } else { 1 };
        let heads = if self.per_head { dims.heads_q } else { 1 };
        [batch, heads, dims.seqlen_q.div_ceil(MASK_BLOCK), dims.seqlen_kv.div_ceil(MASK_BLOCK)]
    }

    /// Refuses lists that the problem's other options do not go with.
    pub(super) fn check(&self, dims: &Dims, asked_for: SlotSet) -> Result<()> {
        let [_, _, _, keys] = self.shape(dims);
        if self.most_partial > keys {
            let allowed = format!("0 to {keys}, the blocks of keys");
            return Err(Error::Value { what: "block_mask.most_partial", got: self.most_partial.to_string(), allowed });
        }
        if LENGTHS.iter().any(|&slot| asked_for.contains(slot)) {
            return Err(Error::Unsupported {
                wanted: "a block mask with packed sequences or used lengths".into(),
                nearest: "no block mask, or one sequence whose block mask keeps documents apart".into(),
            });
        }
        Ok(())
    }
}

impl fmt::Display for BlockMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, " block_mask of up to {} partial", self.most_partial)?;
        for (has, text) in
            [(self.full_blocks, " and full blocks"), (self.per_batch, " per batch"), (self.per_head, " per head")]
        {
            f.write_str(if has { text } else { "" })?;
        }
        Ok(())
    }
}
