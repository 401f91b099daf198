//! `hattn` on a GPU. Without one each test prints a line `skipped: no GPU (NAME)`; with `HATTN_REQUIRE_GPU=1` it fails.
#![cfg(feature = "cuda")]

mod common;

use std::collections::BTreeSet;
use std::io::Write;

use common::{Folder, Written, fixture, hattn, hattn_on};
use hopper_attention::{DType, Device, backward_kernels, kernels};

/// Whether a GPU is here that some kernel of this build runs on.
fn gpu(test: &str) -> bool {
    let found = Device::available().iter().any(|gpu| kernels().iter().any(|kernel| kernel.runs_on(&gpu.facts)));
    if !found {
        let required = std::env::var("HATTN_REQUIRE_GPU").is_ok_and(|value| value == "1");
        assert!(!required, "HATTN_REQUIRE_GPU=1, but no GPU runs a kernel of this build");
        // Past the test harness, which would hide it, and in one piece: other tests write at the same time.
        let line = format!("skipped: no GPU ({test})\n");
        std::io::stderr().write_all(line.as_bytes()).expect("stderr is open");
    }
    found
}

#[test]
fn check_passes_on_real_activations() {
    if !gpu("check_passes_on_real_activations") {
        return;
    }
    for options in ["", "--mask causal", "--mask window:64,0:top-left", "--dtype f16 --scale 0.3"] {
        let line = format!("check --device cuda:0 {options}");
        let text = hattn_on(&line, &fixture(), None).fine();
        assert!(text.contains("median of 10 runs") && text.contains("passed: the largest error is 0."), "{text}");
    }
}

#[test]
fn check_passes_with_every_instruction_set() {
    if !gpu("check_passes_with_every_instruction_set") {
        return;
    }
    let facts = Device::cuda(0).unwrap().info().unwrap().facts;
    let archs: BTreeSet<String> =
        kernels().iter().filter(|kernel| kernel.runs_on(&facts)).map(|kernel| kernel.arch().to_string()).collect();
    for arch in archs {
        let text = hattn_on(&format!("check --device cuda:0 --mask causal --arch {arch}"), &fixture(), None).fine();
        assert!(text.contains(&format!("{arch} fwd")) && text.contains("passed: "), "{text}");
    }
}

#[test]
fn check_passes_on_shapes_with_nothing_in_them() {
    if !gpu("check_passes_on_shapes_with_nothing_in_them") {
        return;
    }
    let folder = Folder::new();
    for sizes in ["--batch 0", "--seqlen-q 0 --seqlen-kv 5", "--seqlen-q 5 --seqlen-kv 0"] {
        let input = folder.random("qkv.safetensors", &format!("--heads-q 2 --head-dim 16 {sizes}"));
        let text = hattn_on("check --device cuda:0", &input, None).fine();
        assert!(text.contains("passed"), "{sizes}: {text}");
    }
}

/// Quantised where the attention is computed.
#[test]
fn check_quantises_on_the_gpu() {
    if !gpu("check_quantises_on_the_gpu") {
        return;
    }
    if !kernels().iter().any(|kernel| kernel.dtype() == DType::E4M3) {
        let line = "skipped: no kernels of e4m3 operands (check_quantises_on_the_gpu)\n";
        std::io::stderr().write_all(line.as_bytes()).expect("stderr is open");
        return;
    }
    for options in [
        "--fp8",
        "--fp8 per-head --mask causal",
        "--fp8 per-block --hadamard 7 --dtype f16",
        "--fp8 --half-scores",
        "--fp8 per-block --half-scores --mask causal",
    ] {
        let text = hattn_on(&format!("check --device cuda:0 {options}"), &fixture(), None).fine();
        let fp8 = text.lines().find(|line| line.starts_with("fp8 ")).expect("a line for the quantiser");
        assert!(fp8.contains(": sm90 quantise ") && text.contains("passed: the largest error is 0."), "{text}");
    }
}

