//! Cases with a cap of the scores, and ways in which a kernel may get it wrong.

use hopper_attention::BackwardProblem;
use hopper_attention::reference::{BackwardPlain, Tensor};
use hopper_attention_verify::case::random::{CAPS, capped};

use crate::data::Values;
use crate::inputs::Class;
use crate::modifiers::{PACKINGS, SIZES, dense, masks, of_other_masks, packed, packed_of_other_masks};
use crate::mutations::places;
use crate::problems::{Case, Grid};
use crate::sinks::Sinks;

/// Every cap with every mask, scores that it hardly bends and scores that it cuts off: short and long rows, rows without keys, no
/// keys at all, many keys for few queries, with sinks and without.
pub fn cases(grid: Grid) -> Vec<Case> {
    let mut cases = Vec::new();
    for &(head_dim, head_dim_vo) in
        grid.pick(&[(64, 64), (128, 128)][..], &[(64, 64), (128, 128), (72, 72), (96, 96), (256, 256), (192, 128)])
    {
        for (mask, cap) in masks().into_iter().flat_map(|mask| CAPS.map(|cap| (mask, cap))) {
            for size in SIZES {
                let turn = cases.len();
                let case = dense(turn, size, head_dim, mask).head_dim_vo(head_dim_vo);
                let mut case = capped(case, (cap, turn % 7 < 4));
                case.sinks = if turn % 5 == 0 { Sinks::Normal } else { Sinks::None };
                case.lse = turn % 11 != 0;
                cases.push(case);
            }
        }
    }
    cases.extend(of_other_masks(
        CAPS.into_iter(),
        grid.pick(&[64][..], &[64, 96, 128, 192, 256]),
        |turn, case, cap| Case { lse: turn % 5 != 0, ..capped(case, (cap, turn % 7 < 4)) },
    ));
    cases
}

/// The same of packed sequences and used lengths.
pub fn packed_cases(grid: Grid) -> Vec<Case> {
    let mut cases = Vec::new();
    for &head_dim in grid.pick(&[64][..], &[64, 96, 128, 192, 256]) {
        for (mask, cap) in masks().into_iter().flat_map(|mask| CAPS.map(|cap| (mask, cap))) {
            for kind in PACKINGS {
                let turn = cases.len();
                let case = packed(turn, kind, head_dim, mask);
                let mut case = capped(case, (cap, turn % 7 < 4));
                case.sinks = if turn % 5 == 0 { Sinks::Mixed } else { Sinks::None };
                cases.push(case);
            }
        }
    }
    cases.extend(packed_of_other_masks(CAPS.into_iter(), grid.pick(&[64][..], &[64, 128]), |turn, case, cap| {
        capped(case, (cap, turn % 7 < 4))
    }));
    cases
}

/// Rows of many blocks whose scores change from block to block: near the cap where the last keys are and far from it where the first ones
/// are (a forward goes from the last to the first), the other way round, and large ones anywhere.
pub fn changing_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let [near_to_far, far_to_near] = [(40, 0), (0, 40)].map(|(first, last)| Values::Sloped { first, last });
    let below = Values::Sloped { first: -40, last: 0 };
    let values = [near_to_far, far_to_near, below, Values::Like(Class::Peaky), Values::Like(Class::Late)];
    for (head_dim, mask) in [64, 96, 128, 192, 256].into_iter().flat_map(|dim| masks().map(|mask| (dim, mask))) {
        for values in values {
            for cap in [15.0, 50.0] {
                let case = Case::new(150, 1100, head_dim, mask).heads(1, 2, 1).softcap(cap);
                cases.push(Case { values, ..case });
            }
        }
    }
    cases
}

/// A way to get a cap wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// None: the right results.
    None,
    /// No cap.
    Forgotten,
    /// Hidden scores are capped like others. So they are -c, and not -inf.
    AfterTheMask,
    /// Products are capped before they are scaled.
    BeforeTheScale,
    /// The tangent has an argument that is too large by 2%.
    Steeper,
    /// Scores are capped at a number that is too large by 2%.
    Higher,
    /// Gradients are not multiplied by `1 - tanh^2`.
    WithoutSlope,
    /// Gradients are multiplied by `1 - tanh`.
    AnotherSlope,
}

