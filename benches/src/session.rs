//! From the events of a harness to a report.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::card::{Card, Watch};
use crate::harness::{Event, Harness, Job, RawRun};
use crate::report::STOPPED;
use crate::{Busy, Ceiling, Point, PointReport, Report, Run, RunStatus, SCHEMA, Summary, quantile};

/// What a sweep reports while it runs.
pub enum Progress<'a> {
    /// A library is about to compute a point.
    Library {
        /// The point.
        point: &'a crate::Point,
        /// The library.
        name: &'a str,
    },
    /// Everything measured so far, one point or ceiling more than the last time.
    Report {
        /// The report.
        report: &'a Report,
        /// How often a harness was done with a point. Two harnesses count twice.
        done: usize,
    },
}

/// How a sweep ended.
pub enum Outcome {
    /// The harness did what it could; what it could not is in the report.
    Done {
        /// The report.
        report: Box<Report>,
        /// CUPTI's library, where one came with PyTorch.
        cupti: Option<PathBuf>,
    },
    /// The harness does not work on this machine, with the reason.
    Absent(String),
}

/// Runs a harness and makes a report of its events.
pub struct Session<'a> {
    job: &'a Job,
    report: Report,
    card: Option<Card>,
    watch: Option<Watch>,
    cupti: Option<PathBuf>,
    absent: Option<String>,
    /// Where each point is in the report.
    places: BTreeMap<usize, usize>,
    /// As in [`Progress::Report`].
    done: usize,
}

impl<'a> Session<'a> {
    /// A sweep that has not begun. `options` are recorded as they are.
    pub fn new(job: &'a Job, commit: Option<String>, options: BTreeMap<String, Value>) -> Self {
        let report = Report {
            schema: SCHEMA.into(),
            commit,
            date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            device: String::new(),
            driver: None,
            harness: String::new(),
            versions: BTreeMap::new(),
            method: String::new(),
            options,
            libraries: vec![],
            missing: vec![],
            notes: vec![],
            state_before: None,
            state_after: None,
            ceilings: vec![],
            host: None,
            points: vec![],
        };
        Self { job, report, card: None, watch: None, cupti: None, absent: None, places: BTreeMap::new(), done: 0 }
    }

