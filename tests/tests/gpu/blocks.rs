//! Block-sparse masks on a GPU: every row with lists, both passes, wrong contents, and what is refused.

use hopper_attention::reference::{Expected, Modifiers};
use hopper_attention::{Arch, DType, Device, E4M3, KernelInfo, Lengths, Mask, MaskClass, Scaling, Workspace, bf16};
use hopper_attention_tests::backward;
use hopper_attention_tests::blocks::{Blocks, cases, cases_of_row, modified_cases, spoil};
use hopper_attention_tests::data::{Input, Poison, Values};
use hopper_attention_tests::fp8::{Operands, Output};
use hopper_attention_tests::gpu::backward::{OnDevice as GradientsOnDevice, same_bits as same_gradients};
use hopper_attention_tests::gpu::fp8::OnDevice as Fp8OnDevice;
use hopper_attention_tests::gpu::{Gpu, OnDevice, planned, same_bits};
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::runner::{Prepared, Runner};
use hopper_attention_tests::sinks::Sinks;

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
    // (Ten of eleven cases are modified: 7 shares no divisor with that.)
    let cases: Vec<Case> = cases.filter(modified).skip(2).step_by(7).collect();
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

/// e4m3 operands. Every kind of factors takes its turn, and each second case is rotated.
#[test]
fn every_listed_e4m3_row_keeps_the_tolerance() {
    let Some(gpu) = Gpu::open("every_listed_e4m3_row_keeps_the_tolerance") else { return };
    let rows = gpu.listed_fp8_rows();
    let mut runner = Runner::new(&rows);
    // (What their operands cannot be is for other types.)
    let fits = |case: &Case| case.dims.head_dim_qk.is_multiple_of(16) && !matches!(case.values, Values::Garbage(..));
    let cases: Vec<Case> = cases(Grid::from_env()).into_iter().filter(fits).step_by(2).collect();
    for (i, case) in cases.iter().enumerate() {
        let sinks = if i % 4 == 3 { Sinks::ALL[i / 4 % Sinks::ALL.len()] } else { Sinks::None };
        // Rows for modified scores have a cap.
        let softcap = [0.0, 20.0, 0.0, 1.5, 0.0][i % 5];
        let case = Case { sinks, softcap, ..case.clone() };
        let options = case.options(DType::E4M3).lse(true).scaling(Scaling::ALL[i % 3]).half_scores(i % 7 == 0);
        let operands = Operands::of_case(&case, &options.build().unwrap(), (i % 2 == 1).then_some(case.seed));
        let expected = operands.expected();
        let on_device = Fp8OnDevice::new(&gpu.stream, &operands);
        for (row, info) in rows.iter().enumerate() {
            let Some(plan) = planned(operands.problem().plan_with_row(&gpu.device, info), info, &case) else {
                continue;
            };
            let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
            let verdict = on_device.judged::<bf16>(&gpu.stream, &mut workspace, &plan, &expected);
            runner.take(row, &case, DType::E4M3, verdict);
        }
    }
    runner.record("forward of e4m3 with lists of blocks", Grid::from_env(), &gpu.card(), &gpu.driver());
    runner.finish();
}

