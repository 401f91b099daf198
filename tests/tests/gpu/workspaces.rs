//! Workspaces of the caller's own memory, such as a part of a pool.

use std::fmt::Debug;

use hopper_attention::cudarc::driver::{CudaContext, CudaSlice};
use hopper_attention::{
    DType, Device, Dims, Error, ForwardProblem, Mask, Quantizer, Result, Scaling, Stream, Workspace, bf16,
};
use hopper_attention_tests::backward;
use hopper_attention_tests::gpu::quantize::{Kind, Like, OnDevice as OnDeviceQuantize, Sample};
use hopper_attention_tests::gpu::{self, Gpu, OnDevice};
use hopper_attention_tests::layouts::Placement;
use hopper_attention_tests::problems::Case;
use hopper_attention_tests::runner::Prepared;

/// What the pool holds before: a kernel must not care, and write nothing beside its part.
const FILL: u8 = 0xa5;
/// Bytes of the pool before the part that is lent, and after it.
const BAND: usize = 256;

fn pool(gpu: &Gpu, bytes: usize) -> CudaSlice<u8> {
    gpu.stream.clone_htod(&vec![FILL; bytes + 2 * BAND]).expect("device memory")
}

/// Runs with memory of several kinds: `run` gives what was written, or looks that nothing was.
fn lent<R: Debug>(
    gpu: &Gpu,
    bytes: usize,
    same: impl Fn(&R, &R) -> bool,
    mut run: impl FnMut(&mut Workspace<'_>) -> Result<R>,
) {
    assert!(bytes > 0, "a plan that needs a workspace");
    let own = run(&mut Workspace::alloc(&gpu.lane(), bytes).unwrap()).unwrap();
    let mut pool = pool(gpu, bytes);
    for end in [BAND + bytes, 2 * BAND + bytes] {
        let mut part = Workspace::cuda(pool.slice_mut(BAND..end));
        assert_eq!(part.bytes(), end - BAND);
        assert!(same(&run(&mut part).unwrap(), &own), "{end}: other bits");
        // Another run with the same part.
        assert!(same(&run(&mut part).unwrap(), &own), "{end}: other bits the second time");
        let all = gpu.stream.clone_dtoh(&pool).unwrap();
        let (before, after) = (&all[..BAND], &all[BAND + bytes..]);
        assert!(before.iter().chain(after).all(|&byte| byte == FILL), "{end}: written beside what was lent");
    }

    for off in [1, 4, 8, 15] {
        let error = run(&mut Workspace::cuda(pool.slice_mut(BAND + off..BAND + off + bytes))).unwrap_err();
        assert!(matches!(error, Error::Layout { tensor: "workspace", .. }), "{error}");
        assert!(error.to_string().ends_with("allowed: multiples of 16 bytes"), "{error}");
    }
    let error = run(&mut Workspace::cuda(pool.slice_mut(BAND..BAND + bytes - 1))).unwrap_err();
    assert_eq!(error, Error::Workspace { need: bytes, have: bytes - 1 });
    let error = run(&mut Workspace::cuda(pool.slice_mut(..0))).unwrap_err();
    assert_eq!(error, Error::Workspace { need: bytes, have: 0 });
    // Memory of the host, and of another context object, whose frees would not be waited for.
    let error = run(&mut Workspace::host(&mut vec![0; bytes])).unwrap_err();
    assert!(matches!(error, Error::Device { what: "workspace", .. }), "{error}");
    let elsewhere = CudaContext::new(0).unwrap().default_stream();
    let mut foreign = elsewhere.alloc_zeros::<u8>(bytes).unwrap();
    let error = run(&mut Workspace::cuda(foreign.slice_mut(..))).unwrap_err();
    assert!(matches!(error, Error::Device { what: "workspace", .. }), "{error}");
    assert!(same(&run(&mut Workspace::cuda(pool.slice_mut(BAND..))).unwrap(), &own), "after the refusals");
}

#[test]
fn a_forward_pass_takes_the_callers_memory() {
    let Some(gpu) = Gpu::open("a_forward_pass_takes_the_callers_memory") else { return };
    // Many tiles for each multiprocessor under a mask, which are drawn from a counter; and few queries on many keys, where clusters
    // sum a tile.
    let drawn = Case::new(300, 333, 64, Mask::causal()).heads(40, 8, 2);
    let summed = Case::new(7, 40000, 128, Mask::Full).heads(1, 2, 1);
    for case in [drawn, summed] {
        let prepared = Prepared::<bf16>::new(&case);
        let plan = prepared.problem.plan(&Device::Cuda(gpu.device.clone())).unwrap();
        let mut on_device = OnDevice::new(&gpu.stream, &prepared);
        lent(&gpu, plan.workspace_bytes(), gpu::same_bits, |workspace| {
            on_device.poison(&gpu.stream, &prepared);
            let ran = plan.run(&gpu.lane(), workspace, on_device.args(&prepared));
            assert!(ran.is_ok() || on_device.untouched(&gpu.stream, &prepared), "a refused run wrote something");
            ran.map(|()| on_device.outputs(&gpu.stream, &prepared).unwrap())
        });
    }
}

#[test]
fn a_backward_pass_takes_the_callers_memory() {
    let Some(gpu) = Gpu::open("a_backward_pass_takes_the_callers_memory") else { return };
    let prepared = backward::Prepared::<bf16>::new(&Case::new(200, 333, 128, Mask::causal()).heads(2, 4, 2));
    let problem = prepared.problem.to_builder().deterministic(true).build().unwrap();
    let plan = problem.plan(&Device::Cuda(gpu.device.clone())).unwrap();
    let mut on_device = gpu::backward::OnDevice::new(&gpu.stream, &prepared);
    let same = |a: &_, b: &_| gpu::backward::same_bits(a, b) == [true; 2];
    lent(&gpu, plan.workspace_bytes(), same, |workspace| {
        on_device.poison(&gpu.stream, &prepared);
        let ran = plan.run(&gpu.lane(), workspace, on_device.args(&prepared));
        assert!(ran.is_ok() || on_device.untouched(&gpu.stream, &prepared), "a refused run wrote something");
        ran.map(|()| on_device.outputs(&gpu.stream, &prepared).unwrap())
    });
}

#[test]
fn a_quantiser_takes_the_callers_memory() {
    let Some(gpu) = Gpu::open("a_quantiser_takes_the_callers_memory") else { return };
    let dims = Dims::new(2, 700, 4, 64).with_heads_kv(2);
    for scaling in Scaling::ALL {
        let problem = ForwardProblem::builder(DType::E4M3, dims).scaling(scaling).build().unwrap();
        let quantizer = Quantizer::builder(&problem, DType::BF16).hadamard(3).build().unwrap();
        let kind = Kind { values: Placement::Bshd, stored: Placement::Bshd, given: false, like: Like::Uneven };
        let sample = Sample::<bf16>::new(quantizer, [Some(kind); 3], true, 4);
        let plan = sample.quantizer.plan(&Device::Cuda(gpu.device.clone())).unwrap();
        let mut on_device = OnDeviceQuantize::new(&gpu.stream, &sample);
        lent(
            &gpu,
            plan.workspace_bytes(),
            |a, b| a == b,
            |workspace| {
                on_device.write(&gpu.stream, &sample);
                let before = on_device.outcome(&gpu.stream);
                let ran = on_device.run(&gpu.stream, workspace, &plan, &sample);
                let after = on_device.outcome(&gpu.stream);
                assert_eq!(
                    ran.is_err(),
                    after == before,
                    "{ran:?}: a refused run wrote something, or another one nothing"
                );
                ran.map(|()| after)
            },
        );
    }
}

/// A plan that needs no workspace takes any of the right place, aligned or not.
#[test]
fn what_is_not_needed_is_not_looked_at() {
    let Some(gpu) = Gpu::open("what_is_not_needed_is_not_looked_at") else { return };
    let prepared = Prepared::<bf16>::new(&Case::new(70, 90, 64, Mask::Full));
    let device = Device::Cuda(gpu.device.clone());
    let plan = prepared.problem.plan(&device).unwrap();
    assert_eq!(plan.workspace_bytes(), 0, "{plan}");
    let mut on_device = OnDevice::new(&gpu.stream, &prepared);
    let mut pool = pool(&gpu, 64);
    for start in [0, 3] {
        let mut workspace = Workspace::cuda(pool.slice_mut(start..));
        let outputs = on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
        assert!(prepared.judge(&outputs).passed());
    }
    // The CPU's plan takes none that is on a GPU.
    let on_cpu = prepared.problem.plan(&Device::cpu()).unwrap();
    let mut outputs = prepared.outputs();
    let mut workspace = Workspace::cuda(pool.slice_mut(..));
    let error = on_cpu.run(&Stream::Cpu, &mut workspace, prepared.host_args(&mut outputs)).unwrap_err();
    assert!(matches!(error, Error::Device { what: "workspace", .. }), "{error}");
}
