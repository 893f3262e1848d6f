// SPDX-License-Identifier: Apache-2.0
//! `viola try` on real VMs. Needs root, the lab's image and a host where slots may run.
#![allow(clippy::unwrap_used)]

mod common;

use std::process::Stdio;
use std::time::Duration;

use common::guests::{HOG, Rig, within};
use common::{stderr, stdout};
use viola_lab::load::{Ping, ping};
use viola_proto::{Class, VmList};

/// The shortest trial: 8 pairs of windows.
const LENGTH: Duration = Duration::from_secs(192);
/// The daemon ends a window's class this long after its last change at the latest, with a second for the change itself.
const LEASE: Duration = Duration::from_secs(22);

#[test]
#[ignore = "a test bed: make test-beds"]
fn a_trial_finds_the_gain_of_a_vm_and_no_loss_of_others_and_leaves_nothing_behind() {
    let rig = Rig::boot(&[("va", HOG), ("vb", HOG), ("vc", HOG)], "");
    within(Duration::from_secs(10), "the daemon finds the VMs", || {
        let list: VmList = rig.daemon.json(&["vms"]);
        let is_found = |name| list.vms.iter().any(|vm| vm.name == name);
        ["va", "vb", "vc"].into_iter().all(is_found)
    });
    let to = rig.guest("va").address().unwrap();
    let every = Duration::from_millis(8);
    let options = Ping {
        count: ((LENGTH.as_millis() + 8_000) / every.as_millis()) as usize,
        interval: (every / 2, every * 3 / 2),
        ..Ping::default()
    };
    let done = std::thread::scope(|scope| {
        let pings = scope.spawn(|| ping(&rig.lab, to, &options).unwrap());
        let done = rig.daemon.ask(&["try", "va", "--for", "192s", "--json"]);
        pings.join().unwrap();
        done
    });
    assert!(done.status.success(), "{}", stderr(&done));
    let report: serde_json::Value = serde_json::from_str(&stdout(&done)).unwrap();
    println!("{}{report:#}", stderr(&done));
    assert_eq!(report["pairs"], 8);
    let vms = report["vms"].as_array().unwrap();
    let of = |name: &str| vms.iter().find(|vm| vm["name"] == name).unwrap();
    assert!(
        of("va")["p50_ns"]["high"].as_f64().unwrap() < 0.5
            && of("va")["p99_ns"]["ratio"].as_f64().unwrap() < 0.7,
        "{report:#}"
    );
    for name in ["vb", "vc"] {
        let ratio = of(name)["used"]["ratio"].as_f64().unwrap();
        assert!((0.95..1.1).contains(&ratio), "{name}: {report:#}");
    }
    within(Duration::from_secs(3), "stock again", || rig.all_stock());

    // A command that is killed leaves the class of its window for some seconds only.
    let class = || {
        let list: VmList = rig.daemon.json(&["vms"]);
        list.vms.iter().find(|vm| vm.name == "va").unwrap().class
    };
    let mut killed = common::viola()
        .args(["try", "va", "--socket"])
        .arg(rig.daemon.socket())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    within(LEASE, "a window of class ls", || class() == Class::Ls);
    killed.kill().unwrap();
    killed.wait().unwrap();
    within(LEASE, "stock after the command was killed", || {
        class() == Class::Batch && rig.all_stock()
    });
}
