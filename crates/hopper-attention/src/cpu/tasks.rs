//! How work is cut into tasks, and how tasks are computed on all threads.
//!
//! Everything that a run allocates is allocated before its first task, so that a run without enough memory fails with its
//! outputs untouched.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

use super::memory::reserved;
use super::sequences::{Sequence, Sequences};
use super::threads;
use crate::error::Result;
use crate::sequences::{SequenceRows, Side};

/// Neighbouring tokens of one head of a sequence: queries of a query head, or keys of a KV head.
pub(super) struct Task {
    pub sequence: Sequence,
    /// The rows of the sequence on the side of the tokens.
    pub rows: SequenceRows,
    pub head: usize,
    /// The tokens, counted from the first row of the sequence.
    pub tokens: Range<usize>,
}

/// The tasks of a pass: the tokens of every head of every sequence, cut into blocks.
pub(super) struct Tasks<'a> {
    sequences: &'a Sequences,
    /// The side of the tokens.
    side: Side,
    heads: usize,
    /// Tokens in a task. The last task of a head of a sequence may have fewer.
    tokens: usize,
    count: usize,
    /// Where sequences differ: for each sequence the number of its first task.
    first: Vec<usize>,
}

impl<'a> Tasks<'a> {
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn new(sequences: &'a Sequences, side: Side, heads: usize, tokens: usize) -> Result<Self> {
        let mut tasks = Self { sequences, side, heads, tokens, count: 0, first: Vec::new() };
        let batch = sequences.count();
        if !sequences.differ() {
            tasks.count = if batch == 0 { 0 } else { batch * tasks.of_sequence(&sequences.get(0)) };
            return Ok(tasks);
        }
        tasks.first = reserved(batch)?;
        for number in 0..batch {
            tasks.first.push(tasks.count);
            tasks.count += tasks.of_sequence(&sequences.get(number));
        }
        Ok(tasks)
    }

    /// The number of tasks.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Tasks of one sequence.
    fn of_sequence(&self, sequence: &Sequence) -> usize {
        self.heads * sequence.side(self.side).len.div_ceil(self.tokens)
    }

    /// The task with this number. `None` after the last one.
    fn get(&self, number: usize) -> Option<Task> {
        if number >= self.count {
            return None;
        }
        let (of, number) = if self.sequences.differ() {
            // The last sequence that begins here or before. Those without a task begin where the next one does.
            let of = self.first.partition_point(|&first| first <= number) - 1;
            (of, number - self.first[of])
        } else {
            let each = self.count / self.sequences.count();
            (number / each, number % each)
        };
        let sequence = self.sequences.get(of);
        let rows = sequence.side(self.side);
        let blocks = rows.len.div_ceil(self.tokens);
        let first = number % blocks * self.tokens;
        Some(Task { sequence, rows, head: number / blocks, tokens: first..rows.len.min(first + self.tokens) })
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
        tasks: &Tasks<'_>,
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
impl Task {
    /// Some queries of a sequence of `len` queries and no keys, which has a batch element to itself.
    pub fn of_padded(number: usize, len: usize, head: usize, tokens: Range<usize>) -> Self {
        let rows = SequenceRows::padded(number, len);
        Self { sequence: Sequence { q: rows, kv: SequenceRows::padded(number, 0) }, rows, head, tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::problem::{Dims, ForwardProblem};
    use crate::sequences::Lengths;

    /// As many sequences of `len` queries.
    fn padded(batch: usize, len: usize) -> Sequences {
        let problem = ForwardProblem::builder(DType::F32, Dims::new(batch, len, 1, 1)).build().unwrap();
        Sequences::new(&problem, &Lengths::default()).unwrap()
    }

    #[test]
    fn tasks_cover_every_token_once() {
        let sequences = padded(2, 10);
        let tasks = Tasks::new(&sequences, Side::Q, 3, 4).unwrap();
        let mut seen = [0; 60];
        let mut count = 0;
        while let Some(Task { rows, head, tokens, .. }) = tasks.get(count) {
            tokens.for_each(|token| seen[(rows.batch * 3 + head) * 10 + token] += 1);
            count += 1;
        }
        assert_eq!((count, seen), (tasks.count(), [1; 60]));
        assert_eq!(Tasks::new(&padded(2, 0), Side::Q, 3, 4).unwrap().count(), 0);
        assert_eq!(Tasks::new(&padded(0, 10), Side::Q, 3, 4).unwrap().count(), 0);
    }

    #[test]
    fn tasks_cover_packed_tokens_once() {
        let dims = Dims::new(7, 20, 1, 1);
        let problem = ForwardProblem::builder(DType::F32, dims).packed_q(true).build().unwrap();
        // Empty sequences first, last and in between, and gaps at both ends.
        let lengths = Lengths { cu_seqlens_q: Some(&[2, 2, 7, 7, 7, 11, 19, 19]), ..Lengths::default() };
        let sequences = Sequences::new(&problem, &lengths).unwrap();
        let tasks = Tasks::new(&sequences, Side::Q, 2, 4).unwrap();
        let mut seen = [[0; 20]; 2];
        let mut count = 0;
        while let Some(task) = tasks.get(count) {
            assert!(!task.tokens.is_empty() && task.tokens.len() <= 4 && task.rows == task.sequence.q);
            task.tokens.for_each(|token| seen[task.head][task.rows.begin + token] += 1);
            count += 1;
        }
        let mut want = [1; 20];
        [0, 1, 19].into_iter().for_each(|gap: usize| want[gap] = 0);
        assert_eq!((count, tasks.count(), seen), (10, 10, [want; 2]));
    }

    #[test]
    fn every_task_is_taken_once() {
        let sequences = padded(3, 7);
        let tasks = Tasks::new(&sequences, Side::Q, 5, 2).unwrap();
        let mut team = Team::new(tasks.count(), || Ok(0)).unwrap();
        assert!((1..=tasks.count()).contains(&team.threads()));
        let mut sum = 0;
        team.each(&tasks, |scratch, task| *scratch = task.tokens.len(), |_, tokens| sum += tokens).unwrap();
        assert_eq!(sum, 3 * 5 * 7);
    }

    #[test]
    fn one_task_is_computed_by_the_caller() {
        let sequences = padded(1, 4);
        let tasks = Tasks::new(&sequences, Side::Q, 1, 4).unwrap();
        let mut team = Team::new(tasks.count(), || Ok(None)).unwrap();
        let mut by = None;
        team.each(&tasks, |thread, _| *thread = Some(std::thread::current().id()), |_, thread| by = *thread).unwrap();
        assert_eq!((team.threads(), by), (1, Some(std::thread::current().id())));
    }

    #[test]
    fn blocks_are_smaller_where_tokens_are_long() {
        let sizes = [1, 128, 4096, 5000, 1 << 20, usize::MAX].map(|head_dim| tokens(256, head_dim));
        assert_eq!(sizes, [256, 256, 256, 128, 1, 1]);
    }
}
