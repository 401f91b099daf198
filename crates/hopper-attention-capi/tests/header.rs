//! Holds what is generated from the sources against the committed files. With HATTN_UPDATE=1 the files are written instead.
//!
//! - `include/hopper_attention.h`: cbindgen makes it of `src/`.
//! - `include/hopper_attention_lists.h`: likewise, of the sources of lists of blocks.
//! - `abi/symbols.txt`: the functions that both headers declare.
//! - `abi/layout.def`: the layout of each struct, for the C compiler to check (`tests/c/abi_layout.c`).

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use hopper_attention_capi::*;

/// The declarations that a macro makes, as cbindgen can read them. What is missing here is missing from the header.
const DECLARED: [&str; 3] = [hattn_forward_plan::TEXT, hattn_backward_plan::TEXT, hattn_quantize_plan::TEXT];

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

/// The name, the offset and the size of each field. Fields lie side by side, so a field ends where the next one begins.
fn fields(of: &StructLayout) -> impl Iterator<Item = (&'static str, usize, usize)> {
    let ends = of.fields.iter().skip(1).map(|&(_, offset)| offset).chain([of.size]);
    of.fields.iter().zip(ends).map(|(&(name, offset), end)| (name, offset, end - offset))
}

/// The macro that initialises a struct, such as `HATTN_TENSOR_INIT`.
fn initialiser(of: &StructLayout) -> String {
    of.name.to_uppercase() + "_INIT"
}

/// `abi/layout.def`.
fn layout() -> String {
    let mut text = String::from(
        "// The layout of ABI version 1, in bytes. Made of src/abi.rs by tests/header.rs; do not edit.\n\
         // A line that changes or goes away is a break of the ABI. The last fields and the size of a struct may grow.\n\
         // STRUCT(struct, initialiser, size)\n\
         // FIELD(struct, field, offset, size)\n",
    );
    for of in LAYOUTS {
        writeln!(text, "\nSTRUCT({}, {}, {})", of.name, initialiser(of), of.size).expect("a String takes any text");
        for (name, offset, size) in fields(of) {
            writeln!(text, "FIELD({}, {name}, {offset}, {size})", of.name).expect("a String takes any text");
        }
    }
    text
}

/// Sizes whose 0 is legal and leaves nothing to compute. Their initial value is one that every call refuses.
const UNSET: [&str; 3] = ["batch", "seqlen_q", "seqlen_kv"];

/// Whether a struct is one of `hopper_attention_lists.h`.
fn is_of_lists(of: &StructLayout) -> bool {
    include_str!("../src/abi/block_lists.rs").contains(&format!("pub struct {} {{", of.name))
}

/// The header's version and its initialisers.
fn main_initialisers() -> String {
    let text = format!(
        "\n/* The version of this header. The library's own is hattn_version(). */\n\
         #define HATTN_VERSION_MAJOR {}\n#define HATTN_VERSION_MINOR {}\n\n\
         struct CUstream_st; /* what a CUstream or a cudaStream_t points to */\n\n\
         /* Initial values of structs: struct_size and abi_version are filled in. batch, seqlen_q and seqlen_kv are HATTN_UNSET,\n   \
         which every call refuses. Everything else is 0. */",
        env!("CARGO_PKG_VERSION_MAJOR"),
        env!("CARGO_PKG_VERSION_MINOR"),
    );
    text + &initialisers(false)
}

/// The initialisers of one of the headers.
fn initialisers(of_lists: bool) -> String {
    let mut text = String::new();
    for of in LAYOUTS.iter().filter(|of| is_of_lists(of) == of_lists) {
        let (macro_name, name) = (initialiser(of), of.name);
        writeln!(text, "\n#define {macro_name} \\").expect("a String takes any text");
        let mut line = format!("  {{ sizeof({name}), HATTN_ABI_VERSION");
        for (name, _, size) in fields(of).skip(2) {
            let value = match size {
                _ if UNSET.contains(&name) => "HATTN_UNSET",
                32 => "{0, 0, 0, 0}", // an array of four int64_t
                _ => "0",
            };
            // Room for the end of a line: a comma, a space and a backslash, or a closing brace.
            if line.len() + 2 + value.len() + 3 > 120 {
                writeln!(text, "{line}, \\").expect("a String takes any text");
                line = format!("    {value}");
            } else {
                line += ", ";
                line += value;
            }
        }
        text += &line;
        text += " }";
    }
    text
}

