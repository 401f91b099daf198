//! How accurate dQ, dK and dV are on each class of inputs, and the O that they are made of, beside the computation that
//! FlashAttention-3 makes: O and the LSE of its own forward (see [`accuracy`](crate::accuracy)), P in f32, and P and dS rounded to
//! the operands' type where they enter a product.

use std::fmt;
use std::ops::{AddAssign, Mul};

use hopper_attention::{BackwardProblem, DType, Float, ForwardProblem};
use rayon::prelude::*;

use crate::accuracy::{DRAWS, Error, Head, LARGEST, RMSE, Reference, Setting, emulated, of_head};
use crate::data::{Input, Values};
use crate::inputs::Class;

/// What is judged, in the order of everything here.
pub const NAMES: [&str; 4] = ["O", "dQ", "dK", "dV"];

/// Inputs of a setting, what is exact, and how far the emulation is from it.
pub struct Sample<T> {
    name: String,
    /// The library's forward problem, with an LSE.
    pub forward: ForwardProblem,
    /// Its gradients.
    pub problem: BackwardProblem,
    /// Q, K, V and dO, each `[1, seqlen, heads, head_dim]` without gaps.
    pub inputs: [Vec<T>; 4],
    /// Of each head.
    exact: Vec<[Vec<f64>; 4]>,
    emulated: [Option<Error>; 4],
}

/// Gradients beside the emulation.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// What is computed.
    pub name: String,
    /// In which type.
    pub dtype: DType,
    /// Of O, dQ, dK and dV: the error, and the emulation's. None where every element is NaN.
    pub errors: [Option<[Error; 2]>; 4],
}

impl<T: Float> Sample<T> {
    /// Draws the inputs, and computes what is compared with.
    pub fn new(setting: Setting) -> Self {
        Self::of(setting.to_string(), setting.problem(T::DTYPE), Self::draw(setting))
    }

    /// Queries whose weights are all alike: nothing more is done to the inputs, and the softmax scale is 1e-4. Each weight is 1/255, and
    /// between two bf16, so that all round by nearly 2^-8 to the same side.
    pub fn alike(head_dim: usize) -> Self {
        let setting = Setting { class: Class::Normal, causal: false, seqlen: 255, head_dim };
        let problem = setting.problem(T::DTYPE).to_builder().softmax_scale(1e-4).build().expect("a legal scale");
        Self::of(format!("alike, {setting}"), problem, Self::draw(setting))
    }

    fn draw(setting: Setting) -> [Vec<T>; 4] {
        let Setting { seqlen, head_dim, .. } = setting;
        let seed = (seqlen * 2 + head_dim) as u64;
        Input::ALL.map(|input| {
            let values = Values::Like(setting.class).tensor(input, [1, seqlen, DRAWS, head_dim], seed);
            values.data().iter().map(|&x| T::from_f32(x as f32)).collect()
        })
    }

    /// Of inputs that there are. The problem has one batch entry, as many heads of K as of Q, and one head dim.
    pub fn of(name: String, forward: ForwardProblem, inputs: [Vec<T>; 4]) -> Self {
        let problem = BackwardProblem::builder(&forward).build().expect("a type with gradients");
        let heads = forward.dims().heads_q;
        let mut sample = Self { name, forward, problem, inputs, exact: vec![], emulated: [None; 4] };
        sample.exact = (0..heads).into_par_iter().map(|head| sample.exact_of(head)).collect();
        let emulated: Vec<_> = (0..heads).into_par_iter().map(|head| sample.emulated_of(head)).collect();
        sample.emulated = [0, 1, 2, 3].map(|i| sample.error(i, |head| emulated[head][i].clone()));
        sample
    }

    /// Whether a query sees a key.
    fn keeps(&self, query: usize, key: usize) -> bool {
        let dims = self.forward.dims();
        self.forward.mask().keep(query, key, dims.seqlen_q, dims.seqlen_kv)
    }

    fn head(&self, input: usize, head: usize) -> Vec<f32> {
        let dims = self.forward.dims();
        of_head(&self.inputs[input], head, dims.heads_q, dims.head_dim_qk)
    }

