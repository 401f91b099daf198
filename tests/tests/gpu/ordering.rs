//! The order of a run among other uses of its memory: a gate holds a run back, and the other use must wait for it.

use hopper_attention_tests::gpu::Gpu;
use hopper_attention_tests::gpu::jobs::{Gate, Plan, Tensors, is_reached};

/// Memory that is freed after the call is not reused before the kernel has read it, for every pass, type and instruction set.
#[test]
fn memory_is_freed_after_the_kernel() {
    let Some(gpu) = Gpu::open("memory_is_freed_after_the_kernel") else { return };
    let other = gpu.device.context().new_stream().unwrap();
    for (name, plan) in Plan::all(&gpu) {
        let expected = plan.expected(&gpu.stream);
        for (owner, whose) in [(&gpu.stream, "the default stream"), (&other, "another stream")] {
            let stream = gpu.device.context().new_stream().unwrap();
            let (inputs, mut outputs) = (Tensors::inputs(owner, &plan), Tensors::outputs(owner, &plan));
            let mut workspace = plan.workspace(owner);
            gpu.device.context().synchronize().unwrap();
            let gate = Gate::hold(&stream);
            plan.run(&stream, &mut workspace, &inputs, &mut outputs).unwrap();
            drop((inputs, workspace));
            let reused = Tensors::blank(owner, &plan);
            let freed = owner.record_event(None).unwrap();
            assert!(!is_reached(&freed), "{name}: memory of {whose} was freed while its reader was held back");
            gate.open();
            assert!(outputs.bytes(&stream) == expected, "{name}: memory of {whose} was overwritten before it was read");
            drop(reused);
        }
    }
}

/// The last stream beside the default one is dropped, so that cudarc forgets its events, and then the memory.
#[test]
fn a_stream_may_be_dropped_early() {
    let Some(gpu) = Gpu::open("a_stream_may_be_dropped_early") else { return };
    let context = gpu.device.context();
    for (name, plan) in Plan::all(&gpu) {
        let expected = plan.expected(&gpu.stream);
        let (mut inputs, mut outputs) = (Tensors::inputs(&gpu.stream, &plan), Tensors::outputs(&gpu.stream, &plan));
        for freed in [false, true] {
            let stream = context.new_stream().unwrap();
            let mut workspace = plan.workspace(&gpu.stream);
            context.synchronize().unwrap();
            let gate = Gate::hold(&stream);
            plan.run(&stream, &mut workspace, &inputs, &mut outputs).unwrap();
            drop(stream);
            assert!(!context.is_managing_stream_synchronization(), "{name}: some other stream keeps the events alive");
            let what = if freed { "freed" } else { "overwritten" };
            let _reused = if freed {
                drop(inputs);
                Some(Tensors::blank(&gpu.stream, &plan))
            } else {
                inputs.overwrite(&gpu.stream);
                None
            };
            let done = gpu.stream.record_event(None).unwrap();
            assert!(!is_reached(&done), "{name}: an input was {what} while its reader was held back");
            gate.open();
            assert!(outputs.bytes(&gpu.stream) == expected, "{name}: an input was {what} before it was read");
            inputs = Tensors::inputs(&gpu.stream, &plan);
            outputs = Tensors::outputs(&gpu.stream, &plan);
        }
    }
}

/// Two runs on two streams read the same tensors. A writer on a third stream waits for both, not only for the latest.
#[test]
fn two_readers_then_a_writer() {
    let Some(gpu) = Gpu::open("two_readers_then_a_writer") else { return };
    let context = gpu.device.context();
    let [first, second, third] = [(); 3].map(|()| context.new_stream().unwrap());
    for (name, plan) in Plan::all(&gpu) {
        let expected = plan.expected(&gpu.stream);
        let mut inputs = Tensors::inputs(&gpu.stream, &plan);
        let mut of_first = (Tensors::outputs(&first, &plan), plan.workspace(&first));
        let mut of_second = (Tensors::outputs(&second, &plan), plan.workspace(&second));
        context.synchronize().unwrap();
        let gate = Gate::hold(&first);
        plan.run(&first, &mut of_first.1, &inputs, &mut of_first.0).unwrap();
        plan.run(&second, &mut of_second.1, &inputs, &mut of_second.0).unwrap();
        inputs.overwrite(&third);
        let written = third.record_event(None).unwrap();
        assert!(!is_reached(&written), "{name}: an input was overwritten while its first reader was held back");
        gate.open();
        assert!(
            of_first.0.bytes(&first) == expected,
            "{name}: an input was overwritten before its first reader read it"
        );
        assert!(of_second.0.bytes(&second) == expected, "{name}: the second reader read something else");
    }
}

/// A second reader of the same tensors does not wait for the first: only what comes after it does.
#[test]
fn readers_run_beside_each_other() {
    let Some(gpu) = Gpu::open("readers_run_beside_each_other") else { return };
    let context = gpu.device.context();
    let [first, second] = [(); 2].map(|()| context.new_stream().unwrap());
    let (name, plan) = Plan::all(&gpu).swap_remove(0);
    let inputs = Tensors::inputs(&gpu.stream, &plan);
    let mut of_first = (Tensors::outputs(&first, &plan), plan.workspace(&first));
    let mut of_second = (Tensors::outputs(&second, &plan), plan.workspace(&second));
    context.synchronize().unwrap();
    let gate = Gate::hold(&first);
    plan.run(&first, &mut of_first.1, &inputs, &mut of_first.0).unwrap();
    plan.run(&second, &mut of_second.1, &inputs, &mut of_second.0).unwrap();
    // The outputs carry an event of their own. A third stream that reads them is done as soon as the kernel is.
    let third = context.new_stream().unwrap();
    let mut copies = Tensors::outputs(&third, &plan);
    copies.copy(&third, &of_second.0);
    let copied = third.record_event(None).unwrap();
    let waited_for_first = !is_reached(&copied);
    gate.open();
    context.synchronize().unwrap();
    assert!(!waited_for_first, "{name}: the second reader waited for the first");
}
