//! A bias of packed sequences, beside attention to each sequence by itself with its part of the bias.

use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use hopper_attention_candle::{Mask, Modifiers, Options, attention_varlen_with, attention_with};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;

use crate::difference;
use crate::varlen::{OFFSETS, ROWS, one_by_one};

/// Heads of Q and of K.
pub const HEADS: [usize; 2] = [4, 2];
/// The number of sequences.
pub const SEQUENCES: usize = OFFSETS[0].len() - 1;
/// How many queries, and how many keys, the longest sequence has.
pub const LONGEST: usize = 33;
const HEAD_DIM: usize = 64;
const SLOPES: [f32; HEADS[0]] = [0.5, 0.25, 0.125, 0.0625];
const SINKS: [f32; HEADS[0]] = [-20.0, 2.0, 0.5, -1.5];

/// What a call has beside Q, K and V.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// The shape of the bias.
    pub shape: [usize; 4],
    /// The type of Q, K and V.
    pub dtype: DType,
    /// The type of the bias.
    pub of_bias: DType,
    /// The mask.
    pub mask: Mask,
    /// The cap of the scores, or 0.
    pub softcap: f32,
    /// With ALiBi.
    pub alibi: bool,
    /// With sinks.
    pub sinks: bool,
}

impl Case {
    /// A bias of f32 beside Q, K and V of f32, without a mask.
    pub fn new(shape: [usize; 4]) -> Self {
        let [dtype, of_bias] = [DType::F32; 2];
        Self { shape, dtype, of_bias, mask: Mask::Full, softcap: 0.0, alibi: false, sinks: false }
    }

