//! The oracle of the gradients: f64, from the definition. Rows of dQ are computed in tiles of queries, and rows of dK
//! and dV in tiles of keys, each from all pairs of the tile.

mod biases;
mod flushed;

use std::f64::consts::SQRT_2;

use super::super::additive::{Added, Additive};
use super::super::blocks::Kept;
use super::super::packed::{cut, cut_list, paste, paste_list, pieces};
use super::super::product::{Matrix, Tokens, Vectors, product};
use super::super::rounding::{
    SCORE_ROUNDOFFS, SMALLEST_NORMAL, U32, half_subnormal, least_with_dropout, unit_roundoff,
};
use super::super::softcap::Softcap;
use super::super::work::{ORACLE_KEY_UNITS, ORACLE_QUERY_UNITS, Work};
use super::super::{Modifiers, Tensor, check_backward_inputs, each_tile, gather};
use super::{Soft, alike, dot, norm, norms, shift_of};
use crate::error::Result;
use crate::problem::BackwardProblem;
use crate::sequences::{Lengths, SequenceRows};

pub use biases::BiasNoise;
use flushed::{FLUSHED, add_magnitudes, counted};

/// The exact gradients, and the sizes of their rounding errors.
#[derive(Clone, Debug)]
pub struct BackwardOracle {
    /// The gradient of Q, `[batch, seqlen_q, heads_q, head_dim_qk]`.
    pub d_q: Tensor,
    /// The gradient of K, `[batch, seqlen_kv, heads_kv, head_dim_qk]`.
    pub d_k: Tensor,
    /// The gradient of V, `[batch, seqlen_kv, heads_kv, head_dim_vo]`.
    pub d_v: Tensor,
    /// The rounding errors of dQ.
    pub d_q_noise: Noise,
    /// The rounding errors of dK.
    pub d_k_noise: Noise,
    /// The rounding errors of dV.
    pub d_v_noise: Noise,
    /// The gradient of the sinks, `[heads_q]`. Empty where the problem does not have it.
    pub d_sinks: Vec<f64>,
    /// The rounding errors of dSink, for each head.
    pub d_sinks_noise: Vec<SinkNoise>,
    /// The gradient of the bias, in its shape, in row-major order. Empty where the problem does not have it.
    pub d_bias: Vec<f64>,
    /// The rounding errors of dBias, for each of its elements.
    pub d_bias_noise: Vec<BiasNoise>,
}

/// The sizes of rounding errors in the gradient of a sink, `-sum over rows of p * delta`.
#[derive(Clone, Copy, Debug, Default)]
pub struct SinkNoise {
    /// The standard deviation that rounding `delta` and the sink's weight `p` brings, as in [`Noise::deviation`].
    pub deviation: f64,
    /// What `delta` costs if the weights that O was computed from were rounded alike, as in [`Noise::of_delta`].
    pub of_delta: f64,
    /// The sum of the magnitudes of the terms.
    pub magnitude: f64,
    /// What is lost where weights are too small for f32 and become 0, and where the gradient itself does.
    pub flushed: f64,
    /// The number of rows that have a part in it.
    pub terms: usize,
}

impl SinkNoise {
    /// That of the sum over the rows of both.
    fn with(self, other: Self) -> Self {
        Self {
            deviation: self.deviation.hypot(other.deviation),
            of_delta: self.of_delta + other.of_delta,
            magnitude: self.magnitude + other.magnitude,
            flushed: self.flushed + other.flushed,
            terms: self.terms + other.terms,
        }
    }
}

/// The sizes of rounding errors in a gradient. The tolerance makes its bounds of them.
///
/// [`tolerance`](crate::reference::tolerance) has the formulas.
#[derive(Clone, Debug)]
pub struct Noise {
    /// The effect of rounding P, dS, delta and the f32 sums behind them: the standard deviation of each element, if each
    /// rounding has a standard deviation of one unit roundoff. In the gradient's shape.
    pub deviation: Tensor,
    /// The root of the sum of the squared terms of each element, in the gradient's shape.
    pub weighted: Tensor,
    /// What delta costs each element if the weights that O was computed from were rounded alike, in the gradient's shape. These
    /// errors have the same sign in all terms.
    pub of_delta: Tensor,
    /// For each row the relative error that the probabilities may have in common:
    /// - what those of them share that are rounded alike ([`RowScale::alike`](super::RowScale::alike)). A kernel may round them
    ///   before it makes dS of them;
    /// - the error of scores, which tensor cores cut off towards 0, as a mean weighted by the probabilities.
    ///
    /// Rows are in the order of `[batch, head, token]`.
    pub alike: Vec<f64>,
    /// For each row the number of pairs of a query and a key that have a part in it. Rows are in the order of
    /// `[batch, head, token]`.
    pub terms: Vec<usize>,
}

impl Noise {
    /// That of a gradient in which no pair has a part.
    fn none(shape: [usize; 4]) -> Self {
        let [deviation, weighted, of_delta] = [(); 3].map(|()| Tensor::zeros(shape));
        let rows = shape[..3].iter().product();
        Self { deviation, weighted, of_delta, alike: vec![0.0; rows], terms: vec![0; rows] }
    }

