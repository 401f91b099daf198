//! `hattn bench` and `hattn plot`: chooses the harness, and prints, saves, compares and draws its report.

mod harness;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use hopper_attention::Arch;
use hopper_attention_benches::compare::Comparison;
use hopper_attention_benches::{ARCH_VARIABLE, Progress, Report, Role, RunStatus, chart, csv, host, readme, table};

use crate::args::{BenchArgs, PlotArgs};
use crate::output::AtomicFile;
use crate::report::{self, Bar};

/// `hattn bench`.
pub fn bench(args: &BenchArgs) -> Result<()> {
    // Before the work: a wrong name should cost nothing.
    let old = args.compare.as_deref().map(Report::load).transpose()?;
    let report = match &args.from {
        Some(path) => Report::load(path)?,
        None => measure(args)?,
    };
    show(&report)?;
    let compared = old.map(|old| Comparison::new(&old, &report, args.noise / 100.0)).transpose()?;
    if let Some(compared) = &compared {
        report::plain(&format!("\n{compared}\n"))?;
    }
    if args.from.is_none() {
        judge(&report)?;
    }
    ensure!(compared.is_none_or(|compared| compared.passed()), "points got slower or were lost since {}", {
        args.compare.as_deref().unwrap_or(Path::new("")).display()
    });
    Ok(())
}

/// Times everything, keeping what there is after every point.
fn measure(args: &BenchArgs) -> Result<Report> {
    if let Some(arch) = args.arch {
        // SAFETY: this is the only thread so far. The harnesses, in this process and in Python's, find it later.
        unsafe { std::env::set_var(ARCH_VARIABLE, Arch::from(arch).to_string()) };
    }
    if let Some(folder) = &args.output {
        std::fs::create_dir_all(folder).with_context(|| format!("folder {}", folder.display()))?;
    }
    let bar = Bar::new(0);
    let mut progress = |progress: Progress<'_>| {
        bar.show(&progress);
        match (progress, &args.output) {
            (Progress::Report(report), Some(folder)) if !report.points.is_empty() => {
                save(report, &folder.join("bench.json"))
            }
            _ => Ok(()),
        }
    };
    let (mut report, host) = harness::run(args, &mut |length| bar.of(length), &mut progress)?;
    bar.clear();
    if let Some(arch) = args.arch {
        report.notes.push(format!("ours computed with {} kernels", Arch::from(arch)));
    }
    match host {
        Ok(host) => report.host = Some(host),
        Err(error) => report.notes.push(format!("host cost was not measured: {error:#}")),
    }
    if let Some(folder) = &args.output {
        save(&report, &folder.join("bench.json"))?;
        let mut text = Vec::new();
        csv::write(&report, &mut text)?;
        write(&folder.join("bench.csv"), &text)?;
        if report.points.iter().any(|p| p.runs.iter().any(|run| run.rate().is_some())) {
            draw(&report, folder)?;
        }
        report::line("wrote", folder.display())?;
    }
    Ok(report)
}

fn save(report: &Report, path: &Path) -> Result<()> {
    write(path, report.json()?.as_bytes())
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    AtomicFile::create(path)?.finish(|writer| writer.write_all(bytes))
}

/// The charts, in a folder.
fn draw(report: &Report, folder: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for chart in chart::charts(report)? {
        let path = folder.join(&chart.file);
        write(&path, chart.svg.as_bytes())?;
        paths.push(path);
    }
    Ok(paths)
}

fn show(report: &Report) -> Result<()> {
    let mut points = table::points(report);
    let mut costs = report.host.as_ref().map(table::host);
    // https://no-color.org
    if std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty()) {
        points.force_no_tty();
        costs.as_mut().map(comfy_table::Table::force_no_tty);
    }
    let commit = report.commit.as_ref().map_or_else(String::new, |commit| format!(", commit {commit}"));
    report::plain(&format!("{}, {} harness, {}{commit}\n", report.device, report.harness, report.date))?;
    report::plain(&format!("{}\n\nTFLOP/s\n{points}\n\n", report.method))?;
    for line in table::ratios(report) {
        report::plain(&format!("{line}\n"))?;
    }
    if let (Some(costs), Some(host)) = (&costs, &report.host) {
        report::plain(&format!("\n{costs}\n"))?;
        for note in &host.notes {
            report::plain(&format!("note: {note}\n"))?;
        }
    }
    for line in table::remarks(report) {
        report::plain(&format!("{line}\n"))?;
    }
    Ok(())
}

/// Fails when ours is missing or not timed anywhere, or the output of any library is wrong.
fn judge(report: &Report) -> Result<()> {
    let runs = || report.points.iter().flat_map(|p| &p.runs);
    let wrong: BTreeMap<&str, usize> =
        runs().filter(|run| run.status == RunStatus::Wrong).fold(BTreeMap::new(), |mut all, run| {
            *all.entry(run.name.as_str()).or_default() += 1;
            all
        });
    ensure!(wrong.is_empty(), "outputs were wrong (points): {wrong:?}");
    let missing = report.missing.iter().find(|x| x.role == Role::Ours);
    ensure!(missing.is_none(), "ours did not take part: {}", missing.map_or("", |x| &x.error));
    let failed = runs().filter(|run| run.role == Role::Ours && run.status != RunStatus::Ok).count();
    ensure!(failed == 0, "{failed} of our points were not timed");
    ensure!(report.stopped().is_none(), "{}", report.stopped().unwrap_or(""));
    Ok(())
}

/// `hattn plot`.
pub fn plot(args: &PlotArgs) -> Result<()> {
    let report = Report::load(&args.report)?;
    let own = args.report.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = args.output.as_deref().unwrap_or(own);
    std::fs::create_dir_all(folder).with_context(|| format!("folder {}", folder.display()))?;
    for path in draw(&report, folder)? {
        report::line("wrote", path.display())?;
    }
    let Some(path) = &args.update else { return Ok(()) };
    let update = || {
        let old = std::fs::read_to_string(path).context("cannot be read")?;
        let new = readme::update(&old, &report, &below(&args.report, path)?)?;
        if new == old {
            return report::line("same", path.display());
        }
        write(path, new.as_bytes())?;
        report::line("updated", path.display())
    };
    update().with_context(|| format!("update {}", path.display()))
}

/// A file's path as seen from the folder of another.
fn below(file: &Path, beside: &Path) -> Result<String> {
    let (file, beside) = (file.canonicalize()?, beside.canonicalize()?);
    let folder = beside.parent().context("it is in a folder")?;
    let relative =
        file.strip_prefix(folder).ok().with_context(|| format!("{} is not below its folder", file.display()))?;
    Ok(relative.to_string_lossy().replace('\\', "/"))
}

/// Host cost on the CPU: what remains of it there.
fn host_on_cpu() -> Result<host::HostCost> {
    host::on_cpu()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_named_as_its_readme_sees_it() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let (record, readme) = (folder.path().join("a/b.json"), folder.path().join("README.md"));
        std::fs::create_dir(folder.path().join("a"))?;
        for path in [&record, &readme] {
            std::fs::write(path, "")?;
        }
        assert_eq!(below(&record, &readme)?, "a/b.json");
        assert!(below(&readme, &record).is_err());
        Ok(())
    }
}
