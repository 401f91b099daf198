//! The doors between the rooms of the house, and its few written rules: who may include, name or hold what.
//!
//! Every rule is a function from a file to its complaints, so that the second test can show that each one complains.

use std::fs;
use std::path::{Path, PathBuf};

/// No file is longer: a reader holds one in mind at a time.
const MOST_LINES: usize = 800;

/// A text file of the repository.
struct Source {
    /// From the root, with forward slashes.
    path: String,
    text: String,
}

impl Source {
    fn new(path: &str, text: &str) -> Self {
        Self { path: path.into(), text: text.into() }
    }

    fn ends_with(&self, ends: &[&str]) -> bool {
        ends.iter().any(|end| self.path.ends_with(end))
    }

    fn is_cpp(&self) -> bool {
        self.ends_with(&[".hpp", ".h", ".cu", ".cuh", ".cc", ".cpp", ".def"])
    }

    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// What the file includes, with the line numbers.
    fn includes(&self) -> impl Iterator<Item = (usize, &str)> {
        numbered(&self.text).filter_map(|(line, text)| {
            let rest = text.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include")?.trim_start();
            let (open, close) = if rest.starts_with('<') { ('<', '>') } else { ('"', '"') };
            Some((line, rest.strip_prefix(open)?.split(close).next()?))
        })
    }
}

fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(i, line)| (i + 1, line))
}

/// A line without its comment; good enough for names, which strings with slashes do not hold.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or(line)
}

const KERNELS: &str = "crates/hopper-attention-sys/kernels/";
const SAFE: &str = "crates/hopper-attention/src/";
const ARCHS: [&str; 2] = ["sm80", "sm90"];

/// `common/` never includes an arch folder, one arch never another. The launch table, which is in no room, lists all.
fn arch_doors(file: &Source, complaints: &mut Vec<String>) {
    let Some(room) = file.path.strip_prefix(KERNELS).and_then(|rest| rest.split('/').next()) else { return };
    if !file.is_cpp() || room == "table.cc" {
        return;
    }
    for (line, include) in file.includes() {
        for arch in ARCHS {
            if arch != room && include.split('/').any(|part| part == arch) {
                complaints.push(format!("{}:{line}: {room} includes {include}", file.path));
            }
        }
    }
}

/// The header that cxx makes of the launch parameters: the only one of its kind that the kernels see.
const PARAMS_HEADER: &str = "hopper-attention-sys/src/params.rs.h";

/// `kernels.hpp` sees neither CUTLASS nor cxx, directly or through the files it includes: the standard library, and the
/// header of the launch parameters, which [`params_door`] keeps free of cxx.
fn cpp_door(file: &Source, complaints: &mut Vec<String>) {
    if !file.path.ends_with("hopper-attention-sys/include/kernels.hpp") {
        return;
    }
    for (line, include) in file.includes() {
        // The standard library's headers have no folder and no ending.
        if include.contains(['/', '.']) && include != PARAMS_HEADER {
            complaints.push(format!(
                "{}:{line}: kernels.hpp includes {include}, allowed are the standard library and {PARAMS_HEADER}",
                file.path
            ));
        }
    }
}

/// `params.rs` defines plain structs and enums. Anything else would make cxx include its own header in the generated one:
/// functions, and types of Rust's or C++'s library.
fn params_door(file: &Source, complaints: &mut Vec<String>) {
    if !file.path.ends_with("hopper-attention-sys/src/params.rs") {
        return;
    }
    for (line, text) in numbered(&file.text) {
        let words = code(text).split(|c: char| !c.is_alphanumeric() && c != '_');
        for word in words.filter(|word| ["fn", "extern", "include", "impl", "str", "usize", "isize"].contains(word)) {
            complaints.push(format!("{}:{line}: {word}, allowed are structs and enums of numbers", file.path));
        }
        if code(text).contains(['<', '&', '*']) {
            complaints.push(format!("{}:{line}: a pointer or a generic type, allowed are numbers", file.path));
        }
    }
}

/// Only the launch side sees the kernels; the Rust door is for the bridge alone.
fn rust_door(file: &Source, complaints: &mut Vec<String>) {
    if !file.path.starts_with(KERNELS) || !file.is_cpp() {
        return;
    }
    for (line, include) in file.includes() {
        if include.ends_with("bridge.h") || include.contains("cxx.h") || include.ends_with(".rs.h") {
            complaints.push(format!("{}:{line}: a kernel includes the Rust door, {include}", file.path));
        }
    }
}

/// Only `hopper-attention/src/sys.rs` names the sys crate.
fn sys_door(file: &Source, complaints: &mut Vec<String>) {
    let name = ["hopper", "attention", "sys"].join("_");
    let allowed = file.path == format!("{SAFE}sys.rs") || file.path.starts_with("crates/hopper-attention-sys/");
    if !file.is_rust() || allowed {
        return;
    }
    for (line, text) in numbered(&file.text) {
        if code(text).contains(&name) {
            complaints.push(format!("{}:{line}: names {name}, which only {SAFE}sys.rs may", file.path));
        }
    }
}

