//! Forward passes of e4m3 operands, in the arithmetic of the tensor cores.
//!
//! Products of stored values are summed in f32. P is rounded to e4m3 before it is multiplied with V. For one query and key let
//!
//! ```text
//! x    = softmax_scale * log2(e) * descale_q * descale_k * (q . k)     the score, in powers of two
//! fold = log2(descale_v / largest_v)                                   largest_v: the largest descale_v of the head
//! p    = 2^(x + fold - max + 8)                                        the weight; max: the largest x + fold so far
//! ```
//!
//! `fold` is 0 unless the scaling is per block. Then
//!
//! ```text
//! O   = largest_v * sum of e4m3(p) * v / divisor
//! LSE = largest * ln(2) + ln(sum of 2^(x - largest))                   largest: the largest x
//! divisor = sum of e4m3(p)             scaling per tensor or per head
//!         = sum of p * 2^-fold         scaling per block
//! ```
//!
//! Why it is done this way:
//! - The factors of V are part of the exponent, so they cost no product.
//! - A weight is at most 2^8, so no weight saturates at 448. Weights keep their three mantissa bits down to 2^-14 of the
//!   largest.
//! - O is divided by the sum of the *rounded* weights. An error that rounding makes in all weights alike then cancels. This
//!   happens where the weights of a row are nearly equal. It also makes the mean of equal values exactly that value.
//! - With factors per block O is divided by the sum of the exact weights instead. Where the values of a block are small,
//!   `fold` is far below 0, and the rounded weights of the block are 0. The block must still count in the sum.
//! - The LSE uses exact weights, and a maximum without folds, so it is as exact as for other types. (With `max` in its place,
//!   both terms of the LSE may be as large as a fold, and lose bits where they cancel.)
//!
//! With a cap `c`, `x` is `c log2(e) tanh(x / (c log2(e)))` (`softcap.rs`).
//!
//! A sink adds `2^(s log2(e) - max + 8)` to both sums, once all keys are done (`sinks.rs`).

use std::f32::consts::{LN_2, LOG2_E};

use super::block::{self, Block, Keys};
use super::listed::{self, ListInputs, Listed};
use super::matmul::{self, Matrix, matmul};
use super::sequences::Sequences;
use super::sinks::{Sinks, Sunk, without_keys};
use super::softcap::cap;
use super::tile::lanes;
use super::{BLOCK, Blocks, HostMut, HostRef, Task, Tasks, Team, fill_gaps, fill_lse_gaps, load, tile};
use crate::dtype::{E4M3, Element, OutputOf};
use crate::error::{Error, Result};
use crate::problem::{ForwardProblem, MASK_BLOCK};
use crate::scaling::{SCALE_BLOCK, Scaling};
use crate::sequences::{Lengths, SequenceRows, Side};

/// The largest weight before rounding is 2 to this power. It is below 448, so that no weight saturates.
const P_OFFSET: f32 = 8.0;
/// `fold` is at least this. It keeps the sums in the range of f32. It changes O by no more than 2^-91 of the head's largest
/// value.
const LEAST_FOLD: f32 = -100.0;

/// The tensors that a forward pass of e4m3 operands reads, in host memory.
pub(crate) struct Fp8Inputs<'a> {
    pub q: HostRef<'a, E4M3, 4>,
    pub k: HostRef<'a, E4M3, 4>,
    pub v: HostRef<'a, E4M3, 4>,
    pub descale_q: HostRef<'a, f32, 3>,
    pub descale_k: HostRef<'a, f32, 3>,
    pub descale_v: HostRef<'a, f32, 3>,
    /// The factor of O before it is rounded. 1 where the output is not e4m3.
    pub scale_o: f32,
    pub lengths: Lengths<'a>,
    pub sinks: Sinks<'a>,
    pub lists: Option<ListInputs<'a>>,
}

/// The tensors that a forward pass of e4m3 operands writes, in host memory.
pub(crate) struct Fp8Outputs<'a, O> {
    pub o: HostMut<'a, O, 4>,
    pub lse: Option<HostMut<'a, f32, 3>>,
    pub amax: Option<HostMut<'a, f32, 1>>,
}

