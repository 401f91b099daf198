//! Random problems over everything that the library computes, until one is wrong. `hattn fuzz` is this.
//!
//! 1. [`Fuzz::draw`] draws problems from a seed.
//! 2. [`Lab::run`] computes them on a device, in guarded memory, and judges the results.
//! 3. [`Lab::smaller`] makes a wrong one as small as it can.
//! 4. [`Problem`] is written as JSON, and can be run again from that.

mod on_cpu;
#[cfg(feature = "cuda")]
mod on_gpu;
mod pairs;
mod problem;

use hopper_attention::{Device, Mask};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use rayon::prelude::*;

use crate::alibi::Alibi;
use crate::bias::Bias;
use crate::blocks::Blocks;
use crate::case::Case;
use crate::case::random::{listed, runner};
use crate::ready::Verdict;
use crate::sinks::Sinks;

pub use pairs::{Count, FEATURES, PASSES, Pairs, example, features, is_pair, largest, pairs};
pub use problem::{Fp8, Launch, Pass, Problem};

/// How many steps are taken to make a problem smaller.
const STEPS: usize = 400;

/// What came of a problem.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Outcome {
    /// It was computed and judged.
    Judged(Verdict),
    /// The device does not compute such a problem, and says so.
    Refused(String),
}

impl Outcome {
    /// What is wrong, if anything is.
    pub fn wrong(&self) -> Option<&str> {
        match self {
            Self::Judged(verdict) => verdict.wrong.as_deref(),
            Self::Refused(_) => None,
        }
    }
}

/// A device to compute problems on.
pub struct Lab {
    #[cfg(feature = "cuda")]
    gpu: Option<on_gpu::Gpu>,
}

impl Lab {
    /// A device.
    ///
    /// # Errors
    /// When the GPU does not answer.
    pub fn new(device: &Device) -> Result<Self, String> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = device {
            return Ok(Self { gpu: Some(on_gpu::Gpu::new(device)?) });
        }
        let _ = device;
        Ok(Self {
            #[cfg(feature = "cuda")]
            gpu: None,
        })
    }

    /// Whether this is a GPU.
    pub fn is_gpu(&self) -> bool {
        #[cfg(feature = "cuda")]
        return self.gpu.is_some();
        #[cfg(not(feature = "cuda"))]
        false
    }

    /// Computes problems and judges the results. On the CPU they are computed side by side. On a GPU one after another, and
    /// judged side by side.
    pub fn run(&mut self, problems: &[Problem]) -> Vec<Outcome> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &mut self.gpu {
            return gpu.run(problems);
        }
        problems.par_iter().map(on_cpu::run).collect()
    }

    /// Whether the device still answers. After an error of the GPU itself, nothing can be run on it in this process.
    pub fn is_alive(&self) -> bool {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.gpu {
            return gpu.is_alive();
        }
        true
    }

    /// The smallest problem like the one drawn that is wrong too, and what is wrong with it. `None` if it is right this time.
    pub fn smaller(&mut self, drawn: &mut Drawn) -> Option<(Problem, String)> {
        smallest(drawn, |problem| {
            if !self.is_alive() {
                return None;
            }
            self.run(std::slice::from_ref(problem)).pop()?.wrong().map(str::to_owned)
        })
    }
}

/// Makes a problem smaller as long as it stays wrong. `wrong` says what is wrong with a problem, if anything is.
fn smallest(drawn: &mut Drawn, mut wrong: impl FnMut(&Problem) -> Option<String>) -> Option<(Problem, String)> {
    let mut smallest = None;
    for _ in 0..STEPS {
        let problem = drawn.problem();
        let moved = match wrong(&problem) {
            Some(why) => {
                smallest = Some((problem, why));
                drawn.tree.simplify()
            }
            None => drawn.tree.complicate(),
        };
        if !moved {
            break;
        }
    }
    smallest
}

