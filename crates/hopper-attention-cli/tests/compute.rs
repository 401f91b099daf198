//! `hattn run` and `hattn check` on inputs that are fine. All on the CPU, so that they say the same everywhere.

mod common;

use std::path::Path;

use common::{EDGES, FIXTURE, Folder, Written, bytes, check_passes, hattn, hattn_on};
use safetensors::{Dtype, SafeTensors};

#[test]
fn check_passes_on_real_activations() {
    for mask in ["full", "causal", "causal:top-left", "window:64,0", "window:-,16:top-left"] {
        let text = hattn(["check", "--device", "cpu", "--input", FIXTURE, "--mask", mask]).fine();
        for part in ["problem", "plan", "device", "time", "TFLOP/s", "o ", "lse ", "passed: the largest error is 0."] {
            assert!(text.contains(part), "`{part}` is not in: {text}");
        }
        assert!(text.contains("bf16 bshd (from the file)"), "{text}");
    }
}

#[test]
fn check_passes_in_every_type_and_converts_when_asked() {
    for dtype in ["bf16", "f16", "f32"] {
        let text = hattn(["check", "--device", "cpu", "--input", FIXTURE, "--dtype", dtype]).fine();
        assert_eq!(text.contains(&format!("converted to {dtype}")), dtype != "bf16", "{text}");
        assert!(text.contains("passed"), "{text}");
    }
}

#[test]
fn the_cpu_ignores_a_margin_and_meets_a_limit() {
    let folder = Folder::new();
    let input = folder.random("qkv.safetensors", "--backward --seqlen-q 50 --heads-q 2 --head-dim 16");
    let text = hattn_on("check --device cpu --backward --sm-margin 500 --workspace-limit 0", &input, None).fine();
    let options = "sm_margin 500 workspace_limit 0\n";
    for part in [&format!(" lse {options}"), &format!(" d_lse {options}"), "passed"] {
        assert!(text.contains(part), "`{part}` is not in: {text}");
    }
}

#[test]
fn check_passes_on_other_shapes() {
    check_passes(
        &[
            "--batch 2 --seqlen-q 65 --seqlen-kv 130 --heads-q 6 --heads-kv 2 --head-dim 40 --head-dim-vo 24 --dtype f32",
        ],
        &["full", "causal", "window:7,3"].map(|mask| format!("--mask {mask} --scale 0.3")),
    );
}

/// The CPU takes any head dims, also those that no kernel takes.
#[test]
fn check_and_run_take_any_head_dims() {
    let sizes =
        ["192 --head-dim-vo 128", "256", "136 --head-dim-vo 512 --dtype f16", "12 --head-dim-vo 520 --dtype f32"];
    let shapes = sizes.map(|sizes| format!("--seqlen-q 33 --seqlen-kv 70 --heads-q 2 --heads-kv 1 --head-dim {sizes}"));
    check_passes(&shapes.each_ref().map(String::as_str), &["--mask causal".into()]);
    let folder = Folder::new();
    let input = folder.random("qkv.safetensors", &format!("--backward {}", shapes[0]));
    let output = folder.path("o.safetensors");
    let text = hattn_on("run --device cpu --backward", &input, Some(&output)).fine();
    assert!(text.contains("o bf16 [1, 33, 2, 128] bshd"), "{text}");
    assert_eq!(Written::read(&output).o_shape, [1, 33, 2, 128]);
    hattn_on("check --device cpu --backward", &input, None).fine();
}

#[test]
fn run_writes_o_and_lse_as_the_input_is() {
    let folder = Folder::new();
    let output = folder.path("o.safetensors");
    let text = hattn_on("run --device cpu --mask causal", Path::new(FIXTURE), Some(&output)).fine();
    assert!(text.contains("o bf16 [2, 197, 12, 32] bshd, lse f32 [2, 12, 197]"), "{text}");
    let written = Written::read(&output);
    assert_eq!((written.dtype, written.o_shape), (Dtype::BF16, vec![2, 197, 12, 32]));
    assert_eq!(written.lse_shape, [2, 12, 197]);
    assert!(written.o.iter().chain(&written.lse).all(|value| value.is_finite()));
    assert!(written.gradients.is_empty());
    for (key, value) in [("layout", "bshd"), ("mask", "causal"), ("softmax_scale", "0.17677669"), ("softcap", "0")] {
        assert_eq!(written.metadata[key], value, "{key}");
    }
    assert_eq!(folder.names(), ["o.safetensors"]);
}

#[test]
fn the_same_input_gives_the_same_file() {
    let folder = Folder::new();
    let [a, b] = ["a.safetensors", "b.safetensors"].map(|name| folder.path(name));
    hattn_on("run --device cpu", Path::new(FIXTURE), Some(&a)).fine();
    // Over an output that is there already.
    std::fs::write(&b, "an older output").unwrap();
    hattn_on("run --device cpu --repeat 3", Path::new(FIXTURE), Some(&b)).fine();
    assert!(std::fs::read(a).unwrap() == std::fs::read(b).unwrap());
}

