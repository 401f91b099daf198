//! Which forward kernel computes a problem, and in which order its tiles are walked: pure functions of numbers.

use std::cmp::Reverse;
use std::fmt;

use super::fitting::{fitting, unsupported};
use super::schedule::{bounds, groups, is_persistent, resident, small, write_keys};
use crate::arch::{DeviceFacts, MaskClass};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::ForwardProblem;
use crate::table::KernelInfo;

/// The counter that CUDA blocks draw tiles from, in bytes.
const COUNTER_BYTES: usize = size_of::<i32>();
/// The same where something comes after it: partial sums of shared tiles, or the range check (`RangeCheck` of the kernels'
/// parameters), whose second word is the fallback's counter.
const HEADER_BYTES: usize = 16;
/// What each CUDA block notes of the range of its scores.
const RANGE_WORD_BYTES: usize = size_of::<u32>();
/// The last tiles are shared out where a block then computes so many fewer blocks of keys. To leave sums, to find them and
/// to begin a tile twice take ten (benches/LOG.md, 28).
const SHARING_SAVES: usize = 20;

/// The kernel that computes a problem where the chosen one, whose scores are in f16, finds that they do not fit: it is
/// launched behind that one, and returns at once where they do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fallback {
    /// The kernel, whose scores are in f32.
    pub kernel: KernelInfo,
    /// Blocks that walk its tiles.
    pub grid: i32,
    /// Whether they draw them from a counter.
    pub tile_counter: bool,
}

/// A kernel for a problem and the schedule of its tiles.
///
/// A tile is `tile_m` queries of one head; the kernel's grid is persistent, and a block computes tile after tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The kernel.
    pub kernel: KernelInfo,
    /// The key at which query 0 stands.
    pub diagonal_offset: i32,
    /// Keys kept before a query's own; 2^30 for all.
    pub window_left: i32,
    /// Keys kept after a query's own; 2^30 for all.
    pub window_right: i32,
    /// Tiles of a head.
    pub m_tiles: i32,
    /// Tiles in all.
    pub tiles: i32,
    /// Blocks that walk them: one a multiprocessor, or one a tile where there are fewer; on sm80, where a multiprocessor
    /// has several at a time, one a tile, and the order is that in which the GPU starts them.
    pub grid: i32,
    /// Heads whose tiles are walked together, so that tiles of unequal work spread evenly over the blocks while their
    /// keys stay in the second-level cache.
    pub heads_per_group: i32,
    /// Such groups; the last one has all heads that are left.
    pub groups: i32,
    /// Whether blocks draw tiles from a counter in the workspace, whoever is free taking the next; otherwise a block's
    /// tiles follow from its index.
    pub tile_counter: bool,
    /// Tiles at the end of the list that are shared out, so that each block computes as many of their keys: of some tiles two
    /// blocks compute a part each. 0: none are.
    pub shared_tiles: i32,
    /// Queries of the last tile of each head that are not there.
    pub padding: i32,
    /// Whether a measurement named the kernel, and not the built-in rule: see [`Tuning`](super::Tuning).
    pub tuned: bool,
    /// The kernel behind one whose scores are in f16; `None` behind others.
    pub fallback: Option<Fallback>,
}

/// Picks the kernel with the smallest head dims that fit, then sums of scores in f16 (of which there are none without
/// [`half_scores`](ForwardProblem::half_scores)), then the least time by `time_weight` (padding counts as work),
/// then the one of which more blocks share a multiprocessor, then the larger tile. A GPU's own instruction set comes
/// before older ones that it runs too, unless the problem asks for one.
///
/// # Errors
/// [`Error::Unsupported`] naming what no row has, and the nearest that one has.
pub fn select(problem: &ForwardProblem, gpu: &DeviceFacts, rows: &[KernelInfo]) -> Result<Choice> {
    schedule(problem, gpu, best(problem, gpu, rows)?, rows)
}

/// As [`select`], but this kernel; a fallback comes from `rows`.
///
/// # Errors
/// [`Error::Unsupported`] where it does not compute the problem.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only GPUs have rows to choose from"))]
pub(super) fn select_row(
    problem: &ForwardProblem,
    gpu: &DeviceFacts,
    row: &KernelInfo,
    rows: &[KernelInfo],
) -> Result<Choice> {
    schedule(problem, gpu, best(problem, gpu, std::slice::from_ref(row))?, rows)
}

