//! Attention sinks, beside candle's own operations: dense, packed, and padded queries with packed keys.

use candle_core::{DType, Device, Result, Tensor, Var};
use hopper_attention_candle::{Mask, Options, attention_padded_q, attention_varlen_with_sinks, attention_with_sinks};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;

use crate::{difference, own};

/// Heads of Q and of K, and the head dim.
const HEADS: [usize; 2] = [4, 2];
const HEAD_DIM: usize = 64;
/// Where sequences begin, among rows that are packed without gaps. One has no queries, one has no keys, and of one the first
/// queries see no key with a causal mask.
const OFFSETS: [[u32; 6]; 2] = [[0, 3, 3, 36, 40, 45], [0, 5, 7, 40, 40, 43]];

/// The sink of each head: one that weighs next to nothing, one that has nearly all weight, and usual ones. (None is -inf, with
/// which candle's own operations make NaN of a row without keys.)
pub const SINKS: [f32; 4] = [-20.0, 6.0, 0.5, -1.5];

/// How the sequences lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A batch of equal lengths.
    Dense,
    /// Both sides packed.
    Packed,
    /// Padded queries and packed keys.
    PaddedQ,
}

/// The largest difference of O and of the gradients of Q, K, V and the sinks from candle's own operations in f32, each as a part
/// of the largest magnitude. Inputs are rounded to `dtype`, and sinks to `of_sinks`, for both.
///
/// # Errors
/// The attention refuses.
pub fn run(device: &Device, dtype: DType, of_sinks: DType, mask: Mask, kind: Kind) -> Result<f32> {
    run_with(device, dtype, of_sinks, mask, kind, &|sinks| Ok(sinks.clone()))
}

