//! What hostile surroundings and hostile files do not bring about: a lost result, a file left behind, a run without an end, a
//! terminal that is steered, a death that no exit code explains.
#![cfg(unix)]

mod common;

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{FIXTURE, Folder, Ran, bytes, ended, hattn, hattn_on, program, send, until, with_header};
use safetensors::Dtype;

const SHAPE: &[usize] = &[1, 2, 1, 4];

/// An input whose q has a NaN, which is worth a warning.
fn with_nan(folder: &Folder) -> PathBuf {
    let mut tensors = ["q", "k", "v"].map(|name| (name, Dtype::F32, SHAPE, bytes(&[0.5; 8])));
    tensors[0].3 = bytes(&[f32::NAN, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]);
    folder.typed("nan.safetensors", Some("bshd"), &tensors)
}

fn run(input: &Path, output: &Path) -> Command {
    let mut command = Command::new(program());
    command.args(["run", "--device", "cpu", "--input"]).arg(input).arg("--output").arg(output);
    command
}

fn full() -> Stdio {
    File::options().write(true).open("/dev/full").expect("Linux has it").into()
}

/// A pipe that nobody reads any more.
fn closed() -> Stdio {
    let (_, writer) = std::io::pipe().expect("a pipe");
    writer.into()
}

/// Nothing on either stream steers a terminal.
#[track_caller]
fn tame(ran: &Ran) {
    let steers = |c: char| c.is_control() && c != '\n';
    assert!(!ran.stdout.contains(steers) && !ran.stderr.contains(steers), "{ran:?}");
}

#[test]
fn a_warning_that_nobody_takes_does_not_cost_the_result() {
    let folder = Folder::new();
    let (input, output) = (with_nan(&folder), folder.path("o.safetensors"));
    for stderr in [full(), closed()] {
        let status = run(&input, &output).stdout(Stdio::null()).stderr(stderr).status().expect("it starts");
        assert_eq!(status.code(), Some(0), "{status}");
        fs::remove_file(&output).expect("the result is there");
    }
    // Nor does it change the exit code of a refusal, or of a command line that cannot be read.
    for (argument, code) in [("--input", 2), ("--input=nowhere", 1)] {
        for stderr in [full(), closed()] {
            let status = Command::new(program()).args(["check", argument]).stderr(stderr).status().expect("it starts");
            assert_eq!(status.code(), Some(code), "{argument}: {status}");
        }
    }
    assert_eq!(folder.names(), ["nan.safetensors"]);
}

#[test]
fn a_full_standard_output_is_named_and_does_not_cost_the_result() {
    let folder = Folder::new();
    let (input, output) = (Path::new(FIXTURE), folder.path("o.safetensors"));
    let said = |command: &mut Command| {
        let output = ended(command.stdout(full()).stderr(Stdio::piped()).spawn().expect("it starts"));
        (output.status.code(), String::from_utf8(output.stderr).expect("UTF-8"))
    };
    let named = (Some(1), "hattn: standard output: No space left on device (os error 28)\n".to_string());
    assert_eq!(said(&mut run(input, &output)), named);
    fs::remove_file(&output).expect("the result is there");
    for line in ["info", "--help", "--version", "bench --help"] {
        assert_eq!(said(Command::new(program()).args(line.split(' '))), named, "{line}");
    }
    let status = run(input, &output).stdout(closed()).status().expect("it starts");
    assert!(status.success() && output.exists(), "a reader may go away: {status}");
}

/// A run that goes on until it is ended, once it has its temporary file.
fn long_run(folder: &Folder, mut command: Command) -> Child {
    command.args(["--repeat", "100000"]).stdout(Stdio::null());
    let child = command.spawn().expect("it starts");
    until("there is a temporary file", || folder.names().iter().any(|name| name.ends_with(".part")));
    child
}

#[test]
fn signals_end_it_and_leave_nothing_behind() {
    let folder = Folder::new();
    let output = folder.path("o.safetensors");
    for (name, number) in [("HUP", 1), ("INT", 2), ("QUIT", 3), ("TERM", 15), ("XCPU", 24)] {
        fs::write(&output, "an older output").expect("written");
        // What starts the tests may ignore signals, as `nohup` and shells in the background do.
        let ignorant = run(Path::new(FIXTURE), &output);
        let mut command = Command::new("env");
        command.arg(format!("--default-signal={name}")).arg(ignorant.get_program()).args(ignorant.get_args());
        let child = long_run(&folder, command);
        send(name, &child);
        assert_eq!(ended(child).status.signal(), Some(number), "SIG{name}");
        assert_eq!(fs::read(&output).expect("still there"), b"an older output");
        assert_eq!(folder.names(), ["o.safetensors"], "SIG{name}");
    }
}

