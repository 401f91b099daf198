//! What moved between two reports, beyond their noise.

use std::fmt;

use anyhow::{Result, ensure};

use crate::{Point, PointReport, Report, Role, Run, geometric_mean};

/// The smallest relative change that is reported. Two sweeps of one build differ by as much.
pub const FLOOR: f64 = 0.02;
/// Changes up to this many standard errors are noise.
const SIGMAS: f64 = 3.0;

/// One point in both reports.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// The point.
    pub point: Point,
    /// TFLOP/s before and after.
    pub rates: [f64; 2],
    /// Our relative change, less that of the peers which both reports timed here: it was the card's.
    pub change: f64,
    /// How large a change could be noise.
    pub noise: f64,
    /// Peers that took the card's part.
    pub peers: usize,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { point, rates: [old, new], change, noise, peers } = self;
        let beside = match peers {
            0 => "no peer in both: the card's part is unknown".into(),
            1 => "beside 1 peer".into(),
            n => format!("beside {n} peers"),
        };
        let (change, noise) = (100.0 * change, 100.0 * noise);
        write!(f, "{point}: {change:+.1}% (noise {noise:.1}%), {old:.1} -> {new:.1} TFLOP/s, {beside}")
    }
}

/// Two reports, point by point.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    /// Slower beyond noise.
    pub slower: Vec<Change>,
    /// Faster beyond noise.
    pub faster: Vec<Change>,
    /// Within noise.
    pub same: usize,
    /// Timed before and now not, though the point was asked for, with the reason.
    pub lost: Vec<(Point, String)>,
    /// Points of one report only.
    pub unmatched: usize,
}

impl Comparison {
    /// Compares `new` with `old`. `floor` is the smallest change that is reported, see [`FLOOR`].
    ///
    /// # Errors
    /// When they are of different devices, or share no point.
    pub fn new(old: &Report, new: &Report, floor: f64) -> Result<Self> {
        ensure!(
            old.device == new.device,
            "one report is of {}, the other of {}: there is nothing to compare",
            old.device,
            new.device
        );
        let mut found = Self::default();
        for after in &new.points {
            let Some(before) = old.points.iter().find(|before| before.point == after.point) else {
                found.unmatched += 1;
                continue;
            };
            let (Some(was), now) = (before.ours().filter(|run| run.rate().is_some()), after.ours()) else { continue };
            let Some(now) = now.filter(|run| run.rate().is_some()) else {
                let why = now.and_then(|run| run.error.clone()).unwrap_or_else(|| "it was not timed".into());
                found.lost.push((after.point.clone(), why));
                continue;
            };
            let Some(change) = change(before, after, was, now, floor) else { continue };
            match change.change {
                x if x < -change.noise => found.slower.push(change),
                x if x > change.noise => found.faster.push(change),
                _ => found.same += 1,
            }
        }
        found.unmatched +=
            old.points.iter().filter(|before| !new.points.iter().any(|after| after.point == before.point)).count();
        let matched = found.slower.len() + found.faster.len() + found.same + found.lost.len();
        ensure!(matched > 0, "the two reports share no point that was timed");
        Ok(found)
    }

    /// Whether nothing got slower and nothing was lost.
    pub fn passed(&self) -> bool {
        self.slower.is_empty() && self.lost.is_empty()
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (word, changes) in [("slower", &self.slower), ("faster", &self.faster)] {
            for change in changes {
                writeln!(f, "{word}: {change}")?;
            }
        }
        for (point, why) in &self.lost {
            writeln!(f, "lost: {point}: {why}")?;
        }
        let Self { slower, faster, same, lost, unmatched } = self;
        let (slower, faster, lost) = (slower.len(), faster.len(), lost.len());
        write!(f, "{slower} slower, {faster} faster, {same} within noise, {lost} lost, {unmatched} in one report only")
    }
}

