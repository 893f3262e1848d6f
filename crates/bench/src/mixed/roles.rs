// SPDX-License-Identifier: Apache-2.0
//! What each guest does: a role is a load from outside, or work inside the guest.

use std::fmt;
use std::time::{Duration, Instant};

use viola_lab::Guest;
use viola_lab::hadoop;
use viola_lab::load::{self, Arrivals, Call, Client, Http};
use viola_lab::media::Stream;
use viola_lab::wire::Workload;

use super::bed::Bed;
use crate::auto::{CAPACITY_TIME, LOAD};
use crate::harness::awake::KeepAwake;
use crate::harness::cell::milliseconds;
use crate::harness::cpu::ThreadSampler;
use crate::harness::guests::{Guests, HOG};
use crate::harness::load::{Capacity, ask};
use crate::harness::side::lab_failure;
use viola_cli::error::{Failure, Outcome};
use viola_report::stats::Sorted;

/// Number of guests.
pub const VMS: usize = 9;
/// Calls at a time.
const CALLS: u32 = 4;
/// Size of a file of the file server, KiB.
const FILE_KIB: usize = 1024;
/// Longest time to wait for the last answers.
const GRACE: Duration = Duration::from_secs(2);
const MAX_REQUESTS: usize = 1_000_000;
/// Time in which is measured what a core serves of the calendar's pages, some milliseconds each.
const CALENDAR_TIME: Duration = Duration::from_secs(4);

/// What a guest does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// nginx; pages of 5 KiB are asked for in an open loop.
    Pages,
    /// An event calendar with nginx, PHP and MariaDB; its pages are asked for in an open loop.
    Calendar,
    /// Voice calls to the guest.
    Voice,
    /// nginx; a client loads files of 1 MiB, one after the other.
    Files,
    /// A DataNode of HDFS.
    DataNode,
    /// A client of HDFS that reads a file of that DataNode, again and again.
    Reader,
    /// It computes.
    Batch,
    /// Nothing.
    Idle,
}

/// The guests' roles in the first phase.
const ROLES: [Role; VMS] = [
    Role::Pages,
    Role::Batch,
    Role::Calendar,
    Role::Files,
    Role::DataNode,
    Role::Voice,
    Role::Idle,
    Role::Reader,
    Role::Batch,
];
/// Every guest has another role in each of three phases; three guests in turn have the same three roles, so that a guest needs the
/// programs of three roles only.
const ROTATION: usize = 3;

/// The roles that wait for packets; [`Reading::delays`] has an entry for each.
pub const WAITING: [Role; 3] = [Role::Pages, Role::Calendar, Role::Voice];
/// Their names in rows.
pub const NAMES: [&str; WAITING.len()] = ["pages", "calendar", "voice"];
/// The quantile of their delays that is compared. A window has some 100 pages of the calendar, too few for a p99.
pub const QUANTILES: [(f64, &str); WAITING.len()] = [(0.99, "p99"), (0.9, "p90"), (0.99, "p99")];

/// Which of the [`WAITING`] roles have class ls, one bit each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Set(u8);

impl Set {
    /// All sets but the empty one.
    pub fn all() -> impl Iterator<Item = Self> {
        (1..1 << WAITING.len()).map(Self)
    }

    /// Whether a role has the class.
    pub fn has(self, role: Role) -> bool {
        let at = WAITING.iter().position(|waiting| *waiting == role);
        at.is_some_and(|at| self.0 >> at & 1 == 1)
    }
}

impl fmt::Display for Set {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = std::iter::zip(NAMES, WAITING).filter(|(_, role)| self.has(*role));
        let names: Vec<&str> = names.map(|(name, _)| name).collect();
        f.write_str(&names.join(", "))
    }
}

impl Role {
    /// The role of a guest, by its index, in a phase.
    pub fn of(guest: usize, phase: usize) -> Self {
        ROLES[(guest + phase * ROTATION) % VMS]
    }

    /// The first guest, by its index, that has this role in a phase.
    ///
    /// # Errors
    /// None has it.
    pub fn guest(self, phase: usize) -> Outcome<usize> {
        let guest = (0..VMS).find(|guest| Self::of(*guest, phase) == self);
        guest.ok_or_else(|| Failure::run("no guest has this role"))
    }
}

