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

/// The bias by candle's own operations, on the scores.
fn biased(q: &Tensor, k: &Tensor, v: &Tensor, slopes: &[f32; 4], causal: bool) -> Result<Tensor> {
    let (rows, keys) = (q.dim(1)?, k.dim(1)?);
    let own = |i: usize| i as f32 + keys as f32 - rows as f32;
    let bias = |head: usize, i: usize, j: usize| {
        if causal && j as f32 > own(i) { f32::NEG_INFINITY } else { -slopes[head] * (own(i) - j as f32).abs() }
    };
    let all = (0..4).flat_map(|h| (0..rows).flat_map(move |i| (0..keys).map(move |j| (h, i, j))));
    let bias: Vec<f32> = all.map(|(h, i, j)| bias(h, i, j)).collect();
    let bias = Tensor::from_vec(bias, (1, 4, rows, keys), q.device())?;
    let wide = |t: &Tensor| t.transpose(1, 2)?.contiguous();
    let repeated = |t: &Tensor| {
        let (batch, keys, heads, dim) = t.dims4()?;
        t.unsqueeze(3)?.expand((batch, keys, heads, 4 / heads, dim))?.reshape((batch, keys, 4, dim))
    };
    let scores =
        (wide(q)?.matmul(&wide(&repeated(k)?)?.transpose(2, 3)?.contiguous()?)? * 0.2)?.broadcast_add(&bias)?;
    // Softmax: no row is without keys.
    let weights = scores.broadcast_sub(&scores.max_keepdim(3)?)?.exp()?;
    let weights = weights.broadcast_div(&weights.sum_keepdim(3)?)?;
    weights.matmul(&wide(&repeated(v)?)?)?.transpose(1, 2)
}

#[test]
fn slopes_bias_the_scores() -> Result<()> {
    let [q, k, v] = tensors()?;
    let slopes = [0.5f32, 0.25, -0.125, 2.0];
    let a = &Tensor::new(&slopes, &Device::Cpu)?;
    let far = |got: &Tensor, want: &Tensor| {
        let want = want.reshape(got.shape())?;
        (got - want)?.abs()?.max_all()?.to_scalar::<f32>()
    };
    let [of_q, of_k] = [[0u32, 6, 12], [0, 9, 18]].map(|offsets| Tensor::new(&offsets, &Device::Cpu));
    let [p, l, r] = [&q, &k, &v].map(|tensor| tensor.flatten(0, 1));
    let (p, l, r, of_q, of_k) = (&p?, &l?, &r?, &of_q?, &of_k?);
    for causal in [false, true] {
        let (want, right) = (biased(&q, &k, &v, &slopes, causal)?, causal.then_some(0));
        let without = flash_attn(&q, &k, &v, 0.2, causal)?;
        assert!(far(&without, &want)? > 0.05);
        for got in [
            flash_attn_alibi(&q, &k, &v, a, 0.2, causal)?,
            flash_attn_alibi_windowed(&q, &k, &v, a, 0.2, None, right)?,
            flash_attn_alibi_windowed_softcap(&q, &k, &v, Some(a), 0.2, None, right, 0.0)?,
            flash_attn_alibi(&q, &k, &v, &Tensor::stack(&[a, a], 0)?, 0.2, causal)?,
            flash_attn_varlen_alibi(p, l, r, a, of_q, of_k, 6, 9, 0.2, causal)?,
            flash_attn_varlen_alibi_windowed(p, l, r, a, of_q, of_k, 6, 9, 0.2, None, right)?,
            flash_attn_varlen_alibi_windowed_softcap(p, l, r, Some(a), of_q, of_k, 6, 9, 0.2, None, right, 0.0)?,
        ] {
            let far = far(&got, &want)?;
            assert!(far < 1e-5, "{causal} {far}");
        }
        // With a cap both are there: it is not the result without the one or the other.
        let both = flash_attn_alibi_windowed_softcap(&q, &k, &v, Some(a), 0.2, None, right, 0.5)?;
        let packed =
            flash_attn_varlen_alibi_windowed_softcap(p, l, r, Some(a), of_q, of_k, 6, 9, 0.2, None, right, 0.5)?;
        same(&packed, &both)?;
        let capped = flash_attn_alibi_windowed_softcap(&q, &k, &v, None, 0.2, None, right, 0.5)?;
        assert!(far(&both, &want)? > 0.01 && far(&both, &capped)? > 0.01);
    }
    Ok(())
}

#[test]
fn gradients_flow_beside_slopes() -> Result<()> {
    let [q, k, v] = tensors()?;
    let slopes = [0.5f32, 0.25, -0.125, 2.0];
    let a = &Tensor::new(&slopes, &Device::Cpu)?;
    let vars = [q, k, v].map(|tensor| candle_core::Var::from_tensor(&tensor));
    let [q, k, v] = vars;
    let (q, k, v) = (q?, k?, v?);
    let weights = Tensor::randn(0f32, 1.0, q.shape(), &Device::Cpu)?;
    let of = |o: Tensor| (o * &weights)?.sum_all()?.backward();
    let (got, want) = (of(flash_attn_alibi(&q, &k, &v, a, 0.2, true)?)?, of(biased(&q, &k, &v, &slopes, true)?)?);
    for var in [&q, &k, &v] {
        let (got, want) = (got.get(var).expect("a gradient"), want.get(var).expect("a gradient"));
        let far = (got - want)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(far < 1e-4, "{far}");
    }
    Ok(())
}

#[test]
fn wrong_slopes_are_refused_by_name() -> Result<()> {
    let [q, k, v] = tensors()?;
    let refused = |slopes: &Tensor| flash_attn_alibi(&q, &k, &v, slopes, 0.2, true).unwrap_err();
    let error = refused(&Tensor::ones(3, DType::F32, &Device::Cpu)?);
    assert!(error.to_string().contains("alibi_slopes: shape [3], expected [4]"), "{error}");
    let error = refused(&Tensor::ones((1, 1, 4), DType::F32, &Device::Cpu)?);
    assert!(matches!(cause(&error), Some(Error::Value { what: "alibi_slopes", .. })), "{error}");
    let var = candle_core::Var::ones(4, DType::F32, &Device::Cpu)?;
    let error = refused(var.as_tensor());
    assert!(error.to_string().contains("allowed: detached slopes"), "{error}");
    Ok(())
}

#[test]
fn what_is_missing_is_named() -> Result<()> {
    let [q, k, v] = tensors()?;
    let l = &Tensor::new(&[0u32, 6, 12], &Device::Cpu)?;
    let pages = Tensor::zeros((2, 1), DType::U32, &Device::Cpu)?;
    let paged = flash_attn_varlen_paged_windowed(&q, &k, &v, l, l, &pages, None, 6, 6, 0.2, None, None, 32, None);
    let error = paged.unwrap_err();
    assert!(error.to_string().contains("flash_attn_varlen_paged_windowed: block_table"), "{error}");
    assert!(matches!(cause(&error), Some(Error::Unsupported { .. })), "{error}");
    Ok(())
}
