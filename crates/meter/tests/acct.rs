// SPDX-License-Identifier: Apache-2.0
//! The accounting program on the running kernel. Needs root and a kernel with BTF.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use support::{Process, SPIN, nap};
use viola_host::attrs::{self, SchedAttr};
use viola_meter::acct::{Acct, CoreView, EventKind, Ring, Role};

#[test]
fn run_times_of_two_busy_threads_agree_with_schedstat() {
    let mut acct = Acct::load().unwrap();
    let (a, b) = (Process::start(SPIN), Process::start(SPIN));
    nap(50);
    assert!(acct.enrol(a.tid(), 0, 10, Role::Vcpu).unwrap());
    assert!(acct.enrol(b.tid(), 1, 11, Role::Vcpu).unwrap());
    nap(100);
    let (account, hist, cpu) = (
        acct.accounts().times(10),
        acct.accounts().waits(10),
        a.cpu_ns(),
    );
    nap(600);
    let (account2, hist2, cpu2) = (
        acct.accounts().times(10),
        acct.accounts().waits(10),
        a.cpu_ns(),
    );
    let (ran, truth) = ((account2.run - account.run) as f64, (cpu2 - cpu) as f64);
    // Up to the last switch only: a slice may be missing on either side.
    assert!(
        (ran - truth).abs() < 20e6,
        "accounted {ran} ns, schedstat {truth} ns"
    );
    assert!(account2.wait > account.wait, "with a neighbour it waits");
    assert!(hist2.counts.iter().sum::<u32>() > hist.counts.iter().sum::<u32>());
    let other = acct.accounts().times(11);
    assert!(other.run > 0 && other.switches > 0);
}

#[test]
fn a_forked_thread_belongs_to_its_vm_and_is_reported() {
    let mut acct = Acct::load().unwrap();
    let fds = acct.prepare_core(1).unwrap();
    let view = CoreView::open(fds.core_vms.as_fd(), fds.core_ctls.as_fd(), 1, acct.cpus()).unwrap();
    let mut ring = Ring::open(fds.ring.as_fd()).unwrap();
    view.set_managed(true);
    let parent = Process::start("while :; do sleep 0.02; done");
    nap(30);
    assert!(acct.enrol(parent.tid(), 3, 20, Role::Vcpu).unwrap());
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut forked = Vec::new();
    while forked.len() < 3 && Instant::now() < deadline {
        while let Some(e) = ring.pop() {
            assert_eq!((e.vm, e.kind), (3, EventKind::Fork));
            forked.push(e.tid);
        }
        nap(10);
    }
    assert!(forked.len() >= 3, "{forked:?}");
    assert!(view.vm(3).used > 0);
    assert!(view.vm(3).wakes > 0);
    assert_eq!(view.lost(), 0);
}

#[test]
fn a_child_that_begins_in_the_fair_class_wakes_the_controller() {
    let mut acct = Acct::load().unwrap();
    let fds = acct.prepare_core(1).unwrap();
    let view = CoreView::open(fds.core_vms.as_fd(), fds.core_ctls.as_fd(), 1, acct.cpus()).unwrap();
    let mut ring = Ring::open(fds.ring.as_fd()).unwrap();
    view.set_managed(true);
    let parent = Process::start("while :; do sleep 0.3; done");
    nap(50);
    let alone = SchedAttr {
        flags: attrs::RESET_ON_FORK,
        ..SchedAttr::fifo(18)
    };
    let _ = attrs::set(parent.tid() as u32, &alone).unwrap();
    assert!(acct.enrol(parent.tid(), 3, 20, Role::Vcpu).unwrap());
    for _ in 0..3 {
        while ring.pop().is_some() {}
        let begin = Instant::now();
        // Without a wake-up it would sleep until the timeout.
        let mut poll = [PollFd::from_borrowed_fd(fds.ring.as_fd(), PollFlags::IN)];
        let timeout = Timespec::try_from(Duration::from_secs(10)).unwrap();
        assert_eq!(rustix::event::poll(&mut poll, Some(&timeout)).unwrap(), 1);
        assert!(begin.elapsed() < Duration::from_secs(5));
        assert_eq!(ring.pop().unwrap().kind, EventKind::Fork);
    }
}

#[test]
fn wake_ups_are_reported_on_request() {
    let mut acct = Acct::load().unwrap();
    let fds = acct.prepare_core(1).unwrap();
    let view = CoreView::open(fds.core_vms.as_fd(), fds.core_ctls.as_fd(), 1, acct.cpus()).unwrap();
    let mut ring = Ring::open(fds.ring.as_fd()).unwrap();
    let sleeper = Process::start("exec python3 -c 'import time\nwhile True: time.sleep(0.01)'");
    nap(200);
    acct.enrol(sleeper.tid(), 5, 30, Role::Vcpu).unwrap();
    nap(50);
    assert!(ring.pop().is_none(), "no event was requested");
    view.notify(true, true);
    // the sleeper may still be starting
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut kinds: Vec<EventKind> = Vec::new();
    while !(kinds.contains(&EventKind::Wake) && kinds.contains(&EventKind::Block)) {
        assert!(Instant::now() < deadline, "{kinds:?}");
        nap(10);
        kinds.extend(std::iter::from_fn(|| ring.pop()).map(|e| e.kind));
    }
    view.notify(false, false);
    nap(50);
    while ring.pop().is_some() {}
    nap(50);
    assert!(ring.pop().is_none());
    assert!(view.vm(5).runnable <= 1 && view.vm(5).runnable >= 0);
}

#[test]
fn an_unenrolled_thread_is_not_accounted() {
    let mut acct = Acct::load().unwrap();
    let p = Process::start(SPIN);
    nap(30);
    acct.enrol(p.tid(), 0, 40, Role::Vcpu).unwrap();
    nap(50);
    acct.unenrol(p.tid()).unwrap();
    nap(50);
    let before = acct.accounts().times(40);
    nap(100);
    assert_eq!(acct.accounts().times(40).switches, before.switches);
    assert!(
        !acct.enrol(i32::MAX - 1, 0, 40, Role::Vcpu).unwrap(),
        "no such thread"
    );
}

/// The daemon's start waits for the verifier: a program of 330,000 instructions took 20 s in an emulated PC.
#[test]
fn the_verifier_examines_few_instructions() {
    let _acct = Acct::load().unwrap();
    let mut verified = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fdinfo").unwrap() {
        // Another test may have closed it meanwhile.
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap_or_default();
        let line = text.lines().find_map(|l| l.strip_prefix("verified_insns:"));
        verified.extend(line.map(|n| n.trim().parse::<u32>().unwrap()));
    }
    assert!(verified.len() >= 8, "{verified:?}");
    assert!(verified.iter().all(|n| *n < 20_000), "{verified:?}");
}
