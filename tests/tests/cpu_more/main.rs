//! The CPU backend, under the tolerance: what is added to attention, and inputs at the edges. (`scripts/sanitize.sh` takes `cpu`
//! without these.)

mod alibi;
mod bias;
mod blocks;
mod combinations;
mod dropout;
mod edges;
mod sinks;
mod softcap;

use hopper_attention::{bf16, f16};
use hopper_attention_tests::backward;
use hopper_attention_tests::problems::Case;
use hopper_attention_tests::runner::{Prepared, Runner};

/// Forwards of all types, each of some cases of its own: `some` gives those from a number on.
fn forwards(some: fn(usize) -> Vec<Case>) {
    Runner::all_on_cpu::<Prepared<f32>>("cpu f32", &some(0));
    Runner::all_on_cpu::<Prepared<bf16>>("cpu bf16", &some(1));
    Runner::all_on_cpu::<Prepared<f16>>("cpu f16", &some(2));
}

/// The same of gradients, of other cases.
fn backwards(some: fn(usize) -> Vec<Case>) {
    Runner::all_on_cpu::<backward::Prepared<f32>>("cpu f32 backward", &some(3));
    Runner::all_on_cpu::<backward::Prepared<f16>>("cpu f16 backward", &some(4));
    Runner::all_on_cpu::<backward::Prepared<bf16>>("cpu bf16 backward", &some(5));
}

/// Both passes of the same cases, in the type that rounds most and in the one that rounds least.
fn both_passes(cases: &[Case]) {
    Runner::all_on_cpu::<Prepared<bf16>>("cpu bf16", cases);
    Runner::all_on_cpu::<Prepared<f32>>("cpu f32", cases);
    Runner::all_on_cpu::<backward::Prepared<bf16>>("cpu bf16 backward", cases);
    Runner::all_on_cpu::<backward::Prepared<f32>>("cpu f32 backward", cases);
}