/// One query head that sees two keys with equal scores: everything can be worked out by hand.
#[test]
fn a_result_by_hand() {
    let folder = Folder::new();
    let tensors = [
        ("q", Dtype::F32, &[1, 2, 1, 2][..], bytes(&[0.0, 0.0, 0.0, 0.0])),
        ("k", Dtype::F32, &[1, 2, 1, 2][..], bytes(&[1.0, 2.0, 3.0, 4.0])),
        ("v", Dtype::F32, &[1, 2, 1, 1][..], bytes(&[1.0, 3.0])),
    ];
    let input = folder.typed("qkv.safetensors", Some("bshd"), &tensors);
    let output = folder.path("o.safetensors");
    hattn_on("run --device cpu --mask causal", &input, Some(&output)).fine();
    let written = Written::read(&output);
    assert_eq!((written.o, written.o_shape), (vec![1.0, 2.0], vec![1, 2, 1, 1]));
    assert_eq!(written.lse[0], 0.0);
    assert!((written.lse[1] - std::f32::consts::LN_2).abs() < 1e-6);
}

#[test]
fn a_row_without_keys_is_zero() {
    let folder = Folder::new();
    let shapes: [(&str, &[usize]); 3] = [("q", &[1, 4, 2, 8]), ("k", &[1, 2, 2, 8]), ("v", &[1, 2, 2, 8])];
    let input = folder.tensors("qkv.safetensors", Some("bshd"), &shapes);
    let output = folder.path("o.safetensors");
    hattn_on("run --device cpu --mask causal", &input, Some(&output)).fine();
    let written = Written::read(&output);
    assert!(written.o[..2 * 2 * 8].iter().all(|&o| o == 0.0), "queries 0 and 1 precede every key");
    assert!(written.o[2 * 2 * 8..].iter().all(|&o| o != 0.0));
    assert_eq!(
        written.lse.iter().map(|&lse| lse == f32::NEG_INFINITY).collect::<Vec<_>>(),
        [true, true, false, false].repeat(2)
    );
}

#[test]
fn check_holds_gradients_too() {
    let folder = Folder::new();
    let grouped =
        "--batch 2 --seqlen-q 65 --seqlen-kv 130 --heads-q 6 --heads-kv 2 --head-dim 40 --head-dim-vo 24 --dtype f32";
    for shape in EDGES.into_iter().chain([grouped]) {
        let input = folder.random("qkv.safetensors", &format!("--backward {shape}"));
        for mask in ["full", "causal", "window:7,3"] {
            let line = format!("check --backward --deterministic --device cpu --mask {mask} --scale 0.3");
            let text = hattn_on(&line, &input, None).fine();
            let parts = [
                "\nbackward backward ",
                " d_lse deterministic\n",
                "\ntime     backward ",
                "\nd_q ",
                "\nd_k ",
                "\nd_v ",
            ];
            for part in parts.into_iter().chain(["passed: the largest error is 0"]) {
                assert!(text.contains(part), "{shape}: `{part}` is not in: {text}");
            }
        }
    }
    let input = folder.random("qkv.safetensors", "--backward --seqlen-q 70 --heads-q 2 --head-dim 16 --dtype f32");
    let text = hattn_on("check --backward --device cpu --dtype bf16", &input, None).fine();
    assert!(text.contains("converted to bf16") && text.contains("passed"), "{text}");
}

#[test]
fn gradients_are_written_as_what_they_are_of() {
    let folder = Folder::new();
    let sizes =
        "--batch 2 --seqlen-q 9 --seqlen-kv 11 --heads-q 4 --heads-kv 2 --head-dim 16 --head-dim-vo 8 --layout bhsd";
    let input = folder.random("qkv.safetensors", &format!("--backward {sizes}"));
    let output = folder.path("o.safetensors");
    let text = hattn_on("run --backward --device cpu --mask causal --repeat 2", &input, Some(&output)).fine();
    assert!(text.contains("lse f32 [2, 4, 9], d_q, d_k and d_v as q, k and v"), "{text}");
    assert!(text.contains("time     backward ") && text.matches("median of 2 runs").count() == 2, "{text}");
    let written = Written::read(&output);
    assert_eq!(written.dtype, Dtype::BF16);
    for (name, shape) in [("d_q", [2, 4, 9, 16]), ("d_k", [2, 2, 11, 16]), ("d_v", [2, 2, 11, 8])] {
        let (found, values) = &written.gradients[name];
        assert_eq!(*found, shape, "{name}");
        assert!(values.iter().all(|value| value.is_finite()) && values.iter().any(|&value| value != 0.0), "{name}");
    }
    // The forward is what it is without gradients, and d_o is not looked at unless it is asked for.
    let alone = folder.path("alone.safetensors");
    hattn_on("run --device cpu --mask causal", &input, Some(&alone)).fine();
    let alone = Written::read(&alone);
    assert!(alone.gradients.is_empty() && alone.o == written.o && alone.lse == written.lse);
}

