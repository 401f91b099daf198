//! Finds the CUDA toolkit, the CUTLASS headers and the build tools. The order is that of `toolchain/bootstrap.sh`.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::vars::Vars;

const LEAST_CUDA: (u32, u32) = (12, 8);

/// What the build uses.
pub struct Toolkit {
    /// Folder with `bin/nvcc` and `include/`.
    pub home: PathBuf,
    /// The version of its nvcc.
    pub version: (u32, u32),
    /// Folder with `libcudart_static.a`.
    pub lib: PathBuf,
    /// Folder with `cutlass/cutlass.h`.
    pub cutlass: PathBuf,
    /// The pinned CMake; `None`: the one on `PATH`.
    pub cmake: Option<PathBuf>,
    /// The pinned or the machine's ninja; `None`: CMake's own choice.
    pub ninja: Option<PathBuf>,
    /// Folder with cuobjdump and nvdisasm, if there is one: the disassembly audit needs them, the build does not.
    pub disassembler: Option<PathBuf>,
}

impl Toolkit {
    /// Finds everything or says in one sentence what is missing and what to do.
    pub fn find(vars: &Vars) -> Result<Self> {
        let home = find_cuda(vars)?;
        let lib = ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"]
            .into_iter()
            .map(|lib| home.join(lib))
            .find(|lib| lib.join("libcudart_static.a").exists())
            .with_context(|| format!("the CUDA toolkit in {} has no libcudart_static.a", home.display()))?;
        let pinned = |path: &str| Some(vars.toolchain.join(path)).filter(|path| path.exists());
        let disassembler = [home.join("bin"), vars.toolchain.join("cuda/bin")]
            .into_iter()
            .find(|bin| bin.join("cuobjdump").exists() && bin.join("nvdisasm").exists());
        Ok(Self {
            cutlass: find_cutlass(vars)?,
            cmake: pinned("cmake/bin/cmake"),
            ninja: pinned("bin/ninja").or_else(|| on_path("ninja")),
            disassembler,
            version: version(&home).with_context(|| format!("{}/bin/nvcc does not run", home.display()))?,
            home,
            lib,
        })
    }

    /// The compiler driver.
    pub fn nvcc(&self) -> PathBuf {
        self.home.join("bin/nvcc")
    }
}

fn find_cuda(vars: &Vars) -> Result<PathBuf> {
    if let Some(home) = &vars.cuda_home {
        let version = version(home).with_context(|| format!("HATTN_CUDA_HOME={} holds no bin/nvcc", home.display()))?;
        if version < LEAST_CUDA {
            bail!("HATTN_CUDA_HOME={} holds CUDA {}.{}: 12.8 or newer is needed", home.display(), version.0, version.1);
        }
        return Ok(home.clone());
    }
    let nvcc = vars.cudacxx.clone().filter(|nvcc| nvcc.is_absolute()).or_else(|| on_path("nvcc"));
    let beside_nvcc = nvcc.and_then(|nvcc| Some(nvcc.canonicalize().ok()?.parent()?.parent()?.to_path_buf()));
    let machine = vars.cuda_candidates.iter().cloned().chain(beside_nvcc).chain([PathBuf::from("/usr/local/cuda")]);
    let mut too_old = Vec::new();
    // Of one form, however it was found: its path is part of what names the kernels' folder.
    let fetched = vars.toolchain.join("cuda");
    let fetched = fetched.canonicalize().unwrap_or(fetched);
    for home in machine.chain([fetched]) {
        match version(&home) {
            Some(version) if version >= LEAST_CUDA && home.join("include/cuda_runtime_api.h").exists() => {
                return Ok(home);
            }
            Some(version) => {
                too_old.push(format!("; passed over CUDA {}.{} in {}", version.0, version.1, home.display()))
            }
            None => {}
        }
    }
    bail!(
        "no CUDA toolkit of version 12.8 or newer: run `{}`, which fetches one, or set HATTN_CUDA_HOME{}",
        bootstrap(vars),
        too_old.concat()
    )
}

fn find_cutlass(vars: &Vars) -> Result<PathBuf> {
    let holds = |dir: &PathBuf| dir.join("cutlass/cutlass.h").exists();
    match &vars.cutlass {
        Some(dir) => [dir.join("include"), dir.clone()].into_iter().find(holds).with_context(|| {
            format!("HATTN_CUTLASS_DIR={} holds neither include/cutlass/cutlass.h nor cutlass/cutlass.h", dir.display())
        }),
        None => Some(vars.toolchain.join("cutlass/include")).filter(holds).with_context(|| {
            format!("no CUTLASS headers: run `{}`, which fetches them, or set HATTN_CUTLASS_DIR", bootstrap(vars))
        }),
    }
}

/// The command that fetches what is missing; it is there whether the crate came with its repository or as a package.
fn bootstrap(vars: &Vars) -> String {
    format!("bash {}", vars.crate_dir.join("toolchain/bootstrap.sh").display())
}

/// The version of a toolkit's nvcc; `None` when there is no nvcc that runs.
fn version(home: &Path) -> Option<(u32, u32)> {
    let output = Command::new(home.join("bin/nvcc")).arg("--version").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let (_, rest) = text.split_once("release ")?;
    let (major, rest) = rest.split_once('.')?;
    let minor: String = rest.chars().take_while(char::is_ascii_digit).collect();
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn on_path(program: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?).map(|dir| dir.join(program)).find(|path| path.is_file())
}
