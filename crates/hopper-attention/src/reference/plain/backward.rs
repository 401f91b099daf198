//! The plain computation of the gradients, in the precision of the problem and without tiling.

use rayon::prelude::*;

use super::super::additive::{Added, Additive};
use super::super::blocks::Kept;
use super::super::packed::{cut, cut_list, paste, pieces};
use super::super::product::Tokens;
use super::super::work::{PLAIN_BACKWARD_UNITS, Work};
use super::super::{Modifiers, ROWS_PER_TASK, Tensor, check_backward_inputs, gather, place};
use super::{Narrow, capped, dot, rounding, widen};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::BackwardProblem;
use crate::sequences::Lengths;

/// The gradients of the plain computation, widened to f64.
#[derive(Clone, Debug)]
pub struct BackwardPlain {
    /// The gradient of Q, `[batch, seqlen_q, heads_q, head_dim_qk]`.
    pub d_q: Tensor,
    /// The gradient of K, `[batch, seqlen_kv, heads_kv, head_dim_qk]`.
    pub d_k: Tensor,
    /// The gradient of V, `[batch, seqlen_kv, heads_kv, head_dim_vo]`.
    pub d_v: Tensor,
    /// The gradient of the sinks, `[heads_q]`. Empty where the problem does not have it.
    pub d_sinks: Vec<f64>,
    /// The gradient of the bias, in its shape, in row-major order. Empty where the problem does not have it.
    pub d_bias: Vec<f64>,
}

/// Computes the gradients in the problem's precision, one row at a time. O and the LSE are those of
/// [`forward_plain`](super::forward_plain).
///
/// 1. `delta = sum(dO * O) - dLSE` in f32, with O rounded to its type; -dLSE of a query without keys;
/// 2. scores and dP: products of the inputs, accumulated in f32;
/// 3. `P = exp(score - LSE)`, with ALiBi `exp(score - slope * distance - LSE)`, and `dS = P * (dP - delta)` in f32, then rounded to the input type; with a cap scores are capped, and
///    dS is multiplied by `1 - tanh^2` before it is rounded; with dropout dP is 0 where a pair is dropped, and multiplied by the
///    factor elsewhere;
/// 4. products with dO (without dropped pairs), Q and K, accumulated in f32; dQ and dK multiplied by the softmax scale, dV by the
///    factor of dropout; all rounded to their type;
/// 5. dSink of a head: the sum over rows of `-exp(sink - LSE) * delta`, in f32;
/// 6. dBias: the sum over rows of `P * (dP - delta)`, in f32, rounded to the type of the bias.
///
/// # Errors
/// - [`Error::Shape`](crate::Error::Shape) when a shape is not the problem's.
/// - [`Error::Value`](crate::Error::Value) when `d_lse` is missing, or given although the problem does not read it.
pub fn backward_plain(
    problem: &BackwardProblem,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    d_o: &Tensor,
    d_lse: Option<&[f64]>,
) -> Result<BackwardPlain> {
    backward_plain_of(problem, &Lengths::default(), [q, k, v, d_o], d_lse)
}

/// As [`backward_plain`], for a problem with packed sequences or used lengths, with q, k, v and d_o in `inputs`. The gradients of
/// rows that belong to no sequence are 0.
///
/// # Errors
/// As [`backward_plain`], and as [`Lengths::check`].
pub fn backward_plain_of(
    problem: &BackwardProblem,
    lengths: &Lengths<'_>,
    inputs: [&Tensor; 4],
    d_lse: Option<&[f64]>,
) -> Result<BackwardPlain> {
    backward_plain_with(problem, lengths, inputs, d_lse, Modifiers::default())
}

/// As [`backward_plain_of`], for a problem with modifiers.
///
/// # Errors
/// As [`backward_plain_of`], and as [`forward_with`](super::super::forward_with) for the modifiers.
pub fn backward_plain_with(
    problem: &BackwardProblem,
    lengths: &Lengths<'_>,
    inputs: [&Tensor; 4],
    d_lse: Option<&[f64]>,
    modifiers: Modifiers<'_>,
) -> Result<BackwardPlain> {
    backward_plain_told(problem, lengths, inputs, d_lse, modifiers, &Work::silent())
}

