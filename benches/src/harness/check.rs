//! A look at the output before it is timed: a fast wrong kernel must not become a figure.
//!
//! This is not the test suite (that holds every row to a tolerance): some rows against f64, the whole against another
//! library's, and NaN where a query is NaN and nowhere else. The error of O on these rows is reported.

mod backward;
mod forward;

use std::collections::BTreeMap;
use std::ops::Range;

use hopper_attention::{DType, Float, Layout};
use serde_json::Value;

use super::contest::{Outputs, Pool, Task};
use crate::point::BiasTensor;
use crate::{Class, Direction, Point};

/// Relative error allowed to a row: well above rounding, two orders below a wrong mask or a lost block of keys.
fn bound(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 6e-3,
        DType::F32 => 1e-4,
        _ => 3e-2,
    }
}

/// An ulp of 1: what sums that differ in their last bits may differ by once they are rounded.
fn ulp(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 1.0 / 1024.0,
        DType::F32 => f64::from(f32::EPSILON),
        _ => 1.0 / 128.0,
    }
}

/// The LSE is f32 throughout; this is a wrong normalisation, not rounding.
const LSE_BOUND: f64 = 2e-3;

/// Rows that two gradients are compared over. A row alone may be what is left of terms that cancel (the only
/// key of a query gives it a gradient of 0), and then its last bits are all it has.
const BLOCK: usize = 64;
/// Gradients of unit-variance inputs are above this, but for those that are 0.
const SMALLEST: f64 = 1e-4;

/// How many times as far two libraries' dQ and dK may be apart where inputs are not normal.
const OF_OTHERS: f64 = 20.0;

/// Rows all over O that are compared with f64.
const SAMPLE: usize = 128;

/// The same of inputs that are not normal. Most weights are then far below 1, and f16 has no more than 2^-24 for each: a sum of
/// thousands of them is off by some 1e-6.
const SMALLEST_OF_OTHERS: f64 = 1e-3;

/// A tensor that a library writes.
struct Written<'a> {
    name: &'static str,
    layout: &'a Layout<4>,
}

/// What the point's libraries write, in the order of [`Outputs::tensors`].
fn written<'a, T>(task: &'a Task<'_, T>) -> Vec<Written<'a>> {
    let named = |name, layout| Written { name, layout };
    match task.point.direction {
        Direction::Fwd => vec![named("o", &task.o)],
        Direction::Bwd => vec![named("d_q", &task.q), named("d_k", &task.k), named("d_v", &task.v)],
    }
}

/// A row in f64.
struct Row {
    /// Of which of the tensors.
    tensor: usize,
    /// Batch, token and head.
    at: [usize; 3],
    exact: Vec<f64>,
    /// What the row would be if its terms were independent: its error is relative to this, should they cancel.
    size: f64,
}

/// Rows of a point's outputs from the definition, for every library that computes it.
pub(super) struct Expected<'a, T> {
    task: &'a Task<'a, T>,
    rows: Vec<Row>,
    /// Places of the LSE, and what belongs there.
    lse: Vec<(usize, f64)>,
    /// Numbers of the gradient of the bias.
    d_bias: Vec<Number>,
}

/// A number of the gradient of the bias in f64.
struct Number {
    /// Batch entry, head, query and key.
    at: [usize; 4],
    exact: f64,
    /// As that of a row.
    size: f64,
}

impl<'a, T: Float> Expected<'a, T> {
    pub(super) fn new(task: &'a Task<'a, T>, pool: &Pool<T>) -> Self {
        let ((rows, lse), d_bias) = match task.point.direction {
            Direction::Fwd => (forward::rows(task, pool), vec![]),
            Direction::Bwd => ((backward::rows(task, pool), vec![]), backward::of_bias(task, pool)),
        };
        Self { task, rows, lse, d_bias }
    }

    /// The largest error of the gradient of the bias; NaN where there is none. `None` where none is asked for.
    fn error_of_d_bias(&self, outputs: &Outputs<T>) -> Option<f64> {
        let form = self.task.point.bias.option().filter(|_| self.task.point.direction == Direction::Bwd)?;
        // What is less than the smallest number of f16 above 0 is lost.
        let least = if form.dtype() == DType::F16 { 2f64.powi(-24) / bound(T::DTYPE) } else { 0.0 };
        let error = |Number { at, exact, size }: &Number| {
            let got = outputs.d_bias.as_ref().map_or(f64::NAN, |d_bias| d_bias.at(*at));
            apart(&[got], &[*exact], size.max(least))
        };
        Some(self.d_bias.iter().map(error).fold(0.0, worse))
    }