/// The name and the value of the constant that a block defines.
fn constant(block: &str) -> Option<(&str, &str)> {
    let (name, value) = block.lines().next_back()?.strip_prefix("#define ")?.split_once(' ')?;
    Some((name, value))
}

/// The Rust type of a constant. `None` for a macro that is no constant of the sources.
fn type_of(name: &str) -> Option<&'static str> {
    let sources = [include_str!("../src/abi.rs"), include_str!("../src/status.rs")];
    let declared = sources.iter().find_map(|source| source.split_once(&format!("pub const {name}: ")))?;
    declared.1.split_once(' ').map(|(of, _)| of)
}

/// Moves each constant behind its type, without a blank line, and sets negative numbers in parentheses. cbindgen writes all
/// types first.
fn arranged(text: &str) -> String {
    let mut blocks: Vec<String> = Vec::new();
    for block in text.split("\n\n") {
        let Some((name, value)) = constant(block) else {
            blocks.push(block.into());
            continue;
        };
        let block = if value.starts_with('-') { block.replace(value, &format!("({value})")) } else { block.into() };
        let of = type_of(name).map(|of| format!("typedef int32_t {of};"));
        match of.and_then(|of| blocks.iter_mut().find(|block| block.lines().any(|line| line == of))) {
            Some(typed) => *typed += &format!("\n{block}"),
            None => blocks.push(block),
        }
    }
    blocks.join("\n\n")
}

fn config(root: &Path) -> cbindgen::Config {
    cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("cbindgen.toml is right")
}

/// What cbindgen makes of sources.
fn written(builder: cbindgen::Builder) -> String {
    let bindings = builder.generate().expect("cbindgen understands the sources");
    let mut text = Vec::new();
    bindings.write(&mut text);
    let text = String::from_utf8(text).expect("a header is text");
    arranged(&promised(&text))
}

fn header() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut config = config(root);
    config.after_includes = Some(main_initialisers());
    let declared = Path::new(env!("CARGO_TARGET_TMPDIR")).join("declared.rs");
    fs::write(&declared, DECLARED.join("\n")).expect("the file can be written");
    let builder = cbindgen::Builder::new()
        .with_config(config)
        .with_src(root.join("src/abi.rs"))
        .with_src(root.join("src/status.rs"))
        .with_src(root.join("src/devices.rs"))
        .with_src(root.join("src/tensor.rs"))
        .with_src(root.join("src/tuning.rs"))
        .with_src(root.join("src/forward.rs"))
        .with_src(root.join("src/backward.rs"))
        .with_src(root.join("src/quantize.rs"))
        .with_src(declared);
    written(builder)
}

/// The text at the top of `hopper_attention_lists.h`.
const OF_LISTS: &str = "
/* Hopper Attention: lists of blocks, which the library makes on the host. They are the operands of a problem with a
   block_mask. hopper_attention.h says what is in them (hattn_block_mask). Generated by cbindgen from
   crates/hopper-attention-capi; do not edit.

     hattn_documents documents = HATTN_DOCUMENTS_INIT;              what the lists are made of: sizes, and arrays of the caller
     hattn_block_lists_from_documents(&documents, &lists);          makes them
     hattn_block_arrays arrays = HATTN_BLOCK_ARRAYS_INIT;           where their numbers are, and what a problem says of them
     hattn_block_lists_arrays(lists, &arrays);
     hattn_block_lists_destroy(lists);

   The same for slices, prefixes, spans and dense masks. hattn_dropout_mask makes the mask of dropout. What
   hopper_attention.h says of functions, threads and versions holds here, too:
   - Lists are live from their creation until they are destroyed. Many threads may use the same lists at once.
   - Arrays that the caller gives are read during the call only.
   - An array is row-major, without gaps. Its address is a multiple of the size of its elements.
   - The functions compute in the calling thread. They use no GPU. */";

