//! Attention sinks on the CPU: values and gradients beside candle's own operations, and what is refused.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_flash_attn::{flash_attn_sinks, flash_attn_sinks_varlen};
use hopper_attention_candle::hopper_attention::Error;
use hopper_attention_candle::{Mask, Options, attention, attention_varlen_with_sinks, attention_with_sinks, cause};
use hopper_attention_integration_tests::gradients::on_several_threads;
use hopper_attention_integration_tests::sinks::{Kind, run, run_with};
use hopper_attention_integration_tests::{difference, own};

const KINDS: [Kind; 3] = [Kind::Dense, Kind::Packed, Kind::PaddedQ];

fn masks() -> [Mask; 3] {
    [Mask::Full, Mask::causal(), Mask::window(Some(3), Some(0))]
}

#[test]
fn values_and_gradients_are_those_of_candles_own_operations() -> Result<()> {
    for kind in KINDS {
        for mask in masks() {
            for (dtype, bound) in [(DType::F32, 4e-6), (DType::BF16, 3e-2), (DType::F16, 5e-3)] {
                for of_sinks in [DType::F32, DType::BF16] {
                    // The gradient of sinks in bf16 is rounded to bf16.
                    let bound = if of_sinks == DType::BF16 { f32::max(bound, 4e-3) } else { bound };
                    let worst = run(&Device::Cpu, dtype, of_sinks, mask, kind)?;
                    assert!(worst <= bound, "{kind:?} {mask:?} {dtype:?} {of_sinks:?}: {worst}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn wrong_sinks_and_lost_gradients_are_seen() -> Result<()> {
    for kind in KINDS {
        for wrong in ["a little more", "without a gradient", "zeros"] {
            let change = |sinks: &Tensor| match wrong {
                "a little more" => sinks * 1.01,
                "zeros" => sinks.zeros_like(),
                _ => Ok(sinks.detach()),
            };
            let worst = run_with(&Device::Cpu, DType::F32, DType::F32, Mask::causal(), kind, &change)?;
            assert!(worst > 5e-4, "{kind:?} {wrong}: {worst}");
        }
    }
    Ok(())
}

/// The gradient of K alone, of the sinks alone, of neither, and gradients that are computed twice and on several threads.
#[test]
fn any_of_the_inputs_may_want_a_gradient() -> Result<()> {
    let random = |heads| Tensor::randn(0f32, 1.0, (2, 9, heads, 16), &Device::Cpu);
    let (q, k, v, logits) = (random(4)?, random(2)?, random(2)?, Tensor::new(&[0f32, 1., -2., 3.], &Device::Cpu)?);
    let vars = [&q, &k, &v, &logits].map(Var::from_tensor);
    let [var_q, var_k, var_v, var_logits] = vars;
    let vars = [&var_q?, &var_k?, &var_v?, &var_logits?];
    let options = Options::new().mask(Mask::causal());
    let loss = |wanted: [bool; 4]| {
        let [q, k, v, sinks] =
            [0, 1, 2, 3].map(|i| if wanted[i] { vars[i].as_tensor().clone() } else { vars[i].as_detached_tensor() });
        attention_with_sinks(&q, &k, &v, &sinks, &options)?.sqr()?.sum_all()
    };
    let all = loss([true; 4])?;
    let want = all.backward()?;
    for bits in 1..16 {
        let wanted = [0, 1, 2, 3].map(|i| bits >> i & 1 == 1);
        let got = loss(wanted)?.backward()?;
        for i in 0..4 {
            match got.get(vars[i]) {
                Some(gradient) if wanted[i] => {
                    assert_eq!(difference(gradient, want.get(vars[i]).expect("a gradient"))?.0, 0.0, "{wanted:?} {i}");
                }
                other => assert!(other.is_none() && !wanted[i], "{wanted:?} {i}"),
            }
        }
    }
    assert!(!loss([false; 4])?.track_op());
    on_several_threads(&all, &want, &vars, 1..5)
}

#[test]
fn a_sink_of_minus_infinity_changes_nothing() -> Result<()> {
    let q = Tensor::randn(0f32, 1.0, (2, 9, 4, 16), &Device::Cpu)?;
    let none = Tensor::new(&[f32::NEG_INFINITY; 4], &Device::Cpu)?;
    let options = Options::new().mask(Mask::causal());
    let (got, want) = (attention_with_sinks(&q, &q, &q, &none, &options)?, attention(&q, &q, &q, &options)?);
    assert_eq!(difference(&got, &want)?.0, 0.0);
    Ok(())
}

/// mistral.rs's layouts: heads in front of rows, and padded queries.
#[test]
fn the_functions_of_mistral_rs() -> Result<()> {
    let random = |heads, rows| Tensor::randn(0f32, 1.0, (2, heads, rows, 32), &Device::Cpu);
    let (q, k, v) = (random(4, 6)?, random(2, 9)?, random(2, 9)?);
    let sinks = Tensor::new(&[0f32, 1.5, -2.0, 4.0], &Device::Cpu)?;
    let flat = |t: &Tensor| t.transpose(1, 2)?.contiguous()?.flatten(0, 1);
    let (flat_k, flat_v) = (flat(&k)?, flat(&v)?);
    let [of_q, of_k] = [[0u32, 6, 12], [0, 9, 18]].map(|offsets| Tensor::new(&offsets, &Device::Cpu));
    let (of_q, of_k) = (of_q?, of_k?);
    for window in [0, 1, 3, 100] {
        let mask = if window == 0 { Mask::causal() } else { Mask::window(Some(window - 1), Some(0)) };
        for sinks in [Some(&sinks), None] {
            let [q_rows, k_rows, v_rows] = [&q, &k, &v].map(|t| t.transpose(1, 2));
            let want = own::attention_with_sinks(&q_rows?, &k_rows?, &v_rows?, sinks, mask, 0.2)?.transpose(1, 2)?;
            let got = flash_attn_sinks(&q, &k, &v, sinks, 0.2, window)?;
            assert_eq!(got.dims(), q.dims());
            assert!(difference(&got, &want)?.0 < 2e-6, "{window}");
            let got = flash_attn_sinks_varlen(&q, &flat_k, &flat_v, sinks, &of_q, &of_k, 0.2, window)?;
            assert!(difference(&got, &want)?.0 < 2e-6, "{window}");
        }
    }
    // Two sequences of 2 and of 5 queries in 6 rows. Sinks in f16 are read as f32.
    let of_q = Tensor::new(&[0u32, 2, 7], &Device::Cpu)?;
    let o = flash_attn_sinks_varlen(&q, &flat_k, &flat_v, Some(&sinks.to_dtype(DType::F16)?), &of_q, &of_k, 0.2, 4)?;
    for (i, length) in [(0, 2), (1, 5)] {
        let part = |t: &Tensor, rows| t.narrow(0, i, 1)?.narrow(2, 0, rows);
        let want = flash_attn_sinks(&part(&q, length)?, &part(&k, 9)?, &part(&v, 9)?, Some(&sinks), 0.2, 4)?;
        assert_eq!(difference(&part(&o, length)?, &want)?.0, 0.0);
        assert_eq!(o.narrow(0, i, 1)?.narrow(2, length, 6 - length)?.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0);
    }
    Ok(())
}

#[test]
fn what_is_wrong_is_named() -> Result<()> {
    let cpu = &Device::Cpu;
    let q = Tensor::zeros((1, 8, 4, 16), DType::F32, cpu)?;
    let sinks = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, cpu);
    for (words, sinks) in [
        ("sinks: 2 dimensions, [1, 4]; allowed: 1, [heads_q]", sinks(&[1, 4], DType::F32)?),
        ("sinks: shape [3], expected [4]", sinks(&[3], DType::F32)?),
        ("sinks: dtype f16; allowed: f32, bf16", sinks(&[4], DType::F16)?),
        ("sinks: dtype f64; allowed: f32, bf16", sinks(&[4], DType::F64)?),
    ] {
        let error = attention_with_sinks(&q, &q, &q, &sinks, &Options::new()).unwrap_err();
        assert!(error.to_string().contains(words), "{words}: {error}");
        assert!(cause(&error).is_some(), "{error}");
    }
    let (good, rows, seqlens) = (sinks(&[4], DType::F32)?, q.squeeze(0)?, Tensor::new(&[0u32, 3, 8], cpu)?);
    let error = attention_varlen_with_sinks(&q, &rows, &rows, &good, &seqlens, &seqlens, &Options::new()).unwrap_err();
    assert!(error.to_string().contains("q: 4 dimensions"), "{error}");
    let heads = Tensor::zeros((2, 4, 4, 16), DType::F32, cpu)?;
    for (words, q, of_q) in [
        ("seqlens_q: 8 after 3; allowed: from 0 to 4", &heads, &[0u32, 3, 8]),
        ("seqlens_q: 1 after 3; allowed: from 0 to 4", &heads, &[0, 3, 1]),
        ("q: 3 dimensions", &rows, &[0, 3, 4]),
    ] {
        let of_q = Tensor::new(of_q, cpu)?;
        let error = flash_attn_sinks_varlen(q, &rows, &rows, Some(&good), &of_q, &seqlens, 0.2, 0).unwrap_err();
        assert!(error.to_string().contains(words), "{words}: {error}");
    }
    let error = flash_attn_sinks_varlen(&heads, &rows, &rows, Some(&good), &seqlens.narrow(0, 0, 2)?, &seqlens, 0.2, 0);
    assert!(matches!(cause(&error.unwrap_err()), Some(Error::Value { .. } | Error::Shape { .. })));
    Ok(())
}
