// SPDX-License-Identifier: Apache-2.0
//! Delays of packets and wake-ups on the running kernel: a process stands for a vCPU, and packets of the loopback interface of
//! a network namespace of their own for those of the VM. Needs root, a kernel with BTF and two cores.
//!
//! The sender and the vCPUs are in the real-time class, so that other work on the machine changes no figure: the sender on core 0,
//! the vCPUs on [`CORE`]. None of them runs for more than a fraction of a second.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::netns::{ip, tid, unshare_network};
use support::{CORE, Process, SPIN, nap};
use viola_host::attrs::{self, SchedAttr};
use viola_host::{CpuSet, Tid, proc};
use viola_meter::acct::{Acct, GuestPackets, HistCounters, Role};
use viola_meter::{Histogram, Waits};

const LOOPBACK: u32 = 1;
const MS: u64 = 1_000_000;

/// Real-time priority of the sender and the vCPUs.
const PRIORITY: u32 = 10;

/// Real-time priority of a neighbour.
const NEIGHBOUR: u32 = 20;

/// The tests share two cores, so one runs at a time.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until no vCPU of the VM runs.
fn until_stopped(acct: &Acct, vm: u32) {
    let begin = Instant::now();
    while acct.delays().vm(vm).running > 0 {
        assert!(begin.elapsed() < Duration::from_secs(1), "it runs on");
    }
}

/// This thread's own network, whose packets go to VM `vm`. The thread is in the real-time class from then on.
struct Wire {
    from: UdpSocket,
    to: UdpSocket,
}

impl Wire {
    fn to_vm(acct: &mut Acct, vm: u32) -> Self {
        pin(0);
        unshare_network();
        ip("link set lo up");
        let netns = proc::netns(tid()).unwrap().unwrap() as u32;
        let to_guest = GuestPackets::Received;
        acct.watch_nic(LOOPBACK, netns, to_guest, vm, None).unwrap();
        let socket = || UdpSocket::bind("127.0.0.1:0").unwrap();
        real_time(tid(), PRIORITY);
        Self {
            from: socket(),
            to: socket(),
        }
    }

    /// Sends packets for so long, a quarter of a millisecond apart. Returns how many.
    fn send(&self, time: Duration) -> u64 {
        let (begin, mut sent) = (Instant::now(), 0);
        while begin.elapsed() < time {
            self.from
                .send_to(&[7; 64], self.to.local_addr().unwrap())
                .unwrap();
            sent += 1;
            while begin.elapsed() < Duration::from_micros(250 * sent) {
                std::hint::spin_loop();
            }
        }
        sent
    }
}

fn pin(core: u32) {
    let core: CpuSet = [core].into_iter().collect();
    let _ = attrs::set_affinity(tid(), &core).unwrap();
}

fn real_time(tid: Tid, priority: u32) {
    let _ = attrs::set(tid, &SchedAttr::fifo(priority)).unwrap();
}

fn difference(new: &HistCounters, old: &HistCounters) -> Histogram {
    let mut h = Histogram::default();
    h.add_difference(new, old);
    h
}

/// What `act` adds to the packet delays of a VM.
fn packets_during(acct: &Acct, vm: u32, act: impl FnOnce() -> u64) -> Histogram {
    let before = acct.delays().vm(vm).packets;
    let sent = act();
    let ended = Instant::now();
    loop {
        nap(10);
        let delays = difference(&acct.delays().vm(vm).packets, &before);
        if delays.count() >= sent || ended.elapsed() > Duration::from_secs(1) {
            assert_eq!(delays.count(), sent, "each packet counts once");
            return delays;
        }
    }
}

/// Starts a vCPU that is always busy.
fn busy_vcpu(acct: &mut Acct, vm: u32, account: u32) -> Process {
    let vcpu = Process::start(SPIN);
    nap(50);
    real_time(vcpu.tid() as Tid, PRIORITY);
    assert!(acct.enrol(vcpu.tid(), vm, account, Role::Vcpu).unwrap());
    nap(50);
    vcpu
}

/// A thread that holds [`CORE`] and lets no vCPU run there, from [`Neighbour::start`] to [`Neighbour::end`] or for a quarter of a
/// second.
struct Neighbour {
    ends: Arc<AtomicBool>,
    thread: JoinHandle<Duration>,
}

