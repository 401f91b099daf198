//! Files and command lines that chance makes: whatever they are, `hattn` ends in time, with a documented exit code, leaves
//! nothing behind and an older output as it was, and steers no terminal.
//!
//! `HATTN_FUZZ_SEED` is the seed of the first case, and each case has the next one. So a case is repeated by its own seed.
//! `HATTN_FUZZ_SECONDS` is for how long cases are made.
#![cfg(unix)]

mod common;

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{FIXTURE, Folder, ended, hattn, program, with_header};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use safetensors::SafeTensors;
use serde_json::{Value, json};

const SEED: u64 = 20_261_124;
const SECONDS: u64 = 25;
/// Address space of a run, in KiB: what would take all memory must fail as what takes too much does.
const KIB: usize = 4_000_000;
/// The longest run, which computes next to nothing.
const LONGEST: Duration = Duration::from_secs(20);

/// What an output holds before a run.
const OLDER: &[u8] = b"an older output";
const OUTPUT: &str = "o.safetensors";

/// Numbers around which programs fail.
const NUMBERS: [&str; 16] = [
    "0",
    "1",
    "2",
    "3",
    "8",
    "65",
    "-1",
    "1.5",
    "1e3",
    "1e400",
    "2147483648",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "00",
];
/// Texts that are none of the words that a reader expects.
const TEXTS: [&str; 10] = ["", "q", "bshd", "\u{1b}[2J", "\r\n", "\u{9b}31m", "\u{202e}", "NaN", "é", "\u{0}"];

#[test]
fn what_chance_makes_ends_as_documented() {
    let number = |name, or| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(or);
    let (seed, seconds) = (number("HATTN_FUZZ_SEED", SEED), number("HATTN_FUZZ_SECONDS", SECONDS));
    let bench = Bench::new();
    let start = Instant::now();
    let (mut cases, mut codes) = (0, [0; 3]);
    while start.elapsed() < Duration::from_secs(seconds) {
        codes[usize::from(case(seed.wrapping_add(cases), &bench))] += 1;
        cases += 1;
    }
    println!("seed {seed}: {cases} cases in {seconds} s, exit codes 0, 1 and 2: {codes:?}");
    // Cases that are all refused at the door would find nothing.
    assert!(cases < 100 || codes.iter().all(|&code| code > cases / 50), "{codes:?}");
}

/// What is the same for all cases.
struct Bench {
    folder: Folder,
    report: Value,
}

impl Bench {
    /// Makes a report of two points.
    fn new() -> Self {
        let folder = Folder::new();
        let line = "bench --device cpu --tokens 16 --hidden 16 --seqlens 8,16 --dims 16 --dtypes bf16 --masks causal --iters 3";
        let output = folder.path("results").display().to_string();
        let ran = hattn(line.split(' ').chain(["--output", output.as_str()]));
        assert_eq!(ran.code, Some(0), "{ran:?}");
        let report = fs::read(folder.path("results/bench.json")).expect("a report");
        Self { folder, report: serde_json::from_slice(&report).expect("JSON") }
    }
}

