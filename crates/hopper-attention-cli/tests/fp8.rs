//! `hattn run --fp8` and `hattn check --fp8` on the CPU.

mod common;

use std::path::Path;

use common::{FIXTURE, Folder, Written, check_passes, hattn, hattn_on};
use safetensors::Dtype;

/// The relative RMSE that `check` printed.
fn accuracy(text: &str) -> f64 {
    let line =
        text.lines().find(|line| line.starts_with("accuracy")).unwrap_or_else(|| panic!("no accuracy in: {text}"));
    line.rsplit(' ').next().and_then(|error| error.parse().ok()).unwrap_or_else(|| panic!("no number in: {line}"))
}

#[test]
fn check_passes_on_real_activations() {
    for (line, shown) in [
        ("--fp8", "quantise bf16 to e4m3 per-tensor"),
        ("--fp8 per-head --mask causal", "quantise bf16 to e4m3 per-head"),
        ("--fp8 per-block --hadamard 7 --mask window:64,0", "quantise bf16 to e4m3 per-block hadamard 7"),
        ("--fp8 --half-scores", "quantise bf16 to e4m3 per-tensor half-scores"),
        ("--half-scores --fp8 per-block --hadamard 7 --mask causal", "e4m3 per-block half-scores hadamard 7"),
        ("--hadamard 18446744073709551615 --fp8 --dtype f16", "quantise f16 to e4m3 per-tensor hadamard"),
    ] {
        let text = hattn_on(&format!("check --device cpu {line}"), Path::new(FIXTURE), None).fine();
        for part in [shown, "problem  forward e4m3", "passed: the largest error is 0."] {
            assert!(text.contains(part), "`{part}` is not in: {text}");
        }
        // Three bits are an error of some percent: neither none at all nor a wrong output.
        let error = accuracy(&text);
        assert!((0.005..0.1).contains(&error), "{text}");
    }
}

#[test]
fn check_passes_on_other_shapes() {
    check_passes(
        &["--batch 2 --seqlen-q 165 --seqlen-kv 330 --heads-q 6 --heads-kv 2 --head-dim 80 --head-dim-vo 24"],
        &["per-tensor", "per-head --hadamard 1", "per-block --hadamard 1", "per-head --half-scores"]
            .map(|fp8| format!("--mask causal --fp8 {fp8}")),
    );
    check_passes(
        &["--seqlen-q 65 --seqlen-kv 130 --heads-q 2 --head-dim 192 --head-dim-vo 136", "--seqlen-q 65 --head-dim 512"],
        &["--fp8 per-block --hadamard 1".into(), "--fp8 per-tensor".into()],
    );
}

#[test]
fn run_writes_o_in_the_type_of_the_input() {
    let folder = Folder::new();
    let [exact, fp8, again, rotated] = ["exact", "fp8", "again", "rotated"].map(|name| folder.path(name));
    let fixture = Path::new(FIXTURE);
    hattn_on("run --device cpu", fixture, Some(&exact)).fine();
    let text = hattn_on("run --device cpu --fp8 per-block", fixture, Some(&fp8)).fine();
    assert!(text.contains("o bf16 [2, 197, 12, 32] bshd, lse f32 [2, 12, 197]"), "{text}");
    hattn_on("run --device cpu --fp8 per-block --repeat 2", fixture, Some(&again)).fine();
    assert!(std::fs::read(&fp8).unwrap() == std::fs::read(&again).unwrap());
    hattn_on("run --device cpu --fp8 per-block --hadamard 3", fixture, Some(&rotated)).fine();
    let [exact, fp8, rotated] = [exact, fp8, rotated].map(|path| Written::read(&path));
    assert_eq!((fp8.dtype, &fp8.o_shape, &fp8.lse_shape), (Dtype::BF16, &exact.o_shape, &exact.lse_shape));
    for written in [&fp8, &rotated] {
        let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x * x)).sum::<f64>();
        let errors = squares(&mut written.o.iter().zip(&exact.o).map(|(a, b)| a - b));
        let relative = (errors / squares(&mut exact.o.iter().copied())).sqrt();
        assert!((0.005..0.1).contains(&relative), "{relative}");
        assert!(written.lse.iter().zip(&exact.lse).all(|(a, b)| (a - b).abs() < 0.3));
    }
    assert_ne!(fp8.o, rotated.o);
}

#[test]
fn what_cannot_be_quantised_is_refused() {
    let folder = Folder::new();
    let input = folder.tensors("qkv.safetensors", Some("bshd"), &["q", "k", "v"].map(|name| (name, &[1, 4, 2, 8][..])));
    let refusal = "--fp8 quantises what is converted to f32; allowed: bf16, f16 (--dtype converts)";
    hattn_on("check --device cpu --fp8", &input, None).refused(&["qkv.safetensors", refusal]);
    hattn_on("check --device cpu --fp8 --dtype bf16", &input, None).fine();
    for (line, part) in [
        ("--fp8 --backward", "cannot be used with '--backward'"),
        ("--hadamard 3", "--fp8"),
        ("--half-scores", "--fp8"),
        ("--fp8 per-row", "per-tensor, per-head, per-block"),
        ("--fp8 --hadamard -1", "unexpected argument '-1'"),
    ] {
        let ran = hattn_on(&format!("check --device cpu {line}"), &input, None);
        assert!(ran.code == Some(2) && ran.stderr.contains(part), "{line}: {ran:?}");
    }
}

/// `auto` takes a GPU that has a kernel, else the CPU, and says why.
#[test]
fn auto_says_what_it_took() {
    let text = hattn(["check", "--fp8", "per-block", "--input", FIXTURE]).fine();
    assert!(text.contains(" (auto: ") && text.contains("passed"), "{text}");
}