    /// Runs the harness to its end.
    ///
    /// # Errors
    /// When the harness breaks off before its first point; later ones are a note in the report.
    pub fn run(
        mut self,
        harness: &mut dyn Harness,
        progress: &mut dyn FnMut(Progress<'_>) -> Result<()>,
    ) -> Result<Outcome> {
        self.report.harness = harness.name().into();
        let job = self.job;
        let ended = harness.run(job, &mut |event| self.take(event, progress));
        if let Some(why) = self.absent {
            return Ok(Outcome::Absent(why));
        }
        self.report.state_after = self.card.as_ref().map(Card::state);
        if let Err(error) = ended {
            if self.report.points.is_empty() {
                return Err(error);
            }
            self.report.notes.push(format!("{STOPPED}: {error:#}"));
        }
        progress(Progress::Report { report: &self.report, done: self.done })?;
        Ok(Outcome::Done { report: Box::new(self.report), cupti: self.cupti })
    }

    fn take(&mut self, event: Event, progress: &mut dyn FnMut(Progress<'_>) -> Result<()>) -> Result<()> {
        let report = &mut self.report;
        let point = |index: usize| self.job.points.get(index).with_context(|| format!("there is no point {index}"));
        match event {
            Event::Absent { error } => {
                self.absent = Some(error);
                return Ok(());
            }
            Event::Ready(ready) => {
                if report.method.is_empty() {
                    (report.device, report.method) = (ready.device, ready.method);
                } else {
                    report.method += &format!(". {}", ready.method);
                }
                report.versions.extend(ready.versions);
                report.libraries.extend(ready.libraries);
                report.missing.extend(ready.missing);
                self.cupti = ready.cupti.or(self.cupti.take());
                if let (Some(uuid), None) = (ready.uuid, &self.card) {
                    match Card::open(&uuid) {
                        Ok(card) => {
                            report.driver = Some(card.driver.clone());
                            report.state_before = Some(card.state());
                            self.card = Some(card);
                        }
                        Err(why) => report.notes.push(why),
                    }
                }
            }
            Event::Missing(missing) => report.missing.push(missing),
            Event::Ceiling { what, error: Some(error), .. } => {
                report.notes.push(format!("{what} was not measured: {error}"))
            }
            Event::Ceiling { what, work, ms, error: None } => {
                let median = quantile(&ms, 0.5).with_context(|| format!("{what} has no timings"))?;
                let when = if report.points.is_empty() { "before" } else { "after" }.into();
                report.ceilings.push(Ceiling { what, when, tera_per_s: work / median * 1e-9, ms: rounded(ms) });
            }
            Event::Library { index, name } => return progress(Progress::Library { point: point(index)?, name: &name }),
            Event::Timing { .. } => {
                self.watch = self.card.as_ref().map(Card::watch);
                return Ok(());
            }
            Event::Point { index, runs } => {
                let point = point(index)?.clone();
                let busy = self.watch.take().and_then(|watch| Busy::new(&watch.stop()));
                let runs = runs.into_iter().map(|run| finished(run, &point)).collect();
                self.done += 1;
                let place = *self.places.entry(index).or_insert(report.points.len());
                if let Some(other) = report.points.get_mut(place) {
                    // The clocks in the report are those of ours.
                    other.runs.extend::<Vec<_>>(runs);
                    other.busy = other.busy.take().or(busy);
                } else {
                    let (flops, bytes) = (point.flops(), point.bytes());
                    report.points.push(PointReport { point, flops, bytes, runs, busy });
                }
            }
        }
        progress(Progress::Report { report, done: self.done })
    }
}

fn finished(raw: RawRun, point: &Point) -> Run {
    let RawRun { name, role, status, error, check, host_us, ms } = raw;
    let summary = Summary::new(rounded(ms), point.flops_by(&name));
    let status = if summary.is_none() && status == RunStatus::Ok { RunStatus::Failed } else { status };
    Run { name, role, status, error, check, host_us, summary }
}

/// To a nanosecond: events resolve half a microsecond, and the digits after that are noise of f32.
fn rounded(ms: Vec<f64>) -> Vec<f64> {
    ms.into_iter().map(|ms| (ms * 1e6).round() / 1e6).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::{Ready, Sink};
    use crate::{Order, Role, Sweep};

    /// Tells what it is given.
    struct Told(Vec<Event>, Option<&'static str>);

    impl Harness for Told {
        fn name(&self) -> &'static str {
            "told"
        }

        fn run(&mut self, _: &Job, sink: Sink<'_>) -> Result<()> {
            for event in self.0.drain(..) {
                sink(event)?;
            }
            self.1.map_or(Ok(()), |why| Err(anyhow::anyhow!(why)))
        }
    }

    fn job() -> Job {
        Job {
            points: Sweep::small().points().unwrap(),
            iters: 3,
            layout: Order::Bshd,
            files: vec![],
            seed: 1,
            draws: 1,
            ours: vec![],
            peers: vec![],
            python_peers: false,
            ordinal: 0,
        }
    }

    fn ready() -> Event {
        Event::Ready(Ready {
            device: "card".into(),
            uuid: Some("GPU-0".into()),
            versions: BTreeMap::new(),
            method: "guessed".into(),
            libraries: vec![],
            missing: vec![],
            cupti: None,
        })
    }

    fn ceiling(error: Option<&str>) -> Event {
        Event::Ceiling { what: "copy".into(), work: 2e9, ms: vec![1.0, 1.0], error: error.map(Into::into) }
    }

    fn point(index: usize) -> Event {
        let run = |ms| RawRun {
            name: "a".into(),
            role: Role::Ours,
            status: RunStatus::Ok,
            error: None,
            check: BTreeMap::new(),
            host_us: None,
            ms,
        };
        Event::Point { index, runs: vec![run(vec![0.123_456_789, 0.2, 0.3]), run(vec![])] }
    }

    fn report(events: Vec<Event>, end: Option<&'static str>) -> Result<Outcome> {
        let mut heard = 0;
        let done = Session::new(&job(), None, BTreeMap::new()).run(&mut Told(events, end), &mut |_| {
            heard += 1;
            Ok(())
        });
        assert!(heard > 0 || done.as_ref().is_ok_and(|done| matches!(done, Outcome::Absent(_))));
        done
    }

    #[test]
    fn events_become_a_report() {
        let events = vec![
            ready(),
            ceiling(None),
            Event::Timing { index: 1 },
            point(1),
            ceiling(None),
            ceiling(Some("no memory")),
        ];
        let Ok(Outcome::Done { report, .. }) = report(events, Some("it fell")) else { panic!("it is done") };
        assert_eq!((report.device.as_str(), report.harness.as_str()), ("card", "told"));
        assert_eq!(
            report.ceilings.iter().map(|c| (c.when.as_str(), c.tera_per_s)).collect::<Vec<_>>(),
            [("before", 2.0), ("after", 2.0)]
        );
        assert_eq!(report.points[0].point, job().points[1]);
        let [timed, untimed] = &report.points[0].runs[..] else { panic!("two runs") };
        assert_eq!(timed.summary.as_ref().unwrap().ms, [0.123_457, 0.2, 0.3]);
        // Right but without a timing is no result.
        assert_eq!(untimed.status, RunStatus::Failed);
        assert!(report.notes[0].starts_with("NVML is not to be had"), "{:?}", report.notes);
        assert_eq!(report.notes[1..], ["copy was not measured: no memory", "THE SWEEP STOPPED: it fell"]);
    }

    #[test]
    fn nothing_measured_is_an_error_or_absence() {
        assert!(
            matches!(report(vec![Event::Absent { error: "no torch".into() }], None), Ok(Outcome::Absent(why)) if why == "no torch")
        );
        assert!(report(vec![ready()], Some("it fell")).is_err());
        assert!(report(vec![ready(), point(99)], None).is_err_and(|e| e.to_string() == "there is no point 99"));
    }
}
