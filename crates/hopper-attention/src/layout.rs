//! Shapes and strides.

use crate::error::{Error, Result};
use crate::operand::MAX_RANK;

/// The shape and the strides of a tensor. A stride is the distance between neighbours of one dimension, in elements.
///
/// - The innermost dimension has stride 1. (A tensor without elements may have any there, as NumPy gives it 0.)
/// - Strides are not negative.
/// - The offset of every element fits an `i64`.
/// - A stride of 0 repeats the same elements (a broadcast). A tensor that is read may have one; a tensor that is written
///   may not.
///
/// Two layouts are equal when their shapes and strides are equal.
///
/// ```
/// use hopper_attention::Layout;
/// # fn main() -> hopper_attention::Result<()> {
/// let bshd = Layout::contiguous([2, 512, 8, 64])?; // [batch, seqlen, heads, head_dim]
/// // The same logical order for memory that is [batch, heads, seqlen, head_dim].
/// let bhsd = Layout::with_strides([2, 512, 8, 64], [8 * 512 * 64, 64, 512 * 64, 1])?;
/// assert_eq!(bshd.span(), bhsd.span());
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout<const R: usize> {
    shape: [usize; R],
    stride: [i64; R],
    span: usize,
}

impl<const R: usize> Layout<R> {
    /// The row-major layout without gaps.
    ///
    /// # Errors
    /// [`Error::Layout`] when the number of elements does not fit an `i64`.
    pub fn contiguous(shape: [usize; R]) -> Result<Self> {
        let mut stride = [1; R];
        let mut elements = 1i64;
        for axis in (0..R).rev() {
            stride[axis] = elements;
            // An empty dimension counts as 1 here. Otherwise the dimensions outside of it would have stride 0.
            let size = i64::try_from(shape[axis].max(1)).ok();
            elements = size.and_then(|size| elements.checked_mul(size)).ok_or_else(|| Error::Layout {
                tensor: "layout",
                got: format!("shape {shape:?}"),
                allowed: "fewer than 2^63 elements".into(),
            })?;
        }
        Self::with_strides(shape, stride)
    }

    /// The layout with these strides, counted in elements.
    ///
    /// # Errors
    /// [`Error::Layout`] when the innermost stride is not 1 and there are elements, when a stride is negative, or when an
    /// offset does not fit an `i64`.
    pub fn with_strides(shape: [usize; R], stride: [i64; R]) -> Result<Self> {
        let refuse = |allowed: &str| Error::Layout {
            tensor: "layout",
            got: format!("shape {shape:?} with strides {stride:?}"),
            allowed: allowed.into(),
        };
        if !shape.contains(&0) && stride.last().is_some_and(|&inner| inner != 1) {
            return Err(refuse("stride 1 in the innermost dimension"));
        }
        if stride.iter().any(|&step| step < 0) {
            return Err(refuse("strides of 0 and above"));
        }
        let span = span(&shape, &stride).ok_or_else(|| refuse("offsets below 2^63 elements"))?;
        Ok(Self { shape, stride, span })
    }

    /// The size of each dimension.
    pub const fn shape(&self) -> [usize; R] {
        self.shape
    }

    /// The stride of each dimension, in elements.
    pub const fn stride(&self) -> [i64; R] {
        self.stride
    }

    /// Elements from the first to the last one, gaps included. A buffer must hold at least this many. 0 when a size is 0.
    pub const fn span(&self) -> usize {
        self.span
    }

    /// Whether any dimension has size 0.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Every index of the shape, in row-major order.
    pub(crate) fn indices(&self) -> impl Iterator<Item = [usize; R]> + Clone + use<R> {
        let shape = self.shape;
        // Not one loop for each dimension: a dimension of size 0 inside of large ones would cost as much as they say.
        let count = if shape.contains(&0) { 0 } else { shape.iter().product() };
        (0..count).map(move |number: usize| {
            let mut rest = number;
            let mut index = [0; R];
            for axis in (0..R).rev() {
                (index[axis], rest) = (rest % shape[axis], rest / shape[axis]);
            }
            index
        })
    }

    /// The distance of an element from the first one, in elements. `None` for an index outside of the shape.
    pub fn offset(&self, index: [usize; R]) -> Option<usize> {
        if index.iter().zip(&self.shape).any(|(&i, &size)| i >= size) {
            return None;
        }
        // The index is in bounds, so the offset is below the span. The arithmetic of the span was checked.
        Some(index.iter().zip(&self.stride).map(|(&i, &step)| i * step as usize).sum())
    }

