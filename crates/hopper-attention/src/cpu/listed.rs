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

    /// The pairs that the lists keep of some neighbouring queries and keys, of one block. `query` and `key` are the first ones. None
    /// where they keep none.
    fn of(&self, batch: usize, head: usize, query: usize, key: usize) -> Option<Pairs<'a>> {
        let row = self.table.row(batch, head, query);
        match self.table.kind(row, key) {
            BlockKind::Hidden => None,
            BlockKind::Full => Some(Pairs::ALL),
            BlockKind::Partial(n) => {
                let bits = self.bits.part_of_list(row, n as usize * MASK_BLOCK_WORDS, MASK_BLOCK_WORDS);
                Some(Pairs { bits, query, key })
            }
        }
    }
}

/// The size of a block that a task visits: where there are lists, such a block is in one block of theirs.
pub(super) fn walked(problem: &ForwardProblem, most: usize) -> usize {
    if problem.block_mask().is_some() { most.min(MASK_BLOCK) } else { most }
}

/// The pairs that lists keep of some neighbouring queries and keys. Without lists: all. None where the lists keep none.
pub(super) fn pairs<'a>(
    listed: Option<&Listed<'a>>,
    batch: usize,
    head: usize,
    query: usize,
    key: usize,
) -> Option<Pairs<'a>> {
    listed.map_or(Some(Pairs::ALL), |listed| listed.of(batch, head, query, key))
}

/// Which pairs of some neighbouring queries and keys are kept, as far as the lists say.
///
/// No enum: every field has a value whatever is kept. The compiler may read all of them ahead of the branch, and valgrind
/// would see it branch on what an enum's variant lacks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pairs<'a> {
    /// The bits of a partial block. Empty where all pairs are kept.
    bits: &'a [i32],
    /// The place in that block of the first query.
    query: usize,
    /// The place of the first key.
    key: usize,
}

impl Pairs<'_> {
    /// All pairs.
    pub const ALL: Self = Self { bits: &[], query: 0, key: 0 };

    /// Whether all pairs are kept.
    pub fn is_all(&self) -> bool {
        self.bits.is_empty()
    }

    /// Whether a pair is kept. Both count from the first query and key.
    pub fn keep(&self, query: usize, key: usize) -> bool {
        self.is_all() || has_bit(self.bits, self.query + query, self.key + key)
    }
}
