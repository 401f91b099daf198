//! How accurate O is on each class of inputs, beside the computation that FlashAttention-3 makes: a true running maximum, weights
//! rounded to the operands' type, and an exact sum of the weights before they are rounded.
//!
//! A weight that is a row's maximum when it comes is 1 there, which has no rounding. A computation with another reference rounds it,
//! which shows in rows that one key dominates. So the tolerance, which bounds the worst row, does not see it, and this does.

use std::fmt;

use hopper_attention::{
    DType, Device, Dims, Float, ForwardArgs, ForwardProblem, Layout, Mask, OutputOf, Stream, TensorMut, TensorRef,
    Workspace,
};
use rayon::prelude::*;

use crate::data::{Input, Values};
use crate::inputs::Class;

/// Draws of the inputs: each is a head of one problem.
pub const DRAWS: usize = 8;
/// The relative RMSE of O is at most this many times the emulation's, each averaged over the draws.
pub const RMSE: f64 = 1.05;
/// The largest error of O is at most this many times the emulation's, likewise.
pub const LARGEST: f64 = 1.25;

/// Keys of a block, as FlashAttention-3 has them under a causal mask.
const BLOCK: usize = 128;
/// Queries of each head that are compared, or all where there are fewer.
const QUERIES: usize = 256;

/// What is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// What Q, K and V hold.
    pub class: Class,
    /// The width of all heads.
    pub head_dim: usize,
    /// Whether a query sees the keys up to its own only.
    pub causal: bool,
    /// Queries, and keys.
    pub seqlen: usize,
}

impl Setting {
    /// Every class and mask at these head dims and lengths.
    pub fn all(head_dims: &[usize], seqlens: &[usize]) -> Vec<Self> {
        let mut all = Vec::new();
        for (class, &head_dim) in Class::ALL.into_iter().flat_map(|class| head_dims.iter().map(move |dim| (class, dim)))
        {
            for causal in [false, true] {
                all.extend(seqlens.iter().map(|&seqlen| Self { class, head_dim, causal, seqlen }));
            }
        }
        all
    }

    /// The library's problem.
    pub fn problem(&self, dtype: DType) -> ForwardProblem {
        let mask = if self.causal { Mask::causal() } else { Mask::Full };
        let dims = Dims::new(1, self.seqlen, DRAWS, self.head_dim);
        ForwardProblem::builder(dtype, dims).mask(mask).lse(true).build().expect("legal sizes")
    }

    /// The keys that a query sees.
    fn keys(&self, query: usize) -> usize {
        if self.causal { query + 1 } else { self.seqlen }
    }
}

/// How far an output is from exact, averaged over the draws.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Error {
    /// Relative RMSE.
    pub rmse: f64,
    /// The largest error of an element.
    pub largest: f64,
}

/// What the weights of a row are relative to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reference {
    /// The largest score of the blocks so far.
    RunningMaximum,
    /// A score of 0: no maximum at all.
    Zero,
}

/// Q, K and V of a setting, what is exact for some queries, and what the emulation makes of these.
pub struct Sample<T> {
    setting: Setting,
    /// The library's problem.
    pub problem: ForwardProblem,
    /// Q, K and V, each `[1, seqlen, DRAWS, head_dim]` without gaps.
    pub qkv: [Vec<T>; 3],
    queries: Vec<usize>,
    /// Of each query of each head in turn; none of a query that is NaN.
    exact: Vec<Option<Vec<f64>>>,
    emulated: Error,
}

/// An output beside the emulation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Verdict {
    /// What is computed.
    pub setting: Setting,
    /// In which type.
    pub dtype: DType,
    /// The output's error.
    pub got: Error,
    /// The emulation's.
    pub emulated: Error,
}

/// A head's vectors, one after the other.
pub(crate) struct Head {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
}

