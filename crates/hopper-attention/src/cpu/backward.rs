//! The gradients, in two passes over the same pairs of queries and keys.
//!
//! 1. Tasks are blocks of queries. A task computes dQ, and delta of each query.
//! 2. Tasks are blocks of keys. A task computes dK and dV, summed over the query heads that read the KV head.
//!
//! Where the gradient of a bias is asked for, there is a third pass. Its tasks are blocks of keys of the bias: a task computes their
//! dBias, summed over the batch entries, heads and queries that share it.
//!
//! All passes compute P from Q, K and the LSE. The first two make seven matrix products, where a single pass would make five. In
//! return every sum belongs to one task. So there are no atomic additions, every run gives the same bits, and all cores have
//! work even with few KV heads.

use std::ops::Range;

use super::additive::{self, Additive, AdditiveMut};
use super::alibi::{Bias, Slopes};
use super::block::{self, Block, Keys};
use super::dropout::{Drops, zero};
use super::listed::{self, ListInputs, Listed};
use super::matmul::{self, Matrix, matmul};
use super::memory::reserved;
use super::sequences::{Sequence, Sequences};
use super::sinks::{self, Sinks};
use super::softcap::capped;
use super::{Blocks, HostMut, HostRef, Task, Tasks, Team, WALKED, fill_gaps, load};
use crate::dtype::{Element, Float};
use crate::error::Result;
use crate::layout::Layout;
use crate::problem::{BackwardProblem, Dims};
use crate::sequences::{Lengths, Side};

/// The tensors that a backward pass reads, in host memory.
pub(crate) struct BackwardInputs<'a, T> {
    pub q: HostRef<'a, T, 4>,
    pub k: HostRef<'a, T, 4>,
    pub v: HostRef<'a, T, 4>,
    pub o: HostRef<'a, T, 4>,
    pub lse: HostRef<'a, f32, 3>,
    pub d_o: HostRef<'a, T, 4>,
    pub d_lse: Option<HostRef<'a, f32, 3>>,
    pub lengths: Lengths<'a>,
    pub sinks: Sinks<'a>,
    pub bias: Additive<'a>,
    pub alibi: Slopes<'a>,
    pub lists: Option<ListInputs<'a>>,
    /// The words of the seed and the offset of dropout, as the forward pass read them.
    pub dropout_state: Option<[i32; 4]>,
}

/// The tensors that a backward pass writes, in host memory.
pub(crate) struct BackwardOutputs<'a, T> {
    pub d_q: HostMut<'a, T, 4>,
    pub d_k: HostMut<'a, T, 4>,
    pub d_v: HostMut<'a, T, 4>,
    pub d_sinks: Option<HostMut<'a, f32, 1>>,
    pub d_bias: Option<AdditiveMut<'a>>,
}