    /// Takes the rows of a sequence.
    fn paste(&mut self, rows: &SequenceRows, from: &Self) {
        let [batch, seqlen, heads, _] = self.deviation.shape();
        paste(&mut self.deviation, rows, &from.deviation);
        paste(&mut self.weighted, rows, &from.weighted);
        paste(&mut self.of_delta, rows, &from.of_delta);
        paste_list(&mut self.alike, [batch, heads, seqlen], rows, &from.alike);
        paste_list(&mut self.terms, [batch, heads, seqlen], rows, &from.terms);
    }
}

/// Computes the gradients in f64. O and the LSE are computed anew.
///
/// - Shapes are the problem's. `d_lse` is `[batch, heads_q, seqlen_q]`. The elements must be those that the tested computation
///   reads: already rounded to its type.
/// - A query that keeps no key has no part in any gradient but that of a sink, which has its dLSE. Neither has a query whose kept keys
///   all have score -inf.
/// - Masked pairs have no part in any result, whatever their elements are.
///
/// # Errors
/// - [`Error::Shape`](crate::Error::Shape) when a shape is not the problem's.
/// - [`Error::Value`](crate::Error::Value) when `d_lse` is missing, or given although the problem does not read it.
pub fn backward(
    problem: &BackwardProblem,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    d_o: &Tensor,
    d_lse: Option<&[f64]>,
) -> Result<BackwardOracle> {
    backward_of(problem, &Lengths::default(), [q, k, v, d_o], d_lse)
}

/// As [`backward`], for a problem with packed sequences or used lengths, with q, k, v and d_o in `inputs`. Each sequence is
/// computed by itself. The gradients of rows that belong to no sequence are 0.
///
/// # Errors
/// As [`backward`], and as [`Lengths::check`].
pub fn backward_of(
    problem: &BackwardProblem,
    lengths: &Lengths<'_>,
    inputs: [&Tensor; 4],
    d_lse: Option<&[f64]>,
) -> Result<BackwardOracle> {
    backward_with(problem, lengths, inputs, d_lse, Modifiers::default())
}

/// As [`backward_of`], for a problem with modifiers.
///
/// # Errors
/// As [`backward_of`], and as [`forward_with`](super::super::forward_with) for the modifiers.
pub fn backward_with(
    problem: &BackwardProblem,
    lengths: &Lengths<'_>,
    inputs: [&Tensor; 4],
    d_lse: Option<&[f64]>,
    modifiers: Modifiers<'_>,
) -> Result<BackwardOracle> {
    backward_told(problem, lengths, inputs, d_lse, modifiers, &Work::silent())
}

/// As [`backward_with`]. It tells `work` about each tile.
pub(in super::super) fn backward_told(
    problem: &BackwardProblem,
    lengths: &Lengths<'_>,
    inputs: [&Tensor; 4],
    d_lse: Option<&[f64]>,
    modifiers: Modifiers<'_>,
    work: &Work<'_>,
) -> Result<BackwardOracle> {
    check_backward_inputs(problem, inputs, d_lse)?;
    modifiers.check(problem.forward())?;
    let Some(pieces) = pieces(problem.forward(), lengths, &modifiers)? else {
        return dense(problem, inputs, d_lse, modifiers, work);
    };
    let [q, k, v, d_o] = inputs;
    let shapes = [problem.d_q_shape(), problem.d_k_shape(), problem.d_v_shape()];
    let [d_q, d_k, d_v] = shapes.map(Tensor::zeros);
    let [d_q_noise, d_k_noise, d_v_noise] = shapes.map(Noise::none);
    let heads = if problem.wants_d_sinks() { problem.dims().heads_q } else { 0 };
    let (d_sinks, d_sinks_noise) = (vec![0.0; heads], vec![SinkNoise::default(); heads]);
    let bias = Additive::of(problem.forward(), &modifiers).filter(|_| problem.wants_d_bias());
    let biases = bias.map_or(0, |_| problem.forward().bias_shape().iter().product());
    let (d_bias, d_bias_noise) = (vec![0.0; biases], vec![BiasNoise::default(); biases]);
    let mut all =
        BackwardOracle { d_q, d_k, d_v, d_q_noise, d_k_noise, d_v_noise, d_sinks, d_sinks_noise, d_bias, d_bias_noise };
    for piece in &pieces {
        let (of_q, of_kv) = (&piece.q, &piece.kv);
        let d_lse = d_lse.map(|d_lse| cut_list(d_lse, problem.d_lse_shape(), of_q));
        let inputs = [&cut(q, of_q), &cut(k, of_kv), &cut(v, of_kv), &cut(d_o, of_q)];
        let own = modifiers.of_sequence(problem.forward(), piece);
        let one = dense(&problem.of_sequence(&piece.problem), inputs, d_lse.as_deref(), own, work)?;
        for (into, rows, from) in
            [(&mut all.d_q, of_q, &one.d_q), (&mut all.d_k, of_kv, &one.d_k), (&mut all.d_v, of_kv, &one.d_v)]
        {
            paste(into, rows, from);
        }
        all.d_q_noise.paste(of_q, &one.d_q_noise);
        all.d_k_noise.paste(of_kv, &one.d_k_noise);
        all.d_v_noise.paste(of_kv, &one.d_v_noise);
        all.d_sinks.iter_mut().zip(one.d_sinks).for_each(|(sum, of_sequence)| *sum += of_sequence);
        all.d_sinks_noise.iter_mut().zip(one.d_sinks_noise).for_each(|(sum, other)| *sum = sum.with(other));
        if let Some(bias) = &bias {
            piece.add_to_bias(bias, &mut all.d_bias, &one.d_bias, |sum, of_sequence| *sum += of_sequence);
            piece.add_to_bias(bias, &mut all.d_bias_noise, &one.d_bias_noise, |sum, other| *sum = sum.with(other));
        }
    }
    Ok(all)
}

