//! The tolerance: how far a result may be from the oracle. Every result, of every backend, is judged by this one tolerance.
//!
//! Words:
//! - *exact* is the oracle's result, in f64.
//! - *plain* is the result of [`forward_plain`](super::forward_plain): the same computation in the precision of the problem,
//!   without tiling.
//! - `u` is the unit roundoff of the operands' type: 2^-4 for e4m3, 2^-8 for bf16, 2^-11 for f16, 2^-24 for f32.
//! - An *ulp* is one of the output's type.
//! - A *row* is the results of one query (for dK and dV: of one key) of one head.
//!
//! # The output
//!
//! ```text
//! per row     max|got - exact| <= 2 * max(max|plain - exact|, floor) + 1 ulp of max|exact|      maxima over the row
//! on tensor   max|got - exact| <= 2 * max(max|plain - exact|, floor) + 1 ulp of max|exact|      maxima over the tensor
//! ```
//!
//! Both lines must hold, and those of [groups](#groups-of-elements).
//! - The plain error sets the scale. A hard problem, where any computation in this precision has large errors, is allowed
//!   large errors. An easy one is not.
//! - Both lines bound a maximum. A mean could hide a wrong row among many right ones.
//! - The line per row keeps a large row from hiding a wrong small one.
//! - An ulp is at least the smallest number of the output's type, and the smallest normal f32. A GPU may make 0 of smaller numbers,
//!   such as those of an element whose V leaves next to nothing. A row with a sink may have an error beside that: see
//!   [below](#rows-that-a-sink-leaves-next-to-nothing).
//!
//! # The floor
//!
//! The plain error of a row depends on luck. It is the largest of only `head_dim_vo` samples of noise, and just one sample if
//! one column of V is much larger than the others. If the plain computation was lucky, a correct kernel would fail. The floor
//! prevents this. It is a multiple of the known size of the noise. Sums are over the keys of a row, `p` is a key's weight, and
//! `scale` is the softmax scale:
//!
//! ```text
//! floor = 1.5 * ((u + 4 s * |scale| |q| sum p |k|) * w + 2^-24 * sqrt(keys) * max(w, max|exact|))
//! w     = sqrt(sum (p v)^2)            the largest over the row's elements
//! s     = 2^-24                        2^-12 for e4m3 operands
//! ```
//!
//! - `u w` is for the rounding of P, which moves an output by a standard deviation of `0.42 u w`. The 0.42 holds for an error
//!   that is uniform within half an ulp, and for values that are spread evenly between two powers of two. The floor takes 1.5
//!   in place of 0.42, and the tolerance is twice the floor. So the bound is 7 standard deviations away. The 10^9 elements of
//!   a long run do not get there. The bound is still no more than about an ulp of the output.
//! - The terms with `s` and 2^-24 are for the errors of scores and of sums in f32. They matter for f32 operands, and for other
//!   operands with scores in the thousands.
//!
//! # Rows that a sink leaves next to nothing
//!
//! A kernel multiplies a row's sum of `weight * v` by one factor (`RowEnd` of `kernels/common/sinks.hpp`): `2^(reference - sink)`
//! over the row's whole sum, and for e4m3 times the descale factor of V. Both are flushed to 0 below 2^-126. The sum itself is then
//! as large as weights let it be. So a GPU may make 0 of an element of a row with a sink, where
//!
//! ```text
//! |exact| <= 2^-126 * W * (sum w |v| + [e4m3] 448 * sum w)     w: a key's weight, where the row's largest is 1
//! ```
//!
//! - `W` is what weights stay below: 448 for e4m3, 2^15 for f16, 2^32 for bf16.
//! - The part of e4m3 is for the descale factor: the sum is one of stored values, which are 448 at most.
//! - `sum w |v|` is taken as the root of the number of keys times the root of `sum (w v)^2`, which is no less.
//! - At an ordinary V this is about 1e-32 for e4m3 and 1e-27 for bf16: the sink is some 70 nats above all scores.
//!
//! Such an element has its own size as an additional error. Above this bound nothing is flushed, and nothing is allowed.
//!
//! # Rows that dropout leaves next to nothing
//!
//! Dropout may leave a row keys of next to no weight. A weight `w` (the row's largest is 1) is rounded to the type of the operands
//! without regard to what is left, and a GPU makes 0 of it below 2^-126 or, in f16, below 2^-25. So the error of an element of O is
//! at least
//!
//! ```text
//! 1 / (1 - p) * least * max |v|     least: 2^-25 for f16, 2^-126 * W for bf16 (W as above)
//! ```
//!
//! # e4m3 operands
//!
//! - Exact is the f64 computation on the real values of the operands (stored times descale). So an error from quantising the
//!   operands is not judged here: it is no error of a kernel.
//! - Plain rounds P to e4m3. So the tolerance allows what this rounding costs, and is not so wide that zeros could pass.
//! - A kernel may divide O by the sum of the *rounded* weights. Where weights are large, this has a smaller error, since what
//!   all roundings share cancels. For a key whose value is small beside the output, the error is larger. The noise of P is then
//!   `0.42 u * sqrt(sum (p (v - o))^2)`. The first `w` of the floor is the larger of this root and the other one.
//! - A weight below 2^-6 of e4m3 has fewer than three bits, and one below 2^-10 becomes 0. A kernel may make a row's largest
//!   weight as small as 8. So a weight `p` has an error of up to `min(p, 2^-13)`, for a largest weight of 1, in addition. What
//!   is lost if all weights below 2^-13 become 0 is allowed in full.
//! - Scores are off by 2^-12 in place of 2^-24: the sums of FP8 products in the tensor cores keep no more bits.
//! - The same bound serves scores in f16 ([`half_scores`](crate::ForwardProblemBuilder::half_scores)). Products are summed in
//!   `n = head_dim / 32` steps. Each step rounds the sum so far, by up to 2^-11 of it. If all products have one sign, the sum
//!   after step `i` is `i / n` of the score. So all steps together are off by `(n + 1) / 2 * 2^-11` of it at most: 2.5 * 2^-11
//!   at head dim 128, and 4.5 * 2^-11 at 256. The tolerance allows 2 * 1.5 * 4 * 2^-12 = 6 * 2^-11 of the magnitudes, which is
//!   enough up to head dim 334, where sums in f16 end. The exponentials are in f16 too, so the LSE is allowed an error of
//!   3.2e-3 in addition.
//!
//! # The LSE
//!
//! The LSE is f32 for all operands.
//!
//! ```text
//! per row     |got - exact| <= 2 * max(|plain - exact|, 4 s * m * |scale| |q| sum p |k|)
//!                              + 4 ulp of max(1, |row_max| + |exact - row_max|)
//! m                            e4m3: (n + 1) / 2, n = head_dim / 32      bf16, f16: max(1, head_dim / 128)      f32: 1
//! ```
//!
//! and the same with maxima over the tensor.
//! - `m` is for the steps in which a tensor core sums a score: of 32 products (e4m3) or 16. Each step cuts off the sum so far. So
//!   if all products have one sign, the loss grows with the number of steps. (Measured with f16 on an H100: up to 5.7 of these
//!   `s` at head dim 256.)
//! - The `max` has the magnitudes of the products that are summed for a score, not of their sum. A tensor core truncates while
//!   it sums, so its error is a few units of these magnitudes.
//! - A sink `s` is a score of f32. Its error has a part of `p |s|`, where `p` is the weight of the sink: `4 * 2^-24 * p |s|` is
//!   added to the `max`, and as much as an error of the scores in the floor of the output. In that floor `sum p |k|` is divided by
//!   `sum p`: with a sink this is less than 1, and what is left of a row has the relative error of its scores all the same.
//! - The ulps are those of the two terms that the LSE is the sum of: the row maximum, and the logarithm of the row sum. They
//!   cover the errors of the hardware's exp2 and log2 (2^-22 each).
//!
//! # Scores with a cap
//!
//! With a [`softcap`](crate::ForwardProblemBuilder::softcap) `c` let `t = tanh(|scale| q k / c)`, so that a score is `c t`.
//!
//! - An error of `q k` is multiplied by the slope `1 - t^2`. So `|k|` in the lines above is `(1 - t^2) |k|`, here and in the
//!   gradients. (The slope is taken where it is the largest within the error of the score. So a score that only an error brought
//!   to the cap is not taken as exact.)
//! - tanh has an error of its own: `4 * 2^-24` in absolute terms, which is what `1 - 2 / (1 + exp(2 y))` has in f32. So
//!   `4 * 2^-24 * c` is added to the error of the scores: in the floor of the output, in the `max` of the LSE, and in `s` of the
//!   gradients.
//! - The gradient of a score is multiplied by `1 - t^2`: `dS = p (dP - delta) (1 - t^2)`. So `n(delta)` and the error of dP are,
//!   too. The slope has an error of `n(1 - t^2) = 2 |t| 4 * 2^-24 (1 + (1 - t^2) |scale| |q| |k| / c) + 2^-24`, which adds
//!   `p |dP - delta| n(1 - t^2)` to `n(dS)`.
//!
//! # Scores with ALiBi
//!
//! With [`alibi`](crate::ForwardProblemBuilder::alibi) a score loses the bias `b = slope * distance`. The product and the difference
//! are rounded. So `4 * 2^-24 * sum p |b|` is added to the error of the scores: in the floor of the output (there divided by
//! `sum p`, as `sum p |k|` is) and in the `max` of the LSE; and `4 * 2^-24 * |b_ij|` in `s` of the gradients.
//!
//! # Scores with a bias
//!
//! A [`bias`](crate::ForwardProblemBuilder::bias) `a` is added to a score `x` before ALiBi's `b` is subtracted. The two roundings are off
//! by no more than `2^-24 (2 |x| + 2 |a| + |b|)`, and the product that `b` is by `2^-24 |b|`. So `|a| + |b|` takes the place of `|b|` in the
//! lines above and below. (`|x|` is no more than `|scale| |q| |k|` or the cap, which are there already.) A pair whose bias is -inf is not
//! kept, so it has no part in any sum.
//!
//! # Dropout
//!
//! With [`dropout`](crate::ForwardProblemBuilder::dropout) let `z` be 0 for a dropped pair and `1 / (1 - p)` for others.
//!
//! - Plain makes the weights of dropped pairs 0 after it has rounded them, and multiplies O and dV at the end by the factor.
//! - In the output and in dV `z p` takes the place of `p`, also in `w`, in what is rounded alike, and in `n(p)` with its `t`. So a
//!   row of which all pairs are dropped must be exactly 0.
//! - The LSE and the maximum logits are as without dropout. `sum p |k|` of the floor is the mean over all keys or the one over
//!   those that are not dropped, whichever is the larger.
//! - In the gradient of a score `z dP` takes the place of dP. So its error is `z` times as large. The other terms of `n(dS)` and
//!   `n(delta)` stay, with `z p` in the O of delta.
//!
//! # Maximum logits
//!
//! ```text
//! |got - exact| <= 2 * max(|plain - exact|, error) + 4 ulp of max(1, |exact|)
//! error          how far the exact maximum moves if each score is off by
//!                4 * s * m * |scale| |q| |k| + 4 * 2^-24 * (c + |b|), all up or all down
//! ```
//!
//! They are f32, with the `m` of the LSE. So keys that are far below the maximum do not widen the bound, however large their
//! terms are.
//!
//! Where products are so large that their sum may overflow f32 on its way, a score depends on the order of the sum. Let `P` be the
//! sum of the positive products of a pair and `N` that of the negative ones, times `max(1, scale)`. From 2^127 on a sum may
//! overflow.
//!
//! ```text
//! P, N finite             the score, if f32 has it; also inf if P may overflow; also -inf if N may; also NaN if both may
//! P or N infinite         that infinity; also NaN if the other one may overflow or is infinite
//! a product is NaN        NaN
//! ```
//!
//! A cap `c` makes `c` and `-c` of the infinities. A NaN does not count. The maximum logit may be the largest of any choice of
//! these, and nothing else ([`MaxLogit::nearest`](super::MaxLogit::nearest)).
//!
//! # The gradients
//!
//! The tolerance of dQ, dK and dV is that of the output, with [`backward_plain`](super::backward_plain) as plain and another
//! floor. The gradients are sums over pairs of a query `i` and a key `j`, in which more numbers are rounded. `n(x)` is the
//! noise of `x`:
//!
//! ```text
//! dQ_i = scale * sum over j of dS_ij k_j     noise^2 = scale^2 * (sum (n(dS_ij) k_j)^2 + (n(delta_i) sum p_ij k_j)^2)
//! dK_j = scale * sum over i of dS_ij q_i     noise^2 = scale^2 * sum (n(dS_ij)^2 + (p_ij n(delta_i))^2) q_i^2
//! dV_j = sum over i of p_ij dO_i             noise^2 = sum (n(p_ij) dO_i)^2
//! floor = 1.5 * (noise + 2^-24 * sqrt(pairs) * size of the terms)
//!
//! n(p)     = (u + s) p + t                   s = 4 * 2^-24 * (|scale| |q_i| |k_j| + max(1, |LSE_i|))
//! n(dS)    = (sqrt(2) u + s) |dS| + p * 4 * 2^-24 * |dO_i| |v_j| + t
//! n(delta) = (u + s) * sqrt(sum over d of dO^2 (O^2 + sum (p v)^2)) + t_O * |dO_i|
//!            + 4 * 2^-24 * (|dO_i| |O_i| + |dLSE_i|)
//! ```
//!
//! - `s` here is the error of a score and of the LSE in f32, and so the relative error of a probability.
//! - dS is rounded. It may have been computed from probabilities that were rounded, too. The errors of two roundings are
//!   `sqrt(2)` times as large as that of one.
//! - delta inherits the rounding of O, and of the probabilities that O was computed from. `t_O` is the error of an element of O near
//!   0: half the smallest subnormal of the type, or what dropout makes it (see
//!   [above](#rows-that-dropout-leaves-next-to-nothing)). Of a row without keys delta is -dLSE.
//! - `t` is half the smallest subnormal of the type, because gradients in f16 may be that small. It is at least the smallest
//!   normal f32 times the root of the number of pairs. A GPU may flush smaller numbers to 0, and such errors of a sum all have one
//!   sign.
//!
//! A GPU makes 0 of P and dS where they are below the smallest normal f32, and of dS before the factor of dropout is in it. What a
//! gradient loses by this has the sign of the gradient: it does not average out, as `a` [below](#groups-of-elements) does not. Pairs
//! whose exact P, or dS without that factor, is below 2^-125 count. A gradient below 2^-126 may be 0 itself.
//!
//! dSink of a head is a sum over rows `i`, whose weight of the sink is `p_i`:
//!
//! ```text
//! dSink    = -sum over i of p_i delta_i      noise^2 = sum p_i^2 (n(delta_i)^2 + (n(LSE_i) + 4 * 2^-24 |s|)^2 delta_i^2)
//! n(LSE)   = 4 * 2^-24 * (|scale| |q| sum p |k| + max(1, |LSE|))
//! floor    = 1.5 * (noise + 2^-24 * sqrt(rows) * sum |p delta|)
//! ```
//!
//! It is f32 for all operands. Its ulp is one of f32.
//!
//! dBias is a sum over the batch entries, heads and queries `i` that share the bias of a key `j`. It has no derivative of a cap:
//!
//! ```text
//! dBias_j  = sum over i of b_ij              b_ij = p_ij (dP_ij - delta_i)
//! noise^2  = sum (n(b_ij)^2 + (p_ij n(delta_i))^2)
//! n(b)     = (sqrt(2) u + s) |b| + p * 4 * 2^-24 * |dO_i| |v_j| + t
//! floor    = 1.5 * (noise + 2^-24 * sqrt(pairs) * size of the terms)
//! ```
//!
//! - A row is the biases of all keys of one batch entry, head and query of the bias. Its ulp is one of the bias's type.
//! - `t` is that of the other gradients. Half the smallest subnormal of the bias's type is allowed in addition.
//! - An element whose pairs are all hidden must be 0.
//!
//! # Groups of elements
//!
//! The lines above bound single elements. An error of 0.5% in all elements is smaller than the largest error of rounding, and
//! passes them. So groups of elements are judged too: the tensor, each head, each element of a head's vectors (a column), and
//! each 64 neighbouring tokens of a head (a block).
//!
//! ```text
//! rms         rms(got - exact) <= (1.6 + c / sqrt(2 n)) * max(rms(plain - exact), rms(d)) + rms(a)
//! common      |sum (got - exact) * exact| <= max(c * deviation of the sum, 2 * |sum (plain - exact) * exact|, e)
//!                                            + u/16 * sum exact^2 + sum a * |exact|
//! ```
//!
//! - `c` is how many standard deviations are allowed for chance: 6.5 for a column, since there are so many columns, and 5 for
//!   other groups.
//! - `d` is the standard deviation that the error of an element is expected to have: `0.42` of the noise above, without the 1.5.
//!   Scores in f16 are off by up to twice `4 s`, so that their standard deviation is taken as `4 s`.
//! - `n` is the number of independent samples in the group. A row is one sample, since its elements share the errors of their
//!   weights. Equal rows count once. If the plain computation's errors add up along the columns, there are fewer samples.
//! - `a` is what does not average out: keys whose weights are rounded alike because their scores are nearly equal, scores that
//!   tensor cores cut off towards 0, and sums in f32 that are cut off. In `sum a * |exact|`, what is rounded alike in a row of
//!   the output is not taken as alike in all rows: it is no more than `c` deviations of its sum over the rows.
//! - The second line is for a factor that all elements share. For the LSE there is only the first.
//! - `e` is for values that are mostly noise, such as a gradient next to 0 whose terms cancel. Its errors may have its signs by
//!   luck, or share an error of its terms: no factor can be seen in it. Let `r` be what is in the `max` of the first line, as a
//!   share of `rms(exact)`. `e` is the right side of the first line times `rms(exact)`, times `min(1, (4 r)^2)`, times the number
//!   of elements. So from `r = 1/4` on the second line fails only where the first one does. Below, `e` is a factor of some
//!   `26 r^3`, which is next to nothing.
//!
//! So a common factor of 0.5% fails for bf16, f16 and f32, and one of 2% for e4m3. `tests/src/mutations.rs` in the repository
//! lists what must fail.
//!
//! # Exact matches
//!
//! - NaN must be where the oracle has NaN, and nowhere else.
//! - Infinities must match, but for outputs and gradients whose exact value is finite. There an infinity stands for the exact value
//!   if that rounds to it, or else for the least number that does (65520 in f16), and its error is judged as any other. The LSE of
//!   a query without keys is -inf.
//! - Where the oracle's row of the output is 0 because every key is masked, the result must be exactly 0. So must a row of a
//!   gradient in which no pair has a part.