fn lists_header() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut config = config(root);
    config.header = Some(OF_LISTS.into());
    config.include_guard = Some("HOPPER_ATTENTION_LISTS_H".into());
    config.sys_includes.clear();
    config.includes = vec!["hopper_attention.h".into()];
    let text = "\n/* Initial values of structs, as in hopper_attention.h. */";
    config.after_includes = Some(text.to_owned() + &initialisers(true));
    let builder = cbindgen::Builder::new()
        .with_config(config)
        .with_src(root.join("src/abi/block_lists.rs"))
        .with_src(root.join("src/lists.rs"))
        .with_src(root.join("src/dropout.rs"));
    written(builder)
}

/// Says the conditions of a call in other words than Rust's, which C's readers do not know. A single condition stands beside
/// these words.
fn promised(text: &str) -> String {
    let mut parts = text.split("//\n// # Safety\n");
    let mut made = String::from(parts.next().unwrap_or_default());
    for part in parts {
        let (first, rest) = part.split_once('\n').expect("a declaration");
        let condition = first.trim_start_matches("// ");
        let is_single = !condition.starts_with('-') && !rest.starts_with("//");
        let is_behind_list = made.lines().next_back().is_some_and(|line| line.starts_with("// -"));
        made += if is_single && !is_behind_list { "" } else { "//\n" };
        made += "// The caller promises:";
        made += &if is_single { format!(" {condition}\n{rest}") } else { format!("\n{part}") };
    }
    made
}

#[test]
fn the_headers_are_made_of_the_sources() {
    committed("include/hopper_attention.h", &header());
    committed("include/hopper_attention_lists.h", &lists_header());
}

/// Blocks of the main one: what stands between blank lines.
fn blocks() -> Vec<&'static str> {
    include_str!("../include/hopper_attention.h").split("\n\n").collect()
}

#[test]
fn constants_stand_beside_their_types() {
    let mut tested = 0;
    for block in blocks() {
        let mut of = "";
        for line in block.lines() {
            if let Some(name) = line.strip_prefix("typedef int32_t ") {
                of = name.trim_end_matches(';');
            } else if let Some((name, value)) = constant(line) {
                let rust = type_of(name).unwrap_or("none");
                let is_integer = ["u32", "i64", "none"].contains(&rust);
                assert!(is_integer || rust == of, "{name}, a {rust}, stands behind {of}");
                assert!(!value.starts_with('-'), "{name} {value}: a negative number needs parentheses");
                tested += usize::from(!is_integer);
            }
        }
    }
    assert!(tested > 30, "{tested} constants");
}

#[test]
fn comments_are_written_for_c() {
    let headers = [include_str!("../include/hopper_attention.h"), include_str!("../include/hopper_attention_lists.h")];
    for line in headers.iter().flat_map(|header| header.lines()).filter(|line| line.trim_start().starts_with("//")) {
        for rust in ["// #", "[`", "`]", "::", "`&"] {
            assert!(!line.contains(rust), "{rust} in {line}");
        }
    }
    for rule in ["Threads:", "struct_size", "HATTN_ERROR_ABI", "hattn_last_error", "Many threads"] {
        assert!(blocks()[..30].iter().any(|block| block.contains(rule)), "the header says nothing of {rule}");
    }
}

#[test]
fn the_layout_for_c_is_made_of_the_layout_in_rust() {
    committed("abi/layout.def", &layout());
}

#[test]
fn the_list_of_symbols_is_what_the_headers_declare() {
    let header = header() + &lists_header();
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
