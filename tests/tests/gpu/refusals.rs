//! What must be refused is refused by name, with nothing written.

use hopper_attention::cudarc::driver::CudaContext;
use hopper_attention::{
    BackwardProblem, CudaDevice, DType, Device, Error, ForwardProblem, KernelInfo, Layout, Mask, Slot, Stream,
    TensorMut, TensorRef, Workspace, bf16, f16,
};
use hopper_attention_tests::gpu::{Gpu, OnDevice};
use hopper_attention_tests::problems::{Case, fitting};
use hopper_attention_tests::runner::Prepared;

use crate::mask_of;

fn case() -> Case {
    Case::new(70, 90, 64, Mask::causal()).heads(2, 4, 2)
}

#[test]
fn wrong_arguments_are_refused_and_nothing_is_written() {
    let Some(gpu) = Gpu::open("wrong_arguments_are_refused_and_nothing_is_written") else { return };
    let prepared = Prepared::<bf16>::new(&case());
    let device = Device::Cuda(gpu.device.clone());
    let plan = prepared.problem.plan(&device).unwrap();
    let lane = gpu.lane();
    let mut workspace = Workspace::alloc(&lane, plan.workspace_bytes()).unwrap();
    let mut on_device = OnDevice::new(&gpu.stream, &prepared);
    let stream = &gpu.stream;

    // Another context object of the same GPU: its streams would not be waited for.
    let elsewhere = CudaContext::new(0).unwrap();
    let other = Stream::Cuda(elsewhere.default_stream());
    let error = plan.run(&other, &mut workspace, on_device.args(&prepared)).unwrap_err();
    assert!(matches!(error, Error::Device { .. }), "{error}");

    // The CPU's stream, the CPU's plan, tensors of the host.
    let error = plan.run(&Stream::Cpu, &mut workspace, on_device.args(&prepared)).unwrap_err();
    assert!(matches!(error, Error::Device { .. }), "{error}");
    let on_cpu = prepared.problem.plan(&Device::Cpu).unwrap();
    let error = on_cpu.run(&lane, &mut workspace, on_device.args(&prepared)).unwrap_err();
    assert!(matches!(error, Error::Device { .. }), "{error}");
    let error = on_cpu.run(&Stream::Cpu, &mut workspace, on_device.args(&prepared)).unwrap_err();
    assert!(matches!(error, Error::Device { .. }), "{error}");
    let q = prepared.q.clone();
    let args = on_device.args(&prepared).read(Slot::Q, TensorRef::host(q.inner(), q.layout()).unwrap());
    let error = plan.run(&lane, &mut workspace, args).unwrap_err();
    assert!(matches!(error, Error::Device { what: "q", .. }), "{error}");

    // The LSE missing, and given though not asked for.
    let without_lse = Prepared::<bf16>::new(&Case { lse: false, ..case() });
    let mut memory_without = OnDevice::new(stream, &without_lse);
    let error = plan.run(&lane, &mut workspace, memory_without.args(&without_lse)).unwrap_err();
    assert!(matches!(error, Error::Value { what: "lse", .. }), "{error}");
    let without = without_lse.problem.plan(&device).unwrap();
    let error = without.run(&lane, &mut workspace, on_device.args(&prepared)).unwrap_err();
    assert!(matches!(error, Error::Value { what: "lse", .. }), "{error}");

    // Another shape, another type.
    let dims = prepared.problem.dims().with_seqlen_kv(89);
    let shorter = ForwardProblem::builder(DType::BF16, dims).lse(true).build().unwrap().plan(&device).unwrap();
    let error = shorter.run(&lane, &mut workspace, on_device.args(&prepared)).unwrap_err();
    assert!(matches!(error, Error::Shape { tensor: "k", .. }), "{error}");
    let half = Prepared::<f16>::new(&case()).problem.plan(&device).unwrap();
    let error = half.run(&lane, &mut workspace, on_device.args(&prepared)).unwrap_err();
    assert!(matches!(error, Error::Dtype { .. }), "{error}");

    // A base that is not a multiple of 16 bytes; a stride that is not; too little memory; an output that overlaps itself.
    let shape = prepared.problem.q_shape();
    let layout = Layout::contiguous(shape).unwrap();
    let memory = stream.alloc_zeros::<bf16>(layout.span() + 64).unwrap();
    let off_by_one = TensorRef::cuda(memory.slice(1..), layout).unwrap();
    let args = on_device.args(&prepared).read(Slot::Q, off_by_one);
    let error = plan.run(&lane, &mut workspace, args).unwrap_err();
    assert!(matches!(error, Error::Layout { tensor: "q", .. }), "{error}");
    let [s_b, s_s, s_h, _] = layout.stride();
    let odd = Layout::with_strides(shape, [s_b + 4, s_s, s_h, 1]).unwrap();
    let odd = TensorRef::cuda(memory.slice(..), odd).unwrap();
    let args = on_device.args(&prepared).read(Slot::Q, odd);
    let error = plan.run(&lane, &mut workspace, args).unwrap_err();
    assert!(matches!(error, Error::Layout { tensor: "q", .. }), "{error}");
    assert!(matches!(TensorRef::cuda(memory.slice(..layout.span() - 1), layout), Err(Error::Layout { .. })));
    let mut overlapping = stream.alloc_zeros::<bf16>(layout.span()).unwrap();
    let twice = Layout::with_strides(shape, [0, s_s, s_h, 1]).unwrap();
    assert!(matches!(TensorMut::cuda(overlapping.slice_mut(..), twice), Err(Error::Layout { .. })));

    // A workspace that is too small, where one is needed at all.
    if plan.workspace_bytes() > 0 {
        let mut small = Workspace::alloc(&lane, plan.workspace_bytes() - 1).unwrap();
        let error = plan.run(&lane, &mut small, on_device.args(&prepared)).unwrap_err();
        assert!(matches!(error, Error::Workspace { .. }), "{error}");
    }

    stream.synchronize().unwrap();
    assert!(on_device.untouched(stream, &prepared), "a refused call wrote something");
    // After all these refusals a correct call works.
    let outputs = on_device.run(stream, &mut workspace, &plan, &prepared).unwrap();
    let report = prepared.judge(&outputs);
    assert!(report.passed(), "{report}");
}

