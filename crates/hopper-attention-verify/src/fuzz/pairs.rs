//! Which pairs of features problems have, and what came of them.

use std::collections::BTreeMap;
use std::fmt;

use hopper_attention::{DType, Mask, Scaling};

use super::{Fp8, Launch, Outcome, Pass, Problem};
use crate::alibi::Alibi;
use crate::blocks::Blocks;
use crate::case::Case;
use crate::packing::{Kind, Packing};
use crate::ready::Verdict;
use crate::sinks::Sinks;

/// What a problem may have, by name: what changes its scores and weights, how its sequences and heads lie, and its mask.
pub const FEATURES: [&str; 16] = [
    "softcap",
    "alibi",
    "sinks",
    "max_logits",
    "bias",
    "dropout",
    "blocks",
    "packed",
    "used lengths",
    "gqa",
    "deterministic",
    "full",
    "causal",
    "window",
    "chunked",
    "prefix",
];

/// The features that are masks. A problem has one of them.
const MASKS: [&str; 5] = ["full", "causal", "window", "chunked", "prefix"];

/// The passes that have features.
pub const PASSES: [Pass; 3] = [Pass::Forward, Pass::Backward, Pass::Fp8];

/// The features of a problem, in the order of [`FEATURES`].
pub fn features(problem: &Problem) -> Vec<&'static str> {
    let Problem { pass, case, deterministic, .. } = problem;
    let forward = problem.forward();
    let (dims, mask) = (forward.dims(), forward.mask());
    let has = [
        forward.softcap() != 0.0,
        forward.alibi().is_some(),
        forward.sinks().is_some(),
        // Gradients have nothing to do with these.
        forward.wants_max_logits() && *pass == Pass::Forward,
        forward.bias().is_some(),
        forward.dropout().is_some(),
        forward.block_mask().is_some(),
        forward.is_packed_q() || forward.is_packed_kv(),
        case.packing.seqused_q.is_some() || case.packing.seqused_kv.is_some(),
        dims.heads_q != dims.heads_kv,
        *deterministic,
        mask == Mask::Full,
        matches!(mask, Mask::Causal { .. }),
        matches!(mask, Mask::Window { .. }),
        matches!(mask, Mask::Chunked { .. }),
        matches!(mask, Mask::Prefix { .. }),
    ];
    FEATURES.into_iter().zip(has).filter_map(|(name, has)| has.then_some(name)).collect()
}

/// Whether a problem of this pass may have both features, if the library computes it: no problem has two masks.
pub fn is_pair(pass: Pass, a: &str, b: &str) -> bool {
    let is_of_pass = |name| match name {
        "max_logits" => pass != Pass::Backward,
        "deterministic" => pass == Pass::Backward,
        _ => true,
    };
    let are_masks = MASKS.contains(&a) && MASKS.contains(&b);
    a != b && !are_masks && is_of_pass(a) && is_of_pass(b)
}

/// All pairs of two features, in the order of [`FEATURES`].
pub fn pairs() -> impl Iterator<Item = (&'static str, &'static str)> {
    (0..FEATURES.len()).flat_map(|i| FEATURES[i + 1..].iter().map(move |b| (FEATURES[i], *b)))
}

/// A small problem with these features and, but for a full mask, no others.
///
/// # Errors
/// What the library says of a problem that it does not have.
pub fn example(pass: Pass, dtype: DType, names: [&str; 2]) -> Result<Problem, String> {
    let has = |name| names.contains(&name);
    // More than one block of lists, beside which other lengths are short.
    let [queries, keys] = if has("blocks") { [140, 270] } else { [40, 50] };
    let batch = 3;
    let mask = match names {
        _ if has("causal") => Mask::causal(),
        _ if has("window") => Mask::window(Some(20), Some(3)),
        _ if has("chunked") => Mask::chunked(16),
        _ if has("prefix") => Mask::prefix(10),
        _ => Mask::Full,
    };
    let mut case = Case::new(queries, keys, 16, mask).heads(batch, 4, if has("gqa") { 2 } else { 4 });
    case.softcap = if has("softcap") { 2.0 } else { 0.0 };
    case.alibi = if has("alibi") { Alibi::PerBatch } else { Alibi::None };
    case.sinks = if has("sinks") { Sinks::Normal } else { Sinks::None };
    case.max_logits = has("max_logits");
    case.dropout = if has("dropout") { 0.3 } else { 0.0 };
    if has("bias") {
        case.bias = "f32:bhq".parse()?;
    }
    if has("blocks") {
        case.blocks = Blocks::Random(50);
    }
    let kind = Kind { packed: [has("packed"); 2], used: [has("used lengths"); 2], fill_gaps: false };
    // Packed sequences share the rows.
    let rows = [queries, keys];
    case.packing = Packing::random(kind, batch, rows, case.seed);
    let problem = Problem {
        pass,
        dtype,
        case,
        fp8: Fp8 { scaling: Scaling::PerHead, half_scores: false, hadamard: None },
        arch: None,
        sm_margin: 0,
        workspace_limit: None,
        deterministic: has("deterministic"),
        launch: Launch::default(),
    };
    problem.built().map_err(|error| error.to_string())?;
    Ok(problem)
}

