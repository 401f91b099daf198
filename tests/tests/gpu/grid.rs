//! Every row against every case that it takes.

use std::collections::{BTreeMap, BTreeSet};

use hopper_attention::internal::{plan_with_shares, plan_with_splits};
use hopper_attention::{Arch, DType, Device, KernelInfo, Workspace, bf16, f16};
use hopper_attention_tests::data::Poison;
use hopper_attention_tests::gpu::{Gpu, OnDevice, planned, same_bits, take_rows};
use hopper_attention_tests::problems::{Case, Grid, Tiles, cases, fitting, largest_head_dim, random};
use hopper_attention_tests::runner::{Mutated, Prepared, Runner};
use hopper_attention_tests::say;

use crate::{mask_of, with_dtype};

/// Scratch for every plan of a test, never cleaned: a kernel must not care what the last one left.
const WORKSPACE_BYTES: usize = 256 << 20;

/// Runs cases through all rows that take them. Where a row's tiles can be shared, each second case has 1 to 8 shares in turn, in one
/// to three clusters, whatever the plan would choose.
pub(crate) fn run<T: Poison>(gpu: &Gpu, rows: &[KernelInfo], cases: &[Case], runner: &mut Runner) {
    let mut runs = 0;
    let mut workspace = Workspace::alloc(&gpu.lane(), WORKSPACE_BYTES).unwrap();
    take_rows(
        runner,
        (rows, cases),
        |prepared: &Prepared<T>| OnDevice::new(&gpu.stream, prepared),
        |row, prepared, on_device| {
            let problem = &prepared.problem;
            runs += usize::from(row.most_shares() > 1);
            let plan = match runs % 2 == 1 && row.most_shares() > 1 {
                true => {
                    let [shares, splits] = [runs / 2 % row.most_shares(), runs / 2 / row.most_shares() % 3];
                    plan_with_splits(problem, &gpu.device, row, 1 + shares, 1 + splits)
                }
                false => problem.plan_with_row(&gpu.device, row),
            };
            let plan = planned(plan, row, &prepared.case)?;
            assert!(plan.workspace_bytes() <= WORKSPACE_BYTES, "{plan}");
            Some(on_device.run(&gpu.stream, &mut workspace, &plan, prepared))
        },
        |prepared, on_device| on_device.check_inputs(&gpu.stream, prepared),
    );
}

#[test]
fn every_row_takes_the_grid() {
    let Some(gpu) = Gpu::open("every_row_takes_the_grid") else { return };
    let rows = gpu.rows();
    let size = Grid::from_env();
    let cases = cases(size, &Tiles::of(&rows));
    let mut runner = Runner::new(&rows);
    run::<bf16>(&gpu, &rows, &cases, &mut runner);
    run::<f16>(&gpu, &rows, &cases, &mut runner);
    say(&format!("{}, {}", gpu.card(), gpu.driver()));
    runner.record("forward", size, &gpu.card(), &gpu.driver());
    runner.finish();
}

/// Every case of the grid has a kernel of each instruction set that plans find by themselves. (A row that is never found is dead weight, but not
/// wrong: it is named, and the grid has run it.)
#[test]
fn every_case_has_a_plan() {
    let Some(gpu) = Gpu::open("every_case_has_a_plan") else { return };
    let device = Device::Cuda(gpu.device.clone());
    let archs: BTreeSet<Arch> = gpu.rows().iter().map(|row| row.arch()).collect();
    let mut picked = Vec::new();
    for case in cases(Grid::Full, &Tiles::of(&gpu.rows())) {
        for dtype in [DType::BF16, DType::F16] {
            for &arch in &archs {
                let problem = case.options(dtype).arch(arch).build().unwrap();
                let of_arch: Vec<_> = gpu.rows().into_iter().filter(|row| row.arch() == arch).collect();
                if fitting(&of_arch, vec![case.clone()]).is_empty() {
                    // Head dims that this instruction set has no kernels for.
                    let error = problem.plan(&device).unwrap_err().to_string();
                    assert!(error.contains(&format!("on {arch}; nearest: up to")), "{error}");
                    continue;
                }
                let plan = problem.plan(&device).unwrap_or_else(|error| panic!("{arch} {dtype} {case}: {error}"));
                let kernel = *plan.kernel().unwrap();
                assert_eq!(kernel.arch(), arch, "{plan}");
                picked.push(kernel);
            }
            let plan = case.problem(dtype).plan(&device).unwrap();
            assert_eq!(plan.kernel().map(KernelInfo::arch), archs.last().copied(), "{plan}");
        }
    }
    for row in gpu.rows().iter().filter(|row| !picked.contains(row)) {
        say(&format!("no case of the grid picks {row}"));
    }
}

