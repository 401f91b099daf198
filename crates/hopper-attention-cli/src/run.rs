//! `hattn run` and `hattn check`: one flow, of which `check` has a last step more.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use hopper_attention::reference::tolerance::Figures;
use hopper_attention::reference::{BackwardExpected, Expected, Tensor, forward as oracle};
use hopper_attention::{BackwardProblem, DType, ForwardProblem, Mask, bf16, f16};

use crate::args::{CheckArgs, ComputeArgs, FileLayout, RunArgs};
use crate::compute::{self, Computed, Gradients};
use crate::input::{GivenGradients, Qkv, Value, count_nonfinite};
use crate::output::{AtomicFile, NamedTensor, write_safetensors};
use crate::report;
use crate::request::{Choice, Request, choose, file_shape, same_file, strided};
use crate::tune;

/// `hattn run`.
pub fn run(args: &RunArgs) -> Result<()> {
    attention(&args.compute, Some(&args.output), false)
}

/// `hattn check`.
pub fn check(args: &CheckArgs) -> Result<()> {
    attention(&args.compute, args.output.as_deref(), true)
}

/// Finds every reason to refuse before it reads the tensors, then computes.
fn attention(args: &ComputeArgs, output: Option<&Path>, check: bool) -> Result<()> {
    let request = Request::new(args)?;
    let tuning = args.tuning.as_deref().map(tune::load).transpose()?.unwrap_or_default();
    let choice = choose(args.device, &request, &tuning)?;
    let output = match output {
        Some(path) => {
            ensure!(!same_file(path, &args.input), "output {} is the input; allowed: another file", path.display());
            Some((path, AtomicFile::create(path)?))
        }
        None => None,
    };
    match (request.problem.output_dtype(), args.fp8) {
        (DType::BF16, None) => execute::<bf16>(args, request, &choice, output, check, compute::forward),
        (DType::F16, None) => execute::<f16>(args, request, &choice, output, check, compute::forward),
        (DType::F32, None) => execute::<f32>(args, request, &choice, output, check, compute::forward),
        (DType::BF16, Some(_)) => execute::<bf16>(args, request, &choice, output, check, compute::forward_fp8),
        (DType::F16, Some(_)) => execute::<f16>(args, request, &choice, output, check, compute::forward_fp8),
        (other, _) => bail!("dtype {other}; allowed: bf16, f16, f32"),
    }
}

/// Computes so many times.
type Forward<T> = fn(&Choice, &Request, &Qkv<T>, u32) -> Result<Computed<T>>;

fn execute<T: Value>(
    args: &ComputeArgs,
    mut request: Request,
    choice: &Choice,
    output: Option<(&Path, AtomicFile)>,
    check: bool,
    forward: Forward<T>,
) -> Result<()> {
    describe(args, &request, choice)?;
    let (qkv, given) = report::busy("reading", || read::<T>(&mut request))?;
    for (name, values) in ["q", "k", "v"].into_iter().zip(&qkv.data) {
        warn_nonfinite(name, values);
    }
    if let Some(GivenGradients { d_o, d_lse }) = &given {
        warn_nonfinite("d_o", d_o);
        warn_nonfinite("d_lse", d_lse.as_deref().unwrap_or_default());
    }

    let Request { layout, problem, backward, .. } = &request;
    let repeat = args.repeat.unwrap_or(if compute::on_gpu(&choice.device) { 10 } else { 1 });
    let computed = report::busy("computing", || forward(choice, &request, &qkv, repeat))?;
    warn_nan("o", &computed.o);
    tell_speed("", computed.time, repeat, flops(problem))?;
    let gradients = match backward.as_ref().zip(given) {
        None => None,
        Some((problem, given)) => {
            let inputs = (&qkv, &given, &computed);
            let gradients =
                report::busy("computing gradients", || compute::backward(choice, problem, *layout, inputs, repeat))?;
            for (name, values) in GRADIENTS.into_iter().zip(&gradients.data) {
                warn_nan(name, values);
            }
            tell_speed("backward ", gradients.time, repeat, backward_flops(problem))?;
            Some((problem, given, gradients))
        }
    };

    if let Some((path, file)) = output {
        let o_shape = file_shape(*layout, problem.o_shape());
        let written = gradients.as_ref().map(|(_, _, gradients)| gradients);
        report::busy("writing", || write(file, &request, &computed, written))?;
        let lse_shape = problem.lse_shape();
        let (dtype, layout) = (problem.output_dtype(), layout.name());
        let beside = if written.is_some() { ", d_q, d_k and d_v as q, k and v" } else { "" };
        let text = format!("{}: o {dtype} {o_shape:?} {layout}, lse f32 {lse_shape:?}{beside}", path.display());
        report::line("output", text)?;
    }
    if !check {
        return Ok(());
    }
    if computed.operands.is_some() {
        tell_accuracy(problem, *layout, &qkv, &computed)?;
    }
    let mut figures = judge(problem, *layout, &qkv, &computed)?;
    if let Some((problem, given, gradients)) = &gradients {
        figures.extend(judge_gradients(problem, *layout, &qkv, given, gradients)?);
    }
    verdict(&figures)
}