impl<T: Float> Sample<T> {
    /// Draws the inputs, and computes what is compared with.
    pub fn new(setting: Setting) -> Self {
        let Setting { seqlen, head_dim, .. } = setting;
        let seed = (seqlen * 2 + head_dim) as u64;
        let qkv = [Input::Q, Input::K, Input::V].map(|input| {
            let values = Values::Like(setting.class).tensor(input, [1, seqlen, DRAWS, head_dim], seed);
            values.data().iter().map(|&x| T::from_f32(x as f32)).collect::<Vec<T>>()
        });
        let stride = seqlen.div_ceil(QUERIES);
        // Neighbours in a tile are not alike: another place in each stride.
        let queries =
            (0..seqlen).step_by(stride).enumerate().map(|(i, first)| (first + i * 5 % stride).min(seqlen - 1));
        let mut sample = Self {
            setting,
            problem: setting.problem(T::DTYPE),
            qkv,
            queries: queries.collect(),
            exact: vec![],
            emulated: Error { rmse: f64::NAN, largest: f64::NAN },
        };
        sample.exact = sample.rows(|head, query| {
            let exact = || exact(head.query(query, head_dim), head, setting.keys(query)).0;
            (!setting.class.is_nan(query)).then(exact)
        });
        sample.emulated = sample.error(&sample.emulate(Reference::RunningMaximum));
        sample
    }

    /// The emulation's rows of the queries that are compared, and NaN elsewhere, as the library would write O.
    pub fn emulate(&self, reference: Reference) -> Vec<T> {
        let Setting { head_dim, seqlen, .. } = self.setting;
        let rows = self.rows(|head, query| {
            let scale = self.problem.softmax_scale();
            emulated::<T>(head.query(query, head_dim), head, self.setting.keys(query), scale, reference).0
        });
        let mut o = vec![T::from_f32(f32::NAN); seqlen * DRAWS * head_dim];
        for (i, row) in rows.into_iter().enumerate() {
            let at = self.place(i);
            o[at..at + head_dim].copy_from_slice(&row);
        }
        o
    }

    /// The emulation's error.
    pub fn emulated(&self) -> Error {
        self.emulated
    }

    /// The RMSE that the rounding of weights and of O explains. A weight has the relative error of its type, unless it is the largest
    /// so far when it comes: then it is 1.
    pub fn predicted_rmse(&self) -> f64 {
        let unit = if T::DTYPE == DType::F16 { 1.0 / 1024.0 } else { 1.0 / 128.0 };
        // The rounding error of numbers that are as frequent in each part of a binade, on a logarithmic scale: a spacing over
        // sqrt(12), times the root mean square of 1/x in [1, 2).
        let relative: f64 = unit / 12_f64.sqrt() * (0.375 / std::f64::consts::LN_2).sqrt();
        let head_dim = self.setting.head_dim;
        let squares = self.rows(|head, query| {
            if self.setting.class.is_nan(query) {
                return [0.0; 2];
            }
            let (o, weights) = exact(head.query(query, head_dim), head, self.setting.keys(query));
            let mut most = f64::NEG_INFINITY;
            let mut rounded = 0.0;
            for (first, block) in weights.chunks(BLOCK).enumerate().rev() {
                most = block.iter().copied().fold(most, f64::max);
                for (i, weight) in block.iter().enumerate().filter(|(_, weight)| **weight < most) {
                    let v = &head.v[(first * BLOCK + i) * head_dim..][..head_dim];
                    rounded += weight.powi(2) * v.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
                }
            }
            // O itself is rounded where it is: one that is nearly a row of V errs by less than others.
            let of_o = o.iter().map(|&x| (f64::from(T::from_f32(x as f32).to_f32()) - x).powi(2)).sum::<f64>();
            [relative.powi(2) * rounded + of_o, o.iter().map(|x| x * x).sum()]
        });
        let per_head = squares.chunks(self.queries.len()).map(|rows| {
            let [errors, of_o] = rows.iter().fold([0.0; 2], |sum, row| [sum[0] + row[0], sum[1] + row[1]]);
            (errors / of_o).sqrt()
        });
        per_head.sum::<f64>() / DRAWS as f64
    }

    /// What is exact of the queries that are compared: head, query, and its row of O.
    pub fn exact(&self) -> impl Iterator<Item = (usize, usize, &[f64])> {
        let count = self.queries.len();
        let rows = self.exact.iter().enumerate();
        rows.filter_map(move |(i, row)| Some((i / count, self.queries[i % count], row.as_deref()?)))
    }

