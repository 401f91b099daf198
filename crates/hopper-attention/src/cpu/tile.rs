//! One task: a block of queries against all keys that it keeps, with an online softmax.

use std::ops::Range;

use super::block::{self, Block, Keys};
use super::matmul::{Matrix, matmul};
use super::{BLOCK, Inputs, Task, WALKED, load};
use crate::dtype::Float;
use crate::problem::ForwardProblem;

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
    kept: Vec<Range<usize>>,
}

/// Where a row's online softmax stands.
#[derive(Clone, Copy)]
struct RowState {
    keys: Keys,
    max: f32,
    sum: f32,
}

pub(super) fn forward<T: Float>(
    problem: &ForwardProblem,
    inputs: &Inputs<'_, T>,
    task: &Task,
    scratch: &mut Scratch,
) -> Rows<T> {
    let dims = problem.dims();
    let head_kv = task.head / problem.group_size();
    let band = problem.mask().band(dims.seqlen_q, dims.seqlen_kv);
    let mut rows = [RowState { keys: (0, 0), max: f32::NEG_INFINITY, sum: 0.0 }; BLOCK];
    let rows = &mut rows[..task.tokens.len()];
    for (query, row) in task.tokens.clone().zip(rows.iter_mut()) {
        row.keys = block::kept(&band, query, dims.seqlen_kv);
    }
    // Blocks outside of what any row keeps are never looked at.
    let (start, end) = block::reach(rows.iter().map(|row| row.keys));

    let Scratch { q, k, v, scores, sums, kept } = scratch;
    load(&inputs.q, task.batch, task.head, task.tokens.clone(), q);
    sums.clear();
    sums.resize(rows.len() * dims.head_dim_vo, 0.0);
    for first in (start..end).step_by(WALKED) {
        let keys = WALKED.min(end - first);
        load(&inputs.k, task.batch, head_kv, first..first + keys, k);
        load(&inputs.v, task.batch, head_kv, first..first + keys, v);
        scores.resize(rows.len() * keys, 0.0);
        let queries = Matrix::new(q, rows.len(), dims.head_dim_qk);
        matmul(problem.softmax_scale(), queries, Matrix::new(k, keys, dims.head_dim_qk).transposed(), 0.0, scores);
        let block = Block::new(rows.iter().map(|row| row.keys), first, keys, kept);
        for (((row, kept), scores), sums) in rows
            .iter_mut()
            .zip(block.kept())
            .zip(scores.chunks_exact_mut(keys))
            .zip(sums.chunks_exact_mut(dims.head_dim_vo))
        {
            scores[..kept.start].fill(0.0);
            scores[kept.end..].fill(0.0);
            row.step(&mut scores[kept.clone()], sums);
        }
        block.sum_over_keys(scores, v, dims.head_dim_vo, sums);
    }

    let mut o = Vec::with_capacity(sums.len());
    for (row, sums) in rows.iter().zip(sums.chunks_exact(dims.head_dim_vo)) {
        if row.sum == 0.0 {
            o.extend(sums.iter().map(|_| T::from_f32(0.0)));
        } else {
            o.extend(sums.iter().map(|sum| T::from_f32(sum / row.sum)));
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
pub(super) fn lanes(values: &[f32], start: f32, fold: impl Fn(f32, f32) -> f32) -> f32 {
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
