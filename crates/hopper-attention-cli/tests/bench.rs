//! `hattn bench` and `hattn plot` as a user runs them, on the CPU: a sweep, its files, comparisons, charts, refusals.

mod common;

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn hattn(arguments: &[&str]) -> Output {
    // A terminal's colours would be in the way.
    Command::new(common::program()).args(arguments).env("NO_COLOR", "1").output().expect("hattn starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Eight points in a second or two; more with other masks.
const SMALL: [&str; 13] = [
    "bench",
    "--device",
    "cpu",
    "--tokens",
    "32",
    "--hidden",
    "64",
    "--seqlens",
    "16,32",
    "--dims",
    "16,32",
    "--dtypes",
    "bf16",
];

fn sweep(folder: &Path, more: &[&str]) -> Output {
    let folder = folder.to_str().expect("a UTF-8 path");
    let rest = ["--iters", "5", "--seed", "7", "--commit", "abc", "--output", folder];
    hattn(&[&SMALL[..], &rest, more].concat())
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).expect("the file is there")).expect("it is JSON")
}

#[test]
fn a_sweep_leaves_a_report_a_table_and_charts() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = sweep(
        &folder.path().join("new/folder"),
        &["--gqa", "2", "--layout", "bhsd", "--masks", "full,causal,window:9"],
    );
    assert!(out.status.success(), "{}", text(&out.stderr));
    let folder = folder.path().join("new/folder");

    let stdout = text(&out.stdout);
    for part in
        ["TFLOP/s", "ours/best", "naive", "ours / best peer: geometric mean", "host cost, us", "CPU backend against"]
    {
        assert!(stdout.contains(part), "{part}\n{stdout}");
    }

    let report = json(&folder.join("bench.json"));
    assert_eq!((&report["schema"], &report["commit"]), (&"hattn-bench/1".into(), &"abc".into()));
    assert_eq!((&report["harness"], &report["options"]["seed"]), (&"cpu".into(), &7.into()));
    assert!(report["host"]["calls"][0]["us"][1].as_f64().is_some_and(|us| us > 0.0), "{}", report["host"]);
    let points = report["points"].as_array().expect("points");
    let sizes: Vec<_> = points
        .iter()
        .map(|p| ["head_dim", "causal", "window", "seqlen", "heads_kv"].map(|key| p["point"][key].to_string()))
        .collect();
    let masks = [["false", "null"], ["true", "null"], ["true", "9"]];
    let expected = |d: usize, [causal, window]: [&str; 2], s: usize| {
        [d.to_string(), causal.into(), window.into(), s.to_string(), (64 / d / 2).to_string()]
    };
    let all =
        [16, 32].into_iter().flat_map(|d| masks.into_iter().flat_map(move |m| [16, 32].map(|s| expected(d, m, s))));
    assert_eq!(sizes, all.collect::<Vec<_>>());
    for point in points {
        let runs = point["runs"].as_array().expect("runs");
        assert_eq!(
            runs.iter().map(|run| run["name"].as_str().expect("a name")).collect::<Vec<_>>(),
            ["hopper-attention", "naive"]
        );
        for run in runs {
            assert_eq!((&run["status"], run["ms"].as_array().map(Vec::len)), (&"ok".into(), Some(5)), "{run}");
            assert!(run["tflops"].as_f64().is_some_and(|rate| rate > 0.0) && run["check"]["unwritten"] == 0, "{run}");
        }
        assert!(runs[1]["check"]["cross"].as_f64().is_some_and(|distance| distance < 0.03), "{}", runs[1]);
    }

    let csv = std::fs::read_to_string(folder.join("bench.csv")).expect("the CSV is there");
    assert_eq!(csv.lines().count(), 1 + 2 * points.len());
    assert!(
        csv.lines().next().is_some_and(|header| header.starts_with("direction,dtype,") && header.ends_with(",ms_5"))
    );

    let charts = ["d16-full", "d16-causal", "d16-window9", "d32-full", "d32-causal", "d32-window9"]
        .map(|name| format!("fwd-bf16-{name}-gqa2.svg"));
    for chart in &charts {
        let svg = std::fs::read_to_string(folder.join(chart)).expect("the chart is there");
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{chart}");
        for part in ["prefers-color-scheme: dark", "hopper-attention ", "naive ", "sequence length"] {
            assert!(svg.contains(part), "{chart} has no {part}");
        }
    }

    // `plot` draws the same from the report.
    let elsewhere = folder.join("elsewhere");
    let (report, elsewhere_text) = (folder.join("bench.json"), elsewhere.display().to_string());
    let out = hattn(&["plot", report.to_str().expect("UTF-8"), "--output", &elsewhere_text]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    for chart in &charts {
        let both = [&folder, &elsewhere].map(|folder| std::fs::read_to_string(folder.join(chart)).expect("a chart"));
        assert!(both[0] == both[1], "{chart}");
    }
}

