// SPDX-License-Identifier: Apache-2.0
//! `viola-lab bench auto`: what guests gain when viola chooses their classes itself, and nobody tells it what they do.
//!
//! Five guests share a core: two web servers that are asked in an open loop, and three that compute. Stock scheduling is compared
//! with classes set by hand and with `auto = "on"`, from the first request on.

mod rows;

pub use rows::{MINUTE, THREE_MINUTES, changes};

use std::time::{Duration, Instant};

use rows::{AutoReading, Measurements};

use crate::harness::cpu::ThreadSampler;
use crate::harness::guests::{self, Guests, OwnWork, WEB};
use crate::harness::load::{self, Capacity, Load, LoadOptions, LoadReading};
use crate::harness::progress::Progress;
use crate::harness::result::Results;
use crate::harness::side::{Active, Guests as Settings, Side};
use crate::harness::vmm::GuestKind;
use crate::options::GuestOptions;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;

/// Guests; the first [`SERVERS`] of them are web servers.
const VMS: usize = 5;
const SERVERS: usize = 2;
/// The servers' load: this part, in percent, of what their share of the core can serve.
pub const LOAD: Load = Load::Open(50);
/// Length of a window of the load.
pub const WINDOW: Duration = Duration::from_secs(10);
/// Windows under stock scheduling and by hand.
pub const WINDOWS: usize = 4;
/// Time that viola gets to choose: three minutes, and a minute more in which its choice is measured.
pub const AUTO_TIME: Duration = Duration::from_secs(240);
/// Time for which nothing must change when all guests compute.
const COMPUTE_TIME: Duration = Duration::from_secs(30);
/// Time in which is measured what a core serves.
pub const CAPACITY_TIME: Duration = Duration::from_millis(1500);
/// Boot of the guests, and the change of sides.
const AROUND_TIME: Duration = Duration::from_secs(25);
/// viola's microslice by hand: the default, microseconds.
pub const MICROSLICE: u32 = 300;

/// The compared sides.
const SIDES: [Side; 3] = [Side::Stock, Side::Viola(MICROSLICE), Side::Auto];

/// Runs the benchmark, prints the table and writes the result.
pub fn run(wanted: &GuestOptions) -> Outcome {
    let options = &wanted.options;
    if options.only.is_some() {
        return Err(Failure::usage("bench auto has one cell; leave --only out"));
    }
    guests::split_cores(options.core)?;
    let rounds = options.rounds();
    let auto_time = AUTO_TIME / if options.quick { 2 } else { 1 };
    let round = AROUND_TIME + 2 * WINDOWS as u32 * WINDOW + auto_time + COMPUTE_TIME;
    let kind = wanted.guests.kind()?;
    let mut bench = Bench {
        kind,
        progress: Progress::new(round * rounds as u32),
        sampler: ThreadSampler::new()?,
        core: options.core,
        auto_time,
        capacity: None,
        found: Measurements::default(),
        kernel: String::new(),
    };
    bench.progress.announce("auto", rounds);
    for number in 0..rounds {
        bench.round(number, rounds)?;
    }
    let mut results = Results::new(rounds, &bench.kernel, bench.found.rows());
    results.left_out(bench.found.refused);
    let path = wanted.path("auto", kind, !options.quick && rounds >= 5);
    drop(bench);
    results.publish(&kind.result("auto"), &path)
}

struct Bench {
    kind: GuestKind,
    progress: Progress,
    sampler: ThreadSampler,
    core: usize,
    auto_time: Duration,
    /// What a core serves, the same in all rounds.
    capacity: Option<Capacity>,
    found: Measurements,
    kernel: String,
}

