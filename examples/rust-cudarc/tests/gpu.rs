//! The step on a GPU. Without one it prints a line `skipped: no GPU (NAME)`; with `HATTN_REQUIRE_GPU=1` it fails.
#![cfg(feature = "cuda")]

use std::io::Write;

use hopper_attention::Device;
use hopper_attention_example_cudarc::gpu::{Gpu, Step, find};
use hopper_attention_example_cudarc::{PlanCache, check, step};

#[test]
fn a_graph_of_several_calls() {
    let Some(ordinal) = find() else {
        let required = std::env::var("HATTN_REQUIRE_GPU").is_ok_and(|value| value == "1");
        assert!(!required, "HATTN_REQUIRE_GPU=1, but no GPU runs a kernel of this build");
        // Past the test harness, which would hide it.
        std::io::stderr().write_all(b"skipped: no GPU (a_graph_of_several_calls)\n").expect("stderr is open");
        return;
    };
    let gpu = Gpu::open(ordinal).unwrap();
    let cache = PlanCache::new(Device::Cuda(gpu.device.clone()), 8);
    let inputs = [step(1).unwrap(), step(2).unwrap(), step(3).unwrap()];
    let mut on_gpu = Step::new(&gpu, &cache, &inputs[0]).unwrap();
    assert_eq!(cache.len(), 3, "two layers have one shape");
    assert!(on_gpu.replay().is_err(), "nothing was captured yet");

    // The first launch of all is the captured one, which computes nothing.
    on_gpu.capture().unwrap();
    assert!(on_gpu.outcomes().unwrap().iter().all(|outcome| outcome.lse.iter().all(|&x| x == 0.0)));

    let mut seen = Vec::new();
    for calls in &inputs {
        on_gpu.write(calls).unwrap();
        on_gpu.clear().unwrap();
        on_gpu.replay().unwrap();
        let replayed = on_gpu.outcomes().unwrap();
        for (call, outcome) in calls.iter().zip(&replayed) {
            let report = check(call, outcome).unwrap();
            assert!(report.passed(), "{}: {report}", call.problem);
        }
        on_gpu.clear().unwrap();
        on_gpu.launch().unwrap();
        assert!(replayed == on_gpu.outcomes().unwrap(), "a replay and launches differ");
        assert!(!seen.contains(&replayed), "a replay did not see new inputs");
        seen.push(replayed);
    }

    // Dropped while a replay may still run: its memory is freed behind it.
    on_gpu.replay().unwrap();
    drop(on_gpu);
    gpu.stream.synchronize().unwrap();

    // Another step's shapes are refused, and the cache still has this one's plans.
    let mut again = Step::new(&gpu, &cache, &inputs[0]).unwrap();
    assert!(again.write(&inputs[0][..1]).is_err());
    assert_eq!(cache.len(), 3);
}
