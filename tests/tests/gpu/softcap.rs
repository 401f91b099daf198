//! Capped scores on a GPU: every row, dense and packed, both passes, and garbage under masks.

use hopper_attention::{BackwardProblem, DType, Device, Dims, Error, ForwardProblem, KernelInfo, MaskClass, Workspace};
use hopper_attention_tests::backward;
use hopper_attention_tests::case::random::CAPS;
use hopper_attention_tests::data::{Garbage, Input, Poison, Values};
use hopper_attention_tests::gpu::{Gpu, OnDevice, backward as of_backward};
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::runner::Prepared;
use hopper_attention_tests::softcap::{cases, packed_cases};

use crate::by_type::{BACKWARD, FORWARD, take};
use crate::packed::packing_rows;
use crate::{mask_of, with_dtype};

/// The rows that compute some capped problem. Others may exist, which capped problems are never given to.
fn capping(gpu: &Gpu, rows: Vec<KernelInfo>, backward: bool) -> Vec<KernelInfo> {
    let takes = |row: &KernelInfo| {
        let dims = Dims::new(1, 512, 1, row.head_dim_qk()).with_head_dim_vo(row.head_dim_vo());
        let options = ForwardProblem::builder(row.dtype(), dims).mask(mask_of(row.mask())).softcap(50.0);
        let problem = options.build().unwrap();
        match backward {
            true => BackwardProblem::builder(&problem).build().unwrap().plan_with_row(&gpu.device, row).is_ok(),
            false => problem.plan_with_row(&gpu.device, row).is_ok(),
        }
    };
    let taken: Vec<_> = rows.into_iter().filter(takes).collect();
    // Both types have them, and every class of masks.
    for dtype in [DType::BF16, DType::F16] {
        for class in [MaskClass::Full, MaskClass::Causal, MaskClass::Window] {
            assert!(taken.iter().any(|row| row.dtype() == dtype && row.mask() == class), "{dtype} {class}");
        }
    }
    taken
}

#[test]
fn every_row_takes_a_softcap() {
    let Some(gpu) = Gpu::open("every_row_takes_a_softcap") else { return };
    let rows = capping(&gpu, gpu.modified_rows(), false);
    take(&gpu, &rows, &cases(Grid::from_env()), "forward with softcap", FORWARD);
}

#[test]
fn every_packing_row_takes_a_softcap() {
    let Some(gpu) = Gpu::open("every_packing_row_takes_a_softcap") else { return };
    let rows = packing_rows(capping(&gpu, gpu.modified_rows(), false));
    take(&gpu, &rows, &packed_cases(Grid::from_env()), "packed forward with softcap", FORWARD);
}

/// The cases whose head dims are at most those of the rows.
fn fitting(rows: &[KernelInfo], cases: Vec<Case>) -> Vec<Case> {
    let fits = |case: &Case| rows.iter().any(|row| row.head_dim_qk() >= case.dims.head_dim_qk);
    cases.into_iter().filter(fits).collect()
}

#[test]
fn every_backward_row_takes_a_softcap() {
    let Some(gpu) = Gpu::open("every_backward_row_takes_a_softcap") else { return };
    let rows = capping(&gpu, gpu.modified_backward_rows(), true);
    let cases = fitting(&rows, cases(Grid::from_env()));
    take(&gpu, &rows, &cases, "backward with softcap", BACKWARD);
}

#[test]
fn every_packing_backward_row_takes_a_softcap() {
    let Some(gpu) = Gpu::open("every_packing_backward_row_takes_a_softcap") else { return };
    let rows = packing_rows(capping(&gpu, gpu.modified_backward_rows(), true));
    let cases = fitting(&rows, packed_cases(Grid::from_env()));
    take(&gpu, &rows, &cases, "packed backward with softcap", BACKWARD);
}

/// NaN, infinity and the largest numbers, in K or V of keys that the mask hides.
#[test]
fn garbage_under_the_mask_reaches_no_capped_row() {
    let Some(gpu) = Gpu::open("garbage_under_the_mask_reaches_no_capped_row") else { return };
    for row in capping(&gpu, gpu.modified_rows(), false).into_iter().filter(|row| row.mask() != MaskClass::Full) {
        with_dtype!(row.dtype(), garbage(&gpu, &row));
    }
    for row in capping(&gpu, gpu.modified_backward_rows(), true).into_iter().filter(|row| row.mask() != MaskClass::Full)
    {
        with_dtype!(row.dtype(), garbage_backward(&gpu, &row));
    }
}

fn hidden(row: &KernelInfo) -> impl Iterator<Item = Case> + use<> {
    let case = Case::new(197, 290, row.head_dim_qk(), mask_of(row.mask())).heads(2, 6, 2);
    let case = case.head_dim_vo(row.head_dim_vo());
    Garbage::ALL.into_iter().zip(CAPS.into_iter().cycle()).flat_map(move |(garbage, cap)| {
        let case = case.clone();
        [Input::K, Input::V].map(|input| Case { values: Values::Garbage(input, garbage), ..case.clone().softcap(cap) })
    })
}

fn garbage<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    for case in hidden(row) {
        let prepared = Prepared::<T>::new(&case);
        let plan = prepared.problem.plan_with_row(&gpu.device, row).unwrap();
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        let mut on_device = OnDevice::new(&gpu.stream, &prepared);
        let outputs = on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
        let report = prepared.judge(&outputs);
        assert!(report.passed(), "{row}, {case}: {report}");
    }
}

fn garbage_backward<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    for case in hidden(row) {
        let prepared = backward::Prepared::<T>::new(&case);
        let plan = prepared.problem.plan_with_row(&gpu.device, row).unwrap();
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        let mut on_device = of_backward::OnDevice::new(&gpu.stream, &prepared);
        let outputs = on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
        let report = prepared.judge(&outputs);
        assert!(report.passed(), "{row}, {case}: {report}");
    }
}

/// The library's own choice takes a cap, or says by name what it lacks.
#[test]
fn a_capped_problem_has_a_plan_or_a_name() {
    let Some(gpu) = Gpu::open("a_capped_problem_has_a_plan_or_a_name") else { return };
    let device = Device::Cuda(gpu.device.clone());
    let mut planned = 0;
    for case in cases(Grid::Full) {
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
