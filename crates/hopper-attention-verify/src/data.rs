//! Values of inputs, and memory with guard bands.

use hopper_attention::reference::Tensor;
use hopper_attention::{DType, Float, Layout, OutputOf, bf16, f16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;
use serde::{Deserialize, Serialize};

use crate::inputs::Class;
pub use crate::inputs::Input;
use crate::packing::Rows;

/// Elements of poison before and after every tensor; a multiple of 16 bytes for every type, so that a tensor starts
/// as aligned as its memory.
pub const GUARD: usize = 256;

/// An element type with a poison: a NaN that no arithmetic makes, so that what was never written can be told from a
/// NaN that was computed.
pub trait Poison: Float + OutputOf<Self> {
    /// The poison.
    const POISON: Self;

    /// The bits.
    fn bits(self) -> u32;

    /// Whether this is the poison, bit for bit.
    fn is_poison(self) -> bool {
        self.bits() == Self::POISON.bits()
    }
}

impl Poison for bf16 {
    const POISON: Self = bf16::from_bits(0x7fa5);
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

impl Poison for f16 {
    const POISON: Self = f16::from_bits(0x7da5);
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

impl Poison for f32 {
    const POISON: Self = f32::from_bits(0x7fa5_a5a5);
    fn bits(self) -> u32 {
        self.to_bits()
    }
}

/// What the inputs of a case hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Values {
    /// Standard normal.
    #[default]
    Normal,
    /// Normal queries and keys of deviation 20: a softmax of one key, scores in the hundreds.
    Large,
    /// Normal of deviation 0.001: an even softmax, outputs near 0.
    Tiny,
    /// Normal around 2, so that sums do not cancel.
    Offset,
    /// Normal, with one column of V a hundred times the others.
    Uneven,
    /// The same everywhere.
    Constant,
    /// Normal, with an offset of the scores, in natural units at the default scale, that goes from `first` at the first key
    /// to `last` at the last: whatever a kernel takes for the size of a score, this is another.
    Sloped {
        /// At the first key.
        first: i16,
        /// At the last key.
        last: i16,
    },
    /// Normal, with a NaN in one query: one row of each of its head's results is NaN.
    NanQuery,
    /// Normal, with a NaN in the last key, which the mask hides from some queries.
    NanKey,
    /// As one of the classes that `hattn bench` times.
    Like(Class),
    /// Normal, with garbage in some rows of one input, in all columns or in one. The mask hides such a row from some rows, or
    /// from all: these must come out as if it were not there.
    Garbage(Input, Garbage),
}

/// What stands in rows of garbage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Garbage {
    /// NaN.
    Nan,
    /// Infinity.
    Infinity,
    /// Minus infinity.
    MinusInfinity,
    /// The largest finite number of the type.
    Largest,
}

impl Garbage {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Nan, Self::Infinity, Self::MinusInfinity, Self::Largest];

    /// It, in a type.
    pub fn of<T: Poison>(self) -> T {
        let largest = match T::DTYPE {
            DType::F16 => f32::from(f16::MAX),
            DType::BF16 => f32::from(bf16::MAX),
            _ => f32::MAX,
        };
        T::from_f32(match self {
            Self::Nan => f32::NAN,
            Self::Infinity => f32::INFINITY,
            Self::MinusInfinity => f32::NEG_INFINITY,
            Self::Largest => largest,
        })
    }
}

/// What makes the slope together with the keys: the first element of every query.
const SLOPE_QUERY: f64 = 8.0;

