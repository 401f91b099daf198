//! How many shares the tiles of a backward pass are cut into.
//!
//! A *step* is one block of queries that a tile of keys visits, in one query head. A tile's steps are those of all query heads
//! that read its KV head. They can be cut into *shares*: a share is some steps of a tile, and a CTA computes one share at a
//! time. What the shares of a tile add to dK and dV is summed in the workspace, or by a cluster of CTAs that have the shares of
//! one tile. A share in a cluster costs more than one whose sums are in memory, but nothing is zeroed before or converted
//! after. A cluster has 8 CTAs at most, and all clusters must run at a time.
//!
//! Shares serve three ends:
//! - More CTAs than there are tiles can work, and they end more evenly.
//! - Each share of a tile reads other query heads. Then a tile that starts late, and has fewer steps, does not go on to the
//!   next query head while others still work on the first. So less memory is in use at a time, and more of it stays in the
//!   second-level cache.
//! - Where many tiles are alike, CTAs take them in rounds, and in the last round half of them may have none. Only the last tiles
//!   are cut then, so that the last round is shorter.
//!
//! The model of the time is a fit to an H200 (benches/LOG.md, entry 75). Its unit is a step: 2.4 microseconds at head dim 64, 1.6
//! at 128.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::schedule::{Bounds, LARGEST_CLUSTER, clusters_at_a_time};
use crate::arch::MaskClass;
use crate::problem::Dims;
use crate::table::KernelInfo;

/// What a kernel's tiles and shares cost beside their steps, in steps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Costs {
    /// Of a whole tile: K and V are loaded, the first scores have no product beside them, dK and dV are written.
    whole: f64,
    /// Of a share, which adds dK and dV to sums.
    summed: f64,
    /// Of a share that a CTA of a cluster has. Tiles that take turns have no clusters.
    in_cluster: f64,
    /// Bytes of these sums that are zeroed before, or converted after, in the time of a step.
    bytes_a_step: f64,
}

impl Costs {
    /// Those of a kernel. Passes in which tiles take turns were not timed again: theirs are of an older fit, to an H100 (entry 34).
    pub(super) fn of(kernel: &KernelInfo, ordered: bool) -> Self {
        match kernel.head_dim_qk {
            _ if ordered => Self { whole: 1.5, summed: 4.0, in_cluster: f64::INFINITY, bytes_a_step: 8.0e6 },
            ..=64 => Self { whole: 0.45, summed: 0.95, in_cluster: 2.0, bytes_a_step: 4.3e6 },
            _ => Self { whole: 1.0, summed: 3.0, in_cluster: 3.9, bytes_a_step: 4.3e6 },
        }
    }
}

/// In how many rounds the CTAs may take shares, so that the time is found by giving them out one by one. With more rounds it is
/// that of even work, and [`LATE`]. The same where tiles take turns.
const ROUNDS: usize = 8;
/// Part of the longest share by which the grid ends late. (CTAs that are done wait for the others.)
const LATE: f64 = 0.15;
/// What the second-level cache holds of what the tiles under way access, in bytes.
const CACHED: f64 = 50e6;
/// Under a causal mask, a step takes this part longer where the tiles access twice [`CACHED`] or more, and less in proportion
/// between. (Without a mask tiles visit the same blocks at a time. Windows are small.)
const MISSES: f64 = 0.2;
/// Cutting must save at least this part of the time.
const WORTH: f64 = 0.03;
/// The same where only the last tiles are cut.
const WORTH_OF_LAST: f64 = 0.0122;
/// What counts as the same time.
const AS_GOOD: f64 = 1.01;
/// The most shares of a tile.
pub(super) const MOST: usize = 32;
/// The numbers of shares that are looked at, with the number of query heads that read a KV head. (All of them would take longer
/// than a launch.)
const NUMBERS: [usize; 15] = [2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, MOST];
/// Problems with more tiles of keys in a head are not looked at: the choice would take longer than a launch.
const MOST_TILES: usize = 1 << 14;
/// The most bytes that the sums of dK and dV may take, if they take more than the sums of dQ.
pub(super) const MOST_BYTES: usize = 256 << 20;
/// From how many bytes on the query heads of a KV head are given to shares of their own under a mask. The bytes are what the
/// tiles of the KV head read and add to.
const FAR_BYTES: usize = 64 << 20;
/// The same without a mask, for each query head, where tiles take no turns. (There each head is a group of its own: two heads
/// are in use at most. With turns it was not measured.)
const FAR_HEAD_BYTES: usize = 32 << 20;
/// Which part of the steps these shares may cost.
const FAR_COST: f64 = 0.033;

