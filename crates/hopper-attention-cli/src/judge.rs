//! The last step of `hattn check`: a result held against the f64 oracle.

use anyhow::{Result, bail};
use hopper_attention::reference::tolerance::Figures;
use hopper_attention::reference::{BackwardExpected, Expected, Tensor, forward as oracle};
use hopper_attention::{BackwardProblem, ForwardProblem};

use crate::args::FileLayout;
use crate::compute::{Computed, GRADIENTS, Gradients};
use crate::layout::strided;
use crate::report;
use crate::values::{GivenGradients, Qkv, Value};

/// How far the result is from the f64 oracle.
pub fn judge<T: Value>(
    problem: &ForwardProblem,
    layout: FileLayout,
    qkv: &Qkv<T>,
    computed: &Computed<T>,
) -> Result<Vec<(&'static str, Figures)>> {
    let report = report::busy("checking against the f64 oracle", || {
        let [q, k, v] = match &computed.operands {
            Some(operands) => operands.real(problem, layout)?,
            None => wide_qkv(problem, layout, qkv)?,
        };
        let lse = wide_lse(&computed.lse);
        let o = wide(&computed.o, layout, problem.o_shape())?;
        anyhow::Ok(Expected::new(problem, &q, &k, &v)?.check(&o, Some(&lse))?)
    })?;
    Ok([("o", report.o)].into_iter().chain(report.lse.map(|lse| ("lse", lse))).collect())
}

/// How far the result is from the exact one of the input before it was quantised, which the tolerance does not allow for.
pub fn tell_accuracy<T: Value>(
    problem: &ForwardProblem,
    layout: FileLayout,
    qkv: &Qkv<T>,
    computed: &Computed<T>,
) -> Result<()> {
    let error = report::busy("comparing with the f64 oracle on the input", || {
        let [q, k, v] = wide_qkv(problem, layout, qkv)?;
        let exact = oracle(problem, &q, &k, &v)?.o;
        let o = wide(&computed.o, layout, problem.o_shape())?;
        let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
        let errors = squares(&mut o.data().iter().zip(exact.data()).map(|(o, exact)| o - exact));
        // Without an error there is none, be there nothing to compare.
        anyhow::Ok(if errors == 0.0 { 0.0 } else { (errors / squares(&mut exact.data().iter().copied())).sqrt() })
    })?;
    report::line("accuracy", format!("relative RMSE of o, quantisation included: {}", report::digits(error)))
}

/// How far the gradients are from the f64 oracle, which computes o and lse anew.
pub fn judge_gradients<T: Value>(
    problem: &BackwardProblem,
    layout: FileLayout,
    qkv: &Qkv<T>,
    given: &GivenGradients<T>,
    gradients: &Gradients<T>,
) -> Result<Vec<(&'static str, Figures)>> {
    let report = report::busy("checking gradients against the f64 oracle", || {
        let [q, k, v] = wide_qkv(problem.forward(), layout, qkv)?;
        let d_o = wide(&given.d_o, layout, problem.d_o_shape())?;
        let d_lse = given.d_lse.as_deref().map(wide_lse);
        let [d_q, d_k, d_v] = &gradients.data;
        BackwardExpected::new(problem, &q, &k, &v, &d_o, d_lse.as_deref())?.check(
            &wide(d_q, layout, problem.d_q_shape())?,
            &wide(d_k, layout, problem.d_k_shape())?,
            &wide(d_v, layout, problem.d_v_shape())?,
        )
    })?;
    Ok(GRADIENTS.into_iter().zip([report.d_q, report.d_k, report.d_v]).collect())
}

fn wide<T: Value>(data: &[T], layout: FileLayout, shape: [usize; 4]) -> hopper_attention::Result<Tensor> {
    Ok(Tensor::from_strided(data, &strided(layout, shape)?))
}

