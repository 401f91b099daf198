//! A model learns with our gradients as it does with exact ones.

use hopper_attention_tests::say;
use hopper_attention_tests::training::{OnCpu, Oracle, Setup, TEXT, distance, train};

const SETUP: Setup = Setup { batch: 4, seqlen: 64, heads_q: 4, heads_kv: 2, head_dim: 16, width: 64, steps: 200 };

#[test]
fn our_gradients_train_as_exact_ones_do() {
    let text = TEXT.as_bytes();
    let exact = train(SETUP, text, &mut Oracle::new(&SETUP, false).unwrap()).unwrap();
    let rounded = train(SETUP, text, &mut Oracle::new(&SETUP, true).unwrap()).unwrap();
    let ours = train(SETUP, text, &mut OnCpu::new(&SETUP).unwrap()).unwrap();
    let (start, end) = (ours[0], ours[ours.len() - 1]);
    // What rounding inputs and outputs to 16 bits does to the curve is the noise of any 16-bit attention.
    let (noise, error) = (distance(&rounded, &exact), distance(&ours, &exact));
    say(&format!(
        "loss {start:.3} -> {end:.3} (exact {:.3}), apart {error:.4}, noise {noise:.4}",
        exact[exact.len() - 1]
    ));
    assert!(end < 0.75 * start, "nothing was learned: {start} to {end}");
    assert!(error <= 3.0 * noise + 0.01, "the curves are {error} apart, rounding alone makes {noise}");
}