impl Neighbour {
    fn start() -> Self {
        let (holds, ends) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let (says, asks) = (Arc::clone(&holds), Arc::clone(&ends));
        let thread = std::thread::spawn(move || Self::hold(&says, &asks));
        while !holds.load(Ordering::Acquire) {
            nap(1);
        }
        Self { ends, thread }
    }

    fn hold(says: &AtomicBool, asks: &AtomicBool) -> Duration {
        // In this order: a thread of the vCPUs' priority would wait for them there.
        real_time(tid(), NEIGHBOUR);
        pin(CORE);
        let begin = Instant::now();
        says.store(true, Ordering::Release);
        while !asks.load(Ordering::Acquire) && begin.elapsed() < Duration::from_millis(250) {
            std::hint::spin_loop();
        }
        begin.elapsed()
    }

    /// Returns for how long it held the core.
    fn end(self) -> Duration {
        self.ends.store(true, Ordering::Release);
        self.thread.join().unwrap()
    }
}

#[test]
fn packets_to_a_vcpu_that_runs_have_no_delay() {
    let _turn = turn();
    let mut acct = Acct::load().unwrap();
    let wire = Wire::to_vm(&mut acct, 3);
    let _vcpu = busy_vcpu(&mut acct, 3, 10);
    let delays = packets_during(&acct, 3, || wire.send(Duration::from_millis(100)));
    // The core may serve somebody else for a moment.
    assert!(delays.quantile(0.9).unwrap() <= 1280, "{delays:?}");
    assert!(delays.quantile(0.99).unwrap() < 10 * MS, "{delays:?}");
}

#[test]
fn packets_to_a_vcpu_that_is_paused_for_20_ms_wait_each_for_the_rest_of_the_pause() {
    let _turn = turn();
    let mut acct = Acct::load().unwrap();
    let wire = Wire::to_vm(&mut acct, 3);
    let vcpu = busy_vcpu(&mut acct, 3, 10);
    let delays = packets_during(&acct, 3, || {
        vcpu.signal(Signal::STOP);
        until_stopped(&acct, 3);
        let sent = wire.send(Duration::from_millis(20));
        vcpu.signal(Signal::CONT);
        sent
    });
    let at = |q| delays.quantile(q).unwrap();
    // The first waits 20 ms, the last hardly; a busy machine adds some.
    assert!((18 * MS..40 * MS).contains(&at(1.0)), "{delays:?}");
    assert!((8 * MS..25 * MS).contains(&at(0.5)), "{delays:?}");
    assert!(at(0.1) < at(0.5) && at(0.5) < at(1.0), "{delays:?}");
    let (first, last) = (at(1.0), at(0.01));
    assert!(first - last > 15 * MS, "each with its own wait: {delays:?}");
    let mean = delays.sum() / delays.count();
    assert!((8 * MS..25 * MS).contains(&mean), "{mean}");
}

#[test]
fn packets_to_a_vcpu_behind_a_real_time_neighbour_wait_for_it_and_so_does_a_random_moment() {
    let _turn = turn();
    let mut acct = Acct::load().unwrap();
    let wire = Wire::to_vm(&mut acct, 3);
    let _vcpu = busy_vcpu(&mut acct, 3, 10);
    let (before, begin) = (acct.accounts().waits(10), Instant::now());
    let mut held = Duration::ZERO;
    let delays = packets_during(&acct, 3, || {
        let neighbour = Neighbour::start();
        let sent = wire.send(Duration::from_millis(10));
        nap(10);
        held = neighbour.end();
        sent
    });
    let time = begin.elapsed();
    let least = delays.quantile(0.01).unwrap();
    assert!(least > 8 * MS, "the neighbour held the core on: {delays:?}");
    let most = delays.quantile(1.0).unwrap();
    let near = |ns: u64, expected: Duration| {
        (0.7..1.4).contains(&(ns as f64 / expected.as_nanos() as f64))
    };
    assert!(near(most, held), "{held:?}: {delays:?}");
    let waits = Waits {
        histogram: difference(&acct.accounts().waits(10), &before),
        time: time.as_nanos() as u64,
    };
    // Somebody who comes at a random moment meets the one wait with probability held / time, and waits half of it on average.
    let most = waits.residual_quantile(0.99).unwrap();
    assert!(near(most, held), "{held:?}, {most}: {waits:?}");
    let mean = waits.residual_mean().unwrap();
    let expected = held.mul_f64(held.as_secs_f64() / time.as_secs_f64() / 2.0);
    assert!(near(mean, expected), "{expected:?}, {mean}: {waits:?}");
}

