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
use super::lists::{ListParts, Lists};
use super::packed::{Packed, table_bytes};
use super::schedule::{
    BACKWARD_GROUP_BYTES, Bounds, HEADS_PER_GROUP, LISTED_GROUP_BYTES, PACKED_GROUP_BYTES, backward_heads, check_limit,
    groups, groups_in_turns, groups_of_shares, heads_within, is_persistent, is_within_limit, multiprocessors, resident,
    small, write_keys,
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
    /// The keys that a query keeps, as the mask and the lengths say.
    pub bounds: Bounds,
    /// Number of tiles in all: `ceil(seqlen_kv / tile_n) * batch * heads_kv`, or no fewer (`packed`). Below 2^31 - 2^20.
    pub tiles: i32,
    /// Number of shares that the work of a tile is cut into, at least 1 (`shares.rs`). sm80: 1.
    pub shares: i32,
    /// Number of tiles that are cut: all, or the last of the tile order. 0 where `shares` is 1.
    pub cut_tiles: i32,
    /// Number of CTAs of a cluster: 1, or `shares`. Then the CTAs of a cluster have the shares of one tile, and sum its dK and
    /// dV through each other's shared memory.
    pub cluster: i32,
    /// Number of CTAs.
    /// - sm90: one for each multiprocessor, less the problem's margin, but no more than there are shares and whole tiles. A CTA
    ///   computes one of them after another. Of clusters: one for each share.
    /// - sm80: one for each tile.
    pub grid: i32,
    /// Number of heads in a group, whose tiles stand together in the tile order. At least 1. A head here is one of the `shares`
    /// of a (batch entry, KV head) pair, or that pair where clusters have the shares or some tiles are whole.
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
    /// The lists of a block-sparse mask. The launch's first kernels make the kernel's own of the caller's, in the workspace.
    pub lists: Option<Lists>,
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
    /// The sums of dV and dK, f32, `[copies, cut_tiles, tile_n * (head_dim_vo + head_dim_qk) of the kernel]`. There are `shares`
    /// copies where tiles take turns, else one. None where `shares` is 1, and of clusters.
    pub key_sums: usize,
    /// The table of sequences. `None` where the plan knows their lengths.
    pub table: Option<usize>,
    /// The lists of a block-sparse mask, where there are any.
    pub lists: Option<ListParts>,
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
        let [tiles, cut, shares] =
            [self.tiles, self.cut_tiles, self.shares].map(|count| usize::try_from(count).unwrap_or(0));
        let mut part = |bytes: usize| {
            let begin = end.next_multiple_of(PART_ALIGNMENT);
            end = if bytes == 0 { end } else { begin + bytes };
            begin
        };
        let entry = if self.packed.is_some() { PACKED_SHARE_BYTES } else { SHARE_BYTES };
        let share_list = part(if kernel.arch == Arch::Sm80 { 0 } else { (tiles - cut + cut * shares) * entry });
        let copies = match (self.sums_keys(), self.turns) {
            (false, _) => 0,
            (true, true) => shares,
            (true, false) => 1,
        };
        let key_sums = part(copies * cut * key_sums_bytes(kernel));
        let table_of = |packed: Packed| table_bytes(packed.sequences, packed.list_size, packed.block_list_size);
        let table = self.packed.map(|packed| part(table_of(packed)));
        let lists = self.lists.map(|lists| lists.parts(end));
        end = lists.map_or(end, |lists| lists.end);
        Parts { leak_flag: COUNTER_BYTES / 2, statistics, sums, progress, share_list, key_sums, table, lists, end }
    }
}

