//! The committed C header is the one that cbindgen makes of the sources, and the committed list of symbols is what it
//! declares. With HATTN_UPDATE=1 both are written anew.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use hopper_attention_capi::*;

/// What macros declare, as cbindgen can read it: the structs, and the functions of the passes. What is missing here is missing
/// from the header.
const DECLARED: [&str; 11] = [
    hattn_forward_problem::TEXT,
    hattn_backward_problem::TEXT,
    hattn_tensor::TEXT,
    hattn_forward_args::TEXT,
    hattn_backward_args::TEXT,
    hattn_quantize_problem::TEXT,
    hattn_quantize_tensor::TEXT,
    hattn_quantize_args::TEXT,
    hattn_forward_plan::TEXT,
    hattn_backward_plan::TEXT,
    hattn_quantize_plan::TEXT,
];

fn committed(path: &str, made: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    if std::env::var_os("HATTN_UPDATE").is_some() {
        fs::write(&path, made).expect("the file can be written");
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    let line = found.lines().zip(made.lines()).position(|(found, made)| found != made);
    assert!(
        found == made,
        "{} is not what the sources say, from line {:?} on; HATTN_UPDATE=1 cargo test -p hopper-attention-capi --test \
         header writes it anew",
        path.display(),
        line.map(|line| line + 1)
    );
}

/// An initialiser for each struct of `abi/layout.def`: its header filled in, and everything else 0.
fn initialisers() -> String {
    let list =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("abi/layout.def")).expect("the list of fields");
    let mut structs: Vec<(&str, String)> = Vec::new();
    for line in list.lines() {
        let columns = |kind: &str| -> Option<Vec<&str>> {
            Some(line.strip_prefix(kind)?.trim_end_matches(')').split(", ").collect())
        };
        if let Some(columns) = columns("STRUCT(") {
            structs.push((columns[0], format!("sizeof({}), HATTN_ABI_VERSION", columns[0])));
        } else if let Some(columns) = columns("FIELD(") {
            let (_, values) = structs.last_mut().expect("a struct before its fields");
            let size: usize = columns[3].parse().expect("a size");
            values.push_str(match (columns[1], size) {
                ("struct_size" | "abi_version", _) => "",
                (_, 32) => ", {0, 0, 0, 0}",
                _ => ", 0",
            });
        }
    }
    let mut text = String::from(
        "\nstruct CUstream_st; /* a CUstream, which is a cudaStream_t, points to one */\n\n\
         /* Structs with their header filled in and everything else 0. */",
    );
    for (name, values) in structs {
        let macro_name = name.to_uppercase() + "_INIT";
        text += &format!("\n#define {macro_name} \\\n  {{ {values} }}");
    }
    text
}

fn header() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("cbindgen.toml is right");
    config.after_includes = Some(initialisers());
    let declared = Path::new(env!("CARGO_TARGET_TMPDIR")).join("declared.rs");
    fs::write(&declared, DECLARED.join("\n")).expect("the file can be written");
    let bindings = cbindgen::Builder::new()
        .with_config(config)
        .with_src(root.join("src/abi.rs"))
        .with_src(root.join("src/status.rs"))
        .with_src(root.join("src/devices.rs"))
        .with_src(root.join("src/tuning.rs"))
        .with_src(root.join("src/forward.rs"))
        .with_src(root.join("src/backward.rs"))
        .with_src(root.join("src/quantize.rs"))
        .with_src(declared)
        .generate()
        .expect("cbindgen understands the sources");
    let mut text = Vec::new();
    bindings.write(&mut text);
    String::from_utf8(text).expect("a header is text")
}

#[test]
fn the_header_is_made_of_the_sources() {
    committed("include/hopper_attention.h", &header());
}

#[test]
fn the_list_of_symbols_is_what_the_header_declares() {
    let header = header();
    let mut symbols = BTreeSet::new();
    for (at, _) in header.match_indices("hattn_") {
        let name: String = header[at..].chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        // A declaration, rather than a type, or a call in the text at the top.
        let declared = header[..at].lines().next_back().is_some_and(|line| !line.starts_with([' ', '/']));
        if declared && header[at + name.len()..].starts_with('(') {
            symbols.insert(name);
        }
    }
    assert!(symbols.len() > 9, "{symbols:?}");
    let lines: Vec<_> = symbols.into_iter().collect();
    committed("abi/symbols.txt", &(lines.join("\n") + "\n"));
}