/// As [`backward_plain_with`]. It tells `work` about its parts.
pub(in super::super) fn backward_plain_told(
    problem: &BackwardProblem,
    lengths: &Lengths<'_>,
    inputs: [&Tensor; 4],
    d_lse: Option<&[f64]>,
    modifiers: Modifiers<'_>,
    work: &Work<'_>,
) -> Result<BackwardPlain> {
    check_backward_inputs(problem, inputs, d_lse)?;
    modifiers.check(problem.forward())?;
    let Some(pieces) = pieces(problem.forward(), lengths, &modifiers)? else {
        return Ok(dense(problem, inputs, d_lse, modifiers, work)?.with_rounded_bias(problem));
    };
    let [q, k, v, d_o] = inputs;
    let [d_q, d_k, d_v] = [problem.d_q_shape(), problem.d_k_shape(), problem.d_v_shape()].map(Tensor::zeros);
    let bias = Additive::of(problem.forward(), &modifiers).filter(|_| problem.wants_d_bias());
    let d_bias = vec![0.0; bias.map_or(0, |_| problem.forward().bias_shape().iter().product())];
    let mut all = BackwardPlain { d_q, d_k, d_v, d_sinks: no_gradients(problem), d_bias };
    for piece in &pieces {
        let (of_q, of_kv) = (&piece.q, &piece.kv);
        let d_lse = d_lse.map(|d_lse| cut_list(d_lse, problem.d_lse_shape(), of_q));
        let inputs = [&cut(q, of_q), &cut(k, of_kv), &cut(v, of_kv), &cut(d_o, of_q)];
        let own = modifiers.of_sequence(problem.forward(), piece);
        let one = dense(&problem.of_sequence(&piece.problem), inputs, d_lse.as_deref(), own, work)?;
        paste(&mut all.d_q, of_q, &one.d_q);
        paste(&mut all.d_k, of_kv, &one.d_k);
        paste(&mut all.d_v, of_kv, &one.d_v);
        all.d_sinks.iter_mut().zip(one.d_sinks).for_each(|(sum, of_sequence)| *sum += of_sequence);
        if let Some(bias) = &bias {
            piece.add_to_bias(bias, &mut all.d_bias, &one.d_bias, |sum, of_sequence| *sum += of_sequence);
        }
    }
    Ok(all.with_rounded_bias(problem))
}

impl BackwardPlain {
    /// With the sums of the gradient of the bias in its type.
    fn with_rounded_bias(mut self, problem: &BackwardProblem) -> Self {
        let round = rounding(problem.forward().bias().map_or(DType::F32, |bias| bias.dtype()));
        self.d_bias.iter_mut().for_each(|sum| *sum = f64::from(round(*sum as f32)));
        self
    }
}

