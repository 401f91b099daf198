//! Makes assertions about the layout of `src/abi.rs` from `abi/layout.def`, the list that C is held to as well.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=abi/layout.def");
    let list = fs::read_to_string("abi/layout.def").expect("abi/layout.def is in the package");
    let mut checks = String::from("const _: () = {\n");
    for line in list.lines().filter(|line| !line.is_empty() && !line.starts_with("//")) {
        let (kind, columns) = line.trim_end().split_once('(').expect("a line is KIND(columns)");
        let columns: Vec<&str> = columns.trim_end_matches(')').split(',').map(str::trim).collect();
        // Writing to a String cannot fail.
        let _ = match (kind, columns.as_slice()) {
            ("STRUCT", [name, size]) => {
                writeln!(checks, "assert!(size_of::<{name}>() == {size} && align_of::<{name}>() == 8);")
            }
            ("FIELD", [name, field, offset, _]) => {
                writeln!(checks, "assert!(std::mem::offset_of!({name}, {field}) == {offset});")
            }
            _ => panic!(
                "abi/layout.def: expected STRUCT(struct, size) or FIELD(struct, field, offset, size), got {line}"
            ),
        };
    }
    checks += "};\n";
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("Cargo sets OUT_DIR")).join("layout.rs");
    fs::write(out, checks).expect("OUT_DIR can be written");
}