    /// Whether no two indices share an element. A tensor that is written must have such a layout.
    ///
    /// The test is that dimensions nest: each dimension's stride must be larger than the largest offset that the dimensions
    /// with smaller strides reach together. Some interleaved layouts have no overlap and yet do not nest. For these the
    /// answer is `false` too.
    pub fn injective(&self) -> bool {
        if self.is_empty() {
            return true;
        }
        let mut axes = [(0i64, 0usize); R];
        for (axis, slot) in axes.iter_mut().enumerate() {
            *slot = if self.shape[axis] > 1 { (self.stride[axis], self.shape[axis]) } else { (i64::MAX, 1) };
        }
        axes.sort_unstable();
        let mut reach = 0;
        axes.iter().filter(|(_, size)| *size > 1).all(|&(step, size)| {
            let steps_over = step > reach;
            reach += step * (size as i64 - 1); // below the span, so it does not overflow
            steps_over
        })
    }
}

impl Layout<1> {
    /// The layout of a list.
    pub(crate) const fn of_list(len: usize) -> Self {
        Self { shape: [len], stride: [1], span: len }
    }
}

/// A layout whose number of dimensions (rank) is known at run time, so that tensors of any rank fit in one list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DynLayout {
    /// The layout, with dimensions of size 1 and stride 1 added at the end.
    padded: Layout<MAX_RANK>,
    rank: usize,
}

impl DynLayout {
    /// The size of each dimension.
    pub fn shape(&self) -> &[usize] {
        &self.padded.shape[..self.rank]
    }

    /// The stride of each dimension, in elements.
    pub fn stride(&self) -> &[i64] {
        &self.padded.stride[..self.rank]
    }

    /// As [`Layout::span`].
    pub fn span(&self) -> usize {
        self.padded.span
    }

    /// Whether any dimension has size 0.
    pub fn is_empty(&self) -> bool {
        self.padded.is_empty()
    }

    /// As [`Layout::injective`].
    fn injective(&self) -> bool {
        self.padded.injective()
    }

    /// Refuses a layout in which two indices share an element. For tensors that are written.
    pub fn check_written(&self, tensor: &'static str) -> Result<()> {
        if self.injective() {
            return Ok(());
        }
        Err(Error::Layout {
            tensor,
            got: format!("shape {:?} with strides {:?} uses elements twice", self.shape(), self.stride()),
            allowed: "for a tensor that is written, dimensions that step over each other".into(),
        })
    }

    /// The same layout with its rank in the type. Where a layout has one dimension less, a first dimension of size 1 is added:
    /// the batch of a packed tensor.
    pub fn with_batch<const R: usize>(&self) -> Option<Layout<R>> {
        if self.rank + 1 != R {
            return self.typed();
        }
        let (mut shape, mut stride) = ([1; R], [1; R]);
        shape[1..].copy_from_slice(self.shape());
        stride[1..].copy_from_slice(self.stride());
        Some(Layout { shape, stride, span: self.padded.span })
    }

    /// The same layout with its rank in the type. `None` where the rank is not `R`.
    pub fn typed<const R: usize>(&self) -> Option<Layout<R>> {
        let (shape, stride) = (self.shape().try_into().ok()?, self.stride().try_into().ok()?);
        Some(Layout { shape, stride, span: self.padded.span })
    }
}

impl<const R: usize> From<Layout<R>> for DynLayout {
    fn from(layout: Layout<R>) -> Self {
        const { assert!(R <= MAX_RANK) };
        let (mut shape, mut stride) = ([1; MAX_RANK], [1; MAX_RANK]);
        shape[..R].copy_from_slice(&layout.shape);
        stride[..R].copy_from_slice(&layout.stride);
        Self { padded: Layout { shape, stride, span: layout.span }, rank: R }
    }
}

