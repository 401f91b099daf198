//! Every backward row against every case that it takes, and what the backward promises beyond the right numbers.

use std::collections::BTreeMap;

use hopper_attention::internal::{plan_backward_with_last_cut, plan_backward_with_shares};
use hopper_attention::{
    Arch, BackwardPlan, BackwardProblem, DType, Device, Dims, ForwardArgs, ForwardProblem, KernelInfo, Stream,
    Workspace, bf16, f16,
};
use hopper_attention_tests::backward::{Outputs, Prepared};
use hopper_attention_tests::data::Poison;
use hopper_attention_tests::gpu::backward::{OnDevice, same_bits};
use hopper_attention_tests::gpu::{self, Gpu, MODE, NO_FLAGS, dense, take_rows, whole, whole_mut};
use hopper_attention_tests::problems::{Case, Grid, Tiles, cases, fitting, largest_head_dim, random};
use hopper_attention_tests::runner::{Mutated, Runner};
use hopper_attention_tests::say;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rayon::prelude::*;

use crate::{mask_of, with_dtype};

/// Scratch for every plan of a test, never cleaned: a kernel must not care what the last one left.
const WORKSPACE_BYTES: usize = 256 << 20;

/// Runs cases through all rows that take them, each second one in turns. Of the others, where the row's tiles can be shared,
/// each second one has tiles that the CTAs of a cluster share, and each fourth has some last tiles that are cut.
pub(crate) fn run<T: Poison>(gpu: &Gpu, rows: &[KernelInfo], cases: &[Case], runner: &mut Runner) {
    let mut workspace = Workspace::alloc(&gpu.lane(), WORKSPACE_BYTES).unwrap();
    let mut index = 0;
    take_rows(
        runner,
        (rows, cases),
        |prepared: &Prepared<T>| OnDevice::new(&gpu.stream, prepared),
        |row, prepared, on_device| {
            index += 1;
            let problem = prepared.problem.to_builder().deterministic(index % 2 == 0).build().unwrap();
            let can_share = row.most_shares() > 1;
            let plan = match index % 8 {
                1 | 5 if can_share => {
                    plan_backward_with_shares(&problem, &gpu.device, row, 2 + index / 4 % (row.most_shares() - 1), true)
                }
                3 if can_share => {
                    plan_backward_with_last_cut(&problem, &gpu.device, row, 2 + index / 8 % 5, 1 + index / 16 % 7)
                }
                _ => problem.plan_with_row(&gpu.device, row),
            };
            let plan = gpu::planned(plan, row, &prepared.case)?;
            assert!(plan.workspace_bytes() <= WORKSPACE_BYTES, "{plan}");
            Some(on_device.run(&gpu.stream, &mut workspace, &plan, prepared))
        },
        |prepared, on_device| on_device.check_inputs(&gpu.stream, prepared),
    );
}

#[test]
fn every_backward_row_takes_the_grid() {
    let Some(gpu) = Gpu::open("every_backward_row_takes_the_grid") else { return };
    let rows = gpu.backward_rows();
    let size = Grid::from_env();
    let all = fitting(&rows, cases(size, &Tiles::of(&rows)));
    let mut runner = Runner::new(&rows);
    run::<bf16>(&gpu, &rows, &all, &mut runner);
    // The oracle of the gradients is slow: the other type takes a third.
    let third: Vec<Case> = all.into_iter().step_by(3).collect();
    run::<f16>(&gpu, &rows, &third, &mut runner);
    runner.record("backward", size, &gpu.card(), &gpu.driver());
    runner.finish();
}

#[test]
fn every_backward_case_has_a_plan() {
    let Some(gpu) = Gpu::open("every_backward_case_has_a_plan") else { return };
    let device = Device::Cuda(gpu.device.clone());
    let mut picked = Vec::new();
    for case in fitting(&gpu.backward_rows(), cases(Grid::Full, &Tiles::of(&gpu.backward_rows()))) {
        for dtype in [DType::BF16, DType::F16] {
            let problem = BackwardProblem::builder(&case.problem(dtype)).build().unwrap();
            let plan = problem.plan(&device).unwrap_or_else(|error| panic!("{dtype} {case}: {error}"));
            picked.push(*plan.kernel().unwrap());
        }
    }
    for row in gpu.backward_rows().iter().filter(|row| !picked.contains(row)) {
        say(&format!("no case of the grid picks {row}"));
    }
}

#[test]
fn random_backward_cases() {
    let Some(gpu) = Gpu::open("random_backward_cases") else { return };
    let rows = gpu.backward_rows();
    let [even, odd] = random::halves(random::drawn(largest_head_dim(&rows), 6, 128));
    let mut runner = Runner::new(["all rows, random cases"]);
    let mut by_row = Runner::new(&rows);
    run::<bf16>(&gpu, &rows, &even, &mut by_row);
    run::<f16>(&gpu, &rows, &odd, &mut by_row);
    by_row.pour_into(&mut runner);
    runner.finish();
}