/// Garbage in keys, values and factors that the lists hide reaches nobody. What they keep does.
#[test]
fn garbage_that_lists_hide_reaches_no_row_of_e4m3() {
    let Some(gpu) = Gpu::open("garbage_that_lists_hide_reaches_no_row_of_e4m3") else { return };
    for (row, scaling) in gpu.listed_fp8_rows().iter().flat_map(|row| Scaling::ALL.map(|scaling| (row, scaling))) {
        // Blocks of keys 0 and 2 of 3 are hidden from all, and of block 1 a pair is kept where key and query have the
        // same parity.
        let case = Case::new(300, 384, row.head_dim_qk(), Mask::Full).head_dim_vo(row.head_dim_vo()).heads(2, 4, 2);
        let case = case.softcap(if row.needs_modifiers() { 5.0 } else { 0.0 });
        let mut lists = Blocks::All.image(case.dims, 0).unwrap();
        lists.keep_one_block(1, |query, key| (query + key) % 2 == 0);
        let options = case.options(DType::E4M3).lse(true).scaling(scaling).block_mask(Some(lists.mask));
        let problem = options.build().unwrap();
        let clean = Operands::of_case(&case, &problem, None).with_blocks(Some(lists.clone()));
        let run = |operands: &Operands| {
            let plan = operands.problem().plan_with_row(&gpu.device, row).unwrap();
            let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
            let on_device = Fp8OnDevice::new(&gpu.stream, operands);
            on_device.run::<bf16>(&gpu.stream, &mut workspace, &plan, None).unwrap().output(operands.problem())
        };
        let same = |(o, lse): &Output, (other_o, other_lse): &Output, query: usize| {
            let dims = case.dims;
            (0..dims.batch).all(|b| {
                (0..dims.heads_q).all(|h| {
                    let at = (b * dims.heads_q + h) * dims.seqlen_q + query;
                    o.row(b, query, h)
                        .iter()
                        .zip(other_o.row(b, query, h))
                        .all(|(x, y)| (x - y).abs() <= 0.1 * y.abs().max(1.0))
                        && (lse[at] - other_lse[at]).abs() < 1e-5
                })
            })
        };
        let expected = run(&clean);
        let mut dirty = clean.clone();
        for (which, key) in [(1, 5), (2, 100), (1, 300), (2, 383)] {
            for (batch, head) in (0..2).flat_map(|b| (0..2).map(move |h| (b, h))) {
                dirty.put(which, [batch, key, head, 3], E4M3::from_bits(0x7f));
            }
        }
        if scaling == Scaling::PerBlock {
            dirty = dirty.with_factor(Input::K, [0, 0, 0], f32::INFINITY).with_factor(Input::V, [1, 1, 2], f32::NAN);
        }
        let written = run(&dirty);
        assert!((0..300).all(|query| same(&written, &expected, query)), "{row} {scaling}");
        // Key 130 is kept by even queries.
        dirty.put(2, [0, 130, 0, 3], E4M3::from_bits(0x7f));
        let (o, _) = run(&dirty);
        assert!((0..300).all(|query| o.row(0, query, 1)[3].is_nan() == (query % 2 == 0)), "{row} {scaling}");
    }
}

/// A forward pass has the same bits in every run, and so have deterministic gradients.
#[test]
fn passes_with_lists_repeat() {
    let Some(gpu) = Gpu::open("passes_with_lists_repeat") else { return };
    let kinds = [(Blocks::Random(50), 0.0), (Blocks::Documents, 0.3), (Blocks::All, 0.0)];
    for ((blocks, dropout), arch) in
        kinds.into_iter().flat_map(|kind| [Arch::Sm90, Arch::Sm80].map(|arch| (kind, arch)))
    {
        let case = Case::new(2000, 2500, 128, Mask::causal()).heads(2, 8, 2).blocks(blocks).dropout(dropout);
        let mut prepared = Prepared::<bf16>::new(&case);
        prepared.problem = prepared.problem.to_builder().arch(arch).build().unwrap();
        let plan = prepared.problem.plan(&Device::Cuda(gpu.device.clone())).unwrap();
        assert_eq!(plan.kernel().unwrap().mask(), MaskClass::Blocks);
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        let mut on_device = OnDevice::new(&gpu.stream, &prepared);
        let mut run = || on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
        let first = run();
        assert!((0..5).all(|_| same_bits(&run(), &first)), "{case}");

        let prepared = backward::Prepared::<bf16>::new(&case);
        let problem = prepared.problem.to_builder().deterministic(true).build().unwrap();
        let rows = [gpu.listed_backward_rows(), gpu.listed_modified_backward_rows()].concat();
        let mut plans = rows.iter().filter(|row| row.arch() == arch).map(|row| problem.plan_with_row(&gpu.device, row));
        let plan = plans.find_map(Result::ok).unwrap();
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        let mut on_device = GradientsOnDevice::new(&gpu.stream, &prepared);
        let mut run = || on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
        let first = run();
        let report = prepared.judge(&first);
        assert!(report.passed(), "{case}: {report}");
        assert!((0..10).all(|_| same_gradients(&run(), &first) == [true; 2]), "{case}");
    }
}
