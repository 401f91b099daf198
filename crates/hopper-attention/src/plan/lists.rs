//! What plans know of block-sparse masks: the sizes of the lists that kernels make in the workspace.
//!
//! The first kernels of such a launch make these of the caller's lists (`hopper-attention-sys/kernels/common/blocks.hpp`). Sizes
//! are upper bounds for all that the caller's lists can hold, so that one plan serves them all.

use super::fitting::unsupported;
use crate::error::Result;
use crate::problem::{ForwardProblem, MASK_BLOCK, MASK_BLOCK_WORDS};

/// The most blocks of queries, and of keys: an entry of a kernel's list has 14 bits for one.
const MOST_BLOCKS: usize = 1 << 14;
/// What each part begins at a multiple of.
const ALIGNMENT: usize = 16;

/// How many lists there are, and how long they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lists {
    /// Batch entries with lists of their own, and heads.
    pub shape: [usize; 2],
    /// Blocks of 128 queries.
    pub q_blocks: usize,
    /// Blocks of 128 keys.
    pub k_blocks: usize,
    /// Of a backward: blocks of queries that a tile of keys may visit. Of a forward: 0.
    pub m_blocks: usize,
    /// The most partial blocks of a block of queries.
    pub most_partial: usize,
}

/// The parts of a workspace with lists, as offsets in bytes. Those of a backward are 0 of a forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ListParts {
    /// How many entries each list of a block of queries has, 8 bytes each.
    pub counts: usize,
    /// The entries, or the matrix of a backward, 4 bytes for each block.
    pub entries: usize,
    /// How many entries a tile of keys has, 4 bytes each.
    pub key_counts: usize,
    /// The entries, 8 bytes each.
    pub key_entries: usize,
    /// The bits of all partial blocks, with keys as rows.
    pub key_bits: usize,
    /// Where the parts end.
    pub end: usize,
}

impl Lists {
    /// Of a problem, where it has lists. `tile_m`: queries of a block of a backward.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported): there are more blocks than kernels can count.
    pub(super) fn of(problem: &ForwardProblem, tile_m: Option<usize>) -> Result<Option<Self>> {
        let Some(mask) = problem.block_mask() else { return Ok(None) };
        let [batch, heads, q_blocks, k_blocks] = mask.shape(&problem.dims());
        for (blocks, of) in [(q_blocks, "queries"), (k_blocks, "keys")] {
            if blocks > MOST_BLOCKS {
                let wanted = format!("a block mask with {blocks} blocks of {of} on a GPU");
                return Err(unsupported(wanted, format!("up to {MOST_BLOCKS}, {} tokens", MOST_BLOCKS * MASK_BLOCK)));
            }
        }
        let (rows, most_partial) = (batch * heads * q_blocks, mask.most_partial());
        if rows.saturating_mul(most_partial.max(1)) >= i32::MAX as usize {
            let wanted = format!("a block mask with {rows} lists of up to {most_partial} partial blocks on a GPU");
            return Err(unsupported(wanted, "below 2^31 partial blocks in all".into()));
        }
        let m_blocks = tile_m.map_or(0, |tile_m| problem.dims().seqlen_q.div_ceil(tile_m.max(1)));
        Ok(Some(Self { shape: [batch, heads], q_blocks, k_blocks, m_blocks, most_partial }))
    }

    /// The parts, from this offset on.
    pub(crate) fn parts(&self, begin: usize) -> ListParts {
        let Self { shape: [batch, heads], q_blocks, k_blocks, m_blocks, most_partial } = *self;
        let (lists, rows) = (batch * heads, batch * heads * q_blocks);
        let mut end = begin;
        let mut part = |bytes: usize| {
            let begin = end.next_multiple_of(ALIGNMENT);
            end = begin + bytes;
            begin
        };
        let counts = part(8 * rows);
        let entries = part(4 * rows * k_blocks);
        if m_blocks == 0 {
            return ListParts { counts, entries, key_counts: 0, key_entries: 0, key_bits: 0, end };
        }
        let key_counts = part(4 * lists * k_blocks);
        let key_entries = part(8 * lists * k_blocks * m_blocks);
        let key_bits = part(rows * most_partial * MASK_BLOCK_WORDS * size_of::<i32>());
        ListParts { counts, entries, key_counts, key_entries, key_bits, end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::problem::{BlockMask, Dims};

    fn problem(seqlen: usize, mask: BlockMask) -> ForwardProblem {
        let dims = Dims::new(3, seqlen, 4, 64).with_heads_kv(2);
        ForwardProblem::builder(DType::BF16, dims).block_mask(Some(mask)).build().unwrap()
    }

    #[test]
    fn parts_follow_each_other() {
        let problem = problem(300, BlockMask::new(2).per_batch(true).per_head(true));
        let forward = Lists::of(&problem, None).unwrap().unwrap();
        assert_eq!((forward.shape, forward.q_blocks, forward.k_blocks, forward.m_blocks), ([3, 4], 3, 3, 0));
        let parts = forward.parts(4);
        assert_eq!((parts.counts, parts.entries, parts.end), (16, 16 + 8 * 36, 16 + 8 * 36 + 4 * 108));
        let backward = Lists::of(&problem, Some(64)).unwrap().unwrap();
        assert_eq!(backward.m_blocks, 5);
        let parts = backward.parts(0);
        assert_eq!((parts.key_counts, parts.key_entries), (8 * 36 + 4 * 108, 8 * 36 + 4 * 108 + 4 * 36));
        assert_eq!((parts.key_bits, parts.end - parts.key_bits), (parts.key_entries + 8 * 36 * 5, 36 * 2 * 2048));
    }

    #[test]
    fn what_kernels_cannot_count_is_refused_by_name() {
        let text = |problem| Lists::of(&problem, None).unwrap_err().to_string();
        let most = "nearest: up to 16384, 2097152 tokens";
        let wanted = "unsupported: a block mask with 16385 blocks of queries on a GPU";
        assert_eq!(text(problem((1 << 21) + 1, BlockMask::new(0))), format!("{wanted}; {most}"));
        let many = text(problem(1 << 21, BlockMask::new(1 << 14).per_head(true).per_batch(true)));
        assert!(many.ends_with("nearest: below 2^31 partial blocks in all"), "{many}");
        let plain = ForwardProblem::builder(DType::BF16, Dims::new(1, 1, 1, 64)).build().unwrap();
        assert_eq!(Lists::of(&plain, None), Ok(None));
    }
}
