//! How long a forward pass takes on sm90, and how many CTAs share the keys of a tile.
//!
//! A tile visits blocks of keys. The CTAs of a cluster can share a tile: each visits some of the blocks, and they sum what they
//! have at the end. That pays where there are fewer tiles than multiprocessors, and a tile visits many blocks. Several clusters
//! can share a tile, too. They sum through the workspace, which takes longer. But that uses multiprocessors which one cluster for
//! each tile leaves idle.
//!
//! The model of the time is a fit to an H100 (benches/LOG.md, entry 73), at head dim 96 and above 128 an estimate. That of e4m3
//! operands is a fit to 108 points (`Costs::of_e4m3`). All its times are in microseconds.

use super::schedule::{Bounds, LARGEST_CLUSTER, clusters_at_a_time};
use crate::arch::MaskClass;
use crate::dtype::DType;
use crate::problem::Dims;
use crate::table::KernelInfo;

/// What launching a grid takes, and zeroing the counter that its CTAs draw tiles from.
const LAUNCH: f64 = 4.8;
const COUNTER: f64 = 1.5;
/// What the launch behind a kernel with scores in f16 takes (`range.hpp` of the kernels): it overlaps with the first, but looks at
/// what that has found (benches/LOG.md, entry 29).
const BEHIND: f64 = 2.5;
/// Part of the longest tile by which a grid of several rounds ends late. (CTAs that are done wait for the others.)
const LATE: f64 = 0.15;
/// Whole rounds are counted up to this number. After more the last one is a small part of the time.
const FEW_ROUNDS: usize = 4;
/// Sharing must save at least this part of the time.
const WORTH: f64 = 0.03;
/// Products of two elements that the tensor cores of a multiprocessor sum up in a microsecond: 2048 a clock, at 1.6 GHz.
const PRODUCTS: f64 = 2048.0 * 1600.0;
/// Of more tiles in a head, so many are looked at.
const LOOKED_AT: usize = 128;
/// The most clusters that share a tile.
const MOST_SPLITS: usize = 32;
/// Blocks of a CTA whose copies are begun early enough to hide what loads take longer than products.
const HIDDEN: usize = 8;

/// How a tile's keys are shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sharing {
    /// CTAs of a cluster. 1: there are no clusters.
    pub shares: usize,
    /// Clusters. Above 1 they sum through the workspace.
    pub splits: usize,
}

impl Sharing {
    /// A CTA has the whole tile.
    pub const NONE: Self = Self::cluster(1);

    /// One cluster has the tile.
    pub const fn cluster(shares: usize) -> Self {
        Self { shares, splits: 1 }
    }

    /// The nearest that a kernel can do.
    pub fn of_kernel(self, kernel: &KernelInfo) -> Self {
        let splits = if kernel.sums_bytes == 0 { 1 } else { self.splits.clamp(1, MOST_SPLITS) };
        let least = if splits > 1 { least_shares(ways(kernel)) } else { 1 };
        Self { shares: self.shares.clamp(1, kernel.most_shares.max(1)).max(least), splits }
    }

    /// CTAs that share a tile.
    pub fn ctas(self) -> usize {
        self.shares * self.splits
    }

    /// The workspace that a launch of so many tiles needs for the clusters' sums.
    pub fn workspace_bytes(self, kernel: &KernelInfo, tiles: usize) -> usize {
        if self.splits <= 1 {
            return 0;
        }
        (size_of::<i32>() * tiles * self.shares).next_multiple_of(16) + tiles * self.splits * kernel.sums_bytes
    }
}

/// Warpgroups of a CTA that share a tile's keys.
fn ways(kernel: &KernelInfo) -> usize {
    if kernel.has_one_tile() { 2 } else { 1 }
}

/// The fewest CTAs of a cluster, of several that share a tile: each has some of the columns, and at most half of them.
fn least_shares(ways: usize) -> usize {
    2 / ways
}

