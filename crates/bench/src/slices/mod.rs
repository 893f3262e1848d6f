// SPDX-License-Identifier: Apache-2.0
//! `viola-lab bench slices`: measures how long requests to a guest on a shared core wait under stock scheduling, the
//! papers' slices and viola, and the cost to the other guests.
//!
//! HTTP requests come in an open loop, at moments fixed beforehand, for loads inside the guest's share, and in a closed
//! loop, which takes all that it gets, for loads above it. [`loads::cells`] says which loads are measured on which
//! guests, and why.

mod extras;
mod figures;
mod first;
mod loads;
mod plan;

use std::time::Duration;

use figures::Readings;
use loads::{BedRun, LoadReadings, LoadSide, Step};
use plan::{Lab, Plan, SWITCH_TIME, State, order};

use crate::harness::cell::{self, Times};
use crate::harness::cpu::ThreadSampler;
use crate::harness::guests::WEB;
use crate::harness::guests::{self, Guests};
use crate::harness::progress::Progress;
use crate::harness::result::Results;
use crate::harness::side::{Active, Guests as Settings, Side};
use crate::harness::vmm::GuestKind;
use crate::options::GuestOptions;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;

/// Runs the benchmark, prints the table and writes the result.
pub fn run(wanted: &GuestOptions) -> Outcome {
    let options = &wanted.options;
    let plan = Plan::new(options.rounds(), options.quick, options.only.as_deref());
    if plan.is_empty() {
        let only = options.only.as_deref().unwrap_or_default();
        return Err(Failure::usage(format!(
            "no cell name contains `{only}`; try pings, open loop, closed loop, busy, idle, 5 VMs, two LSVMs or flood"
        )));
    }
    guests::split_cores(options.core)?;
    let kind = wanted.guests.kind()?;
    let mut bench = Bench {
        kind,
        progress: Progress::new(plan.estimate()),
        sampler: ThreadSampler::new()?,
        core: options.core,
        cells: Readings::default(),
        loads: LoadReadings::default(),
        extras: extras::Measurements::default(),
        kernel: String::new(),
        plan,
    };
    bench.progress.announce("slices", bench.plan.rounds);
    for round in 0..bench.plan.rounds {
        for lab in bench.plan.labs() {
            bench.lab(round, lab)?;
        }
    }
    let mut rows = bench.cells.rows(&bench.plan);
    let loads = bench.loads.rows(&bench.plan.loads, loads::MICROSLICE);
    rows.extend(loads);
    rows.extend(bench.extras.rows());
    let mut results = Results::new(bench.plan.rounds, &bench.kernel, rows);
    let refused = (bench.loads.refused > 0).then(|| {
        format!(
            "{} HTTP loads were left out, because the load generator was late itself",
            bench.loads.refused
        )
    });
    let disturbed: Vec<String> = cell::disturbance(bench.cells.readings())
        .into_iter()
        .chain(refused)
        .collect();
    results.disturbed = (!disturbed.is_empty()).then(|| disturbed.join("; "));
    let path = wanted.path(
        "slices",
        kind,
        bench.plan.is_whole() && !options.quick && bench.plan.rounds >= 5,
    );
    drop(bench);
    results.publish(&kind.result("slices"), &path)
}

struct Bench {
    plan: Plan,
    kind: GuestKind,
    core: usize,
    progress: Progress,
    sampler: ThreadSampler,
    cells: Readings,
    loads: LoadReadings,
    extras: extras::Measurements,
    kernel: String,
}

impl Bench {
    /// One round of everything that needs this lab.
    fn lab(&mut self, round: usize, lab: Lab) -> Outcome {
        interrupt::check()?;
        let cores = if lab.has_two_cores {
            " on two cores"
        } else {
            ""
        };
        let label = format!(
            "round {} of {}: {} guests{cores}",
            round + 1,
            self.plan.rounds,
            lab.vms
        );
        self.progress
            .step(&format!("{label}, boot"), plan::BOOT_TIME);
        let mut guests = self.boot(lab)?;
        if self.kernel.is_empty() {
            self.kernel = guests.kernel()?;
        }
        self.groups(round, lab, &label, &mut guests)?;
        self.loads(round, lab, &label, &mut guests)?;
        self.extras(round, lab, &mut guests)?;
        guests.down()
    }

