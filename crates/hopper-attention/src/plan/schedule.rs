//! What the schedules of forward and backward kernels share: multiprocessors, groups of heads, and the bounds of a mask.
//!
//! A schedule lists all tiles in an order that the CTAs (CUDA thread blocks) walk from the first tile to the last. The list
//! goes group by group. A *group* is some heads: (batch entry, query head) pairs in the forward, (batch entry, KV head) pairs
//! in the backward. In a group the tiles with the most work come first.
//!
//! In a deterministic backward pass tiles take turns. Several tiles of one head add to the same sums of dQ, in a fixed order. A
//! tile's *turn* at a sum comes when the tile before it has added its part. Until then the tile waits.

use std::fmt;

use super::fitting::{band, unsupported};
use crate::arch::{Arch, DeviceFacts, MaskClass};
use crate::error::{Error, Result};
use crate::problem::ForwardProblem;
use crate::table::KernelInfo;

/// How many clusters of 1, 2, ... 8 CTAs run at a time, for each multiprocessor. All CTAs of a cluster run in one part of the
/// GPU, of 16 or 18 multiprocessors, so that some of these are left over. (Measured: an H100 with 132 multiprocessors runs 132,
/// 66, 39, 30, 22, 17, 15 and 15.)
const CLUSTERS: [f64; 8] = [1.0, 0.5, 0.296, 0.228, 0.167, 0.129, 0.114, 0.114];
/// The most CTAs of a cluster.
pub(super) const LARGEST_CLUSTER: usize = CLUSTERS.len();

/// How many clusters of `size` CTAs run at a time, with one CTA on a multiprocessor. 0 where the GPU is too small for one.
/// `size` is 1 to [`LARGEST_CLUSTER`].
pub(super) fn clusters_at_a_time(multiprocessors: usize, size: usize) -> usize {
    (multiprocessors as f64 * CLUSTERS[size - 1]) as usize
}

/// The bound of a mask that kernels read as "no bound". `seqlen_q + seqlen_kv` stays below it, so it excludes no key.
pub(crate) const UNBOUNDED: i32 = 1 << 30;
/// Heads in a group, where tiles have unequal work. More heads give the CTAs more even work. Fewer heads keep what their tiles
/// read in the second-level cache (benches/LOG.md, entry 2).
pub(super) const HEADS_PER_GROUP: usize = 16;
/// The most heads in the last group, and the most bytes that their tiles read. The last group is larger than the others,
/// because the grid ends with its last tiles: the more heads it has, the shorter these tiles are, and the more evenly the CTAs
/// end (benches/LOG.md, entry 14).
const LAST_GROUP_HEADS: usize = 64;
const LAST_GROUP_BYTES: usize = 32 << 20;
/// The bytes that the tiles of a group read, or add to, in a backward pass. What stays in the second-level cache need not come
/// from memory again, which takes time and power (benches/LOG.md, entry 74).
const BACKWARD_CACHED_BYTES: usize = 64 << 20;
/// The least heads in such a group, even if it then accesses more bytes. With one or two, long sequences are slower.
const BACKWARD_LEAST_HEADS: usize = 4;
/// The most bytes that it accesses, even if it then has fewer heads. With more, so little stays in the second-level cache that
/// CTAs which lag behind, and find nothing there, fall behind further (benches/LOG.md, entry 34).
pub(super) const BACKWARD_GROUP_BYTES: usize = 512 << 20;
/// The same with lists of blocks. Each CTA is elsewhere in its own lists, so that all of it is in use at a time (entry 68).
pub(super) const LISTED_GROUP_BYTES: usize = 16 << 20;
/// The same of packed sequences, where a group is of one sequence. One of 32k queries among short ones, with 16 heads of 32 MiB
/// in a group: 0.58 of the speed of 16k queries (benches/LOG.md, entry 43).
pub(super) const PACKED_GROUP_BYTES: usize = 256 << 20;
/// The same where tiles have shares, and the most shares in a group. A group of more bytes has less than half of the speed (16k
/// queries, 32 heads of 16 MiB in a group: 8.4 -> 18.6 ms).
const SHARED_GROUP_BYTES: usize = 256 << 20;
const SHARED_GROUP_HEADS: usize = 8;
/// Where tiles take turns: the most bytes that the tiles of a group access, and the least heads in a group. The first entry is
/// for tiles of unequal work, the second for tiles of equal work.
const TURNS: [(usize, usize); 2] = [(64 << 20, 32), (16 << 20, 16)];