impl Bench {
    fn round(&mut self, number: usize, rounds: usize) -> Outcome {
        let label = format!("round {} of {rounds}", number + 1);
        self.progress.step(&format!("{label}: boot"), AROUND_TIME);
        let mut guests = guests::boot("bench-auto", VMS, self.core, self.kind)?;
        if self.kernel.is_empty() {
            self.kernel = guests.kernel()?;
        }
        let seed = 1 + number as u64;
        guests.serve(SERVERS, OwnWork::Nothing, 100)?;
        let capacity = match self.capacity {
            Some(capacity) => capacity,
            None => Capacity::measure(&guests, &mut self.sampler, CAPACITY_TIME, seed)?,
        };
        self.capacity = Some(capacity);
        let load = LoadOptions {
            load: LOAD,
            servers: SERVERS,
            rate: capacity.rate(LOAD, 1.0 / VMS as f64),
            time: WINDOW,
            seed,
        };
        let mut order = SIDES;
        order.rotate_left(number % SIDES.len());
        for side in order {
            interrupt::check()?;
            let label = format!("{label}: {}", rows::name(side));
            match side {
                Side::Auto => self.auto(&label, &guests, &load)?,
                _ => self.fixed(&label, side, &guests, &load)?,
            }
        }
        self.compute(&label, &mut guests)?;
        guests.down()
    }

    /// Some windows of a side that does not change; one that is left out is measured once more.
    fn fixed(&mut self, label: &str, side: Side, guests: &Guests, load: &LoadOptions) -> Outcome {
        let active = Active::start(side, &self.settings(side), &guests.lab)?;
        let mut measured = 0;
        for number in 0..2 * WINDOWS {
            if measured == WINDOWS {
                break;
            }
            self.progress.step(label, WINDOW);
            if let Some(reading) = self.window(label, guests, load, number)? {
                self.found.add(reading);
                measured += 1;
            }
        }
        self.found.end_round(side);
        active.stop()
    }

    /// viola chooses: all windows, and what it changed when.
    fn auto(&mut self, label: &str, guests: &Guests, load: &LoadOptions) -> Outcome {
        let active = Active::start(Side::Auto, &self.settings(Side::Auto), &guests.lab)?;
        let (begin, begin_ms) = (Instant::now(), viola_cli::log::now_ms());
        let (mut windows, mut number) = (Vec::new(), 0);
        while begin.elapsed() < self.auto_time {
            self.progress.step(label, WINDOW);
            number += 1;
            if let Some(reading) = self.window(label, guests, load, number)? {
                windows.push((begin.elapsed(), reading));
            }
        }
        let reading = AutoReading::new(windows, &active.events()?, begin_ms);
        self.progress.say(&format!("{label}: {}", reading.text()));
        self.found.autos.push(reading);
        active.stop()
    }

    /// All guests compute: nothing is to be gained.
    fn compute(&mut self, label: &str, guests: &mut Guests) -> Outcome {
        self.progress
            .step(&format!("{label}: all compute"), COMPUTE_TIME);
        guests.serve(0, OwnWork::Nothing, 100)?;
        let active = Active::start(Side::Auto, &self.settings(Side::Auto), &guests.lab)?;
        interrupt::sleep(COMPUTE_TIME);
        interrupt::check()?;
        let changes = rows::changes(&active.events()?).len();
        self.found.needless.push(changes as f64);
        active.stop()
    }

    /// Measures a window; `None` if the load generator was late itself.
    fn window(
        &mut self,
        label: &str,
        guests: &Guests,
        load: &LoadOptions,
        number: usize,
    ) -> Outcome<Option<LoadReading>> {
        let load = LoadOptions {
            seed: load.seed * 100 + number as u64,
            ..*load
        };
        match load::measure(guests, &mut self.sampler, &load)? {
            Ok(reading) => Ok(Some(reading)),
            Err(late) => {
                self.found.refused += 1;
                self.progress.say(&format!("left out: {label}: {late}"));
                Ok(None)
            }
        }
    }

    fn settings(&self, side: Side) -> Settings {
        let servers = guests::names(VMS).into_iter().take(SERVERS).collect();
        Settings {
            ls: match side {
                Side::Auto => Vec::new(),
                _ => servers,
            },
            ..Settings::equal(self.core, WEB)
        }
    }
}
