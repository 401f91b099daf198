//! The command as a user runs it, on the CPU backend.

use std::path::PathBuf;
use std::process::{Command, Output};

use hopper_attention_benches::{Report, Role, RunStatus, SCHEMA};

fn sweep(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hattn-sweep")).args(arguments).output().expect("hattn-sweep starts")
}

#[test]
fn a_small_sweep_writes_every_point() {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("hattn_sweep.json");
    let text = path.to_str().expect("a UTF-8 path");
    let small = ["--device", "cpu", "--tokens", "32", "--hidden", "64", "--seqlens", "16,32", "--dims", "16,32"];
    let rest =
        ["--heads-kv", "1", "--iters", "3", "--seed", "7", "--commit", "abc", "--layout", "bhsd", "--json", text];
    let out = sweep(&[&small[..], &rest[..]].concat());
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{stderr}");
    assert!(String::from_utf8_lossy(&out.stdout).contains("TFLOP/s"));

    let json = std::fs::read_to_string(&path).expect("the JSON is there");
    let report: Report = serde_json::from_str(&json).expect("the JSON has the schema");
    assert_eq!((report.schema.as_str(), report.commit.as_deref()), (SCHEMA, Some("abc")));
    assert_eq!(report.options["seed"], 7);
    let points: Vec<_> = report.points.iter().map(|p| (p.point.head_dim, p.point.causal, p.point.seqlen)).collect();
    let expected = [16, 32].into_iter().flat_map(|d| [false, true].map(|c| [16, 32].map(|s| (d, c, s))));
    assert_eq!(points, expected.flatten().collect::<Vec<_>>());
    for result in &report.points {
        assert_eq!((result.point.heads_kv, result.flops), (1, result.point.forward_flops()));
        let [run] = &result.runs[..] else { panic!("one run a point: {result:?}") };
        assert_eq!((run.role, run.status), (Role::Ours, RunStatus::Ok), "{run:?}");
        let summary = run.summary.as_ref().expect("an ok run has timings");
        assert_eq!(summary.ms.len(), 3);
        assert!(summary.ms.iter().all(|&ms| ms > 0.0) && summary.tflops > 0.0, "{summary:?}");
        assert_eq!(run.check["unwritten"], 0);
    }
}

#[test]
fn what_cannot_run_fails_loudly() {
    let out = sweep(&["--device", "cpu", "--seqlens", "16", "--dims", "16", "--hidden", "32", "--heads-kv", "3"]);
    assert!(!out.status.success());
    let both = [out.stdout, out.stderr].concat();
    assert!(String::from_utf8_lossy(&both).contains("a multiple of heads_kv"), "{}", String::from_utf8_lossy(&both));
    assert!(!sweep(&["--seqlens", "0"]).status.success());
    let out = sweep(&["--device", "cuda", "--ordinal", "4096"]);
    assert!(!out.status.success(), "there is no such GPU");
}