/// The work of a launch.
#[derive(Clone, Debug)]
pub(super) struct Work {
    /// Blocks of keys that the tiles of one head visit, the most first. Of many tiles, those of every so many-th.
    visits: Vec<usize>,
    /// Whether the tiles of a head go from long to short, in the order of the list. (By a block more or less: where a window's
    /// edge lies in a block differs from tile to tile.)
    pub goes_down: bool,
    /// Tiles in all.
    tiles: usize,
    multiprocessors: usize,
    /// Whether CTAs draw tiles, where they have several.
    drawn: bool,
    /// Whether there may be no more CTAs than multiprocessors, since others have the rest.
    is_bounded: bool,
    kernel: KernelInfo,
    /// The most bytes that the workspace may have.
    most_bytes: u64,
    costs: Costs,
}

/// Whether a kernel is for a head dim above 128. The tensor cores limit such kernels, also those with small blocks of keys.
pub(super) fn is_wide(kernel: &KernelInfo) -> bool {
    kernel.head_dim_qk.max(kernel.head_dim_vo) > 128
}

/// What a kernel takes for the parts of a tile.
#[derive(Clone, Copy, Debug)]
struct Costs {
    /// A block of keys. Of tiles of 64 queries: two blocks, at which its two warpgroups work at the same time.
    block: f64,
    /// Between two tiles: the last block's products, O and the LSE.
    border: f64,
    /// Before a CTA's first block: barriers, the first copies.
    start: f64,
    /// What summing takes where the CTAs of a cluster share a tile, and where the warpgroups of one CTA do.
    sums: [f64; 2],
    /// What a block takes more where all multiprocessors work. The two warpgroups of a tile of 64 queries read other blocks, so
    /// that twice as many bytes come from the second-level cache.
    crowd: f64,
    /// What each block after the first [`HIDDEN`] takes more: its copies are not hidden.
    long: f64,
    /// What clusters take to sum a tile through the workspace: in any case, the zeroing of the counters with it, and for each cluster.
    splits: [f64; 2],
}

impl Costs {
    fn of(kernel: &KernelInfo) -> Self {
        if kernel.dtype == DType::E4M3 {
            return Self::of_e4m3(kernel);
        }
        if is_wide(kernel) {
            return Self::of_wide(kernel);
        }
        let [block, border, start, clusters, warpgroups, crowd] =
            match (kernel.head_dim_vo, kernel.tile_m, kernel.tile_n) {
                (..=64, 192.., _) => [1.27, 1.62, 2.25, 0.0, 0.0, 0.0],
                (..=64, 65.., 128..) => [0.98, 1.28, 2.45, 1.9, 0.0, 0.0],
                (..=64, 65.., _) => [0.69, 0.95, 2.0, 0.0, 0.0, 0.0],
                (..=64, _, _) => [0.90, 1.07, 2.6, 0.4, 0.3, 0.06],
                // Not a fit: between the two others. The larger tile has 9/8 of the products in a block, at 6% more of them a
                // microsecond.
                (..=96, 192.., _) => [1.17, 2.2, 2.6, 0.0, 0.0, 0.0],
                (..=96, 65.., _) => [1.10, 2.0, 2.4, 2.0, 0.0, 0.0],
                (..=96, _, _) => [0.91, 2.0, 2.5, 0.7, 0.5, 0.45],
                (_, 65.., 128..) => [1.34, 0.92, 3.2, 2.58, 0.0, 0.0],
                (_, 65.., _) => [0.90, 0.71, 2.16, 0.0, 0.0, 0.0],
                (_, _, _) => [0.90, 1.97, 2.62, 0.9, 0.6, 0.52],
            };
        // A fit to an H200 (benches/LOG.md, entry 85).
        let long = if kernel.has_one_tile() && kernel.head_dim_vo > 96 { 0.2 } else { 0.0 };
        let splits = if kernel.head_dim_vo <= 64 { [2.5, 0.4] } else { [4.0, 0.5] };
        Self { block, border, start, sums: [clusters, warpgroups], crowd, long, splits }
    }

