//! The gradients, in two passes over the same pairs of queries and keys.
//!
//! 1. Tasks are blocks of queries. A task computes dQ, and delta of each query.
//! 2. Tasks are blocks of keys. A task computes dK and dV, summed over the query heads that read the key head.
//!
//! Both passes compute P from Q, K and the LSE. This makes seven matrix products, where a single pass would make five. In
//! return every sum belongs to one task. So there are no atomic additions, every run gives the same bits, and all cores have
//! work even with few key heads.

use std::ops::Range;

use super::block::{self, Block, Keys};
use super::matmul::{Matrix, matmul};
use super::{HostMut, HostRef, Task, WALKED, each_task, load};
use crate::dtype::{Element, Float};
use crate::error::Result;
use crate::layout::Layout;
use crate::problem::BackwardProblem;

/// The tensors that a backward pass reads, in host memory.
pub(crate) struct BackwardInputs<'a, T> {
    pub q: HostRef<'a, T, 4>,
    pub k: HostRef<'a, T, 4>,
    pub v: HostRef<'a, T, 4>,
    pub o: HostRef<'a, T, 4>,
    pub lse: HostRef<'a, f32, 3>,
    pub d_o: HostRef<'a, T, 4>,
    pub d_lse: Option<HostRef<'a, f32, 3>>,
}

/// The tensors that a backward pass writes, in host memory.
pub(crate) struct BackwardOutputs<'a, T> {
    pub d_q: HostMut<'a, T, 4>,
    pub d_k: HostMut<'a, T, 4>,
    pub d_v: HostMut<'a, T, 4>,
}

/// Computes `problem` into the outputs. The caller has checked shapes and types.
pub(crate) fn backward<T: Float>(
    problem: &BackwardProblem,
    inputs: &BackwardInputs<'_, T>,
    mut outputs: BackwardOutputs<'_, T>,
) -> Result<()> {
    let dims = problem.dims();
    let layout = Layout::contiguous(problem.d_lse_shape())?;
    let mut delta = vec![0.0; layout.span()];
    let mut of_rows = HostMut::of(&mut delta, layout);
    let compute = |scratch: &mut _, task: &Task| of_queries(problem, inputs, task, scratch);
    each_task(dims.batch, dims.heads_q, dims.seqlen_q, compute, |task, queries| {
        outputs.d_q.store(task, &queries.d_q);
        of_rows.store_part(task, &queries.delta);
    });

    let delta = HostRef::of(&delta, layout);
    let compute = |scratch: &mut _, task: &Task| of_keys(problem, inputs, &delta, task, scratch);
    each_task(dims.batch, dims.heads_kv, dims.seqlen_kv, compute, |task, keys| {
        outputs.d_k.store(task, &keys.d_k);
        outputs.d_v.store(task, &keys.d_v);
    });
    Ok(())
}

/// The results of a task of queries.
struct OfQueries<T> {
    d_q: Vec<T>,
    delta: Vec<f32>,
}

/// The results of a task of keys.
struct OfKeys<T> {
    d_k: Vec<T>,
    d_v: Vec<T>,
}

/// Buffers that a thread uses again for its next task.
#[derive(Default)]
struct Scratch {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    o: Vec<f32>,
    d_o: Vec<f32>,
    rows: Vec<Row>,
    kept: Vec<Range<usize>>,
    /// P, `[queries, keys]`.
    p: Vec<f32>,
    /// dP, then dS, `[queries, keys]`.
    d_s: Vec<f32>,
    /// The gradients as sums. dQ and dK are not yet multiplied by the softmax scale.
    d_q: Vec<f32>,
    d_k: Vec<f32>,
    d_v: Vec<f32>,
}

/// What all pairs of one query share.
struct Row {
    /// The keys that the query keeps.
    keys: Keys,
    lse: f32,
    delta: f32,
}

/// Fills `rows` for some queries. A query with LSE -inf has no part in any gradient, so it counts as one that keeps no key.
fn rows_of(problem: &BackwardProblem, queries: Range<usize>, lse: &[f32], delta: &[f32], rows: &mut Vec<Row>) {
    let dims = problem.dims();
    let band = problem.mask().band(dims.seqlen_q, dims.seqlen_kv);
    rows.clear();
    rows.extend(queries.zip(lse.iter().zip(delta)).map(|(query, (&lse, &delta))| {
        let keys = if lse == f32::NEG_INFINITY { (0, 0) } else { block::kept(&band, query, dims.seqlen_kv) };
        Row { keys, lse, delta }
    }));
}

