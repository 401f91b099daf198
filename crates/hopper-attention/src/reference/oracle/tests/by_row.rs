//! The same results, one row at a time and with plain loops over the keys: as a textbook writes it.

use std::f64::consts::SQRT_2;

use super::super::super::Tensor;
use super::super::super::rounding::{ROUNDING, SCORE_ROUNDOFFS, SMALLEST_NORMAL, U32, half_subnormal, unit_roundoff};
use super::super::super::softcap::Softcap;
use super::super::{E4M3_LEAST, RowScale, alike, dot, finite_dot, norm, norms};
use crate::dtype::DType;
use crate::problem::{BackwardProblem, ForwardProblem};

pub(super) struct Row {
    pub o: Vec<f64>,
    pub weighted: Vec<f64>,
    pub lost: Vec<f64>,
    pub lse: f64,
    pub scale: RowScale,
}

pub(super) fn row(
    problem: &ForwardProblem,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    batch: usize,
    head: usize,
    query: usize,
) -> Row {
    let dims = problem.dims();
    let (mask, softmax_scale) = (problem.mask(), f64::from(problem.softmax_scale()));
    let head_kv = head / (dims.heads_q / dims.heads_kv);
    let q_row = q.row(batch, query, head);

    let keys: Vec<usize> =
        (0..dims.seqlen_kv).filter(|&key| mask.keep(query, key, dims.seqlen_q, dims.seqlen_kv)).collect();
    let uncapped = |key: usize| softmax_scale * dot(q_row, k.row(batch, key, head_kv));
    let softcap = Softcap::of(problem);
    let scores: Vec<f64> = keys.iter().map(|&key| capped(problem.softcap(), uncapped(key))).collect();

    let mut o = vec![0.0; dims.head_dim_vo];
    // `f64::max` ignores a NaN. The weight of that key below is NaN, and so is then the row.
    let row_max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if row_max == f64::NEG_INFINITY && !scores.iter().any(|score| score.is_nan()) {
        return Row { weighted: o.clone(), lost: o.clone(), o, lse: f64::NEG_INFINITY, scale: RowScale::default() };
    }
    let shift = if row_max == f64::NEG_INFINITY { 0.0 } else { row_max };
    let weights: Vec<f64> = scores.iter().map(|score| (score - shift).exp()).collect();
    let row_sum: f64 = weights.iter().sum();

    let mut key_norm = 0.0;
    for (&key, weight) in keys.iter().zip(&weights) {
        let (p, v_row, k_row) = (weight / row_sum, v.row(batch, key, head_kv), k.row(batch, key, head_kv));
        o.iter_mut().zip(v_row).for_each(|(o, v)| *o += p * v);
        // A key of weight 0 may be infinite.
        if p != 0.0 {
            let norm = dot(k_row, k_row).sqrt();
            let left = softcap.steepest(uncapped(key), softmax_scale * dot(q_row, q_row).sqrt() * norm);
            key_norm += if left == 0.0 { 0.0 } else { p * left * norm };
        }
    }

    let mut noise = WeightNoise::new(dims.head_dim_vo);
    let mut centred = WeightNoise::new(dims.head_dim_vo);
    let o_squares = finite_dot(&o, &o);
    let roundoff = unit_roundoff(problem.dtype());
    let mut lost = vec![0.0; dims.head_dim_vo];
    for (&key, weight) in keys.iter().zip(&weights) {
        let (mut p, v_row) = (weight / row_sum, v.row(batch, key, head_kv));
        let along = finite_dot(v_row, &o);
        if problem.dtype() == DType::E4M3 {
            let centred_row = || v_row.iter().zip(&o).map(|(v, o)| v - o);
            // The largest of `weights` is 1.
            if *weight < E4M3_LEAST {
                lost.iter_mut().zip(centred_row()).for_each(|(lost, v)| *lost += p * v);
            }
            p = p.hypot(weight.min(E4M3_LEAST) / row_sum / (ROUNDING * roundoff));
            centred.add(p, centred_row(), along - o_squares);
        }
        noise.add(p, v_row.iter().copied(), along);
    }
    let weighted = noise.squares.iter().zip(&centred.squares).map(|(a, b)| a.max(*b).sqrt()).collect();
    let score = softmax_scale * dot(q_row, q_row).sqrt() * key_norm;
    let scale = RowScale {
        score,
        score_of_o: score,
        along: noise.along.max(centred.along).sqrt(),
        alike: alike(roundoff, &scores, &weights),
        row_max,
        keys: keys.len(),
        sink: 0.0,
        share: 1.0,
        cap: f64::from(problem.softcap()),
        added: 0.0,
        added_of_o: 0.0,
        key_weights: weights.iter().sum(),
    };
    Row { o, weighted, lost, lse: shift + row_sum.ln(), scale }
}