#[test]
fn problems_without_a_kernel_are_refused_by_name() {
    let Some(gpu) = Gpu::open("problems_without_a_kernel_are_refused_by_name") else { return };
    let device = Device::Cuda(gpu.device.clone());
    let largest = gpu.rows().iter().map(|row| row.head_dim_qk()).max().unwrap();
    let of = |dtype, head_dim| Case::new(64, 64, head_dim, Mask::Full).problem(dtype).plan(&device);
    for refused in [of(DType::BF16, 12), of(DType::BF16, largest + 8), of(DType::F32, 64), of(DType::F16, 1)] {
        let error = refused.unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("nearest: "), "{error}");
    }
}

/// Where one instruction set is asked for, no other one answers: gradients that it has none of are refused.
#[test]
fn gradients_of_another_instruction_set_are_refused() {
    let Some(gpu) = Gpu::open("gradients_of_another_instruction_set_are_refused") else { return };
    let device = Device::Cuda(gpu.device.clone());
    for row in gpu.rows() {
        let case = Case::new(64, 64, row.head_dim_qk(), Mask::Full).head_dim_vo(row.head_dim_vo());
        let problem = case.options(row.dtype()).arch(row.arch()).build().unwrap();
        let planned = BackwardProblem::builder(&problem).build().unwrap().plan(&device);
        let of_arch: Vec<_> = gpu.backward_rows().into_iter().filter(|other| other.arch() == row.arch()).collect();
        let refusal = match (of_arch.is_empty(), fitting(&of_arch, vec![case]).is_empty()) {
            (true, _) => format!("unsupported: backward {} kernels", row.arch()),
            (false, true) => format!("unsupported: head_dim_qk {}", row.head_dim_qk()),
            (false, false) => {
                assert_eq!(planned.unwrap().kernel().unwrap().arch(), row.arch());
                continue;
            }
        };
        let error = planned.unwrap_err().to_string();
        assert!(error.starts_with(&refusal) && error.contains("backward"), "{error}");
    }
}

/// A launch goes by a row's index in the table of its pass: a row of the other pass is refused even where its numbers fit. (A
/// row of no table cannot be made outside of the crate, whose unit tests forge some.)
#[test]
fn rows_of_the_other_pass_are_refused() {
    let Some(gpu) = Gpu::open("rows_of_the_other_pass_are_refused") else { return };
    let problem = |row: &KernelInfo| {
        let case = Case::new(333, 417, row.head_dim_qk(), mask_of(row.mask())).head_dim_vo(row.head_dim_vo());
        case.heads(2, 4, 2).options(row.dtype()).arch(row.arch()).build().unwrap()
    };
    let refusal = |row: &KernelInfo, table: &str| {
        Some(Error::Value { what: "row", got: row.to_string(), allowed: format!("a row of {table}") })
    };
    for row in gpu.rows() {
        let planned = BackwardProblem::builder(&problem(&row)).build().unwrap().plan_with_row(&gpu.device, &row);
        assert_eq!(planned.err(), refusal(&row, "backward_kernels()"));
    }
    for row in gpu.backward_rows() {
        let planned = problem(&row).plan_with_row(&gpu.device, &row);
        assert_eq!(planned.err(), refusal(&row, "kernels()"));
    }
}

/// An empty problem is no launch, and writes nothing.
#[test]
fn empty_problems_touch_nothing() {
    let Some(gpu) = Gpu::open("empty_problems_touch_nothing") else { return };
    let device = Device::Cuda(CudaDevice::from_context(gpu.device.context().clone()).unwrap());
    for case in [Case::new(0, 5, 64, Mask::Full), Case::new(5, 5, 64, Mask::causal()).heads(0, 2, 1)] {
        let prepared = Prepared::<bf16>::new(&case);
        let plan = prepared.problem.plan(&device).unwrap();
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        let mut on_device = OnDevice::new(&gpu.stream, &prepared);
        plan.run(&gpu.lane(), &mut workspace, on_device.args(&prepared)).unwrap();
        assert!(on_device.untouched(&gpu.stream, &prepared), "{case}");
    }
}
