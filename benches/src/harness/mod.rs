//! The harnesses: programs that call attention libraries and time them. All send the same [`Event`]s, of which a
//! [`Session`](crate::Session) makes one [`Report`](crate::Report). There are four:
//!
//! - the script in PyTorch, if there is PyTorch with a GPU; only it can call Python packages;
//! - the Rust harness on a GPU;
//! - the Rust harness on a GPU, and after it the script for the peers alone ([`Apart`]), where ours lies in no shared
//!   library;
//! - the Rust harness on the CPU, where the peer is the naive computation.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::report::{Library, Missing, Role, RunStatus};
use crate::{Class, FileTensors, Order, Point, distinct};

mod apart;
mod check;
mod contest;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod events;
#[cfg(feature = "cuda")]
mod product;
mod python;
#[cfg(feature = "cuda")]
mod rows;
mod turns;

pub use apart::Apart;
pub use cpu::Cpu;
#[cfg(feature = "cuda")]
pub use cuda::Cuda;
#[cfg(feature = "cuda")]
pub use events::EventClock;
pub use python::PyTorch;
#[cfg(feature = "cuda")]
pub use rows::Rows;

/// Calls of each library before the first timing: module load, first touch of memory, clocks.
pub const WARM_UPS: usize = 3;

/// How operations are counted, in the words of a report; `peers/sweep.py` has the same.
const FLOPS: &str = "forward FLOPs 2*s*s*(d_qk+d_vo)*h*b, halved when causal, of the pairs kept with a window or in listed blocks, \
                     packed sequences one by one; backward 2*s*s*(3*d_qk+2*d_vo)*h*b";

/// In which order libraries take turns, in the words of a report; `peers/sweep.py` has the same.
const ORDER: &str = "each after each other equally often";

/// What inputs hold, in the words of a report; `peers/inputs.py` has the same.
fn inputs(job: &Job) -> String {
    let files = distinct(job.points.iter().filter_map(|point| Some(point.file.as_ref()?.name.as_str())));
    if !files.is_empty() {
        return format!("inputs of files, repeated along the batch: {}", files.join(", "));
    }
    let classes = distinct(job.points.iter().map(|point| point.inputs).filter(|class| !class.is_normal()));
    let names: Vec<&str> = classes.into_iter().map(Class::name).collect();
    let changed = if names.is_empty() { String::new() } else { format!(", or these as {}", names.join(", ")) };
    format!("unit-variance normal inputs{changed}")
}

/// What to time, whoever does it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Job {
    /// The points, in order.
    pub points: Vec<Point>,
    /// Timings of each library at a point.
    pub iters: usize,
    /// Storage order of Q, K, V, O and the gradients.
    pub layout: Order,
    /// The tensors of the files that points have their inputs from. A harness in another process gets them in another way.
    #[serde(skip)]
    pub files: Vec<Arc<FileTensors>>,
    /// Seed of the inputs.
    pub seed: u64,
    /// On how many draws of the inputs the error of O is measured. The first is the timed one.
    pub draws: usize,
    /// Shared objects of ours with the C entry of `peers/hattn_peer.h`, `PATH` or `NAME=PATH`; the ratios are the first one's.
    pub ours: Vec<String>,
    /// Shared objects of peers, likewise.
    pub peers: Vec<String>,
    /// Whether peers that live in Python take part.
    pub python_peers: bool,
    /// The GPU's ordinal.
    pub ordinal: usize,
}

/// What a harness reports while it runs, in the order in which it happens.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    /// It cannot work here, with the reason. Nothing follows.
    Absent {
        /// Why.
        error: String,
    },
    /// It can, and this is what takes part. A second one adds to the first.
    Ready(Ready),
    /// One more that cannot take part.
    Missing(Missing),
    /// A ceiling was measured.
    Ceiling {
        /// As [`Ceiling::what`](crate::Ceiling).
        what: String,
        /// Operations, or bytes read and written.
        work: f64,
        /// Every timing, in milliseconds; none when it could not be measured.
        #[serde(default)]
        ms: Vec<f64>,
        /// Why it could not.
        #[serde(default)]
        error: Option<String>,
    },
    /// A library is about to compute a point for the first time.
    Library {
        /// Which point.
        index: usize,
        /// Which library.
        name: String,
    },
    /// The timings of a point begin.
    Timing {
        /// Which point.
        index: usize,
    },
    /// A point is done. A second one of a point adds runs to it.
    Point {
        /// Which point.
        index: usize,
        /// One run a library.
        runs: Vec<RawRun>,
    },
}

/// Who takes part, and where.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Ready {
    /// The device's name.
    pub device: String,
    /// The GPU's UUID, for NVML.
    #[serde(default)]
    pub uuid: Option<String>,
    /// Versions of what takes part.
    pub versions: BTreeMap<String, serde_json::Value>,
    /// How timings are taken, in words.
    pub method: String,
    /// What takes part.
    pub libraries: Vec<Library>,
    /// What cannot.
    pub missing: Vec<Missing>,
    /// CUPTI's library, where one came with PyTorch.
    #[serde(default)]
    pub cupti: Option<PathBuf>,
}

/// One library at one point, as a harness reports it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct RawRun {
    /// The library.
    pub name: String,
    /// Ours or a peer's.
    pub role: Role,
    /// How it ended.
    pub status: RunStatus,
    /// Why, unless it was right.
    #[serde(default)]
    pub error: Option<String>,
    /// Errors found before the timing.
    #[serde(default)]
    pub check: BTreeMap<String, serde_json::Value>,
    /// The median time of the call on the host, in microseconds.
    #[serde(default)]
    pub host_us: Option<f64>,
    /// Every timing, in milliseconds.
    #[serde(default)]
    pub ms: Vec<f64>,
}

/// Where a harness puts its events. An error ends the sweep.
pub type Sink<'a> = &'a mut dyn FnMut(Event) -> Result<()>;

/// One that times.
pub trait Harness {
    /// `pytorch`, `rust`, `rust and pytorch` or `cpu`.
    fn name(&self) -> &'static str;

    /// Times everything, telling what happens.
    ///
    /// # Errors
    /// When it cannot go on; the events until then stand.
    fn run(&mut self, job: &Job, sink: Sink<'_>) -> Result<()>;
}

/// `NAME=PATH` or `PATH`; a path with '=' in it needs a name before it.
#[cfg(any(test, feature = "cuda"))]
pub(crate) fn label_and_path(text: &str) -> (Option<&str>, &str) {
    match text.split_once('=') {
        Some((label, path)) if !label.contains('/') => (Some(label), path),
        _ => (None, text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels() {
        assert_eq!(label_and_path("fa3=/a/b=c.so"), (Some("fa3"), "/a/b=c.so"));
        assert_eq!(label_and_path("/a/b=c.so"), (None, "/a/b=c.so"));
        assert_eq!(label_and_path("x.so"), (None, "x.so"));
    }

    #[test]
    fn events_are_lines_of_json() {
        let read = |text| serde_json::from_str::<Event>(text).unwrap();
        assert_eq!(read(r#"{"event": "absent", "error": "no torch"}"#), Event::Absent { error: "no torch".into() });
        let Event::Point { index: 3, runs } = read(
            r#"{"event": "point", "index": 3, "runs": [{"name": "a", "role": "peer", "status": "failed", "error": "x"}]}"#,
        ) else {
            panic!("it is a point")
        };
        assert_eq!((runs[0].status, runs[0].ms.len()), (RunStatus::Failed, 0));
        assert!(serde_json::from_str::<Event>(r#"{"event": "other"}"#).is_err());
    }
}
