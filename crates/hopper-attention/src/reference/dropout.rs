//! The definition of which pairs dropout keeps.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::operand::Slot;
use crate::philox::philox;
use crate::problem::{Dropout, ForwardProblem};

/// Which pairs of a query and a key dropout keeps: the definition, on every device.
///
/// Random bits are those of Philox-4x32 with 7 rounds (Salmon, Moraes, Dror and Shaw, *Parallel random numbers: as easy as 1, 2,
/// 3*, 2011). For query `i` and key `j` of a sequence, counted from the sequence's first:
///
/// ```text
/// key of the generator      [seed low, seed high xor offset high]               halves of 32 bits
/// counter                   [j / 32 * 8 + j % 8, i / 16 * 8 + i % 8, batch * heads_q + head, offset low]
/// word of the result        number j / 8 % 4
/// decision                  bits 0 to 14 of the word where i / 8 is even, bits 16 to 30 where it is odd
/// ```
///
/// The pair is dropped where these 15 bits, as a number, are below [`Dropout::dropped`]. A call of the generator has eight
/// decisions, which belong to the eight numbers that a lane of a tensor core has of 16 queries and 32 keys.
///
/// `batch` is the number of the batch entry. Where sequences are packed, it is that of the sequence.
///
/// ```
/// use hopper_attention::reference::DropoutMask;
/// use hopper_attention::{Dropout, dropout_state};
///
/// let mask = DropoutMask::new(Dropout::new(0.5)?, 2, dropout_state(42, 7));
/// let kept = (0..1000).filter(|&key| mask.keeps(0, 1, 3, key)).count();
/// assert!((400..600).contains(&kept));
/// # Ok::<(), hopper_attention::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DropoutMask {
    dropout: Dropout,
    heads_q: usize,
    seed: [u32; 2],
    offset: [u32; 2],
    /// The number of the batch entry that is counted as 0.
    first_batch: usize,
}

impl DropoutMask {
    /// The mask of a problem with so many query heads. `state` is the operand [`Slot::DropoutState`]
    /// ([`dropout_state`](crate::dropout_state)).
    pub fn new(dropout: Dropout, heads_q: usize, state: [i32; 4]) -> Self {
        let [seed_low, seed_high, offset_low, offset_high] = state.map(|word| word as u32);
        Self { dropout, heads_q, seed: [seed_low, seed_high], offset: [offset_low, offset_high], first_batch: 0 }
    }

    /// The mask of a problem, with the operand [`Slot::DropoutState`]. `None` where the problem has no dropout or the operand is
    /// missing.
    pub fn of(problem: &ForwardProblem, state: Option<[i32; 4]>) -> Option<Self> {
        Some(Self::new(problem.dropout()?, problem.dims().heads_q, state?))
    }

    /// Whether a pair is kept. `query` and `key` count from the first of the sequence.
    pub fn keeps(&self, batch: usize, head: usize, query: usize, key: usize) -> bool {
        self.decides(&self.words([batch, head], query, key), query, key)
    }

    /// The four words of the generator for a pair.
    fn words(&self, [batch, head]: [usize; 2], query: usize, key: usize) -> [u32; 4] {
        let plane = (self.first_batch + batch) * self.heads_q + head;
        let query_patch = query / 16 * 8 + query % 8;
        let key_patch = key / 32 * 8 + key % 8;
        let counter = [key_patch as u32, query_patch as u32, plane as u32, self.offset[0]];
        philox::<7>(counter, [self.seed[0], self.seed[1] ^ self.offset[1]])
    }

    /// Whether a pair is kept, by its words.
    fn decides(&self, words: &[u32; 4], query: usize, key: usize) -> bool {
        let word = words[key / 8 % 4];
        let bits = if (query / 8).is_multiple_of(2) { word & 0x7fff } else { word >> 16 & 0x7fff };
        bits >= self.dropout.dropped()
    }

    /// What the weights of a query and these keys are multiplied by: `1 / (1 - p)`, or 0 where the pair is dropped.
    pub(super) fn factors(&self, place: [usize; 2], query: usize, keys: Range<usize>) -> Vec<f64> {
        let factor = self.dropout.factor();
        // Without a call of the generator, where nothing is dropped.
        if self.dropout.dropped() == 0 {
            return vec![factor; keys.len()];
        }
        // Four of 32 neighbouring keys share each call.
        let (mut words, mut first) = ([[0; 4]; 8], usize::MAX);
        let mut of_key = |key: usize| {
            if key / 32 * 32 != first {
                first = key / 32 * 32;
                words = std::array::from_fn(|i| self.words(place, query, first + i));
            }
            if self.decides(&words[key % 8], query, key) { factor } else { 0.0 }
        };
        keys.map(&mut of_key).collect()
    }

