//! Packed sequences on the CPU: values and gradients are those of each sequence by itself, and what is refused.

use candle_core::{DType, Device, Result, Tensor, Var};
use hopper_attention_candle::hopper_attention::Error;
use hopper_attention_candle::{Mask, Options, attention, attention_varlen, cause};
use hopper_attention_integration_tests::varlen;

#[test]
fn values_and_gradients_are_those_of_each_sequence() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for mask in [Mask::Full, Mask::causal(), Mask::window(Some(3), Some(1)), Mask::window(Some(4), None)] {
            // On the CPU one sequence is computed as the others are, whatever lies beside it.
            assert_eq!(varlen::run(&Device::Cpu, dtype, mask)?, 0.0, "{dtype:?} {mask:?}");
        }
    }
    Ok(())
}

#[test]
fn a_row_that_moves_to_another_sequence_is_seen() -> Result<()> {
    let [q, k, v] = [(); 3].map(|()| Tensor::randn(0f32, 1.0, (8, 2, 16), &Device::Cpu));
    let (q, k, v) = (q?, k?, v?);
    let o = |begin: u32| {
        let seqlens = Tensor::new(&[0, begin, 8], &Device::Cpu)?;
        attention_varlen(&q, &k, &v, &seqlens, &seqlens, &Options::new())?.flatten_all()?.to_vec1::<f32>()
    };
    assert_ne!(o(3)?, o(4)?);
    Ok(())
}

#[test]
fn rows_of_no_sequence_are_zeros() -> Result<()> {
    let q = Var::randn(0f32, 1.0, (8, 2, 16), &Device::Cpu)?;
    let seqlens = Tensor::new(&[2u32, 3, 7], &Device::Cpu)?;
    let o = attention_varlen(&q, &q, &q, &seqlens, &seqlens, &Options::new())?;
    let gradient = o.sqr()?.sum_all()?.backward()?.get(&q).expect("a gradient").clone();
    for tensor in [o, gradient] {
        let largest = tensor.abs()?.flatten_from(1)?.max(1)?.to_vec1::<f32>()?;
        let is_zero: Vec<_> = largest.iter().map(|&value| value == 0.0).collect();
        assert_eq!(is_zero, [true, true, false, false, false, false, false, true]);
    }
    Ok(())
}

/// A part of a longer list, and every other number of one.
#[test]
fn offsets_are_taken_where_they_lie() -> Result<()> {
    let q = Tensor::randn(0f32, 1.0, (8, 2, 16), &Device::Cpu)?;
    let o = |seqlens: &Tensor| {
        attention_varlen(&q, &q, &q, seqlens, seqlens, &Options::new())?.flatten_all()?.to_vec1::<f32>()
    };
    let want = o(&Tensor::new(&[0u32, 3, 8], &Device::Cpu)?)?;
    assert_eq!(o(&Tensor::new(&[5u32, 0, 3, 8, 9], &Device::Cpu)?.narrow(0, 1, 3)?)?, want);
    let every_other = Tensor::new(&[[0u32, 7], [3, 7], [8, 7]], &Device::Cpu)?.narrow(1, 0, 1)?.squeeze(1)?;
    assert_eq!(o(&every_other)?, want);
    Ok(())
}

#[test]
fn what_is_wrong_is_named() -> Result<()> {
    let cpu = &Device::Cpu;
    let q = Tensor::zeros((8, 2, 16), DType::F32, cpu)?;
    let dense = q.unsqueeze(0)?;
    let good = Tensor::new(&[0u32, 3, 8], cpu)?;
    let of = |seqlens: &[u32]| Tensor::new(seqlens, cpu);
    for (words, q, offsets) in [
        ("seqlens_kv: u32 [1, 3]; allowed: u32 [batch + 1]", &q, good.unsqueeze(0)?),
        ("seqlens_kv: i64 [3]; allowed: u32 [batch + 1]", &q, good.to_dtype(DType::I64)?),
        ("seqlens_kv: u32 [0]; allowed: u32 [batch + 1]", &q, good.narrow(0, 0, 0)?),
        ("seqlens_kv: 2147483648; allowed: below 2^31", &q, of(&[0, 3, 1 << 31])?),
        ("seqlens_kv: 4294967295; allowed: below 2^31", &q, of(&[u32::MAX, 3, 8])?),
        ("q: 4 dimensions", &dense, good.clone()),
        ("offsets", &q, of(&[0, 5, 3])?),
        ("cu_seqlens_kv", &q, of(&[0, 5, 9])?),
        ("cu_seqlens_kv", &q, of(&[0, 5, 6, 8])?),
    ] {
        let error = attention_varlen(q, q, q, &good, &offsets, &Options::new()).unwrap_err();
        assert!(error.to_string().contains(words), "{words}: {error}");
        assert!(cause(&error).is_some(), "{error}");
    }
    // The hint is one of packed sequences alone.
    let error = attention(&dense, &dense, &dense, &Options::new().max_seqlens(8, 8)).unwrap_err();
    assert!(matches!(cause(&error), Some(Error::Value { what: "max_seqlen_q", .. })), "{error}");
    Ok(())
}
