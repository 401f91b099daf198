//! Packed sequences and used lengths on a GPU.

use std::sync::Arc;

use hopper_attention::cudarc::driver::{CudaSlice, CudaStream};
use hopper_attention::{
    Dims, Error, ForwardProblem, KernelInfo, Layout, Lengths, Slot, Stream, TensorRef, Workspace, bf16, f16,
};
use hopper_attention_tests::bias::Bias;
use hopper_attention_tests::data::Poison;
use hopper_attention_tests::gpu::{Gpu, MODE, NO_FLAGS, OnDevice, backward as of_backward};
use hopper_attention_tests::packing::{Kind, Packing};
use hopper_attention_tests::problems::{Case, Grid, fitting, largest_head_dim, random};
use hopper_attention_tests::runner::{Prepared, Runner};
use hopper_attention_tests::{backward, packed};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::bias::adding;
use crate::{mask_of, with_dtype};

pub(crate) fn packing_rows(rows: Vec<KernelInfo>) -> Vec<KernelInfo> {
    rows.into_iter().filter(KernelInfo::packs).collect()
}

fn all_cases(rows: &[KernelInfo]) -> Vec<Case> {
    let grid = Grid::from_env();
    let mut all = packed::cases(grid);
    all.extend(packed::drawn(random::seed(), largest_head_dim(rows), grid.pick(8, 300)));
    fitting(rows, all)
}

/// Runs cases through the rows of their type.
type Run = fn(&Gpu, &[KernelInfo], &[Case], &mut Runner);

/// Takes packed cases through those of these rows that pack: by `bf16` and `f16`, each every second case.
fn take_packed(gpu: &Gpu, rows: Vec<KernelInfo>, pass: &str, [bf16, f16]: [Run; 2]) {
    let rows = packing_rows(rows);
    assert!(rows.len() >= 4, "{rows:?}");
    let [even, odd] = random::halves(all_cases(&rows));
    let mut runner = Runner::new(&rows);
    bf16(gpu, &rows, &even, &mut runner);
    f16(gpu, &rows, &odd, &mut runner);
    runner.record(pass, Grid::from_env(), &gpu.card(), &gpu.driver());
    runner.finish();
}

#[test]
fn every_packing_row_takes_packed_cases() {
    let Some(gpu) = Gpu::open("every_packing_row_takes_packed_cases") else { return };
    take_packed(&gpu, gpu.rows(), "forward packed", [crate::grid::run::<bf16>, crate::grid::run::<f16>]);
}

#[test]
fn every_packing_backward_row_takes_packed_cases() {
    let Some(gpu) = Gpu::open("every_packing_backward_row_takes_packed_cases") else { return };
    let runs: [Run; 2] = [crate::backward::run::<bf16>, crate::backward::run::<f16>];
    take_packed(&gpu, gpu.backward_rows(), "backward packed", runs);
}

/// Kernels that do not pack say so.
#[test]
fn other_rows_refuse_by_name() {
    let Some(gpu) = Gpu::open("other_rows_refuse_by_name") else { return };
    for row in gpu.rows().into_iter().filter(|row| !row.packs()) {
        let dims = Dims::new(2, 100, 1, row.head_dim_qk());
        let problem =
            ForwardProblem::builder(row.dtype(), dims).mask(mask_of(row.mask())).packed(true).build().unwrap();
        let error = problem.plan_with_row(&gpu.device, &row).unwrap_err();
        assert!(
            matches!(error, Error::Unsupported { .. }) && error.to_string().contains("packed sequences"),
            "{error}"
        );
    }
}

/// A case of five packed sequences for a row, some of whose keys are not used.
pub(crate) fn of_random_lengths(row: &KernelInfo) -> Case {
    let case = Case::new(260, 300, row.head_dim_qk(), mask_of(row.mask())).head_dim_vo(row.head_dim_vo());
    let kind = Kind { packed: [true; 2], used: [false, true], fill_gaps: true };
    Case { packing: Packing::random(kind, 5, [260, 300], 3), ..case.heads(5, 4, 2) }
}

