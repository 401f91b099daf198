//! What plans know of sequences whose lengths the kernels read from memory: how many tiles there can be, and how large the
//! workspace must be for them.
//!
//! The first kernel of such a launch makes a table of the sequences in the workspace
//! (`hopper-attention-sys/kernels/common/sequences.hpp`). Sizes here are upper bounds for all lengths that the caller's arrays
//! can hold, so that one plan serves them all.

use crate::arch::Arch;
use crate::operand::Slot;
use crate::problem::{Dims, ForwardProblem};
use crate::table::KernelInfo;

/// The most sequences whose table is made in shared memory, as `kMostInShared` of `kernels/common/schedule.cu` says.
const MOST_IN_SHARED: usize = 10240;

/// The most tiles of `tile` rows that all sequences of a head can have together. `rows` is the number of rows of all sequences
/// (packed), or of each.
pub(super) fn most_tiles(packed: bool, batch: usize, rows: usize, tile: usize) -> usize {
    let tile = tile.max(1);
    if packed { rows / tile + batch } else { batch.saturating_mul(rows.div_ceil(tile)) }
}

/// Size in bytes of the table of sequences: a header of 16 bytes, 48 for each sequence, and 4 for each tile and each block of
/// queries of a head. The kernel that makes it may need 20 more for each sequence.
pub(super) fn table_bytes(batch: usize, tiles: usize, blocks: usize) -> usize {
    let scratch = if batch > MOST_IN_SHARED { 20 * batch + 8 } else { 0 };
    16 + 48 * batch + 4 * (tiles.next_multiple_of(4) + blocks.next_multiple_of(4)) + scratch
}

/// The sizes of a problem, or of one whose sequences are alike and which takes about as long.
///
/// Of packed sequences the plan knows the mean length, and maybe a hint of the longest. The time grows with the square of a
/// length, so that long ones count more.
pub(super) fn typical_dims(problem: &ForwardProblem) -> Dims {
    let dims = problem.dims();
    let length = |packed: bool, rows: usize, hint: Option<usize>| match hint.map(|hint| hint.min(rows)) {
        Some(most) if packed => rows.div_ceil(dims.batch.max(1)).clamp((most / 2).min(most), most),
        Some(most) => most,
        None if packed => rows.div_ceil(dims.batch.max(1)),
        None => rows,
    };
    dims.with_seqlen_q(length(problem.wants(Slot::CuSeqlensQ), dims.seqlen_q, problem.max_seqlen_q()))
        .with_seqlen_kv(length(problem.wants(Slot::CuSeqlensKv), dims.seqlen_kv, problem.max_seqlen_kv()))
}

/// The sizes of a backward whose kernels read the lengths of sequences from memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packed {
    /// The number of sequences.
    pub sequences: usize,
    /// The most tiles of keys that all sequences of a head can have together.
    pub list_size: usize,
    /// The most blocks of queries that all sequences of a head can have together.
    pub block_list_size: usize,
    /// As `block_list_size`, for the sequences that have sums of dQ. sm90: those with more than one tile of keys. sm80: all.
    pub sum_blocks: usize,
    /// The number of rows of Q, of one head: of all sequences together.
    pub rows: usize,
}

impl Packed {
    pub(super) fn of(problem: &ForwardProblem, kernel: &KernelInfo) -> Self {
        let dims = problem.dims();
        let [q, kv] = [Slot::CuSeqlensQ, Slot::CuSeqlensKv].map(|slot| problem.wants(slot));
        let most_long = match kv {
            _ if kernel.arch == Arch::Sm80 => dims.batch,
            true => dims.batch.min(dims.seqlen_kv / (kernel.tile_n + 1)),
            false if dims.seqlen_kv > kernel.tile_n => dims.batch,
            false => 0,
        };
        Self {
            sequences: dims.batch,
            list_size: most_tiles(kv, dims.batch, dims.seqlen_kv, kernel.tile_n),
            block_list_size: most_tiles(q, dims.batch, dims.seqlen_q, kernel.tile_m),
            sum_blocks: if most_long == 0 { 0 } else { most_tiles(q, most_long, dims.seqlen_q, kernel.tile_m) },
            rows: if q { dims.seqlen_q } else { dims.batch.saturating_mul(dims.seqlen_q) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever the lengths: no more tiles than the bound, of all sequences and of the long ones alone.
        #[test]
        fn bounds_hold_for_all_lengths(lengths in proptest::collection::vec((0usize..300, 0usize..300), 1..40),
                                       gap in 0usize..50) {
            let tile = 64;
            let [rows_q, rows_kv] = [lengths.iter().map(|l| l.0).sum::<usize>() + gap, lengths.iter().map(|l| l.1).sum()];
            let tiles = |rows: usize| rows.div_ceil(tile);
            let all: usize = lengths.iter().map(|l| tiles(l.0)).sum();
            prop_assert!(all <= most_tiles(true, lengths.len(), rows_q, tile));
            prop_assert!(all <= most_tiles(false, lengths.len(), lengths.iter().map(|l| l.0).max().unwrap(), tile));
            let long: usize = lengths.iter().filter(|l| l.1 > tile).map(|l| tiles(l.0)).sum();
            let most_long = lengths.len().min(rows_kv / (tile + 1));
            let bound = if most_long == 0 { 0 } else { most_tiles(true, most_long, rows_q, tile) };
            prop_assert!(long <= bound);
        }
    }
}