    fn exact_of(&self, head: usize) -> [Vec<f64>; 4] {
        let wide = |input| self.head(input, head).into_iter().map(f64::from).collect::<Vec<f64>>();
        let ([q, k, v, d_o], dims) = ([0, 1, 2, 3].map(wide), self.forward.dims());
        let (n, m, dim) = (dims.seqlen_q, dims.seqlen_kv, dims.head_dim_qk);
        let scale = f64::from(self.forward.softmax_scale());
        let mut p = product(&q, &transposed(&k, m, dim), n, m);
        for (query, row) in p.chunks_exact_mut(m).enumerate() {
            let kept = |key: &usize| self.keeps(query, *key);
            let most = (0..m).filter(kept).map(|key| scale * row[key]).fold(f64::NEG_INFINITY, f64::max);
            let mut sum = 0.0;
            for (key, s) in row.iter_mut().enumerate() {
                *s = if self.keeps(query, key) { (scale * *s - most).exp() } else { 0.0 };
                sum += *s;
            }
            // A query without keys has weights of 0.
            row.iter_mut().filter(|p| **p != 0.0).for_each(|p| *p /= sum);
        }
        let mut d_s = product(&d_o, &transposed(&v, m, dim), n, m);
        d_s.iter_mut().zip(&p).for_each(|(d_s, p)| *d_s *= p);
        // dS = P (dP - delta), where delta is the sum of P dP.
        for (p, d_s) in p.chunks_exact(m).zip(d_s.chunks_exact_mut(m)) {
            let delta: f64 = d_s.iter().sum();
            for (p, d_s) in p.iter().zip(d_s) {
                *d_s = if *p == 0.0 { 0.0 } else { scale * (*d_s - p * delta) };
            }
        }
        let d_k = product(&transposed(&d_s, n, m), &q, m, dim);
        let d_v = product(&transposed(&p, n, m), &d_o, m, dim);
        [product(&p, &v, n, dim), product(&d_s, &k, n, dim), d_k, d_v]
    }

    fn emulated_of(&self, head: usize) -> [Vec<T>; 4] {
        let ([q, k, v, d_o], dims) = ([0, 1, 2, 3].map(|input| self.head(input, head)), self.forward.dims());
        let (n, m, dim) = (dims.seqlen_q, dims.seqlen_kv, dims.head_dim_qk);
        let scale = self.forward.softmax_scale();
        let scale_log2 = scale * std::f32::consts::LOG2_E;
        let rounded = |x: f32| T::from_f32(x).to_f32();
        let mut p = product(&q, &transposed(&k, m, dim), n, m);
        let mut d_s = product(&d_o, &transposed(&v, m, dim), n, m);
        let of_head = Head { q, k, v };
        let mut output = Vec::with_capacity(n * dim);
        for (query, (p, d_s)) in p.chunks_exact_mut(m).zip(d_s.chunks_exact_mut(m)).enumerate() {
            let keys = (0..m).filter(|&key| self.keeps(query, key)).max().map_or(0, |key| key + 1);
            let (o, lse_log2) =
                emulated::<T>(of_head.query(query, dim), &of_head, keys, scale, Reference::RunningMaximum);
            let delta: f32 = o.iter().zip(&d_o[query * dim..]).map(|(o, d_o)| o.to_f32() * d_o).sum();
            output.extend(o);
            for (key, (p, d_s)) in p.iter_mut().zip(d_s).enumerate() {
                *p = if self.keeps(query, key) { (scale_log2 * *p - lse_log2).exp2() } else { 0.0 };
                *d_s = if *p == 0.0 { 0.0 } else { rounded(*p * (*d_s - delta)) };
                *p = rounded(*p);
            }
        }
        let narrow = |values: Vec<f32>, scale: f32| values.into_iter().map(|x| T::from_f32(x * scale)).collect();
        let Head { q, k, .. } = of_head;
        [
            output,
            narrow(product(&d_s, &k, n, dim), scale),
            narrow(product(&transposed(&d_s, n, m), &q, m, dim), scale),
            narrow(product(&transposed(&p, n, m), &d_o, m, dim), 1.0),
        ]
    }

