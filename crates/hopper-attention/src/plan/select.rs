//! Which kernel computes a problem, and in which order its tiles are walked: pure functions of numbers.

use std::cmp::Reverse;
use std::fmt;

use super::Target;
use crate::{Arch, DType, DeviceFacts, Error, ForwardProblem, KernelInfo, MaskClass, Pass, Result};

/// What kernels read as "without bound". Lengths together stay below it, so it excludes nothing.
pub(crate) const UNBOUNDED: i32 = 1 << 30;
/// TMA moves multiples of 16 bytes.
const TMA_BYTES: usize = 16;
/// Heads a group where tiles have unequal work. Their tiles come longest first, and what they share stays in the
/// second-level cache meanwhile (benches/LOG.md, 2).
const HEADS_PER_GROUP: usize = 16;
/// The last group has more of them, since the grid ends as evenly as its last tiles are short, but no more than this
/// nor than share so many bytes (benches/LOG.md, 14).
const LAST_GROUP_HEADS: usize = 64;
const LAST_GROUP_BYTES: usize = 32 << 20;
/// Where tiles take turns: what the heads of a group share at most, and how many they are at least; first under a mask,
/// then where all tiles have equal work.
const TURNS: [(usize, usize); 2] = [(64 << 20, 32), (16 << 20, 16)];
/// The counter that blocks draw tiles from, in bytes.
const TILE_COUNTER_BYTES: usize = size_of::<i32>();
/// The same where something comes after it: what blocks share, or, of a kernel whose scores are in f16, what each block has
/// found of their range (RangeCheck in kernels.hpp), in so many bytes.
const HEADER_BYTES: usize = 16;
const FOUND_BYTES: usize = 4;
/// The last tiles are shared out where a block then computes so many fewer blocks of keys. To leave sums, to find them and
/// to begin a tile twice take ten (benches/LOG.md, 28).
const SHARING_SAVES: usize = 20;

/// Where in that header the counter of the fallback is.
#[cfg(feature = "cuda")]
pub(crate) const FALLBACK_COUNTER_OFFSET: u64 = 4;

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

