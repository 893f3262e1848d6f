// SPDX-License-Identifier: Apache-2.0
//! `viola bench vpipe`: web servers, a proxy, uploads and copies in a guest, as they are and with the host's help, in turn.

mod bed;
mod client;
mod host;
mod rows;
mod servers;
mod upload;

use std::path::Path;
use std::time::{Duration, Instant};

use bed::{Bed, Ground, SIZES, Side, path};
use client::{Ask, Got, load};
use host::Server;
use rows::{Cell, Found, Reading};
use servers::{BACKEND, Work};

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
            "no cell has `{only}` in its name; try `256 MiB`, `32 connections`, `haproxy` or `neighbours`"
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
    let guests = "User Mode Linux, one with the servers and three neighbours on a core; clients and workers on any";
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
        let to = self.bed.address(cell.work, side)?;
        let ask = Ask {
            to,
            path: &path,
            file,
        };
        let listens = match (cell.work, side) {
            (_, Side::Host) => Some(to),
            (Work::Proxy, _) => Some((self.bed.host(), BACKEND).into()),
            _ => None,
        };
        let server = match listens {
            Some(at) => {
                let (image, extents) = self.bed.source(file.len())?;
                let size = file.len() as u64;
                let start = || Server::start(at, image, &extents, size);
                Some(self.bed.at_clients(start)??)
            }
            None => None,
        };
        // caches are the same for all
        let once = Duration::from_millis(1);
        if !matches!(cell.work, Work::Upload | Work::Backup) {
            self.bed.at_clients(|| load(ask, 1, once))??;
        }
        let web = [self.bed.web()?.pid()];
        let begun = self.bed.done()?.begun;
        let (guest, total) = (self.eye.vms(&web)?, busy()?);
        let length = cell.length(self.quick);
        let (got, beside) = match cell.work {
            Work::Nginx | Work::Lighttpd | Work::Proxy => {
                let loaded = || load(ask, cell.connections, length);
                (self.bed.at_clients(loaded)??, None)
            }
            Work::Beside => {
                let (small, path) = (&self.ground.files[0], bed::path(SIZES[0]));
                let small = Ask {
                    to,
                    path: &path,
                    file: small,
                };
                let both = self.bed.at_clients(|| together(ask, small, length))??;
                (both.0, Some(both.1))
            }
            Work::Upload => {
                let loaded = || upload::load(to, file, length);
                (self.bed.at_clients(loaded)??, None)
            }
            Work::Backup => (self.copies(cell, side, &path, length)?, None),
        };
        let total = busy()? - total;
        let guest: f64 = self.eye.vms(&web)?.seconds_since(&guest).iter().sum();
        if let Some(server) = server {
            self.bed.at_clients(|| drop(server))?;
        }
        if side == Side::Viola && cell.is_given_away() {
            self.has_moved(cell, begun)?;
        }
        if matches!(cell.work, Work::Upload | Work::Backup) {
            self.bed.check()?;
            let folder = cell.work.folder(side);
            let compare =
                format!("for f in {folder}/*; do cmp /mnt{path} $f; last=1; done; [ $last ]");
            self.bed.sh(&format!(
                "cd {folder}; rm -f $(ls -t | tail -n +2); {compare}; rm -f {folder}/*"
            ))?;
        }
        Ok(Reading {
            got,
            beside,
            guest,
            host: total,
        })
    }

    /// Copies a file for so long.
    fn copies(&self, cell: &Cell, side: Side, path: &str, length: Duration) -> Outcome<Got> {
        let begun = Instant::now();
        let mut got = Got::default();
        // a small file several times, because each script has a cost, too
        let times = if SIZES[cell.size] < 64 << 20 { 4 } else { 1 };
        while begun.elapsed() < length {
            self.bed.sh(&cell.work.copies(side, path, times))?;
            got.bytes += (SIZES[cell.size] * times) as u64;
        }
        got.seconds = begun.elapsed().as_secs_f64();
        Ok(got)
    }
}

impl Run<'_> {
    /// The host has taken connections over since; its counts are behind by a moment.
    fn has_moved(&self, cell: &Cell, before: u64) -> Outcome {
        let begun = Instant::now();
        while self.bed.done()?.begun == before {
            if begun.elapsed() > TOLD {
                let why = format!("{}: the host has moved nothing", cell.name());
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
