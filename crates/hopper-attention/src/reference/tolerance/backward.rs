//! The tolerance for dQ, dK, dV and the gradients of sinks and of a bias.

use std::fmt;

use super::super::oracle::backward_told;
use super::super::plain::backward_plain_told;
use super::super::rounding::{ROUNDING, U32, half_subnormal, hypot, overflow, unit_roundoff};
use super::super::work::{Told, Work, backward_units};
use super::super::{BackwardOracle, BackwardPlain, BiasNoise, Modifiers, Noise, Tensor, place, shape_error};
use super::{COMMON, FLOOR, Figures, GRADIENT_ULPS, Judged, Norms, Ratios, Row, Tally};
use super::{largest, squares_norm, subnormal, systematic};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::BackwardProblem;
use crate::sequences::Lengths;

/// Judges the gradients of a backward problem on given inputs. It holds the results of the oracle and of the plain computation.
#[derive(Clone, Debug)]
pub struct BackwardExpected {
    dtype: DType,
    oracle: BackwardOracle,
    plain: BackwardPlain,
    /// Of dQ, and of dK and dV.
    judged: [Judged; 2],
    /// The type and the shape of the gradient of the bias.
    d_bias: Option<(DType, [usize; 4])>,
    /// Of the exact dQ, dK and dV.
    norms: [Norms; 3],
}

impl BackwardExpected {
    /// Runs the oracle and the plain computation on the inputs. The inputs are as for
    /// [`backward`](super::super::backward).
    ///
    /// # Errors
    /// As [`backward`](super::super::backward).
    pub fn new(
        problem: &BackwardProblem,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        d_o: &Tensor,
        d_lse: Option<&[f64]>,
    ) -> Result<Self> {
        Self::of(problem, &Lengths::default(), [q, k, v, d_o], d_lse, None)
    }

    /// As [`new`](Self::new), for a problem with packed sequences or used lengths, with q, k, v and d_o in `inputs`. `told`, if
    /// there is one, is called from time to time with the share of the work that is done.
    ///
    /// The shapes of packed tensors have a batch of 1, here and in [`check`](Self::check).
    ///
    /// # Errors
    /// As [`backward_of`](super::super::backward_of).
    pub fn of(
        problem: &BackwardProblem,
        lengths: &Lengths<'_>,
        inputs: [&Tensor; 4],
        d_lse: Option<&[f64]>,
        told: Option<Told<'_>>,
    ) -> Result<Self> {
        Self::with(problem, lengths, inputs, d_lse, Modifiers::default(), told)
    }

    /// As [`of`](Self::of), for a problem with modifiers.
    ///
    /// # Errors
    /// As [`backward_with`](super::super::backward_with).
    pub fn with(
        problem: &BackwardProblem,
        lengths: &Lengths<'_>,
        inputs: [&Tensor; 4],
        d_lse: Option<&[f64]>,
        modifiers: Modifiers<'_>,
        told: Option<Told<'_>>,
    ) -> Result<Self> {
        let dims = problem.dims();
        let rows = |[batch, seqlen, ..]: [usize; 4]| batch * dims.heads_q * seqlen;
        let units = backward_units(rows(problem.d_q_shape()), rows(problem.d_k_shape()));
        let work = told.map_or_else(Work::silent, |told| Work::new(told, units));
        Self::compute(problem, lengths, inputs, d_lse, modifiers, &work)
    }

    /// As [`new`](Self::new), with q, k, v and d_o in `inputs`. `told` is called from time to time with the share of
    /// the work that is done.
    ///
    /// # Errors
    /// As [`backward`](super::super::backward).
    pub fn with_progress(
        problem: &BackwardProblem,
        inputs: [&Tensor; 4],
        d_lse: Option<&[f64]>,
        told: Told<'_>,
    ) -> Result<Self> {
        Self::of(problem, &Lengths::default(), inputs, d_lse, Some(told))
    }