impl fmt::Display for BackwardChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, tiles, shares, cut_tiles, cluster, grid, heads_per_group, groups, blocks, .. } = self;
        if let Some(packed) = &self.packed {
            write!(f, "{kernel}, grid {grid} for up to {tiles} tiles of {} sequences, ", packed.sequences)?;
            let order = if is_persistent(kernel) || self.turns { "drawn" } else { "fixed" };
            write!(f, "up to {blocks} blocks of queries with sums, heads a group {heads_per_group}, {order} order")?;
            write!(f, "{}", if self.turns { ", dQ in turns" } else { "" })?;
            return write_keys(f, kernel.mask, &self.bounds);
        }
        write!(f, "{kernel}, grid {grid} for {tiles} tiles")?;
        if *shares > 1 {
            let last = if cut_tiles < tiles { format!(", the last {cut_tiles}") } else { String::new() };
            write!(f, "{last} of {shares} shares{}", if *cluster > 1 { " in a cluster" } else { "" })?;
        }
        write!(f, ", {blocks} blocks of queries, heads a group {heads_per_group}, groups {groups}, ")?;
        write!(f, "{} order", if self.tile_counter { "drawn" } else { "fixed" })?;
        write!(f, "{}", if self.turns { ", dQ in turns" } else { "" })?;
        write_keys(f, kernel.mask, &self.bounds)
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
/// [`Error::Value`](crate::Error::Value) when the margin leaves none, and when the workspace is above the problem's limit even if no
/// tile is cut.
pub fn select_backward(problem: &BackwardProblem, gpu: &DeviceFacts, rows: &[KernelInfo]) -> Result<BackwardChoice> {
    select_cut(problem, gpu, rows, None)
}

/// A choice, unless its workspace is above the problem's limit.
fn within_limit(problem: &BackwardProblem, choice: BackwardChoice) -> Result<BackwardChoice> {
    check_limit(problem.forward(), choice.workspace_bytes())?;
    Ok(choice)
}

/// The same as [`select_backward`] with tiles that are cut in a given way, where they can be cut.
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
        return within_limit(problem, select_packed(problem, gpu, kernel)?);
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
    let bounds = Bounds::of(problem.forward());
    let even = kernel.mask == MaskClass::Full;
    let turns = problem.is_deterministic();
    let multiprocessors = multiprocessors(problem.forward(), gpu, &kernel)?;
    let group = dims.heads_q / dims.heads_kv.max(1);
    let bytes = bytes_of_kv_head(&dims, &kernel, dims.seqlen_q);
    let lists = Lists::of(problem.forward(), Some(kernel.tile_m))?;
    let cut_so = |cut: Cut| -> Result<BackwardChoice> {
        let shares = cut.shares;
        let cut_tiles = match (cut.last, shares) {
            (_, 1) => 0,
            (Some(last), _) => small(last).min(tiles),
            (None, _) => tiles,
        };
        count("shares of tiles", shares, cut_tiles as usize)?;
        let listed = tiles - cut_tiles + cut_tiles * small(shares);
        let grid = match cut {
            _ if !is_persistent(&kernel) => tiles,
            Cut { in_cluster: true, .. } => listed,
            _ => listed.min(small(multiprocessors)),
        };
        // Tiles that take turns at a block must stand in the list in the order of their turns. A share of whole query heads has the
        // same blocks in each tile. Other shares do not, so that all are in one group.
        let in_heads = if cut_tiles < tiles { 1 } else { shares };
        let heads = heads_kv * in_heads;
        let bytes = bytes / in_heads;
        let [heads_per_group, groups] = match (turns, in_heads) {
            _ if cut.in_cluster => [small(heads_kv), 1],
            (true, _) if group.is_multiple_of(shares) => groups_in_turns(even, heads, bytes),
            (true, _) => [small(heads), 1],
            (false, 1) if lists.is_some() => groups(even, heads, bytes, heads_within(bytes, LISTED_GROUP_BYTES)),
            (false, 1) => groups(even, heads, bytes, backward_heads(bytes, BACKWARD_GROUP_BYTES)),
            (false, _) => groups_of_shares(even, heads, bytes),
        };
        Ok(BackwardChoice {
            kernel,
            bounds,
            tiles,
            shares: small(shares),
            cut_tiles,
            cluster: if cut.in_cluster { small(shares) } else { 1 },
            grid,
            heads_per_group,
            groups,
            // A tile that waits for its turn waits for tiles before it. These must be running, or the pass would never end.
            // Drawing ensures that: every tile before a drawn one is at a CTA that runs (tile_scheduler.hpp).
            // Tiles of equal work are drawn, too, where there are many: some multiprocessors are a little faster.
            // Clusters draw nothing: their tiles follow from their numbers, and they take no turns.
            tile_counter: !cut.in_cluster && (turns || listed > grid && (!even || listed >= 2 * grid)),
            turns,
            blocks: usize::try_from(blocks).unwrap_or(0),
            packed: None,
            lists,
            heads_q: dims.heads_q,
        })
    };
    let limited = problem.workspace_limit().is_some();
    let is_within = |choice: BackwardChoice| is_within_limit(problem.forward(), choice.workspace_bytes());
    let fits = |cut: Cut| !limited || cut_so(cut).is_ok_and(is_within);
    // The steps of a tile with lists are known on the device alone.
    let cut = if is_persistent(&kernel) && lists.is_none() {
        let work = Work {
            steps: shares::steps(&kernel, dims, bounds),
            group,
            heads: heads_kv,
            multiprocessors,
            is_bounded: problem.forward().sm_margin() > 0,
            bytes,
            sums: key_sums_bytes(&kernel),
            costs: shares::Costs::of(&kernel, turns),
            most_bytes: shares::MOST_BYTES.max(heads_q * dims.seqlen_q * kernel.head_dim_qk * size_of::<f32>()),
            is_causal: kernel.mask == MaskClass::Causal,
            ordered: turns,
            // The kernel that adds a bias has no clusters.
            most_in_cluster: if problem.forward().bias().is_some() { 1 } else { kernel.most_shares },
        };
        forced
            .filter(|cut| !(turns && (cut.in_cluster || cut.last.is_some())))
            .unwrap_or_else(|| work.cut_within(&fits))
    } else {
        Cut::WHOLE
    };
    within_limit(problem, cut_so(cut)?)
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
    let bounds = Bounds::of(problem.forward());
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
            backward_heads(bytes, PACKED_GROUP_BYTES).min(dims.heads_kv)
        }
    };
    Ok(BackwardChoice {
        kernel,
        bounds,
        tiles,
        shares: 1,
        cut_tiles: 0,
        cluster: 1,
        grid: if is_persistent(&kernel) { tiles.clamp(1, multiprocessors) } else { tiles.max(1) },
        heads_per_group: small(heads_per_group),
        groups: 1,
        tile_counter: false,
        turns,
        blocks: packed.sum_blocks * dims.heads_q,
        packed: Some(packed),
        lists: None,
        heads_q: dims.heads_q,
    })
}

