// SPDX-License-Identifier: Apache-2.0
//! Delays of packets and wake-ups on the running kernel: a process stands for a vCPU, and packets of the loopback interface of
//! a network namespace of their own for those of the VM. Needs root, a kernel with BTF and two cores.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::net::UdpSocket;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::{CORE, Process, SPIN, nap};
use viola_host::attrs::{self, SchedAttr};
use viola_host::{CpuSet, Tid, proc};
use viola_meter::acct::{Acct, GuestPackets, HistCounters, Role};
use viola_meter::{Histogram, Waits};

const LOOPBACK: u32 = 1;
const MS: u64 = 1_000_000;

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

/// This thread's own network, whose packets go to VM `vm`.
struct Wire {
    from: UdpSocket,
    to: UdpSocket,
}

impl Wire {
    fn to_vm(acct: &mut Acct, vm: u32) -> Self {
        pin(0);
        // SAFETY: a plain system call for this thread alone.
        let own = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        assert_eq!(own, 0, "needs root");
        let up = ["link", "set", "lo", "up"];
        assert!(Command::new("ip").args(up).status().unwrap().success());
        let netns = proc::netns(tid()).unwrap().unwrap() as u32;
        let to_guest = GuestPackets::Received;
        acct.watch_nic(LOOPBACK, netns, to_guest, vm, None).unwrap();
        let socket = || UdpSocket::bind("127.0.0.1:0").unwrap();
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

fn tid() -> Tid {
    rustix::thread::gettid().as_raw_nonzero().get() as Tid
}

fn pin(core: u32) {
    let core: CpuSet = [core].into_iter().collect();
    let _ = attrs::set_affinity(tid(), &core).unwrap();
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
    nap(30);
    let delays = difference(&acct.delays().vm(vm).packets, &before);
    assert_eq!(delays.count(), sent, "each packet counts once");
    delays
}

/// Starts a vCPU that is always busy.
fn busy_vcpu(acct: &mut Acct, vm: u32, account: u32) -> Process {
    let vcpu = Process::start(SPIN);
    nap(50);
    assert!(acct.enrol(vcpu.tid(), vm, account, Role::Vcpu).unwrap());
    nap(50);
    vcpu
}

/// Holds [`CORE`] for so long, in the real-time class.
fn hold_core(time: Duration) {
    std::thread::spawn(move || {
        pin(CORE);
        let _ = attrs::set(tid(), &SchedAttr::fifo(20)).unwrap();
        let begin = Instant::now();
        while begin.elapsed() < time {
            std::hint::spin_loop();
        }
    });
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
    let delays = packets_during(&acct, 3, || {
        hold_core(Duration::from_millis(20));
        nap(2);
        wire.send(Duration::from_millis(10))
    });
    let least = delays.quantile(0.01).unwrap();
    assert!(least > 4 * MS, "the neighbour held the core on: {delays:?}");
    assert!(delays.quantile(1.0).unwrap() < 40 * MS, "{delays:?}");
    let waits = Waits {
        histogram: difference(&acct.accounts().waits(10), &before),
        time: begin.elapsed().as_nanos() as u64,
    };
    // One wait of 20 ms in about 42 ms: somebody who comes at a random moment meets it with probability 1/2.
    let most = waits.residual_quantile(0.99).unwrap();
    assert!((15 * MS..30 * MS).contains(&most), "{most}: {waits:?}");
    let mean = waits.residual_mean().unwrap();
    assert!((2 * MS..8 * MS).contains(&mean), "{mean}: {waits:?}");
}

#[test]
fn a_packet_waits_for_any_vcpu_of_the_vm_but_not_for_its_service_threads() {
    let _turn = turn();
    let mut acct = Acct::load().unwrap();
    let wire = Wire::to_vm(&mut acct, 4);
    let (first, second) = (Process::start(SPIN), Process::start(SPIN));
    // The second vCPU has a core of its own, and shares it with the sender only.
    let other: CpuSet = [0].into_iter().collect();
    let _ = attrs::set_affinity(second.tid() as Tid, &other).unwrap();
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
    acct.enrol(sleeper.tid(), 5, 30, Role::Vcpu).unwrap();
    let wakes_during = |act: &dyn Fn()| {
        let before = acct.delays().vm(5).wakes;
        act();
        difference(&acct.delays().vm(5).wakes, &before)
    };
    let alone = wakes_during(&|| nap(400));
    assert!((10..=22).contains(&alone.count()), "{alone:?}");
    assert!(alone.quantile(0.5).unwrap() < MS, "{alone:?}");
    let behind = wakes_during(&|| {
        hold_core(Duration::from_millis(60));
        nap(100);
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
