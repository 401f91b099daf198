//! Every bad input: exit code 1 and one sentence that says what, got and allowed (2 for a command line that cannot be
//! read), nothing computed, and no output touched.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::{FIXTURE, Folder, Ran, hattn, hattn_on};
use safetensors::Dtype;

const SHAPE: &[usize] = &[1, 4, 2, 8];

/// A good input whose tensors may be replaced by name.
fn input_with(folder: &Folder, changes: &[(&str, &[usize])]) -> PathBuf {
    let shape = |name| changes.iter().find(|(changed, _)| *changed == name).map_or(SHAPE, |(_, shape)| shape);
    folder.tensors("qkv.safetensors", Some("bshd"), &["q", "k", "v"].map(|name| (name, shape(name))))
}

#[track_caller]
fn refused(folder: &Folder, line: &str, input: &Path, parts: &[&str]) {
    let output = folder.path("o.safetensors");
    std::fs::write(&output, "an older output").unwrap();
    let before = folder.names();
    hattn_on(&format!("run --device cpu {line}"), input, Some(&output)).refused(parts);
    assert_eq!(std::fs::read(&output).unwrap(), b"an older output", "the output was touched");
    assert_eq!(folder.names(), before, "something was left behind");
    hattn_on(&format!("check --device cpu {line}"), input, None).refused(parts);
}

#[test]
fn a_missing_tensor() {
    let folder = Folder::new();
    let input = folder.tensors("qkv.safetensors", Some("bshd"), &[("q", SHAPE), ("k", SHAPE), ("values", SHAPE)]);
    refused(&folder, "", &input, &["qkv.safetensors: tensor `v` is missing; found: ", "values"]);
    let input = folder.tensors("qkv.safetensors", Some("bshd"), &[]);
    refused(&folder, "", &input, &["tensor `q` is missing; found: none"]);
}

#[test]
fn a_wrong_dtype() {
    let folder = Folder::new();
    let tensor = |name, dtype, width: usize| (name, dtype, SHAPE, vec![0; 64 * width]);
    let mixed = [tensor("q", Dtype::F32, 4), tensor("k", Dtype::F16, 2), tensor("v", Dtype::F32, 4)];
    let input = folder.typed("qkv.safetensors", Some("bshd"), &mixed);
    refused(&folder, "", &input, &["q, k and v have dtypes f32, f16 and f32; allowed: one for all three"]);
    for (dtype, width) in [(Dtype::F64, 8), (Dtype::I32, 4), (Dtype::F8_E4M3, 1)] {
        let input = folder.typed("qkv.safetensors", Some("bshd"), &["q", "k", "v"].map(|n| tensor(n, dtype, width)));
        refused(&folder, "", &input, &[&format!("tensor `q` has dtype {dtype}; allowed: BF16, F16, F32")]);
    }
}

#[test]
fn a_wrong_number_of_dimensions() {
    let folder = Folder::new();
    let input = input_with(&folder, &[("k", &[4, 2, 8])]);
    let parts = ["tensor `k` has 3 dimensions [4, 2, 8]; allowed: 4, [batch, seqlen, heads, head_dim]"];
    refused(&folder, "", &input, &parts);
    let input = folder.tensors("thd.safetensors", None, &["q", "k", "v"].map(|name| (name, SHAPE)));
    let parts = ["tensor `q` has 4 dimensions", "allowed: 3, [total, heads, head_dim]"];
    refused(&folder, "--layout thd", &input, &parts);
}

#[test]
fn shapes_that_do_not_fit_together() {
    let folder = Folder::new();
    let cases: [(&str, &[usize], &str); 5] = [
        ("q", &[2, 4, 2, 8], "batch is 2 in q and 1 in k"),
        ("v", &[3, 4, 2, 8], "batch is 1 in k and 3 in v"),
        ("v", &[1, 5, 2, 8], "seqlen is 4 in k and 5 in v"),
        ("v", &[1, 4, 1, 8], "heads is 2 in k and 1 in v"),
        ("q", &[1, 4, 2, 16], "head_dim is 16 in q and 8 in k"),
    ];
    for (name, shape, part) in cases {
        let input = input_with(&folder, &[(name, shape)]);
        refused(&folder, "", &input, &[part, "allowed: the same (layout bshd)"]);
    }
}

