//! The whole grid through the CPU backend, under the tolerance law.

use hopper_attention::{DType, Device, Mask, Operand, Stream, Workspace, bf16, f16};
use hopper_attention_tests::data::{Image, Poison, Values};
use hopper_attention_tests::layouts::Placement;
use hopper_attention_tests::mutations::{self, Subject};
use hopper_attention_tests::problems::{Case, Grid, Tiles, cases, random};
use hopper_attention_tests::runner::{Outputs, Prepared, Runner, Verdict};
use proptest::prelude::*;

/// The CPU backend's own blocks, and those of a typical kernel.
fn tiles() -> Tiles {
    Tiles { m: vec![64, 128], n: vec![128, 256] }
}

fn run<T: Poison + Operand<Out = T>>(prepared: &Prepared<T>) -> Result<Outputs<T>, String> {
    let before = prepared.clone();
    let mut outputs = prepared.outputs();
    let plan = prepared.problem.plan(&Device::Cpu).map_err(|error| error.to_string())?;
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes()).map_err(|error| error.to_string())?;
    plan.run(&Stream::Cpu, &mut workspace, prepared.host_args(&mut outputs)).map_err(|error| error.to_string())?;
    for (before, after) in [(&before.q, &prepared.q), (&before.k, &prepared.k), (&before.v, &prepared.v)] {
        before.check_unchanged(after.data())?;
    }
    let o = outputs.o.data().to_vec();
    outputs.o.take_output(o)?;
    if let Some(lse) = &mut outputs.lse {
        let data = lse.data().to_vec();
        lse.take_output(data)?;
    }
    Ok(outputs)
}

fn verdict<T: Poison + Operand<Out = T>>(prepared: &Prepared<T>) -> Verdict {
    match run(prepared) {
        Ok(outputs) => prepared.verdict(&outputs),
        Err(why) => Verdict::failed(why),
    }
}

fn grid<T: Poison + Operand<Out = T>>(runner: &mut Runner, row: usize, cases: &[Case]) {
    for cases in cases.chunks(64) {
        for prepared in Prepared::<T>::all(cases) {
            let verdict = verdict(&prepared);
            runner.take(row, &prepared.case, T::DTYPE, verdict);
        }
    }
}

#[test]
fn every_case_obeys_the_law() {
    let all = cases(Grid::from_env(), &tiles());
    // One type takes everything, the others every fifth case.
    let some: Vec<Case> = all.iter().step_by(5).cloned().collect();
    let mut runner = Runner::new(["cpu bf16", "cpu f16", "cpu f32"]);
    grid::<bf16>(&mut runner, 0, &all);
    grid::<f16>(&mut runner, 1, &some);
    grid::<f32>(&mut runner, 2, &some);
    runner.finish();
}

/// Head dims that no kernel takes are the CPU's too.
#[test]
fn any_head_dim() {
    let mut runner = Runner::new(["cpu bf16"]);
    let cases: Vec<Case> = [1, 2, 3, 5, 7, 9, 31, 33, 65, 100, 127, 129, 192, 256, 300]
        .into_iter()
        .map(|head_dim| Case::new(33, 70, head_dim, Mask::causal()))
        .collect();
    grid::<bf16>(&mut runner, 0, &cases);
    runner.finish();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, max_shrink_iters: 64, ..ProptestConfig::default() })]
    #[test]
    fn random_cases_obey_the_law(case in random::case(128, 8), dtype in 0..3) {
        let verdict = match dtype {
            0 => verdict(&Prepared::<bf16>::new(&case)),
            1 => verdict(&Prepared::<f16>::new(&case)),
            _ => verdict(&Prepared::<f32>::new(&case)),
        };
        prop_assert!(verdict.wrong.is_none(), "{}: {}", case, verdict.wrong.unwrap_or_default());
    }
}

/// A broken kernel must fail the suite: every mutation of an honest result is caught, in every kind of case.
#[test]
fn broken_results_are_caught() {
    let mut applied = vec![0; mutations::ALL.len()];
    for mask in mutations::masks::ALL {
        for case in [
            Case::new(131, 200, 64, mask).heads(2, 4, 2),
            Case::new(300, 150, 128, mask),
            Case { values: Values::Offset, ..Case::new(131, 200, 64, mask) },
            Case::new(70, 1500, 64, mask),
        ] {
            let prepared = Prepared::<bf16>::new(&case);
            let outputs = run(&prepared).unwrap();
            let [q, k, v] = prepared.tensors();
            let lse = outputs.lse.as_ref().map(Image::values).unwrap();
            let subject =
                Subject { problem: &prepared.problem, q: &q, k: &k, v: &v, o: &outputs.o.tensor(), lse: &lse };
            assert!(prepared.expected.check(subject.o, Some(&lse)).unwrap().passed());
            for (mutation, applied) in mutations::ALL.iter().zip(&mut applied) {
                if let Some((o, lse)) = (mutation.apply)(subject) {
                    let report = prepared.expected.check(&o, Some(&lse)).unwrap();
                    assert!(!report.passed(), "not caught: {}, {case}: {report}", mutation.name);
                    *applied += 1;
                }
            }
        }
    }
    for (mutation, applied) in mutations::ALL.iter().zip(applied) {
        assert!(applied >= 4, "{} applied to {applied} cases only", mutation.name);
    }
}

/// What watches the memory must itself be able to fail.
#[test]
fn guards_see_every_stray_write() {
    let case = Case { placement: Placement::BshdGaps, ..Case::new(5, 5, 8, Mask::Full) };
    let prepared = Prepared::<bf16>::new(&case);
    let outputs = run(&prepared).unwrap();
    let honest = outputs.o.data().to_vec();
    for place in 0..honest.len() {
        let mut image = prepared.outputs().o;
        let mut data = honest.clone();
        // A write where there was none, or none where there was to be one.
        data[place] = if data[place].is_poison() { bf16::ONE } else { bf16::POISON };
        assert!(image.take_output(data).is_err(), "{place}");
    }
    let mut after = prepared.q.data().to_vec();
    after[3] = bf16::ZERO;
    assert!(prepared.q.check_unchanged(&after).is_err());
}

#[test]
#[should_panic(expected = "rows that took no case")]
fn a_row_without_cases_fails() {
    let mut runner = Runner::new(["busy", "idle"]);
    runner.take(0, &Case::new(1, 1, 8, Mask::Full), DType::BF16, Verdict { worst_ratio: 0.1, wrong: None });
    runner.finish();
}

#[test]
#[should_panic(expected = "cases failed")]
fn a_failed_case_fails() {
    let case = Case::new(2, 3, 8, Mask::Full);
    let prepared = Prepared::<f32>::new(&case);
    let mut outputs = run(&prepared).unwrap();
    outputs.o.inner_mut().fill(0.0);
    let mut runner = Runner::new(["broken"]);
    runner.take(0, &case, DType::F32, prepared.verdict(&outputs));
    runner.finish();
}
