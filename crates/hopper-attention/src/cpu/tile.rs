//! The forward pass of one task: a block of queries against all keys that they keep, with an online softmax.

use std::ops::Range;

use super::additive;
use super::alibi::Bias;
use super::block::{self, Block, Keys};
use super::dropout::{Drops, zero};
use super::listed::{self, Listed};
use super::matmul::{Matrix, matmul};
use super::memory::reserved;
use super::sinks::{Sunk, without_keys};
use super::softcap::cap;
use super::{BLOCK, Blocks, Inputs, Task, load};
use crate::dtype::Float;
use crate::error::Result;
use crate::problem::ForwardProblem;

/// Buffers that a thread uses again for its next task. They are large enough for the largest task, so that a task allocates nothing.
pub(super) struct Scratch<T> {
    /// The results, `[queries, head_dim_vo]`.
    pub o: Vec<T>,
    /// The results, `[queries]`.
    pub lse: Vec<f32>,
    /// The largest score of all queries. -inf where there is none.
    pub max_logit: f32,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    /// Scores (with e4m3 operands products `q . k`), then weights: `[queries, keys]`.
    pub scores: Vec<f32>,
    /// Sums of weights times values: `[queries, head_dim_vo]`.
    pub sums: Vec<f32>,
    /// The additive biases of the scores. Empty where there is no bias.
    pub biases: Vec<f32>,
    pub kept: Vec<Range<usize>>,
    /// Whether dropout drops a pair, `[queries, keys]`.
    pub dropped: Vec<bool>,
}

impl<T> Scratch<T> {
    pub fn new(problem: &ForwardProblem, blocks: Blocks) -> Result<Self> {
        let dims = problem.dims();
        let (queries, keys) = (blocks.tokens.min(dims.seqlen_q), blocks.walked.min(dims.seqlen_kv));
        Ok(Self {
            o: reserved(queries * dims.head_dim_vo)?,
            lse: reserved(queries)?,
            max_logit: f32::NEG_INFINITY,
            q: reserved(queries * dims.head_dim_qk)?,
            k: reserved(keys * dims.head_dim_qk)?,
            v: reserved(keys * dims.head_dim_vo)?,
            scores: reserved(queries * keys)?,
            sums: reserved(queries * dims.head_dim_vo)?,
            biases: reserved(if problem.bias().is_some() { queries * keys } else { 0 })?,
            kept: reserved(queries)?,
            dropped: reserved(if problem.dropout().is_some() { queries * keys } else { 0 })?,
        })
    }
}

/// The state of one query's online softmax.
#[derive(Clone, Copy)]
struct RowState {
    /// The keys that the query keeps.
    keys: Keys,
    /// The largest score so far.
    max: f32,
    /// The sum of the weights so far.
    sum: f32,
}