#[test]
fn heads_that_do_not_divide() {
    let folder = Folder::new();
    let input = input_with(&folder, &[("q", &[1, 4, 3, 8])]);
    refused(&folder, "", &input, &["heads_q: 3 with heads_kv 2; allowed: a multiple of heads_kv"]);
    let input = input_with(&folder, &[("q", &[1, 4, 0, 8])]);
    refused(&folder, "", &input, &["heads_q: 0; allowed: 1 and above"]);
    let none: &[usize] = &[1, 4, 2, 0];
    let input = input_with(&folder, &[("q", none), ("k", none)]);
    refused(&folder, "", &input, &["head_dim_qk: 0"]);
}

#[test]
fn gradients_that_do_not_fit() {
    let folder = Folder::new();
    let tensor =
        |name, shape: &'static [usize]| (name, Dtype::F32, shape, vec![0; 4 * shape.iter().product::<usize>()]);
    let file = |more: &[(&'static str, Dtype, &'static [usize], Vec<u8>)]| {
        let qkv = [("q", SHAPE), ("k", SHAPE), ("v", SHAPE)].map(|(name, shape)| tensor(name, shape));
        folder.typed("qkv.safetensors", Some("bshd"), &[&qkv[..], more].concat())
    };
    let refused = |more: &[(&'static str, Dtype, &'static [usize], Vec<u8>)], part: &str| {
        let input = file(more);
        refused(&folder, "--backward", &input, &["qkv.safetensors: tensor ", part]);
        // Without --backward these tensors are not read.
        hattn_on("check --device cpu", &input, None).fine();
    };
    let d_o = || tensor("d_o", SHAPE);
    refused(&[], "`d_o` is missing; found: ");
    refused(
        &[tensor("d_o", &[1, 4, 1, 8])],
        "`d_o` has shape [1, 4, 1, 8]; allowed: [1, 4, 2, 8], [batch, seqlen, heads, head_dim]",
    );
    refused(
        &[tensor("d_o", &[4, 2, 8])],
        "`d_o` has shape [4, 2, 8]; allowed: [1, 4, 2, 8], [batch, seqlen, heads, head_dim]",
    );
    refused(&[("d_o", Dtype::BF16, SHAPE, vec![0; 128])], "`d_o` has dtype bf16; allowed: f32");
    refused(&[("d_o", Dtype::F64, SHAPE, vec![0; 512])], "`d_o` has dtype F64; allowed: BF16, F16, F32");
    let part = "`d_lse` has shape [1, 4, 2]; allowed: [1, 2, 4], [batch, heads, seqlen]";
    refused(&[d_o(), tensor("d_lse", &[1, 4, 2])], part);
    refused(&[d_o(), ("d_lse", Dtype::BF16, &[1, 2, 4], vec![0; 16])], "`d_lse` has dtype bf16; allowed: f32");
}

#[test]
fn a_layout_that_is_not_stated_or_not_known() {
    let folder = Folder::new();
    let tensors = [("q", SHAPE), ("k", SHAPE), ("v", SHAPE)];
    let input = folder.tensors("qkv.safetensors", None, &tensors);
    refused(
        &folder,
        "",
        &input,
        &["the layout is stated neither by --layout nor by the file's metadata; allowed: bshd, bhsd, thd"],
    );
    let input = folder.tensors("qkv.safetensors", Some("sbhd"), &tensors);
    refused(&folder, "", &input, &["metadata layout `sbhd`; allowed: bshd, bhsd, thd"]);
    let input = folder.tensors("qkv.safetensors", Some("thd"), &tensors);
    refused(&folder, "", &input, &["tensor `q` has 4 dimensions", "allowed: 3, [total, heads, head_dim]"]);
}