/// What came of the problems of a pass that have a pair of features.
#[derive(Clone, Debug, Default)]
pub struct Count {
    /// Judged, and right.
    pub right: usize,
    /// Judged, and wrong.
    pub wrong: usize,
    /// Refused by the device.
    pub refused: usize,
    /// The largest error of those that were judged, as a share of its bound.
    pub worst: f64,
    /// Why the last one was refused.
    pub why: Option<String>,
}

impl Count {
    /// Counts what came of a problem.
    pub fn take(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Judged(verdict) => {
                match verdict.wrong {
                    None => self.right += 1,
                    Some(_) => self.wrong += 1,
                }
                self.worst = self.worst.max(largest(verdict));
            }
            Outcome::Refused(why) => {
                self.refused += 1;
                self.why = Some(why.clone());
            }
        }
    }
}

/// The largest error of a verdict, as a share of its bound.
pub fn largest(verdict: &Verdict) -> f64 {
    let ratios = &verdict.ratios;
    ratios.row.max(ratios.tensor).max(ratios.rms).max(ratios.common)
}

/// What came of problems, for each pair of features and each pass.
///
/// It is displayed as a table of at most 132 columns.
#[derive(Clone, Debug, Default)]
pub struct Pairs(BTreeMap<(Pass, &'static str, &'static str), Count>);

impl Pairs {
    /// Counts a problem for each pair of its features.
    pub fn take(&mut self, problem: &Problem, outcome: &Outcome) {
        if !PASSES.contains(&problem.pass) {
            return;
        }
        let names = features(problem);
        for (i, a) in names.iter().enumerate() {
            for b in &names[i + 1..] {
                self.0.entry((problem.pass, a, b)).or_default().take(outcome);
            }
        }
    }

    /// What came of the problems of a pass with a pair of features, which are in the order of [`FEATURES`].
    pub fn count(&self, pass: Pass, (a, b): (&'static str, &'static str)) -> Count {
        self.0.get(&(pass, a, b)).cloned().unwrap_or_default()
    }

    /// The pairs of a pass that no judged problem had, by the reason: the last refusal, or what the library says of such a
    /// problem, or that none was drawn.
    pub fn unjudged(&self, pass: Pass) -> BTreeMap<String, Vec<(&'static str, &'static str)>> {
        let mut by_reason = BTreeMap::<_, Vec<_>>::new();
        for pair in pairs().filter(|(a, b)| is_pair(pass, a, b)) {
            let count = self.count(pass, pair);
            if count.right + count.wrong > 0 {
                continue;
            }
            let why = match (count.why, example(pass, DType::BF16, pair.into())) {
                (Some(why), _) | (None, Err(why)) => format!("refused: {why}"),
                (None, Ok(_)) => "none was drawn".into(),
            };
            by_reason.entry(why).or_default().push(pair);
        }
        by_reason
    }
}