    /// Adds what the case has beside the bias.
    fn others<'a>(self, modifiers: Modifiers<'a>, [slopes, sinks]: [&'a Tensor; 2]) -> Modifiers<'a> {
        let modifiers = if self.alibi { modifiers.alibi_slopes(slopes) } else { modifiers };
        if self.sinks { modifiers.sinks(sinks) } else { modifiers }
    }
}

/// Each form of a bias with so many queries and keys.
pub fn forms([queries, keys]: [usize; 2]) -> impl Iterator<Item = [usize; 4]> {
    let size = |own: bool, size: usize| if own { size } else { 1 };
    (0..8).map(move |bits| {
        [size(bits & 1 != 0, SEQUENCES), size(bits & 2 != 0, HEADS[0]), size(bits & 4 != 0, queries), keys]
    })
}

/// The largest difference of O and of the gradients of Q, K, V, the bias and the sinks, each as a part of the largest
/// magnitude. The sequences by themselves are computed on the CPU in f32.
///
/// # Errors
/// The attention refuses.
pub fn run(device: &Device, case: Case) -> Result<f32> {
    run_with(device, case, &|bias| Ok(bias.clone()))
}

/// As [`run`], where the packed attention gets another bias: what `change` makes of it.
///
/// # Errors
/// The attention refuses.
pub fn run_with(device: &Device, case: Case, change: &dyn Fn(&Tensor) -> Result<Tensor>) -> Result<f32> {
    let mut numbers = StdRng::seed_from_u64(17);
    let mut random = |shape: Shape, dtype| {
        let values = (0..shape.elem_count()).map(|_| numbers.sample::<f32, _>(StandardNormal));
        Tensor::from_iter(values, &Device::Cpu)?.reshape(shape)?.to_dtype(dtype)?.to_dtype(DType::F32)
    };
    let mut rows = |side: usize, heads: usize| random((ROWS[side], heads, HEAD_DIM).into(), case.dtype);
    let inputs = [rows(0, HEADS[0])?, rows(1, HEADS[1])?, rows(1, HEADS[1])?, rows(0, HEADS[0])?];
    let bias = some_hidden(&random((&case.shape[..]).into(), case.of_bias)?)?;
    let options = Options::new().mask(case.mask).softcap(case.softcap).deterministic(true);

    let theirs = outcome(&inputs, &bias, &Device::Cpu, [DType::F32; 2], case.sinks, &|qkv, bias, others| {
        one_by_one(qkv, &|i, q, k, v| {
            let bias = part(bias, i)?;
            attention_with(q, k, v, case.others(Modifiers::new().bias(&bias), others), &options)
        })
    })?;
    let types = [case.dtype, case.of_bias];
    let ours = outcome(&inputs, &bias, device, types, case.sinks, &|[q, k, v], bias, others| {
        let [seqlens_q, seqlens_kv] = OFFSETS.map(|offsets| Tensor::new(&offsets, device));
        let bias = change(bias)?;
        let modifiers = case.others(Modifiers::new().bias(&bias), others);
        attention_varlen_with(q, k, v, modifiers, &seqlens_q?, &seqlens_kv?, &options)
    })?;
    let mut worst = 0f32;
    for (name, (got, want)) in ["o", "d_q", "d_k", "d_v", "d_bias", "d_sinks"].iter().zip(ours.iter().zip(&theirs)) {
        // candle's maximum can lose a NaN.
        let sum = got.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?;
        assert!(sum.is_finite(), "{name}: {sum}");
        let (difference, largest) = difference(got, want)?;
        // A tensor of zeros would agree with anything that is empty.
        assert!(largest > 0.05, "{name}: {largest}");
        worst = worst.max(difference / largest);
    }
    Ok(worst)
}

/// The part of a bias that one sequence has.
fn part(bias: &Tensor, sequence: usize) -> Result<Tensor> {
    let [queries, keys] = OFFSETS.map(|offsets| (offsets[sequence + 1] - offsets[sequence]) as usize);
    let bias = if bias.dim(0)? == 1 { bias.clone() } else { bias.narrow(0, sequence, 1)? };
    let bias = if bias.dim(2)? == 1 { bias } else { bias.narrow(2, 0, queries)? };
    bias.narrow(3, 0, keys)
}

/// The same with -inf in each seventh place.
fn some_hidden(bias: &Tensor) -> Result<Tensor> {
    let numbers = bias.flatten_all()?.to_vec1::<f32>()?.into_iter().enumerate();
    let numbers = numbers.map(|(i, number)| if i % 7 == 3 { f32::NEG_INFINITY } else { number });
    Tensor::from_iter(numbers, &Device::Cpu)?.reshape(bias.shape())
}

/// What a computation makes of Q, K and V, a bias, and slopes with sinks.
type Attend<'a> = &'a dyn Fn([&Tensor; 3], &Tensor, [&Tensor; 2]) -> Result<Tensor>;

/// O, and the gradients of Q, K, V, the bias and, where there are any, the sinks.
fn outcome(
    [q, k, v, d_o]: &[Tensor; 4],
    bias: &Tensor,
    device: &Device,
    [dtype, of_bias]: [DType; 2],
    with_sinks: bool,
    attend: Attend<'_>,
) -> Result<Vec<Tensor>> {
    let var = |tensor: &Tensor, dtype| Var::from_tensor(&tensor.to_device(device)?.to_dtype(dtype)?);
    let vars = [var(q, dtype)?, var(k, dtype)?, var(v, dtype)?, var(bias, of_bias)?, Var::new(&SINKS, device)?];
    let [q, k, v, bias, sinks] = &vars;
    let o = attend([q, k, v], bias, [&Tensor::new(&SLOPES, device)?, sinks])?;
    let gradients = (&o * d_o.to_device(device)?.to_dtype(dtype)?)?.sum_all()?.backward()?;
    let mut all = vec![o];
    for var in &vars[..if with_sinks { 5 } else { 4 }] {
        // What has no gradient has one of 0.
        let gradient = gradients.get(var).cloned().map_or_else(|| var.zeros_like(), Ok)?;
        assert_eq!((gradient.dims(), gradient.dtype()), (var.dims(), var.dtype()));
        all.push(gradient);
    }
    Ok(all)
}
