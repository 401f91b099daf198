//! Where the rows of each sequence are: from offsets and used lengths to rows, and the checks of such numbers.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::operand::Slot;
use crate::problem::ForwardProblem;
use crate::scaling::{SCALE_BLOCK, Scaling, first_block};

/// The rows that one sequence has in the tensors of one side: of Q and O, or of K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct SequenceRows {
    /// The number of the sequence, from 0.
    pub sequence: usize,
    /// The index of the sequence in the dimension `batch`. 0 in packed tensors, whose only batch element has all rows.
    pub batch: usize,
    /// The first row. 0 in tensors that are not packed.
    pub begin: usize,
    /// The number of rows, without those after the used length.
    pub len: usize,
    /// The index of the first block of descale factors per block ([`Scaling::PerBlock`]). 0 in tensors that are not packed.
    pub first_block: usize,
}

impl SequenceRows {
    /// The rows, as indices of the tensor.
    pub fn range(&self) -> Range<usize> {
        self.begin..self.begin + self.len
    }

    /// The index `[batch, head, block]` of the descale factor of a row. `token` counts from the first row of the sequence.
    /// `group` is as for [`Scaling::index`].
    pub fn factor(&self, scaling: Scaling, head: usize, group: usize, token: usize) -> [usize; 3] {
        match scaling {
            Scaling::PerBlock => [self.batch, head, self.first_block + token / SCALE_BLOCK],
            _ => scaling.index(self.sequence, head, group, token),
        }
    }

    /// The rows of a sequence that has a batch element to itself.
    pub(crate) fn padded(sequence: usize, len: usize) -> Self {
        Self { sequence, batch: sequence, begin: 0, len, first_block: 0 }
    }
}

/// The rows of packed sequences, one item for each. This is the rule that all backends follow.
///
/// `offsets` has one number more than there are sequences. `used` has a number for each sequence. `capacity` is the number of
/// rows of the tensor. The numbers may be anything:
///
/// - An offset below 0 counts as 0, and one above `capacity` as `capacity`.
/// - An offset below an earlier one counts as the largest earlier one. So sequences never overlap.
/// - A used length below 0 counts as 0, and one above the length of the sequence as that length.
pub fn clamp_sequences<'a>(
    offsets: &'a [i32],
    used: Option<&'a [i32]>,
    capacity: usize,
) -> impl Iterator<Item = SequenceRows> + Clone + 'a {
    let row = move |offset: i32| usize::try_from(offset).map_or(0, |row| row.min(capacity));
    let mut begin = offsets.first().map_or(0, |&first| row(first));
    offsets.iter().skip(1).enumerate().map(move |(sequence, &next)| {
        let end = begin.max(row(next));
        let len = clamped_length(used, sequence, end - begin);
        let rows = SequenceRows { sequence, batch: 0, begin, len, first_block: first_block(begin, sequence) };
        begin = end;
        rows
    })
}

/// The used length of a sequence of `len` rows.
fn clamped_length(used: Option<&[i32]>, sequence: usize, len: usize) -> usize {
    let used = used.map(|used| used.get(sequence).map_or(0, |&used| usize::try_from(used).unwrap_or(0)));
    used.map_or(len, |used| used.min(len))
}

/// Offsets and used lengths of a run, in host memory. A problem says which of them it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lengths<'a> {
    /// [`Slot::CuSeqlensQ`]: `[batch + 1]`.
    pub cu_seqlens_q: Option<&'a [i32]>,
    /// [`Slot::CuSeqlensKv`]: `[batch + 1]`.
    pub cu_seqlens_kv: Option<&'a [i32]>,
    /// [`Slot::SequsedQ`]: `[batch]`.
    pub seqused_q: Option<&'a [i32]>,
    /// [`Slot::SequsedKv`]: `[batch]`.
    pub seqused_kv: Option<&'a [i32]>,
}

/// One side of a problem: Q and O, or K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Q,
    Kv,
}

impl Side {
    pub const BOTH: [Self; 2] = [Self::Q, Self::Kv];