#[test]
fn a_sweep_of_every_class_of_inputs() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = folder.path().to_str().expect("UTF-8");
    let line = ["bench", "--device", "cpu", "--tokens", "260", "--hidden", "16", "--dims", "16", "--seqlens", "130"];
    let rest = ["--dtypes", "bf16,f16", "--iters", "3", "--seed", "3", "--draws", "2", "--output", at];
    let of = |more: &[&str]| hattn(&[&line[..], &rest, more].concat());
    let out = of(&["--inputs", "normal,peaky,sink,late,nan"]);
    assert!(out.status.success(), "{} {}", text(&out.stdout), text(&out.stderr));
    let stdout = text(&out.stdout);
    for part in [
        "normal inputs, or these as peaky, sink, late, nan;",
        "late, ours / best peer: geometric mean",
        "nan, error of o / that of naive: rms mean",
        "fwd/f16/d16/causal/s130/b2/h1/kv1/sink",
    ] {
        assert!(stdout.contains(part), "{part}\n{stdout}");
    }
    let report = json(&folder.path().join("bench.json"));
    assert_eq!((&report["options"]["draws"], &report["options"]["inputs"][4]), (&2.into(), &"nan".into()));
    let points = report["points"].as_array().expect("points");
    assert_eq!(points.len(), 2 * 2 * 5);
    for point in points {
        let bf16 = point["point"]["dtype"] == "bf16";
        for run in point["runs"].as_array().expect("runs") {
            assert_eq!(
                (&run["status"], &run["check"]["draws"]),
                (&"ok".into(), &2.into()),
                "{}: {run}",
                point["point"]
            );
            let [rms, largest] = ["rms", "max"].map(|name| run["check"][name].as_f64().expect("an error"));
            let most = if bf16 { 5e-3 } else { 6e-4 };
            assert!(0.0 < rms && rms < most && largest > rms * 0.5 && largest < 20.0 * most, "{run}");
        }
    }
    for chart in ["fwd-bf16-d16-full.svg", "fwd-f16-d16-causal-nan.svg"] {
        assert!(folder.path().join(chart).is_file(), "{chart}");
    }

    let out = of(&["--directions", "bwd", "--inputs", "peaky,sink,late"]);
    assert!(out.status.success(), "{} {}", text(&out.stdout), text(&out.stderr));
    let out = of(&["--directions", "bwd", "--inputs", "nan"]);
    assert!(text(&out.stderr).contains("allowed: --directions fwd, or --inputs normal,peaky,sink,late"));
    let out = of(&["--inputs", "flat"]);
    assert!(text(&out.stderr).contains("inputs `flat`; allowed: normal, peaky, sink, late, nan"));
}

