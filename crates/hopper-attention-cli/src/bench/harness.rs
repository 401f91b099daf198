//! Which harness times. On a GPU it is PyTorch's where there is one and a shared library of ours, else the Rust one,
//! with the peers in Python after it. Elsewhere it is the CPU's.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail, ensure};
use hopper_attention_benches::host::HostCost;
use hopper_attention_benches::{Cpu, Job, Outcome, Progress, PyTorch, Report, Session, Sweep, WARM_UPS};
use serde_json::json;

use super::files::Files;
use crate::args::{BenchArgs, DeviceArg, HarnessArg};
use crate::report;

/// The report, and what the calls cost on the host, where that could be measured.
pub type Measured = (Report, Result<HostCost>);

/// Runs the first harness that works here.
pub fn run(
    args: &BenchArgs,
    length: &mut dyn FnMut(usize),
    progress: &mut dyn FnMut(Progress<'_>) -> Result<()>,
) -> Result<Measured> {
    let gpu = match args.device {
        DeviceArg::Cpu => None,
        DeviceArg::Cuda(ordinal) => Some(ordinal),
        DeviceArg::Auto if cfg!(feature = "cuda") || !args.ours.is_empty() => Some(0),
        DeviceArg::Auto => None,
    };
    if args.device == DeviceArg::Cpu || (args.device == DeviceArg::Auto && gpu.is_none()) {
        ensure!(
            args.ours.is_empty() && args.peer.is_empty() && args.harness == HarnessArg::Auto,
            "--ours, --peer and --harness are for a GPU, and this would run on the CPU{}",
            if args.device == DeviceArg::Cpu { "" } else { ": this build has no GPU kernels (--features cuda)" }
        );
    }
    let files = &Files::read(args)?;
    let Some(ordinal) = gpu else { return on_cpu(args, files, length, progress) };

    let library = beside();
    if args.harness == HarnessArg::Pytorch && args.ours.is_empty() {
        ensure!(
            library.is_file(),
            "--harness pytorch: the script loads ours from {}, which is not there; allowed: --ours FILE, a hattn that \
             scripts/bench.sh built, or another harness",
            library.display()
        );
    }
    let apart = args.harness == HarnessArg::Auto && args.ours.is_empty() && !library.is_file();
    if args.harness != HarnessArg::Rust && !apart {
        let ours = match &args.ours[..] {
            [] => vec![format!("{}={}", hopper_attention_benches::NAME, library.display())],
            ours => ours.to_vec(),
        };
        let job = job(args, files, false, ordinal, ours)?;
        length(job.points.len());
        let why = match session(args, files, &job).run(&mut PyTorch::new(&args.python), progress)? {
            Outcome::Done { report, cupti } => {
                return Ok((noted(*report, args, files, false), host_on_gpu(ordinal, cupti)));
            }
            Outcome::Absent(why) => why,
        };
        if args.harness == HarnessArg::Pytorch {
            bail!("--harness pytorch: {why}");
        }
        report::warn(format!("{why}: cuDNN, FlashAttention-2 and other peers in Python are not timed"));
    }
    on_gpu(args, files, ordinal, apart && !args.no_python_peers, length, progress)
}

/// Our shared object that `scripts/bench.sh` puts beside this program. An installed program has none.
fn beside() -> PathBuf {
    let folder = std::env::current_exe().ok().and_then(|path| Some(path.parent()?.to_path_buf())).unwrap_or_default();
    folder.join("libhopper_attention_benches.so")
}

fn job(args: &BenchArgs, files: &Files, on_cpu: bool, ordinal: usize, ours: Vec<String>) -> Result<Job> {
    let iters = match (args.iters, on_cpu, args.points.quick) {
        (Some(iters), ..) => iters as usize,
        (None, true, _) => 5,
        (None, false, true) => 12,
        (None, false, false) => 20,
    };
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| u64::from(now.subsec_nanos()));
    let sweep = Sweep { inputs: args.inputs.clone(), ..args.points.sweep(on_cpu) };
    Ok(Job {
        points: if args.input.is_empty() { sweep.points()? } else { sweep.points_of(&files.tensors)? },
        iters,
        layout: args.points.layout,
        files: files.tensors.clone(),
        seed: args.seed.unwrap_or_else(clock),
        draws: args.draws as usize,
        ours,
        peers: args.peer.clone(),
        python_peers: !args.no_python_peers,
        ordinal,
    })
}

