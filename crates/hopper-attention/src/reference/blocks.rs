//! Which pairs of a query and a key are kept: by the mask, by the lists of blocks where a problem has these, and by a bias that is
//! not -inf.

use super::Modifiers;
use super::additive::Additive;
use crate::blocks::{BlockKind, BlockTable, has_bit};
use crate::error::Result;
use crate::mask::Mask;
use crate::problem::{ForwardProblem, MASK_BLOCK_WORDS};

/// Asked for every pair. Batch entries and query heads count from the first, tokens from the first of the sequence.
pub(super) struct Kept<'a> {
    mask: Mask,
    seqlen_q: usize,
    seqlen_kv: usize,
    lists: Option<Lists<'a>>,
    bias: Option<Additive<'a>>,
}

struct Lists<'a> {
    table: BlockTable,
    /// The words of all bits, and those of a row of the table.
    bits: &'a [i32],
    words_of_row: usize,
}

impl<'a> Kept<'a> {
    /// Lists that hold what they should not are read by the rule of [`BlockMask`](crate::BlockMask).
    pub fn new(problem: &ForwardProblem, modifiers: &Modifiers<'a>) -> Result<Self> {
        let dims = problem.dims();
        let lists = match (problem.block_mask(), modifiers.blocks) {
            (Some(mask), Some(lists)) => {
                let [_, heads, queries, keys] = mask.shape(&dims);
                let row = |[b, h, q]: [usize; 3]| lists.row(keys, (b * heads + h) * queries + q);
                let table = BlockTable::new(problem, row, |_| Ok(()))?;
                Some(Lists { table, bits: lists.bits, words_of_row: mask.most_partial() * MASK_BLOCK_WORDS })
            }
            _ => None,
        };
        let (mask, bias) = (problem.mask(), Additive::of(problem, modifiers));
        Ok(Self { mask, seqlen_q: dims.seqlen_q, seqlen_kv: dims.seqlen_kv, lists, bias })
    }

    /// Whether a pair is kept.
    #[inline]
    pub fn keep(&self, batch: usize, head: usize, query: usize, key: usize) -> bool {
        self.mask.keep(query, key, self.seqlen_q, self.seqlen_kv)
            && self.lists.as_ref().is_none_or(|lists| lists.keep(batch, head, query, key))
            && self.bias.is_none_or(|bias| bias.at(batch, head, query, key) != f64::NEG_INFINITY)
    }
}

impl Lists<'_> {
    fn keep(&self, batch: usize, head: usize, query: usize, key: usize) -> bool {
        let row = self.table.row(batch, head, query);
        match self.table.kind(row, key) {
            BlockKind::Hidden => false,
            BlockKind::Full => true,
            BlockKind::Partial(n) => {
                let first = self.table.index(row) * self.words_of_row + n as usize * MASK_BLOCK_WORDS;
                has_bit(&self.bits[first..first + MASK_BLOCK_WORDS], query, key)
            }
        }
    }
}
