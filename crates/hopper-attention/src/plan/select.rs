//! Which forward kernel computes a problem, and the schedule of the kernel's tiles. All functions here are pure.
//!
//! Words:
//! - A *row* is a compiled kernel ([`KernelInfo`]), one row of the launch table.
//! - A *CTA* is a CUDA thread block. The *grid* is the CTAs of a launch.
//! - A *tile* is `tile_m` queries of one head. A CTA computes one tile at a time, and visits the keys of the tile block by
//!   block. A *key block* is `tile_n` keys.
//! - The *tile order* is the list of all tiles. The CTAs walk the list: they take its tiles from the first to the last, either
//!   by index or by drawing. A *round* is `grid` tiles of the list.
//! - A *share* of a tile is some of its key blocks, which one CTA of a cluster visits. Several clusters may share a tile:
//!   [`Choice::splits`] is how many. (`split_tiles` is another thing: the last tiles of an FP8 launch, which all CTAs compute
//!   together.)
//! - To *draw* a tile is to take the next one of the list with a counter in the workspace.
//!   `hopper-attention-sys/kernels/common/tile_scheduler.hpp` has both ways.

use std::cmp::Reverse;
use std::fmt;

use super::fitting::{MOST_TILES_TEXT, fitting, tile_count, unsupported};
use super::gather::of_kernels;
use super::key_shares::{Sharing, Work, is_wide};
use super::lists::{ListParts, Lists};
use super::packed::{most_tiles, table_bytes, typical_dims};
use super::schedule::{
    Bounds, HEADS_PER_GROUP, check_limit, groups, is_persistent, is_within_limit, multiprocessors, resident, small,
    write_keys,
};
use crate::arch::{Arch, DeviceFacts, MaskClass, Pass};
use crate::dtype::DType;
use crate::error::Result;
use crate::operand::Slot;
use crate::problem::{Dims, ForwardProblem};
use crate::table::KernelInfo;

/// Size of the workspace in bytes, where it holds nothing but the counter that CTAs draw tiles from.
const COUNTER_BYTES: usize = size_of::<i32>();
/// Size in bytes of the workspace's header, where the workspace holds more than the counter. The header is the struct
/// `RangeCheck` of `kernels.hpp`. Its first word is the counter, its second word the counter of the fallback.
const HEADER_BYTES: usize = 16;
/// Size in bytes of the word in which one CTA reports whether it found an element of Q or K too large for scores in f16.
const RANGE_WORD_BYTES: usize = size_of::<u32>();
/// The last tiles are split over all CTAs if this saves each CTA at least so many key blocks. A split itself costs about ten:
/// a CTA writes partial sums, another one reads them, and a tile is begun twice (benches/LOG.md, entry 28).
const SPLITTING_SAVES: usize = 20;

/// The second kernel of a [`Choice`] whose kernel sums scores in f16.
///
/// A launch enqueues the fallback after the chosen kernel. The chosen kernel checks every element of Q and K. If one is too
/// large for scores in f16, the fallback computes the whole problem again. Otherwise the fallback returns at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fallback {
    /// The kernel. It sums scores in f32.
    pub kernel: KernelInfo,
    /// Number of CTAs, as [`Choice::grid`].
    pub grid: i32,
    /// Whether the fallback's CTAs draw their tiles, as [`Choice::tile_counter`]. The fallback has a counter of its own.
    pub tile_counter: bool,
}