/// The oracle uses nothing of what it judges.
fn reference_door(file: &Source, complaints: &mut Vec<String>) {
    if !file.path.starts_with(&format!("{SAFE}reference")) {
        return;
    }
    for (line, text) in numbered(&file.text) {
        for module in ["plan", "kernels", "sys", "cpu", "forward", "backward", "raw", "quantize"] {
            for way in ["crate::", "super::super::"] {
                let needle = format!("{way}{module}");
                let follows = |rest: &str| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_');
                if code(text).split(&needle).skip(1).any(follows) {
                    complaints.push(format!("{}:{line}: the reference uses {needle}", file.path));
                }
            }
        }
    }
}

/// The C ABI uses the public crate only.
fn capi_door(file: &Source, complaints: &mut Vec<String>) {
    if !file.path.starts_with("crates/hopper-attention-capi/") || !file.path.ends_with("Cargo.toml") {
        return;
    }
    let name = ["hopper", "attention", "sys"].join("-");
    for (line, text) in numbered(&file.text) {
        if text.contains(&name) {
            complaints.push(format!("{}:{line}: the C ABI depends on {name}", file.path));
        }
    }
}

/// No file is too long to read. Recorded data and lock files are not read.
fn length(file: &Source, complaints: &mut Vec<String>) {
    if file.ends_with(&[".lock", ".json", ".csv", ".jsonl", ".tsv", ".svg", ".log"]) {
        return;
    }
    let lines = file.text.lines().count();
    if lines > MOST_LINES {
        complaints.push(format!("{}: {lines} lines, at most {MOST_LINES}", file.path));
    }
}

/// Every use of `unsafe` says why it is sound. Clippy sees blocks in what is compiled; this sees all files and features,
/// and functions: an `unsafe fn` says what its caller must do.
fn safety(file: &Source, complaints: &mut Vec<String>) {
    if !file.is_rust() {
        return;
    }
    let word = ["un", "safe"].concat();
    let lines: Vec<&str> = file.text.lines().collect();
    for (i, text) in lines.iter().enumerate() {
        let line = code(text);
        let Some((before, after)) = line.split_once(&format!("{word} ")) else { continue };
        let after = after.trim_start();
        // In a string, part of a longer word, a lint's name, a bound that says nothing by itself, or a type of a function.
        let opens = after.starts_with('{') || after.starts_with("impl") || after.starts_with("fn ");
        let quoted = before.matches('"').count() % 2 == 1;
        let extended = before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
        if !opens || quoted || extended {
            continue;
        }
        let wanted: &[&str] = if after.starts_with("fn ") { &["# Safety", "SAFETY:"] } else { &["SAFETY:"] };
        // On the line itself, or in the comments, attributes and unfinished statement above it.
        let mut said = wanted.iter().any(|mark| text.contains(mark));
        for above in lines[..i].iter().rev() {
            if said {
                break;
            }
            let above = above.trim();
            let unfinished = above.ends_with(['=', '(', ',', '|']);
            if !(above.starts_with("//") || above.starts_with("#[") || unfinished) {
                break;
            }
            said = wanted.iter().any(|mark| above.contains(mark));
        }
        if !said {
            complaints.push(format!("{}:{}: {word} without {}", file.path, i + 1, wanted[0]));
        }
    }
}

/// No path of one machine.
fn machine_paths(file: &Source, complaints: &mut Vec<String>) {
    if file.path.ends_with(".lock") {
        return;
    }
    for (line, text) in numbered(&file.text) {
        for folder in ["work", "tmp", "root", "home"] {
            let needle = format!("/{folder}/");
            let alone = |before: &str| !before.ends_with(|c: char| c.is_alphanumeric() || "._-$}".contains(c));
            if text.match_indices(&needle).any(|(at, _)| alone(&text[..at])) {
                complaints.push(format!("{}:{line}: a path of one machine, {needle}", file.path));
            }
        }
    }
}

type Rule = fn(&Source, &mut Vec<String>);
const RULES: [Rule; 10] =
    [arch_doors, cpp_door, params_door, rust_door, sys_door, reference_door, capi_door, length, safety, machine_paths];

fn complaints(file: &Source) -> Vec<String> {
    let mut complaints = Vec::new();
    for rule in RULES {
        rule(file, &mut complaints);
    }
    complaints
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the repository").to_path_buf()
}

/// The text files of the repository, without what is built or fetched. Read from the folders rather than from git, so that
/// the test also runs in an unpacked archive and sees files before they are committed.
fn sources() -> Vec<Source> {
    fn walk(folder: &Path, root: &Path, found: &mut Vec<Source>) {
        for entry in fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
            let path = entry.expect("a folder's entry").path();
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            if path.is_dir() {
                let made = name.starts_with("target") || ["dist", "__pycache__", "shared"].contains(&name.as_str());
                let hidden = name.starts_with('.') && name != ".ci" && name != ".github";
                if !made && !hidden && !path.is_symlink() {
                    walk(&path, root, found);
                }
            } else if name == ".git" {
                // A worktree's, which says where its repository is; it is no part of this one.
            } else if let Ok(text) = fs::read_to_string(&path) {
                let relative = path.strip_prefix(root).expect("below the root").to_string_lossy().replace('\\', "/");
                found.push(Source { path: relative, text });
            }
        }
    }
    let root = root();
    let mut found = Vec::new();
    walk(&root, &root, &mut found);
    found
}

