//! Packed sequences and used lengths through the CPU backend: the tolerance, and what the bits of a sequence do not depend on.

use hopper_attention::{DType, Mask, Scaling, bf16, f16};
use hopper_attention_tests::backward;
use hopper_attention_tests::data::Garbage;
use hopper_attention_tests::fp8::Operands;
use hopper_attention_tests::packed;
use hopper_attention_tests::problems::{Case, Grid};
use hopper_attention_tests::runner::{Prepared, Runner};
use hopper_attention_tests::sequences::{OfSequences, fp8_bits, fp8_garbage, like_dense, neighbours};

const MASKS: [Mask; 3] = [Mask::Full, Mask::causal(), Mask::window(Some(100), Some(20))];

/// The list that kernels take. The oracle of the gradients takes long: a part of it.
#[test]
fn packed_cases_keep_the_tolerance() {
    let all = packed::cases(Grid::from_env());
    let some = |first: usize, step: usize| all.iter().skip(first).step_by(step).cloned().collect::<Vec<_>>();
    Runner::all_on_cpu::<Prepared<bf16>>("cpu packed bf16", &some(0, 3));
    Runner::all_on_cpu::<backward::Prepared<f16>>("cpu packed f16 backward", &some(1, 37));
    for (case, scaling) in some(2, 47).iter().zip(Scaling::ALL.into_iter().cycle()) {
        let problem = case.options(DType::E4M3).lse(true).scaling(scaling).build().unwrap();
        let operands = Operands::of_case(case, &problem, None);
        let (o, lse) = operands.run();
        let report = operands.expected().check(&o, Some(&lse)).unwrap();
        assert!(report.passed(), "{case} {scaling}: {report}");
    }
}

/// Nothing of a neighbour reaches a sequence: NaN, infinities and the largest numbers in all other sequences change none of its bits.
#[test]
fn garbage_in_the_other_sequences_changes_no_bit() {
    for (case, own) in MASKS.into_iter().flat_map(|mask| neighbours(40, 24, mask)) {
        beside_garbage(&Prepared::<bf16>::new(&case), own);
        beside_garbage(&backward::Prepared::<f16>::new(&case), own);
    }
}

fn beside_garbage<P: OfSequences>(clean: &P, own: usize) {
    let outputs = clean.on_cpu().unwrap();
    let wrong = clean.verdict(&outputs).wrong;
    assert!(wrong.is_none(), "{} {}: {wrong:?}", P::DTYPE, clean.case());
    for garbage in Garbage::ALL {
        let spoiled = clean.beside(own, garbage);
        let beside = spoiled.on_cpu().unwrap();
        let (got, want) = (spoiled.bits(&beside, own), clean.bits(&outputs, own));
        assert!(!want[0].1.is_empty(), "{}: no rows", clean.case());
        for ((name, got), (_, want)) in got.iter().zip(&want) {
            assert!(got == want, "{} {}: {name} of sequence {own} beside {garbage:?}", P::DTYPE, clean.case());
        }
        // The others are another result, so that the garbage was there.
        assert!(spoiled.bits_of_others(&beside, own) != clean.bits_of_others(&outputs, own), "{}", clean.case());
    }
}

/// The same of e4m3 operands, and of their factors.
#[test]
fn garbage_in_the_other_sequences_changes_no_bit_of_e4m3() {
    for (case, own) in MASKS.into_iter().flat_map(|mask| neighbours(48, 32, mask)) {
        for scaling in Scaling::ALL {
            let problem = case.options(DType::E4M3).lse(true).scaling(scaling).build().unwrap();
            let clean = Operands::of_case(&case, &problem, None);
            let output = clean.run();
            let report = clean.expected().check(&output.0, Some(&output.1)).unwrap();
            assert!(report.passed(), "{case} {scaling}: {report}");
            for (element, factor) in fp8_garbage(false) {
                let spoiled = clean.beside(own, element, factor);
                let beside = spoiled.run();
                let same = fp8_bits(&spoiled, &beside, own) == fp8_bits(&clean, &output, own);
                assert!(same, "{case} {scaling}: sequence {own} beside {element:?}, {factor}");
            }
        }
    }
}

