// SPDX-License-Identifier: Apache-2.0
//! HTTP loads on the LSVMs: open loops inside their share, closed loops above it.

mod cells;
mod rows;

use std::collections::BTreeSet;
use std::time::Duration;

pub use cells::{Bed, Cell, cells};
pub use rows::{LoadReadings, LoadSide};

use crate::harness::cpu::ThreadSampler;
use crate::harness::guests::{Guests, OwnWork};
use crate::harness::load::{self, Capacity, Load, LoadOptions};
use crate::harness::side::{Active, Side};
use viola_cli::error::{Failure, Outcome};

/// Microslice of viola's side, microseconds: the default.
pub const MICROSLICE: u32 = 300;
/// Duration of a load.
pub const LOAD_TIME: Duration = Duration::from_millis(800);
/// Time around a load: to settle, to count the neighbours' work, and to change the own work.
pub const AROUND_TIME: Duration = Duration::from_millis(350);
/// Duration of a load before it is measured on two cores: viola moves vCPUs between cores once a second.
pub const LEAD_TIME: Duration = Duration::from_secs(2);
/// Duration of the measurement of what a core serves.
pub const CAPACITY_TIME: Duration = Duration::from_millis(1500);

/// Duration of the measurement of what a guest serves.
pub const SERVED_TIME: Duration = Duration::from_millis(1500);

/// Measures what a core serves, if that is not yet known.
pub fn measure_capacity(
    guests: &mut Guests,
    sampler: &mut ThreadSampler,
    readings: &mut LoadReadings,
    seed: u64,
) -> Outcome {
    if readings.capacity.is_some() {
        return Ok(());
    }
    let bed = Bed::equal(guests.pids().len());
    guests.serve(bed.servers(), OwnWork::Nothing, bed.duty())?;
    readings.capacity = Some(Capacity::measure(guests, sampler, CAPACITY_TIME, seed)?);
    Ok(())
}

/// Order of the sides in a round.
pub fn order(round: usize) -> [LoadSide; 2] {
    match round % 2 {
        0 => [LoadSide::Stock, LoadSide::Viola],
        _ => [LoadSide::Viola, LoadSide::Stock],
    }
}

/// Options of the loads of one bed on one side.
pub struct BedRun<'a> {
    /// The cells; all have the same bed.
    pub cells: &'a [Cell],
    /// The side.
    pub side: LoadSide,
    /// Cores of the guests: the first of them alone, and the other.
    pub cores: (usize, usize),
    /// Seed of the arrivals.
    pub seed: u64,
}

impl BedRun<'_> {
    /// Sets up the side, measures the cells, and removes the side. Calls `step` at the start of
    /// each cell and for each refusal.
    pub fn measure(
        &self,
        guests: &mut Guests,
        sampler: &mut ThreadSampler,
        readings: &mut LoadReadings,
        step: &mut dyn FnMut(Step<'_>),
    ) -> Outcome {
        let Some(first) = self.cells.first() else {
            return Ok(());
        };
        let bed = first.bed;
        let side = match self.side {
            LoadSide::Viola => Side::Viola(MICROSLICE),
            LoadSide::Stock | LoadSide::Alone => Side::Stock,
        };
        let settings = bed.settings(self.cores.0, self.cores.1);
        let active = Active::start(side, &settings, &guests.lab)?;
        let duty = match self.side {
            LoadSide::Alone => 0,
            _ => bed.duty(),
        };
        for cell in self.cells {
            step(Step::Cell(cell));
            guests.serve(bed.servers(), cell.own, duty)?;
            let rate = match cell.load {
                Load::Closed { .. } => 0.0,
                Load::Open(_) => cell.load.rate(self.served(cell, readings)?),
            };
            let options = LoadOptions {
                load: cell.load,
                servers: bed.servers(),
                rate,
                time: LOAD_TIME,
                seed: self.seed,
            };
            if !bed.lead().is_zero() {
                let lead = LoadOptions {
                    time: bed.lead(),
                    ..options
                };
                // What it measures is not wanted, nor why it was refused: the load that follows is refused then, too.
                let _ = load::measure(guests, sampler, &lead)?;
            }
            match load::measure(guests, sampler, &options)? {
                Ok(reading) => readings.add(*cell, self.side, reading),
                Err(why) => {
                    readings.refused += 1;
                    step(Step::Refused(cell, &why));
                }
            }
        }
        // No own work stays behind for the next cells of this lab.
        guests.serve(bed.servers(), OwnWork::Nothing, duty)?;
        active.stop()
    }

    /// What a guest's share serves in this round, requests/s: of what a core serves when requests come one at a time, and no more than
    /// the guest serves beside its neighbours.
    fn served(&self, cell: &Cell, readings: &LoadReadings) -> Outcome<f64> {
        let alone = readings.capacity.map_or(f64::INFINITY, |of| of.0);
        let served = readings.served.get(&(cell.bed, cell.own));
        match served.and_then(|rounds| rounds.last()) {
            Some(served) => Ok(served.min(alone * cell.bed.fair_shares()[0])),
            None => {
                let why = format!("{}: what it serves on stock is not known", cell.name());
                Err(Failure::run(why))
            }
        }
    }
}

/// Measures what the guests of these cells serve on stock, which gives the rates of their open loops. The speed of a machine that others
/// use too wanders, so each round measures it anew, before its sides.
pub fn measure_served(
    cells: &[Cell],
    guests: &mut Guests,
    sampler: &mut ThreadSampler,
    readings: &mut LoadReadings,
    seed: u64,
) -> Outcome {
    for (bed, own) in with_rates(cells) {
        guests.serve(bed.servers(), own, bed.duty())?;
        let guest = (bed.servers(), bed.fair_shares()[0]);
        let served = load::served(guests, sampler, guest, SERVED_TIME, seed)?;
        readings.served.entry((bed, own)).or_default().push(served);
    }
    Ok(())
}

/// The guests of the open loops among these cells.
pub fn with_rates(cells: &[Cell]) -> BTreeSet<(Bed, OwnWork)> {
    let open = cells.iter().filter(|cell| cell.load.is_inside());
    open.map(|cell| (cell.bed, cell.own)).collect()
}

/// Progress of [`BedRun::measure`].
pub enum Step<'a> {
    /// This cell begins.
    Cell(&'a Cell),
    /// The figures of this cell were refused for this reason.
    Refused(&'a Cell, &'a str),
}