impl fmt::Display for Pairs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<28}", "pair")?;
        PASSES.iter().try_for_each(|pass| write!(f, "{:>32}", format!("{pass:?}").to_lowercase()))?;
        write!(f, "\n{:28}", "")?;
        PASSES.iter().try_for_each(|_| write!(f, "{:>10}{:>7}{:>8}{:>7}", "right", "wrong", "refused", "worst"))?;
        for (a, b) in pairs().filter(|(a, b)| PASSES.iter().any(|&pass| is_pair(pass, a, b))) {
            write!(f, "\n{:<28}", format!("{a} + {b}"))?;
            for pass in PASSES {
                let Count { right, wrong, refused, worst, .. } = self.count(pass, (a, b));
                if is_pair(pass, a, b) {
                    write!(f, "{right:>10}{wrong:>7}{refused:>8}{worst:>7.3}")?;
                } else {
                    write!(f, "{:>10}{:>7}{:>8}{:>7}", "-", "-", "-", "-")?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use hopper_attention::Device;

    use super::super::Lab;
    use super::*;

    /// The pairs that no problem of a pass has, since the library refuses them. A pair that comes to them is a loss, and one
    /// that goes is to be deleted here.
    fn refused(pass: Pass, a: &str, b: &str) -> bool {
        let has = |names: &[&str]| names.contains(&a) || names.contains(&b);
        let fp8 = pass == Pass::Fp8 && has(&["alibi", "max_logits", "bias", "dropout"]);
        fp8 || has(&["blocks"]) && has(&["packed", "used lengths"])
    }

    #[test]
    fn every_pair_is_judged_on_the_cpu_or_refused_by_name() {
        let mut problems = Vec::new();
        let mut refusals = 0;
        for (pass, (a, b)) in PASSES.into_iter().flat_map(|pass| pairs().map(move |pair| (pass, pair))) {
            if !is_pair(pass, a, b) {
                continue;
            }
            for dtype in if pass == Pass::Fp8 { vec![DType::BF16] } else { vec![DType::BF16, DType::F16, DType::F32] } {
                match example(pass, dtype, [a, b]) {
                    Ok(problem) => {
                        assert!(!refused(pass, a, b), "{pass:?}: {a} + {b} is computed");
                        let names = features(&problem);
                        assert!(names.contains(&a) && names.contains(&b), "{a} + {b}: {problem}");
                        let others = names.iter().filter(|name| ![a, b, "full"].contains(*name)).count();
                        assert_eq!(others, 0, "{a} + {b}: {problem}");
                        problems.push(problem);
                    }
                    Err(why) => {
                        assert!(refused(pass, a, b), "{pass:?}: {a} + {b} is refused: {why}");
                        assert!(why.contains("allowed") || why.contains("nearest"), "{pass:?}: {a} + {b}: {why}");
                        refusals += 1;
                    }
                }
            }
        }
        let mut tally = Pairs::default();
        let outcomes = Lab::new(&Device::cpu()).unwrap().run(&problems);
        for (problem, outcome) in problems.iter().zip(&outcomes) {
            let is_right = matches!(outcome, Outcome::Judged(verdict) if verdict.wrong.is_none());
            assert!(is_right, "{problem}: {outcome:?}");
            tally.take(problem, outcome);
        }
        for pass in PASSES {
            let unjudged: Vec<_> = tally.unjudged(pass).into_iter().collect();
            assert!(unjudged.iter().all(|(why, _)| why.starts_with("refused: ")), "{unjudged:?}");
            let left = unjudged.iter().flat_map(|(_, pairs)| pairs);
            let wanted = pairs().filter(|(a, b)| is_pair(pass, a, b) && refused(pass, a, b));
            assert!(left.clone().all(|(a, b)| refused(pass, a, b)) && left.count() == wanted.count(), "{unjudged:?}");
        }
        assert_eq!((problems.len(), refusals), (601, 64));
    }

    #[test]
    fn what_came_of_a_problem_is_counted_for_its_pairs() {
        let problem = example(Pass::Forward, DType::F32, ["softcap", "packed"]).unwrap();
        let mut tally = Pairs::default();
        let mut verdict = Verdict::default();
        verdict.ratios.rms = 0.25;
        tally.take(&problem, &Outcome::Judged(verdict.clone()));
        verdict.ratios.row = 1.5;
        tally.take(&problem, &Outcome::Judged(Verdict { wrong: Some("o".into()), ..verdict }));
        let pair = ("softcap", "packed");
        assert!(!tally.unjudged(Pass::Forward)["none was drawn"].contains(&pair));
        tally.take(&problem, &Outcome::Refused("no kernel".into()));
        let Count { right, wrong, refused, worst, why } = tally.count(Pass::Forward, pair);
        assert_eq!((right, wrong, refused, worst, why.as_deref()), (1, 1, 1, 1.5, Some("no kernel")));
        assert_eq!(tally.count(Pass::Backward, pair).right, 0);

        let other = example(Pass::Backward, DType::F32, ["softcap", "packed"]).unwrap();
        tally.take(&other, &Outcome::Refused("no kernel".into()));
        let unjudged = tally.unjudged(Pass::Backward);
        assert_eq!(unjudged["refused: no kernel"], [pair, ("softcap", "full"), ("packed", "full")]);
        assert!(unjudged["none was drawn"].contains(&("softcap", "causal")), "{unjudged:?}");
        let (why, lists) = unjudged.iter().find(|(_, pairs)| pairs.contains(&("blocks", "packed"))).unwrap();
        assert!(why.starts_with("refused: unsupported: a block mask with packed"), "{why}");
        assert_eq!(lists[..], [("blocks", "packed"), ("blocks", "used lengths")]);

        let text = tally.to_string();
        assert!(text.lines().all(|line| line.len() <= 132), "{text}");
        let row = text.lines().find(|line| line.starts_with("softcap + packed ")).unwrap();
        let cells: Vec<_> = row.split_whitespace().skip(3).collect();
        assert_eq!(cells, ["1", "1", "1", "1.500", "0", "0", "1", "0.000", "0", "0", "0", "0.000"]);
        assert!(!text.contains("full + causal") && text.contains("gqa + prefix"), "{text}");
    }
}
