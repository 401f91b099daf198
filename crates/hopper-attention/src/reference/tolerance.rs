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
//! Both lines must hold.
//! - The plain error sets the scale. A hard problem, where any computation in this precision has large errors, is allowed
//!   large errors. An easy one is not.
//! - Both lines bound a maximum. A mean could hide a wrong row among many right ones.
//! - The line per row keeps a large row from hiding a wrong small one.
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
//! # e4m3 operands
//!
//! - Exact is the f64 computation on the real values of the operands (stored times descale). So an error from quantising the
//!   operands is not judged here: it is no error of a kernel.
//! - Plain rounds P to e4m3. So the tolerance allows what this rounding costs, and is not so wide that zeros could pass.
//! - A kernel may divide O by the sum of the *rounded* weights. Where weights are large, this has a smaller error, since what
//!   all roundings share cancels. For a key whose value is small beside the output, the error is larger. The noise of P is then
//!   `0.42 u * sqrt(sum (p (v - o))^2)`. The first `w` of the floor is the larger of this root and the other one.
//! - Scores are off by 2^-12 in place of 2^-24: the sums of FP8 products in the tensor cores keep no more bits.
//! - The same bound serves scores in f16 ([`half_scores`](crate::ForwardProblemBuilder::half_scores)). A head dim of 128 is
//!   four steps of 32 products. Each step rounds the sum so far, by up to 2^-11 of it. Four times 2^-11 is 2^-9, and the
//!   tolerance allows 2 * 4 * 2^-12 = 2^-9 of the magnitudes. The exponentials are in f16 too, so the LSE is allowed an error
//!   of at least 2.5e-3.
//!
//! # The LSE
//!
//! The LSE is f32 for all operands.
//!
//! ```text
//! per row     |got - exact| <= 2 * max(|plain - exact|, 4 s * |scale| |q| sum p |k|)
//!                              + 4 ulp of max(1, |row_max| + |exact - row_max|)
//! ```
//!
//! and the same with maxima over the tensor.
//! - The `max` has the magnitudes of the products that are summed for a score, not of their sum. A tensor core truncates while
//!   it sums, so its error is a few units of these magnitudes.
//! - The ulps are those of the two terms that the LSE is the sum of: the row maximum, and the logarithm of the row sum. They
//!   cover the errors of the hardware's exp2 and log2 (2^-22 each).
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
//! n(dS)    = (u + s) |dS| + p * 4 * 2^-24 * |dO_i| |v_j| + t
//! n(delta) = (u + s) * sqrt(sum over d of dO^2 (O^2 + sum (p v)^2)) + 4 * 2^-24 * (|dO_i| |O_i| + |dLSE_i|)
//! ```
//!
//! - `s` here is the error of a score and of the LSE in f32, and so the relative error of a probability.
//! - delta inherits the rounding of O, and of the probabilities that O was computed from.
//! - `t` is half the smallest subnormal of the type, because gradients in f16 may be that small. It is at least the smallest
//!   normal f32, because a GPU may flush smaller numbers to 0.
//!
//! # Exact matches
//!
//! - NaN must be where the oracle has NaN, and nowhere else.
//! - Infinities must match. The LSE of a query without keys is -inf.
//! - Where the oracle's row of the output is 0 because every key is masked, the result must be exactly 0. So must a row of a
//!   gradient in which no pair has a part.

mod backward;

use std::fmt;

use super::plain::forward_plain_scaled;
use super::rounding::{SCORE_ROUNDOFFS, U32, half_subnormal, unit_roundoff};
use super::{Oracle, Plain, Tensor, forward, place, shape_error};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::ForwardProblem;

pub use backward::{BackwardExpected, BackwardReport};

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
/// The unit roundoff `s` of a sum of e4m3 products.
///
/// Hopper's tensor cores add 32 products at a time. Each product is cut off (not rounded) at about 2^-13 of the largest
/// magnitude among the products and the sum so far. The mean loss is half of that. 32 such losses are 2^-9 of the sum, if all
/// products have one sign. The tolerance allows `2 * 4 s`, which is 2^-9.
const U_SUM_E4M3: f64 = 1.0 / (1 << 12) as f64;
/// The least value of the `max` in the LSE's tolerance, where scores are in f16. Twice this, 2.5e-3, is then allowed.
///
/// The exponentials in f16 have a relative error of up to 2^-9.9 (PTX ISA, `ex2`). Their arguments, up to 8, are rounded to
/// f16, which is an error of up to 2^-9 in powers of two. Both together are 2.4e-3.
const LSE_LEAST_HALF_SCORES: f64 = 1.25e-3;

