//! What the cases of score modifiers have in common: masks, sizes, heads, packings, seeds.

use hopper_attention::{Corner, Mask};

use crate::packing::{Kind, Packing};
use crate::problems::Case;

/// Masks that bite on lengths of a few hundred.
pub fn masks() -> [Mask; 4] {
    [Mask::Full, Mask::causal(), Mask::window(Some(70), Some(9)), Mask::window(Some(127), Some(0))]
}

/// Masks beside these: chunks and prefixes, and those of the other corner.
const OTHER_MASKS: [Mask; 7] = [
    Mask::chunked(90),
    Mask::Chunked { chunk: 48, corner: Corner::TopLeft },
    Mask::prefix(60),
    Mask::Prefix { keys: 130, corner: Corner::TopLeft },
    Mask::Causal { corner: Corner::TopLeft },
    Mask::Window { left: Some(70), right: Some(9), corner: Corner::TopLeft },
    Mask::Window { left: Some(5), right: None, corner: Corner::TopLeft },
];

/// Each of the other masks with each kind of a modifier once. Sizes and head dims take turns, so that these are few.
pub fn of_other_masks<K>(
    kinds: impl Iterator<Item = K> + Clone,
    head_dims: &[usize],
    modified: impl Fn(usize, Case, K) -> Case,
) -> Vec<Case> {
    with_other_masks(kinds, &SIZES, head_dims, dense, modified)
}

/// The same of packed sequences and used lengths.
pub fn packed_of_other_masks<K>(
    kinds: impl Iterator<Item = K> + Clone,
    head_dims: &[usize],
    modified: impl Fn(usize, Case, K) -> Case,
) -> Vec<Case> {
    with_other_masks(kinds, &PACKINGS, head_dims, packed, modified)
}

/// The cases that `made` makes of each turn, in which sizes, or kinds of packing, take turns as well.
fn with_other_masks<K, S: Copy>(
    kinds: impl Iterator<Item = K> + Clone,
    sizes: &[S],
    head_dims: &[usize],
    made: impl Fn(usize, S, usize, Mask) -> Case,
    modified: impl Fn(usize, Case, K) -> Case,
) -> Vec<Case> {
    let all = OTHER_MASKS.into_iter().flat_map(|mask| kinds.clone().map(move |kind| (mask, kind)));
    let of = |(turn, (mask, kind)): (usize, (Mask, K))| {
        // Kinds may be as many as sizes. So each mask begins with another size.
        let size = sizes[(turn + turn / sizes.len()) % sizes.len()];
        modified(turn, made(turn, size, head_dims[turn % head_dims.len()], mask), kind)
    };
    all.enumerate().map(of).collect()
}

/// Queries and keys: short and long rows, rows without keys, many keys for few queries, no keys at all.
pub const SIZES: [(usize, usize); 6] = [(197, 290), (300, 140), (1, 700), (64, 1500), (130, 1), (40, 0)];

/// Packed sequences, with used lengths, and used lengths of dense keys.
pub const PACKINGS: [Kind; 3] = [
    Kind { packed: [true; 2], used: [false; 2], fill_gaps: true },
    Kind { packed: [true; 2], used: [true; 2], fill_gaps: false },
    Kind { packed: [false; 2], used: [false, true], fill_gaps: true },
];

/// A dense case, with the batch, the key heads and the seed of its turn.
pub fn dense(turn: usize, (seqlen_q, seqlen_kv): (usize, usize), head_dim: usize, mask: Mask) -> Case {
    let case = Case::new(seqlen_q, seqlen_kv, head_dim, mask).heads(1 + turn % 2, 6, [1, 2, 6][turn % 3]);
    Case { seed: turn as u64 / 2, ..case }
}

/// The same of packed sequences and used lengths.
pub fn packed(turn: usize, kind: Kind, head_dim: usize, mask: Mask) -> Case {
    let is_packed = kind.packed == [true; 2];
    let batch = if is_packed { [4, 13, 70, 1200][turn % 4] } else { 3 };
    let rows = if is_packed { 700 } else { 150 };
    let case = Case::new(rows, rows, head_dim, mask).heads(batch, 4, [1, 2, 4][turn % 3]);
    let seed = turn as u64 / 2;
    Case { seed, packing: Packing::random(kind, batch, [rows; 2], seed), ..case }
}
