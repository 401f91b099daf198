//! The dependency rules: which file may include, import or name which, and what every file must hold to.
//!
//! A rule is a function from a file (`files.rs`), or from all files (here), to complaints. So the last two tests can show that
//! each rule complains.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

#[path = "dependencies/files.rs"]
mod files;
#[path = "dependencies/markdown.rs"]
mod markdown;
#[path = "dependencies/modules.rs"]
mod modules;

use files::{MOST_LINES, Source, complaints};
use markdown::{Paths, README_LINES, WIDTH, long_lines};
use modules::Crate;

/// The crates whose modules must not use each other in circles, by their root files: every crate of the workspace.
const CRATES: [&str; 14] = [
    "benches/src/lib.rs",
    "crates/hopper-attention-capi/src/lib.rs",
    "crates/hopper-attention-cli/src/main.rs",
    "crates/hopper-attention-sys/build/main.rs",
    "crates/hopper-attention-sys/src/lib.rs",
    "crates/hopper-attention-verify/src/lib.rs",
    "crates/hopper-attention/src/lib.rs",
    "examples/rust-cudarc/src/lib.rs",
    "examples/rust-cudarc/src/main.rs",
    "integrations/candle-flash-attn/src/lib.rs",
    "integrations/candle/src/lib.rs",
    "integrations/tests/src/lib.rs",
    "tests/src/lib.rs",
    "tests/tests/gpu/main.rs",
];

/// The modules of a crate form no circle: neither those at its top, nor those of any folder below.
fn circles(files: &[Source], complaints: &mut Vec<String>) {
    let texts: BTreeMap<&str, &str> = files.iter().map(|file| (file.path.as_str(), file.text.as_str())).collect();
    for root in CRATES {
        if texts.contains_key(root) {
            let found = Crate::read(root, &|path| texts.get(path).copied()).complaints();
            complaints.extend(found.into_iter().map(|complaint| format!("{root}: {complaint}")));
        }
    }
}

/// A new crate is checked as well.
fn every_crate(files: &[Source], complaints: &mut Vec<String>) {
    for file in files {
        let root = file.ends_with(&["/src/lib.rs", "/src/main.rs", "/build/main.rs"]);
        let cargo = file.path.rsplitn(3, '/').last().map(|folder| format!("{folder}/Cargo.toml"));
        let is_crate = root && files.iter().any(|other| Some(&other.path) == cargo.as_ref());
        if is_crate && !CRATES.contains(&file.path.as_str()) {
            complaints.push(format!("{}: a crate that CRATES does not list", file.path));
        }
    }
}

/// Markdown names paths that exist. Left out are the log and the records, which tell of what was.
fn named_paths(files: &[Source], complaints: &mut Vec<String>) {
    let paths = Paths::new(files.iter().map(|file| file.path.as_str()));
    for file in files {
        let history =
            ["benches/LOG.md", "benches/log/", "benches/record/"].iter().any(|past| file.path.starts_with(past));
        if !file.path.ends_with(".md") || history {
            continue;
        }
        for (line, path) in paths.missing(&file.path, &file.text) {
            complaints.push(format!("{}:{line}: names {path}, which does not exist", file.path));
        }
    }
}

/// What newcomers read is short: the README as a whole, and the lines of prose.
fn short_pages(files: &[Source], complaints: &mut Vec<String>) {
    for file in files {
        let lines = file.text.lines().count();
        if file.path == "README.md" && lines > README_LINES {
            complaints.push(format!("README.md: {lines} lines, at most {README_LINES}"));
        }
        let named = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "benches/README.md"].contains(&&*file.path);
        if named || (file.path.starts_with("docs/") && file.path.ends_with(".md")) {
            let long = long_lines(&file.text).into_iter();
            complaints.extend(long.map(|(line, length)| {
                format!("{}:{line}: {length} characters, at most {WIDTH} in a line of prose", file.path)
            }));
        }
    }
}

/// The README's example for the CPU is the example `cpu`, which is compiled without CUDA, too.
fn examples(files: &[Source], complaints: &mut Vec<String>) {
    const EXAMPLE: &str = "crates/hopper-attention/examples/cpu.rs";
    let text = |path| files.iter().find(|file| file.path == path).map(|file| &file.text);
    let (Some(readme), Some(example)) = (text("README.md"), text(EXAMPLE)) else { return };
    // The file's own comment opens it.
    let code = example.split_once("\n\n").map_or("", |(_, code)| code);
    if code.is_empty() || !readme.contains(&format!("```rust\n{code}```\n")) {
        complaints.push(format!("README.md: its example for the CPU is not {EXAMPLE}"));
    }
}

