//! What the bits of a sequence do not depend on: values of its neighbours, and whether it lies in a batch at all. And batches at the
//! edges: one long sequence among many short ones, and none that has a row. `tests/tests/cpu/sequences.rs` has the same lists.

use hopper_attention::internal::{plan_backward_with_shares, plan_with_shares};
use hopper_attention::{BackwardPlan, DType, ForwardPlan, KernelInfo, MaskClass, Scaling, Workspace, bf16};
use hopper_attention_tests::backward;
use hopper_attention_tests::data::{Garbage, Poison};
use hopper_attention_tests::fp8::{Operands, Output, for_row};
use hopper_attention_tests::gpu::fp8::OnDevice as Fp8OnDevice;
use hopper_attention_tests::gpu::{Gpu, OnDevice, backward as of_backward, planned};
use hopper_attention_tests::packed::{all_empty, one_long_among_short};
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::runner::Prepared;
use hopper_attention_tests::sequences::{OfSequences, fp8_bits, fp8_garbage, like_dense, neighbours};

use crate::by_type::{judged, judged_backward};
use crate::packed::packing_rows;
use crate::{mask_of, with_dtype};

/// A case that a row computes: alone on its tiles, and with gradients in one order, so that bits are the same in every run.
trait OnGpu: OfSequences {
    type Plan;

    /// `None` where the row is for other problems, or where CTAs would share its tiles.
    fn planned(&self, gpu: &Gpu, row: &KernelInfo) -> Option<Self::Plan>;

    fn run(&self, gpu: &Gpu, plan: &Self::Plan) -> Self::Outputs;
}

impl<T: Poison> OnGpu for Prepared<T> {
    type Plan = ForwardPlan;

    fn planned(&self, gpu: &Gpu, row: &KernelInfo) -> Option<ForwardPlan> {
        planned(plan_with_shares(&self.problem, &gpu.device, row, 1), row, &self.case)
    }

    fn run(&self, gpu: &Gpu, plan: &ForwardPlan) -> Self::Outputs {
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        OnDevice::new(&gpu.stream, self).run(&gpu.stream, &mut workspace, plan, self).unwrap()
    }
}

impl<T: Poison> OnGpu for backward::Prepared<T> {
    type Plan = BackwardPlan;

    fn planned(&self, gpu: &Gpu, row: &KernelInfo) -> Option<BackwardPlan> {
        let problem = self.problem.to_builder().deterministic(true).build().unwrap();
        let plan = planned(plan_backward_with_shares(&problem, &gpu.device, row, 1, false), row, &self.case)?;
        (!plan.to_string().contains(" shares")).then_some(plan)
    }

    fn run(&self, gpu: &Gpu, plan: &BackwardPlan) -> Self::Outputs {
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        of_backward::OnDevice::new(&gpu.stream, self).run(&gpu.stream, &mut workspace, plan, self).unwrap()
    }
}

/// Whether the row took the case.
fn beside_garbage<P: OnGpu>(gpu: &Gpu, row: &KernelInfo, clean: &P, own: usize) -> bool {
    let Some(plan) = clean.planned(gpu, row) else { return false };
    let outputs = clean.run(gpu, &plan);
    let wrong = clean.verdict(&outputs).wrong;
    assert!(wrong.is_none(), "{row}, {}: {wrong:?}", clean.case());
    for garbage in Garbage::ALL {
        let spoiled = clean.beside(own, garbage);
        let beside = spoiled.run(gpu, &plan);
        for ((name, got), (_, want)) in spoiled.bits(&beside, own).iter().zip(&clean.bits(&outputs, own)) {
            let same = !want.is_empty() && got == want;
            assert!(same, "{row}, {}: {name} of sequence {own} beside {garbage:?}", clean.case());
        }
        // The others are another result, so that the garbage was there.
        assert!(spoiled.bits_of_others(&beside, own) != clean.bits_of_others(&outputs, own), "{row}, {}", clean.case());
    }
    true
}

/// The cases of a row, of which it has to take one at least.
fn each_neighbour<T: Poison>(gpu: &Gpu, row: &KernelInfo, backward: bool) {
    let cases = neighbours(row.head_dim_qk(), row.head_dim_vo(), mask_of(row.mask()));
    let taken = cases.iter().filter(|(case, own)| match backward {
        true => beside_garbage(gpu, row, &backward::Prepared::<T>::new(case), *own),
        false => beside_garbage(gpu, row, &Prepared::<T>::new(case), *own),
    });
    assert!(taken.count() > 0, "{row} took no case");
}

#[test]
fn garbage_in_the_other_sequences_changes_no_bit() {
    let Some(gpu) = Gpu::open("garbage_in_the_other_sequences_changes_no_bit") else { return };
    for row in packing_rows(gpu.rows()) {
        with_dtype!(row.dtype(), each_neighbour(&gpu, &row, false));
    }
    for row in packing_rows(gpu.backward_rows()) {
        with_dtype!(row.dtype(), each_neighbour(&gpu, &row, true));
    }
}

