//! The CPU backend: tiled attention and its gradients on all cores, for any strides and any head dim.
//!
//! A *task* is a block of tokens of one head: queries, or keys. A task visits those blocks of the other sequence that have an
//! unmasked pair with it. One thread visits them in order. So the same inputs give the same bits with any number of threads.

mod additive;
mod alibi;
mod backward;
mod block;
mod dropout;
mod fp8;
mod hadamard;
mod host;
mod listed;
mod matmul;
mod memory;
mod quantize;
mod sequences;
mod sinks;
mod softcap;
mod tasks;
mod threads;
mod tile;

use std::ops::Range;

use crate::dtype::{Element, Float};
use crate::error::Result;
use crate::problem::{Dims, ForwardProblem};
use crate::sequences::{Lengths, SequenceRows, Side};
use listed::Listed;
use memory::reserved;
use tasks::{Task, Tasks, Team};

pub(crate) use additive::{Additive, AdditiveMut};
pub(crate) use alibi::Slopes;
pub(crate) use backward::{BackwardInputs, BackwardOutputs, backward};
pub(crate) use fp8::{Fp8Inputs, Fp8Outputs, check_factors, forward as forward_fp8};
pub(crate) use host::{HostMut, HostRef};
pub(crate) use listed::ListInputs;
pub(crate) use quantize::{Factors, QuantizeTask, quantize};
pub(crate) use sequences::Sequences;
pub(crate) use sinks::Sinks;

/// Tokens in a task, where the head dim is not large.
const BLOCK: usize = 64;
/// Tokens in a block of the other sequence, where the head dim is not large. A block and the scores of a task with it stay in
/// the second-level cache.
const WALKED: usize = 256;

/// The tensors that a forward pass reads, in host memory. Packed tensors have a batch of 1, here and in the other passes.
pub(crate) struct Inputs<'a, T> {
    pub q: HostRef<'a, T, 4>,
    pub k: HostRef<'a, T, 4>,
    pub v: HostRef<'a, T, 4>,
    pub lengths: Lengths<'a>,
    pub sinks: Sinks<'a>,
    pub bias: Additive<'a>,
    pub alibi: Slopes<'a>,
    pub lists: Option<ListInputs<'a>>,
    /// The words of the seed and the offset of dropout.
    pub dropout_state: Option<[i32; 4]>,
}

/// The tensors that a forward pass writes, in host memory.
pub(crate) struct Outputs<'a, T> {
    pub o: HostMut<'a, T, 4>,
    pub lse: Option<HostMut<'a, f32, 3>>,
    pub max_logits: Option<HostMut<'a, f32, 1>>,
}

/// How the sequences of a problem are cut.
#[derive(Clone, Copy, Debug)]
struct Blocks {
    /// Tokens in a task.
    tokens: usize,
    /// Tokens in a block of the other sequence.
    walked: usize,
}

impl Blocks {
    /// `walked` is the size of a block where the head dims are not large. Both sizes are powers of two.
    fn of(dims: Dims, walked: usize) -> Self {
        let fitting = |most| tasks::tokens(most, dims.head_dim_qk.max(dims.head_dim_vo));
        Self { tokens: fitting(BLOCK), walked: fitting(walked) }
    }
}

/// Computes `problem` into the outputs. The caller has checked shapes and types.
///
/// # Errors
/// Before an output is written:
/// - [`Error::Value`](crate::Error::Value) for offsets, used lengths and lists of blocks that are wrong.
/// - [`Error::Memory`](crate::Error::Memory) and [`Error::Threads`](crate::Error::Threads).
pub(crate) fn forward<T: Float>(
    problem: &ForwardProblem,
    inputs: &Inputs<'_, T>,
    mut outputs: Outputs<'_, T>,
) -> Result<()> {
    let (dims, blocks) = (problem.dims(), Blocks::of(problem.dims(), listed::walked(problem, WALKED)));
    let sequences = Sequences::new(problem, &inputs.lengths)?;
    let listed = Listed::new(problem, inputs.lists.as_ref())?;
    let tasks = Tasks::new(&sequences, Side::Q, dims.heads_q, blocks.tokens)?;
    let mut team = Team::new(tasks.count(), || tile::Scratch::new(problem, blocks))?;
    let mut max_logits = reserved(if outputs.max_logits.is_some() { dims.heads_q } else { 0 })?;
    matmul::check_memory(team.threads())?;
    if outputs.max_logits.is_some() {
        max_logits.resize(dims.heads_q, f32::NEG_INFINITY);
    }
    let compute = |scratch: &mut tile::Scratch<T>, task: &Task| {
        tile::forward(problem, inputs, listed.as_ref(), blocks, task, scratch);
    };
    team.each(&tasks, compute, |task, scratch| {
        outputs.o.store(task, &scratch.o);
        if let Some(lse) = &mut outputs.lse {
            lse.store_part(task, &scratch.lse);
        }
        if let Some(largest) = max_logits.get_mut(task.head) {
            *largest = scratch.max_logit.max(*largest);
        }
    })?;
    if let Some(out) = &mut outputs.max_logits {
        max_logits.iter().enumerate().for_each(|(head, &largest)| out.set([head], largest));
    }
    if problem.fills_gaps() {
        fill_gaps(&sequences, Side::Q, &mut outputs.o);
        fill_lse_gaps(&sequences, outputs.lse.as_mut());
    }
    Ok(())
}

/// Writes zeros to the rows of an output that no sequence has.
fn fill_gaps<T: Element>(sequences: &Sequences, side: Side, output: &mut HostMut<'_, T, 4>) {
    sequences.each_gap(side, |batch, rows| output.fill_rows(batch, rows, T::from_f32(0.0)));
}

/// Writes -inf to the LSE of the queries that no sequence has.
fn fill_lse_gaps(sequences: &Sequences, lse: Option<&mut HostMut<'_, f32, 3>>) {
    if let Some(lse) = lse {
        sequences.each_gap(Side::Q, |batch, rows| lse.fill_parts(batch, rows, f32::NEG_INFINITY));
    }
}

/// Copies the vectors of some tokens of a sequence to `out`, as f32 and without gaps. `out` is large enough.
fn load<T: Element>(
    tensor: &HostRef<'_, T, 4>,
    of: &SequenceRows,
    head: usize,
    tokens: Range<usize>,
    out: &mut Vec<f32>,
) {
    out.clear();
    for token in tokens {
        out.extend(tensor.row(of.batch, of.begin + token, head).iter().map(|x| x.to_f32()));
    }
}

#[cfg(test)]
mod tests;