#[test]
fn a_sweep_of_both_passes() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = "--directions fwd,bwd --gqa 1,2 --masks full,causal,window:9 --layout bhsd --filter d32";
    let out = sweep(folder.path(), &options.split(' ').collect::<Vec<_>>());
    assert!(out.status.success(), "{}", text(&out.stderr));
    let stdout = text(&out.stdout);
    for part in
        ["\nours / best peer: geometric mean", "over 12 of 12 points", "\nbackward, ours / naive: geometric mean"]
    {
        assert!(stdout.contains(part), "{part}\n{stdout}");
    }

    let report = json(&folder.path().join("bench.json"));
    let points = report["points"].as_array().expect("points");
    let (forward, backward) = points.split_at(12);
    assert_eq!(backward.len(), 12);
    for (forward, backward) in forward.iter().zip(backward) {
        let mut point = forward["point"].clone();
        point["direction"] = "bwd".into();
        assert_eq!(point, backward["point"]);
        let flops = |point: &Value| point["flops"].as_u64().expect("a count");
        assert_eq!(2 * flops(backward), 5 * flops(forward));
        for run in backward["runs"].as_array().expect("runs") {
            assert_eq!((&run["status"], run["ms"].as_array().map(Vec::len)), (&"ok".into(), Some(5)), "{run}");
            assert_eq!(run["check"]["unwritten"], 0);
            for name in ["d_q", "d_k", "d_v"] {
                assert!(run["check"][name].as_f64().is_some_and(|error| error < 0.03), "{run}");
            }
        }
        let apart = backward["runs"][1]["check"]["cross"].as_f64();
        assert!(apart.is_some_and(|distance| distance > 0.0 && distance < 0.03), "{backward}");
    }

    let csv = std::fs::read_to_string(folder.path().join("bench.csv")).expect("the CSV is there");
    assert_eq!(csv.lines().filter(|line| line.starts_with("bwd,bf16,32,")).count(), 2 * 12);
    let chart =
        std::fs::read_to_string(folder.path().join("bwd-bf16-d32-window9-gqa2.svg")).expect("the chart is there");
    assert!(chart.contains("<title>Attention backward, bf16, head dim 32, window9 mask, 2 query heads a key head"));
    let path = folder.path().join("bench.json").display().to_string();
    let same = hattn(&["bench", "--from", &path, "--compare", &path]);
    assert!(text(&same.stdout).contains("0 slower, 0 faster, 24 within noise"), "{}", text(&same.stdout));
}

/// Lists of full blocks, all of them and one in four, in both passes.
#[test]
fn a_sweep_of_lists_of_blocks() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = "bench --device cpu --tokens 400 --seqlens 400 --hidden 32 --dims 16 --dtypes bf16 --directions fwd,bwd \
                   --block-mask 1,1/4 --iters 3 --seed 7 --output";
    let out =
        hattn(&[&options.split_whitespace().collect::<Vec<_>>()[..], &[folder.path().to_str().unwrap()]].concat());
    assert!(out.status.success(), "{}", text(&out.stderr));
    let report = json(&folder.path().join("bench.json"));
    let points = report["points"].as_array().expect("points");
    let flops: Vec<u64> = points.iter().map(|point| point["flops"].as_u64().expect("a count")).collect();
    assert_eq!((flops.len(), flops[0]), (4, 4 * 400 * 400 * 16 * 2));
    assert!(flops[1] < flops[0] && (2 * flops[2], 2 * flops[3]) == (5 * flops[0], 5 * flops[1]), "{flops:?}");
    for (point, blocks) in points.iter().zip([1, 4, 1, 4]) {
        assert_eq!(point["point"]["blocks"], blocks);
        for run in point["runs"].as_array().expect("runs") {
            assert_eq!(run["status"], "ok", "{run}");
        }
    }
    assert!(text(&out.stdout).contains("blocks4"), "{}", text(&out.stdout));
}

/// Dropout in both passes, dense and packed: ours and the plain computation keep the pairs of the definition.
#[test]
fn a_sweep_with_dropout() {
    for (packed, count) in [(None, 2), (Some("--packed"), 12)] {
        let folder = tempfile::tempdir().expect("a folder");
        let options = "bench --device cpu --tokens 60 --seqlens 60 --hidden 32 --dims 16 --dtypes bf16 --masks causal \
                       --directions fwd,bwd --dropout 0.2 --quick --iters 3 --seed 7 --output";
        let mut options: Vec<&str> = options.split_whitespace().collect();
        options.extend([folder.path().to_str().expect("UTF-8")].into_iter().chain(packed));
        let out = hattn(&options);
        assert!(out.status.success(), "{}", text(&out.stderr));
        let report = json(&folder.path().join("bench.json"));
        let points = report["points"].as_array().expect("points");
        assert_eq!(points.len(), count);
        for point in points {
            assert_eq!(point["point"]["dropout"], 20);
            for run in point["runs"].as_array().expect("runs") {
                assert_eq!(run["status"], "ok", "{run}");
            }
        }
        assert!(text(&out.stdout).contains("dropout20"), "{}", text(&out.stdout));
    }
}

