// SPDX-License-Identifier: Apache-2.0
//! `viola try` and class auto on real VMs. Needs root, the lab's image and a host where slots may run.
#![allow(clippy::unwrap_used)]

mod common;

use std::process::Stdio;
use std::time::Duration;

use common::guests::{HOG, Rig, within};
use common::{stderr, stdout};
use viola_lab::load::{Arrivals, Http, Ping, http, ping};
use viola_proto::{Class, VmList};

/// The shortest trial: 8 pairs of windows.
const LENGTH: Duration = Duration::from_secs(192);
/// How long the changes of classes between its windows take.
const CHANGES: Duration = Duration::from_secs(24);
/// The daemon ends a window's class this long after its last change at the latest, with a second for the change itself.
const LEASE: Duration = Duration::from_secs(27);

/// Pings of a VM with gaps of 4 to 12 ms, for so long.
fn pings(length: Duration) -> Ping {
    let every = Duration::from_millis(8);
    Ping {
        count: (length.as_millis() / every.as_millis()) as usize,
        interval: (every / 2, every * 3 / 2),
        ..Ping::default()
    }
}

#[test]
#[ignore = "a test bed: make test-beds"]
fn class_auto_is_proved_and_no_kill_leaves_half_a_trial() {
    let hogs = [("va", HOG), ("vb", HOG), ("vc", HOG)];
    let mut rig = Rig::boot(&hogs, "[[vm]]\nname = \"va\"\nclass = \"auto\"");
    let to = rig.guest("va").address().unwrap();
    let said = |rig: &Rig, what: &str| rig.daemon.log().matches(what).count();
    let class = |rig: &Rig| {
        let list: VmList = rig.daemon.json(&["vms"]);
        let va = list.vms.iter().find(|vm| vm.name == "va");
        va.map(|vm| vm.class)
    };
    ping(&rig.lab, to, &pings(Duration::from_secs(20))).unwrap();
    assert_eq!(
        said(&rig, "tries class ls (auto)"),
        1,
        "{}",
        rig.daemon.log()
    );
    within(Duration::from_secs(8), "a window of class ls", || {
        class(&rig) == Some(Class::Ls) && rig.all_by_slots()
    });
    // In the middle of a trial: the VMs are stock, and the next daemon begins with class batch and a new trial.
    rig.daemon.kill();
    rig.assert_stock_within(Duration::from_secs(5));
    rig.daemon.restart();
    assert_ne!(class(&rig), Some(Class::Ls));
    let found = "class ls (auto): the delay of its slowest packets is 0.";
    for _ in 0..6 {
        if said(&rig, found) == 0 {
            ping(&rig.lab, to, &pings(Duration::from_secs(30))).unwrap();
        }
    }
    assert_eq!(said(&rig, found), 1, "{}", rig.daemon.log());
    assert_eq!(
        said(&rig, "tries class ls (auto)"),
        2,
        "{}",
        rig.daemon.log()
    );
    let why = stdout(&rig.daemon.ask(&["why", "va"]));
    println!("{why}{}", rig.daemon.log());
    assert!(why.contains("that of class batch, in "), "{why}");
    // What was proved holds in the next daemon at once.
    rig.daemon.kill();
    rig.daemon.restart();
    within(Duration::from_secs(5), "class ls again", || {
        class(&rig) == Some(Class::Ls) && rig.all_by_slots()
    });
    assert_eq!(said(&rig, "tries class ls"), 2, "{}", rig.daemon.log());
}

#[test]
#[ignore = "a test bed: make test-beds"]
fn a_trial_finds_the_gain_of_a_vm_and_no_loss_of_others_and_leaves_nothing_behind() {
    let serves = "workloads = [{ kind = 'nginx' }]";
    let guests = [("va", HOG), ("vb", HOG), ("vc", HOG), ("web", serves)];
    let rig = Rig::boot(&guests, "");
    within(Duration::from_secs(10), "the daemon finds the VMs", || {
        let list: VmList = rig.daemon.json(&["vms"]);
        let is_found = |name| list.vms.iter().any(|vm| vm.name == name);
        ["va", "vb", "vc", "web"].into_iter().all(is_found)
    });
    let [to, web] = ["va", "web"].map(|name| rig.guest(name).address().unwrap());
    let options = pings(LENGTH + CHANGES);
    // Each request on a connection of its own.
    let requests = Http {
        arrivals: Arrivals::poisson(40.0),
        connections: 64,
        requests: 1_000_000,
        limit: LENGTH + CHANGES,
        ..Http::default()
    };
    let done = std::thread::scope(|scope| {
        let pings = scope.spawn(|| ping(&rig.lab, to, &options).unwrap());
        let answers = scope.spawn(|| http(&rig.lab, web, &requests).unwrap());
        let done = rig
            .daemon
            .ask(&["try", "va", "web", "--for", "192s", "--json"]);
        pings.join().unwrap();
        assert_eq!(answers.join().unwrap().first_failure, None);
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
    // Clients' times end at the NIC, so they also have what this host's own load takes from the load generator and the
    // daemon. They are there, and no loss is proved.
    for figure in [
        "answer_p50_ns",
        "answer_p99_ns",
        "connect_p50_ns",
        "connect_p99_ns",
    ] {
        let of_web = &of("web")[figure];
        let part = |name: &str| of_web[name].as_f64().unwrap_or(f64::NAN);
        let (low, high) = (part("low"), part("high"));
        assert!(
            low < 1.0 && (low..=high).contains(&part("ratio")),
            "{figure}: {report:#}"
        );
        assert!(
            part("with").min(part("without")) > 0.0,
            "{figure}: {report:#}"
        );
        assert!(of("vb")[figure].is_null(), "{figure}: {report:#}");
    }
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