#[test]
fn random_cases() {
    let Some(gpu) = Gpu::open("random_cases") else { return };
    let rows = gpu.rows();
    let [even, odd] = random::halves(random::drawn(largest_head_dim(&rows), 8, 384));
    let mut runner = Runner::new(["all rows, random cases"]);
    let mut by_row = Runner::new(&rows);
    run::<bf16>(&gpu, &rows, &even, &mut by_row);
    run::<f16>(&gpu, &rows, &odd, &mut by_row);
    by_row.pour_into(&mut runner);
    runner.finish();
}

/// A broken kernel must fail the suite: every mutation of what a row computed is caught.
#[test]
fn broken_results_are_caught() {
    let Some(gpu) = Gpu::open("broken_results_are_caught") else { return };
    for row in gpu.rows() {
        with_dtype!(row.dtype(), broken(&gpu, &row));
    }
}

fn broken<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    let mut case = Case::new(197, 290, row.head_dim_qk(), mask_of(row.mask())).heads(2, 4, 2);
    case.dims.head_dim_vo = row.head_dim_vo();
    let prepared = Prepared::<T>::new(&case);
    // The tiles are shared where they can be.
    let plan = plan_with_shares(&prepared.problem, &gpu.device, row, 3).unwrap();
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let outputs = OnDevice::new(&gpu.stream, &prepared).run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
    let mut applied = BTreeMap::new();
    prepared.catch_all(&outputs, row, &mut applied);
    let applied: usize = applied.values().sum();
    assert!(applied >= 8, "{row}: {applied} mutations applied");
}

/// Shares are summed in their order, whichever is done first, and a share never reads a block that has not arrived: the same bits
/// in every run. (A kernel in which two warpgroups had one barrier for a buffer failed one run in 300; benches/LOG.md, entry 35.)
#[test]
fn shares_of_a_tile_give_the_same_bits() {
    let Some(gpu) = Gpu::open("shares_of_a_tile_give_the_same_bits") else { return };
    let runs = if Grid::from_env() == Grid::Full { 100 } else { 5 };
    for row in gpu.rows().into_iter().filter(|row| row.most_shares() > 1) {
        for shares in 1..=row.most_shares() {
            for splits in [1, 3] {
                with_dtype!(row.dtype(), repeats(&gpu, &row, [shares, splits], runs));
            }
        }
    }
}

fn repeats<T: Poison>(gpu: &Gpu, row: &KernelInfo, [shares, splits]: [usize; 2], runs: usize) {
    let mut case = Case::new(64, 1024, row.head_dim_qk(), mask_of(row.mask())).heads(1, 16, 16);
    case.dims.head_dim_vo = row.head_dim_vo();
    let prepared = Prepared::<T>::new(&case);
    let plan = plan_with_splits(&prepared.problem, &gpu.device, row, shares, splits).unwrap();
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let mut on_device = OnDevice::new(&gpu.stream, &prepared);
    let mut run = || on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
    let first = run();
    let report = prepared.judge(&first);
    assert!(report.passed(), "{row}, {shares} shares, {splits} clusters: {report}");
    for number in 1..runs {
        assert!(same_bits(&first, &run()), "{row}, {shares} shares, {splits} clusters: run {number} gave other bits");
    }
}
