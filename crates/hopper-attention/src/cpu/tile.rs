//! One task: a block of queries against all keys that it keeps, with an online softmax.

use super::matmul::{Matrix, matmul};
use super::{BLOCK_Q, Inputs};
use crate::tensor::HostRef;
use crate::{Band, Element, ForwardProblem, Operand};

/// Keys in a block: a block of K, V and the scores stay in the second-level cache.
const BLOCK_KV: usize = 256;

/// Queries `first..first + queries` of one head.
pub(super) struct Task {
    pub batch: usize,
    pub head: usize,
    pub first: usize,
    pub queries: usize,
}

/// What a task computes.
pub(super) struct Rows<Out> {
    /// `[queries, head_dim_vo]`.
    pub o: Vec<Out>,
    /// `[queries]`.
    pub lse: Vec<f32>,
}

/// Buffers that a thread uses again for its next task.
#[derive(Default)]
pub(super) struct Scratch {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// Scores, then probabilities that are not yet divided by their row's sum: `[queries, keys]`.
    scores: Vec<f32>,
    /// Sums of probabilities times values: `[queries, head_dim_vo]`.
    sums: Vec<f32>,
}

/// Where a row's online softmax stands.
#[derive(Clone, Copy)]
struct RowState {
    /// First key kept, and the one after the last.
    keys: (usize, usize),
    max: f32,
    sum: f32,
}

pub(super) fn forward<T: Operand>(
    problem: &ForwardProblem,
    inputs: &Inputs<'_, T>,
    task: &Task,
    scratch: &mut Scratch,
) -> Rows<T::Out> {
    let dims = problem.dims();
    let head_kv = task.head / problem.group_size();
    let band = problem.mask_value().band(dims.seqlen_q, dims.seqlen_kv);
    let mut rows = [RowState { keys: (0, 0), max: f32::NEG_INFINITY, sum: 0.0 }; BLOCK_Q];
    let rows = &mut rows[..task.queries];
    for (i, row) in rows.iter_mut().enumerate() {
        row.keys = kept(&band, task.first + i, dims.seqlen_kv);
    }
    // Blocks outside of what any row keeps are never looked at.
    let some = || rows.iter().map(|row| row.keys).filter(|(start, end)| start < end);
    let start = some().map(|(start, _)| start).min().unwrap_or(0);
    let end = some().map(|(_, end)| end).max().unwrap_or(0);

    let Scratch { q, k, v, scores, sums } = scratch;
    load(&inputs.q, task.batch, task.head, task.first..task.first + task.queries, q);
    sums.clear();
    sums.resize(task.queries * dims.head_dim_vo, 0.0);
    for first in (start..end).step_by(BLOCK_KV) {
        let keys = BLOCK_KV.min(end - first);
        load(&inputs.k, task.batch, head_kv, first..first + keys, k);
        load(&inputs.v, task.batch, head_kv, first..first + keys, v);
        scores.resize(task.queries * keys, 0.0);
        let queries = Matrix::new(q, task.queries, dims.head_dim_qk);
        matmul(
            problem.softmax_scale_value(),
            queries,
            Matrix::new(k, keys, dims.head_dim_qk).transposed(),
            0.0,
            scores,
        );
        let mut whole = true;
        for ((row, scores), sums) in
            rows.iter_mut().zip(scores.chunks_exact_mut(keys)).zip(sums.chunks_exact_mut(dims.head_dim_vo))
        {
            let kept = within(row.keys, first, keys);
            whole &= kept == (0..keys);
            scores[..kept.start].fill(0.0);
            scores[kept.end..].fill(0.0);
            row.step(&mut scores[kept], sums);
        }
        if whole || v.iter().all(|x| x.is_finite()) {
            matmul(1.0, Matrix::new(scores, task.queries, keys), Matrix::new(v, keys, dims.head_dim_vo), 1.0, sums);
        } else {
            // In the product above a probability of 0 would not keep a masked key's NaN or infinity out.
            for (i, row) in rows.iter().enumerate() {
                for key in within(row.keys, first, keys) {
                    let sums = &mut sums[i * dims.head_dim_vo..][..dims.head_dim_vo];
                    let values = &v[key * dims.head_dim_vo..][..dims.head_dim_vo];
                    for (sum, value) in sums.iter_mut().zip(values) {
                        *sum += scores[i * keys + key] * value;
                    }
                }
            }
        }
    }

    let mut o = Vec::with_capacity(sums.len());
    for (row, sums) in rows.iter().zip(sums.chunks_exact(dims.head_dim_vo)) {
        if row.sum == 0.0 {
            o.extend(sums.iter().map(|_| T::Out::from_f32(0.0)));
        } else {
            o.extend(sums.iter().map(|sum| T::Out::from_f32(sum / row.sum)));
        }
    }
    // ln(0) is the -inf of a row without keys; its max is -inf too.
    let lse = rows.iter().map(|row| row.max + row.sum.ln()).collect();
    Rows { o, lse }
}

impl RowState {
    /// Takes a block's scores of the kept keys: turns them into probabilities relative to the largest score so far,
    /// and what was summed before into the same terms.
    fn step(&mut self, scores: &mut [f32], sums: &mut [f32]) {
        if scores.is_empty() {
            return;
        }
        // A NaN is passed over here and comes back with its probability.
        let max = lanes(scores, self.max, f32::max);
        // Scores of -inf only: any finite shift gives them probability 0, where -inf would give NaN.
        let shift = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let correction = (self.max - shift).exp();
        for score in scores.iter_mut() {
            *score = (*score - shift).exp();
        }
        self.sum = self.sum * correction + lanes(scores, 0.0, |a, b| a + b);
        self.max = max;
        if correction != 1.0 {
            sums.iter_mut().for_each(|sum| *sum *= correction);
        }
    }
}

/// Folds in sixteen lanes, in an order that depends on the length only; `start` is the operation's neutral element or
/// may be taken in more than once.
fn lanes(values: &[f32], start: f32, fold: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [start; 16];
    let chunks = values.chunks_exact(16);
    let tail = chunks.remainder().iter().fold(start, |a, &b| fold(a, b));
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = fold(*lane, value);
        }
    }
    lanes.iter().fold(tail, |a, &b| fold(a, b))
}

/// The keys that a query keeps, from the first to the one after the last; empty ones have `start >= end`.
fn kept(band: &Band, query: usize, seqlen_kv: usize) -> (usize, usize) {
    let bound = |key: i64| usize::try_from(key.max(0)).map_or(seqlen_kv, |key| key.min(seqlen_kv));
    let signed = |keys: usize| i64::try_from(keys).unwrap_or(i64::MAX);
    let own = signed(query).saturating_add(band.offset);
    let start = band.left.map_or(0, |left| bound(own.saturating_sub(signed(left))));
    let end = band.right.map_or(seqlen_kv, |right| bound(own.saturating_add(signed(right)).saturating_add(1)));
    (start, end)
}

/// The part of `start..end` in a block, counted from the block's first key; empty where there is none.
fn within((start, end): (usize, usize), first: usize, keys: usize) -> std::ops::Range<usize> {
    let start = start.clamp(first, first + keys) - first;
    let end = end.clamp(first, first + keys) - first;
    start..end.max(start)
}

/// Rows of a tensor as f32, without gaps.
fn load<T: Element>(
    tensor: &HostRef<'_, T, 4>,
    batch: usize,
    head: usize,
    tokens: std::ops::Range<usize>,
    out: &mut Vec<f32>,
) {
    out.clear();
    for token in tokens {
        out.extend(tensor.row(batch, token, head).iter().map(|x| x.to_f32()));
    }
}