/// A bias in both passes, its gradient among them: of every type, with rows that are hidden, beside a window and more keys.
#[test]
fn a_sweep_with_a_bias() {
    for (bias, name, more) in [
        ("f32:bhq", "bias-f32-bhq", "--batch 2 --masks causal"),
        ("bf16:hq:hidden", "bias-bf16-hq-hidden", "--batch 2 --masks window:9 --quarter --layout bhsd"),
        ("f16::mask", "bias-f16-mask", "--batch 2 --masks full --alibi --dropout 0.2"),
        ("f32:q:hidden", "blocks2", "--batch 2 --block-mask 1/2"),
        ("bf16:bh:hidden", "equal60", "--packed --tokens 120 --masks causal --filter equal60"),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let options = format!(
            "bench --device cpu --seqlens 60 --hidden 32 --dims 16 --dtypes bf16 --directions fwd,bwd \
             --iters 3 --seed 7 --bias {bias} {more} --output"
        );
        let mut options: Vec<&str> = options.split_whitespace().collect();
        options.push(folder.path().to_str().expect("UTF-8"));
        let out = hattn(&options);
        assert!(out.status.success(), "{}", text(&out.stderr));
        let report = json(&folder.path().join("bench.json"));
        let points = report["points"].as_array().expect("points");
        assert_eq!(points.len(), 2);
        for point in points {
            assert_eq!(point["point"]["bias"], bias);
            let backward = point["point"]["direction"] == "bwd";
            for run in point["runs"].as_array().expect("runs") {
                assert_eq!(run["status"], "ok", "{run}");
                assert_eq!(run["check"]["d_bias"].as_f64().is_some_and(|error| error < 0.03), backward, "{run}");
            }
        }
        assert!(text(&out.stdout).contains(name), "{}", text(&out.stdout));
    }
}

/// Head dims of V that are not those of Q and K, in both passes.
#[test]
fn a_sweep_of_pairs_of_head_dims() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = folder.path().to_str().expect("UTF-8");
    let line =
        ["bench", "--device", "cpu", "--tokens", "32", "--hidden", "16", "--seqlens", "32", "--dims", "16x8,4x12,16"];
    let rest = ["--dtypes", "bf16", "--masks", "causal", "--directions", "fwd,bwd", "--iters", "3", "--output", at];
    let out = hattn(&[&line[..], &rest].concat());
    let stdout = text(&out.stdout);
    assert!(out.status.success(), "{stdout} {}", text(&out.stderr));
    assert!(stdout.contains(" 16x8 ") && stdout.contains(" 4x12 "), "{stdout}");
    let report = json(&folder.path().join("bench.json"));
    let points = report["points"].as_array().expect("points");
    let sizes = |point: &Value| ["heads_q", "head_dim", "head_dim_vo"].map(|key| point["point"][key].as_u64());
    // 2 heads of 8, 1 of 12, 1 of 16.
    let forwards = [[Some(2), Some(16), Some(8)], [Some(1), Some(4), Some(12)], [Some(1), Some(16), None]];
    assert_eq!(points.iter().map(sizes).collect::<Vec<_>>(), [forwards, forwards].concat());
    for run in points.iter().flat_map(|point| point["runs"].as_array().expect("runs")) {
        assert_eq!(run["status"], "ok", "{run}");
    }
    assert!(folder.path().join("bwd-bf16-d4x12-causal.svg").is_file());
    let wrong = hattn(&["bench", "--device", "cpu", "--dims", "16x"]);
    assert!(text(&wrong.stderr).contains("192x128 for Q and K of 192"), "{}", text(&wrong.stderr));
}

