// SPDX-License-Identifier: Apache-2.0
//! nginx in a VM under load for minutes: sequential clients, 200 concurrent ones, clients on a lossy link, and misbehaving
//! ones. The test compares every byte, and at the end no resource may be left. `VIOLA_PIPE_SOAK` sets the duration in seconds,
//! up to 600.
#![allow(clippy::unwrap_used)]

#[path = "pipe/client.rs"]
mod client;
mod common;
#[path = "pipe/rig.rs"]
mod rig;
#[path = "pipe/ways.rs"]
mod ways;

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use libbpf_rs::{MapCore, MapHandle};
use viola_host::proc;

use client::Client;
use common::guests::within;
use rig::{CHANGE_TIMEOUT, MIB, NGINX, Rig, WebSpec};
use ways::{ROUTER, RemoteClient, behind_a_router, disturb};

/// Number of concurrent clients.
const CONCURRENT_CLIENTS: usize = 200;
/// Number of clients on the lossy link.
const LOSSY_CLIENTS: usize = 12;

/// A pseudo-random sequence; the seed determines it.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = self.0.wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % sides
    }
}

/// Totals of all clients.
#[derive(Default)]
struct Totals {
    bodies: AtomicU64,
    left: AtomicU64,
}

/// Runs `what` in each of `count` clients again and again until the time is over. `what` gets the client's number.
fn run_clients(span: Duration, count: usize, what: impl Fn(usize, &mut Dice) + Sync) {
    let end = Instant::now() + span;
    std::thread::scope(|scope| {
        for number in 0..count {
            let what = &what;
            scope.spawn(move || {
                let mut dice = Dice(number as u64 + 1);
                while Instant::now() < end {
                    what(number, &mut dice);
                }
            });
        }
    });
}

/// Fetches some files on one connection.
fn polite(rig: &Rig, had: &Totals, dice: &mut Dice, mut client: Client) {
    for _ in 0..=dice.roll(4) {
        let number = dice.roll(rig.files.len());
        let file = &rig.files[number];
        client.fetch(&format!("/f{number}"), file);
        had.bodies.fetch_add(1, Ordering::Relaxed);
    }
}

/// Misbehaves: closes in the middle, reads with pauses, pipelines requests, or requests ranges.
fn rude(rig: &Rig, had: &Totals, dice: &mut Dice, mut client: Client) {
    let number = dice.roll(rig.files.len());
    let (path, file) = (format!("/f{number}"), &rig.files[number]);
    match dice.roll(4) {
        0 => {
            client.ask(&path, "");
            let mut some = vec![0; dice.roll(file.len())];
            client.0.read_exact(&mut some).unwrap();
            had.left.fetch_add(1, Ordering::Relaxed);
            return;
        }
        1 => {
            client.ask(&path, "");
            assert_eq!(client.head().unwrap(), (200, file.len()));
            for part in file.chunks(file.len() / 7) {
                std::thread::sleep(Duration::from_millis(dice.roll(300) as u64));
                let mut some = vec![0; part.len()];
                client.0.read_exact(&mut some).unwrap();
                assert!(some == part, "{path}");
            }
        }
        2 => {
            (0..3).for_each(|_| client.ask(&path, ""));
            for _ in 0..3 {
                client.compare(&path, file).unwrap();
            }
        }
        _ => {
            let from = dice.roll(file.len());
            let to = from + dice.roll(file.len() - from);
            client.ask(&path, &format!("Range: bytes={from}-{to}\r\n"));
            let (status, body) = client.answer();
            assert!(
                status == 206 && body == file[from..=to],
                "{path} {from} {to}"
            );
        }
    }
    had.bodies.fetch_add(1, Ordering::Relaxed);
}

/// Resources that could leak.
#[derive(Debug)]
struct Resources {
    /// Descriptors and threads of the worker, the agent and the server.
    programs: [(usize, usize); 3],
    /// Sockets in the VM's network namespace on the host.
    sockets: usize,
    rules: usize,
}

impl Resources {
    fn now(rig: &Rig) -> Self {
        let workers = proc::children(rig.daemon.pid()).unwrap();
        let [worker] = workers[..] else {
            panic!("{workers:?}")
        };
        let count = |what: &str| {
            let entries = fs::read_dir(format!("/proc/{worker}/{what}"));
            entries.unwrap().count()
        };
        let lines = |what: &str| {
            let text = fs::read_to_string(format!("/proc/{worker}/net/{what}"));
            text.map_or(0, |text| text.lines().count() - 1)
        };
        let of = |name: &str| {
            let text = rig.sh(&format!(
                "p=$(pidof {name} | tr ' ' '\\n' | sort -n | tail -n 1); ls /proc/$p/fd | wc -l; ls /proc/$p/task | wc -l"
            ));
            let mut numbers = text.split_whitespace().map(|n| n.parse().unwrap());
            (numbers.next().unwrap(), numbers.next().unwrap())
        };
        Self {
            programs: [(count("fd"), count("task")), of("viola-agent"), of("nginx")],
            sockets: lines("tcp") + lines("tcp6"),
            rules: flow_count(worker),
        }
    }