mod backward;
mod figures;
mod tally;

use std::fmt;
use std::sync::OnceLock;

use super::oracle::RowScale;
use super::oracle::forward_told;
use super::packed::belonging;
use super::plain::forward_plain_told;
use super::rounding::{
    LARGEST_E4M3, ROUNDING, SCORE_ROUNDOFFS, SMALLEST_NORMAL, U32, half_subnormal, hypot, least_with_dropout, overflow,
    score_roundoff_16_bits, unit_roundoff, weight_limit,
};
use super::work::{Told, Work, forward_units};
use super::{MaxLogit, Modifiers, Oracle, Plain, Tensor, place, shape_error};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::ForwardProblem;
use crate::sequences::{Lengths, SequenceRows};

pub use backward::{BackwardExpected, BackwardReport};
pub use figures::{Bound, Figures, Group, Ratios};

use tally::{Row, Tally};

/// How many times the plain computation's error is allowed.
const TIMES_PLAIN: f64 = 2.0;
/// Ulps of the output type that are allowed in addition, for the output.
const O_ULPS: f64 = 1.0;
/// Ulps of the output type that are allowed in addition, for a gradient.
const GRADIENT_ULPS: f64 = 1.0;
/// Ulps of f32 that are allowed in addition, for the LSE.
const LSE_ULPS: f64 = 4.0;
/// The factor of the floor, in place of the 0.42 of the noise (see above).
const FLOOR: f64 = 1.5;
/// How many times the plain computation's root mean square is allowed.
const TIMES_RMS: f64 = 1.6;
/// The share of the error of scores that may be the same in all elements.
const SCORES_ALIKE: f64 = 0.125;
/// How many standard deviations a sum over a group may be off by chance.
const DEVIATIONS: f64 = 5.0;
/// The same for a column. There are many more columns than other groups: some 10^7 in 10^5 random problems. Of so many, a few
/// come to 5 standard deviations by chance. This is 1.3 times as much.
const COLUMN_DEVIATIONS: f64 = 6.5;
/// The share of the unit roundoff by which all elements may be off together.
const COMMON: f64 = 0.0625;
/// From this share of the values on noise is too large for a common factor to be seen.
const NOISE: f64 = 0.25;
/// The standard deviation of the LSE, as a share of the `max` in its tolerance and of an ulp.
const LSE_DEVIATION: f64 = 1.0;
/// The number of neighbouring tokens that are judged as a group.
const BLOCK: usize = 64;
/// The unit roundoff `s` of a sum of e4m3 products.
///
/// Hopper's tensor cores add 32 products at a time. Each product is cut off (not rounded) at about 2^-13 of the largest
/// magnitude among the products and the sum so far. The mean loss is half of that. 32 such losses are 2^-9 of the sum, if all
/// products have one sign. The tolerance allows `2 * 4 s`, which is 2^-9.
const U_SUM_E4M3: f64 = 1.0 / (1 << 12) as f64;
/// The unit roundoff `s` of a whole score of e4m3 products, for the LSE.
///
/// A score is summed in steps of 32 products. If all products have one sign, the sum after step `i` of `n` is `i / n` of the
/// score, and loses what is said above of that. So the loss of all steps is `(n + 1) / 2` times as large. In O most of it
/// cancels, since all keys lose alike.
fn u_lse_e4m3(head_dim: usize) -> f64 {
    U_SUM_E4M3 * ((head_dim as f64 / 32.0).ceil() + 1.0) / 2.0
}
/// What is added to the `max` in the LSE's tolerance, where scores are in f16. Twice this, 3.2e-3, is then allowed in addition.
///
/// The exponentials in f16 have a relative error of up to 2^-9.9 (PTX ISA, `ex2`). Their arguments, up to 8, are rounded to
/// f16, which is an error of up to 2^-9 in powers of two. Both together are 2.4e-3. Where all scores are equal, all errors
/// are, and a result comes to that. 3.2e-3 is 1.3 times as much.
const LSE_LEAST_HALF_SCORES: f64 = 1.6e-3;

