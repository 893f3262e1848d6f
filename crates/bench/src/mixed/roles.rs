// SPDX-License-Identifier: Apache-2.0
//! What each guest does: a role is a load from outside, or work inside the guest.

use std::fmt;
use std::net::Ipv4Addr;
use std::time::Duration;

use viola_lab::Guest;
use viola_lab::load::{self, Arrivals, Call, Client, Http, TcpRr};
use viola_lab::media::Stream;
use viola_lab::wire::Workload;

use crate::harness::awake::KeepAwake;
use crate::harness::cell::milliseconds;
use crate::harness::guests::{Guests, HOG};
use crate::harness::load::ask;
use crate::harness::side::lab_failure;
use viola_cli::error::{Failure, Outcome};
use viola_report::stats::Sorted;

/// Number of guests.
pub const VMS: usize = 8;
/// Times between two requests to the database: 100 requests/s.
const DATABASE_INTERVAL: (Duration, Duration) =
    (Duration::from_millis(5), Duration::from_millis(15));
/// Calls at a time.
const CALLS: u32 = 4;
/// Size of a file of the file server, KiB.
const FILE_KIB: usize = 1024;
/// Longest time to wait for the last answers.
const GRACE: Duration = Duration::from_secs(2);
const MAX_REQUESTS: usize = 1_000_000;

/// What a guest does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// nginx; pages of 5 KiB are asked for in an open loop.
    Pages,
    /// A request and an answer of one byte, 100 times a second on one connection, as a database that has all in memory.
    Database,
    /// Voice calls to the guest.
    Voice,
    /// nginx; a client loads files of 1 MiB, one after the other.
    Files,
    /// It computes.
    Batch,
    /// Nothing.
    Idle,
}

/// One guest has each of these roles.
const ROLES: [Role; VMS] = [
    Role::Pages,
    Role::Batch,
    Role::Database,
    Role::Files,
    Role::Batch,
    Role::Voice,
    Role::Idle,
    Role::Batch,
];
/// Every guest has another role in each of three phases.
const ROTATION: usize = 3;

/// The roles that wait for packets; [`Reading::delays`] has an entry for each.
pub const WAITING: [Role; 3] = [Role::Pages, Role::Database, Role::Voice];
/// Their names in rows.
pub const NAMES: [&str; WAITING.len()] = ["pages", "database", "voice"];

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
}

/// Workloads of each guest, whatever its role.
pub const SERVERS: &str =
    "workloads = [{ kind = \"nginx\" }, { kind = \"echo\" }, { kind = \"media\" }]\n";

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
    /// Delays (ms) of each of the [`WAITING`] roles: of pages and of the database from the planned moment to the answer, of voice
    /// what a packet took longer than the fastest one.
    pub delays: [Sorted; WAITING.len()],
    /// Loaded files, MiB/s.
    pub files: f64,
    /// Work of the guests that compute, units/s by their own clocks.
    pub work: f64,
}

/// Measures a window of so many seconds, with this rate of pages per second. The inner error is the reason why it is refused: the
/// load generator was late itself.
///
/// # Errors
/// A request fails, or a guest does not answer.
pub fn measure(
    guests: &Guests,
    phase: usize,
    rate: f64,
    time: Duration,
    seed: u64,
) -> Outcome<Result<Reading, String>> {
    let address = |role| -> Outcome<Ipv4Addr> {
        let guest = with_role(guests, phase, role).next();
        let address = guest.and_then(Guest::address);
        address.ok_or_else(|| Failure::run("a guest has no network"))
    };
    let _awake = KeepAwake::start()?;
    let lab = &guests.lab;
    let client = guests.client(seed);
    let to_pages = address(Role::Pages)?;
    let pages = Http {
        arrivals: Arrivals::poisson(rate),
        connections: 64,
        keep_alive: true,
        requests: MAX_REQUESTS,
        limit: time,
        grace: GRACE,
        client,
        ..Http::default()
    };
    let to_files = address(Role::Files)?;
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
    let to_database = address(Role::Database)?;
    let database = TcpRr {
        count: MAX_REQUESTS,
        interval: DATABASE_INTERVAL,
        limit: time,
        client,
        ..TcpRr::default()
    };
    let to_voice = address(Role::Voice)?;
    let voice = Call {
        up: Stream::voice(CALLS, (time.as_millis() / 20) as u32),
        both: false,
        client,
        ..Call::default()
    };
    let before = work(guests, phase)?;
    let (pages, files, database, voice) = std::thread::scope(|scope| {
        let pages = scope.spawn(|| ask(lab, to_pages, &pages));
        let files = scope.spawn(|| ask(lab, to_files, &files));
        let database = scope.spawn(|| load::tcp_rr(lab, to_database, &database));
        let voice = scope.spawn(|| load::call(lab, to_voice, &voice));
        let failed = |_| Failure::run("the load's thread failed");
        Ok::<_, Failure>((
            pages.join().map_err(failed)??,
            files.join().map_err(failed)??,
            database.join().map_err(failed)?.map_err(lab_failure)?,
            voice.join().map_err(failed)?.map_err(lab_failure)?,
        ))
    })?;
    let after = work(guests, phase)?;
    if let Err(late) = pages.check_punctual(1) {
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
        delays: [&pages.us, &database.us, &transit].map(|us| milliseconds(us)),
        files: files.answered as f64 * FILE_KIB as f64 / 1024.0 / files.seconds.max(0.001),
        work: per_s.sum(),
    }))
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

    #[test]
    fn a_set_says_whom_it_has() {
        let all: Vec<String> = Set::all().map(|set| set.to_string()).collect();
        assert_eq!((all.len(), all[0].as_str()), (7, "pages"));
        assert_eq!(all[6], "pages, database, voice");
        assert!(!Set(7).has(Role::Files) && Set(2).has(Role::Database) && !Set(2).has(Role::Pages));
    }

    #[test]
    fn every_guest_with_a_load_gets_another_role_in_each_phase() {
        for phase in 0..3 {
            let roles: Vec<Role> = (0..VMS).map(|guest| Role::of(guest, phase)).collect();
            for role in WAITING.into_iter().chain([Role::Files, Role::Idle]) {
                assert_eq!(roles.iter().filter(|r| **r == role).count(), 1);
            }
            if phase > 0 {
                let kept = (0..VMS).filter(|&guest| {
                    let role = Role::of(guest, phase);
                    WAITING.contains(&role) && role == Role::of(guest, phase - 1)
                });
                assert_eq!(kept.count(), 0);
            }
        }
    }
}
