//! What the compiler made of every kernel of the table, read from its objects: no GPU is needed.
//!
//! A kernel that spills, keeps a stack frame or has its WGMMA pipeline serialised computes the right numbers slowly, so no
//! other test would notice.
#![cfg(feature = "cuda")]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use rayon::prelude::*;

#[path = "disassembly/flaws.rs"]
mod flaws;
#[path = "disassembly/products.rs"]
mod products;
#[path = "disassembly/sizes.rs"]
mod sizes;

use hopper_attention::internal::has_one_tile;
use hopper_attention::{Arch, DType, KernelInfo, MaskClass, Pass, backward_kernels, kernels};

/// The most shared memory that a block may ask for of an sm_90 GPU, of one of 8.0, and of each that sm80 kernels run on.
const SMEM_LIMIT: usize = 232_448;
const SMEM_LIMIT_A100: usize = 166_912;
const SMEM_LIMIT_SM80: usize = 101_376;
/// Those which have no more than that, as HATTN_SM80_CODES names them.
const SMALL_GPUS: [&str; 2] = ["sm_86", "sm_89"];
/// What the system reserves in every block, beside that limit; the resource usage counts it as static shared memory.
const SMEM_RESERVED: usize = 1024;
/// In the names of the kernels that rows are about: `fwd_kernel` and `bwd_kernel`.
const MAIN_KERNEL: &str = "wd_kernel";
/// Registers of a multiprocessor.
const REGISTERS: usize = 65_536;

/// Waits for a warpgroup's products.
const AWAIT_ALL: &str = "DEPBAR.LE gsb0, 0x0";
const AWAIT_ALL_BUT_ONE: &str = "DEPBAR.LE gsb0, 0x1";

