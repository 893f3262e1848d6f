// SPDX-License-Identifier: Apache-2.0
//! `viola-lab bench slices`: measures how long requests to a guest on a shared core wait under stock scheduling, the
//! papers' slices and viola, and the cost to the other guests.

mod extras;
mod figures;
mod first;
mod plan;

use std::time::Duration;

use figures::Readings;
use plan::{Plan, SWITCH_TIME, State, order};

use crate::Options;
use crate::harness::cell::{self, Times};
use crate::harness::cpu::ThreadSampler;
use crate::harness::guests::WEB;
use crate::harness::guests::{self, Guests};
use crate::harness::progress::{Progress, clock};
use crate::harness::result::{Causes, Results};
use crate::harness::row;
use crate::harness::side::{Active, Guests as Settings, Side};
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;
use viola_cli::table;

/// Runs the benchmark, prints the table and writes the result.
pub fn run(options: &Options) -> Outcome {
    let plan = Plan::new(options.rounds(), options.quick, options.only.as_deref());
    if plan.is_empty() {
        let only = options.only.as_deref().unwrap_or_default();
        return Err(Failure::usage(format!(
            "no cell name contains `{only}`; try busy, idle, 5 VMs, 40 % or flood"
        )));
    }
    guests::split_cores(options.core)?;
    let mut bench = Bench {
        progress: Progress::new(plan.estimate()),
        sampler: ThreadSampler::new()?,
        core: options.core,
        cells: Readings::default(),
        extras: extras::Measurements::default(),
        kernel: String::new(),
        plan,
    };
    bench.progress.say(&format!(
        "slices: {} rounds, about {}",
        bench.plan.rounds,
        clock(bench.plan.estimate())
    ));
    for round in 0..bench.plan.rounds {
        for vms in bench.plan.labs() {
            bench.lab(round, vms)?;
        }
    }
    let mut rows = bench.cells.rows(&bench.plan);
    rows.extend(bench.extras.rows());
    let mut results = Results::new(bench.plan.rounds, &bench.kernel, rows);
    results.disturbed = cell::disturbance(bench.cells.readings());
    results.explain(&Causes::read("bench/why-slices.toml".as_ref())?);
    let path = options.path(
        "slices",
        bench.plan.is_whole() && !options.quick && bench.plan.rounds >= 5,
    );
    drop(bench);
    results.write(&path)?;
    table::print(&row::table(&results.rows).text())?;
    table::print(&results.summary(&path, "why-slices.toml"))
}

struct Bench {
    plan: Plan,
    core: usize,
    progress: Progress,
    sampler: ThreadSampler,
    cells: Readings,
    extras: extras::Measurements,
    kernel: String,
}

impl Bench {
    /// One round of everything that needs a lab of this many guests.
    fn lab(&mut self, round: usize, vms: usize) -> Outcome {
        interrupt::check()?;
        let label = format!("round {} of {}: {vms} guests", round + 1, self.plan.rounds);
        self.progress
            .step(&format!("{label}, boot"), plan::BOOT_TIME);
        let mut guests = guests::boot("bench-slices", vms, self.core)?;
        if self.kernel.is_empty() {
            self.kernel = guests.kernel()?;
        }
        let settings = Settings::equal(self.core, WEB);
        let todo: Vec<_> = self.plan.of_lab(vms).cloned().collect();
        for side in order(round) {
            if todo.is_empty() {
                break;
            }
            let label = format!("{label}, {}", side.name());
            self.progress.step(&label, SWITCH_TIME);
            let active = Active::start(side, &settings, &guests.lab)?;
            for (group, states) in &todo {
                for state in states {
                    self.progress.step(
                        &format!("{label}, {}, {}", state.name(), group.name()),
                        self.plan.times.cell(),
                    );
                    guests.keep_busy(*state == State::Busy, group.duty)?;
                    let reading = cell::measure(
                        &guests,
                        &active,
                        &mut self.sampler,
                        &self.plan.times,
                        seed(round),
                    )?;
                    self.cells.add(*group, *state, side, reading);
                }
            }
            active.stop()?;
        }
        if self.plan.alone(vms) {
            self.progress
                .step(&format!("{label}, alone"), self.plan.times.cell());
            guests.keep_busy(false, 0)?;
            let active = Active::start(Side::Stock, &settings, &guests.lab)?;
            let reading = cell::measure(
                &guests,
                &active,
                &mut self.sampler,
                &self.plan.times,
                seed(round),
            )?;
            self.cells.add_alone(vms, reading);
            active.stop()?;
        }
        if vms == 4 {
            self.extras(round, &mut guests)?;
        }
        guests.down()
    }

    fn extras(&mut self, round: usize, guests: &mut Guests) -> Outcome {
        for extra in self.plan.extras.clone() {
            let once = extra == plan::Extra::First;
            if once && round > 0 {
                continue;
            }
            let length = if once {
                self.plan.first_time() * 2
            } else {
                self.plan.times.only_ping().cell()
            };
            let label = format!(
                "round {} of {}: {}",
                round + 1,
                self.plan.rounds,
                extra.name()
            );
            self.progress.step(&label, length + SWITCH_TIME);
            let job = extras::ExtraOptions {
                core: self.core,
                times: self.plan.times.only_ping(),
                pings: self.plan.pings,
                seed: seed(round),
            };
            self.extras
                .measure(extra, &job, guests, &mut self.sampler)?;
        }
        Ok(())
    }
}

/// Seed of a round: the same intervals on all sides.
fn seed(round: usize) -> u64 {
    1 + round as u64
}

/// Time that the flood runs before and after its cell.
fn around(times: &Times) -> Duration {
    times.cell() + Duration::from_millis(200)
}