    /// Of e4m3 operands, with head dims up to 128. A fit to what the kernels of 2026-11-26 took on an H100 at few heads (60 points),
    /// and at 16k tokens with scores in f16 (24) and in f32 (24): off by 3.4% in the mean.
    ///
    /// Scores in f16 make a block shorter. But they are looked at, which makes a tile's end later, and have a launch behind. What
    /// sums take is not measured: that of the 16-bit kernels, and half a microsecond more, since half of the warps sum.
    fn of_e4m3(kernel: &KernelInfo) -> Self {
        let in_f16 = kernel.scores == DType::F16;
        // `edge`: what masked blocks of a tile take more.
        let [block, border, edge, start, clusters] = match (kernel.head_dim_vo, kernel.tile_m, in_f16) {
            (..=64, 192.., _) => [1.03, 1.6, 1.9, 5.2, 0.0],
            (..=64, _, true) => [0.78, 1.1, 1.3, 5.2, 0.0],
            (..=64, _, false) => [0.82, 0.7, 1.0, 5.2, 2.0],
            (_, 192.., _) => [1.345, 3.3, 1.6, 5.3, 0.0],
            (_, _, true) => [0.97, 2.75, 0.9, 5.3, 0.0],
            (_, _, false) => [1.08, 2.0, 0.5, 5.3, 3.0],
        };
        let border = if kernel.mask == MaskClass::Full { border } else { border + edge };
        let start = if in_f16 { start + BEHIND } else { start };
        Self { block, border, start, sums: [clusters, 0.0], crowd: 0.0, long: 0.0, splits: [0.0; 2] }
    }

    /// Of a kernel with a head dim above 128, whose tiles are never shared. Not a fit: the tensor cores limit such a kernel, and
    /// a block takes the clocks of its products. A block of 64 keys takes 3% more, since Q is read from shared memory for each.
    ///
    /// A tile's border is long: there is one buffer of Q, so that the next Q arrives after the last scores.
    fn of_wide(kernel: &KernelInfo) -> Self {
        let products = kernel.tile_m * kernel.tile_n * (kernel.head_dim_qk + kernel.head_dim_vo);
        let narrow = if kernel.tile_n <= 64 { 1.03 } else { 1.0 };
        let block = products as f64 / PRODUCTS * narrow;
        Self { block, border: 3.5, start: 2.5, sums: [0.0, 0.0], crowd: 0.0, long: 0.0, splits: [0.0; 2] }
    }
}

/// The number of blocks of keys that tile `tile` visits: `KeyVisits` of the kernels (`common/visits.hpp`). At least 1.
fn visits(kernel: &KernelInfo, dims: Dims, bounds: Bounds, tile: usize) -> usize {
    let (rows, block) = (kernel.tile_m as i64, kernel.tile_n.max(1) as i64);
    let (queries, keys) = (dims.seqlen_q as i64, dims.seqlen_kv as i64);
    let blocks = |keys: i64| (keys.max(0) + block - 1) / block;
    let (mut begin, mut end) = (0, blocks(keys));
    let first_row = tile as i64 * rows;
    let last_row = (first_row + rows).min(queries) - 1;
    if kernel.mask == MaskClass::Window {
        begin = (bounds.first_key(first_row) / block).min(end - 1);
    }
    if kernel.mask != MaskClass::Full {
        end = blocks(keys.min(bounds.last_key(last_row) + 1)).max(begin + 1);
    }
    usize::try_from(end - begin).unwrap_or(1).max(1)
}

impl Work {
    /// `bounds` are those of the mask (`schedule.rs`). `multiprocessors` is at least 1.
    pub(super) fn new(kernel: &KernelInfo, dims: Dims, bounds: Bounds, multiprocessors: usize, drawn: bool) -> Self {
        let of_head = dims.seqlen_q.div_ceil(kernel.tile_m.max(1));
        let mut visits = if dims.seqlen_kv == 0 {
            vec![1; of_head.min(1)]
        } else if kernel.mask == MaskClass::Full {
            vec![visits(kernel, dims, bounds, 0); of_head.min(1)] // of every tile
        } else {
            let step = of_head.div_ceil(LOOKED_AT).max(1);
            (0..of_head).rev().step_by(step).map(|tile| visits(kernel, dims, bounds, tile)).collect()
        };
        let mut least = usize::MAX;
        // (The first tile may have few queries.)
        let goes_down = visits.iter().skip(1).all(|&visits| {
            least = least.min(visits);
            visits <= least + 1
        });
        visits.sort_unstable_by(|a, b| b.cmp(a));
        let tiles = of_head.saturating_mul(dims.batch * dims.heads_q).min(1 << 40);
        let (kernel, costs) = (*kernel, Costs::of(kernel));
        Self {
            visits,
            goes_down,
            tiles,
            multiprocessors,
            drawn,
            is_bounded: false,
            kernel,
            most_bytes: u64::MAX,
            costs,
        }
    }

