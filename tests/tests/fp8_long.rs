//! That the error of e4m3 operands does not grow with the keys beyond what quantisation alone explains, on the CPU backend,
//! and that a sum over keys which loses a little at each step is noticed.

use hopper_attention::{Mask, Scaling};
use hopper_attention_tests::long::{KEYS, Long, SETTINGS, Values};
use hopper_attention_tests::say;

#[test]
fn long_sequences_are_as_accurate_as_quantisation_allows() {
    for values in [Values::Normal, Values::Positive] {
        // What wider heads cost, if anything, does not wait for many keys either.
        let wide = [[192, 128], [256, 256]].map(|head_dims| (KEYS[0], head_dims));
        for (keys, head_dims) in KEYS.map(|keys| (keys, [128, 128])).into_iter().chain(wide) {
            let long = Long::new(keys, head_dims, values);
            for (mask, scaling) in SETTINGS {
                // What smaller operands cost, if anything, does not wait for many keys.
                for half in [false, true].into_iter().take(if keys == KEYS[0] { 2 } else { 1 }) {
                    let quantised = long.quantised(mask, scaling, half);
                    let (figures, complaint) = quantised.judge(&quantised.operands.run().0);
                    say(&format!("cpu: {figures}"));
                    assert_eq!(complaint, None);
                }
            }
        }
    }
}

#[test]
fn sums_that_are_cut_off_are_noticed() {
    let [short, long, longest] = KEYS.map(|keys| {
        let quantised = Long::new(keys, [64, 64], Values::Positive).quantised(Mask::Full, Scaling::PerTensor, false);
        let (figures, complaint) = quantised.judge(&quantised.cut_off());
        say(&format!("cut off at 14 bits: {figures}"));
        complaint
    });
    // A short sequence loses a thousandth, which is within the tolerance.
    assert_eq!(short, None);
    assert!(long.is_some() && longest.is_some());
}
