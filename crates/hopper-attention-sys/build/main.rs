//! Builds the kernels and the bridge: read the variables, find the tools, compile, link.

mod bridge;
mod kernels;
mod toolkit;
mod vars;

use anyhow::Result;

use toolkit::Toolkit;
use vars::Vars;

fn main() -> Result<()> {
    let vars = Vars::read()?;
    for path in ["CMakeLists.txt", "cmake", "build", "cpp", "include", "kernels", "src"] {
        println!("cargo::rerun-if-changed={path}");
    }
    if vars.no_kernels {
        bridge::generate();
        return Ok(());
    }
    vars.selection.check()?;
    let toolkit = Toolkit::find(&vars)?;
    // First the bridge: the kernels include the header that it makes of src/params.rs.
    let params_header = bridge::build(&vars, &toolkit);
    let build_dir = kernels::build(&vars, &toolkit, &params_header)?;
    kernels::link(&vars, &toolkit, &build_dir);
    // For the disassembly audit: dependents' build scripts see these as DEP_HATTN_BUILD_DIR and DEP_HATTN_DISASSEMBLER_DIR.
    println!("cargo::metadata=build_dir={}", build_dir.display());
    if let Some(dir) = &toolkit.disassembler {
        println!("cargo::metadata=disassembler_dir={}", dir.display());
    }
    Ok(())
}