/// Judges the results of a forward problem on given inputs. It holds the results of the oracle and of the plain computation.
#[derive(Clone, Debug)]
pub struct Expected {
    /// The unit roundoff `u` of P.
    unit_roundoff: f64,
    /// The unit roundoff `s` of the sums that are scores.
    sum_roundoff: f64,
    /// The least value of the `max` in the LSE's tolerance.
    lse_least: f64,
    /// The unit roundoff of the output's type.
    output_roundoff: f64,
    /// The rounding error of an e4m3 output near 0, in real values. 0 for other outputs.
    output_least: f64,
    /// The shape of the LSE.
    shape: [usize; 3],
    oracle: Oracle,
    plain: Plain,
}

impl Expected {
    /// Runs the oracle and the plain computation on the inputs.
    ///
    /// The tensors are as for [`forward`]. Tensors of e4m3 operands hold real values: stored values times their descale factors
    /// ([`Tensor::descaled`]).
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
        let of_e4m3 = problem.takes_scale_o();
        Ok(Self {
            unit_roundoff: unit_roundoff(problem.dtype()),
            sum_roundoff: if problem.dtype() == DType::E4M3 { U_SUM_E4M3 } else { U32 },
            lse_least: if problem.allows_half_scores() { LSE_LEAST_HALF_SCORES } else { 0.0 },
            output_roundoff: unit_roundoff(problem.output_dtype()),
            output_least: if of_e4m3 { half_subnormal(DType::E4M3) / f64::from(scale_o) } else { 0.0 },
            shape: problem.lse_shape(),
            oracle: forward(problem, q, k, v)?,
            plain: forward_plain_scaled(problem, q, k, v, scale_o)?,
        })
    }

    /// The results of the oracle.
    pub fn oracle(&self) -> &Oracle {
        &self.oracle
    }

    /// The results of the plain computation.
    pub fn plain(&self) -> &Plain {
        &self.plain
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
        Ok(Report { o: self.check_o(o), lse: lse.map(|lse| self.check_lse(lse)) })
    }

    fn check_o(&self, got: &Tensor) -> Figures {
        let mut tally = Tally::default();
        for (row, scale) in self.oracle.scales.iter().enumerate() {
            let [batch, head, query] = place(self.shape, row);
            let exact = self.oracle.o.row(batch, query, head);
            let magnitude = largest(exact.iter().copied());
            let floor = FLOOR
                * ((self.unit_roundoff + SCORE_ROUNDOFFS * self.sum_roundoff * scale.score)
                    * scale.weighted.max(scale.centred)
                    + U32 * (scale.keys as f64).sqrt() * scale.weighted.max(magnitude));
            tally.row(
                Row {
                    got: got.row(batch, query, head),
                    exact,
                    plain: self.plain.o.row(batch, query, head),
                    floor,
                    ulps: O_ULPS * 2.0 * (self.output_roundoff * magnitude).max(self.output_least),
                },
                |dim| vec![batch, query, head, dim],
            );
        }
        tally.figures()
    }

    fn check_lse(&self, got: &[f64]) -> Figures {
        let mut tally = Tally::default();
        for (row, scale) in self.oracle.scales.iter().enumerate() {
            let [batch, head, query] = place(self.shape, row);
            let exact = self.oracle.lse[row];
            // A query without keys has LSE -inf. It must match exactly, and must not widen the bound on the tensor.
            let magnitude = if exact.is_finite() { scale.row_max.abs() + (exact - scale.row_max).abs() } else { 0.0 };
            tally.row(
                Row {
                    got: &got[row..=row],
                    exact: &self.oracle.lse[row..=row],
                    plain: &self.plain.lse[row..=row],
                    floor: (SCORE_ROUNDOFFS * self.sum_roundoff * scale.score).max(self.lse_least),
                    ulps: LSE_ULPS * 2.0 * U32 * magnitude.max(1.0),
                },
                |_| vec![batch, head, query],
            );
        }
        tally.figures()
    }
}

/// How the results of a forward pass compare with the tolerance.
#[derive(Clone, Debug)]
pub struct Report {
    /// The figures of the output.
    pub o: Figures,
    /// The figures of the LSE. `None` if no LSE was checked.
    pub lse: Option<Figures>,
}

impl Report {
    /// Whether all results are within the tolerance.
    pub fn passed(&self) -> bool {
        self.worst_ratio() <= 1.0
    }

    /// The largest error as a fraction of its tolerance, over the output and the LSE. At most 1 within the tolerance.
    pub fn worst_ratio(&self) -> f64 {
        self.lse.as_ref().map_or(0.0, |lse| lse.worst_ratio).max(self.o.worst_ratio)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "o: {}", self.o)?;
        match &self.lse {
            Some(lse) => write!(f, "; lse: {lse}"),
            None => Ok(()),
        }
    }
}

