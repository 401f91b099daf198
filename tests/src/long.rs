//! Long sequences of e4m3 operands: whether what a backend adds to the error of quantisation alone grows with the keys.
//!
//! Few queries and many keys are as long as any sequence to a sum over keys, and cheap for the oracle.

use hopper_attention::reference::{Tensor, forward, forward_plain};
use hopper_attention::{DType, Dims, Element, ForwardProblem, Mask, Scaling, bf16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;

use crate::fp8::Operands;

/// Keys of a short sequence, and of long ones.
pub const KEYS: [usize; 3] = [1024, 16384, 65536];

/// What a backend may add to the error of quantisation: a share of it, since weights are rounded relative to another maximum
/// block by block, and what FP8 sums on tensor cores lose at any length (`reference/tolerance.rs` says where 2^-9 comes from).
const SHARE: f64 = 0.1;
const ROUNDOFF: f64 = 1.0 / 512.0;

/// What is computed of each: both masks that a long sequence may have, and factors from coarse to fine.
pub const SETTINGS: [(Mask, Scaling); 2] = [(Mask::Full, Scaling::PerTensor), (Mask::causal(), Scaling::PerBlock)];

/// Values of V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// Normal: sums of them cancel.
    Normal,
    /// All above 0, each column with a mean of its own: what a sum loses by cutting off adds up.
    Positive,
}

/// Q, K and V of bf16 values.
pub struct Long {
    dims: Dims,
    qkv: [Tensor; 3],
    values: Values,
}

/// How far an output is from the f64 oracle on the tensors before they were quantised.
#[derive(Clone, Copy, Debug)]
pub struct Error {
    /// Relative RMSE.
    pub rmse: f64,
    /// The mean of the signed error over that of the magnitudes: below 0 where outputs are too near 0.
    pub bias: f64,
}

/// Operands, what is exact, and what quantisation alone makes of them.
pub struct Quantised {
    /// For a backend to compute with, the output in f16: its rounding hides less than bf16's.
    pub operands: Operands,
    values: Values,
    exact: Tensor,
    emulated: Error,
}

impl Long {
    /// A few queries of two heads and so many keys of one.
    pub fn new(keys: usize, [head_dim, head_dim_vo]: [usize; 2], values: Values) -> Self {
        // Chance, which more queries average out, is smaller where there are more keys.
        let seqlen_q = if keys > 16384 { 4 } else { 8 };
        let dims = Dims::new(1, seqlen_q, 2, head_dim).with_seqlen_kv(keys).with_heads_kv(1);
        let dims = dims.with_head_dim_vo(head_dim_vo);
        let mut rng = StdRng::seed_from_u64(keys as u64);
        let mut normal = |shape: [usize; 4], of: fn(f64, f64) -> f64| {
            Tensor::from_fn(shape, |[.., d]| {
                let x = of(rng.sample(StandardNormal), d as f64 / shape[3] as f64);
                f64::from(Element::to_f32(<bf16 as Element>::from_f32(x as f32)))
            })
        };
        let of_v = match values {
            Values::Normal => |x, _| x,
            Values::Positive => |x: f64, column| (0.5 + x.abs()) * (1.0 + column),
        };
        let qkv = [
            normal([1, seqlen_q, 2, head_dim], |x, _| x),
            normal([1, keys, 1, head_dim], |x, _| x),
            normal([1, keys, 1, head_dim_vo], of_v),
        ];
        Self { dims, qkv, values }
    }

    /// With a mask and factors of a scaling, Q and K small enough for scores in f16 where it is for them.
    pub fn quantised(&self, mask: Mask, scaling: Scaling, half: bool) -> Quantised {
        let options = |dtype| ForwardProblem::builder(dtype, self.dims).mask(mask);
        let [q, k, v] = &self.qkv;
        let of_bf16 = options(DType::BF16).build().expect("legal sizes");
        let exact = forward(&of_bf16, q, k, v).expect("matching shapes").o;
        let of_e4m3 = options(DType::E4M3).scaling(scaling).output(DType::F16).half_scores(half).lse(true);
        let operands = Operands::quantised(&of_e4m3.build().expect("legal sizes"), [q, k, v], None);
        let [q, k, v] = operands.real();
        let emulated = forward_plain(operands.problem(), &q, &k, &v).expect("matching shapes").o;
        Quantised { emulated: Error::of(&emulated, &exact), operands, values: self.values, exact }
    }
}

