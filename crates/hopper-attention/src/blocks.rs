//! Block-sparse masks: the rule that says which pairs the lists of blocks keep. The CPU, the oracle and the tests follow it, and
//! so do the kernels.

use crate::error::{Error, Result};
use crate::memory::reserved;
use crate::operand::Slot;
use crate::problem::{ForwardProblem, MASK_BLOCK, MASK_BLOCK_WORDS};

/// The lists of a [`BlockMask`](crate::BlockMask), in host memory. Each is contiguous, in the order of its operand's dimensions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockLists<'a> {
    /// [`Slot::MaskBlockCnt`]: `[B, H, Qb]`.
    pub counts: &'a [i32],
    /// [`Slot::MaskBlockIdx`]: `[B, H, Qb, Kb]`.
    pub indices: &'a [i32],
    /// [`Slot::MaskBits`]: `[B, H, Qb, most_partial * 512]`.
    pub bits: &'a [i32],
    /// [`Slot::FullBlockCnt`] and [`Slot::FullBlockIdx`], if the mask has lists of full blocks.
    pub full: Option<(&'a [i32], &'a [i32])>,
}

impl<'a> BlockLists<'a> {
    /// Refuses lists of other sizes than the problem asks for. What they hold may be anything.
    pub(crate) fn check(&self, problem: &ForwardProblem) -> Result<()> {
        let what = Slot::MaskBlockIdx.name();
        let Some(mask) = problem.block_mask() else {
            let allowed = "none, since the problem has no block mask".into();
            return Err(Error::Value { what, got: "given".into(), allowed });
        };
        let [batch, heads, queries, keys] = mask.shape(&problem.dims());
        let rows = batch * heads * queries;
        let words = mask.most_partial() * MASK_BLOCK_WORDS;
        let (full_counts, full) = self.full.unwrap_or_default();
        let of_full = usize::from(mask.has_full_blocks());
        for (slot, list, wanted) in [
            (Slot::MaskBlockCnt, self.counts, rows),
            (Slot::MaskBlockIdx, self.indices, rows * keys),
            (Slot::MaskBits, self.bits, rows * words),
            (Slot::FullBlockCnt, full_counts, of_full * rows),
            (Slot::FullBlockIdx, full, of_full * rows * keys),
        ] {
            if list.len() != wanted {
                let (got, want) = (vec![list.len()], vec![wanted]);
                return Err(Error::Shape { tensor: slot.name(), got, want, axes: "[elements]" });
            }
        }
        Ok(())
    }

    /// The lists of row `row` of `[B, H, Qb]`.
    pub(crate) fn row(&self, keys: usize, row: usize) -> RowLists<'a> {
        let of_row = |indices: &'a [i32]| &indices[row * keys..(row + 1) * keys];
        let (full_counts, full) = self.full.unwrap_or_default();
        let (full_count, full) = if self.full.is_some() { (full_counts[row], of_row(full)) } else { (0, &[][..]) };
        RowLists { count: self.counts[row], indices: of_row(self.indices), full_count, full }
    }
}

/// The lists of one block of queries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowLists<'a> {
    pub count: i32,
    pub indices: &'a [i32],
    pub full_count: i32,
    pub full: &'a [i32],
}

/// What the lists say of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockKind {
    /// It is in no list: no pair is kept.
    Hidden,
    /// Every pair is kept.
    Full,
    /// A pair is kept if its bit is set. The block is at this place of the list of partial blocks.
    Partial(u32),
}

/// What the lists say of every block, by the rule of [`BlockMask`](crate::BlockMask).
#[derive(Debug)]
pub(crate) struct BlockTable {
    /// `[B, H, Qb, Kb]`.
    shape: [usize; 4],
    kinds: Vec<BlockKind>,
}