/// Gradients in the order in which they are computed.
const GRADIENTS: [&str; 3] = ["d_q", "d_k", "d_v"];

fn read<T: Value>(request: &mut Request) -> Result<(Qkv<T>, Option<GivenGradients<T>>)> {
    let qkv = request.input.read_qkv(request.file_dtype)?;
    let Some(backward) = &request.backward else { return Ok((qkv, None)) };
    Ok((qkv, Some(request.input.read_gradients(request.file_dtype, backward.takes_d_lse())?)))
}

fn tell_speed(pass: &str, time: Duration, repeat: u32, flops: f64) -> Result<()> {
    let runs = if repeat == 1 { "one run".into() } else { format!("median of {repeat} runs") };
    report::line("time", format!("{pass}{}, {runs}", report::duration(time)))?;
    let rate = report::digits(flops / time.as_secs_f64().max(1e-9) / 1e12);
    report::line(
        "rate",
        format!("{pass}{rate} TFLOP/s ({} GFLOP over the pairs that the mask keeps)", report::digits(flops / 1e9)),
    )
}

fn describe(args: &ComputeArgs, request: &Request, choice: &Choice) -> Result<()> {
    let Request { file_dtype, layout, layout_source, problem, .. } = request;
    let mut input = format!("{}: {file_dtype} {} (from {layout_source})", args.input.display(), layout.name());
    if *file_dtype != problem.output_dtype() {
        input += &format!(", converted to {}", problem.output_dtype());
    }
    report::line("input", input)?;
    if let Some(plan) = &choice.quantise {
        report::line("fp8", format!("{}: {plan}", plan.quantizer()))?;
    }
    report::line("problem", problem)?;
    report::line("plan", &choice.plan)?;
    if let Some(plan) = &choice.backward {
        report::line("backward", format!("{}\n{plan}", plan.problem()))?;
    }
    let device = compute::device_name(&choice.device);
    match &choice.why {
        Some(why) => report::line("device", format!("{device} (auto: {why})")),
        None => report::line("device", device),
    }
}

fn warn_nonfinite<T: Value>(name: &str, values: &[T]) {
    let (nan, infinite) = count_nonfinite(values);
    if nan + infinite > 0 {
        report::warn(format!("{name} holds {nan} NaN and {infinite} infinite values of {}", values.len()));
    }
}

/// A result may hold infinities; a NaN is worth a word.
fn warn_nan<T: Value>(name: &str, values: &[T]) {
    if count_nonfinite(values).0 > 0 {
        warn_nonfinite(name, values);
    }
}

fn write<T: Value>(
    file: AtomicFile,
    request: &Request,
    computed: &Computed<T>,
    gradients: Option<&Gradients<T>>,
) -> Result<()> {
    let problem = &request.problem;
    let metadata: BTreeMap<String, String> = [
        ("layout", request.layout.name().to_string()),
        ("mask", problem.mask_value().to_string()),
        ("softmax_scale", problem.softmax_scale_value().to_string()),
        ("made_by", concat!("hattn ", env!("CARGO_PKG_VERSION")).to_string()),
    ]
    .map(|(key, value)| (key.to_string(), value))
    .into();
    let shapes = [problem.q_shape(), problem.k_shape(), problem.v_shape()];
    let gradients = gradients.into_iter().flat_map(|gradients| &gradients.data).zip(GRADIENTS.into_iter().zip(shapes));
    let mut tensors: Vec<NamedTensor> = gradients
        .map(|(values, (name, shape))| NamedTensor {
            name,
            dtype: problem.dtype(),
            shape: file_shape(request.layout, shape).to_vec(),
            bytes: bytemuck::cast_slice(values),
        })
        .collect();
    tensors.extend([
        NamedTensor {
            name: "lse",
            dtype: DType::F32,
            shape: problem.lse_shape().to_vec(),
            bytes: bytemuck::cast_slice(&computed.lse),
        },
        NamedTensor {
            name: "o",
            dtype: problem.output_dtype(),
            shape: file_shape(request.layout, problem.o_shape()).to_vec(),
            bytes: bytemuck::cast_slice(&computed.o),
        },
    ]);
    file.finish(|writer| write_safetensors(writer, &metadata, &tensors))
}

