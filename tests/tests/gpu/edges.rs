//! Inputs at the edges through every kernel. `tests/tests/cpu_more/edges.rs` takes them through the CPU backend.

use hopper_attention::internal::{plan_backward_with_shares, plan_with_splits};
use hopper_attention::{Arch, BackwardProblem, DType, KernelInfo, Mask, MaskClass, Scaling, Workspace, bf16, f16};
use hopper_attention_tests::backward::Prepared as Backward;
use hopper_attention_tests::blocks::Blocks;
use hopper_attention_tests::data::{Input, Poison};
use hopper_attention_tests::edges::{
    EDGES, Edge, HeadDims, MODIFIERS, is_extreme, large_sums, large_values, modified_extremes, one_key,
    one_key_gives_its_value, one_key_has_no_gradient,
};
use hopper_attention_tests::fp8::{Operands, for_row};
use hopper_attention_tests::gpu::backward::OnDevice as BackwardOnDevice;
use hopper_attention_tests::gpu::fp8::OnDevice as Fp8OnDevice;
use hopper_attention_tests::gpu::{Gpu, OnDevice, planned, take_rows};
use hopper_attention_tests::problems::{Case, extremes};
use hopper_attention_tests::runner::{Prepared as Forward, Ready, Runner, Verdict};
use hopper_attention_tests::say;

use crate::by_type::{BACKWARD, FORWARD, judged, take};
use crate::with_dtype;

/// The kinds of rows: what a case must fit. The rows of a kind take the same case.
fn kinds(rows: &[KernelInfo], dtype: DType) -> Vec<Vec<(usize, KernelInfo)>> {
    let mut kinds: Vec<Vec<(usize, KernelInfo)>> = Vec::new();
    for (i, row) in rows.iter().enumerate().filter(|(_, row)| row.dtype() == dtype) {
        let of = |row: &KernelInfo| (row.mask(), row.head_dim_qk(), row.head_dim_vo());
        match kinds.iter_mut().find(|kind| of(&kind[0].1) == of(row)) {
            Some(kind) => kind.push((i, *row)),
            None => kinds.push(vec![(i, *row)]),
        }
    }
    kinds
}

fn head_dims(row: &KernelInfo) -> HeadDims {
    [row.head_dim_qk(), row.head_dim_vo()]
}

/// The pairs of head dims that there are rows of.
fn all_head_dims(rows: &[KernelInfo]) -> Vec<HeadDims> {
    let mut all: Vec<_> = rows.iter().map(head_dims).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Takes rows of one type through its cases.
type Take = fn(&Gpu, &[KernelInfo], &mut Runner);

/// Takes rows through the cases of both types. `what` names these.
fn take_both(gpu: &Gpu, rows: &[KernelInfo], what: &str, [bf16, f16]: [Take; 2]) {
    let mut runner = Runner::new(rows);
    bf16(gpu, rows, &mut runner);
    f16(gpu, rows, &mut runner);
    say(what);
    runner.finish();
}

/// With the name of the edge in what is wrong.
fn named(name: &str, verdict: Verdict) -> Verdict {
    Verdict { wrong: verdict.wrong.map(|wrong| format!("{name}: {wrong}")), ..verdict }
}

/// Each row takes the case of its kind, and where tiles can be shared, once more with two shares and with two clusters.
fn forwards<T: Poison>(gpu: &Gpu, rows: &[KernelInfo], runner: &mut Runner) {
    for kind in kinds(rows, T::DTYPE) {
        let (mask, head_dims) = (kind[0].1.mask(), head_dims(&kind[0].1));
        for edge in EDGES {
            let prepared: Forward<T> = edge.forward(mask, head_dims);
            let mut on_device = OnDevice::new(&gpu.stream, &prepared);
            for (i, row) in &kind {
                let whole = prepared.problem.plan_with_row(&gpu.device, row).expect("a plan of the row");
                let splits = if row.most_shares() > 1 { 1..3 } else { 0..0 };
                let shared = splits.map(|splits| {
                    plan_with_splits(&prepared.problem, &gpu.device, row, 2, splits).expect("a plan of the row")
                });
                for plan in [whole].into_iter().chain(shared) {
                    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).expect("device memory");
                    let verdict = prepared.verdict_on(on_device.run(&gpu.stream, &mut workspace, &plan, &prepared));
                    runner.take(*i, &prepared.case, T::DTYPE, named(edge.name, verdict));
                }
            }
        }
    }
}