impl BlockTable {
    /// The table of a problem with a block mask. `row` gives the lists of each `[b, h, block of queries]`. `on_wrong` is told what
    /// the lists hold that they should not.
    ///
    /// # Errors
    /// [`Error::Memory`], and those of `on_wrong`.
    pub fn new<'a>(
        problem: &ForwardProblem,
        row: impl Fn([usize; 3]) -> RowLists<'a>,
        on_wrong: impl Fn(Error) -> Result<()>,
    ) -> Result<Self> {
        let mask = problem.block_mask().unwrap_or(crate::problem::BlockMask::new(0));
        let shape = mask.shape(&problem.dims());
        let [batch, heads, queries, keys] = shape;
        let blocks = shape.iter().fold(1usize, |blocks, &size| blocks.saturating_mul(size));
        let mut kinds = reserved("a table of blocks", blocks)?;
        kinds.resize(blocks, BlockKind::Hidden);
        let mut table = Self { shape, kinds };
        for place in (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..queries).map(move |q| [b, h, q]))) {
            let RowLists { count, indices, full_count, full } = row(place);
            let full = listed(Slot::FullBlockCnt, full_count, full, keys, place, &on_wrong)?;
            for (n, &block) in full.iter().enumerate() {
                table.list(Slot::FullBlockIdx, place, n, block, BlockKind::Full, &on_wrong)?;
            }
            let partial = listed(Slot::MaskBlockCnt, count, indices, mask.most_partial(), place, &on_wrong)?;
            for (n, &block) in partial.iter().enumerate() {
                // As many as there are blocks of keys, at most: below 2^23.
                table.list(Slot::MaskBlockIdx, place, n, block, BlockKind::Partial(n as u32), &on_wrong)?;
            }
        }
        Ok(table)
    }

    /// Lists a block, unless it is none, or is listed already.
    fn list(
        &mut self,
        slot: Slot,
        place: [usize; 3],
        n: usize,
        block: i32,
        kind: BlockKind,
        on_wrong: impl Fn(Error) -> Result<()>,
    ) -> Result<()> {
        let keys = self.shape[3];
        let wrong =
            |allowed: String| Error::Value { what: slot.name(), got: format!("{block} at {place:?}, {n}"), allowed };
        match usize::try_from(block).ok().filter(|&block| block < keys) {
            None => on_wrong(wrong(format!("0 to {}, the blocks of keys", keys.saturating_sub(1)))),
            Some(at) if self.kinds[self.at(place, at)] != BlockKind::Hidden => {
                on_wrong(wrong("a block that is listed once, in one of the lists".into()))
            }
            Some(at) => {
                let at = self.at(place, at);
                self.kinds[at] = kind;
                Ok(())
            }
        }
    }

    fn at(&self, [batch, head, queries]: [usize; 3], keys: usize) -> usize {
        let [_, heads, of_queries, of_keys] = self.shape;
        ((batch * heads + head) * of_queries + queries) * of_keys + keys
    }

    /// The row `[b, h, block of queries]` of the lists that a query of a batch entry and head has.
    pub fn row(&self, batch: usize, head: usize, query: usize) -> [usize; 3] {
        let shared = |size: usize, at: usize| if size == 1 { 0 } else { at };
        [shared(self.shape[0], batch), shared(self.shape[1], head), query / MASK_BLOCK]
    }

    /// What the lists of a row say of the block that a key is in.
    pub fn kind(&self, row: [usize; 3], key: usize) -> BlockKind {
        self.kinds[self.at(row, key / MASK_BLOCK)]
    }

    /// The index of a row in `[B, H, Qb]`.
    pub fn index(&self, [batch, head, queries]: [usize; 3]) -> usize {
        (batch * self.shape[1] + head) * self.shape[2] + queries
    }
}

/// The entries of a list that count.
fn listed(
    slot: Slot,
    count: i32,
    list: &[i32],
    most: usize,
    place: [usize; 3],
    on_wrong: impl Fn(Error) -> Result<()>,
) -> Result<&[i32]> {
    let clamped = usize::try_from(count).unwrap_or(0).min(most).min(list.len());
    if i64::from(count) != clamped as i64 {
        let (got, allowed) = (format!("{count} at {place:?}"), format!("0 to {}", most.min(list.len())));
        on_wrong(Error::Value { what: slot.name(), got, allowed })?;
    }
    Ok(&list[..clamped])
}