/// A forward kernel for a problem, and the schedule of its tiles.
///
/// [`select`] sets the fields. [`Tuning`](super::Tuning) sets `tuned`. A launch copies the numbers to the kernel's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The kernel.
    pub kernel: KernelInfo,
    /// Number of query heads that the kernel takes for the queries of one head: 1, or those of a group (`gather.rs`). The other
    /// numbers are of the problem that the kernel computes then.
    pub heads_as_queries: i32,
    /// The keys that a query keeps, as the mask and the lengths say.
    pub bounds: Bounds,
    /// Number of tiles of one head: `ceil(seqlen_q / tile_m)`. Where the kernel reads lengths from memory (`packed`): the most
    /// that all sequences together can have.
    pub m_tiles: i32,
    /// Number of tiles in all: `m_tiles * batch * heads_q`, or `m_tiles * heads_q` where `packed`. Below 2^31 - 2^20.
    pub tiles: i32,
    /// Number of CTAs.
    /// - sm90: one for each multiprocessor that the problem's margin leaves, but no more than `tiles`. A CTA computes one tile
    ///   after another.
    /// - sm90, where `shares` is above 1 or tiles have 64 queries: one for each share of each tile, in each of `splits` clusters. A
    ///   CTA computes one share and ends. With a margin there are no more of them than multiprocessors that it leaves.
    /// - sm80: one for each tile. Several CTAs share a multiprocessor. The GPU starts CTAs in the tile order.
    pub grid: i32,
    /// Number of CTAs of a cluster that share the keys of a tile: at least 1, and at most the kernel's
    /// [`most_shares`](KernelInfo::most_shares). The GPU runs the CTAs of a cluster at the same time, and each reads
    /// what the others have computed (`hopper-attention-sys/kernels/sm90/fwd/shares.hpp`, `fp8/shares.hpp`).
    ///
    /// Above 1 where tiles are few and visit many blocks of keys. CTAs then draw no tiles.
    pub shares: i32,
    /// Number of clusters that share the keys of a tile, 1 to 32: `shares * splits` CTAs in all. The clusters sum through the
    /// workspace. Above 1 where one cluster for each tile would leave much of the GPU idle. (A cluster has eight CTAs at most.)
    pub splits: i32,
    /// Number of heads in a group: 1 under a full mask, 1 to 16 under other masks. A head here is a (batch entry, query head)
    /// pair.
    ///
    /// The tile order lists the tiles group by group. In a group the tiles with the most work come first. So a group must be
    /// large enough to give all CTAs even work, and small enough that its keys and values stay in the second-level cache.
    pub heads_per_group: i32,
    /// Number of groups. At least 1. The last group has all heads that are left, which may be more than `heads_per_group`.
    pub groups: i32,
    /// Whether CTAs draw their tiles from a counter in the workspace. If not, a CTA's tiles follow from its index. (Where `packed`,
    /// the counter is in the table of sequences, and this is false.)
    pub tile_counter: bool,
    /// Number of tiles at the end of the tile order that are split over CTAs by key blocks
    /// (`hopper-attention-sys/kernels/sm90/fp8/split.hpp`). 0 turns splitting off.
    /// - Why: without splitting, some CTAs have no tile in the last round. With splitting, all CTAs compute equally many key
    ///   blocks of the last tiles. A tile at a border between two CTAs is computed in two pieces.
    /// - Range: 0, or above `grid` and below `2 * grid`.
    /// - Needs a kernel with `split_bytes` above 0, `tile_counter`, `tiles >= 2 * grid`, and a workspace within the problem's limit.
    pub split_tiles: i32,
    /// Number of queries by which the last tile of each head reaches past `seqlen_q`: 0 to `tile_m - 1`.
    pub padding: i32,
    /// The number of sequences whose lengths the kernel reads from memory. `None`: all sequences have the problem's lengths.
    ///
    /// One more kernel then runs first. It makes a table of the sequences and their tiles in the workspace
    /// (`hopper-attention-sys/kernels/common/sequences.hpp`), from which CTAs take theirs: they draw them on sm90.
    pub packed: Option<i32>,
    /// The lists of a block-sparse mask. The launch's first kernel makes the kernel's own of the caller's, in the workspace.
    pub lists: Option<Lists>,
    /// Whether a measurement chose the kernel, and not the built-in ranking. See [`Tuning`](super::Tuning).
    pub tuned: bool,
    /// The kernel that is launched after this one. There is one exactly where this kernel sums scores in f16.
    pub fallback: Option<Fallback>,
}

/// Chooses the kernel for a problem, and the schedule of its tiles.
///
/// Candidates are the rows that compute the problem on this GPU. (`fitting` finds them. They all have one instruction set: the
/// one that the problem asks for, or else the newest that the GPU runs.) Candidates are ranked by, in this order:
/// 1. the smallest head dims (sm80: after the time);
/// 2. for e4m3 with a head dim above 128: scores in f16 (only a candidate if the problem allows it:
///    [`half_scores`](crate::ForwardProblemBuilder::half_scores));
/// 3. the least estimated time (`key_shares.rs` on sm90, but for e4m3 with a head dim above 128 `time_weight` and `border_keys`;
///    `sm80_time` on sm80; padding counts as work);
/// 4. the higher occupancy (CTAs that share a multiprocessor);
/// 5. the larger tile;
/// 6. the lower index in the table.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) when no row computes the problem. The error names the first property that
/// no row has, and the nearest that a row has. [`Error::Value`](crate::Error::Value) when the margin leaves no multiprocessor,
/// and when the workspace is above the limit even if no tile is split.
pub fn select(problem: &ForwardProblem, gpu: &DeviceFacts, rows: &[KernelInfo]) -> Result<Choice> {
    schedule_best(problem, gpu, rows, None, rows)
}

