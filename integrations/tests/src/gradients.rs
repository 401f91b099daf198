//! Values and gradients of random tensors, beside candle's own operations.

use std::ops::Range;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use hopper_attention_candle::{Mask, Options, attention};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;

use crate::{Attend, difference, own};

/// Gradients of one graph that several threads compute, for the losses that are `factors` times `loss`, whose gradients `want` has.
///
/// # Errors
/// candle's own.
///
/// # Panics
/// A gradient is missing, or is another one.
pub fn on_several_threads(loss: &Tensor, want: &GradStore, vars: &[&Var], factors: Range<u8>) -> Result<()> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = factors
            .map(|factor| {
                scope.spawn(move || {
                    let got = (loss * f64::from(factor))?.backward()?;
                    for var in vars {
                        let want = (want.get(var).expect("a gradient") * f64::from(factor))?;
                        let (difference, largest) = difference(got.get(var).expect("a gradient"), &want)?;
                        assert!(difference <= 1e-5 * largest, "{factor}: {difference}");
                    }
                    Ok::<_, candle_core::Error>(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
    })
}

/// One problem.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// `[batch, seqlen_q, seqlen_kv, heads_q, heads_kv, head_dim_qk, head_dim_vo]`.
    pub sizes: [usize; 7],
    /// Which keys a query attends to.
    pub mask: Mask,
}

/// Each tensor's largest difference, as a part of its largest magnitude.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// Of the output.
    pub o: f32,
    /// Of the gradients of Q, K and V.
    pub gradients: [f32; 3],
}

impl Report {
    /// The largest of all.
    pub fn worst(&self) -> f32 {
        // Unlike `f32::max`, this keeps a NaN.
        self.gradients.into_iter().fold(self.o, |worst, next| if next <= worst { worst } else { next })
    }
}

/// Masks, grouped heads, head dims and lengths that are no multiples of any tile.
pub fn cases() -> Vec<Case> {
    let of = |sizes, mask| Case { sizes, mask };
    vec![
        of([2, 17, 17, 4, 2, 64, 64], Mask::causal()),
        of([1, 5, 33, 4, 4, 32, 32], Mask::Full),
        of([2, 70, 140, 8, 1, 64, 64], Mask::causal()),
        of([1, 130, 130, 2, 2, 128, 128], Mask::window(Some(40), Some(0))),
        of([1, 1, 77, 4, 2, 64, 64], Mask::causal()),
        of([1, 200, 200, 2, 1, 128, 128], Mask::Full),
    ]
}

/// Head dims of other models, and such as differ: what the CPU computes beside the others.
pub fn wide_cases() -> Vec<Case> {
    let of = |sizes, mask| Case { sizes, mask };
    vec![
        of([2, 17, 33, 4, 2, 96, 96], Mask::causal()),
        of([1, 40, 40, 2, 1, 256, 256], Mask::causal()),
        of([1, 33, 70, 2, 2, 192, 128], Mask::Full),
        of([1, 33, 70, 2, 1, 128, 192], Mask::window(Some(20), Some(3))),
        of([1, 9, 70, 2, 1, 512, 512], Mask::causal()),
        of([1, 9, 30, 2, 1, 12, 520], Mask::Full),
    ]
}

impl Case {
    /// Compares our attention with candle's own operations in f32. Inputs are rounded to `dtype` for both.
    ///
    /// # Errors
    /// Either refuses.
    pub fn run(&self, device: &Device, dtype: DType) -> Result<Report> {
        self.run_with(device, dtype, &|q, k, v| attention(q, k, v, &Options::new().mask(self.mask)))
    }

    /// As [`run`](Self::run), with capped scores.
    ///
    /// # Errors
    /// Either refuses.
    pub fn run_capped(&self, device: &Device, dtype: DType, cap: f32) -> Result<Report> {
        let options = Options::new().mask(self.mask).softcap(cap);
        self.compare(device, dtype, Some(cap), &|q, k, v| attention(q, k, v, &options))
    }

    /// As [`run`](Self::run), with another attention in the place of ours.
    ///
    /// # Errors
    /// Either refuses.
    pub fn run_with(&self, device: &Device, dtype: DType, attend: Attend<'_>) -> Result<Report> {
        self.compare(device, dtype, None, attend)
    }

    fn compare(&self, device: &Device, dtype: DType, cap: Option<f32>, attend: Attend<'_>) -> Result<Report> {
        let [batch, seqlen_q, seqlen_kv, heads_q, heads_kv, head_dim, head_dim_vo] = self.sizes;
        let mut random = StdRng::seed_from_u64(self.sizes.iter().fold(0, |seed, &size| 31 * seed + size as u64));
        let mut normal = |seqlen: usize, heads: usize, head_dim: usize| {
            let values = (0..batch * seqlen * heads * head_dim).map(|_| random.sample::<f32, _>(StandardNormal));
            let values = Tensor::from_iter(values, &Device::Cpu)?.reshape((batch, seqlen, heads, head_dim))?;
            values.to_dtype(dtype)?.to_dtype(DType::F32)
        };
        let qkv = [
            normal(seqlen_q, heads_q, head_dim)?,
            normal(seqlen_kv, heads_kv, head_dim)?,
            normal(seqlen_kv, heads_kv, head_dim_vo)?,
        ];
        let d_o = normal(seqlen_q, heads_q, head_dim_vo)?;
        let scale = (head_dim as f64).sqrt().recip();
        let cap = cap.map(f64::from);
        let [want, ours @ ..] =
            outcome(&qkv, &d_o, &Device::Cpu, DType::F32, &|q, k, v| own::capped(q, k, v, self.mask, scale, cap))?;
        let [got, gradients @ ..] = outcome(&qkv, &d_o, device, dtype, attend)?;
        let part = |got: &Tensor, want: &Tensor| {
            let (difference, largest) = difference(got, want)?;
            Ok::<f32, candle_core::Error>(difference / largest)
        };
        let [q, k, v] = [0, 1, 2].map(|tensor| part(&gradients[tensor], &ours[tensor]));
        Ok(Report { o: part(&got, &want)?, gradients: [q?, k?, v?] })
    }
}

/// The output, and the gradients of Q, K and V. A tensor without a gradient has zeros.
fn outcome(qkv: &[Tensor; 3], d_o: &Tensor, device: &Device, dtype: DType, attend: Attend<'_>) -> Result<[Tensor; 4]> {
    let [q, k, v] = [0, 1, 2].map(|tensor| Var::from_tensor(&qkv[tensor].to_device(device)?.to_dtype(dtype)?));
    let (q, k, v) = (q?, k?, v?);
    let o = attend(&q, &k, &v)?;
    let loss = (&o * d_o.to_device(device)?.to_dtype(dtype)?)?.sum_all()?;
    let gradients = loss.backward()?;
    let of = |var: &Var| gradients.get(var).cloned().map_or_else(|| var.zeros_like(), Ok);
    Ok([o, of(&q)?, of(&k)?, of(&v)?])
}
