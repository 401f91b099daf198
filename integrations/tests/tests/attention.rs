//! Values and gradients on the CPU, beside candle's own operations, and what is refused.

use candle_core::{DType, Device, Result, Tensor, Var};
use hopper_attention_candle::hopper_attention::Error;
use hopper_attention_candle::{Mask, Options, attention, attention_with_lse, cause};
use hopper_attention_integration_tests::gradients;
use hopper_attention_integration_tests::{difference, own};

#[test]
fn values_and_gradients_are_those_of_candles_own_operations() -> Result<()> {
    for case in gradients::cases() {
        let report = case.run(&Device::Cpu, DType::F32)?;
        assert!(report.worst() <= 2e-6, "{case:?}: {report:?}");
    }
    Ok(())
}

/// Scores that a cap of 1 bends, and one of 50 hardly does.
#[test]
fn capped_scores_are_those_of_candles_own_operations() -> Result<()> {
    for case in gradients::cases() {
        for cap in [1.0, 15.0, 50.0] {
            let report = case.run_capped(&Device::Cpu, DType::F32, cap)?;
            assert!(report.worst() <= 4e-6, "{case:?} {cap}: {report:?}");
        }
        // Another cap is seen.
        let options = Options::new().mask(case.mask).softcap(1.0);
        let report = case.run_with(&Device::Cpu, DType::F32, &|q, k, v| attention(q, k, v, &options))?;
        assert!(report.worst() > 1e-2, "{case:?}: {report:?}");
    }
    Ok(())
}

/// Head dims that kernels do not have, and those of V that differ from those of Q and K.
#[test]
fn any_head_dims_are_computed_on_the_cpu() -> Result<()> {
    for case in gradients::wide_cases() {
        for (dtype, bound) in [(DType::F32, 4e-6), (DType::BF16, 2e-2), (DType::F16, 3e-3)] {
            let report = case.run(&Device::Cpu, dtype)?;
            assert!(report.worst() <= bound, "{case:?} {dtype:?}: {report:?}");
        }
    }
    Ok(())
}

#[test]
fn wrong_gradients_are_seen() -> Result<()> {
    let case = &gradients::cases()[0];
    let report = case
        .run_with(&Device::Cpu, DType::F32, &|q, k, v| attention(q, &k.detach(), v, &Options::new().mask(case.mask)))?;
    assert!(report.worst() > 1e-2, "{report:?}");
    Ok(())
}

#[test]
fn half_precision_is_computed_on_the_cpu() -> Result<()> {
    for (dtype, bound) in [(DType::BF16, 2e-2), (DType::F16, 3e-3)] {
        let case = &gradients::cases()[1];
        let report = case.run(&Device::Cpu, dtype)?;
        assert!(report.worst() <= bound, "{dtype:?}: {report:?}");
    }
    Ok(())
}

/// A model often computes Q, K and V in one product, and hands on parts of the result.
#[test]
fn parts_of_one_tensor_are_taken_as_they_lie() -> Result<()> {
    let qkv = Var::randn(0f32, 1.0, (2, 9, 12, 16), &Device::Cpu)?;
    let part = |begin| qkv.narrow(2, begin, 4);
    let (q, k, v) = (part(0)?, part(4)?, part(8)?);
    assert!(!q.is_contiguous());
    let options = Options::new().mask(Mask::causal());
    let ours = attention(&q, &k, &v, &options)?;
    let theirs = own::attention(&q, &k, &v, Mask::causal(), 0.25)?;
    assert!(difference(&ours, &theirs)?.0 < 1e-6);
    let of =
        |o: Tensor| Ok::<_, candle_core::Error>(o.sqr()?.sum_all()?.backward()?.get(&qkv).expect("a gradient").clone());
    let (difference, _) = difference(&of(ours)?, &of(theirs)?)?;
    assert!(difference < 1e-5, "{difference}");
    Ok(())
}

#[test]
fn the_cpu_ignores_a_margin_and_a_limit() -> Result<()> {
    let q = Var::randn(0f32, 1.0, (1, 9, 2, 16), &Device::Cpu)?;
    let both = |options: &Options| {
        let o = attention(&q, &q, &q, options)?;
        let gradient = o.sqr()?.sum_all()?.backward()?.get(&q).expect("a gradient").clone();
        Ok::<_, candle_core::Error>([o, gradient])
    };
    let options = Options::new().mask(Mask::causal());
    let [margin, limit] = [options.clone().sm_margin(500), options.clone().workspace_limit(0)];
    for other in [margin, limit] {
        assert_ne!(other, options);
        for (ours, theirs) in both(&other)?.iter().zip(&both(&options)?) {
            assert_eq!(difference(ours, theirs)?.0, 0.0);
        }
    }
    Ok(())
}

