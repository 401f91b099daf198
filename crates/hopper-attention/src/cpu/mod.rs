//! The CPU backend: tiled attention and its gradients on all cores, for any strides and any head dim.
//!
//! A task is a block of tokens of one head. It walks the blocks of the other sequence that it shares pairs with, in
//! order and on one thread, so the same inputs give the same bits however many threads there are.

mod backward;
mod block;
mod fp8;
mod hadamard;
mod matmul;
mod quantize;
mod tile;

use std::ops::Range;

use rayon::prelude::*;

use crate::tensor::{HostMut, HostRef};
use crate::{Element, ForwardProblem, Operand, Result};

pub(crate) use backward::{BackwardInputs, BackwardOutputs, backward};
pub(crate) use fp8::{Fp8Inputs, Fp8Outputs, check_factors, forward as forward_fp8};
pub(crate) use quantize::{Factors, QuantizeTask, quantize};

/// Tokens in a task.
const BLOCK: usize = 64;
/// Tokens of the other sequence in a block that a task walks: with the scores they stay in the second-level cache.
const WALKED: usize = 256;
/// Tasks in flight for each thread: what is computed before it is copied out. Bounds the memory held by results.
const TASKS_PER_THREAD: usize = 16;

/// Q, K and V of a problem, in host memory.
pub(crate) struct Inputs<'a, T> {
    q: HostRef<'a, T, 4>,
    k: HostRef<'a, T, 4>,
    v: HostRef<'a, T, 4>,
}

/// Some neighbouring tokens of one head: queries of a query head, or keys of a key head.
struct Task {
    batch: usize,
    head: usize,
    tokens: Range<usize>,
}

/// Computes `problem` into `o` and `lse`; shapes and dtypes were checked by the caller.
pub(crate) fn forward<T: Operand>(
    problem: &ForwardProblem,
    q: HostRef<'_, T, 4>,
    k: HostRef<'_, T, 4>,
    v: HostRef<'_, T, 4>,
    mut o: HostMut<'_, T::Out, 4>,
    mut lse: Option<HostMut<'_, f32, 3>>,
) -> Result<()> {
    let dims = problem.dims();
    let inputs = Inputs { q, k, v };
    let compute = |scratch: &mut _, task: &Task| tile::forward::<T>(problem, &inputs, task, scratch);
    each_task(dims.batch, dims.heads_q, dims.seqlen_q, compute, |task, rows| {
        o.store(task, &rows.o);
        if let Some(lse) = &mut lse {
            lse.part_mut(task).copy_from_slice(&rows.lse);
        }
    });
    Ok(())
}

/// Cuts every head's tokens into tasks, computes them on all threads and hands the results on, in order and on this
/// thread.
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

/// Rows of a tensor as f32, without gaps.
fn load<T: Element>(tensor: &HostRef<'_, T, 4>, batch: usize, head: usize, tokens: Range<usize>, out: &mut Vec<f32>) {
    out.clear();
    for token in tokens {
        out.extend(tensor.row(batch, token, head).iter().map(|x| x.to_f32()));
    }
}

impl<T> HostRef<'_, T, 4> {
    /// The vector of one batch element, token and head.
    fn row(&self, batch: usize, seq: usize, head: usize) -> &[T] {
        let start = offset(self.layout.stride(), [batch, seq, head, 0]);
        &self.data[start..start + self.layout.shape()[3]]
    }
}

impl<T: Copy> HostMut<'_, T, 4> {
    /// Copies in a task's vectors, which lie without gaps.
    fn store(&mut self, task: &Task, rows: &[T]) {
        let [_, _, _, dim] = self.layout.shape();
        for (token, row) in task.tokens.clone().zip(rows.chunks_exact(dim)) {
            let start = offset(self.layout.stride(), [task.batch, token, task.head, 0]);
            self.data[start..start + dim].copy_from_slice(row);
        }
    }
}

impl HostRef<'_, f32, 3> {
    /// The numbers of some tokens of one head.
    fn part(&self, batch: usize, head: usize, tokens: Range<usize>) -> &[f32] {
        let start = offset(self.layout.stride(), [batch, head, tokens.start]);
        &self.data[start..start + tokens.len()]
    }
}

impl HostMut<'_, f32, 3> {
    /// The numbers of a task's tokens.
    fn part_mut(&mut self, task: &Task) -> &mut [f32] {
        let start = offset(self.layout.stride(), [task.batch, task.head, task.tokens.start]);
        &mut self.data[start..start + task.tokens.len()]
    }
}

/// The offset of an element within the layout's shape; a layout has checked that all of these fit, and has no
/// negative strides.
fn offset<const R: usize>(stride: [i64; R], index: [usize; R]) -> usize {
    index.iter().zip(stride).map(|(&i, step)| i * step as usize).sum()
}

#[cfg(test)]
mod tests;
