//! CUDA graphs of what `capture.rs`, `backward.rs` and `packed.rs` leave out: changing lengths of gradients and of e4m3 operands, a
//! changing state of dropout, and every modifier. Runs of the same inputs have the same bits.

use std::sync::Arc;

use hopper_attention::cudarc::driver::{CudaGraph, CudaSlice, CudaStream};
use hopper_attention::{Args, DType, KernelInfo, MaskClass, Result, Scaling, Slot, Stream, Workspace, bf16};
use hopper_attention_tests::alibi::Alibi;
use hopper_attention_tests::backward;
use hopper_attention_tests::blocks::Blocks;
use hopper_attention_tests::data::{Poison, Values};
use hopper_attention_tests::fp8::{Operands, for_row};
use hopper_attention_tests::gpu::fp8::{OnDevice as Fp8OnDevice, Outputs as Fp8Outputs};
use hopper_attention_tests::gpu::{Gpu, MODE, NO_FLAGS, OnDevice, backward as of_backward, planned, same_bits};
use hopper_attention_tests::packing::{Kind, Packing};
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::runner::Prepared;
use hopper_attention_tests::sinks::Sinks;

use crate::packed::{list, packing_rows};
use crate::{mask_of, with_dtype};

/// What `launch` enqueues, as a graph.
pub(crate) fn captured(stream: &Arc<CudaStream>, launch: impl FnOnce() -> Result<()>) -> CudaGraph {
    stream.synchronize().unwrap();
    stream.begin_capture(MODE).unwrap();
    let launched = launch();
    let graph = stream.end_capture(NO_FLAGS).unwrap().expect("a graph");
    launched.unwrap();
    graph
}

/// A stream that can be captured: the default one cannot.
pub(crate) fn lane(gpu: &Gpu) -> (Arc<CudaStream>, Stream) {
    let stream = gpu.device.context().new_stream().unwrap();
    (stream.clone(), Stream::Cuda(stream))
}

/// Offsets and used lengths that a graph reads, and that change between its launches.
struct Arrays(Vec<(Slot, CudaSlice<i32>)>);

impl Arrays {
    fn new(stream: &Arc<CudaStream>, packing: &Packing) -> Self {
        Self(packing.lists().map(|(slot, list)| (slot, stream.clone_htod(list).unwrap())).collect())
    }

    fn add_to<'a>(&'a self, args: Args<'a>) -> Args<'a> {
        // SAFETY: they hold legal lengths at every launch of the graph.
        self.0.iter().fold(args, |args, (slot, array)| unsafe { args.lengths_unchecked(*slot, list(array)) })
    }

    fn write(&mut self, stream: &Arc<CudaStream>, packing: &Packing) {
        for ((slot, array), (of, list)) in self.0.iter_mut().zip(packing.lists()) {
            assert_eq!(*slot, of);
            stream.memcpy_htod(list, array).unwrap();
        }
    }
}

const SEQUENCES: usize = 9;
const ROWS: usize = 900;

/// A packed case whose lengths follow from a seed.
fn of_seed(row: &KernelInfo, seed: u64) -> Case {
    let case = Case::new(ROWS, ROWS, row.head_dim_qk(), mask_of(row.mask())).heads(SEQUENCES, 2, 1);
    let case = case.head_dim_vo(row.head_dim_vo());
    let kind = Kind { packed: [true; 2], used: [false, true], fill_gaps: true };
    Case { packing: Packing::random(kind, SEQUENCES, [ROWS; 2], seed), seed, ..case }
}

/// One captured backward serves all lengths within its capacity, in any order of the sums and in one order.
#[test]
fn one_backward_graph_serves_changing_lengths() {
    let Some(gpu) = Gpu::open("one_backward_graph_serves_changing_lengths") else { return };
    // SAFETY: everything of this context object happens on one stream, in its order; nothing relies on events.
    unsafe { gpu.device.context().disable_event_tracking() };
    for row in packing_rows(gpu.backward_rows()) {
        for deterministic in [false, true] {
            with_dtype!(row.dtype(), gradients_of_lengths(&gpu, &row, deterministic));
        }
    }
}

fn gradients_of_lengths<T: Poison>(gpu: &Gpu, row: &KernelInfo, deterministic: bool) {
    let (stream, lane) = lane(gpu);
    let first = backward::Prepared::<T>::new(&of_seed(row, 0));
    let problem = first.problem.to_builder().deterministic(deterministic).build().unwrap();
    let plan = problem.plan_with_row(&gpu.device, row).unwrap();
    let mut workspace = Workspace::alloc(&lane, plan.workspace_bytes()).unwrap();
    let mut on_device = of_backward::OnDevice::new(&stream, &first);
    let mut arrays = Arrays::new(&stream, &first.case.packing);
    let graph = captured(&stream, || plan.run(&lane, &mut workspace, arrays.add_to(on_device.args(&first))));
    assert!(on_device.untouched(&stream, &first), "{row}: capturing wrote something");
    for seed in 1..Grid::from_env().pick(3, 6) {
        let prepared = backward::Prepared::<T>::new(&of_seed(row, seed));
        on_device.write_inputs(&stream, &prepared);
        arrays.write(&stream, &prepared.case.packing);
        let mut launch = || {
            on_device.poison(&stream, &prepared);
            graph.launch().unwrap();
            on_device.outputs(&stream, &prepared).unwrap()
        };
        let outputs = launch();
        let report = prepared.judge(&outputs);
        assert!(report.passed(), "{row}, seed {seed}: {report}");
        if deterministic {
            assert_eq!(of_backward::same_bits(&outputs, &launch()), [true; 2], "{row}, seed {seed}: replays differ");
        }
    }
}

