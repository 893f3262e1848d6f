// SPDX-License-Identifier: Apache-2.0
//! The one program: the daemon, the commands that talk to it, and the lab. A library only so that fuzzers reach what it parses.

mod ability;
mod bench;
mod cli;
mod client;
mod commands;
mod config;
mod daemon;
mod demo;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod keys;
mod log;
mod measure;
mod names;
mod quantities;
mod record;
#[cfg(test)]
mod reference;
mod report;
mod sim;
mod table;
#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(not(test), allow(dead_code))]
mod testing;
mod top;

use std::process::ExitCode;

use cli::{Command, Refusal};
use error::Failure;

/// Does what the command line says.
pub fn main() -> ExitCode {
    let cli = match cli::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(Refusal::Help(help)) => {
            let _ = help.print();
            return ExitCode::from(if help.use_stderr() { 2 } else { 0 });
        }
        Err(Refusal::Usage(sentence)) => return Failure::Usage(sentence).tell(),
    };
    let done = match &cli.command {
        Command::Run(args) => daemon::run(args),
        Command::Check(args) => commands::check(args),
        Command::Vms(args) => commands::vms(args),
        Command::Top(args) => top::run(args),
        Command::Record(args) => commands::record(args),
        Command::Set(args) => commands::set(args),
        Command::Stop(args) => commands::stop(args),
        Command::Start(socket) => commands::start(socket),
        Command::Status(args) => commands::status(args),
        Command::Restore(args) => commands::restore(args),
        Command::Vread(what) => commands::vread(what),
        Command::Pipe(what) => commands::pipe(what),
        Command::Lanes(args) => commands::lanes(args),
        Command::Keys(what) => commands::keys(what),
        Command::Lab(what) => return commands::lab(what).unwrap_or_else(|e| e.tell()),
        Command::Demo(args) => demo::run(args),
        Command::Bench(what) => bench::run(what),
        Command::Sim(what) => sim::run(what),
        Command::Man(args) => commands::man(args),
        Command::Internal(what) => return commands::internal(what),
        Command::Worker(what) => commands::worker(what),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.tell(),
    }
}
