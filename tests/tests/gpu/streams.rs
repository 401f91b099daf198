//! The same bits again, on any stream, beside other streams, and after thousands of launches.

use std::sync::Arc;

use hopper_attention::cudarc::driver::CudaStream;
use hopper_attention::{ForwardPlan, KernelInfo, Stream, Workspace};
use hopper_attention_tests::data::Poison;
use hopper_attention_tests::gpu::{Gpu, OnDevice, same_bits};
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::runner::Prepared;

use crate::{mask_of, with_dtype};

/// A case for a row: several tiles, several heads, a ragged end.
fn case(row: &KernelInfo, seed: u64) -> Case {
    let mut case =
        Case::new(3 * row.tile_m() + 17, 2 * row.tile_n() + 45, row.head_dim_qk(), mask_of(row.mask())).heads(2, 6, 2);
    case.dims.head_dim_vo = row.head_dim_vo();
    Case { seed, ..case }
}

fn ready<T: Poison>(gpu: &Gpu, row: &KernelInfo, seed: u64) -> (Prepared<T>, ForwardPlan) {
    let prepared = Prepared::<T>::new(&case(row, seed));
    let plan = prepared.problem.plan_with_row(&gpu.device, row).unwrap();
    (prepared, plan)
}

#[test]
fn reruns_give_the_same_bits() {
    let Some(gpu) = Gpu::open("reruns_give_the_same_bits") else { return };
    for row in gpu.rows() {
        with_dtype!(row.dtype(), reruns(&gpu, &row));
    }
}

fn reruns<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    let (prepared, plan) = ready::<T>(gpu, row, 1);
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let first = OnDevice::new(&gpu.stream, &prepared).run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
    let report = prepared.judge(&first);
    assert!(report.passed(), "{row}: {report}");
    // In the same memory, and in other memory.
    let mut on_device = OnDevice::new(&gpu.stream, &prepared);
    for run in 1..Grid::from_env().pick(3, 20) {
        let again = on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
        assert!(same_bits(&first, &again), "{row}: run {run} differs from the first");
    }
}

/// On a stream that is not the default one, and on both in turn: the library orders what shares memory.
#[test]
fn a_second_stream() {
    let Some(gpu) = Gpu::open("a_second_stream") else { return };
    let second = gpu.device.context().new_stream().unwrap();
    for row in gpu.rows() {
        with_dtype!(row.dtype(), on_second(&gpu, &second, &row));
    }
}

fn on_second<T: Poison>(gpu: &Gpu, second: &Arc<CudaStream>, row: &KernelInfo) {
    let (prepared, plan) = ready::<T>(gpu, row, 2);
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let mut on_device = OnDevice::new(&gpu.stream, &prepared);
    let first = on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
    // Memory that was written on one stream is used on another at once: the library has to order that.
    on_device.poison(&gpu.stream, &prepared);
    plan.run(&Stream::Cuda(second.clone()), &mut workspace, on_device.args(&prepared)).unwrap();
    let other = on_device.outputs(second, &prepared).unwrap();
    assert!(same_bits(&first, &other), "{row}: the second stream gives other bits");
    assert!(prepared.judge(&other).passed());
    // And back, without waiting in between.
    on_device.poison(second, &prepared);
    plan.run(&Stream::Cuda(second.clone()), &mut workspace, on_device.args(&prepared)).unwrap();
    plan.run(&gpu.lane(), &mut workspace, on_device.args(&prepared)).unwrap();
    let both = on_device.outputs(&gpu.stream, &prepared).unwrap();
    assert!(same_bits(&first, &both), "{row}: two streams in turn give other bits");
}

#[test]
fn many_streams_at_once() {
    let Some(gpu) = Gpu::open("many_streams_at_once") else { return };
    for row in gpu.rows() {
        with_dtype!(row.dtype(), many(&gpu, &row));
    }
}

fn many<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    let rounds = Grid::from_env().pick(2, 25);
    let mut lanes: Vec<_> = (0..6)
        .map(|seed| {
            let (prepared, plan) = ready::<T>(gpu, row, 100 + seed);
            let stream = gpu.device.context().new_stream().unwrap();
            let workspace = Workspace::alloc(&Stream::Cuda(stream.clone()), plan.workspace_bytes()).unwrap();
            let on_device = OnDevice::new(&stream, &prepared);
            (prepared, plan, stream, workspace, on_device)
        })
        .collect();
    for _ in 0..rounds {
        for (prepared, plan, stream, workspace, on_device) in &mut lanes {
            plan.run(&Stream::Cuda(stream.clone()), workspace, on_device.args(prepared)).unwrap();
        }
    }
    for (prepared, _, stream, _, on_device) in &lanes {
        let report = prepared.judge(&on_device.outputs(stream, prepared).unwrap());
        assert!(report.passed(), "{row}: {report}");
        on_device.check_inputs(stream, prepared).unwrap();
    }
}

/// Thousands of launches back to back, of all rows in turn, with one workspace.
#[test]
fn soak() {
    let Some(gpu) = Gpu::open("soak") else { return };
    for dtype in [hopper_attention::DType::BF16, hopper_attention::DType::F16] {
        let rows: Vec<_> = gpu.rows().into_iter().filter(|row| row.dtype() == dtype).collect();
        if !rows.is_empty() {
            with_dtype!(dtype, soak_rows(&gpu, &rows));
        }
    }
}

fn soak_rows<T: Poison>(gpu: &Gpu, rows: &[KernelInfo]) {
    let mut lanes: Vec<_> = rows
        .iter()
        .map(|row| {
            let (prepared, plan) = ready::<T>(gpu, row, 7);
            let on_device = OnDevice::new(&gpu.stream, &prepared);
            (prepared, plan, on_device, *row)
        })
        .collect();
    let bytes = lanes.iter().map(|(_, plan, _, _)| plan.workspace_bytes()).max().unwrap();
    let mut workspace = Workspace::alloc(&gpu.lane(), bytes).unwrap();
    let first: Vec<_> = lanes
        .iter_mut()
        .map(|(prepared, plan, on_device, _)| on_device.run(&gpu.stream, &mut workspace, plan, prepared).unwrap())
        .collect();
    for _ in 0..Grid::from_env().pick(5, 1000) {
        for (prepared, plan, on_device, _) in &mut lanes {
            plan.run(&gpu.lane(), &mut workspace, on_device.args(prepared)).unwrap();
        }
    }
    for ((prepared, _, on_device, row), first) in lanes.iter().zip(&first) {
        let last = on_device.outputs(&gpu.stream, prepared).unwrap();
        assert!(same_bits(first, &last), "{row}: the last launch gave other bits than the first");
        assert!(prepared.judge(&last).passed(), "{row}");
    }
}