/// What candle calls `[batch, heads, seqlen, head_dim]`, and one head of keys repeated by strides of 0.
#[test]
fn any_strides_will_do() -> Result<()> {
    let q = Tensor::randn(0f32, 1.0, (1, 4, 5, 16), &Device::Cpu)?.transpose(1, 2)?;
    let k = Tensor::randn(0f32, 1.0, (1, 7, 1, 16), &Device::Cpu)?;
    let repeated = k.broadcast_as((1, 7, 4, 16))?;
    let ours = attention(&q, &repeated, &repeated, &Options::new().softmax_scale(0.5))?;
    let theirs = own::attention(&q, &k, &k, Mask::Full, 0.5)?;
    assert!(difference(&ours, &theirs)?.0 < 1e-6);
    Ok(())
}

#[test]
fn the_lse_merges_parts_of_the_keys() -> Result<()> {
    let [q, k, v] = [5, 8, 8].map(|seqlen| Tensor::randn(0f32, 1.0, (2, seqlen, 2, 16), &Device::Cpu));
    let (q, k, v) = (q?, k?, v?);
    let options = Options::new();
    let whole = attention(&q, &k, &v, &options)?;
    let part =
        |begin, length| attention_with_lse(&q, &k.narrow(1, begin, length)?, &v.narrow(1, begin, length)?, &options);
    let ((o1, lse1), (o2, lse2)) = (part(0, 3)?, part(3, 5)?);
    assert_eq!((lse1.dims(), lse1.dtype()), (&[2, 2, 5][..], DType::F32));
    let weight = (lse1.exp()? / (lse1.exp()? + lse2.exp()?)?)?.transpose(1, 2)?.unsqueeze(3)?;
    let merged = (o1.broadcast_mul(&weight)? + o2.broadcast_mul(&(1.0 - &weight)?)?)?;
    assert!(difference(&merged, &whole)?.0 < 1e-6);
    Ok(())
}

#[test]
fn no_keys_and_no_queries_are_legal() -> Result<()> {
    let zeros = |seqlen| Tensor::zeros((2, seqlen, 2, 16), DType::F32, &Device::Cpu);
    let o = attention(&zeros(3)?, &zeros(0)?, &zeros(0)?, &Options::new())?;
    assert_eq!(o.flatten_all()?.to_vec1::<f32>()?, [0.0; 192]);
    assert_eq!(attention(&zeros(0)?, &zeros(3)?, &zeros(3)?, &Options::new())?.dims(), [2, 0, 2, 16]);
    Ok(())
}

/// What is refused, and the name of what is wrong.
#[test]
fn what_cannot_be_computed_is_refused_by_name() -> Result<()> {
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu);
    let q = zeros(&[1, 4, 2, 16], DType::F32)?;
    let refused = |q: &Tensor, k: &Tensor, v: &Tensor, options: &Options| {
        let error = attention(q, k, v, options).unwrap_err();
        (error.to_string(), cause(&error).cloned())
    };
    let options = Options::new();

    let double = zeros(&[1, 4, 2, 16], DType::F64)?;
    let (text, _) = refused(&double, &double, &double, &options);
    assert!(text.contains("q, k and v: dtype f64; allowed: f16, bf16, f32"), "{text}");
    let (text, _) = refused(&q, &zeros(&[1, 4, 2, 16], DType::F16)?, &q, &options);
    assert!(text.contains("dtype"), "{text}");
    let three = zeros(&[4, 2, 16], DType::F32)?;
    assert!(refused(&three, &q, &q, &options).0.contains("q: 3 dimensions, [4, 2, 16]"));
    assert!(refused(&q, &q, &three, &options).0.contains("v: 3 dimensions"));
    let (text, _) = refused(&q, &zeros(&[2, 4, 2, 16], DType::F32)?, &q, &options);
    assert!(text.contains("k: shape [2, 4, 2, 16], expected [1, 4, 2, 16]"), "{text}");
    let (text, _) = refused(&q, &zeros(&[1, 4, 16, 2], DType::F32)?.transpose(2, 3)?, &q, &options);
    assert!(text.contains("k: stride 2 in head_dim; allowed: stride 1"), "{text}");
    let (_, error) = refused(&q, &zeros(&[1, 4, 3, 16], DType::F32)?, &zeros(&[1, 4, 3, 16], DType::F32)?, &options);
    assert!(matches!(error, Some(Error::Value { what: "heads_q", .. })), "{error:?}");
    let (text, _) = refused(&q, &q, &q, &options.clone().softmax_scale(-1.0));
    assert!(text.contains("softmax_scale: -1"), "{text}");
    let (_, error) = refused(&q, &q, &q, &options.arch(hopper_attention_candle::Arch::Sm90));
    assert!(matches!(error, Some(Error::Unsupported { .. })), "{error:?}");

    let variable = Var::from_tensor(&q)?;
    let error = attention_with_lse(&variable, &q, &q, &Options::new()).unwrap_err().to_string();
    assert!(error.contains("the LSE has no gradient here"), "{error}");
    Ok(())
}