#[test]
fn a_scale_that_is_no_scale() {
    for scale in ["0", "-1", "nan", "inf"] {
        let folder = Folder::new();
        let input = input_with(&folder, &[]);
        refused(&folder, &format!("--scale {scale}"), &input, &["softmax_scale: ", "allowed: finite and above 0"]);
    }
    let folder = Folder::new();
    let input = input_with(&folder, &[]);
    for cap in ["-1", "nan", "inf", "1e-45"] {
        refused(
            &folder,
            &format!("--softcap {cap}"),
            &input,
            &["softcap: ", "allowed: 0 (none), or finite and above 0"],
        );
    }
    for what in ["alibi", "max_logits"] {
        let options = format!("--{} --fp8 --dtype bf16", what.replace('_', "-"));
        refused(&folder, &options, &input, &[&format!("unsupported: {what} with e4m3 operands")]);
    }
    for p in ["1", "-0.5", "nan", "0.99999", "x"] {
        let ran = hattn_on(&format!("check --device cpu --dropout {p}"), &input, None);
        assert!(ran.code == Some(2) && ran.stderr.contains("0 to below 1") || p == "0.99999", "{ran:?}");
        assert!(ran.stderr.contains("dropout"), "{ran:?}");
    }
    refused(&folder, "--dropout 0.5 --fp8 --dtype bf16", &input, &["unsupported: dropout with e4m3 operands"]);
}

#[test]
fn a_file_that_is_cut_off_or_no_safetensors_file() {
    let folder = Folder::new();
    let whole = std::fs::read(FIXTURE).unwrap();
    let input = folder.path("cut.safetensors");
    // After a part of the tensors, within the header, within the header's length.
    for (bytes, part) in [(whole.len() - 1, "truncated: "), (100, "truncated"), (5, "not a safetensors file")] {
        std::fs::write(&input, &whole[..bytes]).unwrap();
        refused(&folder, "", &input, &["cut.safetensors: ", part]);
    }
    std::fs::write(&input, [whole.as_slice(), b"more"].concat()).unwrap();
    refused(&folder, "", &input, &["4 bytes past its last tensor"]);
    std::fs::write(&input, b"Hello, I am a text file and no tensors at all.").unwrap();
    refused(&folder, "", &input, &["not a safetensors file"]);
    std::fs::write(&input, b"\x04\0\0\0\0\0\0\0{\"a\"").unwrap();
    refused(&folder, "", &input, &["bad safetensors header"]);
    // Offsets that do not match the shape.
    let header = br#"{"q":{"dtype":"F32","shape":[1,1,1,8],"data_offsets":[0,4]}}"#;
    let file = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
    std::fs::write(&input, file).unwrap();
    refused(&folder, "", &input, &["bad safetensors header"]);
}

#[test]
fn an_input_that_is_not_there() {
    let folder = Folder::new();
    refused(&folder, "", &folder.path("nothing.safetensors"), &["nothing.safetensors: cannot be opened: No such file"]);
    refused(&folder, "", &folder.path("."), &["a folder; allowed: a regular file"]);
}

#[test]
fn an_output_that_cannot_be_written() {
    let folder = Folder::new();
    let read_only = folder.path("read_only.safetensors");
    std::fs::write(&read_only, "keep me").unwrap();
    let mut permissions = std::fs::metadata(&read_only).unwrap().permissions();
    permissions.set_readonly(true);
    std::fs::set_permissions(&read_only, permissions).unwrap();
    std::fs::create_dir(folder.path("folder")).unwrap();
    let before = folder.names();
    let cases = [
        (folder.path("no/such/folder/o.safetensors"), "cannot be written: No such file"),
        (read_only.join("o.safetensors"), "cannot be written: Not a directory"),
        (read_only.clone(), "read-only; allowed: "),
        (folder.path("folder"), "a folder; allowed: a file name"),
        (PathBuf::from("/"), "allowed: "),
        (folder.path("new/"), "not a file name"),
        (folder.path("new/."), "not a file name"),
        (folder.path(&"long".repeat(70)), "cannot be written: File name too long"),
        (PathBuf::from("/dev/null"), "not a regular file"),
    ];
    for (output, part) in cases {
        let name = output.display().to_string();
        // Nothing on stdout: it is found before a word about computing is printed.
        hattn_on("run --device cpu", Path::new(FIXTURE), Some(&output)).refused(&[&format!("output {name}"), part]);
    }
    assert_eq!(std::fs::read(&read_only).unwrap(), b"keep me");
    assert_eq!(folder.names(), before);
}