fn best(problem: &ForwardProblem, gpu: &DeviceFacts, rows: &[KernelInfo]) -> Result<KernelInfo> {
    let best = fitting(problem, gpu, rows)?.into_iter().min_by_key(|row| rank(problem, gpu, row));
    best.copied().ok_or_else(|| unsupported(problem.to_string(), "no kernel".into()))
}

/// The rows that compute the problem, in the order in which [`select`] would take them.
///
/// # Errors
/// Those of [`select`] when there is none.
pub fn candidates(problem: &ForwardProblem, gpu: &DeviceFacts, rows: &[KernelInfo]) -> Result<Vec<KernelInfo>> {
    let mut fitting: Vec<KernelInfo> = fitting(problem, gpu, rows)?.into_iter().copied().collect();
    fitting.sort_by_key(|row| rank(problem, gpu, row));
    Ok(fitting)
}

/// What the rule compares, the least first.
fn rank(
    problem: &ForwardProblem,
    gpu: &DeviceFacts,
    row: &KernelInfo,
) -> (usize, bool, u128, Reverse<usize>, Reverse<usize>, u32) {
    let dims = problem.dims();
    let padded = dims.seqlen_q.next_multiple_of(row.tile_m.max(1));
    let time = (padded * time_weight(row)) as u128 * (dims.seqlen_kv + border_keys(row)) as u128;
    let in_f32 = row.scores != DType::F16;
    (row.head_dim_qk + row.head_dim_vo, in_f32, time, Reverse(resident(row, gpu)), Reverse(row.tile_m), row.row)
}

/// Time for a query and a key, in hundredths: 192 queries a tile (three warpgroups) hide more latency than 128 (two), which
/// took 9% longer on an H100 at head dim 64 and long sequences, and 6% at 128 (benches/LOG.md, 3 and 26).
fn time_weight(row: &KernelInfo) -> usize {
    match row.tile_m {
        192.. => 100,
        _ if row.head_dim_vo > 64 => 106,
        _ => 109,
    }
}

/// What a tile's masked blocks cost beside the others, in keys: of e4m3 at head dim 128 three warpgroups are slower there
/// (benches/LOG.md, 26).
fn border_keys(row: &KernelInfo) -> usize {
    let counts = row.dtype == DType::E4M3 && row.mask != MaskClass::Full && row.head_dim_vo > 64;
    if counts { 4 * row.tile_m } else { 0 }
}

/// How a kernel's tiles are walked, and what is behind it among `rows`.
fn schedule(problem: &ForwardProblem, gpu: &DeviceFacts, kernel: KernelInfo, rows: &[KernelInfo]) -> Result<Choice> {
    let fallback = if kernel.scores == DType::F16 {
        let in_f32: Vec<KernelInfo> = rows.iter().filter(|row| row.scores != DType::F16).copied().collect();
        let behind = schedule(problem, gpu, best(problem, gpu, &in_f32)?, &[])?;
        Some(Fallback { kernel: behind.kernel, grid: behind.grid, tile_counter: behind.tile_counter })
    } else {
        None
    };
    let dims = problem.dims();
    let heads = dims.batch * dims.heads_q; // below 2^31: the problem was checked
    let m_tiles = dims.seqlen_q.div_ceil(kernel.tile_m.max(1));
    let tiles = m_tiles.checked_mul(heads).and_then(|tiles| i32::try_from(tiles).ok()).ok_or_else(|| {
        let per_head = format!("{m_tiles} tiles of {} queries for each of {heads} heads", kernel.tile_m);
        unsupported(per_head, "below 2^31 tiles in all".into())
    })?;
    let multiprocessors = gpu.multiprocessors.max(1);
    let keys = dims.heads_kv * dims.seqlen_kv * (dims.head_dim_qk + dims.head_dim_vo) * kernel.dtype.bytes();
    let [heads_per_group, groups] = groups(kernel.mask == MaskClass::Full, heads, keys / dims.heads_q.max(1));
    let [diagonal_offset, window_left, window_right] = bounds(problem);
    let grid = if is_persistent(&kernel) { tiles.min(small(multiprocessors)) } else { tiles };
    // A single round is balanced by no order, and equal tiles by any, where they take equally long: those of e4m3 with
    // many keys differ between multiprocessors (benches/LOG.md, 27).
    let tile_counter =
        tiles > grid && (kernel.mask != MaskClass::Full || (kernel.dtype == DType::E4M3 && dims.seqlen_kv > 512));
    Ok(Choice {
        kernel,
        diagonal_offset,
        window_left,
        window_right,
        m_tiles: small(m_tiles),
        tiles,
        grid,
        heads_per_group,
        groups,
        tile_counter,
        shared_tiles: if tile_counter { shared_tiles(&kernel, tiles, grid, dims.seqlen_kv) } else { 0 },
        padding: small(m_tiles * kernel.tile_m - dims.seqlen_q),
        tuned: false,
        fallback,
    })
}

