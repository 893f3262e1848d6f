// SPDX-License-Identifier: Apache-2.0
//! A process of viola's that dies at any write of a journal leaves VMs that `viola restore` gives back as they were. Part of
//! `make test-beds`: it starts the daemon some thirty times.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::time::{Duration, Instant};

use common::guests::{HOG, Rig, within};
use common::{stderr, viola};
use rustix::process::Signal;
use viola_host::attrs::{self, SchedAttr};
use viola_host::{CpuSet, Tid};

const VMS: [&str; 2] = ["va", "vb"];
/// Time in which the daemon does one thing, or dies.
const STEP_TIMEOUT: Duration = Duration::from_secs(10);

/// Scheduling and affinity of all threads.
type Stock = BTreeMap<Tid, (SchedAttr, CpuSet)>;

fn now(rig: &Rig) -> Stock {
    let threads = VMS.into_iter().flat_map(|name| rig.threads(name));
    threads
        .filter_map(|(tid, attr)| Some((tid, (attr, attrs::affinity(tid).ok()??))))
        .collect()
}

/// Does one thing until `done`. Returns whether the daemon died meanwhile.
fn step(rig: &mut Rig, mut done: impl FnMut(&Rig) -> bool) -> bool {
    let end = Instant::now() + STEP_TIMEOUT;
    while rig.daemon.has_ended().is_none() && !done(rig) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
    rig.daemon.has_ended().is_some()
}

/// Starts a latency-sensitive VM's slots, ends them, starts them again, and ends the daemon.
fn run_daemon(rig: &mut Rig) {
    let set = |class: &'static str| {
        move |rig: &Rig| {
            rig.daemon
                .ask(&["set", "va", "--class", class])
                .status
                .success()
        }
    };
    for class in ["ls", "batch", "ls"] {
        let dead = step(rig, set(class)) || {
            let slots = class == "ls";
            step(rig, |rig| {
                if slots {
                    rig.all_by_slots()
                } else {
                    rig.all_stock()
                }
            })
        };
        if dead {
            return;
        }
    }
    rig.daemon.signal(Signal::TERM);
    step(rig, |_| false);
}

#[test]
#[ignore = "starts the daemon some thirty times: make test-beds"]
fn a_process_that_dies_at_any_write_of_a_journal_leaves_stock_vms() {
    let mut rig = Rig::boot_on("0, 1", &VMS.map(|name| (name, HOG)), "");
    assert!(rig.daemon.stop().success());
    let stock = now(&rig);
    assert!(!stock.is_empty());
    let log = rig.daemon.dir.path().join("crashed");
    for journal in ["slots.json", "affinity.json"] {
        let mut point = 1;
        loop {
            let _ = fs::remove_file(&log);
            let number = point.to_string();
            rig.daemon.start_again_with(&[
                ("VIOLA_CRASH_FILE", OsStr::new(journal)),
                ("VIOLA_CRASH_POINT", OsStr::new(&number)),
                ("VIOLA_CRASH_LOG", log.as_os_str()),
            ]);
            run_daemon(&mut rig);
            if rig.daemon.has_ended().is_none() {
                rig.daemon.kill();
            }
            // As systemd does after the service has ended.
            let what = format!("{journal}, point {point}");
            let restore = viola()
                .args(["restore", "--run-dir"])
                .arg(rig.daemon.run_dir())
                .output()
                .unwrap();
            assert!(restore.status.success(), "{what}: {}", stderr(&restore));
            within(Duration::from_secs(3), &what, || {
                let now = now(&rig);
                now.iter()
                    .all(|(tid, is)| stock.get(tid).is_none_or(|was| was == is))
            });
            assert!(rig.all_stock(), "{what}");
            rig.assert_guests_work(&VMS);
            if !log.exists() {
                break;
            }
            point += 1;
            assert!(point < 100, "{journal} is written without end");
        }
        println!("{journal}: a process died at each of {} points", point - 1);
        assert!(point > 3, "{journal} was never written");
    }
}
