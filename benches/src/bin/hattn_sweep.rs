//! `hattn-sweep`: our forward over the papers' sweep, as a table and as JSON.
//!
//! On a GPU it times 16384 tokens a batch at hidden size 2048 with CUDA events. Without one it runs small sizes on the
//! CPU backend, against the wall clock, so that the command itself is exercised anywhere.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum};
use comfy_table::{CellAlignment, Table, presets};
use hopper_attention::{DType, Device};
use hopper_attention_benches::{
    HIDDEN, Layouts, Point, PointReport, Report, RunStatus, SCHEMA, Setting, TOKENS, measure, method,
};

/// Times the attention forward over a sweep of lengths, head dims and masks.
#[derive(Parser)]
#[command(name = "hattn-sweep", version)]
struct Options {
    /// Where to run.
    #[arg(long, value_enum, default_value_t = On::Auto)]
    device: On,
    /// Which GPU, when on a GPU.
    #[arg(long, default_value_t = 0)]
    ordinal: usize,
    /// Lengths [default: 512 to 16384 on a GPU, 128 and 256 on a CPU].
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    seqlens: Vec<u32>,
    /// Head dims.
    #[arg(long, value_delimiter = ',', default_values_t = [64, 128], value_parser = clap::value_parser!(u32).range(1..))]
    dims: Vec<u32>,
    /// Causal points, others, or both.
    #[arg(long, value_enum, default_value_t = Causal::Both)]
    causal: Causal,
    /// Type of Q, K, V and O.
    #[arg(long, value_enum, default_value_t = Type::Bf16)]
    dtype: Type,
    /// Key heads [default: as many as query heads].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    heads_kv: Option<u32>,
    /// Tokens a batch [default: 16384 on a GPU, 256 on a CPU].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: Option<u32>,
    /// Hidden size, the query heads times the head dim [default: 2048 on a GPU, 256 on a CPU].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    hidden: Option<u32>,
    /// Storage order of Q, K, V and O.
    #[arg(long, value_enum, default_value_t = Layouts::Bshd)]
    layout: Layouts,
    /// Timings a point [default: 20 on a GPU, 5 on a CPU].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    iters: Option<u32>,
    /// Seed of the inputs [default: the clock; it is in the JSON].
    #[arg(long)]
    seed: Option<u64>,
    /// The commit measured, for the JSON.
    #[arg(long)]
    commit: Option<String>,
    /// Where to write the JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum On {
    /// A GPU where this build has kernels and the machine a driver, else the CPU.
    Auto,
    Cpu,
    /// Needs a build with feature `cuda`.
    Cuda,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Causal {
    Both,
    Yes,
    No,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Type {
    F16,
    Bf16,
    F32,
}

impl Type {
    fn dtype(self) -> DType {
        match self {
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
            Self::F32 => DType::F32,
        }
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    let device = device(&options)?;
    let on_cpu = device.info().is_none();
    let pick = |given: Option<u32>, cpu: usize, gpu: usize| match given {
        Some(given) => given as usize,
        None if on_cpu => cpu,
        None => gpu,
    };
    let iters = pick(options.iters, 5, 20);
    let seed = options.seed.unwrap_or_else(clock_seed);
    let points = points(&options, pick(options.tokens, 256, TOKENS), pick(options.hidden, 256, HIDDEN), on_cpu);
    let setting = Setting { dtype: options.dtype.dtype(), layouts: options.layout, iters, seed };
    let method = method(&device, iters);
    println!("{device}, {}, {} points, {method}", setting.dtype, points.len());

    let results = measure(&device, &points, &setting, progress)?;
    println!("{}", table(&results));
    let report = Report {
        schema: SCHEMA.into(),
        commit: options.commit.clone(),
        date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
        device: device.info().map_or_else(|| device.to_string(), |info| info.name.clone()),
        driver: device.info().map(|info| format!("for CUDA {}.{}", info.driver.0, info.driver.1)),
        versions: BTreeMap::from([("hopper-attention-benches".into(), env!("CARGO_PKG_VERSION").into())]),
        method,
        options: BTreeMap::from([
            ("dtype".into(), setting.dtype.to_string().into()),
            ("layout".into(), format!("{:?}", setting.layouts).to_lowercase().into()),
            ("iters".into(), iters.into()),
            ("seed".into(), seed.into()),
        ]),
        notes: if on_cpu { vec!["CPU backend: says nothing about the kernels".into()] } else { vec![] },
        points: results,
    };
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))?;
        println!("wrote {}", path.display());
    }
    let bad = report.points.iter().flat_map(|p| &p.runs).filter(|run| run.status != RunStatus::Ok).count();
    anyhow::ensure!(bad == 0, "{bad} of {} points were not timed", report.points.len());
    Ok(())
}

fn device(options: &Options) -> Result<Device> {
    Ok(match options.device {
        On::Cpu => Device::cpu(),
        On::Cuda => Device::cuda(options.ordinal)?,
        On::Auto => Device::cuda(options.ordinal).unwrap_or_else(|error| {
            eprintln!("{error}: running on the CPU backend");
            Device::cpu()
        }),
    })
}

fn points(options: &Options, tokens: usize, hidden: usize, on_cpu: bool) -> Vec<Point> {
    let default: &[u32] = if on_cpu { &[128, 256] } else { &[512, 1024, 2048, 4096, 8192, 16384] };
    let seqlens = if options.seqlens.is_empty() { default } else { &options.seqlens };
    let masks: &[bool] = match options.causal {
        Causal::Both => &[false, true],
        Causal::Yes => &[true],
        Causal::No => &[false],
    };
    let heads_kv = options.heads_kv.map(|n| n as usize);
    let mut points = Vec::new();
    for &head_dim in &options.dims {
        for &causal in masks {
            for &seqlen in seqlens {
                let point = Point::new(tokens, hidden, seqlen as usize, head_dim as usize, heads_kv);
                points.push(Point { causal, ..point });
            }
        }
    }
    points
}

fn clock_seed() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    // A JSON number keeps 53 bits.
    since.as_micros() as u64 & ((1 << 53) - 1)
}

/// A line on standard error as each point is done: a long sweep must not look stuck.
fn progress(result: &PointReport) {
    for run in &result.runs {
        let outcome = match (&run.summary, &run.error) {
            (Some(summary), _) => format!("{:.3} ms", summary.median_ms),
            (None, Some(error)) => error.clone(),
            (None, None) => "not timed".into(),
        };
        let p = &result.point;
        let mask = if p.causal { "causal" } else { "full" };
        eprintln!("hd {} {mask} seqlen {}: {outcome}", p.head_dim, p.seqlen);
    }
}

fn table(results: &[PointReport]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_BORDERS_ONLY_CONDENSED);
    table.set_header(["hd", "mask", "seqlen", "batch", "median ms", "iqr %", "TFLOP/s", "status"]);
    for result in results {
        let p = &result.point;
        for run in &result.runs {
            let number = |get: fn(&hopper_attention_benches::Summary) -> f64, digits: usize| {
                run.summary.as_ref().map_or("-".into(), |s| format!("{:.digits$}", get(s)))
            };
            table.add_row([
                p.head_dim.to_string(),
                if p.causal { "causal" } else { "full" }.into(),
                p.seqlen.to_string(),
                p.batch.to_string(),
                number(|s| s.median_ms, 4),
                number(|s| s.iqr_percent, 1),
                number(|s| s.tflops, 3),
                run.error.clone().unwrap_or_else(|| "ok".into()),
            ]);
        }
    }
    for column in [0, 2, 3, 4, 5, 6] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}