    /// Holds an output, `[1, seqlen, DRAWS, head_dim]` without gaps, beside the emulation.
    ///
    /// # Errors
    /// Where a row is NaN whose query is not, or the other way round.
    pub fn judge(&self, o: &[T]) -> Result<Verdict, String> {
        let Setting { head_dim, class, .. } = self.setting;
        for (i, row) in o.chunks_exact(head_dim).enumerate() {
            let (query, head) = (i / DRAWS, i % DRAWS);
            let nan = row.iter().filter(|x| x.to_f32().is_nan()).count();
            let want = if class.is_nan(query) { head_dim } else { 0 };
            if nan != want {
                return Err(format!(
                    "{}: {nan} elements of query {query}, head {head} are NaN, not {want}",
                    self.setting
                ));
            }
        }
        Ok(Verdict { setting: self.setting, dtype: T::DTYPE, got: self.error(o), emulated: self.emulated })
    }

    fn error(&self, o: &[T]) -> Error {
        let head_dim = self.setting.head_dim;
        let mut mean = Error { rmse: 0.0, largest: 0.0 };
        for draw in 0..DRAWS {
            let (mut squares, mut of_exact, mut largest) = (0.0, 0.0, 0.0_f64);
            for (i, exact) in self.exact.iter().enumerate().skip(draw * self.queries.len()).take(self.queries.len()) {
                let at = self.place(i);
                for (got, exact) in o[at..at + head_dim].iter().zip(exact.iter().flatten()) {
                    let error = f64::from(got.to_f32()) - exact;
                    squares += error * error;
                    of_exact += exact * exact;
                    largest = largest.max(error.abs());
                }
            }
            mean.rmse += (squares / of_exact).sqrt() / DRAWS as f64;
            mean.largest += largest / DRAWS as f64;
        }
        mean
    }

    /// The first element of the row that is compared as number `i`.
    fn place(&self, i: usize) -> usize {
        let (head, query) = (i / self.queries.len(), self.queries[i % self.queries.len()]);
        (query * DRAWS + head) * self.setting.head_dim
    }

    /// O of the CPU backend.
    pub fn on_cpu(&self) -> Vec<T>
    where
        T: OutputOf<T>,
    {
        let layout = Layout::contiguous(self.problem.q_shape()).expect("a small tensor");
        let of_lse = Layout::contiguous(self.problem.lse_shape()).expect("a small tensor");
        let (mut o, mut lse) = (vec![T::from_f32(0.0); layout.span()], vec![0.0_f32; of_lse.span()]);
        let [q, k, v] = [0, 1, 2].map(|i| TensorRef::host(&self.qkv[i], layout).expect("a fitting layout"));
        let args = ForwardArgs::new(q, k, v, TensorMut::host(&mut o, layout).expect("a fitting layout"));
        let args = args.lse(TensorMut::host(&mut lse, of_lse).expect("a fitting layout"));
        let plan = self.problem.plan(&Device::cpu()).expect("a plan for the CPU");
        let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes()).expect("memory");
        plan.run(&Stream::Cpu, &mut workspace, args).expect("a result");
        o
    }

    /// Something of each query that is compared, head after head, on all cores.
    fn rows<R: Send>(&self, row: impl Fn(&Head, usize) -> R + Sync) -> Vec<R> {
        let mut rows = Vec::new();
        for head in 0..DRAWS {
            let [q, k, v] = [0, 1, 2].map(|i| self.head(&self.qkv[i], head));
            let head = Head { q, k, v };
            rows.par_extend(self.queries.par_iter().map(|&query| row(&head, query)));
        }
        rows
    }

    fn head(&self, data: &[T], head: usize) -> Vec<f32> {
        of_head(data, head, DRAWS, self.setting.head_dim)
    }
}

/// A head's rows of a tensor `[1, seqlen, heads, head_dim]` without gaps.
pub(crate) fn of_head<T: Float>(data: &[T], head: usize, heads: usize, head_dim: usize) -> Vec<f32> {
    let rows = data.chunks_exact(head_dim).skip(head).step_by(heads);
    rows.flatten().map(|x| x.to_f32()).collect()
}

