// SPDX-License-Identifier: Apache-2.0
//! `viola bench turbo`: I/O of a guest with two vCPUs that is busy itself and has busy neighbours, under stock
//! scheduling, the papers' 30 ms slices and with its first vCPU on a turbo core; and what that costs the others.
//!
//! The programs of all guests keep to their second vCPU on every side, so that interrupts come to the first one
//! undisturbed: without that a User Mode Linux guest would not see a packet before the program that runs there makes a
//! system call, and the other sides would look worse than they are.

mod bed;
mod rows;

use std::time::Duration;

use bed::{Bed, Reading};

use super::progress::{Progress, clock};
use super::result::{Causes, Results};
use super::side::Side;
use super::{Options, guests, interrupt, row};
use crate::error::{Failure, Outcome};
use crate::table;

/// Time to boot the guests and take them down, and to go from one side to the next.
const BOOT: Duration = Duration::from_secs(6);
const SWITCH: Duration = Duration::from_secs(2);

/// How long each part of a cell is measured.
#[derive(Debug, Clone, Copy)]
struct Times {
    /// Pings, connections, requests: each.
    answers: Duration,
    /// Floods and streams: each.
    bulk: Duration,
    /// Data written to the disk, MiB.
    disk: u32,
}

impl Times {
    fn of(quick: bool) -> Self {
        Self {
            answers: Duration::from_millis(if quick { 1000 } else { 2500 }),
            bulk: Duration::from_millis(if quick { 1000 } else { 2500 }),
            disk: if quick { 32 } else { 64 },
        }
    }

    /// All parts, with what it takes to begin and end them.
    fn cell(self) -> Duration {
        self.answers * 3 + self.bulk * 3 + Duration::from_secs(4)
    }
}

/// The sides, in the order of the first round. `turbo` is the turbo core.
fn sides(turbo: usize) -> [Side; 3] {
    [Side::Stock, Side::Credit, Side::Turbo(turbo)]
}

/// Runs it, prints the table and writes the result.
pub fn run(options: &Options) -> Outcome {
    if options.only.is_some() {
        return Err(Failure::usage(
            "bench turbo measures everything or nothing: leave --only out",
        ));
    }
    guests::split_cores(options.core)?;
    let rounds = options.rounds();
    let (found, kernel) = measure(options.core, Times::of(options.quick), rounds)?;
    let mut results = Results::new(rounds, &kernel, found.rows());
    results.explain(&Causes::read("bench/why-turbo.toml".as_ref())?);
    let path = options.path("turbo", !options.quick && rounds >= 5);
    results.write(&path)?;
    table::print(&row::table(&results.rows).text())?;
    table::print(&results.verdict(&path, "why-turbo.toml"))
}

/// A look at all figures in one round, for the demo; nothing where there is no kernel for guests with several vCPUs, which
/// takes minutes to build.
pub fn glance(core: usize) -> Outcome<Vec<row::Row>> {
    let there = viola_lab::Paths::find().and_then(|paths| paths.kernel(2));
    match there {
        Ok(_) => Ok(measure(core, Times::of(true), 1)?.0.rows()),
        Err(_) => Ok(Vec::new()),
    }
}

/// Measures all sides, in another order each round; what was found, and the guests' kernel.
fn measure(core: usize, times: Times, rounds: usize) -> Outcome<(rows::Found, String)> {
    let whole = (BOOT + (SWITCH + times.cell()) * 3) * rounds as u32;
    let mut progress = Progress::new(whole);
    progress.say(&format!("turbo: {rounds} rounds, about {}", clock(whole)));
    let mut found = rows::Found::default();
    let mut kernel = String::new();
    for round in 0..rounds {
        progress.step(&format!("round {} of {rounds}: boot", round + 1), BOOT);
        let mut bed = Bed::boot(core)?;
        if kernel.is_empty() {
            kernel = bed.kernel()?;
        }
        let mut order = sides(bed.turbo_core()).to_vec();
        let first = round % order.len();
        order.rotate_left(first);
        for side in order {
            interrupt::check()?;
            let label = format!("round {} of {rounds}: turbo, {}", round + 1, side.name());
            progress.step(&label, SWITCH + times.cell());
            let reading: Reading = bed.measure(side, &times, 1 + round as u64)?;
            found.add(side, reading);
        }
        bed.down()?;
    }
    Ok((found, kernel))
}