/// The tools' words about compiled kernels: those of an object, or one of them.
#[derive(Clone)]
struct Compiled {
    /// What nvcc and ptxas printed while compiling.
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
            // Half of what it prints is the instructions' encoding, in comments behind them.
            sass: cuobjdump("-sass", object)
                .lines()
                .map(|line| line.split("/* 0x").next().unwrap_or_default().trim_end())
                .filter(|line| !line.is_empty())
                .flat_map(|line| [line, "\n"])
                .collect(),
            usage: cuobjdump("--dump-resource-usage", object),
        }
    }

    /// What is said of each kernel of an object, by their names there. One that is compiled for several GPUs is named once. What names
    /// no kernel is about all of them.
    fn by_kernel(&self) -> Vec<(String, Self)> {
        let headings = self.sass.lines().filter_map(|line| line.trim().strip_prefix("Function : "));
        let mut names: Vec<_> = headings.collect();
        names.sort_unstable();
        names.dedup();
        // Every text in one pass: an object's has a million lines.
        let split = |text: &str, starts: fn(&str) -> Option<&str>, ends: fn(&str) -> bool| -> Vec<String> {
            let all = 0..names.len();
            let (mut texts, mut wanted) = (vec![String::new(); names.len()], all.clone());
            for line in text.lines() {
                if let Some(name) = starts(line) {
                    wanted = names.binary_search(&name).map_or(0..0, |at| at..at + 1);
                } else if ends(line) {
                    wanted = all.clone();
                }
                // A line may name another kernel than the section that it stands in. Most lines are instructions and name none.
                let named: Vec<_> = match line.contains("_Z") {
                    true => all.clone().filter(|&at| line.contains(names[at])).collect(),
                    false => Vec::new(),
                };
                let about = if named.is_empty() { wanted.clone().collect() } else { named };
                about.into_iter().for_each(|at| texts[at].extend([line, "\n"]));
            }
            texts
        };
        // "ptxas info : Compiling entry function 'NAME' for 'sm_86'"
        let log =
            split(&self.log, |line| line.split_once("Compiling entry function '")?.1.split('\'').next(), |_| false);
        // A heading a GPU, under which every kernel begins with its name.
        let sass = split(
            &self.sass,
            |line| line.trim().strip_prefix("Function : "),
            |line| line.contains("code for ") || line.contains("Fatbin "),
        );
        let usage = split(
            &self.usage,
            |line| line.trim().strip_prefix("Function ")?.strip_suffix(':'),
            |line| line.contains("arch = ") || line.contains("Fatbin "),
        );
        let texts = log.into_iter().zip(sass).zip(usage);
        names
            .iter()
            .zip(texts)
            .map(|(name, ((log, sass), usage))| (name.to_string(), Self { log, sass, usage }))
            .collect()
    }

    /// Without the code for GPUs that have too little shared memory for a row that asks for so much, where no plan chooses it.
    /// Each text goes from GPU to GPU; the log names them function by function.
    fn where_it_runs(&self, smem_bytes: usize) -> Self {
        let without = |text: &str, heading: &str, names: fn(&str) -> &str| -> String {
            let mut sections = text.split(heading);
            let first = sections.next().unwrap_or_default().to_string();
            sections
                .filter(|section| {
                    let gpu = names(section.lines().next().unwrap_or_default());
                    smem_bytes <= SMEM_LIMIT_SM80 || !SMALL_GPUS.contains(&gpu)
                })
                .fold(first, |all, section| all + heading + section)
        };
        Self {
            // "Compiling entry function 'NAME' for 'sm_86'"
            log: without(&self.log, "Compiling entry function", |line| line.rsplit('\'').nth(1).unwrap_or_default()),
            sass: without(&self.sass, "code for ", str::trim),
            usage: without(&self.usage, "arch = ", str::trim),
        }
    }

    /// The GPUs that there is machine code for.
    fn codes(&self) -> usize {
        self.sass.matches("code for sm_").count()
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

    /// Whether results are stored before the arrival at the last barrier of a cluster, which its CTAs end after, and nothing is
    /// accessed later. (A CTA that has a tile to itself stores elsewhere, and ends.)
    fn leaves_late(&self) -> bool {
        let codes: Vec<_> = self.instructions().collect();
        let Some(arrival) = codes.iter().rposition(|code| *code == "UCGABAR_ARV") else { return false };
        let before = codes[..arrival].iter().rev().take_while(|code| **code != "UCGABAR_WAIT");
        let after = codes[arrival..].iter().take_while(|code| **code != "EXIT");
        let accesses = |code: &str| ["LD", "ST", "RED", "ATOM"].iter().any(|kind| code.starts_with(kind));
        before.clone().any(|code| *code == "STG")
            && after.clone().any(|code| *code == "UCGABAR_WAIT")
            && !after.clone().any(|code| accesses(code))
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
    faults_with(row, row.smem_bytes(), Kind::of(row), compiled)
}

/// Which of a row's kernels it is.
#[derive(Clone, Copy)]
struct Kind {
    /// Whether it is the one in which CTAs share tiles.
    shares: bool,
    /// The threads of its CTAs.
    threads: usize,
    /// Products that add ALiBi's part of the keys to scores (`sm90/fwd/alibi.hpp`).
    of_places: usize,
}

impl Kind {
    /// The row's first kernel.
    fn of(row: &KernelInfo) -> Self {
        Self { shares: false, threads: row.threads(), of_places: 0 }
    }
}

/// The same, as if the row asked for so much shared memory.
fn faults_with(row: &KernelInfo, smem_bytes: usize, of: Kind, compiled: &Compiled) -> Vec<String> {
    let compiled = &compiled.where_it_runs(smem_bytes);
    let mut faults = match row.arch() {
        Arch::Sm80 => faults_of_sm80(row, compiled),
        _ => faults_of_sm90(row, of, compiled),
    };
    faults.extend(common_faults(compiled));
    let limit = match (row.arch(), row.pass()) {
        (Arch::Sm80, Pass::Backward) => SMEM_LIMIT_A100,
        (Arch::Sm80, _) => SMEM_LIMIT_SM80,
        _ => SMEM_LIMIT,
    };
    match compiled.resource("SHARED", MAIN_KERNEL) {
        Some(fixed) if smem_bytes + fixed.saturating_sub(SMEM_RESERVED) <= limit => {}
        fixed => faults
            .push(format!("{smem_bytes} bytes of dynamic and {fixed:?} of static shared memory, at most {limit} fit")),
    }
    faults
}

/// What any kernel can do wrong.
fn common_faults(compiled: &Compiled) -> Vec<String> {
    let mut faults = Vec::new();
    for opcode in ["LDL", "STL"] {
        match compiled.count(opcode) {
            0 => {}
            n => faults.push(format!("{n} {opcode}: something lives in local memory")),
        }
    }
    for key in ["STACK", "LOCAL"] {
        match compiled.resource(key, "") {
            Some(0) => {}
            found => faults.push(format!("{key} is {found:?}, expected 0")),
        }
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
    if reports < compiled.codes().max(1) {
        faults.push("the compiler's log does not say what ptxas did".into());
    }
    faults
}

/// What only an sm80 kernel can do wrong, in any of the codes that it was compiled to.
fn faults_of_sm80(row: &KernelInfo, compiled: &Compiled) -> Vec<String> {
    let mut faults = Vec::new();
    for (opcode, why) in [
        ("HMMA", "matrix products do not use the tensor cores"),
        ("LDGSTS", "loads go through registers"),
        ("LDSM", "operands are not read as matrices"),
    ] {
        if compiled.count(opcode) == 0 {
            faults.push(format!("no {opcode}: {why}"));
        }
    }
    // Forward: each read of K or V serves a warp's strips, with two products each. So a warp with two strips of 16 rows has
    // four for each read, and one with one strip has two. Q is read beside them. In the backward dQ has but one for each
    // read.
    let (products, reads) = (compiled.count("HMMA"), compiled.count("LDSM"));
    let strips = row.tile_m() / (row.threads() / 32) / 16;
    let least = if row.pass() == Pass::Backward { 2.0 } else { 1.5 * strips as f64 };
    if (products as f64) < least * reads as f64 {
        faults.push(format!("{products} HMMA for {reads} LDSM, expected {least} for each at least"));
    }
    let barriers = match row.pass() {
        // One after a tile was drawn, one a block of queries and one before the last dQ; and two where a warp waits for
        // the other of its pair, which arrives.
        Pass::Backward => 3 + 2 * waits(row),
        // One a block of keys with two stages, two with one. Where Q lies over one of two stages, it is read before the first block.
        _ => 3 - row.stages() + usize::from(row.head_dim_vo() > 128 && row.stages() == 2),
    };
    let (found, wanted) = (compiled.count("BAR"), compiled.codes() * barriers);
    if found != wanted {
        faults.push(format!("{found} BAR in {} codes, expected {wanted}", compiled.codes()));
    }
    if row.pass() == Pass::Backward {
        // Each lane has as many values of dQ as its warp has columns, added in three places: by the warps of P, by those
        // of dS, and after the last block.
        let sums = row.tile_m() * row.head_dim_qk() / row.threads();
        let added = compiled.lines().filter(|line| line.contains("RED") && line.contains("ADD.F32")).count();
        let wanted = compiled.codes() * 3 * sums;
        if added != wanted {
            faults.push(format!("{added} additions to dQ in {} codes, expected {wanted}", compiled.codes()));
        }
    }
    // Eight warps share a multiprocessor.
    let (found, allowed) = (compiled.resource("REG", MAIN_KERNEL), (REGISTERS / 256).min(255));
    if found.is_none_or(|found| found > allowed) {
        faults.push(format!("REG is {found:?}, expected {allowed} at most"));
    }
    faults
}

/// How often one warp of a pair waits for the other in a block of an sm80 backward. At head dim 64 P of a block is handed over in as
/// many chunks as keep the scores in a quarter of a warp's registers. At head dim 128 it is f32, and goes in parts that fill the room
/// of 32 queries: before each part but the first, the one before must have been read.
fn waits(row: &KernelInfo) -> usize {
    match row.head_dim_qk() {
        64 => row.tile_m() / 32,
        _ => 2 * (row.tile_m() / 32) - 1,
    }
}

/// What only an sm90 kernel can do wrong.
fn faults_of_sm90(row: &KernelInfo, of: Kind, compiled: &Compiled) -> Vec<String> {
    let Kind { shares, threads, of_places } = of;
    let mut faults = Vec::new();
    let matrix = if row.dtype() == DType::E4M3 { "QGMMA" } else { "HGMMA" };
    for (opcode, why) in [
        (matrix, "matrix products do not use WGMMA"),
        ("UTMALDG", "loads do not use TMA"),
        match (row.pass(), row.dtype()) {
            (Pass::Backward, _) => ("UBLKRED", "sums are not added to by the copy engine"),
            (_, DType::E4M3) => ("LDSM", "V is not transposed as matrices"),
            // Warpgroups write O themselves: those that share a tile, and those that have one buffer of Q (fwd/traits.hpp).
            _ if shares || row.head_dim_qk().max(row.head_dim_vo()) > 128 => ("STG", "nothing is stored"),
            _ => ("UTMASTG", "stores do not use TMA"),
        },
        ("USETMAXREG", "registers are not handed from the producer to the consumers"),
    ] {
        if compiled.count(opcode) == 0 {
            faults.push(format!("no {opcode}: {why}"));
        }
    }
    faults.extend(products::faults(row, of_places, compiled));
    if shares && !compiled.leaves_late() {
        faults.push("a CTA of a cluster ends early, or says that it has read before it stores".into());
    }
    // Exponentials run beside a product only where they stand before the wait for it (forward), or before that for the
    // other warpgroup, which multiplies meanwhile (backward). ptxas moves them behind where it can.
    let (after, before, columns) = match row.pass() {
        Pass::Backward => (AWAIT_ALL, "BAR.SYNC", row.tile_m()),
        _ => (AWAIT_ALL_BUT_ONE, AWAIT_ALL, row.tile_n()),
    };
    let (found, wanted) = (compiled.exponentials(after, before), columns / 2); // 64 rows on 128 threads
    // Not of e4m3, which is faster with them behind the wait (benches/LOG.md, 20). Backward rows for modified scores have no
    // registers for it: theirs stand after dQ.
    if found < wanted && row.dtype() != DType::E4M3 && !row.needs_modifiers() {
        faults.push(format!("{found} exponentials of a block's {wanted} stand before {before}"));
    }
    // Nothing but scores is summed in f16, and by the rows of such alone.
    let in_f16 = compiled.lines().any(|line| line.contains("QGMMA") && line.contains(".F16.E4M3"));
    if in_f16 != (row.scores() == DType::F16) {
        let found = if in_f16 { "there are" } else { "there are no" };
        faults.push(format!("{found} sums in f16, of a row with scores in {}", row.scores()));
    }
    // Small kernels may stand before and after the main one, with registers of their own.
    let (found, expected) = (compiled.resource("REG", MAIN_KERNEL), (REGISTERS / threads) & !7);
    if found != Some(expected) {
        faults.push(format!("REG is {found:?}, expected {expected}"));
    }
    faults
}

/// The folder of the kernels' build. `None` in a build without kernels.
const BUILD_DIR: Option<&str> = option_env!("HATTN_BUILD_DIR");
/// That of cuobjdump and nvdisasm. `None` if they were not found when the kernels were built.
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

/// The lines of a file of the build's about a list.
fn lines_about(list: &str, kind: &str) -> Vec<String> {
    let build = Path::new(BUILD_DIR.expect("the kernels were not built (HATTN_NO_KERNELS is set?)"));
    let path = build.join(format!("rows/hattn_{list}.{kind}"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    text.lines().map(String::from).collect()
}

/// The objects of a list.
fn objects(list: &str) -> Vec<PathBuf> {
    let build = Path::new(BUILD_DIR.expect("the kernels were not built (HATTN_NO_KERNELS is set?)"));
    lines_about(list, "objects").iter().map(|line| build.join(line)).collect()
}

/// A list as the build compiled it.
struct List {
    /// Each source's name, and the kernels that it was compiled to.
    sources: Vec<(String, Vec<(String, Compiled)>)>,
    /// Of each row, in the order of the table, its source and its columns.
    rows: Vec<(String, String)>,
}

impl List {
    /// The source with the kernels before and after a backward.
    const AROUND: &str = "around";

    fn read(name: &str) -> Self {
        let rows: Vec<_> = lines_about(name, "rows")
            .iter()
            .map(|line| line.split_once(": ").expect("a source and its row"))
            .map(|(source, row)| (source.to_string(), row.to_string()))
            .collect();
        let sources = objects(name)
            .par_iter()
            .map(|object| {
                let file = object.file_name().expect("a file").to_string_lossy().into_owned();
                (file.split('.').next().unwrap_or_default().to_string(), Compiled::read(object).by_kernel())
            })
            .collect();
        Self { sources, rows }
    }

    /// The kernels of a source.
    fn source(&self, name: &str) -> &[(String, Compiled)] {
        let found = self.sources.iter().find(|(source, _)| source == name);
        &found.unwrap_or_else(|| panic!("the build has no object of {name}")).1
    }
}

/// The numbers among the arguments of a mangled kernel's traits, in their order (`Li128E`).
fn traits_arguments(function: &str) -> Vec<usize> {
    let Some((_, arguments)) = function.split_once("TraitsI") else { return Vec::new() };
    let bytes = arguments.as_bytes();
    let mut numbers = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let end = at + bytes[at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        if end == at {
            at += 1;
            continue;
        }
        if at > 0 && matches!(bytes[at - 1], b'i' | b'E') && bytes.get(end) == Some(&b'E') {
            numbers.extend(arguments[at..end].parse::<usize>());
        }
        at = end;
    }
    numbers
}

/// Whether a function of an object is a row's kernel.
fn is_kernel_of(row: &KernelInfo, function: &str) -> bool {
    // The enumerators of kernels.hpp.
    let mask = match row.mask() {
        MaskClass::Full => 0,
        MaskClass::Causal => 1,
        MaskClass::Window => 2,
        MaskClass::Blocks => 3,
        other => panic!("a mask class that the audit does not know: {other}"),
    };
    let shape = [mask, row.head_dim_qk(), row.head_dim_vo(), row.tile_m(), row.tile_n(), row.stages()];
    let arguments = match row.dtype() {
        DType::E4M3 => shape.into_iter().chain([usize::from(row.scores() == DType::F16)]).collect::<Vec<_>>(),
        dtype => [usize::from(dtype == DType::BF16)].into_iter().chain(shape).collect(),
    };
    // Of rows of sm90 two more follow: whether it packs, and whether scores are modified. Of e4m3 rows the other way round.
    // A kernel of the backward for dropout alone, or for ALiBi alone, is of a row for modified scores, and has traits of one that
    // is not.
    let is_alone =
        row.pass() == Pass::Backward && ["DrawingTraits", "AlibiTraits"].iter().any(|traits| function.contains(traits));
    let modified = u8::from(row.needs_modifiers() && !is_alone);
    let last = [0, 1].map(|packs| match row.dtype() {
        DType::E4M3 => format!("ELb{modified}ELb{packs}E"),
        _ => format!("Li{}ELb{packs}ELb{modified}E", row.stages()),
    });
    let is_modified_alike = row.arch() != Arch::Sm90 || last.iter().any(|arguments| function.contains(arguments));
    let is_of_row = traits_arguments(function) == arguments && (row.needs_modifiers() || !is_alone);
    function.contains(MAIN_KERNEL) && is_of_row && is_modified_alike
}

/// Whether a row has kernels for ALiBi alone: one, and one of packed sequences.
fn has_alibi_kernels(row: &KernelInfo) -> bool {
    let is_modified = row.needs_modifiers() && row.mask() != MaskClass::Blocks && row.dtype() != DType::E4M3;
    let has_dims = row.pass() == Pass::Backward || [64, 128].contains(&row.head_dim_qk());
    row.arch() == Arch::Sm90 && is_modified && has_dims
}

/// Whether such a row of the backward has a kernel for dropout alone, too, in which a warpgroup draws the numbers.
fn draws(row: &KernelInfo) -> bool {
    row.pass() == Pass::Backward && has_alibi_kernels(row) && row.head_dim_qk() > 64
}

/// The list of kernels that a row is from.
fn list(row: &KernelInfo) -> String {
    match row.dtype() {
        DType::E4M3 => format!("fp8_{}", row.arch()),
        _ => format!("{}_{}", row.pass(), row.arch()),
    }
}

#[test]
fn every_row_is_compiled_as_planned() {
    let (mut report, mut plain_kernels) = (String::new(), Vec::new());
    let mut audited = 0;
    for name in ["fwd_sm90", "fp8_sm90", "fwd_sm80", "bwd_sm90", "bwd_sm80"] {
        let rows: Vec<_> = kernels().iter().chain(backward_kernels()).filter(|row| list(row) == name).collect();
        if rows.is_empty() {
            continue; // not selected
        }
        let built = List::read(name);
        let sources: Vec<_> = built.rows.iter().filter(|(_, columns)| columns != List::AROUND).collect();
        assert_eq!(rows.len(), sources.len(), "{name}: rows of the launch table and rows of the build");
        let mut kernels_of_rows = Vec::new();
        for (row, (source, columns)) in rows.into_iter().zip(sources) {
            let (dtype, mask, stages) = (row.dtype(), row.mask(), row.stages());
            let (head_dim_qk, head_dim_vo) = (row.head_dim_qk(), row.head_dim_vo());
            let (tile_m, tile_n) = (row.tile_m(), row.tile_n());
            let scores = if dtype == DType::E4M3 { format!(", {}", row.scores()) } else { String::new() };
            let modified = if row.needs_modifiers() { ", modified" } else { "" };
            let expected = format!(
                "{dtype}, {mask}, {head_dim_qk}, {head_dim_vo}, {tile_m}, {tile_n}, {stages}{scores}{modified}"
            );
            assert_eq!(columns.to_lowercase(), expected, "row {row} stands where the build has another one");
            let object = built.source(source);
            let functions: Vec<_> = object.iter().filter(|(name, _)| is_kernel_of(row, name)).collect();
            // Where CTAs may share tiles there is a kernel more for it, except for tiles of 64 queries, which have no other. Rows
            // that pack have one more, too. Rows that add a bias have one more for it, or two with that of packed sequences. So
            // have rows with a kernel for dropout alone, or for ALiBi alone. Of rows of head dim 96 each kernel has a second
            // version, which rotates heads.
            let others = [row.most_shares() > 1, row.packs(), row.adds_bias(false), row.adds_bias(true)];
            let sharing = others.into_iter().map(usize::from).sum::<usize>();
            let alone = usize::from(draws(row)) + 2 * usize::from(has_alibi_kernels(row));
            let plain = usize::from(!has_one_tile(row));
            let versions = 1 + usize::from(name == "fwd_sm90" && head_dim_qk == 96 && !row.needs_modifiers());
            let wanted = versions * (plain + sharing) + alone;
            assert_eq!(
                functions.len(),
                wanted,
                "row {row} must be {wanted} kernels of {source}; its kernels are {:?}",
                object.iter().map(|(name, _)| name).collect::<Vec<_>>()
            );
            let audit = |(function, compiled): &&(String, Compiled)| {
                let shares = plain == 0 || function.contains("SharedTraits");
                // As in `is_kernel_of`: of e4m3 rows it follows on whether scores are modified.
                let packed = match dtype {
                    DType::E4M3 => function.contains(&format!("ELb{}ELb1E", u8::from(row.needs_modifiers()))),
                    _ => function.contains(&format!("Li{stages}ELb1E")),
                };
                let kinds = [
                    ("BiasTraits", ", bias"),
                    ("RotatedTraits", ", rotated"),
                    ("DrawingTraits", ", drawing"),
                    ("DropoutTraits", ", dropout"),
                    ("AlibiTraits", ", alibi"),
                ];
                let of = kinds.into_iter().find(|(traits, _)| function.contains(traits)).map_or("", |(_, of)| of);
                // One warpgroup draws numbers.
                let threads = row.threads() + if function.contains("DrawingTraits") { 128 } else { 0 };
                let kind =
                    [["", ", shared"], [", packed", ""]][usize::from(packed)][usize::from(shares)].to_string() + of;
                let name = format!("{row}{kind}");
                let line = format!(
                    "{name}: {} registers, {} instructions, {} matrix instructions",
                    compiled.resource("REG", MAIN_KERNEL).unwrap_or(0),
                    compiled.instructions().count(),
                    compiled.count("HGMMA") + compiled.count("QGMMA") + compiled.count("HMMA"),
                );
                let is_plain = sizes::is_plain(row) && (of.is_empty() || of == ", rotated");
                let size = is_plain.then(|| (name, compiled.instructions().count()));
                let of_places = usize::from(row.pass() == Pass::Forward && of == ", alibi");
                (line, size, faults_with(row, row.smem_bytes(), Kind { shares, threads, of_places }, compiled))
            };
            for (line, size, faults) in functions.par_iter().map(audit).collect::<Vec<_>>() {
                println!("{line}");
                plain_kernels.extend(size);
                faults.iter().for_each(|fault| report.extend([&row.to_string(), ": ", fault, "\n"]));
            }
            kernels_of_rows.extend(functions.iter().map(|(function, _)| (source.clone(), function.clone())));
            audited += 1;
        }
        // Nothing was compiled that is no row's, or twice.
        let mut all: Vec<_> = built
            .sources
            .iter()
            .flat_map(|(source, object)| object.iter().map(move |(name, _)| (source.clone(), name.clone())))
            .filter(|(_, function)| function.contains(MAIN_KERNEL))
            .collect();
        all.sort_unstable();
        kernels_of_rows.sort_unstable();
        assert_eq!(all, kernels_of_rows, "{name}: kernels of the objects and kernels of the rows");
        for (source, _) in built.rows.iter().filter(|(_, columns)| columns == List::AROUND) {
            for (function, compiled) in built.source(source) {
                for fault in common_faults(compiled) {
                    let _ = writeln!(report, "{source}: {function}: {fault}");
                }
            }
        }
    }
    assert_eq!(audited, kernels().len() + backward_kernels().len(), "rows of a list that is not audited");
    assert!(audited > 0, "the launch table is empty");
    assert!(report.is_empty(), "\n{report}");
    sizes::check(plain_kernels);
}

/// What is wrong with the quantiser's kernels, which are bit for bit the CPU's: no flag may have touched their arithmetic.
fn faults_of_quantiser(compiled: &Compiled) -> Vec<String> {
    let mut faults = common_faults(compiled);
    for (opcode, why) in [("LDGSTS", "copies past the registers"), ("F2FP", "conversions to e4m3")] {
        if compiled.count(opcode) == 0 {
            faults.push(format!("no {opcode}: {why}"));
        }
    }
    // ptxas has flushed additions of its own in a division, around numbers that are none.
    let flushed = |line: &&str| ["FMUL.FTZ", "FFMA.FTZ"].iter().any(|opcode| line.contains(opcode));
    if let Some(line) = compiled.lines().find(flushed) {
        faults.push(format!("a subnormal would be flushed: {}", line.trim()));
    }
    faults
}

#[test]
fn the_quantiser_is_compiled_as_written() {
    if !kernels().iter().any(|row| row.dtype() == DType::E4M3) {
        println!("skipped: no rows of e4m3 operands in this build, and so no quantiser");
        return;
    }
    let objects = objects("quantize");
    assert_eq!(objects.len(), 2, "a source type each");
    for object in &objects {
        let compiled = Compiled::read(object);
        assert_eq!(faults_of_quantiser(&compiled), Vec::<String>::new(), "{}", object.display());
        // Worthless if it passed anything.
        let broken = |edit: &dyn Fn(&mut Compiled)| {
            let mut compiled = compiled.clone();
            edit(&mut compiled);
            faults_of_quantiser(&compiled).join("; ")
        };
        let fault = broken(&|compiled| compiled.sass = compiled.sass.replace("FMUL R", "FMUL.FTZ R"));
        assert!(fault.contains("a subnormal would be flushed"), "{fault}");
        let fault = broken(&|compiled| compiled.sass = compiled.sass.replace("LDGSTS", "LDG"));
        assert!(fault.contains("no LDGSTS"), "{fault}");
        // Of any of its kernels.
        let last = compiled.usage.rfind("STACK:0").expect("a kernel without a stack");
        let fault = broken(&|compiled| compiled.usage.replace_range(last..last + 7, "STACK:8"));
        assert!(fault.contains("STACK is Some(8)"), "{fault}");
    }
}

/// A row of an architecture and pass; `None` in a build without it.
fn first_row(arch: Arch, pass: Pass) -> Option<KernelInfo> {
    let row = kernels().iter().chain(backward_kernels()).copied().find(|row| row.arch() == arch && row.pass() == pass);
    if row.is_none() {
        println!("skipped: no {arch} {pass} row in this build");
    }
    row
}

/// Whatever an sm80 row computes, some row computes on the GPUs with the least shared memory.
#[test]
fn sm80_rows_leave_no_gpu_out() {
    let rows: Vec<_> = kernels().iter().chain(backward_kernels()).filter(|row| row.arch() == Arch::Sm80).collect();
    if rows.is_empty() {
        println!("skipped: no sm80 row in this build");
    }
    for row in &rows {
        let computes = |row: &KernelInfo| (row.pass(), row.dtype(), row.mask(), row.head_dim_qk(), row.head_dim_vo());
        let fits = |other: &&&KernelInfo| computes(other) == computes(row) && other.smem_bytes() <= SMEM_LIMIT_SM80;
        assert!(rows.iter().any(|other| fits(&other)), "nothing for 8.6 and 8.9 in place of {row}");
    }
}

/// Of several kernels in a source each gets what is said of it: a flaw is the right row's.
#[test]
fn the_audit_tells_kernels_apart() {
    let name = |dim: usize| {
        format!(
            "_ZN5hattn4sm9010fwd_kernelINS0_9FwdTraitsILNS_5DTypeE1ELNS_9MaskClassE0ELi{dim}ELi{dim}ELi192ELi128ELi3EEEEEvNS0_12KernelParamsE14CUtensorMap_stS7_"
        )
    };
    assert_eq!(traits_arguments(&name(64)), [1, 0, 64, 64, 192, 128, 3]);
    let (first, second) = (name(64), name(128));
    let log = format!(
        "ptxas info    : (C7511) Potential Performance Loss: wgmma in the function '{second}'\nptxas info    : 11 bytes gmem\n"
    );
    let section = |name: &str, spills: usize| {
        format!(
            "ptxas info    : Compiling entry function '{name}' for 'sm_90a'\nptxas info    : Function properties for {name}\n    0 bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads\n"
        )
    };
    let code = |gpu: &str| {
        format!(
            "\t\tcode for {gpu}\n\t\tFunction : {first}\n        /*0000*/                   FADD R1, R2 ;\n\t\tFunction : {second}\n        /*0000*/                   STL [R1], R2 ;\n"
        )
    };
    let usage = |gpu: &str| {
        format!("arch = {gpu}\n Function {first}:\n  REG:8 STACK:0\n Function {second}:\n  REG:9 STACK:16\n")
    };
    let object = Compiled {
        log: log + &section(&first, 0) + &section(&second, 4),
        sass: code("sm_80") + &code("sm_90"),
        usage: usage("sm_80") + &usage("sm_90"),
    };
    let kernels = object.by_kernel();
    let [(second_name, flawed), (first_name, sound)] = &kernels[..] else { panic!("{} kernels", kernels.len()) };
    assert_eq!((first_name, second_name), (&first, &second));
    assert_eq!((sound.codes(), sound.count("FADD"), sound.count("STL")), (2, 2, 0));
    assert_eq!((sound.resource("REG", ""), sound.resource("STACK", "")), (Some(8), Some(0)));
    assert!(!sound.log.contains("C7511") && sound.log.contains("0 bytes spill stores"), "{}", sound.log);
    assert_eq!((flawed.codes(), flawed.count("FADD"), flawed.count("STL")), (2, 0, 2));
    assert_eq!((flawed.resource("REG", ""), flawed.resource("STACK", "")), (Some(9), Some(16)));
    assert!(flawed.log.contains("C7511") && flawed.log.contains("4 bytes spill stores"), "{}", flawed.log);
    // What names no kernel is about all of them.
    assert!(sound.log.contains("11 bytes gmem") && flawed.log.contains("11 bytes gmem"));
}
