//! `hattn run` and `hattn check`: one flow, of which `check` has a last step more.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use hopper_attention::{BackwardProblem, ForwardProblem, Lengths, Mask, Operand, Slot};

use crate::args::{CheckArgs, ComputeArgs, RunArgs};
use crate::blocks;
use crate::compute::{self, Plan, compute};
use crate::dropout_mask::Kept;
use crate::input;
use crate::judge::{judge, judge_gradients, tell_accuracy, verdict};
use crate::layout::{is_in_files_order, shape_in_file};
use crate::operands::outputs;
use crate::output::{AtomicFile, NamedTensor, write_safetensors};
use crate::report;
use crate::request::{Choice, Request, choose, same_file};
use crate::values::{Tensors, Values, lengths, tensor};

/// `hattn run`.
pub fn run(args: &RunArgs) -> Result<()> {
    attention(&args.compute, Some(&args.output), false, args.dropout_mask)
}

/// `hattn check`.
pub fn check(args: &CheckArgs) -> Result<()> {
    attention(&args.compute, args.output.as_deref(), true, false)
}

/// Finds every reason to refuse before it reads the tensors, then computes. `dropout_mask`: whether the output also has what
/// dropout keeps.
fn attention(args: &ComputeArgs, output: Option<&Path>, check: bool, dropout_mask: bool) -> Result<()> {
    let mut request = Request::new(args)?;
    ensure!(
        !dropout_mask || request.problem.dropout().is_some(),
        "--dropout-mask without dropout; allowed: --dropout above 0, or an input whose metadata has it"
    );
    let tuning = args.tuning.as_deref().map(input::tuning).transpose()?.unwrap_or_default();
    let choice = choose(args.device, &request, &tuning)?;
    let output = match output {
        Some(path) => {
            ensure!(!same_file(path, &args.input), "output {} is the input; allowed: another file", path.display());
            Some((path, AtomicFile::create(path)?))
        }
        None => None,
    };
    describe(args, &request, &choice);
    let tensors = report::busy("reading", || request.read())?;
    tensors.iter().for_each(|(slot, values)| match slot {
        // -inf hides a pair.
        Slot::Bias => warn_nan(*slot, values),
        _ => warn_nonfinite(*slot, values),
    });
    let kept =
        dropout_mask.then(|| report::busy("drawing the mask of dropout", || Kept::new(&request.problem, &tensors)));
    let kept = kept.transpose()?;
    execute(args, &request, &choice, tensors, output.map(|(path, file)| (path, file, kept)), check)
}

