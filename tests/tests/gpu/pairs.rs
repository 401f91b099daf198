//! Every pair of what a problem may have, in both passes, on the plan that the library chooses. A pair that no kernel
//! computes is refused by the names of both.

use std::collections::{BTreeMap, BTreeSet};

use hopper_attention::{Arch, DType, Device, Error, Mask, Result, Scaling, kernels};
use hopper_attention_tests::alibi::Alibi;
use hopper_attention_tests::blocks::Blocks;
use hopper_attention_tests::gpu::Gpu;
use hopper_attention_tests::packing::{Kind, Packing};
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::say;
use hopper_attention_tests::sinks::Sinks;
use hopper_attention_verify::fuzz::{Fp8, Lab, Launch, Outcome, Pass, Problem};

/// Something that a problem may have.
struct Feature {
    name: &'static str,
    /// What an error calls it: one of these.
    in_errors: &'static [&'static str],
    /// A case with it.
    with: fn(Case) -> Case,
}

static FEATURES: [Feature; 11] = [
    Feature { name: "softcap", in_errors: &["softcap"], with: |case| case.softcap(15.0) },
    Feature { name: "alibi", in_errors: &["alibi"], with: |case| case.alibi(Alibi::PerBatch) },
    Feature { name: "bias", in_errors: &["a bias"], with: |case| case.bias("f32:hq".parse().expect("a bias")) },
    Feature { name: "sinks", in_errors: &["sinks"], with: |case| Case { sinks: Sinks::Normal, ..case } },
    Feature { name: "dropout", in_errors: &["dropout"], with: |case| case.dropout(0.3) },
    // Gradients have nothing to do with it. A forward that asks for it has some all the same.
    Feature { name: "max_logits", in_errors: &["max_logits"], with: |case| case.max_logits(true) },
    Feature { name: "packed", in_errors: &["packed"], with: packed },
    // The masks bite in the sizes of the cases.
    Feature {
        name: "window",
        in_errors: &["window"],
        with: |case| Case { mask: Mask::window(Some(40), Some(9)), ..case },
    },
    // Errors name the class of such a mask.
    Feature { name: "chunk", in_errors: &["chunk", "window"], with: |case| Case { mask: Mask::chunked(48), ..case } },
    Feature { name: "prefix", in_errors: &["prefix", "window"], with: |case| Case { mask: Mask::prefix(90), ..case } },
    Feature { name: "blocks", in_errors: &["block"], with: |case| case.blocks(Blocks::Random(60)) },
];

/// A problem has one of these masks.
const MASKS: [&str; 3] = ["window", "chunk", "prefix"];