/// Computes O and the LSE of a task, into `scratch`.
pub(super) fn forward<T: Float>(
    problem: &ForwardProblem,
    inputs: &Inputs<'_, T>,
    listed: Option<&Listed<'_>>,
    blocks: Blocks,
    task: &Task,
    scratch: &mut Scratch<T>,
) {
    let dims = problem.dims();
    let head_kv = task.head / problem.group_size();
    let of_keys = &task.sequence.kv;
    let band = problem.mask().band(task.rows.len, of_keys.len);
    let mut rows = [RowState { keys: (0, 0), max: f32::NEG_INFINITY, sum: 0.0 }; BLOCK];
    let rows = &mut rows[..task.tokens.len()];
    for (query, row) in task.tokens.clone().zip(rows.iter_mut()) {
        row.keys = band.keys(query, of_keys.len);
    }
    // Blocks of which no query keeps a key are not visited.
    let (start, end) = block::reach(rows.iter().map(|row| row.keys));
    let start = block::first_visited(start, blocks.walked, listed.is_some());

    let bias = Bias::of(problem, &inputs.alibi, &task.sequence, task.head);
    let drops = Drops::of(problem, inputs.dropout_state, &task.sequence, task.head);
    let Scratch { o, lse, max_logit, q, k, v, scores, sums, biases, kept, dropped } = scratch;
    load(&inputs.q, &task.rows, task.head, task.tokens.clone(), q);
    sums.clear();
    sums.resize(rows.len() * dims.head_dim_vo, 0.0);
    for first in (start..end).step_by(blocks.walked) {
        let keys = blocks.walked.min(end - first);
        let Some(pairs) = listed::pairs(listed, task.rows.batch, task.head, task.tokens.start, first) else { continue };
        load(&inputs.k, of_keys, head_kv, first..first + keys, k);
        load(&inputs.v, of_keys, head_kv, first..first + keys, v);
        inputs.bias.load([task.rows.sequence, task.head], task.tokens.clone(), first..first + keys, biases);
        scores.resize(rows.len() * keys, 0.0);
        let queries = Matrix::new(q, rows.len(), dims.head_dim_qk);
        matmul(problem.softmax_scale(), queries, Matrix::new(k, keys, dims.head_dim_qk).transposed(), 0.0, scores);
        let block = Block::new(rows.iter().map(|row| row.keys), first, keys, kept).of_pairs(pairs).with_bias(biases);
        for ((((row, query), kept), scores), sums) in rows
            .iter_mut()
            .zip(task.tokens.clone())
            .zip(block.kept())
            .zip(scores.chunks_exact_mut(keys))
            .zip(sums.chunks_exact_mut(dims.head_dim_vo))
        {
            scores[..kept.start].fill(0.0);
            scores[kept.end..].fill(0.0);
            cap(problem.softcap(), &mut scores[kept.clone()]);
            if !biases.is_empty() {
                additive::add(&mut scores[kept.clone()], &biases[(query - task.tokens.start) * keys..][kept.clone()]);
            }
            if let Some(bias) = &bias {
                bias.subtract(query, first + kept.start, &mut scores[kept.clone()]);
            }
            block.hide(query - task.tokens.start, f32::NEG_INFINITY, scores);
            row.step(&mut scores[kept.clone()], sums);
        }
        // The sums of the weights, and with them the LSE, are those of all pairs.
        Drops::pairs(drops.as_ref(), task.tokens.clone(), first..first + keys, dropped);
        zero(dropped, scores);
        block.without(dropped).sum_over_keys(scores, v, dims.head_dim_vo, sums);
    }

    *max_logit = rows.iter().fold(f32::NEG_INFINITY, |largest, row| largest.max(row.max));
    let (sink, factor) = (inputs.sinks.of(task.head), problem.dropout_factor());
    o.clear();
    lse.clear();
    for (row, sums) in rows.iter().zip(sums.chunks_exact(dims.head_dim_vo)) {
        // A query without keys has sum 0. Its LSE is the sink, -inf where there is none.
        if row.sum == 0.0 {
            o.extend(sums.iter().map(|_| T::from_f32(without_keys(sink))));
            lse.push(sink);
            continue;
        }
        let sunk = Sunk::new(sink, row.max, f32::exp);
        let total = sunk.add_to(row.sum);
        o.extend(sums.iter().map(|sum| T::from_f32(sum * sunk.own / total * factor)));
        lse.push(sunk.max + total.ln());
    }
}

impl RowState {
    /// Takes the scores of one block, for the keys that the query keeps.
    ///
    /// Each score becomes a weight relative to the largest score so far. If this maximum has grown, the sums of earlier blocks
    /// are rescaled to it.
    fn step(&mut self, scores: &mut [f32], sums: &mut [f32]) {
        if scores.is_empty() {
            return;
        }
        // `f32::max` ignores a NaN. The NaN's weight is NaN, and so is then the sum.
        let max = lanes(scores, self.max, f32::max);
        // If all scores are -inf, a shift of -inf would give NaN. With any finite shift their weights are 0.
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

/// Folds the values in sixteen lanes, so that the compiler may use vectors. The order depends on the length only.
///
/// `start` is folded in several times. So it must be the neutral element of `fold`, or `fold` must not mind (a maximum).
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