/// Every record is kept for something that the records' table says, and the table lists what is there.
fn kept_records(files: &[Source], complaints: &mut Vec<String>) {
    const TABLE: &str = "benches/record/README.md";
    let below = |file: &'_ Source| {
        let mut parts = file.path.strip_prefix("benches/record/")?.split('/');
        let (gpu, name, _) = (parts.next()?, parts.next()?, parts.next()?);
        Some(format!("{gpu}/{name}"))
    };
    let records: BTreeSet<String> = files.iter().filter_map(below).collect();
    let table = files.iter().find(|file| file.path == TABLE).map_or("", |file| &file.text);
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let listed: BTreeSet<String> = rows.map(str::to_owned).collect();
    complaints
        .extend(records.difference(&listed).map(|record| format!("{TABLE}: does not say what {record} is kept for")));
    complaints.extend(listed.difference(&records).map(|record| format!("{TABLE}: {record} is not there")));
}

type RuleOfAll = fn(&[Source], &mut Vec<String>);
const RULES_OF_ALL: [RuleOfAll; 6] = [circles, every_crate, named_paths, short_pages, examples, kept_records];

/// What the rules of all files say.
fn complaints_of_all(files: &[Source]) -> Vec<String> {
    let mut complaints = Vec::new();
    for rule in RULES_OF_ALL {
        rule(files, &mut complaints);
    }
    complaints
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the repository").to_path_buf()
}

