//! `hattn bench` and `hattn plot`: chooses the harness, and prints, saves, compares and draws its report.

mod files;
mod harness;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use hopper_attention::Arch;
use hopper_attention_benches::chart::Chart;
use hopper_attention_benches::compare::Comparison;
use hopper_attention_benches::{
    ARCH_VARIABLE, Progress, Report, Role, RunStatus, SM_MARGIN_VARIABLE, chart, csv, few, host, speed, table, text,
};

use crate::args::{BenchArgs, PlotArgs};
use crate::output::AtomicFile;
use crate::report::{self, Bar};

/// `hattn bench`.
pub fn bench(args: &BenchArgs) -> Result<()> {
    let noise = args.noise;
    ensure!(noise.is_finite() && noise >= 0.0, "--noise {noise}; allowed: finite, 0 and above");
    // Before the work: a wrong name should cost nothing.
    let old = args.compare.as_deref().map(Report::load).transpose()?;
    let report = match &args.from {
        Some(path) => Report::load(path)?,
        None => measure(args)?,
    };
    show(&report);
    let compared = old.map(|old| Comparison::new(&old, &report, noise / 100.0)).transpose()?;
    if let Some(compared) = &compared {
        report::plain(&format!("\n{compared}\n"));
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
    if args.sm_margin > 0 {
        // SAFETY: as above.
        unsafe { std::env::set_var(SM_MARGIN_VARIABLE, args.sm_margin.to_string()) };
    }
    let _made = args.output.as_deref().map(MadeFolder::new).transpose()?;
    let bar = Bar::new(0);
    let mut progress = |progress: Progress<'_>| {
        bar.show(&progress);
        match (progress, &args.output) {
            (Progress::Report { report, .. }, Some(folder)) if !report.points.is_empty() => {
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
    if args.sm_margin > 0 {
        report.notes.push(format!("ours left {} multiprocessors to others", args.sm_margin));
    }
    match host {
        Ok(host) => report.host = Some(host),
        Err(error) => report.notes.push(format!("host cost was not measured: {error:#}")),
    }
    if let Some(folder) = &args.output {
        save(&report, &folder.join("bench.json"))?;
        let mut bytes = Vec::new();
        csv::write(&report, &mut bytes)?;
        write(&folder.join("bench.csv"), &bytes)?;
        if report.points.iter().any(|p| p.runs.iter().any(|run| run.rate().is_some())) {
            write_charts(&chart::charts(&report)?, folder)?;
        }
        report::line("wrote", folder.display());
    }
    Ok(report)
}

fn save(report: &Report, path: &Path) -> Result<()> {
    write(path, report.json()?.as_bytes())
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    AtomicFile::create(path)?.finish(|writer| writer.write_all(bytes))
}

/// Writes charts into a folder; where they are.
fn write_charts(charts: &[Chart], folder: &Path) -> Result<Vec<PathBuf>> {
    let write = |chart: &Chart| {
        let path = folder.join(&chart.file);
        write(&path, chart.svg.as_bytes())?;
        Ok(path)
    };
    charts.iter().map(write).collect()
}

fn show(report: &Report) {
    let mut points = table::points(report);
    let mut costs = report.host.as_ref().map(table::host);
    let mut errors = table::errors(report);
    // https://no-color.org
    if std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty()) {
        points.force_no_tty();
        for table in costs.iter_mut().chain(&mut errors) {
            table.force_no_tty();
        }
    }
    let commit = report.commit.as_ref().map_or_else(String::new, |commit| format!(", commit {commit}"));
    report::plain(&format!("{}, {} harness, {}{commit}\n", report.device, report.harness, report.date));
    report::plain(&format!("{}\n\nTFLOP/s\n", report.method));
    report::table(&points);
    report::plain("\n");
    for line in table::ratios(report) {
        report::plain(&format!("{line}\n"));
    }
    if let Some(errors) = &errors {
        report::plain("\n");
        report::table(errors);
    }
    if let (Some(costs), Some(host)) = (&costs, &report.host) {
        report::plain("\n");
        report::table(costs);
        for note in &host.notes {
            report::plain(&format!("note: {note}\n"));
        }
    }
    for line in table::remarks(report) {
        report::plain(&format!("{line}\n"));
    }
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

/// `hattn plot`. What can be refused is, before the first chart is written.
pub fn plot(args: &PlotArgs) -> Result<()> {
    // A text has charts alone.
    let report = if few::is_text(&args.report) { None } else { Some(Report::load(&args.report)?) };
    let charts = few::charts_of(&args.report)?;
    let update = |path| Update::new(path, report.as_ref(), &charts, &args.report);
    let update = args.update.as_deref().map(update).transpose()?;
    let own = args.report.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = args.output.as_deref().unwrap_or(own);
    let _made = MadeFolder::new(folder)?;
    for path in write_charts(&charts, folder)? {
        report::line("wrote", path.display());
    }
    update.map_or(Ok(()), Update::finish)
}

/// A file that gets its section on speed.
struct Update<'a> {
    path: &'a Path,
    /// Its new text, and where that goes. None if it has this text.
    new: Option<(String, AtomicFile)>,
}

impl<'a> Update<'a> {
    fn new(path: &'a Path, report: Option<&Report>, charts: &[Chart], record: &Path) -> Result<Self> {
        let update = || {
            let old = text::read(path)?;
            let (record, page) = from_common_folder(record, path)?;
            let (shown, galleries) = speed::update_galleries(&old, charts, &record, &page)?;
            // A record that has charts on the page need not have a section of it.
            let new = match report {
                Some(report) if galleries == 0 || speed::records(&shown)?.contains(&record.as_str()) => {
                    speed::update(&shown, report, &record, &page)?
                }
                None if galleries == 0 => bail!("the page has no charts of {record}"),
                _ => shown,
            };
            let new = (new != old).then(|| Ok::<_, anyhow::Error>((new, AtomicFile::create(path)?)));
            Ok::<_, anyhow::Error>(Self { path, new: new.transpose()? })
        };
        update().with_context(|| format!("update {}", path.display()))
    }

    fn finish(self) -> Result<()> {
        match self.new {
            None => report::line("same", self.path.display()),
            Some((text, file)) => {
                file.finish(|writer| writer.write_all(text.as_bytes()))?;
                report::line("updated", self.path.display());
            }
        }
        Ok(())
    }
}

/// Folders that were made for files. If none came, they are removed again.
struct MadeFolder<'a>(Vec<&'a Path>);

impl<'a> MadeFolder<'a> {
    /// Makes a folder and those above it, as far as they are missing.
    fn new(folder: &'a Path) -> Result<Self> {
        let missing = folder.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists());
        let made = Self(missing.collect());
        std::fs::create_dir_all(folder).with_context(|| format!("folder {}", folder.display()))?;
        Ok(made)
    }
}

