//! How many instructions the plain kernels of sm90 have: those without a softcap, ALiBi, a bias, dropout and lists of blocks.
//!
//! What is added for other problems must cost these nothing. So a change of any of them is a line of `sizes.txt` that changes, where
//! a reader sees it. `HATTN_UPDATE=1` writes the file again.

use std::collections::BTreeMap;
use std::path::Path;

use hopper_attention::{Arch, KernelInfo, MaskClass};

/// The numbers, and the compiler that they are of.
const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/disassembly/sizes.txt");

/// Whether the file has the kernels of a row.
pub fn is_plain(row: &KernelInfo) -> bool {
    row.arch() == Arch::Sm90 && !row.needs_modifiers() && row.mask() != MaskClass::Blocks
}

/// Holds the kernels that a build has against the file. Of another compiler nothing is known.
pub fn check(kernels: Vec<(String, usize)>) {
    let mut names: Vec<&str> = kernels.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "two kernels with one name: {names:?}");
    let compiler = compiler();
    let held = std::fs::read_to_string(FILE).unwrap_or_default();
    let (of, lines) = held.split_once('\n').unwrap_or_default();
    let mut known: BTreeMap<&str, &str> = lines.lines().filter_map(|line| line.rsplit_once(": ")).collect();
    if std::env::var_os("HATTN_UPDATE").is_some() {
        let lines: String = kernels.iter().map(|(name, size)| format!("{name}: {size}\n")).collect();
        std::fs::write(FILE, format!("{compiler}\n{lines}")).expect("the file can be written");
        return;
    }
    if of != compiler {
        println!("skipped: sizes of kernels are those of {of}, and this build has {compiler}");
        return;
    }
    // A build may lack some rows.
    let changed: Vec<String> = kernels
        .iter()
        .filter_map(|(name, size)| {
            let before = known.remove(name.as_str()).unwrap_or("none");
            (before != size.to_string()).then(|| format!("{name}: {size} instructions, before {before}"))
        })
        .collect();
    assert!(changed.is_empty(), "plain kernels changed; if that is meant, HATTN_UPDATE=1:\n{}", changed.join("\n"));
}

/// The version of nvcc, as CMake has noted it in the folder of the build.
fn compiler() -> String {
    let folders = Path::new(super::BUILD_DIR.expect("kernels")).join("CMakeFiles");
    let folders = std::fs::read_dir(&folders).unwrap_or_else(|e| panic!("{}: {e}", folders.display()));
    let notes =
        folders.filter_map(|folder| std::fs::read_to_string(folder.ok()?.path().join("CMakeCUDACompiler.cmake")).ok());
    let version =
        notes.filter_map(|text| Some(text.split_once("CUDA_COMPILER_VERSION \"")?.1.split_once('"')?.0.to_string()));
    format!("nvcc {}", version.last().expect("CMake notes the compiler"))
}

/// The file's folder is that of this module.
#[test]
fn the_file_has_a_compiler_and_kernels() {
    let held = std::fs::read_to_string(Path::new(FILE)).expect("sizes.txt");
    let (of, lines) = held.split_once('\n').expect("two lines");
    assert!(of.starts_with("nvcc 1"), "{of}");
    assert!(lines.lines().count() > 100, "{} lines", lines.lines().count());
    assert!(lines.lines().all(|line| line.rsplit_once(": ").is_some_and(|(_, size)| size.parse::<u32>().is_ok())));
}