/// Whether the bits of a partial block keep a pair. `query` and `key` count from the first of the block, or of a sequence whose
/// first block begins there.
pub(crate) fn has_bit(words: &[i32], query: usize, key: usize) -> bool {
    let (query, key) = (query % MASK_BLOCK, key % MASK_BLOCK);
    words[query * (MASK_BLOCK / 32) + key / 32] as u32 >> (key % 32) & 1 != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::problem::{BlockMask, Dims};

    fn problem(most_partial: usize, full: bool) -> ForwardProblem {
        let dims = Dims::new(1, 130, 2, 8).with_seqlen_kv(500);
        let mask = BlockMask::new(most_partial).per_head(true).full_blocks(full);
        ForwardProblem::builder(DType::F32, dims).block_mask(Some(mask)).build().unwrap()
    }

    fn table(problem: &ForwardProblem, lists: &BlockLists<'_>, refuse: bool) -> Result<BlockTable> {
        lists.check(problem)?;
        let row = |[_, head, queries]: [usize; 3]| lists.row(4, head * 2 + queries);
        BlockTable::new(problem, row, |error| if refuse { Err(error) } else { Ok(()) })
    }

    #[test]
    fn lists_say_which_blocks_are_kept() {
        let bits = vec![0; 4 * 2 * MASK_BLOCK_WORDS];
        let indices = [2, 0, 9, 9, 9, 9, 9, 9, 3, 9, 9, 9, 0, 1, 9, 9];
        let (full_counts, full) = ([1, 0, 0, 2], [1, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 3, 2, 9, 9]);
        let lists =
            BlockLists { counts: &[2, 0, 1, 2], indices: &indices, bits: &bits, full: Some((&full_counts, &full)) };
        let problem = problem(2, true);
        let table = table(&problem, &lists, true).unwrap();
        let kinds = |head, query| [0, 128, 256, 499].map(|key| table.kind(table.row(0, head, query), key));
        use BlockKind::{Full, Hidden, Partial};
        assert_eq!(kinds(0, 127), [Partial(1), Full, Partial(0), Hidden]);
        assert_eq!(kinds(0, 128), [Hidden; 4]);
        assert_eq!(
            (kinds(1, 0), kinds(1, 129)),
            ([Hidden, Hidden, Hidden, Partial(0)], [Partial(0), Partial(1), Full, Full])
        );
        assert_eq!(table.index(table.row(0, 1, 129)), 3);
    }

    #[test]
    fn wrong_contents_are_named_or_left_out() {
        let bits = vec![0; 4 * 2 * MASK_BLOCK_WORDS];
        let indices = [-1, 4, 9, 9, 1, 1, 0, 9, 2, 3, 9, 9, 0, 1, 9, 9];
        let (full_counts, full) = ([0, 0, i32::MAX, 0], [9, 9, 9, 9, 9, 9, 9, 9, 3, 3, i32::MIN, 0, 9, 9, 9, 9]);
        let lists =
            BlockLists { counts: &[2, 3, 2, -7], indices: &indices, bits: &bits, full: Some((&full_counts, &full)) };
        let problem = problem(2, true);
        let kept = table(&problem, &lists, false).unwrap();
        let kinds = |head, query| [0, 128, 256, 499].map(|key| kept.kind(kept.row(0, head, query), key));
        use BlockKind::{Full, Hidden, Partial};
        assert_eq!((kinds(0, 0), kinds(0, 128)), ([Hidden; 4], [Hidden, Partial(0), Hidden, Hidden]));
        assert_eq!((kinds(1, 0), kinds(1, 128)), ([Full, Hidden, Partial(0), Full], [Hidden; 4]));
        let error = table(&problem, &lists, true).unwrap_err().to_string();
        assert_eq!(error, "mask_block_idx: -1 at [0, 0, 0], 0; allowed: 0 to 3, the blocks of keys");
        let text = |counts: [i32; 4], full_counts: [i32; 4]| {
            let lists = BlockLists { counts: &counts, full: Some((&full_counts, &full)), ..lists };
            table(&problem, &lists, true).unwrap_err().to_string()
        };
        assert_eq!(text([0, 3, 0, 0], [0; 4]), "mask_block_cnt: 3 at [0, 0, 1]; allowed: 0 to 2");
        assert_eq!(text([0; 4], [0, -1, 0, 0]), "full_block_cnt: -1 at [0, 0, 1]; allowed: 0 to 4");
        let twice = "a block that is listed once, in one of the lists";
        assert_eq!(text([0, 2, 0, 0], [0; 4]), format!("mask_block_idx: 1 at [0, 0, 1], 1; allowed: {twice}"));
        assert_eq!(text([0, 0, 2, 0], [0, 0, 1, 0]), format!("mask_block_idx: 3 at [0, 1, 0], 1; allowed: {twice}"));
    }

    #[test]
    fn lists_have_the_sizes_of_the_problem() {
        let problem = problem(0, false);
        let lists = BlockLists { counts: &[0; 4], indices: &[0; 16], ..BlockLists::default() };
        assert_eq!(lists.check(&problem), Ok(()));
        let refused = |lists: BlockLists<'_>| lists.check(&problem).unwrap_err().to_string();
        assert!(refused(BlockLists { counts: &[0; 3], ..lists }).starts_with("mask_block_cnt: shape [3]"));
        assert!(refused(BlockLists { bits: &[0; 4], ..lists }).starts_with("mask_bits: shape [4]"));
        assert!(
            refused(BlockLists { full: Some((&[0; 4], &[0; 16])), ..lists }).starts_with("full_block_cnt: shape [4]")
        );
        let plain = ForwardProblem::builder(DType::F32, Dims::new(1, 130, 2, 8)).build().unwrap();
        assert!(lists.check(&plain).unwrap_err().to_string().starts_with("mask_block_idx: given"));
    }

    #[test]
    fn bits_are_rows_of_words() {
        let mut words = vec![0; MASK_BLOCK_WORDS];
        words[3 * 4 + 2] = i32::MIN;
        assert!(has_bit(&words, 3, 95) && has_bit(&words, 131, 128 + 95));
        assert!(!has_bit(&words, 3, 94) && !has_bit(&words, 4, 95) && !has_bit(&words, 2, 95));
    }
}
