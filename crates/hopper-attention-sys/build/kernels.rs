//! Drives CMake, which compiles the kernels into one archive.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::toolkit::Toolkit;
use crate::vars::{Cudart, Vars};

/// Compiles the kernels and returns the folder with `libhattn_kernels.a` and the lists that the audit reads.
/// `params_header` is the header that cxx makes of `src/params.rs`.
pub fn build(vars: &Vars, toolkit: &Toolkit, params_header: &Path) -> Result<PathBuf> {
    if let Some(cmake) = &toolkit.cmake {
        // The cmake crate takes the program from its environment only; a variable that is set already wins.
        if std::env::var_os("CMAKE").is_none() {
            // SAFETY: a build script that has started no thread: nobody reads the environment meanwhile.
            unsafe { std::env::set_var("CMAKE", cmake) };
        }
    }
    let mut config = cmake::Config::new(&vars.crate_dir);
    // Kernels are compiled one way whatever Cargo's profile: unoptimised ones would not even fit the registers.
    config.profile("Release").build_target("hattn_kernels");
    if let Some(ninja) = &toolkit.ninja {
        config.generator("Ninja").define("CMAKE_MAKE_PROGRAM", ninja);
    }
    if let Some(jobs) = vars.jobs {
        config.build_arg(format!("-j{jobs}"));
    }
    config
        .define("CMAKE_CUDA_COMPILER", toolkit.nvcc())
        .define("CUDAToolkit_ROOT", &toolkit.home)
        .define("CMAKE_POSITION_INDEPENDENT_CODE", "ON")
        .define("HATTN_CUTLASS_INCLUDE", &toolkit.cutlass)
        .define("HATTN_PARAMS_HEADER", params_header)
        .define("HATTN_ARCHS", vars.selection.archs.join(";"))
        .define("HATTN_DTYPES", vars.selection.dtypes.join(";"))
        .define("HATTN_SM80_CODES", &vars.sm80_codes)
        .define("HATTN_HEAD_DIMS", vars.selection.head_dims.join(";"))
        .define("HATTN_NVCC_FLAGS", vars.nvcc_flags.as_deref().unwrap_or(""))
        .define("CMAKE_CUDA_RUNTIME_LIBRARY", if vars.cudart == Cudart::Static { "Static" } else { "Shared" });
    Ok(config.build().join("build"))
}

/// Tells rustc to link the archive and the CUDA runtime; to be printed after the bridge, which needs both.
pub fn link(vars: &Vars, toolkit: &Toolkit, build_dir: &Path) {
    println!("cargo::rustc-link-search=native={}", build_dir.display());
    println!("cargo::rustc-link-search=native={}", toolkit.lib.display());
    // Not bundled: the archive would be copied into the rlib, and again for every profile.
    println!("cargo::rustc-link-lib=static:-bundle=hattn_kernels");
    match vars.cudart {
        Cudart::Static => {
            println!("cargo::rustc-link-lib=static:-bundle=cudart_static");
            for lib in ["dl", "pthread", "rt"] {
                println!("cargo::rustc-link-lib=dylib={lib}");
            }
        }
        Cudart::Shared => println!("cargo::rustc-link-lib=dylib=cudart"),
    }
    println!("cargo::rustc-link-lib=dylib=stdc++");
}