fn backwards<T: Poison>(gpu: &Gpu, rows: &[KernelInfo], runner: &mut Runner) {
    for kind in kinds(rows, T::DTYPE) {
        let (mask, head_dims) = (kind[0].1.mask(), head_dims(&kind[0].1));
        for edge in EDGES.into_iter().filter(|edge| edge.backward) {
            let prepared: Backward<T> = edge.backward(mask, head_dims);
            let mut on_device = BackwardOnDevice::new(&gpu.stream, &prepared);
            for (i, row) in &kind {
                let whole = prepared.problem.plan_with_row(&gpu.device, row).expect("a plan of the row");
                let shared = (row.most_shares() > 1).then(|| {
                    plan_backward_with_shares(&prepared.problem, &gpu.device, row, 2, true).expect("two shares")
                });
                for plan in [Some(whole), shared].into_iter().flatten() {
                    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).expect("device memory");
                    let verdict = prepared.verdict_on(on_device.run(&gpu.stream, &mut workspace, &plan, &prepared));
                    runner.take(*i, &prepared.case, T::DTYPE, named(edge.name, verdict));
                }
            }
        }
    }
}

/// All head dims of Q and K that there are rows of.
fn head_dims_of(rows: &[KernelInfo]) -> Vec<usize> {
    let mut head_dims: Vec<usize> = rows.iter().map(KernelInfo::head_dim_qk).collect();
    head_dims.sort_unstable();
    head_dims.dedup();
    head_dims
}

/// Cases of all head dims that there are rows of.
fn fits(rows: &[KernelInfo]) -> Vec<Case> {
    extremes(&head_dims_of(rows))
}

fn extreme_forwards<T: Poison>(gpu: &Gpu, rows: &[KernelInfo], runner: &mut Runner) {
    let mut workspace = Workspace::alloc(&gpu.lane(), 64 << 20).expect("device memory");
    let mut runs = 0;
    take_rows(
        runner,
        (rows, &fits(rows)),
        |prepared: &Forward<T>| {
            assert!(is_extreme(prepared), "{}", prepared.case);
            OnDevice::new(&gpu.stream, prepared)
        },
        |row, prepared, on_device| {
            runs += 1;
            let shares = 1 + runs % row.most_shares().clamp(1, 2);
            let plan = plan_with_splits(&prepared.problem, &gpu.device, row, shares, 1 + runs / 2 % 2);
            let plan = planned(plan, row, &prepared.case)?;
            Some(on_device.run(&gpu.stream, &mut workspace, &plan, prepared))
        },
        |prepared, on_device| on_device.check_inputs(&gpu.stream, prepared),
    );
}

fn extreme_backwards<T: Poison>(gpu: &Gpu, rows: &[KernelInfo], runner: &mut Runner) {
    let mut workspace = Workspace::alloc(&gpu.lane(), 64 << 20).expect("device memory");
    take_rows(
        runner,
        (rows, &fits(rows)),
        |prepared: &Backward<T>| BackwardOnDevice::new(&gpu.stream, prepared),
        |row, prepared, on_device| {
            let plan = planned(prepared.problem.plan_with_row(&gpu.device, row), row, &prepared.case)?;
            Some(on_device.run(&gpu.stream, &mut workspace, &plan, prepared))
        },
        |prepared, on_device| on_device.check_inputs(&gpu.stream, prepared),
    );
}

/// Log-sum-exps past 88.7 of both signs, whose exponentials f32 does not hold. cuDNN's gradients of such are NaN.
#[test]
fn extreme_log_sum_exps() {
    let Some(gpu) = Gpu::open("extreme_log_sum_exps") else { return };
    take_both(&gpu, &gpu.rows(), "extreme log-sum-exps, forward", [extreme_forwards::<bf16>, extreme_forwards::<f16>]);
    take_both(
        &gpu,
        &gpu.backward_rows(),
        "extreme log-sum-exps, backward",
        [extreme_backwards::<bf16>, extreme_backwards::<f16>],
    );
}