impl Head {
    pub fn query(&self, query: usize, head_dim: usize) -> &[f32] {
        &self.q[query * head_dim..][..head_dim]
    }
}

/// A row of O in f64, and its weights.
fn exact(q: &[f32], Head { k, v, .. }: &Head, keys: usize) -> (Vec<f64>, Vec<f64>) {
    let head_dim = q.len();
    let scale = 1.0 / (head_dim as f64).sqrt();
    let score = |k: &[f32]| scale * q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>();
    let mut weights: Vec<f64> = k.chunks_exact(head_dim).take(keys).map(score).collect();
    let most = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    weights.iter_mut().for_each(|weight| *weight = (*weight - most).exp());
    let sum: f64 = weights.iter().sum();
    weights.iter_mut().for_each(|weight| *weight /= sum);
    let mut o = vec![0.0; head_dim];
    for (weight, v) in weights.iter().zip(v.chunks_exact(head_dim)) {
        o.iter_mut().zip(v).for_each(|(o, &v)| *o += weight * f64::from(v));
    }
    (o, weights)
}

/// A row of O in f32, block after block from the last one, and its log-sum-exp to the base 2.
pub(crate) fn emulated<T: Float>(
    q: &[f32],
    Head { k, v, .. }: &Head,
    keys: usize,
    softmax_scale: f32,
    reference: Reference,
) -> (Vec<T>, f32) {
    let head_dim = q.len();
    // Scores are logarithms to the base 2.
    let scale = std::f32::consts::LOG2_E * softmax_scale;
    let (mut o, mut sum) = (vec![0.0_f32; head_dim], 0.0_f32);
    let mut maximum = if reference == Reference::Zero { 0.0 } else { f32::NEG_INFINITY };
    for first in (0..keys).step_by(BLOCK).rev() {
        let block = first..(first + BLOCK).min(keys);
        let score = |key: usize| scale * dot(q, &k[key * head_dim..][..head_dim]);
        let scores: Vec<f32> = block.clone().map(score).collect();
        if reference == Reference::RunningMaximum {
            let before = maximum;
            maximum = scores.iter().copied().fold(maximum, f32::max);
            let rescale = (before - maximum).exp2();
            sum *= rescale;
            o.iter_mut().for_each(|o| *o *= rescale);
        }
        for (key, score) in block.zip(scores) {
            let weight = (score - maximum).exp2();
            sum += weight;
            let rounded = T::from_f32(weight).to_f32();
            o.iter_mut().zip(&v[key * head_dim..][..head_dim]).for_each(|(o, &v)| *o += rounded * v);
        }
    }
    (o.into_iter().map(|o| T::from_f32(o / sum)).collect(), maximum + sum.log2())
}

/// In f32, in eight sums: as exact as a tensor core's, and in the registers of a vector unit.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0_f32; 8];
    for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum()
}

impl Verdict {
    /// The error over the emulation's: of the RMSE and of the largest error.
    pub fn ratios(&self) -> [f64; 2] {
        [self.got.rmse / self.emulated.rmse, self.got.largest / self.emulated.largest]
    }

    /// Whether both are within their bounds. NaN is not.
    pub fn passed(&self) -> bool {
        let [rmse, largest] = self.ratios();
        rmse <= RMSE && largest <= LARGEST
    }

    /// The head of a table of verdicts.
    pub const HEAD: &str = "class   type  dim  mask    length  rmse      rmse ratio  max ratio";
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { class, head_dim, causal, seqlen } = self;
        write!(f, "{class} d{head_dim} {} s{seqlen}", if *causal { "causal" } else { "full" })
    }
}

/// A line of a table.
impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Setting { class, head_dim, causal, seqlen } = self.setting;
        let mask = if causal { "causal" } else { "full" };
        let ([rmse, largest], dtype) = (self.ratios(), self.dtype.name());
        write!(f, "{class:<7} {dtype:<5} {head_dim:<4} {mask:<7} {seqlen:<7} ")?;
        write!(f, "{:<9.2e} {rmse:<11.3} {largest:<9.3}", self.got.rmse)?;
        f.write_str(if self.passed() { "" } else { "  PAST THE BOUND" })
    }
}
