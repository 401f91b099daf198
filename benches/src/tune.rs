//! From a report of kernels timed against each other to the choice that plans read: what `hattn tune` writes.

use std::fmt;

use anyhow::{Context as _, Result, bail};
use hopper_attention::internal::candidates;
use hopper_attention::{DeviceFacts, KernelInfo, Tuning};

use crate::{Point, PointReport, Report, RunStatus};

/// The kernels that compute one point, and their times.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict<K = KernelInfo> {
    /// The point.
    pub point: Point,
    /// The kernels with their median times in milliseconds, in the order of the built-in rule: the first is its choice.
    pub timed: Vec<(K, f64)>,
    /// The index of the fastest.
    pub fastest: usize,
}

impl<K> Verdict<K> {
    /// How many times as fast as the rule's choice the fastest kernel is: 1 where they are the same.
    pub fn gain(&self) -> f64 {
        self.timed[0].1 / self.timed[self.fastest].1
    }
}

impl<K: fmt::Display> fmt::Display for Verdict<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.point)?;
        for (index, (row, ms)) in self.timed.iter().enumerate() {
            let mark = match (index == self.fastest, index) {
                (true, 0) => ", the rule's choice, is the fastest",
                (true, _) => ", is the fastest",
                (false, 0) => ", the rule's choice",
                (false, _) => "",
            };
            write!(f, "\n  {:>10.1} us  {row}{mark}", ms * 1e3)?;
        }
        Ok(())
    }
}

/// The verdict on each point of a report of the harness `Rows`, on a GPU with these facts and with these kernels.
///
/// # Errors
/// When a kernel's output was wrong or a call failed, or there was no timing: then nothing should be noted.
pub fn verdicts(report: &Report, gpu: &DeviceFacts, rows: &[KernelInfo]) -> Result<Vec<Verdict>> {
    let verdict = |result: &PointReport| verdict(result, candidates(&result.point.problem()?, gpu, rows)?);
    report.points.iter().map(verdict).collect()
}

/// The verdict on a point that these kernels compute.
fn verdict<K: fmt::Display>(result: &PointReport, kernels: Vec<K>) -> Result<Verdict<K>> {
    let point = result.point.clone();
    if let Some(run) = result.runs.iter().find(|run| matches!(run.status, RunStatus::Wrong | RunStatus::Failed)) {
        bail!("{point}: {}: {}", run.name, run.error.as_deref().unwrap_or("no reason"));
    }
    let time = |kernel: &K| Some(result.run(&kernel.to_string())?.summary.as_ref()?.median_ms);
    let timed = kernels.into_iter().filter_map(|kernel| time(&kernel).map(|ms| (kernel, ms)));
    let timed: Vec<(K, f64)> = timed.collect();
    let fastest = (0..timed.len()).min_by(|&a, &b| timed[a].1.total_cmp(&timed[b].1));
    let fastest = fastest.with_context(|| format!("{point}: no kernel was timed"))?;
    Ok(Verdict { point, timed, fastest })
}

/// Notes the fastest kernel of each point, for plans on this card.
///
/// # Errors
/// When a point is no problem; one that was timed is.
pub fn note(tuning: &mut Tuning, card: &str, verdicts: &[Verdict]) -> Result<()> {
    for verdict in verdicts {
        tuning.set(card, &verdict.point.problem()?, &verdict.timed[verdict.fastest].0);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Role, Run, Summary, report};

    /// In the order of the rule.
    const KERNELS: [&str; 2] = ["tile 128", "tile 192"];

    /// These kernels at two points, with these median times, and one with this status and without a time.
    fn timed(kernels: [&str; 2], ms: [[f64; 2]; 2], last: RunStatus) -> Report {
        let mut report = report::tests::report();
        for (result, ms) in report.points.iter_mut().zip(ms) {
            let all = [(kernels[0], Some(ms[0])), (kernels[1], Some(ms[1])), ("another mask", None)];
            let all = all.into_iter().zip([RunStatus::Ok, RunStatus::Ok, last]);
            result.runs = all
                .map(|((name, ms), status)| Run {
                    name: name.into(),
                    role: Role::Ours,
                    status,
                    error: (status != RunStatus::Ok).then(|| "why not".into()),
                    check: Default::default(),
                    host_us: None,
                    summary: ms.and_then(|ms| Summary::new(vec![ms; 3], result.flops)),
                })
                .collect();
        }
        report
    }

    fn found(report: &Report) -> Result<Vec<Verdict<&'static str>>> {
        report.points.iter().map(|result| verdict(result, [&KERNELS[..], &["not timed"]].concat())).collect()
    }

    #[test]
    fn the_fastest_is_found_whatever_the_rule_says() {
        let found = found(&timed(KERNELS, [[0.2, 0.3], [0.4, 0.2]], RunStatus::Unsupported)).unwrap();
        assert_eq!((found[0].gain(), found[1].gain()), (1.0, 2.0));
        assert_eq!([&found[0], &found[1]].map(|verdict| verdict.timed[verdict.fastest].0), KERNELS);
        let text = found[1].to_string();
        assert!(text.contains("400.0 us  tile 128, the rule's choice\n"), "{text}");
        assert!(text.ends_with("200.0 us  tile 192, is the fastest"), "{text}");
    }

    #[test]
    fn nothing_is_found_beside_a_kernel_that_is_wrong() {
        for status in [RunStatus::Wrong, RunStatus::Failed] {
            let error = found(&timed(KERNELS, [[1.0; 2]; 2], status)).unwrap_err().to_string();
            assert!(error.ends_with(": another mask: why not"), "{error}");
        }
        let mut none = timed(KERNELS, [[1.0; 2]; 2], RunStatus::Unsupported);
        none.points[1].runs.clear();
        assert!(found(&none).unwrap_err().to_string().ends_with("no kernel was timed"));
    }

    /// With the kernels of the build, in the order of its rule.
    #[test]
    fn the_fastest_is_noted_for_plans() {
        let (h100, rows) = (DeviceFacts::h100_sxm(), hopper_attention::kernels());
        let [first, second] = [0, 1].map(|i| {
            let problem = report::tests::report().points[0].point.problem().unwrap();
            candidates(&problem, &h100, rows).ok().and_then(|kernels| kernels.get(i).copied())
        });
        let Some((first, second)) = first.zip(second) else { return println!("skipped: no kernels to choose from") };
        let names = [first.to_string(), second.to_string()];
        let report = timed([&names[0], &names[1]], [[0.2, 0.3], [0.4, 0.2]], RunStatus::Unsupported);
        let mut tuning = Tuning::default();
        note(&mut tuning, "card", &verdicts(&report, &h100, rows).unwrap()).unwrap();
        let noted = [0, 1].map(|i| tuning.row("card", &report.points[i].point.problem().unwrap()).unwrap());
        assert_eq!((noted, tuning.len()), ([&names[0][..], &names[1]], 2));
    }
}
