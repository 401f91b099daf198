//! Problems with packed sequences or used lengths, for the oracle and the plain computation: one sequence at a time, as a
//! problem of its own.

use super::additive::Additive;
use super::{Modifiers, Tensor, place};
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
    /// Its part of the bias, `[1, 1 or heads_q, 1 or q.len, kv.len]`. `None` where there is none.
    pub bias: Option<Vec<f64>>,
}

impl Piece {
    fn of(problem: &ForwardProblem, [q, kv]: [SequenceRows; 2], modifiers: &Modifiers<'_>) -> Self {
        let piece = Self { problem: problem.of_sequence(q.len, kv.len), sequence: q.sequence, q, kv, bias: None };
        let bias = Additive::of(problem, modifiers).map(|bias| {
            let mut own = Vec::new();
            piece.each_row_of_bias(&bias, |row| own.extend(bias.keys(row, kv.len)));
            own
        });
        Self { bias, ..piece }
    }

    /// Calls `take` with the number of each row of the bias that this sequence has, in the order of its part.
    fn each_row_of_bias(&self, bias: &Additive<'_>, mut take: impl FnMut(usize)) {
        let [_, heads, queries, _] = self.problem.bias_shape();
        for (head, query) in (0..heads).flat_map(|head| (0..queries).map(move |query| (head, query))) {
            take(bias.row([self.sequence, head, query]));
        }
    }

    /// Adds elements of a gradient of its part to those of the whole bias, whose values do not matter.
    pub fn add_to_bias<T: Copy>(&self, bias: &Additive<'_>, into: &mut [T], from: &[T], add: impl Fn(&mut T, T)) {
        let (own, all) = (self.kv.len, bias.keys_of_row());
        let mut parts = from.chunks_exact(own.max(1));
        self.each_row_of_bias(bias, |row| {
            let from = parts.next().unwrap_or_default();
            into[row * all..][..own].iter_mut().zip(from).for_each(|(into, &from)| add(into, from));
        });
    }
}

/// The sequences of a problem that have rows. `None` for a problem without packed tensors and used lengths.
///
/// # Errors
/// As [`Lengths::check`].
pub(super) fn pieces(
    problem: &ForwardProblem,
    lengths: &Lengths<'_>,
    modifiers: &Modifiers<'_>,
) -> Result<Option<Vec<Piece>>> {
    lengths.check(problem)?;
    if !problem.has_lengths() {
        return Ok(None);
    }
    let sequences = lengths.sequences(problem).filter(|[q, kv]| q.len > 0 || kv.len > 0);
    Ok(Some(sequences.map(|rows| Piece::of(problem, rows, modifiers)).collect()))
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
