//! The CPU backend: tiled online softmax on all cores, for any strides and any head dim.
//!
//! A task is a block of queries of one head. It walks the blocks of keys that its rows keep, in order and on one
//! thread, so the same inputs give the same bits however many threads there are.

mod matmul;
mod tile;

use rayon::prelude::*;

use crate::tensor::{HostMut, HostRef};
use crate::{ForwardProblem, Operand, Result};
use tile::{Scratch, Task};

/// Queries in a task.
const BLOCK_Q: usize = 64;
/// Tasks in flight for each thread: what is computed before it is copied out. Bounds the memory held by results.
const TASKS_PER_THREAD: usize = 16;

/// Q, K and V of a problem, in host memory.
pub(crate) struct Inputs<'a, T> {
    q: HostRef<'a, T, 4>,
    k: HostRef<'a, T, 4>,
    v: HostRef<'a, T, 4>,
}

/// Computes `problem` into `o` and `lse`; shapes and dtypes were checked by the caller.
pub(crate) fn forward<T: Operand>(
    problem: &ForwardProblem,
    q: HostRef<'_, T, 4>,
    k: HostRef<'_, T, 4>,
    v: HostRef<'_, T, 4>,
    o: HostMut<'_, T::Out, 4>,
    mut lse: Option<HostMut<'_, f32, 3>>,
) -> Result<()> {
    let dims = problem.dims();
    let inputs = Inputs { q, k, v };
    let mut tasks = Vec::with_capacity(dims.batch * dims.heads_q * dims.seqlen_q.div_ceil(BLOCK_Q));
    for batch in 0..dims.batch {
        for head in 0..dims.heads_q {
            for first in (0..dims.seqlen_q).step_by(BLOCK_Q) {
                tasks.push(Task { batch, head, first, queries: BLOCK_Q.min(dims.seqlen_q - first) });
            }
        }
    }
    for tasks in tasks.chunks(TASKS_PER_THREAD * rayon::current_num_threads()) {
        let results: Vec<_> = tasks
            .par_iter()
            .map_init(Scratch::default, |scratch, task| tile::forward::<T>(problem, &inputs, task, scratch))
            .collect();
        for (task, rows) in tasks.iter().zip(results) {
            for i in 0..task.queries {
                let row = &rows.o[i * dims.head_dim_vo..][..dims.head_dim_vo];
                let start = offset(o.layout.stride(), [task.batch, task.first + i, task.head, 0]);
                o.data[start..start + row.len()].copy_from_slice(row);
                if let Some(lse) = &mut lse {
                    lse.data[offset(lse.layout.stride(), [task.batch, task.head, task.first + i])] = rows.lse[i];
                }
            }
        }
    }
    Ok(())
}

impl<T> HostRef<'_, T, 4> {
    /// The vector of one batch element, token and head.
    fn row(&self, batch: usize, seq: usize, head: usize) -> &[T] {
        let start = offset(self.layout.stride(), [batch, seq, head, 0]);
        &self.data[start..start + self.layout.shape()[3]]
    }
}

/// The offset of an element within the layout's shape; a layout has checked that all of these fit, and has no
/// negative strides.
fn offset<const R: usize>(stride: [i64; R], index: [usize; R]) -> usize {
    index.iter().zip(stride).map(|(&i, step)| i * step as usize).sum()
}

#[cfg(test)]
mod tests;
