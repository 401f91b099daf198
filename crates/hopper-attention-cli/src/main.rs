//! `hattn`: exact attention on tensor files, its check against an f64 oracle, what this machine can run, and how fast.
//!
//! Exit codes: 0 done, 1 refused or failed (one sentence on stderr), 2 a command line that cannot be read.

mod args;
mod bench;
mod compute;
mod info;
mod input;
mod judge;
mod layout;
mod operands;
mod output;
mod random;
mod report;
mod request;
mod run;
mod tune;
mod values;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Check(args) => run::check(&args),
        Command::Info(args) => info::info(&args),
        Command::Random(args) => random::random(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Plot(args) => bench::plot(&args),
        Command::Tune(args) => tune::tune(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // One line, whatever a cause may say.
            let sentence = format!("{error:#}").replace('\n', " ");
            eprintln!("hattn: {sentence}");
            ExitCode::FAILURE
        }
    }
}
