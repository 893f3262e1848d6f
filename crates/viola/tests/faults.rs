// SPDX-License-Identifier: Apache-2.0
//! Faults while slots run on real VMs. When a process dies, hangs or is stopped, the VMs continue with their previous
//! scheduling.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::guests::{Rig, signal, within};
use common::{stderr, viola};
use rustix::process::Signal;

const ALL: [&str; 4] = ["va", "vb", "vc", "vd"];
const CHANGE_TIMEOUT: Duration = Duration::from_millis(1500);

/// The daemon starts slots again by itself after such a fault.
fn assert_slots_come_back(rig: &mut Rig) {
    rig.wait_for_slots();
    rig.assert_guests_work(&ALL);
}

#[test]
fn a_killed_controller() {
    let mut rig = Rig::four_busy("");
    let (_, controller) = rig.helpers();
    signal(controller, Signal::KILL);
    rig.assert_stock_within(CHANGE_TIMEOUT);
    rig.assert_guests_work(&ALL);
    assert_slots_come_back(&mut rig);
    assert!(
        rig.daemon.log().contains("controller died"),
        "{}",
        rig.daemon.log()
    );
}

#[test]
fn a_stopped_controller() {
    let mut rig = Rig::four_busy("");
    let (_, controller) = rig.helpers();
    signal(controller, Signal::STOP);
    rig.assert_stock_within(CHANGE_TIMEOUT);
    rig.assert_guests_work(&ALL);
    assert_slots_come_back(&mut rig);
    assert!(
        rig.daemon.log().contains("hung and was killed"),
        "{}",
        rig.daemon.log()
    );
}

#[test]
fn a_killed_watchdog() {
    let mut rig = Rig::four_busy("");
    let (watchdog, controller) = rig.helpers();
    signal(watchdog, Signal::KILL);
    rig.assert_stock_within(CHANGE_TIMEOUT);
    within(CHANGE_TIMEOUT, "the controller ends", || {
        !std::path::Path::new(&format!("/proc/{controller}/exe")).exists()
    });
    rig.assert_guests_work(&ALL);
    assert_slots_come_back(&mut rig);
}

#[test]
fn a_stopped_watchdog() {
    let mut rig = Rig::four_busy("");
    let (watchdog, _) = rig.helpers();
    signal(watchdog, Signal::STOP);
    rig.assert_stock_within(Duration::from_secs(5));
    rig.assert_guests_work(&ALL);
    assert_slots_come_back(&mut rig);
}

#[test]
fn a_killed_daemon() {
    let rig = Rig::four_busy("");
    let (watchdog, controller) = rig.helpers();
    rig.daemon.signal(Signal::KILL);
    rig.assert_stock_within(CHANGE_TIMEOUT);
    for pid in [watchdog, controller] {
        within(CHANGE_TIMEOUT, "helpers end", || {
            !std::path::Path::new(&format!("/proc/{pid}/exe")).exists()
        });
    }
    rig.assert_guests_work(&ALL);
    assert!(
        !rig.daemon.run_dir().join("slots.json").exists(),
        "nothing is left to restore"
    );
}

#[test]
fn a_daemon_killed_in_every_phase() {
    // The delays reach from the first instant of starting slots to well after it. All changes made by then must be undone.
    let guests = [("va", common::guests::HOG), ("vb", common::guests::HOG)];
    let mut rig = Rig::boot(&guests, "");
    for delay in [0, 5, 10, 20, 40, 80, 160, 320] {
        let mut set = viola();
        set.args(["set", "va", "--class", "ls", "--socket"])
            .arg(rig.daemon.socket());
        let mut set = set
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(delay));
        rig.daemon.kill();
        let _ = set.wait();
        std::thread::sleep(Duration::from_millis(300));
        rig.assert_stock_within(CHANGE_TIMEOUT);
        rig.daemon.restart();
    }
}

#[test]
fn slots_continue_while_the_daemon_is_stopped() {
    let mut rig = Rig::four_busy("");
    rig.daemon.signal(Signal::STOP);
    std::thread::sleep(Duration::from_secs(1));
    assert!(rig.all_by_slots());
    rig.assert_guests_work(&ALL);
    rig.daemon.signal(Signal::CONT);
    assert!(rig.daemon.stop().success());
    rig.assert_stock_within(CHANGE_TIMEOUT);
}

#[test]
fn all_three_killed_at_once_and_restored_by_hand() {
    let rig = Rig::four_busy("");
    let (watchdog, controller) = rig.helpers();
    // All are stopped first, so that none can react to the death of another.
    for pid in [rig.daemon.pid(), watchdog, controller] {
        signal(pid, Signal::STOP);
    }
    for pid in [rig.daemon.pid(), watchdog, controller] {
        signal(pid, Signal::KILL);
    }
    std::thread::sleep(Duration::from_millis(300));
    assert!(
        !rig.all_stock(),
        "the threads were restored without a process to do it"
    );
    let restore = || {
        viola()
            .args(["restore", "--run-dir"])
            .arg(rig.daemon.run_dir())
            .output()
            .unwrap()
    };
    let o = restore();
    assert!(o.status.success(), "{}", stderr(&o));
    rig.assert_stock_within(Duration::from_millis(200));
    assert!(
        restore().status.success(),
        "restoring twice changes nothing"
    );
    rig.assert_guests_work(&ALL);
}

#[test]
fn all_three_killed_at_once_and_restored_by_the_next_start() {
    let mut rig = Rig::four_busy("");
    let (watchdog, controller) = rig.helpers();
    let daemon = rig.daemon.pid();
    for pid in [daemon, watchdog, controller] {
        signal(pid, Signal::STOP);
    }
    for pid in [daemon, watchdog, controller] {
        signal(pid, Signal::KILL);
    }
    rig.daemon.ended();
    let dir = std::mem::replace(&mut rig.daemon.dir, tempfile::tempdir().unwrap());
    common::write_config(dir.path(), "[slices]\nenabled = false\n");
    let _next = common::Daemon::in_folder(dir, &[]);
    rig.assert_stock_within(CHANGE_TIMEOUT);
}

#[test]
fn a_vm_that_dies_in_its_slot() {
    let mut rig = Rig::four_busy("");
    for name in ["va", "vb"] {
        rig.guest(name).kill();
        rig.assert_guests_work(&["vc", "vd"]);
    }
    // The only latency-sensitive VM is gone, so no slots are needed.
    rig.assert_stock_within(Duration::from_secs(3));
    assert!(rig.daemon.stop().success());
}

#[test]
fn a_guest_that_reboots() {
    let mut rig = Rig::four_busy("");
    rig.guest("va").reboot().unwrap();
    rig.wait_for_slots();
    let shares = rig.shares(&ALL, Duration::from_secs(2));
    assert!(
        shares.iter().all(|s| (18.0..32.0).contains(s)),
        "{shares:?}"
    );
}
