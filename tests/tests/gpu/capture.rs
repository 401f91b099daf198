//! CUDA graphs: a captured forward pass replayed on values that change in between.

use hopper_attention::internal::plan_with_splits;
use hopper_attention::{Error, KernelInfo, Stream, Workspace};
use hopper_attention_tests::data::Poison;
use hopper_attention_tests::gpu::{Gpu, MODE, NO_FLAGS, OnDevice, same_bits};
use hopper_attention_tests::problems::Case;
use hopper_attention_tests::runner::Prepared;

use crate::{mask_of, with_dtype};

fn prepared<T: Poison>(row: &KernelInfo, seed: u64) -> Prepared<T> {
    // (With fewer keys a window of 100 keys would hide none, and be no window.)
    let seqlen_kv = (3 * row.tile_n() + 1).max(193);
    let case = Case::new(2 * row.tile_m() + 33, seqlen_kv, row.head_dim_qk(), mask_of(row.mask()));
    let mut case = case.heads(2, 4, 1);
    case.dims.head_dim_vo = row.head_dim_vo();
    Prepared::new(&Case { seed, ..case })
}

#[test]
fn replays_read_what_the_memory_then_holds() {
    let Some(gpu) = Gpu::open("replays_read_what_the_memory_then_holds") else { return };
    // SAFETY: everything of this context object happens on one stream, in its order; nothing relies on events.
    unsafe { gpu.device.context().disable_event_tracking() };
    for row in gpu.rows() {
        for (shares, splits) in [(1, 1), (2, 1), (8, 1), (2, 2)] {
            if shares <= row.most_shares() {
                with_dtype!(row.dtype(), replays(&gpu, &row, [shares, splits]));
            }
        }
    }
}

fn replays<T: Poison>(gpu: &Gpu, row: &KernelInfo, [shares, splits]: [usize; 2]) {
    // The default stream cannot be captured.
    let stream = gpu.device.context().new_stream().unwrap();
    let first = prepared::<T>(row, 1);
    let plan = plan_with_splits(&first.problem, &gpu.device, row, shares, splits).unwrap();
    let mut workspace = Workspace::alloc(&Stream::Cuda(stream.clone()), plan.workspace_bytes()).unwrap();
    let mut on_device = OnDevice::new(&stream, &first);
    stream.synchronize().unwrap();

    // The very first launch of this plan is the captured one: planning has loaded all there is to load.
    stream.begin_capture(MODE).unwrap();
    let launched = plan.run(&Stream::Cuda(stream.clone()), &mut workspace, on_device.args(&first));
    let graph = stream.end_capture(NO_FLAGS).unwrap().expect("a graph");
    launched.unwrap();
    assert!(on_device.untouched(&stream, &first), "{row}: capturing wrote something");

    for seed in [1, 2, 3] {
        let prepared = prepared::<T>(row, seed);
        on_device.write_inputs(&stream, &prepared);
        on_device.poison(&stream, &prepared);
        graph.launch().unwrap();
        let outputs = on_device.outputs(&stream, &prepared).unwrap();
        let report = prepared.judge(&outputs);
        assert!(report.passed(), "{row}, seed {seed}: {report}");
        // Replayed again, and launched without a graph, the bits are the same.
        on_device.poison(&stream, &prepared);
        graph.launch().unwrap();
        graph.launch().unwrap();
        assert!(same_bits(&outputs, &on_device.outputs(&stream, &prepared).unwrap()), "{row}: replays differ");
        let direct = on_device.run(&stream, &mut workspace, &plan, &prepared).unwrap();
        assert!(same_bits(&outputs, &direct), "{row}: a replay and a launch differ");
    }
}

/// With event tracking on, a capture would record waits that make it fail later and elsewhere.
#[test]
fn captures_are_refused_while_events_are_tracked() {
    let Some(gpu) = Gpu::open("captures_are_refused_while_events_are_tracked") else { return };
    let row = gpu.rows()[0];
    with_dtype!(row.dtype(), refused(&gpu, &row));
}

fn refused<T: Poison>(gpu: &Gpu, row: &KernelInfo) {
    let stream = gpu.device.context().new_stream().unwrap();
    let prepared = prepared::<T>(row, 5);
    let plan = prepared.problem.plan_with_row(&gpu.device, row).unwrap();
    let lane = Stream::Cuda(stream.clone());
    let mut workspace = Workspace::alloc(&lane, plan.workspace_bytes()).unwrap();
    let mut on_device = OnDevice::new(&stream, &prepared);
    stream.synchronize().unwrap();
    assert!(gpu.device.context().is_managing_stream_synchronization(), "a context of two streams tracks events");
    stream.begin_capture(MODE).unwrap();
    let run = plan.run(&lane, &mut workspace, on_device.args(&prepared));
    let alloc = Workspace::alloc(&lane, 16);
    let graph = stream.end_capture(NO_FLAGS);
    assert!(matches!(run, Err(Error::Capture { .. })), "{run:?}");
    assert!(matches!(alloc, Err(Error::Capture { .. })), "{alloc:?}");
    // The refusals left the capture whole, and the stream as good as new.
    graph.unwrap();
    let outputs = on_device.run(&stream, &mut workspace, &plan, &prepared).unwrap();
    assert!(prepared.judge(&outputs).passed());
}
