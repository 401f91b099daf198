//! How one device computes a backward pass: [`BackwardPlan`].
//!
//! Words (see also `select.rs`):
//! - A *CTA* is a CUDA thread block.
//! - A *tile* is `tile_n` keys of one KV head. A CTA computes one tile at a time. It keeps the tile's dK and dV while it
//!   visits the *blocks of queries* that see the tile, of every query head that reads the KV head. A block is `tile_m`
//!   queries.
//! - The *sums of dQ* of a block are f32 in the workspace. Each tile that visits the block adds its part of dQ to them.
//! - To *draw* a tile is to take the next one of the tile order with a counter in the workspace.
//! - A *share* of a tile is some of its blocks. Where there are few tiles, CTAs take shares of them (`shares.rs`). The *sums of dK
//!   and dV* of such a tile are f32 in the workspace, too, unless the CTAs of a cluster have its shares.
//! - A tile's *turn*: in a deterministic pass, tiles add to the sums of a block in a fixed order. A tile waits for its turn,
//!   that is, for the tiles before it.

use std::cmp::Reverse;
use std::fmt;

use super::fitting::{self, MOST_TILES_TEXT, fitting, tile_count, unsupported};
use super::packed::{Packed, table_bytes};
use super::schedule::{
    BACKWARD_GROUP_BYTES, HEADS_PER_GROUP, PACKED_GROUP_BYTES, bounds, groups, groups_in_turns, groups_of_shares, is_persistent,
    multiprocessors, resident, small, write_keys,
};
use super::shares::{self, Cut, Work};
use super::target::{Planned, Target};
use crate::arch::{Arch, DeviceFacts, MaskClass, Pass};
#[cfg(feature = "cuda")]
use crate::device::CudaDevice;
use crate::device::Device;
use crate::error::Result;
use crate::operand::Operands;
use crate::problem::{BackwardProblem, Dims};
#[cfg(feature = "cuda")]
use crate::sys;
use crate::table::{KernelInfo, backward_kernels};

/// Bytes from the start of the workspace to its second part. The counter that CTAs draw tiles from takes the first 4, the flag
/// of leaks 4 more. The rest aligns the second part to a cache line, if the workspace is aligned so.
const COUNTER_BYTES: usize = 256;

/// Bytes of an entry of the list of shares, and of one of the list of tiles where lengths are read from memory.
const SHARE_BYTES: usize = 32;
const PACKED_SHARE_BYTES: usize = 64;
/// What the last parts of a workspace begin at a multiple of.
const PART_ALIGNMENT: usize = 256;

/// Bytes of the sums of dV and dK of one tile.
fn key_sums_bytes(kernel: &KernelInfo) -> usize {
    kernel.tile_n * (kernel.head_dim_vo + kernel.head_dim_qk) * size_of::<f32>()
}

/// Size of the statistics of one query, its LSE and its delta, in bytes.
fn statistics_bytes(arch: Arch) -> usize {
    match arch {
        // Two f32.
        Arch::Sm80 => 8,
        // Each number as a sum of 16-bit terms, because the tensor cores add them to the scores and to dP.
        Arch::Sm90 => 16,
    }
}

/// How one device computes the gradients of one problem.
///
/// A plan is made once and run any number of times, from any thread and on any stream of the device. It holds no device
/// memory. Printed, it names the kernel and the schedule.
#[derive(Clone, Debug)]
pub struct BackwardPlan {
    problem: BackwardProblem,
    planned: Planned<BackwardChoice>,
}

/// A backward kernel for a problem, and the schedule of its tiles.
///
/// [`select_backward`] sets all fields. A launch copies the numbers to the kernel's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardChoice {
    /// The kernel.
    pub kernel: KernelInfo,
    /// The key at which query 0 stands, as the mask and the lengths say. Between -2^30 and 2^30.
    pub diagonal_offset: i32,
    /// Number of keys kept before a query's own key: 0 to 2^30. 2^30 stands for all.
    pub window_left: i32,
    /// Number of keys kept after a query's own key: 0 to 2^30. 2^30 stands for all.
    pub window_right: i32,
    /// Number of tiles in all: `ceil(seqlen_kv / tile_n) * batch * heads_kv`, or no fewer (`packed`). Below 2^31 - 2^20.
    pub tiles: i32,
    /// Number of shares that the work of each tile is cut into, at least 1 (`shares.rs`). sm80: 1.
    pub shares: i32,
    /// Number of CTAs of a cluster: 1, or `shares`. Then the CTAs of a cluster have the shares of one tile, and sum its dK and
    /// dV through each other's shared memory.
    pub cluster: i32,
    /// Number of CTAs.
    /// - sm90: one for each multiprocessor, less the problem's margin, but no more than `tiles * shares`. A CTA computes one
    ///   share after another. Of clusters: one for each share.
    /// - sm80: one for each tile.
    pub grid: i32,
    /// Number of heads in a group, whose tiles stand together in the tile order. At least 1. A head here is one of the `shares`
    /// of a (batch entry, KV head) pair, or that pair where clusters have the shares.
    pub heads_per_group: i32,
    /// Number of groups. At least 1. The last group has all heads that are left, which may be more or fewer than
    /// `heads_per_group`.
    pub groups: i32,
    /// Whether CTAs draw their tiles from a counter in the workspace. If not, a CTA's tiles follow from its index. (Where `packed`,
    /// the counter is in the table of sequences, and this is false.)
    pub tile_counter: bool,
    /// Whether tiles take turns at the sums of dQ, as a deterministic pass needs. Then the sums have the same bits on every
    /// run. Needs tiles that are drawn, and so no clusters.
    pub turns: bool,
    /// Number of blocks of queries in all that have sums of dQ: `ceil(seqlen_q / tile_m) * batch * heads_q`, or no fewer
    /// (`packed`). Below 2^31 - 2^20.
    pub blocks: usize,
    /// The sizes where the kernels read lengths of sequences from memory. `None`: all sequences have the problem's lengths.
    pub packed: Option<Packed>,
    /// Number of query heads.
    pub heads_q: usize,
}