/// Both passes of packed sequences: the report has the lengths, and what is made of it says what ours reaches on dense batches.
#[test]
fn a_sweep_of_packed_sequences() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = folder.path().to_str().expect("UTF-8");
    let line = ["bench", "--device", "cpu", "--packed", "--quick", "--hidden", "32", "--dims", "16", "--gqa", "2"];
    let rest = ["--directions", "fwd,bwd", "--iters", "3", "--seed", "3", "--output", at];
    let out = hattn(&[&line[..], &rest].concat());
    assert!(out.status.success(), "{} {}", text(&out.stdout), text(&out.stderr));
    let stdout = text(&out.stdout);
    for part in [
        "each after each other equally often",
        "packed sequences one by one",
        "hopper-attention-dense",
        "ours/dense",
        "\nours / hopper-attention-dense: geometric mean",
        "\nbackward, ours / hopper-attention-dense: geometric mean",
        "over 14 of 14 points",
        "lognormal32/t256",
        "fwd/bf16/d16/causal/documents64/t256/b",
    ] {
        assert!(stdout.contains(part), "{part}\n{stdout}");
    }

    let report = json(&folder.path().join("bench.json"));
    let points = report["points"].as_array().expect("points");
    assert_eq!(points.len(), 2 * 2 * (2 + 5));
    for point in points {
        let (sizes, packed) = (&point["point"], &point["point"]["packed"]);
        let lengths: Vec<u64> =
            packed["lengths"].as_array().expect("lengths").iter().filter_map(Value::as_u64).collect();
        assert_eq!((sizes["dtype"].as_str(), sizes["batch"].as_u64()), (Some("bf16"), Some(1)));
        assert_eq!((lengths.iter().sum(), lengths.contains(&0)), (256_u64, false), "{packed}");
        let pairs: u64 = lengths.iter().map(|length| length * length).sum();
        let products = if sizes["direction"] == "fwd" { 2 } else { 5 };
        let halves = if sizes["causal"] == true { 1 } else { 2 };
        assert_eq!(point["flops"].as_u64(), Some(halves * products * 32 * pairs), "{sizes}");
        let runs = point["runs"].as_array().expect("runs");
        let timed: Vec<_> = runs.iter().map(|run| (run["name"].as_str(), run["ms"].as_array().map(Vec::len))).collect();
        let names = [("hopper-attention", 3), ("naive", 6), ("hopper-attention-dense", 3)];
        assert_eq!(timed, names.map(|(name, count)| (Some(name), Some(count))), "{sizes}");
        assert!(runs.iter().all(|run| run["status"] == "ok"), "{runs:?}");
    }

    let csv = std::fs::read_to_string(folder.path().join("bench.csv")).expect("the CSV is there");
    let mut lines = csv.lines();
    assert!(lines.next().is_some_and(|header| header.contains(",inputs,packed,sequences,longest,")));
    assert!(lines.next().is_some_and(|line| line.contains(",normal,equal64,4,64,")));
    for (chart, parts) in [
        ("fwd-bf16-d16-full-gqa2-packed.svg", ["key head, packed<", "sequence length"]),
        ("bwd-bf16-d16-causal-gqa2-ragged256.svg", ["ragged batches of 256 tokens<", "one long"]),
    ] {
        let svg = std::fs::read_to_string(folder.path().join(chart)).expect("the chart is there");
        assert!(parts.iter().all(|part| svg.contains(part)) && svg.contains("hopper-attention-dense "), "{chart}");
    }
    let path = folder.path().join("bench.json").display().to_string();
    let same = hattn(&["bench", "--from", &path, "--compare", &path]);
    assert!(text(&same.stdout).contains("0 slower, 0 faster, 28 within noise"), "{}", text(&same.stdout));
}

