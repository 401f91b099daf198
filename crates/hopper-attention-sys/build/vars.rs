//! Every environment variable that steers the build, read once.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// The environment as the build sees it.
pub struct Vars {
    /// `HATTN_CUDA_HOME`: the toolkit to use, and no other.
    pub cuda_home: Option<PathBuf>,
    /// `CUDA_HOME`, `CUDA_PATH`: toolkits to try.
    pub cuda_candidates: Vec<PathBuf>,
    /// `CUDACXX`: the nvcc to try.
    pub cudacxx: Option<PathBuf>,
    /// `HATTN_CUTLASS_DIR`: CUTLASS headers to use instead of the pinned ones.
    pub cutlass: Option<PathBuf>,
    /// `HATTN_TOOLCHAIN_DIR`: where `toolchain/bootstrap.sh` unpacks the pinned wheels. By default `.toolchain` of the
    /// repository; for a packaged crate, whose folder is not to be written, `hopper-attention/toolchain` in the user's cache
    /// folder (`XDG_CACHE_HOME`, `~/.cache`).
    pub toolchain: PathBuf,
    /// `HATTN_KERNELS_DIR`: where kernels are compiled, an absolute path; by default `kernels` in Cargo's target folder. Each
    /// set of options has a folder of its own in it, whatever Cargo's profile.
    pub kernels_dir: PathBuf,
    /// `HATTN_JOBS`: kernels compiled at a time; Cargo's number of jobs by default.
    pub jobs: Option<u32>,
    /// `HATTN_NVCC_FLAGS`: appended to nvcc's flags (`-lineinfo`, say).
    pub nvcc_flags: Option<String>,
    /// `HATTN_SM80_CODES`: what the sm80 kernels are compiled to, between commas: of `sm_80` (runs on all of 8.x), `sm_86`,
    /// `sm_87`, `sm_89`, `sm_90` and `compute_80` (PTX, for what comes later); `sm_80,sm_90,compute_80` by default.
    pub sm80_codes: String,
    /// `HATTN_CUDART`: `static` (default) or `shared`.
    pub cudart: Cudart,
    /// `DOCS_RS` or `HATTN_NO_KERNELS`: compile no C++ at all. Enough for `cargo check`, clippy and documentation.
    pub no_kernels: bool,
    /// `CC`, `CXX`, `CUDAHOSTCXX`, `CFLAGS`, `CXXFLAGS`, `CUDAFLAGS` and the target, as names with values: CMake and the cc crate
    /// read them, and kernels that were compiled under others are not these.
    pub compilers: Vec<(&'static str, String)>,
    /// The features that choose what is compiled.
    pub selection: Selection,
    /// This crate's folder.
    pub crate_dir: PathBuf,
    /// The folder that Cargo gives this build script for what it makes.
    pub out_dir: PathBuf,
}

/// How the CUDA runtime is linked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Cudart {
    /// Into the binary, which then needs only the driver where it runs.
    Static,
    /// As `libcudart.so`, shared with the rest of the process.
    Shared,
}

/// What the features select, in CMake's words.
pub struct Selection {
    pub archs: Vec<&'static str>,
    pub dtypes: Vec<&'static str>,
    pub head_dims: Vec<&'static str>,
}

impl Vars {
    /// Reads the environment and tells Cargo which variables matter.
    pub fn read() -> Result<Self> {
        let crate_dir = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").context("CARGO_MANIFEST_DIR is not set")?);
        let jobs = match text("HATTN_JOBS") {
            None => None,
            Some(jobs) => Some(
                jobs.parse()
                    .ok()
                    .filter(|&n| n > 0)
                    .with_context(|| format!("HATTN_JOBS is '{jobs}', expected a count of at least 1"))?,
            ),
        };
        let cudart = match text("HATTN_CUDART").as_deref() {
            None | Some("static") => Cudart::Static,
            Some("shared") => Cudart::Shared,
            Some(other) => bail!("HATTN_CUDART is '{other}', expected 'static' or 'shared'"),
        };
        Ok(Self {
            cuda_home: path("HATTN_CUDA_HOME"),
            cuda_candidates: ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(path).collect(),
            cudacxx: path("CUDACXX"),
            cutlass: path("HATTN_CUTLASS_DIR"),
            toolchain: path("HATTN_TOOLCHAIN_DIR").unwrap_or_else(|| default_toolchain(&crate_dir)),
            kernels_dir: kernels_dir()?,
            jobs,
            nvcc_flags: text("HATTN_NVCC_FLAGS"),
            sm80_codes: sm80_codes()?,
            cudart,
            no_kernels: text("DOCS_RS").is_some() || text("HATTN_NO_KERNELS").is_some_and(|v| v != "0"),
            compilers: ["CC", "CXX", "CUDAHOSTCXX", "CFLAGS", "CXXFLAGS", "CUDAFLAGS"]
                .into_iter()
                .filter_map(|name| Some((name, text(name)?)))
                .chain([("TARGET", env::var("TARGET").context("TARGET is not set")?)])
                .collect(),
            selection: Selection::read(),
            crate_dir,
            out_dir: PathBuf::from(env::var_os("OUT_DIR").context("OUT_DIR is not set")?),
        })
    }
}