/// The parts of a backward workspace, as offsets in bytes from its start. The counter is at 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parts {
    /// Whether a dK is not finite, an i32. It is in a cache line of its own.
    pub leak_flag: usize,
    /// The statistics of each query (LSE and delta), `[blocks, tile_m]`.
    pub statistics: usize,
    /// The sums of dQ, f32, `[blocks, tile_m * head_dim_qk of the kernel]`.
    pub sums: usize,
    /// How far the sums of each block are, a count of tiles (`Progress` in the kernels), i32, `[blocks]`.
    pub progress: usize,
    /// The list of all shares of tiles, 32 bytes each. sm80 has none.
    pub share_list: usize,
    /// The sums of dV and dK, f32, `[copies, tiles, tile_n * (head_dim_vo + head_dim_qk) of the kernel]`. There are `shares`
    /// copies where tiles take turns, else one. None where `shares` is 1, and of clusters.
    pub key_sums: usize,
    /// The table of sequences. `None` where the plan knows their lengths.
    pub table: Option<usize>,
    /// The size of the workspace.
    pub end: usize,
}

impl BackwardChoice {
    /// The workspace that the kernel needs, in bytes. See [`BackwardPlan::workspace_bytes`].
    pub fn workspace_bytes(&self) -> usize {
        self.parts().end
    }

    /// Whether the sums of dK and dV are in the workspace: tiles have shares, and these are not a cluster's.
    pub(crate) fn sums_keys(&self) -> bool {
        self.shares > self.cluster
    }

    pub(crate) fn parts(&self) -> Parts {
        let Self { kernel, blocks, .. } = self;
        let queries = blocks * kernel.tile_m;
        let statistics = COUNTER_BYTES;
        // Packed statistics are those of all rows, without padding.
        let numbers = self.packed.map_or(queries, |packed| (packed.rows * self.heads_q).next_multiple_of(16));
        let sums = statistics + numbers * statistics_bytes(kernel.arch);
        let progress = sums + queries * kernel.head_dim_qk * size_of::<f32>();
        let mut end = progress + blocks * size_of::<i32>();
        let [tiles, shares] = [self.tiles, self.shares].map(|count| usize::try_from(count).unwrap_or(0));
        let mut part = |bytes: usize| {
            let begin = end.next_multiple_of(PART_ALIGNMENT);
            end = if bytes == 0 { end } else { begin + bytes };
            begin
        };
        let entry = if self.packed.is_some() { PACKED_SHARE_BYTES } else { SHARE_BYTES };
        let share_list = part(if kernel.arch == Arch::Sm80 { 0 } else { tiles * shares * entry });
        let copies = match (self.sums_keys(), self.turns) {
            (false, _) => 0,
            (true, true) => shares,
            (true, false) => 1,
        };
        let key_sums = part(copies * tiles * key_sums_bytes(kernel));
        let table_of = |packed: Packed| table_bytes(packed.sequences, packed.list_size, packed.block_list_size);
        let table = self.packed.map(|packed| part(table_of(packed)));
        Parts { leak_flag: COUNTER_BYTES / 2, statistics, sums, progress, share_list, key_sums, table, end }
    }
}

impl fmt::Display for BackwardChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, tiles, shares, cluster, grid, heads_per_group, groups, blocks, .. } = self;
        if let Some(packed) = &self.packed {
            write!(f, "{kernel}, grid {grid} for up to {tiles} tiles of {} sequences, ", packed.sequences)?;
            let order = if is_persistent(kernel) || self.turns { "drawn" } else { "fixed" };
            write!(f, "up to {blocks} blocks of queries with sums, heads a group {heads_per_group}, {order} order")?;
            write!(f, "{}", if self.turns { ", dQ in turns" } else { "" })?;
            return write_keys(f, kernel.mask, [self.diagonal_offset, self.window_left, self.window_right]);
        }
        write!(f, "{kernel}, grid {grid} for {tiles} tiles")?;
        if *shares > 1 {
            write!(f, " of {shares} shares{}", if *cluster > 1 { " in a cluster" } else { "" })?;
        }
        write!(f, ", {blocks} blocks of queries, heads a group {heads_per_group}, groups {groups}, ")?;
        write!(f, "{} order", if self.tile_counter { "drawn" } else { "fixed" })?;
        write!(f, "{}", if self.turns { ", dQ in turns" } else { "" })?;
        write_keys(f, kernel.mask, [self.diagonal_offset, self.window_left, self.window_right])
    }
}