/// The same of a forward of e4m3 operands, whose factors follow the sequences.
#[test]
fn one_e4m3_graph_serves_changing_lengths() {
    let Some(gpu) = Gpu::open("one_e4m3_graph_serves_changing_lengths") else { return };
    // SAFETY: as in `one_backward_graph_serves_changing_lengths`.
    unsafe { gpu.device.context().disable_event_tracking() };
    for (i, row) in packing_rows(gpu.fp8_rows()).iter().enumerate() {
        e4m3_of_lengths(&gpu, row, Scaling::ALL[i % 3]);
        e4m3_of_lengths(&gpu, row, Scaling::PerBlock);
    }
}

fn e4m3_of_lengths(gpu: &Gpu, row: &KernelInfo, scaling: Scaling) {
    let (stream, lane) = lane(gpu);
    let operands = |seed| {
        let case = of_seed(row, seed);
        let problem = case.options(DType::E4M3).lse(true).scaling(scaling).build().unwrap();
        Operands::of_case(&case, &for_row(problem, row), None)
    };
    let first = operands(0);
    let plan = first.problem().plan_with_row(&gpu.device, row).unwrap();
    let mut workspace = Workspace::alloc(&lane, plan.workspace_bytes()).unwrap();
    let mut on_device = Fp8OnDevice::new(&stream, &first);
    let mut outputs = Fp8Outputs::<bf16>::new(&stream, plan.problem(), None);
    let mut arrays = Arrays::new(&stream, first.packing());
    let graph = captured(&stream, || {
        let args = on_device.args(plan.problem(), &mut outputs);
        plan.run(&lane, &mut workspace, arrays.add_to(args))
    });
    assert!(outputs.untouched(&stream), "{row}: capturing wrote something");
    for seed in 1..Grid::from_env().pick(3, 6) {
        let operands = operands(seed);
        on_device.write(&stream, &operands);
        arrays.write(&stream, operands.packing());
        let mut launch = || {
            outputs.poison(&stream);
            graph.launch().unwrap();
            stream.synchronize().unwrap();
            outputs.written(&stream).unwrap()
        };
        let (written, again) = (launch(), launch());
        assert!(written.same_bits(&again), "{row} {scaling}, seed {seed}: replays differ");
        let (o, lse) = written.output(plan.problem());
        let report = operands.expected().check(&o, Some(&lse)).unwrap();
        assert!(report.passed(), "{row} {scaling}, seed {seed}: {report}");
    }
}

/// A case of each modifier for a row, dense, and with the class of its mask: softcap, ALiBi, a bias, sinks, dropout.
fn modified(row: &KernelInfo) -> Vec<Case> {
    let listed = row.mask() == MaskClass::Blocks;
    let mask = if listed { hopper_attention::Mask::causal() } else { mask_of(row.mask()) };
    let case = Case::new(300, 410, row.head_dim_qk(), mask).head_dim_vo(row.head_dim_vo()).heads(2, 4, 2);
    // (Of four seeds in a row each gives a bias, its gradient or sinks another layout or type.)
    let case = Case { seed: 40, ..case.blocks(if listed { Blocks::Random(50) } else { Blocks::None }) };
    vec![
        case.clone().softcap(15.0),
        case.clone().alibi(Alibi::Standard),
        case.clone().bias("f32:hq".parse().expect("a bias")),
        Case { sinks: Sinks::Normal, ..case.clone() },
        case.clone().dropout(0.3),
        case.clone().softcap(30.0).alibi(Alibi::PerBatch),
        case,
    ]
}

/// The case with other values, and with another state of dropout, sinks, slopes and bias. Lists of blocks have forms that follow from
/// the seed, so that they stay.
fn changed(case: &Case, turn: usize) -> Case {
    let seed = if case.blocks.is_none() { case.seed + 4 * turn as u64 } else { case.seed };
    Case { values: [Values::Normal, Values::Uneven, Values::Offset][turn % 3], seed, ..case.clone() }
}