    /// The same where the workspace has at most so many bytes.
    pub(super) fn within(self, most_bytes: Option<u64>) -> Self {
        Self { most_bytes: most_bytes.unwrap_or(u64::MAX), ..self }
    }

    /// The most blocks of keys that a tile visits.
    fn most(&self) -> usize {
        self.visits.first().copied().unwrap_or(1)
    }

    /// The same with no more CTAs than multiprocessors.
    pub(super) fn bounded(self) -> Self {
        Self { is_bounded: true, ..self }
    }

    /// The time that the launch takes where tiles are shared so. Infinite: they may not be.
    pub(super) fn time_of(&self, sharing: Sharing) -> f64 {
        let Sharing { shares, splits } = sharing;
        let ways = ways(&self.kernel);
        let Costs { block, border, start, sums: [clusters, warpgroups], crowd, long, splits: [summing, each] } =
            self.costs;
        let most = self.most();
        let mean = |of: &dyn Fn(usize) -> usize| {
            self.visits.iter().map(|&visits| of(visits) as f64).sum::<f64>() / self.visits.len().max(1) as f64
        };
        if shares > 1 || ways > 1 {
            let at_a_time = clusters_at_a_time(self.multiprocessors, shares);
            // A CTA computes one share and ends. The GPU may be too small for such a cluster.
            if at_a_time == 0 || (self.is_bounded && self.tiles * sharing.ctas() > self.multiprocessors) {
                return f64::INFINITY;
            }
            let parts = ways * sharing.ctas();
            let block = block + crowd * ((self.tiles * sharing.ctas()) as f64 / self.multiprocessors as f64).min(1.0);
            let fixed = start + border + if shares > 1 { clusters } else { warpgroups };
            let blocks = most.div_ceil(parts);
            let longest = blocks as f64 * block + blocks.saturating_sub(HIDDEN) as f64 * long + fixed;
            if splits > 1 {
                // Such a launch is for GPUs that are not full.
                let fits = self.tiles * splits <= at_a_time
                    && sharing.workspace_bytes(&self.kernel, self.tiles) as u64 <= self.most_bytes;
                return if fits { LAUNCH + longest + summing + splits as f64 * each } else { f64::INFINITY };
            }
            if self.tiles <= at_a_time {
                return LAUNCH + longest;
            }
            if self.visits.last().is_none_or(|&least| least == most) {
                return LAUNCH + self.tiles.div_ceil(at_a_time) as f64 * longest;
            }
            let of_each = mean(&|visits| visits.div_ceil(parts)) * block + fixed;
            let all = (of_each * self.tiles as f64 / at_a_time as f64).max(longest) + LATE * longest;
            return LAUNCH + all.max(self.rounds(at_a_time, &|visits| visits.div_ceil(parts) as f64 * block + fixed));
        }
        let longest = most as f64 * block + border;
        if self.tiles <= self.multiprocessors {
            return LAUNCH + start + longest;
        }
        if !self.drawn {
            return LAUNCH + start + self.tiles.div_ceil(self.multiprocessors) as f64 * longest;
        }
        let each = mean(&|visits| visits) * block + border;
        let all = (each * self.tiles as f64 / self.multiprocessors as f64).max(longest) + LATE * longest;
        // (The last tiles of e4m3 operands may be split over all CTAs, which end together then.)
        let rounds = match self.kernel.dtype {
            DType::E4M3 => 0.0,
            _ => self.rounds(self.multiprocessors, &|visits| visits as f64 * block + border),
        };
        LAUNCH + COUNTER + start + all.max(rounds)
    }

    /// A lower bound of the time that all tiles take. A *round* is `at_a_time` tiles, computed at once, the longest first. Of the
    /// first `n * at_a_time + 1` tiles some CTA or cluster computes `n + 1` or more, and each takes at least as long as the last of
    /// these tiles. The bound is the largest of these times over `n` (benches/LOG.md, entry 87). `time` gives the microseconds of a
    /// tile that visits so many blocks.
    fn rounds(&self, at_a_time: usize, time: &dyn Fn(usize) -> f64) -> f64 {
        let of_rounds = |rounds: usize| {
            let tile = rounds * at_a_time;
            let place = if tile < self.tiles { tile * self.visits.len() / self.tiles } else { usize::MAX };
            self.visits.get(place).map_or(0.0, |&visits| (rounds + 1) as f64 * time(visits))
        };
        (1..=FEW_ROUNDS).map(of_rounds).fold(0.0, f64::max)
    }

