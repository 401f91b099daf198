//! Margins: each row that can leave multiprocessors to others computes the same on what is left. The others refuse.

use hopper_attention::internal::has_one_tile;
use hopper_attention::{Arch, DType, Error, KernelInfo, Result, Scaling, Workspace, bf16};
use hopper_attention_tests::data::Poison;
use hopper_attention_tests::fp8::{Operands, for_row};
use hopper_attention_tests::gpu::{Gpu, OnDevice, backward as on_gpu, fp8};
use hopper_attention_tests::problems::Case;
use hopper_attention_tests::{backward, runner};

use crate::{mask_of, with_dtype};

/// A case for a row: several tiles for each multiprocessor that some margins leave, and a ragged end.
fn case(row: &KernelInfo) -> Case {
    let case = Case::new(3 * row.tile_m() + 17, 2 * row.tile_n() + 45, row.head_dim_qk(), mask_of(row.mask()));
    case.head_dim_vo(row.head_dim_vo()).heads(3, 12, 4)
}

/// Plans and runs a row with margins that leave nearly all multiprocessors, some, and one. Then with one that leaves none.
fn run_with_margins<O>(
    gpu: &Gpu,
    row: &KernelInfo,
    mut run: impl FnMut(usize) -> Result<(String, O)>,
    right: impl Fn(&O) -> bool,
) {
    let all = gpu.device.info().facts.multiprocessors;
    if row.arch() == Arch::Sm80 {
        let error = run(1).map(|(plan, _)| plan).unwrap_err();
        assert!(matches!(&error, Error::Unsupported { wanted, .. } if wanted.starts_with("sm_margin 1 ")), "{error}");
        return;
    }
    // A kernel whose CTAs compute one tile each refuses where those are too many.
    let has_one_tile = has_one_tile(row);
    for left in [all - 1, all / 8, 1] {
        let (plan, outputs) = match run(all - left) {
            Err(Error::Unsupported { wanted, .. }) if has_one_tile && wanted.starts_with("sm_margin ") => continue,
            ran => ran.unwrap(),
        };
        let grid = plan.split_once(", grid ").and_then(|(_, rest)| rest.split_once(' ')).map(|(grid, _)| grid.parse());
        assert!(matches!(grid, Some(Ok(grid)) if (1..=left).contains(&grid)), "{left}: {plan}");
        assert!(right(&outputs), "{left}: {plan}");
    }
    let error = run(all).map(|(plan, _)| plan).unwrap_err();
    assert!(matches!(error, Error::Value { what: "sm_margin", .. }), "{error}");
}

#[test]
fn forward_rows_leave_multiprocessors() {
    let Some(gpu) = Gpu::open("forward_rows_leave_multiprocessors") else { return };
    for row in gpu.rows() {
        with_dtype!(row.dtype(), forward(&gpu, &row));
    }
}

fn forward<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    let prepared = runner::Prepared::<T>::new(&case(row));
    let mut on_device = OnDevice::new(&gpu.stream, &prepared);
    let run = |margin| {
        let plan = prepared.problem.to_builder().sm_margin(margin).build()?.plan_with_row(&gpu.device, row)?;
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes())?;
        Ok((plan.to_string(), on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap()))
    };
    run_with_margins(gpu, row, run, |outputs| prepared.judge(outputs).passed());
}

#[test]
fn backward_rows_leave_multiprocessors() {
    let Some(gpu) = Gpu::open("backward_rows_leave_multiprocessors") else { return };
    for row in gpu.backward_rows() {
        with_dtype!(row.dtype(), gradients(&gpu, &row));
    }
}

fn gradients<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    let prepared = backward::Prepared::<T>::new(&case(row));
    let mut on_device = on_gpu::OnDevice::new(&gpu.stream, &prepared);
    for deterministic in [false, true] {
        let run = |margin| {
            let problem = prepared.problem.to_builder().deterministic(deterministic).sm_margin(margin).build()?;
            let plan = problem.plan_with_row(&gpu.device, row)?;
            let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes())?;
            Ok((plan.to_string(), on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap()))
        };
        run_with_margins(gpu, row, run, |outputs| prepared.judge(outputs).passed());
    }
}

#[test]
fn e4m3_rows_leave_multiprocessors() {
    let Some(gpu) = Gpu::open("e4m3_rows_leave_multiprocessors") else { return };
    for row in gpu.fp8_rows() {
        let case = case(&row);
        let options = case.options(DType::E4M3).lse(true).scaling(Scaling::PerBlock);
        let problem = for_row(options.build().unwrap(), &row);
        let operands = Operands::of_case(&case, &problem, None);
        let (expected, on_device) = (operands.expected(), fp8::OnDevice::new(&gpu.stream, &operands));
        let run = |margin| {
            let plan = problem.to_builder().sm_margin(margin).build()?.plan_with_row(&gpu.device, &row)?;
            let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes())?;
            Ok((plan.to_string(), on_device.run::<bf16>(&gpu.stream, &mut workspace, &plan, None).unwrap()))
        };
        run_with_margins(&gpu, &row, run, |written| {
            let (o, lse) = written.output(&problem);
            expected.check(&o, Some(&lse)).unwrap().passed()
        });
    }
}
