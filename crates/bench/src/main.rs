// SPDX-License-Identifier: Apache-2.0
//! `viola-lab`: labs of guests, the demo, and the benchmarks.
//!
//! | module | does |
//! |---|---|
//! | `args`, `benches`, `options` | the command line |
//! | `lab` | guests to play with |
//! | `demo` | what `make run` shows |
//! | `slices`, `auto`, `mixed`, `deceivers`, `turbo`, `scx`, `vread`, `vpipe`, `copies` | one benchmark each |
//! | `backlog`, `lanes`, `papers`, `daemon`, `sim` | one benchmark each |
//! | `charts` | charts of the page of `demo` |
//! | `harness` | what they share: sides, rows with goals, the file of results |

// `make run` leaves the benchmarks out.
#![cfg_attr(not(feature = "benches"), allow(dead_code))]

mod args;
#[cfg(feature = "benches")]
mod auto;
#[cfg(feature = "benches")]
mod backlog;
#[cfg(feature = "benches")]
mod benches;
mod charts;
#[cfg(feature = "benches")]
mod copies;
#[cfg(feature = "benches")]
mod daemon;
mod deceivers;
mod demo;
mod harness;
mod lab;
#[cfg(feature = "benches")]
mod lanes;
#[cfg(feature = "benches")]
mod mixed;
mod options;
#[cfg(feature = "benches")]
mod papers;
#[cfg(feature = "benches")]
mod scx;
#[cfg(feature = "benches")]
mod sim;
#[cfg(feature = "benches")]
mod slices;
mod turbo;
#[cfg(feature = "benches")]
mod vpipe;
#[cfg(feature = "benches")]
mod vread;

use std::process::ExitCode;

#[cfg(feature = "benches")]
use args::Internal;
use args::{Command, PROGRAM};
use options::{Options, need_root};
use viola_cli::usage;

/// Runs the subcommand of the command line.
fn main() -> ExitCode {
    let args: args::Args = match usage::parse(std::env::args_os()) {
        Ok(args) => args,
        Err(refusal) => return refusal.report(PROGRAM),
    };
    let done = match &args.command {
        Command::Lab(what) => return lab::run(what).unwrap_or_else(|e| e.report(PROGRAM)),
        Command::Demo(args) => demo::run(args),
        #[cfg(feature = "benches")]
        Command::Bench(what) => benches::run(what),
        #[cfg(feature = "benches")]
        Command::Internal(Internal::Traffic { json }) => lanes::traffic(json),
        #[cfg(feature = "benches")]
        Command::Internal(Internal::Backlog { words }) => backlog::backlog(words),
        #[cfg(feature = "benches")]
        Command::Internal(Internal::Stand { words }) => scx::stand(words),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(PROGRAM),
    }
}
