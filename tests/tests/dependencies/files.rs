//! The rules that one file can break by itself.

/// No file is longer: a reader holds one in mind at a time.
pub const MOST_LINES: usize = 800;

/// A text file of the repository.
pub struct Source {
    /// From the root, with forward slashes.
    pub path: String,
    pub text: String,
}

impl Source {
    pub fn new(path: &str, text: &str) -> Self {
        Self { path: path.into(), text: text.into() }
    }

    pub fn ends_with(&self, ends: &[&str]) -> bool {
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

/// `common/` never includes an arch folder, and one arch never includes another. The launch table lists all of them.
fn arch_includes(file: &Source, complaints: &mut Vec<String>) {
    let Some(folder) = file.path.strip_prefix(KERNELS).and_then(|rest| rest.split('/').next()) else { return };
    if !file.is_cpp() || folder == "table.cc" {
        return;
    }
    for (line, include) in file.includes() {
        for arch in ARCHS {
            if arch != folder && include.split('/').any(|part| part == arch) {
                complaints.push(format!("{}:{line}: {folder} includes {include}", file.path));
            }
        }
    }
}

/// The header that cxx makes of the launch parameters: the only one of its kind that the kernels see.
const PARAMS_HEADER: &str = "hopper-attention-sys/src/params.rs.h";

/// `kernels.hpp` sees neither CUTLASS nor cxx, directly or through the files it includes: the standard library, and the
/// header of the launch parameters, which [`params_are_plain`] keeps free of cxx.
fn cpp_interface(file: &Source, complaints: &mut Vec<String>) {
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
fn params_are_plain(file: &Source, complaints: &mut Vec<String>) {
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

/// Only the bridge sees cxx and the Rust interface; kernels do not.
fn rust_interface(file: &Source, complaints: &mut Vec<String>) {
    if !file.path.starts_with(KERNELS) || !file.is_cpp() {
        return;
    }
    for (line, include) in file.includes() {
        if include.ends_with("bridge.h") || include.contains("cxx.h") || include.ends_with(".rs.h") {
            complaints.push(format!("{}:{line}: a kernel includes the Rust interface, {include}", file.path));
        }
    }
}

/// Only `hopper-attention/src/sys.rs` names the sys crate.
fn sys_users(file: &Source, complaints: &mut Vec<String>) {
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

/// The oracle uses no module that takes part in a run, so that it is able to disagree with one.
fn reference_imports(file: &Source, complaints: &mut Vec<String>) {
    if !file.path.starts_with(&format!("{SAFE}reference")) {
        return;
    }
    for (line, text) in numbered(&file.text) {
        for module in ["plan", "table", "sys", "cpu", "launch", "raw", "run", "tensor", "workspace", "device"] {
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
fn capi_dependencies(file: &Source, complaints: &mut Vec<String>) {
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
/// and functions: an `unsafe fn` says what its caller must do, where a trait has not said it already.
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
        if !opens || quoted || extended || (after.starts_with("fn ") && is_of_a_trait(&lines[..i], before)) {
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

/// Whether a function that begins a line like this is within `impl TRAIT for TYPE`: the block that the last line above with
/// less before it opens.
fn is_of_a_trait(above: &[&str], before: &str) -> bool {
    let indentation = |line: &str| line.len() - line.trim_start().len();
    let own = indentation(before);
    let opener = above.iter().rev().find(|line| !line.trim().is_empty() && indentation(line) < own);
    opener.is_some_and(|line| line.trim_start().starts_with("impl") && line.contains(" for ") && line.ends_with('{'))
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
const RULES: [Rule; 10] = [
    arch_includes,
    cpp_interface,
    params_are_plain,
    rust_interface,
    sys_users,
    reference_imports,
    capi_dependencies,
    length,
    safety,
    machine_paths,
];

/// What the rules of one file say of it.
pub fn complaints(file: &Source) -> Vec<String> {
    let mut complaints = Vec::new();
    for rule in RULES {
        rule(file, &mut complaints);
    }
    complaints
}