#[test]
fn auto_takes_the_gpu_where_it_can() {
    if !gpu("auto_takes_the_gpu_where_it_can") {
        return;
    }
    let device = |options: &str| {
        let text = hattn_on(&format!("check {options}"), &fixture(), None).fine();
        text.lines().find(|line| line.starts_with("device ")).expect("a line for the device").to_string()
    };
    let taken = device("");
    assert!(taken.contains("cuda:") && taken.contains("auto: "), "{taken}");
    let refused = device("--dtype f32");
    assert!(refused.contains("cpu, ") && refused.contains("auto: cuda:0: "), "{refused}");
}

#[test]
fn a_gpu_writes_what_the_cpu_writes() {
    if !gpu("a_gpu_writes_what_the_cpu_writes") {
        return;
    }
    let folder = Folder::new();
    let input = folder
        .random("qkv.safetensors", "--batch 2 --seqlen-q 75 --seqlen-kv 133 --heads-q 6 --heads-kv 2 --layout bhsd");
    let [gpu, cpu] = ["cuda:0", "cpu"].map(|device| {
        let output = folder.path("o.safetensors");
        hattn_on(&format!("run --mask causal --device {device}"), &input, Some(&output)).fine();
        Written::read(&output)
    });
    assert_eq!((gpu.dtype, &gpu.o_shape, &gpu.lse_shape), (cpu.dtype, &cpu.o_shape, &cpu.lse_shape));
    assert_eq!(gpu.metadata, cpu.metadata);
    // Two roundings to bf16 of numbers below 4, and the roundings of P: `check` is what judges precisely.
    let far = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(far(&gpu.o, &cpu.o) < 0.05 && far(&gpu.lse, &cpu.lse) < 1e-4);
}

/// Whether this build has backward kernels, besides a GPU for them.
fn gpu_with_gradients(test: &str) -> bool {
    gpu(test) && {
        let found =
            Device::available().iter().any(|gpu| backward_kernels().iter().any(|kernel| kernel.runs_on(&gpu.facts)));
        if !found {
            let line = format!("skipped: no backward kernels ({test})\n");
            std::io::stderr().write_all(line.as_bytes()).expect("stderr is open");
        }
        found
    }
}

#[test]
fn check_passes_for_gradients() {
    if !gpu_with_gradients("check_passes_for_gradients") {
        return;
    }
    let folder = Folder::new();
    for sizes in [
        "--batch 2 --seqlen-q 200 --seqlen-kv 333 --heads-q 6 --heads-kv 2 --layout bhsd",
        "--batch 1 --seqlen-q 333 --seqlen-kv 130 --heads-q 2 --dtype f16",
        "--batch 0",
        "--seqlen-q 0 --seqlen-kv 5",
        "--seqlen-q 5 --seqlen-kv 0",
    ] {
        let input = folder.random("qkv.safetensors", &format!("--backward --head-dim 64 {sizes}"));
        for options in ["", "--mask causal", "--mask window:64,0:top-left --deterministic"] {
            let text = hattn_on(&format!("check --backward --device cuda:0 {options}"), &input, None).fine();
            assert!(text.matches("median of 10 runs").count() == 2 && text.contains("passed"), "{sizes}: {text}");
        }
    }
}

#[test]
fn deterministic_gradients_are_the_same_bits() {
    if !gpu_with_gradients("deterministic_gradients_are_the_same_bits") {
        return;
    }
    let folder = Folder::new();
    let input = folder.random("qkv.safetensors", "--backward --batch 2 --seqlen-q 1500 --heads-q 4 --head-dim 64");
    let [a, b] = ["a.safetensors", "b.safetensors"].map(|name| {
        let output = folder.path(name);
        let line = "run --backward --deterministic --mask causal --device cuda:0";
        let text = hattn_on(line, &input, Some(&output)).fine();
        assert!(text.contains("dQ in turns"), "{text}");
        std::fs::read(output).expect("the output")
    });
    assert!(a == b);
}

