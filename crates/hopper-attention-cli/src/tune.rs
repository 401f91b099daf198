//! `hattn tune`: times the kernels that compute a shape against each other, and notes the fastest for plans to come.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hopper_attention::plan::Tuning;
use hopper_attention_benches::Direction;

use crate::args::DeviceArg;
use crate::bench::args::PointArgs;
use crate::output::AtomicFile;

#[derive(Debug, Args)]
pub struct TuneArgs {
    #[command(flatten)]
    pub points: PointArgs,
    /// The GPU, cuda:N
    #[arg(long, default_value = "cuda:0")]
    pub device: DeviceArg,
    /// Timings of each kernel at a point
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u32).range(3..=100_000))]
    pub iters: u32,
    /// Seed of the inputs
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// File for the choices; what it holds of other shapes, cards and versions stays
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
}

/// `hattn tune`.
pub fn tune(args: &TuneArgs) -> Result<()> {
    let ordinal = match args.device {
        DeviceArg::Auto => 0,
        DeviceArg::Cuda(ordinal) => ordinal,
        DeviceArg::Cpu => bail!("--device cpu: the CPU has one way to compute a problem; allowed: cuda:N"),
    };
    ensure!(
        !args.points.directions.contains(&Direction::Bwd),
        "--directions bwd: a tuning holds kernels of forwards; allowed: fwd"
    );
    let known = if args.output.exists() { load(&args.output)? } else { Tuning::default() };
    let points = args.points.sweep(false).points()?;
    gpu::tune(args, ordinal, points, known, || AtomicFile::create(&args.output))
}

/// Reads what `hattn tune` wrote.
pub fn load(path: &Path) -> Result<Tuning> {
    let load = || Ok::<_, anyhow::Error>(std::fs::read_to_string(path)?.parse()?);
    load().with_context(|| format!("tuning {}", path.display()))
}

#[cfg(feature = "cuda")]
mod gpu {
    use std::collections::BTreeMap;

    use anyhow::{Result, bail};
    use hopper_attention::plan::Tuning;
    use hopper_attention::{Device, kernels};
    use hopper_attention_benches::tune::{note, verdicts};
    use hopper_attention_benches::{Cuda, Job, Outcome, Point, Rows, Session};

    use super::TuneArgs;
    use crate::bench::Bar;
    use crate::output::AtomicFile;
    use crate::report;

    pub fn tune(
        args: &TuneArgs,
        ordinal: usize,
        points: Vec<Point>,
        mut tuning: Tuning,
        output: impl FnOnce() -> Result<AtomicFile>,
    ) -> Result<()> {
        let Device::Cuda(device) = Device::cuda(ordinal)? else { bail!("cuda:{ordinal} is no GPU") };
        let file = output()?;
        let (card, facts) = (device.info().name.clone(), device.info().facts);
        let job = Job {
            points,
            iters: args.iters as usize,
            layout: args.points.layout,
            seed: args.seed,
            ours: vec![],
            peers: vec![],
            python_peers: false,
            ordinal,
        };
        let bar = Bar::new(job.points.len());
        let session = Session::new(&job, None, BTreeMap::new());
        let outcome = session.run(&mut Rows::new(Cuda::new(device)?), &mut |progress| {
            bar.show(&progress);
            Ok(())
        })?;
        bar.clear();
        let report = match outcome {
            Outcome::Done { report, .. } => report,
            Outcome::Absent(why) => bail!("{why}"),
        };
        if let Some(stopped) = report.stopped() {
            bail!("{stopped}");
        }
        let found = verdicts(&report, &facts, kernels())?;
        for verdict in &found {
            report::plain(&format!("{verdict}\n"))?;
        }
        note(&mut tuning, &card, &found)?;
        let gained = found.iter().filter(|verdict| verdict.fastest != 0).count();
        report::line(
            "tuned",
            format!("{} shapes on {card}, {gained} with another kernel than the rule's", found.len()),
        )?;
        file.finish(|writer| write!(writer, "{tuning}"))?;
        report::line("output", format!("{}: {} choices", args.output.display(), tuning.len()))
    }
}

#[cfg(not(feature = "cuda"))]
mod gpu {
    use anyhow::{Result, bail};
    use hopper_attention::plan::Tuning;
    use hopper_attention_benches::Point;

    use super::TuneArgs;
    use crate::output::AtomicFile;

    pub fn tune(
        _: &TuneArgs,
        _: usize,
        _: Vec<Point>,
        _: Tuning,
        _: impl FnOnce() -> Result<AtomicFile>,
    ) -> Result<()> {
        bail!("this build has no GPU kernels; build with `--features cuda`")
    }
}