/// One query head that sees two keys with equal scores, as above, and a gradient of the LSE.
#[test]
fn gradients_by_hand() {
    let folder = Folder::new();
    let mut tensors = vec![
        ("q", Dtype::F32, &[1, 1, 1, 2][..], bytes(&[0.0, 0.0])),
        ("k", Dtype::F32, &[1, 2, 1, 2][..], bytes(&[1.0, 2.0, 3.0, 4.0])),
        ("v", Dtype::F32, &[1, 2, 1, 1][..], bytes(&[1.0, 3.0])),
        ("d_o", Dtype::F32, &[1, 1, 1, 1][..], bytes(&[4.0])),
    ];
    let mut gradients = |more: Option<f32>| {
        if let Some(d_lse) = more {
            tensors.push(("d_lse", Dtype::F32, &[1, 1, 1][..], bytes(&[d_lse])));
        }
        let input = folder.typed("qkv.safetensors", Some("bshd"), &tensors);
        let output = folder.path("o.safetensors");
        hattn_on("run --backward --device cpu --scale 0.5", &input, Some(&output)).fine();
        let gradients = Written::read(&output).gradients;
        let near = |name: &str, exact: &[f32]| {
            let (_, got) = &gradients[name];
            let far = got.iter().zip(exact).any(|(got, exact)| (got - exact).abs() > 1e-5);
            assert!(got.len() == exact.len() && !far, "{name}: {got:?}, exact {exact:?}");
        };
        near("d_v", &[2.0, 2.0]);
        near("d_k", &[0.0; 4]);
        // dP is 4 and 12, delta 8 - dLSE; dS is half the distance, and the scale 0.5.
        let d_s = [-2.0 + more.unwrap_or(0.0) / 2.0, 2.0 + more.unwrap_or(0.0) / 2.0];
        near("d_q", &[0.5 * (d_s[0] + 3.0 * d_s[1]), 0.5 * (2.0 * d_s[0] + 4.0 * d_s[1])]);
    };
    gradients(None);
    gradients(Some(3.0));
}

/// One query that sees two keys. Their scores, 300 and 0, are capped at 2: to 2 and 0.
#[test]
fn capped_scores_by_hand() {
    let folder = Folder::new();
    let tensors = [
        ("q", Dtype::F32, &[1, 1, 1, 2][..], bytes(&[300.0, 1.0])),
        ("k", Dtype::F32, &[1, 2, 1, 2][..], bytes(&[1.0, 0.0, 0.0, 0.0])),
        ("v", Dtype::F32, &[1, 2, 1, 1][..], bytes(&[1.0, 3.0])),
        ("d_o", Dtype::F32, &[1, 1, 1, 1][..], bytes(&[1.0])),
    ];
    let input = folder.typed("qkv.safetensors", Some("bshd"), &tensors);
    let output = folder.path("o.safetensors");
    hattn_on("run --backward --device cpu --scale 1 --softcap 2", &input, Some(&output)).fine();
    let written = Written::read(&output);
    let first = 1.0 / (1.0 + (-2.0_f32).exp());
    assert!((written.o[0] - (first + 3.0 * (1.0 - first))).abs() < 1e-6, "{:?}", written.o);
    assert!((written.lse[0] - (2.0_f32.exp() + 1.0).ln()).abs() < 1e-6, "{:?}", written.lse);
    // The first score does not move. The second one does, as one without a cap: dQ is that of its key, which is 0.
    assert!(written.gradients["d_q"].1.iter().all(|x| x.abs() < 1e-6), "{:?}", written.gradients["d_q"]);
    let d_s = (1.0 - first) * (3.0 - written.o[0]);
    let (_, d_k) = &written.gradients["d_k"];
    let near = d_k.iter().zip([0.0, 0.0, 300.0 * d_s, d_s]).all(|(got, want)| (got - want).abs() < 1e-4);
    assert!(near, "{d_k:?}, {d_s}");
    for mask in ["full", "causal"] {
        let checked =
            hattn_on(&format!("check --backward --device cpu --softcap 30 --mask {mask}"), &input, None).fine();
        assert!(checked.contains("softcap 30") && checked.contains("passed"), "{checked}");
        let options = format!("check --device cpu --fp8 --dtype bf16 --scale 1 --softcap 2 --mask {mask}");
        let checked = hattn_on(&options, &input, None).fine();
        assert!(checked.contains("softcap 2") && checked.contains("passed"), "{checked}");
    }
}

