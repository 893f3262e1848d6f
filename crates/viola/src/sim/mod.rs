// SPDX-License-Identifier: Apache-2.0
//! `viola sim`: the model of a host, driven by the same policy as the daemon.

mod import;
mod page;
mod papers;
mod show;

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;
use viola_sim::advise::advise;
use viola_sim::fleet::{self, Side};
use viola_sim::scenario::Scenario;

use viola_cli::error::{Failure, Outcome};
use viola_cli::table;

/// Subcommands of `sim`.
#[derive(Debug, Subcommand)]
pub enum Sim {
    /// Check a scenario, and say what is wrong with it.
    Check {
        /// The scenario.
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Run a scenario: what each VM got, how long it waited, what its work came to.
    ///
    /// The same file and seed give the same output, byte for byte.
    Run(Run),
    /// Say of each VM of a scenario what viola would do with it, and what that would bring.
    ///
    /// The policy's own classifiers look at what the simulated meter saw; then the host is run as they say. Figures are
    /// medians over the seeds, with the lowest and the highest.
    Host(Host),
    /// Make a scenario of a running host, from what `viola vms --json` says of it.
    ///
    /// Reads a file or, without one, standard input; prints TOML for `sim host` and `sim run`. A VM has one vCPU in the
    /// model, and what its packets and disks are for is not in the snapshot: read it over before believing what comes out.
    Import {
        /// What `viola vms --json` printed; `-` is standard input.
        #[arg(value_name = "FILE", default_value = "-")]
        file: PathBuf,
    },
    /// Run the papers' experiments, and put the paper's values beside the model's.
    ///
    /// Prints a table: place, what, the paper's value, ours, ratio, verdict. Rows that were held out when constants were
    /// chosen are marked with a *. Writes papers.html, with figures, and papers.json.
    Papers(Papers),
    /// Run a fleet of hosts of 16 cores and 64 VMs by a fluid model, and measure how far that is from the event model.
    Fleet(Fleet),
}

/// Options of `sim run`.
#[derive(Debug, Args)]
pub struct Run {
    /// The scenario.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Seed, instead of the one in the file.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Options of `sim host`.
#[derive(Debug, Args)]
pub struct Host {
    /// The scenario.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Seeds that each side is run with.
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

/// Who schedules the fleet.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum FleetSide {
    /// Xen's credit scheduler with 30 ms.
    Credit,
    /// viola's slices.
    Viola,
}

/// Options of `sim fleet`.
#[derive(Debug, Args)]
pub struct Fleet {
    /// Hosts.
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    pub hosts: u64,
    /// Simulated time, minutes.
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub minutes: u64,
    /// Who schedules.
    #[arg(long, value_enum, default_value_t = FleetSide::Viola)]
    pub scheduler: FleetSide,
    /// Seed.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Threads; without it as many as there are cores.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Cores on which the event model is run too, for the error.
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub compare: u64,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Runs `sim`.
pub fn run(what: &Sim) -> Outcome {
    match what {
        Sim::Check { file } => {
            let scenario = read(file)?;
            let vms = scenario.host.vms.len();
            let cores = scenario.host.cores + scenario.host.turbo_cores;
            let name = &scenario.name;
            table::print(&format!("{name}: {vms} VMs on {cores} cores, all well\n"))
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

/// What a run of the fleet came to.
#[derive(Serialize)]
struct FleetRun {
    hosts: u64,
    vms: u64,
    simulated_s: u64,
    wall_s: f64,
    used_percent: f64,
    mean_wait_ms: f64,
    longest_wait_ms: f64,
    error: fleet::Error,
}

fn run_fleet(args: &Fleet) -> Outcome {
    if args.hosts == 0 || args.minutes == 0 || args.compare == 0 {
        let what = "--hosts, --minutes and --compare must be more than 0";
        return Err(Failure::usage(what));
    }
    let side = match args.scheduler {
        FleetSide::Credit => Side::Credit,
        FleetSide::Viola => Side::Viola,
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
        error: fleet::error(args.compare, 60, side, args.seed),
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
