//! What the compiler made of every kernel of the table, read from its objects: no GPU is needed.
//!
//! A kernel that spills, keeps a stack frame or has its WGMMA pipeline serialised computes the right numbers slowly, so no
//! other test would notice.
#![cfg(feature = "cuda")]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use hopper_attention::{Arch, DType, KernelInfo, Pass, backward_kernels, kernels};

/// The most shared memory that a block of an sm_90 GPU may ask for.
const SMEM_LIMIT: usize = 232_448;
/// What the system reserves in every block, beside that limit; the resource usage counts it as static shared memory.
const SMEM_RESERVED: usize = 1024;
/// In the names of the kernels that rows are about: `fwd_kernel` and `bwd_kernel`.
const MAIN_KERNEL: &str = "wd_kernel";
/// Registers of a multiprocessor.
const REGISTERS: usize = 65_536;

/// Waits for a warpgroup's products.
const AWAIT_ALL: &str = "DEPBAR.LE gsb0, 0x0";
const AWAIT_ALL_BUT_ONE: &str = "DEPBAR.LE gsb0, 0x1";

/// The tools' words about one compiled row.
struct Compiled {
    /// What nvcc and ptxas printed while compiling it.
    log: String,
    /// `cuobjdump -sass`.
    sass: String,
    /// `cuobjdump --dump-resource-usage`.
    usage: String,
}

impl Compiled {
    fn read(object: &Path) -> Self {
        let log = PathBuf::from(format!("{}.log", object.display()));
        Self {
            log: std::fs::read_to_string(&log).unwrap_or_else(|e| panic!("{}: {e}", log.display())),
            sass: cuobjdump("-sass", object),
            usage: cuobjdump("--dump-resource-usage", object),
        }
    }

    /// How often an instruction occurs, whatever its modifiers.
    fn count(&self, opcode: &str) -> usize {
        self.instructions().filter(|found| *found == opcode).count()
    }

    /// The opcodes, without modifiers and predicates.
    fn instructions(&self) -> impl Iterator<Item = &str> {
        self.lines().filter_map(|line| {
            let word = line.split_whitespace().find(|word| !word.starts_with('@'))?;
            word.split(['.', ';']).next()
        })
    }

    /// The instructions as they are printed.
    fn lines(&self) -> impl Iterator<Item = &str> {
        // "        /*0420*/                   @!P0 LDL.64 R2, [R1] ;                     /* 0x... */"
        self.sass.lines().filter_map(|line| {
            let (address, rest) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
            address.chars().all(|c| c.is_ascii_hexdigit()).then_some(rest)
        })
    }

    /// The most exponentials that stand between an instruction and the next one of another kind, with no product between.
    fn exponentials(&self, after: &str, before: &str) -> usize {
        let mut most = 0;
        let mut seen = None;
        for line in self.lines() {
            if line.contains(before) {
                most = most.max(seen.take().unwrap_or(0));
            }
            if line.contains(after) {
                seen = Some(0);
            } else if line.contains("GMMA") {
                seen = None;
            } else if line.contains("MUFU.EX2") {
                seen = seen.map(|n| n + 1);
            }
        }
        most
    }

    /// The largest number of the resource usage under a key, over the kernels with this in their name.
    fn resource(&self, key: &str, name: &str) -> Option<usize> {
        // " Function NAME:", and the numbers on the next line.
        let mut function = "";
        let mut most = None;
        for line in self.usage.lines() {
            if let Some(name) = line.trim().strip_prefix("Function ") {
                function = name;
            } else if function.contains(name) {
                let values = line.split_whitespace().filter_map(|word| word.strip_prefix(key)?.strip_prefix(':'));
                most = most.max(values.filter_map(|value| value.parse().ok()).max());
            }
        }
        most
    }
}

