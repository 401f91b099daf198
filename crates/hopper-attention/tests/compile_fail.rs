//! What the types forbid: each file of `ui/` must not compile, with the message beside it.

use std::process::Command;

/// The messages are this compiler's; another one words them otherwise.
const RUSTC: &str = "rustc 1.95";

#[test]
fn forbidden_uses_do_not_compile() {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let version = Command::new(rustc).arg("--version").output().expect("rustc runs");
    let version = String::from_utf8_lossy(&version.stdout);
    if !version.starts_with(RUSTC) {
        println!("SKIPPED: the expected messages are those of {RUSTC}, this is {}", version.trim());
        return;
    }
    // Its projects are checked in a target folder of their own, and nothing of them is linked: no kernels are needed.
    // SAFETY: the only test here, and it has started no thread that reads the environment.
    unsafe { std::env::set_var("HATTN_NO_KERNELS", "1") };
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