/// The files of the repository, without what is built or fetched; one that is no text is read as empty. Read from the
/// folders rather than from git, so that the test also runs in an unpacked archive and sees files before they are committed.
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
            } else {
                let text = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
                let text = String::from_utf8(text).unwrap_or_default();
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
fn every_rule_is_kept() {
    let sources = sources();
    // A test that reads nothing would pass.
    for expected in CRATES.into_iter().chain(["Cargo.toml", "crates/hopper-attention-sys/include/kernels.hpp"]) {
        assert!(sources.iter().any(|file| file.path == expected), "{expected} was not read");
    }
    let found: Vec<String> = sources.iter().flat_map(complaints).chain(complaints_of_all(&sources)).collect();
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn every_rule_of_a_file_complains() {
    let word = ["un", "safe"].concat();
    let sys = ["hopper", "attention", "sys"].join("_");
    let path = |folder: &str| format!("let p = \"/{folder}/main\";");
    let long = "x\n".repeat(MOST_LINES + 1);
    let wrong = [
        Source::new("crates/hopper-attention-sys/kernels/common/mask.hpp", "#include \"sm90/fwd/traits.hpp\"\n"),
        Source::new("crates/hopper-attention-sys/kernels/sm80/fwd/load.hpp", "#include \"../sm90/load.hpp\"\n"),
        Source::new("crates/hopper-attention-sys/include/kernels.hpp", "#include <cute/tensor.hpp>\n"),
        Source::new("crates/hopper-attention-sys/include/kernels.hpp", "#include \"bridge.h\"\n"),
        Source::new("crates/hopper-attention-sys/src/params.rs", "struct A {\n    rows: Vec<i32>,\n}\n"),
        Source::new("crates/hopper-attention-sys/src/params.rs", "struct A {\n    name: &'static [u8],\n}\n"),
        Source::new("crates/hopper-attention-sys/src/params.rs", "struct A {\n    count: usize,\n}\n"),
        Source::new("crates/hopper-attention-sys/kernels/sm90/fwd/table.cc", "#include \"rust/cxx.h\"\n"),
        Source::new("benches/src/lib.rs", &format!("use {sys}::fwd_rows;\n")),
        Source::new("crates/hopper-attention/src/reference/forward.rs", "use crate::plan::Plan;\n"),
        Source::new("crates/hopper-attention/src/reference/oracle.rs", "use crate::run::BackwardArgs;\n"),
        Source::new("crates/hopper-attention-capi/Cargo.toml", &format!("{} = \"1\"\n", sys.replace('_', "-"))),
        Source::new("README.md", &long),
        Source::new("tests/src/lib.rs", &format!("let x = 1;\nlet y = {word} {{ f() }};\n")),
        Source::new("tests/src/lib.rs", &format!("/// Does it.\npub {word} fn f() {{}}\n")),
        Source::new("tests/src/lib.rs", &format!("impl A {{\n    {word} fn f() {{}}\n}}\n")),
        Source::new("tests/src/lib.rs", &format!("trait A {{\n    /// Does it.\n    {word} fn f();\n}}\n")),
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
        Source::new("tests/src/lib.rs", &format!("impl A for B {{\n    {word} fn f() {{}}\n}}\n")),
        Source::new("scripts/a.sh", "cat target/tmp/x $root/scripts/work/y\n"),
    ];
    for file in &right {
        assert_eq!(complaints(file), Vec::<String>::new());
    }
}

/// The root of the crate in the made-up repositories.
const ROOT: &str = "tests/src/lib.rs";

/// The files of a made-up repository, each with its path and its text.
type Files = &'static [(&'static str, &'static str)];

/// A line of prose, a character too long.
const LONG: &str = "An example is a line of words that goes on and on, until at last it is one single character longer than \
                    any may ever be.";

fn repository(files: Files) -> Vec<Source> {
    files.iter().map(|(path, text)| Source::new(path, text)).collect()
}

#[test]
fn every_rule_of_all_files_complains() {
    // Each with what its one complaint says.
    let wrong: &[(Files, &[&str])] = &[
        // Through a name that the root hands on.
        (
            &[
                (ROOT, "mod plan;\nmod run;\npub use plan::{Other, Plan};"),
                ("tests/src/plan.rs", "pub struct Plan;\n\nuse crate::run::go;"),
                ("tests/src/run.rs", "fn go(plan: crate::Plan) {}"),
            ],
            &[
                "tests/src/lib.rs: the modules use each other in a circle: plan -> run -> plan",
                "\n  tests/src/plan.rs:3: plan uses run: crate::run::go",
                "\n  tests/src/run.rs:1: run uses plan: crate::Plan",
            ],
        ),
        // In another crate.
        (
            &[
                ("crates/hopper-attention-cli/src/main.rs", "mod a;\nmod b;"),
                ("crates/hopper-attention-cli/src/a.rs", "use crate::b::f;"),
                ("crates/hopper-attention-cli/src/b.rs", "use crate::a::f;"),
            ],
            &["crates/hopper-attention-cli/src/main.rs: the modules use each other in a circle: a -> b -> a"],
        ),
        // Through all names of a module, and within a macro.
        (
            &[
                (ROOT, "mod abi;\nmod status;\npub use abi::*;"),
                ("tests/src/abi.rs", "pub struct Tensor { status: super::status::Status }"),
                ("tests/src/status.rs", "fn f() { assert!(true, \"{}\", crate::Tensor::name()); }"),
            ],
            &["abi -> status -> abi", "abi.rs:1: abi uses status: super::status::Status", "status.rs:1: "],
        ),
        // Of several circles the shortest.
        (
            &[
                (ROOT, "mod a;\nmod b;\nmod c;"),
                ("tests/src/a.rs", "use crate::b;\n"),
                ("tests/src/b.rs", "use crate::{\n    c,\n};\n"),
                ("tests/src/c/mod.rs", "mod d;"),
                ("tests/src/c/d.rs", "use crate::a::f;\nuse super::super::b::g;\n"),
            ],
            &[
                "a circle: b -> c -> b\n",
                "tests/src/b.rs:2: b uses c: crate::c",
                "c/d.rs:2: c uses b: super::super::b::g",
            ],
        ),
        // Within a folder, and by what another module brings in.
        (
            &[
                (ROOT, "mod plan;"),
                ("tests/src/plan.rs", "mod select;\nmod tuning;\nuse tuning::Tuning as Choice;"),
                ("tests/src/plan/select.rs", "fn f() -> super::Choice {}"),
                ("tests/src/plan/tuning.rs", "mod inner { use super::super::select; }"),
            ],
            &["the modules of plan use each other", "select -> tuning -> select", "tuning.rs:1: tuning uses select"],
        ),
        // Through all names of a module around it.
        (
            &[
                (ROOT, "mod a;\nmod b;"),
                ("tests/src/a.rs", "use super::*;\nfn f() {\n    b::g();\n}"),
                ("tests/src/b.rs", "use crate::a::f;"),
            ],
            &["a -> b -> a", "tests/src/a.rs:3: a uses b: super::b::g"],
        ),
        (&[(ROOT, "mod gone;")], &["tests/src/gone/mod.rs: a module's file that is not there"]),
        (&[("new/Cargo.toml", ""), ("new/src/main.rs", "")], &["new/src/main.rs: a crate that CRATES does not list"]),
        (&[("README.md", "\nSee `tests/gone.rs`."), ("tests/here.rs", "")], &["README.md:2: names tests/gone.rs, "]),
        (&[("docs/a.md", "```sh\nscripts/gone.sh --fast\n```\n")], &["docs/a.md:2: names scripts/gone.sh, "]),
        (&[("tests/README.md", "[the map](../MAP.md#here)")], &["tests/README.md:1: names ../MAP.md#here, "]),
        (&[("README.md", "<img src=\"a/b.svg\">")], &["README.md:1: names a/b.svg, "]),
        (
            &[("benches/record/h100/a/bench.json", "")],
            &["benches/record/README.md: does not say what h100/a is kept for"],
        ),
        (&[("benches/record/README.md", "| `h100/a` | log, 1 |")], &["benches/record/README.md: h100/a is not there"]),
        (&[("docs/a.md", LONG)], &["docs/a.md:1: 120 characters, at most 119 in a line of prose"]),
        (
            &[
                ("README.md", "```rust\nfn other() {}\n```\n"),
                ("crates/hopper-attention/examples/cpu.rs", "//! It.\n\nfn main() {}\n"),
            ],
            &["README.md: its example for the CPU is not crates/hopper-attention/examples/cpu.rs"],
        ),
        (&[("README.md", "`select/`"), ("tests/select.rs", "")], &["README.md:1: names select/, "]),
    ];
    for (files, says) in wrong {
        let found = complaints_of_all(&repository(files));
        assert_eq!(found.len(), 1, "{files:?}: {found:?}");
        for part in *says {
            assert!(found[0].contains(part), "{part:?} is not in {:?}", found[0]);
        }
    }
    let right: &[Files] = &[
        // One direction, the root's own items, and other crates' modules of the same names.
        &[
            (ROOT, "pub mod run;\npub mod plan;\npub const NAME: &str = \"\";\npub use plan::Plan;"),
            (
                "tests/src/plan.rs",
                "use run::Run;\nuse ::run::go;\nfn f() -> &'static str { crate::NAME }\npub struct Plan;",
            ),
            ("tests/src/run.rs", "use crate::Plan;\nuse std::collections::*;\nfn f(x: impl Fn() + use<'_>) {}"),
        ],
        // What only tests see, comments and strings.
        &[
            (ROOT, "mod plan;\nmod run;\n#[cfg(test)]\nmod made;"),
            (
                "tests/src/plan.rs",
                "//! [`crate::run`]\n// use crate::run;\nconst TEXT: &str = \"use crate::run;\";\n#[cfg(test)]\nuse crate::{run::a, \
                 made};\n#[cfg(test)]\n#[allow(unused)]\nmod tests {\n    use super::*;\n    use crate::run;\n}\n#[cfg(test)]\nmod \
                 more;\n",
            ),
            ("tests/src/run.rs", "use crate::plan;"),
        ],
        // A parent and its children.
        &[
            (ROOT, "mod run;"),
            ("tests/src/run.rs", "mod cuda;\npub use cuda::go;\npub struct Run;"),
            ("tests/src/run/cuda.rs", "use super::Run;\nuse crate::run::Run as Again;\npub(in crate::run) fn go() {}"),
        ],
        // All names of a module around it, one of which is also a variable's.
        &[
            (ROOT, "mod a;\nmod b;"),
            ("tests/src/a.rs", "mod inner { use super::*; fn f(b: Thing) { b.g() } }\nstruct Thing;"),
            ("tests/src/b.rs", "use crate::a;"),
        ],
        // What may be long: code, tables and HTML, and prose that nobody reads first.
        &[
            (
                "docs/a.md",
                concat!(
                    "| a table ",
                    "| 123456789012345678901234567890 | 123456789012345678901234567890 | 123456789012345678901234567890 | 12345678901 |\n"
                ),
            ),
            ("examples/a.md", LONG),
            ("README.md", "```rust\nfn main() {}\n```\n"),
            ("crates/hopper-attention/examples/cpu.rs", "//! It.\n\nfn main() {}\n"),
        ],
        &[
            (
                "README.md",
                "[tests](tests/), [one](tests/one.rs#L1), [far](https://a.b/c.rs), [here](#here)\n`tests/one.rs`, `one.rs:`, \
                 `target/a/b.rs`, `causal/d64`, `.toolchain/bin/`,\n`PREFIX/lib/x.cmake`, `a / b`, `--mask x/y`, `std::fs`, `0.5`\n",
            ),
            ("tests/one.rs", ""),
            ("benches/LOG.md", "`tests/gone.rs`"),
            ("benches/log/one.md", "`tests/gone.rs`"),
            ("benches/record/README.md", "| record | why |\n| --- | --- |\n| `h100/a` | log, 1 |\n"),
            ("benches/record/h100/a/README.md", "`tests/gone.rs`"),
        ],
    ];
    for files in right {
        assert_eq!(complaints_of_all(&repository(files)), Vec::<String>::new(), "{files:?}");
    }
}