impl Values {
    /// The values of one input, not yet rounded to its type. The same seed gives the same values on every machine.
    pub fn tensor(self, input: Input, shape: [usize; 4], seed: u64) -> Tensor {
        let mut rng = StdRng::seed_from_u64(seed.wrapping_mul(4).wrapping_add(input as u64));
        let deviation = match (self, input) {
            (Self::Large, Input::Q | Input::K) => 20.0,
            (Self::Tiny, _) => 0.001,
            (Self::Constant, _) => 0.0,
            _ => 1.0,
        };
        let mean = match self {
            Self::Offset => 2.0,
            Self::Constant => 0.75,
            _ => 0.0,
        };
        let mut tensor = Tensor::from_fn(shape, |[_, _, _, d]| {
            let column = if self == Self::Uneven && input == Input::V && d == 5 { 100.0 } else { 1.0 };
            (mean + deviation * rng.sample::<f64, _>(StandardNormal)) * column
        });
        let [batch, seqlen, heads, head_dim] = shape;
        if let Self::Like(class) = self {
            let shaped = class.shaped(input, shape, seed);
            for (i, row) in tensor.data_mut().chunks_exact_mut(head_dim.max(1)).enumerate() {
                shaped.row([i / heads / seqlen, i / heads % seqlen, i % heads], row);
            }
        }
        if batch > 0 && seqlen > 0 {
            match (self, input) {
                (Self::Sloped { .. }, Input::Q) => {
                    tensor.data_mut().chunks_exact_mut(shape[3]).for_each(|row| row[0] = SLOPE_QUERY);
                }
                (Self::Sloped { first, last }, Input::K) => {
                    let unit = (shape[3] as f64).sqrt() / SLOPE_QUERY;
                    for (i, row) in tensor.data_mut().chunks_exact_mut(shape[3]).enumerate() {
                        let along = (i / heads % seqlen) as f64 / (seqlen - 1).max(1) as f64;
                        row[0] = (f64::from(first) * (1.0 - along) + f64::from(last) * along) * unit;
                    }
                }
                (Self::NanQuery, Input::Q) => tensor.row_mut(batch - 1, seqlen / 2, heads - 1)[3] = f64::NAN,
                (Self::NanKey, Input::K) => tensor.row_mut(0, seqlen - 1, heads - 1)[1] = f64::NAN,
                (Self::Garbage(of, _), _) if of == input => spoil(&mut tensor, &mut rng),
                _ => {}
            }
        }
        tensor
    }
}

/// Makes NaN of up to three rows of each second head, in all columns or in one.
fn spoil(tensor: &mut Tensor, rng: &mut StdRng) {
    let [batch, seqlen, heads, head_dim] = tensor.shape();
    for i in (0..batch * heads).filter(|i| i % 2 == 0) {
        for _ in 0..rng.random_range(1..4) {
            let place = [0, seqlen / 2, seqlen - 1, rng.random_range(0..seqlen)][rng.random_range(0..4)];
            let row = tensor.row_mut(i / heads, place, i % heads);
            match rng.random_range(0..3) {
                0 => row.fill(f64::NAN),
                _ => {
                    row[[0, head_dim / 2, head_dim - 1, rng.random_range(0..head_dim)][rng.random_range(0..4)]] =
                        f64::NAN
                }
            }
        }
    }
}

impl Values {
    /// Puts the garbage of these values into an image that has NaN in its place: the oracle reads NaN. What a row of garbage has a
    /// part in may be anything then, where it is not NaN (`excuse`).
    pub(crate) fn fill<T: Poison>(self, image: &mut Image<T, 4>) {
        if let Self::Garbage(_, garbage) = self {
            for offset in image.offsets() {
                let value = &mut image.inner_mut()[offset];
                if value.to_f32().is_nan() {
                    *value = garbage.of();
                }
            }
        }
    }

    /// Makes NaN of what a row of garbage has a part in, unless it had to be NaN.
    pub(crate) fn excuse(self, got: &mut [f64], exact: &[f64]) {
        if matches!(self, Self::Garbage(_, garbage) if garbage != Garbage::Nan) {
            for (got, exact) in got.iter_mut().zip(exact) {
                *got = if exact.is_nan() { f64::NAN } else { *got };
            }
        }
    }
}

