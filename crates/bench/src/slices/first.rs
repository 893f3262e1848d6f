// SPDX-License-Identifier: Apache-2.0
//! The first 10,000 pings after viola starts. Each has its own timestamp, so that a trace of the core can explain a
//! late one.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use viola_lab::load::{self, Ping};

use crate::harness::cpu::ThreadSampler;
use crate::harness::guests::{self, Guests, names};
use crate::harness::row::{Goal, Row};
use crate::harness::side::lab_failure;
use crate::harness::trace::{CoreTrace, Switch};
use viola_cli::error::Outcome;
use viola_cli::interrupt;
use viola_report::stats::figure;

/// A ping above this round trip is late, ms.
pub const LATE_PING_MS: f64 = 5.0;
/// Maximum number of late pings that are described.
const DESCRIBED: usize = 5;
/// Maximum number of threads named per late ping.
const MAX_NAMED_THREADS: usize = 3;

/// A late ping.
#[derive(Debug, Clone, PartialEq)]
pub struct LatePing {
    /// Time since viola started, seconds.
    pub at_s: f64,
    /// Round trip, ms; `None` without a reply.
    pub ms: Option<f64>,
    /// Threads that had the core meanwhile, with their time in ms, longest first.
    pub core_users: Vec<(String, f64)>,
}

impl LatePing {
    /// One line of text.
    fn text(&self) -> String {
        let rtt = self
            .ms
            .map_or("no answer".into(), |ms| format!("{} ms", figure(ms)));
        let core_users: Vec<String> = self
            .core_users
            .iter()
            .take(MAX_NAMED_THREADS)
            .map(|(who, ms)| format!("{who} {} ms", figure(*ms)))
            .collect();
        let core_users = if core_users.is_empty() {
            "no trace".into()
        } else {
            core_users.join(", ")
        };
        format!(
            "{rtt} at {:.2} s (on the core meanwhile: {core_users})",
            self.at_s
        )
    }
}

/// Sends `count` pings, the first one at once. Returns the late ones.
///
/// # Errors
/// The web server has no network, or pings cannot be sent.
pub fn pings(
    guests: &Guests,
    sampler: &mut ThreadSampler,
    core: usize,
    count: usize,
    seed: u64,
) -> Outcome<Vec<LatePing>> {
    let web = guests::address(guests.web())?;
    let over = AtomicBool::new(false);
    let (late, record) = std::thread::scope(|scope| {
        let recorder = scope.spawn(|| record(core, &over));
        let late = send(guests, web, count, seed);
        over.store(true, Ordering::Relaxed);
        (late, recorder.join().unwrap_or_default())
    });
    let owners = sampler.owners(&guests.pids())?;
    let vms = names(guests.pids().len());
    let name = |tid| {
        let vm = owners.get(&tid).and_then(|vm| vms.get(*vm));
        vm.or_else(|| record.names.get(&tid))
            .cloned()
            .unwrap_or_default()
    };
    let late = late?.into_iter().map(|(mut late, from, to)| {
        late.core_users = core_users(&record.switches, from, to, name);
        late
    });
    Ok(late.collect())
}

/// Late pings with their span of CLOCK_MONOTONIC (ns).
fn send(
    guests: &Guests,
    web: std::net::Ipv4Addr,
    count: usize,
    seed: u64,
) -> Outcome<Vec<(LatePing, u64, u64)>> {
    let started = Instant::now();
    let mut late = Vec::new();
    let mut random = seed | 1;
    for number in 0..count {
        if number > 0 {
            // xorshift64, scaled to 3..12 ms.
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            std::thread::sleep(Duration::from_micros(3000 + random % 9001));
        }
        interrupt::check()?;
        let client = guests.client(seed.wrapping_add(number as u64));
        let one = Ping {
            count: 1,
            grace: Duration::from_secs(2),
            client,
            ..Ping::default()
        };
        let (at_s, from) = (started.elapsed().as_secs_f64(), monotonic());
        let found = load::ping(&guests.lab, web, &one).map_err(lab_failure)?;
        let ms = found.us.first().map(|us| us / 1e3);
        if ms.is_none_or(|ms| ms > LATE_PING_MS) {
            late.push((
                LatePing {
                    at_s,
                    ms,
                    core_users: Vec::new(),
                },
                from,
                monotonic(),
            ));
        }
    }
    Ok(late)
}

