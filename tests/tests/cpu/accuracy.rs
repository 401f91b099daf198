//! The accuracy of O at the head dims that `tests/tests/accuracy.rs` leaves out.

use hopper_attention::{Float, OutputOf, bf16, f16};
use hopper_attention_tests::accuracy::{Sample, Setting, Verdict};
use hopper_attention_tests::say;

#[test]
fn the_cpu_is_as_accurate_at_other_head_dims() {
    let mut wrong = Vec::new();
    say(Verdict::HEAD);
    verdicts::<bf16>(&mut wrong);
    verdicts::<f16>(&mut wrong);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn verdicts<T: Float + OutputOf<T>>(wrong: &mut Vec<String>) {
    for setting in Setting::all(&[96, 192, 256], &[192]) {
        let sample = Sample::<T>::new(setting);
        let verdict = sample.judge(&sample.on_cpu()).unwrap();
        say(&verdict.to_string());
        wrong.extend((!verdict.passed()).then(|| verdict.to_string()));
    }
}