impl Mistake {
    /// All that change O.
    pub const OF_FORWARD: [Self; 5] =
        [Self::Forgotten, Self::AfterTheMask, Self::BeforeTheScale, Self::Steeper, Self::Higher];
    /// Those that change gradients alone.
    pub const OF_BACKWARD: [Self; 2] = [Self::WithoutSlope, Self::AnotherSlope];

    /// A score, and the derivative that its gradient is multiplied by.
    fn score(self, cap: f64, scale: f64, product: f64) -> (f64, f64) {
        let (c, x) = match self {
            Self::Forgotten => return (scale * product, 1.0),
            Self::BeforeTheScale => {
                let t = (product / cap).tanh();
                return (scale * cap * t, 1.0 - t * t);
            }
            Self::Steeper => (cap, 1.02 * scale * product / cap),
            Self::Higher => (1.02 * cap, scale * product / cap),
            _ => (cap, scale * product / cap),
        };
        let slope = match self {
            Self::WithoutSlope => 1.0,
            Self::AnotherSlope => 1.0 - x.tanh(),
            // Not `1 - tanh^2`, so that this is another computation than the oracle's derivative.
            _ => x.cosh().powi(-2),
        };
        (c * x.tanh(), slope)
    }
}

/// O, the LSE and the gradients, in f64, with a mistake. Of a problem without packed tensors, used lengths and sinks.
pub fn computed(
    problem: &BackwardProblem,
    [q, k, v, d_o]: [&Tensor; 4],
    d_lse: Option<&[f64]>,
    mistake: Mistake,
) -> (Tensor, Vec<f64>, BackwardPlain) {
    let (dims, forward) = (problem.dims(), problem.forward());
    let (cap, scale) = (f64::from(forward.softcap()), f64::from(problem.softmax_scale()));
    let [mut o, mut d_q] = [forward.o_shape(), problem.d_q_shape()].map(Tensor::zeros);
    let [mut d_k, mut d_v] = [problem.d_k_shape(), problem.d_v_shape()].map(Tensor::zeros);
    let mut lse = Vec::new();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let add = |out: &mut [f64], factor: f64, x: &[f64]| out.iter_mut().zip(x).for_each(|(out, x)| *out += factor * x);
    for (i, (batch, head, query)) in places(forward.lse_shape()).enumerate() {
        let of_kv = head / forward.group_size();
        let score = |key: usize| {
            let product = dot(q.row(batch, query, head), k.row(batch, key, of_kv));
            let kept = problem.mask().keep(query, key, dims.seqlen_q, dims.seqlen_kv);
            match (kept, mistake) {
                (true, _) => Some((key, mistake.score(cap, scale, product))),
                (false, Mistake::AfterTheMask) => Some((key, (-cap, 0.0))),
                (false, _) => None,
            }
        };
        let scores: Vec<(usize, (f64, f64))> = (0..dims.seqlen_kv).filter_map(score).collect();
        let max = scores.iter().fold(f64::NEG_INFINITY, |max, (_, (score, _))| max.max(*score));
        if scores.is_empty() {
            lse.push(f64::NEG_INFINITY);
            continue;
        }
        let of_row = max + scores.iter().map(|(_, (score, _))| (score - max).exp()).sum::<f64>().ln();
        lse.push(of_row);
        for (key, (score, _)) in &scores {
            add(o.row_mut(batch, query, head), (score - of_row).exp(), v.row(batch, *key, of_kv));
        }
        let d_o_row = d_o.row(batch, query, head);
        let delta = dot(d_o_row, o.row(batch, query, head)) - d_lse.map_or(0.0, |d_lse| d_lse[i]);
        for (key, (score, slope)) in scores {
            let p = (score - of_row).exp();
            let d_s = scale * p * (dot(d_o_row, v.row(batch, key, of_kv)) - delta) * slope;
            add(d_q.row_mut(batch, query, head), d_s, k.row(batch, key, of_kv));
            add(d_k.row_mut(batch, key, of_kv), d_s, q.row(batch, query, head));
            add(d_v.row_mut(batch, key, of_kv), p, d_o_row);
        }
    }
    (o, lse, BackwardPlain { d_q, d_k, d_v, d_sinks: vec![], d_bias: vec![] })
}