impl Drop for MadeFolder<'_> {
    fn drop(&mut self) {
        // The innermost first. A folder that holds something stays.
        self.0.iter().for_each(|folder| drop(std::fs::remove_dir(folder)));
    }
}

/// The paths of two files as the innermost folder that holds both sees them, with forward slashes.
fn from_common_folder(one: &Path, other: &Path) -> Result<(String, String)> {
    let (one, other) = (one.canonicalize()?, other.canonicalize()?);
    let common = one.ancestors().skip(1).find(|folder| other.starts_with(folder)).context("no folder holds both")?;
    let from = |file: &Path| -> Result<String> { Ok(file.strip_prefix(common)?.to_string_lossy().replace('\\', "/")) };
    Ok((from(&one)?, from(&other)?))
}

/// Host cost on the CPU: what remains of it there.
fn host_on_cpu() -> Result<host::HostCost> {
    host::on_cpu()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_named_as_the_common_folder_sees_it() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let [record, readme, page] = ["a/b.json", "README.md", "docs/speed.md"].map(|name| folder.path().join(name));
        for path in [&record, &readme, &page] {
            std::fs::create_dir_all(path.parent().context("a folder")?)?;
            std::fs::write(path, "")?;
        }
        let named = |page| from_common_folder(&record, page);
        assert_eq!(named(&readme)?, ("a/b.json".into(), "README.md".into()));
        assert_eq!(named(&page)?, ("a/b.json".into(), "docs/speed.md".into()));
        assert!(named(&folder.path().join("gone.md")).is_err());
        Ok(())
    }
}
