//! What the user sees while a command runs: labelled lines on stdout, warnings, a spinner and a bar on stderr.

use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::time::Duration;

use anyhow::Result;
use hopper_attention_benches::Progress;
use indicatif::{ProgressBar, ProgressStyle};

/// Prints `text` under `label`, one line for each line of it.
///
/// A reader that has gone away (`hattn … | head`) is no reason to stop: the files still get written.
pub fn line(label: &str, text: impl Display) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    let text = text.to_string();
    for (number, text) in text.lines().enumerate() {
        let label = if number == 0 { label } else { "" };
        ignore_closed(writeln!(stdout, "{label:<8} {text}"))?;
    }
    Ok(())
}

/// Prints text as it is.
pub fn plain(text: &str) -> Result<()> {
    ignore_closed(std::io::stdout().lock().write_all(text.as_bytes()))
}

fn ignore_closed(written: std::io::Result<()>) -> Result<()> {
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// Something the user should know although the work goes on.
pub fn warn(text: impl Display) {
    eprintln!("hattn: warning: {text}");
}

/// Shows a spinner with `text` while `work` runs; nothing where stderr is not a terminal.
pub fn busy<T>(text: &'static str, work: impl FnOnce() -> T) -> T {
    let spinner = ProgressBar::new_spinner().with_message(text);
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
        spinner.set_style(style);
    }
    spinner.enable_steady_tick(Duration::from_millis(120));
    let done = work();
    spinner.finish_and_clear();
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
            Progress::Library { point, name } => self.0.set_message(format!("{point} {name}")),
            Progress::Report(report) => self.0.set_position(report.points.len() as u64),
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