/// The best of `rows` and its schedule, unless its workspace is above the problem's limit. A fallback comes from `all`.
fn schedule_best(
    problem: &ForwardProblem,
    gpu: &DeviceFacts,
    rows: &[KernelInfo],
    sharing: Option<Sharing>,
    all: &[KernelInfo],
) -> Result<Choice> {
    let computed = of_kernels(problem);
    let choice = schedule(&computed, gpu, best(&computed, gpu, rows)?, sharing, all)?;
    check_limit(problem, choice.workspace_bytes())?;
    let heads_as_queries = small(problem.dims().heads_q / computed.dims().heads_q);
    Ok(Choice { heads_as_queries, ..choice })
}

/// As [`select`], but with this kernel, and with tiles that are shared so, where the kernel's tiles can be (`None`: in the best
/// way). A fallback comes from `rows`.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) when the kernel does not compute the problem. [`Error::Value`](crate::Error::Value)
/// as [`select`].
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only GPUs have rows to choose from"))]
pub(super) fn select_row(
    problem: &ForwardProblem,
    gpu: &DeviceFacts,
    row: &KernelInfo,
    sharing: Option<Sharing>,
    rows: &[KernelInfo],
) -> Result<Choice> {
    schedule_best(problem, gpu, std::slice::from_ref(row), sharing, rows)
}

fn best(problem: &ForwardProblem, gpu: &DeviceFacts, rows: &[KernelInfo]) -> Result<KernelInfo> {
    let best = fitting(Pass::Forward, problem, gpu, rows)?.into_iter().min_by_key(|row| rank(problem, gpu, row));
    best.copied().ok_or_else(|| unsupported(problem.to_string(), "no kernel".into()))
}

/// The rows that compute the problem, the best first by the ranking of [`select`].
///
/// # Errors
/// As [`select`], when no row computes the problem.
pub fn candidates(problem: &ForwardProblem, gpu: &DeviceFacts, rows: &[KernelInfo]) -> Result<Vec<KernelInfo>> {
    let problem = of_kernels(problem);
    let mut fitting: Vec<KernelInfo> = fitting(Pass::Forward, &problem, gpu, rows)?.into_iter().copied().collect();
    fitting.sort_by_cached_key(|row| rank(&problem, gpu, row));
    Ok(fitting)
}

/// A row's place in the ranking of [`select`], as a key to sort by. The least is the best.
fn rank(
    problem: &ForwardProblem,
    gpu: &DeviceFacts,
    row: &KernelInfo,
) -> (usize, bool, u128, usize, Reverse<usize>, Reverse<usize>, u32) {
    // (Where times are known, they tell which type is better.)
    let in_f32 = row.scores != DType::F16 && !is_fitted(row);
    let time = if is_fitted(row) {
        let work = work(problem, gpu, row);
        let time = if problem.has_lengths() { work.time_of(Sharing::NONE) } else { work.best().1 };
        // In nanoseconds. A float as large as a u128 saturates.
        (time * 1e3) as u128
    } else if row.arch == Arch::Sm80 {
        let dims = typical_dims(problem);
        (sm80_time(row, dims, gpu) * dims.seqlen_kv as f64) as u128
    } else {
        let dims = problem.dims();
        let padded = dims.seqlen_q.next_multiple_of(row.tile_m.max(1));
        (padded * time_weight(row)) as u128 * (dims.seqlen_kv + border_keys(row)) as u128
    };
    // Of sm80 rows the times are comparable across head dims. Few tiles of head dim 96 are sooner done as tiles of 64 queries,
    // which head dim 128 has.
    let head_dims = row.head_dim_qk + row.head_dim_vo;
    let first = if row.arch == Arch::Sm80 { 0 } else { head_dims };
    (first, in_f32, time, head_dims, Reverse(resident(row, gpu)), Reverse(row.tile_m), row.row)
}

