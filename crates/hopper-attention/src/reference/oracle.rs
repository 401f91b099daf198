//! The oracle: attention in f64, from the definition. Scores, softmax and weighted sum, for a tile of queries and all
//! their keys.

mod backward;
mod max_logits;

use super::additive::Added;
use super::blocks::Kept;
use super::packed::{cut, paste, paste_list, pieces};
use super::product::{Matrix, Tokens, Vectors, product};
use super::rounding::{ROUNDING, SCORE_ROUNDOFFS, U32, hypot, score_roundoff_16_bits, unit_roundoff};
use super::softcap::Softcap;
use super::work::{ORACLE_UNITS, Work};
use super::{Modifiers, Tensor, check_inputs, each_row, each_tile, gather, place};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::ForwardProblem;
use crate::sequences::Lengths;
use max_logits::Sums;

pub(super) use backward::backward_told;
pub use backward::{BackwardOracle, BiasNoise, Noise, SinkNoise, backward, backward_of, backward_with};
pub use max_logits::MaxLogit;

/// The exact results of a forward pass.
#[derive(Clone, Debug)]
pub struct Oracle {
    /// The output, `[batch, seqlen_q, heads_q, head_dim_vo]`.
    pub o: Tensor,
    /// The log-sum-exp of each query, natural log, `[batch, heads_q, seqlen_q]`. -inf where every key is masked, or the sink
    /// of the head.
    pub lse: Vec<f64>,
    /// The effect of rounding P on each element of the output: `sqrt(sum over keys of (p * v)^2)`, in the shape of `o`.
    ///
    /// With dropout `p` is the weight after it: 0 for a dropped pair, and the others larger.
    ///
    /// If each p has an independent error with a relative standard deviation of 1, this is the standard deviation of the
    /// output's error. For e4m3 operands it is the larger of this root and `sqrt(sum over keys of (p * (v - o))^2)`. The second
    /// one holds where O is divided by the sum of the *rounded* P: an error that all p share then cancels.
    ///
    /// A small e4m3 weight `p` has an error of up to `min(p, 2^-13)`, for a largest weight of 1, in addition.
    pub weighted: Tensor,
    /// For e4m3 operands the error of each element of the output if all weights below 2^-13 of a row's largest weight become 0, in
    /// the shape of `o`. 0 for other operands.
    pub lost: Tensor,
    /// For each query the sizes of rounding errors, `[batch, heads_q, seqlen_q]`.
    pub scales: Vec<RowScale>,
    /// The largest score of each query head. Empty where the problem does not have it.
    pub max_logits: Vec<MaxLogit>,
}

/// The sizes of rounding errors in the results of one query (a row). The tolerance makes its floor of them.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowScale {
    /// The size of the terms of the scores: `softmax_scale * |q| * sum over keys of p * |k|`. With a softcap each term is
    /// multiplied by the cap's derivative, `1 - tanh^2`, which is what is left of a score's error.
    ///
    /// It is an upper bound for the sum of the magnitudes that are added up for a score, averaged over keys by weight. A unit
    /// roundoff times this number is the size of a score's error.
    ///
    /// With dropout the keys are those of all pairs, as in the LSE.
    pub score: f64,
    /// The same for the output, whose weights are those that dropout keeps: as [`score`](Self::score), divided by
    /// [`share`](Self::share), or the mean over the keys of the pairs that are not dropped where this is larger.
    pub score_of_o: f64,
    /// The effect of rounding P on the row along its own direction: as [`Oracle::weighted`], with `(v . o)` in place of `v` and
    /// `((v - o) . o)` in place of `v - o`.
    pub along: f64,
    /// The share of the weights that have the same rounding error, from 0 to 1.
    ///
    /// Weights that differ by an eighth of a unit roundoff or less are rounded alike. Then their errors do not average out
    /// over the keys, nor over rows. Keys with such weights make a group. The share is the root of the sum of the squared
    /// weights of the groups of two and more keys. Dropped pairs have no part in it.
    pub alike: f64,
    /// The largest score of the row.
    pub row_max: f64,
    /// The number of keys that the mask keeps.
    pub keys: usize,
    /// The size of the sink, times its weight. An error of the sink, as that of a score, has so much of a part in the row.
    pub sink: f64,
    /// The share of the weights that keys have, from 0 to 1. The sink has the rest.
    pub share: f64,
    /// The softcap, if a key is kept, or 0: the size of the errors that tanh makes.
    pub cap: f64,
    /// The magnitude of what is added to the scores (the bias, and ALiBi), averaged over keys by weight as [`score`](Self::score) is. A
    /// unit roundoff times this number is the size of the errors that they add to a score.
    pub added: f64,
    /// As [`score_of_o`](Self::score_of_o), of [`added`](Self::added).
    pub added_of_o: f64,
    /// The sum of the weights of the keys, where the largest is 1. The sink has no part in it.
    pub key_weights: f64,
}