/// Chooses the kernel for a backward problem, and the schedule of its tiles.
///
/// Candidates are the rows that compute the problem on this GPU (`fitting` finds them). They all have one instruction set: the
/// one that the problem asks for, or else the newest that the GPU runs. Candidates are ranked by, in this order:
/// 1. the smallest head dims;
/// 2. the most threads that share a multiprocessor;
/// 3. the largest block of queries (`tile_m`);
/// 4. the lower index in the table.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) when no row computes the problem. The error names the first property that
/// no row has, and the nearest that a row has. Also where the problem has a margin and the kernel cannot leave multiprocessors.
/// [`Error::Value`](crate::Error::Value) when the margin leaves none.
pub fn select_backward(problem: &BackwardProblem, gpu: &DeviceFacts, rows: &[KernelInfo]) -> Result<BackwardChoice> {
    select_cut(problem, gpu, rows, None)
}

/// The same with tiles that are cut in a given way, where they can be cut.
fn select_cut(
    problem: &BackwardProblem,
    gpu: &DeviceFacts,
    rows: &[KernelInfo],
    forced: Option<Cut>,
) -> Result<BackwardChoice> {
    let dims = problem.dims();
    let kernel = *fitting(Pass::Backward, problem.forward(), gpu, rows)?
        .into_iter()
        .min_by_key(|row| {
            let threads = resident(row, gpu) * row.threads;
            (row.head_dim_qk + row.head_dim_vo, Reverse(threads), Reverse(row.tile_m), row.row)
        })
        .ok_or_else(|| unsupported(problem.to_string(), "no kernel".into()))?;
    if problem.forward().has_lengths() {
        return select_packed(problem, gpu, kernel);
    }
    let heads_kv = dims.batch * dims.heads_kv; // Below 2^31: the problem was checked.
    let count = |what: &str, per_head: usize, heads: usize| {
        tile_count(per_head, heads).ok_or_else(|| {
            unsupported(format!("{per_head} {what} for each of {heads} heads"), format!("{MOST_TILES_TEXT} in all"))
        })
    };
    let tiles = count("tiles of keys", dims.seqlen_kv.div_ceil(kernel.tile_n.max(1)), heads_kv)?;
    let heads_q = dims.batch * dims.heads_q;
    let blocks = count("blocks of queries", dims.seqlen_q.div_ceil(kernel.tile_m.max(1)), heads_q)?;
    let mask = bounds(problem.forward());
    let even = kernel.mask == MaskClass::Full;
    let turns = problem.is_deterministic();
    let multiprocessors = multiprocessors(problem.forward(), gpu, &kernel)?;
    let group = dims.heads_q / dims.heads_kv.max(1);
    let bytes = bytes_of_kv_head(&dims, &kernel, dims.seqlen_q);
    let cut = if is_persistent(&kernel) {
        let work = Work {
            steps: shares::steps(&kernel, dims, mask),
            group,
            heads: heads_kv,
            multiprocessors,
            is_bounded: problem.forward().sm_margin() > 0,
            bytes,
            sums: key_sums_bytes(&kernel),
            most_bytes: shares::MOST_BYTES.max(heads_q * dims.seqlen_q * kernel.head_dim_qk * size_of::<f32>()),
            ordered: turns,
            most_in_cluster: kernel.most_shares,
        };
        forced.filter(|cut| !(cut.in_cluster && turns)).unwrap_or_else(|| work.cut())
    } else {
        Cut::WHOLE
    };
    let shares = cut.shares;
    let listed = count("shares of tiles", shares, tiles as usize)?;
    let grid = match cut {
        _ if !is_persistent(&kernel) => tiles,
        Cut { in_cluster: true, .. } => listed,
        _ => listed.min(small(multiprocessors)),
    };
    let [diagonal_offset, window_left, window_right] = mask;
    // Tiles that take turns at a block must stand in the list in the order of their turns. A share of whole query heads has the
    // same blocks in each tile. Other shares do not, so that all are in one group.
    let heads = heads_kv * shares;
    let bytes = bytes / shares;
    let [heads_per_group, groups] = match (turns, shares) {
        _ if cut.in_cluster => [small(heads_kv), 1],
        (true, _) if group.is_multiple_of(shares) => groups_in_turns(even, heads, bytes),
        (true, _) => [small(heads), 1],
        (false, 1) => groups(even, heads, bytes, BACKWARD_GROUP_BYTES),
        (false, _) => groups_of_shares(even, heads, bytes),
    };
    Ok(BackwardChoice {
        kernel,
        diagonal_offset,
        window_left,
        window_right,
        tiles,
        shares: small(shares),
        cluster: if cut.in_cluster { small(shares) } else { 1 },
        grid,
        heads_per_group,
        groups,
        // A tile that waits for its turn waits for tiles before it. These must be running, or the pass would never end.
        // Drawing ensures that: every tile before a drawn one is at a CTA that runs (tile_scheduler.hpp).
        // Clusters draw nothing: their tiles follow from their numbers, and they take no turns.
        tile_counter: !cut.in_cluster && (turns || (!even && listed > grid)),
        turns,
        blocks: usize::try_from(blocks).unwrap_or(0),
        packed: None,
        heads_q: dims.heads_q,
    })
}

/// How many bytes all tiles of a KV head access in common, with so many queries: they read Q and dO, and add to the sums of dQ,
/// of its query heads.
fn bytes_of_kv_head(dims: &Dims, kernel: &KernelInfo, queries: usize) -> usize {
    let width = (dims.head_dim_qk + dims.head_dim_vo) * kernel.dtype.bytes() + dims.head_dim_qk * size_of::<f32>();
    (dims.heads_q / dims.heads_kv.max(1)).saturating_mul(queries).saturating_mul(width)
}