/// Graphs of modified problems read what the memory then holds: operands, sinks, slopes, biases, the seed and the offset of dropout.
/// Their replays, and launches without a graph, have the same bits.
#[test]
fn graphs_of_modified_problems_read_what_the_memory_then_holds() {
    let Some(gpu) = Gpu::open("graphs_of_modified_problems_read_what_the_memory_then_holds") else { return };
    // SAFETY: as in `one_backward_graph_serves_changing_lengths`.
    unsafe { gpu.device.context().disable_event_tracking() };
    let rows = [gpu.rows(), gpu.modified_rows(), gpu.listed_rows(), gpu.listed_modified_rows()].concat();
    each_modified(&rows, |row, case| with_dtype!(row.dtype(), replays(&gpu, row, case)));
    let rows = [
        gpu.backward_rows(),
        gpu.modified_backward_rows(),
        gpu.listed_backward_rows(),
        gpu.listed_modified_backward_rows(),
    ];
    each_modified(&rows.concat(), |row, case| with_dtype!(row.dtype(), gradient_replays(&gpu, row, case)));
}

/// Takes each row through one of the cases that it takes, which change from row to row: the oracle takes long. Each modifier has had
/// its turn in the end. `replays` says whether the row takes a case.
fn each_modified(rows: &[KernelInfo], replays: impl Fn(&KernelInfo, &Case) -> bool) {
    let mut turns = [0; 7];
    for (i, row) in rows.iter().enumerate() {
        let mut cases: Vec<_> = modified(row).into_iter().enumerate().collect();
        let count = cases.len();
        cases.rotate_left(i % count);
        let taken = cases.into_iter().find(|(_, case)| replays(row, case));
        let (number, _) = taken.unwrap_or_else(|| panic!("{row} took no case"));
        turns[number] += 1;
    }
    assert!(turns.iter().all(|&turns| turns > 0), "{turns:?}");
}

fn replays<T: Poison>(gpu: &Gpu, row: &KernelInfo, case: &Case) -> bool {
    let (stream, lane) = lane(gpu);
    let first = Prepared::<T>::new(case);
    let Some(plan) = planned(first.problem.plan_with_row(&gpu.device, row), row, case) else { return false };
    let mut workspace = Workspace::alloc(&lane, plan.workspace_bytes()).unwrap();
    let mut on_device = OnDevice::new(&stream, &first);
    let graph = captured(&stream, || plan.run(&lane, &mut workspace, on_device.args(&first)));
    assert!(on_device.untouched(&stream, &first), "{row}, {case}: capturing wrote something");
    for turn in 1..3 {
        let prepared = Prepared::<T>::new(&changed(case, turn));
        on_device.write_inputs(&stream, &prepared);
        on_device.poison(&stream, &prepared);
        graph.launch().unwrap();
        let outputs = on_device.outputs(&stream, &prepared).unwrap();
        let report = prepared.judge(&outputs);
        assert!(report.passed(), "{row}, {}: {report}", prepared.case);
        on_device.poison(&stream, &prepared);
        graph.launch().unwrap();
        let again = on_device.outputs(&stream, &prepared).unwrap();
        assert!(same_bits(&outputs, &again), "{row}, {}: replays differ", prepared.case);
        let direct = on_device.run(&stream, &mut workspace, &plan, &prepared).unwrap();
        assert!(same_bits(&outputs, &direct), "{row}, {}: a replay and a launch differ", prepared.case);
    }
    true
}

fn gradient_replays<T: Poison>(gpu: &Gpu, row: &KernelInfo, case: &Case) -> bool {
    let (stream, lane) = lane(gpu);
    let first = backward::Prepared::<T>::new(case);
    let problem = first.problem.to_builder().deterministic(true).build().unwrap();
    let Some(plan) = planned(problem.plan_with_row(&gpu.device, row), row, case) else { return false };
    let mut workspace = Workspace::alloc(&lane, plan.workspace_bytes()).unwrap();
    let mut on_device = of_backward::OnDevice::new(&stream, &first);
    let graph = captured(&stream, || plan.run(&lane, &mut workspace, on_device.args(&first)));
    assert!(on_device.untouched(&stream, &first), "{row}, {case}: capturing wrote something");
    let same = |a: &_, b: &_| of_backward::same_bits(a, b) == [true; 2] && of_backward::same_sums(a, b);
    for turn in 1..3 {
        let prepared = backward::Prepared::<T>::new(&changed(case, turn));
        on_device.write_inputs(&stream, &prepared);
        on_device.poison(&stream, &prepared);
        graph.launch().unwrap();
        let outputs = on_device.outputs(&stream, &prepared).unwrap();
        let report = prepared.judge(&outputs);
        assert!(report.passed(), "{row}, {}: {report}", prepared.case);
        on_device.poison(&stream, &prepared);
        graph.launch().unwrap();
        let again = on_device.outputs(&stream, &prepared).unwrap();
        assert!(same(&outputs, &again), "{row}, {}: replays differ", prepared.case);
        let direct = on_device.run(&stream, &mut workspace, &plan, &prepared).unwrap();
        assert!(same(&outputs, &direct), "{row}, {}: a replay and a launch differ", prepared.case);
    }
    true
}