/// Computes `problem` into the outputs. The caller has checked shapes and types.
///
/// # Errors
/// Before an output is written:
/// - [`Error::Value`](crate::Error::Value) for offsets, used lengths and lists of blocks that are wrong.
/// - [`Error::Memory`](crate::Error::Memory) and [`Error::Threads`](crate::Error::Threads).
pub(crate) fn backward<T: Float>(
    problem: &BackwardProblem,
    inputs: &BackwardInputs<'_, T>,
    mut outputs: BackwardOutputs<'_, T>,
) -> Result<()> {
    let (dims, walked) = (problem.dims(), listed::walked(problem.forward(), WALKED));
    let blocks = Blocks::of(dims, walked);
    let sequences = Sequences::new(problem.forward(), &inputs.lengths)?;
    let listed = Listed::new(problem.forward(), inputs.lists.as_ref())?;
    let listed = listed.as_ref();
    let queries = Tasks::new(&sequences, Side::Q, dims.heads_q, blocks.tokens)?;
    let keys = Tasks::new(&sequences, Side::Kv, dims.heads_kv, blocks.tokens)?;
    // The keys of each batch entry and head of the bias.
    let bias_shape = outputs.d_bias.as_ref().map_or([0; 4], AdditiveMut::shape);
    let biased = Sequences::of_dims(dims.with_batch(bias_shape[0]).with_seqlen_kv(bias_shape[3]));
    let biases = Tasks::new(&biased, Side::Kv, bias_shape[1], blocks.tokens)?;
    let most = queries.count().max(keys.count()).max(biases.count());
    let mut team = Team::new(most, || Scratch::new(problem, bias_shape[2], blocks))?;
    let layout = Layout::contiguous(problem.d_lse_shape())?;
    let mut delta = reserved(layout.span())?;
    matmul::check_memory(team.threads())?;

    delta.resize(layout.span(), 0.0);
    let mut of_rows = HostMut::of(&mut delta, layout);
    let compute = |scratch: &mut Scratch<T>, task: &Task| of_queries(problem, inputs, listed, blocks, task, scratch);
    team.each(&queries, compute, |task, scratch| {
        outputs.d_q.store(task, &scratch.of_tokens);
        of_rows.store_part(task, &scratch.delta);
    })?;

    let delta = HostRef::of(&delta, layout);
    if let Some(d_sinks) = &mut outputs.d_sinks {
        sinks::gradients(&inputs.sinks, &sequences, &inputs.lse, &delta, d_sinks);
    }
    let compute = |scratch: &mut Scratch<T>, task: &Task| {
        of_keys(problem, inputs, listed, blocks, &delta, task, scratch);
    };
    team.each(&keys, compute, |task, scratch| {
        outputs.d_k.store(task, &scratch.of_tokens);
        outputs.d_v.store(task, &scratch.of_values);
    })?;
    if let Some(d_bias) = &mut outputs.d_bias {
        let compute = |scratch: &mut Scratch<T>, task: &Task| {
            of_biases(problem, inputs, listed, blocks, (&sequences, &delta, bias_shape), task, scratch);
        };
        team.each(&biases, compute, |task, scratch| d_bias.store(task, &scratch.d_bias))?;
    }
    if problem.forward().fills_gaps() {
        fill_gaps(&sequences, Side::Q, &mut outputs.d_q);
        fill_gaps(&sequences, Side::Kv, &mut outputs.d_k);
        fill_gaps(&sequences, Side::Kv, &mut outputs.d_v);
    }
    Ok(())
}

/// Buffers that a thread uses again for its next task of either pass. They are large enough for the largest task, so that a task
/// allocates nothing.
struct Scratch<T> {
    /// The result for the tokens of the task: dQ or dK.
    of_tokens: Vec<T>,
    /// The result for the values of the task: dV.
    of_values: Vec<T>,
    /// The result for the queries of the task.
    delta: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    o: Vec<f32>,
    d_o: Vec<f32>,
    rows: Vec<Row>,
    kept: Vec<Range<usize>>,
    /// Whether dropout drops a pair, `[queries, keys]`.
    dropped: Vec<bool>,
    /// P, `[queries, keys]`.
    p: Vec<f32>,
    /// dP, then dS, `[queries, keys]`.
    d_s: Vec<f32>,
    /// dQ or dK as sums that are not yet multiplied by the softmax scale.
    token_sums: Vec<f32>,
    /// dV as sums.
    value_sums: Vec<f32>,
    /// The additive biases, `[queries, keys]`. Empty where there is no bias.
    biases: Vec<f32>,
    /// The result for the biases of the task: `[queries of the bias, keys]`.
    d_bias: Vec<f32>,
}

