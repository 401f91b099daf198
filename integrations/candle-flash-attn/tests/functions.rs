//! Each function computes what candle's crate says, or is an error that names what is missing.

use candle_core::{DType, Device, Result, Tensor};
use candle_flash_attn::*;
use hopper_attention_candle::hopper_attention::Error;
use hopper_attention_candle::{Mask, Options, attention, cause};

fn tensors() -> Result<[Tensor; 3]> {
    let random = |seqlen, heads| Tensor::randn(0f32, 1.0, (2, seqlen, heads, 32), &Device::Cpu);
    Ok([random(6, 4)?, random(9, 2)?, random(9, 2)?])
}

fn same(got: &Tensor, want: &Tensor) -> Result<()> {
    assert_eq!(got.flatten_all()?.to_vec1::<f32>()?, want.flatten_all()?.to_vec1::<f32>()?);
    Ok(())
}

#[test]
fn masks_and_scales_are_as_in_candles_crate() -> Result<()> {
    let [q, k, v] = tensors()?;
    let ours = |mask| attention(&q, &k, &v, &Options::new().mask(mask).softmax_scale(0.2));
    let (full, causal) = (ours(Mask::Full)?, ours(Mask::causal())?);
    same(&flash_attn(&q, &k, &v, 0.2, false)?, &full)?;
    same(&flash_attn(&q, &k, &v, 0.2, true)?, &causal)?;
    same(&flash_attn_windowed(&q, &k, &v, 0.2, None, None)?, &full)?;
    same(&flash_attn_windowed(&q, &k, &v, 0.2, None, Some(0))?, &causal)?;
    // A window that is longer than all keys bounds nothing.
    same(&flash_attn_windowed(&q, &k, &v, 0.2, Some(1000), Some(1000))?, &full)?;
    same(&flash_attn_windowed(&q, &k, &v, 0.2, Some(2), Some(1))?, &ours(Mask::window(Some(2), Some(1)))?)?;
    same(&flash_attn_windowed(&q, &k, &v, 0.2, Some(2), None)?, &ours(Mask::window(Some(2), None))?)?;
    same(&flash_attn_alibi_windowed_softcap(&q, &k, &v, None, 0.2, None, Some(0), 0.0)?, &causal)
}

#[test]
fn head_dims_are_those_of_the_tensors() -> Result<()> {
    for head_dim in [96, 256, 512] {
        let random = |seqlen, heads| Tensor::randn(0f32, 1.0, (1, seqlen, heads, head_dim), &Device::Cpu);
        let (q, k) = (random(6, 4)?, random(9, 2)?);
        let want = attention(&q, &k, &k, &Options::new().mask(Mask::causal()).softmax_scale(0.1))?;
        same(&flash_attn(&q, &k, &k, 0.1, true)?, &want)?;
        assert_eq!(want.dims(), [1, 6, 4, head_dim]);
    }
    Ok(())
}

#[test]
fn packed_sequences_are_as_in_candles_crate() -> Result<()> {
    // The same two sequences of 6 queries and 9 keys, one behind the other.
    let [q, k, v] = tensors()?;
    let [of_q, of_k] = [[0u32, 6, 12], [0, 9, 18]].map(|offsets| Tensor::new(&offsets, &Device::Cpu));
    let [p, l, r] = [&q, &k, &v].map(|tensor| tensor.flatten(0, 1));
    let (p, l, r, of_q, of_k) = (&p?, &l?, &r?, &of_q?, &of_k?);
    for causal in [false, true] {
        let want = flash_attn(&q, &k, &v, 0.2, causal)?;
        // A hint that is too small changes nothing.
        for longest in [9, 1, 0] {
            same(&flash_attn_varlen(p, l, r, of_q, of_k, longest, longest, 0.2, causal)?, &want)?;
        }
    }
    for (left, right) in [(None, None), (None, Some(0)), (Some(2), Some(1)), (Some(2), None), (Some(1000), Some(1000))]
    {
        let want = flash_attn_windowed(&q, &k, &v, 0.2, left, right)?;
        same(&flash_attn_varlen_windowed(p, l, r, of_q, of_k, 6, 9, 0.2, left, right)?, &want)?;
        let softcap = flash_attn_varlen_alibi_windowed_softcap(p, l, r, None, of_q, of_k, 6, 9, 0.2, left, right, 0.0);
        same(&softcap?, &want)?;
        let want = flash_attn_alibi_windowed_softcap(&q, &k, &v, None, 0.2, left, right, 0.5)?;
        let softcap = flash_attn_varlen_alibi_windowed_softcap(p, l, r, None, of_q, of_k, 6, 9, 0.2, left, right, 0.5);
        same(&softcap?, &want)?;
    }
    Ok(())
}

#[test]
fn a_softcap_caps_the_scores() -> Result<()> {
    let [q, k, v] = tensors()?;
    let options = Options::new().softmax_scale(0.2).softcap(0.5);
    let want = attention(&q, &k, &v, &options.clone().mask(Mask::causal()))?;
    let got = flash_attn_alibi_windowed_softcap(&q, &k, &v, None, 0.2, None, Some(0), 0.5)?;
    same(&got, &want)?;
    let far = (got - flash_attn(&q, &k, &v, 0.2, true)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
    assert!(far > 0.05, "{far}");
    let error = flash_attn_alibi_windowed_softcap(&q, &k, &v, None, 0.2, None, None, -30.0).unwrap_err();
    assert!(matches!(cause(&error), Some(Error::Value { what: "softcap", .. })), "{error}");
    Ok(())
}

#[test]
fn what_is_missing_is_named() -> Result<()> {
    let [q, k, v] = tensors()?;
    let (slopes, lengths) = (Tensor::ones(4, DType::F32, &Device::Cpu)?, Tensor::new(&[0u32, 6, 12], &Device::Cpu)?);
    let (a, l) = (&slopes, &lengths);
    let pages = Tensor::zeros((2, 1), DType::U32, &Device::Cpu)?;
    let results = [
        ("flash_attn_alibi: alibi_slopes", flash_attn_alibi(&q, &k, &v, a, 0.2, true)),
        ("flash_attn_alibi_windowed: alibi_slopes", flash_attn_alibi_windowed(&q, &k, &v, a, 0.2, None, Some(0))),
        (
            "flash_attn_alibi_windowed_softcap: alibi_slopes",
            flash_attn_alibi_windowed_softcap(&q, &k, &v, Some(a), 0.2, None, None, 0.0),
        ),
        (
            "flash_attn_varlen_paged_windowed: block_table",
            flash_attn_varlen_paged_windowed(&q, &k, &v, l, l, &pages, None, 6, 6, 0.2, None, None, 32, None),
        ),
        ("flash_attn_varlen_alibi: alibi_slopes", flash_attn_varlen_alibi(&q, &k, &v, a, l, l, 6, 6, 0.2, true)),
        (
            "flash_attn_varlen_alibi_windowed: alibi_slopes",
            flash_attn_varlen_alibi_windowed(&q, &k, &v, a, l, l, 6, 6, 0.2, None, None),
        ),
        (
            "flash_attn_varlen_alibi_windowed_softcap: alibi_slopes",
            flash_attn_varlen_alibi_windowed_softcap(&q, &k, &v, Some(a), l, l, 6, 6, 0.2, None, None, 0.0),
        ),
    ];
    for (name, result) in results {
        let error = result.unwrap_err();
        assert!(error.to_string().contains(name), "{name}: {error}");
        assert!(matches!(cause(&error), Some(Error::Unsupported { .. })), "{error}");
    }
    Ok(())
}
