// SPDX-License-Identifier: Apache-2.0
//! `viola-lab demo`: runs four guests on one core under stock scheduling, the papers' 30 ms slices and viola in turn.
//! It prints a table and writes a report in HTML and JSON.

mod measured;
mod page;
mod rows;

use std::fs;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use crate::charts::timeline::Stretch;
use crate::harness::progress::clock;
use crate::harness::side::Side;
use crate::harness::vmm::GuestOption;
use crate::harness::{cell, guests, machine, row};
use crate::{need_root, turbo};
use measured::{LOADS, Measured, SIDES, STATES};
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;
use viola_cli::table;
use viola_report::stats::Sorted;

/// Options of `demo`.
#[derive(Debug, Args)]
pub struct Demo {
    /// Print the figures as JSON instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Number of rounds.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = viola_cli::usage::at_least_one)]
    pub rounds: usize,
    /// Core that the guests share.
    #[arg(long, value_name = "CPU", default_value_t = 1)]
    pub core: usize,
    #[command(flatten)]
    guests: GuestOption,
    /// Folder for report.html and report.json.
    #[arg(long, value_name = "DIR", default_value = "build")]
    pub output: PathBuf,
}

/// `report.json`.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Git revision that was measured.
    pub git: Option<String>,
    /// Date and time, UTC.
    pub date: String,
    /// Host machine.
    pub machine: String,
    /// Guest kernel.
    pub guests: String,
    /// Number of rounds.
    pub rounds: usize,
    /// HTTP requests per second that the web server's share of the core serves.
    pub share_requests_per_s: f64,
    /// Disturbance by other programs, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disturbed: Option<String>,
    /// The table.
    pub rows: Vec<row::Row>,
    /// Latencies of all rounds, pooled.
    pub distributions: Vec<Distribution>,
    /// Timelines of the core.
    pub timelines: Vec<Timeline>,
}

/// Latencies of one side.
#[derive(Debug, Serialize)]
pub struct Distribution {
    /// Request type and state of the guest.
    pub name: String,
    /// Side.
    pub side: String,
    /// Number of replies.
    pub samples: usize,
    /// Quantile (0..=1) and latency in milliseconds.
    pub quantiles: Vec<(f64, f64)>,
}

/// Timeline of the core on one side.
#[derive(Debug, Serialize)]
pub struct Timeline {
    /// Side.
    pub side: String,
    /// Stretches in order of time; VM 4 stands for everything else on that core.
    pub stretches: Vec<Stretch>,
}

/// Runs the demo.
pub fn run(options: &Demo) -> Outcome {
    need_root()?;
    if options.rounds == 0 {
        return Err(Failure::usage(
            "--rounds 0: the demo needs at least one round",
        ));
    }
    interrupt::watch()?;
    guests::split_cores(options.core)?;
    let kind = options.guests.kind()?;
    let measured = Measured::measure(options.rounds, options.core, kind)?;
    let mut report = report(&measured);
    // Also show turbo cores where that needs no build. A failure here does not affect the report.
    let turbo = turbo::quick_round(options.core, kind);
    let (turbo, failed) = match turbo {
        Ok(mut rows) => {
            rows.iter_mut()
                .for_each(|row| (row.goal, row.met) = (None, None));
            (rows, None)
        }
        Err(e) => (Vec::new(), Some(e)),
    };
    report.rows.extend(turbo.iter().cloned());
    let write = |name: &str, text: &str| {
        let path = options.output.join(name);
        fs::create_dir_all(&options.output)
            .and_then(|()| fs::write(&path, text))
            .map_err(|e| Failure::run(format!("{}: {e}", path.display())))
    };
    let json = serde_json::to_string(&report).map_err(Failure::run)?;
    write("report.json", &format!("{json}\n"))?;
    write("report.html", &page::html(&measured, &report))?;
    if options.json {
        return table::print(&format!("{json}\n"));
    }
    let mut text = format!("\n{}\n", rows::table(&report.rows).text());
    if !turbo.is_empty() {
        text.push_str("a busy guest with two vCPUs, the first on a turbo core; one short round\n");
        text.push_str(&format!("{}\n", row::table(&turbo).text()));
    }
    if let Some(Failure::Run(failed) | Failure::Usage(failed)) = failed {
        text.push_str(&format!("No figures of turbo cores: {failed}.\n"));
    }
    if let Some(disturbed) = &report.disturbed {
        text.push_str(&format!("Careful: {disturbed}.\n"));
    }
    text.push_str(&format!("{}.\n", measured.rates()));
    text.push_str(&format!(
        "{} rounds in {}; charts in {}\n",
        report.rounds,
        clock(measured.took),
        options.output.join("report.html").display()
    ));
    table::print(&text)
}

fn report(measured: &Measured) -> Report {
    let mut distributions = Vec::new();
    let mut add = |what: &str, busy, side: Side, all: &Sorted| {
        let at = |q: f64| Some((q, all.quantile(q)?));
        distributions.push(Distribution {
            name: format!("{what}, {}", rows::state(busy)),
            side: side.name(),
            samples: all.len(),
            quantiles: [
                0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0,
            ]
            .into_iter()
            .filter_map(at)
            .collect(),
        });
    };
    for busy in STATES {
        for side in SIDES {
            for (name, latency) in rows::LATENCIES {
                add(name, busy, side, &measured.pooled(busy, side, latency));
            }
            for load in LOADS {
                let name = format!("HTTP, {}", load.name());
                add(&name, busy, side, &measured.pooled_load(busy, side, load));
            }
        }
    }
    let refused = (measured.refused > 0).then(|| {
        format!(
            "{} HTTP loads were left out, because the load generator was late itself",
            measured.refused
        )
    });
    let disturbed: Vec<String> = cell::disturbance(measured.cells.values().flatten())
        .into_iter()
        .chain(refused)
        .collect();
    let timelines = SIDES.iter().zip(&measured.timelines);
    Report {
        git: machine::git(),
        date: viola_cli::date::now(),
        machine: machine::machine(),
        guests: measured.kernel.clone(),
        rounds: measured.rounds,
        share_requests_per_s: measured.share_per_s,
        disturbed: (!disturbed.is_empty()).then(|| disturbed.join("; ")),
        rows: rows::rows(measured),
        distributions,
        timelines: timelines
            .map(|(side, stretches)| Timeline {
                side: side.name(),
                stretches: stretches.clone(),
            })
            .collect(),
    }
}
