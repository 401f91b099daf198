//! Tensors in host memory, by address.
//!
//! Slices of inputs are made of runs along the innermost dimension only, never of a whole buffer. The gaps of a layout may
//! belong to other code that writes them at the same time, so a slice must not cover a gap.
//!
//! Outputs are written through pointers. No slice is made of them, because their memory may be uninitialised.

use std::marker::PhantomData;
use std::ops::Range;

use super::Task;
use crate::layout::Layout;
use crate::sequences::SequenceRows;

/// A tensor that is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostRef<'a, T, const R: usize> {
    data: *const T,
    layout: Layout<R>,
    borrowed: PhantomData<&'a [T]>,
}

/// A tensor that is written.
#[derive(Debug)]
pub(crate) struct HostMut<'a, T, const R: usize> {
    data: *mut T,
    layout: Layout<R>,
    borrowed: PhantomData<&'a mut [T]>,
}

// SAFETY: a `HostRef` stands for shared references to its elements.
unsafe impl<T: Sync, const R: usize> Send for HostRef<'_, T, R> {}
// SAFETY: as above.
unsafe impl<T: Sync, const R: usize> Sync for HostRef<'_, T, R> {}
// SAFETY: a `HostMut` stands for exclusive references to its elements.
unsafe impl<T: Send, const R: usize> Send for HostMut<'_, T, R> {}
// SAFETY: a shared reference to a `HostMut` gives shared references to its elements (`as_ref`) and the layout.
unsafe impl<T: Sync, const R: usize> Sync for HostMut<'_, T, R> {}

impl<'a, T, const R: usize> HostRef<'a, T, R> {
    /// The tensor whose first element is at `data`.
    ///
    /// # Safety
    /// For `'a`, every element that the layout reaches is initialised, aligned memory of one allocation, and no code writes it.
    /// For a layout without elements `data` may be anything.
    pub unsafe fn new(data: *const T, layout: Layout<R>) -> Self {
        Self { data, layout, borrowed: PhantomData }
    }

    /// A tensor within `data`. Panics if the layout reaches past the end of `data`.
    pub fn of(data: &'a [T], layout: Layout<R>) -> Self {
        assert!(layout.span() <= data.len(), "a layout of {} elements in {}", layout.span(), data.len());
        // SAFETY: all elements lie within the borrowed slice.
        unsafe { Self::new(data.as_ptr(), layout) }
    }

    /// Shape and strides.
    pub fn layout(&self) -> Layout<R> {
        self.layout
    }

    /// `len` elements along the innermost dimension, from an index on.
    fn run(&self, index: [usize; R], len: usize) -> &'a [T] {
        let start = start_of(&self.layout, index, len);
        // SAFETY: `start_of` has checked that all elements are within the shape. The caller of `new` promised these.
        start.map_or(&[], |start| unsafe { std::slice::from_raw_parts(self.data.add(start), len) })
    }
}

impl<'a, T, const R: usize> HostMut<'a, T, R> {
    /// The tensor whose first element is at `data`.
    ///
    /// # Safety
    /// For `'a`, every element that the layout reaches is aligned memory of one allocation, and no other code reads or writes
    /// it. No two indices share an element. The memory may be uninitialised. For a layout without elements `data` may be anything.
    pub unsafe fn new(data: *mut T, layout: Layout<R>) -> Self {
        Self { data, layout, borrowed: PhantomData }
    }

    /// A tensor within `data`. Panics if the layout reaches past the end of `data`.
    pub fn of(data: &'a mut [T], layout: Layout<R>) -> Self {
        assert!(layout.span() <= data.len(), "a layout of {} elements in {}", layout.span(), data.len());
        // SAFETY: all elements lie within the exclusively borrowed slice.
        unsafe { Self::new(data.as_mut_ptr(), layout) }
    }

    /// Shape and strides.
    pub fn layout(&self) -> Layout<R> {
        self.layout
    }

    /// Writes values along the innermost dimension, from an index on.
    pub(super) fn write(&mut self, index: [usize; R], values: &[T])
    where
        T: Copy,
    {
        if let Some(start) = start_of(&self.layout, index, values.len()) {
            // SAFETY: `start_of` has checked that all elements are within the shape. The caller of `new` promised that these
            // are valid for writing and that no other code uses them. So `values` is other memory.
            unsafe { self.data.add(start).copy_from_nonoverlapping(values.as_ptr(), values.len()) };
        }
    }

    /// Writes the element at an index.
    pub fn set(&mut self, index: [usize; R], value: T)
    where
        T: Copy,
    {
        self.write(index, &[value]);
    }

    /// The same tensor for reading. It cannot be written as long as the result is used.
    ///
    /// # Safety
    /// Every element that the result is asked for is initialised.
    pub unsafe fn as_ref(&self) -> HostRef<'_, T, R> {
        HostRef { data: self.data, layout: self.layout, borrowed: PhantomData }
    }
}

/// The offset of an index. `None` if `len` is 0.
///
/// Panics if one of the `len` elements from `index` on, along the innermost dimension, is outside of the shape.
fn start_of<const R: usize>(layout: &Layout<R>, index: [usize; R], len: usize) -> Option<usize> {
    if len == 0 {
        return None;
    }
    let mut last = index;
    last[R - 1] += len - 1;
    assert!(layout.offset(last).is_some(), "{len} elements from {index:?} of {:?}", layout.shape());
    layout.offset(index)
}

