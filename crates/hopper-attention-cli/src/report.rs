//! What the user sees while a command runs: labelled lines on stdout, warnings, a spinner and a bar on stderr.

use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Result, bail};
use comfy_table::Table;
use hopper_attention_benches::Progress;
use hopper_attention_benches::text::{excerpt, printable};
use indicatif::{ProgressBar, ProgressStyle};

/// Lines on stderr are cut to so many characters: a file or an argument may hold any amount.
const LONGEST: usize = 1000;

/// The first error of standard output.
static STDOUT: OnceLock<std::io::Error> = OnceLock::new();

/// Prints `text` under `label`, one line for each line of it.
pub fn line(label: &str, text: impl Display) {
    for (number, text) in text.to_string().lines().enumerate() {
        let label = if number == 0 { label } else { "" };
        put(&format!("{label:<8} {}\n", printable(text)));
    }
}

/// Prints lines of text.
pub fn plain(text: &str) {
    put(&by_line(text, printable));
}

/// Prints a table. The text in its cells must be printable; what else is in it are colours.
pub fn table(table: &Table) {
    put(&format!("{table}\n"));
}

/// Prints the help or the version.
pub fn help(help: &clap::Error) -> Result<()> {
    note(help.print());
    finish()
}

/// Writes to standard output, where nothing else does. An error is kept for [`finish`]: results still get written.
fn put(text: &str) {
    note(std::io::stdout().lock().write_all(text.as_bytes()));
}

/// A reader that has gone away (`hattn ... | head`) is no error.
fn note(written: std::io::Result<()>) {
    if let Err(error) = written
        && error.kind() != ErrorKind::BrokenPipe
    {
        let _ = STDOUT.set(error); // the first one is kept
    }
}

/// Whether standard output took everything. To be asked last.
pub fn finish() -> Result<()> {
    note(std::io::stdout().flush());
    STDOUT.get().map_or(Ok(()), |error| bail!("standard output: {error}"))
}

/// Writes lines to stderr, where nothing else does but the progress bars. Where stderr takes nothing, nobody can be told.
pub fn complain(text: &str) {
    let text = by_line(text.trim_end_matches('\n'), |line| excerpt(line, LONGEST));
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Something the user should know although the work goes on.
pub fn warn(text: impl Display) {
    complain(&format!("hattn: warning: {text}").replace('\n', " "));
}

/// Makes a sentence of every panic.
pub fn tell_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let text = panic.to_string().replace('\n', " ");
        complain(&format!("hattn: this is a bug of hattn, please report it: {text}"));
    }));
}

fn by_line(text: &str, shown: impl Fn(&str) -> String) -> String {
    text.split('\n').map(shown).collect::<Vec<_>>().join("\n")
}

/// Shows a spinner with `text` while `work` runs; nothing where stderr is not a terminal.
pub fn busy<T>(text: &'static str, work: impl FnOnce() -> T) -> T {
    let spinner = ProgressBar::new_spinner().with_message(text);
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
        spinner.set_style(style);
    }
    // Ticks take a thread, which a machine without room for one need not have to show nothing.
    if !spinner.is_hidden() {
        spinner.enable_steady_tick(Duration::from_millis(120));
    }
    let done = work();
    spinner.finish_and_clear();
    done
}

/// Shows a bar with `text` and the time left while `work` runs; nothing where stderr is not a terminal. `work` tells
/// the share that is done, from 0 to 1.
pub fn gradually<T>(text: &'static str, work: impl FnOnce(&(dyn Fn(f64) + Sync)) -> T) -> T {
    const STEPS: u64 = 1000;
    let bar = ProgressBar::new(STEPS).with_message(text);
    if let Ok(style) = ProgressStyle::with_template("{msg} [{bar:30}] {percent}%, {eta} left") {
        bar.set_style(style.progress_chars("=> "));
    }
    // Threads may tell their shares in another order than they were reached.
    let told = |share: f64| {
        let position = (share * STEPS as f64) as u64;
        if position > bar.position() {
            bar.set_position(position);
        }
    };
    let done = work(&told);
    bar.finish_and_clear();
    done
}

/// The progress bar of a sweep; nothing where stderr is not a terminal.
pub struct Bar(ProgressBar);

impl Bar {
    /// For so many points.
    pub fn new(length: usize) -> Self {
        let bar = ProgressBar::new(length as u64);
        if let Ok(style) = ProgressStyle::with_template("{elapsed_precise} [{bar:30}] {pos}/{len} {msg}") {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message("starting");
        Self(bar)
    }

    /// For another number of points.
    pub fn of(&self, length: usize) {
        self.0.set_length(length as u64);
    }

    /// What is going on.
    pub fn show(&self, progress: &Progress<'_>) {
        match progress {
            Progress::Library { point, name } => self.0.set_message(excerpt(&format!("{point} {name}"), 80)),
            Progress::Report { done, .. } => self.0.set_position(*done as u64),
        }
        self.0.tick();
    }

    /// Takes it away.
    pub fn clear(&self) {
        self.0.finish_and_clear();
    }
}

/// A duration with three or four digits and a fitting unit.
pub fn duration(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    match seconds {
        s if s >= 1.0 => format!("{} s", digits(s)),
        s if s >= 1e-3 => format!("{} ms", digits(s * 1e3)),
        s => format!("{} us", digits(s * 1e6)),
    }
}

/// A number with at least three significant digits and no exponent.
pub fn digits(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return value.to_string();
    }
    let decimals = 2 - value.abs().log10().floor() as i32;
    format!("{value:.*}", decimals.clamp(0, 12) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits() {
        let cases =
            [(0.0, "0"), (1.0, "1.00"), (12.345, "12.3"), (678.9, "679"), (12345.6, "12346"), (0.01234, "0.0123")];
        for (value, text) in cases {
            assert_eq!(digits(value), text);
        }
        assert_eq!(duration(Duration::from_micros(1500)), "1.50 ms");
        assert_eq!(duration(Duration::from_nanos(1500)), "1.50 us");
        assert_eq!(duration(Duration::from_secs(90)), "90.0 s");
    }
}