/// The plain computation of a problem whose sequences all have the same lengths. Sums of the gradient of the bias are not rounded to
/// its type.
fn dense(
    problem: &BackwardProblem,
    inputs: [&Tensor; 4],
    d_lse: Option<&[f64]>,
    modifiers: Modifiers<'_>,
    work: &Work<'_>,
) -> Result<BackwardPlain> {
    let [q, k, v, _] = inputs;
    let forward = super::dense(problem.forward(), [q, k, v], modifiers, 1.0, work)?;
    let dims = problem.dims();
    let o = Narrow::new(&forward.o);
    let [q, k, v, d_o] = inputs.map(Narrow::new);
    let round = rounding(problem.dtype());
    let shape = problem.d_lse_shape();
    let kept = Kept::new(problem.forward(), &modifiers)?;
    let rows: Vec<Row> = forward
        .lse
        .iter()
        .enumerate()
        .map(|(i, &lse)| {
            let [batch, head, query] = place(shape, i);
            let d_lse = d_lse.map_or(0.0, |d_lse| d_lse[i] as f32);
            // Where there is no key, O is 0 by definition, whatever dO is.
            let has_keys = (0..dims.seqlen_kv).any(|key| kept.keep(batch, head, query, key));
            let of_o = if has_keys { dot(d_o.row(batch, query, head), o.row(batch, query, head)) } else { 0.0 };
            Row { lse: lse as f32, delta: of_o - d_lse }
        })
        .collect();
    let mut d_sinks = no_gradients(problem);
    for (head, sum) in d_sinks.iter_mut().enumerate() {
        let sink = modifiers.sink(head) as f32;
        let of_head = rows.iter().enumerate().filter(|(i, _)| place(shape, *i)[1] == head).map(|(_, row)| row);
        let counted = of_head.filter(|row| sink != f32::NEG_INFINITY && row.lse != f32::NEG_INFINITY);
        let weight = |lse: f32| if sink == lse { 1.0 } else { (sink - lse).exp() };
        *sum = f64::from(counted.map(|row| -weight(row.lse) * row.delta).sum::<f32>());
    }
    let plain = Backward { problem, kept, modifiers, round, rows, q, k, v, d_o };

    let group = problem.forward().group_size();
    let (mut d_q, mut d_k, mut d_v) = (Vec::new(), Vec::new(), Vec::new());
    for (batch, head_kv) in (0..dims.batch).flat_map(|batch| (0..dims.heads_kv).map(move |head| (batch, head))) {
        let mut sums = vec![(vec![0.0; dims.head_dim_qk], vec![0.0; dims.head_dim_vo]); dims.seqlen_kv];
        for head in head_kv * group..(head_kv + 1) * group {
            plain.head([batch, head], &mut d_q, &mut sums, work);
        }
        for (sum_k, sum_v) in sums {
            d_k.push(plain.finished(sum_k, problem.softmax_scale()));
            d_v.push(plain.finished(sum_v, problem.forward().dropout_factor()));
        }
    }
    let gradient = |shape, rows: &[Vec<f32>]| gather(shape, rows, |row, out| widen(row, out));
    Ok(BackwardPlain {
        d_q: gradient(problem.d_q_shape(), &d_q),
        d_k: gradient(problem.d_k_shape(), &d_k),
        d_v: gradient(problem.d_v_shape(), &d_v),
        d_bias: plain.biases(),
        d_sinks,
    })
}

/// A gradient of the sinks of 0, where the problem has it.
fn no_gradients(problem: &BackwardProblem) -> Vec<f64> {
    vec![0.0; if problem.wants_d_sinks() { problem.dims().heads_q } else { 0 }]
}

/// Pairs of queries and keys that are in memory at a time, and keys that a task adds to.
const PAIRS: usize = 1 << 22;
const KEYS_PER_TASK: usize = 32;

struct Backward<'a> {
    problem: &'a BackwardProblem,
    modifiers: Modifiers<'a>,
    kept: Kept<'a>,
    round: fn(f32) -> f32,
    /// `[batch, heads_q, seqlen_q]`.
    rows: Vec<Row>,
    q: Narrow,
    k: Narrow,
    v: Narrow,
    d_o: Narrow,
}

struct Row {
    lse: f32,
    delta: f32,
}

/// P and dS of a pair. A pair that dropout drops has no P.
type Weights = (Option<f32>, f32);

