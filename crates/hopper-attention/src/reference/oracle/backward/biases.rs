//! The gradient of an additive bias: `P * (dP - delta)` of each pair, summed over the batch entries, heads and queries that share it.

use std::f64::consts::SQRT_2;
use std::ops::Range;

use rayon::prelude::*;

use super::super::super::product::{Matrix, Tokens, product};
use super::super::super::rounding::{SCORE_ROUNDOFFS, U32, unit_roundoff};
use super::{Exact, Row, times};

/// The sizes of rounding errors in the gradient of a bias.
#[derive(Clone, Copy, Debug, Default)]
pub struct BiasNoise {
    /// The effect of rounding P, dP and delta: the standard deviation, as in [`Noise::deviation`](super::Noise::deviation).
    pub deviation: f64,
    /// The root of the sum of the squared terms.
    pub weighted: f64,
    /// What delta costs if the weights that O was computed from were rounded alike, as in
    /// [`Noise::of_delta`](super::Noise::of_delta).
    pub of_delta: f64,
    /// The relative error that the probabilities may have in common, as in [`Noise::alike`](super::Noise::alike).
    pub alike: f64,
    /// The number of pairs of a query and a key that have a part in it.
    pub terms: usize,
}

impl BiasNoise {
    /// That of a sum of two elements, which have no pair in common.
    pub(super) fn with(self, other: Self) -> Self {
        Self {
            deviation: self.deviation.hypot(other.deviation),
            weighted: self.weighted.hypot(other.weighted),
            of_delta: self.of_delta + other.of_delta,
            alike: self.alike.max(other.alike),
            terms: self.terms + other.terms,
        }
    }
}

/// An element's sums: its value, the squares of its noise and of its terms, P, and P times what its row has in common.
#[derive(Clone, Copy, Default)]
struct Sum {
    value: f64,
    noise: f64,
    squares: f64,
    of_delta: f64,
    weight: f64,
    alike: f64,
    terms: usize,
}

/// Queries and keys whose products are in memory at a time.
const QUERIES: usize = 64;
const KEYS: usize = 128;

impl Exact<'_> {
    /// The elements of the gradient, in the order of the bias. None where the problem does not have it.
    pub(super) fn biases(&self, rows: &[Row]) -> Vec<(f64, BiasNoise)> {
        let forward = self.problem.forward();
        if !self.problem.wants_d_bias() {
            return vec![];
        }
        let dims = self.problem.dims();
        let shape = forward.bias_shape();
        // A part is some keys of a batch entry and head of the bias, for all its queries. Parts share no element.
        let of_head = shape[3].div_ceil(KEYS);
        let parts: Vec<Vec<Sum>> = (0..shape[0] * shape[1] * of_head)
            .into_par_iter()
            .map(|part| {
                let place = [part / of_head / shape[1], part / of_head % shape[1]];
                let first = part % of_head * KEYS;
                let keys = Tokens { first, count: KEYS.min(shape[3] - first) };
                let mut sums = vec![Sum::default(); shape[2] * keys.count];
                let sharing = |axis: usize, all: usize| -> Range<usize> {
                    if shape[axis] == 1 { 0..all } else { place[axis]..place[axis] + 1 }
                };
                for batch in sharing(0, dims.batch) {
                    for head in sharing(1, dims.heads_q) {
                        self.add_biases(rows, [batch, head], (keys, shape[2]), &mut sums);
                    }
                }
                sums
            })
            .collect();
        let mut all = Vec::with_capacity(shape.iter().product());
        for i in 0..shape[..3].iter().product() {
            let (head, query) = (i / shape[2].max(1), i % shape[2].max(1));
            for part in &parts[head * of_head..(head + 1) * of_head] {
                let keys = part.len() / shape[2].max(1);
                all.extend(part[query * keys..(query + 1) * keys].iter().map(Sum::finished));
            }
        }
        all
    }

    /// Adds the pairs of a head with these keys. The bias has `queries` queries: all of them, or 1.
    fn add_biases(&self, rows: &[Row], [batch, head]: [usize; 2], (keys, queries): (Tokens, usize), sums: &mut [Sum]) {
        let dims = self.problem.dims();
        let head_kv = head / self.problem.forward().group_size();
        let added = self.added([batch, head]);
        let [mut scores, mut d_p] = [(); 2].map(|()| vec![0.0; QUERIES * keys.count]);
        for first in (0..dims.seqlen_q).step_by(QUERIES) {
            let tile = Tokens { first, count: QUERIES.min(dims.seqlen_q - first) };
            let of_keys = |tensor| Matrix::of(tensor, batch, head_kv, keys).transposed();
            product(Matrix::of(self.q, batch, head, tile), of_keys(self.k), 0.0, &mut scores);
            product(Matrix::of(self.d_o, batch, head, tile), of_keys(self.v), 0.0, &mut d_p);
            for (i, query) in tile.iter().enumerate() {
                let row = &rows[(batch * dims.heads_q + head) * dims.seqlen_q + query];
                let factors = self.modifiers.dropped([batch, head], query, keys);
                let of_query = if queries == 1 { 0 } else { query } * keys.count;
                for (column, key) in keys.iter().enumerate() {
                    if row.lse == f64::NEG_INFINITY || !self.kept.keep(batch, head, query, key) {
                        continue;
                    }
                    let at = i * keys.count + column;
                    let p = row.weight(self.softcap().score(self.scale() * scores[at]) + added.at(query, key));
                    let token = self.token(batch, head_kv, key);
                    let error_size = self.error_size(row, token, scores[at], added.size(query, key));
                    let of_score = self.score_noise(row, error_size);
                    let factor = factors[column];
                    let d_score = times(factor, d_p[at]) - row.delta;
                    let value = p * d_score;
                    let d_p_noise = times(factor, SCORE_ROUNDOFFS * U32 * row.d_o_norm * self.v_norms[token]);
                    // A kernel may round P, and dS.
                    let noise = (SQRT_2 * unit_roundoff(self.problem.dtype()) + of_score) * value.abs()
                        + p * d_p_noise
                        + self.least()
                        + self.flushed() * d_score.abs();
                    let sum = &mut sums[of_query + column];
                    sum.value += value;
                    sum.noise += noise * noise + (p * row.delta_noise).powi(2);
                    sum.squares += value * value;
                    sum.of_delta += p * row.delta_alike;
                    sum.weight += p;
                    sum.alike += p * row.alike.max(of_score);
                    sum.terms += 1;
                }
            }
        }
    }
}

impl Sum {
    fn finished(&self) -> (f64, BiasNoise) {
        let noise = BiasNoise {
            deviation: self.noise.sqrt(),
            weighted: self.squares.sqrt(),
            of_delta: self.of_delta,
            // Without a weight there is nothing that could be off.
            alike: self.alike / f64::max(self.weight, f64::MIN_POSITIVE),
            terms: self.terms,
        };
        (self.value, noise)
    }
}
