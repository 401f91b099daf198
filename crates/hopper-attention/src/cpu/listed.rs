//! The lists of blocks of a block-sparse mask: which blocks a task visits, and which pairs of a block are kept.

use super::host::HostRef;
use crate::blocks::{BlockKind, BlockTable, RowLists, has_bit};
use crate::error::Result;
use crate::problem::{ForwardProblem, MASK_BLOCK, MASK_BLOCK_WORDS};

/// The lists that a run reads, in host memory.
pub(crate) struct ListInputs<'a> {
    pub counts: HostRef<'a, i32, 3>,
    pub indices: HostRef<'a, i32, 4>,
    pub bits: HostRef<'a, i32, 4>,
    pub full: Option<(HostRef<'a, i32, 3>, HostRef<'a, i32, 4>)>,
}

/// What the lists say.
pub(super) struct Listed<'a> {
    table: BlockTable,
    bits: HostRef<'a, i32, 4>,
}

impl<'a> Listed<'a> {
    /// `None` for a problem without lists.
    ///
    /// # Errors
    /// - [`Error::Value`](crate::Error::Value) for lists that hold what they should not.
    /// - [`Error::Memory`](crate::Error::Memory).
    pub fn new(problem: &ForwardProblem, inputs: Option<&ListInputs<'a>>) -> Result<Option<Self>> {
        let Some(inputs) = inputs else { return Ok(None) };
        let row = |place: [usize; 3]| {
            let (full_count, full) = match &inputs.full {
                Some((counts, indices)) => (counts.at(place), indices.list(place)),
                None => (0, &[][..]),
            };
            RowLists { count: inputs.counts.at(place), indices: inputs.indices.list(place), full_count, full }
        };
        Ok(Some(Self { table: BlockTable::new(problem, row, Err)?, bits: inputs.bits }))
    }

    /// The pairs that the lists keep of some neighbouring queries and keys, of one block. `query` and `key` are the first ones.
    fn of(&self, batch: usize, head: usize, query: usize, key: usize) -> Pairs<'a> {
        let row = self.table.row(batch, head, query);
        match self.table.kind(row, key) {
            BlockKind::Hidden => Pairs::None,
            BlockKind::Full => Pairs::All,
            BlockKind::Partial(n) => {
                let words = self.bits.part_of_list(row, n as usize * MASK_BLOCK_WORDS, MASK_BLOCK_WORDS);
                Pairs::Some(Bits { words, query, key })
            }
        }
    }
}

/// The size of a block that a task visits: where there are lists, such a block is in one block of theirs.
pub(super) fn walked(problem: &ForwardProblem, most: usize) -> usize {
    if problem.block_mask().is_some() { most.min(MASK_BLOCK) } else { most }
}

/// The pairs that lists keep of some neighbouring queries and keys. Without lists: all.
pub(super) fn pairs<'a>(listed: Option<&Listed<'a>>, batch: usize, head: usize, query: usize, key: usize) -> Pairs<'a> {
    listed.map_or(Pairs::All, |listed| listed.of(batch, head, query, key))
}

/// Which pairs of some neighbouring queries and keys are kept, as far as the lists say.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pairs<'a> {
    /// No pair.
    None,
    /// All pairs.
    All,
    /// Those whose bit is set.
    Some(Bits<'a>),
}

impl Pairs<'_> {
    /// Whether there is no pair.
    pub fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    /// Whether all pairs are kept.
    pub fn is_all(&self) -> bool {
        matches!(self, Self::All)
    }

    /// Whether a pair is kept. Both count from the first query and key.
    pub fn keep(&self, query: usize, key: usize) -> bool {
        match self {
            Self::None => false,
            Self::All => true,
            Self::Some(bits) => has_bit(bits.words, bits.query + query, bits.key + key),
        }
    }
}

/// The bits of a partial block, from a query and a key on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bits<'a> {
    words: &'a [i32],
    query: usize,
    key: usize,
}
