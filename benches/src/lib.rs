//! Timing of the attention kernels.
//!
//! [`Point`] is a point of the papers' sweep, [`Summary`] what is told of its timings, [`Report`] the JSON that
//! `hattn-sweep` and `peers/sweep.py` both write. With feature `cuda` the shared library of this package exports the C
//! entry of `peers/hattn_peer.h`, so that `peers/sweep.py` can time our forward in turn with other libraries.

#![deny(missing_docs)]

/// The name of our library in tables and reports.
pub const NAME: &str = "hopper-attention";

mod check;
mod measure;
#[cfg(feature = "cuda")]
pub mod peer;
mod point;
mod report;
mod stats;

pub use measure::{Setting, measure, method};
pub use point::{HIDDEN, Layouts, Point, TOKENS};
pub use report::{PointReport, Report, Role, Run, RunStatus, SCHEMA};
pub use stats::{Summary, geometric_mean, quantile};