/// A case of packed sequences for a row, with these lengths on both sides.
pub(crate) fn of_lengths(row: &KernelInfo, lengths: &[usize]) -> Case {
    let mut offsets = vec![0i32];
    lengths.iter().for_each(|&len| offsets.push(offsets.last().unwrap() + i32::try_from(len).unwrap()));
    let total = lengths.iter().sum();
    let mut case = Case::new(total, total, row.head_dim_qk(), mask_of(row.mask())).heads(lengths.len(), 4, 2);
    case.dims.head_dim_vo = row.head_dim_vo();
    let packing = Packing { cu_seqlens_q: Some(offsets.clone()), cu_seqlens_kv: Some(offsets), ..Packing::default() };
    Case { packing, ..case }
}

/// A sequence has the same bits as the dense problem with the same row of the table, whatever else is in the batch.
#[test]
fn a_sequence_has_the_bits_of_the_dense_problem() {
    let Some(gpu) = Gpu::open("a_sequence_has_the_bits_of_the_dense_problem") else { return };
    for row in packing_rows(gpu.rows()) {
        with_dtype!(row.dtype(), same_as_dense(&gpu, &row));
    }
}

fn same_as_dense<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    let lengths = [197, 105, 640, 128, 333]; // of one row, or some, a mask would be of another class
    let packed = Prepared::<T>::new(&of_lengths(row, &lengths));
    let run = |prepared: &Prepared<T>| {
        let plan = hopper_attention::internal::plan_with_shares(&prepared.problem, &gpu.device, row, 1).unwrap();
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        OnDevice::new(&gpu.stream, prepared).run(&gpu.stream, &mut workspace, &plan, prepared).unwrap()
    };
    let outputs = run(&packed);
    let (q, k, v) = (packed.q.tensor(), packed.k.tensor(), packed.v.tensor());
    let (o, lse) = (outputs.o.tensor(), outputs.lse.as_ref().unwrap().values());
    let total: usize = lengths.iter().sum();
    let mut begin = 0;
    for len in lengths {
        let mut case = Case::new(len, len, row.head_dim_qk(), mask_of(row.mask())).heads(1, 4, 2);
        case.dims.head_dim_vo = row.head_dim_vo();
        let dense = Prepared::<T>::edited(&case, |input, tensor| {
            let from = match input {
                hopper_attention_tests::data::Input::Q => &q,
                hopper_attention_tests::data::Input::K => &k,
                _ => &v,
            };
            for token in 0..len {
                for head in 0..tensor.shape()[2] {
                    tensor.row_mut(0, token, head).copy_from_slice(from.row(0, begin + token, head));
                }
            }
        });
        let own = run(&dense);
        let (own_o, own_lse) = (own.o.tensor(), own.lse.as_ref().unwrap().values());
        for token in 0..len {
            for head in 0..4 {
                let bits = |o: &[f64]| o.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                let same = bits(own_o.row(0, token, head)) == bits(o.row(0, begin + token, head));
                let lses = [own_lse[head * len + token], lse[head * total + begin + token]].map(f64::to_bits);
                assert!(
                    same && lses[0] == lses[1],
                    "{row}: sequence of {len} from {begin}: token {token}, head {head}"
                );
            }
        }
        begin += len;
    }
}

/// One captured graph serves all lengths within its capacity: only the arrays on the device change.
#[test]
fn one_graph_serves_changing_lengths() {
    let Some(gpu) = Gpu::open("one_graph_serves_changing_lengths") else { return };
    // SAFETY: everything of this context object happens on one stream, in its order; nothing relies on events.
    unsafe { gpu.device.context().disable_event_tracking() };
    for row in packing_rows(gpu.rows()) {
        with_dtype!(row.dtype(), replays(&gpu, &row));
    }
}

const SEQUENCES: usize = 9;
const ROWS: usize = 900;

