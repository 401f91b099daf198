//! Inputs at the edges through the CPU backend. `tests/tests/gpu/edges.rs` takes them through every kernel.

use hopper_attention::{DType, MaskClass, bf16, f16};
use hopper_attention_tests::backward::Prepared as Backward;
use hopper_attention_tests::data::Poison;
use hopper_attention_tests::edges::{
    EDGES, is_extreme, large_sums, large_values, one_key, one_key_gives_its_value, one_key_has_no_gradient,
};
use hopper_attention_tests::problems::extremes;
use hopper_attention_tests::runner::{Prepared as Forward, Ready, Runner, on_cpu};
use hopper_attention_tests::say;

const CLASSES: [MaskClass; 3] = [MaskClass::Full, MaskClass::Causal, MaskClass::Window];

fn check<T: Poison>(wrong: &mut Vec<String>) {
    for edge in EDGES {
        for class in CLASSES {
            for head_dims in [[64, 64], [128, 128], [192, 128], [256, 256]] {
                let mut take = |pass: &str, why: Option<String>| {
                    let place = format!("{pass} {} {}, {}", T::DTYPE, edge.name, edge.case(class, head_dims));
                    wrong.extend(why.map(|why| format!("{place}: {why}")));
                };
                take("forward", edge.forward::<T>(class, head_dims).verdict_on_cpu().wrong);
                if edge.backward {
                    take("backward", edge.backward::<T>(class, head_dims).verdict_on_cpu().wrong);
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

/// The log-sum-exps are as far from 0 as they should be, and nothing is NaN. cuDNN's gradients are, on such inputs.
#[test]
fn extreme_log_sum_exps() {
    let cases = extremes(&[64]);
    let far = cases.iter().filter(|case| is_extreme(&Forward::<f32>::new(case))).count();
    // Queries above the first key keep none.
    assert_eq!(far, cases.len());
    let mut runner = Runner::new(["forward bf16", "forward f16", "backward bf16", "backward f16"]);
    for case in &cases {
        runner.take(0, case, DType::BF16, on_cpu::<Forward<bf16>>(case));
        runner.take(1, case, DType::F16, on_cpu::<Forward<f16>>(case));
        runner.take(2, case, DType::BF16, on_cpu::<Backward<bf16>>(case));
        runner.take(3, case, DType::F16, on_cpu::<Backward<f16>>(case));
    }
    runner.finish();
}

/// Finite, whatever the values are: the CPU's weights are 1 at most.
#[test]
fn sums_that_weights_above_1_would_overflow() {
    for (class, packed) in CLASSES.into_iter().flat_map(|class| [(class, false), (class, true)]) {
        for make in [large_sums, large_values] {
            let prepared = make(class, [64, 64], packed);
            let o = &prepared.expected.oracle().o;
            // But for what V makes infinite and NaN: two columns of the others.
            let finite = o.data().iter().filter(|o| o.is_finite()).count();
            assert!(finite >= o.data().len() * 62 / 64, "{}", prepared.case);
            let wrong = prepared.verdict_on_cpu().wrong;
            assert!(wrong.is_none(), "{}: {wrong:?}", prepared.case);
        }
    }
}

/// A weight of 1 is exact. So O is V, and no gradient is left but what f32 rounds.
#[test]
fn rows_that_see_one_key() {
    fn check<T: Poison>() {
        for case in [[64, 64], [128, 128], [64, 192], [256, 256]].into_iter().flat_map(one_key) {
            let forward = Forward::<T>::new(&case);
            let right = one_key_gives_its_value(&forward, &forward.on_cpu().unwrap());
            right.unwrap_or_else(|why| panic!("{} {case}: {why}", T::DTYPE));
            let backward = Backward::<T>::new(&case);
            let right = one_key_has_no_gradient(&backward, &backward.on_cpu().unwrap());
            right.unwrap_or_else(|why| panic!("{} {case}: {why}", T::DTYPE));
        }
    }
    check::<bf16>();
    check::<f16>();
}

/// An O whose last bits are off is noticed: what a weight that was rounded makes of it.
#[test]
fn an_o_of_rounded_weights_is_noticed() {
    fn check<T: Poison>(last_bit: f32) {
        for case in one_key([64, 64]) {
            let mut backward = Backward::<T>::new(&case);
            backward.o.inner_mut().iter_mut().for_each(|o| *o = T::from_f32(o.to_f32() * (1.0 + last_bit)));
            assert!(one_key_has_no_gradient(&backward, &backward.on_cpu().unwrap()).is_err(), "{} {case}", T::DTYPE);
        }
    }
    check::<bf16>(1.0 / 128.0);
    check::<f16>(1.0 / 1024.0);
}