/// A verdict on something that holds or not.
fn verdict(right: Result<(), String>) -> Verdict {
    right.map_or_else(Verdict::failed, |()| Verdict::default())
}

fn one_key_forwards<T: Poison>(gpu: &Gpu, rows: &[KernelInfo], runner: &mut Runner) {
    for prepared in all_head_dims(rows).into_iter().flat_map(one_key).map(|case| Forward::<T>::new(&case)) {
        let mut on_device = OnDevice::new(&gpu.stream, &prepared);
        for (i, row) in rows.iter().enumerate().filter(|(_, row)| row.dtype() == T::DTYPE) {
            for shares in 1..=row.most_shares().min(2) {
                let plan = plan_with_splits(&prepared.problem, &gpu.device, row, shares, shares);
                let Some(plan) = planned(plan, row, &prepared.case) else { continue };
                let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).expect("device memory");
                let ran = on_device.run(&gpu.stream, &mut workspace, &plan, &prepared);
                let right = ran.and_then(|outputs| one_key_gives_its_value(&prepared, &outputs));
                runner.take(i, &prepared.case, T::DTYPE, verdict(right));
            }
        }
    }
}

fn one_key_backwards<T: Poison>(gpu: &Gpu, rows: &[KernelInfo], runner: &mut Runner) {
    for prepared in all_head_dims(rows).into_iter().flat_map(one_key).map(|case| Backward::<T>::new(&case)) {
        let mut on_device = BackwardOnDevice::new(&gpu.stream, &prepared);
        for (i, row) in rows.iter().enumerate().filter(|(_, row)| row.dtype() == T::DTYPE) {
            let plan = prepared.problem.plan_with_row(&gpu.device, row);
            let Some(plan) = planned(plan, row, &prepared.case) else { continue };
            let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).expect("device memory");
            let ran = on_device.run(&gpu.stream, &mut workspace, &plan, &prepared);
            let right = ran.and_then(|outputs| one_key_has_no_gradient(&prepared, &outputs));
            runner.take(i, &prepared.case, T::DTYPE, verdict(right));
        }
    }
}

/// A weight of 1 is exact. So O is V bit for bit, and no gradient is left but what f32 rounds.
#[test]
fn rows_that_see_one_key() {
    let Some(gpu) = Gpu::open("rows_that_see_one_key") else { return };
    take_both(&gpu, &gpu.rows(), "rows that see one key, forward", [one_key_forwards::<bf16>, one_key_forwards::<f16>]);
    take_both(
        &gpu,
        &gpu.backward_rows(),
        "rows that see one key, backward",
        [one_key_backwards::<bf16>, one_key_backwards::<f16>],
    );
}

/// Takes rows through a case of their kind, and those that pack through one of packed sequences.
fn take_sums(gpu: &Gpu, rows: &[KernelInfo], make: fn(MaskClass, HeadDims, bool) -> Forward<bf16>) {
    let mut runner = Runner::new(rows);
    for kind in kinds(rows, DType::BF16) {
        for packed in [false, true] {
            let prepared = make(kind[0].1.mask(), head_dims(&kind[0].1), packed);
            let mut on_device = OnDevice::new(&gpu.stream, &prepared);
            for (i, row) in kind.iter().filter(|(_, row)| row.packs() || !packed) {
                let ways = if packed || row.most_shares() == 1 { vec![(1, 1)] } else { vec![(1, 1), (2, 1), (2, 2)] };
                for (shares, splits) in ways {
                    let plan = plan_with_splits(&prepared.problem, &gpu.device, row, shares, splits);
                    let plan = plan.expect("a plan of the row");
                    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).expect("device memory");
                    let verdict = prepared.verdict_on(on_device.run(&gpu.stream, &mut workspace, &plan, &prepared));
                    runner.take(*i, &prepared.case, DType::BF16, verdict);
                }
            }
        }
    }
    runner.finish();
}

