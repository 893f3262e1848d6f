// SPDX-License-Identifier: Apache-2.0
//! `viola-lab bench mixed`: nine guests with different roles on a core. The roles change twice, and viola is told neither what they are
//! nor that they change.
//!
//! Stock scheduling is compared with `auto = "on"`, one daemon for all phases, and with the best classes by hand: in the first round all
//! sets of guests that wait for packets are tried.

mod bed;
mod roles;
mod rows;

use std::time::{Duration, Instant};

use self::bed::Bed;
use self::roles::{Rates, Reading, Role, Set, VMS};
use self::rows::{Measurements, Phase};
use crate::auto::{AUTO_TIME, MICROSLICE, WINDOW, WINDOWS};
use crate::harness::cpu::ThreadSampler;
use crate::harness::guests::{self, WEB};
use crate::harness::progress::Progress;
use crate::harness::result::Results;
use crate::harness::side::{Active, Guests as Settings, Side};
use crate::harness::vmm::GuestKind;
use crate::options::GuestOptions;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;

/// Phases, in each of which the guests have other roles.
const PHASES: usize = 3;
/// Windows of a phase with each set of classes by hand, in the first round.
const HAND_WINDOWS: usize = 2;
/// Boot of the guests, and the changes of roles and sides.
const AROUND_TIME: Duration = Duration::from_secs(120);

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
    let round = AROUND_TIME + phases as u32 * (2 * WINDOWS as u32 * WINDOW + AUTO_TIME);
    let more = (HAND_WINDOWS * Set::all().count() - WINDOWS) * phases;
    let total = round * rounds as u32 + more as u32 * WINDOW;
    let kind = wanted.guests.kind()?;
    let mut bench = Bench {
        kind,
        progress: Progress::new(total),
        sampler: ThreadSampler::new()?,
        core: options.core,
        phases,
        rates: None,
        found: Measurements::default(),
        kernel: String::new(),
        refused: 0,
    };
    bench.progress.announce("mixed", rounds);
    if kind != GuestKind::Uml {
        let why = "HDFS is left out: only UML guests have its Java; two guests more do nothing";
        bench.progress.say(why);
    }
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
    /// Requests per second, the same in all rounds.
    rates: Option<Rates>,
    found: Measurements,
    kernel: String,
    /// Windows that were left out.
    refused: usize,
}

impl Bench {
    fn round(&mut self, number: usize, rounds: usize) -> Outcome {
        let label = format!("round {} of {rounds}", number + 1);
        self.progress.step(&format!("{label}: boot"), AROUND_TIME);
        let mut bed = Bed::boot(self.core, self.kind)?;
        if self.kernel.is_empty() {
            self.kernel = bed.guests.kernel()?;
        }
        let seed = 1_000 * (1 + number as u64);
        roles::begin_phase(&bed.guests, 0)?;
        let rates = match self.rates {
            Some(rates) => rates,
            None => Rates::measure(&bed, &mut self.sampler, seed)?,
        };
        self.rates = Some(rates);
        roles::end(&bed.guests, 0)?;
        let mut order = [Way::Stock, Way::ByHand, Way::Auto];
        let turn = number % order.len();
        order.rotate_left(turn);
        for way in order {
            let label = format!("{label}: {}", way.name());
            match way {
                Way::Stock => self.stock(&label, &mut bed, rates, seed)?,
                Way::ByHand => self.by_hand(&label, &mut bed, rates, seed)?,
                Way::Auto => self.auto(&label, &mut bed, rates, seed)?,
            }
        }
        if self.found.best.is_none() {
            self.found.choose();
            let best = self.found.best.map(|set| set.to_string());
            let best = best.unwrap_or_default();
            self.progress
                .say(&format!("by hand: class ls for {best} is best"));
        }
        bed.down()
    }

    /// All phases under stock scheduling.
    fn stock(&mut self, label: &str, bed: &mut Bed, rates: Rates, seed: u64) -> Outcome {
        for phase in 0..self.phases {
            roles::begin_phase(&bed.guests, phase)?;
            let windows = self.windows(label, bed, phase, (rates, seed), WINDOWS)?;
            self.found.stock.push(windows);
        }
        roles::end(&bed.guests, self.phases - 1)
    }

    /// All phases with each set of classes, or with the best one once it is known.
    fn by_hand(&mut self, label: &str, bed: &mut Bed, rates: Rates, seed: u64) -> Outcome {
        let (sets, count): (Vec<Set>, usize) = match self.found.best {
            Some(best) => (vec![best], WINDOWS),
            None => (Set::all().collect(), HAND_WINDOWS),
        };
        for phase in 0..self.phases {
            roles::begin_phase(&bed.guests, phase)?;
            for &set in &sets {
                let label = format!("{label}: {set}");
                let settings = self.settings(|role| set.has(role), phase);
                let active = Active::start(Side::Viola(MICROSLICE), &settings, &bed.guests.lab)?;
                let windows = self.windows(&label, bed, phase, (rates, seed), count)?;
                active.stop()?;
                self.found.by_hand.entry(set).or_default().push(windows);
            }
        }
        roles::end(&bed.guests, self.phases - 1)
    }

    /// So many windows of a side that does not change; one that is left out is measured once more.
    fn windows(
        &mut self,
        label: &str,
        bed: &mut Bed,
        phase: usize,
        (rates, seed): (Rates, u64),
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
            let reading = self.window(label, bed, phase, rates, seed)?;
            windows.extend(reading.map(|reading| (end, reading)));
        }
        Ok(Phase::new(windows))
    }

    /// All phases while viola chooses: the windows, and what it changed.
    fn auto(&mut self, label: &str, bed: &mut Bed, rates: Rates, seed: u64) -> Outcome {
        let active = Active::start(Side::Auto, &self.settings(|_| false, 0), &bed.guests.lab)?;
        for phase in 0..self.phases {
            roles::begin_phase(&bed.guests, phase)?;
            let (begin, begin_ms) = (Instant::now(), viola_cli::log::now_ms());
            let (mut windows, mut number) = (Vec::new(), 0);
            while begin.elapsed() < AUTO_TIME {
                self.progress.step(label, WINDOW);
                number += 1;
                let seed = seed + 100 * phase as u64 + number;
                let reading = self.window(label, bed, phase, rates, seed)?;
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
        roles::end(&bed.guests, self.phases - 1)?;
        active.stop()
    }

    /// Measures a window; `None` if the load generator was late itself.
    fn window(
        &mut self,
        label: &str,
        bed: &mut Bed,
        phase: usize,
        rates: Rates,
        seed: u64,
    ) -> Outcome<Option<Reading>> {
        interrupt::check()?;
        match roles::measure(bed, phase, rates, WINDOW, seed)? {
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