    fn compute(
        problem: &BackwardProblem,
        lengths: &Lengths<'_>,
        inputs: [&Tensor; 4],
        d_lse: Option<&[f64]>,
        modifiers: Modifiers<'_>,
        work: &Work<'_>,
    ) -> Result<Self> {
        Ok(Self {
            dtype: problem.dtype(),
            oracle: backward_told(problem, lengths, inputs, d_lse, modifiers, work)?,
            plain: backward_plain_told(problem, lengths, inputs, d_lse, modifiers, work)?,
            judged: {
                let forward = problem.forward();
                let sequences = lengths.sequences(forward);
                let of_q = Judged::of(forward, problem.d_q_shape(), sequences.clone().map(|[q, _]| q));
                [of_q, Judged::of(forward, problem.d_k_shape(), sequences.map(|[_, kv]| kv))]
            },
            d_bias: problem.forward().bias().filter(|_| problem.wants_d_bias()).map(|bias| {
                let shape = problem.forward().bias_shape();
                (bias.dtype(), shape)
            }),
            norms: Default::default(),
        })
    }

    /// The gradients of the oracle.
    pub fn oracle(&self) -> &BackwardOracle {
        &self.oracle
    }

    /// The gradients of the plain computation.
    pub fn plain(&self) -> &BackwardPlain {
        &self.plain
    }

    /// As [`Expected::with_exact_plain`](super::Expected::with_exact_plain).
    #[must_use]
    pub fn with_exact_plain(mut self) -> Self {
        let BackwardOracle { d_q, d_k, d_v, d_sinks, d_bias, .. } = &self.oracle;
        let [d_q, d_k, d_v] = [d_q, d_k, d_v].map(Tensor::clone);
        self.plain = BackwardPlain { d_q, d_k, d_v, d_sinks: d_sinks.clone(), d_bias: d_bias.clone() };
        self
    }

    /// Compares gradients with the tolerance.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) when a shape is not the problem's.
    pub fn check(&self, d_q: &Tensor, d_k: &Tensor, d_v: &Tensor) -> Result<BackwardReport> {
        let Self { oracle, plain, judged: [of_q, of_kv], norms, .. } = self;
        let [d_q_norms, d_k_norms, d_v_norms] = norms;
        Ok(BackwardReport {
            d_q: self.check_one("d_q", d_q, (&oracle.d_q, d_q_norms), &plain.d_q, &oracle.d_q_noise, of_q)?,
            d_k: self.check_one("d_k", d_k, (&oracle.d_k, d_k_norms), &plain.d_k, &oracle.d_k_noise, of_kv)?,
            d_v: self.check_one("d_v", d_v, (&oracle.d_v, d_v_norms), &plain.d_v, &oracle.d_v_noise, of_kv)?,
            d_sinks: None,
            d_bias: None,
        })
    }