/// Whether a kernel's grid is persistent: one CTA for each multiprocessor, which computes one tile after another. The other
/// kernels have a CTA for each tile.
pub(super) fn is_persistent(kernel: &KernelInfo) -> bool {
    kernel.arch != Arch::Sm80
}

/// The number of multiprocessors that a kernel's schedule is for: those of the GPU, less the problem's margin. At least 1.
///
/// # Errors
/// - [`Error::Unsupported`]: there is a margin, and the kernel's grid is not persistent, so that it leaves no multiprocessor
///   free.
/// - [`Error::Value`]: the margin leaves none to the kernel.
pub(super) fn multiprocessors(problem: &ForwardProblem, gpu: &DeviceFacts, kernel: &KernelInfo) -> Result<usize> {
    let (all, margin) = (gpu.multiprocessors.max(1), problem.sm_margin());
    if margin > 0 && !is_persistent(kernel) {
        let wanted = format!("sm_margin {margin} with {} kernels, which have a CTA for each tile", kernel.arch);
        return Err(unsupported(wanted, "sm_margin 0, or sm90 kernels".into()));
    }
    all.checked_sub(margin).filter(|&left| left > 0).ok_or_else(|| {
        let allowed = format!("0 to {}, since the GPU has {all} multiprocessors", all - 1);
        Error::Value { what: "sm_margin", got: margin.to_string(), allowed }
    })
}

/// Whether a workspace of so many bytes is within the problem's limit.
pub(super) fn is_within_limit(problem: &ForwardProblem, bytes: usize) -> bool {
    problem.workspace_limit().is_none_or(|limit| bytes as u64 <= limit)
}

/// Refuses a plan whose tiles are cut as little as they can be, and whose workspace is above the problem's limit.
///
/// # Errors
/// [`Error::Value`], which names both numbers of bytes.
pub(super) fn check_limit(problem: &ForwardProblem, bytes: usize) -> Result<()> {
    match problem.workspace_limit() {
        Some(limit) if !is_within_limit(problem, bytes) => {
            let allowed = format!("{bytes} and above, the bytes that the plan needs without cut tiles");
            Err(Error::Value { what: "workspace_limit", got: limit.to_string(), allowed })
        }
        _ => Ok(()),
    }
}

/// Occupancy: how many CTAs of a kernel share a multiprocessor.
///
/// - Registers: a multiprocessor has 64 Ki. A thread is counted with 256, the most that it can get.
/// - Shared memory: a multiprocessor has 1 KiB more than a CTA may ask for. The system takes 1 KiB for each CTA.
pub(super) fn resident(row: &KernelInfo, gpu: &DeviceFacts) -> usize {
    if is_persistent(row) {
        return 1;
    }
    let by_registers = (64 << 10) / (256 * row.threads.max(1));
    let by_memory = (gpu.smem_bytes_per_block + 1024) / (row.smem_bytes + 1024);
    by_registers.min(by_memory)
}

/// The number of heads in a group, and the number of groups.
///
/// - `even`: whether all tiles have equal work. Each head is then a group of its own.
/// - `heads`: the number of heads in all.
/// - `bytes`: how much memory the tiles of one head access in common (in the forward: the head's keys and values).
/// - `most`: the most heads in a group but the last.
pub(super) fn groups(even: bool, heads: usize, bytes: usize, most: usize) -> [i32; 2] {
    if even {
        return [1, small(heads.max(1))];
    }
    let group = most.min(heads.max(1));
    let last = (LAST_GROUP_BYTES / bytes.max(1)).clamp(most, LAST_GROUP_HEADS);
    [small(group), small(heads.saturating_sub(last) / group + 1)]
}

/// The most heads in a group that access `most_bytes` together: at least 1.
pub(super) fn heads_within(bytes: usize, most_bytes: usize) -> usize {
    (most_bytes / bytes.max(1)).clamp(1, HEADS_PER_GROUP)
}

/// The heads in a group of a backward pass: each accesses `bytes`, and all of them `most_bytes` at most, unless it is one head.
pub(super) fn backward_heads(bytes: usize, most_bytes: usize) -> usize {
    heads_within(bytes, BACKWARD_CACHED_BYTES).max(BACKWARD_LEAST_HEADS).min(heads_within(bytes, most_bytes))
}

