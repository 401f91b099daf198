//! The C ABI on a GPU: every row through it, what it refuses, and what it leaves alone.

use std::collections::HashSet;
use std::ffi::c_void;
use std::ptr::null_mut;

use hopper_attention::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut, result, sys};
use hopper_attention::{BackwardProblem, DType, KernelInfo, Layout, Mask, Slot, bf16};
use hopper_attention_capi::*;
use hopper_attention_tests::backward;
use hopper_attention_tests::blocks::{cases_of_row, kinds};
use hopper_attention_tests::c::{
    BackwardMemory, LengthsMemory, Memory, Plan, Refusal, backward_problem, checked, problem, tensor, without_batch,
};
use hopper_attention_tests::data::Poison;
use hopper_attention_tests::gpu::backward::OnDevice as OnDeviceBackward;
use hopper_attention_tests::gpu::{ByAddress, Gpu, OnDevice};
use hopper_attention_tests::packing::Packing;
use hopper_attention_tests::problems::Case;
use hopper_attention_tests::runner::Prepared;

use crate::packed::{of_random_lengths, packing_rows};
use crate::{mask_of, with_dtype};

/// A workspace by address, large enough for every plan here.
fn workspace(gpu: &Gpu) -> CudaSlice<u8> {
    gpu.stream.alloc_zeros(4096).expect("device memory")
}

fn address(gpu: &Gpu, slice: &mut CudaSlice<u8>) -> u64 {
    slice.device_ptr_mut(&gpu.stream).0
}

fn run(plan: &Plan, memory: &Memory, stream: *mut c_void) -> Result<(), Refusal> {
    // SAFETY: the tests' memory outlives the work, for which they wait; bad addresses are refused before they are used.
    unsafe { plan.run(memory, stream) }
}

#[test]
fn every_row_through_c() {
    let Some(gpu) = Gpu::open("every_row_through_c") else { return };
    for row in gpu.rows() {
        with_dtype!(row.dtype(), one_row(&gpu, &row));
    }
}

fn one_row<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    let case = Case::new(333, 417, row.head_dim_qk(), mask_of(row.mask())).head_dim_vo(row.head_dim_vo());
    let prepared = Prepared::<T>::new(&case.heads(2, 4, 2));
    let given = problem(&prepared.problem.to_builder().arch(row.arch()).build().unwrap());
    // SAFETY: a live struct.
    checked(unsafe { hattn_forward_supported(&given, 0) }).unwrap();
    let plan = Plan::new(&given, 0).unwrap();
    assert!(plan.describe().contains(&format!("{} fwd", row.arch())), "{}", plan.describe());
    let mut scratch = workspace(gpu);
    let on_device = OnDevice::new(&gpu.stream, &prepared);
    let mut memory = on_device.c_memory(&gpu.stream, &prepared);
    (memory.workspace, memory.workspace_bytes) = (address(gpu, &mut scratch), plan.workspace_bytes());
    run(&plan, &memory, gpu.stream.cu_stream().cast()).unwrap();
    let outputs = on_device.outputs(&gpu.stream, &prepared).unwrap();
    let report = prepared.judge(&outputs);
    assert!(report.passed(), "{}: {report}", plan.describe());
    on_device.check_inputs(&gpu.stream, &prepared).unwrap();
}

#[test]
fn every_backward_row_through_c() {
    let Some(gpu) = Gpu::open("every_backward_row_through_c") else { return };
    for row in gpu.backward_rows() {
        with_dtype!(row.dtype(), one_backward_row(&gpu, &row));
    }
}