/// Buffers that a thread uses again for its next task: those of the other types, and one number more.
struct Scratch<O> {
    tile: tile::Scratch<O>,
    /// The largest magnitude of the results, before they are scaled and rounded.
    amax: f32,
}

/// The state of one query's online softmax.
#[derive(Clone, Copy)]
struct RowState {
    /// The keys that the query keeps.
    keys: Keys,
    /// The largest `x + fold` so far.
    max: f32,
    /// The largest `x` so far.
    largest: f32,
    /// The sum of `2^(x - largest + 8)` so far, for the LSE.
    sum: f32,
    /// The divisor of O so far.
    divisor: f32,
}

/// Computes `problem`, whose operands are e4m3. The caller has checked shapes and types.
///
/// # Errors
/// Before an output is written:
/// - [`Error::Value`] for offsets, used lengths and lists of blocks that are wrong, for a descale factor that is not finite and 0 or more, and for
///   a `scale_o` that is not finite and above 0. Without queries no factor is read. Nor are factors that belong to no row of a
///   sequence, where sequences differ.
/// - [`Error::Memory`] and [`Error::Threads`].
pub(crate) fn forward<O: OutputOf<E4M3>>(
    problem: &ForwardProblem,
    inputs: &Fp8Inputs<'_>,
    mut outputs: Fp8Outputs<'_, O>,
) -> Result<()> {
    let Fp8Inputs { descale_q, descale_k, descale_v, scale_o, lengths, .. } = inputs;
    let (dims, blocks) = (problem.dims(), Blocks::of(problem.dims(), SCALE_BLOCK));
    let sequences = Sequences::new(problem, lengths)?;
    let listed = Listed::new(problem, inputs.lists.as_ref())?;
    if !problem.is_empty() {
        let scaling = problem.scaling().unwrap_or_default();
        for (what, factors, side) in
            [("descale_q", descale_q, Side::Q), ("descale_k", descale_k, Side::Kv), ("descale_v", descale_v, Side::Kv)]
        {
            check_factors(what, factors, scaling, &sequences, side, true)?;
        }
        check_factor("scale_o", *scale_o, false, || "".into())?;
    }
    let tasks = Tasks::new(&sequences, Side::Q, dims.heads_q, blocks.tokens)?;
    let mut team = Team::new(tasks.count(), || Ok(Scratch { tile: tile::Scratch::new(problem, blocks)?, amax: 0.0 }))?;
    matmul::check_memory(team.threads())?;
    let compute = |scratch: &mut Scratch<O>, task: &Task| {
        compute_tile(problem, inputs, listed.as_ref(), blocks, task, scratch);
    };
    let mut amax = 0.0;
    team.each(&tasks, compute, |task, scratch| {
        outputs.o.store(task, &scratch.tile.o);
        if let Some(lse) = &mut outputs.lse {
            lse.store_part(task, &scratch.tile.lse);
        }
        amax = larger(amax, scratch.amax);
    })?;
    if let Some(out) = &mut outputs.amax {
        out.set([0], amax);
    }
    if problem.fills_gaps() {
        fill_gaps(&sequences, Side::Q, &mut outputs.o);
        fill_lse_gaps(&sequences, outputs.lse.as_mut());
    }
    Ok(())
}

/// Refuses factors of one side that are not finite and above 0, or 0 where that is allowed. Where sequences differ, only factors of their rows are read.
pub(crate) fn check_factors(
    what: &'static str,
    factors: &HostRef<'_, f32, 3>,
    scaling: Scaling,
    sequences: &Sequences,
    side: Side,
    may_be_zero: bool,
) -> Result<()> {
    let check = |index| check_factor(what, factors.at(index), may_be_zero, || format!(" at {index:?}"));
    if !sequences.differ() {
        return factors.layout().indices().try_for_each(check);
    }
    // The heads of the factors, and not those of the tensor: each is checked once.
    let [_, heads, _] = factors.layout().shape();
    for own in (0..sequences.count()).map(|number| sequences.get(number).side(side)) {
        for head in 0..heads {
            (0..own.len).step_by(SCALE_BLOCK).try_for_each(|token| check(own.factor(scaling, head, 1, token)))?;
        }
    }
    Ok(())
}