/// Two queries and two keys. The second query stands at the second key, and the first one before the first.
#[test]
fn linear_biases_by_hand() {
    let folder = Folder::new();
    let of = |slopes: Option<(&'static [usize], f32)>| {
        let mut tensors = vec![
            ("q", Dtype::F32, &[1, 2, 1, 1][..], bytes(&[1.0, 0.0])),
            ("k", Dtype::F32, &[1, 2, 1, 1][..], bytes(&[3.0, 4.0])),
            ("v", Dtype::F32, &[1, 2, 1, 1][..], bytes(&[1.0, 2.0])),
            ("d_o", Dtype::F32, &[1, 2, 1, 1][..], bytes(&[1.0, 1.0])),
        ];
        tensors.extend(slopes.map(|(shape, slope)| ("alibi_slopes", Dtype::F32, shape, bytes(&[slope]))));
        folder.typed("qkv.safetensors", Some("bshd"), &tensors)
    };
    let output = folder.path("o.safetensors");
    // One head of one has the slope 2^-8 with --alibi.
    for (shape, slope, option) in
        [(Some(&[1][..]), 0.5, ""), (Some(&[1, 1][..]), 0.5, ""), (None, 2.0_f32.powi(-8), "--alibi")]
    {
        let input = of(shape.map(|shape| (shape, slope)));
        let line = format!("run --device cpu --scale 1 --max-logits {option}");
        hattn_on(&line, &input, Some(&output)).fine();
        let written = Written::read(&output);
        let lse = [[3.0, 4.0 - slope], [-slope, 0.0]].map(|scores| scores.map(f32::exp).iter().sum::<f32>().ln());
        assert!(written.lse.iter().zip(lse).all(|(got, want)| (got - want).abs() < 1e-5), "{:?}, {lse:?}", written.lse);
        assert_eq!(written.gradients["max_logits"], (vec![1], vec![4.0 - slope]));
        let checked = hattn_on(&format!("check --backward --device cpu --max-logits {option}"), &input, None).fine();
        assert!(checked.contains("alibi") && checked.contains("max_logits") && checked.contains("passed"), "{checked}");
    }
    let input = of(Some((&[1], 0.5)));
    let both = "--alibi, and a tensor `alibi_slopes` with other slopes; allowed: one of them";
    hattn_on("run --device cpu --alibi", &input, Some(&output)).refused(&[both]);
    // `hattn random` writes the slopes of models.
    let random =
        folder.random("random.safetensors", "--heads-q 4 --seqlen-q 40 --head-dim 8 --dtype f32 --alibi --backward");
    let checked = hattn_on("check --backward --device cpu --mask causal", &random, None).fine();
    assert!(checked.contains("causal alibi") && checked.contains("passed"), "{checked}");
}

/// Two queries and two keys. A bias is added to the scores, and -inf hides a pair.
#[test]
fn a_bias_by_hand() {
    let folder = Folder::new();
    let of = |layout: &str, bias: &[f32], shape: &[usize; 4]| {
        let tensors = [
            ("q", Dtype::F32, &[1, 2, 1, 1][..], bytes(&[1.0, 0.0])),
            ("k", Dtype::F32, &[1, 2, 1, 1][..], bytes(&[3.0, 4.0])),
            ("v", Dtype::F32, &[1, 2, 1, 1][..], bytes(&[1.0, 2.0])),
            ("d_o", Dtype::F32, &[1, 2, 1, 1][..], bytes(&[1.0, 1.0])),
            ("bias", Dtype::F32, &shape[..], bytes(bias)),
        ];
        folder.typed("qkv.safetensors", Some(layout), &tensors)
    };
    let output = folder.path("o.safetensors");
    let hidden = f32::NEG_INFINITY;
    let input = of("bshd", &[0.5, -1.0, hidden, 2.0], &[1, 1, 2, 2]);
    let said = hattn_on("run --backward --device cpu --scale 1", &input, Some(&output)).fine();
    assert!(said.contains("bias f32 per query") && said.contains("dbias as bias"), "{said}");
    let written = Written::read(&output);
    let lse = [(3.5_f32.exp() + 3.0_f32.exp()).ln(), 2.0];
    assert!(written.lse.iter().zip(lse).all(|(got, want)| (got - want).abs() < 1e-5), "{:?}, {lse:?}", written.lse);
    let (shape, d_bias) = &written.gradients["dbias"];
    // The weights of query 0 times the distance of a value from their mean. Query 1 has one key.
    let [a, b] = [(3.5 - lse[0]).exp(), (3.0 - lse[0]).exp()];
    let mean = a + 2.0 * b;
    let want = [a * (1.0 - mean), b * (2.0 - mean), 0.0, 0.0];
    assert!(
        shape == &[1, 1, 2, 2] && d_bias.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-6),
        "{d_bias:?}"
    );
    let shared = of("bshd", &[0.5, -1.0], &[1, 1, 1, 2]);
    for input in [&input, &shared] {
        let checked = hattn_on("check --backward --device cpu --max-logits", input, None).fine();
        assert!(checked.contains("bias f32") && checked.contains("dbias") && checked.contains("passed"), "{checked}");
    }
    let wrong = of("bshd", &[0.5, -1.0, 0.0], &[1, 1, 1, 3]);
    hattn_on("run --device cpu", &wrong, Some(&output))
        .refused(&["tensor `bias` has shape [1, 1, 1, 3]; allowed: [1, 1, 1, 2]"]);
    let input = of("bshd", &[0.5, -1.0], &[1, 1, 1, 2]);
    hattn_on("run --device cpu --fp8 --dtype bf16", &input, Some(&output))
        .refused(&["unsupported: a bias with e4m3 operands"]);
    // `hattn random` writes one, whose dimensions do not follow the layout of the other tensors.
    for (kind, layout) in [("f32:bhq:hidden", "bhsd"), ("bf16:h", "bshd"), ("f16", "bhsd")] {
        let options = format!(
            "--batch 2 --heads-q 4 --seqlen-q 40 --seqlen-kv 50 --head-dim 8 --layout {layout} --bias {kind} --backward"
        );
        let random = folder.random("random.safetensors", &options);
        let checked = hattn_on("check --backward --device cpu --mask causal", &random, None).fine();
        assert!(checked.contains("bias ") && checked.contains("passed"), "{checked}");
    }
}