    /// Whether no resource has leaked since `then`.
    fn is_clean(&self, then: &Self) -> bool {
        let mut both = self.programs.iter().zip(&then.programs);
        self.sockets == 0 && self.rules == 0 && both.all(|(a, b)| a.0 <= b.0 && a.1 <= b.1)
    }
}

/// The number of connections in the map of the steering program.
fn flow_count(worker: u32) -> usize {
    let maps: BTreeSet<u32> = fs::read_dir(format!("/proc/{worker}/fdinfo"))
        .unwrap()
        .filter_map(|file| fs::read_to_string(file.unwrap().path()).ok())
        .filter_map(|text| {
            text.split("map_id:")
                .nth(1)?
                .split_whitespace()
                .next()?
                .parse()
                .ok()
        })
        .collect();
    let maps = maps.into_iter().map(MapHandle::from_map_id);
    let maps: Vec<_> = maps.map(Result::unwrap).collect();
    let flows: Vec<_> = maps.iter().filter(|map| map.name() == "flows").collect();
    assert_eq!(flows.len(), 1, "{} maps of the worker", maps.len());
    flows[0].keys().count()
}

#[test]
#[ignore = "minutes: make test-beds"]
fn no_resource_leaks_and_no_byte_is_wrong() {
    let seconds = std::env::var("VIOLA_PIPE_SOAK").map_or(90, |s| s.parse::<u64>().unwrap());
    let span = Duration::from_secs(seconds.clamp(8, 600)) / 4;
    let sizes: Vec<usize> = (0..7).map(|n| (2 + n) * MIB + n * 4321).collect();
    let rig = Rig::with(&WebSpec {
        name: "pi-soak",
        sizes: &sizes,
        more: ROUTER,
        ..WebSpec::default()
    });
    let far: RemoteClient = behind_a_router(&rig);
    rig.web.start(&NGINX, "VIOLA_PIPE_MIN=1000000");
    let had = Totals::default();
    let begun = |what: &str| {
        let work = rig.work();
        let (bodies, mib) = (had.bodies.load(Ordering::Relaxed), work.bytes >> 20);
        println!(
            "{what}: {bodies} bodies; {} begun, {} reset, {mib} MiB by the host",
            work.begun, work.broken
        );
        work
    };
    // Resources that the first pipe creates once are no leak.
    rig.client().fetch("/f0", &rig.files[0]);
    rig.settled(1);
    let before = Resources::now(&rig);

    run_clients(span, 1, |_, dice| polite(&rig, &had, dice, rig.client()));
    begun("one after another");
    run_clients(span, CONCURRENT_CLIENTS, |_, dice| {
        polite(&rig, &had, dice, rig.client())
    });
    begun("many at once");
    disturb(&rig.lab.guests()[1]);
    run_clients(span, LOSSY_CLIENTS, |_, dice| {
        polite(&rig, &had, dice, far.client())
    });
    let work = begun("with loss");
    assert_eq!(work.broken, 0, "{work:?}");
    run_clients(span, 64, |number, dice| match number {
        0..6 => rude(&rig, &had, dice, far.client()),
        6..20 => polite(&rig, &had, dice, rig.client()),
        _ => rude(&rig, &had, dice, rig.client()),
    });
    let work = rig.settled(had.bodies.load(Ordering::Relaxed) / 2);
    begun("rude ones");
    let left = had.left.load(Ordering::Relaxed);
    assert!(work.broken <= left, "{left} clients closed early: {work:?}");
    println!("{}", rig.agent_status());

    let deadline = Instant::now() + CHANGE_TIMEOUT;
    loop {
        let now = Resources::now(&rig);
        if now.is_clean(&before) {
            break;
        }
        assert!(Instant::now() < deadline, "{before:?} before, now {now:?}");
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(
        rig.sh("dmesg | grep -iE 'bug:|oops|call trace' || true")
            .is_empty(),
        "the guest's kernel logged an error"
    );
    within(CHANGE_TIMEOUT, "the agent is idle", || {
        rig.agent_status().contains(": 0 now;")
    });
    rig.client().fetch("/f0", &rig.files[0]);
}