/// Starts and ends the work inside the guests.
///
/// # Errors
/// A guest does not answer.
pub fn begin_phase(guests: &Guests, phase: usize) -> Outcome {
    for (at, guest) in guests.lab.guests().iter().enumerate() {
        let computed = phase > 0 && Role::of(at, phase - 1) == Role::Batch;
        let computes = Role::of(at, phase) == Role::Batch;
        if computed && !computes {
            guest.stop(HOG).map_err(lab_failure)?;
        }
        if computes && !computed {
            guest.start(HOG, Workload::hog()).map_err(lab_failure)?;
        }
    }
    Ok(())
}

/// Ends all work inside the guests.
///
/// # Errors
/// A guest does not answer.
pub fn end(guests: &Guests, phase: usize) -> Outcome {
    for guest in with_role(guests, phase, Role::Batch) {
        guest.stop(HOG).map_err(lab_failure)?;
    }
    Ok(())
}

/// What a window showed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reading {
    /// Delays (ms) of each of the [`WAITING`] roles: of pages from the planned moment to the answer, of voice what a packet took longer
    /// than the fastest one.
    pub delays: [Sorted; WAITING.len()],
    /// Loaded files, MiB/s.
    pub files: f64,
    /// Read from HDFS, MiB/s; NaN for guests without it.
    pub hdfs: f64,
    /// Work of the guests that compute, units/s by their own clocks.
    pub work: f64,
}

/// Requests per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    pages: f64,
    calendar: f64,
}

impl Rates {
    /// Measures what a core serves in the first phase under stock scheduling: half of what a fair share of it serves, of both servers.
    ///
    /// # Errors
    /// A request fails.
    pub fn measure(bed: &Bed, sampler: &mut ThreadSampler, seed: u64) -> Outcome<Self> {
        let share = 1.0 / VMS as f64;
        let pages = Capacity::measure(&bed.guests, sampler, CAPACITY_TIME, seed)?;
        let page = Http {
            requests: MAX_REQUESTS,
            limit: CALENDAR_TIME,
            grace: GRACE,
            client: bed.guests.client(seed),
            ..bed.calendar_page(0)?
        };
        let to = bed.address(Role::Calendar, 0)?;
        let pids = [bed.guests.pids()[Role::Calendar.guest(0)?]];
        let before = sampler.vms(&pids)?;
        let served = ask(&bed.guests.lab, to, &page)?.rate();
        let used = sampler.vms(&pids)?.since(&before);
        let used = used.first().map_or(0.0, |used| used.share);
        Ok(Self {
            pages: pages.rate(LOAD, share),
            calendar: Capacity::of(served, used)?.rate(LOAD, share),
        })
    }
}

/// Measures a window of so many seconds. The inner error is the reason why it is refused: the load generator was late itself.
///
/// # Errors
/// A request fails, or a guest does not answer.
pub fn measure(
    bed: &mut Bed,
    phase: usize,
    rates: Rates,
    time: Duration,
    seed: u64,
) -> Outcome<Result<Reading, String>> {
    let _awake = KeepAwake::start()?;
    let client = bed.guests.client(seed);
    // Requests in an open loop.
    let open = |rate: f64, page: Http| Http {
        arrivals: Arrivals::poisson(rate),
        connections: 64,
        keep_alive: true,
        requests: MAX_REQUESTS,
        limit: time,
        grace: GRACE,
        client,
        ..page
    };
    let to_pages = bed.address(Role::Pages, phase)?;
    let pages = open(rates.pages, Http::default());
    let to_calendar = bed.address(Role::Calendar, phase)?;
    let calendar = open(rates.calendar, bed.calendar_page(phase)?);
    let to_files = bed.address(Role::Files, phase)?;
    let files = Http {
        path: format!("/page{FILE_KIB}k"),
        bytes: FILE_KIB << 10,
        keep_alive: true,
        requests: MAX_REQUESTS,
        limit: time,
        grace: GRACE,
        // Its copying must not delay the other clients.
        client: Client {
            fifo: None,
            ..client
        },
        ..Http::default()
    };
    let to_voice = bed.address(Role::Voice, phase)?;
    let voice = Call {
        up: Stream::voice(CALLS, (time.as_millis() / 20) as u32),
        both: false,
        client,
        ..Call::default()
    };
    let (guests, reader) = bed.parts(phase)?;
    let lab = &guests.lab;
    let before = work(guests, phase)?;
    let (pages, calendar, files, voice, hdfs) = std::thread::scope(|scope| {
        let pages = scope.spawn(|| ask(lab, to_pages, &pages));
        let calendar = scope.spawn(|| ask(lab, to_calendar, &calendar));
        let files = scope.spawn(|| ask(lab, to_files, &files));
        let voice = scope.spawn(|| load::call(lab, to_voice, &voice));
        let hdfs = scope.spawn(|| read(reader, time));
        let failed = |_| Failure::run("the load's thread failed");
        Ok::<_, Failure>((
            pages.join().map_err(failed)??,
            calendar.join().map_err(failed)??,
            files.join().map_err(failed)??,
            voice.join().map_err(failed)?.map_err(lab_failure)?,
            hdfs.join().map_err(failed)??,
        ))
    })?;
    let after = work(guests, phase)?;
    if let Err(late) = pages.check_punctual(2) {
        return Ok(Err(late.to_string()));
    }
    let per_s = std::iter::zip(before, after)
        .map(|((u0, s0), (u1, s1))| (u1 - u0) as f64 / (s1 - s0).max(0.001));
    let transit: Vec<f64> = (voice.up.iter())
        .map(|packet| packet.us - f64::from(packet.due_us))
        .collect();
    let least = transit.iter().copied().fold(f64::INFINITY, f64::min);
    let transit: Vec<f64> = transit.iter().map(|us| us - least).collect();
    Ok(Ok(Reading {
        delays: [&pages.us, &calendar.us, &transit].map(|us| milliseconds(us)),
        files: files.answered as f64 * FILE_KIB as f64 / 1024.0 / files.seconds.max(0.001),
        hdfs,
        work: per_s.sum(),
    }))
}