/// Equal scores and a value of ones: O is the share of the keys that are kept, times the factor.
#[test]
fn dropout_by_hand() {
    use hopper_attention::reference::DropoutMask;
    use hopper_attention::{Dropout, dropout_state};

    let folder = Folder::new();
    let words = |state: [i32; 4]| state.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
    let of = |name: &str, state: Option<[i32; 4]>| {
        let mut tensors = vec![
            ("q", Dtype::F32, &[1, 3, 1, 1][..], bytes(&[0.0; 3])),
            ("k", Dtype::F32, &[1, 100, 1, 1][..], bytes(&[1.0; 100])),
            ("v", Dtype::F32, &[1, 100, 1, 1][..], bytes(&[1.0; 100])),
            ("d_o", Dtype::F32, &[1, 3, 1, 1][..], bytes(&[1.0; 3])),
        ];
        tensors.extend(state.map(|state| ("dropout_state", Dtype::I32, &[4][..], words(state))));
        folder.typed(name, Some("bshd"), &tensors)
    };
    let output = folder.path("o.safetensors");
    let own = dropout_state(0x1234_5678_9abc, 3 << 33);
    for (name, state) in [("own.safetensors", Some(own)), ("none.safetensors", None)] {
        let input = of(name, state);
        hattn_on("run --device cpu --dropout 0.3", &input, Some(&output)).fine();
        let written = Written::read(&output);
        let dropout = Dropout::new(0.3).unwrap();
        let mask = DropoutMask::new(dropout, 1, state.unwrap_or_default());
        for query in 0..3 {
            let kept = (0..100).filter(|&key| mask.keeps(0, 0, query, key)).count() as f32;
            let want = kept / 100.0 * dropout.factor() as f32;
            assert!((written.o[query] - want).abs() < 1e-5, "{query}: {}, {want}", written.o[query]);
        }
        assert!(written.lse.iter().all(|lse| (lse - 100_f32.ln()).abs() < 1e-5));
        let checked = hattn_on("check --backward --device cpu --dropout 0.3", &input, None).fine();
        assert!(checked.contains("dropout 0.2999") && checked.contains("passed"), "{checked}");
    }
    // A state alone does not say how many are dropped. 0 drops none, and says so.
    let input = of("own.safetensors", Some(own));
    let alone = "a tensor `dropout_state`, and no probability; allowed: --dropout, or metadata `dropout`";
    hattn_on("run --device cpu", &input, Some(&output)).refused(&[alone]);
    let checked = hattn_on("check --device cpu --dropout 0", &input, None).fine();
    assert!(!checked.contains("dropout"), "{checked}");
    // `hattn random` states the probability.
    let random = folder.random(
        "random.safetensors",
        "--batch 2 --heads-q 4 --seqlen-q 40 --head-dim 8 --dtype f32 --dropout 0.25 --backward --seed 7",
    );
    let checked = hattn_on("check --backward --device cpu --mask causal", &random, None).fine();
    assert!(checked.contains("causal dropout 0.25") && checked.contains("passed"), "{checked}");
    let checked = hattn_on("check --device cpu --dropout 0.5", &random, None).fine();
    assert!(checked.contains("full dropout 0.5"), "{checked}");
}

