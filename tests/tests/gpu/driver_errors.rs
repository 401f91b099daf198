//! Errors that others left in the context, and a context that a kernel has broken.

use std::process::Command;

use hopper_attention::cudarc::driver::DriverError;
use hopper_attention::cudarc::driver::sys::CUresult;
use hopper_attention::raw::{Place, RawArgs, RawTensor};
use hopper_attention::{DType, Error, Layout, Mask, Slot, Stream, Workspace, bf16};
use hopper_attention_tests::gpu::jobs::{Gate, Plan, Tensors, is_reached};
use hopper_attention_tests::gpu::{Gpu, OnDevice};
use hopper_attention_tests::problems::Case;
use hopper_attention_tests::runner::Prepared;

/// What a destructor of cudarc leaves in the context when it fails.
const OTHERS: DriverError = DriverError(CUresult::CUDA_ERROR_INVALID_VALUE);

/// A run neither fails with the error of another thread, nor takes it away, nor forgets to wait because of it.
#[test]
fn errors_of_another_thread_stay_where_they_are() {
    let Some(gpu) = Gpu::open("errors_of_another_thread_stay_where_they_are") else { return };
    let context = gpu.device.context();
    let leave_error = || std::thread::scope(|scope| _ = scope.spawn(|| context.record_err::<()>(Err(OTHERS))).join());
    for with_streams in [false, true] {
        let streams = with_streams.then(|| [(); 2].map(|()| context.new_stream().unwrap()));
        for (name, plan) in Plan::all(&gpu) {
            let expected = plan.expected(&gpu.stream);
            let from = Tensors::inputs(&gpu.stream, &plan);
            let (mut inputs, mut outputs) = (Tensors::blank(&gpu.stream, &plan), Tensors::outputs(&gpu.stream, &plan));
            let mut workspace = plan.workspace(&gpu.stream);
            context.synchronize().unwrap();
            let [writer, reader] = streams.clone().unwrap_or_else(|| [gpu.stream.clone(), gpu.stream.clone()]);
            let gate = Gate::hold(&writer);
            inputs.copy(&writer, &from);
            leave_error();
            let ran = plan.run(&reader, &mut workspace, &inputs, &mut outputs);
            let left = context.check_err();
            let done = reader.record_event(None).unwrap();
            let early = is_reached(&done);
            gate.open();
            ran.unwrap_or_else(|error| panic!("{name}: the run failed with an error of another thread: {error}"));
            assert_eq!(left, Err(OTHERS), "{name}: the error that another thread left");
            assert!(!early, "{name}: the run did not wait for the writer of its inputs");
            assert!(outputs.bytes(&reader) == expected, "{name}: the run read its inputs before they were written");
        }
    }
}

const CHILD: &str = "HATTN_TEST_BROKEN_CONTEXT";
const SURVIVED: &str = "every call failed with the same code, and everything was dropped";

/// A kernel that accesses wrong memory breaks the context. It does so in a process of its own: this test, run again.
#[test]
fn a_broken_context_says_so() {
    let Some(gpu) = Gpu::open("a_broken_context_says_so") else { return };
    if std::env::var_os(CHILD).is_some() {
        return break_context(gpu);
    }
    let this = std::env::current_exe().unwrap();
    let arguments = ["driver_errors::a_broken_context_says_so", "--exact", "--nocapture"];
    let ran = Command::new(this).args(arguments).env(CHILD, "1").output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success() && err.contains(SURVIVED), "{}\n{out}\n{err}", ran.status);
}

fn break_context(gpu: Gpu) {
    let prepared = Prepared::<bf16>::new(&Case { lse: false, ..Case::new(64, 64, 64, Mask::Full) });
    let row = *gpu.rows().iter().find(|row| prepared.problem.plan_with_row(&gpu.device, row).is_ok()).unwrap();
    let plan = prepared.problem.plan_with_row(&gpu.device, &row).unwrap();
    let lane = gpu.lane();
    let mut workspace = Workspace::alloc(&lane, plan.workspace_bytes().max(16)).unwrap();
    let mut on_device = OnDevice::new(&gpu.stream, &prepared);
    let second = gpu.device.context().new_stream().unwrap();
    gpu.device.context().synchronize().unwrap();

    let nowhere = |shape| RawTensor::new(0x1000, DType::BF16, Place::Cuda(0), Layout::contiguous(shape).unwrap());
    let problem = &prepared.problem;
    let wrong = RawArgs::new()
        .with(Slot::Q, nowhere(problem.q_shape()))
        .with(Slot::K, nowhere(problem.k_shape()))
        .with(Slot::V, nowhere(problem.v_shape()))
        .with(Slot::O, nowhere(problem.o_shape()))
        .with_workspace(0x1000, plan.workspace_bytes());
    // SAFETY: none: the addresses are wrong, and the test is about what follows. The process ends after it.
    unsafe { plan.run_raw(&wrong, gpu.stream.cu_stream().cast()) }.unwrap();
    let broken = lane.synchronize().unwrap_err();
    let Error::Driver { code, ref name, .. } = broken else { panic!("not an error of the driver: {broken}") };
    assert!(code >= 700 && name.starts_with("CUDA_ERROR_"), "a kernel at a wrong address: {broken}");

    let of_second = Stream::Cuda(second);
    for round in 0..2 {
        let results = [
            ("synchronize", lane.synchronize()),
            ("run", plan.run(&lane, &mut workspace, on_device.args(&prepared))),
            ("run on a second stream", plan.run(&of_second, &mut workspace, on_device.args(&prepared))),
            // SAFETY: as above. Nothing is launched any more.
            ("run_raw", unsafe { plan.run_raw(&wrong, gpu.stream.cu_stream().cast()) }),
            ("alloc", Workspace::alloc(&lane, 16).map(drop)),
        ];
        for (call, result) in results {
            let error = result.expect_err(call);
            let same = matches!(&error, Error::Driver { code: found, .. } if *found == code);
            assert!(same, "{call}, round {round}: {error}; before: {broken}");
        }
    }
    drop((plan, workspace, on_device, of_second, lane, gpu));
    hopper_attention_tests::say(SURVIVED);
}