/// A problem of e4m3 operands for a row, and its plan: of tiles that no CTAs share.
fn fp8_planned(gpu: &Gpu, row: &KernelInfo, case: &Case, scaling: Scaling) -> Option<(Operands, ForwardPlan)> {
    let problem = case.options(DType::E4M3).lse(true).scaling(scaling).build().unwrap();
    let operands = Operands::of_case(case, &for_row(problem, row), None);
    let plan = planned(plan_with_shares(operands.problem(), &gpu.device, row, 1), row, case)?;
    Some((operands, plan))
}

fn fp8_run(gpu: &Gpu, operands: &Operands, plan: &ForwardPlan) -> Output {
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let on_device = Fp8OnDevice::new(&gpu.stream, operands);
    on_device.run::<bf16>(&gpu.stream, &mut workspace, plan, None).unwrap().output(plan.problem())
}

/// The same of e4m3 operands, and of their factors.
#[test]
fn garbage_in_the_other_sequences_changes_no_bit_of_e4m3() {
    let Some(gpu) = Gpu::open("garbage_in_the_other_sequences_changes_no_bit_of_e4m3") else { return };
    for row in packing_rows(gpu.fp8_rows()) {
        let cases = neighbours(row.head_dim_qk(), row.head_dim_vo(), mask_of(row.mask()));
        let mut taken = 0;
        for ((case, own), scaling) in cases.iter().flat_map(|case| Scaling::ALL.map(|scaling| (case, scaling))) {
            let Some((clean, plan)) = fp8_planned(&gpu, &row, case, scaling) else { continue };
            let output = fp8_run(&gpu, &clean, &plan);
            let report = clean.expected().check(&output.0, Some(&output.1)).unwrap();
            assert!(report.passed(), "{row}, {case} {scaling}: {report}");
            for (element, factor) in fp8_garbage(true) {
                let spoiled = clean.beside(*own, element, factor);
                let beside = fp8_run(&gpu, &spoiled, &plan);
                let same = fp8_bits(&spoiled, &beside, *own) == fp8_bits(&clean, &output, *own);
                assert!(same, "{row}, {case} {scaling}: sequence {own} beside {element:?}, {factor}");
            }
            taken += 1;
        }
        assert!(taken > 0, "{row} took no case");
    }
}

/// How many sequences of a case the row computes with the bits that it gives for a dense problem.
fn same_as_dense<P: OnGpu>(gpu: &Gpu, row: &KernelInfo, packed: &P) -> usize {
    let Some(plan) = packed.planned(gpu, row) else { return 0 };
    let (outputs, mut taken) = (packed.run(gpu, &plan), 0);
    for own in 0..packed.case().dims.batch {
        let dense = packed.alone(own);
        // Some rows take a modifier of packed problems alone.
        let Some(plan) = dense.planned(gpu, row) else { continue };
        let by_itself = dense.run(gpu, &plan);
        for ((name, got), (_, want)) in packed.bits(&outputs, own).iter().zip(dense.bits(&by_itself, 0)) {
            assert!(!got.is_empty() && *got == want, "{row}, {}: {name} of sequence {own}", packed.case());
        }
        taken += 1;
    }
    taken
}

fn each_like_dense<T: Poison>(gpu: &Gpu, row: &KernelInfo, backward: bool) {
    let cases = like_dense(row.head_dim_qk(), row.head_dim_vo(), mask_of(row.mask()));
    let taken = cases.iter().map(|case| match backward {
        true => same_as_dense(gpu, row, &backward::Prepared::<T>::new(case)),
        false => same_as_dense(gpu, row, &Prepared::<T>::new(case)),
    });
    assert!(taken.sum::<usize>() > 0, "{row} took no sequence");
}

/// With every modifier that the row takes, and deterministic gradients. (`packed.rs` has the plain forward of every row.)
#[test]
fn a_modified_sequence_has_the_bits_of_the_dense_problem() {
    let Some(gpu) = Gpu::open("a_modified_sequence_has_the_bits_of_the_dense_problem") else { return };
    // A row that adds a bias of packed problems alone has nothing to be compared with.
    let is_compared = |row: &KernelInfo| !row.needs_modifiers() || !row.adds_bias(true) || row.adds_bias(false);
    for row in packing_rows([gpu.rows(), gpu.modified_rows()].concat()).into_iter().filter(is_compared) {
        with_dtype!(row.dtype(), each_like_dense(&gpu, &row, false));
    }
    let rows = packing_rows([gpu.backward_rows(), gpu.modified_backward_rows()].concat());
    for row in rows.into_iter().filter(is_compared) {
        with_dtype!(row.dtype(), each_like_dense(&gpu, &row, true));
    }
}