    /// How tiles are shared so that the launch takes the least time, and that time.
    pub(super) fn best(&self) -> (Sharing, f64) {
        let blocks = self.most();
        let most = blocks.min(self.kernel.most_shares).min(LARGEST_CLUSTER);
        let timed = |sharing| (sharing, self.time_of(sharing));
        let worth = |best: (Sharing, f64), other: Option<(Sharing, f64)>| match other {
            Some(other) if other.1 < best.1 * (1.0 - WORTH) => other,
            _ => best,
        };
        let least = |a: &(Sharing, f64), b: &(Sharing, f64)| a.1.total_cmp(&b.1);
        let one = worth(timed(Sharing::NONE), (2..=most).map(Sharing::cluster).map(timed).min_by(least));
        if self.kernel.sums_bytes == 0 {
            return one;
        }
        let several = (least_shares(ways(&self.kernel))..=most).flat_map(|shares| {
            let clusters = self.multiprocessors / (self.tiles * shares).max(1);
            (2..=clusters.min(MOST_SPLITS).min(blocks / shares)).map(move |splits| Sharing { shares, splits })
        });
        worth(one, several.map(timed).min_by(least))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::{Arch, Modifiers};
    use crate::dtype::DType;
    use crate::mask::Mask;
    use crate::plan::schedule::small_bands;
    use crate::problem::ForwardProblem;
    use crate::table::tests::ROW;

    /// The best number of shares of a tile of 128 queries, on 132 multiprocessors.
    fn shares(dims: Dims, mask: Mask) -> usize {
        let problem = ForwardProblem::builder(DType::BF16, dims).mask(mask).build().unwrap();
        let class = if mask == Mask::Full { MaskClass::Full } else { MaskClass::Causal };
        let head_dim = dims.head_dim_vo;
        let row = KernelInfo {
            arch: Arch::Sm90,
            mask: class,
            head_dim_qk: head_dim,
            head_dim_vo: head_dim,
            tile_m: 128,
            tile_n: 128,
            most_shares: 8,
            packs: false,
            drops: [false; 2],
            adds_bias: [false; 2],
            modifiers: Modifiers::Either,
            ..ROW
        };
        Work::new(&row, dims, Bounds::of(&problem), 132, class != MaskClass::Full).best().0.shares
    }

    fn square(heads: usize, seqlen: usize, head_dim: usize) -> Dims {
        Dims::new(1, seqlen, heads, head_dim)
    }

    #[test]
    fn few_long_tiles_are_shared() {
        // 64 tiles of up to 16 blocks; 32 tiles of up to 4.
        assert_eq!(shares(square(4, 2048, 128), Mask::causal()), 2);
        assert_eq!(shares(square(4, 2048, 128), Mask::Full), 2);
        assert_eq!(shares(square(4, 512, 128), Mask::causal()), 4);
        // 128 queries, 16k keys: 32 tiles. 30 clusters of four would run at a time, and two after them.
        assert_eq!(shares(square(32, 128, 128).with_seqlen_kv(16384), Mask::Full), 3);
        assert_eq!(shares(square(8, 16, 128).with_seqlen_kv(32768), Mask::Full), 8);
        // As many tiles as fill the GPU; tiles of one block.
        assert_eq!(shares(square(16, 4096, 128), Mask::causal()), 1);
        assert_eq!(shares(square(4, 128, 64), Mask::Full), 1);
    }

    #[test]
    fn tiles_of_64_queries_are_for_launches_of_few() {
        let row = |tile_m, most_shares| KernelInfo {
            arch: Arch::Sm90,
            mask: MaskClass::Causal,
            head_dim_qk: 128,
            head_dim_vo: 128,
            tile_m,
            tile_n: 128,
            most_shares,
            ..ROW
        };
        let time = |heads, seqlen, row: KernelInfo| {
            let dims = square(heads, seqlen, 128);
            let problem = ForwardProblem::builder(DType::BF16, dims).mask(Mask::causal()).build().unwrap();
            Work::new(&row, dims, Bounds::of(&problem), 132, true).best()
        };
        let (narrow, wide) = (row(64, 4), row(128, 8));
        assert!(narrow.has_one_tile() && !wide.has_one_tile() && !row(64, 1).has_one_tile());
        // 64 tiles of 128 queries, or 128 of 64; 16 or 32; then twice as many of 64 as run at a time.
        assert!(time(16, 512, narrow).1 < time(16, 512, wide).1);
        assert_eq!(time(4, 512, narrow).0, Sharing::cluster(2));
        assert!(time(32, 512, narrow).1 > time(32, 512, wide).1);
        assert!(time(16, 4096, narrow).1 > time(16, 4096, wide).1);
    }

    #[test]
    fn wide_blocks_of_keys_are_for_many_keys() {
        let row = |tile_n| KernelInfo { head_dim_qk: 256, head_dim_vo: 256, tile_m: 128, tile_n, ..ROW };
        let best = |seqlen_kv: usize| {
            let dims = square(16, 4096, 256).with_seqlen_kv(seqlen_kv);
            let problem = ForwardProblem::builder(DType::BF16, dims).build().unwrap();
            let time = |tile_n| {
                let row = KernelInfo { mask: MaskClass::Full, ..row(tile_n) };
                Work::new(&row, dims, Bounds::of(&problem), 132, false).best()
            };
            assert_eq!([time(64).0, time(80).0], [Sharing::NONE; 2], "such tiles are never shared");
            if time(80).1 <= time(64).1 { 80 } else { 64 }
        };
        // 512 keys are 7 blocks of 80, of which the last is nearly empty, or 8 of 64.
        assert_eq!([64, 77, 128, 160, 512, 4096, 16384].map(best), [64, 80, 64, 80, 64, 80, 80]);
    }

    #[test]
    fn no_cluster_is_larger_than_the_gpu() {
        // 16 queries on 32768 keys: the more shares, the better.
        let dims = square(1, 16, 128).with_seqlen_kv(32768);
        let problem = ForwardProblem::builder(DType::BF16, dims).build().unwrap();
        let row = KernelInfo { tile_m: 128, tile_n: 128, most_shares: 8, head_dim_vo: 128, ..ROW };
        for multiprocessors in [1, 2, 4, 6, 7, 8, 16, 78, 114, 132] {
            let (sharing, time) = Work::new(&row, dims, Bounds::of(&problem), multiprocessors, false).best();
            let possible = sharing.splits == 1 && (1..=multiprocessors.min(8)).contains(&sharing.shares);
            assert!(possible && time.is_finite(), "{multiprocessors}: {sharing:?}");
        }
    }

    #[test]
    fn many_tiles_are_looked_at_in_steps() {
        let long = square(1, 1 << 20, 64);
        let problem = ForwardProblem::builder(DType::BF16, long).mask(Mask::causal()).build().unwrap();
        let row = KernelInfo { mask: MaskClass::Causal, tile_m: 128, tile_n: 128, ..ROW };
        let work = Work::new(&row, long, Bounds::of(&problem), 132, true);
        assert_eq!((work.visits.len(), work.tiles, work.visits.first()), (128, 8192, Some(&8192)));
        let none = Work::new(&row, Dims { batch: 0, seqlen_q: 0, ..long }, Bounds::of(&problem), 132, true);
        assert_eq!(none.best().0, Sharing::NONE);
    }

    #[test]
    fn clusters_share_tiles_where_one_size_leaves_the_gpu_half_empty() {
        let row = |tile_m, most_shares, sums_bytes| KernelInfo {
            mask: MaskClass::Full,
            tile_m,
            tile_n: 128,
            most_shares,
            head_dim_vo: 128,
            sums_bytes,
            ..ROW
        };
        let best = |heads, queries, keys, row: KernelInfo, limit: Option<u64>| {
            let dims = square(heads, queries, 128).with_seqlen_kv(keys);
            let problem = ForwardProblem::builder(DType::BF16, dims).build().unwrap();
            Work::new(&row, dims, Bounds::of(&problem), 132, false).within(limit).best().0
        };
        let wide = row(128, 8, 73728);
        // 32 tiles: 39 clusters of three run at a time, or 66 of two.
        assert_eq!(best(32, 128, 16384, wide, None), Sharing { shares: 2, splits: 2 });
        assert_eq!(best(32, 128, 16384, row(128, 8, 0), None), Sharing::cluster(3));
        // Eight tiles of 64 queries on 32k keys. A cluster of this kernel has four CTAs at most: one for each tile is 32 CTAs.
        let narrow = best(8, 1, 32768, row(64, 4, 40960), None);
        assert!(narrow.ctas() * 8 > 100 && narrow.shares <= 4, "{narrow:?}");
        // Few keys, and tiles that fill the GPU in clusters of one size.
        assert_eq!(best(32, 128, 512, wide, None).splits, 1);
        assert_eq!(best(64, 128, 16384, wide, None), Sharing::cluster(2));
        // The workspace: 64 counters, and two sums of each tile.
        let bytes = Sharing { shares: 2, splits: 2 }.workspace_bytes(&wide, 32);
        assert_eq!((bytes, Sharing::cluster(8).workspace_bytes(&wide, 32)), (256 + 64 * 73728, 0));
        let within = |bytes: usize| best(32, 128, 16384, wide, Some(bytes as u64));
        assert_eq!((within(bytes).splits, within(bytes - 1)), (2, Sharing::cluster(3)));
    }

    /// The last queries of a long sequence visit nearly all keys, so that two rounds take two tiles' time.
    #[test]
    fn tiles_of_nearly_equal_work_take_whole_rounds() {
        let best = |heads, queries, keys, most_shares| {
            let row =
                KernelInfo { mask: MaskClass::Causal, tile_m: 64, tile_n: 128, head_dim_vo: 64, most_shares, ..ROW };
            let dims = square(heads, queries, 64).with_seqlen_kv(keys);
            let problem = ForwardProblem::builder(DType::BF16, dims).mask(Mask::causal()).build().unwrap();
            Work::new(&row, dims, Bounds::of(&problem), 132, true).best().0.shares
        };
        // At a time run 30 clusters of four CTAs, or 39 of three (`clusters_at_a_time`). Four heads have 32 tiles: one round of
        // clusters of three, and two of clusters of four. Three heads have 24 tiles: one round of either.
        assert_eq!(best(4, 512, 4096, 4), 3);
        assert_eq!(best(3, 512, 4096, 4), 4);
    }

    #[test]
    fn a_kernel_is_asked_for_what_it_can_do() {
        let wide = KernelInfo { tile_m: 128, most_shares: 8, sums_bytes: 1, ..ROW };
        let narrow = KernelInfo { tile_m: 64, most_shares: 4, ..wide };
        let of = |shares, splits, row: &KernelInfo| {
            let sharing = Sharing { shares, splits }.of_kernel(row);
            [sharing.shares, sharing.splits]
        };
        assert_eq!([of(1, 3, &wide), of(3, 3, &wide), of(9, 99, &wide)], [[2, 3], [3, 3], [8, 32]]);
        assert_eq!([of(1, 3, &narrow), of(9, 0, &narrow)], [[1, 3], [4, 1]]);
        assert_eq!(of(2, 2, &KernelInfo { sums_bytes: 0, ..wide }), [2, 1]);
        assert_eq!(of(2, 2, &ROW), [1, 1]);
    }

    /// `visits` beside the mask's definition.
    #[test]
    fn visits_are_the_blocks_that_a_tile_sees() {
        let row = |mask| KernelInfo { mask, tile_m: 8, tile_n: 4, ..ROW };
        for (dims, class, mask, bounds) in small_bands() {
            let (queries, keys) = (dims.seqlen_q, dims.seqlen_kv);
            for tile in 0..queries.div_ceil(8) {
                let keeps = |block: &usize| {
                    let rows = || 8 * tile..(8 * tile + 8).min(queries);
                    (4 * block..(4 * block + 4).min(keys)).any(|k| rows().any(|q| mask.keep(q, k, queries, keys)))
                };
                let seen: Vec<usize> = (0..keys.div_ceil(4)).filter(keeps).collect();
                // A causal tile begins with the first block.
                let seen = match (class, seen.last()) {
                    (MaskClass::Causal, Some(last)) => last + 1,
                    _ => seen.len(),
                };
                let visits = visits(&row(class), dims, bounds, tile);
                assert_eq!(visits, seen.max(1), "{mask} {queries}x{keys} tile {tile}");
            }
        }
    }
}
