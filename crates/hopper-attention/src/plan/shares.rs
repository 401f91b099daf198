//! How many shares the tiles of a backward pass are cut into.
//!
//! A *step* is one block of queries that a tile of keys visits, in one query head. A tile's steps are those of all query heads
//! that read its KV head. They can be cut into *shares*: a share is some steps of a tile, and a CTA computes one share at a
//! time. Then more CTAs than there are tiles can work at the same time. What the shares of a tile add to dK and dV is summed in
//! the workspace.

use crate::arch::MaskClass;
use crate::table::KernelInfo;

/// What a share costs beside its steps, in steps: K and V are loaded, the first scores have no product beside them, dK and dV
/// are written. Measured on an H100 (benches/LOG.md, entry 34).
const WHOLE: f64 = 1.5;
/// The same where dK and dV are added to sums, which another kernel converts.
const SUMMED: f64 = 2.5;
/// The most shares of a tile.
const MOST: usize = 64;
/// Tiles are cut only where there are fewer than so many for each multiprocessor. With more, the grid is as good as even.
const TILES_EACH: usize = 4;
/// Cutting must save at least this part of the time.
const WORTH: f64 = 0.03;
/// The most bytes that the sums of dK and dV may take.
const MOST_BYTES: usize = 256 << 20;

/// The work of a launch.
#[derive(Clone, Debug)]
pub(super) struct Work {
    /// Steps of each tile of one KV head, all query heads together.
    pub steps: Vec<usize>,
    /// (batch entry, KV head) pairs.
    pub heads: usize,
    /// Multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of the sums of dK and dV of one tile.
    pub bytes: usize,
    /// Whether each share needs sums of its own.
    pub ordered: bool,
}

/// The number of blocks of queries that tile `tile` of keys visits, in one query head: `QueryVisits` of the kernels
/// (`common/visits.hpp`). At least 1.
pub(super) fn visits(kernel: &KernelInfo, [seqlen_q, seqlen_kv]: [usize; 2], bounds: [i32; 3], tile: usize) -> usize {
    let (rows, keys) = (kernel.tile_m.max(1) as i64, kernel.tile_n as i64);
    let [offset, left, right] = bounds.map(i64::from);
    let (queries, all_keys) = (seqlen_q as i64, seqlen_kv as i64);
    let ceil = |a: i64| (a.max(0) + rows - 1) / rows;
    let (mut begin, mut end) = (0, ceil(queries));
    let first_key = tile as i64 * keys;
    if kernel.mask != MaskClass::Full {
        begin = ((first_key - offset - right).max(0) / rows).min(end - 1);
    }
    if kernel.mask == MaskClass::Window {
        let last_key = (first_key + keys).min(all_keys) - 1;
        end = ceil(queries.min(last_key - (offset - left) + 1)).max(begin + 1);
    }
    usize::try_from(end - begin).unwrap_or(1).max(1)
}

impl Work {
    /// Whether there are so few tiles that the choice is worth the time that it takes.
    pub(super) fn is_small(tiles: usize, multiprocessors: usize) -> bool {
        tiles < TILES_EACH * multiprocessors
    }

    /// The time that the launch takes with so many shares of each tile, in steps.
    fn time(&self, shares: usize) -> f64 {
        let beside = if shares == 1 { WHOLE } else { SUMMED };
        let longest = self.steps.iter().copied().max().unwrap_or(1).div_ceil(shares) as f64 + beside;
        // A tile of few steps has fewer shares.
        let listed: usize = self.steps.iter().map(|&steps| steps.min(shares)).sum::<usize>() * self.heads;
        let even = self.steps.iter().all(|&steps| steps == self.steps[0]);
        if even {
            return listed.div_ceil(self.multiprocessors) as f64 * longest;
        }
        let steps = (self.steps.iter().sum::<usize>() * self.heads) as f64;
        ((steps + listed as f64 * beside) / self.multiprocessors as f64).max(longest)
    }

    /// The number of shares that takes the least time.
    pub(super) fn shares(&self) -> usize {
        let whole = self.time(1);
        let tiles = self.steps.len() * self.heads;
        let most = self.steps.iter().copied().max().unwrap_or(1).min(MOST);
        (2..=most)
            .filter(|shares| tiles * self.bytes * if self.ordered { *shares } else { 1 } <= MOST_BYTES)
            .map(|shares| (self.time(shares), shares))
            .filter(|(time, _)| *time < whole * (1.0 - WORTH))
            .min_by(|a, b| a.0.total_cmp(&b.0))
            .map_or(1, |(_, shares)| shares)
    }
}
