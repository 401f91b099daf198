//! The additive bias: a number for each pair, which is added to its score after the cap. -inf hides the pair.

use std::ops::Range;

use super::{BLOCK, HostMut, HostRef, Task};
use crate::dtype::{Element, bf16, f16};

/// The bias of a problem, `[batch, heads_q, seqlen_q, seqlen_kv]`. A dimension of 1 is shared.
#[derive(Clone, Copy)]
pub(crate) enum Additive<'a> {
    /// There is none.
    None,
    /// In f32.
    F32(HostRef<'a, f32, 4>),
    /// In bf16.
    Bf16(HostRef<'a, bf16, 4>),
    /// In f16.
    F16(HostRef<'a, f16, 4>),
}

impl Additive<'_> {
    /// Fills `out` with the biases of some queries and neighbouring keys of a head: `[queries, keys]`. Without a bias it becomes empty.
    pub fn load(&self, [batch, head]: [usize; 2], queries: Range<usize>, keys: Range<usize>, out: &mut Vec<f32>) {
        out.clear();
        match self {
            Self::None => {}
            Self::F32(bias) => load(bias, [batch, head], queries, keys, out),
            Self::Bf16(bias) => load(bias, [batch, head], queries, keys, out),
            Self::F16(bias) => load(bias, [batch, head], queries, keys, out),
        }
    }
}

fn load<T: Element>(
    bias: &HostRef<'_, T, 4>,
    [batch, head]: [usize; 2],
    queries: Range<usize>,
    keys: Range<usize>,
    out: &mut Vec<f32>,
) {
    let [batches, heads, rows, _] = bias.layout().shape();
    let own = |size: usize, index: usize| if size == 1 { 0 } else { index };
    for query in queries {
        let place = [own(batches, batch), own(heads, head), own(rows, query)];
        out.extend(bias.part_of_list(place, keys.start, keys.len()).iter().map(|x| x.to_f32()));
    }
}

/// Adds biases to scores. Those of -inf may make a NaN, of a pair that is then hidden.
pub(super) fn add(scores: &mut [f32], biases: &[f32]) {
    scores.iter_mut().zip(biases).for_each(|(score, bias)| *score += bias);
}

/// The gradient of a bias, in its shape and type.
pub(crate) enum AdditiveMut<'a> {
    /// In f32.
    F32(HostMut<'a, f32, 4>),
    /// In bf16.
    Bf16(HostMut<'a, bf16, 4>),
    /// In f16.
    F16(HostMut<'a, f16, 4>),
}

impl AdditiveMut<'_> {
    /// The shape.
    pub fn shape(&self) -> [usize; 4] {
        match self {
            Self::F32(out) => out.layout().shape(),
            Self::Bf16(out) => out.layout().shape(),
            Self::F16(out) => out.layout().shape(),
        }
    }

    /// Writes the sums of a task's keys, `[queries of the shape, keys of the task]`, rounded to the type. The batch and the head of the
    /// task are those of the shape.
    pub(super) fn store(&mut self, task: &Task, sums: &[f32]) {
        match self {
            Self::F32(out) => store(out, task, sums),
            Self::Bf16(out) => store(out, task, sums),
            Self::F16(out) => store(out, task, sums),
        }
    }
}

fn store<T: Element>(out: &mut HostMut<'_, T, 4>, task: &Task, sums: &[f32]) {
    let mut rounded = [T::default(); BLOCK];
    for (row, sums) in sums.chunks_exact(task.tokens.len()).enumerate() {
        let rounded = &mut rounded[..sums.len()];
        rounded.iter_mut().zip(sums).for_each(|(out, &sum)| *out = T::from_f32(sum));
        out.write([task.rows.batch, task.head, row, task.tokens.start], rounded);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;

    #[test]
    fn a_dimension_of_one_is_shared() {
        let numbers: Vec<f32> = (0..2 * 3 * 2 * 4).map(|x| x as f32).collect();
        let read = |shape: [usize; 4], place, queries, keys| {
            let mut out = vec![9.0];
            let bias = HostRef::of(&numbers, Layout::contiguous(shape).unwrap());
            Additive::F32(bias).load(place, queries, keys, &mut out);
            out
        };
        assert_eq!(read([2, 3, 2, 4], [1, 2], 0..2, 1..3), [41.0, 42.0, 45.0, 46.0]);
        assert_eq!(read([1, 3, 2, 4], [1, 2], 1..2, 0..4), [20.0, 21.0, 22.0, 23.0]);
        assert_eq!(read([2, 1, 2, 4], [1, 2], 1..2, 0..1), [12.0]);
        assert_eq!(read([1, 1, 1, 4], [1, 2], 3..5, 2..4), [2.0, 3.0, 2.0, 3.0]);
        let mut out = vec![9.0];
        Additive::None.load([1, 2], 0..2, 0..2, &mut out);
        assert!(out.is_empty());
    }

    #[test]
    fn sums_are_written_row_by_row() {
        let mut memory = [7f32; 2 * 2 * 8];
        let layout = Layout::with_strides([1, 2, 2, 6], [32, 16, 8, 1]).unwrap();
        let mut out = AdditiveMut::F32(HostMut::of(&mut memory, layout));
        let task = Task::of_padded(0, 6, 1, 2..4);
        out.store(&task, &[1.0, 2.0, 3.0, 4.0]);
        let mut want = [7f32; 32];
        (want[18], want[19], want[26], want[27]) = (1.0, 2.0, 3.0, 4.0);
        assert_eq!((out.shape(), memory), ([1, 2, 2, 6], want));
    }
}
