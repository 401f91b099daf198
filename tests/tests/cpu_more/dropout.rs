//! Dropout through the CPU backend, under the tolerance; and what the tolerance must notice.

use hopper_attention::{Mask, bf16, f16};
use hopper_attention_tests::backward;
use hopper_attention_tests::case::random;
use hopper_attention_tests::data::{Garbage, Image, Input, Poison, Values};
use hopper_attention_tests::dropout::{Mistake, cases, computed, packed_cases};
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::runner::{Prepared, Runner};

/// Every 17th case, from this one on: 17 divides none of the numbers of sizes, masks and probabilities, so that these have all of
/// them. The oracle takes too long for all cases here. The kernels' tests take them.
fn some(first: usize) -> Vec<Case> {
    let grid = Grid::from_env();
    [cases(grid), packed_cases(grid)].concat().into_iter().skip(first).step_by(17).collect()
}

#[test]
fn the_forward_keeps_the_tolerance() {
    crate::forwards(some);
}

#[test]
fn the_backward_keeps_the_tolerance() {
    crate::backwards(some);
}

/// NaN, infinities and large numbers reach the rows that do not drop them, and no others.
#[test]
fn garbage_keeps_the_tolerance() {
    let mut cases = Vec::new();
    for (input, garbage) in Input::ALL.into_iter().flat_map(|input| Garbage::ALL.map(|garbage| (input, garbage))) {
        for (p, mask) in [(0.5, Mask::causal()), (0.9, Mask::Full)] {
            let case = Case::new(70, 150, 24, mask).heads(2, 4, 2).dropout(p);
            cases.push(Case { values: Values::Garbage(input, garbage), ..case });
        }
    }
    Runner::all_on_cpu::<Prepared<f32>>("cpu f32", &cases);
    Runner::all_on_cpu::<Prepared<bf16>>("cpu bf16", &cases);
    Runner::all_on_cpu::<backward::Prepared<f32>>("cpu f32 backward", &cases);
    Runner::all_on_cpu::<backward::Prepared<f16>>("cpu f16 backward", &cases);
}

/// What `hattn fuzz` draws.
#[test]
fn random_cases_keep_the_tolerance() {
    use proptest::strategy::{Strategy as _, ValueTree as _};
    let mut runner = random::runner(hopper_attention_tests::problems::random::seed());
    let beside = (random::softcap(), random::biases(), random::blocks());
    let strategy = (random::case(128, 8), random::packing(), random::sinks(), beside, random::dropout());
    let drawn = std::iter::repeat_with(|| {
        let (case, packing, sinks, beside, dropout) = strategy.new_tree(&mut runner).unwrap().current();
        let (softcap, (alibi, max_logits), blocks) = beside;
        let case = random::capped(Case { sinks, alibi, max_logits, ..random::packed(case, packing) }, softcap);
        random::listed(case, blocks).dropout(dropout)
    });
    let drawn: Vec<_> = drawn.filter(|case| case.dropout != 0.0).take(Grid::from_env().pick(15, 30)).collect();
    crate::both_passes(&drawn);
}

/// A computation with a mistake fails where it is wrong, and the right one passes.
#[test]
fn mistakes_are_noticed() {
    for (p, mask) in [(0.1, Mask::Full), (0.5, Mask::causal()), (0.2, Mask::window(Some(40), Some(9)))] {
        let case = Case::new(50, 70, 16, mask).heads(2, 4, 2).dropout(p);
        noticed::<bf16>(&case);
        noticed::<f16>(&case);
        noticed::<f32>(&case);
    }
}

fn noticed<T: Poison>(case: &Case) {
    let of_o = Prepared::<T>::new(case);
    let of_gradients = backward::Prepared::<T>::new(case);
    let d_lse = of_gradients.d_lse.as_ref().map(Image::values);
    let [q, k, v] = &of_o.tensors();
    let d_o = of_gradients.d_o.tensor();
    let state = case.dropout_state().expect("dropout");
    for (mistake, spoiled) in [(Mistake::None, &[][..])].into_iter().chain(Mistake::ALL) {
        let got = computed(&of_gradients.problem, [q, k, v, &d_o], d_lse.as_deref(), state, mistake);
        let forward = of_o.expected.check(&got.o, Some(&got.lse)).unwrap();
        let [d_q, d_k, d_v] = &got.gradients;
        let backward = of_gradients.expected.check(d_q, d_k, d_v).unwrap();
        let lse = forward.lse.as_ref().expect("an LSE");
        for (name, figures) in
            [("o", &forward.o), ("lse", lse), ("d_q", &backward.d_q), ("d_k", &backward.d_k), ("d_v", &backward.d_v)]
        {
            let is_spoiled = spoiled.contains(&name);
            assert_eq!(figures.worst_ratio > 1.0, is_spoiled, "{mistake:?}, {name}, {}, {case}: {figures}", T::DTYPE);
        }
    }
}