/// The same of e4m3 operands, with a cap and with sinks.
#[test]
fn a_sequence_of_e4m3_has_the_bits_of_the_dense_problem() {
    let Some(gpu) = Gpu::open("a_sequence_of_e4m3_has_the_bits_of_the_dense_problem") else { return };
    for row in packing_rows(gpu.all_fp8_rows()) {
        let cases = like_dense(row.head_dim_qk(), row.head_dim_vo(), mask_of(row.mask()));
        let mut taken = 0;
        for (case, scaling) in cases.iter().take(3).flat_map(|case| Scaling::ALL.map(|scaling| (case, scaling))) {
            let Some((packed, plan)) = fp8_planned(&gpu, &row, case, scaling) else { continue };
            let output = fp8_run(&gpu, &packed, &plan);
            for own in 0..case.dims.batch {
                let dense = packed.alone(own);
                let plan = plan_with_shares(dense.problem(), &gpu.device, &row, 1);
                let Some(plan) = planned(plan, &row, case) else { continue };
                let same = fp8_bits(&packed, &output, own) == fp8_bits(&dense, &fp8_run(&gpu, &dense, &plan), 0);
                assert!(same, "{row}, {case} {scaling}: sequence {own}");
                taken += 1;
            }
        }
        assert!(taken > 0, "{row} took no sequence");
    }
}

/// 128k rows (gradients: 32k, beside fewer) beside a thousand sequences of one row. The long one has the bits of the dense problem. The
/// oracle judges the short ones.
#[test]
fn one_long_sequence_among_short_ones() {
    let Some(gpu) = Gpu::open("one_long_sequence_among_short_ones") else { return };
    let is_narrow = |row: &KernelInfo| row.mask() == MaskClass::Window && row.head_dim_qk() == 64;
    let rows: Vec<_> = packing_rows(gpu.rows()).into_iter().filter(is_narrow).collect();
    let of_backward: Vec<_> = packing_rows(gpu.backward_rows()).into_iter().filter(is_narrow).collect();
    assert!(!rows.is_empty() && !of_backward.is_empty());
    for row in rows {
        with_dtype!(row.dtype(), long_among_short(&gpu, &row, false));
    }
    for row in of_backward {
        with_dtype!(row.dtype(), long_among_short(&gpu, &row, true));
    }
}

fn long_among_short<T: Poison>(gpu: &Gpu, row: &KernelInfo, backward: bool) {
    // (Their mean length must not be below the window, which would be another mask class.)
    // O and the LSE that a backward reads are those of the plain computation, which takes long.
    let most = if backward { 1 << 15 } else { 1 << 17 };
    let (long, short) = Grid::from_env().pick((1 << 12, 20), (most, most >> 8));
    let (case, own) = one_long_among_short(long, short, row.head_dim_qk(), row.head_dim_vo());
    match backward {
        true => compared(gpu, row, &backward::Prepared::<T>::new(&Case { lse: false, ..case }), own),
        false => compared(gpu, row, &Prepared::<T>::new(&case), own),
    }
}

fn compared<P: OnGpu>(gpu: &Gpu, row: &KernelInfo, all: &P, own: usize) {
    let run = |prepared: &P| {
        let plan =
            prepared.planned(gpu, row).unwrap_or_else(|| panic!("{row} does not take {:?}", prepared.case().dims));
        prepared.run(gpu, &plan)
    };
    let outputs = run(all);
    let dense = all.alone(own);
    // A dense problem that is cut into shares has other sums.
    if dense.planned(gpu, row).is_some() {
        assert!(all.bits(&outputs, own) == dense.bits(&run(&dense), 0), "{row}: the long sequence");
    }
    let short = all.without(own);
    let wrong = short.verdict(&all.outputs_without(&outputs, own, &short)).wrong;
    assert!(wrong.is_none(), "{row}: {wrong:?}");
}

/// Rows, and no sequence that has one: every row of an output is filled, or left alone.
#[test]
fn all_sequences_are_empty() {
    let Some(gpu) = Gpu::open("all_sequences_are_empty") else { return };
    let is_full = |row: &KernelInfo| row.mask() == MaskClass::Full;
    for row in packing_rows(gpu.rows()).into_iter().filter(is_full) {
        for case in all_empty(row.head_dim_qk(), row.head_dim_vo()) {
            with_dtype!(row.dtype(), judged(&gpu, &row, &case));
        }
    }
    for row in packing_rows(gpu.backward_rows()).into_iter().filter(is_full) {
        for case in all_empty(row.head_dim_qk(), row.head_dim_vo()) {
            with_dtype!(row.dtype(), judged_backward(&gpu, &row, &case));
        }
    }
    for row in packing_rows(gpu.fp8_rows()).into_iter().filter(is_full) {
        for (case, scaling) in
            all_empty(row.head_dim_qk(), row.head_dim_vo()).iter().zip(Scaling::ALL.into_iter().cycle())
        {
            let Some((operands, plan)) = fp8_planned(&gpu, &row, case, scaling) else { continue };
            let (o, lse) = fp8_run(&gpu, &operands, &plan);
            let report = operands.expected().check(&o, Some(&lse)).unwrap();
            assert!(report.passed(), "{row}, {case} {scaling}: {report}");
        }
    }
}