/// Keys whose scores differ by a unit roundoff divided by this number are rounded alike.
const ALIKE: f64 = 8.0;

/// Half of the distance between two small e4m3 weights, as a share of a row's largest weight. A smaller weight may become 0.
///
/// The smallest e4m3 number is 2^-9. A kernel may make a row's largest weight no larger than 2^3, so that sums of weights stay
/// within the type. A weight `p` then has the error `min(p, E4M3_LEAST)` besides that of its three bits.
const E4M3_LEAST: f64 = 1.0 / (1 << 13) as f64;

struct Row {
    o: Vec<f64>,
    weighted: Vec<f64>,
    lost: Vec<f64>,
    lse: f64,
    scale: RowScale,
    max_logit: MaxLogit,
}

/// Computes the forward pass in f64.
///
/// - `q` is `[batch, seqlen_q, heads_q, head_dim_qk]`, `k` is `[batch, seqlen_kv, heads_kv, head_dim_qk]`, and `v` is
///   `[batch, seqlen_kv, heads_kv, head_dim_vo]`. The elements must be those that the tested computation reads: already
///   rounded to its type.
/// - A query that keeps no key gets output 0 and LSE -inf, or the sink of its head. So does a query whose kept keys all have
///   score -inf.
/// - A NaN among the kept scores of a query makes its results NaN. Masked keys have no part in them.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape) when a tensor's shape is not the problem's.
pub fn forward(problem: &ForwardProblem, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Oracle> {
    forward_of(problem, &Lengths::default(), q, k, v)
}

/// As [`forward`], for a problem with packed sequences or used lengths. Each sequence is computed by itself. The results of rows
/// that belong to no sequence are 0, and -inf for the LSE.
///
/// # Errors
/// As [`forward`], and as [`Lengths::check`].
pub fn forward_of(
    problem: &ForwardProblem,
    lengths: &Lengths<'_>,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
) -> Result<Oracle> {
    forward_with(problem, lengths, [q, k, v], Modifiers::default())
}

/// As [`forward_of`], with q, k and v in `inputs`, for a problem with modifiers.
///
/// # Errors
/// As [`forward_of`]. [`Error::Shape`](crate::Error::Shape) and [`Error::Value`](crate::Error::Value) for modifiers that are not
/// the problem's.
pub fn forward_with(
    problem: &ForwardProblem,
    lengths: &Lengths<'_>,
    inputs: [&Tensor; 3],
    modifiers: Modifiers<'_>,
) -> Result<Oracle> {
    forward_told(problem, lengths, inputs, modifiers, &Work::silent())
}

/// As [`forward_with`]. It tells `work` about each tile.
pub(super) fn forward_told(
    problem: &ForwardProblem,
    lengths: &Lengths<'_>,
    [q, k, v]: [&Tensor; 3],
    modifiers: Modifiers<'_>,
    work: &Work<'_>,
) -> Result<Oracle> {
    check_inputs(problem, q, k, v)?;
    modifiers.check(problem)?;
    let Some(pieces) = pieces(problem, lengths, &modifiers)? else { return dense(problem, [q, k, v], modifiers, work) };
    let (shape, rows) = (problem.o_shape(), problem.lse_shape());
    let queries = rows.iter().product();
    let mut all = Oracle {
        o: Tensor::zeros(shape),
        lse: vec![f64::NEG_INFINITY; queries],
        weighted: Tensor::zeros(shape),
        lost: Tensor::zeros(shape),
        scales: vec![RowScale::default(); queries],
        max_logits: no_logits(problem),
    };
    for piece in &pieces {
        let of = &piece.q;
        let (k, v) = (cut(k, &piece.kv), cut(v, &piece.kv));
        let own = modifiers.of_sequence(problem, piece);
        let one = dense(&piece.problem, [&cut(q, of), &k, &v], own, work)?;
        for (into, from) in [(&mut all.o, &one.o), (&mut all.weighted, &one.weighted), (&mut all.lost, &one.lost)] {
            paste(into, of, from);
        }
        paste_list(&mut all.lse, rows, of, &one.lse);
        paste_list(&mut all.scales, rows, of, &one.scales);
        all.max_logits.iter_mut().zip(one.max_logits).for_each(|(max, other)| max.join(other));
    }
    Ok(all)
}

/// What the heads begin with, where the problem has their largest scores.
fn no_logits(problem: &ForwardProblem) -> Vec<MaxLogit> {
    vec![MaxLogit::NONE; if problem.wants_max_logits() { problem.dims().heads_q } else { 0 }]
}

/// The oracle of a problem whose sequences all have the same lengths.
fn dense(
    problem: &ForwardProblem,
    [q, k, v]: [&Tensor; 3],
    modifiers: Modifiers<'_>,
    work: &Work<'_>,
) -> Result<Oracle> {
    let exact = Exact {
        problem,
        modifiers,
        kept: Kept::new(problem, &modifiers)?,
        q,
        k,
        k_norms: norms(k),
        v,
        values: Vectors::new(v, |v| v),
        squares: Vectors::new(v, |v| v * v),
    };
    let rows = each_tile(problem.lse_shape(), problem.dims().seqlen_kv, work, ORACLE_UNITS, |place, queries| {
        exact.tile(place, queries)
    });
    let o = gather(problem.o_shape(), &rows, |row, out| out.copy_from_slice(&row.o));
    let weighted = gather(problem.o_shape(), &rows, |row, out| out.copy_from_slice(&row.weighted));
    let lost = gather(problem.o_shape(), &rows, |row, out| out.copy_from_slice(&row.lost));
    let mut max_logits = no_logits(problem);
    let (mut lse, mut scales) = (Vec::with_capacity(rows.len()), Vec::with_capacity(rows.len()));
    for (i, row) in rows.into_iter().enumerate() {
        if !max_logits.is_empty() {
            max_logits[place(problem.lse_shape(), i)[1]].join(row.max_logit);
        }
        lse.push(row.lse);
        scales.push(row.scale);
    }
    Ok(Oracle { o, lse, weighted, lost, scales, max_logits })
}

struct Exact<'a> {
    problem: &'a ForwardProblem,
    modifiers: Modifiers<'a>,
    kept: Kept<'a>,
    q: &'a Tensor,
    k: &'a Tensor,
    /// The norms of the keys, `[batch, heads_kv, seqlen_kv]`.
    k_norms: Vec<f64>,
    v: &'a Tensor,
    /// V, and the squares of its elements.
    values: Vectors,
    squares: Vectors,
}