    /// What the libraries compute.
    pub(super) fn task(&self) -> &'a Task<'a, T> {
        self.task
    }

    /// The relative RMSE of O on the rows, and its largest error. `None` of gradients.
    pub(super) fn error_of_o(&self, outputs: &Outputs<T>) -> Option<[f64; 2]> {
        let (Direction::Fwd, Some(o)) = (self.task.point.direction, outputs.tensors.first()) else { return None };
        let (mut squares, mut of_exact, mut largest) = (0.0, 0.0, 0.0);
        for row in self.rows.iter().filter(|row| !is_nan(self.task.point, row.at)) {
            for (got, exact) in values(o, &self.task.o, row.at).into_iter().zip(&row.exact) {
                squares += (got - exact).powi(2);
                of_exact += exact.powi(2);
                largest = worse((got - exact).abs(), largest);
            }
        }
        Some([if squares == 0.0 { 0.0 } else { (squares / of_exact).sqrt() }, largest])
    }

    /// The errors found, by name, and a complaint when they are too large.
    pub(super) fn check(&self, outputs: &Outputs<T>) -> (BTreeMap<String, Value>, Option<String>) {
        let [unwritten, lost] = stray(self.task, outputs);
        let smallest = if others(self.task.point) { SMALLEST_OF_OTHERS } else { 0.0 };
        let mut errors: Vec<(&str, f64, f64)> = Vec::new();
        for (tensor, Written { name, layout }) in written(self.task).into_iter().enumerate() {
            let data = outputs.tensors.get(tensor).map_or(&[][..], Vec::as_slice);
            let error = self.rows.iter().filter(|row| row.tensor == tensor).map(|row| {
                let got = values(data, layout, row.at);
                match is_nan(self.task.point, row.at) {
                    true => 0.0, // it is NaN, or is counted as lost
                    false => apart(&got, &row.exact, row.size.max(smallest * (got.len() as f64).sqrt())),
                }
            });
            // The name that reports have had for O since there were reports.
            let name = if name == "o" { "row" } else { name };
            errors.push((name, error.fold(0.0, worse), bound(T::DTYPE)));
        }
        if !self.lse.is_empty() {
            let got = |at: usize| outputs.lse.get(at).map_or(f64::NAN, |&x| f64::from(x));
            let places = self.lse.iter().filter(|(at, _)| !is_nan_lse(self.task.point, *at));
            // Both are -inf where a bias hides a whole row.
            let error = places.map(|&(at, exact)| if got(at) == exact { 0.0 } else { (got(at) - exact).abs() });
            errors.push(("lse", error.fold(0.0, worse), LSE_BOUND));
        }
        errors.extend(self.error_of_d_bias(outputs).map(|error| ("d_bias", error, bound(T::DTYPE))));
        let mut numbers = BTreeMap::from([("unwritten".to_owned(), unwritten.into())]);
        let mut complaints = Vec::new();
        if unwritten > 0 {
            complaints.push(format!("{unwritten} elements are NaN"));
        }
        if lost > 0 {
            complaints.push(format!("{lost} elements of NaN queries are not NaN"));
        }
        for (name, error) in ["rms", "max"].into_iter().zip(self.error_of_o(outputs).into_iter().flatten()) {
            numbers.insert(name.into(), number(error));
        }
        for (name, error, bound) in errors {
            numbers.insert(name.into(), number(error));
            complaints.extend(beyond(name, error, bound));
        }
        (numbers, (!complaints.is_empty()).then(|| complaints.join("; ")))
    }
}

/// Whether the outputs are gradients of inputs that are not normal.
fn others(point: &Point) -> bool {
    point.direction == Direction::Bwd && !point.is_normal()
}

/// Whether the row of a forward's output is NaN, since its query is. (There are no backward points of such inputs.)
fn is_nan(point: &Point, [_, token, _]: [usize; 3]) -> bool {
    point.direction == Direction::Fwd && point.inputs.is_nan(token)
}

/// The same of a place of the LSE.
fn is_nan_lse(point: &Point, at: usize) -> bool {
    is_nan(point, [0, at % point.seqlen_q(), 0])
}

