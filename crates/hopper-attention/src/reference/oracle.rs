//! Attention in f64, as the textbook writes it: scores, softmax, weighted sum, one query at a time.

mod backward;

use super::{Tensor, check_inputs, each_row, gather};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::ForwardProblem;

pub use backward::{BackwardOracle, GradientScale, backward};

/// What the exact computation gives.
#[derive(Clone, Debug)]
pub struct Oracle {
    /// The output, `[batch, seqlen_q, heads_q, head_dim_vo]`.
    pub o: Tensor,
    /// The natural-log sum-exp of every query's scores, `[batch, heads_q, seqlen_q]`; -inf where every key is masked.
    pub lse: Vec<f64>,
    /// How much rounding a row has to bear, `[batch, heads_q, seqlen_q]`.
    pub scales: Vec<RowScale>,
}

/// The magnitudes that bound a row's rounding errors; the tolerance makes its floor of them.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowScale {
    /// `max over d of sqrt(sum over keys of (p * v[d])^2)`: what independent roundings of relative size 1 of every
    /// probability move the output by, as a standard deviation.
    pub weighted: f64,
    /// `max over d of sqrt(sum over keys of (p * (v[d] - o[d]))^2)`: the same where the output is divided by the sum of the
    /// rounded probabilities, so that what all of them share cancels. Of e4m3 operands; 0 of others, where nobody does that.
    pub centred: f64,
    /// `softmax_scale * |q| * sum over keys of p * |k|`: an upper bound of the sums of magnitudes behind the scores
    /// that matter, so a unit roundoff times this is the size of a score's error.
    pub score: f64,
    /// The largest score.
    pub row_max: f64,
    /// Keys that the mask keeps.
    pub keys: usize,
}

struct Row {
    o: Vec<f64>,
    lse: f64,
    scale: RowScale,
}

/// Computes the forward pass in f64. `q` is `[batch, seqlen_q, heads_q, head_dim_qk]`, `k` and `v` are
/// `[batch, seqlen_kv, heads_kv, head_dim]`; their elements must be the ones that the computation under test sees,
/// already rounded to its type.
///
/// A row that keeps no key, or whose kept keys all have score -inf, gets output 0 and LSE -inf. A NaN among the kept
/// scores of a row makes the row NaN; a masked key is never looked at.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape) when a tensor's shape is not the problem's.
pub fn forward(problem: &ForwardProblem, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Oracle> {
    check_inputs(problem, q, k, v)?;
    let rows = each_row(problem.lse_shape(), |[batch, head, query]| row(problem, q, k, v, batch, head, query));
    let o = gather(problem.o_shape(), &rows, |row, out| out.copy_from_slice(&row.o));
    let (lse, scales) = rows.into_iter().map(|row| (row.lse, row.scale)).unzip();
    Ok(Oracle { o, lse, scales })
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
    // A NaN is passed over here and comes back with its weight below.
    let row_max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if row_max == f64::NEG_INFINITY && !scores.iter().any(|score| score.is_nan()) {
        return Row { o, lse: f64::NEG_INFINITY, scale: RowScale::default() };
    }
    let shift = if row_max == f64::NEG_INFINITY { 0.0 } else { row_max };
    let weights: Vec<f64> = scores.iter().map(|score| (score - shift).exp()).collect();
    let row_sum: f64 = weights.iter().sum();

    let mut squares = vec![0.0; dims.head_dim_vo];
    let mut key_norm = 0.0;
    for (&key, weight) in keys.iter().zip(&weights) {
        let (p, v_row, k_row) = (weight / row_sum, v.row(batch, key, head_kv), k.row(batch, key, head_kv));
        for ((o, square), &v) in o.iter_mut().zip(&mut squares).zip(v_row) {
            let term = p * v;
            *o += term;
            *square += term * term;
        }
        key_norm += p * dot(k_row, k_row).sqrt();
    }
    let mut centred = vec![0.0; dims.head_dim_vo];
    if problem.dtype() == DType::E4M3 {
        for (&key, weight) in keys.iter().zip(&weights) {
            for ((square, &o), &v) in centred.iter_mut().zip(&o).zip(v.row(batch, key, head_kv)) {
                *square += (weight / row_sum * (v - o)).powi(2);
            }
        }
    }
    let largest_root = |squares: &[f64]| squares.iter().copied().fold(0.0, f64::max).sqrt();
    let scale = RowScale {
        weighted: largest_root(&squares),
        centred: largest_root(&centred),
        score: softmax_scale * dot(q_row, q_row).sqrt() * key_norm,
        row_max,
        keys: keys.len(),
    };
    Row { o, lse: shift + row_sum.ln(), scale }
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
