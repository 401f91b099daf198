//! `hattn tune`, and `--tuning` of `run` and `check`, where there is no GPU; tests/gpu.rs has what needs one.

mod common;

use common::{FIXTURE, Folder, hattn};

const LINE: &str =
    "0.1.0\tNVIDIA H100 80GB HBM3\tforward bf16 batch 1 seqlen 8x8 heads 1/1 head_dim 8/8 full\tsm90 fwd\n";

#[test]
fn what_cannot_be_tuned_is_refused_and_the_file_stays() {
    let folder = Folder::new();
    let path = folder.path("tuning.tsv");
    let output = path.to_str().expect("a UTF-8 path");
    hattn(["tune", "--device", "cpu", "--output", output]).refused(&["--device cpu", "one way", "allowed: cuda:N"]);
    hattn(["tune", "--device", "cuda:4096", "--output", output]).refused(&[if cfg!(feature = "cuda") {
        "no device: cuda:4096"
    } else {
        "this build has no GPU kernels"
    }]);
    hattn(["tune", "--directions", "fwd,bwd", "--output", output]).refused(&["--directions bwd: ", "allowed: fwd"]);
    hattn(["tune", "--packed", "--output", output]).refused(&["--packed: ", "allowed: without it"]);
    hattn(["tune", "--block-mask", "1/4", "--output", output]).refused(&["--block-mask: ", "allowed: without it"]);
    hattn(["tune", "--gqa", "3", "--output", output]).refused(&["--gqa 3 does not divide"]);
    assert!(folder.names().is_empty(), "{:?}", folder.names());
    // A file that is something else is not overwritten.
    std::fs::write(&path, "some notes of mine\n").expect("written");
    hattn(["tune", "--output", output]).refused(&["tuning.tsv: ", "line 1 with 1 fields"]);
    assert_eq!(std::fs::read(&path).expect("still there"), b"some notes of mine\n");
}

#[test]
fn a_tuning_is_read_before_anything_is_computed() {
    let folder = Folder::new();
    let path = folder.path("tuning.tsv");
    let tuning = path.to_str().expect("a UTF-8 path");
    let check = || hattn(["check", "--device", "cpu", "--input", FIXTURE, "--tuning", tuning]);
    check().refused(&["tuning.tsv: ", "No such file"]);
    std::fs::write(&path, format!("# fine\n{LINE}")).expect("written");
    let text = check().fine();
    assert!(text.contains("passed") && text.contains("cpu, tiled online softmax"), "{text}");
    std::fs::write(&path, format!("{LINE}0.1.0\tcard\n")).expect("written");
    check().refused(&["line 2 with 2 fields", "allowed: version, card, shape and row between tabs"]);
}