impl<'a, T> HostRef<'a, T, 4> {
    /// The vector of one batch element, token and head.
    pub fn row(&self, batch: usize, token: usize, head: usize) -> &'a [T] {
        self.run([batch, token, head, 0], self.layout.shape()[3])
    }
}

impl<'a, T> HostRef<'a, T, 4> {
    /// The list at a place.
    pub fn list(&self, place: [usize; 3]) -> &'a [T] {
        self.part_of_list(place, 0, self.layout.shape()[3])
    }

    /// `len` elements of the list at a place, from element `first` on.
    pub fn part_of_list(&self, [a, b, c]: [usize; 3], first: usize, len: usize) -> &'a [T] {
        self.run([a, b, c, first], len)
    }
}

impl<T: Copy> HostMut<'_, T, 4> {
    /// Copies the vectors of a task's tokens into the tensor. `rows` has them without gaps.
    pub(super) fn store(&mut self, task: &Task, rows: &[T]) {
        let [_, _, _, dim] = self.layout.shape();
        for (token, row) in task.tokens.clone().zip(rows.chunks_exact(dim)) {
            self.write([task.rows.batch, task.rows.begin + token, task.head, 0], row);
        }
    }

    /// Writes one value to all elements of some rows.
    pub(super) fn fill_rows(&mut self, batch: usize, rows: Range<usize>, value: T) {
        let [_, _, heads, dim] = self.layout.shape();
        for (row, head) in rows.flat_map(|row| (0..heads).map(move |head| (row, head))) {
            (0..dim).for_each(|element| self.set([batch, row, head, element], value));
        }
    }
}

impl<'a> HostRef<'a, f32, 3> {
    /// The numbers of some tokens of a sequence, for one head.
    pub fn part(&self, of: &SequenceRows, head: usize, tokens: Range<usize>) -> &'a [f32] {
        self.run([of.batch, head, of.begin + tokens.start], tokens.len())
    }
}

impl HostMut<'_, f32, 3> {
    /// Copies the numbers of a task's tokens into the tensor.
    pub(super) fn store_part(&mut self, task: &Task, numbers: &[f32]) {
        self.write([task.rows.batch, task.head, task.rows.begin + task.tokens.start], numbers);
    }

    /// Writes one number for all heads of some tokens.
    pub(super) fn fill_parts(&mut self, batch: usize, tokens: Range<usize>, number: f32) {
        let [_, heads, _] = self.layout.shape();
        for head in 0..heads {
            tokens.clone().for_each(|token| self.set([batch, head, token], number));
        }
    }
}

impl<'a, T> HostRef<'a, T, 1> {
    /// All elements.
    pub fn all(&self) -> &'a [T] {
        self.run([0], self.layout.shape()[0])
    }
}

impl<T: Copy, const R: usize> HostRef<'_, T, R> {
    /// The element at an index.
    pub fn at(&self, index: [usize; R]) -> T {
        self.run(index, 1)[0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_found_by_the_strides() {
        let data: Vec<f32> = (0..24).map(|x| x as f32).collect();
        // Two heads of three tokens, in a buffer whose tokens are six elements apart.
        let layout = Layout::with_strides([1, 3, 2, 2], [24, 6, 3, 1]).unwrap();
        let tensor = HostRef::of(&data, layout);
        assert_eq!((tensor.row(0, 0, 0), tensor.row(0, 2, 1)), (&[0.0, 1.0][..], &[15.0, 16.0][..]));
        let rows = HostRef::of(&data, Layout::contiguous([2, 2, 3]).unwrap());
        let second = SequenceRows::padded(1, 3);
        assert_eq!((rows.part(&second, 0, 1..3), rows.part(&second, 1, 2..2)), (&[7.0, 8.0][..], &[][..]));
        assert_eq!(HostRef::of(&data, Layout::contiguous([3]).unwrap()).all(), [0.0, 1.0, 2.0]);
        assert_eq!(rows.at([0, 1, 2]), 5.0);
    }

    #[test]
    fn only_what_the_layout_reaches_is_written() {
        let mut data = [7f32; 12];
        let layout = Layout::with_strides([1, 2, 1, 2], [12, 6, 3, 1]).unwrap();
        let mut tensor = HostMut::of(&mut data, layout);
        tensor.store(&Task::of_padded(0, 2, 0, 0..2), &[1.0, 2.0, 3.0, 4.0]);
        tensor.set([0, 1, 0, 1], 5.0);
        // SAFETY: the array is initialised.
        assert_eq!(unsafe { tensor.as_ref() }.row(0, 1, 0), [3.0, 5.0]);
        tensor.fill_rows(0, 0..1, 9.0);
        assert_eq!(data, [9.0, 9.0, 7.0, 7.0, 7.0, 7.0, 3.0, 5.0, 7.0, 7.0, 7.0, 7.0]);
    }

    #[test]
    #[should_panic(expected = "3 elements from [0, 0] of [2, 2]")]
    fn what_is_outside_of_the_shape_is_not_reached() {
        let data = [0f32; 4];
        HostRef::of(&data, Layout::contiguous([2, 2]).unwrap()).run([0, 0], 3);
    }
}