fn check_factor(what: &'static str, factor: f32, may_be_zero: bool, place: impl Fn() -> String) -> Result<()> {
    if factor.is_finite() && (factor > 0.0 || may_be_zero && factor == 0.0) {
        return Ok(());
    }
    let allowed = if may_be_zero { "finite and 0 or more" } else { "finite and above 0" };
    Err(Error::Value { what, got: format!("{factor}{}", place()), allowed: allowed.into() })
}

/// The larger of two magnitudes. NaN if one of them is NaN.
fn larger(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) }
}

/// The largest descale factor of V in a KV head of a sequence.
fn largest_of_head(scaling: Scaling, factors: &HostRef<'_, f32, 3>, of: &SequenceRows, head_kv: usize) -> f32 {
    let blocks = (0..of.len).step_by(SCALE_BLOCK);
    blocks.map(|token| factors.at(of.factor(scaling, head_kv, 1, token))).fold(0.0, f32::max)
}

/// Computes O, the LSE and the largest magnitude of a task, into `scratch`.
fn compute_tile<O: OutputOf<E4M3>>(
    problem: &ForwardProblem,
    inputs: &Fp8Inputs<'_>,
    listed: Option<&Listed<'_>>,
    blocks: Blocks,
    task: &Task,
    scratch: &mut Scratch<O>,
) {
    let (dims, scaling) = (problem.dims(), problem.scaling().unwrap_or_default());
    let head_kv = task.head / problem.group_size();
    let of_keys = &task.sequence.kv;
    let band = problem.mask().band(task.rows.len, of_keys.len);
    let mut rows =
        [RowState { keys: (0, 0), max: f32::NEG_INFINITY, largest: f32::NEG_INFINITY, sum: 0.0, divisor: 0.0 }; BLOCK];
    let rows = &mut rows[..task.tokens.len()];
    for (query, row) in task.tokens.clone().zip(rows.iter_mut()) {
        row.keys = band.keys(query, of_keys.len);
    }
    let (start, end) = block::reach(rows.iter().map(|row| row.keys));

    // All queries of a task share one descale factor. So do all keys of one step of the loop below.
    const { assert!(SCALE_BLOCK.is_multiple_of(BLOCK)) };
    // And a block of a list is a step.
    const { assert!(SCALE_BLOCK == MASK_BLOCK) };
    let descale_q = inputs.descale_q.at(task.rows.factor(scaling, task.head, problem.group_size(), task.tokens.start));
    let largest_v = largest_of_head(scaling, &inputs.descale_v, of_keys, head_kv);
    let Scratch { tile: tile::Scratch { o, lse, q, k, v, scores, sums, kept, .. }, amax } = scratch;
    load(&inputs.q, &task.rows, task.head, task.tokens.clone(), q);
    sums.clear();
    sums.resize(rows.len() * dims.head_dim_vo, 0.0);
    for first in (start / blocks.walked * blocks.walked..end).step_by(blocks.walked) {
        let keys = blocks.walked.min(end - first);
        let Some(pairs) = listed::pairs(listed, task.rows.batch, task.head, task.tokens.start, first) else { continue };
        let of = of_keys.factor(scaling, head_kv, 1, first);
        let unit = problem.softmax_scale() * LOG2_E * descale_q * inputs.descale_k.at(of);
        let fold = (inputs.descale_v.at(of) / largest_v).log2().max(LEAST_FOLD);
        load(&inputs.k, of_keys, head_kv, first..first + keys, k);
        load(&inputs.v, of_keys, head_kv, first..first + keys, v);
        scores.resize(rows.len() * keys, 0.0);
        let queries = Matrix::new(q, rows.len(), dims.head_dim_qk);
        matmul(1.0, queries, Matrix::new(k, keys, dims.head_dim_qk).transposed(), 0.0, scores);
        let block = Block::new(rows.iter().map(|row| row.keys), first, keys, kept).of_pairs(pairs);
        for ((((query, row), kept), scores), sums) in rows
            .iter_mut()
            .enumerate()
            .zip(block.kept())
            .zip(scores.chunks_exact_mut(keys))
            .zip(sums.chunks_exact_mut(dims.head_dim_vo))
        {
            scores[..kept.start].fill(0.0);
            scores[kept.end..].fill(0.0);
            let mut unit = capped_unit(problem.softcap(), &mut scores[kept.clone()], unit);
            if !pairs.is_all() {
                // (-inf times a unit of 0 would be NaN.)
                scores.iter_mut().for_each(|score| *score *= unit);
                unit = 1.0;
                block.hide(query, f32::NEG_INFINITY, scores);
            }
            row.step(&mut scores[kept.clone()], unit, fold, scaling == Scaling::PerBlock, sums);
        }
        block.sum_over_keys(scores, v, dims.head_dim_vo, sums);
    }

    let sink = inputs.sinks.of(task.head);
    *amax = 0.0;
    o.clear();
    lse.clear();
    for (row, sums) in rows.iter().zip(sums.chunks_exact(dims.head_dim_vo)) {
        // With the sink, for sums relative to either maximum.
        let sunk = |max: f32| {
            let sunk = Sunk::new(sink * LOG2_E, max, f32::exp2);
            Sunk { weight: sunk.weight * P_OFFSET.exp2(), ..sunk }
        };
        let (of_output, of_lse) = (sunk(row.max), sunk(row.largest));
        let divisor = of_output.add_to(row.divisor);
        for sum in sums {
            let value = if row.sum == 0.0 { without_keys(sink) } else { sum * of_output.own / divisor * largest_v };
            *amax = larger(*amax, value.abs());
            o.push(O::from_f32(value * inputs.scale_o));
        }
        // A query without keys has sum 0. Its LSE is the sink, -inf where there is none.
        let total = of_lse.add_to(row.sum) / P_OFFSET.exp2();
        lse.push(if row.sum == 0.0 { sink } else { of_lse.max * LN_2 + total.ln() });
    }
}