/// How tiles are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// Shares of a tile, at least 1.
    pub shares: usize,
    /// Whether the CTAs of a cluster have them. Not where there is one.
    pub in_cluster: bool,
    /// How many tiles are cut, the last ones. `None`: all.
    pub last: Option<usize>,
}

impl Cut {
    pub(super) const WHOLE: Self = Self::all(1, false);

    /// All tiles are cut alike.
    pub(super) const fn all(shares: usize, in_cluster: bool) -> Self {
        Self { shares, in_cluster, last: None }
    }
}

/// The work of a launch.
#[derive(Clone, Debug)]
pub(super) struct Work {
    /// Steps of each tile of one KV head, all query heads together ([`steps`]). Empty: tiles are not cut.
    pub steps: Vec<usize>,
    /// Query heads that read one KV head.
    pub group: usize,
    /// (batch entry, KV head) pairs.
    pub heads: usize,
    /// Multiprocessors of the GPU, less the problem's margin. At least 1.
    pub multiprocessors: usize,
    /// Whether there may be no more CTAs than multiprocessors, since others have the rest.
    pub is_bounded: bool,
    /// Bytes that the tiles of one KV head read, or add to, in common.
    pub bytes: usize,
    /// Bytes of the sums of dK and dV of one tile.
    pub sums: usize,
    /// What its tiles and shares cost.
    pub costs: Costs,
    /// The most bytes of all of them ([`MOST_BYTES`]).
    pub most_bytes: usize,
    /// Whether the mask is causal.
    pub is_causal: bool,
    /// Whether tiles take turns, so that each share needs sums of its own.
    pub ordered: bool,
    /// The most CTAs of a cluster that may share a tile.
    pub most_in_cluster: usize,
}

/// The number of blocks of queries that tile `tile` of keys visits, in one query head: `QueryVisits` of the kernels
/// (`common/visits.hpp`). At least 1.
fn visits(kernel: &KernelInfo, dims: Dims, bounds: Bounds, tile: usize) -> usize {
    let (rows, keys) = (kernel.tile_m.max(1) as i64, kernel.tile_n as i64);
    let (queries, all_keys) = (dims.seqlen_q as i64, dims.seqlen_kv as i64);
    let blocks = |queries: i64| (queries.max(0) + rows - 1) / rows;
    let (mut begin, mut end) = (0, blocks(queries));
    let first_key = tile as i64 * keys;
    if kernel.mask != MaskClass::Full {
        begin = (bounds.first_query(first_key) / rows).min(end - 1);
    }
    if kernel.mask == MaskClass::Window {
        let last_key = (first_key + keys).min(all_keys) - 1;
        end = blocks(queries.min(bounds.last_query(last_key) + 1)).max(begin + 1);
    }
    usize::try_from(end - begin).unwrap_or(1).max(1)
}

/// The steps of each tile of one KV head, all query heads together: [`Work::steps`].
pub(super) fn steps(kernel: &KernelInfo, dims: Dims, bounds: Bounds) -> Vec<usize> {
    let tiles = dims.seqlen_kv.div_ceil(kernel.tile_n.max(1));
    if tiles > MOST_TILES || dims.batch * dims.seqlen_q == 0 {
        return Vec::new();
    }
    (0..tiles).map(|tile| dims.group_size() * visits(kernel, dims, bounds, tile)).collect()
}

impl Work {
    /// Bytes of the sums of dK and dV.
    fn sums(&self, shares: usize) -> usize {
        let copies = if self.ordered { shares } else { 1 };
        self.steps.len() * self.heads * self.sums * copies
    }

    /// All steps of the launch.
    fn steps(&self) -> usize {
        self.steps.iter().sum::<usize>() * self.heads
    }

    /// The steps of the longest tile.
    fn most(&self) -> usize {
        self.steps.iter().copied().max().unwrap_or(1)
    }

    /// Shares that have steps. A tile of few steps has fewer.
    fn listed(&self, shares: usize) -> usize {
        self.steps.iter().map(|&steps| steps.min(shares)).sum::<usize>() * self.heads
    }

    /// Whether all tiles have as many steps.
    fn is_even(&self) -> bool {
        self.steps.windows(2).all(|pair| pair[0] == pair[1])
    }

