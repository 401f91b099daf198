//! Whoever runs a plan has the CUDA context current that was current before, or none.

use std::ptr::null_mut;

use hopper_attention::cudarc::driver::{result, sys};
use hopper_attention::{DType, Device, Error, ForwardProblem, Mask, Quantizer, Scaling, Workspace, bf16};
use hopper_attention_tests::backward;
use hopper_attention_tests::gpu::quantize::{Kind, Like, OnDevice as OnDeviceQuantize, Sample};
use hopper_attention_tests::gpu::{self, Gpu, OnDevice};
use hopper_attention_tests::layouts::Placement;
use hopper_attention_tests::problems::Case;
use hopper_attention_tests::runner::Prepared;

fn current() -> Option<sys::CUcontext> {
    result::ctx::get_current().unwrap()
}

/// Planning, running and refusing leave the current context alone, with events of cudarc around every use of memory. (By address:
/// `capi.rs`.)
#[test]
fn safe_runs_leave_the_current_context_alone() {
    let Some(gpu) = Gpu::open("safe_runs_leave_the_current_context_alone") else { return };
    let device = Device::Cuda(gpu.device.clone());
    let lane = gpu.lane();
    // With a second stream cudarc waits for events and records them.
    let _second = gpu.device.context().new_stream().unwrap();
    assert!(gpu.device.context().is_managing_stream_synchronization());

    // More tiles than two rounds, so that the forward has a workspace.
    let case = Case::new(70, 90, 64, Mask::causal()).heads(40, 8, 2);
    let forward = Prepared::<bf16>::new(&case);
    let mut of_forward = OnDevice::new(&gpu.stream, &forward);
    let gradients = backward::Prepared::<bf16>::new(&case);
    let mut of_gradients = gpu::backward::OnDevice::new(&gpu.stream, &gradients);
    let e4m3 = ForwardProblem::builder(DType::E4M3, case.dims).scaling(Scaling::PerHead).build().unwrap();
    let kind = Kind { values: Placement::Bshd, stored: Placement::Bshd, given: false, like: Like::Uneven };
    let quantizer = Quantizer::builder(&e4m3, DType::BF16).build().unwrap();
    let sample = Sample::<bf16>::new(quantizer, [Some(kind); 3], true, 4);
    let mut of_sample = OnDeviceQuantize::new(&gpu.stream, &sample);
    let mut workspace = Workspace::alloc(&lane, 64 << 20).unwrap();
    let mut too_small = Workspace::alloc(&lane, 0).unwrap();
    let mut memory = gpu.stream.alloc_zeros::<u8>(1 << 20).unwrap();
    let mut askew = Workspace::cuda(memory.slice_mut(4..));
    gpu.stream.synchronize().unwrap();

    let mut other = null_mut();
    // SAFETY: a place for the handle; the new context is current from then on.
    unsafe { sys::cuCtxCreate_v4(&raw mut other, null_mut(), 0, 0) }.result().unwrap();
    let mut everything = |before: Option<sys::CUcontext>| {
        let kept = |what: &str| assert_eq!(current(), before, "{what}");
        let plan = forward.problem.plan(&device).unwrap();
        kept("planning a forward pass");
        plan.run(&lane, &mut workspace, of_forward.args(&forward)).unwrap();
        kept("a forward pass");
        assert!(plan.workspace_bytes() > 0, "{plan}");
        plan.run(&lane, &mut too_small, of_forward.args(&forward)).unwrap_err();
        kept("a refused forward pass");
        let plan = gradients.problem.plan(&device).unwrap();
        kept("planning a backward pass");
        plan.run(&lane, &mut workspace, of_gradients.args(&gradients)).unwrap();
        kept("a backward pass");
        let plan = sample.quantizer.plan(&device).unwrap();
        kept("planning a quantiser");
        plan.run(&lane, &mut workspace, of_sample.args(&sample)).unwrap();
        kept("a quantiser");
        // Addresses are looked at after the plan's context was made current.
        let error = plan.run(&lane, &mut askew, of_sample.args(&sample)).unwrap_err();
        assert!(matches!(error, Error::Layout { tensor: "workspace", .. }), "{error}");
        kept("a refused quantiser");
        Device::shared_cuda(0).unwrap();
        kept("opening the GPU");
    };
    everything(Some(other));
    // No context at all stays none.
    while current().is_some() {
        // SAFETY: contexts are a stack, from which this takes one; none being current is what is tested.
        unsafe { result::ctx::set_current(null_mut()) }.unwrap();
    }
    everything(None);

    gpu.device.context().bind_to_thread().unwrap();
    gpu.device.context().synchronize().unwrap();
    // SAFETY: made above, and not current.
    unsafe { sys::cuCtxDestroy_v2(other) }.result().unwrap();
    assert!(forward.judge(&of_forward.outputs(&gpu.stream, &forward).unwrap()).passed());
    let report = gradients.judge(&of_gradients.outputs(&gpu.stream, &gradients).unwrap());
    assert!(report.passed(), "{report}");
    assert!(of_sample.outcome(&gpu.stream) == sample.on_cpu(), "the quantiser's bytes are others");
}