/// The schedule of a kernel that reads the lengths of sequences from memory. Tiles have no shares.
fn select_packed(problem: &BackwardProblem, gpu: &DeviceFacts, kernel: KernelInfo) -> Result<BackwardChoice> {
    let dims = problem.dims();
    let packed = Packed::of(problem.forward(), &kernel);
    let count = |what: &str, per_head: usize, heads: usize| {
        tile_count(per_head, heads).ok_or_else(|| {
            unsupported(
                format!("up to {per_head} {what} for each of {heads} heads"),
                format!("{MOST_TILES_TEXT} in all"),
            )
        })
    };
    let tiles = count("tiles of keys", packed.list_size, dims.heads_kv)?;
    count("blocks of queries", packed.block_list_size, dims.heads_q)?;
    let [diagonal_offset, window_left, window_right] = bounds(problem.forward());
    let even = kernel.mask == MaskClass::Full && !problem.is_deterministic();
    let multiprocessors = small(multiprocessors(problem.forward(), gpu, &kernel)?);
    // A group is of one sequence. Here it has as many heads as suit the longest that there may be.
    let longest = problem.forward().max_seqlen_q().map_or(dims.seqlen_q, |hint| hint.min(dims.seqlen_q));
    let turns = problem.is_deterministic();
    let heads_per_group = match (even, turns) {
        (true, _) => 1,
        (false, true) => HEADS_PER_GROUP.min(dims.heads_kv),
        (false, false) => {
            let bytes = bytes_of_kv_head(&dims, &kernel, longest);
            (PACKED_GROUP_BYTES / bytes.max(1)).clamp(1, HEADS_PER_GROUP).min(dims.heads_kv)
        }
    };
    Ok(BackwardChoice {
        kernel,
        diagonal_offset,
        window_left,
        window_right,
        tiles,
        shares: 1,
        cluster: 1,
        grid: if is_persistent(&kernel) { tiles.clamp(1, multiprocessors) } else { tiles.max(1) },
        heads_per_group: small(heads_per_group),
        groups: 1,
        tile_counter: false,
        turns,
        blocks: packed.sum_blocks * dims.heads_q,
        packed: Some(packed),
        heads_q: dims.heads_q,
    })
}

impl BackwardProblem {
    /// Makes the plan for a device. On a GPU it chooses the kernel and loads it, so that a later run loads nothing.
    ///
    /// # Errors
    /// - [`Error::Unsupported`](crate::Error::Unsupported): the GPU has no kernel for the problem. The error names the nearest
    ///   that the GPU has. The CPU refuses only a problem that asks for a GPU's instruction set.
    /// - [`Error::Value`](crate::Error::Value): the problem's `sm_margin` leaves no multiprocessor of the GPU.
    /// - [`Error::Driver`](crate::Error::Driver) or [`Error::Launch`](crate::Error::Launch): the kernel cannot be loaded.
    pub fn plan(&self, device: &Device) -> Result<BackwardPlan> {
        match device {
            Device::Cpu => Ok(self.planned(fitting::cpu(self.forward())?)),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => self.plan_among(device, backward_kernels()),
        }
    }

    /// As [`plan`](Self::plan), but takes this row of [`backward_kernels()`]. For tests and benches, which run every row.
    ///
    /// # Errors
    /// As [`plan`](Self::plan) on a GPU that has no other kernel than this row. Also [`Error::Value`](crate::Error::Value): the
    /// row is not one of [`backward_kernels()`].
    #[cfg(feature = "cuda")]
    pub fn plan_with_row(&self, device: &CudaDevice, row: &KernelInfo) -> Result<BackwardPlan> {
        self.plan_among(device, std::slice::from_ref(row))
    }

    /// As [`plan_with_row`](Self::plan_with_row), with tiles of so many shares, in clusters or not, where they can be cut.
    #[cfg(feature = "cuda")]
    pub(crate) fn plan_with_shares(
        &self,
        device: &CudaDevice,
        row: &KernelInfo,
        shares: usize,
        in_cluster: bool,
    ) -> Result<BackwardPlan> {
        let most = if in_cluster { row.most_shares.max(1) } else { shares::MOST };
        let shares = shares.clamp(1, most);
        let cut = Cut { shares, in_cluster: in_cluster && shares > 1 };
        self.plan_chosen(device, select_cut(self, &device.info().facts, std::slice::from_ref(row), Some(cut))?)
    }

    #[cfg(feature = "cuda")]
    fn plan_among(&self, device: &CudaDevice, rows: &[KernelInfo]) -> Result<BackwardPlan> {
        self.plan_chosen(device, select_backward(self, &device.info().facts, rows)?)
    }

    #[cfg(feature = "cuda")]
    fn plan_chosen(&self, device: &CudaDevice, choice: BackwardChoice) -> Result<BackwardPlan> {
        let prepare = |choice: &BackwardChoice| {
            let kernel = &choice.kernel;
            fitting::check_row(kernel, Pass::Backward)?;
            sys::prepare(kernel.pass, kernel.row, kernel)
        };
        Ok(self.planned(Target::loaded(choice, device, prepare)?))
    }

    /// The plan that [`plan`](Self::plan) makes on a GPU with these facts. This needs no GPU.
    ///
    /// The plan can be inspected and printed. It cannot be run, because its kernel was not loaded.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) and [`Error::Value`](crate::Error::Value), as [`plan`](Self::plan).
    pub fn plan_for(&self, facts: &DeviceFacts) -> Result<BackwardPlan> {
        Ok(self.planned(Target::described(select_backward(self, facts, backward_kernels())?)))
    }