    fn boot(&self, lab: Lab) -> Outcome<Guests> {
        const NAME: &str = "bench-slices";
        if !lab.has_two_cores {
            return guests::boot(NAME, lab.vms, self.core, self.kind);
        }
        let mut cores = [self.core, guests::other_core(self.core)?];
        cores.sort_unstable();
        guests::boot_spec(&guests::spec(NAME, lab.vms, &cores, self.kind)?, self.core)
    }

    fn groups(&mut self, round: usize, lab: Lab, label: &str, guests: &mut Guests) -> Outcome {
        let settings = Settings::equal(self.core, WEB);
        let todo: Vec<_> = self.plan.groups_of(lab).cloned().collect();
        for side in order(self.plan.sides_of(lab), round) {
            let label = format!("{label}, {}", side.name());
            self.progress.step(&label, SWITCH_TIME);
            let active = Active::start(side, &settings, &guests.lab)?;
            for (group, states) in &todo {
                if !group.sides(self.plan.quick).contains(&side) {
                    continue;
                }
                for state in states {
                    self.progress.step(
                        &format!("{label}, {}, {}", state.name(), group.name()),
                        self.plan.times.cell(),
                    );
                    guests.keep_busy(*state == State::Busy, group.duty)?;
                    let reading = cell::measure(
                        guests,
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
        if self.plan.alone(lab) {
            self.progress
                .step(&format!("{label}, alone"), self.plan.times.cell());
            guests.keep_busy(false, 0)?;
            let active = Active::start(Side::Stock, &settings, &guests.lab)?;
            let reading = cell::measure(
                guests,
                &active,
                &mut self.sampler,
                &self.plan.times,
                seed(round),
            )?;
            self.cells.add_alone(lab.vms, reading);
            active.stop()?;
        }
        Ok(())
    }

    fn loads(&mut self, round: usize, lab: Lab, label: &str, guests: &mut Guests) -> Outcome {
        for cells in self.plan.loads_of(lab) {
            if self.loads.capacity.is_none() {
                let label = format!("{label}, what a core serves");
                self.progress.step(&label, loads::CAPACITY_TIME);
            }
            loads::measure_capacity(guests, &mut self.sampler, &mut self.loads, seed(round))?;
            let rates = loads::with_rates(&cells).len() as u32;
            let label_of_rates = format!("{label}, what the guests serve");
            (self.progress).step(&label_of_rates, loads::SERVED_TIME * rates);
            loads::measure_served(
                &cells,
                guests,
                &mut self.sampler,
                &mut self.loads,
                seed(round),
            )?;
            let alone: Vec<loads::Cell> = cells.iter().filter(|c| c.has_alone()).copied().collect();
            let [first, second] = loads::order(round);
            let runs = [(first, &cells), (second, &cells), (LoadSide::Alone, &alone)];
            for (side, cells) in runs {
                if cells.is_empty() {
                    continue;
                }
                let label = format!("{label}, {}", side.name());
                self.progress.step(&label, SWITCH_TIME);
                let run = BedRun {
                    cells,
                    side,
                    cores: (self.core, guests.load_core),
                    seed: seed(round),
                };
                let progress = &mut self.progress;
                let mut step = |step: Step<'_>| match step {
                    Step::Cell(cell) => progress.step(
                        &format!("{label}, {}", cell.name()),
                        cell.bed.lead() + loads::LOAD_TIME + loads::AROUND_TIME,
                    ),
                    Step::Refused(cell, why) => {
                        progress.say(&format!("left out: {label}, {}: {why}", cell.name()));
                    }
                };
                run.measure(guests, &mut self.sampler, &mut self.loads, &mut step)?;
            }
        }
        Ok(())
    }

    fn extras(&mut self, round: usize, lab: Lab, guests: &mut Guests) -> Outcome {
        for extra in self.plan.extras_of(lab) {
            if extra == plan::Extra::First && round > 0 {
                continue;
            }
            let label = format!(
                "round {} of {}: {}",
                round + 1,
                self.plan.rounds,
                extra.name()
            );
            self.progress.step(&label, self.plan.extra_time(extra));
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