fn one_backward_row<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    let case = Case::new(333, 417, row.head_dim_qk(), mask_of(row.mask())).heads(2, 4, 2);
    let prepared = backward::Prepared::<T>::new(&case);
    let forward = prepared.problem.forward().to_builder().arch(row.arch()).build().unwrap();
    for deterministic in [false, true] {
        let given = BackwardProblem::builder(&forward)
            .d_lse(prepared.problem.takes_d_lse())
            .deterministic(deterministic)
            .build()
            .unwrap();
        let given = backward_problem(&given);
        // SAFETY: a live struct.
        checked(unsafe { hattn_backward_supported(&given, 0) }).unwrap();
        let plan = Plan::new(&given, 0).unwrap();
        assert!(plan.describe().contains(&format!("{} bwd", row.arch())), "{}", plan.describe());
        let mut scratch: CudaSlice<u8> = gpu.stream.alloc_zeros(plan.workspace_bytes()).expect("device memory");
        let on_device = OnDeviceBackward::new(&gpu.stream, &prepared);
        let mut memory = on_device.c_memory(&gpu.stream, &prepared);
        let stream: *mut c_void = gpu.stream.cu_stream().cast();
        // SAFETY: the tests' memory outlives the work, for which they wait; too small a workspace is refused.
        let run = |memory: &BackwardMemory| unsafe { plan.run(memory, stream) };
        (memory.workspace, memory.workspace_bytes) = (address(gpu, &mut scratch), plan.workspace_bytes() - 1);
        assert_eq!(run(&memory).unwrap_err().0, HATTN_ERROR_WORKSPACE);
        assert!(on_device.untouched(&gpu.stream, &prepared), "{}: something was written", plan.describe());
        memory.workspace_bytes += 1;
        run(&memory).unwrap();
        let report = prepared.judge(&on_device.outputs(&gpu.stream, &prepared).unwrap());
        assert!(report.passed(), "{}: {report}", plan.describe());
        on_device.check_inputs(&gpu.stream, &prepared).unwrap();
    }
}

#[test]
fn lists_of_blocks_through_c() {
    let Some(gpu) = Gpu::open("lists_of_blocks_through_c") else { return };
    for row in [gpu.listed_rows(), gpu.listed_modified_rows()].concat() {
        with_dtype!(row.dtype(), one_listed_row(&gpu, &row));
    }
    for row in [gpu.listed_backward_rows(), gpu.listed_modified_backward_rows()].concat() {
        with_dtype!(row.dtype(), one_listed_backward_row(&gpu, &row));
    }
}

fn one_listed_row<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    for case in cases_of_row(row).take(kinds().count()) {
        let prepared = Prepared::<T>::new(&case);
        let plan = Plan::new(&problem(&prepared.problem), 0).unwrap();
        assert!(plan.describe().contains("blocks"), "{}", plan.describe());
        let mut scratch: CudaSlice<u8> = gpu.stream.alloc_zeros(plan.workspace_bytes()).expect("device memory");
        let on_device = OnDevice::new(&gpu.stream, &prepared);
        let mut memory = on_device.c_memory(&gpu.stream, &prepared);
        (memory.workspace, memory.workspace_bytes) = (address(gpu, &mut scratch), plan.workspace_bytes());
        let stream: *mut c_void = gpu.stream.cu_stream().cast();
        let (status, text) = run(&plan, &Memory { blocks: None, ..memory }, stream).unwrap_err();
        assert!(status == HATTN_ERROR_VALUE && text.contains("mask_block_cnt: missing"), "{text}");
        assert!(on_device.untouched(&gpu.stream, &prepared), "{}: something was written", plan.describe());
        run(&plan, &memory, stream).unwrap();
        let report = prepared.judge(&on_device.outputs(&gpu.stream, &prepared).unwrap());
        assert!(report.passed(), "{}: {report}", plan.describe());
        on_device.check_inputs(&gpu.stream, &prepared).unwrap();
    }
}

fn one_listed_backward_row<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    // The oracle of gradients is slow.
    for (i, case) in cases_of_row(row).take(kinds().count()).enumerate().step_by(2) {
        let prepared = backward::Prepared::<T>::new(&case);
        let options = BackwardProblem::builder(prepared.problem.forward()).d_lse(prepared.problem.takes_d_lse());
        let plan = Plan::new(&backward_problem(&options.deterministic(i % 4 == 0).build().unwrap()), 0).unwrap();
        assert!(plan.describe().contains("blocks"), "{}", plan.describe());
        let mut scratch: CudaSlice<u8> = gpu.stream.alloc_zeros(plan.workspace_bytes()).expect("device memory");
        let on_device = OnDeviceBackward::new(&gpu.stream, &prepared);
        let mut memory = on_device.c_memory(&gpu.stream, &prepared);
        (memory.workspace, memory.workspace_bytes) = (address(gpu, &mut scratch), plan.workspace_bytes());
        // SAFETY: the tests' memory outlives the work, for which they wait.
        unsafe { plan.run(&memory, gpu.stream.cu_stream().cast()) }.unwrap();
        let report = prepared.judge(&on_device.outputs(&gpu.stream, &prepared).unwrap());
        assert!(report.passed(), "{}: {report}", plan.describe());
        on_device.check_inputs(&gpu.stream, &prepared).unwrap();
    }
}

