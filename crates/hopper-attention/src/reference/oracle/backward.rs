//! The oracle of the gradients: f64, from the definition. Each row of dQ, and each row of dK and dV, is computed by itself.

use std::f64::consts::SQRT_2;

use super::super::rounding::{SCORE_ROUNDOFFS, SMALLEST_NORMAL, U32, half_subnormal, unit_roundoff};
use super::super::{Tensor, check_backward_inputs, each_row, gather};
use super::{alike, dot};
use crate::error::Result;
use crate::problem::BackwardProblem;

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

/// Computes the gradients in f64. O and the LSE are computed anew.
///
/// - Shapes are the problem's. `d_lse` is `[batch, heads_q, seqlen_q]`. The elements must be those that the tested computation
///   reads: already rounded to its type.
/// - A query that keeps no key has no part in any gradient. Neither has a query whose kept keys all have score -inf.
/// - Masked pairs are never read.
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
    check_backward_inputs(problem, [q, k, v, d_o], d_lse)?;
    let (mut k_norms, v_norms) = (norms(k), norms(v));
    // An infinite key has weight 0, or makes its row NaN. Neither widens the tolerance of other keys.
    k_norms.iter_mut().filter(|norm| norm.is_infinite()).for_each(|norm| *norm = 0.0);
    let exact = Exact { problem, q, k, v, d_o, d_lse, k_norms, v_norms };
    let dims = problem.dims();

    let shape = problem.d_lse_shape();
    let (rows, queries): (Vec<Row>, Vec<_>) =
        each_row(shape, |[batch, head, query]| exact.query(batch, head, query)).into_iter().unzip();
    let (d_q, d_q_noise) = with_noise(problem.d_q_shape(), &queries);

    let shape = [dims.batch, dims.heads_kv, dims.seqlen_kv];
    let (keys, values): (Vec<_>, Vec<_>) =
        each_row(shape, |[batch, head, key]| exact.key(&rows, batch, head, key)).into_iter().unzip();
    let (d_k, d_k_noise) = with_noise(problem.d_k_shape(), &keys);
    let (d_v, d_v_noise) = with_noise(problem.d_v_shape(), &values);
    Ok(BackwardOracle { d_q, d_k, d_v, d_q_noise, d_k_noise, d_v_noise })
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
    q: &'a Tensor,
    k: &'a Tensor,
    v: &'a Tensor,
    d_o: &'a Tensor,
    d_lse: Option<&'a [f64]>,
    /// The norms of the keys, `[batch, heads_kv, seqlen_kv]`.
    k_norms: Vec<f64>,
    /// The norms of the values, `[batch, heads_kv, seqlen_kv]`.
    v_norms: Vec<f64>,
}

/// What all pairs of one query share.
#[derive(Clone, Copy)]
struct Row {
    lse: f64,
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
}

/// One query and one key that the query keeps. The noise is `n(p)` and `n(dS)` in the tolerance.
struct Pair {
    p: f64,
    d_s: f64,
    p_noise: f64,
    d_s_noise: f64,
}

