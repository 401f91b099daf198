//! The output of e4m3 operands is bf16, f16 or e4m3.
use hopper_attention::Fp8ForwardArgs;

fn run(_: Fp8ForwardArgs<'_, f32>) {}

fn main() {
    let _ = run;
}
