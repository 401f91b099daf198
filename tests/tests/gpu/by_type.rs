//! Cases of both 16-bit types through rows of either pass: what the tests of score modifiers share.

use hopper_attention::{KernelInfo, bf16, f16};
use hopper_attention_tests::gpu::Gpu;
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::runner::Runner;

/// Runs cases through the rows of their type.
type Run = fn(&Gpu, &[KernelInfo], &[Case], &mut Runner);

pub(crate) const FORWARD: [Run; 2] = [crate::grid::run::<bf16>, crate::grid::run::<f16>];
/// Every second run of these is deterministic.
pub(crate) const BACKWARD: [Run; 2] = [crate::backward::run::<bf16>, crate::backward::run::<f16>];

/// Takes all cases in bf16 and every second one in f16.
pub(crate) fn take(gpu: &Gpu, rows: &[KernelInfo], cases: &[Case], what: &str, [bf16, f16]: [Run; 2]) {
    assert!(!rows.is_empty());
    let mut runner = Runner::new(rows);
    bf16(gpu, rows, cases, &mut runner);
    f16(gpu, rows, &cases.iter().skip(1).step_by(2).cloned().collect::<Vec<_>>(), &mut runner);
    runner.record(what, Grid::from_env(), &gpu.card(), &gpu.driver());
    runner.finish();
}
