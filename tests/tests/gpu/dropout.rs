//! Dropout on a GPU: every row that takes it, dense and packed, both passes, and garbage in what is dropped.

use hopper_attention::{Arch, DType, Device, Dropout, KernelInfo, Layout, Workspace, bf16};
use hopper_attention_capi::HATTN_CPU;
use hopper_attention_tests::backward;
use hopper_attention_tests::c::{Plan, problem, tensor};
use hopper_attention_tests::data::{Garbage, Input, Poison, Values};
use hopper_attention_tests::dropout::{cases, packed_cases};
use hopper_attention_tests::gpu::{self, ByAddress, Gpu, OnDevice};
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::runner::Prepared;
use hopper_attention_tests::say;
use hopper_attention_verify::dropout::add_to;

use crate::by_type::{BACKWARD, FORWARD, fitting, judged, judged_backward, modifying, take};
use crate::graphs::{captured, lane};
use crate::packed::{of_random_lengths, packing_rows};
use crate::{mask_of, with_dtype};

/// The rows that take dropout.
fn dropping(gpu: &Gpu, rows: Vec<KernelInfo>, backward: bool) -> Vec<KernelInfo> {
    modifying(gpu, rows, backward, |options| options.dropout(Some(Dropout::new(0.5).unwrap())))
}

/// The same with sequences of lengths that the device knows.
fn packed_dropping(gpu: &Gpu, rows: Vec<KernelInfo>, backward: bool) -> Vec<KernelInfo> {
    packing_rows(dropping(gpu, rows, backward)).into_iter().filter(|row| row.drops(true)).collect()
}

#[test]
fn every_row_drops() {
    let Some(gpu) = Gpu::open("every_row_drops") else { return };
    let rows = dropping(&gpu, gpu.modified_rows(), false);
    take(&gpu, &rows, &cases(Grid::from_env()), "forward with dropout", FORWARD);
}

#[test]
fn every_packing_row_drops() {
    let Some(gpu) = Gpu::open("every_packing_row_drops") else { return };
    let rows = packed_dropping(&gpu, gpu.modified_rows(), false);
    take(&gpu, &rows, &packed_cases(Grid::from_env()), "packed forward with dropout", FORWARD);
}

#[test]
fn every_backward_row_drops() {
    let Some(gpu) = Gpu::open("every_backward_row_drops") else { return };
    let rows = dropping(&gpu, gpu.modified_backward_rows(), true);
    let cases = fitting(&rows, cases(Grid::from_env()));
    take(&gpu, &rows, &cases, "backward with dropout", BACKWARD);
}

#[test]
fn every_packing_backward_row_drops() {
    let Some(gpu) = Gpu::open("every_packing_backward_row_drops") else { return };
    let rows = packed_dropping(&gpu, gpu.modified_backward_rows(), true);
    let cases = fitting(&rows, packed_cases(Grid::from_env()));
    take(&gpu, &rows, &cases, "packed backward with dropout", BACKWARD);
}

/// NaN, infinity and the largest numbers reach the rows that do not drop them, and no others.
#[test]
fn garbage_reaches_no_row_that_drops_it() {
    let Some(gpu) = Gpu::open("garbage_reaches_no_row_that_drops_it") else { return };
    for row in dropping(&gpu, gpu.modified_rows(), false) {
        for input in [Input::K, Input::V] {
            spoiled(&row, input).for_each(|case| with_dtype!(row.dtype(), judged(&gpu, &row, &case)));
        }
    }
    for row in dropping(&gpu, gpu.modified_backward_rows(), true) {
        for input in Input::ALL {
            spoiled(&row, input).for_each(|case| with_dtype!(row.dtype(), judged_backward(&gpu, &row, &case)));
        }
    }
}

fn spoiled(row: &KernelInfo, input: Input) -> impl Iterator<Item = Case> + use<> {
    let case = Case::new(197, 290, row.head_dim_qk(), mask_of(row.mask())).heads(2, 6, 2);
    let case = case.head_dim_vo(row.head_dim_vo());
    // And where no pair stays: what spoils dV then does not spoil dK. Under a causal mask four of the queries have no key.
    let (qk, vo) = (row.head_dim_qk(), row.head_dim_vo());
    let few = Case::new(5, 1, qk, mask_of(row.mask())).head_dim_vo(vo).heads(2, 6, 2);
    Garbage::ALL.into_iter().zip([0.5, 0.9, 0.1, 0.5]).flat_map(move |(garbage, p)| {
        [(&case, p), (&few, 0.999)].map(|(case, p)| {
            let case = Case { values: Values::Garbage(input, garbage), ..case.clone() };
            case.dropout(p)
        })
    })
}