impl Backward<'_> {
    /// Adds a query head: its rows of dQ, and what it adds to the sums of dK and dV of its KV head. Sums are in the order of
    /// the keys, and of the heads and queries.
    fn head(
        &self,
        [batch, head]: [usize; 2],
        d_q: &mut Vec<Vec<f32>>,
        sums: &mut [(Vec<f32>, Vec<f32>)],
        work: &Work<'_>,
    ) {
        let dims = self.problem.dims();
        let at_a_time = (PAIRS / dims.seqlen_kv.max(1)).max(ROWS_PER_TASK);
        for first in (0..dims.seqlen_q).step_by(at_a_time) {
            let queries = first..dims.seqlen_q.min(first + at_a_time);
            let rows: Vec<(Vec<_>, Vec<f32>)> =
                queries.clone().into_par_iter().map(|query| self.query(batch, head, query)).collect();
            sums.par_chunks_mut(KEYS_PER_TASK).enumerate().for_each(|(task, sums)| {
                for (query, (pairs, _)) in queries.clone().zip(&rows) {
                    let (q_row, d_o_row) = (self.q.row(batch, query, head), self.d_o.row(batch, query, head));
                    for (pair, (d_k, d_v)) in pairs[task * KEYS_PER_TASK..].iter().zip(&mut *sums) {
                        if let Some((p, d_s)) = *pair {
                            add(d_s, q_row, d_k);
                            p.into_iter().for_each(|p| add(p, d_o_row, d_v));
                        }
                    }
                }
            });
            work.add(PLAIN_BACKWARD_UNITS * queries.len() as u64);
            d_q.extend(rows.into_iter().map(|(_, row)| row));
        }
    }

    /// A query's pairs with all keys, and its row of dQ.
    fn query(&self, batch: usize, head: usize, query: usize) -> (Vec<Option<Weights>>, Vec<f32>) {
        let dims = self.problem.dims();
        let head_kv = head / self.problem.forward().group_size();
        let keys = Tokens { first: 0, count: dims.seqlen_kv };
        let factors = self.modifiers.dropped([batch, head], query, keys);
        let pair = |key: usize| self.pair([batch, head], query, key, factors[key] != 0.0);
        let pairs: Vec<_> = keys.iter().map(pair).collect();
        let mut d_q = vec![0.0; dims.head_dim_qk];
        for (key, pair) in pairs.iter().enumerate() {
            if let Some((_, d_s)) = *pair {
                add(d_s, self.k.row(batch, key, head_kv), &mut d_q);
            }
        }
        (pairs, self.finished(d_q, self.problem.softmax_scale()))
    }

    /// The gradient of the bias. Sums are in the order of batch entries, heads and queries.
    fn biases(&self) -> Vec<f64> {
        let forward = self.problem.forward();
        let (Some(bias), true) = (Additive::of(forward, &self.modifiers), self.problem.wants_d_bias()) else {
            return vec![];
        };
        let (dims, shape) = (self.problem.dims(), forward.bias_shape());
        let mut sums = vec![0.0_f32; shape.iter().product()];
        let keys = dims.seqlen_kv;
        for i in 0..if keys == 0 { 0 } else { self.rows.len() } {
            let [batch, head, query] = place(self.problem.d_lse_shape(), i);
            let row = bias.row([batch, head, query]) * keys;
            let factors = self.modifiers.dropped([batch, head], query, Tokens { first: 0, count: keys });
            sums[row..row + keys].par_iter_mut().with_min_len(ROWS_PER_TASK).enumerate().for_each(|(key, sum)| {
                if let Some([p, d_score, _]) = self.parts([batch, head], query, key, factors[key] != 0.0) {
                    *sum += p * d_score;
                }
            });
        }
        sums.into_iter().map(f64::from).collect()
    }

    /// P and dS of a pair, rounded to the input type. `keeps`: whether dropout keeps it. `None` for a pair that has no part in any gradient.
    fn pair(&self, place: [usize; 2], query: usize, key: usize, keeps: bool) -> Option<Weights> {
        let [p, d_score, slope] = self.parts(place, query, key, keeps)?;
        Some((keeps.then(|| (self.round)(p)), (self.round)(p * d_score * slope)))
    }

    /// P of a pair, `dP - delta`, and the derivative of the cap.
    fn parts(&self, [batch, head]: [usize; 2], query: usize, key: usize, keeps: bool) -> Option<[f32; 3]> {
        let dims = self.problem.dims();
        let head_kv = head / self.problem.forward().group_size();
        let row = &self.rows[(batch * dims.heads_q + head) * dims.seqlen_q + query];
        if !self.kept.keep(batch, head, query, key) || row.lse == f32::NEG_INFINITY {
            return None;
        }
        let scale = self.problem.softmax_scale();
        let score = scale * dot(self.q.row(batch, query, head), self.k.row(batch, key, head_kv));
        let (score, slope) = capped(self.problem.forward(), score);
        let d_p = dot(self.d_o.row(batch, query, head), self.v.row(batch, key, head_kv));
        let d_p = if keeps { self.problem.forward().dropout_factor() * d_p } else { 0.0 };
        let added = Added::of(self.problem.forward(), self.modifiers, [batch, head]);
        let p = (added.add_to(score, query, key) - row.lse).exp();
        Some([p, d_p - row.delta, slope])
    }

    fn finished(&self, sums: Vec<f32>, scale: f32) -> Vec<f32> {
        sums.into_iter().map(|sum| (self.round)(scale * sum)).collect()
    }
}

fn add(weight: f32, vector: &[f32], sums: &mut [f32]) {
    sums.iter_mut().zip(vector).for_each(|(sum, x)| *sum += weight * x);
}
