//! How work is cut into tasks, and how tasks are computed on all threads.
//!
//! Everything that a run allocates is allocated before its first task, so that a run without enough memory fails with its
//! outputs untouched.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

use super::memory::reserved;
use super::threads;
use crate::error::Result;

/// Neighbouring tokens of one head: queries of a query head, or keys of a KV head.
pub(super) struct Task {
    pub batch: usize,
    pub head: usize,
    pub tokens: Range<usize>,
}

/// The tasks of a pass: the tokens of every head, cut into blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tasks {
    pub batch: usize,
    pub heads: usize,
    pub seqlen: usize,
    /// Tokens in a task. The last task of a head may have fewer.
    pub tokens: usize,
}

impl Tasks {
    /// The number of tasks.
    pub fn count(&self) -> usize {
        self.batch * self.heads * self.blocks()
    }

    /// Tasks of one head.
    fn blocks(&self) -> usize {
        self.seqlen.div_ceil(self.tokens)
    }

    /// The task with this number. `None` after the last one.
    fn get(&self, number: usize) -> Option<Task> {
        if number >= self.count() {
            return None;
        }
        let (head, first) = (number / self.blocks(), number % self.blocks() * self.tokens);
        let tokens = first..self.seqlen.min(first + self.tokens);
        Some(Task { batch: head / self.heads, head: head % self.heads, tokens })
    }
}

/// The buffers of all threads that compute: one `S` for each.
pub(super) struct Team<S> {
    scratch: Vec<S>,
}

impl<S: Send> Team<S> {
    /// Makes buffers with `make` for each thread that gets a task. `tasks` is the largest number of tasks of a call of
    /// [`each`](Self::each). For 0 tasks nothing is made. For less than 2 no thread is started.
    pub fn new(tasks: usize, make: impl Fn() -> Result<S>) -> Result<Self> {
        let threads = if tasks < 2 { tasks } else { threads::count()?.min(tasks) };
        let mut scratch = reserved(threads)?;
        for _ in 0..threads {
            scratch.push(make()?);
        }
        Ok(Self { scratch })
    }

    /// The number of threads that compute.
    pub fn threads(&self) -> usize {
        self.scratch.len()
    }

    /// Computes tasks with `compute` on all threads, or on the calling thread if there are buffers for one only. `take` then gets
    /// each task and the buffers with its results, in any order and one after the other.
    pub fn each(
        &mut self,
        tasks: Tasks,
        compute: impl Fn(&mut S, &Task) + Sync,
        take: impl FnMut(&Task, &S) + Send,
    ) -> Result<()> {
        if tasks.count() == 0 {
            return Ok(());
        }
        let next = AtomicUsize::new(0);
        let take = Mutex::new(take);
        let some = |scratch: &mut S| {
            while let Some(task) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
                compute(scratch, &task);
                let mut take = take.lock().unwrap_or_else(PoisonError::into_inner);
                take(&task, scratch);
            }
        };
        // One task takes less time than waking another thread, where it is small.
        if let [scratch] = self.scratch.as_mut_slice() {
            some(scratch);
            return Ok(());
        }
        threads::install(|| self.scratch.par_iter_mut().with_max_len(1).for_each(some))
    }
}

/// Elements in a buffer for a block of tokens, at most, unless a single token has more. It bounds the memory of a thread
/// where the head dim is large.
const BLOCK_ELEMENTS: usize = 1 << 20;

/// The number of tokens in a block: `most`, or a smaller power of two where the head dim is large.
pub(super) fn tokens(most: usize, head_dim: usize) -> usize {
    let fit = (BLOCK_ELEMENTS / head_dim).max(1);
    most.min(1 << fit.ilog2())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_cover_every_token_once() {
        let tasks = Tasks { batch: 2, heads: 3, seqlen: 10, tokens: 4 };
        let mut seen = [0; 60];
        let mut count = 0;
        while let Some(Task { batch, head, tokens }) = tasks.get(count) {
            tokens.for_each(|token| seen[(batch * 3 + head) * 10 + token] += 1);
            count += 1;
        }
        assert_eq!((count, seen), (tasks.count(), [1; 60]));
        assert_eq!(Tasks { seqlen: 0, ..tasks }.count(), 0);
    }

    #[test]
    fn every_task_is_taken_once() {
        let tasks = Tasks { batch: 3, heads: 5, seqlen: 7, tokens: 2 };
        let mut team = Team::new(tasks.count(), || Ok(0)).unwrap();
        assert!((1..=tasks.count()).contains(&team.threads()));
        let mut sum = 0;
        team.each(tasks, |scratch, task| *scratch = task.tokens.len(), |_, tokens| sum += tokens).unwrap();
        assert_eq!(sum, 3 * 5 * 7);
    }

    #[test]
    fn one_task_is_computed_by_the_caller() {
        let tasks = Tasks { batch: 1, heads: 1, seqlen: 4, tokens: 4 };
        let mut team = Team::new(tasks.count(), || Ok(None)).unwrap();
        let mut by = None;
        team.each(tasks, |thread, _| *thread = Some(std::thread::current().id()), |_, thread| by = *thread).unwrap();
        assert_eq!((team.threads(), by), (1, Some(std::thread::current().id())));
    }

    #[test]
    fn blocks_are_smaller_where_tokens_are_long() {
        let sizes = [1, 128, 4096, 5000, 1 << 20, usize::MAX].map(|head_dim| tokens(256, head_dim));
        assert_eq!(sizes, [256, 256, 256, 128, 1, 1]);
    }
}