#[test]
fn a_packet_waits_for_any_vcpu_of_the_vm_but_not_for_its_service_threads() {
    let _turn = turn();
    let mut acct = Acct::load().unwrap();
    let wire = Wire::to_vm(&mut acct, 4);
    // The second one runs while the first one is stopped, and ends after it.
    let (second, first) = (Process::start(SPIN), Process::start(SPIN));
    real_time(first.tid() as Tid, PRIORITY + 1);
    real_time(second.tid() as Tid, PRIORITY);
    nap(50);
    acct.enrol(first.tid(), 4, 20, Role::Vcpu).unwrap();
    acct.enrol(second.tid(), 4, 21, Role::Vcpu).unwrap();
    nap(50);
    let both_stopped = |acct: &Acct| {
        second.signal(Signal::STOP);
        first.signal(Signal::STOP);
        until_stopped(acct, 4);
    };
    second.signal(Signal::STOP);
    let delays = packets_during(&acct, 4, || wire.send(Duration::from_millis(20)));
    assert!(
        delays.quantile(0.9).unwrap() <= 1280,
        "one runs: {delays:?}"
    );
    let delays = packets_during(&acct, 4, || {
        both_stopped(&acct);
        let sent = wire.send(Duration::from_millis(20));
        second.signal(Signal::CONT);
        sent
    });
    assert!(delays.quantile(0.5).unwrap() > 8 * MS, "{delays:?}");
    // From now on the second is a service thread. It runs, and the packets still wait.
    acct.enrol(second.tid(), 4, 21, Role::Service).unwrap();
    let delays = packets_during(&acct, 4, || {
        let sent = wire.send(Duration::from_millis(20));
        first.signal(Signal::CONT);
        sent
    });
    assert!(delays.quantile(0.5).unwrap() > 8 * MS, "{delays:?}");
}

#[test]
fn a_sleeping_vm_that_an_interrupt_wakes_has_a_wake_delay() {
    let _turn = turn();
    let mut acct = Acct::load().unwrap();
    pin(0);
    let sleeper = Process::start("exec python3 -c 'import time\nwhile True: time.sleep(0.02)'");
    nap(300);
    real_time(sleeper.tid() as Tid, PRIORITY);
    acct.enrol(sleeper.tid(), 5, 30, Role::Vcpu).unwrap();
    let wakes_during = |act: &dyn Fn()| {
        let before = acct.delays().vm(5).wakes;
        act();
        difference(&acct.delays().vm(5).wakes, &before)
    };
    real_time(tid(), PRIORITY);
    let alone = wakes_during(&|| nap(400));
    assert!((10..=22).contains(&alone.count()), "{alone:?}");
    assert!(alone.quantile(0.5).unwrap() < MS, "{alone:?}");
    let behind = wakes_during(&|| {
        let neighbour = Neighbour::start();
        nap(60);
        neighbour.end();
        nap(40);
    });
    // It woke while the neighbour held the core, and ran when it ended.
    assert!(behind.quantile(1.0).unwrap() > 30 * MS, "{behind:?}");
}

#[test]
fn packets_that_wait_for_a_vm_that_is_gone_do_not_count_for_the_next_one() {
    let _turn = turn();
    let mut acct = Acct::load().unwrap();
    let wire = Wire::to_vm(&mut acct, 6);
    let old = busy_vcpu(&mut acct, 6, 40);
    old.signal(Signal::STOP);
    until_stopped(&acct, 6);
    wire.send(Duration::from_millis(5));
    acct.unenrol(old.tid()).unwrap();
    let before = acct.delays().vm(6);
    assert!(before.steps.iter().sum::<u32>() > 10, "packets wait");
    acct.begin_vm(6).unwrap();
    let _new = busy_vcpu(&mut acct, 6, 41);
    let after = acct.delays().vm(6);
    assert_eq!(difference(&after.packets, &before.packets).count(), 0);
    assert_eq!(after.runnable, 1, "the new one");
}