#[test]
fn a_head_dim_that_no_kernel_takes_is_refused_by_name() {
    if !gpu("a_head_dim_that_no_kernel_takes_is_refused_by_name") {
        return;
    }
    let folder = Folder::new();
    let input = folder.random("qkv.safetensors", "--heads-q 1 --seqlen-q 8 --head-dim 12");
    hattn_on("check --device cuda:0", &input, None).refused(&["unsupported: "]);
}

/// The forward of Hopper's kernels goes to 256, in pairs. What does not is refused by its name.
#[test]
fn head_dims_above_128_are_checked_on_hopper() {
    if !gpu("head_dims_above_128_are_checked_on_hopper") {
        return;
    }
    if !hattn(["info"]).fine().contains("sm_90") {
        println!("skipped: no Hopper GPU (head_dims_above_128_are_checked_on_hopper)");
        return;
    }
    let folder = Folder::new();
    let nearest = "nearest: up to 64 with 64, up to 128 with 128";
    for (i, dims) in
        ["192 --head-dim-vo 128", "256", "136 --head-dim-vo 200", "72 --head-dim-vo 192"].iter().enumerate()
    {
        let sizes = format!("--heads-q 2 --seqlen-q 300 --dtype bf16 --backward --head-dim {dims}");
        let input = folder.random(&format!("{i}.safetensors"), &sizes);
        for mask in ["full", "causal", "window:70,9"] {
            let text = hattn_on(&format!("check --device cuda:0 --mask {mask}"), &input, None).fine();
            assert!(text.contains("passed"), "{text}");
            for fp8 in ["--fp8 per-block", "--fp8 per-head --hadamard 3 --half-scores"] {
                let fp8 = hattn_on(&format!("check --device cuda:0 --mask {mask} {fp8}"), &input, None);
                // Kernels of e4m3 take multiples of 16.
                if i < 2 {
                    let text = fp8.fine();
                    assert!(text.contains("passed"), "{text}");
                } else {
                    fp8.refused(&["multiples of 16"]);
                }
            }
        }
        let backward = hattn_on("check --device cuda:0 --backward", &input, None);
        backward.refused(&["for a backward pass of bf16, full, on sm90", nearest]);
        let sm80 = hattn_on("check --device cuda:0 --arch sm80", &input, None).fine();
        assert!(sm80.contains("on sm80") && sm80.contains("passed"), "{sm80}");
    }
}

/// Lists of blocks, also those that `hattn` makes of slices and prefixes, in both passes.
#[test]
fn check_passes_with_lists_of_blocks_on_hopper() {
    if !gpu_with_gradients("check_passes_with_lists_of_blocks_on_hopper") {
        return;
    }
    if !hattn(["info"]).fine().contains("sm_90") {
        println!("skipped: no Hopper GPU (check_passes_with_lists_of_blocks_on_hopper)");
        return;
    }
    let folder = Folder::new();
    let slices = folder.path("slices.txt");
    std::fs::write(&slices, "0 300 0 300 1\n300 500 0 200 0\n300 500 200 600 3\n").expect("a folder of the test's own");
    let slices = format!("slices:{}", slices.display());
    for kind in ["random:30", "documents", "all", "nothing", "striped", &slices, "prefixes:77,300"] {
        let sizes = "--batch 2 --seqlen-q 500 --seqlen-kv 600 --heads-q 4 --heads-kv 2 --head-dim 64 --backward";
        let input = folder.random("listed.safetensors", &format!("{sizes} --seed 3 --block-mask {kind}"));
        for options in ["", "--mask window:200,40", "--backward", "--backward --deterministic --mask causal"] {
            let text = hattn_on(&format!("check --device cuda:0 {options}"), &input, None).fine();
            assert!(text.contains("block_mask") && text.contains("sm90") && text.contains("passed"), "{kind}: {text}");
        }
    }
    // With what is done to scores and weights, too.
    let sizes = "--batch 2 --seqlen-q 500 --seqlen-kv 600 --heads-q 4 --heads-kv 2 --head-dim 128 --backward";
    let input = folder.random("modified.safetensors", &format!("{sizes} --block-mask random:40 --alibi --dropout 0.2"));
    for options in ["", "--softcap 20 --max-logits", "--backward --deterministic --softcap 20 --mask causal"] {
        let text = hattn_on(&format!("check --device cuda:0 --dropout 0.2 {options}"), &input, None).fine();
        assert!(text.contains("block_mask") && text.contains("sm90") && text.contains("passed"), "{text}");
    }
}

