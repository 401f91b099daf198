//! The plain computation: attention in the precision of the problem, as a careful author without tiling would write it.
//!
//! Its error is the yardstick for how large a kernel's error may be.

mod backward;

use super::additive::Added;
use super::blocks::Kept;
use super::packed::{cut, paste, paste_list, pieces};
use super::product::Tokens;
use super::work::{PLAIN_UNITS, Work};
use super::{Modifiers, Tensor, check_inputs, each_row, gather, place};
use crate::dtype::{DType, Element, bf16, f16};
use crate::error::Result;
use crate::problem::ForwardProblem;
use crate::sequences::Lengths;

pub(super) use backward::backward_plain_told;
pub use backward::{BackwardPlain, backward_plain, backward_plain_of, backward_plain_with};

/// The results of the plain computation, widened to f64.
#[derive(Clone, Debug)]
pub struct Plain {
    /// The output, rounded to the output type, `[batch, seqlen_q, heads_q, head_dim_vo]`.
    pub o: Tensor,
    /// The log-sum-exp in f32, natural log, `[batch, heads_q, seqlen_q]`.
    pub lse: Vec<f64>,
    /// The largest score of each query head. Empty where the problem does not have it.
    pub max_logits: Vec<f64>,
}

/// Computes the forward pass in the problem's precision, one query at a time:
///
/// 1. scores: products of the inputs, accumulated in f32, times the softmax scale; with a cap `c` then `c * tanh(score / c)`;
///    with a bias then plus the bias; with ALiBi then minus `slope * distance`;
/// 2. `p = exp(score - row_max)` and its sum, in f32;
/// 3. `p` rounded to the input type, and 0 where dropout drops the pair; products with V, accumulated in f32;
/// 4. divided by the sum, with dropout multiplied by its factor, and rounded to the output type. (The sum has the weight of the sink, where there are sinks.)
///
/// For e4m3 operands the tensors hold real values (stored times descale). In step 3 `256 p` is rounded to e4m3. In step 4 an
/// e4m3 output is multiplied by `scale_o` before it is rounded; `scale_o` is 1 here, and may be another factor with
/// [`Expected`](super::Expected). So the error is that of rounding alone.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape) when a tensor's shape is not the problem's.
pub fn forward_plain(problem: &ForwardProblem, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Plain> {
    forward_plain_of(problem, &Lengths::default(), q, k, v)
}

/// As [`forward_plain`], for a problem with packed sequences or used lengths. The results of rows that belong to no sequence
/// are 0, and -inf for the LSE.
///
/// # Errors
/// As [`forward_plain`], and as [`Lengths::check`].
pub fn forward_plain_of(
    problem: &ForwardProblem,
    lengths: &Lengths<'_>,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
) -> Result<Plain> {
    forward_plain_with(problem, lengths, [q, k, v], Modifiers::default())
}

/// As [`forward_plain_of`], with q, k and v in `inputs`, for a problem with modifiers.
///
/// # Errors
/// As [`forward_plain_of`], and as [`forward_with`](super::forward_with) for the modifiers.
pub fn forward_plain_with(
    problem: &ForwardProblem,
    lengths: &Lengths<'_>,
    inputs: [&Tensor; 3],
    modifiers: Modifiers<'_>,
) -> Result<Plain> {
    forward_plain_told(problem, lengths, inputs, modifiers, 1.0, &Work::silent())
}

/// As [`forward_plain_with`]. `scale_o` is the factor of an e4m3 output before it is rounded. The result is divided by it again.
/// It tells `work` about each row.
pub(super) fn forward_plain_told(
    problem: &ForwardProblem,
    lengths: &Lengths<'_>,
    [q, k, v]: [&Tensor; 3],
    modifiers: Modifiers<'_>,
    scale_o: f32,
    work: &Work<'_>,
) -> Result<Plain> {
    check_inputs(problem, q, k, v)?;
    modifiers.check(problem)?;
    let Some(pieces) = pieces(problem, lengths, &modifiers)? else {
        return dense(problem, [q, k, v], modifiers, scale_o, work);
    };
    let rows = problem.lse_shape();
    let lse = vec![f64::NEG_INFINITY; rows.iter().product()];
    let mut all = Plain { o: Tensor::zeros(problem.o_shape()), lse, max_logits: no_logits(problem) };
    for piece in &pieces {
        let (k, v) = (cut(k, &piece.kv), cut(v, &piece.kv));
        let own = modifiers.of_sequence(problem, piece);
        let one = dense(&piece.problem, [&cut(q, &piece.q), &k, &v], own, scale_o, work)?;
        paste(&mut all.o, &piece.q, &one.o);
        paste_list(&mut all.lse, rows, &piece.q, &one.lse);
        all.max_logits.iter_mut().zip(one.max_logits).for_each(|(max, other)| *max = max.max(other));
    }
    Ok(all)
}

/// What the heads begin with, where the problem has their largest scores.
fn no_logits(problem: &ForwardProblem) -> Vec<f64> {
    vec![f64::NEG_INFINITY; if problem.wants_max_logits() { problem.dims().heads_q } else { 0 }]
}

/// The plain computation of a problem whose sequences all have the same lengths.
fn dense(
    problem: &ForwardProblem,
    [q, k, v]: [&Tensor; 3],
    modifiers: Modifiers<'_>,
    scale_o: f32,
    work: &Work<'_>,
) -> Result<Plain> {
    let rounding = Rounding::of(problem, scale_o);
    let kept = Kept::new(problem, &modifiers)?;
    let [q, k, v] = [q, k, v].map(Narrow::new);
    let rows = each_row(problem.lse_shape(), work, PLAIN_UNITS, |[batch, head, query]| {
        row(problem, &kept, &rounding, [&q, &k, &v], modifiers, [batch, head, query])
    });
    let o = gather(problem.o_shape(), &rows, |(row, ..), out| widen(row, out));
    let mut max_logits = no_logits(problem);
    if !max_logits.is_empty() {
        for (i, (.., largest)) in rows.iter().enumerate() {
            let max = &mut max_logits[place(problem.lse_shape(), i)[1]];
            *max = max.max(f64::from(*largest));
        }
    }
    Ok(Plain { o, lse: rows.into_iter().map(|(_, lse, _)| f64::from(lse)).collect(), max_logits })
}

fn widen(row: &[f32], out: &mut [f64]) {
    out.iter_mut().zip(row).for_each(|(out, &value)| *out = f64::from(value));
}

/// An input as f32. f32 holds the values of every operand type exactly.
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

/// The function that rounds a number to the nearest value of a type.
fn rounding(dtype: DType) -> fn(f32) -> f32 {
    match dtype {
        DType::F16 => |x| f16::from_f32(x).to_f32(),
        DType::BF16 => |x| <bf16 as Element>::from_f32(x).to_f32(),
        DType::F32 | DType::I32 => |x| x,
        DType::E4M3 => |x| round_e4m3(f64::from(x)) as f32,
    }
}

/// Rounds to the nearest e4m3, ties to even. Magnitudes above 448 become 448.
///
/// By the definition of the format, neighbouring numbers are an eighth of the power of two below them apart, but at least 2^-9.
pub(super) fn round_e4m3(x: f64) -> f64 {
    if x.is_nan() || x == 0.0 {
        return x;
    }
    let power = x.abs().min(448.0).log2().floor().max(-6.0);
    let step = (power - 3.0).exp2();
    ((x / step).round_ties_even() * step).clamp(-448.0, 448.0)
}

/// How P and O are rounded: a factor and a function. A number is multiplied by the factor, rounded, and divided by it again.
struct Rounding {
    weight: (f32, fn(f32) -> f32),
    output: (f32, fn(f32) -> f32),
}

impl Rounding {
    fn of(problem: &ForwardProblem, scale_o: f32) -> Self {
        // Weights are at most 1. With a factor of 256 they use the range of e4m3, whose largest value is 448.
        let headroom = if problem.dtype() == DType::E4M3 { 256.0 } else { 1.0 };
        Self { weight: (headroom, rounding(problem.dtype())), output: (scale_o, rounding(problem.output_dtype())) }
    }
}

fn rounded((scale, round): (f32, fn(f32) -> f32), x: f32) -> f32 {
    round(x * scale) / scale
}

/// The output of a query, its LSE and its largest score.
fn row(
    problem: &ForwardProblem,
    kept: &Kept<'_>,
    rounding: &Rounding,
    [q, k, v]: [&Narrow; 3],
    modifiers: Modifiers<'_>,
    [batch, head, query]: [usize; 3],
) -> (Vec<f32>, f32, f32) {
    let (sink, added) = (modifiers.sink(head) as f32, Added::of(problem, modifiers, [batch, head]));
    let dims = problem.dims();
    let head_kv = head / (dims.heads_q / dims.heads_kv);
    let q_row = q.row(batch, query, head);

    let keys: Vec<usize> = (0..dims.seqlen_kv).filter(|&key| kept.keep(batch, head, query, key)).collect();
    let product = |key| problem.softmax_scale() * dot(q_row, k.row(batch, key, head_kv));
    let score = |&key: &usize| added.add_to(capped(problem, product(key)).0, query, key);
    let scores: Vec<f32> = keys.iter().map(score).collect();

    let mut o = vec![0.0_f32; dims.head_dim_vo];
    let row_max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if row_max == f32::NEG_INFINITY && !scores.iter().any(|score| score.is_nan()) {
        o.fill(if sink.is_nan() { sink } else { 0.0 });
        return (o, sink, row_max);
    }
    let shift = if row_max == f32::NEG_INFINITY { 0.0 } else { row_max };
    let mut row_sum = 0.0;
    let factors = modifiers.dropped([batch, head], query, Tokens { first: 0, count: dims.seqlen_kv });
    for (&key, score) in keys.iter().zip(&scores) {
        let weight = (score - shift).exp();
        row_sum += weight;
        if factors[key] == 0.0 {
            continue;
        }
        let weight = rounded(rounding.weight, weight);
        for (o, v) in o.iter_mut().zip(v.row(batch, key, head_kv)) {
            *o += weight * v;
        }
    }
    // The sums and the sink, relative to the larger of the largest score and the sink. (A NaN is the larger of none.)
    let both = shift.max(sink);
    let relative = |x: f32| if x == both { 1.0 } else { (x - both).exp() };
    let own = relative(shift);
    let total = row_sum * own + relative(sink);
    let factor = problem.dropout_factor();
    for o in &mut o {
        *o = rounded(rounding.output, *o * own / total * factor);
    }
    (o, both + total.ln(), row_max)
}

/// A score after the cap, if there is one, and the derivative of the cap.
fn capped(problem: &ForwardProblem, score: f32) -> (f32, f32) {
    let cap = problem.softcap();
    if cap == 0.0 {
        return (score, 1.0);
    }
    let t = (score / cap).tanh();
    (cap * t, 1.0 - t * t)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::E4M3;

    /// `round_e4m3` and the `float8` crate, which the CPU backend rounds with, share no code.
    #[test]
    fn e4m3_is_rounded_as_its_type_does() {
        for bits in (0..0x7f80_0000_u32).step_by(50_021).chain((0x3a00_0000..0x4400_0000).step_by(4_099)) {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                let want = Element::to_f32(<E4M3 as Element>::from_f32(x));
                assert_eq!(round_e4m3(f64::from(x)) as f32, want, "{x}");
            }
        }
        assert_eq!((round_e4m3(464.0), round_e4m3(f64::INFINITY), round_e4m3(-1e9)), (448.0, 448.0, -448.0));
        // Ties, between 16 and 18 and between 18 and 20.
        assert_eq!((round_e4m3(17.0), round_e4m3(19.0)), (16.0, 20.0));
        assert!(round_e4m3(f64::NAN).is_nan());
    }
}