/// The last tiles, between one and two for each block of the grid, where it would end with a round for few of its blocks.
fn shared_tiles(kernel: &KernelInfo, tiles: i32, grid: i32, seqlen_kv: usize) -> i32 {
    let rest = tiles % grid.max(1);
    if kernel.share_bytes == 0 || rest == 0 || tiles / 2 < grid {
        return 0;
    }
    let idle = (grid - rest) as usize * seqlen_kv.div_ceil(kernel.tile_n.max(1));
    if idle >= grid as usize * SHARING_SAVES { grid + rest } else { 0 }
}

/// Where the parts of a forward workspace are, in bytes from its start, and where it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parts {
    /// The counter of the kernel.
    pub tile_counter: Option<usize>,
    /// The counter of the fallback.
    pub fallback_counter: Option<usize>,
    /// The range check, whose first words are those counters.
    pub range_check: Option<usize>,
    pub end: usize,
}

impl Choice {
    /// The type of Q, K and V.
    pub fn dtype(&self) -> DType {
        self.kernel.dtype
    }

    /// What the kernels need of a workspace, in bytes: nothing; 4 for the counter; 544 on an H100 where there is a fallback;
    /// and, where tiles are shared out, the kernel's `share_bytes` for each CUDA block besides (14 MB there).
    pub fn workspace_bytes(&self) -> usize {
        self.parts().end
    }

    pub(crate) fn parts(&self) -> Parts {
        let grid = self.grid as usize; // never below 0
        let tile_counter = self.tile_counter.then_some(0);
        let Some(fallback) = &self.fallback else {
            let end = match (self.tile_counter, self.shared_tiles) {
                (false, 0) => 0,
                (true, 0) => COUNTER_BYTES,
                _ => HEADER_BYTES + grid * self.kernel.share_bytes,
            };
            return Parts { tile_counter, fallback_counter: None, range_check: None, end };
        };
        let range_check = HEADER_BYTES + (RANGE_WORD_BYTES * grid).next_multiple_of(16);
        Parts {
            tile_counter,
            fallback_counter: fallback.tile_counter.then_some(COUNTER_BYTES),
            range_check: Some(0),
            end: range_check + if self.shared_tiles > 0 { grid * self.kernel.share_bytes } else { 0 },
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, tiles, grid, heads_per_group, groups, padding, m_tiles, .. } = self;
        let tuned = if self.tuned { ", tuned" } else { "" };
        write!(f, "{kernel}{tuned}, grid {grid} for {tiles} tiles ({m_tiles} a head, {padding} queries of padding), ")?;
        write!(
            f,
            "heads a group {heads_per_group}, groups {groups}, {} order",
            if self.tile_counter { "drawn" } else { "fixed" }
        )?;
        if self.shared_tiles > 0 {
            write!(f, ", the last {} shared out", self.shared_tiles)?;
        }
        write_keys(f, kernel.mask, [self.diagonal_offset, self.window_left, self.window_right])?;
        match &self.fallback {
            Some(fallback) => {
                write!(f, ", and where scores do not fit f16 {}, grid {}", fallback.kernel, fallback.grid)
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
#[path = "select_tests.rs"]
mod tests;