/// Everything that is wrong with a compiled row, in words.
fn faults(row: &KernelInfo, compiled: &Compiled) -> Vec<String> {
    let mut faults = Vec::new();
    let matrix = if row.dtype == DType::E4M3 { "QGMMA" } else { "HGMMA" };
    for (opcode, why) in [
        (matrix, "matrix products do not use WGMMA"),
        ("UTMALDG", "loads do not use TMA"),
        if row.pass == Pass::Backward {
            ("UBLKRED", "sums are not added to by the copy engine")
        } else {
            ("UTMASTG", "stores do not use TMA")
        },
        ("USETMAXREG", "registers are not handed from the producer to the consumers"),
    ] {
        if compiled.count(opcode) == 0 {
            faults.push(format!("no {opcode}: {why}"));
        }
    }
    for opcode in ["LDL", "STL"] {
        match compiled.count(opcode) {
            0 => {}
            n => faults.push(format!("{n} {opcode}: something lives in local memory")),
        }
    }
    // Exponentials run beside a product only where they stand before the wait for it (forward), or before that for the
    // other warpgroup, which multiplies meanwhile (backward). ptxas moves them behind where it can.
    let (after, before, columns) = match row.pass {
        Pass::Backward => (AWAIT_ALL, "BAR.SYNC", row.tile_m),
        _ => (AWAIT_ALL_BUT_ONE, AWAIT_ALL, row.tile_n),
    };
    // 64 rows on 128 threads
    let (found, wanted) = (compiled.exponentials(after, before), columns / 2);
    if found < wanted {
        faults.push(format!("{found} exponentials of a block's {wanted} stand before {before}"));
    }
    let expected = (REGISTERS / row.threads) & !7;
    // Small kernels may stand before and after the main one, with registers of their own.
    for (key, kernel, allowed) in [("REG", MAIN_KERNEL, expected), ("STACK", "", 0), ("LOCAL", "", 0)] {
        match compiled.resource(key, kernel) {
            Some(value) if value == allowed => {}
            found => faults.push(format!("{key} is {found:?}, expected {allowed}")),
        }
    }
    match compiled.resource("SHARED", MAIN_KERNEL) {
        Some(fixed) if row.smem_bytes + fixed.saturating_sub(SMEM_RESERVED) <= SMEM_LIMIT => {}
        fixed => faults.push(format!(
            "{} bytes of dynamic and {fixed:?} of static shared memory, at most {SMEM_LIMIT} fit",
            row.smem_bytes
        )),
    }
    let mut reports = 0;
    for line in compiled.log.lines() {
        let lower = line.to_lowercase();
        if ["c75", "serialized", "injected", "ignored", "warning"].iter().any(|word| lower.contains(word)) {
            faults.push(format!("the compiler says: {}", line.trim()));
        }
        if lower.contains("bytes stack frame") {
            reports += 1;
            if line.trim() != "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" {
                faults.push(format!("ptxas reports {}", line.trim()));
            }
        }
    }
    if reports == 0 {
        faults.push("the compiler's log does not say what ptxas did".into());
    }
    faults
}

/// What build.rs was told by the kernels' build; absent where that had nothing to tell.
const BUILD_DIR: Option<&str> = option_env!("HATTN_BUILD_DIR");
const DISASSEMBLER_DIR: Option<&str> = option_env!("HATTN_DISASSEMBLER_DIR");

fn disassembler() -> &'static Path {
    Path::new(DISASSEMBLER_DIR.expect(
        "cuobjdump and nvdisasm were not found when the kernels were built: run scripts/bootstrap.sh, which fetches them",
    ))
}

fn cuobjdump(option: &str, object: &Path) -> String {
    let folder = disassembler();
    // cuobjdump starts nvdisasm by name.
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap_or_default());
    let output = Command::new(folder.join("cuobjdump"))
        .arg(option)
        .arg(object)
        .env("PATH", path)
        .output()
        .unwrap_or_else(|e| panic!("{}: {e}", folder.join("cuobjdump").display()));
    assert!(output.status.success(), "cuobjdump {option} {}: {output:?}", object.display());
    String::from_utf8(output.stdout).expect("cuobjdump prints text")
}

/// The objects of the sm_90a rows of a pass, in the order of the table.
fn objects(pass: Pass) -> Vec<PathBuf> {
    let build = Path::new(BUILD_DIR.expect("the kernels were not built (HATTN_NO_KERNELS is set?)"));
    let list = build.join(format!("rows/hattn_{pass}_sm90.objects"));
    let text = std::fs::read_to_string(&list).unwrap_or_else(|e| panic!("{}: {e}", list.display()));
    text.lines().map(|line| build.join(line)).collect()
}

