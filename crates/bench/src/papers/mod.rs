// SPDX-License-Identifier: Apache-2.0
//! `viola-lab bench papers`: repeats the experiments of dissertation 000, section 2.5, on lab guests under the papers'
//! 30 ms slices, stock scheduling and viola. Each row shows the paper's gain beside it.

mod bed;
mod mpi;
mod mpiexec;
mod paper;
mod plan;

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;

use bed::TestBed;
use plan::{CREDIT, Cell, Experiment, SIDES, SWITCH_TIME, VIOLA, side_name};

use super::vpipe::split_patterns;
use crate::harness::cell::{self, Reading};
use crate::harness::cpu::ThreadSampler;
use crate::harness::guests::{names, split_cores};
use crate::harness::progress::Progress;
use crate::harness::result::Results;
use crate::harness::row::Row;
use crate::harness::side::{Active, Guests as Settings, Side};
use crate::harness::vmm::GuestKind;
use crate::options::GuestOptions;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;
use viola_cli::table;

/// Options of `viola-lab bench papers`.
#[derive(Debug, Args)]
pub struct Papers {
    #[command(flatten)]
    wanted: GuestOptions,
    /// Do not measure. Print a result file as the book's table "paper | 30 ms | stock | viola".
    #[arg(long, value_name = "FILE", conflicts_with_all = ["rounds", "quick", "only", "output"])]
    table: Option<PathBuf>,
}

/// Runs the benchmark, prints the table and writes the result.
pub fn run(papers: &Papers) -> Outcome {
    if let Some(file) = &papers.table {
        return table::print(&paper::table(file)?);
    }
    super::need_root()?;
    let (wanted, options) = (&papers.wanted, &papers.wanted.options);
    let patterns = options.only.as_deref().map(split_patterns);
    let mut cells = Cell::of(patterns.as_deref());
    if cells.is_empty() {
        let only = options.only.as_deref().unwrap_or_default();
        return Err(Failure::usage(format!(
            "no row name contains `{only}`; try ping, jitter, TCP, Apache, MPI, VoIP, streaming, STREAM, `5 VMs` or `40 %`"
        )));
    }
    let kind = wanted.guests.kind()?;
    let has_mpi = kind == GuestKind::Uml && mpi::is_there()?;
    let without_mpi = cells.iter().any(|c| c.part == Experiment::Mpi) && !has_mpi;
    if without_mpi {
        cells.retain(|c| c.part != Experiment::Mpi);
        if cells.is_empty() {
            return Err(mpi::missing());
        }
    }
    split_cores(options.core)?;
    let rounds = options.rounds();
    let total = plan::round(&cells, options.quick) * rounds as u32;
    let mut bench = Bench {
        kind,
        rounds,
        cells,
        quick: options.quick,
        core: options.core,
        progress: Progress::new(total),
        sampler: ThreadSampler::new()?,
        found: Measurements::default(),
        kernel: String::new(),
        readings: Vec::new(),
    };
    bench.progress.announce("papers", rounds);
    if without_mpi {
        let note = "papers: without MPI, which scripts/mpi.sh makes for UML guests";
        bench.progress.say(note);
    }
    for round in 0..rounds {
        for vms in plan::labs(&bench.cells) {
            bench.lab(round, vms)?;
        }
    }
    let mut results = Results::new(rounds, &bench.kernel, bench.found.rows());
    results.disturbed = cell::disturbance(&bench.readings);
    let path = wanted.path(
        "papers",
        kind,
        options.only.is_none() && !options.quick && rounds >= 5,
    );
    drop(bench);
    results.publish(&kind.result("papers"), &path)
}

struct Bench {
    kind: GuestKind,
    rounds: usize,
    cells: Vec<Cell>,
    quick: bool,
    core: usize,
    progress: Progress,
    sampler: ThreadSampler,
    found: Measurements,
    kernel: String,
    /// One per cell, with only the share of the guests' core that other programs used.
    readings: Vec<Reading>,
}

