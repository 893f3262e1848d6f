// SPDX-License-Identifier: Apache-2.0
//! `viola sim`: a simulated host whose decisions are made by the daemon's policy.

mod import;
mod page;
mod papers;
mod show;

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;
use viola_sim::advise::advise;
use viola_sim::fleet::{self, FleetScheduler};
use viola_sim::scenario::Scenario;

use viola_cli::error::{Failure, Outcome};
use viola_cli::table;

/// Subcommands of `sim`.
#[derive(Debug, Subcommand)]
pub enum Sim {
    /// Check a scenario.
    Check {
        /// File of the scenario.
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Run a scenario, and show CPU time, waits and work of each VM.
    ///
    /// The same file and seed give the same output, byte for byte.
    Run(Run),
    /// Show what viola would do for each VM of a scenario, and the gain.
    ///
    /// The policy's classifiers decide from the simulated meter; then the host runs with their decisions. Figures are
    /// medians over the seeds, with minimum and maximum.
    Host(Host),
    /// Make a scenario from the output of `viola vms --json`.
    ///
    /// Reads a file or standard input, and prints TOML for `sim host` and `sim run`. The model has one vCPU for each VM, and
    /// the snapshot does not say what packets and disk traffic are for: check the scenario before you use its results.
    Import {
        /// Output of `viola vms --json`; `-` is standard input.
        #[arg(value_name = "FILE", default_value = "-")]
        file: PathBuf,
    },
    /// Run the papers' experiments, and compare the model with the papers.
    ///
    /// Prints a table: place, quantity, the paper's value, the model's, ratio, verdict. A * marks rows that were held out
    /// when constants were chosen. Writes papers.html, with figures, and papers.json.
    Papers(Papers),
    /// Run a fleet of hosts with 16 cores and 64 VMs each by a fluid model, and compare it with the event model.
    Fleet(Fleet),
}

/// Options of `sim run`.
#[derive(Debug, Args)]
pub struct Run {
    /// File of the scenario.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Seed; overrides that of the file.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Options of `sim host`.
#[derive(Debug, Args)]
pub struct Host {
    /// File of the scenario.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Number of seeds for each side.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub seeds: u64,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Options of `sim papers`.
#[derive(Debug, Args)]
pub struct Papers {
    /// Folder for papers.html and papers.json.
    #[arg(long, value_name = "DIR", default_value = "build/sim")]
    pub output: PathBuf,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Scheduler of the fleet.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum FleetSide {
    /// Xen's credit scheduler with slices of 30 ms.
    Credit,
    /// viola's slices.
    Viola,
}

/// Options of `sim fleet`.
#[derive(Debug, Args)]
pub struct Fleet {
    /// Number of hosts.
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    pub hosts: u64,
    /// Simulated time, minutes.
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub minutes: u64,
    /// Scheduler of the hosts.
    #[arg(long, value_enum, default_value_t = FleetSide::Viola)]
    pub scheduler: FleetSide,
    /// Seed.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Number of threads; one for each core by default.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Number of cores that the event model simulates too, to measure the error.
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub compare: u64,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// `viola sim`
///
/// # Errors
/// Exit status 2 for a wrong scenario, 1 when an output cannot be written.
pub fn run(what: &Sim) -> Outcome {
    match what {
        Sim::Check { file } => {
            let scenario = read(file)?;
            let vms = scenario.host.vms.len();
            let cores = scenario.host.cores + scenario.host.turbo_cores;
            let name = &scenario.name;
            table::print(&format!("{name}: {vms} VMs on {cores} cores, no error\n"))
        }
        Sim::Run(args) => {
            let scenario = read(&args.file)?;
            let outcome = scenario.run(args.seed.unwrap_or(scenario.seed));
            if args.json {
                json(&outcome)
            } else {
                table::print(&show::outcome(&outcome))
            }
        }
        Sim::Host(args) => {
            let scenario = read(&args.file)?;
            let advice = advise(&scenario, args.seeds);
            if args.json {
                json(&advice)
            } else {
                table::print(&show::advice(&advice, args.seeds))
            }
        }
        Sim::Import { file } => table::print(&import::read(file)?),
        Sim::Papers(args) => papers::run(args),
        Sim::Fleet(args) => run_fleet(args),
    }
}

fn read(file: &Path) -> Outcome<Scenario> {
    Scenario::read(file).map_err(Failure::usage)
}

fn json(value: &impl Serialize) -> Outcome {
    let text = serde_json::to_string_pretty(value).map_err(Failure::run)?;
    table::print(&format!("{text}\n"))
}

/// Result of a run of the fleet.
#[derive(Serialize)]
struct FleetRun {
    hosts: u64,
    vms: u64,
    simulated_s: u64,
    wall_s: f64,
    used_percent: f64,
    mean_wait_ms: f64,
    longest_wait_ms: f64,
    error: fleet::ModelError,
}

fn run_fleet(args: &Fleet) -> Outcome {
    if args.hosts == 0 || args.minutes == 0 || args.compare == 0 {
        let what = "--hosts, --minutes and --compare must be more than 0";
        return Err(Failure::usage(what));
    }
    let side = match args.scheduler {
        FleetSide::Credit => FleetScheduler::Credit,
        FleetSide::Viola => FleetScheduler::Viola,
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.unwrap_or(cores).max(1);
    let steps = args.minutes.saturating_mul(60);
    let begun = Instant::now();
    let sums = fleet::run(args.hosts, steps, side, args.seed, threads);
    let wall_s = begun.elapsed().as_secs_f64();
    let per = 1.0 / sums.steps.max(1) as f64;
    let run = FleetRun {
        hosts: args.hosts,
        vms: args.hosts * (fleet::CORES * fleet::VMS_PER_CORE) as u64,
        simulated_s: steps,
        wall_s,
        used_percent: 100.0 * sums.used * per,
        mean_wait_ms: sums.wait_ms * per,
        longest_wait_ms: sums.longest_ms,
        error: fleet::model_error(args.compare, 60, side, args.seed),
    };
    if args.json {
        json(&run)
    } else {
        table::print(&show::fleet(
            &[
                ("hosts", run.hosts as f64),
                ("VMs", run.vms as f64),
                ("simulated s", run.simulated_s as f64),
                ("wall s", run.wall_s),
                ("cores used %", run.used_percent),
                ("mean wait of a request, ms", run.mean_wait_ms),
                ("longest, ms", run.longest_wait_ms),
            ],
            &run.error,
        ))
    }
}
