//! The rows of e4m3 operands on several streams and in graphs, and what their runs allocate.

use hopper_attention::{
    DType, E4M3, ForwardPlan, ForwardProblem, KernelInfo, Scaling, Stream, Workspace, bf16, kernels,
};
use hopper_attention_tests::allocations::counted;
use hopper_attention_tests::fp8::{Operands, for_row};
use hopper_attention_tests::gpu::fp8::{OnDevice, Outputs};
use hopper_attention_tests::gpu::{Gpu, MODE, NO_FLAGS};
use hopper_attention_tests::problems::{Case, Grid};

use crate::mask_of;

/// A case for a row: several tiles and heads, a ragged end.
fn case(row: &KernelInfo, seed: u64) -> Case {
    let case = Case::new(3 * row.tile_m() + 17, 2 * row.tile_n() + 45, row.head_dim_qk(), mask_of(row.mask()));
    Case { seed, ..case.head_dim_vo(row.head_dim_vo()).heads(2, 6, 2) }
}

fn operands(row: &KernelInfo, seed: u64) -> Operands {
    let case = case(row, seed);
    let place = kernels().iter().position(|other| other == row).unwrap();
    let scaling = Scaling::ALL[place % 3];
    let problem: ForwardProblem = case.options(DType::E4M3).lse(true).scaling(scaling).amax(true).build().unwrap();
    Operands::of_case(&case, &for_row(problem, row), None)
}

fn ready(gpu: &Gpu, row: &KernelInfo) -> (Operands, ForwardPlan) {
    let operands = operands(row, 1);
    let plan = operands.problem().plan_with_row(&gpu.device, row).unwrap();
    (operands, plan)
}

#[test]
fn replays_of_e4m3_read_what_the_memory_then_holds() {
    let Some(gpu) = Gpu::open("replays_of_e4m3_read_what_the_memory_then_holds") else { return };
    // SAFETY: everything of this context object happens on one stream, in its order; nothing relies on events.
    unsafe { gpu.device.context().disable_event_tracking() };
    let stream = gpu.device.context().new_stream().unwrap();
    let lane = Stream::Cuda(stream.clone());
    for row in gpu.fp8_rows() {
        let (first, plan) = ready(&gpu, &row);
        let mut workspace = Workspace::alloc(&lane, plan.workspace_bytes()).unwrap();
        let mut on_device = OnDevice::new(&stream, &first);
        let mut outputs = Outputs::<bf16>::new(&stream, first.problem(), None);
        stream.synchronize().unwrap();

        // The very first launch of this plan is the captured one: planning has loaded all there is to load.
        stream.begin_capture(MODE).unwrap();
        let launched = plan.run(&lane, &mut workspace, outputs.args(on_device.inputs(first.problem())));
        let graph = stream.end_capture(NO_FLAGS).unwrap().expect("a graph");
        launched.unwrap();
        let nothing = outputs.written(&stream).unwrap();
        assert!(nothing.o.iter().all(|o| o.is_nan()), "{row}: capturing wrote something");

        for seed in [1, 2, 3] {
            let operands = operands(&row, seed);
            on_device.write(&stream, &operands);
            outputs.poison(&stream);
            graph.launch().unwrap();
            let written = outputs.written(&stream).unwrap();
            let (o, lse) = written.output(operands.problem());
            let report = operands.expected().check(&o, Some(&lse)).unwrap();
            assert!(report.passed(), "{row}, seed {seed}: {report}");
            // Replayed again, and launched without a graph, the bits are the same.
            outputs.poison(&stream);
            graph.launch().unwrap();
            graph.launch().unwrap();
            assert!(outputs.written(&stream).unwrap().same_bits(&written), "{row}: replays differ");
            let direct = on_device.run::<bf16>(&stream, &mut workspace, &plan, None).unwrap();
            assert!(direct.same_bits(&written), "{row}: a replay and a launch differ");
        }
    }
}

/// On a stream that is not the default one, and on both in turn: the library orders what shares memory, and when it is
/// freed and taken again.
#[test]
fn e4m3_on_a_second_stream() {
    let Some(gpu) = Gpu::open("e4m3_on_a_second_stream") else { return };
    let second = gpu.device.context().new_stream().unwrap();
    for row in gpu.fp8_rows() {
        let (operands, plan) = ready(&gpu, &row);
        let (here, there) = (gpu.lane(), Stream::Cuda(second.clone()));
        let mut workspace = Workspace::alloc(&here, plan.workspace_bytes()).unwrap();
        let on_device = OnDevice::new(&gpu.stream, &operands);
        let first = on_device.run::<bf16>(&gpu.stream, &mut workspace, &plan, None).unwrap();
        let mut outputs = Outputs::<bf16>::new(&gpu.stream, operands.problem(), None);
        for run in 0..Grid::from_env().pick(2, 20) {
            let (poisoned, ran) = if run % 2 == 0 { (&gpu.stream, &there) } else { (&second, &here) };
            outputs.poison(poisoned);
            plan.run(ran, &mut workspace, outputs.args(on_device.inputs(operands.problem()))).unwrap();
            let Stream::Cuda(read) = ran else { unreachable!("made above") };
            assert!(outputs.written(read).unwrap().same_bits(&first), "{row}: run {run} gives other bits");
        }
        // Operands are freed while a kernel on another stream may still read them, and their memory is overwritten.
        let dropped = OnDevice::new(&gpu.stream, &operands);
        outputs.poison(&second);
        plan.run(&there, &mut workspace, outputs.args(dropped.inputs(operands.problem()))).unwrap();
        drop(dropped);
        let other: Vec<_> =
            (0..4).map(|_| gpu.stream.clone_htod(&vec![E4M3::from_bits(0x7f); 1 << 20]).unwrap()).collect();
        assert!(outputs.written(&second).unwrap().same_bits(&first), "{row}: after operands were freed");
        drop(other);
    }
}

#[test]
fn runs_of_e4m3_allocate_no_host_memory() {
    let Some(gpu) = Gpu::open("runs_of_e4m3_allocate_no_host_memory") else { return };
    for row in gpu.fp8_rows() {
        let (operands, plan) = ready(&gpu, &row);
        let mut workspace = Workspace::alloc(&gpu.lane(), plan.workspace_bytes()).unwrap();
        let on_device = OnDevice::new(&gpu.stream, &operands);
        let mut outputs = Outputs::<bf16>::new(&gpu.stream, operands.problem(), None);
        for run in 0..3 {
            let args = outputs.args(on_device.inputs(operands.problem()));
            let (ran, calls) = counted(|| plan.run(&gpu.lane(), &mut workspace, args));
            ran.unwrap();
            assert_eq!(calls, 0, "{row}: run {run} called the allocator");
        }
        let (o, lse) = outputs.written(&gpu.stream).unwrap().output(operands.problem());
        let report = operands.expected().check(&o, Some(&lse)).unwrap();
        assert!(report.passed(), "{row}: {report}");
    }
}