#[test]
fn a_tuned_kernel_is_taken_and_right() {
    if !gpu("a_tuned_kernel_is_taken_and_right") {
        return;
    }
    let folder = Folder::new();
    let input = folder.random("qkv.safetensors", "--batch 2 --seqlen-q 512 --heads-q 2");
    let path = folder.path("tuning.tsv");
    let tuning = path.to_str().expect("a UTF-8 path");
    let sizes = "--dtypes bf16 --dims 64 --seqlens 512 --tokens 1024 --hidden 128 --masks causal --iters 3";
    let text = hattn(format!("tune {sizes} --output {tuning}").split_whitespace()).fine();
    // Both tiles that head dim 64 has under a causal mask, and the kernels of head dim 128.
    assert!(text.contains("the rule's choice") && text.lines().filter(|line| line.contains(" us  sm90")).count() > 1);
    assert!(text.contains("1 shapes on ") && text.contains("1 choices"), "{text}");
    let check =
        |mask: &str| hattn_on(&format!("check --device cuda:0 --mask {mask} --tuning {tuning}"), &input, None).fine();
    let (known, other) = (check("causal"), check("full"));
    assert!(known.contains(", tuned, grid") && known.contains("passed"), "{known}");
    assert!(!other.contains("tuned") && other.contains("passed"), "{other}");
    // Whatever kernel the file names for this card: here each in turn.
    let written = std::fs::read_to_string(&path).expect("the tuning");
    let (head, _) = written.rsplit_once('\t').expect("fields");
    for row in kernels().iter().filter(|row| text.contains(&row.to_string())) {
        std::fs::write(&path, format!("{head}\t{row}\n")).expect("written");
        let text = check("causal");
        assert!(text.contains(&format!("{row}, tuned")) && text.contains("passed"), "{text}");
    }
    // What modifiers read is there, too.
    for modified in ["--alibi", "--dropout 0.1"] {
        let output = folder.path("modified.tsv");
        let output = output.to_str().expect("a UTF-8 path");
        let text = hattn(format!("tune {sizes} {modified} --output {output}").split_whitespace()).fine();
        assert!(text.contains("1 shapes on ") && text.lines().any(|line| line.contains(" us  sm90")), "{text}");
    }
}

#[test]
fn check_passes_on_packed_sequences() {
    if !gpu("check_passes_on_packed_sequences") {
        return;
    }
    let folder = Folder::new();
    let input = folder.random(
        "packed.safetensors",
        "--packed --batch 5 --seqlen-q 300 --heads-q 4 --heads-kv 2 --head-dim 64 --dtype bf16 --backward",
    );
    for options in ["", "--mask causal", "--mask window:40,0", "--backward --mask causal"] {
        let text = hattn_on(&format!("check --device cuda:0 {options}"), &input, None).fine();
        assert!(text.contains("5 sequences") && text.contains("passed: the largest error is 0."), "{text}");
    }
    for scaling in ["per-tensor", "per-head --hadamard 3", "per-block --mask causal"] {
        let text = hattn_on(&format!("check --device cuda:0 --fp8 {scaling}"), &input, None).fine();
        assert!(text.contains("lengths of 5 sequences in memory") && text.contains("passed"), "{text}");
    }
}