    fn planned(&self, target: Target<BackwardChoice>) -> BackwardPlan {
        let planned = Planned::new(target, self.operands(), BackwardChoice::workspace_bytes);
        BackwardPlan { problem: self.clone(), planned }
    }
}

impl BackwardPlan {
    /// The problem that the plan computes.
    pub fn problem(&self) -> &BackwardProblem {
        &self.problem
    }

    /// The tensors that a run reads and writes.
    pub fn operands(&self) -> &Operands {
        &self.planned.operands
    }

    /// The kernel. `None` on the CPU.
    pub fn kernel(&self) -> Option<&KernelInfo> {
        self.choice().map(|choice| &choice.kernel)
    }

    /// The kernel and its schedule. `None` on the CPU.
    pub(crate) fn choice(&self) -> Option<&BackwardChoice> {
        self.planned.target.choice()
    }

    /// The size of the [`Workspace`](crate::Workspace) that a run needs, in bytes. It is exact.
    ///
    /// - On the CPU: 0.
    /// - On a GPU: for each query `4 * head_dim_qk` of the kernel, and 16 more (sm80: 8), with `seqlen_q` rounded up to whole
    ///   blocks of `tile_m` queries; 4 for each such block; and 256 for a counter. On Hopper also 32 for each share of a tile of
    ///   `tile_n` keys. Where tiles have shares that are not a cluster's (the printed plan says so), also
    ///   `4 * tile_n * (head_dim_qk + head_dim_vo)` for each tile, times the shares in a deterministic pass. These are no more than
    ///   256 MiB, or than the `4 * head_dim_qk` for each query where that is more. Parts are aligned to 256 bytes.
    /// - On a GPU with packed sequences or used lengths: 16 for each query, 64 for each tile of keys that all sequences can have,
    ///   the table of sequences, and `4 * head_dim_qk` for each query of blocks of sequences with more keys than a tile.
    pub fn workspace_bytes(&self) -> usize {
        self.planned.workspace_bytes
    }

    pub(crate) fn planned(&self) -> &Planned<BackwardChoice> {
        &self.planned
    }
}

