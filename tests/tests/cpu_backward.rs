//! The grid's backward passes through the CPU backend, under the tolerance law.

use hopper_attention::{Device, Mask, Operand, Stream, Workspace, bf16, f16};
use hopper_attention_tests::backward::mutations::{self, Subject};
use hopper_attention_tests::backward::{Outputs, Prepared};
use hopper_attention_tests::data::{Image, Poison, Values};
use hopper_attention_tests::mutations::masks;
use hopper_attention_tests::problems::{Case, Grid, Tiles, cases, random};
use hopper_attention_tests::runner::{Runner, Verdict};
use proptest::prelude::*;

/// The CPU backend's own blocks, and those of a typical kernel.
fn tiles() -> Tiles {
    Tiles { m: vec![64, 128], n: vec![64, 256] }
}

fn run<T: Poison + Operand<Out = T>>(prepared: &Prepared<T>) -> Result<Outputs<T>, String> {
    let before = prepared.clone();
    let mut outputs = prepared.outputs();
    let plan = prepared.problem.plan(&Device::Cpu).map_err(|error| error.to_string())?;
    let mut workspace = Workspace::alloc(&Stream::Cpu, plan.workspace_bytes()).map_err(|error| error.to_string())?;
    plan.run(&Stream::Cpu, &mut workspace, prepared.host_args(&mut outputs)).map_err(|error| error.to_string())?;
    prepared.check_unchanged(&before)?;
    outputs.check_written()?;
    Ok(outputs)
}

fn verdict<T: Poison + Operand<Out = T>>(prepared: &Prepared<T>) -> Verdict {
    match run(prepared) {
        Ok(outputs) => prepared.verdict(&outputs),
        Err(why) => Verdict::failed(why),
    }
}

fn grid<'c, T: Poison + Operand<Out = T>>(runner: &mut Runner, row: usize, cases: impl Iterator<Item = &'c Case>) {
    let cases: Vec<Case> = cases.cloned().collect();
    for cases in cases.chunks(64) {
        for prepared in Prepared::<T>::all(cases) {
            let verdict = verdict(&prepared);
            runner.take(row, &prepared.case, T::DTYPE, verdict);
        }
    }
}

/// The oracle of the gradients is what limits them: long cases are left out, and of the others one type takes every eleventh,
/// the others every 43rd.
#[test]
fn cases_obey_the_law() {
    let cost = |case: &Case| case.dims.batch * case.dims.heads_q * case.dims.seqlen_q * case.dims.seqlen_kv;
    let all: Vec<Case> = cases(Grid::from_env(), &tiles()).into_iter().filter(|case| cost(case) < 250_000).collect();
    let mut runner = Runner::new(["cpu backward bf16", "cpu backward f16", "cpu backward f32"]);
    grid::<bf16>(&mut runner, 0, all.iter().step_by(11));
    grid::<f16>(&mut runner, 1, all.iter().skip(1).step_by(43));
    grid::<f32>(&mut runner, 2, all.iter().skip(2).step_by(43));
    runner.finish();
}

/// Head dims that no kernel takes are the CPU's too.
#[test]
fn any_head_dim() {
    let mut runner = Runner::new(["cpu backward bf16"]);
    let cases: Vec<Case> = [1, 2, 3, 5, 7, 9, 31, 33, 65, 100, 127, 129, 192, 256, 300]
        .into_iter()
        .map(|head_dim| Case::new(70, 33, head_dim, Mask::causal()))
        .collect();
    grid::<bf16>(&mut runner, 0, cases.iter());
    runner.finish();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, max_shrink_iters: 64, ..ProptestConfig::default() })]
    #[test]
    fn random_cases_obey_the_law(case in random::case(64, 8), dtype in 0..3) {
        let verdict = match dtype {
            0 => verdict(&Prepared::<bf16>::new(&case)),
            1 => verdict(&Prepared::<f16>::new(&case)),
            _ => verdict(&Prepared::<f32>::new(&case)),
        };
        prop_assert!(verdict.wrong.is_none(), "{}: {}", case, verdict.wrong.unwrap_or_default());
    }
}

/// A broken kernel must fail the suite: every mutation of honest gradients is caught, in every kind of case.
#[test]
fn broken_gradients_are_caught() {
    let mut applied = vec![0; mutations::ALL.len()];
    for mask in masks::ALL {
        for case in [
            Case::new(131, 170, 64, mask).heads(1, 4, 2),
            Case::new(170, 90, 40, mask),
            Case { values: Values::Offset, ..Case::new(131, 170, 64, mask) },
        ] {
            let prepared = Prepared::<bf16>::new(&case);
            let honest = run(&prepared).unwrap().tensors();
            let judge = |got: &_| {
                let hopper_attention::reference::BackwardPlain { d_q, d_k, d_v } = got;
                prepared.expected.check(d_q, d_k, d_v).unwrap()
            };
            assert!(judge(&honest).passed());
            let d_lse = prepared.d_lse.as_ref().map(Image::values);
            let subject = Subject {
                problem: &prepared.problem,
                q: &prepared.q.tensor(),
                k: &prepared.k.tensor(),
                v: &prepared.v.tensor(),
                d_o: &prepared.d_o.tensor(),
                d_lse: d_lse.as_deref(),
                honest: &honest,
            };
            for (mutation, applied) in mutations::ALL.iter().zip(&mut applied) {
                if let Some(broken) = (mutation.apply)(subject) {
                    let report = judge(&broken);
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
