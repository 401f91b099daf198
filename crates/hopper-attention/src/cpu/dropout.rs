//! Dropout: which weights become 0. `reference/dropout.rs` has the definition, pair by pair. Here neighbouring keys of a query
//! share calls of the generator.

use std::ops::Range;

use super::sequences::Sequence;
use crate::philox::philox;
use crate::problem::ForwardProblem;

/// Keys of which the four words of eight calls decide.
const KEYS: usize = 32;

/// Which pairs of one head of a sequence are dropped.
#[derive(Clone, Copy, Debug)]
pub(super) struct Drops {
    dropped: u32,
    key: [u32; 2],
    /// The last two words of the counter: the head of the sequence, and the low half of the offset.
    place: [u32; 2],
}

impl Drops {
    /// Those of a query head. `state` has the words of the seed and of the offset. `None` where nothing is dropped.
    pub fn of(problem: &ForwardProblem, state: Option<[i32; 4]>, sequence: &Sequence, head: usize) -> Option<Self> {
        let dropout = problem.drops()?;
        let [seed_low, seed_high, offset_low, offset_high] = state?.map(|word| word as u32);
        // Batch entries times heads are below 2^31.
        let head = (sequence.q.sequence * problem.dims().heads_q + head) as u32;
        Some(Self { dropped: dropout.dropped(), key: [seed_low, seed_high ^ offset_high], place: [head, offset_low] })
    }

    /// Fills `out` with whether pairs of these queries and keys are dropped, `[queries, keys]`. It is empty where nothing is dropped.
    pub fn pairs(drops: Option<&Self>, queries: Range<usize>, keys: Range<usize>, out: &mut Vec<bool>) {
        out.clear();
        if let Some(drops) = drops {
            queries.for_each(|query| drops.row(query, keys.start, keys.len(), out));
        }
    }

    /// Adds to `out` for neighbouring keys, from `first_key` on, whether the pair with the query is dropped.
    fn row(&self, query: usize, first_key: usize, keys: usize, out: &mut Vec<bool>) {
        let (query_patch, shift) = ((query / 16 * 8 + query % 8) as u32, query / 8 % 2 * 16);
        let end = first_key + keys;
        for first in (first_key / KEYS * KEYS..end).step_by(KEYS) {
            let mut of_group = [false; KEYS];
            for lane in 0..8 {
                let key_patch = (first / 4 + lane) as u32;
                let [head, offset] = self.place;
                let words = philox::<7>([key_patch, query_patch, head, offset], self.key);
                for (at, word) in words.into_iter().enumerate() {
                    of_group[at * 8 + lane] = (word >> shift) & 0x7fff < self.dropped;
                }
            }
            out.extend_from_slice(&of_group[first_key.max(first) - first..end.min(first + KEYS) - first]);
        }
    }
}

/// Makes the weights of dropped pairs 0.
pub(super) fn zero(dropped: &[bool], weights: &mut [f32]) {
    weights.iter_mut().zip(dropped).for_each(|(weight, &dropped)| *weight = if dropped { 0.0 } else { *weight });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::problem::{Dims, Dropout, dropout_state};
    use crate::reference::DropoutMask;
    use crate::sequences::SequenceRows;

    #[test]
    fn rows_are_those_of_the_definition() {
        let dims = Dims::new(3, 40, 4, 8).with_seqlen_kv(150);
        let problem = |p| ForwardProblem::builder(DType::F32, dims).dropout(Some(Dropout::new(p).unwrap())).build();
        let (problem, none) = (problem(0.3).unwrap(), problem(0.0).unwrap());
        let state = Some(dropout_state(0x0123_4567_89ab_cdef, 0x7_8000_0005));
        let mask = DropoutMask::of(&problem, state).unwrap();
        for (batch, head) in [(0, 0), (1, 3), (2, 1)] {
            let [q, kv] = [40, 150].map(|len| SequenceRows::padded(batch, len));
            let sequence = Sequence { q, kv };
            let drops = Drops::of(&problem, state, &sequence, head).unwrap();
            for (query, first, keys) in [(0, 0, 150), (7, 3, 1), (8, 31, 2), (23, 32, 64), (39, 77, 73), (16, 5, 0)] {
                let mut row = vec![true];
                drops.row(query, first, keys, &mut row);
                let want = (first..first + keys).map(|key| !mask.keeps(batch, head, query, key));
                assert!(row[1..].iter().copied().eq(want), "{batch} {head} {query} {first} {keys}");
            }
            assert!(Drops::of(&none, state, &sequence, head).is_none() && none.dropout_factor() == 1.0);
        }
    }
}
