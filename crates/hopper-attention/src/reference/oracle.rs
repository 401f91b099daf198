//! The oracle: attention in f64, as a textbook writes it. Scores, softmax and weighted sum, one query at a time.

mod backward;

use super::rounding::{ROUNDING, unit_roundoff};
use super::{Tensor, check_inputs, each_row, gather};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::ForwardProblem;

pub use backward::{BackwardOracle, Noise, backward};

/// The exact results of a forward pass.
#[derive(Clone, Debug)]
pub struct Oracle {
    /// The output, `[batch, seqlen_q, heads_q, head_dim_vo]`.
    pub o: Tensor,
    /// The log-sum-exp of each query, natural log, `[batch, heads_q, seqlen_q]`. -inf where every key is masked.
    pub lse: Vec<f64>,
    /// The effect of rounding P on each element of the output: `sqrt(sum over keys of (p * v)^2)`, in the shape of `o`.
    ///
    /// If each p has an independent error with a relative standard deviation of 1, this is the standard deviation of the
    /// output's error. For e4m3 operands it is the larger of this root and `sqrt(sum over keys of (p * (v - o))^2)`. The second
    /// one holds where O is divided by the sum of the *rounded* P: an error that all p share then cancels.
    ///
    /// A small e4m3 weight `p` has an error of up to `min(p, 2^-13)`, for a largest weight of 1, in addition.
    pub weighted: Tensor,
    /// For e4m3 operands the error of each element of the output if all weights below 2^-13 of a row's largest weight become 0, in
    /// the shape of `o`. 0 for other operands.
    pub lost: Tensor,
    /// For each query the sizes of rounding errors, `[batch, heads_q, seqlen_q]`.
    pub scales: Vec<RowScale>,
}

/// The sizes of rounding errors in the results of one query (a row). The tolerance makes its floor of them.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowScale {
    /// The size of the terms of the scores: `softmax_scale * |q| * sum over keys of p * |k|`.
    ///
    /// It is an upper bound for the sum of the magnitudes that are added up for a score, averaged over keys by weight. A unit
    /// roundoff times this number is the size of a score's error.
    pub score: f64,
    /// The effect of rounding P on the row along its own direction: as [`Oracle::weighted`], with `(v . o)` in place of `v` and
    /// `((v - o) . o)` in place of `v - o`.
    pub along: f64,
    /// The share of the weights that have the same rounding error, from 0 to 1.
    ///
    /// Weights that differ by an eighth of a unit roundoff or less are rounded alike. Then their errors do not average out
    /// over the keys, nor over rows. Keys with such weights make a group. The share is the root of the sum of the squared
    /// weights of the groups of two and more keys.
    pub alike: f64,
    /// The largest score of the row.
    pub row_max: f64,
    /// The number of keys that the mask keeps.
    pub keys: usize,
}

/// Keys whose scores differ by a unit roundoff divided by this number are rounded alike.
const ALIKE: f64 = 8.0;

/// Half of the distance between two small e4m3 weights, as a share of a row's largest weight. A smaller weight may become 0.
///
/// The smallest e4m3 number is 2^-9. A kernel may make a row's largest weight no larger than 2^3, so that sums of weights stay
/// within the type. A weight `p` then has the error `min(p, E4M3_LEAST)` besides that of its three bits.
const E4M3_LEAST: f64 = 1.0 / (1 << 13) as f64;

struct Row {
    o: Vec<f64>,
    weighted: Vec<f64>,
    lost: Vec<f64>,
    lse: f64,
    scale: RowScale,
}

/// Computes the forward pass in f64.
///
/// - `q` is `[batch, seqlen_q, heads_q, head_dim_qk]`, `k` is `[batch, seqlen_kv, heads_kv, head_dim_qk]`, and `v` is
///   `[batch, seqlen_kv, heads_kv, head_dim_vo]`. The elements must be those that the tested computation reads: already
///   rounded to its type.
/// - A query that keeps no key gets output 0 and LSE -inf. So does a query whose kept keys all have score -inf.
/// - A NaN among the kept scores of a query makes its results NaN. Masked keys are never read.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape) when a tensor's shape is not the problem's.
pub fn forward(problem: &ForwardProblem, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Oracle> {
    check_inputs(problem, q, k, v)?;
    let rows = each_row(problem.lse_shape(), |[batch, head, query]| row(problem, q, k, v, batch, head, query));
    let o = gather(problem.o_shape(), &rows, |row, out| out.copy_from_slice(&row.o));
    let weighted = gather(problem.o_shape(), &rows, |row, out| out.copy_from_slice(&row.weighted));
    let lost = gather(problem.o_shape(), &rows, |row, out| out.copy_from_slice(&row.lost));
    let (lse, scales) = rows.into_iter().map(|row| (row.lse, row.scale)).unzip();
    Ok(Oracle { o, lse, weighted, lost, scales })
}

fn row(problem: &ForwardProblem, q: &Tensor, k: &Tensor, v: &Tensor, batch: usize, head: usize, query: usize) -> Row {
    let dims = problem.dims();
    let (mask, softmax_scale) = (problem.mask(), f64::from(problem.softmax_scale()));
    let head_kv = head / (dims.heads_q / dims.heads_kv);
    let q_row = q.row(batch, query, head);

    let keys: Vec<usize> =
        (0..dims.seqlen_kv).filter(|&key| mask.keep(query, key, dims.seqlen_q, dims.seqlen_kv)).collect();
    let scores: Vec<f64> = keys.iter().map(|&key| softmax_scale * dot(q_row, k.row(batch, key, head_kv))).collect();

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
            key_norm += p * dot(k_row, k_row).sqrt();
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
    let scale = RowScale {
        score: softmax_scale * dot(q_row, q_row).sqrt() * key_norm,
        along: noise.along.max(centred.along).sqrt(),
        alike: alike(roundoff, &scores, &weights),
        row_max,
        keys: keys.len(),
    };
    Row { o, weighted, lost, lse: shift + row_sum.ln(), scale }
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

/// The share of weights that have the same rounding error ([`RowScale::alike`]).
fn alike(unit_roundoff: f64, scores: &[f64], weights: &[f64]) -> f64 {
    let sum: f64 = weights.iter().sum();
    let mut keys: Vec<(f64, f64)> = scores.iter().copied().zip(weights.iter().copied()).collect();
    keys.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let (mut squares, mut from) = (0.0, 0);
    while let Some(first) = keys.get(from) {
        let group = keys[from..].iter().take_while(|key| key.0 - first.0 <= unit_roundoff / ALIKE);
        let (count, weight) = group.fold((0, 0.0), |(count, weight), key| (count + 1, weight + key.1));
        if count > 1 {
            squares += (weight / sum).powi(2);
        }
        // A NaN is like no other.
        from += count.max(1);
    }
    squares.sqrt()
}

/// A dot product that leaves out what is not finite.
fn finite_dot(a: &[f64], b: &[f64]) -> f64 {
    let all = dot(a, b);
    if all.is_finite() {
        return all;
    }
    a.iter().zip(b).map(|(a, b)| a * b).filter(|product| product.is_finite()).sum()
}

/// A dot product in eight partial sums, so that the compiler may use vectors.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (a_chunks, b_chunks) = (a.chunks_exact(8), b.chunks_exact(8));
    let tail: f64 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f64>() + tail
}