/// A tensor's memory: poison, the tensor with poison in its gaps, poison.
#[derive(Clone, Debug)]
pub struct Image<T, const R: usize> {
    data: Vec<T>,
    layout: Layout<R>,
    /// Which rows belong to a sequence, and the dimension of the rows.
    rows: Option<(Rows, usize)>,
}

impl<T: Poison, const R: usize> Image<T, R> {
    /// Nothing but poison: an output before it is written.
    pub fn poisoned(layout: Layout<R>) -> Self {
        Self { data: vec![T::POISON; layout.span() + 2 * GUARD], layout, rows: None }
    }

    /// The same tensor, some of whose rows belong to no sequence. `axis` is the dimension of the rows. These rows of an input
    /// are NaN from now on, but for memory that they share with a row of a sequence. Those of an output are not written, unless
    /// they are filled.
    #[must_use]
    pub fn of_sequences(mut self, rows: Option<&Rows>, axis: usize) -> Self {
        let Some(rows) = rows else { return self };
        let (shape, offsets) = (self.layout.shape(), self.offsets());
        let mut used = vec![false; self.inner().len()];
        for (i, &offset) in offsets.iter().enumerate() {
            used[offset] |= rows.belongs(row_of(shape, axis, i));
        }
        for offset in offsets.into_iter().filter(|&offset| !used[offset]) {
            self.inner_mut()[offset] = T::POISON;
        }
        self.rows = Some((rows.clone(), axis));
        self
    }

    /// These values, in logical order, rounded to the type.
    pub fn holding(values: &[f64], layout: Layout<R>) -> Self {
        let mut image = Self::poisoned(layout);
        let offsets = image.offsets();
        let inner = image.inner_mut();
        for (offset, &value) in offsets.into_iter().zip(values) {
            inner[offset] = T::from_f32(value as f32);
        }
        image
    }

    /// All of the memory.
    pub fn data(&self) -> &[T] {
        &self.data
    }

    /// The tensor's layout.
    pub fn layout(&self) -> Layout<R> {
        self.layout
    }

    /// The tensor's part of the memory.
    pub fn inner(&self) -> &[T] {
        &self.data[GUARD..self.data.len() - GUARD]
    }

    /// The tensor's part of the memory, for writing.
    pub fn inner_mut(&mut self) -> &mut [T] {
        let end = self.data.len() - GUARD;
        &mut self.data[GUARD..end]
    }

    /// Takes over what a run left in memory of this shape, and looks at it as [`check_written`](Self::check_written).
    pub fn take_output(&mut self, data: Vec<T>) -> Result<(), String> {
        assert_eq!(data.len(), self.data.len(), "memory came back with another length");
        self.data = data;
        self.check_written()
    }

    /// Says what a run did to this memory that it may not: changed a guard band or a gap, or left an element unwritten.
    pub fn check_written(&self) -> Result<(), String> {
        let mut inside = vec![false; self.data.len()];
        for (i, offset) in self.offsets().into_iter().enumerate() {
            let row = |axis| row_of(self.layout.shape(), axis, i);
            inside[GUARD + offset] = self.rows.as_ref().is_none_or(|(rows, axis)| rows.is_written(row(*axis)));
        }
        for (i, (value, inside)) in self.data.iter().zip(inside).enumerate() {
            let place = i as i64 - GUARD as i64;
            if inside && value.is_poison() {
                return Err(format!("element at offset {place} of {:?} was not written", self.layout));
            }
            if !inside && !value.is_poison() {
                let whose = if self.rows.is_some() { "outside of the sequences of" } else { "outside of" };
                return Err(format!("offset {place}, {whose} {:?}, was overwritten with {value:?}", self.layout));
            }
        }
        Ok(())
    }

    /// Says whether memory of an input is still what it was, bit for bit.
    pub fn check_unchanged(&self, after: &[T]) -> Result<(), String> {
        match self.data.iter().zip(after).position(|(a, b)| a.bits() != b.bits()) {
            Some(i) => Err(format!("an input was written at offset {} of {:?}", i as i64 - GUARD as i64, self.layout)),
            None => Ok(()),
        }
    }

