//! `hattn run` and `hattn check`: one flow, of which `check` has a last step more.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use hopper_attention::{BackwardProblem, DType, ForwardProblem, Mask, bf16, f16};

use crate::args::{CheckArgs, ComputeArgs, RunArgs};
use crate::compute::{self, Computed, GRADIENTS, Gradients};
use crate::input;
use crate::judge::{judge, judge_gradients, tell_accuracy, verdict};
use crate::layout::file_shape;
use crate::output::{AtomicFile, NamedTensor, write_safetensors};
use crate::report;
use crate::request::{Choice, Request, choose, same_file};
use crate::values::{GivenGradients, Qkv, Value, count_nonfinite};

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
    let tuning = args.tuning.as_deref().map(input::tuning).transpose()?.unwrap_or_default();
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

    #[test]
    fn gradients_take_five_products() {
        let dims =
            Dims { batch: 1, seqlen_q: 1, seqlen_kv: 2, heads_q: 1, heads_kv: 1, head_dim_qk: 2, head_dim_vo: 2 };
        let problem = ForwardProblem::new(DType::F32, dims).expect("a legal problem");
        assert_eq!(backward_flops(&BackwardProblem::of(&problem)), 2.5 * flops(&problem));
        let dims = Dims { head_dim_vo: 5, ..dims };
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
