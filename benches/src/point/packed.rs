//! Packed batches: sequences of different lengths that follow each other in the same tensors.

use std::f64::consts::TAU;
use std::fmt;
use std::ops::Range;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use super::Point;

/// What our second run at a packed point is called: our name and this. It computes the point's dense batch
/// ([`Packed::dense`]).
pub const DENSE: &str = "-dense";

/// How long the sequences of a packed batch are, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// All have this length.
    Equal(usize),
    /// Log-normal with this mean.
    Lognormal(usize),
    /// One has half of the tokens. The others are short.
    Long,
    /// Log-normal, with longer ones cut into pieces of this length.
    Documents(usize),
}

/// The word in the names of points, in tables and on charts.
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Equal(length) => write!(f, "equal{length}"),
            Self::Lognormal(mean) => write!(f, "lognormal{mean}"),
            Self::Long => f.write_str("long"),
            Self::Documents(most) => write!(f, "documents{most}"),
        }
    }
}

/// The sequences of a packed batch. Reports have the lengths, and the script in PyTorch reads them from its job.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Packed {
    /// How the lengths were chosen.
    pub kind: Kind,
    /// The length of each sequence, at least 1, in the order of the rows.
    pub lengths: Vec<usize>,
    /// A dense batch with as many operations and about as many tokens: how many sequences, and their length. Of equal
    /// lengths it is the same batch.
    pub dense: [usize; 2],
}

impl Packed {
    fn new(kind: Kind, lengths: Vec<usize>) -> Self {
        let sum = |power: i32| lengths.iter().map(|&length| (length as f64).powi(power)).sum::<f64>();
        let (tokens, squares) = (sum(1), sum(2));
        // The operations follow from the squares. So many sequences of one length have as many tokens, too.
        let count = (tokens * tokens / squares).round().max(1.0);
        let dense = [count as usize, (squares / count).sqrt().round() as usize];
        Self { kind, lengths, dense }
    }

    /// So many sequences of one length.
    pub fn equal(count: usize, length: usize) -> Self {
        Self::new(Kind::Equal(length), vec![length; count])
    }

    /// Lengths of a log-normal distribution with this mean.
    pub fn lognormal(tokens: usize, mean: usize) -> Self {
        Self::new(Kind::Lognormal(mean), lognormal(tokens, mean))
    }

    /// The same lengths, cut into pieces of `most` and what is left.
    pub fn documents(tokens: usize, mean: usize, most: usize) -> Self {
        let cut = |length: usize| (0..length).step_by(most).map(move |begin| most.min(length - begin));
        Self::new(Kind::Documents(most), lognormal(tokens, mean).into_iter().flat_map(cut).collect())
    }

    /// A sequence of half of the tokens in the middle of sequences whose lengths are spread evenly over `short`.
    pub fn long(tokens: usize, short: Range<usize>) -> Self {
        let (long, mut draws) = (tokens.div_ceil(2), Draws(tokens as u64));
        let (mut lengths, mut left) = (Vec::new(), tokens - long);
        while left > 0 {
            let length = short.start + (draws.uniform() * short.len() as f64) as usize;
            // The last one has what is left.
            let length = length.clamp(1, left);
            lengths.push(length);
            left -= length;
        }
        lengths.insert(lengths.len() / 2, long);
        Self::new(Kind::Long, lengths)
    }

    /// Whether these are the lengths of so many tokens.
    pub(super) fn check(&self, tokens: usize) -> Result<()> {
        let sum = self.lengths.iter().map(|&length| length as u128).sum::<u128>();
        ensure!(sum == tokens as u128, "packed sequences of {sum} tokens; allowed: {tokens}, the point's");
        ensure!(!self.lengths.contains(&0), "a packed sequence without tokens; allowed: at least 1");
        Ok(())
    }

    /// The length of the longest sequence.
    pub fn longest(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0)
    }

    /// Where each sequence begins, and where the last one ends: `cu_seqlens`.
    ///
    /// # Panics
    /// Where there are 2^31 tokens or more. A point that was checked has fewer.
    pub fn offsets(&self) -> Vec<i32> {
        let ends = self.lengths.iter().scan(0, |end, length| {
            *end += length;
            Some(i32::try_from(*end).expect("a point has fewer tokens"))
        });
        std::iter::once(0).chain(ends).collect()
    }

    /// The number of the sequence that this row belongs to, and the sequence's first row.
    pub(super) fn numbered(&self, row: usize) -> (usize, usize) {
        let mut begin = 0;
        for (number, length) in self.lengths.iter().enumerate() {
            if row < begin + length {
                return (number, begin);
            }
            begin += length;
        }
        (self.lengths.len(), begin)
    }

    /// The rows of the sequence that this row belongs to.
    pub(super) fn sequence(&self, row: usize) -> Range<usize> {
        let (number, begin) = self.numbered(row);
        begin..begin + self.lengths.get(number).copied().unwrap_or(0)
    }
}

impl Point {
    /// A pair (batch entry, query head, query and key) as operands of each sequence count it: a packed sequence has the number of a
    /// batch entry, and counts from its first row.
    pub(crate) fn in_sequence(&self, [batch, head, query, key]: [usize; 4]) -> [usize; 4] {
        let Some(packed) = &self.packed else { return [batch, head, query, key] };
        let (number, begin) = packed.numbered(query);
        [number, head, query - begin, key - begin]
    }

    /// The batch entry and the rows of each sequence. Rows are keys, and queries where they are packed.
    pub(crate) fn sides(&self) -> Vec<(usize, Range<usize>)> {
        match &self.packed {
            None => (0..self.batch).map(|batch| (batch, 0..self.seqlen)).collect(),
            Some(packed) => packed.offsets().windows(2).map(|ends| (0, ends[0] as usize..ends[1] as usize)).collect(),
        }
    }
}