fn change(before: &PointReport, after: &PointReport, was: &Run, now: &Run, floor: f64) -> Option<Change> {
    let peers: Vec<(&Run, &Run)> = before
        .runs
        .iter()
        .filter(|run| run.role == Role::Peer && run.rate().is_some())
        .filter_map(|run| Some((run, after.run(&run.name).filter(|run| run.rate().is_some())?)))
        .collect();
    let card: Vec<f64> = peers.iter().filter_map(|(old, new)| Some(new.rate()? / old.rate()?)).collect();
    let (old, new) = (was.rate()?, now.rate()?);
    let change = new / old / geometric_mean(&card).unwrap_or(1.0) - 1.0;
    let variance = |run: &Run| standard_error(run).powi(2);
    let own = variance(was) + variance(now);
    // The peers' mean is known better than each of them.
    let theirs: f64 = peers.iter().map(|(old, new)| variance(old) + variance(new)).sum();
    let theirs = theirs / (peers.len().max(1) as f64).powi(2);
    let noise = floor.max(SIGMAS * (own + theirs).sqrt());
    Some(Change { point: after.point.clone(), rates: [old, new], change, noise, peers: peers.len() })
}

/// Of the median, relative to it, from the quartiles, which no outlier moves: the quartiles of a normal distribution are
/// 1.349 standard deviations apart, and its median's error is 1.253 times that of the mean.
fn standard_error(run: &Run) -> f64 {
    let Some(summary) = &run.summary else { return 0.0 };
    1.253 / 1.349 * (summary.iqr_percent / 100.0) / (summary.ms.len() as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;
    use crate::{RunStatus, Summary};

    /// The report with each library's times multiplied.
    fn slowed(ours: f64, peers: f64) -> Report {
        let mut report = report();
        for result in &mut report.points {
            for run in &mut result.runs {
                let factor = if run.role == Role::Ours { ours } else { peers };
                let times = run.summary.take();
                run.summary =
                    times.and_then(|s| Summary::new(s.ms.iter().map(|ms| ms * factor).collect(), result.flops));
            }
        }
        report
    }

    fn counts(old: &Report, new: &Report) -> (usize, usize, usize) {
        let found = Comparison::new(old, new, FLOOR).unwrap();
        (found.slower.len(), found.faster.len(), found.same)
    }

    #[test]
    fn only_what_moves_beside_the_peers_counts() {
        assert_eq!(counts(&report(), &report()), (0, 0, 2));
        assert_eq!(counts(&report(), &slowed(1.1, 1.0)), (2, 0, 0));
        assert_eq!(counts(&report(), &slowed(0.9, 1.0)), (0, 2, 0));
        // The card was slower, and we with it.
        assert_eq!(counts(&report(), &slowed(1.1, 1.1)), (0, 0, 2));
        // We kept our rate on a faster card.
        assert_eq!(counts(&report(), &slowed(1.0, 0.9)), (2, 0, 0));
        assert_eq!(counts(&report(), &slowed(1.019, 1.0)), (0, 0, 2));
    }

    #[test]
    fn wide_samples_are_noise() {
        let noisy = |factor: f64| {
            let mut report = report();
            for result in &mut report.points {
                let ms = [0.5, 0.8, 1.0, 1.2, 1.5].map(|x| x * factor).into();
                result.runs[1].summary = Summary::new(ms, result.flops);
            }
            report
        };
        assert_eq!(counts(&noisy(1.0), &noisy(1.1)), (0, 0, 2));
        assert_eq!(counts(&noisy(1.0), &noisy(5.0)), (2, 0, 0));
    }

    #[test]
    fn lost_points_fail_and_are_named() {
        let mut new = report();
        new.points[1].runs[1].status = RunStatus::Failed;
        new.points[1].runs[1].error = Some("it broke".into());
        let found = Comparison::new(&report(), &new, FLOOR).unwrap();
        assert!(!found.passed() && Comparison::new(&report(), &report(), FLOOR).unwrap().passed());
        let text = found.to_string();
        assert!(
            text.contains("lost: fwd/bf16/d64/causal/s1024/b16/h32/kv32: it broke\n0 slower, 0 faster, 1 within"),
            "{text}"
        );
    }

    #[test]
    fn what_cannot_be_compared_is_refused() {
        let other = Report { device: "CPU".into(), ..report() };
        assert!(Comparison::new(&report(), &other, FLOOR).is_err());
        let none = Report { points: vec![], ..report() };
        assert!(Comparison::new(&none, &report(), FLOOR).is_err());
    }

    #[test]
    fn a_change_in_words() {
        let found = Comparison::new(&report(), &slowed(1.25, 1.0), FLOOR).unwrap();
        assert!(
            found.slower[0].to_string().starts_with(
                "fwd/bf16/d64/causal/s512/b32/h32/kv32: -20.0% (noise 5.0%), 600.0 -> 480.0 TFLOP/s, beside 1 peer"
            ),
            "{}",
            found.slower[0]
        );
    }
}
