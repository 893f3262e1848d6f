// SPDX-License-Identifier: Apache-2.0
//! `viola-lab bench vpipe`: measures web servers, a proxy, uploads and copies in a guest, without and with the host's
//! help, in turn.

mod bed;
mod cell;
mod client;
mod host;
mod native;
mod rows;
mod servers;
mod times;
mod tools;
mod upload;

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

pub(super) use bed::pattern_bytes;
use bed::{Fixtures, SIZES, Side, TestBed, path};
use cell::Cell;
use client::{Request, Response, load};
use host::Server;
use native::Native;
use rows::{Measurements, Reading};
use servers::{BACKEND, Work};
use times::Handovers;

use clap::Args;

use super::vread::busy;
use crate::harness::cpu::ThreadSampler;
use crate::harness::guests::{kernel, split_cores};
use crate::harness::progress::Progress;
use crate::harness::result::Results;
use crate::options::GuestOptions;
use viola_cli::error::{Failure, Outcome};

const FOLDER: &str = "build/bench/vpipe";
/// Maximum delay until the daemon reports what a worker sent.
const STATUS_INTERVAL: Duration = Duration::from_secs(3);
/// Time within which a proxy notices that its server has ended, even with busy neighbours.
const PROXY_NOTICE_TIME: Duration = Duration::from_millis(500);
/// Minimum number of hand-overs for a 99th percentile.
const MIN_P99_SAMPLES: usize = 100;

/// Options of `viola-lab bench vpipe`.
#[derive(Debug, Args)]
pub struct Vpipe {
    #[command(flatten)]
    wanted: GuestOptions,
    /// Run both sides without the library, to measure chance differences. The result goes to
    /// build/bench/vpipe-control.json.
    #[arg(long)]
    control: bool,
}

/// Splits patterns at commas. A comma that a space follows is part of a name.
pub(super) fn split_patterns(only: &str) -> Vec<&str> {
    let ends = only.match_indices(',').map(|(at, _)| at);
    let ends = ends.filter(|at| !only[at + 1..].starts_with(' '));
    let mut begin = 0;
    let mut parts = Vec::new();
    for end in ends.chain([only.len()]) {
        parts.push(&only[begin..end]);
        begin = only.len().min(end + 1);
    }
    parts
}

