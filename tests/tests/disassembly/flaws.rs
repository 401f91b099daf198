//! What the audit must see: a sound kernel passes, and each single flaw is named.

use hopper_attention::{Arch, DType, KernelInfo, Pass};

use super::products::{descriptor, row_bytes};
use super::{Compiled, Kind, REGISTERS, SMEM_LIMIT_A100, faults, faults_with, first_row, waits};

type Spoil<'a> = &'a dyn Fn(&mut Compiled);

fn assert_each_is_named(row: &KernelInfo, sound: impl Fn() -> Compiled, flaws: &[(&str, Spoil<'_>)]) {
    assert_eq!(faults(row, &sound()), Vec::<String>::new());
    for (expected, spoil) in flaws {
        let mut compiled = sound();
        spoil(&mut compiled);
        let found = faults(row, &compiled);
        assert!(found.iter().any(|fault| fault.contains(expected)), "expected '{expected}', got {found:?}");
    }
}

/// The audit would be worthless if it passed anything: a sound row passes, and each single flaw is named.
#[test]
fn the_audit_sees_every_flaw() {
    let Some(row) = first_row(Arch::Sm90, Pass::Forward) else { return };
    let launch = (REGISTERS / row.threads()) & !7;
    let matrix = if row.dtype() == DType::E4M3 { "QGMMA" } else { "HGMMA" };
    let store = if row.head_dim_qk().max(row.head_dim_vo()) > 128 { "STG" } else { "UTMASTG" };
    let product = |columns: usize, steps: usize| {
        std::iter::repeat_n(format!("@!P0 {matrix}.64x{columns}x16.F32.BF16 R24, gdesc[UR12], RZ"), steps)
    };
    let sound = || Compiled {
        log: "ptxas info : Function properties\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
            .into(),
        sass: [
            "USETMAXREG.DEALLOC.CTAPOOL 0x18".into(),
            "UTMALDG.4D [UR8], [UR6]".into(),
            format!("{store}.4D [R8], R6"),
            format!("UMOV UR5, {}", descriptor(row_bytes(&row))),
        ]
        .into_iter()
        .chain(product(row.tile_n(), row.head_dim_qk() / 16))
        .chain(product(row.head_dim_vo(), row.tile_n() / 16))
        .chain(["WARPGROUP.DEPBAR.LE gsb0, 0x1".into()])
        .chain(std::iter::repeat_n("MUFU.EX2 R24, R24".into(), row.tile_n() / 2))
        .chain(["WARPGROUP.DEPBAR.LE gsb0, 0x0".into()])
        .map(|text| format!("        /*0420*/                   {text} ;    /* 0x000000a0000079c8 */\n"))
        .collect(),
        usage: format!(" Function _Z10fwd_kernel:\n  REG:{launch} STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:1152\n"),
    };
    let (no_store, columns) = (format!("no {store}"), format!("64x{}x16", row.tile_n()));
    let exponentials = [row.tile_n() / 2 - 1, 0].map(|n| format!("{n} exponentials of a block's {}", row.tile_n() / 2));
    let drop_store = |c: &mut Compiled| c.sass = c.sass.replace(store, "NOP");
    let fewer_registers = |c: &mut Compiled| c.usage = c.usage.replace(&format!("REG:{launch}"), "REG:24");
    let narrow = |c: &mut Compiled| c.sass = c.sass.replace(&columns, "64x16x16");
    let other_rows =
        |c: &mut Compiled| c.sass = c.sass.replace(descriptor(row_bytes(&row)), descriptor(192 - row_bytes(&row)));
    let one_less = |c: &mut Compiled| c.sass = c.sass.replacen("HGMMA", "NOP", 1);
    let mut flaws: Vec<(&str, Spoil<'_>)> = vec![
        ("there are sums in f16", &|c| {
            c.sass += "        /*0440*/                   QGMMA.64x8x32.F16.E4M3.E4M3 R24, gdesc[UR4] ;\n"
        }),
        (&no_store, &drop_store),
        ("no UTMALDG", &|c| c.sass = c.sass.replace("UTMALDG", "LDG")),
        ("no USETMAXREG", &|c| c.sass = c.sass.replace("USETMAXREG", "NOP")),
        ("STL", &|c| c.sass = c.sass.replace("UTMALDG.4D", "UTMALDG.4D ;\n /*0430*/ STL")),
        (&exponentials[0], &|c| c.sass = c.sass.replacen("MUFU.EX2", "MUFU.RCP", 1)),
        (&exponentials[1], &|c| c.sass = c.sass.replace("gsb0, 0x1", "gsb0, 0x0")),
        ("REG is", &fewer_registers),
        ("STACK is", &|c| c.usage = c.usage.replace("STACK:0", "STACK:8")),
        ("of static shared memory", &|c| c.usage = c.usage.replace("SHARED:1024", "SHARED:240000")),
        ("the compiler says", &|c| c.log += "ptxas info : (C7510) Potential Performance Loss: wgmma serialized\n"),
        ("ptxas reports", &|c| c.log = c.log.replace("    0 bytes", "    80 bytes")),
    ];
    if row.dtype() != DType::E4M3 {
        flaws.push(("products of 16 columns", &narrow));
        flaws.push(("products by columns are", &one_less));
        flaws.push(("descriptors of rows of", &other_rows));
    }
    assert_each_is_named(&row, sound, &flaws);
}

#[test]
fn the_audit_sees_every_flaw_of_an_sm80_row() {
    let Some(row) = first_row(Arch::Sm80, Pass::Forward) else { return };
    let code = |gpu: &str| {
        let lines = ["LDGSTS.E.BYPASS.LTC128B.128 [R1], [R2.64]", "LDSM.16.M88.4 R4, [R1]"]
            .into_iter()
            .chain(std::iter::repeat_n("@!P0 HMMA.16816.F32.BF16 R24, R4, R8, R24", 4))
            .chain(std::iter::repeat_n("BAR.SYNC.DEFER_BLOCKING 0x0", 3 - row.stages()));
        let lines =
            lines.map(|text| format!("        /*0420*/                   {text} ;    /* 0x000000a0000079c8 */\n"));
        format!("\t\tcode for {gpu}\n{}", lines.collect::<String>())
    };
    let sound = || Compiled {
        log: "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n".repeat(2),
        sass: code("sm_80") + &code("sm_90"),
        usage: " Function _Z10fwd_kernel:\n  REG:250 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:552\n".repeat(2),
    };
    assert_each_is_named(
        &row,
        sound,
        &[
            ("no HMMA", &|c| c.sass = c.sass.replace("HMMA", "HFMA2")),
            ("no LDGSTS", &|c| c.sass = c.sass.replace("LDGSTS", "LDG")),
            ("no LDSM", &|c| c.sass = c.sass.replace("LDSM", "LDS")),
            ("5 HMMA for 2 LDSM, expected 3", &|c| {
                c.sass = c.sass.replacen("HMMA", "HFMA2", 3);
            }),
            ("BAR in 2 codes", &|c| c.sass = c.sass.replacen("BAR.SYNC", "NOP", 1)),
            ("LDL", &|c| c.sass = c.sass.replacen("LDSM.16", "LDL.64 R1 ;\n /*0430*/ LDSM.16", 1)),
            ("REG is", &|c| c.usage = c.usage.replacen("REG:250", "REG:256", 1)),
            ("STACK is", &|c| c.usage = c.usage.replacen("STACK:0", "STACK:8", 1)),
            ("of static shared memory", &|c| c.usage = c.usage.replacen("SHARED:1024", "SHARED:240000", 1)),
            ("ptxas reports", &|c| c.log = c.log.replacen("0 bytes spill stores", "4 bytes spill stores", 1)),
            ("does not say what ptxas did", &|c| c.log.truncate(70)),
        ],
    );
}

#[test]
fn the_audit_sees_every_flaw_of_an_sm80_backward_row() {
    let Some(row) = first_row(Arch::Sm80, Pass::Backward) else { return };
    let sums = 3 * row.tile_m() * row.head_dim_qk() / row.threads();
    let code = |gpu: &str, red: &str| {
        let lines = ["LDGSTS.E.BYPASS.LTC128B.128 [R1], [R2.64]", "LDSM.16.MT88.4 R4, [R1]"]
            .into_iter()
            .chain(std::iter::repeat_n("HMMA.16816.F32.BF16 R24, R4, R8, R24", 2))
            .chain(std::iter::repeat_n("BAR.SYNC.DEFER_BLOCKING 0x0", 3 + waits(&row)))
            .chain(std::iter::repeat_n("BAR.ARV R3, 0x40", waits(&row)));
        let lines =
            lines.map(String::from).chain(std::iter::repeat_n(format!("{red}.E.ADD.F32.FTZ.RN [R2.64], R1"), sums));
        let lines =
            lines.map(|text| format!("        /*0420*/                   {text} ;    /* 0x000000a0000079c8 */\n"));
        format!("\t\tcode for {gpu}\n{}", lines.collect::<String>())
    };
    let sound = || Compiled {
        log: "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n".repeat(2),
        sass: code("sm_80", "RED") + &code("sm_90", "REDG"),
        usage: " Function _Z10bwd_kernel:\n  REG:255 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:648\n".repeat(2),
    };
    assert_each_is_named(
        &row,
        sound,
        &[
            ("no LDGSTS", &|c| c.sass = c.sass.replace("LDGSTS", "LDG")),
            ("3 HMMA for 2 LDSM, expected 2", &|c| c.sass = c.sass.replacen("HMMA", "HFMA2", 1)),
            ("BAR in 2 codes", &|c| c.sass = c.sass.replacen("BAR.ARV", "NOP", 1)),
            ("additions to dQ in 2 codes", &|c| c.sass = c.sass.replacen("REDG", "ATOMG", 1)),
            ("of static shared memory", &|c| c.usage = c.usage.replacen("SHARED:1024", "SHARED:168960", 1)),
            ("REG is", &|c| c.usage = c.usage.replacen("REG:255", "REG:256", 1)),
            ("ptxas reports", &|c| c.log = c.log.replacen("0 bytes spill stores", "4 bytes spill stores", 1)),
        ],
    );

    // Code for a GPU that cannot run the row may be anything; where it can, it may not.
    let with_flaws = |gpu: &str| {
        let mut compiled = sound();
        compiled.sass += &(code(gpu, "RED") + "        /*0430*/                   STL [R1], R2 ;\n");
        let (heading, usage) = (format!("Fatbin elf code:\narch = {gpu}\n"), sound().usage);
        compiled.usage += &(heading + &usage.replace("STACK:0", "STACK:8"));
        compiled.log += &format!(
            "ptxas info : Compiling entry function '_Z10bwd_kernel' for '{gpu}'\n    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n"
        );
        compiled
    };
    assert_eq!(faults_with(&row, SMEM_LIMIT_A100, Kind::of(&row), &with_flaws("sm_86")), Vec::<String>::new());
    for (smem_bytes, gpu) in [(row.smem_bytes(), "sm_86"), (SMEM_LIMIT_A100, "sm_87")] {
        let found = faults_with(&row, smem_bytes, Kind::of(&row), &with_flaws(gpu)).join("\n");
        for flaw in ["STL", "STACK is", "ptxas reports"] {
            assert!(found.contains(flaw), "{gpu}: {flaw} is not in\n{found}");
        }
    }
}
