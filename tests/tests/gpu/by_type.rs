//! Cases of both 16-bit types through rows of either pass: what the tests of score modifiers share.

use hopper_attention::reference::Tensor;
use hopper_attention::{
    BackwardProblem, DType, Device, Dims, Error, ForwardProblem, ForwardProblemBuilder, KernelInfo, MaskClass,
    Workspace, bf16, f16,
};
use hopper_attention_tests::backward;
use hopper_attention_tests::data::{Input, Poison};
use hopper_attention_tests::gpu::{Gpu, OnDevice, backward as of_backward};
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::runner::{Prepared, Runner};

use crate::mask_of;

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

/// The rows that compute some problem with a modifier, which `modified` gives it. Others may exist, which such problems are never
/// given to.
pub(crate) fn modifying(
    gpu: &Gpu,
    rows: Vec<KernelInfo>,
    backward: bool,
    modified: impl Fn(ForwardProblemBuilder) -> ForwardProblemBuilder,
) -> Vec<KernelInfo> {
    let takes = |row: &KernelInfo| {
        let dims = Dims::new(1, 512, 1, row.head_dim_qk()).with_head_dim_vo(row.head_dim_vo());
        let options = ForwardProblem::builder(row.dtype(), dims).mask(mask_of(row.mask()));
        let problem = modified(options).build().unwrap();
        match backward {
            true => BackwardProblem::builder(&problem).build().unwrap().plan_with_row(&gpu.device, row).is_ok(),
            false => problem.plan_with_row(&gpu.device, row).is_ok(),
        }
    };
    let taken: Vec<_> = rows.into_iter().filter(takes).collect();
    // Both types have them, for every mask: those of class window compute them all.
    for dtype in [DType::BF16, DType::F16] {
        assert!(taken.iter().any(|row| row.dtype() == dtype && row.mask() == MaskClass::Window), "{dtype}");
    }
    taken
}

/// The cases whose head dims are at most those of the rows.
pub(crate) fn fitting(rows: &[KernelInfo], cases: Vec<Case>) -> Vec<Case> {
    let fits = |case: &Case| rows.iter().any(|row| row.head_dim_qk() >= case.dims.head_dim_qk);
    cases.into_iter().filter(fits).collect()
}

/// One forward run of a case by a row, judged.
pub(crate) fn judged<T: Poison>(gpu: &Gpu, row: &KernelInfo, case: &Case) {
    judged_edited::<T>(gpu, row, case, |_, _| {});
}

/// The same of inputs that `edit` changes.
pub(crate) fn judged_edited<T: Poison>(gpu: &Gpu, row: &KernelInfo, case: &Case, edit: impl Fn(Input, &mut Tensor)) {
    let prepared = Prepared::<T>::edited(case, edit);
    let plan = prepared.problem.plan_with_row(&gpu.device, row).unwrap();
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let mut on_device = OnDevice::new(&gpu.stream, &prepared);
    let outputs = on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
    outputs.check_written().unwrap_or_else(|why| panic!("{row}, {case}: {why}"));
    let report = prepared.judge(&outputs);
    assert!(report.passed(), "{row}, {case}: {report}");
}

/// One backward run of a case by a row, judged.
pub(crate) fn judged_backward<T: Poison>(gpu: &Gpu, row: &KernelInfo, case: &Case) {
    judged_backward_edited::<T>(gpu, row, case, |_, _| {});
}

/// The same of inputs that `edit` changes.
pub(crate) fn judged_backward_edited<T: Poison>(
    gpu: &Gpu,
    row: &KernelInfo,
    case: &Case,
    edit: impl Fn(Input, &mut Tensor),
) {
    let prepared = backward::Prepared::<T>::edited(case, edit);
    let plan = prepared.problem.plan_with_row(&gpu.device, row).unwrap();
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let mut on_device = of_backward::OnDevice::new(&gpu.stream, &prepared);
    let outputs = on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
    let report = prepared.judge(&outputs);
    assert!(report.passed(), "{row}, {case}: {report}");
}

/// The library's own choice takes each case in both types, or says by name what the backward lacks.
pub(crate) fn planned_or_named(gpu: &Gpu, cases: &[Case]) {
    let device = Device::Cuda(gpu.device.clone());
    let mut planned = 0;
    for case in cases {
        for dtype in [DType::BF16, DType::F16] {
            let problem = case.problem(dtype);
            problem.plan(&device).unwrap_or_else(|error| panic!("{problem}: {error}"));
            let problem = BackwardProblem::builder(&problem).build().unwrap();
            match problem.plan(&device) {
                Ok(_) => planned += 1,
                Err(Error::Unsupported { wanted, .. }) => assert!(wanted.contains("backward"), "{problem}: {wanted}"),
                Err(error) => panic!("{problem}: {error}"),
            }
        }
    }
    assert!(planned > 0);
}
