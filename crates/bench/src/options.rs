// SPDX-License-Identifier: Apache-2.0
//! Options shared by all benchmarks.

use std::path::PathBuf;

use clap::Args;

use crate::harness::vmm::{GuestKind, GuestOption};
use viola_cli::error::{Failure, Outcome};

/// Rounds of a full run.
const ROUNDS: usize = 5;
/// Rounds of a quick one.
const QUICK_ROUNDS: usize = 1;

/// Options of every benchmark.
#[derive(Debug, Args)]
pub struct Options {
    /// Rounds per cell; default 5, or 1 with --quick.
    #[arg(long, value_name = "N", value_parser = viola_cli::usage::at_least_one)]
    pub rounds: Option<usize>,
    /// Quick check: short cells, one round.
    #[arg(long)]
    pub quick: bool,
    /// Measure only cells whose name contains this, such as `LSVM idle`, `5 VMs` or `open loop`. turbo, vread, vpipe and
    /// papers accept several patterns, separated by commas.
    #[arg(long, value_name = "PATTERN")]
    pub only: Option<String>,
    /// Core that the guests share.
    #[arg(long, value_name = "CPU", default_value_t = 1)]
    pub core: usize,
    /// File for the result.
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

impl Options {
    /// Rounds per cell.
    pub fn rounds(&self) -> usize {
        self.rounds
            .unwrap_or(if self.quick { QUICK_ROUNDS } else { ROUNDS })
    }

    /// Path of the result file. Only a full run replaces `bench/results/NAME.json`.
    pub fn path(&self, name: &str, is_full: bool) -> PathBuf {
        let folder = if is_full {
            "bench/results"
        } else {
            "build/bench"
        };
        self.output
            .clone()
            .unwrap_or_else(|| PathBuf::from(folder).join(format!("{name}.json")))
    }
}

/// Options of a benchmark that runs on guests of each kind.
#[derive(Debug, Args)]
pub struct GuestOptions {
    #[command(flatten)]
    pub options: Options,
    #[command(flatten)]
    pub guests: GuestOption,
}

impl GuestOptions {
    /// Path of the result file. Only a full run with KVM or User Mode Linux replaces that of `bench/results`.
    pub fn path(&self, name: &str, kind: GuestKind, is_full: bool) -> PathBuf {
        let is_full = is_full && kind.is_evidence();
        self.options.path(&kind.result(name), is_full)
    }
}

/// Fails unless the process runs as root, which guests, their network and real-time scheduling need.
pub fn need_root() -> Outcome {
    match rustix::process::geteuid().is_root() {
        true => Ok(()),
        false => Err(Failure::run("booting guests needs root; use sudo")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_full_run_replaces_the_committed_result() {
        let mut options = Options {
            rounds: None,
            quick: false,
            only: None,
            core: 1,
            output: None,
        };
        assert_eq!(
            options.path("slices", true),
            PathBuf::from("bench/results/slices.json")
        );
        assert_eq!(
            options.path("slices", false),
            PathBuf::from("build/bench/slices.json")
        );
        options.output = Some("x.json".into());
        assert_eq!(options.path("slices", true), PathBuf::from("x.json"));
        assert_eq!(
            (
                options.rounds(),
                Options {
                    quick: true,
                    ..options
                }
                .rounds()
            ),
            (5, 1)
        );
    }
}