    /// What a share costs beside its steps, and what zeroing and converting the sums costs.
    fn beside(&self, shares: usize) -> [f64; 2] {
        match shares {
            1 => [self.costs.whole, 0.0],
            _ => [self.costs.summed, 2.0 * self.sums(shares) as f64 / self.costs.bytes_a_step],
        }
    }

    /// The time that the launch takes with so many shares of each tile.
    fn time(&self, shares: usize) -> f64 {
        let [beside, around] = self.beside(shares);
        let listed = self.listed(shares);
        let step = if self.is_causal && !self.ordered { 1.0 + MISSES * self.missed(shares) } else { 1.0 };
        if !self.ordered && listed <= ROUNDS * self.multiprocessors {
            return self.given_out(shares, step, beside) + around;
        }
        let longest = step * self.most().div_ceil(shares) as f64 + beside;
        if self.is_even() {
            return listed.div_ceil(self.multiprocessors) as f64 * longest + around;
        }
        let each = (step * self.steps() as f64 + listed as f64 * beside) / self.multiprocessors as f64;
        each.max(longest) + LATE * longest + around
    }

    /// By how much the bytes that tiles under way access exceed those that are [`CACHED`], as a part of these, 1 at most.
    fn missed(&self, shares: usize) -> f64 {
        let tiles = (self.multiprocessors / shares).clamp(1, self.steps.len() * self.heads) as f64;
        let bytes = self.bytes as f64 * (tiles / self.steps.len() as f64).min(self.heads as f64);
        (bytes / CACHED - 1.0).clamp(0.0, 1.0)
    }

    /// When the last CTA is done, where each takes the longest share that is left once it is done with the one before.
    fn given_out(&self, shares: usize, step: f64, beside: f64) -> f64 {
        const PARTS: f64 = 1024.0; // of a step, since a heap orders integers
        let mut done = BinaryHeap::from(vec![Reverse(0_u64); self.multiprocessors]);
        let mut tiles = self.steps.clone();
        tiles.sort_unstable_by_key(|&steps| Reverse(steps));
        for steps in tiles {
            let count = steps.min(shares);
            for share in 0..count {
                // The first shares have the steps that are left over.
                let own = steps / count + usize::from(share < steps % count);
                let time = ((own as f64 * step + beside) * PARTS) as u64;
                for _ in 0..self.heads {
                    if let Some(mut first) = done.peek_mut() {
                        first.0 += time;
                    }
                }
            }
        }
        done.into_iter().map(|Reverse(time)| time).max().unwrap_or(0) as f64 / PARTS
    }

    /// Whether the shares of each tile can be a cluster's: all clusters must run at a time. Not where tiles take turns. A tile waits
    /// for those before it, which must be running, and only drawing ensures that.
    fn runs(&self, shares: usize) -> bool {
        let tiles = self.steps.len() * self.heads;
        let bound = if self.is_bounded { self.multiprocessors / shares } else { usize::MAX };
        !self.ordered && tiles <= clusters_at_a_time(self.multiprocessors, shares).min(bound)
    }

    /// The time with the shares of each tile in a cluster. `None` where the clusters do not run at a time.
    fn time_in_clusters(&self, shares: usize) -> Option<f64> {
        if !self.runs(shares) {
            return None;
        }
        Some(self.most().div_ceil(shares) as f64 + self.costs.in_cluster)
    }

    /// What shares cost more than whole tiles, as a part of the steps.
    fn cost(&self, shares: usize) -> f64 {
        let work = |shares: usize| {
            let [beside, around] = self.beside(shares);
            self.listed(shares) as f64 * beside / self.multiprocessors as f64 + around
        };
        (work(shares) - work(1)) * self.multiprocessors as f64 / self.steps() as f64
    }

    /// Whether a share is some query heads, or a query head some shares. Others are slower: measured at 3 and 5 shares of 8
    /// query heads.
    fn is_aligned(&self, shares: usize) -> bool {
        self.group.is_multiple_of(shares) || shares.is_multiple_of(self.group)
    }

    /// How tiles are cut: not at all, or so that it takes the least time.
    pub(super) fn cut(&self) -> Cut {
        self.best(&|_| true)
    }

    /// As [`cut`](Self::cut), among the cuts whose workspace fits, as `fits` says. Whole tiles are taken in any case.
    pub(super) fn cut_within(&self, fits: &dyn Fn(Cut) -> bool) -> Cut {
        // A cut that fits must not depend on those that do not, with which `best` compares it.
        Some(self.cut()).filter(|&cut| fits(cut)).unwrap_or_else(|| self.best(fits))
    }

