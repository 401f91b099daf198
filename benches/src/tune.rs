//! From a report of kernels timed against each other to the choice that plans read: what `hattn tune` writes.

use std::fmt;

use anyhow::{Context as _, Result, ensure};
use hopper_attention::plan::{Tuning, candidates};
use hopper_attention::{DeviceFacts, KernelInfo};

use crate::{Point, PointReport, Report, RunStatus};

/// The kernels that compute one point, and their times.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// The point.
    pub point: Point,
    /// The kernels with their median times in milliseconds, in the order of the built-in rule: the first is its choice.
    pub timed: Vec<(KernelInfo, f64)>,
    /// The index of the fastest.
    pub fastest: usize,
}

impl Verdict {
    /// How many times as fast as the rule's choice the fastest kernel is: 1 where they are the same.
    pub fn gain(&self) -> f64 {
        self.timed[0].1 / self.timed[self.fastest].1
    }
}

impl fmt::Display for Verdict {
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
    let verdict = |result: &PointReport| {
        let point = result.point.clone();
        let broken = result.runs.iter().find(|run| matches!(run.status, RunStatus::Wrong | RunStatus::Failed));
        ensure!(
            broken.is_none(),
            "{point}: {}",
            broken.map_or_else(String::new, |run| {
                format!("{}: {}", run.name, run.error.as_deref().unwrap_or("no reason"))
            })
        );
        let timed: Vec<(KernelInfo, f64)> = candidates(&point.problem()?, gpu, rows)?
            .into_iter()
            .filter_map(|row| Some((row, result.run(&row.to_string())?.summary.as_ref()?.median_ms)))
            .collect();
        let fastest = (0..timed.len()).min_by(|&a, &b| timed[a].1.total_cmp(&timed[b].1));
        let fastest = fastest.with_context(|| format!("{point}: no kernel was timed"))?;
        Ok(Verdict { point, timed, fastest })
    };
    report.points.iter().map(verdict).collect()
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
    use hopper_attention::{Arch, DType, MaskClass};

    use super::*;
    use crate::{Role, Run, Summary, report};

    const H100: DeviceFacts = DeviceFacts::h100_sxm();

    fn rows() -> Vec<KernelInfo> {
        let row = |row, tile_m, mask| KernelInfo {
            row,
            pass: hopper_attention::Pass::Forward,
            arch: Arch::Sm90,
            dtype: DType::BF16,
            mask,
            head_dim_qk: 64,
            head_dim_vo: 64,
            tile_m,
            tile_n: 128,
            stages: 2,
            threads: 384,
            smem_bytes: 200 << 10,
            scores: DType::F32,
            share_bytes: 0,
        };
        vec![row(0, 192, MaskClass::Causal), row(1, 128, MaskClass::Causal), row(2, 128, MaskClass::Full)]
    }

    /// The kernels at two causal points (512 and 1024), with these median times, or this status without one.
    fn timed(ms: [[f64; 2]; 2], last: RunStatus) -> Report {
        let mut report = report::tests::report();
        for (result, ms) in report.points.iter_mut().zip(ms) {
            let status = [RunStatus::Ok, RunStatus::Ok, last];
            let all = rows().into_iter().zip([Some(ms[0]), Some(ms[1]), None]).zip(status);
            result.runs = all
                .map(|((row, ms), status)| Run {
                    name: row.to_string(),
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

    #[test]
    fn the_fastest_is_noted_whatever_the_rule_says() {
        let found = verdicts(&timed([[0.3, 0.2], [0.2, 0.4]], RunStatus::Unsupported), &H100, &rows()).unwrap();
        // At 512 and 1024 queries the rule takes 128 a tile.
        let tiles = |verdict: &Verdict| verdict.timed.iter().map(|(row, _)| row.tile_m).collect::<Vec<_>>();
        assert_eq!((tiles(&found[0]), tiles(&found[1])), (vec![128, 192], vec![128, 192]));
        assert_eq!((found[0].gain(), found[1].gain()), (1.0, 2.0));
        let mut tuning = Tuning::default();
        note(&mut tuning, "card", &found).unwrap();
        let noted = |verdict: &Verdict| {
            let problem = verdict.point.problem().unwrap();
            tuning.select(&problem, "card", &H100, &rows()).unwrap().kernel.tile_m
        };
        assert_eq!((noted(&found[0]), noted(&found[1]), tuning.len()), (128, 192, 2));
        let text = found[1].to_string();
        assert!(text.contains("400.0 us") && text.contains("stages 2, the rule's choice\n"), "{text}");
        assert!(text.ends_with("tile 192x128 stages 2, is the fastest"), "{text}");
    }

    #[test]
    fn nothing_is_noted_beside_a_kernel_that_is_wrong() {
        for status in [RunStatus::Wrong, RunStatus::Failed] {
            let error = verdicts(&timed([[1.0; 2]; 2], status), &H100, &rows()).unwrap_err().to_string();
            assert!(error.contains("full head_dim 64/64") && error.ends_with("why not"), "{error}");
        }
        let mut none = timed([[1.0; 2]; 2], RunStatus::Unsupported);
        none.points[1].runs.clear();
        assert!(verdicts(&none, &H100, &rows()).unwrap_err().to_string().ends_with("no kernel was timed"));
    }
}
