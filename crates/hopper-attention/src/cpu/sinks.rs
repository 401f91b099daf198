//! Attention sinks: a logit of each query head that takes part in the softmax of all its rows, and has no value.
//!
//! A row's sums over its keys are relative to the row's largest score. The sink is added to them once, when all keys are done.

use super::sequences::Sequences;
use super::{HostMut, HostRef};
use crate::dtype::bf16;

/// The sinks of a problem, `[heads_q]`.
#[derive(Clone, Copy)]
pub(crate) enum Sinks<'a> {
    /// There are none.
    None,
    /// In f32.
    F32(HostRef<'a, f32, 1>),
    /// In bf16.
    Bf16(HostRef<'a, bf16, 1>),
}

impl Sinks<'_> {
    /// The sink of a query head. -inf, which changes nothing, where there are none.
    pub fn of(&self, head: usize) -> f32 {
        match self {
            Self::None => f32::NEG_INFINITY,
            Self::F32(sinks) => sinks.at([head]),
            Self::Bf16(sinks) => sinks.at([head]).to_f32(),
        }
    }
}

/// What a sink makes of the sums of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sunk {
    /// What the sums over keys are multiplied by, from 0 to 1.
    pub own: f32,
    /// The weight of the sink.
    pub weight: f32,
    /// What both are relative to: the larger of the sink and the row's largest score.
    pub max: f32,
}

impl Sunk {
    /// `max` is the row's largest score. `exp` is `f32::exp`, or `f32::exp2` where scores are in powers of two.
    pub fn new(sink: f32, max: f32, exp: impl Fn(f32) -> f32) -> Self {
        // `f32::max` ignores the NaN of a sink, which stays in the weight.
        let both = max.max(sink);
        // Equal numbers may be infinite.
        let relative = |x: f32| if x == both { 1.0 } else { exp(x - both) };
        let weight = if sink == f32::NEG_INFINITY { 0.0 } else { relative(sink) };
        Self { own: relative(max), weight, max: both }
    }

    /// A sum over keys, with the sink.
    pub fn add_to(&self, sum: f32) -> f32 {
        sum * self.own + self.weight
    }
}

/// The O of a row without keys: 0, or NaN where the sink is NaN.
pub(super) fn without_keys(sink: f32) -> f32 {
    if sink.is_nan() { sink } else { 0.0 }
}

/// Writes the gradient of the sinks, from the LSE of each query and its `delta`: `rowsum(dO * O) - dLSE`, of a query without
/// keys -dLSE. Rows are added in the order of the sequences, in f64.
pub(super) fn gradients(
    sinks: &Sinks<'_>,
    sequences: &Sequences,
    lse: &HostRef<'_, f32, 3>,
    delta: &HostRef<'_, f32, 3>,
    d_sinks: &mut HostMut<'_, f32, 1>,
) {
    let [heads] = d_sinks.layout().shape();
    for head in 0..heads {
        let sink = sinks.of(head);
        let mut sum = 0.0;
        if sink != f32::NEG_INFINITY {
            for rows in (0..sequences.count()).map(|number| sequences.get(number).q) {
                let [lse, delta] = [lse, delta].map(|tensor| tensor.part(&rows, head, 0..rows.len));
                for (&lse, &delta) in lse.iter().zip(delta).filter(|(lse, _)| **lse != f32::NEG_INFINITY) {
                    let weight = if sink == lse { 1.0 } else { (sink - lse).exp() };
                    sum -= f64::from(weight) * f64::from(delta);
                }
            }
        }
        d_sinks.set([head], sum as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_and_its_sink_are_relative_to_the_larger_one() {
        let inf = f32::INFINITY;
        let sunk = |sink, max| {
            let Sunk { own, weight, max } = Sunk::new(sink, max, f32::exp);
            (own, weight, max)
        };
        assert_eq!(sunk(-inf, 3.0), (1.0, 0.0, 3.0));
        assert_eq!(sunk(-inf, -inf), (1.0, 0.0, -inf));
        assert_eq!(sunk(3.0, 3.0), (1.0, 1.0, 3.0));
        assert_eq!(sunk(1000.0, 0.0), (0.0, 1.0, 1000.0));
        assert_eq!(sunk(-1000.0, 0.0), (1.0, 0.0, 0.0));
        assert_eq!(sunk(inf, 3.0), (0.0, 1.0, inf));
        assert_eq!(sunk(2.0, -inf), (0.0, 1.0, 2.0));
        assert!(sunk(f32::NAN, 3.0).1.is_nan() && sunk(f32::NAN, 3.0).2 == 3.0);
        assert_eq!(Sunk::new(1.0, 3.0, f32::exp2).add_to(8.0), 8.25);
    }
}