/// As `nohup` does it.
#[test]
fn a_signal_that_is_ignored_stays_ignored() {
    let folder = Folder::new();
    let mut command = Command::new("sh");
    command.args(["-c", r#"trap '' HUP; exec "$0" "$@""#]).arg(program());
    command.args(["run", "--device", "cpu", "--input", FIXTURE, "--output"]).arg(folder.path("o.safetensors"));
    let mut child = long_run(&folder, command);
    send("HUP", &child);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(child.try_wait().expect("a process"), None);
    send("TERM", &child);
    assert_eq!(ended(child).status.signal(), Some(15));
    assert!(folder.names().is_empty());
}

/// The limit on the size of files comes with a signal of its own.
#[test]
fn a_file_that_may_not_grow_is_an_error() {
    let folder = Folder::new();
    let output = folder.path("o.safetensors");
    let mut command = Command::new("sh");
    command.args(["-c", r#"ulimit -f 64; exec "$0" run --device cpu --input "$1" --output "$2""#]);
    let ran = Ran::of(command.arg(program()).arg(FIXTURE).arg(&output));
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stderr.contains("cannot be written: File too large") && ran.stderr.lines().count() == 1, "{ran:?}");
    assert!(folder.names().is_empty(), "{:?}", folder.names());
}

#[test]
fn an_output_keeps_its_permissions() {
    let folder = Folder::new();
    let mode = |path: &Path| fs::metadata(path).expect("it is there").permissions().mode() & 0o777;
    let output = folder.path("o.safetensors");
    for wanted in [0o600, 0o640, 0o666] {
        fs::write(&output, "an older output").expect("written");
        fs::set_permissions(&output, Permissions::from_mode(wanted)).expect("changed");
        hattn_on("run --device cpu", Path::new(FIXTURE), Some(&output)).fine();
        assert_eq!(mode(&output), wanted, "{:o} instead of {wanted:o}", mode(&output));
    }
    // Nobody else reads it meanwhile either.
    fs::set_permissions(&output, Permissions::from_mode(0o600)).expect("changed");
    let child = long_run(&folder, run(Path::new(FIXTURE), &output));
    let part = folder.names().into_iter().find(|name| name.ends_with(".part")).expect("a temporary file");
    assert_eq!(mode(&folder.path(&part)), 0o600);
    send("TERM", &child);
    ended(child);
    // A new file has what any program gives it.
    let (new, other) = (folder.path("new.safetensors"), folder.path("other"));
    hattn_on("run --device cpu", Path::new(FIXTURE), Some(&new)).fine();
    fs::write(&other, "").expect("written");
    assert_eq!(mode(&new), mode(&other));
}

#[test]
fn an_output_behind_links_to_nothing_yet() {
    let folder = Folder::new();
    fs::create_dir(folder.path("inner")).expect("a folder");
    let (link, target) = (folder.path("link"), folder.path("inner/target"));
    symlink("inner/next", &link).expect("a link");
    symlink("target", folder.path("inner/next")).expect("a link");
    hattn_on("run --device cpu", Path::new(FIXTURE), Some(&link)).fine();
    assert!(fs::symlink_metadata(&link).expect("it stays").is_symlink());
    assert!(fs::symlink_metadata(&target).expect("it was written").is_file());

    let [one, two] = ["one", "two"].map(|name| folder.path(name));
    symlink(&one, &two).expect("a link");
    symlink(&two, &one).expect("a link");
    let ran = hattn_on("run --device cpu", Path::new(FIXTURE), Some(&one));
    ran.refused(&["output ", "/one: more than 40 symbolic links"]);
}

#[test]
fn a_pipe_without_a_writer_is_refused() {
    let folder = Folder::new();
    let pipe = folder.path("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo starts").success());
    let name = pipe.to_str().expect("UTF-8");
    let lines: [&[&str]; 6] = [
        &["run", "--input", name, "--output", "o"],
        &["check", "--input", name],
        &["check", "--input", FIXTURE, "--tuning", name],
        &["bench", "--from", name],
        &["plot", name],
        &["tune", "--output", name],
    ];
    for line in lines {
        hattn(line).refused(&["/pipe: not a regular file", "allowed: a regular file"]);
    }
    hattn(["check", "--input", "/dev/null"]).refused(&["input /dev/null: not a regular file"]);
}

/// `\u{1b}[2J` clears a terminal, `\u{9b}` does so on some, `\u{202e}` turns the text around.
const STEERING: &str = "\u{1b}[2Jx\r\u{9b}\u{202e}";
const SHOWN: &str = r"\u{1b}[2Jx\r\u{9b}\u{202e}";
/// The same of an argument that cannot be read, from which clap takes the first.
const SHOWN_BY_CLAP: &str = r"x\r\u{9b}\u{202e}";

#[test]
fn what_steers_a_terminal_is_shown_as_an_escape() {
    let folder = Folder::new();
    let shows = |ran: Ran, code: i32| {
        tame(&ran);
        assert_eq!(ran.code, Some(code), "{ran:?}");
        let shown = if code == 2 { SHOWN_BY_CLAP } else { SHOWN };
        assert!(ran.stdout.contains(shown) || ran.stderr.contains(shown), "{ran:?}");
    };
    // A name, a layout, a type, a key, a path.
    let input = folder.tensors("a", Some("bshd"), &[("q", SHAPE), ("k", SHAPE), (STEERING, SHAPE)]);
    shows(hattn_on("check", &input, None), 1);
    let input = folder.tensors("b", Some(STEERING), &[("q", SHAPE)]);
    shows(hattn_on("check", &input, None), 1);
    let quoted = serde_json::to_string(STEERING).expect("a string");
    let tensor = |dtype: &str| format!(r#"{{"dtype":{dtype},"shape":[1],"data_offsets":[0,4]}}"#);
    let input = folder.path("c");
    for header in
        [format!(r#"{{"q":{}}}"#, tensor(&quoted)), format!(r#"{{{quoted}:{0},{quoted}:{0}}}"#, tensor("\"F32\""))]
    {
        fs::write(&input, with_header(header.as_bytes(), &[0; 4])).expect("written");
        shows(hattn_on("check", &input, None), 1);
    }
    shows(hattn_on("check", &folder.path(STEERING), None), 1);
    fs::copy(FIXTURE, folder.path(STEERING)).expect("copied");
    shows(hattn_on("check --device cpu", &folder.path(STEERING), None), 0);
    // Arguments.
    for line in [&[STEERING][..], &["check", STEERING], &["check", "--mask", STEERING], &["bench", "--masks", STEERING]]
    {
        shows(hattn(line), 2);
    }
    shows(hattn(["bench", "--device", "cpu", "--filter", STEERING]), 1);
    shows(hattn(["bench", "--device", "cuda:0", "--harness", "pytorch", "--ours", "x.so", "--python", STEERING]), 1);
}

/// A sweep of one point, with texts in its report replaced.
fn report(folder: &Folder, change: impl Fn(&mut serde_json::Value)) -> PathBuf {
    let small = "bench --device cpu --tokens 16 --hidden 16 --seqlens 16 --dims 16 --dtypes bf16 --masks full --iters 3 --output";
    let results = folder.path("results");
    let ran = hattn(small.split(' ').map(Path::new).chain([results.as_path()]));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let path = results.join("bench.json");
    let mut json = serde_json::from_slice(&fs::read(&path).expect("a report")).expect("JSON");
    change(&mut json);
    fs::write(&path, json.to_string()).expect("written");
    path
}

#[test]
fn a_report_does_not_steer_a_terminal_either() {
    let folder = Folder::new();
    let path = report(&folder, |json| {
        let steering = || serde_json::Value::from(STEERING);
        for place in ["/device", "/method", "/date", "/commit", "/harness", "/points/0/runs/1/name"] {
            *json.pointer_mut(place).expect(place) = steering();
        }
        json["points"][0]["runs"][0]["error"] = steering();
        json["notes"] = [steering()].into_iter().collect();
        json["host"]["calls"][0]["what"] = steering();
        json["host"]["calls"][0]["problem"] = steering();
        json["host"]["notes"] = [steering()].into_iter().collect();
    });
    let path = path.to_str().expect("UTF-8");
    for line in [&["bench", "--from", path][..], &["bench", "--from", path, "--compare", path], &["plot", path]] {
        let ran = hattn(line);
        tame(&ran);
        assert_eq!(ran.code, Some(0), "{ran:?}");
    }
    let text = hattn(["bench", "--from", path]).stdout;
    assert!(text.matches(SHOWN).count() >= 10, "{text}");
    let chart = fs::read_to_string(folder.path("results/fwd-bf16-d16-full.svg")).expect("a chart");
    assert!(chart.contains(SHOWN) && !chart.contains(|c: char| c.is_control() && c != '\n'), "{chart}");
    // A word that is no word of a report is an error, and shown as such.
    report(&folder, |json| json["schema"] = STEERING.into());
    let ran = hattn(["bench", "--from", path]);
    tame(&ran);
    ran.refused(&["its schema is ", SHOWN]);
}

#[test]
fn long_lists_and_long_words_are_cut() {
    let folder = Folder::new();
    let input = folder.path("qkv.safetensors");
    let refused = |header: String, parts: &[&str]| {
        fs::write(&input, with_header(header.as_bytes(), &[])).expect("written");
        let ran = hattn_on("check", &input, None);
        assert!(ran.stderr.len() < 1500, "{} bytes: {ran:?}", ran.stderr.len());
        ran.refused(parts);
    };
    let tensor = |dtype: &str| format!(r#"{{"dtype":"{dtype}","shape":[0],"data_offsets":[0,0]}}"#);
    let names: Vec<String> = (0..3000).rev().map(|i| format!(r#""t{i:04}":{}"#, tensor("F32"))).collect();
    let header = format!(r#"{{"__metadata__":{{"layout":"bshd"}},{}}}"#, names.join(","));
    refused(header, &["`q` is missing; found: t0000, t0001, t0002, ", ", t0007 and 2992 more"]);
    let long = "long".repeat(25_000);
    refused(
        format!(r#"{{"__metadata__":{{"layout":"{long}"}}}}"#),
        &["layout `long", "characters ...]", "g`; allowed: bshd"],
    );
    refused(format!(r#"{{"q":{}}}"#, tensor(&long)), &["unknown variant `long", "characters ...]", " column "]);
    let header = format!(r#"{{"__metadata__":{{"layout":"bshd"}},"{long}":{}}}"#, tensor("F32"));
    refused(header, &["found: long", "characters ...]"]);
    let ran = hattn(["check", "--mask", &long]);
    assert!(ran.code == Some(2) && ran.stderr.len() < 1500 && ran.stderr.contains("characters ...]"), "{ran:?}");
}

#[test]
fn a_header_with_a_key_twice_or_blanks_before_it_is_refused() {
    let folder = Folder::new();
    let input = folder.path("qkv.safetensors");
    let tensor = |shape: &str| format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}"#);
    let header = |first: &str, more: &str| {
        let tensors: Vec<String> = ["q", "k", "v"].map(|name| format!(r#""{name}":{}"#, tensor("[0,1,1,8]"))).into();
        format!(r#"{first}{{"__metadata__":{{"layout":"bshd"{more}}},{}}}"#, tensors.join(","))
    };
    let check = |header: String| {
        fs::write(&input, with_header(header.as_bytes(), &[])).expect("written");
        hattn_on("check --device cpu", &input, None)
    };
    check(header("", "") + "  ").fine();
    check(header(" ", "")).refused(&["bad safetensors header: it does not begin with `{`"]);
    check(header("", r#","layout":"bhsd""#)).refused(&["bad safetensors header: the key `layout` is there twice"]);
    let twice = header("", "").replace(r#""k":"#, r#""q":"#);
    check(twice).refused(&["bad safetensors header: the key `q` is there twice"]);
}

/// Runs it with so many KiB of address space. The allocator has one arena: it would reserve 64 MiB for each thread that
/// allocates, so that what fits would depend on the threads.
fn limited(kib: usize, arguments: &[&str]) -> Ran {
    let mut command = Command::new("sh");
    command.env("MALLOC_ARENA_MAX", "1");
    command.args(["-c", &format!(r#"ulimit -v {kib}; exec "$0" "$@""#)]).arg(program()).args(arguments);
    Ran::of(&mut command)
}

#[test]
fn too_little_memory_is_an_error() {
    let folder = Folder::new();
    // A header whose entries take far more memory than bytes.
    let keys: Vec<String> = (0..600_000).map(|i| format!(r#""{i:x}":"""#)).collect();
    let header = format!(r#"{{"__metadata__":{{{}}}}}"#, keys.join(","));
    let (parsed, read) = (folder.path("parsed.safetensors"), folder.path("read.safetensors"));
    fs::write(&parsed, with_header(header.as_bytes(), &[])).expect("written");
    // The longest header that the format allows.
    fs::write(&read, 100_000_000_u64.to_le_bytes()).expect("written");
    File::options().write(true).open(&read).and_then(|file| file.set_len(100_000_008)).expect("a long file");
    for input in [parsed, read] {
        let ran = limited(90_000, &["check", "--input", input.to_str().expect("UTF-8")]);
        ran.refused(&[".safetensors: ", "out of memory: "]);
    }
    // Only the output is large, so the inputs fit.
    let line = "--seqlen-q 65536 --seqlen-kv 1 --heads-q 8 --head-dim 8 --head-dim-vo 512 --dtype f16";
    let input = folder.random("qkv.safetensors", line);
    let output = folder.path("o.safetensors");
    let (input, output) = (input.to_str().expect("UTF-8"), output.to_str().expect("UTF-8"));
    let ran = limited(250_000, &["run", "--device", "cpu", "--input", input, "--output", output]);
    assert!(ran.code == Some(1) && ran.stderr.starts_with("hattn: o: out of memory: 268435456 elements"), "{ran:?}");
    assert!(!folder.names().iter().any(|name| name.ends_with(".part") || name == "o.safetensors"));
}

/// A file without elements, whose shapes hold the largest numbers that there are: no pass takes memory for them, or time.
#[test]
fn empty_files_of_large_numbers_are_answered_at_once() {
    let folder = Folder::new();
    let large = i32::MAX;
    for shape in [[large, 0, 1, 8], [0, 1, 1, large], [0, large, 1, 8], [0, 1, large, 8], [0, large, large, 64]] {
        let tensors =
            ["q", "k", "v"].map(|name| format!(r#""{name}":{{"dtype":"F16","shape":{shape:?},"data_offsets":[0,0]}}"#));
        let header = format!(r#"{{{},"__metadata__":{{"layout":"bshd"}}}}"#, tensors.join(","));
        let (input, output) = (folder.path("empty.safetensors"), folder.path("o.safetensors"));
        fs::write(&input, with_header(header.as_bytes(), &[])).expect("written");
        for options in ["", "--fp8 per-tensor", "--fp8 per-head", "--fp8 per-block --hadamard 1"] {
            let line = format!("run --device cpu {options} --input {} --output {}", input.display(), output.display());
            let ran = limited(3_000_000, &line.split_whitespace().collect::<Vec<_>>());
            assert!(matches!(ran.code, Some(0 | 1)), "{shape:?} {options}: {ran:?}");
            if ran.code == Some(1) {
                assert!(ran.stderr.lines().count() == 1 && !ran.stderr.contains("panicked"), "{ran:?}");
            }
        }
    }
}

#[test]
fn sweeps_that_are_too_large_are_refused() {
    for (sizes, part) in [
        ("--seqlens 9223372036854775807", "seqlen 9223372036854775807; allowed: 1 to 2147483647"),
        ("--seqlens 4294967296", "seqlen 4294967296; allowed: 1 to 2147483647"),
        ("--seqlens 2147483647", " operations; allowed: below "),
        ("--hidden 2147483648", "out of memory: "),
        ("--hidden 18446744073709551552", "heads_q "),
        ("--batch 18446744073709551615", "batch 18446744073709551615; allowed: "),
        ("--batch 1073741824 --seqlens 1", "out of memory: "),
        ("--gqa 4611686018427387904", "--gqa 4611686018427387904 does not divide"),
        ("--dims 9223372036854775808", "head dim 9223372036854775808 in a hidden size of"),
    ] {
        let line = format!("bench --device cpu --dtypes bf16 {sizes}");
        limited(4_000_000, &line.split(' ').collect::<Vec<_>>()).refused(&[part]);
    }
    // The inputs fit in memory, and what the naive computation needs besides does not.
    let line =
        "bench --device cpu --dtypes bf16 --masks full --dims 64 --seqlens 16 --tokens 4096 --hidden 2048 --iters 3";
    let ran = limited(300_000, &line.split(' ').collect::<Vec<_>>());
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.stdout.contains("WRONG: naive, first at ") && ran.stdout.contains("in f64: out of memory"), "{ran:?}");
}

/// What is documented is what occurs: the other tests hold each of these codes to its cause.
#[test]
fn the_exit_codes_are_documented() {
    let page = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/hattn.md")).expect("the page");
    let help = hattn(["--help"]).fine();
    for (code, meaning) in
        [(0, "done"), (1, "refused or failed; one sentence on stderr says why"), (2, "the command line cannot be read")]
    {
        assert!(help.contains(&format!("\n  {code}   {meaning}\n")), "{help}");
        assert!(page.contains(&format!("| {code} | {meaning} |")), "docs/hattn.md lacks {code}");
    }
}
