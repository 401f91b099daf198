//! Problems with packed sequences or used lengths, for the oracle and the plain computation: one sequence at a time, as a
//! problem of its own.

use super::{Tensor, place};
use crate::error::Result;
use crate::problem::ForwardProblem;
use crate::sequences::{Lengths, SequenceRows};

/// A sequence, and the problem that it is by itself.
pub(super) struct Piece {
    /// Its number.
    pub sequence: usize,
    pub q: SequenceRows,
    pub kv: SequenceRows,
    pub problem: ForwardProblem,
}

/// The sequences of a problem that have rows. `None` for a problem without packed tensors and used lengths.
///
/// # Errors
/// As [`Lengths::check`].
pub(super) fn pieces(problem: &ForwardProblem, lengths: &Lengths<'_>) -> Result<Option<Vec<Piece>>> {
    lengths.check(problem)?;
    if !problem.has_lengths() {
        return Ok(None);
    }
    let piece =
        |[q, kv]: [SequenceRows; 2]| Piece { problem: problem.of_sequence(q.len, kv.len), sequence: q.sequence, q, kv };
    let pieces = lengths.sequences(problem).map(piece);
    Ok(Some(pieces.filter(|piece| piece.q.len > 0 || piece.kv.len > 0).collect()))
}

/// Which rows of a tensor `[batch, seqlen, ..]` belong to a sequence, in the order of the tensor.
pub(super) fn belonging([batch, seqlen, ..]: [usize; 4], rows: impl Iterator<Item = SequenceRows>) -> Vec<bool> {
    let mut belongs = vec![false; batch * seqlen];
    for rows in rows {
        rows.range().for_each(|row| belongs[rows.batch * seqlen + row] = true);
    }
    belongs
}

/// The rows of a sequence, as a tensor with a batch of 1.
pub(super) fn cut(tensor: &Tensor, rows: &SequenceRows) -> Tensor {
    let [_, _, heads, dim] = tensor.shape();
    Tensor::from_fn([1, rows.len, heads, dim], |[_, token, head, element]| {
        tensor.row(rows.batch, rows.begin + token, head)[element]
    })
}

/// The opposite of [`cut`].
pub(super) fn paste(into: &mut Tensor, rows: &SequenceRows, from: &Tensor) {
    let [_, _, heads, _] = into.shape();
    for (token, head) in (0..rows.len).flat_map(|token| (0..heads).map(move |head| (token, head))) {
        into.row_mut(rows.batch, rows.begin + token, head).copy_from_slice(from.row(0, token, head));
    }
}

/// A sequence's part of a list `[batch, heads, seqlen]`, as one with a batch of 1.
pub(super) fn cut_list<T: Copy>(list: &[T], shape: [usize; 3], rows: &SequenceRows) -> Vec<T> {
    (0..shape[1] * rows.len).map(|i| list[within(shape, rows, i)]).collect()
}

/// The opposite of [`cut_list`].
pub(super) fn paste_list<T: Copy>(into: &mut [T], shape: [usize; 3], rows: &SequenceRows, from: &[T]) {
    from.iter().enumerate().for_each(|(i, &value)| into[within(shape, rows, i)] = value);
}

/// The place in a list `[batch, heads, seqlen]` of entry `i` of a sequence's part.
fn within(shape: [usize; 3], rows: &SequenceRows, i: usize) -> usize {
    let [_, head, token] = place([1, shape[1], rows.len], i);
    (rows.batch * shape[1] + head) * shape[2] + rows.begin + token
}