/// A problem that can be made smaller.
pub struct Drawn {
    tree: Box<dyn ValueTree<Value = Problem>>,
}

impl Drawn {
    /// The problem.
    pub fn problem(&self) -> Problem {
        self.tree.current()
    }
}

/// A source of problems.
pub struct Fuzz {
    runner: TestRunner,
    strategy: proptest::strategy::BoxedStrategy<Problem>,
}

impl Fuzz {
    /// Problems for a GPU, or for the CPU. A seed gives the same problems on every machine.
    pub fn new(seed: u64, for_gpu: bool) -> Self {
        Self { runner: runner(seed), strategy: problem::any(for_gpu).boxed() }
    }

    /// Gives all problems this cap of the scores (0: none) in place of the drawn one. It must be legal with every scale that is drawn:
    /// 0, or 1e-3 to 1e6.
    #[must_use]
    pub fn softcap(self, softcap: f32) -> Self {
        self.with_any(move |problem| problem.case.softcap = softcap)
    }

    /// Gives all problems ALiBi slopes of this kind in place of the drawn ones. Problems with e4m3 operands have none.
    #[must_use]
    pub fn alibi(self, alibi: Alibi) -> Self {
        self.with(move |case| case.alibi = alibi)
    }

    /// Gives all problems lists of blocks of this kind in place of the drawn ones. Problems with packed sequences or used lengths have
    /// none.
    #[must_use]
    pub fn blocks(self, blocks: Blocks) -> Self {
        self.with_any(move |problem| {
            if problem.pass != Pass::Quantize {
                problem.case = listed(problem.case.clone(), blocks);
            }
        })
    }

    /// Gives all problems an additive bias of this kind in place of the drawn one. Problems with e4m3 operands have none.
    #[must_use]
    pub fn bias(self, bias: Bias) -> Self {
        self.with(move |case| *case = case.clone().bias(bias))
    }

    /// Gives all problems dropout with this probability (0: none) in place of the drawn one. Problems with e4m3 operands have none.
    #[must_use]
    pub fn dropout(self, probability: f32) -> Self {
        self.with(move |case| case.dropout = probability)
    }

    /// Gives all problems this mask in place of the drawn one.
    #[must_use]
    pub fn mask(self, mask: Mask) -> Self {
        self.with_any(move |problem| problem.case.mask = mask)
    }

    /// Gives all problems sinks of this kind in place of the drawn ones.
    #[must_use]
    pub fn sinks(self, sinks: Sinks) -> Self {
        self.with_any(move |problem| problem.case.sinks = sinks)
    }

    /// Asks all problems for the maximum logits, or none of them. Problems with e4m3 operands have none.
    #[must_use]
    pub fn max_logits(self, wanted: bool) -> Self {
        self.with(move |case| case.max_logits = wanted)
    }

    /// Changes the cases of problems whose operands are not e4m3.
    fn with(self, change: impl Fn(&mut Case) + 'static) -> Self {
        self.with_any(move |problem| {
            if !matches!(problem.pass, Pass::Fp8 | Pass::Quantize) {
                change(&mut problem.case);
            }
        })
    }

    /// Changes problems of all passes.
    fn with_any(self, change: impl Fn(&mut Problem) + 'static) -> Self {
        let changed = move |mut problem: Problem| {
            change(&mut problem);
            problem
        };
        Self { strategy: self.strategy.prop_map(changed).boxed(), ..self }
    }