#[test]
fn comparisons_fail_only_on_what_got_slower() {
    let folder = tempfile::tempdir().expect("a folder");
    assert!(sweep(folder.path(), &["--filter", "d32/causal"]).status.success());
    // What the machine did meanwhile is in neither report: both get the same narrow samples, and the old one other rates of
    // ours. (A busy machine's own samples can spread so far that even a thousandth of the rate is within their noise.)
    let report = |name: &str, factor: f64| {
        let mut report = json(&folder.path().join("bench.json"));
        for point in report["points"].as_array_mut().expect("points") {
            let run = &mut point["runs"][0];
            run["tflops"] = (run["tflops"].as_f64().expect("a rate") * factor).into();
            for run in point["runs"].as_array_mut().expect("runs") {
                run["iqr_percent"] = 1.0.into();
            }
        }
        let path = folder.path().join(name);
        std::fs::write(&path, report.to_string()).expect("written");
        path.to_str().expect("UTF-8").to_owned()
    };
    let new = report("new.json", 1.0);
    let against =
        |factor: f64| hattn(&["bench", "--from", &new, "--compare", &report("old.json", factor), "--noise", "30"]);
    let same = against(1.0);
    assert!(
        same.status.success() && text(&same.stdout).contains("0 slower, 0 faster, 2 within noise"),
        "{}",
        text(&same.stdout)
    );
    let faster = against(0.001);
    assert!(faster.status.success() && text(&faster.stdout).contains("0 slower, 2 faster"), "{}", text(&faster.stdout));
    let slower = against(1000.0);
    assert_eq!(slower.status.code(), Some(1));
    assert!(
        text(&slower.stdout).contains("slower: fwd/bf16/d32/causal/s16/b2/h2/kv2: -99.9%"),
        "{}",
        text(&slower.stdout)
    );
    assert!(text(&slower.stderr).contains("points got slower or were lost since"));
}

#[test]
fn a_page_gets_its_section() {
    let folder = tempfile::tempdir().expect("a folder");
    let record = folder.path().join("record/cpu");
    assert!(sweep(&record, &["--filter", "d32"]).status.success());
    let readme = folder.path().join("README.md");
    let markers = "<!-- begin generated by `hattn plot x --update README.md` -->\n<!-- end generated -->\n";
    std::fs::write(&readme, format!("before\n{markers}after\n")).expect("written");
    let report = record.join("bench.json").display().to_string();
    let update = || hattn(&["plot", &report, "--update", readme.to_str().expect("UTF-8")]);
    let out = update();
    assert!(out.status.success() && text(&out.stdout).contains("updated"), "{}", text(&out.stderr));
    let new = std::fs::read_to_string(&readme).expect("the README");
    for part in [
        "before\n<!-- begin generated by `hattn plot record/cpu/bench.json --update README.md` -->\n",
        "<img src=\"record/cpu/fwd-bf16-d32-full.svg\"",
        "| bf16, head dim 32, causal |",
        "<!-- end generated -->\nafter\n",
    ] {
        assert!(new.contains(part), "{part}\n{new}");
    }
    assert!(text(&update().stdout).contains("same"));
    std::fs::write(&readme, "no markers").expect("written");
    let chart = record.join("fwd-bf16-d32-full.svg");
    std::fs::write(&chart, "an older chart").expect("written");
    let refused = update();
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("are missing"), "{}", text(&refused.stderr));
    assert_eq!(text(&refused.stdout), "", "it was refused after charts had been written");
    assert_eq!(std::fs::read_to_string(&chart).expect("still there"), "an older chart");
}

/// What is refused leaves nothing, and not even an empty folder.
#[test]
fn a_refused_sweep_makes_no_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let new = folder.path().join("new/folder");
    let path = new.to_str().expect("UTF-8");
    // Found before the sweep begins, and by its harness.
    for wrong in [&["--dims", "300"][..], &["--dtypes", "e4m3"], &["--hidden", "1099511627776", "--tokens", "1"]] {
        let out = hattn(&[&["bench", "--device", "cpu", "--output", path], wrong].concat());
        assert_eq!(out.status.code(), Some(1), "{wrong:?}: {}", text(&out.stderr));
        assert!(!folder.path().join("new").exists(), "{wrong:?}");
    }
    // A folder that was there stays.
    std::fs::create_dir_all(&new).expect("made");
    assert!(!hattn(&["bench", "--device", "cpu", "--dims", "300", "--output", path]).status.success());
    assert!(new.exists());
    // A report without a timing has no charts.
    let report = folder.path().join("bench.json");
    assert!(sweep(folder.path(), &["--filter", "d32/full"]).status.success());
    let mut json = json(&report);
    json["points"] = Value::Array(vec![]);
    std::fs::write(&report, json.to_string()).expect("written");
    let charts = folder.path().join("charts");
    let out = hattn(&["plot", report.to_str().expect("UTF-8"), "--output", charts.to_str().expect("UTF-8")]);
    assert!(text(&out.stderr).contains("no point that was timed"), "{}", text(&out.stderr));
    assert!(!charts.exists());
}

