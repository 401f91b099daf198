//! `hattn fuzz`: random problems on a device, each judged, until one is wrong or the time is over.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hopper_attention::Device;
use hopper_attention::reference::tolerance::Ratios;
use hopper_attention_benches::text;
use hopper_attention_verify::fuzz::{Count, Drawn, Fuzz, Lab, Outcome, PASSES, Pairs, Problem, largest};
use serde::{Deserialize, Serialize};

use crate::args::{DeviceArg, FuzzArgs};
use crate::compute::device_name;
use crate::output::AtomicFile;
use crate::report;

/// Problems between two looks at the clock.
const ROUND: usize = 512;

/// Wrong problems that are printed.
const SHOWN: usize = 20;

/// Reasons why problems were refused that are printed, the most frequent first.
const REASONS_SHOWN: usize = 5;

/// A wrong problem in a file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Failure {
    /// The version of `hattn` that wrote it.
    hattn: String,
    /// Where it was computed.
    device: String,
    /// What was wrong.
    wrong: String,
    /// The problem.
    problem: Problem,
}

/// What was found so far.
#[derive(Default)]
struct Tally {
    judged: BTreeMap<String, usize>,
    refused: BTreeMap<String, usize>,
    /// Why, without the numbers.
    reasons: BTreeMap<String, usize>,
    /// What came of the problems of each pair of features.
    pairs: Pairs,
    /// The same by how sequences lie: packed, dense with used lengths, dense. Without problems of the quantiser.
    lying: BTreeMap<&'static str, Count>,
    wrong: usize,
    worst: Ratios,
    /// From which share of its bound on an error is printed, and how many problems had one.
    near_from: Option<f64>,
    near: usize,
}

/// The longest line of a list of pairs, as long as those of their table.
const COLUMNS: usize = 120;

/// How the sequences of a problem lie.
fn lying(problem: &Problem) -> &'static str {
    let forward = problem.forward();
    match () {
        () if forward.is_packed_q() || forward.is_packed_kv() => "packed",
        () if forward.has_lengths() => "used",
        () => "dense",
    }
}

/// Pieces of a text with spaces between them, and with line breaks in place of some, so that no line is longer, but for a longer
/// piece.
fn wrapped<'a>(pieces: impl Iterator<Item = &'a str>, columns: usize) -> String {
    let mut lines = vec![String::new()];
    for piece in pieces {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(piece),
            Some(line) if line.chars().count() + 1 + piece.chars().count() <= columns => {
                line.push(' ');
                line.push_str(piece);
            }
            _ => lines.push(piece.into()),
        }
    }
    lines.join("\n")
}