fn replays<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    let stream = gpu.device.context().new_stream().unwrap();
    let lane = Stream::Cuda(stream.clone());
    let prepared = |seed: u64| {
        let mut case = Case::new(ROWS, ROWS, row.head_dim_qk(), mask_of(row.mask())).heads(SEQUENCES, 2, 1);
        case.dims.head_dim_vo = row.head_dim_vo();
        let kind = Kind { packed: [true; 2], used: [false, true], fill_gaps: true };
        Prepared::<T>::new(&Case { packing: Packing::random(kind, SEQUENCES, [ROWS; 2], seed), seed, ..case })
    };
    let first = prepared(0);
    let plan = first.problem.plan_with_row(&gpu.device, row).unwrap();
    let mut workspace = Workspace::alloc(&lane, plan.workspace_bytes()).unwrap();
    let mut on_device = OnDevice::new(&stream, &first);
    // Arrays that the graph reads, and that change between its launches.
    let mut arrays: Vec<(Slot, CudaSlice<i32>)> =
        first.case.packing.lists().map(|(slot, list)| (slot, stream.clone_htod(list).unwrap())).collect();
    stream.synchronize().unwrap();
    stream.begin_capture(MODE).unwrap();
    let mut args = on_device.args(&first);
    for (slot, array) in &arrays {
        // SAFETY: they hold legal lengths at every launch of the graph.
        args = unsafe { args.lengths_unchecked(*slot, list(array)) };
    }
    let launched = plan.run(&lane, &mut workspace, args);
    let graph = stream.end_capture(NO_FLAGS).unwrap().expect("a graph");
    launched.unwrap();
    for seed in 1..Grid::from_env().pick(5, 8) {
        let prepared = prepared(seed);
        on_device.write_inputs(&stream, &prepared);
        on_device.poison(&stream, &prepared);
        for ((_, array), (_, list)) in arrays.iter_mut().zip(prepared.case.packing.lists()) {
            stream.memcpy_htod(list, array).unwrap();
        }
        graph.launch().unwrap();
        let outputs = on_device.outputs(&stream, &prepared).unwrap();
        let report = prepared.judge(&outputs);
        assert!(report.passed(), "{row}, seed {seed}: {report}");
    }
}

pub(crate) fn list(array: &CudaSlice<i32>) -> TensorRef<'_, i32, 1> {
    TensorRef::cuda(array.slice(..), Layout::contiguous([array.len()]).unwrap()).unwrap()
}

/// Offsets and lengths that are garbage: nothing outside of the tensors is read or written (with memcheck: nothing illegal), and
/// rows of no clamped sequence stay as they are.
#[test]
fn garbage_lengths_write_only_rows_of_clamped_sequences() {
    let Some(gpu) = Gpu::open("garbage_lengths_write_only_rows_of_clamped_sequences") else { return };
    let draws = Grid::from_env().pick(3, 40);
    let mut rng = StdRng::seed_from_u64(random::seed());
    let of = |rows: Vec<KernelInfo>, bias: Bias| rows.into_iter().map(move |row| (row, bias));
    let bias = "bf16:hq".parse().unwrap();
    let of_bias = of(adding(gpu.modified_rows(), true), bias);
    for (row, bias) in of(packing_rows(gpu.rows()), Bias::NONE).chain(of_bias) {
        for _ in 0..draws {
            with_dtype!(row.dtype(), garbage(&gpu, &row, bias, &mut rng));
        }
    }
    let of_bias = of(adding(gpu.modified_backward_rows(), true), bias);
    for (row, bias) in of(packing_rows(gpu.backward_rows()), Bias::NONE).chain(of_bias) {
        for draw in 0..draws {
            with_dtype!(row.dtype(), garbage_backward(&gpu, &row, bias, &mut rng, draw % 2 == 0));
        }
    }
}

/// Arrays of any numbers: near the tensor's rows, repeated, falling, and at the ends of the type.
pub(crate) fn hostile(rng: &mut StdRng, count: usize, rows: usize) -> Vec<i32> {
    let rows = i32::try_from(rows).unwrap();
    let number = |rng: &mut StdRng| match rng.random_range(0..5) {
        0 => rng.random(),
        1 => [i32::MIN, i32::MAX, 0, rows, rows + 1, -1][rng.random_range(0..6)],
        _ => rng.random_range(-rows..2 * rows + 1),
    };
    (0..count).map(|_| number(rng)).collect()
}

/// A case whose lists are garbage. Its prepared inputs are of the legal lists of another, and so is what its bias covers.
fn hostile_case(row: &KernelInfo, bias: Bias, rng: &mut StdRng) -> (Case, [Vec<i32>; 4]) {
    let (batch, rows) = ([1, 3, 40, 1100, 3000][rng.random_range(0..5)], [105, 130, 700][rng.random_range(0..3)]);
    let mut case = Case::new(rows, rows, row.head_dim_qk(), mask_of(row.mask())).heads(batch, 2, 1).bias(bias);
    case.dims.head_dim_vo = row.head_dim_vo();
    let kind = Kind { packed: [true; 2], used: [true; 2], fill_gaps: false };
    case.packing = Packing::random(kind, batch, [rows; 2], 1);
    let counts = [batch + 1, batch + 1, batch, batch];
    (case, counts.map(|count| hostile(rng, count, rows)))
}

