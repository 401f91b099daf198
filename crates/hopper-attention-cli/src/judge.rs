//! The last step of `hattn check`: a result held against the f64 oracle.

use anyhow::{Result, bail};
use hopper_attention::reference::tolerance::Figures;
use hopper_attention::reference::{
    BackwardExpected, BackwardPlain, DropoutMask, Expected, Modifiers, Tensor, forward_with as oracle,
};
use hopper_attention::{BackwardProblem, ForwardProblem, Layout, SequenceRows, Slot};

use crate::args::FileLayout;
use crate::blocks::lists;
use crate::layout::strided;
use crate::operands::QUANTISED;
use crate::report;
use crate::values::{Tensors, Values, dropout_state, lengths, tensor};

/// How far the result is from the f64 oracle.
pub fn judge(problem: &ForwardProblem, layout: FileLayout, tensors: &Tensors) -> Result<Vec<(&'static str, Figures)>> {
    let report = report::gradually("checking against the f64 oracle", |told| {
        let [q, k, v] = real(problem, layout, tensors)?;
        let o = wide(tensors, Slot::O, layout, problem.o_shape())?;
        let lse = tensor(tensors, Slot::Lse)?.wide()?;
        let read = Read::of(tensors)?;
        let modifiers = read.modifiers(problem, tensors);
        let expected = Expected::with(problem, &lengths(tensors), [&q, &k, &v], modifiers, 1.0, Some(told))?;
        anyhow::Ok(match list(tensors, Slot::MaxLogits)? {
            Some(max_logits) => expected.check_with(&o, Some(&lse), &max_logits)?,
            None => expected.check(&o, Some(&lse))?,
        })
    })?;
    let others = [("lse", report.lse), ("max_logits", report.max_logits)];
    let others = others.into_iter().filter_map(|(name, figures)| Some((name, figures?)));
    Ok([("o", report.o)].into_iter().chain(others).collect())
}

/// How far the result is from the exact one of the input before it was quantised, which the tolerance does not allow for.
pub fn tell_accuracy(problem: &ForwardProblem, layout: FileLayout, tensors: &Tensors) -> Result<()> {
    let error = report::busy("comparing with the f64 oracle on the input", || {
        let values = |i: usize, shape| wide(tensors, QUANTISED[i].values, layout, shape);
        let (q, k, v) = (values(0, problem.q_shape())?, values(1, problem.k_shape())?, values(2, problem.v_shape())?);
        let read = Read::of(tensors)?;
        let modifiers = read.modifiers(problem, tensors);
        let exact = oracle(problem, &lengths(tensors), [&q, &k, &v], modifiers)?.o;
        let o = wide(tensors, Slot::O, layout, problem.o_shape())?;
        let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
        let errors = squares(&mut o.data().iter().zip(exact.data()).map(|(o, exact)| o - exact));
        // Without an error there is none, be there nothing to compare.
        anyhow::Ok(if errors == 0.0 { 0.0 } else { (errors / squares(&mut exact.data().iter().copied())).sqrt() })
    })?;
    report::line("accuracy", format!("relative RMSE of o, quantisation included: {}", report::digits(error)));
    Ok(())
}

/// How far the gradients are from the f64 oracle, which computes o and lse again.
pub fn judge_gradients(
    problem: &BackwardProblem,
    layout: FileLayout,
    tensors: &Tensors,
) -> Result<Vec<(&'static str, Figures)>> {
    let report = report::gradually("checking gradients against the f64 oracle", |told| {
        let [q, k, v] = real(problem.forward(), layout, tensors)?;
        let d_o = wide(tensors, Slot::DO, layout, problem.d_o_shape())?;
        let d_lse = tensors.get(&Slot::DLse).map(Values::wide).transpose()?;
        let inputs = [&q, &k, &v, &d_o];
        let lengths = lengths(tensors);
        let read = Read::of(tensors)?;
        let modifiers = read.modifiers(problem.forward(), tensors);
        let expected = BackwardExpected::with(problem, &lengths, inputs, d_lse.as_deref(), modifiers, Some(told))?;
        let d_q = wide(tensors, Slot::DQ, layout, problem.d_q_shape())?;
        let d_k = wide(tensors, Slot::DK, layout, problem.d_k_shape())?;
        let d_v = wide(tensors, Slot::DV, layout, problem.d_v_shape())?;
        let written = |slot| anyhow::Ok(list(tensors, slot)?.unwrap_or_default());
        let (d_sinks, d_bias) = (written(Slot::DSinks)?, written(Slot::DBias)?);
        anyhow::Ok(expected.check_all(&BackwardPlain { d_q, d_k, d_v, d_sinks, d_bias })?)
    })?;
    let others = [("d_sinks", report.d_sinks), ("dbias", report.d_bias)];
    let others = others.into_iter().filter_map(|(name, figures)| Some((name, figures?)));
    Ok([("d_q", report.d_q), ("d_k", report.d_k), ("d_v", report.d_v)].into_iter().chain(others).collect())
}

/// What changes the softmax, as the oracle reads it.
struct Read {
    sinks: Option<Vec<f64>>,
    slopes: Option<Vec<f64>>,
    bias: Option<Vec<f64>>,
}

impl Read {
    fn of(tensors: &Tensors) -> Result<Self> {
        let [sinks, slopes, bias] = [Slot::Sinks, Slot::AlibiSlopes, Slot::Bias].map(|slot| list(tensors, slot));
        Ok(Self { sinks: sinks?, slopes: slopes?, bias: bias? })
    }