/// Queries of 130, keys of 200. The first block of queries has the second block of keys, the second a bit of the first.
#[test]
fn lists_of_blocks_by_hand() {
    let folder = Folder::new();
    let lists = |numbers: &[i32]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>();
    let mut bits = vec![0; 2 * 512];
    // Query 129, key 7.
    bits[512 + 4] = 1 << 7;
    let ones = |count: usize| bytes(&vec![1.0; count]);
    let of = |layout: &str, words: &[i32], shape: &[usize; 4]| {
        let (q, k) = if layout == "bshd" { ([1, 130, 1, 1], [1, 200, 1, 1]) } else { ([1, 1, 130, 1], [1, 1, 200, 1]) };
        let v: Vec<f32> = (0..200).map(|key| key as f32 / 64.0).collect();
        let tensors = [
            ("q", Dtype::F32, &q[..], ones(130)),
            ("k", Dtype::F32, &k[..], ones(200)),
            ("v", Dtype::F32, &k[..], bytes(&v)),
            ("d_o", Dtype::F32, &q[..], ones(130)),
            ("mask_block_cnt", Dtype::I32, &[1, 1, 2][..], lists(&[0, 1])),
            ("mask_block_idx", Dtype::I32, &[1, 1, 2, 2][..], lists(&[9, 9, 0, 9])),
            ("mask_bits", Dtype::I32, &shape[..], lists(words)),
            ("full_block_cnt", Dtype::I32, &[1, 1, 2][..], lists(&[1, 0])),
            ("full_block_idx", Dtype::I32, &[1, 1, 2, 2][..], lists(&[1, 9, 9, 9])),
        ];
        folder.typed("qkv.safetensors", Some(layout), &tensors)
    };
    let output = folder.path("o.safetensors");
    for layout in ["bshd", "bhsd"] {
        let input = of(layout, &bits, &[1, 1, 2, 512]);
        let text = hattn_on("run --device cpu", &input, Some(&output)).fine();
        assert!(text.contains("block_mask of up to 1 partial and full blocks"), "{text}");
        let written = Written::read(&output);
        // The mean of keys 128 to 199, nothing, and key 7.
        let near = |got: f32, want: f32| (got - want).abs() < 1e-5;
        assert!(written.o[..128].iter().all(|&o| near(o, 163.5 / 64.0)), "{:?}", written.o);
        assert!(written.o[128] == 0.0 && near(written.o[129], 7.0 / 64.0), "{:?}", &written.o[128..]);
        assert_eq!(written.lse[128], f32::NEG_INFINITY);
        let checked = hattn_on("check --backward --device cpu", &input, None).fine();
        assert!(checked.contains("passed"), "{checked}");
        let more = hattn_on("check --backward --device cpu --mask causal", &input, None).fine();
        assert!(more.contains("causal block_mask") && more.contains("passed"), "{more}");
    }
    let refused = |words: &[i32], shape: &[usize; 4], text: &str| {
        hattn_on("run --device cpu", &of("bshd", words, shape), Some(&output)).refused(&[text]);
    };
    refused(&[0; 1026], &[1, 1, 2, 513], "allowed: a last dimension that is a multiple of 512");
    refused(&[0; 512], &[1, 1, 1, 512], "tensor `mask_bits` has shape [1, 1, 1, 512]; allowed: [1, 1, 2, 512]");
    refused(&[0; 3072], &[1, 1, 2, 1536], "block_mask.most_partial: 3; allowed: 0 to 2, the blocks of keys");
    // Each kind of `hattn random`, of which no two batch entries and heads are alike.
    for (seed, kind) in ["random:40", "documents", "all", "nothing", "striped", "none"].into_iter().enumerate() {
        let line =
            "--batch 2 --heads-q 4 --heads-kv 2 --seqlen-q 150 --seqlen-kv 290 --head-dim 8 --dtype f32 --backward";
        let options = format!("{line} --block-mask {kind} --seed {seed} --layout bhsd");
        let random = folder.random("random.safetensors", &options);
        let checked = hattn_on("check --backward --device cpu --mask causal", &random, None).fine();
        assert!(checked.contains("block_mask") == (kind != "none") && checked.contains("passed"), "{checked}");
    }
}

/// An infinite input makes infinities, NaN, and rows that it has no part in. The oracle says which is where.
#[test]
fn check_passes_on_infinite_input() {
    let folder = Folder::new();
    let (shape, statistics) = (&[1, 9, 2, 8][..], &[1, 2, 9][..]);
    for seed in 0..4_u32 {
        // Of both signs, and no two alike.
        let values = |i: u32, len: usize| -> Vec<f32> {
            (0..len).map(|j| ((j as f32 + 1.0) * (i + 5 * seed + 3) as f32 * 0.77).sin() * 1.5).collect()
        };
        for (place, infinite) in (0..5).flat_map(|place| [(place, f32::INFINITY), (place, f32::NEG_INFINITY)]) {
            let mut all: Vec<Vec<f32>> = (0..4).map(|i| values(i, 144)).chain([values(4, 18)]).collect();
            all[place][if place == 4 { 13 } else { 75 }] = infinite;
            let tensors: Vec<_> = ["q", "k", "v", "d_o", "d_lse"]
                .into_iter()
                .zip([shape, shape, shape, shape, statistics])
                .zip(&all)
                .map(|((name, shape), values)| (name, Dtype::F32, shape, bytes(values)))
                .collect();
            let input = folder.typed("qkv.safetensors", Some("bshd"), &tensors);
            for rest in ["--mask full", "--mask causal", "--mask causal --dtype f16", "--dtype f16"] {
                let said = hattn_on(&format!("check --backward --device cpu {rest}"), &input, None).warned();
                assert!(said.contains("1 infinite values"), "{said}");
            }
        }
    }
}

#[test]
fn nan_in_a_gradient_is_counted() {
    let folder = Folder::new();
    let shape = &[1, 2, 1, 4][..];
    let mut tensors = ["q", "k", "v", "d_o"].map(|name| (name, Dtype::F32, shape, bytes(&[0.5; 8]))).to_vec();
    tensors[3].3 = bytes(&[0.5, 0.5, 0.5, f32::NAN, 0.5, 0.5, 0.5, 0.5]);
    let input = folder.typed("qkv.safetensors", Some("bshd"), &tensors);
    let said = hattn_on("check --backward --device cpu --mask causal", &input, None).warned();
    for part in ["d_o holds 1 NaN and 0 infinite values of 8", "d_q holds 4 NaN", "d_k holds 4 NaN", "d_v holds 1 NaN"]
    {
        assert!(said.contains(part), "`{part}` is not in: {said}");
    }
    assert_eq!(said.lines().count(), 4, "{said}");
}