    /// The operands with the offsets and with the used lengths of this side.
    pub const fn slots(self) -> [Slot; 2] {
        match self {
            Self::Q => [Slot::CuSeqlensQ, Slot::SequsedQ],
            Self::Kv => [Slot::CuSeqlensKv, Slot::SequsedKv],
        }
    }

    /// The rows of a tensor of this side: of all sequences together where they are packed, otherwise of each.
    pub fn rows(self, problem: &ForwardProblem) -> usize {
        match self {
            Self::Q => problem.dims().seqlen_q,
            Self::Kv => problem.dims().seqlen_kv,
        }
    }

    /// The most rows that a sequence may have: those of the tensor, or those that the bias has numbers for.
    pub fn most_rows(self, problem: &ForwardProblem) -> usize {
        let [.., queries, keys] = problem.bias_shape();
        match (problem.bias(), self) {
            (Some(bias), Self::Q) if bias.is_per_query() => queries,
            (Some(_), Self::Kv) => keys,
            _ => self.rows(problem),
        }
    }
}

impl<'a> Lengths<'a> {
    /// Refuses numbers that are not what the problem asks for.
    ///
    /// # Errors
    /// - [`Error::Value`]: a list is missing or was not asked for. An offset decreases, is below 0, or is above the number of
    ///   rows. A used length is below 0 or above the length of its sequence.
    /// - [`Error::Shape`]: a list has another number of entries.
    pub fn check(&self, problem: &ForwardProblem) -> Result<()> {
        Side::BOTH.into_iter().try_for_each(|side| self.check_side(problem, side))
    }

    /// As [`check`](Self::check), for the lists of one side.
    pub(crate) fn check_side(&self, problem: &ForwardProblem, side: Side) -> Result<()> {
        let [of_offsets, of_used] = side.slots();
        let batch = problem.dims().batch;
        let (offsets, used) = self.of(side);
        for (slot, list, count) in [(of_offsets, offsets, batch + 1), (of_used, used, batch)] {
            let refuse = |got: &str, allowed: &str| {
                Err(Error::Value { what: slot.name(), got: got.into(), allowed: allowed.into() })
            };
            match (problem.wants(slot), list) {
                (true, None) => return refuse("missing", "the list that the problem was made with"),
                (false, Some(_)) => return refuse("given", "none, since the problem was made without it"),
                (true, Some(list)) if list.len() != count => {
                    let (got, want) = (vec![list.len()], vec![count]);
                    return Err(Error::Shape { tensor: slot.name(), got, want, axes: slot.axes() });
                }
                _ => {}
            }
        }
        if let Some(offsets) = offsets {
            check_offsets(of_offsets.name(), offsets, side.rows(problem))?;
        }
        if let Some(used) = used {
            check_used(of_used.name(), used, offsets, side.rows(problem))?;
        }
        check_covered(problem, side, self.of(side))
    }

    /// The rows of one side, one item for each sequence, by the rule of [`clamp_sequences`].
    pub(crate) fn rows(
        &self,
        problem: &ForwardProblem,
        side: Side,
    ) -> impl Iterator<Item = SequenceRows> + Clone + use<'a> {
        let (offsets, used) = self.of(side);
        let (batch, rows) = (problem.dims().batch, side.rows(problem));
        let packed = offsets.map(|offsets| clamp_sequences(offsets, used, rows));
        let padded = move |sequence| SequenceRows::padded(sequence, clamped_length(used, sequence, rows));
        let padded = (0..if packed.is_some() { 0 } else { batch }).map(padded);
        let most = side.most_rows(problem);
        packed.into_iter().flatten().chain(padded).map(move |rows| SequenceRows { len: rows.len.min(most), ..rows })
    }

    /// The rows of both sides, one item for each sequence: those of Q and O, and those of K and V.
    ///
    /// Numbers that [`check`](Self::check) refuses are clamped, as [`clamp_sequences`] says.
    pub fn sequences(&self, problem: &ForwardProblem) -> impl Iterator<Item = [SequenceRows; 2]> + Clone + use<'a> {
        self.rows(problem, Side::Q).zip(self.rows(problem, Side::Kv)).map(|(q, kv)| [q, kv])
    }

    fn of(&self, side: Side) -> (Option<&'a [i32]>, Option<&'a [i32]>) {
        match side {
            Side::Q => (self.cu_seqlens_q, self.seqused_q),
            Side::Kv => (self.cu_seqlens_kv, self.seqused_kv),
        }
    }
}

