//! ALiBi in f64.

use super::Modifiers;
use crate::mask::Corner;
use crate::problem::ForwardProblem;

/// The biases of one head of a sequence: `slope * |query + offset - key|`, which scores lose.
#[derive(Clone, Copy, Debug)]
pub(super) struct Alibi {
    /// 0 where there is none.
    slope: f64,
    offset: i64,
}

impl Alibi {
    pub fn of(problem: &ForwardProblem, modifiers: Modifiers<'_>, [batch, head]: [usize; 2]) -> Self {
        let dims = problem.dims();
        // Without a mask the last query stands at the last key.
        let offset = match problem.mask().corner() {
            Some(Corner::TopLeft) => 0,
            _ => dims.seqlen_kv as i64 - dims.seqlen_q as i64,
        };
        let own = |slopes: &[f64]| {
            if slopes.len() == dims.heads_q { slopes[head] } else { slopes[batch * dims.heads_q + head] }
        };
        Self { slope: modifiers.alibi_slopes.map_or(0.0, own), offset }
    }

    /// What a score loses.
    pub fn bias(self, query: usize, key: usize) -> f64 {
        if self.slope == 0.0 { 0.0 } else { self.slope * (query as i64 + self.offset - key as i64).abs() as f64 }
    }

    /// The magnitude of that, which rounding errors are a share of. 0 where it is not finite.
    pub fn size(self, query: usize, key: usize) -> f64 {
        let size = self.bias(query, key).abs();
        if size.is_finite() { size } else { 0.0 }
    }
}
