//! The one tolerance: how far a result may be from the oracle.
//!
//! For the output, with `u` the unit roundoff of the operands' type (e4m3: 2^-4, bf16: 2^-8, f16: 2^-11, f32: 2^-24), and
//! ulps those of the output's:
//!
//! ```text
//! per row     max|got - exact| <= 2 * max(max|plain - exact|, floor) + 1 ulp of max|exact|      all over the row
//! on tensor   max|got - exact| <= 2 * max(max|plain - exact|, floor) + 1 ulp of max|exact|      all over the tensor
//! ```
//!
//! `plain` is [`forward_plain`](super::forward_plain), the same computation in the same precision without any tiling: a
//! hard problem is allowed what it costs anybody, an easy one is not. Both lines must hold, and both bound a maximum:
//! no mean can excuse a wrong row, and no large row a wrong small one.
//!
//! `floor` keeps a row whose plain computation was lucky from failing an honest kernel. A row's plain error is the
//! largest of only `head_dim_vo` samples of noise, and of one sample's luck when the row has a single heavy column.
//! The noise has a known size, though: the roundings of P move an output by a standard deviation of
//! `0.42 u * sqrt(sum (p v)^2)` (0.42 for a rounding error uniform within half an ulp and values spread evenly over a
//! binade). The floor takes 1.5 `u` in place of 0.42 `u`, so the tolerance's double of it lies 7 standard deviations
//! out: beyond the 10^9 elements that a long run looks at, and still no more than about an ulp of the output.
//! What f32 accumulation adds (`sqrt(keys)` roundings of 2^-24, and scores that are off by 2^-24 times the magnitudes
//! that were summed for them) matters for f32 only, and is there for the others' sake with logits in the thousands.
//!
//! With e4m3 operands, exact is the f64 computation on what the operands stand for, and plain rounds P to e4m3: a kernel's
//! error is held against what quantisation alone costs, and not against a tolerance that zeros could pass. What was lost
//! when the operands were quantised is no error of a kernel and not judged here. A kernel may divide by the sum of the
//! rounded weights instead of the exact one, which costs less where weights are large (what all their roundings share
//! cancels) and more for a key whose value is small beside the output: the noise of P is then `0.42 u * sqrt(sum (p (v -
//! o))^2)`, and the floor takes the larger of the two.
//!
//! For the LSE, which is f32 whatever the operands are:
//!
//! ```text
//! per row     |got - exact| <= 2 * max(|plain - exact|, 4 * 2^-24 * |scale| |q| sum p |k|)
//!                              + 4 ulp of max(1, |row_max| + |exact - row_max|)
//! ```
//!
//! and the same with maxima on the tensor. The magnitudes are those behind the dot product, since a tensor core that
//! truncates while it accumulates is wrong by a few units of them, not of their sum; the ulps are those of the two
//! terms that are added, and cover the hardware's approximate exp2 and log2 (2^-22 each). Scores of e4m3 operands are off by
//! 2^-12 in place of 2^-24, here and in the floor above: the tensor cores' sums of FP8 products keep no more. That is as
//! true where a problem has them in f16 ([`half_scores`](ForwardProblem::half_scores)): a head dim of 128 is four
//! steps of 32 products, each of which rounds the sum so far by up to 2^-11 of it, and four times 2^-11 are the 2^-9 that
//! the tolerance allows of the magnitudes. Their exponentials are of f16 too, and so their LSE is allowed 2.5e-3 at least.
//!
//! For dQ, dK and dV the tolerance is that of the output. Its `plain` is [`backward_plain`](super::backward_plain), and its floor
//! is another, since they are sums over pairs of a query and a key in which more is rounded:
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
//! `s` is what a score and the LSE are off by in f32, and so a probability's relative error; delta inherits the rounding of
//! O and of the probabilities behind it. `t` is half the smallest subnormal of the type, which f16 gradients do come near,
//! but at least the smallest normal f32, below which a GPU may flush to 0.
//!
//! What is not finite must match: NaN where the oracle has NaN and only there, and infinities (the -inf of a fully
//! masked row) exactly. An output row that is exactly 0, and a gradient's row in which no pair has a part, must be exactly 0.

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
/// Ulps of the output type on top.
const O_ULPS: f64 = 1.0;
/// Ulps of the output type on top, for a gradient.
const GRADIENT_ULPS: f64 = 1.0;
/// Ulps of f32 on top, for the LSE.
const LSE_ULPS: f64 = 4.0;
/// The floor in units of the standard deviation's size without its 0.42 (see above).
const FLOOR: f64 = 1.5;
/// The unit roundoff of a sum of e4m3 products. Hopper's tensor cores add 32 of them at a time, each cut off (not rounded) at some
/// 2^-13 of the largest magnitude among them and the sum so far: half of that 32 times is 2^-9 of the sum where all have one
/// sign, which is what the tolerance allows with this.
const U_SUM_E4M3: f64 = 1.0 / (1 << 12) as f64;
/// The least that an LSE of scores in f16 may be off by, in the tolerance's `max`: half of what it allows then. Exponentials of f16 are
/// good to 2^-9.9 (PTX ISA, `ex2`), and exponents of up to 8 are rounded to f16, by 2^-9 in powers of two: together 2.4e-3.
const LSE_LEAST_HALF_SCORES: f64 = 1.25e-3;
/// Everything needed to judge results of one problem on given inputs: the oracle and the plain computation.
#[derive(Clone, Debug)]
pub struct Expected {
    /// Of the weights.
    unit_roundoff: f64,
    /// Of the sums that are scores.
    sum_roundoff: f64,
    /// In the LSE's floor.
    lse_least: f64,
    /// Of the output.
    output_roundoff: f64,
    /// What an output of e4m3 is off by near 0.
    output_least: f64,
    /// The LSE's.
    shape: [usize; 3],
    oracle: Oracle,
    plain: Plain,
}

