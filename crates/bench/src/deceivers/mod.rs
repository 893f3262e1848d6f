// SPDX-License-Identifier: Apache-2.0
//! `viola-lab bench deceivers`: guests that look latency-sensitive and compute. With `auto = "on"` they must gain nothing, and the
//! others lose nothing.
//!
//! Four guests share a core. The first one deceives, the others compute; one of these is pinged at times.

mod tricks;

use std::time::Duration;

use viola_lab::load::{self, Ping};

use self::tricks::Trick;
use crate::auto::changes;
use crate::harness::awake::KeepAwake;
use crate::harness::cell::{milliseconds, rate};
use crate::harness::cpu::ThreadSampler;
use crate::harness::guests::{self, Guests, WEB};
use crate::harness::progress::Progress;
use crate::harness::result::Results;
use crate::harness::row::{Goal, Row};
use crate::harness::side::{Active, Guests as Settings, Side, lab_failure};
use crate::harness::vmm::GuestKind;
use crate::options::GuestOptions;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;
use viola_report::stats::figure;

const VMS: usize = 4;
/// The guest that is pinged.
const PINGED: usize = 1;
/// Time of a cell under stock scheduling.
const STOCK_TIME: Duration = Duration::from_secs(40);
/// Time of a cell with viola: a trial needs a minute or more, and its windows count too.
const AUTO_TIME: Duration = Duration::from_secs(100);
/// Time between two pings, on average 50 ms.
const PING_INTERVAL: (Duration, Duration) = (Duration::from_millis(25), Duration::from_millis(75));
/// Boot of the guests.
const AROUND_TIME: Duration = Duration::from_secs(20);
/// What the deceiver may have beyond its share, points.
const POINTS: f64 = 1.0;

/// Runs the benchmark, prints the table and writes the result.
pub fn run(wanted: &GuestOptions) -> Outcome {
    let options = &wanted.options;
    if options.only.is_some() {
        return Err(Failure::usage(
            "bench deceivers has no cells to choose from; leave --only out",
        ));
    }
    guests::split_cores(options.core)?;
    let rounds = options.rounds();
    let part = if options.quick { 2 } else { 1 };
    let times = [STOCK_TIME / part, AUTO_TIME / part];
    let round = AROUND_TIME + Trick::ALL.len() as u32 * (times[0] + times[1]);
    let kind = wanted.guests.kind()?;
    let mut bench = Bench {
        kind,
        progress: Progress::new(round * rounds as u32),
        sampler: ThreadSampler::new()?,
        core: options.core,
        times,
        found: Trick::ALL.map(|_| [Vec::new(), Vec::new()]),
        kernel: String::new(),
    };
    bench.progress.announce("deceivers", rounds);
    for number in 0..rounds {
        bench.round(number, rounds)?;
    }
    let results = Results::new(rounds, &bench.kernel, rows(&bench.found));
    let path = wanted.path("deceivers", kind, !options.quick && rounds >= 5);
    drop(bench);
    results.publish(&kind.result("deceivers"), &path)
}

const SIDES: [Side; 2] = [Side::Stock, Side::Auto];

/// Figures of a cell.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Reading {
    /// CPU time of the deceiver, percent of the core.
    share: f64,
    /// Work of the others, units/s.
    work: f64,
    /// Pings of another guest, ms.
    p50: f64,
    p99: f64,
    /// Changes of class that viola made.
    changes: usize,
}

struct Bench {
    kind: GuestKind,
    progress: Progress,
    sampler: ThreadSampler,
    core: usize,
    /// Times of the cells, by [`SIDES`].
    times: [Duration; SIDES.len()],
    /// By trick and by [`SIDES`], one of each round.
    found: [[Vec<Reading>; SIDES.len()]; Trick::ALL.len()],
    kernel: String,
}

impl Bench {
    fn round(&mut self, number: usize, rounds: usize) -> Outcome {
        let label = format!("round {} of {rounds}", number + 1);
        self.progress.step(&format!("{label}: boot"), AROUND_TIME);
        let mut guests = guests::boot("bench-deceivers", VMS, self.core, self.kind)?;
        if self.kernel.is_empty() {
            self.kernel = guests.kernel()?;
        }
        guests.keep_busy(false, 100)?;
        for (at, trick) in Trick::ALL.into_iter().enumerate() {
            let mut order = [0, 1];
            order.rotate_left(number % 2);
            for side in order {
                let label = format!("{label}: {}, {}", trick.name(), SIDES[side].name());
                self.progress.step(&label, self.times[side]);
                let seed = (10 * number + at) as u64;
                let reading = self.cell(&guests, trick, side, seed)?;
                self.progress.say(&format!(
                    "{label}: {} % of the core, {} changes of class",
                    figure(reading.share),
                    reading.changes
                ));
                self.found[at][side].push(reading);
            }
        }
        guests.down()
    }

