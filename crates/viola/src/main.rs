// SPDX-License-Identifier: Apache-2.0
//! `viola`, the product: the daemon, and the commands that talk to it.

mod args;
mod commands;
mod prepare;
mod record;
#[cfg(test)]
mod reference;
mod sim;
#[cfg(test)]
mod testing;
mod top;
mod trial;

use std::process::ExitCode;

use args::{Command, Viola};
use viola_cli::usage;

/// Name of the program in messages.
const PROGRAM: &str = "viola";

/// Does what the command line says.
fn main() -> ExitCode {
    let args: Viola = match usage::parse(std::env::args_os()) {
        Ok(args) => args,
        Err(refusal) => return refusal.report(PROGRAM),
    };
    viola_host::answer_process::use_processes();
    let done = match &args.command {
        Command::Run(args) => viola_daemon::run(&args.config, args.dry_run),
        Command::Check(args) => commands::check(args),
        Command::Vms(args) => commands::vms(args),
        Command::Advise(args) => commands::advise(args),
        Command::Why(args) => commands::why(args),
        Command::Log(args) => commands::log(args),
        Command::Try(args) => trial::run(args),
        Command::Top(args) => top::run(args),
        Command::Record(args) => commands::record(args),
        Command::Prepare(args) => prepare::prepare(args),
        Command::Unprepare(args) => prepare::unprepare(args),
        Command::Register(args) => commands::register(args),
        Command::Set(args) => commands::set(args),
        Command::Stop(args) => commands::stop(args),
        Command::Start(socket) => commands::start(socket),
        Command::Status(args) => commands::status(args),
        Command::Restore(args) => commands::restore(args),
        Command::Vread(what) => commands::vread(what),
        Command::Pipe(what) => commands::pipe(what),
        Command::Lanes(args) => commands::lanes(args),
        Command::Keys(what) => commands::keys(what),
        Command::Sim(what) => sim::run(what),
        Command::Man(args) => commands::man(args),
        Command::Internal(what) => return commands::internal(what),
        Command::Worker(what) => what.run(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(PROGRAM),
    }
}
