//! Order statistics of raw timings.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// A summary of the timings of one library at one point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Every timing, in milliseconds, in the order taken.
    pub ms: Vec<f64>,
    /// The median, in milliseconds.
    pub median_ms: f64,
    /// The first quartile, in milliseconds.
    pub q1_ms: f64,
    /// The third quartile, in milliseconds.
    pub q3_ms: f64,
    /// The distance of the quartiles, in percent of the median.
    pub iqr_percent: f64,
    /// 10^12 floating-point operations a second at the median.
    pub tflops: f64,
}

impl Summary {
    /// Of timings in milliseconds of something that takes `flops` operations; `None` without timings.
    pub fn new(ms: Vec<f64>, flops: u64) -> Option<Self> {
        let [q1_ms, median_ms, q3_ms] = [0.25, 0.5, 0.75].map(|q| quantile(&ms, q));
        let (q1_ms, median_ms, q3_ms) = (q1_ms?, median_ms?, q3_ms?);
        let iqr_percent = 100.0 * (q3_ms - q1_ms) / median_ms;
        Some(Self { ms, median_ms, q1_ms, q3_ms, iqr_percent, tflops: flops as f64 / median_ms * 1e-9 })
    }

    /// Whether the figures could have been measured.
    pub(crate) fn check(&self) -> Result<()> {
        let Self { ms: _, median_ms, q1_ms, q3_ms, iqr_percent, tflops } = *self;
        for (name, figure) in [("median_ms", median_ms), ("q1_ms", q1_ms), ("q3_ms", q3_ms), ("tflops", tflops)] {
            measured(name, figure)?;
        }
        ensure!((0.0..=LARGEST).contains(&iqr_percent), "iqr_percent {iqr_percent}; allowed: 0 to {LARGEST:e}");
        Ok(())
    }
}

/// The least and the largest figure that is taken for a measurement: far from all real ones, and no product or quotient of a
/// few of them is infinite.
const LEAST: f64 = 1e-12;
const LARGEST: f64 = 1e12;

/// Whether a figure of a report could be a time, a rate or a ratio.
pub(crate) fn measured(name: &str, figure: f64) -> Result<()> {
    ensure!((LEAST..=LARGEST).contains(&figure), "{name} {figure}; allowed: {LEAST:e} to {LARGEST:e}");
    Ok(())
}

/// The `q`-quantile, linear between order statistics; `None` of nothing.
pub fn quantile(samples: &[f64], q: f64) -> Option<f64> {
    let mut ordered = samples.to_vec();
    ordered.sort_by(f64::total_cmp);
    let last = ordered.len().checked_sub(1)?;
    let at = q.clamp(0.0, 1.0) * last as f64;
    let low = at.floor() as usize;
    let high = (low + 1).min(last);
    Some(ordered[low] + (ordered[high] - ordered[low]) * (at - low as f64))
}

/// The exponential of the mean logarithm; `None` of nothing.
pub fn geometric_mean(values: &[f64]) -> Option<f64> {
    let sum: f64 = values.iter().map(|x| x.ln()).sum();
    (!values.is_empty()).then(|| (sum / values.len() as f64).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_interpolate() {
        assert_eq!(quantile(&[4.0, 1.0, 3.0, 2.0], 0.5), Some(2.5));
        assert_eq!(quantile(&[5.0], 0.25), Some(5.0));
        assert_eq!(quantile(&[], 0.5), None);
        let hundred: Vec<f64> = (0..=100).map(f64::from).collect();
        assert_eq!([0.0, 0.25, 0.75, 1.0].map(|q| quantile(&hundred, q)), [0.0, 25.0, 75.0, 100.0].map(Some));
    }

    #[test]
    fn the_rate_is_at_the_median() {
        let s = Summary::new(vec![3.0, 1.0, 2.0], 2_000_000_000_000).unwrap();
        assert_eq!((s.median_ms, s.q1_ms, s.q3_ms, s.iqr_percent), (2.0, 1.5, 2.5, 50.0));
        assert!((s.tflops - 1000.0).abs() < 1e-9, "{}", s.tflops); // 2e12 operations in 2 ms
        assert_eq!(s.ms, [3.0, 1.0, 2.0]);
        assert_eq!(Summary::new(vec![], 1), None);
    }

    #[test]
    fn geometric_means() {
        assert_eq!(geometric_mean(&[2.0, 8.0]).map(|x| (x * 1e9).round()), Some(4e9));
        assert_eq!(geometric_mean(&[]), None);
    }
}