/// Elements from the first to the last one. `None` when the offset of the last element does not fit an `i64`, or the count
/// does not fit.
fn span(shape: &[usize], stride: &[i64]) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    let mut last = 0i64;
    for (&size, &step) in shape.iter().zip(stride) {
        last = last.checked_add(i64::try_from(size - 1).ok()?.checked_mul(step)?)?;
    }
    usize::try_from(last.checked_add(1)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    #[test]
    fn contiguous_strides() {
        let layout = Layout::contiguous([2, 3, 4, 5]).unwrap();
        assert_eq!((layout.stride(), layout.span()), ([60, 20, 5, 1], 120));
        let empty = Layout::contiguous([2, 0, 4, 5]).unwrap();
        assert_eq!((empty.span(), empty.is_empty(), empty.injective()), (0, true, true));
        assert_eq!(Layout::contiguous([]).unwrap().span(), 1);
    }

    #[test]
    fn refusals_say_why() {
        let text = |shape, stride| Layout::<2>::with_strides(shape, stride).unwrap_err().to_string();
        assert!(text([2, 2], [4, 2]).contains("stride 1 in the innermost dimension"));
        assert!(text([2, 2], [-4, 1]).contains("strides of 0 and above"));
        assert!(text([3, 2], [i64::MAX, 1]).contains("below 2^63"));
        assert!(text([2, 2], [i64::MAX, 1]).contains("below 2^63"));
        assert!(text([usize::MAX, 2], [1, 1]).contains("below 2^63"));
        assert!(Layout::contiguous([1 << 32, 1 << 31]).is_err());
        assert!(text([0, 2], [-4, 0]).contains("strides of 0 and above"));
        assert_eq!(Layout::with_strides([0, 2], [0, 0]).unwrap().span(), 0);
        assert!(Layout::contiguous([1 << 31, 1 << 31]).is_ok());
    }

    #[test]
    fn a_layout_of_any_rank_is_what_it_was() {
        let layout = Layout::with_strides([2, 3], [9, 1]).unwrap();
        let erased = DynLayout::from(layout);
        assert_eq!((erased.shape(), erased.stride(), erased.span()), (&[2, 3][..], &[9, 1][..], 12));
        assert_eq!((erased.typed::<2>(), erased.typed::<3>()), (Some(layout), None));
        let with_batch = erased.with_batch::<3>().unwrap();
        assert_eq!((with_batch.shape(), with_batch.span()), ([1, 2, 3], 12));
        assert_eq!(with_batch.offset([0, 1, 2]), layout.offset([1, 2]));
        assert_eq!((erased.with_batch::<2>(), erased.with_batch::<4>()), (Some(layout), None));
        let broadcast = DynLayout::from(Layout::with_strides([2, 3], [0, 1]).unwrap());
        assert!(erased.check_written("view").is_ok() && !erased.is_empty());
        let text = broadcast.check_written("o").unwrap_err().to_string();
        assert!(text.starts_with("o: shape [2, 3] with strides [0, 1] uses elements twice"), "{text}");
    }

    #[test]
    fn broadcasts_overlap() {
        assert!(!Layout::with_strides([2, 3], [0, 1]).unwrap().injective());
        assert!(Layout::with_strides([1, 3], [0, 1]).unwrap().injective());
        assert!(!Layout::with_strides([2, 3], [2, 1]).unwrap().injective());
        assert!(Layout::with_strides([2, 3], [3, 1]).unwrap().injective());
    }

    proptest! {
        #[test]
        fn span_and_overlap_agree_with_every_offset(shape in [0usize..4, 0usize..4, 0usize..4, 0usize..4],
                                                    outer in [0i64..40, 0i64..40, 0i64..40]) {
            let layout = Layout::with_strides(shape, [outer[0], outer[1], outer[2], 1]).unwrap();
            let mut seen = HashSet::new();
            let (mut highest, mut overlap) = (None, false);
            for i in 0..shape.iter().product() {
                let index = [i / (shape[3] * shape[2] * shape[1]), i / (shape[3] * shape[2]) % shape[1],
                             i / shape[3] % shape[2], i % shape[3]];
                let offset = layout.offset(index).unwrap();
                highest = highest.max(Some(offset));
                overlap |= !seen.insert(offset);
            }
            prop_assert_eq!(layout.span(), highest.map_or(0, |offset| offset + 1));
            // Nesting may refuse a layout without overlap. It must refuse one with an overlap.
            prop_assert!(!(overlap && layout.injective()));
        }

        #[test]
        fn permutations_of_contiguous_are_injective(shape in [1usize..5, 1usize..5, 1usize..5, 1usize..5], gap in 0i64..9) {
            let [b, s, h, d] = shape.map(|size| size as i64);
            let row = d + gap;
            for stride in [[s * h * row, h * row, row, 1], [h * s * row, row, s * row, 1], [row, b * h * row, b * row, 1]] {
                prop_assert!(Layout::with_strides(shape, stride).unwrap().injective());
            }
        }

        #[test]
        fn no_numbers_panic(shape in any::<[usize; 3]>(), stride in any::<[i64; 3]>()) {
            if let Ok(layout) = Layout::with_strides(shape, [stride[0], stride[1], 1]) {
                layout.injective();
                layout.offset([0; 3]);
            }
            let _ = Layout::contiguous(shape);
        }
    }
}