fn monotonic() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Trace of the core.
#[derive(Debug, Default)]
struct Record {
    switches: Vec<Switch>,
    /// Names of the threads that had the core.
    names: HashMap<i32, String>,
}

/// Traces the core until `end` is set. Records nothing without the permission.
fn record(core: usize, over: &AtomicBool) -> Record {
    let mut record = Record::default();
    let Ok(mut trace) = CoreTrace::start(core) else {
        return record;
    };
    let mut last = false;
    while !last {
        last = over.load(Ordering::Relaxed);
        trace.read();
        // Read the names at once; short-lived processes soon disappear.
        for switch in trace.switches.drain(..) {
            record
                .names
                .entry(switch.to)
                .or_insert_with(|| comm(switch.to));
            record.switches.push(switch);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    record
}

fn comm(tid: i32) -> String {
    let comm = match tid {
        0 => "idle".into(),
        _ => std::fs::read_to_string(format!("/proc/{tid}/comm")).unwrap_or_default(),
    };
    match comm.trim() {
        "" => "a thread that ended at once".into(),
        comm => comm.to_owned(),
    }
}

/// Threads that had the core in a span of time, longest first.
fn core_users(
    switches: &[Switch],
    from: u64,
    to: u64,
    name: impl Fn(i32) -> String,
) -> Vec<(String, f64)> {
    let mut sum: HashMap<String, f64> = HashMap::new();
    let first = switches.partition_point(|s| s.at <= from).saturating_sub(1);
    for pair in switches[first.min(switches.len())..].windows(2) {
        if pair[0].at >= to {
            break;
        }
        let span = pair[1].at.min(to).saturating_sub(pair[0].at.max(from));
        *sum.entry(name(pair[0].to)).or_default() += span as f64 / 1e6;
    }
    let mut sum: Vec<(String, f64)> = sum.into_iter().filter(|(_, ms)| *ms >= 0.01).collect();
    sum.sort_by(|a, b| b.1.total_cmp(&a.1));
    sum
}

/// The row of one state.
pub fn row(state: &str, count: usize, slice: &str, late: &[LatePing]) -> Row {
    let name = format!(
        "pings above {LATE_PING_MS} ms of the first {count} after switching on, {state}, {slice}"
    );
    let row = Row::new(name, "pings")
        .side("viola", [late.len() as f64])
        .goal(Goal::FigureAtMost(1.0), "viola");
    let texts: Vec<String> = late.iter().take(DESCRIBED).map(LatePing::text).collect();
    Row {
        why: (!texts.is_empty()).then(|| texts.join("; ")),
        ..row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64, to: i32) -> Switch {
        Switch {
            at: ms * 1_000_000,
            from: 0,
            to,
        }
    }

    #[test]
    fn only_threads_that_ran_during_the_ping_count() {
        let switches = [at(0, 1), at(10, 2), at(16, 1), at(18, 0), at(30, 2)];
        let core_users = core_users(&switches, 12_000_000, 20_000_000, |tid| format!("t{tid}"));
        let expected = [("t2", 4.0), ("t1", 2.0), ("t0", 2.0)].map(|(n, ms)| (n.to_owned(), ms));
        assert_eq!(core_users[0], expected[0]);
        assert_eq!(core_users.len(), 3);
        assert!((core_users.iter().map(|r| r.1).sum::<f64>() - 8.0).abs() < 1e-9);
    }

    #[test]
    fn without_a_trace_no_thread_is_named() {
        assert!(core_users(&[], 0, 10, |_| String::new()).is_empty());
        let late = LatePing {
            at_s: 1.5,
            ms: Some(7.25),
            core_users: Vec::new(),
        };
        let row = row("LSVM busy", 10, "0.3 ms", &[late]);
        assert_eq!(row.met, Some(true));
        assert_eq!(
            row.why.as_deref(),
            Some("7.25 ms at 1.50 s (on the core meanwhile: no trace)")
        );
    }

    #[test]
    fn two_late_pings_miss_the_goal() {
        let late = LatePing {
            at_s: 0.0,
            ms: None,
            core_users: vec![("ksoftirqd/1".into(), 6.0)],
        };
        let row = row("LSVM idle", 10_000, "0.3 ms", &[late.clone(), late]);
        assert_eq!(row.met, Some(false));
        assert!(row.why.is_some_and(|w| {
            w.starts_with("no answer at 0.00 s (on the core meanwhile: ksoftirqd/1 6.00 ms)")
        }));
    }
}