    /// That of a sequence, as batch entry 0 of a problem of its own.
    pub(super) fn of_sequence(self, sequence: usize) -> Self {
        Self { first_batch: self.first_batch + sequence, ..self }
    }

    /// Refuses the mask of another problem.
    pub(super) fn check(mask: Option<&Self>, problem: &ForwardProblem) -> Result<()> {
        let what = Slot::DropoutState.name();
        let refuse = |got: &str, allowed: String| Err(Error::Value { what, got: got.into(), allowed });
        match (problem.dropout(), mask) {
            (Some(_), None) => refuse("missing", "the mask, since the problem has dropout".into()),
            (None, Some(_)) => refuse("given", "none, since the problem has no dropout".into()),
            (Some(dropout), Some(mask)) if (dropout, problem.dims().heads_q) != (mask.dropout, mask.heads_q) => refuse(
                &format!("a mask for {} and {} query heads", mask.dropout, mask.heads_q),
                format!("{dropout} and {} query heads, as the problem has them", problem.dims().heads_q),
            ),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::dropout_state;

    /// The numbers behind the decisions, from a program of a few lines in Python.
    #[test]
    fn known_answers() {
        for ((seed, offset, heads), (batch, head, query, key), bits) in [
            ((0, 0, 1), (0, 0, 0, 0), 14089),
            ((0, 0, 1), (0, 0, 8, 0), 24431),
            ((0, 0, 1), (0, 0, 0, 8), 16228),
            ((0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210, 6), (1, 4, 37, 1001), 10359),
            ((42, 7, 2), (3, 1, 15, 31), 19996),
            ((42, 7, 2), (3, 1, 16, 32), 27414),
        ] {
            let keeps = |dropped: u32| {
                let dropout = Dropout::new(dropped as f32 / 32768.0).unwrap();
                let mask = DropoutMask::new(dropout, heads, dropout_state(seed, offset));
                let moved = mask.of_sequence(batch);
                assert_eq!(moved.keeps(0, head, query, key), mask.keeps(batch, head, query, key));
                mask.keeps(batch, head, query, key)
            };
            assert!(keeps(bits) && !keeps(bits + 1), "{seed} {offset}: {batch} {head} {query} {key}");
        }
    }

    #[test]
    fn neighbouring_keys_together() {
        let dropout = Dropout::new(0.3).unwrap();
        let mask = DropoutMask::new(dropout, 3, dropout_state(9, 4)).of_sequence(2);
        for (query, keys) in [(0, 0..0), (3, 0..100), (13, 5..71), (29, 31..33), (8, 64..97)] {
            let want: Vec<f64> =
                keys.clone().map(|key| if mask.keeps(1, 2, query, key) { dropout.factor() } else { 0.0 }).collect();
            assert_eq!(mask.factors([1, 2], query, keys), want);
        }
        let none = DropoutMask::new(Dropout::new(0.0).unwrap(), 3, [0; 4]);
        assert_eq!(none.factors([0, 0], 0, 3..5), [1.0; 2]);
    }

    #[test]
    fn the_mask_of_another_problem_is_refused() {
        let dims = crate::problem::Dims::new(1, 4, 2, 8);
        let options = || ForwardProblem::builder(crate::dtype::DType::F32, dims);
        let dropout = Dropout::new(0.5).unwrap();
        let with = options().dropout(Some(dropout)).build().unwrap();
        let mask = DropoutMask::of(&with, Some([1, 2, 3, 4]));
        assert!(DropoutMask::check(mask.as_ref(), &with).is_ok() && DropoutMask::of(&with, None).is_none());
        let refused = |mask: Option<DropoutMask>, problem: &ForwardProblem| {
            DropoutMask::check(mask.as_ref(), problem).unwrap_err().to_string()
        };
        assert_eq!(refused(None, &with), "dropout_state: missing; allowed: the mask, since the problem has dropout");
        let without = options().build().unwrap();
        assert_eq!(refused(mask, &without), "dropout_state: given; allowed: none, since the problem has no dropout");
        let other = DropoutMask::new(dropout, 3, [0; 4]);
        assert_eq!(
            refused(Some(other), &with),
            "dropout_state: a mask for dropout 0.5 and 3 query heads; allowed: dropout 0.5 and 2 query heads, as the problem has them"
        );
    }
}