    /// As [`check`](Self::check), for a problem with the gradient of sinks: `[heads_q]`.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn check_with(&self, d_q: &Tensor, d_k: &Tensor, d_v: &Tensor, d_sinks: &[f64]) -> Result<BackwardReport> {
        Ok(BackwardReport { d_sinks: Some(self.check_sinks(d_sinks)?), ..self.check(d_q, d_k, d_v)? })
    }

    /// Compares all gradients with the tolerance: those of sinks and of a bias where the problem has them.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn check_all(&self, got: &BackwardPlain) -> Result<BackwardReport> {
        let d_sinks = if self.oracle.d_sinks.is_empty() { None } else { Some(self.check_sinks(&got.d_sinks)?) };
        let d_bias = if self.d_bias.is_some() { Some(self.check_bias(&got.d_bias)?) } else { None };
        Ok(BackwardReport { d_sinks, d_bias, ..self.check(&got.d_q, &got.d_k, &got.d_v)? })
    }

    /// Compares the gradient of the bias with the tolerance. Its elements are in row-major order.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) when there are not as many elements as the problem has.
    pub fn check_bias(&self, got: &[f64]) -> Result<Figures> {
        let (dtype, shape) = self.d_bias.unwrap_or((DType::F32, [0; 4]));
        let (exact, plain, noise) = (&self.oracle.d_bias, &self.plain.d_bias, &self.oracle.d_bias_noise);
        if got.len() != exact.len() {
            let axes = "[batch, heads, seqlen_q, seqlen_kv]";
            return Err(Error::Shape { tensor: "dbias", got: vec![got.len()], want: shape.into(), axes });
        }
        let [batches, heads, queries, keys] = shape;
        let (roundoff, least) = (unit_roundoff(dtype), half_subnormal(dtype));
        let common = COMMON * roundoff.max(unit_roundoff(self.dtype));
        let mut tally = Tally::new([batches, queries, heads, keys], Some(common));
        for row in 0..batches * heads * queries {
            let [batch, head, query] = place([batches, heads, queries], row);
            let of_row = row * keys..(row + 1) * keys;
            let (exact, noise) = (&exact[of_row.clone()], &noise[of_row.clone()]);
            // An element without pairs must be exactly 0.
            let zeroed =
                |(&got, noise): (&f64, &BiasNoise)| if noise.terms == 0 && got != 0.0 { f64::NAN } else { got };
            let seen: Vec<f64> = got[of_row.clone()].iter().zip(noise).map(zeroed).collect();
            let of = |size: fn(&BiasNoise) -> f64| noise.iter().map(size).collect::<Vec<_>>();
            let (deviation, weighted, of_delta) =
                (of(|noise| noise.deviation), of(|noise| noise.weighted), of(|noise| noise.of_delta));
            let terms = noise.iter().map(|noise| noise.terms).max().unwrap_or(0);
            let same = largest(&of(|noise| noise.alike));
            let magnitude = largest(exact);
            let of_sums = U32 * (terms as f64).sqrt();
            let of_terms = |noise: &BiasNoise| {
                let least = if noise.terms == 0 { 0.0 } else { least };
                ROUNDING * hypot(noise.deviation, least) + U32 * (noise.terms as f64).sqrt() * noise.weighted
            };
            let of_terms: Vec<f64> = noise.iter().map(of_terms).collect();
            let least = if terms == 0 { 0.0 } else { least };
            let rounding = ROUNDING * roundoff;
            let along = of_terms.iter().zip(exact).map(|(noise, exact)| noise * exact.abs());
            let along: f64 = along.filter(|term| term.is_finite()).sum();
            tally.row(&Row {
                at: [batch, query, head],
                got: &seen,
                exact,
                plain: &plain[of_row],
                deviation: of_terms.iter().zip(exact).map(|(&noise, exact)| hypot(noise, rounding * exact)).collect(),
                along: hypot(along, rounding * squares_norm(exact)),
                alike: vec![0.0; keys],
                systematic: systematic([same, 0.0], terms, &of_delta, exact, &weighted),
                floor: FLOOR * (largest(&deviation) + of_sums * largest(&weighted).max(magnitude)),
                ulps: GRADIENT_ULPS * 2.0 * (roundoff * magnitude).max(least),
                overflow: overflow(dtype),
            });
        }
        let mut figures = tally.figures();
        if let [batch, query, head, key] = figures.worst_at[..] {
            figures.worst_at = vec![batch, head, query, key];
        }
        Ok(figures)
    }

    fn check_sinks(&self, got: &[f64]) -> Result<Figures> {
        let (exact, plain, noise) = (&self.oracle.d_sinks, &self.plain.d_sinks, &self.oracle.d_sinks_noise);
        if got.len() != exact.len() {
            let (got, want) = (vec![got.len()], vec![exact.len()]);
            return Err(Error::Shape { tensor: "d_sinks", got, want, axes: "[heads]" });
        }
        let mut tally = Tally::new([1, 1, exact.len(), 1], None);
        for (head, noise) in noise.iter().enumerate() {
            let of_sums = U32 * (noise.terms as f64).sqrt() * noise.magnitude;
            tally.row(&Row {
                at: [0, 0, head],
                got: &got[head..=head],
                exact: &exact[head..=head],
                plain: &plain[head..=head],
                deviation: vec![ROUNDING * noise.deviation + of_sums + noise.flushed],
                along: 0.0,
                alike: vec![0.0],
                systematic: vec![noise.of_delta],
                floor: FLOOR * (noise.deviation + of_sums) + noise.flushed,
                ulps: 2.0 * U32 * exact[head].abs(),
                overflow: overflow(DType::F32),
            });
        }
        Ok(tally.figures())
    }

    fn check_one(
        &self,
        name: &'static str,
        got: &Tensor,
        (exact, norms): (&Tensor, &Norms),
        plain: &Tensor,
        noise: &Noise,
        judged: &Judged,
    ) -> Result<Figures> {
        if got.shape() != exact.shape() {
            return Err(shape_error(name, got.shape(), exact.shape()));
        }
        let [batch, seqlen, heads, _] = exact.shape();
        let (roundoff, least) = (unit_roundoff(self.dtype), half_subnormal(self.dtype));
        let mut tally = Tally::new(exact.shape(), Some(COMMON * roundoff));
        let norms = norms.of(exact);
        for (i, (&terms, &same)) in noise.terms.iter().zip(&noise.alike).enumerate() {
            let [batch, head, token] = place([batch, heads, seqlen], i);
            if !judged.row(batch, token) {
                continue;
            }
            let norm = norms[i];
            let [exact, noise, weighted, of_delta] = [exact, &noise.deviation, &noise.weighted, &noise.of_delta]
                .map(|tensor| tensor.row(batch, token, head));
            let magnitude = largest(exact);
            let of_sums = U32 * (terms as f64).sqrt();
            // A row without pairs must be exactly 0, so it is allowed nothing. Among subnormal numbers an ulp has a fixed size.
            let least = if terms == 0 { 0.0 } else { least };
            let lost: Vec<f64> = of_delta.iter().zip(exact).map(|(lost, &exact)| lost + subnormal(exact)).collect();
            let of_terms = |(noise, weighted): (&f64, &f64)| ROUNDING * hypot(*noise, least) + of_sums * weighted;
            let of_terms: Vec<f64> = noise.iter().zip(weighted).map(of_terms).collect();
            let rounding = ROUNDING * roundoff;
            // As if what is summed had the same error in all elements.
            let along = of_terms.iter().zip(exact).map(|(noise, exact)| noise * exact.abs());
            let along: f64 = along.filter(|term| term.is_finite()).sum();
            tally.row(&Row {
                at: [batch, token, head],
                got: got.row(batch, token, head),
                exact,
                plain: plain.row(batch, token, head),
                deviation: of_terms.iter().zip(exact).map(|(&noise, exact)| hypot(noise, rounding * exact)).collect(),
                along: hypot(along, rounding * norm),
                // Keys see the same roundings in all queries, and queries in all keys.
                alike: vec![0.0; exact.len()],
                systematic: systematic([same, least * (same / roundoff).min(1.0)], terms, &lost, exact, weighted),
                floor: FLOOR * (largest(noise) + of_sums * largest(weighted).max(magnitude)),
                ulps: GRADIENT_ULPS * 2.0 * (roundoff * magnitude).max(least),
                overflow: overflow(self.dtype),
            });
        }
        Ok(tally.figures())
    }
}

