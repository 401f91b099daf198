//! From a problem to how it is computed: [`ForwardPlan`], [`BackwardPlan`] and [`QuantizePlan`]. A plan is a pure function of
//! the problem and of a device's facts.

mod backward;
mod fitting;
mod forward;
mod quantize;
mod schedule;
mod select;
mod target;
mod tuning;

pub use backward::{BackwardChoice, BackwardPlan, select_backward};
pub use fitting::mask_class;
pub use forward::ForwardPlan;
pub(crate) use quantize::QuantizeChoice;
pub use quantize::QuantizePlan;
pub use select::{Choice, Fallback, candidates, select};
#[cfg(feature = "cuda")]
pub(crate) use target::Gpu;
pub(crate) use target::{Planned, Target, not_on_a_gpu};
pub use tuning::Tuning;