impl Bench {
    /// One round of everything that needs a lab of this many guests.
    fn lab(&mut self, round: usize, vms: usize) -> Outcome {
        interrupt::check()?;
        let label = format!("round {} of {}: {vms} VMs", round + 1, self.rounds);
        self.progress
            .step(&format!("{label}, boot"), plan::BOOT_TIME);
        let mut bed = TestBed::boot(vms, self.core, self.kind)?;
        if self.kernel.is_empty() {
            self.kernel = bed.guests.kernel()?;
        }
        let mut sides = SIDES.to_vec();
        sides.rotate_left(round % SIDES.len());
        for side in sides {
            for ls in plan::classes(&self.cells, vms) {
                let settings = Settings {
                    ls: names(vms)[..ls].to_vec(),
                    ..Settings::equal(self.core, crate::harness::guests::WEB)
                };
                let label = format!("{label}, {}", side.name());
                self.progress.step(&label, SWITCH_TIME);
                let active = Active::start(side, &settings, &bed.guests.lab)?;
                // Change the neighbours' load as rarely as possible.
                let of = |c: &&Cell| c.setup.vms == vms && c.setup.ls == ls;
                let mut cells: Vec<Cell> = self.cells.iter().filter(of).copied().collect();
                cells.sort();
                for cell in cells {
                    let (name, time) = (cell.part.figures()[0].0, cell.part.time(self.quick));
                    let label = format!("{label}, {name}, {}", cell.setup.name());
                    self.progress.step(&label, time);
                    self.cell(&mut bed, &active, side, cell, 1 + round as u64)?;
                }
                active.stop()?;
            }
        }
        bed.down()
    }

    fn cell(
        &mut self,
        bed: &mut TestBed,
        active: &Active,
        side: Side,
        cell: Cell,
        seed: u64,
    ) -> Outcome {
        let (pids, core) = (bed.guests.pids(), self.core);
        let (before, tree) = (self.sampler.vms(&pids)?, active.sample());
        let times = plan::times(self.quick);
        let (ls, duty) = (cell.setup.ls, cell.setup.duty);
        let calls = plan::calls(side, self.quick);
        let figures = bed.measure(cell.part, ls, duty, &times, calls, seed)?;
        // A controller failure invalidates the measurement.
        active.controller_ns()?;
        let shares = self.sampler.vms(&pids)?.since(&before);
        let shares: f64 = shares.iter().map(|u| u.share).sum();
        let own = active.sample().zip(tree).map_or(0.0, |(now, before)| {
            let used = now.only_on(core).since(&before.only_on(core));
            used.iter().map(|u| u.share).sum()
        });
        // Ranks start and end within a cell, so their CPU use cannot be read afterwards.
        if bed.guests.is_saturated() && cell.part != Experiment::Mpi {
            self.readings.push(Reading {
                foreign_share: (1.0 - shares - own).max(0.0),
                ..Reading::default()
            });
        }
        self.found.add(cell, side, &figures);
        Ok(())
    }
}

/// Results by cell, index of the figure and side, one per round.
#[derive(Debug, Default)]
struct Measurements(BTreeMap<(Cell, usize, Side), Vec<f64>>);

impl Measurements {
    fn add(&mut self, cell: Cell, side: Side, figures: &[Option<f64>]) {
        for (index, figure) in figures.iter().enumerate() {
            let rounds = self.0.entry((cell, index, side)).or_default();
            rounds.extend(figure);
        }
    }

    /// A row per figure, with the paper's gain as its goal.
    fn rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        for cell in Cell::all() {
            for (index, (name, (_, unit))) in cell.rows().enumerate() {
                let mut row = Row::new(name, unit);
                for side in SIDES {
                    let rounds = self.0.get(&(cell, index, side)).cloned();
                    row = row.side(side_name(side), rounds.unwrap_or_default());
                }
                row = row.against(VIOLA, CREDIT);
                if let Some(goal) = paper::of(cell.part, index, cell.setup).goal {
                    row = row.goal(goal, VIOLA);
                }
                rows.push(row);
            }
        }
        rows.retain(Row::is_measured);
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plan::MICROSLICE;

    #[test]
    fn the_paper_is_held_against_30_ms_slices() {
        let cell = Cell::of(Some(&["ping mean, 4 VMs, 1 LSVM, others 100"]))[0];
        assert_eq!(cell.part, Experiment::Ping);
        let mut found = Measurements::default();
        for _ in 0..3 {
            found.add(cell, Side::Credit, &[Some(40.0), Some(90.0)]);
            found.add(cell, Side::Stock, &[Some(5.0), None]);
            found.add(cell, Side::Viola(MICROSLICE), &[Some(1.0), Some(45.0)]);
        }
        let rows = found.rows();
        assert_eq!(rows.len(), 2);
        let sides: Vec<&str> = rows[0].sides.iter().map(|s| s.0.as_str()).collect();
        assert_eq!(sides, [CREDIT, "stock", VIOLA]);
        assert_eq!((rows[0].ratio, rows[0].met), (Some(1.0 / 40.0), Some(true)));
        // The paper's worst case falls to a third.
        assert_eq!((rows[1].ratio, rows[1].met), (Some(0.5), Some(false)));
        assert_eq!(rows[1].sides.len(), 2);
    }
}