/// The library's own choice takes dropout. Where no sm90 kernel does (windows above head dim 128, packed ones above 64), an sm80
/// kernel runs. Who asks for sm90 is told what it lacks.
#[test]
fn every_problem_with_dropout_has_a_plan() {
    let Some(gpu) = Gpu::open("every_problem_with_dropout_has_a_plan") else { return };
    let device = Device::Cuda(gpu.device.clone());
    let mut by_older = 0;
    for case in [cases(Grid::Full), packed_cases(Grid::Full)].concat() {
        let problem = case.problem(DType::BF16);
        let plan = problem.plan(&device).unwrap_or_else(|error| panic!("{problem}: {error}"));
        if plan.kernel().unwrap().arch() == Arch::Sm80 {
            by_older += 1;
            let asks = problem.to_builder().arch(Arch::Sm90).build().unwrap();
            let text = asks.plan(&device).unwrap_err().to_string();
            assert!(text.starts_with("unsupported: dropout with sm90 kernels"), "{problem}: {text}");
        }
    }
    assert!(by_older > 0);
}

fn of_row(row: &KernelInfo) -> Case {
    let case = Case::new(97, 130, row.head_dim_qk(), mask_of(row.mask())).head_dim_vo(row.head_dim_vo());
    case.heads(2, 4, 2).dropout(0.3)
}

/// Runs with a state, and with those that differ in one bit of one word: `same` compares with what is expected of the state.
fn each_word_counts<O>(
    row: &KernelInfo,
    state: [i32; 4],
    mut run: impl FnMut([i32; 4]) -> O,
    same: impl Fn(&O) -> bool,
) {
    assert!(same(&run(state)), "{row}");
    for word in 0..4 {
        let other = std::array::from_fn(|at| if at == word { state[at] ^ 1 } else { state[at] });
        assert!(!same(&run(other)), "{row}: {other:?}");
    }
}

/// A seed and an offset in host memory give the bits of those in the GPU's, in every row. Each of their words counts.
#[test]
fn the_state_may_be_on_the_host() {
    let Some(gpu) = Gpu::open("the_state_may_be_on_the_host") else { return };
    host_states(&gpu, dropping, of_row);
}

/// The same of packed sequences, both passes.
#[test]
fn the_state_of_packed_sequences_may_be_on_the_host() {
    let Some(gpu) = Gpu::open("the_state_of_packed_sequences_may_be_on_the_host") else { return };
    host_states(&gpu, packed_dropping, packed_of_row);
}

/// Both passes, in every row that `dropping` leaves of the modified ones, with `case` of the row.
fn host_states(gpu: &Gpu, dropping: fn(&Gpu, Vec<KernelInfo>, bool) -> Vec<KernelInfo>, case: fn(&KernelInfo) -> Case) {
    for row in dropping(gpu, gpu.modified_rows(), false) {
        with_dtype!(row.dtype(), host_state(gpu, &row, &case(&row)));
    }
    for row in dropping(gpu, gpu.modified_backward_rows(), true) {
        with_dtype!(row.dtype(), host_state_backward(gpu, &row, &case(&row)));
    }
}

/// The same of a backward with a bias, whose gradient is asked for: of dense tensors, and of packed sequences.
#[test]
fn the_state_beside_the_gradient_of_a_bias_may_be_on_the_host() {
    let Some(gpu) = Gpu::open("the_state_beside_the_gradient_of_a_bias_may_be_on_the_host") else { return };
    let mut ran = [0; 2];
    for row in dropping(&gpu, gpu.modified_backward_rows(), true) {
        for (packed, case) in [of_row(&row), packed_of_row(&row)].into_iter().enumerate() {
            if !row.drops(packed == 1) || !row.adds_bias(packed == 1) {
                say(&format!("skipped: {row} has no dropout and bias{}", [", dense", ", packed"][packed]));
                continue;
            }
            let case = case.bias("f32:hq".parse().expect("a bias"));
            with_dtype!(row.dtype(), host_state_backward(&gpu, &row, &case));
            ran[packed] += 1;
        }
    }
    assert!(ran.iter().all(|&ran| ran > 0), "{ran:?}");
}