#[test]
fn every_row_is_compiled_as_planned() {
    let mut report = String::new();
    let mut all = Vec::new();
    for (pass, rows) in [(Pass::Forward, kernels()), (Pass::Backward, backward_kernels())] {
        let rows: Vec<_> = rows.iter().filter(|row| row.arch == Arch::Sm90).collect();
        let objects = objects(pass);
        assert!(!rows.is_empty(), "the launch table is empty");
        assert_eq!(rows.len(), objects.len(), "rows of the launch table and objects of the build");
        all.extend(rows.into_iter().zip(objects));
    }
    for (row, object) in &all {
        // The order is the same by construction; the name makes sure of it.
        let name = object.file_name().expect("a file").to_string_lossy().into_owned();
        let KernelInfo { dtype, mask, head_dim_qk, head_dim_vo, tile_m, tile_n, stages, .. } = row;
        let expected = format!("_{dtype}_{mask}_qk{head_dim_qk}_vo{head_dim_vo}_m{tile_m}_n{tile_n}_s{stages}.cu.o");
        assert!(name.ends_with(&expected), "row {row} stands where the build has {name}");
        let compiled = Compiled::read(object);
        println!(
            "{row}: {} registers, {} instructions, {} matrix instructions",
            compiled.resource("REG", MAIN_KERNEL).unwrap_or(0),
            compiled.instructions().count(),
            compiled.count("HGMMA") + compiled.count("QGMMA"),
        );
        for fault in faults(row, &compiled) {
            let _ = writeln!(report, "{row}: {fault}");
        }
    }
    assert!(report.is_empty(), "\n{report}");
}

/// The audit would be worthless if it passed anything: a sound row passes, and each single flaw is named.
#[test]
fn the_audit_sees_every_flaw() {
    let row = kernels().first().copied().expect("the launch table is empty");
    let launch = (REGISTERS / row.threads) & !7;
    let matrix = if row.dtype == DType::E4M3 { "QGMMA" } else { "HGMMA" };
    let sound = || Compiled {
        log: "ptxas info : Function properties\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
            .into(),
        sass: ["USETMAXREG.DEALLOC.CTAPOOL 0x18", "UTMALDG.4D [UR8], [UR6]", "UTMASTG.4D [UR8], [UR6]"]
            .into_iter()
            .map(String::from)
            .chain([format!("@!P0 {matrix}.64x128x16.F32.BF16 R24, gdesc[UR12], RZ")])
            .chain(["WARPGROUP.DEPBAR.LE gsb0, 0x1".into()])
            .chain(std::iter::repeat_n("MUFU.EX2 R24, R24".into(), row.tile_n / 2))
            .chain(["WARPGROUP.DEPBAR.LE gsb0, 0x0".into()])
            .map(|text| format!("        /*0420*/                   {text} ;    /* 0x000000a0000079c8 */\n"))
            .collect(),
        usage: format!(" Function _Z10fwd_kernel:\n  REG:{launch} STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:1152\n"),
    };
    assert_eq!(faults(&row, &sound()), Vec::<String>::new());

    type Spoil<'a> = &'a dyn Fn(&mut Compiled);
    let flaws: [(&str, Spoil<'_>); 11] = [
        ("no UTMASTG", &|c| c.sass = c.sass.replace("UTMASTG", "STG")),
        ("no UTMALDG", &|c| c.sass = c.sass.replace("UTMALDG", "LDG")),
        ("no USETMAXREG", &|c| c.sass = c.sass.replace("USETMAXREG", "NOP")),
        ("STL", &|c| c.sass = c.sass.replace("UTMASTG.4D", "UTMASTG.4D ;\n /*0430*/ STL")),
        ("63 exponentials of a block's 64", &|c| c.sass = c.sass.replacen("MUFU.EX2", "MUFU.RCP", 1)),
        ("0 exponentials of a block's 64", &|c| c.sass = c.sass.replace("gsb0, 0x1", "gsb0, 0x0")),
        ("REG is", &|c| c.usage = c.usage.replace(&format!("REG:{launch}"), "REG:24")),
        ("STACK is", &|c| c.usage = c.usage.replace("STACK:0", "STACK:8")),
        ("of static shared memory", &|c| c.usage = c.usage.replace("SHARED:1024", "SHARED:240000")),
        ("the compiler says", &|c| c.log += "ptxas info : (C7510) Potential Performance Loss: wgmma serialized\n"),
        ("ptxas reports", &|c| c.log = c.log.replace("    0 bytes", "    80 bytes")),
    ];
    for (expected, spoil) in flaws {
        let mut compiled = sound();
        spoil(&mut compiled);
        let found = faults(&row, &compiled);
        assert!(found.iter().any(|fault| fault.contains(expected)), "expected '{expected}', got {found:?}");
    }
}