impl Exact<'_> {
    /// The rows of these queries of a head.
    fn tile(&self, [batch, head]: [usize; 2], queries: Tokens) -> Vec<Row> {
        let dims = self.problem.dims();
        let head_kv = head / (dims.heads_q / dims.heads_kv);
        let dim = dims.head_dim_vo;
        let keeps = |query, key| self.kept.keep(batch, head, query, key);
        let keys = Tokens::of(dims.seqlen_kv, |key| queries.iter().any(|query| keeps(query, key)));
        let count = keys.count;

        let mut scores = vec![0.0; queries.count * count];
        let of_keys = Matrix::of(self.k, batch, head_kv, keys);
        product(Matrix::of(self.q, batch, head, queries), of_keys.transposed(), 0.0, &mut scores);
        // Of masked pairs too. `kept` says which pairs those are.
        let mut kept = vec![false; scores.len()];
        // After dropout. Dropped pairs are not kept.
        let mut p = vec![0.0; scores.len()];
        let mut soft = Vec::with_capacity(queries.count);
        let added = Added::of(self.problem, self.modifiers, [batch, head]);
        for (row, query) in queries.iter().enumerate() {
            let columns: Vec<usize> = (0..count).filter(|column| keeps(query, keys.first + column)).collect();
            let at = row * count;
            let added = |column| added.at(query, keys.first + column);
            let row = Soft::new(self.problem, columns, &scores[at..at + count], added, self.modifiers.sink(head));
            let factors = self.modifiers.dropped([batch, head], query, keys);
            for (&column, weight) in row.columns.iter().zip(&row.weights) {
                let factor = factors[column];
                kept[at + column] = factor != 0.0;
                p[at + column] = if factor == 0.0 { 0.0 } else { weight / row.sum * factor };
            }
            soft.push(row);
        }

        let mut o = vec![0.0; queries.count * dim];
        self.values.add_weighted([batch, head_kv], keys, &p, &kept, &mut o);
        // Scores count also where dropout drops all pairs of a row.
        let of_rows = o.chunks_mut(dim.max(1)).zip(&soft);
        of_rows.filter(|(_, soft)| soft.sum.is_nan()).for_each(|(row, _)| row.fill(f64::NAN));
        // The products of V and O, of what is finite. They take the place of the scores.
        let finite: Vec<f64> = o.iter().map(|&o| if o.is_finite() { o } else { 0.0 }).collect();
        let finite = Matrix::dense(&finite, queries.count, dim);
        product(finite, self.values.finite(batch, head_kv, keys).transposed(), 0.0, &mut scores);

        let mut rows: Vec<Row> = Vec::with_capacity(queries.count);
        for (i, (query, soft)) in queries.iter().zip(&soft).enumerate() {
            let of_row = i * count..(i + 1) * count;
            let q_row = self.q.row(batch, query, head);
            let o = o[i * dim..(i + 1) * dim].to_vec();
            let added = |column| [added.at(query, keys.first + column), added.size(query, keys.first + column)];
            let along = &scores[of_row.clone()];
            let (p, kept) = (&mut p[of_row.clone()], &kept[of_row]);
            rows.push(self.row([batch, head_kv], keys, q_row, o, soft, added, along, (p, kept)));
        }
        // `p` holds the squares of what each weight's error is a share of.
        let mut squares = vec![0.0; queries.count * dim];
        self.squares.add_weighted([batch, head_kv], keys, &p, &kept, &mut squares);
        for (row, squares) in rows.iter_mut().zip(squares.chunks(dim.max(1))) {
            let squares = squares.iter().zip(&row.weighted);
            row.weighted = squares.map(|(a, b)| a.max(*b).sqrt()).collect();
        }
        rows
    }

    /// A query's row. Its `weighted` are the squares of the centred noise alone. `p`, which comes with which pairs are kept,
    /// becomes the squares that the other noise is made of. `added` gives what is added to the score in a column, and its
    /// magnitude.
    #[expect(clippy::too_many_arguments, reason = "one row of one tile")]
    fn row(
        &self,
        [batch, head_kv]: [usize; 2],
        keys: Tokens,
        q_row: &[f64],
        o: Vec<f64>,
        soft: &Soft,
        added: impl Fn(usize) -> [f64; 2],
        along: &[f64],
        (p, kept): (&mut [f64], &[bool]),
    ) -> Row {
        let dims = self.problem.dims();
        if soft.weights.is_empty() {
            let [weighted, lost] = [(); 2].map(|()| vec![0.0; o.len()]);
            // 0, or the NaN of a sink.
            let o = o.iter().map(|_| if soft.lse.is_nan() { f64::NAN } else { 0.0 }).collect();
            return Row { o, weighted, lost, lse: soft.lse, scale: RowScale::default(), max_logit: MaxLogit::NONE };
        }
        let k_norms = &self.k_norms[(batch * dims.heads_kv + head_kv) * dims.seqlen_kv + keys.first..];
        let o_squares = finite_dot(&o, &o);
        let roundoff = unit_roundoff(self.problem.dtype());
        let mut centred = vec![0.0; o.len()];
        let mut lost = vec![0.0; o.len()];
        let (mut biases, mut max_logit) = (0.0, MaxLogit::NONE);
        let score_roundoff = match self.problem.dtype() {
            DType::BF16 | DType::F16 => score_roundoff_16_bits(dims.head_dim_qk),
            _ => U32,
        };
        let (mut key_norm, mut along_squares, mut along_centred) = (0.0, 0.0, 0.0);
        // Of the pairs that are not dropped: the sum of their weights, and what it is the weight of.
        let mut of_kept = [0.0; 3];
        let (softcap, softmax_scale) = (Softcap::of(self.problem), f64::from(self.problem.softmax_scale()));
        let q_norm = norm(q_row);
        let size = softmax_scale * q_norm;
        for (i, (&column, weight)) in soft.columns.iter().zip(&soft.weights).enumerate() {
            let mut of_key = p[column];
            let of_all = weight / soft.sum;
            // A key of weight 0 may be infinite. So may one whose score is at the cap.
            let left = softcap.steepest(soft.uncapped(i), size * k_norms[column]);
            let part = of_all * left;
            let [added, added_size] = added(column);
            biases += of_all * added_size;
            if self.problem.wants_max_logits() {
                let k_row = self.k.row(batch, keys.first + column, head_kv);
                let of_sum = SCORE_ROUNDOFFS * score_roundoff * size * k_norms[column];
                let later = SCORE_ROUNDOFFS * U32 * (softcap.cap + added_size);
                match Sums::of(softmax_scale, q_row, k_row, q_norm * k_norms[column]) {
                    None => max_logit.take(soft.scores[i], of_sum * left + later),
                    Some(sums) => max_logit.take_any(&sums, |sum| softcap.score(sum) + added, of_sum, later),
                }
            }
            if part != 0.0 {
                key_norm += part * k_norms[column];
            }
            if kept[column] {
                let norm = if part != 0.0 { left * k_norms[column] } else { 0.0 };
                of_kept.iter_mut().zip([1.0, norm, added_size]).for_each(|(sum, size)| *sum += of_all * size);
            }
            if self.problem.dtype() == DType::E4M3 {
                let v_row = self.v.row(batch, keys.first + column, head_kv);
                let centred_row = || v_row.iter().zip(&o).map(|(v, o)| v - o);
                // The largest of `weights` is 1.
                if *weight < E4M3_LEAST {
                    lost.iter_mut().zip(centred_row()).for_each(|(lost, v)| *lost += of_key * v);
                }
                of_key = hypot(of_key, weight.min(E4M3_LEAST) / soft.sum / (ROUNDING * roundoff));
                centred.iter_mut().zip(centred_row()).for_each(|(square, v)| *square += (of_key * v).powi(2));
                along_centred += (of_key * (along[column] - o_squares)).powi(2);
            }
            along_squares += (of_key * along[column]).powi(2);
            p[column] = of_key * of_key;
        }
        let share = soft.weights.iter().sum::<f64>() / soft.sum;
        // What the sink or dropout leaves of a row has the relative error of the keys' scores, however little it is.
        let mean = |sum: f64, of_kept: f64, share_of_kept: f64| {
            let of_all = if share > 0.0 { sum / share } else { sum };
            if share_of_kept > 0.0 { f64::max(of_all, of_kept / share_of_kept) } else { of_all }
        };
        let scale = RowScale {
            score: size * key_norm,
            score_of_o: mean(size * key_norm, size * of_kept[1], of_kept[0]),
            along: f64::max(along_squares, along_centred).sqrt(),
            alike: soft.alike(roundoff, |column| kept[column]),
            row_max: soft.max,
            keys: soft.columns.len(),
            sink: soft.sink_size,
            share,
            cap: softcap.cap,
            added: biases,
            added_of_o: mean(biases, of_kept[2], of_kept[0]),
            key_weights: soft.of_keys,
        };
        Row { o, weighted: centred, lost, lse: soft.lse, scale, max_logit }
    }
}

