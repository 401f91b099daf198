//! Block-sparse masks on a GPU: every row with lists, both passes, wrong contents, and what is refused.

use hopper_attention::reference::{Expected, Modifiers};
use hopper_attention::{
    Arch, BackwardProblem, Bias, DType, Device, KernelInfo, Lengths, Mask, MaskClass, Workspace, bf16,
};
use hopper_attention_tests::backward;
use hopper_attention_tests::blocks::{Blocks, cases, cases_of_row, modified_cases, spoil};
use hopper_attention_tests::data::Poison;
use hopper_attention_tests::gpu::backward::{OnDevice as GradientsOnDevice, same_bits as same_gradients};
use hopper_attention_tests::gpu::{Gpu, OnDevice, same_bits};
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::runner::Prepared;

use crate::by_type::{BACKWARD, FORWARD, take};
use crate::with_dtype;

#[test]
fn every_listed_row_keeps_the_tolerance() {
    let Some(gpu) = Gpu::open("every_listed_row_keeps_the_tolerance") else { return };
    take(&gpu, &gpu.listed_rows(), &cases(Grid::from_env()), "forward with lists of blocks", FORWARD);
}

/// Each second case is deterministic. The oracle of the gradients is slow: a third of the cases.
#[test]
fn every_listed_backward_row_keeps_the_tolerance() {
    let Some(gpu) = Gpu::open("every_listed_backward_row_keeps_the_tolerance") else { return };
    let cases: Vec<Case> = cases(Grid::from_env()).into_iter().step_by(3).collect();
    take(&gpu, &gpu.listed_backward_rows(), &cases, "backward with lists of blocks", BACKWARD);
}

/// Softcap, ALiBi, dropout, maximum logits and sinks, alone and together. A third of the cases, by a number that shares no divisor
/// with what they take turns in.
#[test]
fn every_listed_row_takes_modifiers() {
    let Some(gpu) = Gpu::open("every_listed_row_takes_modifiers") else { return };
    let cases: Vec<Case> = modified_cases(Grid::from_env()).into_iter().skip(1).step_by(3).collect();
    take(&gpu, &gpu.listed_modified_rows(), &cases, "forward with lists of blocks and modifiers", FORWARD);
}

#[test]
fn every_listed_backward_row_takes_modifiers() {
    let Some(gpu) = Gpu::open("every_listed_backward_row_takes_modifiers") else { return };
    // Gradients have nothing to do with maximum logits.
    let cases = modified_cases(Grid::from_env()).into_iter().map(|case| case.max_logits(false));
    let modified = |case: &Case| case.softcap != 0.0 || !case.alibi.is_none() || case.dropout != 0.0;
    let cases: Vec<Case> = cases.filter(modified).skip(2).step_by(5).collect();
    take(&gpu, &gpu.listed_modified_backward_rows(), &cases, "backward with lists of blocks and modifiers", BACKWARD);
}

/// Whatever the lists hold, nothing outside of the tensors is read or written, and the rule for wrong contents holds. (With
/// compute-sanitizer: memcheck sees what is read.)
#[test]
fn wrong_contents_of_lists_follow_the_rule() {
    let Some(gpu) = Gpu::open("wrong_contents_of_lists_follow_the_rule") else { return };
    for row in [gpu.listed_rows(), gpu.listed_modified_rows()].concat() {
        with_dtype!(row.dtype(), spoiled(&gpu, &row));
    }
    for row in [gpu.listed_backward_rows(), gpu.listed_modified_backward_rows()].concat() {
        with_dtype!(row.dtype(), spoiled_backward(&gpu, &row));
    }
}

fn spoiled_cases(row: &KernelInfo) -> Vec<Case> {
    cases_of_row(row).take(Grid::from_env().pick(4, 12)).collect()
}

