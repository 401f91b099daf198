//! Cases with an additive bias, and ways in which a computation may get one wrong.

use hopper_attention::{Corner, Mask};
use hopper_attention_verify::case::random::capped;

use crate::alibi::Alibi;
use crate::blocks::{self, Blocks};
use crate::modifiers::{self, PACKINGS, SIZES, dense, of_other_masks, packed, packed_of_other_masks};
use crate::problems::{Case, Grid};
use crate::sinks::Sinks;

pub use hopper_attention_verify::bias::{Bias, BiasImage};

/// Those of all modifiers, and one of the other corner.
fn masks() -> [Mask; 5] {
    let [full, causal, window, short] = modifiers::masks();
    [full, causal, Mask::Causal { corner: Corner::TopLeft }, window, short]
}

/// Every bias with every mask and size. Some have a cap, ALiBi, sinks or lists of blocks beside it.
pub fn cases(grid: Grid) -> Vec<Case> {
    let mut cases = Vec::new();
    for &head_dim in grid.pick(&[64][..], &[64, 72, 128]) {
        for (mask, bias) in masks().into_iter().flat_map(|mask| Bias::all().map(move |bias| (mask, bias))) {
            for size in SIZES {
                let turn = cases.len();
                let case = dense(turn, size, head_dim, mask).bias(bias).max_logits(turn % 3 == 1);
                let case = if turn.is_multiple_of(4) {
                    capped(case, ([15.0, 50.0][turn / 4 % 2], turn % 8 < 4))
                } else {
                    case
                };
                let case = if turn % 5 == 2 { case.alibi(Alibi::ALL[turn / 5 % Alibi::ALL.len()]) } else { case };
                let case = if turn % 7 == 3 { case.blocks(Blocks::ALL[turn / 7 % Blocks::ALL.len()]) } else { case };
                let sinks = if turn % 5 == 1 { Sinks::Mixed } else { Sinks::None };
                cases.push(Case { sinks, lse: turn % 11 != 0, ..case });
            }
        }
    }
    // Every seventh bias has all forms and types in the end: 7 divides none of their numbers.
    let some = Bias::all().step_by(7);
    cases.extend(of_other_masks(some, grid.pick(&[64][..], &[64, 96, 128, 192, 256]), |turn, case, bias| {
        let case = case.bias(bias).max_logits(turn % 3 == 1);
        if turn % 5 == 2 { case.alibi(Alibi::Standard) } else { case }
    }));
    cases
}

/// The same of packed sequences and used lengths.
pub fn packed_cases(grid: Grid) -> Vec<Case> {
    let mut cases = Vec::new();
    for &head_dim in grid.pick(&[64][..], &[64, 72, 128]) {
        for (mask, bias) in masks().into_iter().flat_map(|mask| Bias::all().map(move |bias| (mask, bias))) {
            for kind in PACKINGS {
                let turn = cases.len();
                let case = packed(turn, kind, head_dim, mask).bias(bias).max_logits(turn % 3 == 1);
                let case = if turn.is_multiple_of(4) { capped(case, (50.0, turn % 8 < 4)) } else { case };
                let case = if turn % 5 == 2 { case.alibi(Alibi::ALL[turn / 5 % Alibi::ALL.len()]) } else { case };
                let case = if turn % 7 == 3 { case.dropout(0.3) } else { case };
                let sinks = if turn % 5 == 1 { Sinks::Mixed } else { Sinks::None };
                cases.push(Case { sinks, lse: turn % 11 != 0, ..case });
            }
        }
    }
    let some = Bias::all().skip(3).step_by(11);
    cases.extend(packed_of_other_masks(some, grid.pick(&[64][..], &[64, 96, 128, 192, 256]), |_, case, bias| {
        case.bias(bias)
    }));
    cases
}

/// The same beside lists of blocks, of which some have other modifiers, too.
pub fn listed_cases(grid: Grid) -> Vec<Case> {
    // (The numbers of biases and of modifiers have no divisor in common.)
    blocks::modified_cases(grid).into_iter().zip(Bias::all().cycle()).map(|(case, bias)| case.bias(bias)).collect()
}

/// What a wrong bias is made of: the numbers of a bias that has every dimension, and where they are.
pub struct Numbers<'a> {
    /// `[batch, heads, queries, keys]`.
    pub shape: [usize; 4],
    /// The numbers, in row-major order.
    pub values: &'a [f64],
    /// The softmax scale.
    pub scale: f64,
}

impl Numbers<'_> {
    /// The number at a place, counted in a circle.
    fn at(&self, place: [usize; 4]) -> f64 {
        self.values[(0..4).fold(0, |at, axis| at * self.shape[axis] + place[axis] % self.shape[axis])]
    }
}

/// A way to get a bias wrong: what is wrong, and the number that is taken in place of the one at a place.
pub type Mistake = (&'static str, fn(&Numbers<'_>, [usize; 4]) -> f64);

/// Ways to get a bias wrong that the tolerance must notice.
pub const MISTAKES: [Mistake; 10] = [
    ("forgotten", |_, _| 0.0),
    ("with the other sign", |of, place| -of.at(place)),
    ("multiplied by the scale", |of, place| of.scale * of.at(place)),
    ("in base 2", |of, place| std::f64::consts::LOG2_E * of.at(place)),
    ("too large by 2%", |of, place| 1.02 * of.at(place)),
    ("of the first batch entry", |of, [_, head, query, key]| of.at([0, head, query, key])),
    ("of the first head", |of, [batch, _, query, key]| of.at([batch, 0, query, key])),
    ("of the first query", |of, [batch, head, _, key]| of.at([batch, head, 0, key])),
    ("of the next query", |of, [batch, head, query, key]| of.at([batch, head, query + 1, key])),
    ("of the next key", |of, [batch, head, query, key]| of.at([batch, head, query, key + 1])),
];