    /// The elements of some rows, in logical order. `axis` is the dimension of the rows. The number of a row is
    /// `batch * seqlen + token`.
    pub fn elements_of_rows(&self, axis: usize, is_taken: impl Fn(usize) -> bool) -> Vec<T> {
        self.offsets_of_rows(axis, is_taken).into_iter().map(|offset| self.inner()[offset]).collect()
    }

    /// Puts elements into some rows, in the order in which [`elements_of_rows`](Self::elements_of_rows) gives them.
    pub fn put_into_rows(
        &mut self,
        axis: usize,
        is_taken: impl Fn(usize) -> bool,
        elements: impl IntoIterator<Item = T>,
    ) {
        let offsets = self.offsets_of_rows(axis, is_taken);
        let inner = self.inner_mut();
        offsets.into_iter().zip(elements).for_each(|(offset, element)| inner[offset] = element);
    }

    fn offsets_of_rows(&self, axis: usize, is_taken: impl Fn(usize) -> bool) -> Vec<usize> {
        let shape = self.layout.shape();
        let offsets = self.offsets().into_iter().enumerate();
        offsets.filter(|(i, _)| is_taken(row_of(shape, axis, *i))).map(|(_, offset)| offset).collect()
    }

    /// The elements in logical order.
    pub fn values(&self) -> Vec<f64> {
        self.offsets().into_iter().map(|offset| f64::from(self.inner()[offset].to_f32())).collect()
    }

    /// The offsets of all elements, in logical order.
    fn offsets(&self) -> Vec<usize> {
        let (shape, stride) = (self.layout.shape(), self.layout.stride());
        let mut offsets = vec![0];
        for axis in 0..R {
            let step = stride[axis] as usize;
            offsets = offsets.iter().flat_map(|&base| (0..shape[axis]).map(move |i| base + i * step)).collect();
        }
        offsets
    }
}

/// The row `batch * seqlen + token` of element `i`, in logical order. `axis` is the dimension of the tokens.
fn row_of<const R: usize>(shape: [usize; R], axis: usize, i: usize) -> usize {
    let within = |axis: usize| i / shape[axis + 1..].iter().product::<usize>() % shape[axis];
    within(0) * shape[axis] + within(axis)
}

impl<T: Poison> Image<T, 4> {
    /// A tensor with these values, rounded to the type.
    pub fn of(values: &Tensor, layout: Layout<4>) -> Self {
        Self::holding(values.data(), layout)
    }

    /// What it holds, as the oracle reads it.
    pub fn tensor(&self) -> Tensor {
        Tensor::from_strided(self.inner(), &self.layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Case;
    use crate::layouts::Placement;
    use crate::packing::Packing;
    use hopper_attention::Mask;

    /// Batch entries of different lengths share K and V: a row is NaN where none of them has it, and nowhere else.
    #[test]
    fn shared_rows_of_a_sequence_are_no_gaps() {
        let packing = Packing { seqused_kv: Some(vec![7, 4]), ..Packing::default() };
        let case = Case { packing, ..Case::new(3, 10, 8, Mask::Full).heads(2, 1, 1) };
        let problem = case.problem(DType::BF16);
        let belonging = case.packing.belonging(&problem);
        let nan_rows = |placement: Placement| {
            let tensor = case.values.tensor(Input::K, problem.k_shape(), 1);
            let image = Image::<bf16, 4>::of(&tensor, placement.layout(problem.k_shape(), true));
            let tensor = image.of_sequences(belonging.as_ref().map(|[_, kv]| kv), 1).tensor();
            [0, 1].map(|batch| (0..10).filter(|&key| tensor.row(batch, key, 0).iter().all(|x| x.is_nan())).count())
        };
        assert_eq!(nan_rows(Placement::Bshd), [3, 6]);
        assert_eq!(nan_rows(Placement::SharedBatch), [3, 3]);
    }
}