/// Judges the results of a forward problem on given inputs. It holds the results of the oracle and of the plain computation.
#[derive(Clone, Debug)]
pub struct Expected {
    /// The unit roundoff `u` of P.
    unit_roundoff: f64,
    /// The unit roundoff `s` of the sums that are scores.
    sum_roundoff: f64,
    /// The unit roundoff `s` in the LSE's tolerance.
    lse_roundoff: f64,
    /// What is added to the `max` in the LSE's tolerance.
    lse_least: f64,
    /// The standard deviation of a score's error, as a share of its size in the floor.
    score_deviation: f64,
    /// The unit roundoff of the output's type.
    output_roundoff: f64,
    /// The error of an output near 0, in real values: of rounding to e4m3 and f16. Of other types it is half the smallest normal
    /// f32: a GPU may make 0 of smaller numbers.
    output_least: f64,
    /// From which magnitude on an output is infinite.
    output_overflow: f64,
    /// What a GPU may make 0 of in rows with a sink.
    flush: Option<Flush>,
    /// The shape of the LSE.
    shape: [usize; 3],
    judged: Judged,
    oracle: Oracle,
    plain: Plain,
    /// Of the exact output.
    norms: Norms,
}

impl Expected {
    /// Runs the oracle and the plain computation on the inputs.
    ///
    /// The tensors are as for [`forward`](super::forward). Tensors of e4m3 operands hold real values: stored values times
    /// their descale factors ([`Tensor::descaled`]).
    ///
    /// # Errors
    /// [`Error::Shape`] when a tensor's shape is not the problem's.
    pub fn new(problem: &ForwardProblem, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Self> {
        Self::with_scale_o(problem, q, k, v, 1.0)
    }

    /// As [`new`](Self::new), for an e4m3 output that is multiplied by `scale_o` before it is rounded.
    ///
    /// The results that [`check`](Self::check) gets are real values: stored values divided by `scale_o`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_scale_o(problem: &ForwardProblem, q: &Tensor, k: &Tensor, v: &Tensor, scale_o: f32) -> Result<Self> {
        Self::of(problem, &Lengths::default(), [q, k, v], scale_o, None)
    }