/// Reads a file of HDFS until the time is over. Returns MiB/s, NaN without a client.
fn read(reader: Option<(&mut hadoop::Client, String)>, time: Duration) -> Outcome<f64> {
    let Some((client, file)) = reader else {
        return Ok(f64::NAN);
    };
    let (begin, mut bytes) = (Instant::now(), 0);
    while begin.elapsed() < time {
        let read = client.ask(&format!("stock read {file} 65536"));
        bytes += read.map_err(lab_failure)?.bytes;
    }
    Ok(bytes as f64 / f64::from(1 << 20) / begin.elapsed().as_secs_f64())
}

fn with_role(guests: &Guests, phase: usize, role: Role) -> impl Iterator<Item = &Guest> {
    let guests = guests.lab.guests().iter().enumerate();
    guests
        .filter(move |(at, _)| Role::of(*at, phase) == role)
        .map(|(_, guest)| guest)
}

/// Units of work so far and the guest's own time (s), of all guests that compute. Asks all at once, because each waits for the core
/// before it answers.
fn work(guests: &Guests, phase: usize) -> Outcome<Vec<(u64, f64)>> {
    std::thread::scope(|scope| {
        let asked: Vec<_> = with_role(guests, phase, Role::Batch)
            .map(|guest| scope.spawn(|| guest.stat(HOG).map_err(lab_failure)))
            .collect();
        let answers = asked.into_iter().map(|asked| {
            let stat = asked
                .join()
                .map_err(|_| Failure::run("the thread that asks a guest failed"))??;
            Ok((stat.units, stat.up_ms as f64 / 1e3))
        });
        answers.collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mixed::PHASES;

    #[test]
    fn a_set_says_whom_it_has() {
        let all: Vec<String> = Set::all().map(|set| set.to_string()).collect();
        assert_eq!((all.len(), all[0].as_str()), (7, "pages"));
        assert_eq!(all[6], "pages, calendar, voice");
        assert!(!Set(7).has(Role::Files) && Set(2).has(Role::Calendar) && !Set(2).has(Role::Pages));
    }

    #[test]
    fn every_guest_gets_another_role_in_each_phase() {
        for phase in 0..PHASES {
            let roles: Vec<Role> = (0..VMS).map(|guest| Role::of(guest, phase)).collect();
            let count = |role: Role| roles.iter().filter(|r| **r == role).count();
            let once = [Role::Files, Role::DataNode, Role::Reader, Role::Idle];
            assert!(WAITING.into_iter().chain(once).all(|role| count(role) == 1));
            assert_eq!(count(Role::Batch), 2);
            let before = |guest| phase > 0 && Role::of(guest, phase - 1) == roles[guest];
            assert!(!(0..VMS).any(before));
        }
    }
}