/// The mask class that computes a problem: what its mask keeps, not how it was spelled.
pub fn mask_class(problem: &ForwardProblem) -> MaskClass {
    let dims = problem.dims();
    let band = problem.mask_value().band(dims.seqlen_q, dims.seqlen_kv);
    match (band.left, band.right) {
        (None, None) => MaskClass::Full,
        (None, Some(_)) => MaskClass::Causal,
        (Some(_), _) => MaskClass::Window,
    }
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

/// Whether a kernel has one block a multiprocessor, which walks over tiles; the others have a block for each tile.
pub(super) fn is_persistent(kernel: &KernelInfo) -> bool {
    kernel.arch != Arch::Sm80
}

/// Blocks of a kernel that share a multiprocessor: as many as its registers hold, a quarter of 1024 for each thread, and
/// as find shared memory, of which the system keeps 1 KiB for each.
pub(super) fn resident(row: &KernelInfo, gpu: &DeviceFacts) -> usize {
    if is_persistent(row) {
        return 1;
    }
    let by_registers = (64 << 10) / (256 * row.threads.max(1));
    let by_memory = (gpu.smem_bytes_per_block + 1024) / (row.smem_bytes + 1024);
    by_registers.min(by_memory)
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

/// The rows that compute the problem on the GPU; never empty. Each sieve that leaves nothing is named in the error.
pub(super) fn fitting<'a>(
    problem: &ForwardProblem,
    gpu: &DeviceFacts,
    rows: &'a [KernelInfo],
) -> Result<Vec<&'a KernelInfo>> {
    let dims = problem.dims();
    let (dtype, class) = (problem.dtype(), mask_class(problem));
    if rows.is_empty() {
        let wanted = format!("{gpu}, in a build without GPU kernels");
        return Err(unsupported(wanted, "Device::cpu(), or a build with the feature `cuda`".into()));
    }
    let rows: Vec<_> = rows.iter().collect();
    let rows = sieve(
        rows,
        |row| row.arch.runs_on(gpu.arch),
        |rows| {
            // A GPU may have kernels for the forward alone.
            let what = if is_backward(rows) { "backward kernels for a GPU" } else { "a GPU" };
            (format!("{what} of {}", gpu.arch), list(rows, |row| arch_name(row.arch)))
        },
    )?;
    let latest = rows.iter().map(|row| row.arch).max();
    let rows = sieve(
        rows,
        |row| problem.arch_value().or(latest) == Some(row.arch),
        |rows| {
            let arch = problem.arch_value().map_or(String::new(), |arch| arch.to_string());
            let pass = if is_backward(rows) { "backward " } else { "" };
            (format!("{pass}{arch} kernels on a GPU of {}", gpu.arch), list(rows, |row| row.arch.to_string()))
        },
    )?;
    let rows = sieve(
        rows,
        |row| row.dtype == dtype,
        |rows| (format!("{dtype} operands on a GPU"), list(rows, |row| row.dtype.to_string())),
    )?;
    // Sums in f16 are for those who asked for them; who did is as well served by sums in f32.
    let rows = sieve(
        rows,
        |row| row.scores != DType::F16 || problem.half_scores_value(),
        |_| (format!("{dtype} operands without half_scores(true) on a GPU"), "with half_scores(true)".into()),
    )?;
    let rows = sieve(
        rows,
        |row| row.mask == class,
        |rows| (format!("mask class {class} for {dtype}"), list(rows, |row| row.mask.to_string())),
    )?;
    let (qk, vo) = (dims.head_dim_qk, dims.head_dim_vo);
    let rows = sieve(
        rows,
        |row| row.head_dim_qk >= qk && row.head_dim_vo >= vo,
        |rows| {
            let wanted = format!("head_dim_qk {qk} with head_dim_vo {vo} for {dtype}, {class}");
            (wanted, list(rows, |row| format!("up to {} with {}", row.head_dim_qk, row.head_dim_vo)))
        },
    )?;
    let step = TMA_BYTES / dtype.bytes();
    for (what, got) in [("head_dim_qk", qk), ("head_dim_vo", vo)] {
        if !got.is_multiple_of(step) {
            let nearest =
                format!("{} (multiples of {step}: GPU rows are moved in 16-byte steps)", nearest_step(got, step));
            return Err(unsupported(format!("{what} {got} on a GPU"), nearest));
        }
    }
    sieve(
        rows,
        |row| row.runs_on(gpu),
        |rows| {
            let least = rows.iter().map(|row| row.smem_bytes).min().unwrap_or(0);
            let wanted = format!("{least} bytes of shared memory a block, which the smallest kernel for this asks for");
            (wanted, format!("{} bytes on this GPU", gpu.smem_bytes_per_block))
        },
    )
}

/// The CPU's plan, which has no instruction set to choose.
pub(super) fn cpu<C>(problem: &ForwardProblem) -> Result<Target<C>> {
    match problem.arch_value() {
        None => Ok(Target::Cpu),
        Some(arch) => Err(unsupported(format!("{arch} kernels on the CPU"), format!("a GPU of {}", arch_name(arch)))),
    }
}

/// Keeps some rows; if none is left, an error from what was there before.
fn sieve(
    rows: Vec<&KernelInfo>,
    keep: impl Fn(&KernelInfo) -> bool,
    name: impl FnOnce(&[&KernelInfo]) -> (String, String),
) -> Result<Vec<&KernelInfo>> {
    let kept: Vec<_> = rows.iter().copied().filter(|row| keep(row)).collect();
    if kept.is_empty() {
        let (wanted, nearest) = name(&rows);
        return Err(unsupported(wanted, nearest));
    }
    Ok(kept)
}

fn is_backward(rows: &[&KernelInfo]) -> bool {
    rows.iter().all(|row| row.pass == Pass::Backward)
}