/// Whether the time that a kernel takes is known from a fit ([`key_shares`]): those of sm90, but for e4m3 operands with a head dim
/// above 128.
fn is_fitted(row: &KernelInfo) -> bool {
    row.arch == Arch::Sm90 && (row.dtype != DType::E4M3 || !is_wide(row))
}

/// The work of a launch of such a kernel.
fn work(problem: &ForwardProblem, gpu: &DeviceFacts, row: &KernelInfo) -> Work {
    let margin = problem.sm_margin();
    let left = gpu.multiprocessors.saturating_sub(margin).max(1);
    let dims = typical_dims(problem);
    // Equal tiles in two rounds or fewer have a fixed order (`schedule`). (Of 16-bit rows with small blocks of keys, the fit counts
    // them as drawn.)
    let tiles = dims.seqlen_q.div_ceil(row.tile_m.max(1)).saturating_mul(dims.batch * dims.heads_q);
    let is_even = row.dtype == DType::E4M3 && row.mask == MaskClass::Full && !problem.has_lengths();
    let drawn = is_drawn(problem, row) && !(is_even && tiles <= 2 * left);
    let work = Work::new(row, dims, Bounds::of(problem), left, drawn);
    if margin > 0 { work.bounded() } else { work }
}

/// Whether CTAs draw their tiles where they have several.
///
/// Drawing balances unequal work over the CTAs. Under a full mask all tiles have equal work, and a fixed order is as good: but not
/// for e4m3 with many keys (benches/LOG.md, entry 27), and not for kernels of head dims up to 128 with small blocks of keys, which
/// are bound by memory (entry 35).
fn is_drawn(problem: &ForwardProblem, row: &KernelInfo) -> bool {
    row.mask != MaskClass::Full
        || (row.dtype == DType::E4M3 && problem.dims().seqlen_kv > 512)
        || (is_fitted(row) && row.tile_n <= 80 && !is_wide(row))
}

/// Estimated time of a launch of an sm80 kernel for 64 keys, in nanoseconds on an H100.
///
/// A CTA has one tile. Where there are no more tiles than multiprocessors, the launch takes as long as a tile does alone. Where
/// there are more, as many take turns on a multiprocessor as fit there: two, or one.
fn sm80_time(row: &KernelInfo, dims: Dims, gpu: &DeviceFacts) -> f64 {
    // A tile alone, and one of two that share a multiprocessor (benches/LOG.md, entries 48 and 67). Tiles of 128 queries with more
    // than 128 columns of V are always alone.
    let [alone, shared] = match (row.tile_m, row.head_dim_vo) {
        (..=64, ..=64) => [800.0, 900.0],
        (..=64, ..=128) => [1150.0, 1600.0],
        (..=64, ..=192) => [1760.0, 2330.0],
        (..=64, _) => [2280.0, 3450.0],
        (_, ..=64) => [1340.0, 1470.0],
        (_, ..=96) => [1760.0, 2250.0],
        (_, ..=128) => [2000.0, 2760.0],
        (_, ..=192) => [2590.0, 2590.0],
        _ => [3590.0, 3590.0],
    };
    let tiles = dims.seqlen_q.div_ceil(row.tile_m.max(1)) as f64 * (dims.batch * dims.heads_q) as f64;
    let multiprocessors = gpu.multiprocessors.max(1) as f64;
    if tiles > multiprocessors && resident(row, gpu) > 1 {
        shared * (tiles / (2.0 * multiprocessors)).max(1.0)
    } else {
        alone * (tiles / multiprocessors).max(1.0)
    }
}

/// Estimated time for one query and one key, of an e4m3 kernel with a head dim above 128. The unit is a hundredth of the time that
/// a tile of 192 queries takes for them.
///
/// A tile of 192 queries has three warpgroups, which hide more latency than the two of a tile of 128. On an H100 with long
/// sequences, tiles of 128 took 9% longer at head dim 64 and 6% longer at head dim 128 (benches/LOG.md, entries 3 and 26).
fn time_weight(row: &KernelInfo) -> usize {
    match row.tile_m {
        192.. => 100,
        _ if row.head_dim_vo > 64 => 106,
        _ => 109,
    }
}