/// How many elements are NaN where none should be, and how many are not where all should be.
fn stray<T: Float>(task: &Task<'_, T>, outputs: &Outputs<T>) -> [usize; 2] {
    let nan = outputs.tensors.iter().flatten().filter(|x| x.to_f32().is_nan()).count();
    let nan = nan + outputs.d_bias.as_ref().map_or(0, BiasTensor::count_nan);
    let nan = nan + outputs.lse.iter().filter(|x| x.is_nan()).count();
    let point = task.point;
    if point.inputs != Class::Nan {
        return [nan, 0];
    }
    let (mut belong, mut right) = (0, 0);
    let queries = (0..point.seqlen_q()).filter(|&query| is_nan(point, [0, query, 0]));
    for query in queries {
        for (batch, head) in (0..point.batch).flat_map(|batch| (0..point.heads_q).map(move |head| (batch, head))) {
            let place = (batch * point.heads_q + head) * point.seqlen_q() + query;
            let row = outputs.tensors.first().map(|o| values(o, &task.o, [batch, query, head])).unwrap_or_default();
            let lse = outputs.lse.get(place).map(|&lse| f64::from(lse));
            for x in row.into_iter().chain(lse) {
                belong += 1;
                right += usize::from(x.is_nan());
            }
        }
    }
    [nan - right.min(nan), belong - right]
}

/// Holds the whole of an output against another library's; a complaint when they are too far apart.
pub(super) fn cross<T: Float>(
    task: &Task<'_, T>,
    outputs: &Outputs<T>,
    other: &Outputs<T>,
    numbers: &mut BTreeMap<String, Value>,
) -> Option<String> {
    let tensors = written(task).into_iter().zip(outputs.tensors.iter().zip(&other.tensors));
    let mut complaint = None;
    let apart = tensors.map(|(Written { name, layout }, (a, b))| {
        let apart = distance(task.point, layout, a, b);
        // What is left of terms that cancel, where O is rounded: 0.084 was measured of two right gradients in bf16. dV has none.
        let wider = if others(task.point) && name != "d_v" { OF_OTHERS } else { 1.0 };
        complaint = complaint.take().or_else(|| beyond("cross", apart, wider * bound(T::DTYPE)));
        apart
    });
    let mut worst = apart.fold(0.0, worse);
    if let (Some(a), Some(b)) = (&outputs.d_bias, &other.d_bias) {
        let apart = distance_of_biases(task.point, a, b);
        complaint = complaint.or_else(|| beyond("cross", apart, bound(T::DTYPE)));
        worst = worse(worst, apart);
    }
    numbers.insert("cross".into(), number(worst));
    complaint
}

/// A complaint when a library's outputs are not those that it gave on the same inputs before.
///
/// A gradient may be summed in any order, and so differ in its last bits.
pub(super) fn changed<T: Float>(task: &Task<'_, T>, before: &Outputs<T>, after: &Outputs<T>) -> Option<String> {
    let tensors = written(task).into_iter().zip(before.tensors.iter().zip(&after.tensors));
    let mut moved: Vec<&str> = tensors
        .filter(|(Written { name, layout }, (a, b))| {
            let far = || beyond(name, distance(task.point, layout, b, a), ulp(T::DTYPE)).is_some();
            if *name == "o" { !a.iter().map(bits).eq(b.iter().map(bits)) } else { far() }
        })
        .map(|(Written { name, .. }, _)| name)
        .collect();
    if let (Some(a), Some(b)) = (&before.d_bias, &after.d_bias)
        && beyond("d_bias", distance_of_biases(task.point, b, a), ulp(a.dtype()).max(ulp(T::DTYPE))).is_some()
    {
        moved.push("d_bias");
    }
    if !before.lse.iter().map(|x| x.to_bits()).eq(after.lse.iter().map(|x| x.to_bits())) {
        moved.push("lse");
    }
    (!moved.is_empty()).then(|| format!("the output changed between runs on the same inputs: {}", moved.join(", ")))
}

/// Widening is exact, so that these bits tell any two values apart.
fn bits<T: Float>(value: &T) -> u32 {
    value.to_f32().to_bits()
}

/// The largest relative distance of two outputs: of a row in the forward, of a block of rows in the backward. Where inputs are not
/// normal, few rows of a gradient may be large and most of them what is left of terms that cancel: then of a whole head.
fn distance<T: Float>(point: &Point, layout: &Layout<4>, a: &[T], b: &[T]) -> f64 {
    let [batches, seqlen, heads, dims] = layout.shape();
    let (tokens, smallest) = match point.direction {
        Direction::Fwd => (1, 0.0),
        Direction::Bwd if others(point) => (seqlen, SMALLEST),
        Direction::Bwd => (BLOCK, SMALLEST),
    };
    // Token after token of a head, and then of the next: short sequences share a block, and the last block reaches back,
    // since it might be one row alone.
    let count = batches * heads * seqlen;
    let at = |row: usize| [row / seqlen / heads, row % seqlen, row / seqlen % heads];
    let mut worst = 0.0;
    for first in (0..count).step_by(tokens).filter(|&row| !is_nan(point, at(row))) {
        let block = block(first, tokens, count);
        let all = |data| block.clone().flat_map(|row| values(data, layout, at(row))).collect();
        let (a, b): (Vec<f64>, Vec<f64>) = (all(a), all(b));
        worst = worse(worst, apart(&a, &b, smallest * ((block.len() * dims) as f64).sqrt()));
    }
    worst
}

