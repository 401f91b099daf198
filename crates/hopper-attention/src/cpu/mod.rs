//! The CPU backend: tiled attention and its gradients on all cores, for any strides and any head dim.
//!
//! A *task* is a block of tokens of one head: queries, or keys. A task visits those blocks of the other sequence that have an
//! unmasked pair with it. One thread visits them in order. So the same inputs give the same bits with any number of threads.

mod backward;
mod block;
mod fp8;
mod hadamard;
mod host;
mod matmul;
mod quantize;
mod tile;

use std::ops::Range;

use rayon::prelude::*;

use crate::dtype::{Element, Float};
use crate::problem::ForwardProblem;

pub(crate) use backward::{BackwardInputs, BackwardOutputs, backward};
pub(crate) use fp8::{Fp8Inputs, Fp8Outputs, check_factors, forward as forward_fp8};
pub(crate) use host::{HostMut, HostRef};
pub(crate) use quantize::{Factors, QuantizeTask, quantize};

/// Tokens in a task.
const BLOCK: usize = 64;
/// Tokens in a block of the other sequence. A block and the scores of a task with it stay in the second-level cache.
const WALKED: usize = 256;
/// Tasks for each thread whose results are held in memory before they are copied to the outputs. It bounds that memory.
const TASKS_PER_THREAD: usize = 16;

/// The tensors that a forward pass reads, in host memory.
pub(crate) struct Inputs<'a, T> {
    pub q: HostRef<'a, T, 4>,
    pub k: HostRef<'a, T, 4>,
    pub v: HostRef<'a, T, 4>,
}

/// The tensors that a forward pass writes, in host memory.
pub(crate) struct Outputs<'a, T> {
    pub o: HostMut<'a, T, 4>,
    pub lse: Option<HostMut<'a, f32, 3>>,
}

/// Neighbouring tokens of one head: queries of a query head, or keys of a key head.
struct Task {
    batch: usize,
    head: usize,
    tokens: Range<usize>,
}

/// Computes `problem` into the outputs. The caller has checked shapes and types.
pub(crate) fn forward<T: Float>(problem: &ForwardProblem, inputs: &Inputs<'_, T>, mut outputs: Outputs<'_, T>) {
    let dims = problem.dims();
    let compute = |scratch: &mut _, task: &Task| tile::forward::<T>(problem, inputs, task, scratch);
    each_task(dims.batch, dims.heads_q, dims.seqlen_q, compute, |task, rows| {
        outputs.o.store(task, &rows.o);
        if let Some(lse) = &mut outputs.lse {
            lse.store_part(task, &rows.lse);
        }
    });
}

/// Cuts the tokens of every head into tasks, and computes the tasks with `compute` on all threads. `take` gets the results, in
/// order and on this thread.
fn each_task<S: Default, R: Send>(
    batch: usize,
    heads: usize,
    seqlen: usize,
    compute: impl Fn(&mut S, &Task) -> R + Sync,
    mut take: impl FnMut(&Task, R),
) {
    let mut tasks = Vec::with_capacity(batch * heads * seqlen.div_ceil(BLOCK));
    for batch in 0..batch {
        for head in 0..heads {
            let firsts = (0..seqlen).step_by(BLOCK);
            tasks.extend(firsts.map(|first| Task { batch, head, tokens: first..seqlen.min(first + BLOCK) }));
        }
    }
    for tasks in tasks.chunks(TASKS_PER_THREAD * rayon::current_num_threads()) {
        let results: Vec<_> = tasks.par_iter().map_init(S::default, &compute).collect();
        tasks.iter().zip(results).for_each(|(task, result)| take(task, result));
    }
}

/// Copies the vectors of some tokens to `out`, as f32 and without gaps.
fn load<T: Element>(tensor: &HostRef<'_, T, 4>, batch: usize, head: usize, tokens: Range<usize>, out: &mut Vec<f32>) {
    out.clear();
    for token in tokens {
        out.extend(tensor.row(batch, token, head).iter().map(|x| x.to_f32()));
    }
}

#[cfg(test)]
mod tests;