/// The oracle of a problem whose sequences all have the same lengths.
fn dense(
    problem: &BackwardProblem,
    [q, k, v, d_o]: [&Tensor; 4],
    d_lse: Option<&[f64]>,
    modifiers: Modifiers<'_>,
    work: &Work<'_>,
) -> Result<BackwardOracle> {
    let (mut k_norms, v_norms) = (norms(k), norms(v));
    // An infinite key has weight 0, or makes its row NaN. Neither widens the tolerance of other keys.
    k_norms.iter_mut().filter(|norm| norm.is_infinite()).for_each(|norm| *norm = 0.0);
    let kept = Kept::new(problem.forward(), &modifiers)?;
    let least_o = half_subnormal(problem.dtype()).max(least_with_dropout(problem.forward(), v));
    let exact = Exact { problem, kept, q, k, v, d_o, d_lse, modifiers, k_norms, v_norms, least_o };
    let dims = problem.dims();

    // Each half has its own copies of the tensors that it sums.
    let (of_k, of_v) = (Squared::new(k), Squared::new(v));
    let (rows, queries): (Vec<Row>, Vec<_>) =
        each_tile(problem.d_lse_shape(), dims.seqlen_kv, work, ORACLE_QUERY_UNITS, |place, queries| {
            exact.queries(&of_k, &of_v, place, queries)
        })
        .into_iter()
        .unzip();
    drop((of_k, of_v));
    let (d_q, d_q_noise) = with_noise(problem.d_q_shape(), &queries);
    let (d_sinks, d_sinks_noise) = exact.sinks(&rows).into_iter().unzip();
    let (d_bias, d_bias_noise) = exact.biases(&rows).into_iter().unzip();

    let (of_q, of_d_o, magnitudes) = (Squared::new(q), Squared::new(d_o), Vectors::new(q, f64::abs));
    let shape = [dims.batch, dims.heads_kv, dims.seqlen_kv];
    let (keys, values): (Vec<_>, Vec<_>) = each_tile(
        shape,
        dims.seqlen_q,
        work,
        ORACLE_KEY_UNITS * problem.forward().group_size() as u64,
        |place, keys| exact.keys(&rows, [&of_q, &of_d_o], &magnitudes, place, keys),
    )
    .into_iter()
    .unzip();
    let (d_k, d_k_noise) = with_noise(problem.d_k_shape(), &keys);
    let (d_v, d_v_noise) = with_noise(problem.d_v_shape(), &values);
    Ok(BackwardOracle { d_q, d_k, d_v, d_q_noise, d_k_noise, d_v_noise, d_sinks, d_sinks_noise, d_bias, d_bias_noise })
}

/// The tensor that these rows make, and its noise.
fn with_noise(shape: [usize; 4], rows: &[Sum]) -> (Tensor, Noise) {
    let roots = |squares: &[f64], out: &mut [f64]| out.iter_mut().zip(squares).for_each(|(out, x)| *out = x.sqrt());
    let noise = Noise {
        deviation: gather(shape, rows, |row, out| roots(&row.noise_squares, out)),
        weighted: gather(shape, rows, |row, out| roots(&row.squares, out)),
        of_delta: gather(shape, rows, |row, out| out.copy_from_slice(&row.of_delta)),
        alike: rows.iter().map(|row| row.alike).collect(),
        terms: rows.iter().map(|row| row.terms).collect(),
    };
    (gather(shape, rows, |row, out| out.copy_from_slice(&row.values)), noise)
}

struct Exact<'a> {
    problem: &'a BackwardProblem,
    kept: Kept<'a>,
    q: &'a Tensor,
    k: &'a Tensor,
    v: &'a Tensor,
    d_o: &'a Tensor,
    d_lse: Option<&'a [f64]>,
    modifiers: Modifiers<'a>,
    /// The norms of the keys, `[batch, heads_kv, seqlen_kv]`.
    k_norms: Vec<f64>,
    /// The norms of the values, `[batch, heads_kv, seqlen_kv]`.
    v_norms: Vec<f64>,
    /// The error of an element of O near 0.
    least_o: f64,
}