impl Selection {
    /// Features, as Cargo passes them to build scripts.
    fn read() -> Self {
        let chosen = |features: &[(&str, &'static str)]| -> Vec<&'static str> {
            features
                .iter()
                .filter(|(feature, _)| env::var_os(format!("CARGO_FEATURE_{feature}")).is_some())
                .map(|&(_, name)| name)
                .collect()
        };
        Self {
            archs: chosen(&[("SM90", "sm90"), ("SM80", "sm80")]),
            dtypes: chosen(&[("F16", "F16"), ("BF16", "BF16"), ("E4M3", "E4M3")]),
            head_dims: chosen(&[
                ("HDIM64", "64"),
                ("HDIM96", "96"),
                ("HDIM128", "128"),
                ("HDIM192", "160"),
                ("HDIM192", "192"),
                ("HDIM256", "256"),
            ]),
        }
    }

    /// A selection that leaves nothing to compile is a mistake.
    pub fn check(&self) -> Result<()> {
        for (what, chosen, allowed) in [
            ("architecture", &self.archs, "sm90, sm80"),
            ("element type", &self.dtypes, "f16, bf16, e4m3"),
            ("head dim", &self.head_dims, "hdim64, hdim96, hdim128, hdim192, hdim256"),
        ] {
            if chosen.is_empty() {
                bail!("hopper-attention-sys: no {what} is selected; enable at least one of the features {allowed}");
            }
        }
        Ok(())
    }
}

/// `HATTN_SM80_CODES` as CMake's list. What is not known would be an error of nvcc's, kernel by kernel.
fn sm80_codes() -> Result<String> {
    const KNOWN: [&str; 6] = ["sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "compute_80"];
    // Always said, since CMake would remember what was said before.
    let codes = text("HATTN_SM80_CODES").unwrap_or_else(|| "sm_80,sm_90,compute_80".into());
    let codes: Vec<&str> = codes.split(',').map(str::trim).collect();
    if let Some(other) = codes.iter().find(|code| !KNOWN.contains(code)) {
        bail!("HATTN_SM80_CODES has '{other}', expected some of {} between commas", KNOWN.join(", "));
    }
    Ok(codes.join(";"))
}

/// `HATTN_KERNELS_DIR` or its default.
fn kernels_dir() -> Result<PathBuf> {
    if let Some(dir) = path("HATTN_KERNELS_DIR") {
        if dir.is_relative() {
            bail!("HATTN_KERNELS_DIR is '{}', expected an absolute path", dir.display());
        }
        return Ok(dir);
    }
    // Cargo does not name its target folder to build scripts, but marks it with one of these files.
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").context("OUT_DIR is not set")?);
    let is_target = |dir: &&Path| [".rustc_info.json", "CACHEDIR.TAG"].iter().any(|mark| dir.join(mark).exists());
    Ok(out_dir.ancestors().find(is_target).unwrap_or(&out_dir).join("kernels"))
}

/// The same rule as in `toolchain/bootstrap.sh`.
fn default_toolchain(crate_dir: &Path) -> PathBuf {
    let repository = crate_dir.join("../..");
    if repository.join("crates/hopper-attention-sys/toolchain").is_dir() {
        return repository.join(".toolchain");
    }
    let cache = path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")));
    // Without a home there is no such folder, and nothing is found in it.
    cache.unwrap_or_else(|| repository.clone()).join("hopper-attention/toolchain")
}

fn text(name: &str) -> Option<String> {
    println!("cargo::rerun-if-env-changed={name}");
    env::var(name).ok().filter(|value| !value.is_empty())
}

fn path(name: &str) -> Option<PathBuf> {
    text(name).map(PathBuf::from)
}
