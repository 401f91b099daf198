//! A language model learns through candle's autograd with our attention as it does with candle's own.

use candle_core::{Device, Result, Tensor};
use hopper_attention_candle::{Mask, Options, attention};
use hopper_attention_integration_tests::language::{Setup, train, verdict};
use hopper_attention_integration_tests::{own, say};

#[test]
fn a_language_model_learns_as_with_candles_own_attention() -> Result<()> {
    let setup = Setup {
        batch: 8,
        seqlen: 64,
        layers: 2,
        heads_q: 4,
        heads_kv: 2,
        head_dim: 16,
        steps: 120,
        learning_rate: 2e-3,
    };
    let options = Options::new().mask(Mask::causal());
    let ours = train(setup, &Device::Cpu, &|q, k, v| attention(q, k, v, &options))?;
    let theirs = train(setup, &Device::Cpu, &|q, k, v| own::attention(q, k, v, Mask::causal(), 0.25))?;
    let result = verdict(&ours, &theirs, 1e-5, 1e-3);
    say(&result.text);
    assert!(result.passed, "{}", result.text);
    // The comparison can fail: here keys get no gradient.
    let short = Setup { steps: 25, ..setup };
    let broken = |q: &Tensor, k: &Tensor, v: &Tensor| attention(q, &k.detach(), v, &options);
    let broken = verdict(&train(short, &Device::Cpu, &broken)?, &theirs[..25], 1e-5, 1e-3);
    say(&format!("caught: {}", broken.text));
    assert!(!broken.passed);
    Ok(())
}