/// Runs the benchmark, prints the table and writes the result.
pub fn run(vpipe: &Vpipe) -> Outcome {
    super::need_root()?;
    let options = &vpipe.wanted.options;
    let cells: Vec<Cell> = Cell::all()
        .into_iter()
        .filter(|cell| {
            let any = |only: &String| {
                split_patterns(only)
                    .iter()
                    .any(|part| cell.name().contains(part))
            };
            options.only.as_ref().is_none_or(any) && !(vpipe.control && cell.is_given_away())
        })
        .collect();
    if cells.is_empty() {
        let only = options.only.as_deref().unwrap_or_default();
        return Err(Failure::usage(format!(
            "no cell name contains `{only}`; try `256 MiB`, `32 connections`, `haproxy` or `neighbours`"
        )));
    }
    let kind = vpipe.wanted.guests.kind()?;
    let rounds = options.rounds();
    let start = Duration::from_secs(10);
    let once: Duration = cells
        .iter()
        .map(|cell| {
            let sides = cell.turns(0).into_iter();
            let each = |side| cell.length(side, options.quick) + Duration::from_millis(300);
            sides.map(each).sum::<Duration>()
        })
        .sum();
    let total = start + once * rounds as u32;
    let mut progress = Progress::new(total);
    progress.announce("vpipe", rounds);
    progress.step("guests", start);
    // Native cells need no guest.
    let fixtures = match cells.iter().any(|cell| !cell.work.is_native()) {
        true => Some(Fixtures::new(Path::new(FOLDER))?),
        false => None,
    };
    let lab = fixtures
        .as_ref()
        .map(|fixtures| fixtures.boot(options.core, kind));
    let lab = lab.transpose()?;
    let bed = fixtures.as_ref().zip(lab.as_ref());
    let mut run = Run {
        bed: bed
            .map(|(fixtures, lab)| fixtures.bed(lab, kind, vpipe.control))
            .transpose()?,
        sampler: ThreadSampler::new()?,
        busy: false,
        quick: options.quick,
        core: options.core,
        sum: None,
        native: None,
        server: None,
    };
    let guests = match &lab {
        Some(lab) => format!(
            "{}, one with the servers and three neighbours on a core; clients and workers on any",
            kernel(lab)?
        ),
        None => "none: the servers run on the host".into(),
    };
    let mut found = Measurements::default();
    for round in 0..rounds {
        for cell in &cells {
            for side in cell.turns(round) {
                let label = format!(
                    "round {} of {rounds}: {}, {}",
                    round + 1,
                    cell.name(),
                    side.name()
                );
                progress.step(&label, cell.length(side, options.quick));
                let reading = run.measure(cell, side)?;
                found.add(*cell, side, reading);
            }
        }
    }
    drop(run);
    drop(progress);
    viola_cli::interrupt::check()?;
    let results = Results::new(rounds, &guests, found.rows());
    let is_full = options.only.is_none() && !options.quick && rounds >= 5;
    let path = match vpipe.control {
        true => vpipe.wanted.path("vpipe-control", kind, false),
        false => vpipe.wanted.path("vpipe", kind, is_full),
    };
    results.publish(&kind.result("vpipe"), &path)?;
    match lab {
        Some(lab) => lab.down().map_err(crate::harness::side::lab_failure),
        None => Ok(()),
    }
}

struct Run<'a> {
    /// The guests, if any cell needs them.
    bed: Option<TestBed<'a>>,
    sampler: ThreadSampler,
    busy: bool,
    quick: bool,
    /// Core of the guests.
    core: usize,
    /// MD5 of the file that curl gets.
    sum: Option<String>,
    native: Option<Native>,
    /// The host's server, with its address and file size.
    server: Option<((SocketAddr, usize), Server)>,
}

/// Received by the clients.
#[derive(Default)]
struct Received {
    received: Response,
    beside: Option<Response>,
    turns: Option<Handovers>,
}