#[test]
fn bhsd_and_bshd_are_one_problem() {
    let folder = Folder::new();
    let (batch, seqlen, heads, dim) = (2, 9, 3, 16);
    let bshd_shape = &[batch, seqlen, heads, dim][..];
    let value = |b: usize, s: usize, h: usize, d: usize| ((b * 31 + s * 17 + h * 7 + d * 3) % 41) as f32 / 16.0 - 1.0;
    let (mut bshd, mut bhsd) = (Vec::new(), Vec::new());
    for b in 0..batch {
        for s in 0..seqlen {
            (0..heads).for_each(|h| bshd.extend((0..dim).map(|d| value(b, s, h, d))));
        }
        for h in 0..heads {
            (0..seqlen).for_each(|s| bhsd.extend((0..dim).map(|d| value(b, s, h, d))));
        }
    }
    let file = |name, layout, shape, values: &[f32]| {
        let tensors = ["q", "k", "v", "d_o"].map(|tensor| (tensor, Dtype::F32, shape, bytes(values)));
        folder.typed(name, layout, &tensors)
    };
    let one = file("bshd.safetensors", Some("bshd"), bshd_shape, &bshd);
    let other = file("bhsd.safetensors", None, &[batch, heads, seqlen, dim], &bhsd);
    let (one_o, other_o) = (folder.path("one_o.safetensors"), folder.path("other_o.safetensors"));
    hattn_on("run --backward --device cpu --mask causal", &one, Some(&one_o)).fine();
    hattn_on("run --backward --device cpu --mask causal --layout bhsd", &other, Some(&other_o)).fine();
    let (one, other) = (Written::read(&one_o), Written::read(&other_o));
    assert_eq!(other.o_shape, [batch, heads, seqlen, dim]);
    assert_eq!(one.lse, other.lse);
    let gradients = ["d_q", "d_k", "d_v"].map(|name| (&one.gradients[name].1, &other.gradients[name].1));
    for (one, other) in [(&one.o, &other.o)].into_iter().chain(gradients) {
        for (i, &value) in one.iter().enumerate() {
            let (b, s, h, d) = (i / (seqlen * heads * dim), i / (heads * dim) % seqlen, i / dim % heads, i % dim);
            assert_eq!(value, other[((b * heads + h) * seqlen + s) * dim + d], "[{b}, {s}, {h}, {d}]");
        }
    }
}

#[test]
fn an_option_that_contradicts_the_file_is_followed_and_said() {
    let folder = Folder::new();
    let input = folder.random("qkv.safetensors", "--seqlen-q 4 --heads-q 4 --head-dim 8");
    let said = hattn_on("check --device cpu --layout bhsd", &input, None).warned();
    assert!(said.contains("--layout bhsd overrides the file's own layout bshd"), "{said}");
}

