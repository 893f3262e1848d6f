// SPDX-License-Identifier: Apache-2.0
//! The demo's measurements.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::charts::timeline::Stretch;
use crate::harness::cell::{self, Reading, Times};
use crate::harness::cpu::ThreadSampler;
use crate::harness::guests::{self, Guests, OwnWork, WEB};
use crate::harness::load::{self, Capacity, Load, LoadOptions, LoadReading};
use crate::harness::progress::{Progress, clock};
use crate::harness::side::{Active, Guests as Settings, Side};
use crate::harness::trace::{self, CoreTrace};
use crate::harness::vmm::GuestKind;
use viola_cli::error::Outcome;
use viola_report::stats::Sorted;

/// Guests on the core.
pub const VMS: usize = 4;
/// The sides, in the order of the tables.
pub const SIDES: [Side; 3] = [Side::Stock, Side::Credit, Side::Viola(300)];
/// States of the web server: busy with its own work, or idle between requests.
pub const STATES: [bool; 2] = [true, false];

/// HTTP loads: inside the web server's share of the core, near it, and above it.
pub const LOADS: [Load; 3] = [
    Load::Open(50),
    Load::Open(90),
    Load::Closed {
        connections: 16,
        keep_alive: true,
    },
];

const TIMES: Times = Times::of(200, 1800, 800, 0);
const LOAD_TIME: Duration = Duration::from_millis(1000);
/// Time around a load, for counting the neighbours' work.
const AROUND_LOAD_TIME: Duration = Duration::from_millis(250);
const CAPACITY_TIME: Duration = Duration::from_millis(1500);
const SWITCH_TIME: Duration = Duration::from_millis(900);
const BOOT_TIME: Duration = Duration::from_secs(3);
/// Length of the core trace for the timeline.
const TRACE_TIME: Duration = Duration::from_millis(200);

/// All readings of a demo run.
#[derive(Debug, Default)]
pub struct Measured {
    /// Readings by state of the web server (busy or not) and side, one per round.
    pub cells: BTreeMap<(bool, Side), Vec<Reading>>,
    /// Readings of the HTTP loads, by state, side and load.
    pub loads: BTreeMap<(bool, Side, Load), Vec<LoadReading>>,
    /// Requests per second that the web server's share of the core serves, measured under stock scheduling.
    pub share_per_s: f64,
    /// Number of loads that were left out because the load generator was late itself.
    pub refused: usize,
    /// Timeline of the core by side; empty where the kernel allows no trace.
    pub timelines: Vec<Vec<Stretch>>,
    /// Version of the guests' kernel.
    pub kernel: String,
    /// Number of rounds.
    pub rounds: usize,
    /// Duration of the run.
    pub took: Duration,
}

impl Measured {
    /// Boots the guests and measures all sides, in a different order each round.
    pub fn measure(rounds: usize, core: usize, kind: GuestKind) -> Outcome<Self> {
        let started = Instant::now();
        let cells = SIDES.len() * STATES.len() * rounds;
        let cell = TIMES.cell() + (LOAD_TIME + AROUND_LOAD_TIME) * LOADS.len() as u32;
        let total = BOOT_TIME
            + CAPACITY_TIME
            + cell * cells as u32
            + SWITCH_TIME * (SIDES.len() * rounds) as u32;
        let mut progress = Progress::new(total);
        progress.say(&format!(
            "demo: four guests on core {core}, {rounds} rounds, about {}",
            clock(total)
        ));
        progress.step("booting four guests", BOOT_TIME);
        let mut guests = guests::boot("demo", VMS, core, kind)?;
        let mut sampler = ThreadSampler::new()?;
        let mut measured = Self {
            kernel: guests.kernel()?,
            rounds,
            ..Self::default()
        };
        measured.timelines = vec![Vec::new(); SIDES.len()];
        progress.step("what a core serves", CAPACITY_TIME);
        guests.serve(1, OwnWork::Nothing, 100)?;
        let capacity = Capacity::measure(&guests, &mut sampler, CAPACITY_TIME, 1)?;
        let share = 1.0 / VMS as f64;
        measured.share_per_s = capacity.0 * share;
        let settings = Settings::equal(core, WEB);
        for round in 0..rounds {
            for turn in 0..SIDES.len() {
                let number = (round + turn) % SIDES.len();
                let side = SIDES[number];
                let label = format!("round {} of {rounds}: {}", round + 1, side.name());
                progress.step(&label, SWITCH_TIME);
                let active = Active::start(side, &settings, &guests.lab)?;
                for busy in STATES {
                    let what = if busy { "web busy" } else { "web idle" };
                    progress.step(&format!("{label}, {what}"), cell);
                    guests.keep_busy(busy, 100)?;
                    let seed = 1 + round as u64;
                    let reading = cell::measure(&guests, &active, &mut sampler, &TIMES, seed)?;
                    measured
                        .cells
                        .entry((busy, side))
                        .or_default()
                        .push(reading);
                    for load in LOADS {
                        let options = LoadOptions {
                            load,
                            servers: 1,
                            rate: capacity.rate(load, share),
                            time: LOAD_TIME,
                            seed,
                        };
                        match load::measure(&guests, &mut sampler, &options)? {
                            Ok(reading) => measured.add_load(busy, side, load, reading),
                            Err(why) => {
                                measured.refused += 1;
                                progress.say(&format!("left out: {label}, {}: {why}", load.name()));
                            }
                        }
                    }
                    if busy && round + 1 == rounds {
                        measured.timelines[number] = trace_core(core, &guests, &mut sampler)?;
                    }
                }
                active.stop()?;
            }
        }
        guests.down()?;
        measured.took = started.elapsed();
        Ok(measured)
    }

