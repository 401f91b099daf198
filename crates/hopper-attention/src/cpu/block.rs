//! A block of pairs of queries and keys: the pairs that the mask keeps, and products over these pairs alone.

use std::ops::Range;

use super::listed::Pairs;
use super::matmul::{Matrix, matmul};

/// The keys that a query keeps: the first one, and the one after the last. `start >= end` where the query keeps none.
pub(super) type Keys = (usize, usize);

/// Some queries against some neighbouring keys. The weights of the pairs are a matrix `[queries, keys]`, 0 for masked pairs.
#[derive(Clone, Copy)]
pub(super) struct Block<'a> {
    /// For each query the keys that it keeps, counted from the first key of the block.
    kept: &'a [Range<usize>],
    /// Keys in the block.
    keys: usize,
    /// Which of these pairs the lists keep.
    pairs: Pairs<'a>,
    /// The additive bias of each pair, `[queries, keys]`. Empty where none of them hides its pair.
    hiding: &'a [f32],
    /// Which pairs dropout drops, `[queries, keys]`. Empty where it drops none.
    dropped: &'a [bool],
    /// Whether every query keeps every key.
    whole: bool,
}

impl<'a> Block<'a> {
    /// The block of `keys` keys from key `first` on. `queries` has the keys that each query keeps. `kept` is memory that the
    /// block fills.
    pub fn new(
        queries: impl Iterator<Item = Keys>,
        first: usize,
        keys: usize,
        kept: &'a mut Vec<Range<usize>>,
    ) -> Self {
        kept.clear();
        kept.extend(queries.map(|own| within(own, first, keys)));
        let whole = kept.iter().all(|kept| *kept == (0..keys));
        Self { kept, keys, pairs: Pairs::ALL, hiding: &[], dropped: &[], whole }
    }

    /// The same block, of which lists keep these pairs.
    pub fn of_pairs(self, pairs: Pairs<'a>) -> Self {
        Self { pairs, whole: self.whole && pairs.is_all(), ..self }
    }

    /// The same block, whose pairs have these additive biases: `[queries, keys]`. None where there is no bias.
    pub fn with_bias(self, biases: &'a [f32]) -> Self {
        let hides = biases.contains(&f32::NEG_INFINITY);
        Self { hiding: if hides { biases } else { &[] }, whole: self.whole && !hides, ..self }
    }

    /// The same block without the pairs that dropout drops: `[queries, keys]`, or empty where it drops none.
    pub fn without(self, dropped: &'a [bool]) -> Self {
        Self { dropped, whole: self.whole && dropped.is_empty(), ..self }
    }

    /// Writes `value` over the numbers of the pairs of a query that the mask keeps, and the lists or the bias do not.
    pub fn hide(&self, query: usize, value: f32, numbers: &mut [f32]) {
        if !self.hiding.is_empty() || !self.pairs.is_all() {
            self.kept[query].clone().filter(|&key| !self.shows(query, key)).for_each(|key| numbers[key] = value);
        }
    }

    /// Whether the mask, the lists and the bias keep any key of the block for a query.
    pub fn keeps_any(&self, query: usize) -> bool {
        self.kept[query].clone().any(|key| self.shows(query, key))
    }

    /// Whether neither the lists nor the bias hide a pair.
    fn shows(&self, query: usize, key: usize) -> bool {
        self.pairs.keep(query, key)
            && self.hiding.get(query * self.keys + key).is_none_or(|&bias| bias != f32::NEG_INFINITY)
    }

    /// For each query the keys that it keeps, counted from the first key of the block.
    pub fn kept(&self) -> &'a [Range<usize>] {
        self.kept
    }

    /// Whether no query keeps any key of the block.
    pub fn is_empty(&self) -> bool {
        self.kept.iter().all(Range::is_empty)
    }

    /// `out[query] += sum over keys of weights[query, key] * values[key]`, with rows of `dim` elements.
    pub fn sum_over_keys(&self, weights: &[f32], values: &[f32], dim: usize, out: &mut [f32]) {
        if self.may_multiply(values) {
            matmul(1.0, self.matrix(weights), Matrix::new(values, self.keys, dim), 1.0, out);
        } else {
            self.each_pair(|query, key| {
                add(weights[query * self.keys + key], &values[key * dim..][..dim], &mut out[query * dim..][..dim]);
            });
        }
    }

    /// `out[key] += sum over queries of weights[query, key] * values[query]`, with rows of `dim` elements.
    pub fn sum_over_queries(&self, weights: &[f32], values: &[f32], dim: usize, out: &mut [f32]) {
        if self.may_multiply(values) {
            let values = Matrix::new(values, self.kept.len(), dim);
            matmul(1.0, self.matrix(weights).transposed(), values, 1.0, out);
        } else {
            self.each_pair(|query, key| {
                add(weights[query * self.keys + key], &values[query * dim..][..dim], &mut out[key * dim..][..dim]);
            });
        }
    }

    fn matrix<'w>(&self, weights: &'w [f32]) -> Matrix<'w> {
        Matrix::new(weights, self.kept.len(), self.keys)
    }

    /// Whether a product over the whole block is right. It is wrong if a masked value is NaN or infinite: the weight is 0, but
    /// 0 times NaN or infinity is NaN.
    fn may_multiply(&self, values: &[f32]) -> bool {
        self.whole || values.iter().all(|x| x.is_finite())
    }

    fn each_pair(&self, mut pair: impl FnMut(usize, usize)) {
        for (query, kept) in self.kept.iter().enumerate() {
            let adds = |&key: &usize| {
                let dropped = self.dropped.get(query * self.keys + key).is_some_and(|&dropped| dropped);
                self.shows(query, key) && !dropped
            };
            kept.clone().filter(adds).for_each(|key| pair(query, key));
        }
    }
}

fn add(weight: f32, values: &[f32], sums: &mut [f32]) {
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum += weight * value;
    }
}

/// The first key that any query keeps, and the one after the last. The two are equal if no query keeps any key.
pub(super) fn reach(queries: impl Iterator<Item = Keys> + Clone) -> Keys {
    let some = queries.filter(|(start, end)| start < end);
    let start = some.clone().map(|(start, _)| start).min().unwrap_or(0);
    (start, some.map(|(_, end)| end).max().unwrap_or(0))
}

/// Where the first block begins that a task visits. Where there are lists of blocks, it begins where one of theirs does, or
/// within one that it does not leave.
pub(super) fn first_visited(start: usize, walked: usize, has_lists: bool) -> usize {
    if has_lists { start / walked * walked } else { start }
}

/// The keys of `start..end` that are in the block of `keys` keys from `first` on, counted from the block's first key.
fn within((start, end): Keys, first: usize, keys: usize) -> Range<usize> {
    let start = start.clamp(first, first + keys) - first;
    let end = end.clamp(first, first + keys) - first;
    start..end.max(start)
}
