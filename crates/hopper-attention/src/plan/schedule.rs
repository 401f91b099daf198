//! In which order a kernel's tiles are walked, and what a mask keeps, as kernels read it.

use std::fmt;

use crate::arch::{Arch, DeviceFacts, MaskClass};
use crate::problem::ForwardProblem;
use crate::table::KernelInfo;

/// What kernels read as "without bound". Lengths together stay below it, so it excludes nothing.
pub(crate) const UNBOUNDED: i32 = 1 << 30;
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
    let band = problem.mask().band(dims.seqlen_q, dims.seqlen_kv);
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