impl Error {
    fn of(o: &Tensor, exact: &Tensor) -> Self {
        let (mut squares, mut of_exact, mut signed, mut magnitudes) = (0.0, 0.0, 0.0, 0.0);
        for (o, exact) in o.data().iter().zip(exact.data()) {
            squares += (o - exact).powi(2);
            of_exact += exact * exact;
            signed += (o - exact) * exact.signum();
            magnitudes += exact.abs();
        }
        Self { rmse: (squares / of_exact).sqrt(), bias: signed / magnitudes }
    }
}

impl Quantised {
    /// An output's figures in words, and a complaint where it is further from exact than quantisation explains.
    pub fn judge(&self, o: &Tensor) -> (String, Option<String>) {
        let (got, emulated) = (Error::of(o, &self.exact), self.emulated);
        let problem = self.operands.problem();
        let figures = format!(
            "{:?} V, {} keys, head dim {}, {}, {}{}: error {:.3}% (quantisation alone {:.3}%), bias {:+.3}% ({:+.3}%)",
            self.values,
            problem.dims().seqlen_kv,
            problem.dims().head_dim_vo,
            problem.mask(),
            problem.scaling().unwrap_or_default(),
            if problem.allows_half_scores() { ", half scores" } else { "" },
            100.0 * got.rmse,
            100.0 * emulated.rmse,
            100.0 * got.bias,
            100.0 * emulated.bias
        );
        // A NaN is no smaller than any bound.
        let near = got.rmse <= (1.0 + SHARE) * emulated.rmse + ROUNDOFF;
        // Of values that cancel, the mean of the signed error is what chance leaves of it.
        let centred = self.values == Values::Normal || (got.bias - emulated.bias).abs() <= ROUNDOFF;
        let complaint = (!(near && centred)).then(|| format!("more than quantisation explains: {figures}"));
        (figures, complaint)
    }

    /// What tensor cores give whose sum over all keys is cut off at 14 bits after each 32 of them, divided by exact sums.
    pub fn cut_off(&self) -> Tensor {
        let problem = self.operands.problem();
        let [q, k, v] = self.operands.real();
        let dims = problem.dims();
        let scale = f64::from(problem.softmax_scale());
        let mut o = Tensor::zeros(problem.o_shape());
        for (query, head) in (0..dims.seqlen_q).flat_map(|query| (0..dims.heads_q).map(move |head| (query, head))) {
            let dot = |key: usize| q.row(0, query, head).iter().zip(k.row(0, key, 0)).map(|(q, k)| q * k).sum::<f64>();
            let keep = |key| problem.mask().keep(query, key, dims.seqlen_q, dims.seqlen_kv);
            let scores: Vec<f64> =
                (0..dims.seqlen_kv).map(|key| if keep(key) { scale * dot(key) } else { f64::NEG_INFINITY }).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let out = o.row_mut(0, query, head);
            for (first, weights) in weights.chunks(32).enumerate() {
                let mut step = vec![0.0; dims.head_dim_vo];
                for (i, weight) in weights.iter().enumerate() {
                    step.iter_mut().zip(v.row(0, 32 * first + i, 0)).for_each(|(step, v)| *step += weight * v);
                }
                out.iter_mut().zip(step).for_each(|(out, step)| *out = truncated(*out + step));
            }
            out.iter_mut().for_each(|out| *out /= sum);
        }
        o
    }
}

/// To 14 significant bits, towards 0.
fn truncated(x: f64) -> f64 {
    if x == 0.0 {
        return x;
    }
    let step = (x.abs().log2().floor() - 13.0).exp2();
    (x / step).trunc() * step
}
