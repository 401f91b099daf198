//! `hattn bench --input`: q, k and v of a file, timed and judged on the CPU in both passes. What makes no sense is refused.

mod common;

use std::path::Path;

use common::{FIXTURE, Folder, bytes, fixture, hattn, with_header};
use safetensors::Dtype;
use serde_json::Value;

fn json(folder: &Path) -> Value {
    let text = std::fs::read_to_string(folder.join("bench.json")).expect("the report is there");
    serde_json::from_str(&text).expect("it is JSON")
}

/// A sweep of files on the CPU, with the words of a line; its report, and what it printed.
#[track_caller]
fn bench(folder: &Folder, files: &[&Path], line: &str) -> (Value, String) {
    let at = folder.path("out");
    let mut arguments: Vec<String> = "bench --device cpu --iters 3 --seed 3".split(' ').map(String::from).collect();
    arguments.extend(line.split_whitespace().map(String::from));
    for file in files {
        arguments.extend(["--input".into(), file.display().to_string()]);
    }
    arguments.extend(["--output".into(), at.display().to_string()]);
    let printed = hattn(&arguments).fine();
    (json(&at), printed)
}

/// Each library at each point is right, and was timed. Gives the names of the points.
#[track_caller]
fn all_right(report: &Value) -> Vec<String> {
    let name = |point: &Value| {
        let text = |key: &str| point[key].as_str().unwrap_or("full").to_owned();
        let mask = if point["causal"] == true { "causal".into() } else { text("mask") };
        format!(
            "{}/{}/{mask}/b{}/{}",
            text("direction"),
            text("dtype"),
            point["batch"],
            text_of(&point["file"]["name"])
        )
    };
    let points = report["points"].as_array().expect("points");
    for point in points {
        let runs = point["runs"].as_array().expect("runs");
        assert_eq!(runs.len(), 2, "{point}");
        for run in runs {
            assert_eq!((&run["status"], run["ms"].as_array().map(Vec::len)), (&"ok".into(), Some(3)), "{run}");
            assert!(run["tflops"].as_f64().is_some_and(|rate| rate > 0.0), "{run}");
        }
        assert!(runs[1]["check"]["cross"].is_number(), "{point}");
    }
    points.iter().map(|point| name(&point["point"])).collect()
}

fn text_of(value: &Value) -> &str {
    value.as_str().expect("a text")
}

/// The real layer, in both types and both passes. Its two sequences are repeated to as many tokens.
#[test]
fn a_real_layer_is_timed_and_judged() {
    let folder = Folder::new();
    let (report, printed) = bench(&folder, &[&fixture()], "--directions fwd,bwd");
    let names = ["fwd/bf16", "bwd/bf16", "fwd/f16", "bwd/f16"].map(|kind| format!("{kind}/full/b2/minilm_layer3"));
    assert_eq!(all_right(&report), names);
    let point = &report["points"][0]["point"];
    let sizes = ["heads_q", "heads_kv", "head_dim", "seqlen"].map(|key| point[key].as_u64());
    assert_eq!(sizes, [Some(12), Some(12), Some(32), Some(197)]);
    assert_eq!(point["file"], serde_json::json!({"name": "minilm_layer3", "sequences": 2}));
    let points = report["points"].as_array().expect("points");
    for point in points.iter().filter(|point| point["point"]["direction"] == "fwd") {
        // Not the error of normal inputs: scores of this layer run from -16 to 9.
        let most = if point["point"]["dtype"] == "bf16" { 5e-3 } else { 6e-4 };
        let rms = point["runs"][0]["check"]["rms"].as_f64().expect("an error of O");
        assert!(0.0 < rms && rms < most, "{point}");
    }
    let file = &report["options"]["files"][0];
    assert_eq!((text_of(&file["name"]), text_of(&file["dtype"])), ("minilm_layer3", "bf16"));
    assert_eq!(file["shapes"]["v"], serde_json::json!([2, 197, 12, 32]));
    assert!(text_of(&file["path"]).ends_with("minilm_layer3.safetensors"));
    let note = "batch 2: its 2 sequences in turn; dO is drawn, normal";
    let method = "inputs of files, repeated along the batch: minilm_layer3";
    for part in [note, method, "fwd/f16/d32/full/s197/b2/h12/kv12/minilm_layer3", "minilm_layer3, ours / best peer"] {
        assert!(printed.contains(part), "{part}\n{printed}");
    }
    let csv = std::fs::read_to_string(folder.path("out/bench.csv")).expect("the CSV");
    assert!(csv.lines().nth(1).is_some_and(|line| line.contains(",minilm_layer3,")), "{csv}");
    assert!(folder.path("out/bwd-f16-d32-full-minilm_layer3.svg").is_file());
    let path = folder.path("out/bench.json").display().to_string();
    let same = hattn(["bench", "--from", &path, "--compare", &path]).fine();
    assert!(same.contains("0 slower, 0 faster, 4 within noise"), "{same}");
}