/// The distinct names of rows, in their order.
fn list(rows: &[&KernelInfo], name: impl Fn(&KernelInfo) -> String) -> String {
    let mut names: Vec<String> = Vec::new();
    for row in rows {
        let name = name(row);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.join(", ")
}

fn arch_name(arch: Arch) -> String {
    match arch {
        Arch::Sm80 => "sm_80 and later".into(),
        Arch::Sm90 => "sm_90".into(),
    }
}

fn nearest_step(got: usize, step: usize) -> usize {
    let below = got / step * step;
    if below > 0 && got - below < step.div_ceil(2) { below } else { below.saturating_add(step) }
}

pub(super) fn unsupported(wanted: String, nearest: String) -> Error {
    Error::Unsupported { wanted, nearest }
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

/// Heads a group and the number of groups, where the tiles of one head share so many bytes: one by one where all tiles
/// are `even`.
pub(super) fn groups(even: bool, heads: usize, bytes: usize) -> [i32; 2] {
    if even {
        return [1, small(heads.max(1))];
    }
    let group = HEADS_PER_GROUP.min(heads.max(1));
    let last = (LAST_GROUP_BYTES / bytes.max(1)).clamp(HEADS_PER_GROUP, LAST_GROUP_HEADS);
    [small(group), small(heads.saturating_sub(last) / group + 1)]
}

/// The same where tiles take turns, so that a tile may begin when those before it are under way: the more heads at a time,
/// the more tiles may, until what they share leaves the second-level cache (benches/LOG.md, 18).
pub(super) fn groups_in_turns(even: bool, heads: usize, bytes: usize) -> [i32; 2] {
    let (room, least) = TURNS[usize::from(even)];
    let group = (room / bytes.max(1)).clamp(least, LAST_GROUP_HEADS).min(heads.max(1));
    [small(group), small(heads.max(1).div_ceil(group))]
}

/// The mask as kernels read it: the key at which query 0 stands, and the keys kept before and after a query's own.
pub(super) fn bounds(problem: &ForwardProblem) -> [i32; 3] {
    let dims = problem.dims();
    let band = problem.mask_value().band(dims.seqlen_q, dims.seqlen_kv);
    let bound = |bound: Option<usize>| bound.map_or(UNBOUNDED, |keys| small(keys).min(UNBOUNDED));
    // |offset| < 2^30: the problem was checked
    [i32::try_from(band.offset).unwrap_or(0), bound(band.left), bound(band.right)]
}

pub(super) fn small(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}

/// The keys that a mask keeps, in a plan's words.
pub(super) fn write_keys(f: &mut fmt::Formatter<'_>, mask: MaskClass, [offset, left, right]: [i32; 3]) -> fmt::Result {
    match mask {
        MaskClass::Full => Ok(()),
        MaskClass::Causal => write!(f, ", keys to {offset:+}{right:+}"),
        MaskClass::Window if right == UNBOUNDED => write!(f, ", keys from {offset:+}{:+}", -left),
        MaskClass::Window => write!(f, ", keys from {offset:+}{:+} to {offset:+}{right:+}", -left),
    }
}

impl Choice {
    /// The type of Q, K and V.
    pub fn dtype(&self) -> DType {
        self.kernel.dtype
    }

    /// What the kernels need of a workspace, in bytes: nothing, 4 for the counter, 544 on an H100 where there is a fallback,
    /// and, where tiles are shared out, the kernel's `share_bytes` for each block (14 MB there).
    pub fn workspace_bytes(&self) -> usize {
        let grid = self.grid as usize; // never below 0
        if self.fallback.is_none() && self.shared_tiles == 0 {
            return if self.tile_counter { TILE_COUNTER_BYTES } else { 0 };
        }
        let found = if self.fallback.is_some() { (FOUND_BYTES * grid).next_multiple_of(16) } else { 0 };
        HEADER_BYTES + found + if self.shared_tiles > 0 { grid * self.kernel.share_bytes } else { 0 }
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