impl Expected {
    /// Computes the oracle and the plain computation. The tensors are as for [`forward`]; those of e4m3 operands hold
    /// real values, what is stored times its factor ([`Tensor::descaled`]).
    ///
    /// # Errors
    /// [`Error::Shape`] when a tensor's shape is not the problem's.
    pub fn new(problem: &ForwardProblem, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Self> {
        Self::with_scale_o(problem, q, k, v, 1.0)
    }

    /// As [`new`](Self::new), for an output of e4m3 that is stored times `scale_o`. Results to check are real values: what
    /// is stored divided by `scale_o`.
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

    /// The exact result.
    pub fn oracle(&self) -> &Oracle {
        &self.oracle
    }

    /// The plain computation's result.
    pub fn plain(&self) -> &Plain {
        &self.plain
    }

    /// Holds a result against the tolerance. `o` is `[batch, seqlen_q, heads_q, head_dim_vo]`, `lse` (when there is one)
    /// `[batch, heads_q, seqlen_q]`.
    ///
    /// # Errors
    /// [`Error::Shape`] when they have other shapes.
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
            // The -inf of a masked row has no ulps, and must not widen the bound on the tensor.
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

/// How a result compares with the tolerance.
#[derive(Clone, Debug)]
pub struct Report {
    /// The output's figures.
    pub o: Figures,
    /// The LSE's figures, when there was one to check.
    pub lse: Option<Figures>,
}

impl Report {
    /// Whether the tolerance is kept.
    pub fn passed(&self) -> bool {
        self.worst_ratio() <= 1.0
    }

    /// The largest error as a fraction of its tolerance, over the output and the LSE.
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

/// One tensor's figures.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// The largest error as a fraction of its tolerance; at most 1 when the tolerance is kept, infinite where something that
    /// is not finite does not match.
    pub worst_ratio: f64,
    /// Where that is: `[batch, seqlen, head, dim]` for an output, `[batch, head, seqlen]` for an LSE; empty when the
    /// tensor is empty or exact.
    pub worst_at: Vec<usize>,
    /// What was found there.
    pub worst_got: f64,
    /// What is exact there.
    pub worst_exact: f64,
    /// Whether it was the bound on the whole tensor that was nearest to being broken, not the one on the row.
    pub worst_on_tensor: bool,
    /// The largest error.
    pub max: f64,
    /// The plain computation's largest error.
    pub plain_max: f64,
    /// The root of the mean squared error.
    pub rms: f64,
    /// The plain computation's.
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

/// What the rows of a tensor add up to.
#[derive(Default)]
struct Tally {
    figures: Figures,
    floor_max: f64,
    ulps_max: f64,
    /// Where the largest error is, what was found and what is exact.
    max_at: (Vec<usize>, f64, f64),
    squares: f64,
    plain_squares: f64,
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
            // A plain computation that overflowed excuses nothing.
            if plain_error.is_finite() {
                plain_worst = plain_worst.max(plain_error);
                self.plain_squares += plain_error * plain_error;
            }
        }
        // `max` passes over the NaN that magnitudes of NaN inputs are.
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
