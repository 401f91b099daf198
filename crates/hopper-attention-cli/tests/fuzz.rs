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
fn masks_and_sinks_may_be_given() {
    let line = "fuzz --device cpu --problems 24 --seed 3 --mask chunk:9:top-left --sinks ten --near 0";
    let text = hattn(line.split(' ')).fine();
    let problems: Vec<_> =
        text.lines().filter(|line| line.starts_with("near     ") && line.contains(" seed ")).collect();
    assert!(problems.len() == 20 && text.contains("passed: 0 wrong"), "{text}");
    for problem in problems {
        assert!(problem.contains(" chunk 9 top-left ") && problem.contains(" sinks Ten"), "{problem}");
    }
    for (option, allowed) in [
        ("--sinks some", "sinks `some`; allowed: none, normal, zero, nothing, ten, large, mixed"),
        ("--mask some", "allowed: full, causal[:top-left]"),
    ] {
        let ran = hattn(format!("fuzz --device cpu --problems 1 {option}").split(' '));
        assert!(ran.code == Some(2) && ran.stderr.contains(allowed), "{ran:?}");
    }
}

#[test]
fn pairs_of_features_are_counted() {
    let text = hattn("fuzz --device cpu --problems 40 --seed 3 --sinks normal --pairs".split(' ')).fine();
    let table = text.find("\npair ").map(|at| &text[at..]).expect("a table");
    assert!(table.lines().all(|line| line.chars().count() <= 132), "{text}");
    // The numbers of a row, of a pass after the other: right, wrong, refused, and the largest error.
    let row = |name: &str| -> Vec<f64> {
        let row = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{name} in {text}"));
        row.split_whitespace().map(|cell| if cell == "-" { -1.0 } else { cell.parse().expect("a number") }).collect()
    };
    // All problems have sinks, and one of five masks.
    let (mut right, mut worst) = (0.0, 0.0_f64);
    for mask in ["full", "causal", "window", "chunked", "prefix"] {
        let cells = row(&format!("sinks + {mask} "));
        assert_eq!(cells.len(), 12, "{cells:?}");
        for cells in cells.chunks(4) {
            right += cells[0];
            worst = worst.max(cells[3]);
            assert_eq!(cells[1..3], [0.0; 2], "{cells:?}");
        }
    }
    assert!(right == 40.0 && (0.01..1.0).contains(&worst), "{right} {worst}");
    assert_eq!(row("sinks + max_logits ")[4..8], [-1.0; 4]);
    // By how the sequences lie: as many in all, and the same largest error.
    let (mut judged, mut largest) = (0, 0.0_f64);
    for lying in ["packed   ", "used     ", "dense    "] {
        let Some(line) = text.lines().find_map(|line| line.strip_prefix(lying)) else { continue };
        judged += line.split(' ').next().and_then(|word| word.parse::<usize>().ok()).expect("a count");
        let error = line.split(' ').rev().nth(3).and_then(|word| word.parse::<f64>().ok());
        largest = largest.max(error.unwrap_or_else(|| panic!("a number in {line}")));
    }
    assert!(judged == 40 && largest == worst, "{judged} {largest} {worst}: {text}");
    // Lists with packed sequences are refused, by name. (Long lines are wrapped.)
    let words = table.split_whitespace().collect::<Vec<_>>().join(" ");
    let refused = "unjudged fp8, 2 pairs, refused: unsupported: a block mask with packed sequences or used lengths; \
                   nearest: no block mask, or one sequence whose block mask keeps documents apart: blocks + packed, \
                   blocks + used lengths";
    assert!(words.contains(refused) && words.contains(" refused: unsupported: alibi with e4m3 operands;"), "{text}");
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
