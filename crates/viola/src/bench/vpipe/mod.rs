// SPDX-License-Identifier: Apache-2.0
//! `viola bench vpipe`: Debian's nginx in a guest, as it is and with its files sent by the host, in turn.

mod bed;
mod client;
mod host;
mod rows;

use std::path::Path;
use std::time::{Duration, Instant};

use bed::{Bed, Ground, SIZES, Side, path};
use client::{Ask, Got, load};
use host::Server;
use rows::{Cell, Found, Reading};

use super::Options;
use super::cpu::Eye;
use super::progress::{Progress, clock};
use super::result::{Causes, Results};
use super::row;
use super::vread::{busy, verdict};
use crate::error::{Failure, Outcome};
use crate::table;

const FOLDER: &str = "build/bench/vpipe";
/// The daemon tells within this time what a worker has sent.
const TOLD: Duration = Duration::from_secs(3);
/// The largest file.
const LARGEST: usize = SIZES.len() - 1;

/// Runs it, prints the table and writes the result.
pub fn run(options: &Options) -> Outcome {
    super::need_root()?;
    let cells: Vec<Cell> = Cell::all()
        .into_iter()
        .filter(|cell| {
            let any = |only: &String| {
                only.split(',')
                    .any(|part| cell.name().contains(part.trim()))
            };
            options.only.as_ref().is_none_or(any)
        })
        .collect();
    if cells.is_empty() {
        let only = options.only.as_deref().unwrap_or_default();
        return Err(Failure::usage(format!(
            "no cell has `{only}` in its name; try `256 MiB`, `32 connections` or `neighbours`"
        )));
    }
    let rounds = options.rounds();
    let start = Duration::from_secs(10);
    let once: Duration = cells
        .iter()
        .map(|cell| {
            (cell.length(options.quick) + Duration::from_millis(300)) * cell.sides().len() as u32
        })
        .sum();
    let total = start + once * rounds as u32;
    let mut progress = Progress::new(total);
    progress.say(&format!("vpipe: {rounds} rounds, about {}", clock(total)));
    progress.step("guests", start);
    let ground = Ground::new(Path::new(FOLDER))?;
    let lab = ground.boot(options.core)?;
    let mut run = Run {
        bed: ground.bed(&lab)?,
        ground: &ground,
        eye: Eye::new()?,
        busy: false,
        quick: options.quick,
    };
    let mut found = Found::default();
    for round in 0..rounds {
        for cell in &cells {
            let mut sides = cell.sides();
            let by = round % sides.len();
            sides.rotate_left(by);
            for side in sides {
                let label = format!(
                    "round {} of {rounds}: {}, {}",
                    round + 1,
                    cell.name(),
                    side.name()
                );
                progress.step(&label, cell.length(options.quick));
                let reading = run.measure(cell, side)?;
                found.add(*cell, side, reading);
            }
        }
    }
    drop(run);
    drop(progress);
    super::interrupt::check()?;
    let guests = "User Mode Linux, one with nginx and three neighbours on a core; clients and workers on any";
    let mut results = Results::new(rounds, guests, found.rows());
    results.explain(&Causes::read("bench/why-vpipe.toml".as_ref())?);
    let path = options.path(
        "vpipe",
        options.only.is_none() && !options.quick && rounds >= 5,
    );
    results.write(&path)?;
    table::print(&row::table(&results.rows).text())?;
    table::print(&verdict(&results, &path))?;
    lab.down().map_err(super::side::lab_failure)
}

struct Run<'a> {
    bed: Bed<'a>,
    ground: &'a Ground,
    eye: Eye,
    busy: bool,
    quick: bool,
}

impl Run<'_> {
    fn measure(&mut self, cell: &Cell, side: Side) -> Outcome<Reading> {
        super::interrupt::check()?;
        if cell.busy != self.busy {
            self.bed.disturb(cell.busy)?;
            self.busy = cell.busy;
        }
        let file = &self.ground.files[cell.size];
        let path = path(file.len());
        let to = self.bed.address(side)?;
        let ask = Ask {
            to,
            path: &path,
            file,
        };
        let server = match side {
            Side::Host => {
                let (image, extents) = self.bed.source(file.len())?;
                let size = file.len() as u64;
                Some(
                    self.bed
                        .at_clients(|| Server::start(to, image, &extents, size))??,
                )
            }
            _ => None,
        };
        // caches are the same for all
        self.bed
            .at_clients(|| load(ask, 1, Duration::from_millis(1)))??;
        let web = [self.bed.web()?.pid()];
        let sent = self.bed.work()?;
        let (guest, total) = (self.eye.vms(&web)?, busy()?);
        let length = cell.length(self.quick);
        let (got, beside) = match cell.beside {
            false => (
                self.bed
                    .at_clients(|| load(ask, cell.connections, length))??,
                None,
            ),
            true => {
                let (small, path) = (&self.ground.files[0], bed::path(SIZES[0]));
                let small = Ask {
                    to,
                    path: &path,
                    file: small,
                };
                let both = self.bed.at_clients(|| together(ask, small, length))??;
                (both.0, Some(both.1))
            }
        };
        let total = busy()? - total;
        let guest: f64 = self.eye.vms(&web)?.seconds_since(&guest).iter().sum();
        if let Some(server) = server {
            self.bed.at_clients(|| drop(server))?;
        }
        if side == Side::Viola && file.len() >= 16 << 20 {
            self.has_sent(cell, sent.begun)?;
        }
        Ok(Reading {
            got,
            beside,
            guest,
            host: total,
        })
    }
}

impl Run<'_> {
    /// The host has taken connections over since; its counts are behind by a moment.
    fn has_sent(&self, cell: &Cell, before: u64) -> Outcome {
        let begun = Instant::now();
        while self.bed.work()?.begun == before {
            if begun.elapsed() > TOLD {
                let why = format!("{}: the host has sent nothing", cell.name());
                return Err(Failure::run(why));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

/// A large file and small ones, at the same time.
fn together(large: Ask<'_>, small: Ask<'_>, length: Duration) -> Outcome<(Got, Got)> {
    // threads stay in the network namespace of the one that starts them
    std::thread::scope(|scope| {
        let other = scope.spawn(|| load(small, 1, length));
        let got = load(large, 1, length);
        match other.join() {
            Ok(beside) => Ok((got?, beside?)),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}
