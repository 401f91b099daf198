//! The Python side of the sweep: its own tests, where there is a Python to run them.

use std::path::Path;
use std::process::Command;

#[test]
fn the_scripts_own_tests_pass() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers");
    if Command::new("python3").arg("--version").output().is_err() {
        return println!("skipped: no python3");
    }
    let out =
        Command::new("python3").args(["-m", "unittest", "discover"]).arg(folder).output().expect("python3 starts");
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{text}");
    assert!(!text.contains("Ran 0 tests"), "{text}");
}