fn spoiled<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    for case in spoiled_cases(row) {
        let mut prepared = Prepared::<T>::new(&case);
        let lists = prepared.blocks.as_mut().unwrap();
        spoil(lists, case.seed);
        let modifiers = Modifiers { blocks: Some(lists.borrowed()), ..Modifiers::default() };
        let inputs = [&prepared.q.tensor(), &prepared.k.tensor(), &prepared.v.tensor()];
        let expected = Expected::with(&prepared.problem, &Lengths::default(), inputs, modifiers, 1.0, None);
        prepared.expected = expected.unwrap().into();
        let plan = prepared.problem.plan_with_row(&gpu.device, row).unwrap();
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        let mut on_device = OnDevice::new(&gpu.stream, &prepared);
        let outputs = on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
        let report = prepared.judge(&outputs);
        assert!(report.passed(), "{row}, {case}: {report}");
        on_device.check_inputs(&gpu.stream, &prepared).unwrap();
    }
}

fn spoiled_backward<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    for case in spoiled_cases(row).into_iter().step_by(2) {
        let mut lists = case.block_lists().unwrap();
        spoil(&mut lists, case.seed);
        // O and the LSE are made of these lists, too.
        let prepared = backward::Prepared::<T>::with_lists(&case, Some(lists));
        let plan = prepared.problem.plan_with_row(&gpu.device, row).unwrap();
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        let mut on_device = GradientsOnDevice::new(&gpu.stream, &prepared);
        let outputs = on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
        let report = prepared.judge(&outputs);
        assert!(report.passed(), "{row}, {case}: {report}");
        on_device.check_inputs(&gpu.stream, &prepared).unwrap();
    }
}

/// A forward pass has the same bits in every run, and so have deterministic gradients.
#[test]
fn passes_with_lists_repeat() {
    let Some(gpu) = Gpu::open("passes_with_lists_repeat") else { return };
    for (blocks, dropout) in [(Blocks::Random(50), 0.0), (Blocks::Documents, 0.3), (Blocks::All, 0.0)] {
        let case = Case::new(2000, 2500, 128, Mask::causal()).heads(2, 8, 2).blocks(blocks).dropout(dropout);
        let prepared = Prepared::<bf16>::new(&case);
        let plan = prepared.problem.plan(&Device::Cuda(gpu.device.clone())).unwrap();
        assert_eq!(plan.kernel().unwrap().mask(), MaskClass::Blocks);
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        let mut on_device = OnDevice::new(&gpu.stream, &prepared);
        let mut run = || on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
        let first = run();
        assert!((0..5).all(|_| same_bits(&run(), &first)), "{case}");

        let prepared = backward::Prepared::<bf16>::new(&case);
        let problem = prepared.problem.to_builder().deterministic(true).build().unwrap();
        let plan = problem.plan(&Device::Cuda(gpu.device.clone())).unwrap();
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        let mut on_device = GradientsOnDevice::new(&gpu.stream, &prepared);
        let mut run = || on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
        let first = run();
        let report = prepared.judge(&first);
        assert!(report.passed(), "{case}: {report}");
        assert!((0..10).all(|_| same_gradients(&run(), &first) == [true; 2]), "{case}");
    }
}

/// Instruction sets without kernels for lists, and a bias beside lists.
#[test]
fn sm80_kernels_and_a_bias_are_refused_by_name() {
    let Some(gpu) = Gpu::open("sm80_kernels_and_a_bias_are_refused_by_name") else { return };
    let device = Device::Cuda(gpu.device.clone());
    let options = Case::new(300, 300, 64, Mask::causal()).blocks(Blocks::All).options(DType::BF16);
    let refused = |options: hopper_attention::ForwardProblemBuilder| {
        let problem = options.build().unwrap();
        let backward = BackwardProblem::builder(&problem).build().unwrap();
        [problem.plan(&device).unwrap_err().to_string(), backward.plan(&device).unwrap_err().to_string()]
    };
    for text in refused(options.clone().arch(Arch::Sm80)) {
        assert!(text.starts_with("unsupported: mask class blocks for bf16"), "{text}");
    }
    for text in refused(options.bias(Some(Bias::new(DType::F32)))) {
        assert!(text.starts_with("unsupported: a bias with") && text.contains("blocks"), "{text}");
    }
}
