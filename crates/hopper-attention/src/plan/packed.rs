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

/// With more sequences, some thread of the kernel that makes the table may have several (`kThreads` of
/// `kernels/common/schedule.cu`).
const SCHEDULE_THREADS: usize = 1024;

/// The most tiles of `tile` rows that all sequences of a head can have together. `rows` is the number of rows of all sequences
/// (packed), or of each.
pub(super) fn most_tiles(packed: bool, batch: usize, rows: usize, tile: usize) -> usize {
    let tile = tile.max(1);
    if packed { rows / tile + batch } else { batch.saturating_mul(rows.div_ceil(tile)) }
}

/// Size in bytes of the table of sequences: a header of 32 bytes, 48 for each sequence, and 4 for each tile and each block of
/// queries of a head. Where a thread of the kernel that makes it may have several sequences, it needs 48 more for each.
pub(super) fn table_bytes(batch: usize, tiles: usize, blocks: usize) -> usize {
    let scratch = if batch > SCHEDULE_THREADS { 48 * batch } else { 0 };
    32 + 48 * batch + 4 * (tiles.next_multiple_of(4) + blocks.next_multiple_of(4)) + scratch
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
    use crate::arch::{DeviceFacts, MaskClass, Pass};
    use crate::dtype::DType;
    use crate::plan::{BackwardChoice, Choice, select, select_backward};
    use crate::problem::BackwardProblem;
    use crate::table::tests::ROW;
    use proptest::prelude::*;

    const H100: DeviceFacts = DeviceFacts::h100_sxm();

    /// 5 sequences of 1000 rows together, 4 query heads on 2 key heads.
    fn problem(arch: Arch, sm_margin: usize) -> ForwardProblem {
        let dims = Dims::new(5, 1000, 4, 128).with_heads_kv(2);
        ForwardProblem::builder(DType::BF16, dims).packed(true).arch(arch).sm_margin(sm_margin).build().unwrap()
    }

    fn row(arch: Arch) -> KernelInfo {
        KernelInfo { arch, mask: MaskClass::Full, tile_m: 64, tile_n: 128, packs: true, ..ROW }
    }

    /// sm80: a CTA for each tile that there can be, which draws none, and sums of dQ for all sequences.
    #[test]
    fn sm80_kernels_have_ctas_for_all_tiles() {
        let choice = |arch| select(&problem(arch, 0), &H100, &[row(arch)]).unwrap();
        let most = 4 * (1000 / 64 + 5);
        assert_eq!((choice(Arch::Sm80).grid, choice(Arch::Sm80).tiles, choice(Arch::Sm90).grid), (most, most, most));
        let few = DeviceFacts { multiprocessors: 7, ..H100 };
        let grid = |arch| select(&problem(arch, 0), &few, &[row(arch)]).unwrap().grid;
        assert_eq!((grid(Arch::Sm80), grid(Arch::Sm90)), (most, 7));
        assert!(choice(Arch::Sm80).to_string().contains("fixed order"));

        let choice = |arch, deterministic| {
            let row = KernelInfo { pass: Pass::Backward, ..row(arch) };
            let problem = BackwardProblem::builder(&problem(arch, 0)).deterministic(deterministic).build().unwrap();
            select_backward(&problem, &few, &[row]).unwrap()
        };
        let (sm80, sm90) = (choice(Arch::Sm80, false), choice(Arch::Sm90, false));
        let most_blocks = 1000 / 64 + 5;
        assert_eq!((sm80.grid, sm90.grid), (2 * (1000 / 128 + 5), 7));
        assert_eq!((sm80.blocks, sm90.blocks), (4 * most_blocks, 4 * most_blocks));
        assert_eq!(sm80.packed.unwrap().sum_blocks, sm80.packed.unwrap().block_list_size);
        // Statistics of 8 bytes, and no list of tiles.
        let sums = 256 + 4000 * 8;
        let end = sums + 4 * most_blocks * (64 * 128 * 4 + 4);
        let parts = sm80.parts();
        assert_eq!((parts.statistics, parts.sums, parts.share_list), (256, sums, end.next_multiple_of(256)));
        assert_eq!((parts.table, parts.end), (Some(parts.share_list), parts.share_list + table_bytes(5, 12, 20)));
        for (choice, order) in [(sm80, "fixed order"), (choice(Arch::Sm80, true), "drawn order, dQ in turns")] {
            assert!(choice.to_string().ends_with(order) && !choice.tile_counter, "{choice}");
        }
    }

    /// Where a key tile holds a whole sequence, sm80 kernels sum up dQ none the less.
    #[test]
    fn sm80_kernels_have_sums_for_short_sequences() {
        let dims = Dims::new(9, 100, 1, 128);
        let problem = ForwardProblem::builder(DType::BF16, dims).packed(true).build().unwrap();
        let sum_blocks = |arch| Packed::of(&problem, &row(arch)).sum_blocks;
        assert_eq!((sum_blocks(Arch::Sm80), sum_blocks(Arch::Sm90)), (100 / 64 + 9, 0));
    }

    /// A hint has a part in the choice of a kernel and in the groups of heads, and in nothing that must hold for all lengths.
    #[test]
    fn whatever_the_hints_all_lengths_fit() {
        let hints = [None, Some(0), Some(1), Some(300), Some(usize::MAX)];
        let dims = Dims::new(5, 1000, 4, 128).with_heads_kv(2);
        let mut kernels = std::collections::BTreeSet::new();
        for (q, kv) in hints.into_iter().flat_map(|q| hints.map(|kv| (q, kv))) {
            let problem = |[q, kv]: [Option<usize>; 2]| {
                let options = ForwardProblem::builder(DType::BF16, dims).packed(true).lse(true);
                let options = q.into_iter().fold(options, |options, hint| options.max_seqlen_q(hint));
                kv.into_iter().fold(options, |options, hint| options.max_seqlen_kv(hint)).build().unwrap()
            };
            let tiles = |row: KernelInfo| [64, 128, 192].map(|tile_m| KernelInfo { row: tile_m as u32, tile_m, ..row });
            let with = select(&problem([q, kv]), &H100, &tiles(row(Arch::Sm90))).unwrap();
            let without = select(&problem([None; 2]), &H100, &[with.kernel]).unwrap();
            let sizes = |choice: &Choice| (choice.tiles, choice.grid, choice.bounds, choice.workspace_bytes());
            assert_eq!(sizes(&with), sizes(&without), "{q:?} {kv:?}");
            kernels.insert(with.kernel.tile_m);

            let backward = |hints| BackwardProblem::builder(&problem(hints)).build().unwrap();
            let row = KernelInfo { pass: Pass::Backward, ..row(Arch::Sm90) };
            let [with, without] =
                [[q, kv], [None; 2]].map(|hints| select_backward(&backward(hints), &H100, &[row]).unwrap());
            let sizes =
                |choice: &BackwardChoice| (choice.tiles, choice.grid, choice.blocks, choice.packed, choice.parts());
            assert_eq!(sizes(&with), sizes(&without), "{q:?} {kv:?}");
        }
        // The hint is looked at.
        assert!(kernels.len() > 1, "{kernels:?}");
    }

    #[test]
    fn sm80_kernels_leave_no_multiprocessors() {
        let error = select(&problem(Arch::Sm80, 1), &H100, &[row(Arch::Sm80)]).unwrap_err().to_string();
        assert!(error.contains("sm_margin 1 with sm80 kernels"), "{error}");
    }

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
