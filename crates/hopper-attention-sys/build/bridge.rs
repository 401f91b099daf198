//! Makes the C++ side of the cxx bridges, and compiles it with the host compiler.

use std::path::PathBuf;

use crate::toolkit::Toolkit;
use crate::vars::Vars;

/// Where the bridges are: the parameters, which the kernels read too, and the functions.
const SOURCES: [&str; 2] = ["src/params.rs", "src/lib.rs"];

/// Generates the C++ of the bridges, which takes no C++ compiler. A file that would not change is not written.
pub fn generate() {
    // What this returns would compile it.
    let _ = cxx_build::bridges(SOURCES);
}

/// Generates the C++ of the bridges and compiles it with `cpp/bridge.cc`. Returns the header of `src/params.rs`.
pub fn build(vars: &Vars, toolkit: &Toolkit) -> PathBuf {
    cxx_build::bridges(SOURCES)
        .file("cpp/bridge.cc")
        .include(vars.crate_dir.join("include"))
        // As system headers: warnings in CUDA's are not ours to mend.
        .flag("-isystem")
        .flag(toolkit.home.join("include"))
        .std("c++17")
        .flag_if_supported("-Wall")
        .flag_if_supported("-Wextra")
        .compile("hattn_bridge");
    vars.out_dir.join("cxxbridge/include/hopper-attention-sys/src/params.rs.h")
}