fn packed_of_row(row: &KernelInfo) -> Case {
    of_random_lengths(row).dropout(0.3)
}

fn host_state<T: Poison>(gpu: &Gpu, row: &KernelInfo, case: &Case) {
    let prepared = Prepared::<T>::new(case);
    let plan = prepared.problem.plan_with_row(&gpu.device, row).unwrap();
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let mut on_device = OnDevice::new(&gpu.stream, &prepared);
    let expected = on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
    let run = |state: [i32; 4]| {
        on_device.poison(&gpu.stream, &prepared);
        plan.run(&gpu.lane(), &mut workspace, add_to(&state, on_device.args(&prepared))).unwrap();
        on_device.outputs(&gpu.stream, &prepared).unwrap()
    };
    let same = |outputs: &_| gpu::same_bits(outputs, &expected);
    each_word_counts(row, prepared.case.dropout_state().unwrap(), run, same);
}

fn host_state_backward<T: Poison>(gpu: &Gpu, row: &KernelInfo, case: &Case) {
    let prepared = backward::Prepared::<T>::new(case);
    let problem = prepared.problem.to_builder().deterministic(true).build().unwrap();
    let plan = problem.plan_with_row(&gpu.device, row).unwrap();
    let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
    let mut on_device = gpu::backward::OnDevice::new(&gpu.stream, &prepared);
    let expected = on_device.run(&gpu.stream, &mut workspace, &plan, &prepared).unwrap();
    let run = |state: [i32; 4]| {
        on_device.poison(&gpu.stream, &prepared);
        plan.run(&gpu.lane(), &mut workspace, add_to(&state, on_device.args(&prepared))).unwrap();
        on_device.outputs(&gpu.stream, &prepared).unwrap()
    };
    let same = |outputs: &_| same_gradients(outputs, &expected);
    each_word_counts(row, prepared.case.dropout_state().unwrap(), run, same);
}

/// Whether all gradients have the same bits: also that of a bias, where there is one.
fn same_gradients<T: Poison>(a: &backward::Outputs<T>, b: &backward::Outputs<T>) -> bool {
    gpu::backward::same_bits(a, b) == [true; 2] && gpu::backward::same_sums(a, b)
}

/// A captured graph keeps the seed and the offset that were in host memory at the capture, whatever that memory holds
/// at a launch of the graph. A run without a graph reads what the memory then holds.
#[test]
fn a_graph_keeps_the_state_of_the_host() {
    let Some(gpu) = Gpu::open("a_graph_keeps_the_state_of_the_host") else { return };
    // SAFETY: everything of this context object happens on one stream, in its order; nothing relies on events.
    unsafe { gpu.device.context().disable_event_tracking() };
    for row in dropping(&gpu, gpu.modified_rows(), false) {
        with_dtype!(row.dtype(), kept_state(&gpu, &row));
    }
    for row in dropping(&gpu, gpu.modified_backward_rows(), true) {
        with_dtype!(row.dtype(), kept_state_backward(&gpu, &row));
    }
}

/// The words of a state, each with other bits.
fn others(state: [i32; 4]) -> [i32; 4] {
    state.map(|word| word ^ 0x1234_5678)
}

fn kept_state<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    let (stream, lane) = lane(gpu);
    let mut prepared = Prepared::<T>::new(&of_row(row));
    let mut words = prepared.case.dropout_state().unwrap();
    // The GPU's memory holds the others from the beginning: it is not what a run with words of the host reads.
    prepared.dropout_state = Some(others(words));
    let plan = prepared.problem.plan_with_row(&gpu.device, row).unwrap();
    let mut workspace = Workspace::alloc(&lane, plan.workspace_bytes()).unwrap();
    let mut on_device = OnDevice::new(&stream, &prepared);
    plan.run(&lane, &mut workspace, add_to(&words, on_device.args(&prepared))).unwrap();
    let expected = on_device.outputs(&stream, &prepared).unwrap();
    on_device.poison(&stream, &prepared);
    let graph = captured(&stream, || plan.run(&lane, &mut workspace, add_to(&words, on_device.args(&prepared))));
    assert!(on_device.untouched(&stream, &prepared), "{row}: capturing wrote something");
    words = others(words);
    for _ in 0..2 {
        on_device.poison(&stream, &prepared);
        graph.launch().unwrap();
        let outputs = on_device.outputs(&stream, &prepared).unwrap();
        assert!(gpu::same_bits(&outputs, &expected), "{row}: the graph read another state");
    }
    on_device.poison(&stream, &prepared);
    plan.run(&lane, &mut workspace, add_to(&words, on_device.args(&prepared))).unwrap();
    let outputs = on_device.outputs(&stream, &prepared).unwrap();
    assert!(!gpu::same_bits(&outputs, &expected), "{row}: a run read the state of before");
    let of_memory = on_device.run(&stream, &mut workspace, &plan, &prepared).unwrap();
    assert!(gpu::same_bits(&outputs, &of_memory), "{row}: the same words in the GPU's memory give other bits");
}