impl<'a> Run<'a> {
    fn bed(&self) -> Outcome<&TestBed<'a>> {
        let bed = self.bed.as_ref();
        bed.ok_or_else(|| Failure::run("there are no guests"))
    }

    fn measure(&mut self, cell: &Cell, side: Side) -> Outcome<Reading> {
        viola_cli::interrupt::check()?;
        if cell.work.is_native() {
            return self.run_native(cell, side);
        }
        if cell.busy != self.busy {
            self.bed()?.set_neighbours_busy(cell.busy)?;
            self.busy = cell.busy;
        }
        let file = self.bed()?.file(cell.size)?;
        let path = path(cell.size);
        let to = self.bed()?.address(cell.work, side)?;
        let ask = Request {
            to,
            path: &path,
            file,
        };
        let listens = match (cell.work, side) {
            (_, Side::Host) => Some(to),
            (Work::Proxy, _) => Some((self.bed()?.host(), BACKEND).into()),
            _ => None,
        };
        if let Some(at) = listens {
            self.serve(at, file.len())?;
        }
        // The host has its image in the page cache, so the guest that sends by itself gets the complete file in its
        // page cache too.
        let sends_by_itself = side == Side::Stock || !cell.is_given_away();
        if sends_by_itself && !matches!(cell.work, Work::Proxy | Work::Upload) {
            self.bed()?.sh(&format!("cat /mnt{path} > /dev/null"))?;
        }
        let once = Duration::from_millis(1);
        if !matches!(cell.work, Work::Upload | Work::Backup | Work::Times) {
            self.bed()?.at_clients(|| load(ask, 1, once))??;
        }
        let web = [self.bed()?.web()?.pid()];
        let begun = self.bed()?.counters()?.begun;
        let (guest, total) = (self.sampler.vms(&web)?, busy()?);
        let clients = self.run_clients(cell, side, ask)?;
        let total = busy()? - total;
        let guest: f64 = self.sampler.vms(&web)?.seconds_since(&guest).iter().sum();
        if side == Side::Viola && cell.is_given_away() {
            // Where hand-overs are timed, every reply must be one.
            let least = clients
                .turns
                .as_ref()
                .map_or(1, |turns| turns.first_ms.len());
            self.check_moved(cell, begun, least as u64)?;
        }
        if matches!(cell.work, Work::Upload | Work::Backup) {
            self.bed()?.check()?;
            let folder = cell.work.folder(side);
            let compare =
                format!("for f in {folder}/*; do cmp /mnt{path} $f; last=1; done; [ $last ]");
            self.bed()?.sh(&format!(
                "cd {folder}; rm -f $(ls -t | tail -n +2); {compare}; rm -f {folder}/*"
            ))?;
        }
        Ok(Reading {
            received: clients.received,
            beside: clients.beside,
            turns: clients.turns,
            guest,
            host: total,
        })
    }

    /// Starts the host's server for this file and keeps it between turns. A proxy whose server has ended may disconnect
    /// its own client.
    fn serve(&mut self, at: SocketAddr, size: usize) -> Outcome {
        if self
            .server
            .as_ref()
            .is_some_and(|(of, _)| *of == (at, size))
        {
            return Ok(());
        }
        if self.server.take().is_some() {
            std::thread::sleep(PROXY_NOTICE_TIME);
        }
        let (image, extents) = self.bed()?.source(size)?;
        let start = || Server::start(at, image, &extents, size as u64);
        let server = self.bed()?.at_clients(start)??;
        self.server = Some(((at, size), server));
        Ok(())
    }

    /// Measures a cell without a guest.
    fn run_native(&mut self, cell: &Cell, side: Side) -> Outcome<Reading> {
        let file = &pattern_bytes(cell.size);
        let native = match self.native.take() {
            Some(native) => native,
            None => Native::new(
                &Path::new(FOLDER).join("native"),
                &Cell::NATIVE.map(pattern_bytes),
            )?,
        };
        let native = self.native.insert(native);
        let (begun, total) = (native.begun()?, busy()?);
        let length = cell.length(side, self.quick);
        let to = Native::address(cell.work, side);
        let guest = native.cpu()?;
        let (received, turns) = match cell.work {
            Work::NativeWeb => {
                let path = &path(cell.size);
                let ask = Request { to, path, file };
                (native.at_client(|| load(ask, 1, length))??, None)
            }
            _ => {
                let loaded = || times::load(to, file, length, least(side));
                let (received, turns) = native.at_client(loaded)??;
                (received, Some(turns))
            }
        };
        let (guest, host) = (native.cpu()? - guest, busy()? - total);
        let moved = native.begun()?.saturating_sub(begun);
        let fewest = turns.as_ref().map_or(1, |turns| turns.first_ms.len());
        if side == Side::Viola && moved < fewest as u64 {
            let why = format!(
                "{}: the host took over only {moved} of {fewest} connections",
                cell.name()
            );
            return Err(Failure::run(why));
        }
        Ok(Reading {
            received,
            beside: None,
            turns,
            guest: guest.as_secs_f64(),
            host,
        })
    }

    /// Runs the clients.
    fn run_clients(&mut self, cell: &Cell, side: Side, ask: Request<'_>) -> Outcome<Received> {
        let length = cell.length(side, self.quick);
        let Request { to, path, file } = ask;
        let mut clients = Received::default();
        clients.received = match cell.work {
            Work::Nginx | Work::Written | Work::Lighttpd | Work::Proxy | Work::Given => {
                let loaded = || {
                    // The client's core makes a difference of up to a factor of two on either side, so it is fixed.
                    if !cell.is_given_away() {
                        split_cores(self.core)?;
                    }
                    load(ask, cell.connections, length)
                };
                self.bed()?.at_clients(loaded)??
            }
            Work::Native | Work::NativeWeb => return Err(Failure::run("native work has no guest")),
            Work::Beside => {
                let small = Request {
                    to,
                    path: &bed::path(SIZES[0]),
                    file: self.bed()?.file(SIZES[0])?,
                };
                let (received, beside) =
                    self.bed()?.at_clients(|| load_both(ask, small, length))??;
                clients.beside = Some(beside);
                received
            }
            Work::Times => {
                let loaded = || times::load(to, file, length, least(side));
                let (received, turns) = self.bed()?.at_clients(loaded)??;
                clients.turns = Some(turns);
                received
            }
            Work::Wrk => {
                let folder = Path::new(FOLDER);
                let loaded = || tools::wrk(to, path, cell.connections, length, folder);
                self.bed()?.at_clients(loaded)??
            }
            Work::Curl => {
                let sum = match self.sum.take() {
                    Some(sum) => sum,
                    None => tools::md5_of(file)?,
                };
                let sum = &*self.sum.insert(sum).clone();
                let loaded = || tools::curl(to, path, sum, length);
                self.bed()?.at_clients(loaded)??
            }
            Work::Upload => {
                let loaded = || upload::load(to, file, length);
                self.bed()?.at_clients(loaded)??
            }
            Work::Backup => self.copies(cell, side, path, length)?,
        };
        Ok(clients)
    }

    /// Copies a file for this long.
    fn copies(&self, cell: &Cell, side: Side, path: &str, length: Duration) -> Outcome<Response> {
        let started = Instant::now();
        let mut received = Response::default();
        // Copy a small file several times per script, because a script has a cost of its own.
        let times = if cell.size < 64 << 20 { 4 } else { 1 };
        while started.elapsed() < length {
            self.bed()?.sh(&cell.work.copies(side, path, times))?;
            received.bytes += (cell.size * times) as u64;
        }
        received.seconds = started.elapsed().as_secs_f64();
        Ok(received)
    }
}