/// Caps products `q . k` in place, where there is a cap. `unit` is `x / (q . k)`. Returns what it is from then on.
fn capped_unit(softcap: f32, scores: &mut [f32], unit: f32) -> f32 {
    if softcap == 0.0 {
        return unit;
    }
    scores.iter_mut().for_each(|score| *score *= unit * LN_2);
    cap(softcap, scores);
    LOG2_E
}

impl RowState {
    /// Takes the products `q . k` of one block, for the keys that the query keeps. `unit` is `x / (q . k)`.
    ///
    /// Each product becomes a rounded weight relative to the maximum so far. If the maximum has grown, the sums of earlier
    /// blocks are rescaled to it.
    fn step(&mut self, scores: &mut [f32], unit: f32, fold: f32, per_block: bool, sums: &mut [f32]) {
        if scores.is_empty() {
            return;
        }
        // `f32::max` ignores a NaN. The NaN's weight is NaN, and so is then the sum. `unit` is 0 or more, so the largest
        // product has the largest score.
        let of_block = lanes(scores, f32::NEG_INFINITY, f32::max) * unit;
        let (max, largest) = (self.max.max(of_block + fold), self.largest.max(of_block));
        // If all scores are -inf or NaN, a shift of -inf would give NaN. Any finite shift will do.
        let finite = |max: f32| if max == f32::NEG_INFINITY { 0.0 } else { max };
        let (shift, lse_shift) = (finite(max), finite(largest));
        let correction = (self.max - shift).exp2();
        let block_shift = shift - fold;
        scores.iter_mut().for_each(|score| *score = (*score * unit + (P_OFFSET - block_shift)).exp2());
        let exact = lanes(scores, 0.0, |a, b| a + b);
        scores.iter_mut().for_each(|p| *p = Element::to_f32(<E4M3 as Element>::from_f32(*p)));
        let divisor = if per_block { exact * (-fold).exp2() } else { lanes(scores, 0.0, |a, b| a + b) };
        self.divisor = self.divisor * correction + divisor;
        self.sum = self.sum * (self.largest - lse_shift).exp2() + exact * (block_shift - lse_shift).exp2();
        (self.max, self.largest) = (max, largest);
        if correction != 1.0 {
            sums.iter_mut().for_each(|sum| *sum *= correction);
        }
    }
}
