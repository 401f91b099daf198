//! The additive bias of a point: what it holds, and memory for it and its gradient.

use std::ops::Range;

use anyhow::{Context as _, Result};
use hopper_attention::{Args, Bias, DType, Float, Layout, Slot, TensorMut, TensorRef, bf16, f16};
use hopper_attention_verify::bias::BiasDraw;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use rand_distr::StandardNormal;

use super::Point;
use crate::memory;

/// Rows of a tensor in one part of work.
const ROWS: usize = 64;

/// Numbers in the type of a bias.
#[derive(Clone, Debug)]
enum Numbers {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

/// Does the same to the numbers of every type.
macro_rules! each {
    ($numbers:expr, $data:ident => $what:expr) => {
        match $numbers {
            Numbers::F32($data) => $what,
            Numbers::Bf16($data) => $what,
            Numbers::F16($data) => $what,
        }
    };
}

/// A number as f64.
fn wide<T: Float>(number: &T) -> f64 {
    number.to_f32().into()
}

/// A number rounded to a type.
fn narrow<T: Float>(number: f64) -> T {
    T::from_f32(number as f32)
}

/// A bias or its gradient, contiguous, of the shape of [`Point::bias_shape`].
#[derive(Clone, Debug)]
pub(crate) struct BiasTensor {
    numbers: Numbers,
    layout: Layout<4>,
}

impl BiasTensor {
    /// Nothing but NaN.
    fn unwritten(dtype: DType, layout: Layout<4>) -> Result<Self> {
        let len = layout.span();
        let numbers = match dtype {
            DType::BF16 => Numbers::Bf16(memory::filled(len, bf16::NAN)?),
            DType::F16 => Numbers::F16(memory::filled(len, f16::NAN)?),
            _ => Numbers::F32(memory::filled(len, f32::NAN)?),
        };
        Ok(Self { numbers, layout })
    }

    /// The number that a pair reads: of a batch entry, query head, query and key, as its sequence counts them.
    pub(crate) fn at(&self, pair: [usize; 4]) -> f64 {
        let shape = self.layout.shape();
        let own = std::array::from_fn(|axis| if shape[axis] == 1 { 0 } else { pair[axis] });
        let offset = self.layout.offset(own).unwrap_or(usize::MAX);
        each!(&self.numbers, data => data.get(offset).map_or(f64::NAN, wide))
    }

    /// The same memory with these numbers, in order.
    pub(crate) fn holding(&self, values: &[f64]) -> Result<Self> {
        let mut held = self.copied()?;
        each!(&mut held.numbers, data => {
            data.iter_mut().zip(values).for_each(|(to, &x)| *to = narrow(x));
        });
        Ok(held)
    }

    /// A copy.
    pub(crate) fn copied(&self) -> Result<Self> {
        let numbers = match &self.numbers {
            Numbers::F32(data) => Numbers::F32(memory::copied(data)?),
            Numbers::Bf16(data) => Numbers::Bf16(memory::copied(data)?),
            Numbers::F16(data) => Numbers::F16(memory::copied(data)?),
        };
        Ok(Self { numbers, layout: self.layout })
    }

    /// The type of the numbers.
    pub(crate) fn dtype(&self) -> DType {
        match &self.numbers {
            Numbers::F32(_) => DType::F32,
            Numbers::Bf16(_) => DType::BF16,
            Numbers::F16(_) => DType::F16,
        }
    }

    /// The shape.
    pub(crate) fn shape(&self) -> [usize; 4] {
        self.layout.shape()
    }

    /// How many numbers are NaN.
    pub(crate) fn count_nan(&self) -> usize {
        each!(&self.numbers, data => data.iter().filter(|&x| wide(x).is_nan()).count())
    }

    /// The numbers of all keys of a batch entry, head and query, which are counted together.
    pub(crate) fn row(&self, number: usize) -> Vec<f64> {
        let keys = self.shape()[3];
        each!(&self.numbers, data => data[number * keys..][..keys].iter().map(wide).collect())
    }

    /// All numbers in order.
    pub(crate) fn widened(&self) -> Result<Vec<f64>> {
        let mut all = memory::reserved(self.layout.span())?;
        each!(&self.numbers, data => all.extend(data.iter().map(wide)));
        Ok(all)
    }