    /// As [`with_scale_o`](Self::with_scale_o), for a problem with packed sequences or used lengths. `told`, if there is one, is
    /// called from time to time with the share of the work that is done.
    ///
    /// The shapes of packed tensors have a batch of 1, here and in [`check`](Self::check).
    ///
    /// # Errors
    /// As [`new`](Self::new), and as [`Lengths::check`].
    pub fn of(
        problem: &ForwardProblem,
        lengths: &Lengths<'_>,
        inputs: [&Tensor; 3],
        scale_o: f32,
        told: Option<Told<'_>>,
    ) -> Result<Self> {
        Self::with(problem, lengths, inputs, Modifiers::default(), scale_o, told)
    }

    /// As [`of`](Self::of), for a problem with modifiers.
    ///
    /// # Errors
    /// As [`of`](Self::of), and as [`forward_with`](super::forward_with) for the modifiers.
    pub fn with(
        problem: &ForwardProblem,
        lengths: &Lengths<'_>,
        inputs: [&Tensor; 3],
        modifiers: Modifiers<'_>,
        scale_o: f32,
        told: Option<Told<'_>>,
    ) -> Result<Self> {
        let units = forward_units(problem.lse_shape().iter().product());
        let work = told.map_or_else(Work::silent, |told| Work::new(told, units));
        Self::compute(problem, lengths, inputs, modifiers, scale_o, &work)
    }