/// A case for a row: several tiles, several heads, a ragged end.
fn prepared<T: Poison>(row: &KernelInfo, seed: u64) -> Prepared<T> {
    let mut case =
        Case::new(3 * row.tile_m() + 17, 2 * row.tile_n() + 45, row.head_dim_qk(), mask_of(row.mask())).heads(2, 6, 2);
    case.dims.head_dim_vo = row.head_dim_vo();
    Prepared::new(&Case { seed, ..case })
}

fn planned<T: Poison>(
    gpu: &Gpu,
    row: &KernelInfo,
    prepared: &Prepared<T>,
    deterministic: bool,
) -> (BackwardPlan, Workspace<'static>) {
    let plan = prepared
        .problem
        .to_builder()
        .deterministic(deterministic)
        .build()
        .unwrap()
        .plan_with_row(&gpu.device, row)
        .unwrap();
    let workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    (plan, workspace)
}

/// A broken kernel must fail the suite: every mutation of what a row computed is caught.
#[test]
fn broken_gradients_are_caught() {
    let Some(gpu) = Gpu::open("broken_gradients_are_caught") else { return };
    for row in gpu.backward_rows() {
        with_dtype!(row.dtype(), broken(&gpu, &row));
    }
}

fn broken<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    let prepared = prepared::<T>(row, 3);
    let (plan, mut workspace) = planned(gpu, row, &prepared, false);
    let outputs = OnDevice::new(&gpu.stream, &prepared).run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
    let mut applied = BTreeMap::new();
    prepared.catch_all(&outputs, row, &mut applied);
    let applied: usize = applied.values().sum();
    assert!(applied >= 8, "{row}: {applied} mutations applied");
}

/// The same bits on every run in turns. Without them dK and dV all the same where tiles have no shares or clusters have them, and
/// the rest to rounding.
#[test]
fn deterministic_runs_give_the_same_bits() {
    let Some(gpu) = Gpu::open("deterministic_runs_give_the_same_bits") else { return };
    for row in gpu.backward_rows() {
        with_dtype!(row.dtype(), reruns(&gpu, &row, 1, false));
        for shares in [2, 3, 8].into_iter().filter(|shares| *shares <= row.most_shares()) {
            with_dtype!(row.dtype(), reruns(&gpu, &row, shares, true));
        }
        if row.arch() == Arch::Sm90 {
            with_dtype!(row.dtype(), reruns(&gpu, &row, 3, false));
        }
    }
}

/// `shares` above 1: of tiles that CTAs share, of a cluster or through the workspace.
fn reruns<T: Poison>(gpu: &Gpu, row: &KernelInfo, shares: usize, in_cluster: bool) {
    let prepared = prepared::<T>(row, 1);
    // Clusters take no turns.
    for deterministic in [true, false].into_iter().filter(|deterministic| !in_cluster || !deterministic) {
        let (mut plan, mut workspace) = planned(gpu, row, &prepared, deterministic);
        if shares > 1 {
            plan = plan_backward_with_shares(plan.problem(), &gpu.device, row, shares, in_cluster).unwrap();
            let text = plan.to_string();
            assert!(
                text.contains(&format!("{shares} shares")) && text.contains(" in a cluster") == in_cluster,
                "{plan}"
            );
            workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        }
        let mut on_device = OnDevice::new(&gpu.stream, &prepared);
        let first = on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
        let report = prepared.judge(&first);
        assert!(report.passed(), "{row}: {report}");
        // The same bits need no second judgement.
        let mut others = Vec::new();
        for run in 1..Grid::from_env().pick(3, if shares > 1 { 20 } else { 100 }) {
            let again = on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
            let [d_kv, d_q] = same_bits(&first, &again);
            let may_move = !in_cluster && plan.to_string().contains(" shares");
            let same = if deterministic { d_kv && d_q } else { d_kv || may_move };
            assert!(same, "{row}: run {run} differs from the first ({plan})");
            if !(d_kv && d_q) {
                others.push((run, again));
            }
        }
        // All at once, since a judgement takes long.
        others.par_iter().for_each(|(run, again)| assert!(prepared.judge(again).passed(), "{row}: run {run}"));
    }
}

/// In turns too where the sums are more than the second-level cache holds, so that a part which has been sent takes long
/// to be there, and beside work that evicts them.
#[test]
fn turns_are_kept_out_of_the_cache() {
    let Some(gpu) = Gpu::open("turns_are_kept_out_of_the_cache") else { return };
    for row in gpu.backward_rows() {
        with_dtype!(row.dtype(), out_of_the_cache(&gpu, &row));
    }
}