    fn best(&self, fits: &dyn Fn(Cut) -> bool) -> Cut {
        if self.steps.is_empty() {
            return Cut::WHOLE;
        }
        let whole = self.time(1);
        let shares = self.shares(whole, fits);
        (2..=self.most_in_cluster.min(LARGEST_CLUSTER))
            .filter_map(|shares| Some((self.time_in_clusters(shares)?, Cut::all(shares, true))))
            .filter(|&(_, cut)| fits(cut))
            .min_by(|a, b| a.0.total_cmp(&b.0))
            .filter(|(time, _)| *time < whole * (1.0 - WORTH) && *time < self.time(shares))
            .map(|(_, cut)| cut)
            .or_else(|| if shares == 1 { self.last(whole, fits) } else { None })
            .unwrap_or(Cut::all(shares, false))
    }

    /// Cuts the last tiles of many that are alike. `None` where that saves too little.
    ///
    /// Whole tiles are rounds of the grid: all full rounds of the launch, or all but one.
    fn last(&self, whole: f64, fits: &dyn Fn(Cut) -> bool) -> Option<Cut> {
        let (steps, tiles, ctas) = (self.steps[0], self.steps.len() * self.heads, self.multiprocessors);
        if self.ordered || !self.is_even() {
            return None;
        }
        let rounds = [tiles / ctas, (tiles / ctas).saturating_sub(1)];
        let time = |shares: usize, rounds: usize| {
            let last = tiles - rounds * ctas;
            let of_shares = (last * shares).div_ceil(ctas) as f64 * (steps.div_ceil(shares) as f64 + self.costs.summed);
            let around = 2.0 * (last * self.sums) as f64 / self.costs.bytes_a_step;
            rounds as f64 * (steps as f64 + self.costs.whole) + of_shares + around
        };
        (2..=MOST.min(steps))
            .filter(|&shares| self.is_aligned(shares))
            .flat_map(|shares| rounds.map(|rounds| (time(shares, rounds), shares, tiles - rounds * ctas)))
            .filter(|&(_, _, last)| 0 < last && last < tiles && last * self.sums <= self.most_bytes)
            .map(|(time, shares, last)| (time, Cut { shares, in_cluster: false, last: Some(last) }))
            .filter(|&(_, cut)| fits(cut))
            .min_by(|a, b| a.0.total_cmp(&b.0))
            .filter(|(time, _)| *time < whole * (1.0 - WORTH_OF_LAST))
            .map(|(_, cut)| cut)
    }

