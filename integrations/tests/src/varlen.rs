//! Packed sequences, beside attention to each sequence by itself.

use candle_core::{DType, Device, Result, Tensor, Var};
use hopper_attention_candle::{Mask, Options, attention, attention_varlen};

use crate::difference;

/// Where sequences begin. One has no queries, one has no keys, and rows at both ends belong to none.
pub(crate) const OFFSETS: [[u32; 6]; 2] = [[1, 4, 4, 37, 41, 46], [1, 6, 8, 41, 41, 47]];
/// The rows of the tensors.
pub(crate) const ROWS: [usize; 2] = [48, 49];

/// O of each sequence by itself. `attend` gets the number of the sequence, and its part of Q, K and V with a dimension
/// `batch` of 1. Rows of no sequence are 0.
///
/// # Errors
/// The attention refuses.
pub(crate) fn one_by_one(
    [q, k, v]: [&Tensor; 3],
    attend: &dyn Fn(usize, &Tensor, &Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let mut rows = vec![q.narrow(0, 0, OFFSETS[0][0] as usize)?.zeros_like()?];
    for i in 0..OFFSETS[0].len() - 1 {
        let part = |tensor: &Tensor, side: usize| {
            let [begin, end] = [OFFSETS[side][i], OFFSETS[side][i + 1]].map(|row| row as usize);
            tensor.narrow(0, begin, end - begin)?.unsqueeze(0)
        };
        if OFFSETS[0][i] < OFFSETS[0][i + 1] {
            rows.push(attend(i, &part(q, 0)?, &part(k, 1)?, &part(v, 1)?)?.squeeze(0)?);
        }
    }
    let end = OFFSETS[0][5] as usize;
    rows.push(q.narrow(0, end, ROWS[0] - end)?.zeros_like()?);
    Tensor::cat(&rows, 0)
}

/// The largest difference of O and of all gradients, as a part of the largest magnitude.
///
/// # Errors
/// The attention refuses.
pub fn run(device: &Device, dtype: DType, mask: Mask) -> Result<f32> {
    let random = |rows, heads| {
        let values = Tensor::randn(0f32, 1.0, (rows, heads, 64), &Device::Cpu)?;
        Var::from_tensor(&values.to_device(device)?.to_dtype(dtype)?)
    };
    let (q, k, v) = (random(ROWS[0], 4)?, random(ROWS[1], 2)?, random(ROWS[1], 2)?);
    let d_o = random(ROWS[0], 4)?;
    let options = Options::new().mask(mask).deterministic(true);
    let [seqlens_q, seqlens_kv] = OFFSETS.map(|offsets| Tensor::new(&offsets, device));
    let packed = attention_varlen(&q, &k, &v, &seqlens_q?, &seqlens_kv?, &options.clone().max_seqlens(33, 33))?;
    let one_by_one = one_by_one([&q, &k, &v], &|_, q, k, v| attention(q, k, v, &options))?;
    let mut worst = 0f32;
    let mut compare = |got: &Tensor, want: &Tensor| {
        let (difference, largest) = difference(got, want)?;
        // A tensor of zeros would agree with anything that is empty.
        assert!(largest > 0.1, "{largest}");
        worst = worst.max(difference / largest);
        Ok::<_, candle_core::Error>(())
    };
    compare(&packed, &one_by_one)?;
    let of = |o: &Tensor| (o * d_o.as_tensor())?.sum_all()?.backward();
    let (ours, theirs) = (of(&packed)?, of(&one_by_one)?);
    for tensor in [&q, &k, &v] {
        compare(ours.get(tensor).expect("a gradient"), theirs.get(tensor).expect("a gradient"))?;
    }
    Ok(worst)
}
