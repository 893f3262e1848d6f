// SPDX-License-Identifier: Apache-2.0
//! `viola-lab`: guests to play with, the demo, and the benchmarks.
//!
//! | module | does |
//! |---|---|
//! | `args`, `options` | the command line |
//! | `lab` | guests to play with |
//! | `demo` | what `make run` shows |
//! | `slices`, `turbo`, `scx`, `vread`, `vpipe`, `copies`, `backlog`, `lanes`, `papers`, `daemon`, `sim` | one benchmark each |
//! | `side`, `guests`, `spawn`, `program` | the sides of a comparison: guests, and the daemon that is measured |
//! | `cell`, `row`, `result`, `progress` | figures, their goals, and the file of results |
//! | `cpu`, `machine`, `trace`, `tool`, `folder` | what the benchmarks measure with |

mod args;
mod backlog;
mod cell;
mod copies;
mod cpu;
mod daemon;
mod demo;
mod folder;
mod guests;
mod lab;
mod lanes;
mod machine;
mod options;
mod papers;
mod program;
mod progress;
mod result;
mod row;
mod scx;
mod side;
mod sim;
mod slices;
mod spawn;
mod tool;
mod trace;
mod turbo;
mod vpipe;
mod vread;

use std::process::ExitCode;

use args::{Command, Internal, PROGRAM};
use options::{Options, need_root};
use viola_cli::usage;

/// Does what the command line says.
fn main() -> ExitCode {
    let args: args::Args = match usage::parse(std::env::args_os()) {
        Ok(args) => args,
        Err(refusal) => return refusal.report(PROGRAM),
    };
    let done = match &args.command {
        Command::Lab(what) => return lab::run(what).unwrap_or_else(|e| e.report(PROGRAM)),
        Command::Demo(args) => demo::run(args),
        Command::Bench(what) => options::run(what),
        Command::Internal(Internal::Traffic { json }) => lanes::traffic(json),
        Command::Internal(Internal::Backlog { words }) => backlog::backlog(words),
        Command::Internal(Internal::Stand { words }) => scx::stand(words),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(PROGRAM),
    }
}
