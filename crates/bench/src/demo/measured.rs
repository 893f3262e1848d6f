// SPDX-License-Identifier: Apache-2.0
//! The demo's measurements.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::charts::timeline::Stretch;
use crate::harness::cell::{self, Reading, Times};
use crate::harness::cpu::ThreadSampler;
use crate::harness::guests::{self, Guests, WEB};
use crate::harness::progress::{Progress, clock};
use crate::harness::side::{Active, Guests as Settings, Side};
use crate::harness::trace::{self, CoreTrace};
use viola_cli::error::Outcome;
use viola_report::stats::Sorted;

/// Guests on the core.
pub const VMS: usize = 4;
/// The sides, in the order of the tables.
pub const SIDES: [Side; 3] = [Side::Stock, Side::Credit, Side::Viola(300)];
/// States of the web server: busy with its own work, or idle between requests.
pub const STATES: [bool; 2] = [true, false];

const TIMES: Times = Times::of(200, 2300, 1000, 1000);
const SWITCH_TIME: Duration = Duration::from_millis(900);
const BOOT_TIME: Duration = Duration::from_secs(3);
/// Length of the core trace for the timeline.
const TRACE_TIME: Duration = Duration::from_millis(200);

/// All readings of a demo run.
#[derive(Debug, Default)]
pub struct Measured {
    /// Readings by state of the web server (busy or not) and side, one per round.
    pub cells: BTreeMap<(bool, Side), Vec<Reading>>,
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
    pub fn measure(rounds: usize, core: usize) -> Outcome<Self> {
        let started = Instant::now();
        let cells = SIDES.len() * STATES.len() * rounds;
        let total =
            BOOT_TIME + TIMES.cell() * cells as u32 + SWITCH_TIME * (SIDES.len() * rounds) as u32;
        let mut progress = Progress::new(total);
        progress.say(&format!(
            "demo: four guests on core {core}, {rounds} rounds, about {}",
            clock(total)
        ));
        progress.step("booting four guests", BOOT_TIME);
        let mut guests = guests::boot("demo", VMS, core)?;
        let mut sampler = ThreadSampler::new()?;
        let mut measured = Self {
            kernel: guests.kernel()?,
            rounds,
            ..Self::default()
        };
        measured.timelines = vec![Vec::new(); SIDES.len()];
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
                    progress.step(&format!("{label}, {what}"), TIMES.cell());
                    guests.keep_busy(busy, 100)?;
                    let reading =
                        cell::measure(&guests, &active, &mut sampler, &TIMES, 1 + round as u64)?;
                    measured
                        .cells
                        .entry((busy, side))
                        .or_default()
                        .push(reading);
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