/// How far the result is from the f64 oracle.
fn judge<T: Value>(
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

/// How far the result is from the exact one of the input before it was quantised, which the law does not judge.
fn tell_accuracy<T: Value>(
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
fn judge_gradients<T: Value>(
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

/// Tells the figures; an error when one is past the law.
fn verdict(figures: &[(&str, Figures)]) -> Result<()> {
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

/// Multiplications and additions of both matrix products, over the pairs of query and key that the mask keeps.
fn flops(problem: &ForwardProblem) -> f64 {
    let dims = problem.dims();
    let pairs = kept_pairs(&problem.mask_value(), dims.seqlen_q, dims.seqlen_kv) as f64;
    2.0 * (dims.batch * dims.heads_q) as f64 * pairs * (dims.head_dim_qk + dims.head_dim_vo) as f64
}

/// The same of the five products of the gradients: the scores, dQ and dK of one head dim, dP and dV of the other.
fn backward_flops(problem: &BackwardProblem) -> f64 {
    let dims = problem.dims();
    let (qk, vo) = (dims.head_dim_qk as f64, dims.head_dim_vo as f64);
    flops(problem.forward()) * (3.0 * qk + 2.0 * vo) / (qk + vo)
}

/// How many pairs of query and key a mask keeps.
fn kept_pairs(mask: &Mask, seqlen_q: usize, seqlen_kv: usize) -> u64 {
    let band = mask.band(seqlen_q, seqlen_kv);
    let keys = seqlen_kv as i64;
    let bound = |bound: Option<usize>| bound.map(|bound| i64::try_from(bound).unwrap_or(i64::MAX));
    let row = |q: i64| {
        let own = q + band.offset;
        let first = bound(band.left).map_or(0, |left| own.saturating_sub(left).max(0));
        let end = bound(band.right).map_or(keys, |right| own.saturating_add(right).saturating_add(1).min(keys));
        (end - first).max(0) as u64
    };
    (0..seqlen_q as i64).map(row).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hopper_attention::{Corner, Dims};
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
    fn a_result_past_the_law_fails_the_check() {
        let ln_2 = std::f32::consts::LN_2;
        assert!(judged(vec![2.0, 3.0], ln_2).is_ok());
        for (o, lse) in [([2.0, 3.001], ln_2), ([2.0, f32::NAN], ln_2), ([2.0, 3.0], ln_2 + 0.001)] {
            let error = judged(o.to_vec(), lse).expect_err("a wrong result passed").to_string();
            assert!(error.starts_with("check failed: the largest error is "), "{error}");
        }
    }

    /// Both weights are a half. With dO = (1, 3) and dLSE = 2, dP is 7 and 15, delta 11 - 2, dS -1 and 3.
    #[test]
    fn gradients_past_the_law_fail_the_check() {
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

    #[test]
    fn gradients_take_five_products() {
        let (problem, _) = problem();
        assert_eq!(backward_flops(&BackwardProblem::of(&problem)), 2.5 * flops(&problem));
        let dims = Dims { head_dim_vo: 5, ..problem.dims() };
        let other = ForwardProblem::new(DType::F32, dims).expect("a legal problem");
        assert_eq!(backward_flops(&BackwardProblem::of(&other)), 2.0 * 2.0 * (3.0 * 2.0 + 2.0 * 5.0));
    }

    #[test]
    fn kept_pairs_are_those_that_the_mask_keeps() {
        let bounds = [None, Some(0), Some(2), Some(usize::MAX)];
        let mut masks = vec![Mask::Full];
        for corner in [Corner::BottomRight, Corner::TopLeft] {
            masks.push(Mask::Causal { corner });
            for left in bounds {
                masks.extend(bounds.map(|right| Mask::Window { left, right, corner }));
            }
        }
        for mask in masks {
            for (rows, keys) in [(0, 3), (3, 0), (1, 1), (4, 9), (9, 4), (7, 7)] {
                let pairs = (0..rows).flat_map(|q| (0..keys).map(move |kv| (q, kv)));
                let counted = pairs.filter(|&(q, kv)| mask.keep(q, kv, rows, keys)).count();
                assert_eq!(kept_pairs(&mask, rows, keys), counted as u64, "{mask} {rows}x{keys}");
            }
        }
    }
}