#[test]
fn what_cannot_run_is_refused_by_name() {
    let refused = |arguments: &[&str], part: &str| {
        let out = hattn(&[&["bench", "--device", "cpu"], arguments].concat());
        assert!(!out.status.success(), "{arguments:?}");
        assert!(text(&out.stderr).contains(part), "{arguments:?}: {}", text(&out.stderr));
    };
    refused(&["--dims", "300"], "head dim 300 in a hidden size of 256");
    refused(&["--gqa", "3"], "--gqa 3 does not divide");
    refused(&["--directions", "up"], "invalid value 'up' for '--directions");
    refused(&["--filter", "s51"], "none of the");
    refused(&["--seqlens", "0"], "0 is not in 1..");
    refused(&["--packed", "--batch", "2"], "cannot be used with");
    refused(&["--packed", "--inputs", "sink"], "--packed with other --inputs is not timed; allowed: --inputs normal");
    refused(&["--tokens", "64", "--batch", "1"], "cannot be used with");
    refused(&["--block-mask", "1/4", "--masks", "full"], "cannot be used with");
    refused(&["--block-mask", "0.5"], "1, or 1/N such as 1/16");
    refused(&["--dropout", "10"], "whole percent, 0.01 to 0.99");
    refused(&["--dropout", "0.1", "--inputs", "peaky"], "--dropout with other --inputs is not timed");
    refused(&["--bias", "f64"], "allowed: none, or f32, bf16 or f16");
    refused(&["--bias", "f32:q", "--dtypes", "e4m3"], "--bias with --dtypes e4m3: e4m3 operands have no bias");
    refused(&["--bias", "f32:q", "--softcap", "5", "--directions", "bwd"], "no kernel has gradients of both");
    refused(&["--bias", "f32:q:lowest"], "allowed: normal, hidden, mask");
    refused(&["--block-mask", "1/4", "--packed"], "--block-mask with --packed is not timed");
    refused(&["--peer", "libfa3.so"], "--ours, --peer and --harness are for a GPU");
    refused(&["--arch", "sm80"], "--arch is for a GPU, and this would run on the CPU");
    refused(&["--sm-margin", "8"], "--sm-margin is for a GPU, and this would run on the CPU");
    refused(&["--arch", "sm70"], "invalid value 'sm70' for '--arch");
    refused(&["--compare", "nowhere.json"], "report nowhere.json");
    for noise in ["nan", "inf", "-1"] {
        let option = format!("--noise={noise}");
        refused(&["--compare", "nowhere.json", &option], "; allowed: finite, 0 and above");
    }
    refused(
        &["--dtypes", "e4m3"],
        "fwd/e4m3/d64/full/s64/b4/h4/kv4: e4m3 operands are timed by the harness in PyTorch alone",
    );
    refused(&["--dtypes", "e4m3", "--directions", "fwd,bwd"], "e4m3 operands have no gradients");
    let out = hattn(&["bench", "--device", "cuda:4096", "--harness", "rust", "--filter", "s512"]);
    assert!(!out.status.success(), "there is no such GPU");
    let in_torch = ["bench", "--device", "cuda:0", "--harness", "pytorch", "--python", "python-that-is-missing"];
    let out = hattn(&[&in_torch[..], &["--ours", "x.so"]].concat());
    assert!(
        text(&out.stderr).contains("--harness pytorch: python-that-is-missing does not start"),
        "{}",
        text(&out.stderr)
    );
    // A program that was installed has no shared library beside it for the script.
    let folder = tempfile::tempdir().expect("a folder");
    let installed = folder.path().join("hattn");
    std::fs::copy(common::program(), &installed).expect("copied");
    let out = Command::new(&installed).args(in_torch).output().expect("hattn starts");
    assert_eq!(out.status.code(), Some(1));
    let complaint = text(&out.stderr);
    assert!(
        complaint.contains("--harness pytorch: the script loads ours from ") && complaint.contains("is not there"),
        "{complaint}"
    );
}