fn kept_state_backward<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    let (stream, lane) = lane(gpu);
    let mut prepared = backward::Prepared::<T>::new(&of_row(row));
    let mut words = prepared.case.dropout_state().unwrap();
    prepared.dropout_state = Some(others(words));
    let problem = prepared.problem.to_builder().deterministic(true).build().unwrap();
    let plan = problem.plan_with_row(&gpu.device, row).unwrap();
    let mut workspace = Workspace::alloc(&lane, plan.workspace_bytes()).unwrap();
    let mut on_device = gpu::backward::OnDevice::new(&stream, &prepared);
    plan.run(&lane, &mut workspace, add_to(&words, on_device.args(&prepared))).unwrap();
    let expected = on_device.outputs(&stream, &prepared).unwrap();
    on_device.poison(&stream, &prepared);
    let graph = captured(&stream, || plan.run(&lane, &mut workspace, add_to(&words, on_device.args(&prepared))));
    assert!(on_device.untouched(&stream, &prepared), "{row}: capturing wrote something");
    words = others(words);
    for _ in 0..2 {
        on_device.poison(&stream, &prepared);
        graph.launch().unwrap();
        let outputs = on_device.outputs(&stream, &prepared).unwrap();
        assert!(same_gradients(&outputs, &expected), "{row}: the graph read another state");
    }
    on_device.poison(&stream, &prepared);
    plan.run(&lane, &mut workspace, add_to(&words, on_device.args(&prepared))).unwrap();
    let outputs = on_device.outputs(&stream, &prepared).unwrap();
    assert!(!same_gradients(&outputs, &expected), "{row}: a run read the state of before");
    let of_memory = on_device.run(&stream, &mut workspace, &plan, &prepared).unwrap();
    assert!(same_gradients(&outputs, &of_memory), "{row}: the same words in the GPU's memory give other bits");
}

/// The same through C, where the tensor says that it is in host memory.
#[test]
fn c_takes_a_state_on_the_host() {
    let Some(gpu) = Gpu::open("c_takes_a_state_on_the_host") else { return };
    let prepared = Prepared::<bf16>::new(&Case::new(97, 130, 64, hopper_attention::Mask::causal()).dropout(0.3));
    let plan = Plan::new(&problem(&prepared.problem), 0).unwrap();
    let on_device = OnDevice::new(&gpu.stream, &prepared);
    let mut memory = on_device.c_memory(&gpu.stream, &prepared);
    let state = prepared.case.dropout_state().unwrap();
    let address = state.as_ptr().expose_provenance() as u64;
    memory.dropout_state = Some(tensor(address, DType::I32, HATTN_CPU, Layout::contiguous([4]).unwrap()));
    assert_eq!(plan.workspace_bytes(), 0);
    // SAFETY: the memory outlives the work, for which `outputs` waits.
    unsafe { plan.run(&memory, gpu.stream.cu_stream().cast()).unwrap() };
    let report = prepared.judge(&on_device.outputs(&gpu.stream, &prepared).unwrap());
    assert!(report.passed(), "{report}");
    // Q there is refused.
    memory.q = tensor(address, DType::BF16, HATTN_CPU, prepared.q.layout());
    // SAFETY: as above; the address is not used.
    let (_, text) = unsafe { plan.run(&memory, gpu.stream.cu_stream().cast()).unwrap_err() };
    assert!(text.starts_with("q: on device cpu;"), "{text}");
}
