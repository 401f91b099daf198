//! `hattn tune`: times the kernels that compute a shape against each other, and notes the fastest for plans to come.

use anyhow::{Result, bail, ensure};
use hopper_attention::Tuning;
use hopper_attention_benches::Direction;

use crate::args::{DeviceArg, TuneArgs};
use crate::input;
use crate::output::AtomicFile;

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
    let known = if args.output.exists() { input::tuning(&args.output)? } else { Tuning::default() };
    ensure!(
        !args.points.packed,
        "--packed: a tuning holds kernels of sequences that are not packed; allowed: without it"
    );
    ensure!(args.points.block_mask.is_empty(), "--block-mask: one kernel takes lists of blocks; allowed: without it");
    ensure!(args.points.bias.is_none(), "--bias: a tuning is made without a bias; allowed: without it");
    let points = args.points.sweep(false).points()?;
    gpu::tune(args, ordinal, points, known, || AtomicFile::create(&args.output))
}

#[cfg(feature = "cuda")]
mod gpu {
    use std::collections::BTreeMap;

    use anyhow::{Result, bail};
    use hopper_attention::Tuning;
    use hopper_attention::{Device, kernels};
    use hopper_attention_benches::tune::{note, verdicts};
    use hopper_attention_benches::{Cuda, Job, Outcome, Point, Rows, Session};

    use crate::args::TuneArgs;
    use crate::output::AtomicFile;
    use crate::report::{self, Bar};

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
            files: vec![],
            seed: args.seed,
            draws: 1,
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
            report::plain(&format!("{verdict}\n"));
        }
        note(&mut tuning, &card, &found)?;
        let gained = found.iter().filter(|verdict| verdict.fastest != 0).count();
        report::line(
            "tuned",
            format!("{} shapes on {card}, {gained} with another kernel than the rule's", found.len()),
        );
        file.finish(|writer| write!(writer, "{tuning}"))?;
        report::line("output", format!("{}: {} choices", args.output.display(), tuning.len()));
        Ok(())
    }
}

#[cfg(not(feature = "cuda"))]
mod gpu {
    use anyhow::{Result, bail};
    use hopper_attention::Tuning;
    use hopper_attention_benches::Point;

    use crate::args::TuneArgs;
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