    /// As [`new`](Self::new). `told` is called from time to time with the share of the work that is done.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_progress(problem: &ForwardProblem, q: &Tensor, k: &Tensor, v: &Tensor, told: Told<'_>) -> Result<Self> {
        Self::of(problem, &Lengths::default(), [q, k, v], 1.0, Some(told))
    }

    fn compute(
        problem: &ForwardProblem,
        lengths: &Lengths<'_>,
        inputs: [&Tensor; 3],
        modifiers: Modifiers<'_>,
        scale_o: f32,
        work: &Work<'_>,
    ) -> Result<Self> {
        let of_e4m3 = problem.takes_scale_o();
        Ok(Self {
            unit_roundoff: unit_roundoff(problem.dtype()),
            sum_roundoff: if problem.dtype() == DType::E4M3 { U_SUM_E4M3 } else { U32 },
            lse_roundoff: match problem.dtype() {
                DType::E4M3 => u_lse_e4m3(problem.dims().head_dim_qk),
                DType::BF16 | DType::F16 => score_roundoff_16_bits(problem.dims().head_dim_qk),
                DType::F32 | DType::I32 => U32,
            },
            lse_least: if problem.allows_half_scores() { LSE_LEAST_HALF_SCORES } else { 0.0 },
            score_deviation: if problem.allows_half_scores() { 1.0 } else { ROUNDING },
            output_roundoff: unit_roundoff(problem.output_dtype()),
            output_least: match problem.output_dtype() {
                _ if of_e4m3 => half_subnormal(DType::E4M3) / f64::from(scale_o),
                DType::F16 => half_subnormal(DType::F16).max(least_with_dropout(problem, inputs[2])),
                _ => f64::max(SMALLEST_NORMAL / 2.0, least_with_dropout(problem, inputs[2])),
            },
            output_overflow: overflow(problem.output_dtype()),
            flush: problem.sinks().map(|_| Flush::of(problem.dtype())),
            shape: problem.lse_shape(),
            oracle: forward_told(problem, lengths, inputs, modifiers, work)?,
            plain: forward_plain_told(problem, lengths, inputs, modifiers, scale_o, work)?,
            judged: Judged::of(problem, problem.o_shape(), lengths.sequences(problem).map(|[q, _]| q)),
            norms: Norms::default(),
        })
    }

    /// The results of the oracle.
    pub fn oracle(&self) -> &Oracle {
        &self.oracle
    }

    /// Takes other maximum logits for the right ones. A run may read garbage where Q, K and V have NaN here. Then results of rows
    /// with a part in it are not judged. But a maximum logit is one of all rows.
    ///
    /// # Panics
    /// If they are not as many as before.
    pub fn expect_max_logits(&mut self, max_logits: Vec<MaxLogit>) {
        assert_eq!(max_logits.len(), self.oracle.max_logits.len(), "maximum logits");
        self.plain.max_logits = max_logits.iter().map(|logit| logit.value).collect();
        self.oracle.max_logits = max_logits;
    }

    /// The results of the plain computation.
    pub fn plain(&self) -> &Plain {
        &self.plain
    }

    /// Takes the exact results for those of the plain computation, which then has no errors: what is left of the bounds is made of
    /// the known sizes of the noise. A plain computation must keep these bounds too. Another one, or one with more luck, may be
    /// what a result is judged by.
    #[must_use]
    pub fn with_exact_plain(mut self) -> Self {
        let Oracle { o, lse, max_logits, .. } = &self.oracle;
        let max_logits = max_logits.iter().map(|logit| logit.value).collect();
        self.plain = Plain { o: o.clone(), lse: lse.clone(), max_logits };
        self
    }

    /// Compares results with the tolerance. `o` is `[batch, seqlen_q, heads_q, head_dim_vo]`. `lse`, if there is one, is
    /// `[batch, heads_q, seqlen_q]`.
    ///
    /// # Errors
    /// [`Error::Shape`] when a shape is another one.
    pub fn check(&self, o: &Tensor, lse: Option<&[f64]>) -> Result<Report> {
        let want = self.oracle.o.shape();
        if o.shape() != want {
            return Err(shape_error("o", o.shape(), want));
        }
        if let Some(lse) = lse
            && lse.len() != self.oracle.lse.len()
        {
            let want = vec![want[0], want[2], want[1]];
            return Err(Error::Shape { tensor: "lse", got: vec![lse.len()], want, axes: "[batch, heads_q, seqlen_q]" });
        }
        Ok(Report { o: self.check_o(o), lse: lse.map(|lse| self.check_lse(lse)), max_logits: None })
    }

    /// As [`check`](Self::check), for a problem with the maximum logits: `[heads_q]`.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn check_with(&self, o: &Tensor, lse: Option<&[f64]>, max_logits: &[f64]) -> Result<Report> {
        Ok(Report { max_logits: Some(self.check_max_logits(max_logits)?), ..self.check(o, lse)? })
    }

    fn check_o(&self, got: &Tensor) -> Figures {
        let mut tally = Tally::new(got.shape(), Some(COMMON * self.unit_roundoff.max(self.output_roundoff)));
        let norms = self.norms.of(&self.oracle.o);
        for (row, scale) in self.oracle.scales.iter().enumerate() {
            let [batch, head, query] = place(self.shape, row);
            if !self.judged.row(batch, query) {
                continue;
            }
            let (exact, weighted) =
                (self.oracle.o.row(batch, query, head), self.oracle.weighted.row(batch, query, head));
            let (magnitude, weighted_max) = (largest(exact), largest(weighted));
            let of_scores = self.sum_roundoff * scale.score_of_o + U32 * (scale.sink + scale.cap + scale.added_of_o);
            let of_scores = SCORE_ROUNDOFFS * of_scores;
            let of_sums = U32 * (scale.keys as f64).sqrt();
            // A row in which no key has a part must be exactly 0, so it is allowed nothing.
            let least = if magnitude.max(weighted_max) == 0.0 { 0.0 } else { self.output_least };
            let floor = (self.unit_roundoff + of_scores) * weighted_max + of_sums * weighted_max.max(magnitude);
            let flushed: Vec<f64> = match &self.flush {
                Some(flush) => flush.of_row(scale, self.oracle.lse[row], exact, weighted),
                None => vec![0.0; exact.len()],
            };
            let lost = self.oracle.lost.row(batch, query, head).iter().zip(&flushed);
            let lost = lost.zip(exact).map(|((lost, flushed), &exact)| lost.abs() + flushed.max(subnormal(exact)));
            let lost: Vec<f64> = lost.collect();
            let deviation = |of_p: f64, exact: f64| {
                let rounding = hypot(self.unit_roundoff * of_p, self.output_roundoff * exact);
                ROUNDING * hypot(rounding, least)
                    + self.score_deviation * of_scores * of_p
                    + of_sums * of_p.max(exact.abs())
            };
            tally.row(&Row {
                at: [batch, query, head],
                got: got.row(batch, query, head),
                exact,
                plain: self.plain.o.row(batch, query, head),
                deviation: weighted.iter().zip(exact).map(|(&weighted, &exact)| deviation(weighted, exact)).collect(),
                along: deviation(scale.along, norms[row]),
                alike: alike([self.unit_roundoff * scale.alike, least * scale.alike], exact, weighted),
                systematic: systematic([SCORES_ALIKE * of_scores, 0.0], scale.keys, &lost, exact, weighted),
                floor: FLOOR * floor,
                overflow: self.output_overflow,
                ulps: O_ULPS * 2.0 * (self.output_roundoff * magnitude).max(least) + largest(&flushed),
            });
        }
        tally.figures()
    }

    fn check_max_logits(&self, got: &[f64]) -> Result<Figures> {
        let (exact, plain) = (&self.oracle.max_logits, &self.plain.max_logits);
        if got.len() != exact.len() {
            let (got, want) = (vec![got.len()], vec![exact.len()]);
            return Err(Error::Shape { tensor: "max_logits", got, want, axes: "[heads]" });
        }
        let mut tally = Tally::new([1, 1, exact.len(), 1], None);
        for (head, logit) in exact.iter().enumerate() {
            let (exact, floor) = logit.nearest(got[head]);
            // The plain computation may have summed in another order, and be near another of the right ones.
            let plain_error = plain[head] - logit.nearest(plain[head]).0;
            // -inf and inf must match exactly, and must not widen the bound on the tensor.
            let ulp = if exact.is_finite() { 2.0 * U32 * exact.abs().max(1.0) } else { 0.0 };
            tally.row(&Row {
                at: [0, 0, head],
                got: &got[head..=head],
                exact: &[exact],
                plain: &[if plain_error.is_finite() { exact + plain_error } else { exact }],
                deviation: vec![LSE_DEVIATION * (floor + ulp)],
                along: 0.0,
                alike: vec![0.0],
                systematic: vec![0.0],
                floor,
                overflow: f64::INFINITY,
                ulps: LSE_ULPS * ulp,
            });
        }
        Ok(tally.figures())
    }

    fn check_lse(&self, got: &[f64]) -> Figures {
        let [batch, heads, queries] = self.shape;
        let mut tally = Tally::new([batch, queries, heads, 1], None);
        for (row, scale) in self.oracle.scales.iter().enumerate() {
            let [batch, head, query] = place(self.shape, row);
            if !self.judged.row(batch, query) {
                continue;
            }
            let exact = self.oracle.lse[row];
            // A query without keys has LSE -inf, or its sink. It must match exactly, and must not widen the bound on the
            // tensor.
            let magnitude = if exact.is_finite() { scale.row_max.abs() + (exact - scale.row_max).abs() } else { 0.0 };
            let of_scores = self.lse_roundoff * scale.score + U32 * (scale.sink + scale.cap + scale.added);
            let floor = SCORE_ROUNDOFFS * of_scores + self.lse_least;
            let ulp = if scale.keys == 0 { 0.0 } else { 2.0 * U32 * magnitude.max(1.0) };
            tally.row(&Row {
                at: [batch, query, head],
                got: &got[row..=row],
                exact: &self.oracle.lse[row..=row],
                plain: &self.plain.lse[row..=row],
                deviation: vec![LSE_DEVIATION * (floor + ulp)],
                along: 0.0,
                alike: vec![0.0],
                systematic: vec![0.0],
                floor,
                overflow: f64::INFINITY,
                ulps: LSE_ULPS * ulp,
            });
        }
        let mut figures = tally.figures();
        if let [batch, query, head, _] = figures.worst_at[..] {
            figures.worst_at = vec![batch, head, query];
        }
        figures
    }
}