/// The softmax of a query, before the division.
struct Soft {
    /// The kept keys, as columns of the tile.
    columns: Vec<usize>,
    scores: Vec<f64>,
    /// The scores before the cap and the bias. Empty where there is neither.
    before_cap: Vec<f64>,
    weights: Vec<f64>,
    max: f64,
    /// The sum of the weights, and of that of the sink. The weights are relative to the maximum, if a score is above -inf. If all
    /// scores are -inf, or no key is kept, there are no weights.
    sum: f64,
    lse: f64,
    /// The magnitude of the sink, times its share of the sum. 0 if the sink is not finite.
    sink_size: f64,
    /// The sum of the weights alone.
    of_keys: f64,
}

/// What weights are relative to, if this is the largest score.
fn shift_of(max: f64) -> f64 {
    if max == f64::NEG_INFINITY { 0.0 } else { max }
}

impl Soft {
    /// `added` gives what is added to the score of a column.
    fn new(
        problem: &ForwardProblem,
        columns: Vec<usize>,
        products: &[f64],
        added: impl Fn(usize) -> f64,
        sink: f64,
    ) -> Self {
        let softmax_scale = f64::from(problem.softmax_scale());
        let mut scores: Vec<f64> = columns.iter().map(|&column| softmax_scale * products[column]).collect();
        let (softcap, mut before_cap) = (Softcap::of(problem), Vec::new());
        if softcap.cap != 0.0 || problem.alibi().is_some() || problem.bias().is_some() {
            before_cap.clone_from(&scores);
            let modified = |score: f64, column: usize| softcap.score(score) + added(column);
            scores.iter_mut().zip(&columns).for_each(|(score, &column)| *score = modified(*score, column));
        }
        // `f64::max` ignores a NaN. The weight of that key below is NaN, and so is then the row.
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if max == f64::NEG_INFINITY && !scores.iter().any(|score| score.is_nan()) {
            let sink_size = if sink.is_finite() { sink.abs() } else { 0.0 };
            let weights = vec![];
            return Self { columns, scores, before_cap, weights, max, sum: 0.0, lse: sink, sink_size, of_keys: 0.0 };
        }
        let shift = shift_of(max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - shift).exp()).collect();
        let of_keys: f64 = weights.iter().sum();
        // It may be infinite, and then no key has a part.
        let sum = of_keys + (sink - shift).exp();
        // log(exp(a) + exp(b)), relative to the larger one.
        let (a, b) = (shift + of_keys.ln(), sink);
        let lse = if b > a { b + (a - b).exp().ln_1p() } else { a + (b - a).exp().ln_1p() };
        let sink_size = if sink.is_finite() { sink.abs() * (sink - lse).exp() } else { 0.0 };
        Self { columns, scores, before_cap, weights, max, sum, lse, sink_size, of_keys }
    }

    /// [`alike`] of the keys in these columns alone.
    fn alike(&self, unit_roundoff: f64, counts: impl Fn(usize) -> bool) -> f64 {
        if self.columns.iter().all(|&column| counts(column)) {
            return alike(unit_roundoff, &self.scores, &self.weights);
        }
        let both = self.columns.iter().zip(self.scores.iter().zip(&self.weights));
        let (scores, weights): (Vec<f64>, Vec<f64>) =
            both.filter(|&(&column, _)| counts(column)).map(|(_, (score, weight))| (score, weight)).unzip();
        alike(unit_roundoff, &scores, &weights)
    }

    /// The score of the kept key number `i` without the cap and the bias.
    fn uncapped(&self, i: usize) -> f64 {
        *self.before_cap.get(i).unwrap_or(&self.scores[i])
    }
}