impl Run<'_> {
    /// Waits until the host has taken over this many connections; its counters lag behind a little.
    fn check_moved(&self, cell: &Cell, before: u64, least: u64) -> Outcome {
        let started = Instant::now();
        loop {
            let moved = self.bed()?.counters()?.begun.saturating_sub(before);
            if moved >= least {
                return Ok(());
            }
            if started.elapsed() > STATUS_INTERVAL {
                let agent_status = self.bed()?.agent_status()?;
                let cell = cell.name();
                let why = format!(
                    "{cell}: the host took over {moved} of {least} connections; the agent reports:\n{agent_status}\nthe daemon: {}",
                    self.bed()?.daemon_log()
                );
                return Err(Failure::run(why));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Minimum number of timed hand-overs. Only viola's side has goals for their 99th percentile; the
/// others are slow beside busy neighbours, and one hand-over is enough there.
fn least(side: Side) -> usize {
    match side {
        Side::Viola => MIN_P99_SAMPLES,
        _ => 1,
    }
}

/// Loads a large file and small files at the same time.
fn load_both(
    large: Request<'_>,
    small: Request<'_>,
    length: Duration,
) -> Outcome<(Response, Response)> {
    // New threads stay in the network namespace of their creator.
    std::thread::scope(|scope| {
        let other = scope.spawn(|| load(small, 1, length));
        let received = load(large, 1, length);
        match other.join() {
            Ok(beside) => Ok((received?, beside?)),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_a_comma_is_one_pattern() {
        assert_eq!(split_patterns("cp, 256 MiB,wrk"), ["cp, 256 MiB", "wrk"]);
        assert_eq!(split_patterns("haproxy"), ["haproxy"]);
        assert_eq!(split_patterns("a,"), ["a", ""]);
    }
}