/// As many lengths as have this mean, all at least 1. Their logarithms have a deviation of 1.
fn lognormal(tokens: usize, mean: usize) -> Vec<usize> {
    let (count, mut draws) = ((tokens as f64 / mean as f64).round().max(1.0) as usize, Draws(mean as u64));
    let shares: Vec<f64> = (0..count).map(|_| draws.normal().exp()).collect();
    let (all, mut sum, mut begin) = (shares.iter().sum::<f64>(), 0.0, 0);
    let length = |(i, share): (usize, &f64)| {
        sum += share;
        // Those that follow need a token each.
        let most = tokens - (count - 1 - i);
        let end = if i + 1 == count { tokens } else { ((sum / all * tokens as f64) as usize).clamp(begin + 1, most) };
        end - std::mem::replace(&mut begin, end)
    };
    shares.iter().enumerate().map(length).collect()
}

/// Random numbers that are the same with every version of every crate: reports of different versions have the same
/// points.
struct Draws(u64);

impl Draws {
    /// Above 0 and below 1, by SplitMix64.
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (((x ^ x >> 31) >> 12) as f64 + 0.5) / (1_u64 << 52) as f64
    }

    /// Normal, by Box and Muller.
    fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (TAU * self.uniform()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_sum_to_the_tokens() {
        for tokens in [1, 2, 255, 256, 1024, 16384, 65536] {
            for packed in [
                Packed::lognormal(tokens, 512),
                Packed::lognormal(tokens, 8192),
                Packed::documents(tokens, 2048, 4096),
                Packed::long(tokens, 64..513),
            ] {
                packed.check(tokens).unwrap();
                assert_eq!(packed.offsets().last(), Some(&(tokens as i32)));
                let sequences: Vec<_> = (0..tokens).map(|row| packed.sequence(row)).collect();
                let lengths: Vec<usize> = crate::distinct(sequences).into_iter().map(|rows| rows.len()).collect();
                assert_eq!(lengths, packed.lengths);
            }
        }
    }

    #[test]
    fn lengths_are_spread_as_their_kind_says() {
        let many = Packed::lognormal(1 << 22, 512);
        assert_eq!(many.lengths.len(), 8192);
        let below = |length| many.lengths.iter().filter(|&&x| x < length).count() * 100 / many.lengths.len();
        // The median is exp(-1/2) of the mean, and a deviation of the logarithm is a factor of e.
        assert!((48..52).contains(&below(311)) && (82..86).contains(&below(844)), "{} {}", below(311), below(844));
        let documents = Packed::documents(65536, 2048, 4096);
        let whole = Packed::lognormal(65536, 2048);
        assert!(whole.longest() > 4096 && documents.longest() == 4096);
        let ends = |packed: &Packed| packed.offsets();
        assert!(ends(&whole).iter().all(|end| ends(&documents).contains(end)), "a piece of two documents");
        let long = Packed::long(65536, 64..513);
        assert_eq!(long.longest(), 32768);
        let at = long.lengths.iter().position(|&length| length == 32768).unwrap();
        assert!(at > 40 && long.lengths.len() - at > 40, "{at}");
        let (_, others) = long.lengths.split_last().unwrap();
        assert!(others.iter().all(|length| (64..513).contains(length) || *length == 32768));
    }

    /// Records name the lengths. This test fails where new ones would not be compared with old ones.
    #[test]
    fn lengths_are_the_same_everywhere() {
        assert_eq!(Packed::lognormal(4096, 512).lengths, [463, 44, 206, 457, 500, 1383, 470, 573]);
        assert_eq!(Packed::long(1024, 64..513).lengths, [183, 512, 329]);
        let documents = Packed::documents(16384, 2048, 4096).lengths;
        assert_eq!(documents, [1864, 4096, 669, 2787, 2749, 159, 1454, 1875, 731]);
    }

    #[test]
    fn the_dense_batch_has_as_many_operations_and_about_as_many_tokens() {
        assert_eq!(Packed::equal(32, 512).dense, [32, 512]);
        assert_eq!(Packed::equal(1, 16384).dense, [1, 16384]);
        // 9 + 1 + 4 + 1 + 1 = 16 of 8 tokens.
        assert_eq!(Packed::new(Kind::Long, vec![3, 1, 2, 1, 1]).dense, [4, 2]);
        for tokens in [16384, 65536] {
            for packed in [
                Packed::lognormal(tokens, 512),
                Packed::lognormal(tokens, 2048),
                Packed::lognormal(tokens, 8192),
                Packed::long(tokens, 64..513),
                Packed::documents(tokens, 2048, 4096),
            ] {
                let [count, length] = packed.dense;
                let squares: usize = packed.lengths.iter().map(|length| length * length).sum();
                assert!(((count * length * length) as f64 / squares as f64 - 1.0).abs() < 2e-3, "{packed:?}");
                assert!(((count * length) as f64 / tokens as f64 - 1.0).abs() < 0.2, "{packed:?}");
            }
        }
    }

    #[test]
    fn wrong_lengths_are_refused() {
        let refused =
            |lengths: Vec<usize>| Packed { kind: Kind::Long, lengths, dense: [1, 1] }.check(8).unwrap_err().to_string();
        assert_eq!(refused(vec![4, 5]), "packed sequences of 9 tokens; allowed: 8, the point's");
        assert!(refused(vec![usize::MAX; 3]).contains("packed sequences of 5534023222"));
        assert_eq!(refused(vec![8, 0]), "a packed sequence without tokens; allowed: at least 1");
    }
}