/// What a GPU may make 0 of in a row that a sink leaves next to nothing (see above).
#[derive(Clone, Copy, Debug)]
struct Flush {
    /// The smallest factor that is not flushed, times what weights stay below.
    factor: f64,
    /// What a stored value is at most, in units that a descale factor may make as small as it likes. 0 without such factors.
    stored: f64,
}

impl Flush {
    fn of(dtype: DType) -> Self {
        let stored = if dtype == DType::E4M3 { LARGEST_E4M3 } else { 0.0 };
        // No GPU computes f32.
        let factor = if dtype == DType::F32 { 0.0 } else { SMALLEST_NORMAL * weight_limit(dtype) };
        Self { factor, stored }
    }

    /// The error of each element that is flushed: all of it. 0 for those that are too large.
    fn of_row(&self, scale: &RowScale, lse: f64, exact: &[f64], weighted: &[f64]) -> Vec<f64> {
        let to_largest = (scale.keys as f64).sqrt() * (lse - scale.row_max).exp();
        let sum = |weighted: f64| if weighted > 0.0 { weighted * to_largest } else { 0.0 };
        let limit = |weighted| self.factor * (sum(weighted) + self.stored * scale.key_weights);
        exact.iter().zip(weighted).map(|(x, &w)| if x.abs() <= limit(w) { x.abs() } else { 0.0 }).collect()
    }
}

