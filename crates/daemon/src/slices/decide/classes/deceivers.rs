// SPDX-License-Identifier: Apache-2.0
//! VMs that pretend to be latency sensitive beside three that compute and a server: they gain nothing beyond their share, and nobody
//! loses by them.

use super::simulated::{Auto, MICROSLICE, S, TICK};
use super::*;
use viola_policy::slices::simulate::{Behaviour, Host, Usage, slowest_mean};

/// Time of a run.
const TIME: Nanos = 300 * S;
/// Part of its CPU time, or of its delay, that a VM may win or lose by another's pretence.
const TOLERANCE: f64 = 0.02;

/// It computes, and sleeps for so short a time that it hardly loses any, to wake up often.
const NAPS: Behaviour = Behaviour::Duty {
    period: 2 * MS,
    on: 2 * MS - 50_000,
};
/// A server that wants a tenth of the core.
const SERVER: Behaviour = Behaviour::Duty {
    period: 10 * MS,
    on: MS,
};
/// What the deceiver does in its quiet seconds.
const REQUESTS: Behaviour = Behaviour::Duty {
    period: 10 * MS,
    on: 100_000,
};

/// CPU time of each VM, ns, and the mean of the server's slowest twentieth of the delays, ns.
#[derive(Debug)]
struct Totals {
    work: Vec<f64>,
    delay: f64,
}

/// Runs a host whose first VM does what `deceiver` says in each second. `believed`: its class is the one that viola chooses; else
/// batch.
fn run(deceiver: impl Fn(u64) -> Behaviour, believed: bool) -> (Totals, Auto) {
    let behaviours = |second| {
        let busy = Behaviour::Busy;
        [deceiver(second), SERVER, busy, busy, busy]
    };
    let vms = behaviours(0).len();
    let mut host = Host::new(&behaviours(0), MICROSLICE, 7);
    let mut classes = Auto::new(vms);
    let (mut work, mut delays) = (vec![0.0; vms], Vec::new());
    let mut ls = vec![false; vms];
    for tick in 0..TIME / TICK {
        host.set_behaviours(&behaviours(tick * TICK / S));
        host.set_classes(&ls);
        let got: Vec<Usage> = host.run(TICK).unwrap();
        // The deceiver's packets are those that it sends itself.
        ls = classes.tick(&got, |vm| vm < 2);
        ls[0] &= believed;
        for (sum, got) in work.iter_mut().zip(&got) {
            *sum += got.run as f64;
        }
        delays.extend(&got[1].wakes);
    }
    let delay = slowest_mean(delays);
    (Totals { work, delay }, classes)
}

/// The fair part of the core for one of the three that compute (max-min fairness: none gets more as long as another one that gets
/// less wants more).
fn fair(deceiver: Behaviour) -> f64 {
    let wants = |behaviour| match behaviour {
        Behaviour::Duty { period, on } => on as f64 / period as f64,
        _ => 1.0,
    };
    let left = 1.0 - wants(SERVER);
    (left / 4.0).max((left - wants(deceiver)) / 3.0)
}

fn assert_useless(name: &str, deceiver: impl Fn(u64) -> Behaviour) {
    let (as_batch, _) = run(&deceiver, false);
    let (got, auto) = run(&deceiver, true);
    let lines = auto.changes.iter();
    let lines: Vec<_> = lines
        .map(|(at, line)| format!("{} s: {line}", at / S))
        .collect();
    let log = format!("{name}: {as_batch:.0?}, {got:.0?}, {lines:#?}");
    let share = TIME as f64 / got.work.len() as f64;
    assert!(
        got.work[0] <= (1.0 + TOLERANCE) * share.max(as_batch.work[0]),
        "{log}"
    );
    // Slices in turn, as on stock, give less than its share to a VM that sleeps often. That it gets its share is no harm.
    let fair: f64 = (0..TIME / S)
        .map(|second| fair(deceiver(second)) * S as f64)
        .sum();
    for (got, before) in std::iter::zip(&got.work, &as_batch.work).skip(2) {
        assert!(
            *got >= (1.0 - TOLERANCE) * before.min(fair),
            "fair {fair:.0}; {log}"
        );
    }
    assert!(got.work[1] >= (1.0 - TOLERANCE) * as_batch.work[1], "{log}");
    assert!(got.delay <= 1.05 * as_batch.delay, "{log}");
}

#[test]
fn a_vm_that_computes_and_sends_itself_packets_gains_nothing() {
    assert_useless("naps", |_| NAPS);
}

#[test]
fn a_vm_that_changes_its_role_each_second_gains_nothing() {
    let alternates = |second: u64| match second % 2 {
        0 => Behaviour::Busy,
        _ => REQUESTS,
    };
    assert_useless("alternates", alternates);
    let naps = |second: u64| match second % 2 {
        0 => NAPS,
        _ => REQUESTS,
    };
    assert_useless("alternates with naps", naps);
    let five = |second: u64| if second % 60 < 40 { REQUESTS } else { NAPS };
    assert_useless("requests for 40 s, then naps for 20", five);
}
