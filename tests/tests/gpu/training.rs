//! A model learns on the GPU as it does with exact gradients.

use std::path::Path;

use hopper_attention_tests::gpu::Gpu;
use hopper_attention_tests::gpu::training::OnGpu;
use hopper_attention_tests::problems::Grid;
use hopper_attention_tests::say;
use hopper_attention_tests::training::{Curves, Setup};

/// Curves are recorded beside `HATTN_TEST_RECORD`, as JSON and as a chart.
#[test]
fn a_model_learns_on_the_gpu() {
    let Some(gpu) = Gpu::open("a_model_learns_on_the_gpu") else { return };
    let steps = Grid::from_env().pick(20, 300);
    for head_dim in [64, 128] {
        let setup = Setup { batch: 2, seqlen: 192, heads_q: 2, heads_kv: 1, head_dim, width: 96, steps };
        let curves = Curves::new(setup, &mut OnGpu::new(&gpu, &setup).unwrap()).unwrap();
        if let Some(path) = std::env::var_os("HATTN_TEST_RECORD") {
            let path = Path::new(&path);
            let title = format!("Two layers of causal attention, head dim {head_dim}, on bytes of this repository");
            let chart = curves.chart(&title).unwrap();
            std::fs::write(path.with_extension(format!("training-d{head_dim}.svg")), chart).unwrap();
            let losses = serde_json::to_string(&curves).unwrap();
            std::fs::write(path.with_extension(format!("training-d{head_dim}.json")), losses + "\n").unwrap();
        }
        say(&curves.verdict().unwrap_or_else(|words| panic!("head dim {head_dim}: {words}")));
    }
}