/// A sequence of a batch has the bits of a dense problem of its own: with every modifier, and gradients where they are deterministic.
#[test]
fn a_sequence_has_the_bits_of_the_dense_problem() {
    for case in MASKS.into_iter().flat_map(|mask| like_dense(64, 40, mask)) {
        same_as_dense(&Prepared::<bf16>::new(&case), |dense| dense);
        let deterministic = |mut prepared: backward::Prepared<f16>| {
            prepared.problem = prepared.problem.to_builder().deterministic(true).build().unwrap();
            prepared
        };
        same_as_dense(&deterministic(backward::Prepared::new(&case)), deterministic);
    }
}

fn same_as_dense<P: OfSequences>(packed: &P, options: impl Fn(P) -> P) {
    let outputs = packed.on_cpu().unwrap();
    for own in 0..packed.case().dims.batch {
        let dense = options(packed.alone(own));
        let by_itself = dense.on_cpu().unwrap();
        for ((name, got), (_, want)) in packed.bits(&outputs, own).iter().zip(dense.bits(&by_itself, 0)) {
            let is_something = got.iter().any(|&bits| bits != 0);
            assert!(is_something && *got == want, "{} {}: {name} of sequence {own}", P::DTYPE, packed.case());
        }
    }
}

/// The same of e4m3 operands, with a cap and with sinks.
#[test]
fn a_sequence_of_e4m3_has_the_bits_of_the_dense_problem() {
    for case in MASKS.into_iter().flat_map(|mask| like_dense(64, 48, mask).into_iter().take(3)) {
        for scaling in Scaling::ALL {
            let problem = case.options(DType::E4M3).lse(true).scaling(scaling).build().unwrap();
            let packed = Operands::of_case(&case, &problem, None);
            let output = packed.run();
            for own in 0..case.dims.batch {
                let dense = packed.alone(own);
                let same = fp8_bits(&packed, &output, own) == fp8_bits(&dense, &dense.run(), 0);
                assert!(same, "{case} {scaling}: sequence {own}");
            }
        }
    }
}

/// 128k rows (gradients: 8k) beside a thousand sequences of one row. The long one has the bits of the dense problem. The oracle judges
/// the short ones.
#[test]
fn one_long_sequence_among_short_ones() {
    let (case, own) = packed::one_long_among_short(1 << 17, 500, 8, 8);
    long_among_short(&Prepared::<bf16>::new(&case), own);
    // O and the LSE are those of the plain computation, which takes long.
    let (case, own) = packed::one_long_among_short(1 << 13, 500, 8, 8);
    long_among_short(&backward::Prepared::<f16>::new(&Case { lse: false, ..case }), own);
}

fn long_among_short<P: OfSequences>(all: &P, own: usize) {
    let outputs = all.on_cpu().unwrap();
    let dense = all.alone(own);
    assert!(all.bits(&outputs, own) == dense.bits(&dense.on_cpu().unwrap(), 0), "{}: the long sequence", P::DTYPE);
    let short = all.without(own);
    let wrong = short.verdict(&all.outputs_without(&outputs, own, &short)).wrong;
    assert!(wrong.is_none(), "{}: {wrong:?}", P::DTYPE);
}

/// Rows, and no sequence that has one: every row of an output is filled, or left alone.
#[test]
fn all_sequences_are_empty() {
    let cases = packed::all_empty(64, 48);
    Runner::all_on_cpu::<Prepared<bf16>>("cpu bf16", &cases);
    Runner::all_on_cpu::<backward::Prepared<f16>>("cpu f16 backward", &cases);
    for (case, scaling) in cases.iter().zip(Scaling::ALL.into_iter().cycle()) {
        let problem = case.options(DType::E4M3).lse(true).scaling(scaling).build().unwrap();
        let operands = Operands::of_case(case, &problem, None);
        let (o, lse) = operands.run();
        let report = operands.expected().check(&o, Some(&lse)).unwrap();
        // Rows that are not written stay NaN, which is what is expected of them.
        assert!(report.passed(), "{case} {scaling}: {report}");
    }
}
