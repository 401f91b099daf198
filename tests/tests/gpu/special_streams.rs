//! The default stream and the per-thread default stream by their handles: as themselves, and between threads.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::mpsc;

use hopper_attention::cudarc::driver::{DevicePtrMut, sys};
use hopper_attention::{Mask, bf16};
use hopper_attention_tests::c;
use hopper_attention_tests::gpu::jobs::{Gate, PATIENCE, Plan, Tensors, is_reached};
use hopper_attention_tests::gpu::{ByAddress, Gpu, OnDevice};
use hopper_attention_tests::problems::Case;
use hopper_attention_tests::runner::Prepared;

/// Every plan on the per-thread default stream of this thread and of another.
#[test]
fn the_per_thread_default_stream_serves() {
    let Some(gpu) = Gpu::open("the_per_thread_default_stream_serves") else { return };
    for (name, plan) in Plan::all(&gpu) {
        let expected = plan.expected(&gpu.stream);
        let run = || {
            let stream = gpu.device.context().per_thread_stream();
            let (inputs, mut outputs) = (Tensors::inputs(&stream, &plan), Tensors::outputs(&stream, &plan));
            plan.run(&stream, &mut plan.workspace(&stream), &inputs, &mut outputs).unwrap();
            drop(inputs);
            outputs.bytes(&stream)
        };
        assert!(run() == expected, "{name}: the per-thread default stream gives other bits");
        let elsewhere = std::thread::scope(|scope| scope.spawn(run).join().unwrap());
        assert!(elsewhere == expected, "{name}: that of another thread gives other bits");
    }
}

/// The handle is the same on two threads, and the streams are not. A reader on one thread, then a writer on the other.
#[test]
fn a_writer_waits_for_a_run_of_another_thread() {
    let Some(gpu) = Gpu::open("a_writer_waits_for_a_run_of_another_thread") else { return };
    let context = gpu.device.context();
    let stream = context.per_thread_stream();
    assert!(!context.is_managing_stream_synchronization(), "this context has no stream of new_stream");
    for (name, plan) in Plan::all(&gpu) {
        let expected = plan.expected(&stream);
        let (inputs, mut outputs) = (Tensors::inputs(&stream, &plan), Tensors::outputs(&stream, &plan));
        let mut workspace = plan.workspace(&stream);
        context.synchronize().unwrap();
        let (sent, ran) = mpsc::channel();
        let (finish, finished) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let (plan, there, writes, scratch) = (&plan, &stream, &mut outputs, &mut workspace);
            scope.spawn(move || {
                context.bind_to_thread().unwrap();
                let gate = Gate::hold(there);
                plan.run(there, scratch, &inputs, writes).unwrap();
                sent.send((gate, inputs)).unwrap();
                // The stream ends with its thread, which therefore stays until the main thread has looked.
                let _ = finished.recv_timeout(PATIENCE);
            });
            let (gate, mut inputs) = ran.recv().unwrap();
            inputs.overwrite(&stream);
            let done = stream.record_event(None).unwrap();
            let early = is_reached(&done);
            gate.open();
            finish.send(()).unwrap();
            assert!(!early, "{name}: an input was overwritten while a run of another thread was held back");
        });
        context.synchronize().unwrap();
        assert!(outputs.bytes(&stream) == expected, "{name}: an input was overwritten before it was read");
    }
}

/// A writer on one thread, then a run on the other.
#[test]
fn a_run_waits_for_a_writer_of_another_thread() {
    let Some(gpu) = Gpu::open("a_run_waits_for_a_writer_of_another_thread") else { return };
    let context = gpu.device.context();
    let stream = context.per_thread_stream();
    for (name, plan) in Plan::all(&gpu) {
        let expected = plan.expected(&stream);
        let from = Tensors::inputs(&stream, &plan);
        let (inputs, mut outputs) = (Tensors::blank(&stream, &plan), Tensors::outputs(&stream, &plan));
        let mut workspace = plan.workspace(&stream);
        context.synchronize().unwrap();
        let (sent, written) = mpsc::channel();
        let (finish, finished) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let (from, to_write) = (&from, &stream);
            scope.spawn(move || {
                let mut inputs = inputs;
                context.bind_to_thread().unwrap();
                let gate = Gate::hold(to_write);
                inputs.copy(to_write, from);
                sent.send((gate, inputs)).unwrap();
                let _ = finished.recv_timeout(PATIENCE);
            });
            let (gate, inputs) = written.recv().unwrap();
            plan.run(&stream, &mut workspace, &inputs, &mut outputs).unwrap();
            let done = stream.record_event(None).unwrap();
            let early = is_reached(&done);
            gate.open();
            finish.send(()).unwrap();
            let bytes = outputs.bytes(&stream);
            assert!(!early, "{name}: the run did not wait for the writer of another thread");
            assert!(bytes == expected, "{name}: the run read its inputs before they were written");
        });
    }
}

/// By address, as C and the raw layer do: each of CUDA's own handles, with another context current.
#[test]
fn special_handles_through_c_belong_to_the_plans_context() {
    let Some(gpu) = Gpu::open("special_handles_through_c_belong_to_the_plans_context") else { return };
    let context = gpu.device.context();
    let prepared = Prepared::<bf16>::new(&Case::new(70, 90, 64, Mask::causal()).heads(20, 8, 2));
    let plan = c::Plan::new(&c::problem(&prepared.problem), 0).unwrap();
    let mut scratch = gpu.stream.alloc_zeros::<u8>(4096).unwrap();
    let mut on_device = OnDevice::new(&gpu.stream, &prepared);
    let mut other = null_mut();
    // SAFETY: a place for the handle; the new context is current from then on.
    unsafe { sys::cuCtxCreate_v4(&raw mut other, null_mut(), 0, 0) }.result().unwrap();
    for handle in [0, 1, 2] {
        let stream: *mut c_void = std::ptr::without_provenance_mut(handle);
        on_device.poison(&gpu.stream, &prepared);
        let mut memory = on_device.c_memory(&gpu.stream, &prepared);
        (memory.workspace, memory.workspace_bytes) = (scratch.device_ptr_mut(&gpu.stream).0, 4096);
        context.synchronize().unwrap();
        // SAFETY: a context that was made above.
        unsafe { sys::cuCtxSetCurrent(other) }.result().unwrap();
        // SAFETY: the memory outlives the work, which is waited for below.
        unsafe { plan.run(&memory, stream) }.unwrap_or_else(|refusal| panic!("handle {handle}: {refusal:?}"));
        let mut current = null_mut();
        // SAFETY: a place for the handle.
        unsafe { sys::cuCtxGetCurrent(&raw mut current) }.result().unwrap();
        assert_eq!(current, other, "handle {handle}: another context is current after the run");
        context.synchronize().unwrap();
        let report = prepared.judge(&on_device.outputs(&gpu.stream, &prepared).unwrap());
        assert!(report.passed(), "handle {handle}: {report}");
    }
    // SAFETY: made above, and not current: the loop has ended with cudarc's context.
    unsafe { sys::cuCtxDestroy_v2(other) }.result().unwrap();
}
