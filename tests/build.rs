//! Hands the disassembly audit what the kernels' build says of itself.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for (metadata, variable) in
        [("DEP_HATTN_BUILD_DIR", "HATTN_BUILD_DIR"), ("DEP_HATTN_DISASSEMBLER_DIR", "HATTN_DISASSEMBLER_DIR")]
    {
        println!("cargo::rerun-if-env-changed={metadata}");
        if let Ok(value) = std::env::var(metadata) {
            println!("cargo::rustc-env={variable}={value}");
        }
    }
}