/// The rows that are compared together with the one that is `first` of so many, of `count` in all. The last block reaches back.
fn block(first: usize, tokens: usize, count: usize) -> Range<usize> {
    first.min(count.saturating_sub(tokens))..(first + tokens).min(count)
}

/// The largest relative distance of blocks of rows of two gradients of a bias. Packed sequences may be short, so that nothing but what
/// is left of terms that cancel is in a block. Then the whole is compared.
fn distance_of_biases(point: &Point, a: &BiasTensor, b: &BiasTensor) -> f64 {
    let [batch, heads, queries, keys] = a.shape();
    let count = batch * heads * queries;
    let rows = if point.packed.is_some() { count } else { BLOCK };
    let of_block = |first| {
        let block = block(first, rows, count);
        let all = |x: &BiasTensor| block.clone().flat_map(|row| x.row(row)).collect::<Vec<f64>>();
        apart(&all(a), &all(b), SMALLEST * ((block.len() * keys) as f64).sqrt())
    };
    (0..count).step_by(rows).map(of_block).fold(0.0, worse)
}

/// The vector of a batch element, token and head; NaN where the data ends before.
fn values<T: Float>(data: &[T], layout: &Layout<4>, [batch, token, head]: [usize; 3]) -> Vec<f64> {
    let dims = layout.shape()[3];
    let start = layout.offset([batch, token, head, 0]).unwrap_or(usize::MAX);
    let row = start.checked_add(dims).and_then(|end| data.get(start..end));
    row.map_or_else(|| vec![f64::NAN; dims], |row| row.iter().map(|x| f64::from(x.to_f32())).collect())
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn norm(a: &[f64]) -> f64 {
    dot(a, a).sqrt()
}

/// The distance of two vectors, relative to the second, or to `size` where that is larger. Equal vectors have none, also where
/// both are 0 (the gradient of a key that nobody sees).
fn apart(a: &[f64], b: &[f64], size: f64) -> f64 {
    let distance = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
    if distance == 0.0 { 0.0 } else { distance / norm(b).max(size) }
}

/// A complaint about an error past its bound; a NaN is larger than any bound.
fn beyond(name: &str, error: f64, bound: f64) -> Option<String> {
    (error.is_nan() || error > bound).then(|| format!("{name} {error:.3e} > {bound:.0e}"))
}

/// JSON has no NaN.
pub(super) fn number(x: f64) -> Value {
    if x.is_finite() { x.into() } else { x.to_string().into() }
}

/// The larger of two errors; NaN is larger than everything.
fn worse(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

/// `[batch, token, query head]` of the first and last heads, at both ends of so many tokens and around the middle, where tiles
/// meet. Of packed sequences also at both ends of the one in the middle.
fn places(point: &Point, seqlen: usize) -> Vec<[usize; 3]> {
    let last = seqlen - 1;
    let mut tokens = vec![0, 1, last / 2, last / 2 + 1, last.saturating_sub(1), last];
    if point.packed.is_some() {
        let middle = point.sequence(last / 2);
        tokens.extend([middle.start, middle.end - 1]);
    }
    tokens.iter_mut().for_each(|token| *token = (*token).min(last));
    let heads = [[0, 0], [point.batch - 1, point.heads_q - 1], [point.batch / 2, point.heads_q / 3]];
    let tokens = &tokens;
    heads.iter().flat_map(|&[batch, head]| tokens.iter().map(move |&token| [batch, token, head])).collect()
}

/// `[batch, token, query head]` of rows all over the tensor, on which the error of O is measured as well: [`SAMPLE`] of them,
/// or all where there are fewer.
fn spread(point: &Point, seqlen: usize) -> Vec<[usize; 3]> {
    let rows = point.batch * point.heads_q * seqlen;
    let count = rows.min(SAMPLE);
    let row = |i: usize| {
        // One in each of equal parts, at another place of each: neighbours in a tile are not alike.
        let (begin, end) = (i * rows / count, (i + 1) * rows / count);
        let row = begin + i * 7919 % (end - begin);
        [row / seqlen / point.heads_q, row % seqlen, row / seqlen % point.heads_q]
    };
    (0..count).map(row).collect()
}