/// How one tensor compares with the tolerance.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// The largest error as a fraction of its tolerance. At most 1 within the tolerance. Infinite where a NaN or infinity does
    /// not match.
    pub worst_ratio: f64,
    /// The index of that error: `[batch, token, head, dim]` for an output or a gradient, `[batch, head, query]` for an LSE.
    /// Empty if the tensor is empty or has no error.
    pub worst_at: Vec<usize>,
    /// The value that was found there.
    pub worst_got: f64,
    /// The exact value there.
    pub worst_exact: f64,
    /// Whether `worst_ratio` is for the bound on the whole tensor. If not, it is for the bound on a row.
    pub worst_on_tensor: bool,
    /// The largest error.
    pub max: f64,
    /// The largest error of the plain computation.
    pub plain_max: f64,
    /// The root mean square of the errors.
    pub rms: f64,
    /// The root mean square of the plain computation's errors.
    pub plain_rms: f64,
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { worst_ratio, worst_at, worst_got, worst_exact, max, plain_max, rms, plain_rms, .. } = self;
        write!(f, "error {worst_ratio:.3} of tolerance")?;
        if !worst_at.is_empty() {
            let whole = if self.worst_on_tensor { "the tensor" } else { "its row" };
            write!(f, " (over {whole}) at {worst_at:?}: got {worst_got:e}, exact {worst_exact:e}")?;
        }
        write!(f, "; max {max:.2e} (plain {plain_max:.2e}), rms {rms:.2e} (plain {plain_rms:.2e})")
    }
}

/// One row to be judged.
struct Row<'a> {
    got: &'a [f64],
    exact: &'a [f64],
    plain: &'a [f64],
    floor: f64,
    ulps: f64,
}

/// The figures of a tensor while its rows are judged one after another.
#[derive(Default)]
struct Tally {
    figures: Figures,
    /// The largest floor of a row.
    floor_max: f64,
    /// The largest allowance of a row in ulps.
    ulps_max: f64,
    /// The index of the largest error, the value that was found there, and the exact value.
    max_at: (Vec<usize>, f64, f64),
    /// Sum of the squared errors.
    squares: f64,
    /// Sum of the plain computation's squared errors.
    plain_squares: f64,
    /// Number of finite elements.
    finite: usize,
}

impl Tally {
    fn row(&mut self, row: Row<'_>, place: impl Fn(usize) -> Vec<usize>) {
        let (mut worst, mut worst_dim, mut plain_worst) = (0.0_f64, None, 0.0_f64);
        for (dim, ((&got, &exact), &plain)) in row.got.iter().zip(row.exact).zip(row.plain).enumerate() {
            if !exact.is_finite() || !got.is_finite() {
                if !(got == exact || got.is_nan() && exact.is_nan()) {
                    self.worst(f64::INFINITY, || place(dim), got, exact);
                }
                continue;
            }
            let (error, plain_error) = ((got - exact).abs(), (plain - exact).abs());
            if error > worst {
                (worst, worst_dim) = (error, Some(dim));
            }
            self.squares += error * error;
            self.finite += 1;
            // If the plain computation overflowed, its error does not widen the tolerance.
            if plain_error.is_finite() {
                plain_worst = plain_worst.max(plain_error);
                self.plain_squares += plain_error * plain_error;
            }
        }
        // NaN inputs give a NaN floor. `f64::max` ignores the NaN.
        let floor = row.floor.max(0.0);
        let ulps = row.ulps.max(0.0);
        if let Some(dim) = worst_dim {
            let ratio = worst / (TIMES_PLAIN * plain_worst.max(floor) + ulps);
            self.worst(ratio, || place(dim), row.got[dim], row.exact[dim]);
            if worst > self.figures.max {
                self.figures.max = worst;
                self.max_at = (place(dim), row.got[dim], row.exact[dim]);
            }
        }
        self.figures.plain_max = self.figures.plain_max.max(plain_worst);
        self.floor_max = self.floor_max.max(floor);
        self.ulps_max = self.ulps_max.max(ulps);
    }

    fn worst(&mut self, ratio: f64, place: impl Fn() -> Vec<usize>, got: f64, exact: f64) {
        if ratio > self.figures.worst_ratio {
            self.figures.worst_ratio = ratio;
            self.figures.worst_at = place();
            (self.figures.worst_got, self.figures.worst_exact) = (got, exact);
        }
    }

    fn figures(mut self) -> Figures {
        let tolerance = TIMES_PLAIN * self.figures.plain_max.max(self.floor_max) + self.ulps_max;
        if self.figures.max > 0.0 && self.figures.max / tolerance > self.figures.worst_ratio {
            let (at, got, exact) = std::mem::take(&mut self.max_at);
            self.figures.worst_on_tensor = true;
            self.worst(self.figures.max / tolerance, || at.clone(), got, exact);
        }
        let mean = |squares: f64| if self.finite == 0 { 0.0 } else { (squares / self.finite as f64).sqrt() };
        self.figures.rms = mean(self.squares);
        self.figures.plain_rms = mean(self.plain_squares);
        self.figures
    }
}

/// The largest finite magnitude.
fn largest(values: impl Iterator<Item = f64>) -> f64 {
    values.map(f64::abs).filter(|x| x.is_finite()).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests;
