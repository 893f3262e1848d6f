// SPDX-License-Identifier: Apache-2.0
//! HTTP loads on the LSVMs: open loops inside their share, closed loops above it.

mod cells;
mod rows;

use std::time::Duration;

pub use cells::{Bed, Cell, cells};
pub use rows::{LoadReadings, LoadSide};

use crate::harness::cpu::ThreadSampler;
use crate::harness::guests::{Guests, OwnWork};
use crate::harness::load::{self, Capacity, LoadOptions};
use crate::harness::side::{Active, Side};
use viola_cli::error::Outcome;

/// Microslice of viola's side, microseconds: the default.
pub const MICROSLICE: u32 = 300;
/// Duration of a load.
pub const LOAD_TIME: Duration = Duration::from_millis(800);
/// Time around a load: to settle, to count the neighbours' work, and to change the own work.
pub const AROUND_TIME: Duration = Duration::from_millis(350);
/// Duration of the measurement of what a core serves.
pub const CAPACITY_TIME: Duration = Duration::from_millis(1500);

/// Measures what a core serves, if that is not yet known. So all rounds and sides have the same rates.
pub fn measure_capacity(
    guests: &mut Guests,
    sampler: &mut ThreadSampler,
    readings: &mut LoadReadings,
    seed: u64,
) -> Outcome<Capacity> {
    if let Some(capacity) = readings.capacity {
        return Ok(capacity);
    }
    let bed = Bed::equal(guests.pids().len());
    guests.serve(bed.servers(), OwnWork::Nothing, bed.duty())?;
    let capacity = Capacity::measure(guests, sampler, CAPACITY_TIME, seed)?;
    readings.capacity = Some(capacity);
    Ok(capacity)
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
    /// What a core serves.
    pub capacity: Capacity,
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
        let share = bed.fair_shares()[0];
        let duty = match self.side {
            LoadSide::Alone => 0,
            _ => bed.duty(),
        };
        for cell in self.cells {
            step(Step::Cell(cell));
            guests.serve(bed.servers(), cell.own, duty)?;
            let options = LoadOptions {
                load: cell.load,
                servers: bed.servers(),
                rate: self.capacity.rate(cell.load, share),
                time: LOAD_TIME,
                seed: self.seed,
            };
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
}

/// Progress of [`BedRun::measure`].
pub enum Step<'a> {
    /// This cell begins.
    Cell(&'a Cell),
    /// The figures of this cell were refused for this reason.
    Refused(&'a Cell, &'a str),
}
