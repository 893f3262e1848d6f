// SPDX-License-Identifier: Apache-2.0
//! A reader's worker runs on a core with slots and ranks as part of its VM. Needs root, the lab's image and a host where slots
//! may run.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::guests::{CORE, HOG, Rig, within};
use viola_host::attrs::{self, Policy};
use viola_host::proc;
use viola_proto::vread::Vread;

const CHANGE_TIMEOUT: Duration = Duration::from_secs(15);

/// Process ID of the only reader's worker, once it runs.
fn worker(rig: &Rig) -> u32 {
    let pid = || {
        let shown: Vread = rig.daemon.json(&["vread", "ls"]);
        shown.readers.first().map_or(0, |r| r.pid)
    };
    within(CHANGE_TIMEOUT, "a reader's worker", || pid() > 0);
    pid()
}

/// Whether all threads of a process rank as service threads of a VM, on the VMs' core.
fn ranks(pid: u32) -> bool {
    let threads = proc::thread_ids(pid).unwrap();
    threads.iter().all(|tid| {
        let attr = attrs::get(*tid).unwrap().unwrap();
        let cpus = attrs::affinity(*tid).unwrap().unwrap();
        attr.policy == Policy::Fifo && (10..=23).contains(&attr.rt_priority) && cpus.contains(CORE)
    })
}

fn is_stock(pid: u32) -> bool {
    let threads = proc::thread_ids(pid).unwrap();
    let policy = |tid: &u32| attrs::get(*tid).unwrap().unwrap().policy;
    !threads.is_empty() && threads.iter().all(|tid| policy(tid) == Policy::Normal)
}

#[test]
fn a_readers_worker_ranks_with_its_vm_and_gets_its_own_class_back() {
    let config = "[vread]\nallow = [{ reader = \"va\", datanode = \"vb\" }]\n\
                  [[vm]]\nname = \"va\"\nclass = \"ls\"\n";
    let mut rig = Rig::boot(&[("va", HOG), ("vb", HOG)], config);
    rig.wait_for_slots();
    let pid = worker(&rig);
    within(CHANGE_TIMEOUT, "the worker ranks with its VM", || {
        ranks(pid)
    });
    // Slots end, because no VM is latency-sensitive any more.
    let done = rig.daemon.ask(&["set", "va", "--class", "batch"]);
    assert!(done.status.success(), "{done:?}");
    within(
        CHANGE_TIMEOUT,
        "the worker has stock scheduling again",
        || is_stock(pid),
    );
    let done = rig.daemon.ask(&["set", "va", "--class", "ls"]);
    assert!(done.status.success(), "{done:?}");
    within(CHANGE_TIMEOUT, "the worker ranks again", || ranks(pid));
    // The VM ends, and the worker waits for the next VM of that name.
    common::guests::signal(rig.guest("va").pid(), rustix::process::Signal::KILL);
    within(
        CHANGE_TIMEOUT,
        "the worker outlives its VM, with stock scheduling",
        || is_stock(pid),
    );
}

#[test]
fn a_killed_daemon_leaves_no_worker_real_time() {
    let config = "[vread]\nallow = [{ reader = \"va\", datanode = \"vb\" }]\n\
                  [[vm]]\nname = \"va\"\nclass = \"ls\"\n";
    let mut rig = Rig::boot(&[("va", HOG), ("vb", HOG)], config);
    rig.wait_for_slots();
    let pid = worker(&rig);
    within(CHANGE_TIMEOUT, "the worker ranks with its VM", || {
        ranks(pid)
    });
    rig.daemon.kill();
    within(
        CHANGE_TIMEOUT,
        "the worker has stock scheduling again",
        || is_stock(pid),
    );
    rig.daemon.restart();
    within(
        CHANGE_TIMEOUT,
        "the worker continues and ranks again",
        || ranks(pid),
    );
}