fn execute(
    args: &ComputeArgs,
    request: &Request,
    choice: &Choice,
    mut tensors: Tensors,
    output: Option<(&Path, AtomicFile, Option<Kept>)>,
    check: bool,
) -> Result<()> {
    let Request { layout, problem, backward, .. } = request;
    let repeat = args.repeat.unwrap_or(if compute::on_gpu(&choice.device) { 10 } else { 1 });
    if let Some(plan) = &choice.quantise {
        report::busy("quantising", || compute::quantise(plan, &choice.device, *layout, &mut tensors))?;
    }
    let pairs = match problem.block_mask().zip(blocks::lists(&tensors)) {
        Some((form, lists)) => blocks::kept_pairs(problem, form, &lists) as f64,
        None => pairs(problem, &lengths(&tensors)),
    };
    let mut pass = |what, plan: &dyn Plan| {
        let time = report::busy(what, || compute(plan, &choice.device, *layout, &mut tensors, repeat))?;
        outputs(plan.operands()).filter(|operand| is_in_files_order(operand)).try_for_each(|operand| {
            warn_nan(operand.slot(), tensor(&tensors, operand.slot())?);
            anyhow::Ok(())
        })?;
        anyhow::Ok(time)
    };
    let time = pass("computing", &choice.plan)?;
    tell_speed("", time, repeat, flops(problem, pairs));
    if let Some(plan) = &choice.backward {
        let time = pass("computing gradients", plan)?;
        tell_speed("backward ", time, repeat, backward_flops(plan.problem(), pairs));
    }

    if let Some((path, file, kept)) = output {
        report::busy("writing", || write(file, request, &tensors, kept.as_ref()))?;
        let text = |operand: &Operand| {
            let order = if is_in_files_order(operand) { format!(" {}", layout.name()) } else { String::new() };
            format!("{} {} {:?}{order}", operand.slot(), operand.dtype(), shape_in_file(*layout, operand))
        };
        let written: Vec<String> = outputs(&problem.operands()).map(text).collect();
        let beside = match backward {
            Some(backward) if backward.wants_d_sinks() => ", d_q, d_k and d_v as q, k and v, d_sinks",
            Some(_) => ", d_q, d_k and d_v as q, k and v",
            None => "",
        };
        let of_bias = backward.as_ref().is_some_and(BackwardProblem::wants_d_bias);
        let of_bias = if of_bias { ", dbias as bias" } else { "" };
        let of_dropout = kept.map(|kept| format!(", {} u8 {:?}", Kept::NAME, kept.shape)).unwrap_or_default();
        report::line("output", format!("{}: {}{beside}{of_bias}{of_dropout}", path.display(), written.join(", ")));
    }
    if !check {
        return Ok(());
    }
    if request.quantizer.is_some() {
        tell_accuracy(problem, *layout, &tensors)?;
    }
    let mut figures = judge(problem, *layout, &tensors)?;
    if let Some(problem) = backward {
        figures.extend(judge_gradients(problem, *layout, &tensors)?);
    }
    verdict(&figures)
}

fn tell_speed(pass: &str, time: Duration, repeat: u32, flops: f64) {
    let runs = if repeat == 1 { "one run".into() } else { format!("median of {repeat} runs") };
    report::line("time", format!("{pass}{}, {runs}", report::duration(time)));
    let rate = report::digits(flops / time.as_secs_f64().max(1e-9) / 1e12);
    report::line(
        "rate",
        format!("{pass}{rate} TFLOP/s ({} GFLOP over the pairs that the mask keeps)", report::digits(flops / 1e9)),
    );
}

fn describe(args: &ComputeArgs, request: &Request, choice: &Choice) {
    let Request { file_dtype, layout, layout_source, problem, .. } = request;
    let mut input = format!("{}: {file_dtype} {} (from {layout_source})", args.input.display(), layout.name());
    if *file_dtype != problem.output_dtype() {
        input += &format!(", converted to {}", problem.output_dtype());
    }
    report::line("input", input);
    if let Some(plan) = &choice.quantise {
        report::line("fp8", format!("{}: {plan}", plan.quantizer()));
    }
    report::line("problem", problem);
    report::line("plan", &choice.plan);
    if let Some(plan) = &choice.backward {
        report::line("backward", format!("{}\n{plan}", plan.problem()));
    }
    let device = compute::device_name(&choice.device);
    match &choice.why {
        Some(why) => report::line("device", format!("{device} (auto: {why})")),
        None => report::line("device", device),
    }
}

fn warn_nonfinite(slot: Slot, values: &Values) {
    let (nan, infinite) = values.count_nonfinite();
    if nan + infinite > 0 {
        report::warn(format!("{slot} holds {nan} NaN and {infinite} infinite values of {}", values.len()));
    }
}

/// A result may hold infinities; a NaN is worth a word.
fn warn_nan(slot: Slot, values: &Values) {
    if values.count_nonfinite().0 > 0 {
        warn_nonfinite(slot, values);
    }
}