/// A reason without its numbers: it is then the same for many problems. Digits of words, such as those of e4m3, stay.
fn without_numbers(why: &str) -> String {
    let word = |word: &str| match word.contains(|c: char| c.is_ascii_alphabetic()) {
        true => word.to_owned(),
        false => word.replace(|c: char| c.is_ascii_digit(), "#"),
    };
    why.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

impl Tally {
    fn take(&mut self, problem: &Problem, outcome: &Outcome) {
        let kind = format!("{} {}", format!("{:?}", problem.pass).to_lowercase(), problem.dtype);
        self.pairs.take(problem, outcome);
        if PASSES.contains(&problem.pass) {
            self.lying.entry(lying(problem)).or_default().take(outcome);
        }
        match outcome {
            Outcome::Judged(verdict) => {
                *self.judged.entry(kind).or_default() += 1;
                self.worst = self.worst.max(verdict.ratios);
                if self.near_from.is_some_and(|from| largest(verdict) >= from) {
                    self.near += 1;
                    if self.near <= SHOWN {
                        report::line("near", format!("{problem}: {}", verdict.report));
                    }
                }
            }
            Outcome::Refused(why) => {
                *self.refused.entry(kind).or_default() += 1;
                *self.reasons.entry(why.replace(|c: char| c.is_ascii_digit(), "#")).or_default() += 1;
            }
            _ => {}
        }
    }

    /// `pairs`: whether to print what came of each pair of features.
    fn tell(&self, seed: u64, time: Duration, pairs: bool) {
        let sum = |counts: &BTreeMap<String, usize>| counts.values().sum::<usize>();
        let words = |counts: &BTreeMap<String, usize>| {
            let words: Vec<_> = counts.iter().map(|(kind, count)| format!("{kind} {count}")).collect();
            words.join(", ")
        };
        report::line(
            "problems",
            format!("{} in {:.1} s, seed {seed}: {}", sum(&self.judged), time.as_secs_f64(), words(&self.judged)),
        );
        if !self.refused.is_empty() {
            report::line(
                "refused",
                format!("{}, since the device has no kernel for them: {}", sum(&self.refused), words(&self.refused)),
            );
            let mut reasons: Vec<_> = self.reasons.iter().collect();
            reasons.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
            for (why, count) in reasons.into_iter().take(REASONS_SHOWN) {
                report::line("refused", format!("{count}: {why}"));
            }
        }
        let Ratios { row, tensor, rms, common, .. } = self.worst;
        report::line(
            "largest",
            format!(
                "errors as a share of their bounds: row {row:.3}, tensor {tensor:.3}, rms {rms:.3}, common {common:.3}"
            ),
        );
        for (lying, Count { right, wrong, refused, worst, .. }) in &self.lying {
            let judged = right + wrong;
            let counts = format!("{judged} judged, {wrong} of them wrong, {refused} refused");
            report::line(lying, format!("{counts}; the largest error is {worst:.3} of its bound"));
        }
        if pairs {
            self.tell_pairs();
        }
        if let Some(from) = self.near_from {
            report::line("near", format!("{} of the problems with an error of {from} of its bound or more", self.near));
        }
    }
}

impl Tally {
    fn tell_pairs(&self) {
        report::plain(&format!("{}\n", self.pairs));
        for pass in PASSES {
            let mut by_reason = BTreeMap::<String, Vec<String>>::new();
            for (why, pairs) in self.pairs.unjudged(pass) {
                let names = pairs.iter().map(|(a, b)| format!("{a} + {b},"));
                by_reason.entry(without_numbers(&why)).or_default().extend(names);
            }
            for (why, names) in by_reason {
                let why = format!("{}, {} pairs, {why}:", format!("{pass:?}").to_lowercase(), names.len());
                let text = wrapped(why.split(' ').chain(names.iter().map(String::as_str)), COLUMNS);
                report::line("unjudged", text.trim_end_matches(','));
            }
        }
    }
}

/// `hattn fuzz`.
pub fn fuzz(args: &FuzzArgs) -> Result<()> {
    let failure = args.replay.as_deref().map(read).transpose()?;
    let device = device(args.device)?;
    report::line("device", device_name(&device));
    let mut lab = Lab::new(&device).map_err(anyhow::Error::msg)?;
    match failure {
        Some(failure) => replay(&mut lab, &failure),
        None => search(args, &device, &mut lab),
    }
}

fn device(arg: DeviceArg) -> Result<Device> {
    match arg {
        DeviceArg::Cpu => Ok(Device::cpu()),
        DeviceArg::Cuda(ordinal) => Ok(Device::cuda(ordinal)?),
        DeviceArg::Auto if cfg!(feature = "cuda") && !Device::available().is_empty() => Ok(Device::cuda(0)?),
        DeviceArg::Auto => Ok(Device::cpu()),
    }
}

fn search(args: &FuzzArgs, device: &Device, lab: &mut Lab) -> Result<()> {
    let seed = args.seed.unwrap_or_else(rand::random);
    report::line("seed", seed);
    let fuzz = Fuzz::new(seed, lab.is_gpu());
    let mut fuzz = match args.softcap {
        Some(softcap) => fuzz.softcap(softcap),
        None => fuzz,
    };
    fuzz = args.alibi.into_iter().fold(fuzz, Fuzz::alibi);
    fuzz = args.dropout.into_iter().fold(fuzz, |fuzz, dropout| fuzz.dropout(dropout.probability()));
    fuzz = args.block_mask.into_iter().fold(fuzz, Fuzz::blocks);
    fuzz = args.bias.into_iter().fold(fuzz, Fuzz::bias);
    fuzz = args.sinks.into_iter().fold(fuzz, Fuzz::sinks);
    fuzz = args.mask.into_iter().fold(fuzz, Fuzz::mask);
    if args.max_logits {
        fuzz = fuzz.max_logits(true);
    }
    let (since, mut tally) = (Instant::now(), Tally { near_from: args.near, ..Tally::default() });
    let limit = Duration::from_secs(args.seconds);
    let mut left = args.problems.unwrap_or(usize::MAX);
    let mut first: Option<(Drawn, String)> = None;
    let mut round = if lab.is_gpu() { ROUND } else { ROUND / 16 };
    while left > 0 && since.elapsed() < limit {
        round = round.min(left);
        let mut drawn = Vec::with_capacity(round);
        for _ in 0..round {
            drawn.push(fuzz.draw().map_err(anyhow::Error::msg)?);
        }
        let problems: Vec<Problem> = drawn.iter().map(Drawn::problem).collect();
        let outcomes = lab.run(&problems);
        for ((drawn, problem), outcome) in drawn.into_iter().zip(&problems).zip(&outcomes) {
            tally.take(problem, outcome);
            let Some(why) = outcome.wrong() else { continue };
            tally.wrong += 1;
            if tally.wrong <= SHOWN {
                report::line("wrong", format!("{problem}: {why}"));
            }
            first.get_or_insert((drawn, why.to_owned()));
        }
        if first.is_some() && !args.keep_going {
            break;
        }
        if !lab.is_alive() {
            tally.tell(seed, since.elapsed(), args.pairs);
            bail!("{}: the GPU does not answer any more", device_name(device));
        }
        left -= round;
    }
    tally.tell(seed, since.elapsed(), args.pairs);
    if let Some((mut drawn, why)) = first {
        report::line("check", format!("FAILED: {} wrong", tally.wrong));
        return failed(args, device, lab, (&mut drawn, &why));
    }
    let judged: usize = tally.judged.values().sum();
    ensure!(judged > 0, "no problem was computed; allowed: --seconds and --problems of 1 and above");
    report::line("check", "passed: 0 wrong");
    Ok(())
}

/// Makes the wrong problem smaller and writes it.
fn failed(args: &FuzzArgs, device: &Device, lab: &mut Lab, (drawn, why): (&mut Drawn, &str)) -> Result<()> {
    let first = drawn.problem();
    let (problem, wrong) = lab.smaller(drawn).unwrap_or_else(|| {
        report::line(
            "note",
            "it could not be made smaller: a second run of it was right, or the GPU does not answer any more",
        );
        (first, why.to_owned())
    });
    report::line("smaller", format!("{problem}: {wrong}"));
    let failure = Failure { hattn: env!("CARGO_PKG_VERSION").into(), device: device_name(device), wrong, problem };
    let json = serde_json::to_string_pretty(&failure).context("the problem cannot be written as JSON")?;
    AtomicFile::create(&args.output)?.finish(|writer| writeln!(writer, "{json}"))?;
    let path = args.output.display();
    bail!("a problem was computed wrong; written to {path}; hattn fuzz --replay {path} runs it again")
}

/// The wrong problem that a file holds.
fn read(path: &Path) -> Result<Failure> {
    let load = || Ok::<_, anyhow::Error>(serde_json::from_str(&text::read(path)?)?);
    load().with_context(|| format!("replay {}", path.display()))
}

fn replay(lab: &mut Lab, failure: &Failure) -> Result<()> {
    report::line("problem", &failure.problem);
    report::line("then", format!("{}, hattn {}: {}", failure.device, failure.hattn, failure.wrong));
    let outcome = lab.run(std::slice::from_ref(&failure.problem)).pop();
    match outcome {
        Some(Outcome::Judged(verdict)) => match verdict.wrong {
            Some(wrong) => bail!("computed wrong: {wrong}"),
            None => {
                report::line("check", "passed");
                Ok(())
            }
        },
        Some(Outcome::Refused(why)) => bail!("the device does not compute it: {why}"),
        _ => bail!("the GPU does not answer"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_pairs_are_wrapped_between_pairs() {
        let pieces = ["why:", "a + b,", "a + c,", "longer than a line,", "d"];
        assert_eq!(wrapped(pieces.into_iter(), 11), "why: a + b,\na + c,\nlonger than a line,\nd");
        assert_eq!(wrapped([].into_iter(), 11), "");
    }

    #[test]
    fn reasons_lose_their_numbers() {
        assert_eq!(without_numbers("head_dim 136 of e4m3, (8, 16)"), "head_dim ### of e4m3, (#, ##)");
    }
}
