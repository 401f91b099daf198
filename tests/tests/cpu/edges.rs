//! Modified scores at the edges through the CPU backend. `tests/tests/gpu/edges.rs` takes them through kernels.
//! `tests/tests/cpu_more/edges.rs` has plain scores.

use hopper_attention::{MaskClass, bf16, f16};
use hopper_attention_tests::backward::Prepared as Backward;
use hopper_attention_tests::data::Poison;
use hopper_attention_tests::edges::{EDGES, MODIFIERS, is_extreme, modified_extremes};
use hopper_attention_tests::problems::Case;
use hopper_attention_tests::runner::{Prepared as Forward, Ready, Runner};
use rayon::prelude::*;

/// What is wrong with edges whose cases are modified. Passes take turns: `turn` says which is the first.
fn wrong<T: Poison>(turn: usize, class: MaskClass, modifier: fn(Case) -> Case) -> Vec<String> {
    let mut wrong = Vec::new();
    for (i, edge) in EDGES.into_iter().enumerate() {
        let Some(case) = edge.modified(class, [40, 24], modifier) else { continue };
        let (pass, why) = match (turn + i).is_multiple_of(2) || !edge.takes_backward(&case) {
            true => ("forward", edge.forward_of::<T>(class, case.clone()).verdict_on_cpu().wrong),
            false => ("backward", edge.backward_of::<T>(class, case.clone()).verdict_on_cpu().wrong),
        };
        wrong.extend(why.map(|why| format!("{pass} {} {}, {case}: {why}", T::DTYPE, edge.name)));
    }
    wrong
}

#[test]
fn modified_edges_match_the_oracle() {
    let classes = [MaskClass::Full, MaskClass::Causal, MaskClass::Window];
    let all: Vec<_> = classes.into_iter().flat_map(|class| MODIFIERS.map(|modifier| (class, modifier))).collect();
    // A modifier's turn is odd for one class and even for the next, so that both passes take each edge with it.
    let each = all.par_iter().enumerate().map(|(i, &(class, modifier))| match i % 2 {
        0 => wrong::<bf16>(i + i / MODIFIERS.len(), class, modifier),
        _ => wrong::<f16>(i + i / MODIFIERS.len(), class, modifier),
    });
    let wrong: Vec<String> = each.flatten().collect();
    assert!(wrong.is_empty(), "{} are wrong: {}", wrong.len(), wrong.join("\n"));
}

#[test]
fn modified_extremes_match_the_oracle() {
    let cases = modified_extremes(&[64]);
    // But for a sink, which is all that a row of such low scores has.
    let far = |case: &&Case| case.sinks.is_none();
    assert!(cases.iter().filter(far).all(|case| is_extreme(&Forward::<f32>::new(case))));
    assert!(cases.iter().filter(|case| !far(case)).count() > 15);
    Runner::all_on_cpu::<Forward<bf16>>("cpu bf16", &cases);
    Runner::all_on_cpu::<Backward<f16>>("cpu f16 backward", &cases);
}