    fn modifiers<'a>(&'a self, problem: &ForwardProblem, tensors: &'a Tensors) -> Modifiers<'a> {
        let Self { sinks, slopes, bias } = self;
        let (sinks, alibi_slopes, bias) = (sinks.as_deref(), slopes.as_deref(), bias.as_deref());
        let dropout = DropoutMask::of(problem, dropout_state(tensors));
        Modifiers { sinks, alibi_slopes, bias, blocks: lists(tensors), dropout }
    }
}

/// Numbers in the order of memory, such as the attention sinks, where there are any.
fn list(tensors: &Tensors, slot: Slot) -> Result<Option<Vec<f64>>> {
    tensors.get(&slot).map(Values::wide).transpose()
}

fn wide(tensors: &Tensors, slot: Slot, layout: FileLayout, shape: [usize; 4]) -> Result<Tensor> {
    Ok(tensor(tensors, slot)?.tensor(&strided(layout, shape)?))
}

/// The real values of q, k and v: what is stored, times its factors where it has some.
fn real(problem: &ForwardProblem, layout: FileLayout, tensors: &Tensors) -> Result<[Tensor; 3]> {
    let scaling = problem.scaling().unwrap_or_default();
    let sequences: Vec<_> = lengths(tensors).sequences(problem).collect();
    let real = |i: usize, shape, of_factors, group| {
        let stored = wide(tensors, QUANTISED[i].tensor, layout, shape)?;
        let Some(factors) = tensors.get(&QUANTISED[i].factors) else { return Ok(stored) };
        let (factors, of_factors) = (factors.wide()?, Layout::contiguous(of_factors)?);
        anyhow::Ok(stored.descaled(|[batch, row, head]| {
            // A sequence's rows follow those of earlier ones. Rows of no sequence have no factor, and nobody reads them.
            let own = if problem.has_lengths() {
                let of_side = |rows: &[SequenceRows; 2]| rows[usize::from(i > 0)];
                let from =
                    sequences.partition_point(|rows| (of_side(rows).batch, of_side(rows).range().end) <= (batch, row));
                let rows = sequences.get(from).map(of_side).filter(|own| own.batch == batch && own.begin <= row);
                rows.map(|own| own.factor(scaling, head, group, row - own.begin))
            } else {
                Some(scaling.index(batch, head, group, row))
            };
            own.and_then(|own| of_factors.offset(own)).map_or(f32::NAN, |place| factors[place] as f32)
        }))
    };
    Ok([
        real(0, problem.q_shape(), problem.descale_q_shape(), problem.group_size())?,
        real(1, problem.k_shape(), problem.descale_k_shape(), 1)?,
        real(2, problem.v_shape(), problem.descale_v_shape(), 1)?,
    ])
}

/// Tells the figures; an error when one is past the tolerance.
pub fn verdict(figures: &[(&str, Figures)]) -> Result<()> {
    for (name, figures) in figures {
        report::line(name, figures);
    }
    // A ratio is a number, or infinite where what is not finite does not match.
    let worst = figures.iter().map(|(_, figures)| figures.worst_ratio).fold(0.0, f64::max);
    let text = report::digits(worst);
    if worst <= 1.0 {
        report::line("check", format!("passed: the largest error is {text} of its tolerance"));
        return Ok(());
    }
    report::line("check", format!("FAILED: the largest error is {text} of its tolerance"));
    bail!("check failed: the largest error is {text} of its tolerance; allowed: 1")
}

#[cfg(test)]
mod tests {
    use super::*;
    use hopper_attention::{DType, Dims};

    /// One query and two equal keys.
    fn problem() -> (ForwardProblem, Tensors) {
        let dims = Dims::new(1, 1, 1, 2).with_seqlen_kv(2);
        let problem = ForwardProblem::builder(DType::F32, dims).softmax_scale(1.0).lse(true).build();
        let qkv = [(Slot::Q, vec![0.0, 0.0]), (Slot::K, vec![1.0; 4]), (Slot::V, vec![1.0, 2.0, 3.0, 4.0])].map(values);
        (problem.expect("a legal problem"), qkv.into())
    }

    fn values((slot, values): (Slot, Vec<f32>)) -> (Slot, Values) {
        (slot, Values::F32(values))
    }

    /// The output is the mean of the two values, the LSE ln 2.
    fn judged(o: Vec<f32>, lse: f32) -> Result<()> {
        let (problem, mut tensors) = problem();
        tensors.extend([(Slot::O, o), (Slot::Lse, vec![lse])].map(values));
        verdict(&judge(&problem, FileLayout::Bshd, &tensors)?)
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
        let (problem, mut tensors) = problem();
        let backward = BackwardProblem::builder(&problem).d_lse(true).build().expect("it has gradients");
        tensors.extend([(Slot::DO, vec![1.0, 3.0]), (Slot::DLse, vec![2.0])].map(values));
        let mut judged = |slot, wrong: f32| {
            let right = [(Slot::DQ, vec![2.0, 2.0]), (Slot::DK, vec![0.0; 4]), (Slot::DV, vec![0.5, 1.5, 0.5, 1.5])];
            tensors.extend(right.map(values));
            if let Some(Values::F32(values)) = tensors.get_mut(&slot) {
                values[1] += wrong;
            }
            verdict(&judge_gradients(&backward, FileLayout::Bshd, &tensors)?)
        };
        for slot in [Slot::DQ, Slot::DK, Slot::DV] {
            assert!(judged(slot, 0.0).is_ok());
            for wrong in [1e-3, f32::NAN] {
                assert!(judged(slot, wrong).is_err(), "{slot} + {wrong} passed");
            }
        }
    }
}