/// One run; its exit code.
fn case(seed: u64, bench: &Bench) -> u8 {
    let rng = &mut StdRng::seed_from_u64(seed);
    let folder = Folder::new();
    fs::write(folder.path(OUTPUT), OLDER).expect("written");
    fs::write(folder.path("README.md"), readme(rng)).expect("written");
    let (line, files): (Vec<String>, &[&str]) = match rng.random_range(0..10) {
        0..5 => {
            fs::write(folder.path("in"), tensors(rng)).expect("written");
            (attention(rng, "in"), &["in"])
        }
        5..7 => {
            let text = serde_json::to_vec(&changed_json(rng, &bench.report)).expect("JSON");
            fs::write(folder.path("new.json"), changed_bytes(rng, text)).expect("written");
            fs::copy(bench.folder.path("results/bench.json"), folder.path("old.json")).expect("copied");
            let lines = [
                "bench --from new.json",
                "bench --from new.json --compare old.json",
                "bench --from old.json --compare new.json",
                "plot new.json --output charts",
                "plot new.json --update README.md",
            ];
            (words(lines.choose(rng).expect("some")), &["new.json", "README.md"])
        }
        7 => {
            let line = "0.2.0\tcard\tforward bf16 batch 1 seqlen 8x8 heads 1/1 head_dim 8/8 full\tsm90 fwd\n";
            fs::write(folder.path("tuning"), changed_bytes(rng, line.repeat(2).into())).expect("written");
            (words(&format!("check --device cpu --input {FIXTURE} --tuning tuning")), &["tuning"])
        }
        _ => (command_line(rng), &[]),
    };
    let before: Vec<Vec<u8>> = files.iter().map(|name| fs::read(folder.path(name)).expect("it was written")).collect();
    let told = || {
        let files = files.iter().zip(&before).map(|(name, bytes)| format!("\n{name}: {}", bytes.escape_ascii()));
        format!("HATTN_FUZZ_SEED={seed} repeats it: hattn {line:?}{}", files.collect::<String>())
    };
    let (code, stdout, stderr) = limited(&folder, &line, &told);

    let tell = || format!("exit code {code:?}\n{stdout}\n{stderr}\n{}", told());
    let steers = |text: &str| text.contains(|c: char| c != '\n' && (c.is_control() || c == '\u{202e}'));
    assert!(!steers(&stdout) && !steers(&stderr), "{}", tell());
    assert!(!stderr.contains("bug of hattn") && !stderr.contains("panicked") && stderr.len() < 20_000, "{}", tell());
    let code = code.and_then(|code| u8::try_from(code).ok()).filter(|code| *code <= 2);
    let code = code.unwrap_or_else(|| panic!("{}", tell()));
    assert!(code != 1 || stderr.lines().last().is_some_and(|line| line.starts_with("hattn: ")), "{}", tell());
    assert!(!folder.names().iter().any(|name| name.ends_with(".part")), "{:?} {}", folder.names(), tell());
    let output = fs::read(folder.path(OUTPUT)).expect("still there");
    if code != 0 || line[0] == "check" {
        // `check` writes what it computed even where that fails.
        let whole = line[0] == "check" && SafeTensors::deserialize(&output).is_ok();
        assert!(output == OLDER || whole, "{}", tell());
        let kept = |(name, bytes): (&&str, &Vec<u8>)| fs::read(folder.path(name)).is_ok_and(|now| now == *bytes);
        assert!(files.iter().zip(&before).all(kept), "a file was changed: {}", tell());
    } else if line[0] == "run" && stdout.contains("\noutput   o.safetensors") {
        assert!(SafeTensors::deserialize(&output).is_ok(), "{}", tell());
    }
    code
}