/// How gradients compare with the tolerance.
#[derive(Clone, Debug)]
pub struct BackwardReport {
    /// The figures of dQ.
    pub d_q: Figures,
    /// The figures of dK.
    pub d_k: Figures,
    /// The figures of dV.
    pub d_v: Figures,
    /// The figures of the gradient of the sinks. `None` if it was not checked.
    pub d_sinks: Option<Figures>,
    /// The figures of the gradient of the bias. `None` if it was not checked.
    pub d_bias: Option<Figures>,
}

impl BackwardReport {
    /// Whether all gradients are within the tolerance.
    pub fn passed(&self) -> bool {
        self.worst_ratio() <= 1.0
    }

    /// The largest error as a fraction of its tolerance, over all gradients. At most 1 within the tolerance.
    pub fn worst_ratio(&self) -> f64 {
        let others = [&self.d_sinks, &self.d_bias].into_iter().flatten().map(|figures| figures.worst_ratio);
        others.fold(self.d_q.worst_ratio.max(self.d_k.worst_ratio).max(self.d_v.worst_ratio), f64::max)
    }

    /// The same for each kind of bound.
    pub fn ratios(&self) -> Ratios {
        let ratios = self.d_q.ratios.max(self.d_k.ratios).max(self.d_v.ratios);
        let others = [&self.d_sinks, &self.d_bias].into_iter().flatten();
        others.fold(ratios, |ratios, figures| ratios.max(figures.ratios))
    }
}

impl fmt::Display for BackwardReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "d_q: {}; d_k: {}; d_v: {}", self.d_q, self.d_k, self.d_v)?;
        let others = [("d_sinks", &self.d_sinks), ("dbias", &self.d_bias)];
        others
            .into_iter()
            .filter_map(|(name, figures)| Some((name, figures.as_ref()?)))
            .try_for_each(|(name, figures)| write!(f, "; {name}: {figures}"))
    }
}