    /// Readings of a cell, one per round.
    pub fn readings(&self, busy: bool, side: Side) -> &[Reading] {
        self.cells.get(&(busy, side)).map_or(&[], Vec::as_slice)
    }

    /// Latencies of all rounds, pooled.
    pub fn pooled(&self, busy: bool, side: Side, latency: fn(&Reading) -> &Sorted) -> Sorted {
        Sorted::pooled(self.readings(busy, side).iter().map(latency))
    }

    /// Readings of a load, one per round.
    pub fn load_readings(&self, busy: bool, side: Side, load: Load) -> &[LoadReading] {
        self.loads
            .get(&(busy, side, load))
            .map_or(&[], Vec::as_slice)
    }

    /// Latencies of a load in all rounds, pooled.
    pub fn pooled_load(&self, busy: bool, side: Side, load: Load) -> Sorted {
        let readings = self.load_readings(busy, side, load);
        Sorted::pooled(readings.iter().map(|r| &r.latency))
    }

    /// Adds a reading of a load.
    pub fn add_load(&mut self, busy: bool, side: Side, load: Load, reading: LoadReading) {
        let of_load = self.loads.entry((busy, side, load)).or_default();
        of_load.push(reading);
    }

    /// One sentence on the rates of the loads.
    pub fn rates(&self) -> String {
        format!(
            "Open loop 50 % and 90 %: requests come at moments fixed beforehand, at that part of what web's share of the \
             core serves ({:.0}/s here), whether earlier ones were answered or not. Closed loop 16: 16 connections ask \
             again as soon as they have their answer, which is more than the share",
            self.share_per_s
        )
    }

    /// Each guest's share of the core (0..=1), mean over all rounds.
    pub fn shares(&self, busy: bool, side: Side) -> Vec<f64> {
        let readings = self.readings(busy, side);
        let mean = |vm: usize| {
            readings
                .iter()
                .filter_map(|r| r.shares.get(vm))
                .sum::<f64>()
                / readings.len() as f64
        };
        (0..VMS).map(mean).collect()
    }

    #[cfg(test)]
    pub fn add(&mut self, busy: bool, side: Side, reading: Reading) {
        self.cells.entry((busy, side)).or_default().push(reading);
    }
}

/// Traces the core for [`TRACE_TIME`]. Returns an empty timeline if the kernel allows no trace.
fn trace_core(core: usize, guests: &Guests, sampler: &mut ThreadSampler) -> Outcome<Vec<Stretch>> {
    let Ok(mut trace) = CoreTrace::start(core) else {
        return Ok(Vec::new());
    };
    std::thread::sleep(TRACE_TIME);
    trace.read();
    let owners = sampler.owners(&guests.pids())?;
    Ok(trace::stretches(&trace.switches, &owners, VMS))
}
