//! Cases with dropout, and ways in which a pass may get it wrong.

use hopper_attention::reference::{DropoutMask, Tensor};
use hopper_attention::{BackwardProblem, Mask};
use hopper_attention_verify::case::random::{DROPOUTS, capped};

use crate::alibi::Alibi;
use crate::blocks::Blocks;
use crate::modifiers::{self, PACKINGS, SIZES, dense, of_other_masks, packed, packed_of_other_masks};
use crate::packing::Packing;
use crate::problems::{Case, Grid};
use crate::sinks::Sinks;

/// What a case may have beside dropout, in turns: a cap, ALiBi, sinks, the maximum logits, lists of blocks.
fn with_others(case: Case, turn: usize) -> Case {
    let case = if turn.is_multiple_of(4) { capped(case, ([15.0, 50.0][turn / 4 % 2], turn % 8 < 4)) } else { case };
    let sinks = if turn.is_multiple_of(5) { [Sinks::Normal, Sinks::Mixed][turn / 5 % 2] } else { Sinks::None };
    let alibi = if turn.is_multiple_of(3) { [Alibi::Standard, Alibi::PerBatch][turn / 3 % 2] } else { Alibi::None };
    let dense = case.packing == Packing::default();
    let blocks = if turn % 7 == 3 && dense { Blocks::Random(50) } else { Blocks::None };
    Case { sinks, ..case.alibi(alibi).blocks(blocks).max_logits(turn % 6 == 1) }
}

/// Every probability with every mask: short and long rows, rows without keys, no keys at all, many keys for few queries.
pub fn cases(grid: Grid) -> Vec<Case> {
    let mut cases = Vec::new();
    for &(head_dim, head_dim_vo) in
        grid.pick(&[(64, 64), (128, 128)][..], &[(64, 64), (128, 128), (72, 72), (96, 96), (256, 256), (192, 128)])
    {
        for (mask, p) in modifiers::masks().into_iter().flat_map(|mask| DROPOUTS.map(|p| (mask, p))) {
            for size in SIZES {
                let turn = cases.len();
                let case = dense(turn, size, head_dim, mask).head_dim_vo(head_dim_vo).dropout(p);
                cases.push(Case { lse: turn % 11 != 0, ..with_others(case, turn) });
            }
        }
    }
    cases.extend(of_other_masks(
        DROPOUTS.into_iter(),
        grid.pick(&[64][..], &[64, 96, 128, 192, 256]),
        |turn, case, p| with_others(case.dropout(p), turn),
    ));
    cases
}

/// The same of packed sequences and used lengths.
pub fn packed_cases(grid: Grid) -> Vec<Case> {
    let mut cases = Vec::new();
    for &head_dim in grid.pick(&[64][..], &[64, 96, 128, 192, 256]) {
        for (mask, p) in modifiers::masks().into_iter().flat_map(|mask| DROPOUTS.map(|p| (mask, p))) {
            for kind in PACKINGS {
                let turn = cases.len();
                cases.push(with_others(packed(turn, kind, head_dim, mask).dropout(p), turn));
            }
        }
    }
    cases.extend(packed_of_other_masks(DROPOUTS.into_iter(), grid.pick(&[64][..], &[64, 128]), |turn, case, p| {
        with_others(case.dropout(p), turn)
    }));
    cases
}

/// A way to get dropout wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// None: the right computation.
    None,
    /// The forward pass drops nothing.
    NothingDroppedInO,
    /// The gradient of the scores drops nothing.
    NothingDroppedInDs,
    /// The gradient of V drops nothing.
    NothingDroppedInDv,
    /// The weights that stay are not multiplied.
    NoFactor,
    /// The weights that stay are divided by their own sum, and the LSE is that of their scores.
    LseOfTheKept,
    /// The mask is that of the next head.
    NextHead,
    /// The mask is that of the next batch entry.
    NextBatch,
    /// The high half of the offset is not read.
    HalfAnOffset,
    /// The halves of a word are in the other order.
    HalvesSwapped,
    /// delta is made of an O without dropout.
    DeltaWithoutDropout,
}

impl Mistake {
    /// Each mistake, and the results that it spoils.
    pub const ALL: [(Self, &'static [&'static str]); 10] = [
        (Self::NothingDroppedInO, &["o", "d_q", "d_k"]),
        (Self::NothingDroppedInDs, &["d_q", "d_k"]),
        (Self::NothingDroppedInDv, &["d_v"]),
        (Self::NoFactor, &["o", "d_q", "d_k", "d_v"]),
        (Self::LseOfTheKept, &["o", "lse", "d_q", "d_k", "d_v"]),
        (Self::NextHead, &["o", "d_q", "d_k", "d_v"]),
        (Self::NextBatch, &["o", "d_q", "d_k", "d_v"]),
        (Self::HalfAnOffset, &["o", "d_q", "d_k", "d_v"]),
        (Self::HalvesSwapped, &["o", "d_q", "d_k", "d_v"]),
        (Self::DeltaWithoutDropout, &["d_q", "d_k"]),
    ];
}

