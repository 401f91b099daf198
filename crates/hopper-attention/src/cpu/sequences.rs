//! The sequences of a run: where each of them has its rows, and the rows that no sequence has.

use std::ops::Range;

use super::memory::reserved;
use crate::error::Result;
use crate::problem::{Dims, ForwardProblem};
use crate::sequences::{Lengths, SequenceRows, Side};

/// One sequence: its rows in Q and O, and its rows in K and V.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sequence {
    pub q: SequenceRows,
    pub kv: SequenceRows,
}

impl Sequence {
    pub fn side(&self, side: Side) -> SequenceRows {
        match side {
            Side::Q => self.q,
            Side::Kv => self.kv,
        }
    }
}

/// All sequences of a run.
pub(crate) struct Sequences {
    dims: Dims,
    /// Whether Q is packed, and whether K and V are.
    packed: [bool; 2],
    /// `None` where every sequence has all rows of its batch element. A list would cost memory for nothing.
    listed: Option<Vec<Sequence>>,
}

impl Sequences {
    /// Checks the lengths of a run, and lists the sequences.
    ///
    /// # Errors
    /// As [`Lengths::check`], and [`Error::Memory`](crate::Error::Memory).
    pub fn new(problem: &ForwardProblem, lengths: &Lengths<'_>) -> Result<Self> {
        lengths.check(problem)?;
        let dims = problem.dims();
        let packed = [problem.is_packed_q(), problem.is_packed_kv()];
        if !problem.has_lengths() {
            return Ok(Self { dims, packed, listed: None });
        }
        let mut listed = reserved(dims.batch)?;
        listed.extend(lengths.sequences(problem).map(|[q, kv]| Sequence { q, kv }));
        Ok(Self { dims, packed, listed: Some(listed) })
    }

    /// Sequences of these sizes, which all have all rows of their batch element.
    pub fn of_dims(dims: Dims) -> Self {
        Self { dims, packed: [false; 2], listed: None }
    }

    /// As [`new`](Self::new), where the other side's lengths are not known. Only this side of the sequences means something.
    pub fn of_side(problem: &ForwardProblem, lengths: &Lengths<'_>, side: Side) -> Result<Self> {
        lengths.check_side(problem, side)?;
        let dims = problem.dims();
        let packed = [problem.is_packed_q(), problem.is_packed_kv()];
        if !side.slots().into_iter().any(|slot| problem.wants(slot)) {
            return Ok(Self { dims, packed, listed: None });
        }
        let mut listed = reserved(dims.batch)?;
        listed.extend(lengths.rows(problem, side).map(|rows| Sequence { q: rows, kv: rows }));
        Ok(Self { dims, packed, listed: Some(listed) })
    }

    /// The number of sequences.
    pub fn count(&self) -> usize {
        self.dims.batch
    }

    /// Whether sequences may have different lengths.
    pub fn differ(&self) -> bool {
        self.listed.is_some()
    }

    /// A sequence by its number.
    pub fn get(&self, number: usize) -> Sequence {
        match &self.listed {
            Some(listed) => listed[number],
            None => {
                let [q, kv] = [self.dims.seqlen_q, self.dims.seqlen_kv].map(|len| SequenceRows::padded(number, len));
                Sequence { q, kv }
            }
        }
    }

    /// Calls `fill` for each stretch of rows of one side that no sequence has: the batch element, and the rows.
    pub fn each_gap(&self, side: Side, mut fill: impl FnMut(usize, Range<usize>)) {
        let Some(listed) = &self.listed else { return };
        let (rows, packed) = match side {
            Side::Q => (self.dims.seqlen_q, self.packed[0]),
            Side::Kv => (self.dims.seqlen_kv, self.packed[1]),
        };
        let mut end = 0;
        for own in listed.iter().map(|sequence| sequence.side(side)) {
            if packed {
                fill(0, end..own.begin);
                end = own.range().end;
            } else {
                fill(own.batch, own.len..rows);
            }
        }
        if packed {
            fill(0, end..rows);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    fn gaps(sequences: &Sequences, side: Side) -> Vec<(usize, Range<usize>)> {
        let mut gaps = Vec::new();
        sequences.each_gap(side, |batch, rows| gaps.push((batch, rows)));
        gaps.retain(|(_, rows)| !rows.is_empty());
        gaps
    }

    #[test]
    fn rows_of_no_sequence_are_gaps() {
        let options = ForwardProblem::builder(DType::F32, Dims::new(3, 10, 1, 4));
        let problem = options.clone().packed_q(true).used_q(true).used_kv(true).build().unwrap();
        let lengths = Lengths {
            cu_seqlens_q: Some(&[1, 4, 4, 8]),
            seqused_q: Some(&[2, 0, 4]),
            seqused_kv: Some(&[10, 0, 3]),
            ..Lengths::default()
        };
        let sequences = Sequences::new(&problem, &lengths).unwrap();
        assert_eq!(gaps(&sequences, Side::Q), [(0, 0..1), (0, 3..4), (0, 8..10)]);
        assert_eq!(gaps(&sequences, Side::Kv), [(1, 0..10), (2, 3..10)]);
        assert_eq!((sequences.get(2).q.range(), sequences.get(2).kv.range()), (4..8, 0..3));

        let same = Sequences::new(&options.build().unwrap(), &Lengths::default()).unwrap();
        assert_eq!((gaps(&same, Side::Q), same.get(2).q.range(), same.get(2).q.batch), (vec![], 0..10, 2));
        assert!(Sequences::new(&problem, &Lengths::default()).is_err());
    }
}