/// The share of weights that have the same rounding error ([`RowScale::alike`]).
fn alike(unit_roundoff: f64, scores: &[f64], weights: &[f64]) -> f64 {
    let sum: f64 = weights.iter().sum();
    let mut keys: Vec<(f64, f64)> = scores.iter().copied().zip(weights.iter().copied()).collect();
    keys.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let (mut squares, mut from) = (0.0, 0);
    while let Some(first) = keys.get(from) {
        let group = keys[from..].iter().take_while(|key| key.0 - first.0 <= unit_roundoff / ALIKE);
        let (count, weight) = group.fold((0, 0.0), |(count, weight), key| (count + 1, weight + key.1));
        if count > 1 {
            squares += (weight / sum).powi(2);
        }
        // A NaN is like no other.
        from += count.max(1);
    }
    squares.sqrt()
}

/// A dot product that leaves out what is not finite.
fn finite_dot(a: &[f64], b: &[f64]) -> f64 {
    let all = dot(a, b);
    if all.is_finite() {
        return all;
    }
    a.iter().zip(b).map(|(a, b)| a * b).filter(|product| product.is_finite()).sum()
}

/// A dot product in eight partial sums, so that the compiler may use vectors.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (a_chunks, b_chunks) = (a.chunks_exact(8), b.chunks_exact(8));
    let tail: f64 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f64>() + tail
}

fn norm(row: &[f64]) -> f64 {
    dot(row, row).sqrt()
}

/// The norm of every row, in the order of `[batch, head, token]`.
fn norms(tensor: &Tensor) -> Vec<f64> {
    let [batch, seqlen, heads, _] = tensor.shape();
    let shape = [batch, heads, seqlen];
    each_row(shape, &Work::silent(), 0, |[batch, head, token]| norm(tensor.row(batch, token, head)))
}

#[cfg(test)]
mod tests;
