//! What is added to the scores, in f64: the additive bias, and ALiBi.

use super::Modifiers;
use super::alibi::Alibi;
use crate::problem::ForwardProblem;

/// The additive bias of a problem.
#[derive(Clone, Copy, Debug)]
pub(super) struct Additive<'a> {
    values: &'a [f64],
    shape: [usize; 4],
}

impl<'a> Additive<'a> {
    /// `None` where there is none.
    pub fn of(problem: &ForwardProblem, modifiers: &Modifiers<'a>) -> Option<Self> {
        Some(Self { values: modifiers.bias?, shape: problem.bias_shape() })
    }

    /// The bias of a pair.
    pub fn at(&self, batch: usize, head: usize, query: usize, key: usize) -> f64 {
        self.values[self.row([batch, head, query]) * self.shape[3] + key]
    }

    /// The first `count` biases of a row.
    pub fn keys(&self, row: usize, count: usize) -> &'a [f64] {
        &self.values[row * self.shape[3]..][..count]
    }

    /// The number of biases of a row.
    pub fn keys_of_row(&self) -> usize {
        self.shape[3]
    }

    /// Of the rows `[batch, head, query]` of the bias, the number of the one that this query reads.
    pub fn row(&self, place: [usize; 3]) -> usize {
        let own =
            |row: usize, axis: usize| row * self.shape[axis] + if self.shape[axis] == 1 { 0 } else { place[axis] };
        (0..3).fold(0, own)
    }
}

/// What is added to the scores of one head: the bias, minus what ALiBi takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Added<'a> {
    bias: Option<Additive<'a>>,
    alibi: Alibi,
    place: [usize; 2],
}

impl<'a> Added<'a> {
    pub fn of(problem: &ForwardProblem, modifiers: Modifiers<'a>, place: [usize; 2]) -> Self {
        Self { bias: Additive::of(problem, &modifiers), alibi: Alibi::of(problem, modifiers, place), place }
    }

    fn bias(&self, query: usize, key: usize) -> f64 {
        let [batch, head] = self.place;
        self.bias.map_or(0.0, |bias| bias.at(batch, head, query, key))
    }

    /// What is added to a score, that the mask, the lists and the bias keep.
    pub fn at(&self, query: usize, key: usize) -> f64 {
        self.bias(query, key) - self.alibi.bias(query, key)
    }

    /// The magnitude of the terms of that, which rounding errors are a share of. 0 where it is not finite.
    pub fn size(&self, query: usize, key: usize) -> f64 {
        let bias = self.bias(query, key).abs();
        self.alibi.size(query, key) + if bias.is_finite() { bias } else { 0.0 }
    }

    /// A score in f32, with both added one after the other.
    pub fn add_to(&self, score: f32, query: usize, key: usize) -> f32 {
        score + self.bias(query, key) as f32 - self.alibi.bias(query, key) as f32
    }
}