impl<T> Scratch<T> {
    /// `bias_queries` is how many queries the gradient of the bias has.
    fn new(problem: &BackwardProblem, bias_queries: usize, Blocks { tokens, walked }: Blocks) -> Result<Self> {
        let Dims { seqlen_q, seqlen_kv, head_dim_qk, head_dim_vo, .. } = problem.dims();
        let d_bias = bias_queries * tokens.min(seqlen_kv);
        // A task has queries and visits keys, or has keys and visits queries.
        let (queries, keys) = (tokens.max(walked).min(seqlen_q), tokens.max(walked).min(seqlen_kv));
        let pairs = (tokens.min(seqlen_q) * keys).max(queries * tokens.min(seqlen_kv));
        let tokens = tokens.min(seqlen_q.max(seqlen_kv));
        Ok(Self {
            of_tokens: reserved(tokens * head_dim_qk)?,
            of_values: reserved(tokens * head_dim_vo)?,
            delta: reserved(tokens)?,
            q: reserved(queries * head_dim_qk)?,
            k: reserved(keys * head_dim_qk)?,
            v: reserved(keys * head_dim_vo)?,
            o: reserved(tokens * head_dim_vo)?,
            d_o: reserved(queries * head_dim_vo)?,
            rows: reserved(queries)?,
            kept: reserved(queries)?,
            dropped: reserved(if problem.forward().dropout().is_some() { pairs } else { 0 })?,
            p: reserved(pairs)?,
            d_s: reserved(pairs)?,
            token_sums: reserved(tokens * head_dim_qk)?,
            value_sums: reserved(tokens * head_dim_vo)?,
            biases: reserved(if problem.forward().bias().is_some() { pairs } else { 0 })?,
            d_bias: reserved(d_bias)?,
        })
    }
}

/// What all pairs of one query share.
struct Row {
    /// Its number in the sequence.
    query: usize,
    /// The keys that the query keeps.
    keys: Keys,
    lse: f32,
    delta: f32,
    /// Whether a key of the query was found that the mask, the lists and the bias keep.
    has_keys: bool,
}

/// Fills `rows` for some queries of a sequence. A query with LSE -inf has no part in any gradient, so it counts as one that keeps no key.
fn rows_of(
    problem: &BackwardProblem,
    of: &Sequence,
    queries: Range<usize>,
    lse: &[f32],
    delta: &[f32],
    rows: &mut Vec<Row>,
) {
    let band = problem.mask().band(of.q.len, of.kv.len);
    rows.clear();
    rows.extend(queries.zip(lse.iter().zip(delta)).map(|(query, (&lse, &delta))| {
        let keys = if lse == f32::NEG_INFINITY { (0, 0) } else { band.keys(query, of.kv.len) };
        Row { query, keys, lse, delta, has_keys: false }
    }));
}

