//! `hattn`: exact attention on tensor files, its check against an f64 oracle, what this machine can run, and how fast.
//!
//! `args::MORE_HELP` lists the exit codes. Every failure is one sentence on stderr.

mod args;
mod bench;
mod blocks;
mod compute;
mod dropout_mask;
mod fuzz;
mod info;
mod input;
mod judge;
mod layout;
mod mask;
mod operands;
mod output;
mod random;
mod report;
mod request;
mod run;
mod signals;
mod tune;
mod values;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;

use args::{Cli, Command};

/// The exit code of a command line that cannot be read.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    report::tell_panics();
    signals::fail_writes_past_the_limit();
    // A panic is a bug. Its sentence has been printed by then.
    std::panic::catch_unwind(|| match Cli::try_parse() {
        Ok(cli) => ended(execute(cli.command).and_then(|()| report::finish())),
        Err(wrong) if wrong.use_stderr() => {
            report::complain(&wrong.to_string());
            ExitCode::from(USAGE)
        }
        Err(help) => ended(report::help(&help)),
    })
    .unwrap_or(ExitCode::FAILURE)
}

fn execute(command: Command) -> Result<()> {
    match command {
        Command::Run(args) => run::run(&args),
        Command::Check(args) => run::check(&args),
        Command::Info(args) => info::info(&args),
        Command::Random(args) => random::random(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Plot(args) => bench::plot(&args),
        Command::Fuzz(args) => fuzz::fuzz(&args),
        Command::Mask(args) => mask::mask(&args),
        Command::Tune(args) => tune::tune(&args),
    }
}

fn ended(done: Result<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // One line, whatever a cause may say.
            report::complain(&format!("hattn: {}", format!("{error:#}").replace('\n', " ")));
            ExitCode::FAILURE
        }
    }
}
