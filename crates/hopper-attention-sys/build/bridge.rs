//! Compiles the bridge between Rust and the kernels with the host compiler.

use crate::toolkit::Toolkit;
use crate::vars::Vars;

/// Generates and compiles both halves of the cxx bridge and `cpp/bridge.cc`.
pub fn build(vars: &Vars, toolkit: &Toolkit) {
    cxx_build::bridge("src/lib.rs")
        .file("cpp/bridge.cc")
        .include(vars.crate_dir.join("include"))
        // As system headers: warnings in CUDA's are not ours to mend.
        .flag("-isystem")
        .flag(toolkit.home.join("include"))
        .std("c++17")
        .flag_if_supported("-Wall")
        .flag_if_supported("-Wextra")
        .compile("hattn_bridge");
}
