//! Drives CMake, which compiles the kernels into one archive.
//!
//! Kernels are compiled one way whatever Cargo's profile, and take minutes. So their build folder is not Cargo's `OUT_DIR`, of
//! which every profile has its own, but one that all builds with the same options share (`HATTN_KERNELS_DIR`).

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result};

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
    let options = options(vars, toolkit);
    let folder = vars.kernels_dir.join(folder_name(vars, toolkit, &options));
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    // Two Cargos may build two profiles at a time. The lock is given back when the process ends, however it does.
    let lock = folder.join("lock");
    let lock = File::create(&lock).with_context(|| format!("cannot write {}", lock.display()))?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive)
        .with_context(|| format!("cannot lock {}", folder.display()))?;

    let mut config = cmake::Config::new(&vars.crate_dir);
    config.out_dir(&folder).profile("Release").build_target("hattn_kernels");
    if let Some(ninja) = &toolkit.ninja {
        config.generator("Ninja").define("CMAKE_MAKE_PROGRAM", ninja);
    }
    if let Some(jobs) = vars.jobs {
        config.build_arg(format!("-j{jobs}"));
    }
    // The header is of this Cargo profile's, and the same in all: CMake copies it where it has changed.
    config.define("CMAKE_POSITION_INDEPENDENT_CODE", "ON").define("HATTN_PARAMS_HEADER", params_header);
    for (name, value) in &options {
        config.define(name, value);
    }
    let build_dir = config.build().join("build");
    keep_while_there(&folder)?;
    Ok(build_dir)
}

/// What decides what is compiled, as CMake is told it.
fn options(vars: &Vars, toolkit: &Toolkit) -> Vec<(&'static str, String)> {
    vec![
        ("CMAKE_CUDA_COMPILER", toolkit.nvcc().display().to_string()),
        ("CUDAToolkit_ROOT", toolkit.home.display().to_string()),
        ("HATTN_CUTLASS_INCLUDE", toolkit.cutlass.display().to_string()),
        ("HATTN_ARCHS", vars.selection.archs.join(";")),
        ("HATTN_DTYPES", vars.selection.dtypes.join(";")),
        ("HATTN_SM80_CODES", vars.sm80_codes.clone()),
        ("HATTN_HEAD_DIMS", vars.selection.head_dims.join(";")),
        ("HATTN_NVCC_FLAGS", vars.nvcc_flags.clone().unwrap_or_default()),
    ]
}

/// A name for the folder of these options, such as `sm90-bf16-128-0123456789abcdef`: what is selected, to read, and a hash of all
/// that decides. The same options have the same folder in every build, and two checkouts that share a folder do not meet.
fn folder_name(vars: &Vars, toolkit: &Toolkit, options: &[(&'static str, String)]) -> String {
    let mut decides = format!("{}\n{:?}\n", vars.crate_dir.display(), toolkit.version);
    for (name, value) in vars.compilers.iter().chain(options) {
        decides += &format!("{name}={value}\n");
    }
    // FNV-1a: the hashes of std may change from one Rust to the next.
    let hash = decides
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    let selected = [&vars.selection.archs, &vars.selection.dtypes, &vars.selection.head_dims];
    format!("{}-{hash:016x}", selected.map(|names| names.join(".").to_lowercase()).join("-"))
}

/// Has Cargo run the build script again when the folder is gone. It would also do so when a file is newer than the script's last
/// run, which is no reason here: another profile's build may have compiled what this one then found. So the file that Cargo looks
/// at is as old as can be.
fn keep_while_there(folder: &Path) -> Result<()> {
    let stamp = folder.join("stamp");
    File::create(&stamp)
        .and_then(|file| file.set_modified(SystemTime::UNIX_EPOCH))
        .with_context(|| format!("cannot write {}", stamp.display()))?;
    println!("cargo::rerun-if-changed={}", stamp.display());
    Ok(())
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
