//! Forward passes of e4m3 operands, in the arithmetic of tensor cores: products of stored values summed in f32, P rounded
//! to e4m3 between them.
//!
//! With `x = softmax_scale * log2(e) * descale_q * descale_k * (q . k)` and `fold = log2(descale_v / the largest descale_v
//! of the head)`, 0 but for factors per block, the weight of a key is
//!
//! ```text
//! p   = 2^(x + fold - max + 8)      at most 2^8, since max is the largest x + fold so far
//! O   = the largest descale_v * sum of e4m3(p) * v / sum of e4m3(p)       per block: / sum of p * 2^-fold
//! LSE = max * ln(2) + ln(sum of p * 2^-fold / 2^8)
//! ```
//!
//! so that the factors of V cost no product, 448 is never reached, and weights keep their three bits down to 2^-14 of the
//! largest. O is divided by the sum of the rounded weights: what rounding does to all of them alike, as where a row is
//! nearly even, cancels, and equal values give themselves. With factors per block it is that of the exact ones, since
//! where a block's values are small its weights round to 0, and count all the same. The LSE is as exact as that of other
//! types.

use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

use super::block::{self, Block, Keys};
use super::matmul::{Matrix, matmul};
use super::tile::lanes;
use super::{BLOCK, HostMut, HostRef, Task, each_task, load};
use crate::dtype::{E4M3, Element, OutputOf};
use crate::error::{Error, Result};
use crate::problem::ForwardProblem;
use crate::scaling::{SCALE_BLOCK, Scaling};

/// The largest weight before rounding is 2 to this power: below 448, so that none saturates.
const P_OFFSET: f32 = 8.0;
/// Values of V with a factor that is smaller than the head's largest by more than 2 to this power count as that: it keeps
/// sums in the range of f32, and what it changes is 2^-91 of the head's largest value.
const LEAST_FOLD: f32 = -100.0;

/// What a forward pass of e4m3 operands reads.
pub(crate) struct Fp8Inputs<'a> {
    pub q: HostRef<'a, E4M3, 4>,
    pub k: HostRef<'a, E4M3, 4>,
    pub v: HostRef<'a, E4M3, 4>,
    pub descale_q: HostRef<'a, f32, 3>,
    pub descale_k: HostRef<'a, f32, 3>,
    pub descale_v: HostRef<'a, f32, 3>,
    /// 1 where the output is not e4m3.
    pub scale_o: f32,
}

/// What it writes.
pub(crate) struct Fp8Outputs<'a, O> {
    pub o: HostMut<'a, O, 4>,
    pub lse: Option<HostMut<'a, f32, 3>>,
    pub amax: Option<HostMut<'a, f32, 1>>,
}

/// What a task computes.
struct Rows<O> {
    o: Vec<O>,
    lse: Vec<f32>,
    amax: f32,
}

/// Buffers that a thread uses again for its next task.
#[derive(Default)]
struct Scratch {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// Scores, then rounded weights: `[queries, keys]`.
    scores: Vec<f32>,
    /// Sums of weights times values: `[queries, head_dim_vo]`.
    sums: Vec<f32>,
    kept: Vec<Range<usize>>,
}

/// Where a row's online softmax stands, in powers of two.
#[derive(Clone, Copy)]
struct RowState {
    keys: Keys,
    max: f32,
    /// Of the weights.
    sum: f32,
    /// What O is divided by.
    divisor: f32,
}

/// Computes `problem`, whose operands are e4m3; shapes and types were checked by the caller.
///
/// # Errors
/// [`Error::Value`] for a factor that is not finite and above 0.
pub(crate) fn forward<O: OutputOf<E4M3>>(
    problem: &ForwardProblem,
    inputs: &Fp8Inputs<'_>,
    mut outputs: Fp8Outputs<'_, O>,
) -> Result<()> {
    let Fp8Inputs { descale_q, descale_k, descale_v, scale_o, .. } = inputs;
    for (what, factors) in [("descale_q", descale_q), ("descale_k", descale_k), ("descale_v", descale_v)] {
        check_factors(what, factors)?;
    }
    check_factor("scale_o", *scale_o, || "".into())?;
    let dims = problem.dims();
    let largest_v = largest_of_heads(problem, descale_v);
    let compute = |scratch: &mut _, task: &Task| tile::<O>(problem, inputs, &largest_v, task, scratch);
    let mut amax = 0.0;
    each_task(dims.batch, dims.heads_q, dims.seqlen_q, compute, |task, rows| {
        outputs.o.store(task, &rows.o);
        if let Some(lse) = &mut outputs.lse {
            lse.part_mut(task).copy_from_slice(&rows.lse);
        }
        amax = larger(amax, rows.amax);
    });
    if let Some(out) = &mut outputs.amax {
        *out.at_mut([0]) = amax;
    }
    Ok(())
}

/// Whether every factor is one.
pub(crate) fn check_factors(what: &'static str, factors: &HostRef<'_, f32, 3>) -> Result<()> {
    let [batch, heads, blocks] = factors.layout().shape();
    for index in (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..blocks).map(move |i| [b, h, i]))) {
        check_factor(what, factors.at(index), || format!(" at {index:?}"))?;
    }
    Ok(())
}

fn check_factor(what: &'static str, factor: f32, place: impl Fn() -> String) -> Result<()> {
    if factor.is_finite() && factor > 0.0 {
        return Ok(());
    }
    Err(Error::Value { what, got: format!("{factor}{}", place()), allowed: "finite and above 0".into() })
}

/// The larger of two magnitudes, or NaN where there is one.
fn larger(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) }
}