/// Packed sequences, with offsets and used lengths in the GPU's memory. C asks for no row. So each instruction set,
/// type, mask and head dim has one case.
#[test]
fn packed_sequences_through_c() {
    let Some(gpu) = Gpu::open("packed_sequences_through_c") else { return };
    let distinct = |rows: Vec<KernelInfo>| {
        let mut seen = HashSet::new();
        let kind = |row: &KernelInfo| (row.arch(), row.dtype(), row.mask(), row.head_dim_qk(), row.head_dim_vo());
        packing_rows(rows).into_iter().filter(move |row| seen.insert(kind(row)))
    };
    for row in distinct(gpu.rows()) {
        with_dtype!(row.dtype(), one_packed_row(&gpu, &row));
    }
    for row in distinct(gpu.backward_rows()) {
        with_dtype!(row.dtype(), one_packed_backward_row(&gpu, &row));
    }
}

/// The lists of a case in the GPU's memory.
fn uploaded(gpu: &Gpu, packing: &Packing) -> Vec<(Slot, CudaSlice<i32>)> {
    packing.lists().map(|(slot, list)| (slot, gpu.stream.clone_htod(list).expect("device memory"))).collect()
}

/// The lists by address.
fn lengths(gpu: &Gpu, lists: &[(Slot, CudaSlice<i32>)]) -> LengthsMemory {
    let of = |slot: Slot| {
        let (_, list) = lists.iter().find(|(of, _)| *of == slot)?;
        let layout = Layout::contiguous([list.len()]).expect("a short list");
        Some(tensor(list.device_ptr(&gpu.stream).0, DType::I32, 0, layout))
    };
    LengthsMemory {
        cu_seqlens: [Slot::CuSeqlensQ, Slot::CuSeqlensKv].map(of),
        seqused: [Slot::SequsedQ, Slot::SequsedKv].map(of),
    }
}

fn one_packed_row<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    let prepared = Prepared::<T>::new(&of_random_lengths(row));
    let given = problem(&prepared.problem.to_builder().arch(row.arch()).build().unwrap());
    let plan = Plan::new(&given, 0).unwrap();
    assert!(plan.describe().contains(&format!("{} fwd", row.arch())), "{}", plan.describe());
    let mut scratch = gpu.stream.alloc_zeros(plan.workspace_bytes().max(16)).expect("device memory");
    let on_device = OnDevice::new(&gpu.stream, &prepared);
    let all = on_device.c_memory(&gpu.stream, &prepared);
    let [q, k, v, o] = [all.q, all.k, all.v, all.o].map(without_batch);
    let memory = Memory {
        q,
        k,
        v,
        o,
        lse: all.lse.map(without_batch),
        workspace: address(gpu, &mut scratch),
        workspace_bytes: plan.workspace_bytes(),
        ..all
    };
    let lists = uploaded(gpu, &prepared.case.packing);
    let lengths = lengths(gpu, &lists);
    let stream: *mut c_void = gpu.stream.cu_stream().cast();
    // SAFETY: the memory outlives the work, for which `outputs` waits; a missing list is refused.
    let run = |lengths: &LengthsMemory| unsafe { plan.run_packed(&memory, lengths, stream) };
    let (status, text) = run(&LengthsMemory { seqused: [None; 2], ..lengths }).unwrap_err();
    assert!(status == HATTN_ERROR_VALUE && text.contains("seqused_kv: missing"), "{text}");
    assert!(on_device.untouched(&gpu.stream, &prepared), "{}: something was written", plan.describe());
    run(&lengths).unwrap();
    let report = prepared.judge(&on_device.outputs(&gpu.stream, &prepared).unwrap());
    assert!(report.passed(), "{}: {report}", plan.describe());
    on_device.check_inputs(&gpu.stream, &prepared).unwrap();
}