/// Weights are relative to what a row's maximum was some blocks ago. So they may be far above 1, and sums of bf16 weights and
/// values overflow although O does not. Kernels compute such rows again.
#[test]
fn sums_that_overflow_are_computed_again() {
    let Some(gpu) = Gpu::open("sums_that_overflow_are_computed_again") else { return };
    let rows: Vec<_> = gpu.rows().into_iter().filter(|row| row.dtype() == DType::BF16).collect();
    take_sums(&gpu, &rows, large_sums);
    // sm90 kernels under a mask find only rows whose weights have a large sum at the end (docs/numerics.md).
    let finds_all = |row: &KernelInfo| row.arch() != Arch::Sm90 || row.mask() == MaskClass::Full;
    let rows: Vec<_> = rows.into_iter().filter(finds_all).collect();
    take_sums(&gpu, &rows, large_values);
}

#[test]
fn every_row_takes_the_edges() {
    let Some(gpu) = Gpu::open("every_row_takes_the_edges") else { return };
    take_both(&gpu, &gpu.rows(), "edges, forward", [forwards::<bf16>, forwards::<f16>]);
}

#[test]
fn every_backward_row_takes_the_edges() {
    let Some(gpu) = Gpu::open("every_backward_row_takes_the_edges") else { return };
    take_both(&gpu, &gpu.backward_rows(), "edges, backward", [backwards::<bf16>, backwards::<f16>]);
}

/// Rows for modified scores and those for lists of blocks, which the tests above leave out, with a modifier that they take: each row
/// takes each edge once, with modifiers in turn.
#[test]
fn every_modified_row_takes_the_edges() {
    let Some(gpu) = Gpu::open("every_modified_row_takes_the_edges") else { return };
    let of = |row: &KernelInfo| with_dtype!(row.dtype(), modified_edges(&gpu, row));
    [gpu.modified_rows(), gpu.listed_rows(), gpu.listed_modified_rows()].concat().iter().for_each(of);
    let of = |row: &KernelInfo| with_dtype!(row.dtype(), modified_backward_edges(&gpu, row));
    let rows = [gpu.modified_backward_rows(), gpu.listed_backward_rows(), gpu.listed_modified_backward_rows()];
    rows.concat().iter().for_each(of);
}

/// The cases of an edge that a row may take, the class of whose mask is the row's: each modifier, beginning with another each time, and at
/// last none at all. Rows with lists have one that keeps some blocks.
fn modified(row: &KernelInfo, turn: usize, edge: &Edge) -> Vec<Case> {
    let (class, head_dims) = (class_of(row), head_dims(row));
    let mut modifiers = MODIFIERS;
    modifiers.rotate_left(turn % MODIFIERS.len());
    let cases = modifiers.into_iter().filter_map(|modifier| edge.modified(class, head_dims, modifier));
    let listed = row.mask() == MaskClass::Blocks;
    let cases = cases.chain([edge.case(class, head_dims)]);
    cases.map(|case| if listed { case.blocks(Blocks::Random(70)) } else { case }).collect()
}

fn class_of(row: &KernelInfo) -> MaskClass {
    if row.mask() == MaskClass::Blocks { MaskClass::Causal } else { row.mask() }
}

fn modified_edges<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    for (turn, edge) in EDGES.into_iter().enumerate() {
        let class = class_of(row);
        let cases = modified(row, turn, &edge);
        let taken = cases.into_iter().find_map(|case| {
            let plan = planned(case.problem(T::DTYPE).plan_with_row(&gpu.device, row), row, &case)?;
            Some((edge.forward_of::<T>(class, case), plan))
        });
        let (prepared, plan) = taken.unwrap_or_else(|| panic!("{row} takes no case of {}", edge.name));
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).expect("device memory");
        let ran = OnDevice::new(&gpu.stream, &prepared).run(&gpu.stream, &mut workspace, &plan, &prepared);
        let wrong = prepared.verdict_on(ran).wrong;
        assert!(wrong.is_none(), "{row}, {}, {}: {wrong:?}", edge.name, prepared.case);
    }
}