    fn cell(&mut self, guests: &Guests, trick: Trick, side: usize, seed: u64) -> Outcome<Reading> {
        interrupt::check()?;
        let settings = Settings {
            ls: Vec::new(),
            ..Settings::equal(self.core, WEB)
        };
        let active = Active::start(SIDES[side], &settings, &guests.lab)?;
        let bridges = &guests.lab.spec().bridges;
        let host = bridges.first().map(|bridge| bridge.address);
        let host = host.ok_or_else(|| Failure::run("the lab has no network"))?;
        let running = trick.start(guests.web(), host)?;
        let time = self.times[side];
        let pinged = &guests.lab.guests()[PINGED];
        let address = guests::address(pinged)?;
        let mean = (PING_INTERVAL.0 + PING_INTERVAL.1) / 2;
        let ping = Ping {
            count: (time.as_secs_f64() / mean.as_secs_f64()) as usize,
            interval: PING_INTERVAL,
            client: guests.client(seed),
            ..Ping::default()
        };
        let pids = guests.pids();
        let _awake = KeepAwake::start()?;
        let work = guests.work()?;
        let before = self.sampler.vms(&pids)?;
        let times = load::ping(&guests.lab, address, &ping).map_err(lab_failure)?;
        let shares = self.sampler.vms(&pids)?.since(&before);
        let work = rate(&work, &guests.work()?);
        running.stop()?;
        let changes = match SIDES[side] {
            Side::Auto => changes(&active.events()?).len(),
            _ => 0,
        };
        active.stop()?;
        let delays = milliseconds(&times.us);
        Ok(Reading {
            share: shares.first().map_or(f64::NAN, |used| used.share * 100.0),
            work: work.unwrap_or(f64::NAN),
            p50: delays.median().unwrap_or(f64::NAN),
            p99: delays.quantile(0.99).unwrap_or(f64::NAN),
            changes,
        })
    }
}

fn rows(found: &[[Vec<Reading>; SIDES.len()]; Trick::ALL.len()]) -> Vec<Row> {
    let mut rows = Vec::new();
    for (trick, sides) in Trick::ALL.into_iter().zip(found) {
        let mut row = |what: &str, unit, goal, of: fn(&Reading) -> f64| {
            let mut row = Row::new(format!("{}: {what}", trick.name()), unit);
            for (side, readings) in SIDES.into_iter().zip(sides) {
                row = row.side(side.name(), readings.iter().map(of));
            }
            rows.push(row.against("auto", "stock").goal(goal, "auto"));
        };
        let fair = 100.0 / VMS as f64;
        row(
            "its part of the core",
            "%",
            Goal::FigureAtMost(fair + POINTS),
            |r| r.share,
        );
        row("work of the others", "units/s", Goal::AtLeast(0.98), |r| {
            r.work
        });
        row("ping of another one, p50", "ms", Goal::AtMost(1.05), |r| {
            r.p50
        });
        row("ping of another one, p99", "ms", Goal::AtMost(1.05), |r| {
            r.p99
        });
        row(
            "changes of class",
            "changes",
            Goal::FigureAtMost(4.0),
            |r| r.changes as f64,
        );
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deceiver_that_gains_misses_its_goal() {
        let of = |share, work| Reading {
            share,
            work,
            p50: 4.0,
            p99: 12.0,
            changes: 2,
        };
        let cell = |auto| [vec![of(25.0, 900.0)], vec![auto]];
        let found = [
            cell(of(25.5, 890.0)),
            cell(of(27.0, 890.0)),
            cell(of(25.0, 870.0)),
        ];
        let rows = rows(&found);
        let met = |name: &str| rows.iter().find(|row| row.name == name).unwrap().met;
        assert_eq!(met("packets to itself: its part of the core"), Some(true));
        assert_eq!(met("flood: its part of the core"), Some(false));
        assert_eq!(met("packets to itself: work of the others"), Some(true));
        assert_eq!(
            met("alternates each second: work of the others"),
            Some(false)
        );
    }
}