fn one_packed_backward_row<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    let prepared = backward::Prepared::<T>::new(&of_random_lengths(row));
    let forward = prepared.problem.forward().to_builder().arch(row.arch()).build().unwrap();
    let options = BackwardProblem::builder(&forward).d_lse(prepared.problem.takes_d_lse());
    let plan = Plan::new(&backward_problem(&options.deterministic(true).build().unwrap()), 0).unwrap();
    assert!(plan.describe().contains(&format!("{} bwd", row.arch())), "{}", plan.describe());
    let mut scratch = gpu.stream.alloc_zeros(plan.workspace_bytes().max(16)).expect("device memory");
    let on_device = OnDeviceBackward::new(&gpu.stream, &prepared);
    let all = on_device.c_memory(&gpu.stream, &prepared);
    let [q, k, v, o, d_o] = [all.q, all.k, all.v, all.o, all.d_o].map(without_batch);
    let [d_q, d_k, d_v] = [all.d_q, all.d_k, all.d_v].map(without_batch);
    let memory = BackwardMemory {
        q,
        k,
        v,
        o,
        lse: without_batch(all.lse),
        d_o,
        d_lse: all.d_lse.map(without_batch),
        d_q,
        d_k,
        d_v,
        workspace: address(gpu, &mut scratch),
        workspace_bytes: plan.workspace_bytes(),
        ..all
    };
    let lists = uploaded(gpu, &prepared.case.packing);
    // SAFETY: the memory outlives the work, for which `outputs` waits.
    unsafe { plan.run_packed(&memory, &lengths(gpu, &lists), gpu.stream.cu_stream().cast()) }.unwrap();
    let report = prepared.judge(&on_device.outputs(&gpu.stream, &prepared).unwrap());
    assert!(report.passed(), "{}: {report}", plan.describe());
    on_device.check_inputs(&gpu.stream, &prepared).unwrap();
}

fn case() -> Case {
    Case::new(70, 90, 64, Mask::causal()).heads(2, 4, 2)
}