pub(crate) const LISTS: [Slot; 4] = [Slot::CuSeqlensQ, Slot::CuSeqlensKv, Slot::SequsedQ, Slot::SequsedKv];

pub(crate) fn uploaded(stream: &Arc<CudaStream>, lists: &[Vec<i32>; 4]) -> [CudaSlice<i32>; 4] {
    [0, 1, 2, 3].map(|i| stream.clone_htod(&lists[i]).unwrap())
}

/// The rows of both sides that belong to a clamped sequence. A bias may make sequences shorter.
pub(crate) fn claims(problem: &ForwardProblem, lists: &[Vec<i32>; 4]) -> [Vec<bool>; 2] {
    let [cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv] = lists.each_ref().map(|list| Some(&list[..]));
    let lengths = Lengths { cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv };
    let mut claims = [problem.dims().seqlen_q, problem.dims().seqlen_kv].map(|rows| vec![false; rows]);
    for sides in lengths.sequences(problem) {
        claims.iter_mut().zip(sides).for_each(|(claimed, rows)| claimed[rows.range()].fill(true));
    }
    claims
}

fn garbage<T: Poison>(gpu: &Gpu, row: &KernelInfo, bias: Bias, rng: &mut StdRng) {
    let (case, lists) = hostile_case(row, bias, rng);
    let prepared = Prepared::<T>::new(&case);
    let plan = prepared.problem.plan_with_row(&gpu.device, row).unwrap();
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let mut on_device = OnDevice::new(&gpu.stream, &prepared);
    let arrays = uploaded(&gpu.stream, &lists);
    let mut args = on_device.args(&prepared);
    for (slot, array) in LISTS.into_iter().zip(&arrays) {
        // SAFETY: wrong numbers are what is tested. The rows of outputs are looked at, and nothing else relies on them.
        args = unsafe { args.lengths_unchecked(slot, list(array)) };
    }
    plan.run(&gpu.lane(), &mut workspace, args).unwrap();
    gpu.stream.synchronize().unwrap_or_else(|error| panic!("{row}: {error} with {lists:?}"));
    let o = gpu.stream.clone_dtoh(&on_device.o).unwrap();
    let [of_q, _] = claims(&prepared.problem, &lists);
    only_claimed(&o, prepared.outputs().o.layout(), &of_q, &|| format!("{row}: o with {lists:?}"));
    on_device.check_inputs(&gpu.stream, &prepared).unwrap();
}

/// Whether all that is no poison is in claimed rows of a packed tensor between guard bands.
fn only_claimed<T: Poison>(data: &[T], layout: Layout<4>, claimed: &[bool], what: &dyn Fn() -> String) {
    let guard = hopper_attention_tests::data::GUARD;
    let [_, rows, heads, dim] = layout.shape();
    let mut may_be_written = vec![false; data.len()];
    for row in (0..rows).filter(|&row| claimed[row]) {
        for head in 0..heads {
            for x in 0..dim {
                may_be_written[guard + layout.offset([0, row, head, x]).unwrap()] = true;
            }
        }
    }
    let stray = data.iter().zip(&may_be_written).position(|(x, may_be)| !may_be && !x.is_poison());
    assert!(stray.is_none(), "{}: element {stray:?} was written", what());
}

fn garbage_backward<T: Poison>(gpu: &Gpu, row: &KernelInfo, bias: Bias, rng: &mut StdRng, deterministic: bool) {
    let (case, lists) = hostile_case(row, bias, rng);
    let prepared = backward::Prepared::<T>::new(&case);
    let problem = prepared.problem.to_builder().deterministic(deterministic).build().unwrap();
    let plan = problem.plan_with_row(&gpu.device, row).unwrap();
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let mut on_device = of_backward::OnDevice::new(&gpu.stream, &prepared);
    let arrays = uploaded(&gpu.stream, &lists);
    let mut args = on_device.args(&prepared);
    for (slot, array) in LISTS.into_iter().zip(&arrays) {
        // SAFETY: as in `garbage`.
        args = unsafe { args.lengths_unchecked(slot, list(array)) };
    }
    plan.run(&gpu.lane(), &mut workspace, args).unwrap();
    gpu.stream.synchronize().unwrap_or_else(|error| panic!("{row}: {error} with {lists:?}"));
    let claims = claims(problem.forward(), &lists);
    let outputs = prepared.outputs();
    let layouts = [outputs.d_q.layout(), outputs.d_k.layout(), outputs.d_v.layout()];
    for (i, (slice, layout)) in on_device.outputs.iter().zip(layouts).enumerate() {
        let data = gpu.stream.clone_dtoh(slice).unwrap();
        only_claimed(&data, layout, &claims[i.min(1)], &|| format!("{row}: gradient {i} with {lists:?}"));
    }
}

