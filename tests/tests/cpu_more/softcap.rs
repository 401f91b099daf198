//! Capped scores through the CPU backend, under the tolerance; and what the tolerance must notice.

use hopper_attention::{Mask, bf16, f16};
use hopper_attention_tests::backward;
use hopper_attention_tests::case::random::{self, CAPS};
use hopper_attention_tests::data::{Image, Poison};
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::runner::Prepared;
use hopper_attention_tests::softcap::{Mistake, cases, computed, packed_cases};

/// Every 23rd case, from this one on: 23 divides none of the numbers of sizes, masks and caps, so that these have all of them.
/// The oracle takes too long for all cases here. The kernels' tests take them.
fn some(first: usize) -> Vec<Case> {
    let grid = Grid::from_env();
    [cases(grid), packed_cases(grid)].concat().into_iter().skip(first).step_by(23).collect()
}

#[test]
fn the_forward_keeps_the_tolerance() {
    crate::forwards(some);
}

#[test]
fn the_backward_keeps_the_tolerance() {
    crate::backwards(some);
}

/// What `hattn fuzz` draws has all caps.
#[test]
fn random_cases_keep_the_tolerance() {
    use proptest::strategy::{Strategy as _, ValueTree as _};
    let mut runner = random::runner(hopper_attention_tests::problems::random::seed());
    let strategy = (random::case(128, 8), random::packing(), random::sinks(), random::softcap());
    let drawn = std::iter::repeat_with(|| {
        let (case, packing, sinks, softcap) = strategy.new_tree(&mut runner).unwrap().current();
        random::capped(Case { sinks, ..random::packed(case, packing) }, softcap)
    });
    let drawn: Vec<_> = drawn.filter(|case| case.softcap != 0.0).take(Grid::from_env().pick(15, 30)).collect();
    crate::both_passes(&drawn);
}

/// A computation without the cap, with a cap after the mask, with another cap or without the derivative fails, and the right one
/// passes.
#[test]
fn wrong_caps_are_noticed() {
    for (i, cap) in CAPS.into_iter().enumerate() {
        // Scores of the size of the cap, so that it bends all of them. The first queries of the causal mask have no keys.
        for mask in [Mask::Full, Mask::causal(), Mask::window(Some(40), Some(9))] {
            let mut case = Case::new(110, 90, 32, mask).heads(2, 4, 2).softcap(cap);
            case.scale = Some(cap / 32_f32.sqrt());
            case.seed = 3 + i as u64;
            noticed::<bf16>(&case);
            noticed::<f16>(&case);
            noticed::<f32>(&case);
        }
    }
}

fn noticed<T: Poison>(case: &Case) {
    let of_o = Prepared::<T>::new(case);
    let of_gradients = backward::Prepared::<T>::new(case);
    let d_lse = of_gradients.d_lse.as_ref().map(Image::values);
    let [q, k, v] = &of_o.tensors();
    let wrong = |mistake| {
        let d_o = of_gradients.d_o.tensor();
        computed(&of_gradients.problem, [q, k, v, &d_o], d_lse.as_deref(), mistake)
    };
    let of_backward = |mistake| {
        let (_, _, gradients) = wrong(mistake);
        of_gradients.expected.check(&gradients.d_q, &gradients.d_k, &gradients.d_v).unwrap()
    };
    let report = of_backward(Mistake::None);
    assert!(report.passed(), "{case}: {report}");
    for mistake in [Mistake::None].into_iter().chain(Mistake::OF_FORWARD) {
        // Without a mask nothing is hidden.
        if mistake == Mistake::AfterTheMask && case.mask == Mask::Full {
            continue;
        }
        let (o, lse, _) = wrong(mistake);
        let report = of_o.expected.check(&o, Some(&lse)).unwrap();
        assert_eq!(report.passed(), mistake == Mistake::None, "{mistake:?}, {}, {case}: {report}", T::DTYPE);
        // By O alone, too. The window hides keys whose part is less than exp(-c), and leaves none without keys.
        let little = mistake == Mistake::AfterTheMask && case.mask != Mask::causal() && case.softcap > 1.0;
        let report = of_o.expected.check(&o, None).unwrap();
        assert!(
            little || report.passed() == (mistake == Mistake::None),
            "{mistake:?} in O, {}, {case}: {report}",
            T::DTYPE
        );
    }
    for mistake in Mistake::OF_BACKWARD.into_iter().chain([Mistake::Forgotten, Mistake::BeforeTheScale]) {
        let report = of_backward(mistake);
        assert!(!report.passed(), "gradients {mistake:?}, {}, {case}: {report}", T::DTYPE);
        for (name, figures) in [("dQ", &report.d_q), ("dK", &report.d_k)] {
            assert!(figures.worst_ratio > 1.0, "{name} {mistake:?}, {}, {case}: {report}", T::DTYPE);
        }
    }
}