/// The rows of a tensor that are judged: those of sequences, and all of them where gaps are filled.
#[derive(Clone, Debug)]
struct Judged {
    /// `[batch, seqlen]`. `None` if it is all of them.
    rows: Option<Vec<bool>>,
    seqlen: usize,
}

impl Judged {
    fn of(problem: &ForwardProblem, shape: [usize; 4], rows: impl Iterator<Item = SequenceRows>) -> Self {
        let some = problem.has_lengths() && !problem.fills_gaps();
        Self { rows: some.then(|| belonging(shape, rows)), seqlen: shape[1] }
    }

    fn row(&self, batch: usize, token: usize) -> bool {
        self.rows.as_ref().is_none_or(|rows| rows[batch * self.seqlen + token])
    }
}

/// How the results of a forward pass compare with the tolerance.
#[derive(Clone, Debug)]
pub struct Report {
    /// The figures of the output.
    pub o: Figures,
    /// The figures of the LSE. `None` if no LSE was checked.
    pub lse: Option<Figures>,
    /// The figures of the maximum logits. `None` if they were not checked.
    pub max_logits: Option<Figures>,
}

impl Report {
    /// Whether all results are within the tolerance.
    pub fn passed(&self) -> bool {
        self.worst_ratio() <= 1.0
    }

