//! Cases with attention sinks, and ways in which a kernel may get a sink wrong.

use crate::modifiers::{PACKINGS, SIZES, dense, masks, of_other_masks, packed, packed_of_other_masks};
use crate::problems::{Case, Grid};

pub use hopper_attention_verify::sinks::{Sinks, SinksImage};

/// Sinks that are not there, and every kind of those that are.
fn kinds() -> impl Iterator<Item = Sinks> + Clone {
    Sinks::ALL.into_iter().filter(|kind| !kind.is_none())
}

/// Every kind with every mask: short and long rows, rows without keys, no keys at all, many keys for few queries.
pub fn cases(grid: Grid) -> Vec<Case> {
    let mut cases = Vec::new();
    for &head_dim in grid.pick(&[64, 128][..], &[64, 128, 72, 192, 256]) {
        for (mask, sinks) in masks().into_iter().flat_map(|mask| kinds().map(move |kind| (mask, kind))) {
            for size in SIZES {
                let turn = cases.len();
                cases.push(Case { sinks, lse: turn % 5 != 0, ..dense(turn, size, head_dim, mask) });
            }
        }
    }
    cases.extend(of_other_masks(kinds(), grid.pick(&[64][..], &[64, 128, 256]), |turn, case, sinks| Case {
        sinks,
        lse: turn % 5 != 0,
        ..case
    }));
    cases
}

/// The same of packed sequences and used lengths.
pub fn packed_cases(grid: Grid) -> Vec<Case> {
    let mut cases = Vec::new();
    for &head_dim in grid.pick(&[64][..], &[64, 96, 128, 192, 256]) {
        for (mask, sinks) in masks().into_iter().flat_map(|mask| kinds().map(move |kind| (mask, kind))) {
            for kind in PACKINGS {
                cases.push(Case { sinks, ..packed(cases.len(), kind, head_dim, mask) });
            }
        }
    }
    cases.extend(packed_of_other_masks(kinds(), grid.pick(&[64][..], &[64, 96, 128, 192, 256]), |_, case, sinks| {
        Case { sinks, ..case }
    }));
    cases
}

/// A way to get sinks wrong: what is wrong, and the sink that is taken in place of one. `scale` is the softmax scale.
pub type Mistake = (&'static str, fn(f64, f64) -> f64);

/// All of them. The tolerance must notice each.
pub const MISTAKES: [Mistake; 5] = [
    ("forgotten", |_, _| f64::NEG_INFINITY),
    ("added twice", |sink, _| sink + std::f64::consts::LN_2),
    ("multiplied by the scale", |sink, scale| sink * scale),
    ("in base 2", |sink, _| sink * std::f64::consts::LN_2),
    ("with the other sign", |sink, _| -sink),
];
