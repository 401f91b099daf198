//! Inputs at the edges through the CPU backend. `tests/tests/gpu/edges.rs` takes them through every kernel.

use hopper_attention::{MaskClass, bf16, f16};
use hopper_attention_tests::data::Poison;
use hopper_attention_tests::edges::EDGES;
use hopper_attention_tests::runner::Ready;
use hopper_attention_tests::say;

const CLASSES: [MaskClass; 3] = [MaskClass::Full, MaskClass::Causal, MaskClass::Window];

fn check<T: Poison>(wrong: &mut Vec<String>) {
    for edge in EDGES {
        for class in CLASSES {
            for head_dim in [64, 128] {
                let mut take = |pass: &str, why: Option<String>| {
                    let place = format!("{pass} {} {}, {}", T::DTYPE, edge.name, edge.case(class, head_dim));
                    wrong.extend(why.map(|why| format!("{place}: {why}")));
                };
                take("forward", edge.forward::<T>(class, head_dim).verdict_on_cpu().wrong);
                if edge.backward {
                    take("backward", edge.backward::<T>(class, head_dim).verdict_on_cpu().wrong);
                }
            }
        }
    }
}

#[test]
fn edges_match_the_oracle() {
    let mut wrong = Vec::new();
    check::<bf16>(&mut wrong);
    check::<f16>(&mut wrong);
    check::<f32>(&mut wrong);
    wrong.iter().for_each(|wrong| say(wrong));
    assert!(wrong.is_empty(), "{} are wrong; the first: {}", wrong.len(), wrong[0]);
}