fn session<'a>(args: &BenchArgs, files: &Files, job: &'a Job) -> Session<'a> {
    let mut options = BTreeMap::from([
        ("iters".to_string(), json!(job.iters)),
        ("warm_ups".into(), json!(WARM_UPS)),
        ("layout".into(), json!(job.layout)),
        ("seed".into(), json!(job.seed)),
        ("inputs".into(), json!(args.inputs)),
        ("draws".into(), json!(job.draws)),
        ("filter".into(), json!(args.points.filter)),
    ]);
    if !args.input.is_empty() {
        options.insert("files".into(), files.options());
    }
    Session::new(job, args.commit.clone(), options)
}

/// A report with what is to be known of the files.
fn noted(mut report: Report, args: &BenchArgs, files: &Files, on_cpu: bool) -> Report {
    report.notes.extend(files.notes(&args.points.sweep(on_cpu)));
    report
}

fn on_cpu(
    args: &BenchArgs,
    files: &Files,
    length: &mut dyn FnMut(usize),
    progress: &mut dyn FnMut(Progress<'_>) -> Result<()>,
) -> Result<Measured> {
    ensure!(args.arch.is_none(), "--arch is for a GPU, and this would run on the CPU");
    ensure!(args.sm_margin == 0, "--sm-margin is for a GPU, and this would run on the CPU");
    let job = job(args, files, true, 0, vec![])?;
    length(job.points.len());
    match session(args, files, &job).run(&mut Cpu, progress)? {
        Outcome::Done { mut report, .. } => {
            report
                .notes
                .push("the CPU backend against the naive computation: it says nothing about the kernels".into());
            Ok((noted(*report, args, files, true), super::host_on_cpu()))
        }
        Outcome::Absent(why) => bail!("{why}"),
    }
}

#[cfg(feature = "cuda")]
fn on_gpu(
    args: &BenchArgs,
    files: &Files,
    ordinal: usize,
    python: bool,
    length: &mut dyn FnMut(usize),
    progress: &mut dyn FnMut(Progress<'_>) -> Result<()>,
) -> Result<Measured> {
    use hopper_attention::Device;
    use hopper_attention_benches::{Apart, Cuda, Harness};

    let device = match Device::cuda(ordinal) {
        Ok(Device::Cuda(device)) => device,
        Ok(_) => return on_cpu(args, files, length, progress),
        Err(error) if args.device == DeviceArg::Auto && args.ours.is_empty() && args.peer.is_empty() => {
            report::warn(format!("{error}: small sizes on the CPU"));
            return on_cpu(args, files, length, progress);
        }
        Err(error) => return Err(error.into()),
    };
    let job = job(args, files, false, ordinal, args.ours.clone())?;
    let (mut ours, mut apart);
    let harness: &mut dyn Harness = if python {
        length(2 * job.points.len());
        apart = Apart::new(Cuda::new(device)?, PyTorch::new(&args.python));
        &mut apart
    } else {
        length(job.points.len());
        ours = Cuda::new(device)?;
        &mut ours
    };
    match session(args, files, &job).run(harness, progress)? {
        Outcome::Done { report, cupti } => Ok((noted(*report, args, files, false), host_on_gpu(ordinal, cupti))),
        Outcome::Absent(why) => bail!("{why}"),
    }
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(
    _: &BenchArgs,
    _: &Files,
    _: usize,
    _: bool,
    _: &mut dyn FnMut(usize),
    _: &mut dyn FnMut(Progress<'_>) -> Result<()>,
) -> Result<Measured> {
    bail!("this build has no GPU kernels; build with `--features cuda`")
}

#[cfg(feature = "cuda")]
fn host_on_gpu(ordinal: usize, cupti: Option<PathBuf>) -> Result<HostCost> {
    match hopper_attention::Device::cuda(ordinal)? {
        hopper_attention::Device::Cuda(device) => hopper_attention_benches::host::on_gpu(&device, cupti.as_deref()),
        _ => super::host_on_cpu(),
    }
}

#[cfg(not(feature = "cuda"))]
fn host_on_gpu(_: usize, _: Option<PathBuf>) -> Result<HostCost> {
    bail!("this build has no GPU side; build with `--features cuda`")
}