/// Runs a line in the folder, with little memory and time.
fn limited(folder: &Folder, line: &[String], told: &dyn Fn() -> String) -> (Option<i32>, String, String) {
    let mut command = Command::new("sh");
    command.args(["-c", &format!(r#"ulimit -v {KIB}; exec "$0" "$@""#)]).arg(program()).args(line);
    command.current_dir(folder.path(".")).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let start = Instant::now();
    let output = ended(command.spawn().expect("it starts"));
    assert!(start.elapsed() < LONGEST, "{} s: {}", start.elapsed().as_secs(), told());
    let text = |bytes| String::from_utf8(bytes).unwrap_or_else(|_| panic!("no UTF-8: {}", told()));
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(String::from).collect()
}

/// A safetensors file, or what was one.
fn tensors(rng: &mut StdRng) -> Vec<u8> {
    let mut sizes = || *[0_usize, 1, 1, 2, 3, 8, 9].choose(rng).expect("some");
    let [batch, queries, keys, group, heads] = [sizes(), sizes(), sizes(), sizes().max(1), sizes().max(1)];
    let (wide, dim) = (rng.random_bool(0.5), 8 * rng.random_range(1..4_usize));
    let (dtype, bytes) = if wide { ("F32", 4) } else { (["F16", "BF16"][rng.random_range(0..2)], 2) };
    let layout = ["bshd", "bhsd"][rng.random_range(0..2)];
    let shape = |rows, heads| match layout {
        "bshd" => [batch, rows, heads, dim],
        _ => [batch, heads, rows, dim],
    };
    let mut at = 0;
    let mut tensor = |shape: [usize; 4]| {
        let from = at;
        at += bytes * shape.iter().product::<usize>();
        json!({"dtype": dtype, "shape": shape, "data_offsets": [from, at]})
    };
    let mut header = json!({"__metadata__": {"layout": layout}});
    header["q"] = tensor(shape(queries, heads * group));
    header["k"] = tensor(shape(keys, heads));
    header["v"] = tensor(shape(keys, heads));
    if rng.random_bool(0.5) {
        header["d_o"] = tensor(shape(queries, heads * group));
    }
    let data: Vec<u8> = (0..at).map(|_| rng.random()).collect();
    let header = changed_json(rng, &header);
    let mut text = serde_json::to_string(&header).expect("JSON");
    if rng.random_bool(0.1) {
        // A number that JSON's own values do not have, in place of another.
        let digits = text.char_indices().filter(|(_, c)| c.is_ascii_digit()).map(|(at, _)| at).collect::<Vec<_>>();
        if let Some(&at) = digits.choose(rng) {
            text.replace_range(at..at + 1, NUMBERS.choose(rng).expect("some"));
        }
    }
    let text = if rng.random_bool(0.2) { changed_bytes(rng, text.into()) } else { text.into() };
    let file = with_header(&text, &data);
    if rng.random_bool(0.2) { changed_bytes(rng, file) } else { file }
}

/// `run` or `check`, with some options.
fn attention(rng: &mut StdRng, input: &str) -> Vec<String> {
    let mut line = words(["run", "check"].choose(rng).expect("some"));
    line.extend(words(&format!("--device cpu --input {input}")));
    if line[0] == "run" || rng.random_bool(0.3) {
        line.extend(words(&format!("--output {OUTPUT}")));
    }
    let options = [
        "--mask causal",
        "--mask window:1,0:top-left",
        "--mask window:-,18446744073709551615",
        "--scale 0.5",
        "--scale -1",
        "--backward",
        "--backward --deterministic",
        "--layout bhsd",
        "--layout thd",
        "--dtype bf16",
        "--dtype f32",
        "--fp8 per-block",
        "--fp8 per-head --hadamard 1",
        "--fp8",
        "--fp8 --half-scores",
        "--repeat 2",
        "--arch sm80",
    ];
    for _ in 0..rng.random_range(0..3) {
        line.extend(words(options.choose(rng).expect("some")));
    }
    line
}

/// A line of words that commands know, and of others. None of them computes for long.
fn command_line(rng: &mut StdRng) -> Vec<String> {
    let mut line = words(
        [
            "run --device cpu",
            "check --device cpu",
            "info",
            "plot",
            "tune",
            "random",
            "bench --device cpu --tokens 16 --iters 3 --dims 16 --hidden 16 --dtypes bf16 --seqlens 8",
            "",
        ]
        .choose(rng)
        .expect("some"),
    );
    let options = [
        "--input",
        "--output",
        "--mask",
        "--scale",
        "--layout",
        "--dtype",
        "--device",
        "--batch",
        "--seqlen-q",
        "--seqlen-kv",
        "--heads-q",
        "--heads-kv",
        "--head-dim",
        "--head-dim-vo",
        "--seed",
        "--fp8",
        "--hadamard",
        "--masks",
        "--gqa",
        "--filter",
        "--noise",
        "--compare",
        "--from",
        "--directions",
        "--tuning",
        "--markdown",
        "--update",
        "--help",
        "--version",
        "--seqlens",
        "--hidden",
        "--batch",
        "-o",
        "-i",
        "--",
        "--backward",
        "--quick",
    ];
    let values =
        [FIXTURE, OUTPUT, "README.md", ".", "charts", "causal", "window:1", "bf16", "e4m3", "cpu", "nowhere", "/"];
    for _ in 0..rng.random_range(0..4) {
        line.push((*options.choose(rng).expect("some")).into());
        line.push(match rng.random_range(0..4) {
            0 => continue,
            1 => (*NUMBERS.choose(rng).expect("some")).into(),
            // An argument ends at a 0.
            2 => TEXTS.choose(rng).expect("some").replace('\0', ""),
            _ => (*values.choose(rng).expect("some")).into(),
        });
    }
    if line.is_empty() { vec![String::new()] } else { line }
}

/// A README with the markers of its section, or without.
fn readme(rng: &mut StdRng) -> Vec<u8> {
    let text =
        "a\n<!-- begin generated by `hattn plot old.json --update README.md` -->\nold\n<!-- end generated -->\nb\n";
    if rng.random_bool(0.7) { text.into() } else { changed_bytes(rng, text.into()) }
}

/// The value with some of its parts taken away, doubled or replaced.
fn changed_json(rng: &mut StdRng, value: &Value) -> Value {
    let mut value = value.clone();
    for _ in 0..[0, 1, 1, 2, 5].choose(rng).copied().unwrap_or_default() {
        change(rng, &mut value);
    }
    value
}

fn change(rng: &mut StdRng, value: &mut Value) {
    // Down to some depth, and there something else.
    let deeper = rng.random_bool(0.85);
    match value {
        Value::Object(map) if deeper && !map.is_empty() => {
            let key = map.keys().nth(rng.random_range(0..map.len())).cloned().unwrap_or_default();
            match rng.random_range(0..12) {
                0 => drop(map.remove(&key)),
                1 => {
                    let copy = map[&key].clone();
                    map.insert((*TEXTS.choose(rng).expect("some")).into(), copy);
                }
                _ => change(rng, &mut map[&key]),
            }
        }
        Value::Array(items) if deeper && !items.is_empty() => {
            let at = rng.random_range(0..items.len());
            match rng.random_range(0..12) {
                0 => drop(items.remove(at)),
                1 => items.push(items[at].clone()),
                _ => change(rng, &mut items[at]),
            }
        }
        other => *other = any(rng),
    }
}

fn any(rng: &mut StdRng) -> Value {
    match rng.random_range(0..9) {
        0 => Value::Null,
        1 => Value::Bool(rng.random()),
        2 => json!([]),
        3 => json!({}),
        4 => TEXTS.choose(rng).map_or("long".repeat(10_000), |text| text.repeat(rng.random_range(1..3))).into(),
        _ => serde_json::from_str(NUMBERS.choose(rng).expect("some")).unwrap_or_else(|_| json!(1e-300)),
    }
}

/// The bytes with some taken away, put in or replaced.
fn changed_bytes(rng: &mut StdRng, mut bytes: Vec<u8>) -> Vec<u8> {
    for _ in 0..rng.random_range(0..4) {
        let at = rng.random_range(0..=bytes.len());
        let end = (at + rng.random_range(0..9)).min(bytes.len());
        let new = match rng.random_range(0..4) {
            0 => vec![],
            1 => (0..rng.random_range(1..9)).map(|_| rng.random()).collect(),
            2 => TEXTS.choose(rng).expect("some").as_bytes().to_vec(),
            _ => bytes[at..end].repeat(2),
        };
        bytes.splice(at..end, new);
        if rng.random_bool(0.1) {
            bytes.truncate(at);
        }
    }
    bytes
}