/// Estimated extra time for the key blocks of a tile that the mask cuts, in keys.
///
/// It is counted for e4m3 kernels at head dim 128 only: there three warpgroups are slower at such blocks than two
/// (benches/LOG.md, entry 26).
fn border_keys(row: &KernelInfo) -> usize {
    let counts = row.dtype == DType::E4M3 && row.mask != MaskClass::Full && row.head_dim_vo > 64;
    if counts { 4 * row.tile_m } else { 0 }
}

/// The schedule of a kernel's tiles. If the kernel sums scores in f16, the fallback is chosen from `rows`.
fn schedule(
    problem: &ForwardProblem,
    gpu: &DeviceFacts,
    kernel: KernelInfo,
    sharing: Option<Sharing>,
    rows: &[KernelInfo],
) -> Result<Choice> {
    let fallback = if kernel.scores == DType::F16 {
        let in_f32: Vec<KernelInfo> = rows.iter().filter(|row| row.scores != DType::F16).copied().collect();
        // One share: it starts for nothing nearly always.
        let behind = schedule(problem, gpu, best(problem, gpu, &in_f32)?, Some(Sharing::NONE), &[])?;
        Some(Fallback { kernel: behind.kernel, grid: behind.grid, tile_counter: behind.tile_counter })
    } else {
        None
    };
    if problem.has_lengths() {
        return schedule_packed(problem, gpu, kernel);
    }
    let dims = problem.dims();
    let heads = dims.batch * dims.heads_q; // Below 2^31: the problem was checked.
    let m_tiles = dims.seqlen_q.div_ceil(kernel.tile_m.max(1));
    let too_many = || {
        let per_head = format!("{m_tiles} tiles of {} queries for each of {heads} heads", kernel.tile_m);
        unsupported(per_head, format!("{MOST_TILES_TEXT} tiles in all"))
    };
    let tiles = tile_count(m_tiles, heads).ok_or_else(too_many)?;
    let multiprocessors = multiprocessors(problem, gpu, &kernel)?;
    let keys = dims.heads_kv * dims.seqlen_kv * (dims.head_dim_qk + dims.head_dim_vo) * kernel.dtype.bytes();
    let [heads_per_group, groups] =
        groups(kernel.mask == MaskClass::Full, heads, keys / dims.heads_q.max(1), HEADS_PER_GROUP);
    let bounds = Bounds::of(problem);
    let sharing = match sharing {
        _ if kernel.most_shares <= 1 => Sharing::NONE,
        Some(sharing) => sharing.of_kernel(&kernel),
        // (A limit of the workspace has not chosen the kernel.)
        None => work(problem, gpu, &kernel).within(problem.workspace_limit()).best().0,
    };
    let grid = match is_persistent(&kernel) {
        true if sharing.ctas() > 1 || kernel.has_one_tile() => {
            tile_count(tiles as usize, sharing.ctas()).ok_or_else(too_many)?
        }
        true => tiles.min(small(multiprocessors)),
        false => tiles,
    };
    if problem.sm_margin() > 0 && is_persistent(&kernel) && grid as usize > multiprocessors {
        let wanted = format!("sm_margin {} with {kernel}, {grid} CTAs that compute a share each", problem.sm_margin());
        return Err(unsupported(wanted, format!("up to {multiprocessors} such CTAs, or another kernel")));
    }
    // Where no CTA has more than two tiles, a fixed order gives it one from the front of the list and one from its back. If the
    // list goes from long tiles to short ones, drawing would pair them alike, and needs a counter that is zeroed before the
    // launch (benches/LOG.md, entry 84).
    let several = tiles > grid && is_drawn(problem, &kernel);
    let tile_counter = several
        && (tiles > grid.saturating_mul(2) || problem.block_mask().is_some() || !work(problem, gpu, &kernel).goes_down);
    let choice = Choice {
        kernel,
        heads_as_queries: 1,
        bounds,
        m_tiles: small(m_tiles),
        tiles,
        grid,
        shares: small(sharing.shares),
        splits: small(sharing.splits),
        heads_per_group,
        groups,
        tile_counter,
        split_tiles: if tile_counter { split_tiles(&kernel, tiles, grid, dims.seqlen_kv) } else { 0 },
        padding: small(m_tiles * kernel.tile_m - dims.seqlen_q),
        packed: None,
        lists: Lists::of(problem, None)?,
        tuned: false,
        fallback,
    };
    // Partial sums of FP8's split tiles are all that a limit can still save: it has chosen how tiles are shared.
    let fits = is_within_limit(problem, choice.workspace_bytes());
    Ok(if fits { choice } else { Choice { split_tiles: 0, ..choice } })
}