#[test]
fn what_c_gets_wrong_is_refused_and_nothing_is_written() {
    let Some(gpu) = Gpu::open("what_c_gets_wrong_is_refused_and_nothing_is_written") else { return };
    // More tiles than two rounds, so that tiles are drawn and there is a workspace to get wrong.
    let prepared = Prepared::<bf16>::new(&case().heads(40, 8, 2));
    let plan = Plan::new(&problem(&prepared.problem), 0).unwrap();
    assert!(plan.workspace_bytes() > 0, "a causal plan draws tiles from a counter");
    let mut scratch = workspace(&gpu);
    let on_device = OnDevice::new(&gpu.stream, &prepared);
    let mut good = on_device.c_memory(&gpu.stream, &prepared);
    (good.workspace, good.workspace_bytes) = (address(&gpu, &mut scratch), scratch.len());
    let stream: *mut c_void = gpu.stream.cu_stream().cast();

    let refused = |edit: fn(&mut Memory), status: hattn_status, text: &str| {
        let mut memory = good;
        edit(&mut memory);
        let got = run(&plan, &memory, stream).unwrap_err();
        assert!(got.0 == status && got.1.contains(text), "{got:?}, expected {status}: {text}");
        assert!(on_device.untouched(&gpu.stream, &prepared), "{text}: something was written");
    };
    refused(|m| m.workspace_bytes = 3, HATTN_ERROR_WORKSPACE, "workspace: have 3 bytes, need 4");
    refused(|m| m.workspace = 0, HATTN_ERROR_WORKSPACE, "workspace: have 0 bytes, need 4");
    refused(|m| m.workspace += 4, HATTN_ERROR_LAYOUT, "allowed: multiples of 16 bytes");
    refused(|m| m.q.data = m.q.data.wrapping_byte_add(2), HATTN_ERROR_LAYOUT, "q: address");
    refused(|m| m.k.data = null_mut(), HATTN_ERROR_LAYOUT, "k: address 0x0");
    refused(|m| m.k.stride[1] += 1, HATTN_ERROR_LAYOUT, "in seqlen, of bf16 elements");
    refused(|m| m.q.device = HATTN_CPU, HATTN_ERROR_DEVICE, "q: on device cpu; allowed: device cuda:0");
    refused(|m| m.o.device = 1, HATTN_ERROR_DEVICE, "o: on device cuda:1; allowed: device cuda:0");
    refused(|m| m.o.dtype = HATTN_F32, HATTN_ERROR_DTYPE, "o: dtype f32; allowed: bf16, the problem's");
    refused(|m| m.v.shape[0] = 1, HATTN_ERROR_SHAPE, "v: shape [1, 90, 2, 64]");
    refused(|m| m.o.stride[0] = 0, HATTN_ERROR_LAYOUT, "o: shape [40, 70, 8, 64] with strides");
    refused(|m| m.lse = None, HATTN_ERROR_VALUE, "lse: missing");

    // What no kernel computes is refused when it is planned, and told beforehand.
    let given = problem(&prepared.problem);
    for wanted in [
        hattn_forward_problem { head_dim_qk: 264, head_dim_vo: 264, ..given },
        hattn_forward_problem { head_dim_qk: 60, ..given },
        hattn_forward_problem { head_dim_qk: 264, head_dim_vo: 264, arch: HATTN_ARCH_SM80, ..given },
        hattn_forward_problem { dtype: HATTN_F32, output: 0, ..given },
        hattn_forward_problem { arch: HATTN_ARCH_SM80, sm_margin: 1, ..given },
    ] {
        // SAFETY: a live struct.
        let told = checked(unsafe { hattn_forward_supported(&wanted, 0) }).unwrap_err();
        assert!(told.0 == HATTN_ERROR_UNSUPPORTED && told.1.contains("nearest"), "{told:?}");
        assert_eq!(Plan::new(&wanted, 0).unwrap_err(), told);
    }
    // A forward may be computed at head dims of which there are no gradients. The refusal says that it is about these.
    let forward = prepared.problem.to_builder().build().unwrap();
    let backward = backward_problem(&BackwardProblem::builder(&forward).build().unwrap());
    let wanted = hattn_backward_problem { head_dim_qk: 256, head_dim_vo: 256, ..backward };
    // SAFETY: a live struct.
    let told = checked(unsafe { hattn_backward_supported(&wanted, 0) }).unwrap_err();
    assert!(told.0 == HATTN_ERROR_UNSUPPORTED && told.1.contains("256 for a backward pass of bf16"), "{told:?}");
    assert_eq!(Plan::new(&wanted, 0).unwrap_err(), told);
    // And after all of this it still works.
    run(&plan, &good, stream).unwrap();
    assert!(prepared.judge(&on_device.outputs(&gpu.stream, &prepared).unwrap()).passed());
}

/// A second context on the same GPU is another address space: a stream of it must not be used.
#[test]
fn contexts_are_kept_apart_and_left_alone() {
    let Some(gpu) = Gpu::open("contexts_are_kept_apart_and_left_alone") else { return };
    let prepared = Prepared::<bf16>::new(&case());
    let mut scratch = workspace(&gpu);
    let on_device = OnDevice::new(&gpu.stream, &prepared);
    let mut memory = on_device.c_memory(&gpu.stream, &prepared);
    (memory.workspace, memory.workspace_bytes) = (address(&gpu, &mut scratch), scratch.len());
    gpu.stream.synchronize().unwrap();

    let current = || result::ctx::get_current().unwrap();
    let (mut other, mut foreign) = (null_mut(), null_mut());
    // SAFETY: places for the handles; the new context is current from then on.
    unsafe {
        sys::cuCtxCreate_v4(&raw mut other, null_mut(), 0, 0).result().unwrap();
        sys::cuStreamCreate(&raw mut foreign, 0).result().unwrap();
    }
    let before = current();
    assert_eq!(before, Some(other));
    // Planning and running leave the other context current.
    let plan = Plan::new(&problem(&prepared.problem), 0).unwrap();
    assert_eq!(current(), before);
    run(&plan, &memory, gpu.stream.cu_stream().cast()).unwrap();
    assert_eq!(current(), before);
    let (status, text) = run(&plan, &memory, foreign.cast()).unwrap_err();
    assert!(status == HATTN_ERROR_DEVICE && text.starts_with("stream: on another CUDA context"), "{text}");
    assert_eq!(current(), before);
    // The null stream is the plan's GPU's, whatever is current; and no context at all stays none.
    while current().is_some() {
        // SAFETY: contexts are a stack, from which this takes one; none being current is what is tested.
        unsafe { result::ctx::set_current(null_mut()) }.unwrap();
    }
    run(&plan, &memory, null_mut()).unwrap();
    assert_eq!(current(), None);
    gpu.device.context().bind_to_thread().unwrap();
    gpu.device.context().synchronize().unwrap();
    // SAFETY: made above, and not current; its stream goes with it.
    unsafe { sys::cuCtxDestroy_v2(other) }.result().unwrap();
    assert!(prepared.judge(&on_device.outputs(&gpu.stream, &prepared).unwrap()).passed());
}