    /// Holds O and gradients, in the layout of the inputs, beside the emulation.
    ///
    /// # Errors
    /// Where an element is NaN that should not be, or the other way round.
    pub fn judge(&self, results: &[Vec<T>; 4]) -> Result<Verdict, String> {
        let (heads, dim) = (self.forward.dims().heads_q, self.forward.dims().head_dim_qk);
        for ((name, result), i) in NAMES.into_iter().zip(results).zip(0..) {
            for (head, exact) in self.exact.iter().enumerate() {
                let got = of_head(result, head, heads, dim);
                if let Some(at) = got.iter().zip(&exact[i]).position(|(got, exact)| got.is_nan() != exact.is_nan()) {
                    let (got, exact) = (got[at], exact[i][at]);
                    return Err(format!("{}: {name} at head {head}, row {}: {got} for {exact}", self.name, at / dim));
                }
            }
        }
        let errors = [0, 1, 2, 3].map(|i| {
            let got =
                self.error(i, |head| of_head(&results[i], head, heads, dim).into_iter().map(T::from_f32).collect());
            Some([got?, self.emulated[i]?])
        });
        Ok(Verdict { name: self.name.clone(), dtype: T::DTYPE, errors })
    }

    /// The error of result `i`, averaged over the heads. None where nothing exact is a number.
    fn error(&self, i: usize, of_head: impl Fn(usize) -> Vec<T>) -> Option<Error> {
        let mut mean = Error { rmse: 0.0, largest: 0.0 };
        let heads = self.exact.len() as f64;
        for (head, exact) in self.exact.iter().enumerate() {
            let (mut squares, mut of_exact, mut largest) = (0.0, 0.0, 0.0_f64);
            for (got, exact) in of_head(head).iter().zip(&exact[i]).filter(|(_, exact)| !exact.is_nan()) {
                let error = f64::from(got.to_f32()) - exact;
                squares += error * error;
                of_exact += exact * exact;
                largest = largest.max(error.abs());
            }
            if of_exact == 0.0 {
                return None;
            }
            mean.rmse += (squares / of_exact).sqrt() / heads;
            mean.largest += largest / heads;
        }
        Some(mean)
    }
}

/// The product of a matrix of `rows` rows and one of `columns` columns. A weight of 0 has no part in it, whatever it meets.
fn product<N: Copy + Default + PartialEq + AddAssign + Mul<Output = N>>(
    a: &[N],
    b: &[N],
    rows: usize,
    columns: usize,
) -> Vec<N> {
    let mut out = vec![N::default(); rows * columns];
    for (a, out) in a.chunks_exact(a.len() / rows.max(1)).zip(out.chunks_exact_mut(columns)) {
        for (&a, b) in a.iter().zip(b.chunks_exact(columns)).filter(|(a, _)| **a != N::default()) {
            out.iter_mut().zip(b).for_each(|(out, &b)| *out += a * b);
        }
    }
    out
}

fn transposed<N: Copy>(a: &[N], rows: usize, columns: usize) -> Vec<N> {
    (0..rows * columns).map(|i| a[i % rows * columns + i / rows]).collect()
}

impl Verdict {
    /// The errors over the emulation's: of the RMSE and of the largest error, of each result that there is.
    pub fn ratios(&self) -> [Option<[f64; 2]>; 4] {
        self.errors
            .map(|errors| errors.map(|[got, emulated]| [got.rmse / emulated.rmse, got.largest / emulated.largest]))
    }

    /// Whether all are within these bounds. NaN is not.
    pub fn within(&self, most_rmse: f64, most_largest: f64) -> bool {
        self.ratios().iter().flatten().all(|&[rmse, largest]| rmse <= most_rmse && largest <= most_largest)
    }

    /// Whether all are within the goal.
    pub fn passed(&self) -> bool {
        self.within(RMSE, LARGEST)
    }

    /// The head of a table of verdicts.
    pub const HEAD: &str = "type  of O: rmse, max  of dQ            of dK            of dV            inputs";
}

/// A line of a table.
impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<5}", self.dtype.name())?;
        for ratios in self.ratios() {
            match ratios {
                Some([rmse, largest]) => write!(f, " {rmse:<7.3} {largest:<8.3}")?,
                None => write!(f, " {:<16}", "all NaN")?,
            }
        }
        write!(f, " {}{}", self.name, if self.passed() { "" } else { "  PAST THE BOUND" })
    }
}