/// The same where the kernel reads the lengths of sequences from memory.
fn schedule_packed(problem: &ForwardProblem, gpu: &DeviceFacts, kernel: KernelInfo) -> Result<Choice> {
    let dims = problem.dims();
    let list_size = most_tiles(problem.wants(Slot::CuSeqlensQ), dims.batch, dims.seqlen_q, kernel.tile_m);
    let tiles = tile_count(list_size, dims.heads_q).ok_or_else(|| {
        let wanted = format!("up to {list_size} tiles of {} queries for each of {} heads", kernel.tile_m, dims.heads_q);
        unsupported(wanted, MOST_TILES_TEXT.into())
    })?;
    let multiprocessors = multiprocessors(problem, gpu, &kernel)?;
    let bounds = Bounds::of(problem);
    Ok(Choice {
        kernel,
        heads_as_queries: 1,
        bounds,
        m_tiles: small(list_size),
        tiles,
        grid: if is_persistent(&kernel) { tiles.clamp(1, small(multiprocessors)) } else { tiles },
        shares: 1,
        splits: 1,
        heads_per_group: small(if kernel.mask == MaskClass::Full { 1 } else { HEADS_PER_GROUP.min(dims.heads_q) }),
        groups: 1,
        tile_counter: false,
        split_tiles: 0,
        padding: 0,
        packed: Some(small(dims.batch)),
        lists: None,
        tuned: false,
        fallback: None,
    })
}

/// How many of the last tiles to split over all CTAs: see [`Choice::split_tiles`].
///
/// Without splitting, the last round has `rest` tiles, and `grid - rest` CTAs idle in it. So the last two rounds, `grid + rest`
/// tiles, are split, if this saves enough.
fn split_tiles(kernel: &KernelInfo, tiles: i32, grid: i32, seqlen_kv: usize) -> i32 {
    let rest = tiles % grid.max(1);
    if kernel.split_bytes == 0 || rest == 0 || tiles / 2 < grid {
        return 0;
    }
    let idle = (grid - rest) as usize * seqlen_kv.div_ceil(kernel.tile_n.max(1));
    if idle >= grid as usize * SPLITTING_SAVES { grid + rest } else { 0 }
}

/// The parts of a forward workspace, as offsets in bytes from its start.
///
/// ```text
/// CTAs draw tiles             counter: 4 bytes
/// CTAs draw and split tiles   counter: 16 bytes | partial sums: grid * split_bytes
/// clusters share tiles        counters: 4 bytes for each CTA of one cluster of each tile, rounded up to 16 | sums_bytes for each cluster
/// lengths are in memory       the table of sequences and their tiles (table_bytes)
/// there are lists of blocks   counter: 16 bytes | the kernel's own lists (`lists.rs`)
/// there is a fallback         RangeCheck: 16 bytes | a word for each CTA: 4 * grid, rounded up to 16 | partial sums, if split
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parts {
    /// The counter of the kernel. `None` where CTAs do not draw.
    pub tile_counter: Option<usize>,
    /// The counter of the fallback. `None` where there is no fallback, or where its CTAs do not draw.
    pub fallback_counter: Option<usize>,
    /// The table of sequences. `None` where the plan knows their lengths.
    pub table: Option<usize>,
    /// The `RangeCheck`, whose first two words are those counters. `None` where there is no fallback.
    pub range_check: Option<usize>,
    /// The lists of a block-sparse mask, where there are any.
    pub lists: Option<ListParts>,
    /// What clusters that share a tile leave for each other. `None` where none do.
    pub split_sums: Option<usize>,
    /// The size of the workspace.
    pub end: usize,
}

impl Parts {
    /// A counter, if any, and nothing else.
    fn of_counter(tile_counter: Option<usize>) -> Self {
        Self {
            tile_counter,
            fallback_counter: None,
            table: None,
            range_check: None,
            lists: None,
            split_sums: None,
            end: 0,
        }
    }
}