/// What C captures: a stream that cudarc knows nothing of.
#[test]
fn a_run_is_captured_and_replayed() {
    let Some(gpu) = Gpu::open("a_run_is_captured_and_replayed") else { return };
    gpu.device.context().bind_to_thread().unwrap();
    let prepared = Prepared::<bf16>::new(&case());
    let plan = Plan::new(&problem(&prepared.problem), 0).unwrap();
    let mut scratch = workspace(&gpu);
    let mut on_device = OnDevice::new(&gpu.stream, &prepared);
    let mut memory = on_device.c_memory(&gpu.stream, &prepared);
    (memory.workspace, memory.workspace_bytes) = (address(&gpu, &mut scratch), scratch.len());
    gpu.stream.synchronize().unwrap();
    let ok = |status: sys::CUresult| status.result().unwrap();
    let (mut stream, mut graph, mut ready) = (null_mut(), null_mut(), null_mut());
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: handles that the driver made a line before, on the current context, used in their order.
    unsafe {
        ok(sys::cuStreamCreate(&raw mut stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32));
        ok(sys::cuStreamBeginCapture_v2(stream, mode));
        let captured = run(&plan, &memory, stream.cast());
        ok(sys::cuStreamEndCapture(stream, &raw mut graph));
        captured.unwrap();
        assert!(on_device.untouched(&gpu.stream, &prepared), "capturing wrote something");
        ok(sys::cuGraphInstantiateWithFlags(&raw mut ready, graph, 0));
        for _ in 0..2 {
            on_device.poison(&gpu.stream, &prepared);
            gpu.stream.synchronize().unwrap();
            ok(sys::cuGraphLaunch(ready, stream));
            ok(sys::cuStreamSynchronize(stream));
            assert!(prepared.judge(&on_device.outputs(&gpu.stream, &prepared).unwrap()).passed());
        }
        ok(sys::cuGraphExecDestroy(ready));
        ok(sys::cuGraphDestroy(graph));
        ok(sys::cuStreamDestroy_v2(stream));
    }
}

/// One plan, many threads, each with a stream, outputs and a workspace of its own.
#[test]
fn threads_share_a_plan() {
    let Some(gpu) = Gpu::open("threads_share_a_plan") else { return };
    let prepared = Prepared::<bf16>::new(&case());
    let plan = Plan::new(&problem(&prepared.problem), 0).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let stream = gpu.device.context().new_stream().unwrap();
                let mut scratch = stream.alloc_zeros::<u8>(4096).unwrap();
                let mut on_device = OnDevice::new(&stream, &prepared);
                for _ in 0..20 {
                    on_device.poison(&stream, &prepared);
                    let mut memory = on_device.c_memory(&stream, &prepared);
                    (memory.workspace, memory.workspace_bytes) = (scratch.device_ptr_mut(&stream).0, 4096);
                    run(&plan, &memory, stream.cu_stream().cast()).unwrap();
                    assert!(prepared.judge(&on_device.outputs(&stream, &prepared).unwrap()).passed());
                }
            });
        }
    });
}