/// As [`groups`], where tiles have shares: a head is one share of a KV head. All are one group if that is no more than the
/// second-level cache bears, since there are few tiles.
pub(super) fn groups_of_shares(even: bool, heads: usize, bytes: usize) -> [i32; 2] {
    if heads.saturating_mul(bytes) <= SHARED_GROUP_BYTES {
        return [small(heads.max(1)), 1];
    }
    let group = if even { 1 } else { (SHARED_GROUP_BYTES / bytes.max(1)).clamp(1, SHARED_GROUP_HEADS) };
    [small(group), small(heads.div_ceil(group))]
}

/// As [`groups`], where tiles take turns.
///
/// Tiles of different heads never wait for each other. So the more heads a group has, the fewer tiles wait. But what the tiles
/// of a group access must stay in the second-level cache (benches/LOG.md, entry 18).
pub(super) fn groups_in_turns(even: bool, heads: usize, bytes: usize) -> [i32; 2] {
    let (most_bytes, least_heads) = TURNS[usize::from(even)];
    let group = (most_bytes / bytes.max(1)).clamp(least_heads, LAST_GROUP_HEADS).min(heads.max(1));
    [small(group), small(heads.max(1).div_ceil(group))]
}

/// The mask as kernels read it (`MaskEdges` in the sys crate's `params.rs`). Each query keeps one interval of keys, and neither
/// end of it falls from one query to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// The key at which query 0 stands. Between -2^30 and 2^30. Where the kernels know the lengths of sequences, and not the plan,
    /// they add what follows from these.
    pub diagonal_offset: i32,
    /// Number of keys kept before a query's own key: 0 to 2^30. 2^30 stands for all.
    pub window_left: i32,
    /// Number of keys kept after a query's own key: 0 to 2^30. 2^30 stands for all.
    pub window_right: i32,
    /// The first key that a query keeps is rounded up to a multiple of this: 1 to 2^30. It is 1 for a window. For chunks it is their
    /// number of keys, and `window_left` is one less: so a query keeps the keys of its own chunk.
    pub step: i32,
    /// Number of keys at the beginning that every query keeps, whatever `window_right` is: 0 to 2^30.
    pub prefix: i32,
}

impl Bounds {
    /// Of a problem's mask.
    pub fn of(problem: &ForwardProblem) -> Self {
        let dims = problem.dims();
        let band = band(problem, dims.seqlen_q, dims.seqlen_kv);
        let bound = |bound: Option<usize>| bound.map_or(UNBOUNDED, |keys| small(keys).min(UNBOUNDED));
        let step = band.chunk.map_or(1, small);
        // Where there is no mask, the distances of ALiBi need a diagonal all the same.
        let offset = match problem.alibi() {
            Some(_) => problem.alibi_offset(dims.seqlen_q, dims.seqlen_kv),
            None => band.offset,
        };
        Self {
            // |offset| < 2^30: the problem was checked.
            diagonal_offset: if problem.has_lengths() { 0 } else { i32::try_from(offset).unwrap_or(0) },
            window_left: if band.chunk.is_some() { step - 1 } else { bound(band.left) },
            window_right: bound(band.right),
            step,
            prefix: small(band.prefix),
        }
    }

    /// The first key that a query keeps, 0 or more. It may be past the last one: then the query keeps none.
    pub(super) fn first_key(&self, query: i64) -> i64 {
        let bound = query + i64::from(self.diagonal_offset) - i64::from(self.window_left);
        self.rounded_down((bound + i64::from(self.step) - 1).max(0))
    }

    /// The last key that a query keeps. It may be past the end of the keys, or below 0.
    pub(super) fn last_key(&self, query: i64) -> i64 {
        let bound = query + i64::from(self.diagonal_offset) + i64::from(self.window_right);
        bound.max(i64::from(self.prefix) - 1)
    }

    /// The first query that keeps a key, if any does, 0 or more.
    pub(super) fn first_query(&self, key: i64) -> i64 {
        let bound = key - i64::from(self.diagonal_offset) - i64::from(self.window_right);
        if key < i64::from(self.prefix) { 0 } else { bound.max(0) }
    }

    /// The last query whose first key is no later than a key.
    pub(super) fn last_query(&self, key: i64) -> i64 {
        self.rounded_down(key) - i64::from(self.diagonal_offset) + i64::from(self.window_left)
    }

    fn rounded_down(&self, key: i64) -> i64 {
        key - key % i64::from(self.step.max(1))
    }

