//! Timing of the attention kernels, and everything that is made of the figures.
//!
//! [`Sweep`] chooses [`Point`]s, a [`Harness`] times every library at each, in turn, a [`Session`] makes a [`Report`] of
//! that: the JSON that is kept. Tables ([`table`]), CSV ([`csv`]), charts ([`chart`]), comparisons ([`compare`]) and the
//! page `docs/speed.md` ([`speed`]) are made of reports and measure nothing. So is the choice of kernels by [`tune`].
//! `hattn bench`, `hattn plot` and `hattn tune` are the front.
//!
//! With feature `cuda` the shared library of this package exports the C entry of `peers/hattn_peer.h`, through which
//! the script in PyTorch times our forward and backward in turn with other libraries.

#![deny(missing_docs)]

/// The name of our library in tables and reports.
pub const NAME: &str = "hopper-attention";

pub mod card;
pub mod chart;
pub mod compare;
pub mod csv;
#[cfg(feature = "cuda")]
pub mod entry;
pub mod few;
mod files;
mod growth;
mod harness;
pub mod host;
pub mod memory;
mod point;
mod report;
mod session;
pub mod speed;
mod stats;
mod sweep;
pub mod table;
pub mod text;
pub mod tune;

/// The environment variable by which `hattn bench --arch` restricts our entry to kernels of one instruction set: `sm80` or
/// `sm90`. The arguments of the entry have no field for it, since peers have no such choice.
pub const ARCH_VARIABLE: &str = "HATTN_PEER_ARCH";

/// The environment variable by which `hattn bench --sm-margin` makes our entry leave so many multiprocessors to others.
pub const SM_MARGIN_VARIABLE: &str = "HATTN_PEER_SM_MARGIN";

pub use files::{FileTensor, FileTensors};
pub use harness::{Apart, Cpu, Event, Harness, Job, PyTorch, RawRun, Ready, Sink, WARM_UPS};
#[cfg(feature = "cuda")]
pub use harness::{Cuda, EventClock, Rows};
pub use hopper_attention_verify::inputs::Class;
pub use point::{
    DENSE, Direction, FullBlocks, HeadDims, InputFile, Kind, Order, Packed, Point, PointMask, Precision, Scale,
};
pub use report::{Busy, Ceiling, Library, Missing, PointReport, Report, Role, Run, RunStatus, SCHEMA};
pub use session::{Outcome, Progress, Session};
pub use stats::{Summary, geometric_mean, quantile};
pub use sweep::{FEW_HEADS, FEW_SEQUENCES, HIDDEN, LAST_PARTS, LOPSIDED, SHORT, Sweep, TOKENS};

/// Each item once, in the order of their first places.
pub(crate) fn distinct<T: PartialEq>(items: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut seen = Vec::new();
    for item in items {
        if !seen.contains(&item) {
            seen.push(item);
        }
    }
    seen
}
