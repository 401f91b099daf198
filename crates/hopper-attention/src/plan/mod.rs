//! How a device computes a problem: [`ForwardPlan`], [`BackwardPlan`] and [`QuantizePlan`].
//!
//! A plan is a pure function of the problem and of the device's facts. The files, in the order of the work:
//! - `fitting.rs`: which kernels compute a problem on a GPU.
//! - `select.rs` (forward) and `backward.rs`: which of these kernels is chosen, and the schedule of its tiles.
//! - `gather.rs`: query heads as the queries of one head, where each sequence has one query.
//! - `key_shares.rs`: how many CTAs share a tile of a forward pass, and how long that takes.
//! - `shares.rs`: into how many shares a backward pass cuts its tiles.
//! - `schedule.rs`: what both schedules share: multiprocessors, groups of heads, mask bounds.
//! - `lists.rs`: the lists of a block-sparse mask.
//! - `quantize.rs`: the same for the quantiser, which has one kernel for each source type.
//! - `tuning.rs`: measurements that replace the built-in choice.
//! - `target.rs`: the device that a plan was made for.

mod backward;
mod fitting;
mod forward;
mod gather;
mod key_shares;
mod lists;
mod packed;
mod quantize;
mod schedule;
mod select;
mod shares;
mod target;
mod tuning;

pub use backward::{BackwardChoice, BackwardPlan, select_backward};
pub use fitting::mask_class;
pub use forward::ForwardPlan;
#[cfg(feature = "cuda")]
pub(crate) use gather::gathered;
#[cfg_attr(not(feature = "cuda"), allow(unused_imports, reason = "read by the launch"))]
pub(crate) use lists::{ListParts, Lists};
pub(crate) use quantize::QuantizeChoice;
pub use quantize::QuantizePlan;
pub use schedule::Bounds;
pub use select::{Choice, Fallback, candidates, select};
#[cfg(feature = "cuda")]
pub(crate) use target::Gpu;
pub(crate) use target::{Planned, Target, not_on_a_gpu};
pub use tuning::Tuning;