    /// The number of shares of each tile whose sums are in the workspace: 1, or what takes the least time. `whole` is that of
    /// whole tiles.
    fn shares(&self, whole: f64, fits: &dyn Fn(Cut) -> bool) -> usize {
        let most = self.most().min(MOST);
        let fits = |&shares: &usize| self.sums(shares) <= self.most_bytes && fits(Cut::all(shares, false));
        let is_looked_at = |&shares: &usize| self.ordered || shares == self.group || NUMBERS.contains(&shares);
        let times: Vec<(usize, f64)> = (2..=most)
            .filter(is_looked_at)
            .filter(|&shares| self.is_aligned(shares) && fits(&shares))
            .map(|shares| (shares, self.time(shares)))
            .filter(|(_, time)| *time < whole * (1.0 - WORTH))
            .collect();
        // Of those that are as good as the best, the fewest shares.
        let best = times.iter().map(|(_, time)| *time).fold(f64::INFINITY, f64::min);
        let fastest = times.iter().find(|(_, time)| *time <= best * AS_GOOD).map_or(1, |(shares, _)| *shares);
        let is_far = match self.is_even() {
            true => !self.ordered && self.bytes / self.group.max(1) >= FAR_HEAD_BYTES,
            false => self.bytes >= FAR_BYTES,
        };
        let far = is_far && self.cost(self.group) <= FAR_COST && fits(&self.group);
        if far { fastest.max(self.group) } else { fastest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::schedule::small_bands;
    use crate::table::tests::ROW;

    fn costs(ordered: bool) -> Costs {
        Costs::of(&KernelInfo { head_dim_qk: 128, ..ROW }, ordered)
    }

    /// A launch at head dim 128 under a causal mask, on 132 multiprocessors.
    fn causal(group: usize, heads: usize, seqlen: usize) -> Work {
        let blocks = seqlen / 64;
        Work {
            steps: (0..seqlen / 128).map(|tile| group * (blocks - 2 * tile)).collect(),
            group,
            heads,
            multiprocessors: 132,
            bytes: group * seqlen * 1024,
            sums: 128 << 10,
            costs: costs(false),
            most_bytes: MOST_BYTES,
            is_causal: true,
            ordered: false,
            is_bounded: false,
            most_in_cluster: 1,
        }
    }

    #[test]
    fn few_tiles_are_cut_until_they_fill_the_card() {
        // 16 tiles for 132 multiprocessors; the longest has 32 blocks of 8 heads.
        assert_eq!(causal(8, 1, 2048).cut().shares, 16);
        assert_eq!(causal(8, 1, 8192).cut().shares, 4);
        assert_eq!(Work { ordered: true, costs: costs(true), ..causal(8, 1, 8192) }.cut().shares, 8);
        assert_eq!(causal(4, 4, 8192).cut().shares, 2);
        // One query head a KV head: its blocks are cut.
        assert_eq!(causal(1, 4, 2048).cut().shares, 3);
        // Four short tiles a head: cutting costs more than it saves.
        assert_eq!(causal(1, 16, 512).cut().shares, 1);
        // As many tiles as fill the card.
        assert_eq!(causal(1, 16, 4096).cut().shares, 1);
        assert_eq!(causal(4, 32, 2048).cut().shares, 1);
    }

    #[test]
    fn each_multiprocessor_takes_the_longest_share_left() {
        let costs = Costs { whole: 0.0, summed: 1.0, in_cluster: 0.0, bytes_a_step: 1.0 };
        let work = |heads| Work {
            steps: vec![3, 4, 3],
            multiprocessors: 2,
            is_causal: false,
            sums: 0,
            costs,
            ..causal(1, heads, 128)
        };
        // 4 beside 3 and 3. Of two heads: 4 and 3 and 3, twice.
        assert_eq!(work(1).time(1), 6.0);
        assert_eq!(work(2).time(1), 10.0);
        // Halves, each a step longer: 3, 3 and 2 beside 3, 2 and 3.
        assert_eq!(work(1).time(2), 8.0);
        // Sums are zeroed and converted.
        assert_eq!(Work { sums: 5, ..work(1) }.time(2), 8.0 + 2.0 * 3.0 * 5.0);
    }

    /// 256 tiles fill the card. But eight query heads of 2k queries, of each of eight KV heads, exceed the cache.
    #[test]
    fn query_heads_under_way_stay_in_the_cache() {
        assert_eq!(causal(8, 16, 2048).cut().shares, 4);
        assert_eq!(Work { is_causal: false, ..causal(8, 16, 2048) }.cut().shares, 1);
        assert_eq!(causal(4, 16, 2048).cut().shares, 1);
    }

    #[test]
    fn shares_are_whole_heads_or_parts_of_one() {
        for (group, heads, seqlen) in
            [(8, 1, 512), (8, 4, 2048), (6, 1, 1024), (12, 2, 4096), (4, 4, 8192), (3, 1, 256)]
        {
            let shares = causal(group, heads, seqlen).cut().shares;
            assert!(group.is_multiple_of(shares) || shares.is_multiple_of(group), "{group} {heads} {seqlen}: {shares}");
        }
    }

    #[test]
    fn sums_are_bounded() {
        let work = causal(8, 1, 8192);
        assert_eq!(work.sums(1), 64 * (128 << 10));
        let ordered = Work { ordered: true, ..work.clone() };
        assert_eq!(ordered.sums(8), 8 * work.sums(1));
        let little = Work { most_bytes: 4 * work.sums(1), ..ordered };
        assert_eq!(little.cut().shares, 4);
        assert_eq!(Work { most_bytes: 0, ..work }.cut().shares, 1);
    }

    #[test]
    fn cuts_that_do_not_fit_are_left_out() {
        let work = causal(8, 1, 2048);
        assert_eq!(work.cut_within(&|_| true), work.cut());
        assert_eq!(work.cut_within(&|cut| cut == work.cut()), work.cut());
        assert_eq!(work.cut_within(&|cut| cut.shares < 16), Cut::all(8, false));
        assert_eq!(work.cut_within(&|cut| cut.shares <= 3), Cut::all(2, false));
        assert_eq!(work.cut_within(&|_| false), Cut::WHOLE);
        let in_clusters = Work { most_in_cluster: 8, ..causal(1, 16, 512) };
        assert_eq!(in_clusters.cut_within(&|cut| !cut.in_cluster), causal(1, 16, 512).cut());
    }

    #[test]
    fn clusters_have_the_shares_where_all_run_at_a_time() {
        let cut = |work: Work| Work { most_in_cluster: 8, ..work }.cut();
        // 64 tiles and 66 clusters of two; the sums of dK and dV in the workspace would cost more than they save.
        let two = Cut::all(2, true);
        assert_eq!(cut(causal(1, 16, 512)), two);
        assert_eq!(cut(Work { is_bounded: true, multiprocessors: 127, ..causal(1, 16, 512) }), Cut::WHOLE);
        // 128 tiles, and 16 tiles of 64 steps, for which 8 CTAs are too few.
        assert_eq!(cut(causal(1, 32, 512)), Cut::WHOLE);
        assert!(!cut(causal(8, 1, 2048)).in_cluster);
        assert!(!causal(1, 17, 512).runs(2) && causal(1, 16, 512).runs(2));
        assert_eq!(Work { most_in_cluster: 1, ..causal(1, 16, 512) }.cut(), Cut::WHOLE);
        assert!(!cut(Work { ordered: true, ..causal(1, 16, 512) }).in_cluster);
    }

    #[test]
    fn the_last_tiles_of_many_are_cut() {
        // 2048 tiles without a mask are 15 rounds of 132, and 68 more.
        let full =
            |seqlen: usize| Work { steps: vec![seqlen / 64; seqlen / 128], ..causal(1, 16 * 16384 / seqlen, seqlen) };
        for seqlen in [4096, 8192, 16384] {
            let cut = full(seqlen).cut();
            assert!(cut.shares > 1 && cut.last.is_some_and(|last| last % 132 == 68), "{seqlen}: {cut:?}");
        }
        // Of short tiles a round is not worth it.
        assert_eq!(full(512).cut(), Cut::WHOLE);
        // Full rounds are not cut, nor what has turns.
        assert_eq!(Work { multiprocessors: 128, ..full(16384) }.cut(), Cut::WHOLE);
        assert_eq!(Work { ordered: true, ..full(16384) }.cut(), Cut::WHOLE);
        // Shares are whole query heads, or parts of one.
        let grouped = Work { group: 4, ..full(16384) }.cut();
        assert!(
            grouped.last.is_some() && (4_usize.is_multiple_of(grouped.shares) || grouped.shares.is_multiple_of(4)),
            "{grouped:?}"
        );
    }

    /// `visits` beside the mask's definition.
    #[test]
    fn visits_are_the_blocks_that_see_a_tile() {
        let row = |mask| KernelInfo { mask, tile_m: 4, tile_n: 8, ..ROW };
        for (dims, class, mask, bounds) in small_bands() {
            let (queries, keys) = (dims.seqlen_q, dims.seqlen_kv);
            for tile in 0..keys.div_ceil(8) {
                let sees = |block: &usize| {
                    let rows = 4 * block..(4 * block + 4).min(queries);
                    let keys_of_tile = || 8 * tile..(8 * tile + 8).min(keys);
                    rows.clone().any(|q| keys_of_tile().any(|k| mask.keep(q, k, queries, keys)))
                };
                let seen = (0..queries.div_ceil(4)).filter(sees).count();
                let visits = visits(&row(class), dims, bounds, tile);
                assert_eq!(visits, seen.max(1), "{mask} {queries}x{keys} tile {tile}");
            }
        }
    }

    #[test]
    fn query_heads_that_fill_the_cache_get_shares_of_their_own() {
        // 32 MiB a query head.
        assert_eq!(causal(4, 8, 32768).cut().shares, 4);
        assert_eq!(Work { bytes: FAR_BYTES - 1, ..causal(4, 8, 32768) }.cut().shares, 1);
        assert_eq!(causal(1, 16, 32768).cut().shares, 1);
        // The same without a mask.
        let full = |group: usize, heads, seqlen: usize| Work {
            steps: vec![group * seqlen / 64; seqlen / 128],
            is_causal: false,
            ..causal(group, heads, seqlen)
        };
        assert_eq!(full(8, 1, 65536).cut(), Cut::all(8, false));
        assert_eq!(full(4, 4, 32768).cut(), Cut::all(4, false));
        assert_ne!(full(4, 8, 16384).cut(), Cut::all(4, false));
        assert_ne!(Work { ordered: true, ..full(8, 1, 65536) }.cut(), Cut::all(8, false));
    }
}