/// The largest factor of V of each head, `[batch, heads_kv]`.
fn largest_of_heads(problem: &ForwardProblem, factors: &HostRef<'_, f32, 3>) -> Vec<f32> {
    let (dims, scaling) = (problem.dims(), problem.scaling().unwrap_or_default());
    let heads = (0..dims.batch).flat_map(|batch| (0..dims.heads_kv).map(move |head| (batch, head)));
    let blocks = (0..dims.seqlen_kv).step_by(SCALE_BLOCK);
    heads
        .map(|(batch, head)| {
            blocks.clone().map(|token| factors.at(scaling.index(batch, head, 1, token))).fold(0.0, f32::max)
        })
        .collect()
}

fn tile<O: OutputOf<E4M3>>(
    problem: &ForwardProblem,
    inputs: &Fp8Inputs<'_>,
    largest_v: &[f32],
    task: &Task,
    scratch: &mut Scratch,
) -> Rows<O> {
    let (dims, scaling) = (problem.dims(), problem.scaling().unwrap_or_default());
    let head_kv = task.head / problem.group_size();
    let band = problem.mask().band(dims.seqlen_q, dims.seqlen_kv);
    let mut rows = [RowState { keys: (0, 0), max: f32::NEG_INFINITY, sum: 0.0, divisor: 0.0 }; BLOCK];
    let rows = &mut rows[..task.tokens.len()];
    for (query, row) in task.tokens.clone().zip(rows.iter_mut()) {
        row.keys = block::kept(&band, query, dims.seqlen_kv);
    }
    let (start, end) = block::reach(rows.iter().map(|row| row.keys));

    // A task's queries are of one block of factors, and so are the keys of each step.
    const { assert!(SCALE_BLOCK.is_multiple_of(BLOCK)) };
    let descale_q = inputs.descale_q.at(scaling.index(task.batch, task.head, problem.group_size(), task.tokens.start));
    let largest_v = largest_v[task.batch * dims.heads_kv + head_kv];
    let Scratch { q, k, v, scores, sums, kept } = scratch;
    load(&inputs.q, task.batch, task.head, task.tokens.clone(), q);
    sums.clear();
    sums.resize(rows.len() * dims.head_dim_vo, 0.0);
    for first in (start / SCALE_BLOCK * SCALE_BLOCK..end).step_by(SCALE_BLOCK) {
        let keys = SCALE_BLOCK.min(end - first);
        let of = scaling.index(task.batch, head_kv, 1, first);
        let unit = problem.softmax_scale() * LOG2_E * descale_q * inputs.descale_k.at(of);
        let fold = (inputs.descale_v.at(of) / largest_v).log2().max(LEAST_FOLD);
        load(&inputs.k, task.batch, head_kv, first..first + keys, k);
        load(&inputs.v, task.batch, head_kv, first..first + keys, v);
        scores.resize(rows.len() * keys, 0.0);
        let queries = Matrix::new(q, rows.len(), dims.head_dim_qk);
        matmul(1.0, queries, Matrix::new(k, keys, dims.head_dim_qk).transposed(), 0.0, scores);
        let block = Block::new(rows.iter().map(|row| row.keys), first, keys, kept);
        for (((row, kept), scores), sums) in rows
            .iter_mut()
            .zip(block.kept())
            .zip(scores.chunks_exact_mut(keys))
            .zip(sums.chunks_exact_mut(dims.head_dim_vo))
        {
            scores[..kept.start].fill(0.0);
            scores[kept.end..].fill(0.0);
            row.step(&mut scores[kept.clone()], unit, fold, scaling == Scaling::PerBlock, sums);
        }
        block.sum_over_keys(scores, v, dims.head_dim_vo, sums);
    }

    let mut amax = 0.0;
    let mut o = Vec::with_capacity(sums.len());
    for (row, sums) in rows.iter().zip(sums.chunks_exact(dims.head_dim_vo)) {
        for sum in sums {
            let value = if row.sum == 0.0 { 0.0 } else { sum / row.divisor * largest_v };
            amax = larger(amax, value.abs());
            o.push(O::from_f32(value * inputs.scale_o));
        }
    }
    // ln(0) is the -inf of a row without keys; its max is -inf too.
    let lse = rows.iter().map(|row| row.max * LN_2 + (row.sum / P_OFFSET.exp2()).ln()).collect();
    Rows { o, lse, amax }
}

impl RowState {
    /// Takes a block's products of the kept keys: turns them into rounded weights relative to the largest so far, and
    /// what was summed before into the same terms.
    fn step(&mut self, scores: &mut [f32], unit: f32, fold: f32, per_block: bool, sums: &mut [f32]) {
        if scores.is_empty() {
            return;
        }
        // A NaN is passed over here and comes back with its weight. The unit is above 0, so the largest product decides.
        let max = self.max.max(lanes(scores, f32::NEG_INFINITY, f32::max) * unit + fold);
        // Nothing but -inf or NaN: any finite shift will do.
        let shift = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let correction = (self.max - shift).exp2();
        let block_shift = P_OFFSET - (shift - fold);
        scores.iter_mut().for_each(|score| *score = (*score * unit + block_shift).exp2());
        let sum = lanes(scores, 0.0, |a, b| a + b) * (-fold).exp2();
        scores.iter_mut().for_each(|p| *p = Element::to_f32(<E4M3 as Element>::from_f32(*p)));
        let divisor = if per_block { sum } else { lanes(scores, 0.0, |a, b| a + b) };
        self.sum = self.sum * correction + sum;
        self.divisor = self.divisor * correction + divisor;
        self.max = max;
        if correction != 1.0 {
            sums.iter_mut().for_each(|sum| *sum *= correction);
        }
    }
}
