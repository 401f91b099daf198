//! Two harnesses one after the other: ours in this process, and peers in Python's.
//!
//! The script in PyTorch times in turn, but it loads ours from a shared library. An installed `hattn` has none. So
//! ours is timed first, by the harness of this process, and the peers in Python afterwards. The card may have become
//! warmer in between. The report's method says so.

use anyhow::Result;

use super::{Event, Harness, Job, Sink};
use crate::report::{Missing, Role};

/// A harness that times ours, and then another one that times peers.
pub struct Apart<O, P> {
    ours: O,
    peers: P,
}

impl<O: Harness, P: Harness> Apart<O, P> {
    /// `ours` also times the shared objects of peers. `peers` times what lives in Python.
    pub fn new(ours: O, peers: P) -> Self {
        Self { ours, peers }
    }
}

impl<O: Harness, P: Harness> Harness for Apart<O, P> {
    fn name(&self) -> &'static str {
        "rust and pytorch"
    }

    fn run(&mut self, job: &Job, sink: Sink<'_>) -> Result<()> {
        self.ours.run(job, sink)?;
        let theirs = Job { ours: vec![], peers: vec![], ..job.clone() };
        self.peers.run(&theirs, &mut |event| match event {
            Event::Ready(mut ready) => {
                ready.method =
                    format!("After all of that the peers in Python, in a process of their own: {}", ready.method);
                sink(Event::Ready(ready))
            }
            // What is measured of ours stands.
            Event::Absent { error } => {
                sink(Event::Missing(Missing { name: "peers in Python".into(), role: Role::Peer, error }))
            }
            event => sink(event),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cpu, Order, Outcome, PyTorch, RunStatus, Session, Sweep};

    fn job() -> Job {
        Job {
            points: Sweep { seqlens: vec![16, 32], filters: vec!["bf16/d64/full".into()], ..Sweep::small() }
                .points()
                .expect("there are two"),
            iters: 3,
            layout: Order::Bshd,
            files: vec![],
            seed: 1,
            draws: 1,
            ours: vec![],
            peers: vec!["libpeer.so".into()],
            python_peers: true,
            ordinal: 0,
        }
    }

    fn report(peers: PyTorch) -> crate::Report {
        let job = job();
        let mut done = Vec::new();
        let outcome = Session::new(&job, None, Default::default()).run(&mut Apart::new(Cpu, peers), &mut |progress| {
            if let crate::Progress::Report { done: points, .. } = progress {
                done.push(points);
            }
            Ok(())
        });
        let Ok(Outcome::Done { report, .. }) = outcome else { panic!("it is done") };
        assert!(done.is_sorted() && done.last() >= Some(&job.points.len()), "{done:?}");
        *report
    }

    /// A peer that says what job it was given.
    const PEER: &str = r#"
import json, sys
job = json.load(sys.stdin)
tell = lambda event, **fields: print(json.dumps({"event": event, **fields}), flush=True)
assert job["ours"] == [] and job["peers"] == [], job
tell("ready", device="a card", versions={"torch": "3"}, method="in turn", missing=[],
     libraries=[{"name": "p", "role": "peer", "file": "torch"}])
for index in range(len(job["points"])):
    tell("library", index=index, name="p")
    tell("point", index=index, runs=[{"name": "p", "role": "peer", "status": "ok", "ms": [1.0, 1.0, 1.0]}])
"#;

    #[test]
    fn both_are_in_one_report() {
        let report = report(PyTorch::with_script("python3", PEER));
        assert_eq!(report.points.len(), 2);
        for point in &report.points {
            let names: Vec<_> = point.runs.iter().map(|run| (run.name.as_str(), run.status)).collect();
            let right = |name| (name, RunStatus::Ok);
            assert_eq!(names, [right("hopper-attention"), right("naive"), right("p")]);
            assert!(point.ours().is_some_and(|ours| point.runs[2].rate() > Some(0.0) && ours.rate() > Some(0.0)));
        }
        // The device is that of ours, and nothing of either is lost.
        assert!(report.device.starts_with("CPU, "), "{}", report.device);
        assert!(report.versions.contains_key("torch") && report.versions.contains_key("hopper-attention"));
        assert_eq!(report.libraries.last().map(|library| library.name.as_str()), Some("p"));
        assert!(
            report.method.contains(". After all of that the peers in Python, in a process of their own: in turn"),
            "{}",
            report.method
        );
        assert_eq!(report.harness, "rust and pytorch");
        assert!(report.missing.is_empty(), "{:?}", report.missing);
    }

    #[test]
    fn ours_stands_without_a_python() {
        let report = report(PyTorch::new("python-that-is-missing"));
        assert_eq!(report.points.iter().map(|point| point.runs.len()).collect::<Vec<_>>(), [2, 2]);
        let [missing] = &report.missing[..] else { panic!("{:?}", report.missing) };
        assert!(missing.role == Role::Peer && missing.error.contains("does not start"), "{missing:?}");
    }

    #[test]
    fn peers_that_break_off_lose_nothing_of_ours() {
        let report = report(PyTorch::with_script("python3", "import sys\nsys.exit('no luck')"));
        assert_eq!(report.points.len(), 2);
        assert!(report.stopped().is_some_and(|why| why.contains("no luck")), "{:?}", report.notes);
    }
}