/// Computes dQ and delta of some queries, into `scratch`.
fn of_queries<T: Float>(
    problem: &BackwardProblem,
    inputs: &BackwardInputs<'_, T>,
    listed: Option<&Listed<'_>>,
    blocks: Blocks,
    task: &Task,
    scratch: &mut Scratch<T>,
) {
    let dims = problem.dims();
    let head_kv = task.head / problem.forward().group_size();
    let Scratch { of_tokens, delta, q, k, v, o, d_o, rows, kept, dropped, p, d_s, token_sums: d_q, biases, .. } =
        scratch;
    for (tensor, out) in [(&inputs.q, &mut *q), (&inputs.o, &mut *o), (&inputs.d_o, &mut *d_o)] {
        load(tensor, &task.rows, task.head, task.tokens.clone(), out);
    }
    // delta is `rowsum(dO * O) - dLSE`. The derivative of the LSE with respect to a score is P, so dLSE adds `P * dLSE` to dS.
    delta.clear();
    delta.extend(o.chunks_exact(dims.head_dim_vo).zip(d_o.chunks_exact(dims.head_dim_vo)).map(|(o, d_o)| dot(o, d_o)));
    if let Some(d_lse) = &inputs.d_lse {
        let d_lse = d_lse.part(&task.rows, task.head, task.tokens.clone());
        delta.iter_mut().zip(d_lse).for_each(|(delta, d_lse)| *delta -= d_lse);
    }
    let lse = inputs.lse.part(&task.rows, task.head, task.tokens.clone());
    rows_of(problem, &task.sequence, task.tokens.clone(), lse, delta, rows);

    let bias = Bias::of(problem.forward(), &inputs.alibi, &task.sequence, task.head);
    let drops = Drops::of(problem.forward(), inputs.dropout_state, &task.sequence, task.head);
    d_q.clear();
    d_q.resize(q.len(), 0.0);
    let (start, end) = block::reach(rows.iter().map(|row| row.keys));
    let start = block::first_visited(start, blocks.walked, listed.is_some());
    for first in (start..end).step_by(blocks.walked) {
        let keys = first..end.min(first + blocks.walked);
        let Some(pairs) = listed::pairs(listed, task.rows.batch, task.head, task.tokens.start, first) else { continue };
        load(&inputs.k, &task.sequence.kv, head_kv, keys.clone(), k);
        load(&inputs.v, &task.sequence.kv, head_kv, keys.clone(), v);
        inputs.bias.load([task.rows.sequence, task.head], task.tokens.clone(), keys.clone(), biases);
        let block =
            Block::new(rows.iter().map(|row| row.keys), first, keys.len(), kept).of_pairs(pairs).with_bias(biases);
        Drops::pairs(drops.as_ref(), task.tokens.clone(), keys, dropped);
        let of_pairs = OfPairs { alibi: bias, first_key: first, biases, capped: true, dropped };
        weights(problem, rows, &block, of_pairs, [q, k, v, d_o], p, d_s);
        block.sum_over_keys(d_s, k, dims.head_dim_qk, d_q);
        for (query, row) in rows.iter_mut().enumerate() {
            row.has_keys = row.has_keys || block.keeps_any(query);
        }
    }
    // The O of a query without keys is 0 by definition, whatever dO is. What the gradient of a sink has of it is dLSE.
    let d_lse = inputs.d_lse.as_ref().map(|d_lse| d_lse.part(&task.rows, task.head, task.tokens.clone()));
    for (i, delta) in delta.iter_mut().enumerate().filter(|(i, _)| !rows[*i].has_keys) {
        *delta = d_lse.map_or(0.0, |d_lse| -d_lse[i]);
    }
    round(d_q, problem.softmax_scale(), of_tokens);
}

/// Computes dK and dV of some keys, into `scratch`.
fn of_keys<T: Float>(
    problem: &BackwardProblem,
    inputs: &BackwardInputs<'_, T>,
    listed: Option<&Listed<'_>>,
    blocks: Blocks,
    delta: &HostRef<'_, f32, 3>,
    task: &Task,
    scratch: &mut Scratch<T>,
) {
    let dims = problem.dims();
    let group = problem.forward().group_size();
    let Scratch { of_tokens, of_values, q, k, v, d_o, rows, kept, dropped, p, d_s, biases, .. } = scratch;
    let (d_k, d_v) = (&mut scratch.token_sums, &mut scratch.value_sums);
    load(&inputs.k, &task.rows, task.head, task.tokens.clone(), k);
    load(&inputs.v, &task.rows, task.head, task.tokens.clone(), v);
    for (sums, like) in [(&mut *d_k, &*k), (&mut *d_v, &*v)] {
        sums.clear();
        sums.resize(like.len(), 0.0);
    }
    let of_queries = &task.sequence.q;
    for head in task.head * group..(task.head + 1) * group {
        let bias = Bias::of(problem.forward(), &inputs.alibi, &task.sequence, head);
        let drops = Drops::of(problem.forward(), inputs.dropout_state, &task.sequence, head);
        for first in (0..of_queries.len).step_by(blocks.walked) {
            let queries = first..of_queries.len.min(first + blocks.walked);
            let Some(pairs) = listed::pairs(listed, task.rows.batch, head, first, task.tokens.start) else { continue };
            let lse = inputs.lse.part(of_queries, head, queries.clone());
            let delta = delta.part(of_queries, head, queries.clone());
            rows_of(problem, &task.sequence, queries.clone(), lse, delta, rows);
            let block = Block::new(rows.iter().map(|row| row.keys), task.tokens.start, task.tokens.len(), kept);
            if block.is_empty() {
                continue;
            }
            load(&inputs.q, of_queries, head, queries.clone(), q);
            load(&inputs.d_o, of_queries, head, queries.clone(), d_o);
            inputs.bias.load([task.rows.sequence, head], queries.clone(), task.tokens.clone(), biases);
            let block = block.of_pairs(pairs).with_bias(biases);
            Drops::pairs(drops.as_ref(), queries, task.tokens.clone(), dropped);
            let first_key = task.tokens.start;
            let of_pairs = OfPairs { alibi: bias, first_key, biases, capped: true, dropped };
            weights(problem, rows, &block, of_pairs, [q, k, v, d_o], p, d_s);
            zero(dropped, p);
            block.without(dropped).sum_over_queries(p, d_o, dims.head_dim_vo, d_v);
            block.sum_over_queries(d_s, q, dims.head_dim_qk, d_k);
        }
    }
    round(d_k, problem.softmax_scale(), of_tokens);
    round(d_v, problem.forward().dropout_factor(), of_values);
}