/// Refuses sequences that are longer than the problem's bias. Of offsets and used lengths, those that are not known are `None`.
pub(crate) fn check_covered(
    problem: &ForwardProblem,
    side: Side,
    (offsets, used): (Option<&[i32]>, Option<&[i32]>),
) -> Result<()> {
    let most = side.most_rows(problem);
    for (i, pair) in offsets.unwrap_or_default().windows(2).enumerate() {
        let of_used = used.and_then(|used| used.get(i)).copied().unwrap_or(i32::MAX);
        let len = usize::try_from(pair[1].saturating_sub(pair[0]).min(of_used)).unwrap_or(0);
        if len > most {
            let [slot, _] = side.slots();
            let (got, allowed) =
                (format!("{len} rows at {i}"), format!("at most {most}, which the bias has numbers for"));
            return Err(Error::Value { what: slot.name(), got, allowed });
        }
    }
    Ok(())
}

/// Refuses offsets that decrease, or that are not within 0 to `rows`.
pub(crate) fn check_offsets(what: &'static str, offsets: &[i32], rows: usize) -> Result<()> {
    let mut largest = 0;
    for (i, &offset) in offsets.iter().enumerate() {
        if offset < 0 || offset as usize > rows {
            let allowed = format!("0 to {rows}, the number of rows");
            return Err(Error::Value { what, got: format!("{offset} at {i}"), allowed });
        }
        if offset < largest {
            let allowed = "offsets that do not decrease".into();
            return Err(Error::Value { what, got: format!("{offset} at {i}, after {largest}"), allowed });
        }
        largest = offset;
    }
    Ok(())
}

