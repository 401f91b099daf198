//! What the types forbid: each file of `ui/` must not compile, with the message beside it.

use std::io::Write;
use std::process::{Command, Stdio};

/// The messages are this compiler's; another one words them otherwise.
const RUSTC: &str = "rustc 1.95";

#[test]
fn forbidden_uses_do_not_compile() {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let version = Command::new(rustc).arg("--version").output().expect("rustc runs");
    let version = String::from_utf8_lossy(&version.stdout);
    if !version.starts_with(RUSTC) {
        println!("skipped: the expected messages are those of {RUSTC}, this is {}", version.trim());
        return;
    }
    // Its projects are checked in a target folder of their own, and nothing of them is linked: no kernels are needed.
    // SAFETY: the other test here reads the environment only where it starts processes, under the lock of the standard library
    // that this call takes too.
    unsafe { std::env::set_var("HATTN_NO_KERNELS", "1") };
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}

/// Runs the test above with another compiler, and counts the result as scripts/test.sh does: passed, failed, skipped.
#[test]
fn another_compiler_is_a_skip() {
    let skips = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "forbidden_uses_do_not_compile", "--show-output"])
        .env("RUSTC", "echo") // says `--version`
        .output()
        .expect("it starts");
    let mut count = Command::new("awk")
        .args(["-f", concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/count_tests.awk")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("awk starts");
    count.stdin.take().expect("a pipe").write_all(&skips.stdout).expect("awk reads");
    let counted = count.wait_with_output().expect("it counts");
    let said = String::from_utf8_lossy(&skips.stdout);
    assert_eq!(String::from_utf8_lossy(&counted.stdout).trim(), "0 0 1", "{said}");
}