/// The variable asks candle for gradients of gradients. candle reads it when a thread first computes gradients, so
/// that the test runs itself with it.
#[test]
fn a_gradient_of_a_gradient_is_refused() -> Result<()> {
    const NAME: &str = "CANDLE_GRAD_DO_NOT_DETACH";
    if std::env::var_os(NAME).is_none() {
        let this = std::env::current_exe()?;
        let run = std::process::Command::new(this)
            .args(["--exact", "a_gradient_of_a_gradient_is_refused"])
            .env(NAME, "1")
            .output()?;
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stdout));
        return Ok(());
    }
    let q = Var::randn(0f32, 1.0, (1, 3, 1, 8), &Device::Cpu)?;
    let o = attention(&q, &q, &q, &Options::new())?;
    let error = o.sqr()?.sum_all()?.backward().unwrap_err();
    assert!(matches!(cause(&error), Some(Error::Unsupported { .. })), "{error}");
    assert!(error.to_string().contains("a gradient of a gradient"), "{error}");
    Ok(())
}

/// Values and gradients with the mask of the definition, by candle's own operations.
#[test]
fn dropout_is_that_of_its_definition() -> Result<()> {
    use hopper_attention_candle::Dropout;
    use hopper_attention_candle::hopper_attention::{dropout_state, reference::DropoutMask};

    let (batch, seqlen, heads, dim) = (2, 19, 3, 8);
    let shape = (batch, seqlen, heads, dim);
    let dropout = Dropout::new(0.3).unwrap();
    let options = Options::new().dropout(dropout, 77, 5 << 32);
    let [q, k, v] = [(); 3].map(|()| Var::randn(0f32, 1.0, shape, &Device::Cpu));
    let (q, k, v) = (q?, k?, v?);
    let mask = DropoutMask::new(dropout, heads, dropout_state(77, 5 << 32));
    let mut factors = Vec::new();
    for i in 0..batch * heads * seqlen * seqlen {
        let (key, query, head) = (i % seqlen, i / seqlen % seqlen, i / seqlen / seqlen % heads);
        let kept = mask.keeps(i / seqlen / seqlen / heads, head, query, key);
        factors.push(if kept { dropout.factor() as f32 } else { 0.0 });
    }
    let factors = Tensor::from_vec(factors, (batch, heads, seqlen, seqlen), &Device::Cpu)?;
    let [of_q, of_k, of_v] = [&q, &k, &v].map(|tensor| tensor.transpose(1, 2).and_then(|tensor| tensor.contiguous()));
    let scores = (of_q?.matmul(&of_k?.transpose(2, 3)?.contiguous()?)? * (1.0 / (dim as f64).sqrt()))?;
    let exp = scores.broadcast_sub(&scores.max_keepdim(3)?.detach())?.exp()?;
    let p = exp.broadcast_div(&exp.sum_keepdim(3)?)?;
    let want = (p * factors)?.matmul(&of_v?)?.transpose(1, 2)?.contiguous()?;
    let got = attention(&q, &k, &v, &options)?;
    let d_o = Tensor::randn(0f32, 1.0, shape, &Device::Cpu)?;
    let [got_gradients, want_gradients] =
        [&got, &want].map(|o| (o * &d_o).and_then(|loss| loss.sum_all()).and_then(|loss| loss.backward()));
    let (got_gradients, want_gradients) = (got_gradients?, want_gradients?);
    assert!(difference(&got, &want)?.0 < 1e-5);
    for tensor in [&q, &k, &v] {
        let [got, want] = [&got_gradients, &want_gradients].map(|all| all.get(tensor).unwrap());
        assert!(difference(got, want)?.0 < 1e-5);
    }
    // Another offset is another mask, and the same one the same.
    let again = attention(&q, &k, &v, &options)?;
    assert_eq!(difference(&got, &again)?.0, 0.0);
    let other = attention(&q, &k, &v, &Options::new().dropout(dropout, 77, 6 << 32))?;
    assert!(difference(&got, &other)?.0 > 0.1);
    Ok(())
}