/// What is done to the pairs of a block.
struct OfPairs<'a> {
    /// ALiBi.
    alibi: Option<Bias>,
    /// The first key of the block.
    first_key: usize,
    /// The additive bias of each pair. Empty where there is none.
    biases: &'a [f32],
    /// Whether dS is multiplied by the cap's derivative. Without it dS is the gradient of a bias.
    capped: bool,
    /// Whether dropout drops a pair, `[queries, keys]`. Empty where it drops none.
    dropped: &'a [bool],
}

/// Computes dBias of some keys of the bias, into `scratch`: for each query, or the sum over the queries that share it. `shape` is that
/// of the bias. The sum is in the order of batch entries, heads and queries. Numbers that no sequence reaches get 0.
fn of_biases<T: Float>(
    problem: &BackwardProblem,
    inputs: &BackwardInputs<'_, T>,
    listed: Option<&Listed<'_>>,
    blocks: Blocks,
    (sequences, delta, shape): (&Sequences, &HostRef<'_, f32, 3>, [usize; 4]),
    task: &Task,
    scratch: &mut Scratch<T>,
) {
    let (dims, group) = (problem.dims(), problem.forward().group_size());
    let Scratch { q, k, v, d_o, rows, kept, p, d_s, biases, d_bias, dropped, .. } = scratch;
    d_bias.clear();
    d_bias.resize(shape[2] * task.tokens.len(), 0.0);
    let sharing = |size: usize, own: usize, all: usize| if size == 1 { 0..all } else { own..own + 1 };
    let heads = sharing(shape[1], task.head, dims.heads_q);
    for batch in sharing(shape[0], task.rows.batch, dims.batch) {
        let sequence = sequences.get(batch);
        let Sequence { q: of_queries, kv: of_keys } = sequence;
        let keys = task.tokens.start..task.tokens.end.min(of_keys.len);
        if keys.is_empty() {
            continue;
        }
        for head in heads.clone() {
            load(&inputs.k, &of_keys, head / group, keys.clone(), k);
            load(&inputs.v, &of_keys, head / group, keys.clone(), v);
            let alibi = Bias::of(problem.forward(), &inputs.alibi, &sequence, head);
            let drops = Drops::of(problem.forward(), inputs.dropout_state, &sequence, head);
            for first in (0..of_queries.len).step_by(blocks.walked) {
                let queries = first..of_queries.len.min(first + blocks.walked);
                let Some(pairs) = listed::pairs(listed, batch, head, first, task.tokens.start) else { continue };
                let lse = inputs.lse.part(&of_queries, head, queries.clone());
                let delta = delta.part(&of_queries, head, queries.clone());
                rows_of(problem, &sequence, queries.clone(), lse, delta, rows);
                let block = Block::new(rows.iter().map(|row| row.keys), keys.start, keys.len(), kept);
                if block.is_empty() {
                    continue;
                }
                load(&inputs.q, &of_queries, head, queries.clone(), q);
                load(&inputs.d_o, &of_queries, head, queries.clone(), d_o);
                inputs.bias.load([batch, head], queries.clone(), keys.clone(), biases);
                let block = block.of_pairs(pairs).with_bias(biases);
                Drops::pairs(drops.as_ref(), queries.clone(), keys.clone(), dropped);
                let of_pairs = OfPairs { alibi, first_key: keys.start, biases, capped: false, dropped };
                weights(problem, rows, &block, of_pairs, [q, k, v, d_o], p, d_s);
                for (query, d_s) in queries.zip(d_s.chunks_exact(keys.len())) {
                    let row = if shape[2] == 1 { 0 } else { query };
                    let sums = &mut d_bias[row * task.tokens.len()..][..task.tokens.len()];
                    sums.iter_mut().zip(d_s).for_each(|(sum, d_s)| *sum += d_s);
                }
            }
        }
    }
}

/// Computes `P = exp(softmax_scale * Q K^T - LSE)` and `dS = P * (dO V^T - delta)` of a block. Hidden pairs get 0. With a cap the
/// scores in P are capped, and dS is multiplied by the cap's derivative. With dropout `dO V^T` is 0 for dropped pairs, and
/// multiplied by the factor for others. P is that of all pairs.
fn weights(
    problem: &BackwardProblem,
    rows: &[Row],
    block: &Block<'_>,
    of_pairs: OfPairs<'_>,
    [q, k, v, d_o]: [&[f32]; 4],
    p: &mut Vec<f32>,
    d_s: &mut Vec<f32>,
) {
    let (dims, softcap) = (problem.dims(), problem.forward().softcap());
    let (queries, keys) = (rows.len(), k.len() / dims.head_dim_qk);
    for (scale, a, b, dim, out) in
        [(problem.softmax_scale(), q, k, dims.head_dim_qk, &mut *p), (1.0, d_o, v, dims.head_dim_vo, &mut *d_s)]
    {
        out.resize(queries * keys, 0.0);
        matmul(scale, Matrix::new(a, queries, dim), Matrix::new(b, keys, dim).transposed(), 0.0, out);
    }
    if !of_pairs.dropped.is_empty() {
        let factor = problem.forward().dropout_factor();
        d_s.iter_mut().for_each(|d_p| *d_p *= factor);
        zero(of_pairs.dropped, d_s);
    }
    let pairs = p.chunks_exact_mut(keys).zip(d_s.chunks_exact_mut(keys));
    for (((query, row), kept), (p, d_s)) in rows.iter().enumerate().zip(block.kept()).zip(pairs) {
        for out in [&mut *p, &mut *d_s] {
            out[..kept.start].fill(0.0);
            out[kept.end..].fill(0.0);
        }
        let (of_p, of_d_s) = (&mut p[kept.clone()], &mut d_s[kept.clone()]);
        // The derivative of a score with respect to the product that it is made of.
        of_d_s.iter_mut().for_each(|d_s| *d_s -= row.delta);
        if softcap != 0.0 {
            for (p, d_s) in of_p.iter_mut().zip(of_d_s.iter_mut()) {
                let (score, slope) = capped(softcap, *p);
                (*p, *d_s) = (score, if of_pairs.capped { *d_s * slope } else { *d_s });
            }
        }
        if !of_pairs.biases.is_empty() {
            additive::add(of_p, &of_pairs.biases[query * keys..][kept.clone()]);
        }
        if let Some(alibi) = of_pairs.alibi {
            alibi.subtract(row.query, of_pairs.first_key + kept.start, of_p);
        }
        for (p, d_s) in of_p.iter_mut().zip(of_d_s) {
            *p = (*p - row.lse).exp();
            *d_s *= *p;
        }
        block.hide(query, 0.0, p);
        block.hide(query, 0.0, d_s);
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Fills `out` with the sums times `scale`, rounded to the type.
fn round<T: Element>(sums: &[f32], scale: f32, out: &mut Vec<T>) {
    out.clear();
    out.extend(sums.iter().map(|sum| T::from_f32(scale * sum)));
}