/// What a computation with a mistake makes of a case.
pub struct Computed {
    /// The output.
    pub o: Tensor,
    /// The log-sum-exp.
    pub lse: Vec<f64>,
    /// dQ, dK and dV.
    pub gradients: [Tensor; 3],
}

/// Both passes in f64, pair by pair, with a mistake. The problem has a mask and dropout, and nothing else.
pub fn computed(
    problem: &BackwardProblem,
    [q, k, v, d_o]: [&Tensor; 4],
    d_lse: Option<&[f64]>,
    mut state: [i32; 4],
    mistake: Mistake,
) -> Computed {
    let (dims, mask, scale): (_, Mask, _) = (problem.dims(), problem.mask(), f64::from(problem.softmax_scale()));
    if mistake == Mistake::HalfAnOffset {
        state[3] = 0;
    }
    let drops = DropoutMask::of(problem.forward(), Some(state)).expect("dropout");
    let factor =
        if mistake == Mistake::NoFactor { 1.0 } else { problem.forward().dropout().expect("dropout").factor() };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut o = Tensor::zeros(problem.forward().o_shape());
    let mut lse = vec![f64::NEG_INFINITY; problem.d_lse_shape().iter().product()];
    let [mut d_q, mut d_k, mut d_v] = [q, k, v].map(|like| Tensor::zeros(like.shape()));
    for i in 0..lse.len() {
        let (query, head, batch) =
            (i % dims.seqlen_q, i / dims.seqlen_q % dims.heads_q, i / dims.seqlen_q / dims.heads_q);
        let head_kv = head / problem.forward().group_size();
        let keys: Vec<usize> =
            (0..dims.seqlen_kv).filter(|&key| mask.keep(query, key, dims.seqlen_q, dims.seqlen_kv)).collect();
        if keys.is_empty() {
            continue;
        }
        let drop_head = if mistake == Mistake::NextHead { (head + 1) % dims.heads_q } else { head };
        let drop_batch = if mistake == Mistake::NextBatch { (batch + 1) % dims.batch } else { batch };
        let drop_query = if mistake == Mistake::HalvesSwapped { query ^ 8 } else { query };
        let z: Vec<f64> = keys
            .iter()
            .map(|&key| if drops.keeps(drop_batch, drop_head, drop_query, key) { factor } else { 0.0 })
            .collect();
        let weights: Vec<f64> = keys
            .iter()
            .map(|&key| (scale * dot(q.row(batch, query, head), k.row(batch, key, head_kv))).exp())
            .collect();
        let counted = |n: usize| mistake != Mistake::LseOfTheKept || z[n] != 0.0;
        let sum: f64 = (0..keys.len()).filter(|&n| counted(n)).map(|n| weights[n]).sum();
        lse[i] = sum.ln();
        if sum == 0.0 {
            continue;
        }
        let weighted = |z: &dyn Fn(usize) -> f64| {
            let mut row = vec![0.0; dims.head_dim_vo];
            for (n, &key) in keys.iter().enumerate() {
                let p = weights[n] / sum * z(n);
                row.iter_mut().zip(v.row(batch, key, head_kv)).for_each(|(o, v)| *o += p * v);
            }
            row
        };
        let all = |missing: bool| move |right: f64| if missing { 1.0 } else { right };
        let of_o = all(mistake == Mistake::NothingDroppedInO);
        let row = weighted(&|n| of_o(z[n]));
        o.row_mut(batch, query, head).copy_from_slice(&row);
        let of_delta = all(mistake == Mistake::DeltaWithoutDropout);
        let row = if mistake == Mistake::DeltaWithoutDropout { weighted(&|n| of_delta(z[n])) } else { row };
        let d_o_row = d_o.row(batch, query, head);
        let delta = dot(&row, d_o_row) - d_lse.map_or(0.0, |d_lse| d_lse[i]);
        let (of_ds, of_dv) = (all(mistake == Mistake::NothingDroppedInDs), all(mistake == Mistake::NothingDroppedInDv));
        for (n, &key) in keys.iter().enumerate() {
            let p = weights[n] / sum;
            let d_s = scale * p * (of_ds(z[n]) * dot(d_o_row, v.row(batch, key, head_kv)) - delta);
            let add = |to: &mut [f64], factor: f64, from: &[f64]| {
                to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
            };
            add(d_q.row_mut(batch, query, head), d_s, k.row(batch, key, head_kv));
            add(d_k.row_mut(batch, key, head_kv), d_s, q.row(batch, query, head));
            add(d_v.row_mut(batch, key, head_kv), p * of_dv(z[n]), d_o_row);
        }
    }
    Computed { o, lse, gradients: [d_q, d_k, d_v] }
}