fn out_of_the_cache<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    let seqlen = Grid::from_env().pick(500, 4096);
    let dims = Dims::new(3, seqlen, 16, row.head_dim_qk()).with_head_dim_vo(row.head_dim_vo());
    let forward = ForwardProblem::builder(T::DTYPE, dims).mask(mask_of(row.mask())).build().unwrap();
    let problem = BackwardProblem::builder(&forward).deterministic(true).build().unwrap();
    let plan = problem.plan_with_row(&gpu.device, row).unwrap();
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let mut rng = StdRng::seed_from_u64(1);
    let mut noise = |shape: [usize; 4]| {
        let values: Vec<T> = (0..shape.iter().product()).map(|_| T::from_f32(rng.random_range(-1.0..1.0))).collect();
        gpu.stream.clone_htod(&values).unwrap()
    };
    let [q, k, v] = [forward.q_shape(), forward.k_shape(), forward.v_shape()].map(&mut noise);
    let [o, d_o] = [forward.o_shape(); 2].map(&mut noise);
    let lse = gpu.stream.clone_htod(&vec![(seqlen as f32).ln(); dims.batch * dims.heads_q * seqlen]).unwrap();
    let poison = |shape: [usize; 4]| gpu.stream.clone_htod(&vec![T::POISON; shape.iter().product()]).unwrap();
    let [mut d_q, mut d_k, mut d_v] = [problem.d_q_shape(), problem.d_k_shape(), problem.d_v_shape()].map(poison);
    let beside = gpu.device.context().new_stream().unwrap();
    let mut evicted = beside.alloc_zeros::<u8>(64 << 20).unwrap();
    let mut first: Option<Vec<T>> = None;
    for run in 0..Grid::from_env().pick(3, 40) {
        if run % 2 == 1 {
            beside.memset_zeros(&mut evicted).unwrap();
        }
        let args = dense(&problem, [&q, &k, &v, &o, &d_o], &lse, [&mut d_q, &mut d_k, &mut d_v]).unwrap();
        plan.run(&gpu.lane(), &mut workspace, args).unwrap();
        let got = gpu.stream.clone_dtoh(&d_q).unwrap();
        let Some(first) = &first else {
            let finite = got.par_iter().all(|x| x.to_f32().is_finite());
            assert!(finite && got.par_iter().any(|x| x.to_f32() != 0.0), "{row}: no gradient");
            first = Some(got);
            continue;
        };
        let moved = first.par_iter().zip(&got).filter(|(a, b)| a.bits() != b.bits()).count();
        assert_eq!(moved, 0, "{row}: run {run}: so many elements of dQ differ from the first run's ({plan})");
    }
}

/// On several streams at once, each with memory of its own, in turns: tiles of one launch wait only for each other.
#[test]
fn many_backward_streams_at_once() {
    let Some(gpu) = Gpu::open("many_backward_streams_at_once") else { return };
    for row in gpu.backward_rows() {
        with_dtype!(row.dtype(), many(&gpu, &row));
    }
}

fn many<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    let rounds = Grid::from_env().pick(2, 25);
    // Streams share operands three by three, and so their bits: most of the time is the oracle's, once for each.
    let prepared = [100, 101].map(|seed| prepared::<T>(row, seed));
    let mut lanes: Vec<_> = (0..6)
        .map(|i| {
            let of = i % prepared.len();
            let stream = gpu.device.context().new_stream().unwrap();
            let lane = Stream::Cuda(stream.clone());
            let plan = prepared[of]
                .problem
                .to_builder()
                .deterministic(true)
                .build()
                .unwrap()
                .plan_with_row(&gpu.device, row)
                .unwrap();
            let workspace = Workspace::alloc(&lane, plan.workspace_bytes()).unwrap();
            let on_device = OnDevice::new(&stream, &prepared[of]);
            (of, plan, stream, workspace, on_device)
        })
        .collect();
    let mut first = prepared.each_ref().map(|_| None::<Outputs<T>>);
    for _ in 0..rounds {
        for (of, plan, stream, workspace, on_device) in &mut lanes {
            plan.run(&Stream::Cuda(stream.clone()), workspace, on_device.args(&prepared[*of])).unwrap();
        }
        for (of, _, stream, _, on_device) in &lanes {
            let outputs = on_device.outputs(stream, &prepared[*of]).unwrap();
            let first = first[*of].get_or_insert_with(|| outputs.clone());
            assert_eq!(same_bits(first, &outputs), [true; 2], "{row}");
        }
    }
    for (of, _, stream, _, on_device) in &lanes {
        on_device.check_inputs(stream, &prepared[*of]).unwrap();
    }
    for (prepared, first) in prepared.iter().zip(first) {
        let report = prepared.judge(&first.unwrap());
        assert!(report.passed(), "{row}: {report}");
    }
}