    /// Adds a bias to the arguments of a run in host memory.
    pub(crate) fn add_to<'a>(&'a self, args: Args<'a>) -> hopper_attention::Result<Args<'a>> {
        Ok(each!(&self.numbers, data => args.read(Slot::Bias, TensorRef::host(data, self.layout)?)))
    }

    /// Adds its gradient to the arguments of a run in host memory.
    pub(crate) fn add_gradient_to<'a>(&'a mut self, args: Args<'a>) -> hopper_attention::Result<Args<'a>> {
        Ok(each!(&mut self.numbers, data => args.write(Slot::DBias, TensorMut::host(data, self.layout)?)))
    }

    /// The bytes of the numbers.
    #[cfg(feature = "cuda")]
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: numbers without padding, which are borrowed as long as their bytes.
        each!(&self.numbers, data => unsafe {
            std::slice::from_raw_parts(data.as_ptr().cast(), std::mem::size_of_val(&data[..]))
        })
    }

    /// The same with other bytes.
    ///
    /// # Errors
    /// When they are not as many, or there is no memory.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_bytes(point: &Point, bytes: &[u8]) -> Result<Option<Self>> {
        let Some(mut tensor) = point.bias_gradient()? else { return Ok(None) };
        anyhow::ensure!(bytes.len() == tensor.bytes().len(), "{} bytes of a gradient of the bias", bytes.len());
        each!(&mut tensor.numbers, data => {
            let to: *mut u8 = data.as_mut_ptr().cast();
            // SAFETY: as many bytes, of another allocation; any bits are a number.
            unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        });
        Ok(Some(tensor))
    }
}

/// Which pairs of a sequence the mask and the lists of blocks keep.
struct Seen {
    /// The sequence as a point of its own.
    sequence: Point,
    /// Of each key, whether a query sees it. Empty where every query has numbers of its own.
    by_any: Vec<bool>,
}

impl Seen {
    fn new(sequence: Point) -> Self {
        let shared = sequence.bias.option().is_some_and(|form| !form.is_per_query());
        let keys = if shared { 0..sequence.seqlen } else { 0..0 };
        let by_any = keys.map(|key| sequence.queries_of(key).next().is_some()).collect();
        Self { sequence, by_any }
    }

    /// The keys of a row of the bias, of which [`keeps`](Self::keeps) tells those that are read.
    fn keys(&self, query: usize) -> Range<usize> {
        match self.by_any.len() {
            0 if query < self.sequence.seqlen_q() => self.sequence.keys(query),
            shared => 0..shared,
        }
    }

    fn keeps(&self, query: usize, key: usize) -> bool {
        self.by_any.get(key).copied().unwrap_or_else(|| self.sequence.lists_keep(query, key))
    }
}

impl Point {
    /// The numbers of the bias, from the seed. `None` where there is none.
    ///
    /// # Errors
    /// When there is no memory for them.
    pub(crate) fn bias_numbers(&self, seed: u64) -> Result<Option<BiasTensor>> {
        let Some(mut tensor) = self.bias_gradient().context("the bias")? else { return Ok(None) };
        let seen = self.bias_sequences();
        each!(&mut tensor.numbers, data => self.draw(data, &seen, seed));
        Ok(Some(tensor))
    }