#[test]
fn every_door_is_shut() {
    let sources = sources();
    // A test that reads nothing would pass.
    for expected in
        ["Cargo.toml", "crates/hopper-attention/src/lib.rs", "crates/hopper-attention-sys/include/kernels.hpp"]
    {
        assert!(sources.iter().any(|file| file.path == expected), "{expected} was not read");
    }
    let found: Vec<String> = sources.iter().flat_map(complaints).collect();
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn every_rule_complains() {
    let word = ["un", "safe"].concat();
    let sys = ["hopper", "attention", "sys"].join("_");
    let path = |folder: &str| format!("let p = \"/{folder}/main\";");
    let long = "x\n".repeat(MOST_LINES + 1);
    let wrong = [
        Source::new("crates/hopper-attention-sys/kernels/common/mask.hpp", "#include \"sm90/fwd/traits.hpp\"\n"),
        Source::new("crates/hopper-attention-sys/kernels/sm80/fwd/load.hpp", "#include \"../sm90/load.hpp\"\n"),
        Source::new("crates/hopper-attention-sys/include/kernels.hpp", "#include <cute/tensor.hpp>\n"),
        Source::new("crates/hopper-attention-sys/include/kernels.hpp", "#include \"bridge.h\"\n"),
        Source::new("crates/hopper-attention-sys/include/kernels.hpp", "#include \"rust/cxx.h\"\n"),
        Source::new(
            "crates/hopper-attention-sys/include/kernels.hpp",
            "#include \"hopper-attention-sys/src/lib.rs.h\"\n",
        ),
        Source::new("crates/hopper-attention-sys/src/params.rs", "struct A {\n    rows: Vec<i32>,\n}\n"),
        Source::new("crates/hopper-attention-sys/src/params.rs", "struct A {\n    name: &'static [u8],\n}\n"),
        Source::new("crates/hopper-attention-sys/src/params.rs", "struct A {\n    count: usize,\n}\n"),
        Source::new("crates/hopper-attention-sys/kernels/sm90/fwd/table.cc", "#include \"rust/cxx.h\"\n"),
        Source::new("benches/src/lib.rs", &format!("use {sys}::fwd_rows;\n")),
        Source::new("crates/hopper-attention/src/reference/forward.rs", "use crate::plan::Plan;\n"),
        Source::new("crates/hopper-attention/src/reference/oracle.rs", "use crate::backward::BackwardArgs;\n"),
        Source::new("crates/hopper-attention-capi/Cargo.toml", &format!("{} = \"1\"\n", sys.replace('_', "-"))),
        Source::new("README.md", &long),
        Source::new("tests/src/lib.rs", &format!("let x = 1;\nlet y = {word} {{ f() }};\n")),
        Source::new("tests/src/lib.rs", &format!("/// Does it.\npub {word} fn f() {{}}\n")),
        Source::new("scripts/a.sh", &path("work")),
        Source::new("scripts/a.sh", &path("root")),
    ];
    for file in &wrong {
        assert_eq!(
            complaints(file).len(),
            1,
            "{} with {:?}: {:?}",
            file.path,
            file.text.lines().next(),
            complaints(file)
        );
    }
    let right = [
        Source::new(
            "crates/hopper-attention-sys/kernels/sm90/fwd/load.hpp",
            "#include \"sm90/a.hpp\"\n#include \"common/b.hpp\"\n",
        ),
        Source::new(
            "crates/hopper-attention-sys/include/kernels.hpp",
            "#include <cstdint>\n#include \"hopper-attention-sys/src/params.rs.h\"\n",
        ),
        Source::new(
            "crates/hopper-attention-sys/src/params.rs",
            "/// A `Vec<i32>` & more.\nstruct A {\n    address: u64,\n}\n",
        ),
        Source::new("crates/hopper-attention/src/sys.rs", &format!("use {sys}::fwd_rows;\n")),
        Source::new("crates/hopper-attention/src/reference/forward.rs", "use crate::planet;\n// not crate::plan\n"),
        Source::new("tests/src/lib.rs", &format!("// SAFETY: it is.\nlet y =\n    {word} {{ f() }};\n")),
        Source::new(
            "tests/src/lib.rs",
            &format!("/// # Safety\n///\n/// Be careful.\n#[inline]\npub {word} fn f() {{}}\n"),
        ),
        Source::new("scripts/a.sh", "cat target/tmp/x $root/scripts/work/y\n"),
    ];
    for file in &right {
        assert_eq!(complaints(file), Vec::<String>::new());
    }
}