impl BackwardProblem {
    /// Makes the plan for a device. On a GPU it chooses the kernel and loads it, so that a later run loads nothing.
    ///
    /// # Errors
    /// - [`Error::Unsupported`](crate::Error::Unsupported): the GPU has no kernel for the problem. The error names the nearest
    ///   that the GPU has. The CPU refuses only a problem that asks for a GPU's instruction set.
    /// - [`Error::Value`](crate::Error::Value): the problem's `sm_margin` leaves no multiprocessor of the GPU, or its `workspace_limit` is
    ///   below what the plan needs without cut tiles.
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
        let in_cluster = in_cluster && self.forward().bias().is_none();
        let most = if in_cluster { row.most_shares.max(1) } else { shares::MOST };
        let shares = shares.clamp(1, most);
        self.plan_cut(device, row, Cut::all(shares, in_cluster && shares > 1))
    }

    /// The same where only the last tiles are cut, so many.
    #[cfg(feature = "cuda")]
    pub(crate) fn plan_with_last_cut(
        &self,
        device: &CudaDevice,
        row: &KernelInfo,
        shares: usize,
        last: usize,
    ) -> Result<BackwardPlan> {
        let shares = shares.clamp(1, shares::MOST);
        self.plan_cut(device, row, Cut { last: Some(last), ..Cut::all(shares, false) })
    }

    #[cfg(feature = "cuda")]
    fn plan_cut(&self, device: &CudaDevice, row: &KernelInfo, cut: Cut) -> Result<BackwardPlan> {
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
    ///   `4 * tile_n * (head_dim_qk + head_dim_vo)` for each of these tiles, times the shares in a deterministic pass. These are
    ///   no more than 256 MiB, or than the `4 * head_dim_qk` for each query where that is more. Parts are aligned to 256 bytes.
    ///   With a [`workspace_limit`](crate::BackwardProblemBuilder::workspace_limit), a plan that would be above it has fewer shares.
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
#[path = "backward_tests.rs"]
mod tests;