    /// Memory for the gradient of the bias, full of NaN. `None` where there is no bias.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub(crate) fn bias_gradient(&self) -> Result<Option<BiasTensor>> {
        let Some(form) = self.bias_form() else { return Ok(None) };
        Ok(Some(BiasTensor::unwritten(form.dtype(), Layout::contiguous(self.bias_shape())?)?))
    }

    /// The form that problems have. With packed sequences it covers the longest one.
    pub(super) fn bias_form(&self) -> Option<Bias> {
        let form = self.bias.option()?;
        Some(self.packed.as_ref().map_or(form, |packed| form.covering(packed.longest(), packed.longest())))
    }

    /// `[1 or batch, 1 or heads_q, 1 or queries, keys]`, of packed sequences `[1 or sequences, 1 or heads_q, 1 or longest, longest]`.
    /// Zeros where there is no bias.
    pub(crate) fn bias_shape(&self) -> [usize; 4] {
        let Some(form) = self.bias_form() else { return [0; 4] };
        let of = |own, size| if own { size } else { 1 };
        let (batch, heads) = (of(form.is_per_batch(), self.sequences()), of(form.is_per_head(), self.heads_q));
        let [queries, keys] = form.covered().unwrap_or([self.seqlen_q(), self.seqlen]);
        [batch, heads, of(form.is_per_query(), queries), keys]
    }

    /// The bytes that the bias has for pairs, and so its gradient.
    pub(super) fn bias_bytes(&self) -> usize {
        let Some(form) = self.bias_form() else { return 0 };
        let numbers = match &self.packed {
            Some(packed) if form.is_per_batch() => {
                let of_one = |&length: &usize| if form.is_per_query() { length * length } else { length };
                self.bias_shape()[1] * packed.lengths.iter().map(of_one).sum::<usize>()
            }
            _ => self.bias_shape().iter().product(),
        };
        form.dtype().bytes() * numbers
    }

    /// Which pairs read the numbers of each of the bias's own batch entries. Sequences that share numbers are a part of the longest.
    fn bias_sequences(&self) -> Vec<Seen> {
        let per_batch = self.bias.option().is_some_and(|form| form.is_per_batch());
        let of_length = |seqlen| Seen::new(Self { seqlen, batch: 1, packed: None, ..self.clone() });
        match &self.packed {
            Some(packed) if per_batch => packed.lengths.iter().copied().map(of_length).collect(),
            Some(packed) => vec![of_length(packed.longest())],
            None => vec![of_length(self.seqlen)],
        }
    }

    /// Draws all rows, each with a generator of its own, so that threads share the work.
    fn draw<T: Float>(&self, data: &mut [T], sequences: &[Seen], seed: u64) {
        let [_, heads, queries, keys] = self.bias_shape();
        let row = |(number, row): (usize, &mut [T])| {
            let mut rng = SmallRng::seed_from_u64(seed ^ 0x6269_6173 ^ (number as u64) << 32);
            // Of a dense point all batch entries are alike.
            let seen = &sequences[number / (heads * queries) % sequences.len()];
            let query = number % queries;
            let read = seen.keys(query);
            // A row that all queries share would hide everything.
            let whole = seen.by_any.is_empty() && rng.random_range(0..8) == 7;
            for (key, to) in row.iter_mut().enumerate() {
                let normal = 2.0 * rng.sample::<f64, _>(StandardNormal);
                let draw = BiasDraw { whole, one_of: rng.random_range(0..12), normal };
                *to = narrow(self.bias.number(read.contains(&key) && seen.keeps(query, key), draw));
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let rows = data.len() / keys;
        let each = rows.div_ceil(threads).next_multiple_of(ROWS);
        std::thread::scope(|scope| {
            for (part, rows) in data.chunks_mut(each * keys).enumerate() {
                scope.spawn(move || {
                    rows.chunks_mut(keys).enumerate().for_each(|(i, of_one)| row((part * each + i, of_one)));
                });
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use crate::{Direction, Kind, Packed, Point, PointMask, Sweep};

    fn point(bias: &str, mask: PointMask) -> Point {
        let sweep = Sweep {
            bias: bias.parse().unwrap(),
            seqlens: vec![70],
            batch: Some(3),
            masks: vec![mask],
            quarter: true,
            ..Sweep::small()
        };
        sweep.points().unwrap().remove(0)
    }

    #[test]
    fn numbers_follow_from_the_seed() {
        for (bias, shape) in [("f32:bhq", [3, 4, 17, 70]), ("bf16:h", [1, 4, 1, 70]), ("f16", [1, 1, 1, 70])] {
            let point = point(bias, PointMask::Full);
            assert_eq!((point.bias_shape(), point.problem().unwrap().bias_shape()), (shape, shape));
            let of = |seed| point.bias_numbers(seed).unwrap().unwrap();
            let [once, again, other] = [of(4), of(4), of(5)].map(|tensor| tensor.widened().unwrap());
            assert!(once == again && once != other, "{bias}");
            assert_eq!(once.len(), shape.iter().product::<usize>());
            let squares = once.iter().map(|x| x * x).sum::<f64>() / once.len() as f64;
            assert!((2.0..6.0).contains(&squares), "{bias}: {squares}");
            // What a pair reads is where a contiguous tensor has it.
            let [_, heads, queries, keys] = shape;
            let at = ([2, 3, 16, 69].iter().zip(shape)).map(|(&i, size)| i.min(size - 1)).collect::<Vec<_>>();
            let place = ((at[0] * heads + at[1]) * queries + at[2]) * keys + at[3];
            assert_eq!(of(4).at([2, 3, 16, 69]), once[place]);
        }
        assert!(point("none", PointMask::Full).bias_numbers(1).unwrap().is_none());
    }

    #[test]
    fn what_is_hidden() {
        let (causal, window) = (PointMask::Causal, PointMask::Window(3));
        let own = point("f32:q:hidden", causal);
        let numbers = own.bias_numbers(2).unwrap().unwrap().widened().unwrap();
        let mut gone = 0;
        for (query, row) in numbers.chunks(70).enumerate() {
            assert!((0..70).all(|key| row[key].is_nan() != own.keys(query).contains(&key)));
            gone += usize::from(row.iter().all(|x| x.is_nan() || *x == f64::NEG_INFINITY));
        }
        assert!((1..8).contains(&gone), "{gone} of 17");
        // The first queries' windows leave the first keys to nobody.
        let shared = point("bf16:h:hidden", window);
        let numbers = shared.bias_numbers(2).unwrap().unwrap().widened().unwrap();
        assert!(
            numbers
                .chunks(70)
                .all(|row| row[..50].iter().all(|x| x.is_nan()) && row[51..].iter().any(|x| x.is_finite()))
        );
        let mask = point("f16::mask", causal).bias_numbers(2).unwrap().unwrap().widened().unwrap();
        assert!(mask.iter().all(|x| *x == 0.0 || *x == f64::NEG_INFINITY) && mask.contains(&0.0));
    }

    /// Of packed sequences, each counts from its own first row, and what is past its end is read by no pair.
    #[test]
    fn packed_sequences_have_the_size_of_the_longest() {
        let packed = Packed { kind: Kind::Long, lengths: vec![3, 1, 4], dense: [3, 3] };
        let of = |bias: &str, causal| {
            let dense = Point { queries: None, causal, ..point(bias, PointMask::Full) };
            Point { seqlen: 8, batch: 1, packed: Some(packed.clone()), ..dense }
        };
        for (bias, shape, numbers) in [
            ("f32:bhq:hidden", [3, 4, 4, 4], 4 * (9 + 1 + 16)),
            ("f32:h:hidden", [1, 4, 1, 4], 16),
            ("f32:bh", [3, 4, 1, 4], 4 * 8),
        ] {
            for causal in [false, true] {
                let point = of(bias, causal);
                assert_eq!((point.bias_shape(), point.problem().unwrap().bias_shape()), (shape, shape));
                let plain = Point { bias: "none".parse().unwrap(), ..point.clone() };
                assert_eq!(point.bytes() - plain.bytes(), 4 * numbers);
                let tensor = point.bias_numbers(3).unwrap().unwrap();
                for (place, number) in tensor.widened().unwrap().into_iter().enumerate() {
                    let (entry, query, key) = (place / (shape[2] * 4) / 4 % shape[0], place / 4 % shape[2], place % 4);
                    // Those that share numbers are a part of the longest.
                    let length = if shape[0] == 1 { 4 } else { packed.lengths[entry] };
                    let read = key < length && (shape[2] == 1 || query < length && (!causal || key <= query));
                    assert_eq!(number.is_nan(), bias.ends_with("hidden") && !read, "{point} {place}");
                }
                // Row 6 is query 2 of the last sequence.
                let pair = point.in_sequence([0, 1, 6, 5]);
                assert_eq!(pair, [2, 1, 2, 1]);
                assert!(tensor.at(pair).is_finite() || tensor.at(pair) == f64::NEG_INFINITY);
            }
        }
    }

    #[test]
    fn its_bytes_are_moved_once_and_twice() {
        let (with, without) = (point("bf16:bq", PointMask::Full), point("none", PointMask::Full));
        assert_eq!(with.bytes() - without.bytes(), 2 * 3 * 17 * 70);
        let backward = |point: Point| Point { direction: Direction::Bwd, ..point }.bytes();
        assert_eq!(backward(with) - backward(without), 2 * 2 * 3 * 17 * 70);
    }
}
