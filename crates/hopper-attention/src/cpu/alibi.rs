//! ALiBi: scores lose `slope * |query + offset - key|`, after the cap. Masked pairs are left out before.

use super::HostRef;
use super::sequences::Sequence;
use crate::problem::{AlibiSlopes, ForwardProblem};

/// The slopes of a problem: `[1, heads_q]` where all batches share them, or `[batch, heads_q]`. `None` where there is no ALiBi.
pub(crate) type Slopes<'a> = Option<HostRef<'a, f32, 2>>;

/// The biases of the scores of one head of a sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bias {
    slope: f32,
    /// The key at which query 0 stands. Lengths are below 2^30, and so is this.
    offset: i32,
}

impl Bias {
    /// Those of a query head. `None` without ALiBi.
    pub fn of(problem: &ForwardProblem, slopes: &Slopes<'_>, sequence: &Sequence, head: usize) -> Option<Self> {
        let slopes = slopes.as_ref()?;
        let batch = match problem.alibi()? {
            AlibiSlopes::PerHead => 0,
            AlibiSlopes::PerBatch => sequence.q.sequence,
        };
        let offset = problem.alibi_offset(sequence.q.len, sequence.kv.len);
        Some(Self { slope: slopes.at([batch, head]), offset: i32::try_from(offset).unwrap_or(0) })
    }

    /// Subtracts from the scores of a query and neighbouring keys, from `first_key` on.
    pub fn subtract(&self, query: usize, first_key: usize, scores: &mut [f32]) {
        let to_first = query as i32 + self.offset - first_key as i32;
        for (i, score) in scores.iter_mut().enumerate() {
            *score -= self.slope * (to_first - i as i32).abs() as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::layout::Layout;
    use crate::mask::{Corner, Mask};
    use crate::problem::Dims;
    use crate::sequences::SequenceRows;

    #[test]
    fn biases_by_hand() {
        let dims = Dims::new(2, 3, 2, 8).with_seqlen_kv(5);
        let options = || ForwardProblem::builder(DType::F32, dims);
        let slopes = [0.5, 2.0, -1.0, 0.0];
        let of = |problem: ForwardProblem, batch: usize, head, query, first| {
            let shape = if problem.alibi() == Some(AlibiSlopes::PerBatch) { [2, 2] } else { [1, 2] };
            let slopes = Some(HostRef::of(&slopes, Layout::contiguous(shape).unwrap()));
            let [q, kv] = [3, 5].map(|len| SequenceRows::padded(batch, len));
            let mut scores = [10.0; 3];
            let bias = Bias::of(&problem, &slopes, &Sequence { q, kv }, head);
            bias.unwrap().subtract(query, first, &mut scores);
            scores
        };
        let shared = || options().alibi(AlibiSlopes::PerHead);
        // The last query stands at the last key.
        assert_eq!(of(shared().build().unwrap(), 1, 0, 2, 2), [9.0, 9.5, 10.0]);
        assert_eq!(of(shared().build().unwrap(), 1, 1, 0, 1), [8.0, 10.0, 8.0]);
        let top_left = Mask::Causal { corner: Corner::TopLeft };
        assert_eq!(of(shared().mask(top_left).build().unwrap(), 0, 1, 0, 0), [10.0, 8.0, 6.0]);
        let per_batch = || options().alibi(AlibiSlopes::PerBatch).build().unwrap();
        assert_eq!(of(per_batch(), 1, 0, 2, 2), [12.0, 11.0, 10.0]);
        assert_eq!(of(per_batch(), 0, 0, 2, 2), [9.0, 9.5, 10.0]);
        let [q, kv] = [3, 5].map(|len| SequenceRows::padded(0, len));
        assert!(Bias::of(&options().build().unwrap(), &None, &Sequence { q, kv }, 0).is_none());
    }
}
