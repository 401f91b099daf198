//! `hattn run` and `hattn check`: one flow, of which `check` has a last step more.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, bail, ensure};
use hopper_attention::reference::{Expected, Tensor};
use hopper_attention::{DType, ForwardProblem, Mask, bf16, f16};

use crate::args::{CheckArgs, ComputeArgs, FileLayout, RunArgs};
use crate::compute::{self, Computed};
use crate::input::{Qkv, Value, count_nonfinite};
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
    let choice = choose(args.device, &request.problem, &tuning)?;
    let output = match output {
        Some(path) => {
            ensure!(!same_file(path, &args.input), "output {} is the input; allowed: another file", path.display());
            Some((path, AtomicFile::create(path)?))
        }
        None => None,
    };
    match request.problem.dtype() {
        DType::BF16 => execute::<bf16>(args, request, &choice, output, check),
        DType::F16 => execute::<f16>(args, request, &choice, output, check),
        DType::F32 => execute::<f32>(args, request, &choice, output, check),
        other => bail!("dtype {other}; allowed: bf16, f16, f32"),
    }
}

fn execute<T: Value>(
    args: &ComputeArgs,
    mut request: Request,
    choice: &Choice,
    output: Option<(&Path, AtomicFile)>,
    check: bool,
) -> Result<()> {
    describe(args, &request, choice)?;
    let qkv: Qkv<T> = report::busy("reading", || request.input.read_qkv(request.file_dtype))?;
    for (name, values) in ["q", "k", "v"].into_iter().zip(&qkv.data) {
        warn_nonfinite(name, values);
    }

    let Request { layout, problem, .. } = &request;
    let repeat = args.repeat.unwrap_or(if compute::on_gpu(&choice.device) { 10 } else { 1 });
    let computed = report::busy("computing", || compute::forward(choice, problem, *layout, &qkv, repeat))?;
    if count_nonfinite(&computed.o).0 > 0 {
        warn_nonfinite("o", &computed.o);
    }
    let runs = if repeat == 1 { "one run".into() } else { format!("median of {repeat} runs") };
    report::line("time", format!("{}, {runs}", report::duration(computed.time)))?;
    let flops = flops(problem);
    let rate = report::digits(flops / computed.time.as_secs_f64().max(1e-9) / 1e12);
    report::line(
        "rate",
        format!("{rate} TFLOP/s ({} GFLOP over the pairs that the mask keeps)", report::digits(flops / 1e9)),
    )?;

    if let Some((path, file)) = output {
        let o_shape = file_shape(*layout, problem.o_shape());
        report::busy("writing", || write(file, &request, &computed))?;
        let lse_shape = problem.lse_shape();
        let (dtype, layout) = (problem.dtype(), layout.name());
        report::line("output", format!("{}: o {dtype} {o_shape:?} {layout}, lse f32 {lse_shape:?}", path.display()))?;
    }
    if check { judge(&request.problem, request.layout, &qkv, &computed) } else { Ok(()) }
}

fn describe(args: &ComputeArgs, request: &Request, choice: &Choice) -> Result<()> {
    let Request { file_dtype, layout, layout_source, problem, .. } = request;
    let mut input = format!("{}: {file_dtype} {} (from {layout_source})", args.input.display(), layout.name());
    if *file_dtype != problem.dtype() {
        input += &format!(", converted to {}", problem.dtype());
    }
    report::line("input", input)?;
    report::line("problem", problem)?;
    report::line("plan", &choice.plan)?;
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

fn write<T: Value>(file: AtomicFile, request: &Request, computed: &Computed<T>) -> Result<()> {
    let problem = &request.problem;
    let metadata: BTreeMap<String, String> = [
        ("layout", request.layout.name().to_string()),
        ("mask", problem.mask_value().to_string()),
        ("softmax_scale", problem.softmax_scale_value().to_string()),
        ("made_by", concat!("hattn ", env!("CARGO_PKG_VERSION")).to_string()),
    ]
    .map(|(key, value)| (key.to_string(), value))
    .into();
    let tensors = [
        NamedTensor {
            name: "lse",
            dtype: DType::F32,
            shape: problem.lse_shape().to_vec(),
            bytes: bytemuck::cast_slice(&computed.lse),
        },
        NamedTensor {
            name: "o",
            dtype: problem.dtype(),
            shape: file_shape(request.layout, problem.o_shape()).to_vec(),
            bytes: bytemuck::cast_slice(&computed.o),
        },
    ];
    file.finish(|writer| write_safetensors(writer, &metadata, &tensors))
}

/// Holds the result against the f64 oracle.
fn judge<T: Value>(problem: &ForwardProblem, layout: FileLayout, qkv: &Qkv<T>, computed: &Computed<T>) -> Result<()> {
    let wide =
        |data: &[T], shape| Ok::<_, hopper_attention::Error>(Tensor::from_strided(data, &strided(layout, shape)?));
    let report = report::busy("checking against the f64 oracle", || {
        let [q, k, v] = &qkv.data;
        let (q, k, v) = (wide(q, problem.q_shape())?, wide(k, problem.k_shape())?, wide(v, problem.v_shape())?);
        let lse: Vec<f64> = computed.lse.iter().map(|&lse| f64::from(lse)).collect();
        Expected::new(problem, &q, &k, &v)?.check(&wide(&computed.o, problem.o_shape())?, Some(&lse))
    })?;
    report::line("o", &report.o)?;
    if let Some(lse) = &report.lse {
        report::line("lse", lse)?;
    }
    let worst = report::digits(report.worst_ratio());
    if report.passed() {
        return report::line("check", format!("passed: the largest error is {worst} of its tolerance"));
    }
    report::line("check", format!("FAILED: the largest error is {worst} of its tolerance"))?;
    bail!("check failed: the largest error is {worst} of its tolerance; allowed: 1")
}

/// Multiplications and additions of both matrix products, over the pairs of query and key that the mask keeps.
fn flops(problem: &ForwardProblem) -> f64 {
    let dims = problem.dims();
    let pairs = kept_pairs(&problem.mask_value(), dims.seqlen_q, dims.seqlen_kv) as f64;
    2.0 * (dims.batch * dims.heads_q) as f64 * pairs * (dims.head_dim_qk + dims.head_dim_vo) as f64
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

    /// One query and two equal keys: the output is the mean of the two values, the LSE ln 2.
    fn judged(o: Vec<f32>, lse: f32) -> Result<()> {
        let dims =
            Dims { batch: 1, seqlen_q: 1, seqlen_kv: 2, heads_q: 1, heads_kv: 1, head_dim_qk: 2, head_dim_vo: 2 };
        let problem = ForwardProblem::new(DType::F32, dims)?.lse(true);
        let qkv = Qkv { data: [vec![0.0, 0.0], vec![1.0; 4], vec![1.0, 2.0, 3.0, 4.0]] };
        judge(&problem, FileLayout::Bshd, &qkv, &Computed { o, lse: vec![lse], time: Duration::ZERO })
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