/// Many sequences, and one long one beside many short ones: more than the table makes in one CTA, and more than it keeps in
/// shared memory.
#[test]
fn many_sequences() {
    let Some(gpu) = Gpu::open("many_sequences") else { return };
    let mut rng = StdRng::seed_from_u64(7);
    let mut lengths = |count: usize| {
        let mut lengths: Vec<usize> = (0..count).map(|_| rng.random_range(0..17)).collect();
        lengths[count / 3] = 1500;
        lengths
    };
    // The table is the same for each row. So the most sequences are for the first row alone: the oracle takes long.
    let most = Grid::from_env().pick(vec![1500], vec![1024, 5000, 12_000]);
    for (i, row) in packing_rows(gpu.rows()).into_iter().filter(|row| row.head_dim_qk() == 64).enumerate() {
        for &count in if i == 0 { &most[..] } else { &[1025] } {
            with_dtype!(row.dtype(), once(&gpu, &of_lengths(&row, &lengths(count)), &row));
        }
    }
    for (i, row) in packing_rows(gpu.backward_rows()).into_iter().filter(|row| row.head_dim_qk() == 64).enumerate() {
        let count = if i == 0 { most[most.len() / 2] } else { 1025 };
        with_dtype!(row.dtype(), once_backward(&gpu, &of_lengths(&row, &lengths(count)), &row));
    }
}

fn once<T: Poison>(gpu: &Gpu, case: &Case, row: &KernelInfo) {
    let prepared = Prepared::<T>::new(case);
    let plan = prepared.problem.plan_with_row(&gpu.device, row).unwrap();
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let outputs = OnDevice::new(&gpu.stream, &prepared).run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
    let report = prepared.judge(&outputs);
    assert!(report.passed(), "{row}, {} sequences: {report}", case.dims.batch);
}

fn once_backward<T: Poison>(gpu: &Gpu, case: &Case, row: &KernelInfo) {
    let prepared = backward::Prepared::<T>::new(case);
    let plan = prepared.problem.plan_with_row(&gpu.device, row).unwrap();
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let outputs =
        of_backward::OnDevice::new(&gpu.stream, &prepared).run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
    let report = prepared.judge(&outputs);
    assert!(report.passed(), "{row}, {} sequences: {report}", case.dims.batch);
}

/// No sequence at all, and sides without rows: nothing is read, and gaps are filled.
#[test]
fn sides_without_rows() {
    let Some(gpu) = Gpu::open("sides_without_rows") else { return };
    let fill = |packed| Kind { packed, used: [false; 2], fill_gaps: true };
    let sizes = [
        (0, 9, 9, [true; 2]),
        (3, 0, 40, [true; 2]),
        (3, 40, 0, [true; 2]),
        (2, 0, 200, [false, true]),
        (2, 70, 0, [true, false]),
    ];
    for (batch, seqlen_q, seqlen_kv, packed) in sizes {
        let case = |row: &KernelInfo| {
            let mut case = Case::new(seqlen_q, seqlen_kv, row.head_dim_qk(), mask_of(row.mask())).heads(batch, 2, 1);
            case.dims.head_dim_vo = row.head_dim_vo();
            Case { packing: Packing::random(fill(packed), batch, [seqlen_q, seqlen_kv], 3), ..case }
        };
        // Sizes of which a mask hides nothing have rows of class full only.
        for row in packing_rows(gpu.rows()).into_iter().filter(|row| row.mask() == hopper_attention::MaskClass::Full) {
            with_dtype!(row.dtype(), once(&gpu, &case(&row), &row));
        }
        for row in packing_rows(gpu.backward_rows()) {
            if row.mask() == hopper_attention::MaskClass::Full {
                with_dtype!(row.dtype(), once_backward(&gpu, &case(&row), &row));
            }
        }
    }
}