/// dQ and delta of some queries.
fn of_queries<T: Float>(
    problem: &BackwardProblem,
    inputs: &BackwardInputs<'_, T>,
    task: &Task,
    scratch: &mut Scratch,
) -> OfQueries<T> {
    let dims = problem.dims();
    let head_kv = task.head / problem.forward().group_size();
    let Scratch { q, k, v, o, d_o, rows, kept, p, d_s, d_q, .. } = scratch;
    for (tensor, out) in [(&inputs.q, &mut *q), (&inputs.o, &mut *o), (&inputs.d_o, &mut *d_o)] {
        load(tensor, task.batch, task.head, task.tokens.clone(), out);
    }
    // delta is `rowsum(dO * O) - dLSE`. The derivative of the LSE with respect to a score is P, so dLSE adds `P * dLSE` to dS.
    let mut delta: Vec<f32> =
        o.chunks_exact(dims.head_dim_vo).zip(d_o.chunks_exact(dims.head_dim_vo)).map(|(o, d_o)| dot(o, d_o)).collect();
    if let Some(d_lse) = &inputs.d_lse {
        let d_lse = d_lse.part(task.batch, task.head, task.tokens.clone());
        delta.iter_mut().zip(d_lse).for_each(|(delta, d_lse)| *delta -= d_lse);
    }
    let lse = inputs.lse.part(task.batch, task.head, task.tokens.clone());
    rows_of(problem, task.tokens.clone(), lse, &delta, rows);

    d_q.clear();
    d_q.resize(q.len(), 0.0);
    let (start, end) = block::reach(rows.iter().map(|row| row.keys));
    for first in (start..end).step_by(WALKED) {
        let keys = first..end.min(first + WALKED);
        load(&inputs.k, task.batch, head_kv, keys.clone(), k);
        load(&inputs.v, task.batch, head_kv, keys.clone(), v);
        let block = Block::new(rows.iter().map(|row| row.keys), first, keys.len(), kept);
        weights(problem, rows, &block, [q, k, v, d_o], p, d_s);
        block.sum_over_keys(d_s, k, dims.head_dim_qk, d_q);
    }
    OfQueries { d_q: rounded(d_q, problem.softmax_scale()), delta }
}

/// dK and dV of some keys.
fn of_keys<T: Float>(
    problem: &BackwardProblem,
    inputs: &BackwardInputs<'_, T>,
    delta: &HostRef<'_, f32, 3>,
    task: &Task,
    scratch: &mut Scratch,
) -> OfKeys<T> {
    let dims = problem.dims();
    let group = problem.forward().group_size();
    let Scratch { q, k, v, d_o, rows, kept, p, d_s, d_k, d_v, .. } = scratch;
    load(&inputs.k, task.batch, task.head, task.tokens.clone(), k);
    load(&inputs.v, task.batch, task.head, task.tokens.clone(), v);
    for (sums, like) in [(&mut *d_k, &*k), (&mut *d_v, &*v)] {
        sums.clear();
        sums.resize(like.len(), 0.0);
    }
    for head in task.head * group..(task.head + 1) * group {
        for first in (0..dims.seqlen_q).step_by(WALKED) {
            let queries = first..dims.seqlen_q.min(first + WALKED);
            let lse = inputs.lse.part(task.batch, head, queries.clone());
            let delta = delta.part(task.batch, head, queries.clone());
            rows_of(problem, queries.clone(), lse, delta, rows);
            let block = Block::new(rows.iter().map(|row| row.keys), task.tokens.start, task.tokens.len(), kept);
            if block.is_empty() {
                continue;
            }
            load(&inputs.q, task.batch, head, queries.clone(), q);
            load(&inputs.d_o, task.batch, head, queries, d_o);
            weights(problem, rows, &block, [q, k, v, d_o], p, d_s);
            block.sum_over_queries(p, d_o, dims.head_dim_vo, d_v);
            block.sum_over_queries(d_s, q, dims.head_dim_qk, d_k);
        }
    }
    OfKeys { d_k: rounded(d_k, problem.softmax_scale()), d_v: rounded(d_v, 1.0) }
}

/// Computes `P = exp(softmax_scale * Q K^T - LSE)` and `dS = P * (dO V^T - delta)` of a block. Masked pairs get 0.
fn weights(
    problem: &BackwardProblem,
    rows: &[Row],
    block: &Block<'_>,
    [q, k, v, d_o]: [&[f32]; 4],
    p: &mut Vec<f32>,
    d_s: &mut Vec<f32>,
) {
    let dims = problem.dims();
    let (queries, keys) = (rows.len(), k.len() / dims.head_dim_qk);
    for (scale, a, b, dim, out) in
        [(problem.softmax_scale(), q, k, dims.head_dim_qk, &mut *p), (1.0, d_o, v, dims.head_dim_vo, &mut *d_s)]
    {
        out.resize(queries * keys, 0.0);
        matmul(scale, Matrix::new(a, queries, dim), Matrix::new(b, keys, dim).transposed(), 0.0, out);
    }
    let pairs = p.chunks_exact_mut(keys).zip(d_s.chunks_exact_mut(keys));
    for ((row, kept), (p, d_s)) in rows.iter().zip(block.kept()).zip(pairs) {
        for out in [&mut *p, &mut *d_s] {
            out[..kept.start].fill(0.0);
            out[kept.end..].fill(0.0);
        }
        for (p, d_s) in p[kept.clone()].iter_mut().zip(&mut d_s[kept.clone()]) {
            *p = (*p - row.lse).exp();
            *d_s = *p * (*d_s - row.delta);
        }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The sums times `scale`, rounded to the type.
fn rounded<T: Element>(sums: &[f32], scale: f32) -> Vec<T> {
    sums.iter().map(|sum| T::from_f32(scale * sum)).collect()
}