#[test]
fn the_input_as_output() {
    let folder = Folder::new();
    let input = input_with(&folder, &[]);
    let before = std::fs::read(&input).unwrap();
    hattn_on("run --device cpu", &input, Some(&input)).refused(&["is the input; allowed: another file"]);
    assert!(std::fs::read(&input).unwrap() == before);
}

/// The disk is full halfway: the old output stays, whole, and nothing is left beside it.
#[cfg(unix)]
#[test]
fn a_write_that_fails_halfway() {
    let folder = Folder::new();
    let output = folder.path("o.safetensors");
    std::fs::write(&output, "an older output").unwrap();
    // A limit on the size of files stands in for a full disk; ignoring its signal turns it into a failing write.
    let script = r#"trap '' XFSZ; ulimit -f 64; exec "$0" run --device cpu --input "$1" --output "$2""#;
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_hattn"), FIXTURE]).arg(&output);
    let ran = Ran::of(&mut command);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stderr.contains("cannot be written: File too large") && ran.stderr.lines().count() == 1, "{ran:?}");
    assert_eq!(std::fs::read(&output).unwrap(), b"an older output");
    assert_eq!(folder.names(), ["o.safetensors"]);
}

/// What a symbolic link leads to is replaced, not the link.
#[cfg(unix)]
#[test]
fn an_output_behind_a_link() {
    let folder = Folder::new();
    let (target, link) = (folder.path("target.safetensors"), folder.path("link.safetensors"));
    std::fs::write(&target, "an older output").unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    hattn_on("run --device cpu", Path::new(FIXTURE), Some(&link)).fine();
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(std::fs::metadata(&target).unwrap().len() > 100_000);
}

#[test]
fn a_device_that_cannot_do_it() {
    let ran = hattn(["check", "--input", FIXTURE, "--device", "cuda:99"]);
    ran.refused(&["no device: cuda:99; "]);
    let ran = hattn(["check", "--input", FIXTURE, "--device", "cuda:0", "--dtype", "f32"]);
    ran.refused(&["cuda:0: the GPU kernels do not compute f32; --dtype bf16 or f16 converts"]);
}

#[test]
fn an_instruction_set_where_there_is_none() {
    let ran = hattn(["check", "--input", FIXTURE, "--device", "cpu", "--arch", "sm80"]);
    ran.refused(&["sm80 kernels on the CPU; nearest: a GPU of sm_80 and later"]);
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_table_of_no_kernels() {
    hattn(["info", "--markdown"]).refused(&["--markdown lists the kernels of this build, and it has none"]);
}

#[test]
fn random_sizes_that_make_no_problem() {
    let folder = Folder::new();
    let random = |line: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hattn"));
        command.arg("random").args(line.split_whitespace()).arg("--output").arg(folder.path("qkv.safetensors"));
        Ran::of(&mut command)
    };
    random("--heads-q 3 --heads-kv 2").refused(&["heads_q: 3 with heads_kv 2; allowed: a multiple of heads_kv"]);
    random("--packed --like peaky").refused(&["--like peaky with packed sequences; allowed: normal"]);
    random("--batch 100000 --seqlen-q 10000000 --head-dim 1000").refused(&["out of memory: 8000000000000000 elements"]);
    random("--batch 100000 --seqlen-q 100000000 --head-dim 2000000000").refused(&["shape [", "allowed: a number of"]);
    assert!(folder.names().is_empty());
}

#[test]
fn a_command_line_that_cannot_be_read() {
    let input = ["--input", FIXTURE];
    let cases: [&[&str]; 13] = [
        &[],
        &["walk"],
        &["run", input[0], input[1]],
        &["check"],
        &["check", input[0], input[1], "--mask", "diagonal"],
        &["check", input[0], input[1], "--device", "tpu"],
        &["check", input[0], input[1], "--dtype", "f64"],
        &["check", input[0], input[1], "--arch", "sm_80"],
        &["check", input[0], input[1], "--repeat", "0"],
        &["check", input[0], input[1], "--sm-margin", "-1"],
        &["check", input[0], input[1], "--workspace-limit", "-1"],
        &["bench", "--sm-margin", "few"],
        &["check", input[0], input[1], "--deterministic"],
    ];
    for args in cases {
        let ran = hattn(args);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{args:?}");
        assert!(!ran.stderr.is_empty(), "{args:?}");
    }
}