fn modified_backward_edges<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    for (turn, edge) in EDGES.into_iter().filter(|edge| edge.backward).enumerate() {
        let class = class_of(row);
        let cases = modified(row, turn, &edge);
        let taken = cases.into_iter().find_map(|case| {
            if !edge.takes_backward(&case) {
                return None;
            }
            let forward = case.problem(T::DTYPE);
            let problem = BackwardProblem::builder(&forward).d_lse(case.lse).d_sinks(!case.sinks.is_none());
            let problem = problem.d_bias(!case.bias.is_none()).build().expect("a type with gradients");
            let plan = planned(problem.plan_with_row(&gpu.device, row), row, &case)?;
            Some((edge.backward_of::<T>(class, case), plan))
        });
        let (prepared, plan) = taken.unwrap_or_else(|| panic!("{row} takes no case of {}", edge.name));
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).expect("device memory");
        let ran = BackwardOnDevice::new(&gpu.stream, &prepared).run(&gpu.stream, &mut workspace, &plan, &prepared);
        let wrong = prepared.verdict_on(ran).wrong;
        assert!(wrong.is_none(), "{row}, {}, {}: {wrong:?}", edge.name, prepared.case);
    }
}

/// Log-sum-exps past 88.7 of modified scores, and scores beside which a sink is nothing or all.
#[test]
fn modified_extreme_log_sum_exps() {
    let Some(gpu) = Gpu::open("modified_extreme_log_sum_exps") else { return };
    let rows = [gpu.rows(), gpu.modified_rows()].concat();
    take(&gpu, &rows, &modified_extremes(&head_dims_of(&rows)), "extremes of modified scores, forward", FORWARD);
    let rows = [gpu.backward_rows(), gpu.modified_backward_rows()].concat();
    take(&gpu, &rows, &modified_extremes(&head_dims_of(&rows)), "extremes of modified scores, backward", BACKWARD);
}

/// A softmax scale below the normal range of f32, for e4m3 operands: with factors that make ordinary scores, and with small ones. A scale
/// of less than 2^-126 / log2(e) counts as that. The first of these is a little above it.
#[test]
fn e4m3_rows_take_a_scale_below_the_normal_range() {
    let Some(gpu) = Gpu::open("e4m3_rows_take_a_scale_below_the_normal_range") else { return };
    for (i, row) in gpu.fp8_rows().iter().enumerate() {
        let mask = crate::mask_of(row.mask());
        let case = Case::new(150, 290, row.head_dim_qk(), mask).head_dim_vo(row.head_dim_vo()).heads(1, 4, 2);
        for (scale, by) in [(8.2e-39, [1e18, 4e18]), (f32::from_bits(1), [1e6, 4e6]), (8e-39, [1.0, 1.0])] {
            let case = Case { scale: Some(scale), ..case.clone() };
            let problem = case.options(DType::E4M3).lse(true).scaling(Scaling::ALL[i % 3]).build().unwrap();
            let operands = Operands::of_case(&case, &for_row(problem, row), None);
            let operands = operands.with_factors_times(Input::Q, by[0]).with_factors_times(Input::K, by[1]);
            let plan = operands.problem().plan_with_row(&gpu.device, row).unwrap();
            let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).expect("device memory");
            let on_device = Fp8OnDevice::new(&gpu.stream, &operands);
            let verdict = on_device.judged::<bf16>(&gpu.stream, &mut workspace, &plan, &operands.expected());
            assert!(verdict.wrong.is_none(), "{row}, {case}: {:?}", verdict.wrong);
        }
    }
}

/// The rows of a tile on both sides of the border of two chunks, which begin many blocks apart.
#[test]
fn a_tile_may_lie_across_the_border_of_chunks() {
    let Some(gpu) = Gpu::open("a_tile_may_lie_across_the_border_of_chunks") else { return };
    let mut runs = 0;
    for row in gpu.rows().into_iter().chain(gpu.modified_rows()).filter(|row| row.mask() == MaskClass::Window) {
        for (seqlen_q, seqlen_kv, chunk) in [(546, 832, 226), (700, 1900, 1024), (300, 2500, 2048)] {
            let case = Case::new(seqlen_q, seqlen_kv, row.head_dim_qk(), Mask::chunked(chunk)).heads(1, 3, 1);
            let mut case = case.head_dim_vo(row.head_dim_vo());
            case.max_logits = row.needs_modifiers();
            with_dtype!(row.dtype(), judged(&gpu, &row, &case));
            runs += 1;
        }
    }
    assert!(runs > 0);
}
