//! Cases with ALiBi and maximum logits, and ways in which a kernel may get slopes wrong.

use hopper_attention::{Corner, Mask};
use hopper_attention_verify::case::random::capped;

use crate::data::{Garbage, Input, Values};
use crate::modifiers::{self, PACKINGS, SIZES, dense, of_other_masks, packed, packed_of_other_masks};
use crate::packing::Packing;
use crate::problems::{Case, Grid};
use crate::sinks::Sinks;

pub use hopper_attention_verify::alibi::{Alibi, AlibiImage};

/// Slopes that are not there, and every kind of those that are.
fn kinds() -> impl Iterator<Item = Alibi> + Clone {
    Alibi::ALL.into_iter().filter(|kind| !kind.is_none())
}

/// Those of all modifiers. The corner says where the diagonal is, so there is one more of the other corner, and one with a prefix.
fn masks() -> [Mask; 6] {
    let [full, causal, window, short] = modifiers::masks();
    [full, causal, Mask::Causal { corner: Corner::TopLeft }, window, short, Mask::prefix(40)]
}

/// What a case may have beside slopes, in turns: a cap, sinks, the maximum logits.
fn with_others(case: Case, turn: usize, sinks: Sinks) -> Case {
    let case = if turn.is_multiple_of(4) { capped(case, ([15.0, 50.0][turn / 4 % 2], turn % 8 < 4)) } else { case };
    let sinks = if turn.is_multiple_of(5) { sinks } else { Sinks::None };
    Case { sinks, ..case.max_logits(turn % 3 != 1) }
}

/// Every kind with every mask: short and long rows, rows without keys, no keys at all, many keys for few queries. Some have no slopes
/// but the maximum logits.
pub fn cases(grid: Grid) -> Vec<Case> {
    let mut cases = Vec::new();
    for &(head_dim, head_dim_vo) in
        grid.pick(&[(64, 64), (128, 128)][..], &[(64, 64), (128, 128), (72, 72), (96, 96), (256, 256), (192, 128)])
    {
        for (mask, alibi) in masks().into_iter().flat_map(|mask| kinds().map(move |kind| (mask, kind))) {
            for size in SIZES {
                let turn = cases.len();
                let case = dense(turn, size, head_dim, mask).head_dim_vo(head_dim_vo);
                let mut case = with_others(case.alibi(alibi), turn, Sinks::Normal);
                case.lse = turn % 11 != 0;
                if turn % 7 == 6 {
                    case = case.alibi(Alibi::None).max_logits(true);
                }
                cases.push(case);
            }
        }
    }
    cases.extend(of_other_masks(kinds(), grid.pick(&[64][..], &[64, 96, 128, 192, 256]), |turn, case, alibi| {
        with_others(case.alibi(alibi), turn, Sinks::Normal)
    }));
    cases
}

/// The same of packed sequences and used lengths.
pub fn packed_cases(grid: Grid) -> Vec<Case> {
    let mut cases = Vec::new();
    for &head_dim in grid.pick(&[64][..], &[64, 96, 128, 192, 256]) {
        for (mask, alibi) in masks().into_iter().flat_map(|mask| kinds().map(move |kind| (mask, kind))) {
            for kind in PACKINGS {
                let turn = cases.len();
                let case = packed(turn, kind, head_dim, mask).alibi(alibi);
                cases.push(with_others(case, turn, Sinks::Mixed));
            }
        }
    }
    cases.extend(packed_of_other_masks(kinds(), grid.pick(&[64][..], &[64, 128]), |turn, case, alibi| {
        with_others(case.alibi(alibi), turn, Sinks::Mixed)
    }));
    cases
}

/// Maximum logits where a row of Q or K in every second head holds garbage: with caps and without, with slopes and without.
pub fn garbage_in_scores(mask: Mask, head_dim: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for (garbage, input) in Garbage::ALL.into_iter().flat_map(|garbage| [(garbage, Input::Q), (garbage, Input::K)]) {
        for (i, cap) in [0.0, 1.0, 50.0].into_iter().enumerate() {
            // Two seeds have garbage in all of a row, and in one column.
            for seed in [8201, 8202] {
                let alibi = [Alibi::None, Alibi::Standard, Alibi::Mixed][(i + cases.len() / 2) % 3];
                let case = Case::new(70, 150, head_dim, mask).heads(2, 4, 2).softcap(cap).alibi(alibi).max_logits(true);
                cases.push(Case { values: Values::Garbage(input, garbage), seed, ..case });
            }
        }
    }
    cases
}

/// Maximum logits where no sequence has a query: no rows at all, rows of no sequence, and queries of which none is used.
pub fn empty_sequences(head_dim: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, fill_gaps) in [(0, false), (0, true), (40, false), (40, true)] {
        let case = Case::new(rows, 60, head_dim, Mask::Full).heads(3, 4, 2).max_logits(true);
        let packed = Packing {
            cu_seqlens_q: Some(vec![0; 4]),
            cu_seqlens_kv: Some(vec![0, 10, 10, 60]),
            fill_gaps,
            ..Packing::default()
        };
        let unused =
            Packing { seqused_q: Some(vec![0; 3]), seqused_kv: Some(vec![60, 0, 7]), fill_gaps, ..Packing::default() };
        for (packing, alibi) in [(packed.clone(), Alibi::None), (packed, Alibi::Mixed), (unused, Alibi::Standard)] {
            cases.push(Case { packing, ..case.clone().alibi(alibi) });
        }
    }
    cases
}

/// A way to get slopes wrong: what is wrong, and the slope that is taken in place of one. `scale` is the softmax scale, and `next`
/// the slope of the next head.
pub type Mistake = (&'static str, fn(slope: f64, scale: f64, next: f64) -> f64);

/// Ways to get slopes wrong that the tolerance must notice.
pub const MISTAKES: [Mistake; 6] = [
    ("forgotten", |_, _, _| 0.0),
    ("with the other sign", |slope, _, _| -slope),
    ("multiplied by the scale", |slope, scale, _| slope * scale),
    ("in base 2", |slope, _, _| slope * std::f64::consts::LOG2_E),
    ("too large by 2%", |slope, _, _| slope * 1.02),
    ("of the next head", |_, _, next| next),
];
