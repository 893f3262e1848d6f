// SPDX-License-Identifier: Apache-2.0
//! `viola-lab bench mixed`: eight guests with different roles on a core. The roles change twice, and viola is told neither what they are
//! nor that they change.
//!
//! Stock scheduling is compared with `auto = "on"`, one daemon for all phases, and with the best classes by hand: all sets of guests that wait
//! for packets are tried, in each phase.

mod roles;
mod rows;

use std::path::Path;
use std::time::{Duration, Instant};

use viola_lab::Spec;

use self::roles::{Reading, Role, Set, VMS};
use self::rows::{Measurements, Phase};
use crate::auto::{AUTO_TIME, CAPACITY_TIME, LOAD, MICROSLICE, WINDOW, WINDOWS};
use crate::harness::cpu::ThreadSampler;
use crate::harness::guests::{self, Guests, WEB};
use crate::harness::load::Capacity;
use crate::harness::progress::{Progress, clock};
use crate::harness::result::Results;
use crate::harness::side::{Active, Guests as Settings, Side, lab_failure};
use crate::harness::vmm::GuestKind;
use crate::options::GuestOptions;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;

/// Phases, in each of which the guests have other roles.
const PHASES: usize = 3;
/// Windows of a phase with each set of classes by hand.
const HAND_WINDOWS: usize = 2;
/// Boot of the guests, and the changes of roles and sides.
const AROUND_TIME: Duration = Duration::from_secs(60);

/// The compared sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Stock,
    ByHand,
    Auto,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Stock => "stock",
            Self::ByHand => "by hand",
            Self::Auto => "auto",
        }
    }
}

/// Runs the benchmark, prints the table and writes the result.
pub fn run(wanted: &GuestOptions) -> Outcome {
    let options = &wanted.options;
    if options.only.is_some() {
        return Err(Failure::usage("bench mixed has one cell; leave --only out"));
    }
    guests::split_cores(options.core)?;
    let rounds = options.rounds();
    let phases = if options.quick { 1 } else { PHASES };
    let fixed = WINDOWS + HAND_WINDOWS * Set::all().count();
    let round = AROUND_TIME + phases as u32 * (fixed as u32 * WINDOW + AUTO_TIME);
    let kind = wanted.guests.kind()?;
    let mut bench = Bench {
        kind,
        progress: Progress::new(round * rounds as u32),
        sampler: ThreadSampler::new()?,
        core: options.core,
        phases,
        capacity: None,
        found: Measurements::default(),
        kernel: String::new(),
        refused: 0,
    };
    let length = clock(round * rounds as u32);
    bench
        .progress
        .say(&format!("mixed: {rounds} rounds, about {length}"));
    for number in 0..rounds {
        bench.round(number, rounds)?;
    }
    let mut results = Results::new(rounds, &bench.kernel, bench.found.rows());
    results.left_out(bench.refused);
    let path = wanted.path("mixed", kind, !options.quick && rounds >= 5);
    drop(bench);
    results.publish(&kind.result("mixed"), &path)
}

struct Bench {
    kind: GuestKind,
    progress: Progress,
    sampler: ThreadSampler,
    core: usize,
    phases: usize,
    /// What a core serves, the same in all rounds.
    capacity: Option<Capacity>,
    found: Measurements,
    kernel: String,
    /// Windows that were left out.
    refused: usize,
}

impl Bench {
    fn round(&mut self, number: usize, rounds: usize) -> Outcome {
        let label = format!("round {} of {rounds}", number + 1);
        self.progress.step(&format!("{label}: boot"), AROUND_TIME);
        let guests = self.boot()?;
        let seed = 1_000 * (1 + number as u64);
        roles::begin_phase(&guests, 0)?;
        let capacity = match self.capacity {
            Some(capacity) => capacity,
            None => Capacity::measure(&guests, &mut self.sampler, CAPACITY_TIME, seed)?,
        };
        self.capacity = Some(capacity);
        roles::end(&guests, 0)?;
        let rate = capacity.rate(LOAD, 1.0 / VMS as f64);
        let mut order = [Way::Stock, Way::ByHand, Way::Auto];
        let turn = number % order.len();
        order.rotate_left(turn);
        for way in order {
            let label = format!("{label}: {}", way.name());
            match way {
                Way::Stock => self.stock(&label, &guests, rate, seed)?,
                Way::ByHand => self.by_hand(&label, &guests, rate, seed)?,
                Way::Auto => self.auto(&label, &guests, rate, seed)?,
            }
        }
        guests.down()
    }

