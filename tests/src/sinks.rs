//! Cases with attention sinks, and ways in which a kernel may get a sink wrong.

use hopper_attention::Mask;

use crate::packing::{Kind, Packing};
use crate::problems::{Case, Grid};

pub use hopper_attention_verify::sinks::{Sinks, SinksImage};

/// Sinks that are not there, and every kind of those that are.
fn kinds() -> impl Iterator<Item = Sinks> + Clone {
    Sinks::ALL.into_iter().filter(|kind| !kind.is_none())
}

fn masks() -> [Mask; 4] {
    [Mask::Full, Mask::causal(), Mask::window(Some(70), Some(9)), Mask::window(Some(127), Some(0))]
}

/// Every kind with every mask: short and long rows, rows without keys, no keys at all, many keys for few queries.
pub fn cases(grid: Grid) -> Vec<Case> {
    let mut cases = Vec::new();
    let sizes = [(197, 290), (300, 140), (1, 700), (64, 1500), (130, 1), (40, 0)];
    for &head_dim in grid.pick(&[64, 128][..], &[64, 128, 72]) {
        for (mask, sinks) in masks().into_iter().flat_map(|mask| kinds().map(move |kind| (mask, kind))) {
            for (seqlen_q, seqlen_kv) in sizes {
                let turn = cases.len();
                let mut case =
                    Case::new(seqlen_q, seqlen_kv, head_dim, mask).heads(1 + turn % 2, 6, [1, 2, 6][turn % 3]);
                case.sinks = sinks;
                case.seed = turn as u64 / 2;
                case.lse = turn % 5 != 0;
                cases.push(case);
            }
        }
    }
    cases
}

/// The same of packed sequences and used lengths.
pub fn packed_cases(grid: Grid) -> Vec<Case> {
    let both = [true; 2];
    let packings = [
        Kind { packed: both, used: [false; 2], fill_gaps: true },
        Kind { packed: both, used: both, fill_gaps: false },
        Kind { packed: [false; 2], used: [false, true], fill_gaps: true },
    ];
    let mut cases = Vec::new();
    for &head_dim in grid.pick(&[64][..], &[64, 128]) {
        for (mask, sinks) in masks().into_iter().flat_map(|mask| kinds().map(move |kind| (mask, kind))) {
            for kind in packings {
                let turn = cases.len();
                let batch = if kind.packed == both { [4, 13, 70, 1200][turn % 4] } else { 3 };
                let rows = if kind.packed == both { 700 } else { 150 };
                let mut case = Case::new(rows, rows, head_dim, mask).heads(batch, 4, [1, 2, 4][turn % 3]);
                case.sinks = sinks;
                case.seed = turn as u64 / 2;
                case.packing = Packing::random(kind, batch, [rows; 2], case.seed);
                cases.push(case);
            }
        }
    }
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