/// As [`run`], where our attention gets other sinks: what `change` makes of them.
///
/// # Errors
/// The attention refuses.
pub fn run_with(
    device: &Device,
    dtype: DType,
    of_sinks: DType,
    mask: Mask,
    kind: Kind,
    change: &dyn Fn(&Tensor) -> Result<Tensor>,
) -> Result<f32> {
    let rounded = |tensor: Tensor, dtype| tensor.to_dtype(dtype)?.to_dtype(DType::F32);
    let mut numbers = StdRng::seed_from_u64(5);
    let mut random = |rows: usize, heads: usize| {
        let values = (0..rows * heads * HEAD_DIM).map(|_| numbers.sample::<f32, _>(StandardNormal));
        rounded(Tensor::from_iter(values, &Device::Cpu)?.reshape((rows, heads, HEAD_DIM))?, dtype)
    };
    let offsets = if kind == Kind::Dense { [[0, 9, 18, 27, 36, 45], [0, 8, 16, 24, 32, 40]] } else { OFFSETS };
    let rows = offsets.map(|offsets| offsets[5] as usize);
    let inputs = [
        random(rows[0], HEADS[0])?,
        random(rows[1], HEADS[1])?,
        random(rows[1], HEADS[1])?,
        random(rows[0], HEADS[0])?,
    ];
    let sinks = rounded(Tensor::new(&SINKS, &Device::Cpu)?, of_sinks)?;
    let options = Options::new().mask(mask);

    let theirs = outcome(&inputs, &sinks, &Device::Cpu, [DType::F32; 2], &|[q, k, v], sinks| {
        let mut all = Vec::new();
        for i in 0..5 {
            let part = |tensor: &Tensor, side: usize| {
                let [begin, end] = [offsets[side][i], offsets[side][i + 1]].map(|row| row as usize);
                tensor.narrow(0, begin, end - begin)?.unsqueeze(0)
            };
            let (q, k, v) = (part(q, 0)?, part(k, 1)?, part(v, 1)?);
            if q.dim(1)? > 0 && k.dim(1)? > 0 {
                let sinks = Some(sinks);
                all.push(
                    own::attention_with_sinks(&q, &k, &v, sinks, mask, 1.0 / (HEAD_DIM as f64).sqrt())?.squeeze(0)?,
                );
            } else if q.dim(1)? > 0 {
                // All weight is the sink's.
                all.push(q.zeros_like()?.squeeze(0)?);
            }
        }
        Tensor::cat(&all, 0)
    })?;
    let ours = outcome(&inputs, &sinks, device, [dtype, of_sinks], &|[q, k, v], sinks| {
        let sinks = change(sinks)?;
        let [of_q, of_kv] = offsets.map(|offsets| Tensor::new(&offsets, device));
        let (of_q, of_kv) = (of_q?, of_kv?);
        match kind {
            Kind::Dense => {
                let [q, k, v] = [q, k, v].map(|t| t.reshape((5, t.dim(0)? / 5, t.dim(1)?, HEAD_DIM)));
                attention_with_sinks(&q?, &k?, &v?, &sinks, &options)?.flatten(0, 1)
            }
            Kind::Packed => attention_varlen_with_sinks(q, k, v, &sinks, &of_q, &of_kv, &options),
            Kind::PaddedQ => {
                let longest = (0..5).map(|i| offsets[0][i + 1] - offsets[0][i]).max().unwrap_or(0) as usize + 2;
                let mut padded = Vec::new();
                for i in 0..5 {
                    let [begin, end] = [offsets[0][i], offsets[0][i + 1]].map(|row| row as usize);
                    padded.push(if begin < end {
                        q.narrow(0, begin, end - begin)?.pad_with_zeros(0, 0, longest - (end - begin))?
                    } else {
                        q.narrow(0, 0, longest)?.zeros_like()?
                    });
                }
                let q = Tensor::stack(&padded, 0)?;
                let o = attention_padded_q(&q, k, v, Some(&sinks), &of_q, &of_kv, &options)?;
                let mut rows = Vec::new();
                for i in 0..5 {
                    let length = (offsets[0][i + 1] - offsets[0][i]) as usize;
                    let padding = o.get(i)?.narrow(0, length, longest - length)?.abs()?.sum_all()?;
                    assert_eq!(padding.to_dtype(DType::F32)?.to_scalar::<f32>()?, 0.0, "the padding of O");
                    if length > 0 {
                        rows.push(o.get(i)?.narrow(0, 0, length)?);
                    }
                }
                Tensor::cat(&rows, 0)
            }
        }
    })?;
    let mut worst = 0f32;
    for (name, (got, want)) in ["o", "d_q", "d_k", "d_v", "d_sinks"].iter().zip(ours.iter().zip(&theirs)) {
        let (difference, largest) = difference(got, want)?;
        // A tensor of zeros would agree with anything that is empty.
        assert!(largest > 0.05, "{name}: {largest}");
        let part = difference / largest;
        // Unlike `f32::max`, this keeps a NaN.
        worst = if part <= worst { worst } else { part };
    }
    Ok(worst)
}

/// What a computation makes of Q, K, V and sinks.
type With<'a> = &'a dyn Fn([&Tensor; 3], &Tensor) -> Result<Tensor>;

/// O, and the gradients of Q, K, V and the sinks.
fn outcome(
    [q, k, v, d_o]: &[Tensor; 4],
    sinks: &Tensor,
    device: &Device,
    [dtype, of_sinks]: [DType; 2],
    attend: With<'_>,
) -> Result<[Tensor; 5]> {
    let var = |tensor: &Tensor, dtype| Var::from_tensor(&tensor.to_device(device)?.to_dtype(dtype)?);
    let (q, k, v, sinks) = (var(q, dtype)?, var(k, dtype)?, var(v, dtype)?, var(sinks, of_sinks)?);
    let o = attend([&q, &k, &v], &sinks)?;
    let gradients = (&o * d_o.to_device(device)?.to_dtype(dtype)?)?.sum_all()?.backward()?;
    let of = |var: &Var| gradients.get(var).cloned().map_or_else(|| var.zeros_like(), Ok);
    Ok([o, of(&q)?, of(&k)?, of(&v)?, of(&sinks)?])
}