impl fmt::Display for BackwardPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.choice() {
            None => f.write_str("cpu, tiled recomputation in two passes")?,
            Some(choice) => write!(f, "{choice}")?,
        }
        write!(f, ", workspace {} bytes", self.workspace_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::{ComputeCapability, Pass};
    use crate::dtype::DType;
    use crate::mask::Mask;
    use crate::problem::{Dims, ForwardProblem};

    const H100: DeviceFacts = DeviceFacts::h100_sxm();
    const DIMS: Dims =
        Dims { batch: 2, seqlen_q: 1000, seqlen_kv: 3000, heads_q: 16, heads_kv: 4, head_dim_qk: 64, head_dim_vo: 64 };

    /// A made-up table.
    fn rows() -> Vec<KernelInfo> {
        let mut rows = Vec::new();
        for mask in [MaskClass::Full, MaskClass::Causal, MaskClass::Window] {
            for (head_dim, tile_m) in [(64, 128), (128, 64)] {
                rows.push(KernelInfo {
                    row: rows.len() as u32,
                    pass: Pass::Backward,
                    arch: Arch::Sm90,
                    dtype: DType::BF16,
                    mask,
                    head_dim_qk: head_dim,
                    head_dim_vo: head_dim,
                    tile_m,
                    tile_n: 128,
                    stages: 2,
                    threads: 384,
                    smem_bytes: 200 << 10,
                    scores: DType::F32,
                    split_bytes: 0,
                    most_shares: 1,
                    packs: false,
                });
            }
        }
        rows
    }

    /// Rows for sm80 with the real tiles, for one mask class.
    fn sm80_rows() -> Vec<KernelInfo> {
        let tiles = [(64, 64, 128, 128, 98), (64, 32, 128, 128, 81), (128, 64, 128, 256, 162), (128, 32, 64, 128, 81)];
        let row = |(i, &(head_dim, tile_m, tile_n, threads, kib)): (usize, &(usize, usize, usize, usize, usize))| {
            let like = rows()[0];
            KernelInfo {
                row: i as u32,
                arch: Arch::Sm80,
                head_dim_qk: head_dim,
                head_dim_vo: head_dim,
                tile_m,
                tile_n,
                threads,
                smem_bytes: kib << 10,
                ..like
            }
        };
        tiles.iter().enumerate().map(row).collect()
    }

    fn of(forward: &ForwardProblem) -> BackwardProblem {
        BackwardProblem::builder(forward).build().unwrap()
    }

    fn problem(dims: Dims, mask: Mask) -> BackwardProblem {
        of(&ForwardProblem::builder(DType::BF16, dims).mask(mask).build().unwrap())
    }

    fn deterministic(problem: &BackwardProblem) -> BackwardProblem {
        problem.to_builder().deterministic(true).build().unwrap()
    }

    fn with_arch(arch: Option<Arch>) -> BackwardProblem {
        let forward = ForwardProblem::builder(DType::BF16, DIMS);
        of(&arch.map_or(forward.clone(), |arch| forward.arch(arch)).build().unwrap())
    }

    fn chosen(problem: &BackwardProblem) -> BackwardChoice {
        select_backward(problem, &H100, &rows()).unwrap()
    }

    #[test]
    fn golden_plans() {
        assert_eq!(
            chosen(&problem(DIMS, Mask::Full)).to_string(),
            "sm90 bwd bf16 full head_dim 64/64 tile 128x128 stages 2, grid 132 for 192 tiles of 2 shares, \
             256 blocks of queries, heads a group 16, groups 1, fixed order"
        );
        let wide = Dims { head_dim_vo: 72, ..DIMS };
        assert_eq!(
            chosen(&deterministic(&problem(wide, Mask::causal()))).to_string(),
            "sm90 bwd bf16 causal head_dim 128/128 tile 64x128 stages 2, grid 132 for 192 tiles, 512 blocks of queries, \
             heads a group 8, groups 1, drawn order, dQ in turns, keys to +2000+0"
        );
        assert_eq!(
            chosen(&problem(Dims { batch: 1, ..DIMS }, Mask::window(Some(5), None))).to_string(),
            "sm90 bwd bf16 window head_dim 64/64 tile 128x128 stages 2, grid 132 for 96 tiles of 4 shares, \
             128 blocks of queries, heads a group 16, groups 1, drawn order, keys from +2000-5"
        );
    }

    #[test]
    fn few_tiles_are_clusters_unless_they_take_turns() {
        let dims = Dims {
            batch: 1,
            seqlen_q: 512,
            seqlen_kv: 512,
            heads_q: 16,
            heads_kv: 16,
            head_dim_qk: 128,
            head_dim_vo: 128,
        };
        let rows: Vec<KernelInfo> = rows().into_iter().map(|row| KernelInfo { most_shares: 8, ..row }).collect();
        let of = |problem: &BackwardProblem| select_backward(problem, &H100, &rows).unwrap();
        let choice = of(&problem(dims, Mask::causal()));
        assert_eq!(
            choice.to_string(),
            "sm90 bwd bf16 causal head_dim 128/128 tile 64x128 stages 2, grid 128 for 64 tiles of 2 shares in a cluster, \
             128 blocks of queries, heads a group 16, groups 1, fixed order, keys to +0+0"
        );
        assert!(
            choice.cluster == 2
                && !choice.tile_counter
                && choice.parts().key_sums == choice.parts().end.next_multiple_of(256)
        );
        let in_turns = of(&deterministic(&problem(dims, Mask::causal())));
        assert!(in_turns.cluster == 1 && in_turns.tile_counter);
    }

    #[test]
    fn sm80_tiles_are_those_that_fill_a_multiprocessor() {
        let facts = |major, minor, kib: usize| DeviceFacts {
            arch: ComputeCapability { major, minor },
            smem_bytes_per_block: kib << 10,
            ..H100
        };
        let tile = |head_dim: usize, facts: &DeviceFacts| {
            let dims = Dims { head_dim_qk: head_dim, head_dim_vo: head_dim, ..DIMS };
            let kernel = select_backward(&problem(dims, Mask::Full), facts, &sm80_rows()).unwrap().kernel;
            (kernel.tile_m, kernel.tile_n)
        };
        for (major, minor, kib, narrow, wide) in [
            (8, 0, 163, (32, 128), (64, 128)),
            (8, 6, 99, (64, 128), (32, 64)),
            (8, 9, 99, (64, 128), (32, 64)),
            (9, 0, 227, (64, 128), (64, 128)),
        ] {
            let facts = facts(major, minor, kib);
            assert_eq!((tile(64, &facts), tile(128, &facts)), (narrow, wide), "{major}.{minor}");
            // A head dim in between takes the row of the next larger head dim.
            assert_eq!((tile(8, &facts), tile(72, &facts)), (narrow, wide), "{major}.{minor}");
        }
        // One CTA for each tile, drawn tiles where they take turns, and 8 bytes of statistics for a query.
        let a100 = facts(8, 0, 163);
        let choice = select_backward(&problem(DIMS, Mask::Full), &a100, &sm80_rows()).unwrap();
        assert_eq!((choice.grid, choice.tiles, choice.tile_counter), (192, 192, false));
        let queries = choice.blocks * 32;
        assert_eq!(choice.parts().sums, 256 + queries * 8);
        assert_eq!(choice.parts().progress, 256 + queries * (8 + 64 * 4));
        let in_turns = select_backward(&deterministic(&problem(DIMS, Mask::Full)), &a100, &sm80_rows()).unwrap();
        assert_eq!((in_turns.grid, in_turns.tile_counter, in_turns.turns), (192, true, true));
        let little = facts(8, 0, 48);
        let refusal = select_backward(&problem(DIMS, Mask::Full), &little, &sm80_rows()).unwrap_err().to_string();
        assert!(refusal.contains("82944 bytes of shared memory a block"), "{refusal}");
    }

    /// What the tiles of a group access stays in the second-level cache, however long a packed sequence may be.
    #[test]
    fn packed_heads_are_grouped_for_the_longest_sequence() {
        let rows = rows().into_iter().map(|row| KernelInfo { packs: true, ..row }).collect::<Vec<_>>();
        let heads = |longest: Option<usize>| {
            let dims = Dims::new(100, 64 << 10, 16, 128);
            let options = ForwardProblem::builder(DType::BF16, dims).mask(Mask::causal()).packed(true).lse(true);
            let options = longest.into_iter().fold(options, |options, hint| options.max_seqlen_q(hint));
            let problem = BackwardProblem::builder(&options.build().unwrap()).build().unwrap();
            select_backward(&problem, &H100, &rows).unwrap().heads_per_group
        };
        // Of 16k queries the tiles of a head access 16 MiB.
        assert_eq!([512, 16 << 10, 32 << 10].map(|longest| heads(Some(longest))), [16, 16, 8]);
        assert_eq!(heads(None), 4);
    }

    #[test]
    fn turns_are_taken_by_more_heads_the_less_they_share() {
        let groups = |seqlen: usize, batch: usize, mask: Mask| {
            let dims = Dims { batch, seqlen_q: seqlen, seqlen_kv: seqlen, heads_q: 32, heads_kv: 32, ..DIMS };
            let choice = chosen(&deterministic(&problem(dims, mask)));
            (choice.heads_per_group, choice.groups)
        };
        // 1024 heads whose tiles read 256 KiB in common, 256 heads of 1 MiB, 128 of 2 MiB, 32 of 8 MiB.
        assert_eq!(groups(512, 32, Mask::causal()), (64, 16));
        assert_eq!(groups(2048, 8, Mask::causal()), (64, 4));
        assert_eq!(groups(4096, 4, Mask::causal()), (32, 4));
        assert_eq!(groups(16384, 1, Mask::causal()), (32, 1));
        assert_eq!(groups(512, 32, Mask::Full), (64, 16));
        assert_eq!(groups(2048, 8, Mask::Full), (16, 16));
        // The last group has the heads that are left.
        assert_eq!(groups(2048, 3, Mask::causal()), (64, 2));
    }

    #[test]
    fn the_workspace_has_its_parts_one_after_the_other() {
        let choice = chosen(&problem(DIMS, Mask::Full));
        // 1000 queries are 8 blocks of 128, in each of 32 heads.
        let queries: usize = 8 * 128 * 32;
        let sums = 256 + queries * 16;
        let end = sums + queries * 64 * 4;
        // 24 tiles of keys in each of 8 heads.
        let list = (end + 8 * 32 * 4).next_multiple_of(256);
        let whole = BackwardChoice { shares: 1, ..choice };
        let after = (list + 24 * 8 * 32).next_multiple_of(256);
        let parts = Parts {
            leak_flag: 128,
            statistics: 256,
            sums,
            progress: end,
            share_list: list,
            key_sums: after,
            table: None,
            end: list + 24 * 8 * 32,
        };
        assert_eq!(whole.parts(), parts);
        assert_eq!(whole.workspace_bytes(), parts.end);
        // Shares: a longer list, and sums of dK and dV. In turns each share has its own.
        let tile = 128 * (64 + 64) * 4;
        let shared = BackwardChoice { shares: 3, ..choice };
        let key_sums = (list + 3 * 24 * 8 * 32).next_multiple_of(256);
        assert_eq!(shared.parts(), Parts { key_sums, end: key_sums + 24 * 8 * tile, ..parts });
        let in_turns = BackwardChoice { turns: true, ..shared };
        assert_eq!(in_turns.parts(), Parts { key_sums, end: key_sums + 3 * 24 * 8 * tile, ..parts });
        // Clusters sum through shared memory.
        let clusters = BackwardChoice { cluster: 3, ..in_turns };
        assert_eq!(clusters.parts(), Parts { key_sums, end: list + 3 * 24 * 8 * 32, ..parts });
        let in_turns = chosen(&deterministic(&problem(DIMS, Mask::Full)));
        assert!(in_turns.tile_counter && !choice.tile_counter);
        // The kernels copy and add 16 bytes at a time, so every part begins at a multiple of 16.
        for choice in [choice, in_turns, chosen(&problem(Dims { seqlen_q: 1, ..DIMS }, Mask::causal()))] {
            let Parts { statistics, sums, progress, share_list, key_sums, .. } = choice.parts();
            assert!(
                [statistics, sums, progress, share_list, key_sums].iter().all(|at| at.is_multiple_of(16)),
                "{choice}"
            );
        }
    }

    #[test]
    fn what_no_row_has_is_named_with_the_nearest() {
        let refused = |problem: BackwardProblem| select_backward(&problem, &H100, &rows()).unwrap_err().to_string();
        let text = refused(problem(Dims { head_dim_qk: 136, ..DIMS }, Mask::Full));
        let end = "a backward pass of bf16, full, on sm90; nearest: up to 64 with 64, up to 128 with 128";
        assert!(text.ends_with(end), "{text}");
        let many = Dims { batch: 1 << 20, seqlen_q: 1 << 28, ..DIMS };
        let text = refused(problem(many, Mask::Full));
        assert!(text.contains("blocks of queries for each of 16777216 heads") && text.contains("2^31"), "{text}");
        let half = of(&ForwardProblem::builder(DType::F16, DIMS).build().unwrap());
        assert_eq!(refused(half), "unsupported: f16 operands on a GPU; nearest: bf16");
    }

    #[test]
    fn gradients_are_of_the_same_instruction_set_or_refused() {
        let chosen = |arch| select_backward(&with_arch(Some(arch)), &H100, &rows());
        assert_eq!(chosen(Arch::Sm90), select_backward(&problem(DIMS, Mask::Full), &H100, &rows()));
        // A build without sm80 kernels.
        let refusal = "unsupported: backward sm80 kernels on a GPU of sm_90; nearest: sm90";
        assert_eq!(chosen(Arch::Sm80).unwrap_err().to_string(), refusal);
        let a100 = DeviceFacts { arch: ComputeCapability { major: 8, minor: 0 }, ..H100 };
        let error = select_backward(&problem(DIMS, Mask::Full), &a100, &rows());
        assert_eq!(error.unwrap_err().to_string(), "unsupported: backward kernels for a GPU of sm_80; nearest: sm_90");
        // A build with both: the GPU's newest instruction set, or the one that the forward problem asks for.
        let both: Vec<_> = rows().into_iter().chain(sm80_rows()).collect();
        let arch =
            |asked: Option<Arch>, gpu| select_backward(&with_arch(asked), gpu, &both).map(|choice| choice.kernel.arch);
        assert_eq!(arch(None, &H100), Ok(Arch::Sm90));
        assert_eq!(arch(Some(Arch::Sm80), &H100), Ok(Arch::Sm80));
        assert_eq!(arch(None, &a100), Ok(Arch::Sm80));
        let refusal = "unsupported: backward sm90 kernels on a GPU of sm_80; nearest: sm80";
        assert_eq!(arch(Some(Arch::Sm90), &a100).unwrap_err().to_string(), refusal);
        let on_cpu = with_arch(Some(Arch::Sm80));
        let refusal = "unsupported: sm80 kernels on the CPU; nearest: a GPU of sm_80 and later";
        assert_eq!(on_cpu.plan(&Device::cpu()).unwrap_err().to_string(), refusal);
    }

    #[test]
    fn the_cpu_takes_every_problem() {
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            let forward = ForwardProblem::builder(dtype, DIMS).mask(Mask::causal()).build().unwrap();
            let problem = BackwardProblem::builder(&forward).d_lse(true).deterministic(true).build().unwrap();
            let plan = problem.plan(&Device::cpu()).unwrap();
            assert_eq!(plan.to_string(), "cpu, tiled recomputation in two passes, workspace 0 bytes");
            assert_eq!((plan.problem(), plan.workspace_bytes(), plan.choice()), (&problem, 0, None));
        }
    }

    #[test]
    fn a_margin_leaves_multiprocessors_to_others() {
        let margin = |problem: &BackwardProblem, margin| problem.to_builder().sm_margin(margin).build().unwrap();
        let few = |multiprocessors| DeviceFacts { multiprocessors, ..H100 };
        let problems = [problem(DIMS, Mask::Full), problem(Dims { batch: 1, seqlen_kv: 512, ..DIMS }, Mask::causal())];
        for problem in problems.iter().flat_map(|problem| [problem.clone(), deterministic(problem)]) {
            // As on a GPU that has no more.
            for (all, left) in [(132, 0), (132, 1), (132, 16), (132, 131), (114, 16), (78, 8)] {
                let choice = select_backward(&margin(&problem, left), &few(all), &rows()).unwrap();
                assert_eq!(select_backward(&problem, &few(all - left), &rows()), Ok(choice));
                assert_eq!(choice.grid, (choice.tiles * choice.shares).min((all - left) as i32), "{choice}");
            }
            let refused = |left, all| select_backward(&margin(&problem, left), &few(all), &rows()).unwrap_err();
            let text = "sm_margin: 132; allowed: 0 to 131, since the GPU has 132 multiprocessors";
            assert_eq!(refused(132, 132).to_string(), text);
            assert!(matches!(refused(usize::MAX, 114), crate::Error::Value { what: "sm_margin", .. }));
            assert_eq!(margin(&problem, 500).plan(&Device::cpu()).unwrap().workspace_bytes(), 0);
        }
        let sm80 = margin(&with_arch(Some(Arch::Sm80)), 1);
        let text = "unsupported: sm_margin 1 with sm80 kernels, which have a CTA for each tile; \
                    nearest: sm_margin 0, or sm90 kernels";
        assert_eq!(select_backward(&sm80, &H100, &sm80_rows()).unwrap_err().to_string(), text);
    }

    /// The order of turns must be the order of the list: shares that are not whole query heads are all in one group.
    #[test]
    fn shares_in_turns_are_listed_in_the_order_of_their_turns() {
        let mut cut = 0;
        for (heads_q, heads_kv) in [(8, 1), (6, 2), (1, 1), (12, 3), (64, 1)] {
            for seqlen in [1, 300, 1000, 4096, 20000] {
                for mask in [Mask::Full, Mask::causal(), Mask::window(Some(500), Some(0))] {
                    let dims = Dims { batch: 1, seqlen_q: seqlen, seqlen_kv: seqlen, heads_q, heads_kv, ..DIMS };
                    let choice = chosen(&deterministic(&problem(dims, mask)));
                    let group = (heads_q / heads_kv) as i32;
                    assert!(choice.groups == 1 || group % choice.shares == 0, "{choice}");
                    let heads = heads_kv as i32 * choice.shares;
                    assert!(choice.heads_per_group * choice.groups >= heads, "{choice}");
                    assert!(choice.grid == (choice.tiles * choice.shares).min(132) && choice.tile_counter, "{choice}");
                    let Parts { share_list, key_sums, end, .. } = choice.parts();
                    assert!(choice.shares == 1 || end > key_sums && key_sums > share_list, "{choice}");
                    cut += usize::from(choice.shares > 1);
                }
            }
        }
        assert!(cut > 20, "{cut}");
    }

    #[test]
    fn a_described_gpu_is_planned_for_with_the_kernels_of_the_build() {
        match problem(DIMS, Mask::Full).plan_for(&H100) {
            Ok(plan) => assert!(backward_kernels().contains(&plan.choice().unwrap().kernel)),
            Err(error) => assert!(backward_kernels().is_empty(), "{error}"),
        }
    }
}
