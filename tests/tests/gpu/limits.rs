//! Limits of the workspace: each backward row computes the same with fewer shares, or with none.

use hopper_attention::{BackwardPlan, Error, KernelInfo, Result, Workspace};
use hopper_attention_tests::backward;
use hopper_attention_tests::data::Poison;
use hopper_attention_tests::gpu::{Gpu, OnDevice, backward as on_gpu};
use hopper_attention_tests::problems::Case;
use hopper_attention_tests::runner;

use crate::{mask_of, with_dtype};

/// Few tiles of keys, whose query heads the library shares out where it is free to.
fn case(row: &KernelInfo) -> Case {
    let case = Case::new(1029, 645, row.head_dim_qk(), mask_of(row.mask())).head_dim_vo(row.head_dim_vo());
    case.heads(1, 8, 1)
}

/// The bytes that a plan needs without cut tiles, as the refusal of a limit of 0 names them.
fn least(error: &Error) -> u64 {
    let Error::Value { what: "workspace_limit", allowed, .. } = error else { panic!("{error}") };
    let bytes = allowed.split_once(' ').and_then(|(bytes, _)| bytes.parse().ok());
    bytes.unwrap_or_else(|| panic!("{error}"))
}

#[test]
fn gradients_are_right_within_any_limit() {
    let Some(gpu) = Gpu::open("gradients_are_right_within_any_limit") else { return };
    for row in gpu.backward_rows() {
        with_dtype!(row.dtype(), gradients(&gpu, &row));
    }
}

fn gradients<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    let prepared = backward::Prepared::<T>::new(&case(row));
    let mut on_device = on_gpu::OnDevice::new(&gpu.stream, &prepared);
    for deterministic in [false, true] {
        let plan = |limit| -> Result<BackwardPlan> {
            let options = prepared.problem.to_builder().deterministic(deterministic).workspace_limit(limit);
            options.build()?.plan_with_row(&gpu.device, row)
        };
        let most = plan(None).unwrap().workspace_bytes() as u64;
        let whole = least(&plan(Some(0)).unwrap_err());
        assert!(whole <= most && least(&plan(Some(whole - 1)).unwrap_err()) == whole);
        for limit in [whole, u64::midpoint(whole, most), most] {
            let plan = plan(Some(limit)).unwrap();
            assert!(plan.workspace_bytes() as u64 <= limit, "{limit}: {plan}");
            let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
            let outputs = on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
            assert!(prepared.judge(&outputs).passed(), "{limit}: {plan}");
        }
    }
}

/// Forward passes have the workspace that they need, or are refused before anything is launched.
#[test]
fn forward_rows_meet_a_limit_or_refuse_it() {
    let Some(gpu) = Gpu::open("forward_rows_meet_a_limit_or_refuse_it") else { return };
    for row in gpu.rows() {
        with_dtype!(row.dtype(), forward(&gpu, &row));
    }
}

fn forward<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    let prepared = runner::Prepared::<T>::new(&case(row));
    let mut on_device = OnDevice::new(&gpu.stream, &prepared);
    let plan = |limit| prepared.problem.to_builder().workspace_limit(limit).build()?.plan_with_row(&gpu.device, row);
    let needed = plan(None).unwrap().workspace_bytes() as u64;
    if needed > 0 {
        assert_eq!(least(&plan(Some(needed - 1)).unwrap_err()), needed);
    }
    let plan = plan(Some(needed)).unwrap();
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let outputs = on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
    assert!(prepared.judge(&outputs).passed(), "{plan}");
}