/// Tensors of the file that are called as operands are taken where the problem can be asked for them.
#[test]
fn a_tensor_that_the_problem_cannot_use_is_left_out_and_said() {
    let folder = Folder::new();
    let shape = &[1, 4, 2, 8][..];
    let tensors: [(&str, &[usize]); 4] = [("q", shape), ("k", shape), ("v", shape), ("scale_o", &[1])];
    let input = folder.tensors("qkv.safetensors", Some("bshd"), &tensors);
    let said = hattn_on("check --device cpu", &input, None).warned();
    assert!(said.contains("tensor `scale_o` of the input is left out: scale_o: asked for; allowed: "), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn nan_is_counted_and_stays_in_its_rows() {
    let folder = Folder::new();
    let mut q = vec![0.25; 3 * 8];
    q[8] = f32::NAN;
    let shape = &[1, 3, 1, 8][..];
    let tensors = [
        ("q", Dtype::F32, shape, bytes(&q)),
        ("k", Dtype::F32, shape, bytes(&[0.5; 24])),
        ("v", Dtype::F32, shape, bytes(&[1.0; 24])),
    ];
    let input = folder.typed("qkv.safetensors", Some("bshd"), &tensors);
    let output = folder.path("o.safetensors");
    let said = hattn_on("check --device cpu", &input, Some(&output)).warned();
    assert!(said.contains("q holds 1 NaN and 0 infinite values of 24"), "{said}");
    assert!(said.contains("o holds 8 NaN and 0 infinite values of 24"), "{said}");
    assert_eq!(said.lines().count(), 2, "{said}");
    let nan: Vec<bool> = Written::read(&output).o.iter().map(|o| o.is_nan()).collect();
    assert_eq!(nan, [vec![false; 8], vec![true; 8], vec![false; 8]].concat());
}

#[test]
fn a_conversion_that_overflows_is_said() {
    let folder = Folder::new();
    let shape = &[1, 1, 1, 1][..];
    let big = |name| (name, Dtype::F32, shape, bytes(&[1e6]));
    let input = folder.typed("qkv.safetensors", Some("bshd"), &[big("q"), big("k"), big("v")]);
    let said = hattn_on("run --device cpu --dtype f16", &input, Some(&folder.path("o.safetensors"))).warned();
    assert!(said.contains("q holds 0 NaN and 1 infinite values of 1"), "{said}");
}

#[test]
fn random_makes_every_class_of_inputs() {
    let folder = Folder::new();
    let sizes = "--batch 2 --seqlen-q 130 --heads-q 4 --heads-kv 2 --head-dim 16 --dtype f32";
    // As floats, by name.
    let read = |line: &str| {
        let file = std::fs::read(folder.random("x", &format!("{sizes} {line}"))).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        ["q", "k", "v"].map(|name| {
            let bytes = tensors.tensor(name).unwrap().data().to_vec();
            bytes.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect::<Vec<f32>>()
        })
    };
    let normal = read("");
    assert_eq!(read("--like normal"), normal);
    let peaky = read("--like peaky");
    assert!((0..2).all(|i| peaky[i].iter().zip(&normal[i]).all(|(peaky, normal)| *peaky == 3.0 * normal)));
    // Of each query of a sequence: its mean score with the first key of its head.
    let sink = read("--like sink");
    let score = |query: usize| (0..16).map(|d| sink[0][query * 64 + d] * sink[1][d]).sum::<f32>() / 4.0;
    let mean = (0..130).map(score).sum::<f32>() / 130.0;
    assert!((mean - 15.0).abs() < 1.5, "{mean}");
    assert_eq!(sink[1].iter().zip(&normal[1]).filter(|(a, b)| a != b).count(), 2 * 2 * 16);
    let late = read("--like late");
    assert_eq!(late[1].iter().zip(&normal[1]).filter(|(a, b)| a != b).count(), 2 * 2 * 2 * 16);
    let nan = read("--like nan");
    for (i, row) in nan[0].chunks_exact(16).enumerate() {
        assert!(row.iter().all(|x| x.is_nan() == (i / 4 % 130 % 128 == 0)));
    }
    for (class, made) in [("peaky", &peaky), ("sink", &sink), ("late", &late), ("nan", &nan)] {
        assert_eq!(made[2], normal[2], "{class}");
        assert!(class == "nan" || made[0] != normal[0], "{class}");
        // The file's order changes which numbers a row is made of, and not which rows are changed.
        let input = folder.random("y", &format!("{sizes} --like {class} --layout bhsd"));
        let text = hattn_on("check --device cpu", &input, None);
        assert!(text.code == Some(0) && text.stdout.contains("passed"), "{class}: {text:?}");
    }
    let output = folder.path("z");
    let refused = hattn(["random", "--like", "flat", "--output", output.to_str().unwrap()]);
    assert_eq!(refused.code, Some(2));
    assert!(refused.stderr.contains("inputs `flat`; allowed: normal, peaky, sink, late, nan"), "{}", refused.stderr);
}

#[test]
fn random_is_the_same_for_the_same_seed() {
    let folder = Folder::new();
    let read = |name, line: &str| std::fs::read(folder.random(name, line)).unwrap();
    let (a, b, c) = (read("a", "--seqlen-q 8"), read("b", "--seqlen-q 8"), read("c", "--seqlen-q 8 --seed 1"));
    assert!(a == b && a != c);
    // q, k and v do not depend on what is drawn after them.
    let [alone, more] = ["--seqlen-q 8", "--seqlen-q 8 --backward"].map(|line| {
        let file = std::fs::read(folder.random("d", line)).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let mut names = tensors.names();
        names.sort();
        assert_eq!(names.contains(&"d_o") && names.contains(&"d_lse"), names.len() == 5, "{names:?}");
        ["q", "k", "v"].map(|name| tensors.tensor(name).unwrap().data().to_vec())
    });
    assert!(alone == more);
}

#[test]
fn auto_says_why_it_took_what_it_took() {
    let text = hattn(["check", "--input", FIXTURE, "--dtype", "f32"]).fine();
    let device = text.lines().find(|line| line.starts_with("device ")).expect("a line for the device");
    let reasons = ["auto: this build has no GPU kernels", "auto: no GPU was found", "auto: cuda:0: "];
    assert!(device.contains("cpu") && reasons.iter().any(|reason| device.contains(reason)), "{device}");
}

#[test]
fn info_lists_devices_and_kernels() {
    let text = hattn(["info"]).fine();
    assert!(text.contains("\n\nkernels\n  ") && text.contains("\n\ndevices\n  cpu, "), "{text}");
    // With kernels: a line for each instruction set and pass, and all of them only when asked for.
    let rows = hattn(["info", "--kernels"]).fine();
    match rows.starts_with("none in this build") {
        true => assert!(text.contains("\nkernels\n  none in this build"), "{text}"),
        false => {
            let all = format!("`hattn info --kernels` lists all {}\n", rows.lines().count());
            assert!(text.contains(&all) && text.lines().count() < 20, "{text}");
        }
    }
}
