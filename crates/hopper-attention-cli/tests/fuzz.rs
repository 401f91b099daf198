//! `hattn fuzz` on the CPU: a short run, the file of a wrong problem, and what is refused.

mod common;

use common::{Folder, hattn};

#[test]
fn random_problems_are_right() {
    let text = hattn(["fuzz", "--device", "cpu", "--problems", "64", "--seed", "20261124"]).fine();
    for part in ["seed     20261124", "problems 64 in", "forward bf16", "backward f32", "fp8 ", "passed: 0 wrong"] {
        assert!(text.contains(part), "`{part}` is not in: {text}");
    }
}

#[test]
fn lists_of_blocks_may_be_given() {
    let text = hattn("fuzz --device cpu --problems 24 --seed 3 --block-mask random:30".split(' ')).fine();
    assert!(text.contains("passed: 0 wrong"), "{text}");
    let allowed = "allowed: random:PERCENT, none, documents, all, nothing, striped";
    let ran = hattn("fuzz --device cpu --problems 1 --block-mask some".split(' '));
    assert!(ran.code == Some(2) && ran.stderr.contains(allowed), "{ran:?}");
}

#[test]
fn a_written_problem_is_run_again() {
    let folder = Folder::new();
    let path = folder.path("wrong.json");
    let json = |seqlen_q: usize, dtype: &str| {
        format!(
            r#"{{"hattn":"0.2.0","device":"cuda:0","wrong":"o: off","problem":{{"pass":"forward","dtype":"{dtype}","batch":1,
            "seqlen_q":{seqlen_q},"seqlen_kv":60,"heads_q":4,"heads_kv":2,"head_dim_qk":32,"head_dim_vo":32,
            "mask":{{"kind":"window","left":null,"right":36,"top_left":true}},"scale":1.5,"lse":true,"placement":"BshdGaps",
            "values":{{"Sloped":{{"first":10,"last":-3}}}},"seed":7,"scaling":"per-head","half_scores":false,"hadamard":null,
            "arch":"sm90","deterministic":false,"launch":{{"kernel":3,"second_stream":true,"graph":false,"poison":9}}}}}}"#
        )
    };
    let replay = || hattn(["fuzz", "--device", "cpu", "--replay", path.to_str().expect("a name in UTF-8")]);
    std::fs::write(&path, json(50, "f16")).unwrap();
    let text = replay().fine();
    for part in ["window", "sm90", "then     cuda:0, hattn 0.2.0: o: off", "check    passed"] {
        assert!(text.contains(part), "`{part}` is not in: {text}");
    }
    for (wrong, part) in [(json(50, "f8"), "dtype"), (json(usize::MAX, "f16"), "sizes"), ("{}".into(), "replay")] {
        std::fs::write(&path, wrong).unwrap();
        replay().refused(&[part]);
    }
    std::fs::remove_file(&path).unwrap();
    replay().refused(&["wrong.json"]);
}