impl Exact<'_> {
    /// What all pairs of a query share, and the query's row of dQ.
    fn query(&self, batch: usize, head: usize, query: usize) -> (Row, Sum) {
        let dims = self.problem.dims();
        let head_kv = head / self.problem.forward().group_size();
        let (q_row, d_o_row) = (self.q.row(batch, query, head), self.d_o.row(batch, query, head));
        let (q_norm, d_o_norm) = (norm(q_row), norm(d_o_row));
        let mut row = Row {
            lse: f64::NEG_INFINITY,
            delta: 0.0,
            delta_noise: 0.0,
            q_norm,
            d_o_norm,
            alike: 0.0,
            delta_alike: 0.0,
        };
        let mut sum = Sum::new(dims.head_dim_qk);

        let keys: Vec<usize> = (0..dims.seqlen_kv).filter(|&key| self.keep(query, key)).collect();
        let scores: Vec<f64> = keys.iter().map(|&key| self.score(batch, head, query, key)).collect();
        // `f64::max` ignores a NaN. The sum below is then NaN.
        let row_max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if row_max == f64::NEG_INFINITY && !scores.iter().any(|score| score.is_nan()) {
            return (row, sum);
        }
        let shift = if row_max == f64::NEG_INFINITY { 0.0 } else { row_max };
        let weights: Vec<f64> = scores.iter().map(|score| (score - shift).exp()).collect();
        row.lse = shift + weights.iter().sum::<f64>().ln();
        let roundoff = unit_roundoff(self.problem.dtype());
        row.alike = roundoff * alike(roundoff, &scores, &weights);

        let d_p: Vec<f64> = keys.iter().map(|&key| dot(d_o_row, self.v.row(batch, key, head_kv))).collect();
        let mut o = Sum::new(dims.head_dim_vo);
        let mut key_norm = 0.0;
        for (&key, score) in keys.iter().zip(&scores) {
            let p = (score - row.lse).exp();
            o.add(p, self.v.row(batch, key, head_kv));
            key_norm += p * self.k_norms[self.token(batch, head_kv, key)];
        }
        // Not the sum of p * dP: where dO is infinite, dP is infinite of both signs.
        row.delta = dot(d_o_row, &o.values);
        let d_lse = self.d_lse.map_or(0.0, |d_lse| d_lse[(batch * dims.heads_q + head) * dims.seqlen_q + query]);
        row.delta_alike = row.alike * row.delta.abs();
        row.delta -= d_lse;
        // The O in delta is rounded, and was computed from rounded P.
        let rounded: f64 = d_o_row
            .iter()
            .zip(o.values.iter().zip(&o.squares))
            .map(|(d_o, (o, square))| d_o * d_o * (o * o + square))
            .sum();
        row.delta_noise = (unit_roundoff(self.problem.dtype()) + self.score_noise(&row, key_norm)) * rounded.sqrt()
            + SCORE_ROUNDOFFS * U32 * (d_o_norm * norm(&o.values) + d_lse.abs());

        let mut mean_key = vec![0.0; dims.head_dim_qk];
        for ((&key, &score), &d_p) in keys.iter().zip(&scores).zip(&d_p) {
            let pair = self.pair(&row, self.token(batch, head_kv, key), score, d_p);
            let k_row = self.k.row(batch, key, head_kv);
            sum.add(self.scale() * pair.d_s, k_row);
            sum.add_noise(self.scale() * pair.d_s_noise, k_row);
            mean_key.iter_mut().zip(k_row).for_each(|(mean, k)| *mean += pair.p * k);
        }
        sum.alike = row.alike.max(self.score_noise(&row, key_norm));
        // All keys of the row share the one error of delta, so it does not average out over the keys.
        sum.add_noise(self.scale() * row.delta_noise, &mean_key);
        sum.add_of_delta(self.scale() * row.delta_alike, &mean_key);
        (row, sum)
    }

    /// A key's rows of dK and dV.
    fn key(&self, rows: &[Row], batch: usize, head_kv: usize, key: usize) -> (Sum, Sum) {
        let dims = self.problem.dims();
        let group = self.problem.forward().group_size();
        let (mut d_k, mut d_v) = (Sum::new(dims.head_dim_qk), Sum::new(dims.head_dim_vo));
        let mut weight = 0.0;
        for head in head_kv * group..(head_kv + 1) * group {
            for query in (0..dims.seqlen_q).filter(|&query| self.keep(query, key)) {
                let row = &rows[(batch * dims.heads_q + head) * dims.seqlen_q + query];
                if row.lse == f64::NEG_INFINITY {
                    continue;
                }
                let (q_row, d_o_row) = (self.q.row(batch, query, head), self.d_o.row(batch, query, head));
                let d_p = dot(d_o_row, self.v.row(batch, key, head_kv));
                let token = self.token(batch, head_kv, key);
                let pair = self.pair(row, token, self.score(batch, head, query, key), d_p);
                d_k.add(self.scale() * pair.d_s, q_row);
                d_k.add_noise(self.scale() * pair.d_s_noise.hypot(pair.p * row.delta_noise), q_row);
                d_k.add_of_delta(self.scale() * pair.p * row.delta_alike, q_row);
                d_v.add(pair.p, d_o_row);
                d_v.add_noise(pair.p_noise, d_o_row);
                d_v.alike += pair.p * row.alike.max(self.score_noise(row, self.k_norms[token]));
                weight += pair.p;
            }
        }
        // Without a weight there is nothing that could be off.
        d_v.alike /= weight.max(f64::MIN_POSITIVE);
        d_k.alike = d_v.alike;
        (d_k, d_v)
    }

    /// The pair of a query and a key. `token` is the key's index in the norms.
    fn pair(&self, row: &Row, token: usize, score: f64, d_p: f64) -> Pair {
        let p = (score - row.lse).exp();
        let d_s = p * (d_p - row.delta);
        let dtype = self.problem.dtype();
        let (roundoff, of_score) = (unit_roundoff(dtype), self.score_noise(row, self.k_norms[token]));
        let d_p_noise = SCORE_ROUNDOFFS * U32 * row.d_o_norm * self.v_norms[token];
        Pair {
            p,
            d_s,
            p_noise: (roundoff + of_score) * p + half_subnormal(dtype),
            // A kernel may round P before it makes dS of it.
            d_s_noise: (SQRT_2 * roundoff + of_score) * d_s.abs()
                + p * d_p_noise
                + half_subnormal(dtype)
                + SMALLEST_NORMAL * (d_p - row.delta).abs(),
        }
    }

    /// The error of a score and of the LSE, which is the relative error of the probability: `s` in the tolerance of the
    /// gradients.
    fn score_noise(&self, row: &Row, k_norm: f64) -> f64 {
        SCORE_ROUNDOFFS * U32 * (self.scale() * row.q_norm * k_norm + row.lse.abs().max(1.0))
    }

    fn scale(&self) -> f64 {
        f64::from(self.problem.softmax_scale())
    }

    fn score(&self, batch: usize, head: usize, query: usize, key: usize) -> f64 {
        let head_kv = head / self.problem.forward().group_size();
        self.scale() * dot(self.q.row(batch, query, head), self.k.row(batch, key, head_kv))
    }

    fn keep(&self, query: usize, key: usize) -> bool {
        let dims = self.problem.dims();
        self.problem.mask().keep(query, key, dims.seqlen_q, dims.seqlen_kv)
    }

    fn token(&self, batch: usize, head_kv: usize, key: usize) -> usize {
        let dims = self.problem.dims();
        (batch * dims.heads_kv + head_kv) * dims.seqlen_kv + key
    }
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

    fn add(&mut self, weight: f64, vector: &[f64]) {
        for ((value, square), x) in self.values.iter_mut().zip(&mut self.squares).zip(vector) {
            let term = weight * x;
            *value += term;
            *square += term * term;
        }
        self.terms += 1;
    }

    fn add_of_delta(&mut self, error: f64, vector: &[f64]) {
        self.of_delta.iter_mut().zip(vector).for_each(|(sum, x)| *sum += (error * x).abs());
    }

    fn add_noise(&mut self, noise: f64, vector: &[f64]) {
        self.noise_squares.iter_mut().zip(vector).for_each(|(square, x)| *square += (noise * x) * (noise * x));
    }
}

fn norm(row: &[f64]) -> f64 {
    dot(row, row).sqrt()
}

/// The norm of every row, in the order of `[batch, head, token]`.
fn norms(tensor: &Tensor) -> Vec<f64> {
    let [batch, seqlen, heads, _] = tensor.shape();
    each_row([batch, heads, seqlen], |[batch, head, token]| norm(tensor.row(batch, token, head)))
}