/// What all pairs of one query share.
#[derive(Clone, Copy)]
struct Row {
    lse: f64,
    /// What the weights are relative to, and their sum with that of the sink. P is a quotient of weights: next to a large LSE, of
    /// a large bias, f64 has not enough bits for it.
    shift: f64,
    sum: f64,
    /// Whether the query keeps any key. Else O is 0 by definition, whatever dO is.
    has_keys: bool,
    /// `dO . O`, minus the gradient of the LSE.
    delta: f64,
    /// The noise of delta: `n(delta)` in the tolerance.
    delta_noise: f64,
    q_norm: f64,
    d_o_norm: f64,
    /// The relative error that the probabilities have in common, since they are rounded alike.
    alike: f64,
    /// The error of delta if O has this relative error.
    delta_alike: f64,
    /// The error of the LSE.
    lse_noise: f64,
}

impl Row {
    /// P of a score.
    fn weight(&self, score: f64) -> f64 {
        (score - self.shift).exp() / self.sum
    }
}

/// What the error of the score of a key is made of, or the mean of several keys.
#[derive(Clone, Copy, Default)]
struct ErrorSize {
    /// The norm of the key, times what the cap leaves of the error of its score.
    norm: f64,
    /// The magnitude of what is added to the score.
    added: f64,
}

/// One query and one key that the query keeps. The noise is `n(dS)` in the tolerance.
struct Pair {
    d_s: f64,
    d_s_noise: f64,
    /// All of dS, where a GPU may make 0 of it: P or dS are too small for a normal f32.
    flushed: f64,
}

/// A tensor, and the squares of its elements.
struct Squared {
    values: Vectors,
    squares: Vectors,
}

impl Squared {
    fn new(tensor: &Tensor) -> Self {
        Self { values: Vectors::new(tensor, |x| x), squares: Vectors::new(tensor, |x| x * x) }
    }
}