/// A score with a cap, if there is one.
fn capped(cap: f32, score: f64) -> f64 {
    let cap = f64::from(cap);
    if cap == 0.0 { score } else { cap * (score / cap).tanh() }
}

/// The variance of a row's errors, if each weight has an independent error with a relative standard deviation of 1.
struct WeightNoise {
    squares: Vec<f64>,
    /// Of the sum of the errors times the row.
    along: f64,
}

impl WeightNoise {
    fn new(dim: usize) -> Self {
        Self { squares: vec![0.0; dim], along: 0.0 }
    }

    fn add(&mut self, p: f64, values: impl Iterator<Item = f64>, along: f64) {
        self.squares.iter_mut().zip(values).for_each(|(square, v)| *square += (p * v).powi(2));
        self.along += (p * along).powi(2);
    }
}

/// The queries of a head, and then its keys.
pub(super) fn backward(
    problem: &BackwardProblem,
    [q, k, v, d_o]: [&Tensor; 4],
    d_lse: Option<&[f64]>,
) -> (Vec<Sum>, Vec<(Sum, Sum)>) {
    let (mut k_norms, v_norms) = (norms(k), norms(v));
    k_norms.iter_mut().filter(|norm| norm.is_infinite()).for_each(|norm| *norm = 0.0);
    let exact = Exact { problem, q, k, v, d_o, d_lse, k_norms, v_norms };
    let dims = problem.dims();
    let each = |heads: usize, seqlen: usize| {
        (0..dims.batch).flat_map(move |b| (0..heads).flat_map(move |h| (0..seqlen).map(move |s| (b, h, s))))
    };
    let (rows, queries): (Vec<OfRow>, Vec<Sum>) =
        each(dims.heads_q, dims.seqlen_q).map(|(b, h, s)| exact.query(b, h, s)).unzip();
    (queries, each(dims.heads_kv, dims.seqlen_kv).map(|(b, h, s)| exact.key(&rows, b, h, s)).collect())
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
struct OfRow {
    lse: f64,
    /// What weights are relative to, and their sum.
    softmax: [f64; 2],
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
    /// P times the derivative of the cap.
    flat: f64,
    d_s: f64,
    p_noise: f64,
    d_s_noise: f64,
}

impl Exact<'_> {
    /// What all pairs of a query share, and the query's row of dQ.
    fn query(&self, batch: usize, head: usize, query: usize) -> (OfRow, Sum) {
        let dims = self.problem.dims();
        let head_kv = head / self.problem.forward().group_size();
        let (q_row, d_o_row) = (self.q.row(batch, query, head), self.d_o.row(batch, query, head));
        let (q_norm, d_o_norm) = (norm(q_row), norm(d_o_row));
        let mut row = OfRow {
            lse: f64::NEG_INFINITY,
            softmax: [0.0, 1.0],
            delta: 0.0,
            delta_noise: 0.0,
            q_norm,
            d_o_norm,
            alike: 0.0,
            delta_alike: 0.0,
        };
        let mut sum = Sum::new(dims.head_dim_qk);

        let keys: Vec<usize> = (0..dims.seqlen_kv).filter(|&key| self.keep(query, key)).collect();
        let cap = self.problem.forward().softcap();
        let uncapped: Vec<f64> = keys.iter().map(|&key| self.score(batch, head, query, key)).collect();
        let scores: Vec<f64> = uncapped.iter().map(|&score| capped(cap, score)).collect();
        // `f64::max` ignores a NaN. The sum below is then NaN.
        let row_max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if row_max == f64::NEG_INFINITY && !scores.iter().any(|score| score.is_nan()) {
            return (row, sum);
        }
        let shift = if row_max == f64::NEG_INFINITY { 0.0 } else { row_max };
        let weights: Vec<f64> = scores.iter().map(|score| (score - shift).exp()).collect();
        row.softmax = [shift, weights.iter().sum()];
        row.lse = shift + row.softmax[1].ln();
        let roundoff = unit_roundoff(self.problem.dtype());
        row.alike = roundoff * alike(roundoff, &scores, &weights);

        let d_p: Vec<f64> = keys.iter().map(|&key| dot(d_o_row, self.v.row(batch, key, head_kv))).collect();
        let mut o = Sum::new(dims.head_dim_vo);
        let mut key_norm = 0.0;
        for (&key, score) in keys.iter().zip(&scores) {
            let p = (score - row.softmax[0]).exp() / row.softmax[1];
            o.add(p, self.v.row(batch, key, head_kv));
            key_norm += p * self.error_norm(&row, batch, head, query, key);
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
            + half_subnormal(self.problem.dtype()) * d_o_norm
            + SCORE_ROUNDOFFS * U32 * (d_o_norm * norm(&o.values) + d_lse.abs());

        let mut mean_key = vec![0.0; dims.head_dim_qk];
        for ((&key, &score), &d_p) in keys.iter().zip(&uncapped).zip(&d_p) {
            let pair = self.pair(&row, self.token(batch, head_kv, key), score, d_p);
            let k_row = self.k.row(batch, key, head_kv);
            sum.add(self.scale() * pair.d_s, k_row);
            sum.add_noise(self.scale() * pair.d_s_noise, k_row);
            mean_key.iter_mut().zip(k_row).for_each(|(mean, k)| *mean += pair.flat * k);
        }
        sum.alike = row.alike.max(self.score_noise(&row, key_norm));
        // All keys of the row share the one error of delta, so it does not average out over the keys.
        sum.add_noise(self.scale() * row.delta_noise, &mean_key);
        sum.add_of_delta(self.scale() * row.delta_alike, &mean_key);
        (row, sum)
    }

    /// A key's rows of dK and dV.
    fn key(&self, rows: &[OfRow], batch: usize, head_kv: usize, key: usize) -> (Sum, Sum) {
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
                d_k.add_noise(self.scale() * pair.d_s_noise.hypot(pair.flat * row.delta_noise), q_row);
                d_k.add_of_delta(self.scale() * pair.flat * row.delta_alike, q_row);
                d_v.add(pair.p, d_o_row);
                d_v.add_noise(pair.p_noise, d_o_row);
                let of_score = self.score_noise(row, self.error_norm(row, batch, head, query, key));
                d_v.alike += pair.p * row.alike.max(of_score);
                weight += pair.p;
            }
        }
        // Without a weight there is nothing that could be off.
        d_v.alike /= weight.max(f64::MIN_POSITIVE);
        d_k.alike = d_v.alike;
        (d_k, d_v)
    }

    /// The pair of a query and a key. `token` is the key's index in the norms. The score is without the cap.
    fn pair(&self, row: &OfRow, token: usize, score: f64, d_p: f64) -> Pair {
        let softcap = Softcap::of(self.problem.forward());
        let p = (capped(self.problem.forward().softcap(), score) - row.softmax[0]).exp() / row.softmax[1];
        let slope = if softcap.cap == 0.0 { 1.0 } else { 1.0 - (score / softcap.cap).tanh().powi(2) };
        let d_s = p * (d_p - row.delta) * slope;
        let dtype = self.problem.dtype();
        let size = self.scale() * row.q_norm * self.k_norms[token];
        let error_norm = self.k_norms[token] * softcap.steepest(score, size);
        let (roundoff, of_score) = (unit_roundoff(dtype), self.score_noise(row, error_norm));
        let d_p_noise = SCORE_ROUNDOFFS * U32 * row.d_o_norm * self.v_norms[token];
        Pair {
            p,
            flat: p * slope,
            d_s,
            p_noise: (roundoff + of_score) * p + half_subnormal(dtype),
            // A kernel may round P before it makes dS of it.
            d_s_noise: (SQRT_2 * roundoff + of_score) * d_s.abs()
                + p * slope * d_p_noise
                + p * softcap.slope_noise(score, size) * (d_p - row.delta).abs()
                + half_subnormal(dtype)
                + SMALLEST_NORMAL * (d_p - row.delta).abs(),
        }
    }

    /// The error of a score and of the LSE, which is the relative error of the probability: `s` in the tolerance of
    /// the gradients.
    fn score_noise(&self, row: &OfRow, error_norm: f64) -> f64 {
        let cap = f64::from(self.problem.forward().softcap());
        SCORE_ROUNDOFFS * U32 * (self.scale() * row.q_norm * error_norm + row.lse.abs().max(1.0) + cap)
    }

    /// The norm of a key, times what the cap leaves of the error of its score.
    fn error_norm(&self, row: &OfRow, batch: usize, head: usize, query: usize, key: usize) -> f64 {
        let norm = self.k_norms[self.token(batch, head / self.problem.forward().group_size(), key)];
        let softcap = Softcap::of(self.problem.forward());
        norm * softcap.steepest(self.score(batch, head, query, key), self.scale() * row.q_norm * norm)
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

/// A sum of weighted vectors: its elements, and for each element the sums of the squared terms, of their squared
/// noise, and of `Noise::of_delta`.
pub(super) struct Sum {
    pub values: Vec<f64>,
    pub squares: Vec<f64>,
    pub noise_squares: Vec<f64>,
    pub of_delta: Vec<f64>,
    pub alike: f64,
    pub terms: usize,
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