/// Two names of features, in their order.
type Names = [&'static str; 2];

/// The pairs that the library does not compute, as `docs/numerics.md` has them. `of_sm80`: by sm80 kernels alone.
fn is_refused(pass: Pass, names: Names, of_sm80: bool) -> bool {
    match names {
        ["packed", "blocks"] => true,
        ["softcap", "bias"] => pass == Pass::Backward,
        ["softcap", "alibi"] => pass == Pass::Backward && of_sm80,
        _ => false,
    }
}

fn pairs() -> impl Iterator<Item = [&'static Feature; 2]> {
    let all = (0..FEATURES.len()).flat_map(|i| FEATURES[i + 1..].iter().map(move |b| [&FEATURES[i], b]));
    all.filter(|pair| !pair.iter().all(|feature| MASKS.contains(&feature.name)))
}

/// Packed sequences of random lengths. Some have more queries than keys.
fn packed(case: Case) -> Case {
    let (rows, batch) = ([300, 340], 4);
    let dims = case.dims.with_batch(batch).with_seqlen_q(rows[0]).with_seqlen_kv(rows[1]);
    let kind = Kind { packed: [true; 2], used: [false; 2], fill_gaps: false };
    Case { dims, packing: Packing::random(kind, batch, rows, case.seed), ..case }
}

/// A problem with both. Each second pair stands beside a causal mask, where it has no mask of its own.
fn problem(pass: Pass, turn: usize, pair: [&Feature; 2], head_dim: usize, arch: Option<Arch>) -> Problem {
    let mask = if turn.is_multiple_of(2) { Mask::causal() } else { Mask::Full };
    let case = Case { seed: turn as u64, ..Case::new(140, 200, head_dim, mask).heads(2, 2, 1) };
    Problem {
        pass,
        dtype: DType::BF16,
        case: pair.into_iter().fold(case, |case, feature| (feature.with)(case)),
        fp8: Fp8 { scaling: Scaling::PerHead, half_scores: false, hadamard: None },
        arch,
        sm_margin: 0,
        workspace_limit: None,
        deterministic: false,
        launch: Launch::default(),
    }
}

/// The instruction set of the plan that the library chooses.
fn planned(device: &Device, problem: &Problem) -> Result<Arch> {
    let kernel = match problem.pass {
        Pass::Forward => problem.built()?.plan(device)?.kernel().copied(),
        _ => problem.backward()?.plan(device)?.kernel().copied(),
    };
    Ok(kernel.expect("a kernel of a GPU").arch())
}

#[test]
fn every_pair_in_the_forward() {
    let Some(gpu) = Gpu::open("every_pair_in_the_forward") else { return };
    every_pair(&gpu, Pass::Forward, Grid::from_env().pick(&[64][..], &[64, 128, 256]));
}

/// The gradients of sinks and of a bias are asked for.
#[test]
fn every_pair_in_the_backward() {
    let Some(gpu) = Gpu::open("every_pair_in_the_backward") else { return };
    every_pair(&gpu, Pass::Backward, Grid::from_env().pick(&[64][..], &[64, 128]));
}

fn every_pair(gpu: &Gpu, pass: Pass, head_dims: &[usize]) {
    let device = Device::Cuda(gpu.device.clone());
    let facts = gpu.device.info().facts;
    let is_hopper = kernels().iter().any(|row| row.arch() == Arch::Sm90 && row.runs_on(&facts));
    let mut problems = Vec::new();
    let mut computed = BTreeSet::new();
    let mut refused: BTreeMap<(Names, String), Vec<String>> = BTreeMap::new();
    // By sm90 kernels, by sm80 kernels where the problem asks for none, and by those that it asks for.
    let mut by_arch = [0; 3];
    for (turn, pair) in pairs().enumerate() {
        let names = pair.map(|feature| feature.name);
        for (&head_dim, arch) in head_dims.iter().flat_map(|dim| [None, Some(Arch::Sm80)].map(|arch| (dim, arch))) {
            let problem = problem(pass, turn, pair, head_dim, arch);
            let place = format!("head dim {head_dim}, {}", arch.map_or("own choice".into(), |arch| arch.to_string()));
            let what = format!("{pass:?} of {} and {}, {place}", names[0], names[1]);
            let of_sm80 = arch.is_some() || !is_hopper;
            match planned(&device, &problem) {
                Ok(of) => {
                    assert!(!is_refused(pass, names, of_sm80), "{what} is computed: {problem}");
                    by_arch[if arch.is_some() { 2 } else { usize::from(of == Arch::Sm80) }] += 1;
                    computed.insert(names);
                    problems.push(problem);
                }
                Err(error @ Error::Unsupported { .. }) => {
                    let text = error.to_string();
                    for feature in pair {
                        let is_named = feature.in_errors.iter().any(|word| text.contains(word));
                        assert!(is_named, "{what}: the refusal does not name {}: {text}", feature.name);
                    }
                    assert!(is_refused(pass, names, of_sm80), "{what} is refused: {text}");
                    refused.entry((names, text)).or_default().push(place);
                }
                Err(error) => panic!("{what}: {error}"),
            }
        }
    }
    let outcomes = Lab::new(&device).unwrap().run(&problems);
    let mut wrong = Vec::new();
    for (problem, outcome) in problems.iter().zip(&outcomes) {
        match outcome {
            Outcome::Judged(verdict) => wrong.extend(verdict.wrong.as_ref().map(|why| format!("{problem}: {why}"))),
            other => wrong.push(format!("{problem}: {other:?}")),
        }
    }
    for ((names, why), places) in &refused {
        say(&format!("refused: {pass:?} of {} and {} ({}): {why}", names[0], names[1], places.join("; ")));
    }
    let all = pairs().count();
    let by_none: Vec<_> =
        pairs().map(|pair| pair.map(|feature| feature.name)).filter(|names| !computed.contains(names)).collect();
    say(&format!(
        "pairs, {pass:?}: {} of {all} ran, refused everywhere: {by_none:?}; {} problems: own choice sm90 {}, \
         own choice sm80 {}, asked for sm80 {}",
        computed.len(),
        outcomes.len(),
        by_arch[0],
        by_arch[1],
        by_arch[2],
    ));
    assert_eq!(outcomes.len(), problems.len(), "the GPU does not answer any more: {wrong:?}");
    assert!(wrong.is_empty(), "{} are wrong: {}", wrong.len(), wrong.join("\n"));
    assert!(computed.len() + by_none.len() == all && by_none.iter().all(|names| is_refused(pass, *names, !is_hopper)));
}