/// The error of O of repeated sequences is that of the sequences: the same rows lie beside each other.
#[test]
fn sequences_are_repeated_to_the_batch_or_the_tokens() {
    let folder = Folder::new();
    let file = folder.random("a.safetensors", "--batch 2 --seqlen-q 20 --heads-q 2 --head-dim 16 --dtype f32");
    for (option, batch) in [("--tokens 130", 6), ("--tokens 1", 2), ("--batch 3", 3), ("--batch 1", 1)] {
        let (report, printed) = bench(&folder, &[&file], &format!("{option} --dtypes bf16"));
        assert_eq!(all_right(&report), [format!("fwd/bf16/full/b{batch}/a")]);
        assert!(printed.contains(&format!("f32; batch {batch}: its 2 sequences in turn")), "{printed}");
    }
}

/// Several files, heads first, more keys than queries, few KV heads, a dO of the file, and a mask and a scale in the metadata.
#[test]
fn a_file_says_what_its_problem_is() {
    let folder = Folder::new();
    let shape = "--batch 1 --seqlen-q 9 --seqlen-kv 21 --heads-q 4 --heads-kv 2 --head-dim 16 --head-dim-vo 8";
    let one = folder.random("one.safetensors", &format!("{shape} --layout bhsd --dtype f16"));
    // `random` knows no mask and no scale.
    let shapes: [(&str, &[usize]); 4] =
        [("q", &[1, 9, 2, 8]), ("k", &[1, 9, 2, 8]), ("v", &[1, 9, 2, 8]), ("d_o", &[1, 9, 2, 8])];
    let two = folder.path("two.safetensors");
    std::fs::write(&two, file_of(&shapes, r#""layout":"bshd","mask":"window:3","scale":"0.75""#)).expect("written");
    let (report, printed) = bench(&folder, &[&one, &two], "--directions fwd,bwd --layout bhsd");
    assert_eq!(all_right(&report).len(), 8);
    let of = |at: usize| &report["points"][at]["point"];
    assert_eq!((&of(0)["queries"], &of(0)["head_dim_vo"], &of(0)["causal"]), (&9.into(), &8.into(), &false.into()));
    assert_eq!((&of(1)["causal"], &of(1)["window"]), (&true.into(), &3.into()));
    assert_eq!(of(1)["file"]["scale"].as_f64(), Some(0.75));
    assert!(printed.contains("two: q, k and v of ") && printed.contains("f32, scale 0.75; batch 28: "), "{printed}");
    assert!(printed.contains("its 1 sequences in turn; dO is the file's"), "{printed}");
    // Masks that are asked for come before that of the file.
    let (report, _) = bench(&folder, &[&two], "--masks full,causal --dtypes bf16 --filter causal --softcap 5 --alibi");
    assert_eq!(all_right(&report), ["fwd/bf16/causal/b28/two"]);
}

/// A safetensors file of these f32 tensors and this metadata. Values are small and differ.
fn file_of(tensors: &[(&str, &[usize])], metadata: &str) -> Vec<u8> {
    let (mut header, mut data) = (format!(r#"{{"__metadata__":{{{metadata}}}"#), Vec::new());
    for (name, shape) in tensors {
        let count = shape.iter().product::<usize>();
        let values: Vec<f32> = (0..count).map(|i| ((i * 7919 % 1009) as f32 - 504.0) / 256.0).collect();
        let (begin, end) = (data.len(), data.len() + 4 * count);
        header += &format!(r#","{name}":{{"dtype":"F32","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#);
        data.extend(bytes(&values));
    }
    with_header((header + "}").as_bytes(), &data)
}

#[test]
fn what_makes_no_sense_is_refused_by_name() {
    let folder = Folder::new();
    let usage = |more: &[&str], part: &str| {
        let ran = hattn([&["bench", "--device", "cpu", "--input", FIXTURE], more].concat());
        assert!(ran.code == Some(2) && ran.stderr.contains(part), "{more:?}: {ran:?}");
    };
    for option in [
        "--inputs peaky",
        "--few-heads",
        "--lopsided",
        "--quarter",
        "--packed",
        "--gqa 2",
        "--dims 64",
        "--seqlens 128",
        "--hidden 64",
        "--bias f32:q",
        "--dropout 0.1",
        "--block-mask 1/4",
        "--draws 2",
        "--from bench.json",
    ] {
        let words: Vec<&str> = option.split(' ').collect();
        usage(&words, "cannot be used with");
        usage(&words, words[0]);
    }
    usage(&["--tokens", "64", "--batch", "1"], "cannot be used with");

    let refused = |files: &[&Path], more: &[&str], parts: &[&str]| {
        let mut arguments = vec!["bench".to_string(), "--device".into(), "cpu".into()];
        arguments.extend(files.iter().flat_map(|file| ["--input".into(), file.display().to_string()]));
        arguments.extend(more.iter().map(ToString::to_string));
        hattn(&arguments).refused(parts);
    };
    let real = fixture();
    refused(&[&real], &["--dtypes", "e4m3"], &["--input with --dtypes e4m3 is not timed; allowed: --dtypes bf16,f16"]);
    refused(&[&real, &real], &[], &["two files are called minilm_layer3"]);
    refused(&[&real], &["--filter", "causal"], &["none of the 2 points of files fits --filter causal"]);
    refused(&[Path::new("nowhere.safetensors")], &[], &["input nowhere.safetensors"]);

    let shape: &[usize] = &[1, 4, 2, 8];
    let qkv = [("q", shape), ("k", shape), ("v", shape)];
    refused(&[&folder.tensors("a", None, &qkv)], &[], &["input ", "states no layout; allowed: bshd, bhsd"]);
    refused(&[&folder.tensors("b", Some("bshd"), &qkv[..2])], &[], &["tensor `v` is missing"]);
    let packed = folder.random("c", "--packed --batch 2 --seqlen-q 9 --heads-q 2 --head-dim 8");
    refused(&[&packed], &[], &["layout thd: packed sequences of a file are not timed"]);
    for (option, tensor) in [("--sinks", "sinks"), ("--alibi", "alibi_slopes"), ("--bias f32:q", "bias")] {
        let file = folder.random("d", &format!("--seqlen-q 9 --heads-q 2 --head-dim 8 {option}"));
        refused(&[&file], &[], &[&format!("a tensor `{tensor}`, which `bench` gives to no library")]);
    }
    let gradients = folder.random("e", "--seqlen-q 9 --heads-q 2 --head-dim 8 --backward");
    refused(&[&gradients], &["--directions", "bwd"], &["a tensor `d_lse`"]);
    let with = |name: &str, metadata: &str| {
        let path = folder.path(name);
        std::fs::write(&path, file_of(&qkv, metadata)).expect("written");
        path
    };
    let wrong = [
        (r#""layout":"bshd","mask":"chunk:4""#, "metadata `mask` chunk:4: full, causal, or window:N"),
        (r#""layout":"bshd","scale":"one""#, "metadata `scale` one: invalid float"),
        (r#""layout":"bshd","scale":"-1""#, "softmax scale -1; allowed: finite and above 0"),
        (r#""layout":"bshd","dropout":"0.5""#, "metadata `dropout`: `bench` times a file without dropout"),
    ];
    for (metadata, part) in wrong {
        refused(&[&with("f", metadata)], &[], &[part]);
    }
    // 70000 is infinite in f16 alone.
    let large = bytes(&[70000.0; 64]);
    let tensors = ["q", "k", "v"].map(|name| (name, Dtype::F32, shape, large.clone()));
    let large = folder.typed("g", Some("bshd"), &tensors);
    refused(&[&large], &[], &["tensor `q` has 7e4, which is not finite in f16; allowed: finite numbers"]);
    let none = folder.tensors("h", Some("bshd"), &["q", "k", "v"].map(|name| (name, &[0, 4, 2, 8][..])));
    refused(&[&none], &[], &["s4/b0/h2/kv2/h: batch 0; allowed: 1 to"]);
}