impl Choice {
    /// The element type of Q, K and V.
    pub fn dtype(&self) -> DType {
        self.kernel.dtype
    }

    /// The workspace that the kernels need, in bytes:
    /// - 0 where CTAs do not draw tiles, 4 where they do;
    /// - 544 on an H100 where there is a fallback;
    /// - where the kernel reads lengths from memory, some 50 for each sequence and 4 for each tile of a head;
    /// - where there are lists of blocks, some 4 for each block of them;
    /// - where several clusters share a tile, counters, and `sums_bytes` of the kernel for each cluster: up to 6 MB in all on an H100;
    /// - where tiles are split, also `split_bytes` of the kernel for each CTA (14 MB on an H100).
    pub fn workspace_bytes(&self) -> usize {
        self.parts().end
    }

    pub(crate) fn parts(&self) -> Parts {
        let grid = self.grid as usize; // Never below 0.
        let tile_counter = self.tile_counter.then_some(0);
        if let Some(batch) = self.packed {
            let end = table_bytes(batch as usize, self.m_tiles as usize, 0); // Never below 0.
            return Parts { table: Some(0), end, ..Parts::of_counter(tile_counter) };
        }
        if let Some(lists) = &self.lists {
            let lists = lists.parts(HEADER_BYTES);
            let end = lists.end;
            return Parts { lists: Some(lists), end, ..Parts::of_counter(tile_counter) };
        }
        if self.splits > 1 {
            let [shares, splits] = [self.shares, self.splits].map(|count| count as usize); // Never below 1.
            let end = Sharing { shares, splits }.workspace_bytes(&self.kernel, self.tiles as usize);
            return Parts { split_sums: Some(0), end, ..Parts::of_counter(None) };
        }
        let Some(fallback) = &self.fallback else {
            let end = match (self.tile_counter, self.split_tiles) {
                (false, 0) => 0,
                (true, 0) => COUNTER_BYTES,
                _ => HEADER_BYTES + grid * self.kernel.split_bytes,
            };
            return Parts { end, ..Parts::of_counter(tile_counter) };
        };
        let range_check = HEADER_BYTES + (RANGE_WORD_BYTES * grid).next_multiple_of(16);
        Parts {
            fallback_counter: fallback.tile_counter.then_some(COUNTER_BYTES),
            range_check: Some(0),
            end: range_check + if self.split_tiles > 0 { grid * self.kernel.split_bytes } else { 0 },
            ..Parts::of_counter(tile_counter)
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, tiles, grid, heads_per_group, groups, padding, m_tiles, .. } = self;
        let tuned = if self.tuned { ", tuned" } else { "" };
        if let Some(sequences) = self.packed {
            write!(f, "{kernel}{tuned}, grid {grid} for up to {tiles} tiles of {sequences} sequences, ")?;
            let order = if is_persistent(kernel) { "drawn" } else { "fixed" };
            write!(f, "heads a group {heads_per_group}, {order} order")?;
            return write_keys(f, kernel.mask, &self.bounds);
        }
        write!(f, "{kernel}{tuned}, grid {grid} for {tiles} tiles ({m_tiles} a head, {padding} queries of padding), ")?;
        write!(
            f,
            "heads a group {heads_per_group}, groups {groups}, {} order",
            if self.tile_counter { "drawn" } else { "fixed" }
        )?;
        if self.heads_as_queries > 1 {
            write!(f, ", {} heads as queries", self.heads_as_queries)?;
        }
        if self.split_tiles > 0 {
            write!(f, ", the last {} split", self.split_tiles)?;
        }
        if self.shares > 1 {
            write!(f, ", {} shares", self.shares)?;
        }
        if self.splits > 1 {
            write!(f, ", {} clusters a tile", self.splits)?;
        }
        write_keys(f, kernel.mask, &self.bounds)?;
        match &self.fallback {
            Some(fallback) => {
                write!(f, ", and where scores do not fit f16 {}, grid {}", fallback.kernel, fallback.grid)
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
#[path = "older_tests.rs"]
mod older_tests;

#[cfg(test)]
#[path = "select_bias_tests.rs"]
mod bias_tests;

#[cfg(test)]
#[path = "select_tests.rs"]
mod tests;
