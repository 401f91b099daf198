//! A run allocates nothing: no host memory through Rust's allocator, which is counted in this binary, and no device memory.

use std::ffi::c_void;
use std::hint::black_box;

use hopper_attention::cudarc::driver::DevicePtrMut;
use hopper_attention::{ForwardPlan, KernelInfo, Stream, Workspace};
use hopper_attention_tests::allocations::{Counting, counted};
use hopper_attention_tests::c;
use hopper_attention_tests::data::Poison;
use hopper_attention_tests::gpu::{ByAddress, Gpu, OnDevice};
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::runner::Prepared;
use hopper_attention_tests::say;

use crate::{mask_of, with_dtype};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn the_counter_counts() {
    assert_eq!(counted(|| drop(black_box(Box::new(1)))).1, 2);
    assert_eq!(counted(|| black_box(1)).1, 0);
    assert_eq!(counted(|| black_box(vec![0u8; 64]).resize(4096, 1)).1, 3);
}

#[test]
fn runs_allocate_no_host_memory() {
    let Some(gpu) = Gpu::open("runs_allocate_no_host_memory") else { return };
    for row in gpu.rows() {
        with_dtype!(row.dtype(), no_host_memory(&gpu, &row, false));
    }
    // With a second stream cudarc waits for events and records them, around every use of memory made from then on.
    let second = gpu.device.context().new_stream().unwrap();
    // Once, so that cudarc has looked up the driver's functions for it.
    gpu.stream.wait(&second.record_event(None).unwrap()).unwrap();
    assert!(gpu.device.context().is_managing_stream_synchronization());
    for row in gpu.rows() {
        with_dtype!(row.dtype(), no_host_memory(&gpu, &row, true));
    }
}

fn case(row: &KernelInfo) -> Case {
    let mut case =
        Case::new(2 * row.tile_m() + 17, 2 * row.tile_n() + 45, row.head_dim_qk(), mask_of(row.mask())).heads(2, 4, 2);
    case.dims.head_dim_vo = row.head_dim_vo();
    case
}

fn no_host_memory<T: Poison>(gpu: &Gpu, row: &KernelInfo, events: bool) {
    let prepared = Prepared::<T>::new(&case(row));
    let plan = prepared.problem.plan_with_row(&gpu.device, row).unwrap();
    let lane = gpu.lane();
    let mut workspace = Workspace::alloc(&lane, plan.workspace_bytes()).unwrap();
    let mut on_device = OnDevice::new(&gpu.stream, &prepared);
    for run in 0..3 {
        on_device.poison(&gpu.stream, &prepared);
        let args = on_device.args(&prepared);
        // From the very first run on: what has to be made ready was made ready with the plan.
        let (ran, calls) = counted(|| plan.run(&lane, &mut workspace, args));
        ran.unwrap();
        assert_eq!(calls, 0, "{row}: run {run} called the allocator, events {events}");
    }
    let report = prepared.judge(&on_device.outputs(&gpu.stream, &prepared).unwrap());
    assert!(report.passed(), "{row}: {report}");

    // By address, as C does.
    let through_c = c::Plan::new(&c::problem(&prepared.problem), 0).unwrap();
    let mut scratch = gpu.stream.alloc_zeros::<u8>(through_c.workspace_bytes().max(16)).unwrap();
    let mut memory = on_device.c_memory(&gpu.stream, &prepared);
    memory.workspace = scratch.device_ptr_mut(&gpu.stream).0;
    memory.workspace_bytes = through_c.workspace_bytes();
    let stream: *mut c_void = gpu.stream.cu_stream().cast();
    on_device.poison(&gpu.stream, &prepared);
    for run in 0..3 {
        // SAFETY: the memory is the case's own and outlives the work, which is waited for below.
        let (ran, calls) = counted(|| unsafe { through_c.run(&memory, stream) });
        ran.unwrap();
        assert_eq!(calls, 0, "{row}: run {run} through C called the allocator, events {events}");
    }
    let report = prepared.judge(&on_device.outputs(&gpu.stream, &prepared).unwrap());
    assert!(report.passed(), "{row}, through C: {report}");
}

#[test]
fn runs_allocate_no_device_memory() {
    let Some(gpu) = Gpu::open("runs_allocate_no_device_memory") else { return };
    let rows = gpu.rows();
    let mut lanes: Vec<Box<dyn FnMut()>> = Vec::new();
    for row in &rows {
        lanes.push(with_dtype!(row.dtype(), lane(&gpu, row)));
    }
    // The driver may set something aside for the first launch of a kernel; after that nothing may grow.
    lanes.iter_mut().for_each(|run| run());
    gpu.stream.synchronize().unwrap();
    let (before, total) = gpu.device.context().mem_get_info().unwrap();
    assert!(before > 0 && before < total);
    for _ in 0..Grid::from_env().pick(10, 500) {
        lanes.iter_mut().for_each(|run| run());
    }
    // Neither while they run nor when they are done.
    let during = gpu.device.context().mem_get_info().unwrap().0;
    gpu.stream.synchronize().unwrap();
    let after = gpu.device.context().mem_get_info().unwrap().0;
    assert_eq!(after, before, "bytes of device memory that are free");
    // compute-sanitizer, which the small grid is for, sets memory aside for what is under way.
    if Grid::from_env().pick(false, true) {
        assert_eq!(during, before, "bytes of device memory that are free while kernels run");
    } else {
        say("skipped: the memory that is free while kernels run (HATTN_TEST_GRID=small)");
    }
}

/// A case of a row, ready to be enqueued again and again.
fn lane<T: Poison + 'static>(gpu: &Gpu, row: &KernelInfo) -> Box<dyn FnMut()> {
    let prepared = Prepared::<T>::new(&case(row));
    let plan: ForwardPlan = prepared.problem.plan_with_row(&gpu.device, row).unwrap();
    let lane: Stream = gpu.lane();
    let mut workspace = Workspace::alloc(&lane, plan.workspace_bytes()).unwrap();
    let mut on_device = OnDevice::new(&gpu.stream, &prepared);
    Box::new(move || plan.run(&lane, &mut workspace, on_device.args(&prepared)).unwrap())
}