    fn boot(&mut self) -> Outcome<Guests> {
        let mut text = format!("[lab]\nname = \"bench-mixed\"\n{}", self.kind.lab_keys());
        for name in guests::names(VMS) {
            text.push_str(&format!(
                "\n[[guest]]\nname = \"{name}\"\ncores = [{}]\n{}",
                self.core,
                roles::SERVERS
            ));
        }
        let spec = Spec::from_toml(&text, "bench-mixed", Path::new(".")).map_err(lab_failure)?;
        let guests = guests::boot_spec(&spec, self.core)?;
        if self.kernel.is_empty() {
            self.kernel = guests.kernel()?;
        }
        Ok(guests)
    }

    /// All phases under stock scheduling.
    fn stock(&mut self, label: &str, guests: &Guests, rate: f64, seed: u64) -> Outcome {
        for phase in 0..self.phases {
            roles::begin_phase(guests, phase)?;
            let windows = self.windows(label, guests, phase, (rate, seed), WINDOWS)?;
            self.found.stock.push(windows);
        }
        roles::end(guests, self.phases - 1)
    }

    /// All phases with each set of classes.
    fn by_hand(&mut self, label: &str, guests: &Guests, rate: f64, seed: u64) -> Outcome {
        for phase in 0..self.phases {
            roles::begin_phase(guests, phase)?;
            for set in Set::all() {
                let label = format!("{label}: {set}");
                let settings = self.settings(|role| set.has(role), phase);
                let active = Active::start(Side::Viola(MICROSLICE), &settings, &guests.lab)?;
                let windows = self.windows(&label, guests, phase, (rate, seed), HAND_WINDOWS)?;
                active.stop()?;
                self.found.by_hand.entry(set).or_default().push(windows);
            }
        }
        roles::end(guests, self.phases - 1)
    }

    /// So many windows of a side that does not change; one that is left out is measured once more.
    fn windows(
        &mut self,
        label: &str,
        guests: &Guests,
        phase: usize,
        (rate, seed): (f64, u64),
        count: usize,
    ) -> Outcome<Phase> {
        let mut windows = Vec::new();
        for number in 0..2 * count {
            if windows.len() == count {
                break;
            }
            self.progress.step(label, WINDOW);
            let seed = seed + (100 * phase + number) as u64;
            let end = (number + 1) as u32 * WINDOW;
            let reading = self.window(label, guests, phase, rate, seed)?;
            windows.extend(reading.map(|reading| (end, reading)));
        }
        Ok(Phase::new(windows))
    }

    /// All phases while viola chooses: the windows, and what it changed.
    fn auto(&mut self, label: &str, guests: &Guests, rate: f64, seed: u64) -> Outcome {
        let active = Active::start(Side::Auto, &self.settings(|_| false, 0), &guests.lab)?;
        for phase in 0..self.phases {
            roles::begin_phase(guests, phase)?;
            let (begin, begin_ms) = (Instant::now(), viola_cli::log::now_ms());
            let (mut windows, mut number) = (Vec::new(), 0);
            while begin.elapsed() < AUTO_TIME {
                self.progress.step(label, WINDOW);
                number += 1;
                let seed = seed + 100 * phase as u64 + number;
                let reading = self.window(label, guests, phase, rate, seed)?;
                windows.extend(reading.map(|reading| (begin.elapsed(), reading)));
            }
            let mut measured = Phase::new(windows);
            let label = format!("{label}: phase {}", phase + 1);
            for line in measured.take_changes(&active.events()?, begin_ms) {
                self.progress.say(&format!("{label}: {line}"));
            }
            self.progress.say(&format!("{label}: {}", measured.text()));
            self.found.auto.push(measured);
        }
        roles::end(guests, self.phases - 1)?;
        active.stop()
    }

    /// Measures a window; `None` if the load generator was late itself.
    fn window(
        &mut self,
        label: &str,
        guests: &Guests,
        phase: usize,
        rate: f64,
        seed: u64,
    ) -> Outcome<Option<Reading>> {
        interrupt::check()?;
        match roles::measure(guests, phase, rate, WINDOW, seed)? {
            Ok(reading) => Ok(Some(reading)),
            Err(late) => {
                self.refused += 1;
                self.progress.say(&format!("left out: {label}: {late}"));
                Ok(None)
            }
        }
    }

    /// Class ls for the guests whose role in the phase it suits.
    fn settings(&self, suits: impl Fn(Role) -> bool, phase: usize) -> Settings {
        let names = guests::names(VMS).into_iter().enumerate();
        Settings {
            ls: names
                .filter(|(at, _)| suits(Role::of(*at, phase)))
                .map(|(_, name)| name)
                .collect(),
            ..Settings::equal(self.core, WEB)
        }
    }
}