/// Refuses used lengths below 0 or above the length of their sequence. `offsets` were checked. `rows` is the length of each
/// sequence where there are no offsets.
pub(crate) fn check_used(what: &'static str, used: &[i32], offsets: Option<&[i32]>, rows: usize) -> Result<()> {
    for (i, &used) in used.iter().enumerate() {
        let len = match offsets.map(|offsets| (offsets.get(i), offsets.get(i + 1))) {
            Some((Some(&begin), Some(&end))) => usize::try_from(i64::from(end) - i64::from(begin)).unwrap_or(0),
            Some(_) => 0,
            None => rows,
        };
        if used < 0 || used as usize > len {
            let allowed = format!("0 to {len}, the length of the sequence");
            return Err(Error::Value { what, got: format!("{used} at {i}"), allowed });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::problem::Dims;
    use proptest::prelude::*;

    fn ranges(offsets: &[i32], used: Option<&[i32]>, capacity: usize) -> Vec<Range<usize>> {
        clamp_sequences(offsets, used, capacity).map(|rows| rows.range()).collect()
    }

    #[test]
    fn legal_lengths_are_what_they_say() {
        assert_eq!(ranges(&[0, 3, 3, 8], None, 8), [0..3, 3..3, 3..8]);
        assert_eq!(ranges(&[2, 3, 6], None, 9), [2..3, 3..6]);
        assert_eq!(ranges(&[0, 3, 3, 8], Some(&[1, 0, 5]), 8), [0..1, 3..3, 3..8]);
        assert_eq!(ranges(&[0], None, 8), [0..0; 0]);
    }

    #[test]
    fn garbage_is_clamped() {
        assert_eq!(ranges(&[5, 3, 9, 4, 7], None, 8), [5..5, 5..8, 8..8, 8..8]);
        assert_eq!(ranges(&[i32::MIN, 2, -7, i32::MAX], None, 4), [0..2, 2..2, 2..4]);
        assert_eq!(ranges(&[0, 3, 5], Some(&[-1, i32::MAX]), 5), [0..0, 3..5]);
        assert_eq!(ranges(&[0, 3, 5], Some(&[2]), 5), [0..2, 3..3], "a list that is too short");
        assert_eq!(ranges(&[], None, 5), [0..0; 0]);
    }

    #[test]
    fn errors_name_the_number_its_place_and_what_is_allowed() {
        let offsets = |offsets: &[i32]| check_offsets("cu_seqlens_q", offsets, 8).map_err(|error| error.to_string());
        assert_eq!(offsets(&[0, 3, 3, 8]), Ok(()));
        assert_eq!(
            offsets(&[0, 5, 3]).unwrap_err(),
            "cu_seqlens_q: 3 at 2, after 5; allowed: offsets that do not decrease"
        );
        assert_eq!(offsets(&[-1, 5]).unwrap_err(), "cu_seqlens_q: -1 at 0; allowed: 0 to 8, the number of rows");
        assert_eq!(offsets(&[0, 9]).unwrap_err(), "cu_seqlens_q: 9 at 1; allowed: 0 to 8, the number of rows");
        assert!(offsets(&[i32::MIN]).unwrap_err().contains("-2147483648 at 0"));
        let used = |used: &[i32], offsets: Option<&[i32]>| {
            check_used("seqused_kv", used, offsets, 8).map_err(|error| error.to_string())
        };
        assert_eq!((used(&[8, 0], None), used(&[3, 2], Some(&[0, 3, 5]))), (Ok(()), Ok(())));
        let text = "seqused_kv: 3 at 1; allowed: 0 to 2, the length of the sequence";
        assert_eq!(used(&[3, 3], Some(&[0, 3, 5])).unwrap_err(), text);
        assert!(used(&[-1], None).unwrap_err().starts_with("seqused_kv: -1 at 0"));
    }

    #[test]
    fn a_problem_says_which_lists_there_are() {
        let dims = Dims::new(2, 8, 1, 8);
        let problem = ForwardProblem::builder(DType::BF16, dims).packed_q(true).used_kv(true).build().unwrap();
        let lengths = Lengths { cu_seqlens_q: Some(&[0, 3, 8]), seqused_kv: Some(&[8, 1]), ..Lengths::default() };
        lengths.check(&problem).unwrap();
        let rows: Vec<_> =
            lengths.sequences(&problem).map(|[q, kv]| (q.batch, q.range(), kv.batch, kv.range())).collect();
        assert_eq!(rows, [(0, 0..3, 0, 0..8), (0, 3..8, 1, 0..1)]);
        let refused = |lengths: Lengths<'_>| lengths.check(&problem).unwrap_err().to_string();
        assert!(refused(Lengths::default()).starts_with("cu_seqlens_q: missing"));
        assert!(refused(Lengths { cu_seqlens_kv: Some(&[0, 3, 8]), ..lengths }).starts_with("cu_seqlens_kv: given"));
        assert_eq!(
            refused(Lengths { cu_seqlens_q: Some(&[0, 8]), ..lengths }),
            "cu_seqlens_q: shape [2], expected [3] [batch + 1]"
        );
    }

    proptest! {
        /// The rules of the kernels, written another way: every offset is the largest of the clamped ones up to it.
        #[test]
        fn sequences_never_overlap_or_leave_the_tensor(
            offsets in proptest::collection::vec(prop_oneof![-3i32..40, any::<i32>()], 1..12),
            used in proptest::collection::vec(prop_oneof![-3i32..20, any::<i32>()], 11),
            capacity in 0usize..32,
        ) {
            let batch = offsets.len() - 1;
            let begins: Vec<i64> = (0..=batch)
                .map(|i| offsets[..=i].iter().map(|&x| i64::from(x).clamp(0, capacity as i64)).max().unwrap())
                .collect();
            for (i, rows) in clamp_sequences(&offsets, Some(&used[..batch]), capacity).enumerate() {
                prop_assert_eq!(rows.begin as i64, begins[i]);
                prop_assert_eq!(rows.len as i64, i64::from(used[i]).clamp(0, begins[i + 1] - begins[i]));
                // Blocks of factors of two sequences are apart, and within the tensor of factors.
                let end = rows.first_block + rows.len.div_ceil(SCALE_BLOCK);
                prop_assert!(end <= first_block(begins[i + 1] as usize, i + 1));
            }
            prop_assert!(first_block(begins[batch] as usize, batch) <= first_block(capacity, batch));
        }
    }
}
