//! The plain computation in the precision of the problem: what a careful author without any tiling would write, and
//! the yardstick for how large a kernel's error may be.

mod backward;

use super::{Tensor, check_inputs, each_row, gather};
use crate::{DType, Element, ForwardProblem, Result, bf16, f16};

pub use backward::{BackwardPlain, backward_plain};

/// What the plain computation gives, its values widened to f64.
#[derive(Clone, Debug)]
pub struct Plain {
    /// The output, rounded to the output type, `[batch, seqlen_q, heads_q, head_dim_vo]`.
    pub o: Tensor,
    /// The natural-log sum-exp in f32, `[batch, heads_q, seqlen_q]`.
    pub lse: Vec<f64>,
}

/// Computes the forward pass in the problem's precision, one query at a time: products of the inputs accumulated in
/// f32, `p = exp(score - row_max)` in f32, its sum in f32, `p` rounded to the input type before it meets V, products
/// with V accumulated in f32, divided by the sum and rounded to the output type.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape) when a tensor's shape is not the problem's.
pub fn forward_plain(problem: &ForwardProblem, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Plain> {
    check_inputs(problem, q, k, v)?;
    let round = rounding(problem.dtype());
    let [q, k, v] = [q, k, v].map(Narrow::new);
    let rows =
        each_row(problem.lse_shape(), |[batch, head, query]| row(problem, round, &q, &k, &v, batch, head, query));
    let o = gather(problem.o_shape(), &rows, |(row, _), out| widen(row, out));
    Ok(Plain { o, lse: rows.into_iter().map(|(_, lse)| f64::from(lse)).collect() })
}

fn widen(row: &[f32], out: &mut [f64]) {
    out.iter_mut().zip(row).for_each(|(out, &value)| *out = f64::from(value));
}

/// The inputs as f32, which holds every operand type exactly.
struct Narrow {
    shape: [usize; 4],
    data: Vec<f32>,
}

impl Narrow {
    fn new(tensor: &Tensor) -> Self {
        Self { shape: tensor.shape(), data: tensor.data().iter().map(|&x| x as f32).collect() }
    }

    fn row(&self, batch: usize, seq: usize, head: usize) -> &[f32] {
        let [_, seqlen, heads, head_dim] = self.shape;
        let start = ((batch * seqlen + seq) * heads + head) * head_dim;
        &self.data[start..start + head_dim]
    }
}

/// To the nearest value of a type, and back.
fn rounding(dtype: DType) -> fn(f32) -> f32 {
    match dtype {
        DType::F16 => |x| f16::from_f32(x).to_f32(),
        DType::BF16 => |x| <bf16 as Element>::from_f32(x).to_f32(),
        // E4M3 inputs give P in the accumulator's precision: nothing is promised about its rounding yet.
        DType::F32 | DType::E4M3 => |x| x,
    }
}

#[expect(clippy::too_many_arguments, reason = "one row of one problem")]
fn row(
    problem: &ForwardProblem,
    round: fn(f32) -> f32,
    q: &Narrow,
    k: &Narrow,
    v: &Narrow,
    batch: usize,
    head: usize,
    query: usize,
) -> (Vec<f32>, f32) {
    let dims = problem.dims();
    let mask = problem.mask_value();
    let head_kv = head / (dims.heads_q / dims.heads_kv);
    let q_row = q.row(batch, query, head);

    let keys: Vec<usize> =
        (0..dims.seqlen_kv).filter(|&key| mask.keep(query, key, dims.seqlen_q, dims.seqlen_kv)).collect();
    let scores: Vec<f32> =
        keys.iter().map(|&key| problem.softmax_scale_value() * dot(q_row, k.row(batch, key, head_kv))).collect();

    let mut o = vec![0.0_f32; dims.head_dim_vo];
    let row_max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if row_max == f32::NEG_INFINITY && !scores.iter().any(|score| score.is_nan()) {
        return (o, f32::NEG_INFINITY);
    }
    let shift = if row_max == f32::NEG_INFINITY { 0.0 } else { row_max };
    let mut row_sum = 0.0;
    for (&key, score) in keys.iter().zip(&scores) {
        let weight = (score - shift).exp();
        row_sum += weight;
        let weight = round(weight);
        for (o, v) in o.iter_mut().zip(v.row(batch, key, head_kv)) {
            *o += weight * v;
        }
    }
    for o in &mut o {
        *o = round(*o / row_sum);
    }
    (o, shift + row_sum.ln())
}

/// A dot product in eight partial sums, so that the compiler may use vectors.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; 8];
    let (a_chunks, b_chunks) = (a.chunks_exact(8), b.chunks_exact(8));
    let tail: f32 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f32>() + tail
}