    /// How kernels divide a number below 2^31 by `step`: twice the number times `multiplier`, without the lower 32 bits, is shifted
    /// to the right by `shift`. (The error of `multiplier` is below `2^shift`, so that of the quotient is below `1 / step`.)
    pub fn reciprocal(&self) -> (u32, i32) {
        let step = u64::from(self.step.max(1).unsigned_abs());
        let shift = step.next_power_of_two().trailing_zeros();
        // Below 2^32, since 2^shift is less than twice the step.
        let multiplier = (1u64 << (31 + shift)).div_ceil(step);
        (u32::try_from(multiplier).unwrap_or(u32::MAX), shift as i32)
    }
}

/// A count as `i32`. A count that does not fit saturates.
pub(super) fn small(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}

/// Prints the keys that a mask keeps, as part of a plan's text. `from +2000-256 to +2000+3` means that query `q` keeps the keys
/// from `q + 2000 - 256` to `q + 2000 + 3`.
pub(super) fn write_keys(f: &mut fmt::Formatter<'_>, mask: MaskClass, bounds: &Bounds) -> fmt::Result {
    let Bounds { diagonal_offset: offset, window_left: left, window_right: right, step, prefix } = *bounds;
    match mask {
        MaskClass::Full => return Ok(()),
        MaskClass::Blocks => return write!(f, ", blocks of lists"),
        MaskClass::Causal => return write!(f, ", keys to {offset:+}{right:+}"),
        MaskClass::Window if left == UNBOUNDED => write!(f, ", keys to {offset:+}{right:+}")?,
        MaskClass::Window if right == UNBOUNDED => write!(f, ", keys from {offset:+}{:+}", -left)?,
        MaskClass::Window => write!(f, ", keys from {offset:+}{:+} to {offset:+}{right:+}", -left)?,
    }
    if step > 1 {
        write!(f, ", chunks of {step}")?;
    }
    if prefix > 0 {
        write!(f, ", and the first {prefix}")?;
    }
    Ok(())
}

/// Problems by which the blocks that a kernel visits are compared with the mask's definition: sizes, class, mask, and the mask's
/// bounds.
#[cfg(test)]
pub(super) fn small_bands() -> impl Iterator<Item = (crate::problem::Dims, MaskClass, crate::Mask, Bounds)> {
    use crate::{Corner, DType, Mask, problem::Dims};
    let masks = [
        (MaskClass::Full, Mask::Full),
        (MaskClass::Causal, Mask::causal()),
        (MaskClass::Window, Mask::window(Some(5), Some(2))),
        (MaskClass::Window, Mask::window(None, Some(0))),
        (MaskClass::Window, Mask::chunked(1)),
        (MaskClass::Window, Mask::chunked(5)),
        (MaskClass::Window, Mask::Chunked { chunk: 12, corner: Corner::TopLeft }),
        (MaskClass::Window, Mask::prefix(3)),
        (MaskClass::Window, Mask::Prefix { keys: 11, corner: Corner::TopLeft }),
    ];
    [(1, 1), (13, 29), (29, 13), (16, 16), (30, 7)].into_iter().flat_map(move |(queries, keys)| {
        let dims = Dims::new(1, queries, 1, 8).with_seqlen_kv(keys);
        masks.map(|(class, mask)| {
            let problem = ForwardProblem::builder(DType::BF16, dims).mask(mask).build().unwrap();
            (dims, class, mask, Bounds::of(&problem))
        })
    })
}

#[cfg(test)]
#[path = "limit_tests.rs"]
mod limit_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn divided(number: i32, step: i32) -> i32 {
        let bounds = Bounds { diagonal_offset: 0, window_left: 0, window_right: 0, step, prefix: 0 };
        let (multiplier, shift) = bounds.reciprocal();
        let product = u64::from(2 * number.unsigned_abs()) * u64::from(multiplier);
        ((product >> 32) as u32 >> shift) as i32
    }

    #[test]
    fn kernels_divide_exactly_at_every_border() {
        for step in (1..=3000).chain([8191, 8192, 8193, 65537, (1 << 29) - 1, (1 << 30) - 1, 1 << 30]) {
            let most = i32::MAX / step;
            for quotient in [0, 1, 2, 3, most - 1, most].map(|quotient| quotient.min(most)) {
                let border = quotient * step;
                assert_eq!(divided(border, step), quotient, "{border} / {step}");
                assert_eq!(divided((border - 1).max(0), step), (border - 1).max(0) / step, "{border} - 1, / {step}");
            }
            assert_eq!(divided(i32::MAX, step), i32::MAX / step);
        }
    }

    proptest! {
        #[test]
        fn kernels_divide_exactly(number in 0..=i32::MAX, step in 1..=1i32 << 30) {
            prop_assert_eq!(divided(number, step), number / step);
        }
    }
}