impl Exact<'_> {
    /// For each of these queries of a head what its pairs share, and its row of dQ.
    fn queries(&self, of_k: &Squared, of_v: &Squared, [batch, head]: [usize; 2], queries: Tokens) -> Vec<(Row, Sum)> {
        let dims = self.problem.dims();
        let head_kv = head / self.problem.forward().group_size();
        let place = [batch, head_kv];
        let keys =
            Tokens::of(dims.seqlen_kv, |key| queries.iter().any(|query| self.kept.keep(batch, head, query, key)));
        let pairs = queries.count * keys.count;

        let [mut scores, mut d_p, mut p, mut flat] = [(); 4].map(|()| vec![0.0; pairs]);
        let mut kept = vec![false; pairs];
        // What dropout multiplies P by.
        let mut factors = vec![1.0; pairs];
        let transposed = |tensor| Matrix::of(tensor, batch, head_kv, keys).transposed();
        product(Matrix::of(self.q, batch, head, queries), transposed(self.k), 0.0, &mut scores);
        product(Matrix::of(self.d_o, batch, head, queries), transposed(self.v), 0.0, &mut d_p);
        let added = self.added([batch, head]);
        let mut rows: Vec<(Row, Sum, ErrorSize)> = Vec::with_capacity(queries.count);
        for (i, query) in queries.iter().enumerate() {
            let of_row = i * keys.count..(i + 1) * keys.count;
            let p = &mut p[of_row.clone()];
            factors[of_row.clone()].copy_from_slice(&self.modifiers.dropped([batch, head], query, keys));
            let (factors, kept) = (&factors[of_row.clone()], &mut kept[of_row.clone()]);
            rows.push(self.query([batch, head], query, keys, &scores[of_row], p, (kept, factors)));
        }

        // O, which delta is made of.
        let mut o = Terms::new(queries.count, dims.head_dim_vo);
        let left: Vec<bool> = kept.iter().zip(&factors).map(|(&kept, &factor)| kept && factor != 0.0).collect();
        let mut weights: Vec<f64> = p.iter().zip(&factors).map(|(&p, &factor)| times(factor, p)).collect();
        of_v.values.add_weighted(place, keys, &weights, &left, &mut o.values);
        weights.iter_mut().for_each(|weight| *weight *= *weight);
        of_v.squares.add_weighted(place, keys, &weights, &left, &mut o.squares);
        for (i, query) in queries.iter().enumerate() {
            let (row, _, error_size) = &mut rows[i];
            if row.lse != f64::NEG_INFINITY {
                self.finish([batch, head], query, row, *error_size, o.row(i));
            }
        }

        // What delta has to do with a score's gradient: P, and the derivative of the cap.
        for (at, flat) in flat.iter_mut().enumerate().filter(|(at, _)| kept[*at]) {
            *flat = p[at] * self.softcap().slope(self.scale() * scores[at]);
        }
        let mut mean_key = vec![0.0; queries.count * dims.head_dim_qk];
        of_k.values.add_weighted(place, keys, &flat, &kept, &mut mean_key);
        let mut flushed = vec![0.0; pairs];
        // dS takes the place of the scores, and its squared noise that of P.
        for (i, (row, ..)) in rows.iter().enumerate() {
            for column in 0..keys.count {
                let at = i * keys.count + column;
                if kept[at] {
                    let (query, key) = (queries.first + i, keys.first + column);
                    let token = self.token(batch, head_kv, key);
                    let pair = self.pair(row, token, scores[at], p[at], (d_p[at], factors[at]), added.size(query, key));
                    scores[at] = self.scale() * pair.d_s;
                    p[at] = (self.scale() * pair.d_s_noise).powi(2);
                    flushed[at] = self.scale() * pair.flushed;
                } else {
                    scores[at] = 0.0;
                }
            }
        }
        let mut sums = Terms::new(queries.count, dims.head_dim_qk);
        let mut noise = vec![0.0; queries.count * dims.head_dim_qk];
        of_k.values.add_weighted(place, keys, &scores, &kept, &mut sums.values);
        of_k.squares.add_weighted(place, keys, &p, &kept, &mut noise);
        scores.iter_mut().for_each(|d_s| *d_s *= *d_s);
        of_k.squares.add_weighted(place, keys, &scores, &kept, &mut sums.squares);
        let mut lost = vec![0.0; queries.count * dims.head_dim_qk];
        for (at, &flushed) in flushed.iter().enumerate().filter(|(_, flushed)| **flushed > 0.0) {
            let (row, key) = (at / keys.count * dims.head_dim_qk, keys.first + at % keys.count);
            add_magnitudes(flushed, self.k.row(batch, key, head_kv), &mut lost[row..row + dims.head_dim_qk]);
        }

        let dim = dims.head_dim_qk.max(1);
        let of_rows = mean_key.chunks(dim).zip(noise.chunks(dim).zip(lost.chunks(dim)));
        let of_rows = rows.into_iter().enumerate().zip(of_rows);
        of_rows
            .map(|((i, (row, mut sum, error_size)), (mean_key, (noise, lost)))| {
                let (values, squares) = sums.row(i);
                (sum.values, sum.squares, sum.noise_squares) = (values.to_vec(), squares.to_vec(), noise.to_vec());
                sum.of_delta = lost.to_vec();
                if row.lse != f64::NEG_INFINITY {
                    sum.alike = row.alike.max(self.score_noise(&row, error_size));
                    // All keys of the row share the one error of delta, so it does not average out over the keys.
                    sum.add_noise(self.scale() * row.delta_noise, mean_key);
                    sum.add_of_delta(self.scale() * row.delta_alike, mean_key);
                }
                (row, sum)
            })
            .collect()
    }

    /// The softmax of a query. Fills its rows of the tile: P, and which pairs are kept, which come with the factors of dropout. The
    /// scores are the products of Q and K. The last result is the mean size of the errors of the keys' scores.
    fn query(
        &self,
        [batch, head]: [usize; 2],
        query: usize,
        keys: Tokens,
        scores: &[f64],
        p: &mut [f64],
        (kept, factors): (&mut [bool], &[f64]),
    ) -> (Row, Sum, ErrorSize) {
        let dims = self.problem.dims();
        let head_kv = head / self.problem.forward().group_size();
        let mut row = Row {
            lse: f64::NEG_INFINITY,
            shift: 0.0,
            sum: 1.0,
            has_keys: false,
            delta: 0.0,
            delta_noise: 0.0,
            q_norm: norm(self.q.row(batch, query, head)),
            d_o_norm: norm(self.d_o.row(batch, query, head)),
            alike: 0.0,
            delta_alike: 0.0,
            lse_noise: 0.0,
        };
        let mut sum = Sum::new(dims.head_dim_qk);
        let keeps = |column: &usize| self.kept.keep(batch, head, query, keys.first + column);
        let columns: Vec<usize> = (0..keys.count).filter(keeps).collect();
        row.has_keys = !columns.is_empty();
        let added = self.added([batch, head]);
        let of_column = |column| added.at(query, keys.first + column);
        let soft = Soft::new(self.problem.forward(), columns, scores, of_column, self.modifiers.sink(head));
        row.lse = soft.lse;
        (row.shift, row.sum) = if soft.weights.is_empty() { (soft.lse, 1.0) } else { (shift_of(soft.max), soft.sum) };
        if soft.weights.is_empty() {
            return (row, sum, ErrorSize::default());
        }
        let roundoff = unit_roundoff(self.problem.dtype());
        // O is made of the pairs that are not dropped, and dS of all.
        let of_left = soft.alike(roundoff, |column| factors[column] != 0.0);
        let drops = soft.columns.iter().any(|&column| factors[column] == 0.0);
        let of_all = if drops { alike(roundoff, &soft.scores, &soft.weights) } else { of_left };
        row.alike = roundoff * of_all.max(of_left);
        let mut mean = ErrorSize::default();
        for (&column, score) in soft.columns.iter().zip(&soft.scores) {
            (kept[column], p[column]) = (true, row.weight(*score));
            let token = self.token(batch, head_kv, keys.first + column);
            let size = self.error_size(&row, token, scores[column], added.size(query, keys.first + column));
            mean.norm += p[column] * size.norm;
            mean.added += p[column] * size.added;
        }
        sum.terms = soft.columns.len();
        (row, sum, mean)
    }

    /// What a row has of O: delta and its noise. `o` is its elements, and the sums of their squared terms.
    fn finish(
        &self,
        [batch, head]: [usize; 2],
        query: usize,
        row: &mut Row,
        error_size: ErrorSize,
        (o, squares): (&[f64], &[f64]),
    ) {
        let dims = self.problem.dims();
        let d_o_row = self.d_o.row(batch, query, head);
        // Not the sum of p * dP: where dO is infinite, dP is infinite of both signs.
        row.delta = if row.has_keys { dot(d_o_row, o) } else { 0.0 };
        let d_lse = self.d_lse.map_or(0.0, |d_lse| d_lse[(batch * dims.heads_q + head) * dims.seqlen_q + query]);
        row.delta_alike = row.alike * row.delta.abs();
        row.delta -= d_lse;
        row.lse_noise = self.score_noise(row, error_size);
        if !row.has_keys {
            row.delta_noise = SCORE_ROUNDOFFS * U32 * d_lse.abs();
            return;
        }
        // The O in delta is rounded, and was computed from rounded P.
        let rounded: f64 =
            d_o_row.iter().zip(o.iter().zip(squares)).map(|(d_o, (o, square))| d_o * d_o * (o * o + square)).sum();
        row.delta_noise = (unit_roundoff(self.problem.dtype()) + row.lse_noise) * rounded.sqrt()
            + self.least_o * row.d_o_norm
            + SCORE_ROUNDOFFS * U32 * (row.d_o_norm * norm(o) + d_lse.abs());
    }

    /// The gradient of each sink and its noise. `rows` are those of all queries. None where the problem does not have it.
    fn sinks(&self, rows: &[Row]) -> Vec<(f64, SinkNoise)> {
        let dims = self.problem.dims();
        let heads = if self.problem.wants_d_sinks() { dims.heads_q } else { 0 };
        let of_head = |head| {
            let sink = self.modifiers.sink(head);
            let heads = rows.chunks(dims.seqlen_q.max(1)).skip(head).step_by(dims.heads_q);
            let mut sum = (0.0, SinkNoise::default());
            if sink == f64::NEG_INFINITY {
                return sum;
            }
            for row in heads.flatten().filter(|row| row.lse != f64::NEG_INFINITY) {
                let p = if sink == row.lse { 1.0 } else { (sink - row.lse).exp() };
                let p_noise = SCORE_ROUNDOFFS * U32 * if sink.is_finite() { sink.abs() } else { 0.0 } + row.lse_noise;
                sum.0 -= p * row.delta;
                sum.1 = sum.1.with(SinkNoise {
                    deviation: p * row.delta_noise.hypot(p_noise * row.delta),
                    of_delta: p * row.delta_alike,
                    magnitude: (p * row.delta).abs(),
                    flushed: f64::from(f32::MIN_POSITIVE) * (1.0 + row.delta.abs()),
                    terms: 1,
                });
            }
            sum
        };
        (0..heads).map(of_head).collect()
    }

    /// These keys' rows of dK and dV. `magnitudes` are those of Q.
    fn keys(
        &self,
        rows: &[Row],
        [of_q, of_d_o]: [&Squared; 2],
        magnitudes: &Vectors,
        [batch, head_kv]: [usize; 2],
        keys: Tokens,
    ) -> Vec<(Sum, Sum)> {
        let dims = self.problem.dims();
        let group = self.problem.forward().group_size();
        let heads = head_kv * group..(head_kv + 1) * group;
        let keeps = |query, key| heads.clone().any(|head| self.kept.keep(batch, head, query, key));
        let queries = Tokens::of(dims.seqlen_q, |query| keys.iter().any(|key| keeps(query, key)));
        let pairs = keys.count * queries.count;
        let [mut scores, mut d_p, mut noise, mut of_delta, mut p_noise] = [(); 5].map(|()| vec![0.0; pairs]);
        let mut kept = vec![false; pairs];
        let mut d_k = Terms::new(keys.count, dims.head_dim_qk);
        let mut d_v = Terms::new(keys.count, dims.head_dim_vo);
        let [mut d_k_noise, mut d_k_of_delta] = [(); 2].map(|()| vec![0.0; keys.count * dims.head_dim_qk]);
        let [mut d_v_noise, mut d_v_lost] = [(); 2].map(|()| vec![0.0; keys.count * dims.head_dim_vo]);
        // Which pairs are kept and not dropped.
        let mut left = vec![false; pairs];
        // For each key the number of pairs, the sum of P, and the sum of P times what P has in common: of dK, and of dV without the
        // dropped pairs.
        let mut weights = vec![[(0, 0.0, 0.0); 2]; keys.count];
        for head in heads.clone() {
            let place = [batch, head];
            let of_keys = |tensor| Matrix::of(tensor, batch, head_kv, keys);
            product(of_keys(self.k), Matrix::of(self.q, batch, head, queries).transposed(), 0.0, &mut scores);
            product(of_keys(self.v), Matrix::of(self.d_o, batch, head, queries).transposed(), 0.0, &mut d_p);
            let added = self.added([batch, head]);
            let rows = &rows[(batch * dims.heads_q + head) * dims.seqlen_q + queries.first..][..queries.count];
            let factors: Vec<Vec<f64>> =
                queries.iter().map(|query| self.modifiers.dropped(place, query, keys)).collect();
            for (i, key) in keys.iter().enumerate() {
                let token = self.token(batch, head_kv, key);
                for (column, row) in rows.iter().enumerate() {
                    let at = i * queries.count + column;
                    kept[at] = row.lse != f64::NEG_INFINITY && self.kept.keep(batch, head, queries.first + column, key);
                    if !kept[at] {
                        // Also what is left of another head, which keeps the pair.
                        (left[at], p_noise[at]) = (false, 0.0);
                        (scores[at], d_p[at], noise[at], of_delta[at]) = (0.0, 0.0, 0.0, 0.0);
                        continue;
                    }
                    let score = self.scale() * scores[at];
                    let query = queries.first + column;
                    let added_size = added.size(query, key);
                    let p = row.weight(self.softcap().score(score) + added.at(query, key));
                    let error_size = self.error_size(row, token, scores[at], added_size);
                    let factor = factors[column][i];
                    left[at] = factor != 0.0;
                    let pair = self.pair(row, token, scores[at], p, (d_p[at], factor), added_size);
                    p_noise[at] = times(factor, self.p_noise(row, error_size, p));
                    if left[at] && p < FLUSHED && counted(factor * p) > 0.0 {
                        let lost = &mut d_v_lost[i * dims.head_dim_vo..(i + 1) * dims.head_dim_vo];
                        add_magnitudes(factor * p, self.d_o.row(batch, query, head), lost);
                    }
                    // P after dropout, dS, the squared noise of dS and the error of delta.
                    (scores[at], d_p[at]) = (times(factor, p), self.scale() * pair.d_s);
                    let flat = p * self.softcap().slope(score);
                    let delta_noise = flat * row.delta_noise;
                    let squares = pair.d_s_noise * pair.d_s_noise + delta_noise * delta_noise;
                    // Of infinity and NaN `hypot` makes infinity.
                    let squares = if squares.is_nan() { pair.d_s_noise.hypot(delta_noise) } else { squares };
                    noise[at] = self.scale().powi(2) * squares;
                    of_delta[at] = self.scale() * (flat * row.delta_alike + pair.flushed);
                    let common = row.alike.max(self.score_noise(row, error_size));
                    for (terms, weight, alike) in &mut weights[i][..if left[at] { 2 } else { 1 }] {
                        *terms += 1;
                        *weight += p;
                        *alike += p * common;
                    }
                }
            }
            of_q.values.add_weighted(place, queries, &d_p, &kept, &mut d_k.values);
            of_q.squares.add_weighted(place, queries, &noise, &kept, &mut d_k_noise);
            magnitudes.add_weighted(place, queries, &of_delta, &kept, &mut d_k_of_delta);
            of_d_o.values.add_weighted(place, queries, &scores, &left, &mut d_v.values);
            // The squares of dS, of P, and of the noise of P.
            d_p.iter_mut().for_each(|d_s| *d_s *= *d_s);
            of_q.squares.add_weighted(place, queries, &d_p, &kept, &mut d_k.squares);
            for at in (0..pairs).filter(|&at| kept[at]) {
                p_noise[at] = p_noise[at].powi(2);
                scores[at] *= scores[at];
            }
            of_d_o.squares.add_weighted(place, queries, &p_noise, &left, &mut d_v_noise);
            of_d_o.squares.add_weighted(place, queries, &scores, &left, &mut d_v.squares);
        }

        let of_row = |all: &[f64], i: usize| all[i * all.len() / keys.count..(i + 1) * all.len() / keys.count].to_vec();
        let of_key = |(i, &[of_k, of_v]): (usize, &[(usize, f64, f64); 2])| {
            let sum =
                |terms_of: &Terms, noise: &[f64], of_delta: Vec<f64>, (terms, weight, alike): (usize, f64, f64)| {
                    let (values, squares) = terms_of.row(i);
                    // Without a weight there is nothing that could be off.
                    let alike = alike / f64::max(weight, f64::MIN_POSITIVE);
                    let (values, squares) = (values.to_vec(), squares.to_vec());
                    Sum { values, squares, noise_squares: of_row(noise, i), of_delta, alike, terms }
                };
            let of_delta = of_row(&d_k_of_delta, i);
            (sum(&d_k, &d_k_noise, of_delta, of_k), sum(&d_v, &d_v_noise, of_row(&d_v_lost, i), of_v))
        };
        weights.iter().enumerate().map(of_key).collect()
    }

    /// The pair of a query and a key. `token` is the key's index in the norms, `product` that of Q and K, and `added` the magnitude
    /// of what is added to the score. `d_p` comes with what dropout multiplies it by.
    fn pair(&self, row: &Row, token: usize, product: f64, p: f64, (d_p, factor): (f64, f64), added: f64) -> Pair {
        let (softcap, score) = (self.softcap(), self.scale() * product);
        let d_p = times(factor, d_p);
        let slope = softcap.slope(score);
        let d_s = p * (d_p - row.delta) * slope;
        let of_score = self.score_noise(row, self.error_size(row, token, product, added));
        let roundoff = unit_roundoff(self.problem.dtype());
        let d_p_noise = times(factor, SCORE_ROUNDOFFS * U32 * row.d_o_norm * self.v_norms[token]);
        let slope_noise = softcap.slope_noise(score, self.scale() * row.q_norm * self.k_norms[token]);
        Pair {
            d_s,
            // (The factor of dropout comes last.)
            flushed: if p < FLUSHED || d_s.abs() < FLUSHED * f64::from(self.problem.forward().dropout_factor()) {
                counted(d_s)
            } else {
                0.0
            },
            // A kernel may round P before it makes dS of it.
            d_s_noise: (SQRT_2 * roundoff + of_score) * d_s.abs()
                + p * slope * d_p_noise
                + p * slope_noise * (d_p - row.delta).abs()
                + self.least()
                + self.flushed() * (d_p - row.delta).abs(),
        }
    }

    /// The noise of a probability: `n(p)` in the tolerance.
    fn p_noise(&self, row: &Row, error_size: ErrorSize, p: f64) -> f64 {
        (unit_roundoff(self.problem.dtype()) + self.score_noise(row, error_size)) * p + self.least()
    }

    /// The error of numbers near 0: `t` in the tolerance.
    fn least(&self) -> f64 {
        half_subnormal(self.problem.dtype()).max(self.flushed())
    }

    /// The part of each term in the largest error of a sum whose terms are flushed to 0. These errors have one sign, but they are
    /// added as if they had any.
    fn flushed(&self) -> f64 {
        let dims = self.problem.dims();
        let pairs = (dims.seqlen_q * (dims.heads_q / dims.heads_kv)).max(dims.seqlen_kv);
        SMALLEST_NORMAL * (pairs as f64).sqrt()
    }

    /// The error of a score and of the LSE, which is the relative error of the probability: `s` in the tolerance of the
    /// gradients. `size` is that of the key.
    fn score_noise(&self, row: &Row, size: ErrorSize) -> f64 {
        let lse = if row.lse.is_finite() { row.lse.abs() } else { 0.0 };
        // Without a key there is no product, whatever the query is.
        let of_product = if size.norm == 0.0 { 0.0 } else { self.scale() * row.q_norm * size.norm };
        SCORE_ROUNDOFFS * U32 * (of_product + size.added + lse.max(1.0) + self.softcap().cap)
    }

    /// What the error of a key's score is made of. `added` is the magnitude of what is added to it.
    fn error_size(&self, row: &Row, token: usize, product: f64, added: f64) -> ErrorSize {
        let norm = self.k_norms[token];
        let left = self.softcap().steepest(self.scale() * product, self.scale() * row.q_norm * norm);
        ErrorSize { norm: norm * left, added }
    }

    fn added(&self, place: [usize; 2]) -> Added<'_> {
        Added::of(self.problem.forward(), self.modifiers, place)
    }

    fn softcap(&self) -> Softcap {
        Softcap::of(self.problem.forward())
    }

    fn scale(&self) -> f64 {
        f64::from(self.problem.softmax_scale())
    }

    fn token(&self, batch: usize, head_kv: usize, key: usize) -> usize {
        let dims = self.problem.dims();
        (batch * dims.heads_kv + head_kv) * dims.seqlen_kv + key
    }
}