/// Writes what was computed: the gradients, then the rest from the last to the first, then what dropout keeps.
fn write(file: AtomicFile, request: &Request, tensors: &Tensors, kept: Option<&Kept>) -> Result<()> {
    let Request { layout, problem, backward, .. } = request;
    let metadata: BTreeMap<String, String> = [
        ("layout", layout.name().to_string()),
        ("mask", problem.mask().to_string()),
        ("softmax_scale", problem.softmax_scale().to_string()),
        ("softcap", problem.softcap().to_string()),
        ("made_by", concat!("hattn ", env!("CARGO_PKG_VERSION")).to_string()),
    ]
    .map(|(key, value)| (key.to_string(), value))
    .into();
    let (forward, backward) = (problem.operands(), backward.as_ref().map(BackwardProblem::operands));
    let written = backward.iter().flat_map(outputs).chain(outputs(&forward).rev()).map(|operand| {
        let values = tensor(tensors, operand.slot())?;
        let (name, shape) = (operand.slot().name(), shape_in_file(*layout, operand));
        Ok(NamedTensor { name, dtype: operand.dtype().name(), shape, bytes: values.bytes() })
    });
    let mut written: Vec<NamedTensor> = written.collect::<Result<_>>()?;
    written.extend(kept.map(Kept::named));
    file.finish(|writer| write_safetensors(writer, &metadata, &written))
}

/// Multiplications and additions of both matrix products, over so many pairs of query and key.
fn flops(problem: &ForwardProblem, pairs: f64) -> f64 {
    let dims = problem.dims();
    2.0 * pairs * (dims.head_dim_qk + dims.head_dim_vo) as f64
}

/// The same of the five products of the gradients: the scores, dQ and dK of one head dim, dP and dV of the other.
fn backward_flops(problem: &BackwardProblem, pairs: f64) -> f64 {
    let dims = problem.dims();
    let (qk, vo) = (dims.head_dim_qk as f64, dims.head_dim_vo as f64);
    flops(problem.forward(), pairs) * (3.0 * qk + 2.0 * vo) / (qk + vo)
}

/// The pairs of query and key that the mask keeps, in all heads of all sequences.
fn pairs(problem: &ForwardProblem, lengths: &Lengths<'_>) -> f64 {
    let (dims, mask) = (problem.dims(), problem.mask());
    if problem.has_lengths() {
        let each = lengths.sequences(problem).map(|[q, kv]| kept_pairs(&mask, q.len, kv.len) as f64);
        return dims.heads_q as f64 * each.sum::<f64>();
    }
    let heads = dims.batch * dims.heads_q;
    // Without heads the file may state any number of queries, and they would all be counted.
    let pairs = if heads == 0 { 0 } else { kept_pairs(&mask, dims.seqlen_q, dims.seqlen_kv) };
    heads as f64 * pairs as f64
}

/// How many pairs of query and key a mask keeps.
fn kept_pairs(mask: &Mask, seqlen_q: usize, seqlen_kv: usize) -> u64 {
    let band = mask.band(seqlen_q, seqlen_kv);
    let row = |q| {
        let (first, end) = band.keys(q, seqlen_kv);
        (end - first) as u64
    };
    (0..seqlen_q).map(row).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hopper_attention::{Corner, DType, Dims};

    #[test]
    fn gradients_take_five_products() {
        let flops_of = |head_dim_vo| {
            let dims = Dims::new(1, 1, 1, 2).with_seqlen_kv(2).with_head_dim_vo(head_dim_vo);
            let forward = ForwardProblem::builder(DType::F32, dims).build().expect("a legal problem");
            let backward = BackwardProblem::builder(&forward).build().expect("it has gradients");
            let pairs = pairs(&forward, &Lengths::default());
            (flops(&forward, pairs), backward_flops(&backward, pairs))
        };
        let (forward, backward) = flops_of(2);
        assert_eq!(backward, 2.5 * forward);
        assert_eq!(flops_of(5).1, 2.0 * 2.0 * (3.0 * 2.0 + 2.0 * 5.0));
    }

    #[test]
    fn kept_pairs_are_those_that_the_mask_keeps() {
        let bounds = [None, Some(0), Some(2), Some(usize::MAX)];
        let mut masks = vec![Mask::Full];
        for corner in [Corner::BottomRight, Corner::TopLeft] {
            masks.push(Mask::Causal { corner });
            masks.extend([1, 2, 3, 8].map(|chunk| Mask::Chunked { chunk, corner }));
            masks.extend([0, 1, 5, 9].map(|keys| Mask::Prefix { keys, corner }));
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