/// CUDA blocks that get a multiprocessor only when the others have drawn all the tiles end without one: another launch holds
/// half of the multiprocessors meanwhile.
#[test]
fn late_blocks_may_find_no_tile_left() {
    let Some(gpu) = Gpu::open("late_blocks_may_find_no_tile_left") else { return };
    for row in gpu.backward_rows() {
        with_dtype!(row.dtype(), late(&gpu, &row));
    }
}

fn late<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    // A forward pass of some milliseconds. A tile has 64 queries or more, so that its tiles are for half of the multiprocessors
    // at most. (On sm90 several CUDA blocks might share a tile.)
    let dims = Dims::new(1, gpu.device.info().facts.multiprocessors / 2 * 64, 1, row.head_dim_qk())
        .with_seqlen_kv(1 << 16)
        .with_head_dim_vo(row.head_dim_vo());
    let forward = ForwardProblem::builder(T::DTYPE, dims).arch(Arch::Sm80).build().unwrap();
    let stream = gpu.device.context().new_stream().unwrap();
    let lane = Stream::Cuda(stream.clone());
    let plan = forward.plan(&Device::Cuda(gpu.device.clone())).unwrap();
    let mut scratch = Workspace::alloc(&lane, plan.workspace_bytes()).unwrap();
    let zeros = |shape: [usize; 4]| stream.clone_htod(&vec![T::default(); shape.iter().product()]).unwrap();
    let [q, k, v] = [forward.q_shape(), forward.k_shape(), forward.v_shape()].map(zeros);
    let mut o = zeros(forward.o_shape());

    // More short tiles than multiprocessors, drawn.
    let mut case =
        Case::new(row.tile_m(), 2 * row.tile_n() + 45, row.head_dim_qk(), mask_of(row.mask())).heads(4, 16, 16);
    case.dims.head_dim_vo = row.head_dim_vo();
    let prepared = Prepared::<T>::new(&case);
    let (short, mut workspace) = planned(gpu, row, &prepared, true);
    let mut on_device = OnDevice::new(&gpu.stream, &prepared);
    on_device.poison(&gpu.stream, &prepared);
    gpu.stream.synchronize().unwrap();
    stream.synchronize().unwrap();

    let [q, k, v] =
        [(&q, forward.q_shape()), (&k, forward.k_shape()), (&v, forward.v_shape())].map(|(x, s)| whole(x, s).unwrap());
    let args = ForwardArgs::new(q, k, v, whole_mut(&mut o, forward.o_shape()).unwrap());
    plan.run(&lane, &mut scratch, args).unwrap();
    std::thread::sleep(std::time::Duration::from_micros(300));
    short.run(&gpu.lane(), &mut workspace, on_device.args(&prepared)).unwrap();
    let report = prepared.judge(&on_device.outputs(&gpu.stream, &prepared).unwrap());
    assert!(report.passed(), "{row}: {report}");
    stream.synchronize().unwrap();
}

/// A captured backward pass replayed on values that change in between.
#[test]
fn backward_replays_read_what_the_memory_then_holds() {
    let Some(gpu) = Gpu::open("backward_replays_read_what_the_memory_then_holds") else { return };
    // SAFETY: everything of this context object happens on one stream, in its order; nothing relies on events.
    unsafe { gpu.device.context().disable_event_tracking() };
    for row in gpu.backward_rows() {
        with_dtype!(row.dtype(), replays(&gpu, &row));
    }
}

fn replays<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    // The default stream cannot be captured.
    let stream = gpu.device.context().new_stream().unwrap();
    let lane = Stream::Cuda(stream.clone());
    let first = prepared::<T>(row, 1);
    let plan = first.problem.to_builder().deterministic(true).build().unwrap().plan_with_row(&gpu.device, row).unwrap();
    let mut workspace = Workspace::alloc(&lane, plan.workspace_bytes()).unwrap();
    let mut on_device = OnDevice::new(&stream, &first);
    stream.synchronize().unwrap();

    stream.begin_capture(MODE).unwrap();
    let launched = plan.run(&lane, &mut workspace, on_device.args(&first));
    let graph = stream.end_capture(NO_FLAGS).unwrap().expect("a graph");
    launched.unwrap();
    assert!(on_device.untouched(&stream, &first), "{row}: capturing wrote something");
    for seed in [1, 2] {
        let prepared = prepared::<T>(row, seed);
        on_device.write_inputs(&stream, &prepared);
        on_device.poison(&stream, &prepared);
        graph.launch().unwrap();
        graph.launch().unwrap();
        let outputs = on_device.outputs(&stream, &prepared).unwrap();
        let report = prepared.judge(&outputs);
        assert!(report.passed(), "{row}, seed {seed}: {report}");
        let direct = on_device.run(&stream, &mut workspace, &plan, &prepared).unwrap();
        assert_eq!(same_bits(&outputs, &direct), [true; 2], "{row}: a replay and a launch differ");
    }
}