    /// The next problem.
    ///
    /// # Errors
    /// When none could be drawn, which is a bug.
    pub fn draw(&mut self) -> Result<Drawn, String> {
        let tree = self.strategy.new_tree(&mut self.runner).map_err(|reason| reason.to_string())?;
        Ok(Drawn { tree: Box::new(tree) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_problem_is_made_smaller() {
        let mut fuzz = Fuzz::new(7, true);
        let wrong = |problem: &Problem| {
            let large = problem.case.dims.seqlen_kv >= 33 && problem.pass == Pass::Backward;
            large.then(|| "more than 32 keys".to_owned())
        };
        let mut found = 0;
        for _ in 0..200 {
            let mut drawn = fuzz.draw().unwrap();
            let first = drawn.problem();
            let Some((problem, _)) = smallest(&mut drawn, wrong) else {
                assert!(wrong(&first).is_none(), "{first}");
                continue;
            };
            found += 1;
            let Problem { case, launch, .. } = &problem;
            // The least length of each of the ranges that lengths are drawn from, above 32.
            assert!(
                [33, 60, 120, 185, 300].contains(&case.dims.seqlen_kv) && wrong(&problem).is_some(),
                "{first} became {problem}"
            );
            // Few heads have long sequences of both.
            let queries = if case.dims.seqlen_kv == 300 { 300 } else { 1 };
            assert!(case.dims.batch == 1 && case.dims.seqlen_q == queries && !launch.graph, "{first} became {problem}");
        }
        assert!(found > 10, "{found}");
    }

    #[test]
    fn a_seed_gives_the_same_problems() {
        let draw = |seed| {
            let mut fuzz = Fuzz::new(seed, false);
            (0..20).map(|_| fuzz.draw().unwrap().problem()).collect::<Vec<_>>()
        };
        assert!(draw(3) == draw(3) && draw(3) != draw(4));
    }

    #[test]
    fn a_cap_may_be_given() {
        for cap in [0.0, 1e-3, 50.0, 1e6] {
            let mut fuzz = Fuzz::new(5, true).softcap(cap);
            for problem in (0..200).map(|_| fuzz.draw().unwrap().problem()) {
                assert_eq!(problem.forward().softcap(), cap, "{problem}");
            }
        }
    }

    #[test]
    fn slopes_and_maximum_logits_may_be_given() {
        for (alibi, wanted) in [(Alibi::None, false), (Alibi::PerBatch, true)] {
            let mut fuzz = Fuzz::new(5, true).alibi(alibi).max_logits(wanted);
            for problem in (0..200).map(|_| fuzz.draw().unwrap().problem()) {
                let fp8 = matches!(problem.pass, Pass::Fp8 | Pass::Quantize);
                let forward = problem.forward();
                assert_eq!(forward.alibi(), if fp8 { None } else { alibi.option() }, "{problem}");
                assert_eq!(forward.wants_max_logits(), wanted && !fp8, "{problem}");
            }
        }
    }

    #[test]
    fn dropout_may_be_given() {
        for (probability, for_gpu) in [(0.0, false), (0.25, false), (0.25, true)] {
            let mut fuzz = Fuzz::new(5, for_gpu).dropout(probability);
            for problem in (0..200).map(|_| fuzz.draw().unwrap().problem()) {
                let has = probability > 0.0 && !matches!(problem.pass, Pass::Fp8 | Pass::Quantize);
                let got = problem.forward().dropout().map(|dropout| dropout.probability());
                assert_eq!(got, has.then_some(probability), "{problem}");
            }
        }
    }

    /// What a problem computes beside the plain softmax, and its pass, by name.
    fn modifiers(problem: &Problem) -> Vec<&'static str> {
        let pass = match problem.pass {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
            Pass::Fp8 => "fp8",
            Pass::Quantize => "quantize",
        };
        features(problem).into_iter().chain([pass]).collect()
    }

    /// Pairs that no problem has: of two masks and of two passes, and those that the library refuses.
    fn never(a: &str, b: &str) -> bool {
        let both = |x: &[&str], y: &[&str]| x.contains(&a) && y.contains(&b) || x.contains(&b) && y.contains(&a);
        let (masks, passes) = (["full", "causal", "window", "chunked", "prefix"], ["forward", "backward", "fp8"]);
        both(&masks, &masks)
            || both(&passes, &passes)
            || both(&["fp8"], &["alibi", "max_logits", "bias", "dropout"])
            || both(&["backward"], &["max_logits"])
            || both(&["forward", "fp8"], &["deterministic"])
            || both(&["max_logits"], &["deterministic"])
            || both(&["blocks"], &["packed", "used lengths"])
    }

    #[test]
    fn every_pair_of_modifiers_is_drawn() {
        for for_gpu in [false, true] {
            let mut fuzz = Fuzz::new(11, for_gpu);
            let mut pairs = std::collections::BTreeMap::<_, usize>::new();
            let mut seen = std::collections::BTreeSet::new();
            for problem in (0..8000).map(|_| fuzz.draw().unwrap().problem()).filter(|x| x.pass != Pass::Quantize) {
                let names = modifiers(&problem);
                for (i, a) in names.iter().enumerate() {
                    seen.insert(*a);
                    names[i + 1..].iter().for_each(|b| *pairs.entry((*a, *b)).or_default() += 1);
                }
            }
            assert_eq!(seen.len(), FEATURES.len() + PASSES.len(), "{seen:?}");
            let all = seen.iter().flat_map(|a| seen.iter().map(move |b| (*a, *b))).filter(|(a, b)| a < b);
            for (a, b) in all {
                let drawn = pairs.get(&(a, b)).or(pairs.get(&(b, a))).copied().unwrap_or(0);
                if never(a, b) {
                    assert_eq!(drawn, 0, "{a} with {b}, for a GPU: {for_gpu}");
                } else {
                    assert!(drawn >= 5, "{a} with {b}, for a GPU: {for_gpu}: {drawn} of 8000");
                }
            }
        }
    }

    #[test]
    fn lists_of_blocks_may_be_given() {
        for blocks in [Blocks::None, Blocks::Random(40), Blocks::Documents] {
            let mut fuzz = Fuzz::new(5, true).blocks(blocks);
            let mut with = 0;
            for problem in (0..200).map(|_| fuzz.draw().unwrap().problem()) {
                let takes = problem.pass != Pass::Quantize && problem.case.packing.is_none();
                let has = problem.forward().block_mask().is_some();
                assert_eq!(has, takes && !blocks.is_none(), "{problem}");
                with += usize::from(has);
            }
            assert!(with > 20 || blocks.is_none(), "{with} of 200");
        }
    }

    #[test]
    fn masks_and_sinks_may_be_given() {
        for (mask, sinks) in [(Mask::chunked(7), Sinks::None), (Mask::causal(), Sinks::Ten)] {
            let mut fuzz = Fuzz::new(5, true).mask(mask).sinks(sinks);
            for problem in (0..200).map(|_| fuzz.draw().unwrap().problem()) {
                let forward = problem.forward();
                assert_eq!((forward.mask(), forward.sinks().is_none()), (mask, sinks.is_none()), "{problem}");
            }
        }
    }

    #[test]
    fn a_bias_may_be_given() {
        for bias in ["none", "bf16:hq:hidden"].map(|text| text.parse::<Bias>().unwrap()) {
            let mut fuzz = Fuzz::new(5, false).bias(bias);
            let mut with = 0;
            for problem in (0..200).map(|_| fuzz.draw().unwrap().problem()) {
                let takes = !matches!(problem.pass, Pass::Fp8 | Pass::Quantize);
                let has = problem.forward().bias().is_some();
                assert_eq!(has, takes && !bias.is_none(), "{problem}");
                with += usize::from(has);
            }
            assert!(with > 20 || bias.is_none(), "{with} of 200");
        }
    }

    #[test]
    fn the_cpu_is_right() {
        let mut fuzz = Fuzz::new(1, false);
        let problems: Vec<_> = (0..60).map(|_| fuzz.draw().unwrap().problem()).collect();
        let outcomes = Lab::new(&Device::cpu()).unwrap().run(&problems);
        for (problem, outcome) in problems.iter().zip(outcomes) {
            assert!(outcome.wrong().is_none(), "{problem}: {outcome:?}");
        }
    }
}