/// A number after dropout: nothing of a dropped one is left, whatever it is.
fn times(factor: f64, x: f64) -> f64 {
    if factor == 0.0 { 0.0 } else { factor * x }
}

/// A sum of weighted vectors: its elements, and for each element the sums of the squared terms, of their squared noise, and of
/// [`Noise::of_delta`].
struct Sum {
    values: Vec<f64>,
    squares: Vec<f64>,
    noise_squares: Vec<f64>,
    of_delta: Vec<f64>,
    alike: f64,
    terms: usize,
}

impl Sum {
    fn new(dim: usize) -> Self {
        let [values, squares, noise_squares, of_delta] = [(); 4].map(|()| vec![0.0; dim]);
        Self { values, squares, noise_squares, of_delta, alike: 0.0, terms: 0 }
    }

    fn add_of_delta(&mut self, error: f64, vector: &[f64]) {
        self.of_delta.iter_mut().zip(vector).for_each(|(sum, x)| *sum += (error * x).abs());
    }

    fn add_noise(&mut self, noise: f64, vector: &[f64]) {
        self.noise_squares.iter_mut().zip(vector).for_each(|(square, x)| *square += (noise * x) * (noise * x));
    }
}

/// For rows of sums of weighted vectors: the sums, and the sums of the squared terms.
struct Terms {
    dim: usize,
    values: Vec<f64>,
    squares: Vec<f64>,
}

impl Terms {
    fn new(rows: usize, dim: usize) -> Self {
        Self { dim, values: vec![0.0; rows * dim], squares: vec![0.0; rows * dim] }
    }

    fn row(&self, i: usize) -> (&[f64], &[f64]) {
        let at = i * self.dim..(i + 1) * self.dim;
        (&self.values[at.clone()], &self.squares[at])
    }
}