fn wide_qkv<T: Value>(
    problem: &ForwardProblem,
    layout: FileLayout,
    qkv: &Qkv<T>,
) -> hopper_attention::Result<[Tensor; 3]> {
    let [q, k, v] = &qkv.data;
    Ok([wide(q, layout, problem.q_shape())?, wide(k, layout, problem.k_shape())?, wide(v, layout, problem.v_shape())?])
}

fn wide_lse(lse: &[f32]) -> Vec<f64> {
    lse.iter().map(|&lse| f64::from(lse)).collect()
}

/// Tells the figures; an error when one is past the tolerance.
pub fn verdict(figures: &[(&str, Figures)]) -> Result<()> {
    for (name, figures) in figures {
        report::line(name, figures)?;
    }
    // A ratio is a number, or infinite where what is not finite does not match.
    let worst = figures.iter().map(|(_, figures)| figures.worst_ratio).fold(0.0, f64::max);
    let text = report::digits(worst);
    if worst <= 1.0 {
        return report::line("check", format!("passed: the largest error is {text} of its tolerance"));
    }
    report::line("check", format!("FAILED: the largest error is {text} of its tolerance"))?;
    bail!("check failed: the largest error is {text} of its tolerance; allowed: 1")
}

#[cfg(test)]
mod tests {
    use super::*;
    use hopper_attention::{DType, Dims};
    use std::time::Duration;

    /// One query and two equal keys.
    fn problem() -> (ForwardProblem, Qkv<f32>) {
        let dims =
            Dims { batch: 1, seqlen_q: 1, seqlen_kv: 2, heads_q: 1, heads_kv: 1, head_dim_qk: 2, head_dim_vo: 2 };
        let qkv = Qkv { data: [vec![0.0, 0.0], vec![1.0; 4], vec![1.0, 2.0, 3.0, 4.0]] };
        (ForwardProblem::new(DType::F32, dims).expect("a legal problem").lse(true), qkv)
    }

    /// The output is the mean of the two values, the LSE ln 2.
    fn judged(o: Vec<f32>, lse: f32) -> Result<()> {
        let (problem, qkv) = problem();
        let computed = Computed { o, lse: vec![lse], time: Duration::ZERO, operands: None };
        verdict(&judge(&problem, FileLayout::Bshd, &qkv, &computed)?)
    }

    #[test]
    fn a_result_past_the_tolerance_fails_the_check() {
        let ln_2 = std::f32::consts::LN_2;
        assert!(judged(vec![2.0, 3.0], ln_2).is_ok());
        for (o, lse) in [([2.0, 3.001], ln_2), ([2.0, f32::NAN], ln_2), ([2.0, 3.0], ln_2 + 0.001)] {
            let error = judged(o.to_vec(), lse).expect_err("a wrong result passed").to_string();
            assert!(error.starts_with("check failed: the largest error is "), "{error}");
        }
    }

    /// Both weights are a half. With dO = (1, 3) and dLSE = 2, dP is 7 and 15, delta 11 - 2, dS -1 and 3.
    #[test]
    fn gradients_past_the_tolerance_fail_the_check() {
        let (problem, qkv) = problem();
        let backward = BackwardProblem::of(&problem.softmax_scale(1.0).expect("a scale")).d_lse(true);
        let given = GivenGradients { d_o: vec![1.0, 3.0], d_lse: Some(vec![2.0]) };
        let right = || [vec![2.0f32, 2.0], vec![0.0; 4], vec![0.5, 1.5, 0.5, 1.5]];
        let judged = |data| {
            let gradients = Gradients { data, time: Duration::ZERO };
            verdict(&judge_gradients(&backward, FileLayout::Bshd, &qkv, &given, &gradients)?)
        };
        assert!(judged(right()).is_ok());
        for tensor in 0..3 {
            for wrong in [1e-3, f32::NAN] {
                let mut data = right();
                data[tensor][1] += wrong;
                assert!(judged(data).is_err(), "{} + {wrong} passed", GRADIENTS[tensor]);
            }
        }
    }
}