    /// The largest error as a fraction of its tolerance, over the output and the LSE. At most 1 within the tolerance.
    pub fn worst_ratio(&self) -> f64 {
        let others = [&self.lse, &self.max_logits].into_iter().flatten().map(|figures| figures.worst_ratio);
        others.fold(self.o.worst_ratio, f64::max)
    }

    /// The same for each kind of bound.
    pub fn ratios(&self) -> Ratios {
        let others = [&self.lse, &self.max_logits].into_iter().flatten().map(|figures| figures.ratios);
        others.fold(self.o.ratios, Ratios::max)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "o: {}", self.o)?;
        let others = [("lse", &self.lse), ("max_logits", &self.max_logits)];
        others
            .into_iter()
            .filter_map(|(name, figures)| Some((name, figures.as_ref()?)))
            .try_for_each(|(name, figures)| write!(f, "; {name}: {figures}"))
    }
}

/// The [`squares_norm`] of each row of an exact tensor, in the order of `[batch, head, token]`. Made once: a test may judge many
/// results by one exact one.
#[derive(Clone, Debug, Default)]
struct Norms(OnceLock<Vec<f64>>);

impl Norms {
    /// `exact` must be the same each time.
    fn of(&self, exact: &Tensor) -> &[f64] {
        let [batch, seqlen, heads, _] = exact.shape();
        // In one thread: one that waits for others may take a task that asks for the same, and would wait for itself.
        let norm = |row| {
            let [batch, head, token] = place([batch, heads, seqlen], row);
            squares_norm(exact.row(batch, token, head))
        };
        self.0.get_or_init(|| (0..batch * heads * seqlen).map(norm).collect())
    }
}

/// The norm of the squares, of what is finite. If each element has an independent relative error with a standard deviation of 1,
/// this is the standard deviation of the sum of the errors times the elements. Equal elements are rounded alike: their squares are
/// added first.
fn squares_norm(row: &[f64]) -> f64 {
    let mut squares: Vec<f64> = row.iter().map(|x| x * x).filter(|x| x.is_finite()).collect();
    squares.sort_unstable_by(f64::total_cmp);
    let of_equals = squares.chunk_by(|a, b| b - a <= 1e-9 * b).map(|equals| equals.iter().sum::<f64>());
    of_equals.map(|square| square * square).sum::<f64>().sqrt()
}

/// The part of the errors of a row that does not average out over its elements.
///
/// - `same` is the relative error of factors that are rounded alike. It goes with the element where all factors share it. It
///   goes with the root of the squared terms where each term has its own, the same one in all rows.
/// - `least` is the same near 0, where roundings have a fixed size.
fn alike([same, least]: [f64; 2], exact: &[f64], weighted: &[f64]) -> Vec<f64> {
    exact.iter().zip(weighted).map(|(exact, weighted)| same * (exact.abs() + weighted) + least).collect()
}

/// The part that has the same sign in all rows: as [`alike`], a sum in f32 of so many terms, and what else is known of each
/// element (`other`). Tensor cores may cut off the sum after each term. That is half an ulp a term.
fn systematic(errors: [f64; 2], terms: usize, other: &[f64], exact: &[f64], weighted: &[f64]) -> Vec<f64> {
    let cut_off = U32 * terms as f64;
    let alike = alike(errors, exact, weighted);
    let sum = |((alike, exact), other): ((&f64, &f64), &f64)| alike + cut_off * exact.abs() + other.abs();
    alike.iter().zip(exact).zip(other).map(sum).collect()
}

/// What a GPU may make 0 of, since f32 has it as a subnormal number alone: all of it. 0 for larger numbers.
fn subnormal(exact: f64) -> f64 {
    if exact.abs() < SMALLEST_NORMAL { exact.abs() } else { 0.0 }
}

/// The largest finite magnitude.
fn largest(values: &[f64]) -> f64 {
    values.iter().map(|x| x.abs()).filter(|x| x.is_finite()).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests;
