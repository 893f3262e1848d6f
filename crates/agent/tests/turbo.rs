// SPDX-License-Identifier: Apache-2.0
//! A turbo vCPU in a guest made of files: what is changed, and that everything is restored.
#![allow(clippy::unwrap_used)]

mod paper_guest;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use paper_guest::{BOOT, Guest, OURS, read_only};
use tempfile::TempDir;
use viola_agent::turbo::journal::Journal;
use viola_agent::turbo::knob::Part;
use viola_agent::turbo::report::Report;
use viola_agent::turbo::restore::{restore, restore_leftovers};
use viola_agent::turbo::settings::{Applications, Settings};

fn bed() -> (TempDir, Guest, Settings) {
    let folder = tempfile::tempdir().unwrap();
    let guest = Guest::make(&folder.path().join("guest"));
    let settings = Settings {
        journal: folder.path().join("run/turbo.json"),
        ..Settings::default()
    };
    (folder, guest, settings)
}

fn irq(guest: &Guest, irq: u32) -> String {
    guest.get(&format!("/proc/irq/{irq}/smp_affinity_list"))
}

fn why(report: &Report, part: Part) -> String {
    let left = report.left.iter().filter(|left| left.part == part);
    left.map(|left| left.why.clone())
        .collect::<Vec<_>>()
        .join("; ")
}

#[test]
fn io_moves_to_the_turbo_vcpu_applications_off_it_and_the_end_restores_all() {
    let (_folder, guest, settings) = bed();
    guest.routes.lock().unwrap().managed = BTreeSet::from([28]);
    read_only(&guest, "/proc/irq/29/smp_affinity_list");
    let before = guest.all();
    let mut keeper = guest.keeper(&settings);
    assert!(!keeper.report().active);
    keeper.round();
    let got: Vec<String> = [1, 24, 25, 26, 27, 28, 29].map(|n| irq(&guest, n)).into();
    assert_eq!(got, ["0-2", "0", "0", "0", "0", "0-2", "0-2"]);
    let queue = |what: &str| guest.get(&format!("/sys/class/net/eth0/queues/{what}"));
    assert_eq!(queue("tx-0/xps_cpus"), "00000001");
    assert_eq!(queue("tx-1/xps_cpus"), "00000006");
    assert_eq!(queue("rx-0/rps_cpus"), "00000000");
    assert_eq!(queue("rx-1/rps_flow_cnt"), "0");
    assert_eq!(guest.get("/sys/block/vda/queue/rq_affinity"), "0");
    assert_eq!(
        guest.get("/sys/devices/virtual/workqueue/cpumask"),
        "00000001"
    );
    assert_eq!(guest.get(&format!("{OURS}/cpuset.cpus")), "0");
    assert_eq!(
        guest.get(&format!("{OURS}/cpuset.cpus.partition")),
        "isolated"
    );
    assert!(guest.get("/proc/50/cgroup").ends_with("0::/viola.turbo"));
    for other in [51, 52, 100] {
        assert!(
            !guest
                .get(&format!("/proc/{other}/cgroup"))
                .contains("viola")
        );
    }
    assert_eq!(
        guest.get("/proc/sys/net/ipv4/tcp_rmem"),
        "4096 131072 45000000"
    );
    assert_eq!(guest.get("/proc/sys/net/core/rmem_default"), "212992");
    let report = keeper.report();
    assert!(report.active && report.state == "in force" && report.applications == "partition");
    let left = why(&report, Part::Interrupts);
    for interrupt in [
        "interrupt 28 (virtio1-req.0)",
        "interrupt 29 (virtio1-req.1)",
    ] {
        let says = format!("{interrupt}: the kernel does not let its affinity be set");
        assert!(left.contains(&says), "{left}");
    }
    assert!(
        report
            .changes
            .iter()
            .any(|c| c.what == "interrupt 25 (virtio0-input.0)" && c.from == "0-2")
    );
    // nothing more to be done
    let now = guest.all();
    keeper.round();
    assert_eq!((guest.all(), keeper.report()), (now, report));
    keeper.end();
    assert_eq!(guest.all(), before);
    assert!(!settings.journal.exists());
    assert_eq!(keeper.report().state, "off: ended");
}

#[test]
fn a_kill_at_any_step_is_restored_by_the_next_start() {
    for (no_partition, cgroup) in [(false, true), (true, true), (true, false)] {
        let mut kills = 0;
        loop {
            let (_folder, guest, settings) = bed();
            if !cgroup {
                guest.put("/proc/mounts", "proc /proc proc rw 0 0");
            }
            let before = guest.all();
            *guest.routes.lock().unwrap() = paper_guest::Routes {
                managed: BTreeSet::from([28, 29]),
                no_partition,
                left: Some(kills),
                ..paper_guest::Routes::default()
            };
            let mut keeper = guest.keeper(&settings);
            let killed = catch_unwind(AssertUnwindSafe(|| keeper.round())).is_err();
            drop(keeper);
            guest.routes.lock().unwrap().left = None;
            assert_ne!(
                guest.all() == before,
                kills > 0,
                "{kills}: it has changed something"
            );
            // a kill during the restore
            guest.routes.lock().unwrap().left = Some(kills / 2);
            let _ = catch_unwind(AssertUnwindSafe(|| {
                restore_leftovers(&guest, &settings.journal)
            }));
            guest.routes.lock().unwrap().left = None;
            restore_leftovers(&guest, &settings.journal).unwrap();
            let after = guest.all();
            assert_eq!(after, before, "{kills} changes, {no_partition} {cgroup}");
            assert!(!settings.journal.exists());
            if !killed {
                break;
            }
            kills += 1;
        }
        println!("killed before each of {kills} changes");
        assert!(kills > 12, "{kills}");
    }
}

#[test]
fn settings_changed_by_others_since_stay() {
    let (_folder, guest, settings) = bed();
    let mut keeper = guest.keeper(&settings);
    keeper.round();
    guest.put("/proc/irq/25/smp_affinity_list", "2");
    guest.put("/proc/sys/net/core/rmem_max", "999");
    keeper.round();
    assert_eq!(irq(&guest, 25), "2");
    let report = keeper.report();
    let says = "interrupt 25 was set to 2 by somebody else, and stays so";
    assert_eq!(why(&report, Part::Interrupts), says);
    assert!(why(&report, Part::Buffers).contains("net.core.rmem_max was set to 999"));
    // and what they set where the keeper does not look any more
    guest.put("/sys/devices/virtual/workqueue/cpumask", "00000004");
    drop(keeper);
    let mut journal = Journal::open(&settings.journal, BOOT).unwrap();
    let done = restore(&guest, &mut journal).unwrap();
    assert_eq!(
        done.left,
        ["unbound workqueues was set to 2 by somebody else, and stays so"]
    );
    assert_eq!(
        guest.get("/sys/devices/virtual/workqueue/cpumask"),
        "00000004"
    );
    assert_eq!(
        (irq(&guest, 25), irq(&guest, 24)),
        ("2".into(), "0-2".into())
    );
    assert!(done.failed.is_empty() && !settings.journal.exists());
}

#[test]
fn without_a_partition_cpusets_are_set_and_without_those_threads_with_their_children() {
    let (_folder, guest, settings) = bed();
    guest.routes.lock().unwrap().no_partition = true;
    let before = guest.all();
    let mut keeper = guest.keeper(&settings);
    keeper.round();
    let report = keeper.report();
    assert_eq!(report.applications, "slices");
    let left = why(&report, Part::Applications);
    assert!(
        left.contains("root invalid (Parent is not a partition root)"),
        "{left}"
    );
    for group in ["system.slice", "user.slice"] {
        assert_eq!(
            guest.get(&format!("/sys/fs/cgroup/{group}/cpuset.cpus")),
            "1-2"
        );
    }
    assert!(
        !guest
            .all()
            .keys()
            .any(|path| path.to_string_lossy().contains("viola.turbo"))
    );
    assert_eq!(
        (guest.cpus_of(50, 50), guest.cpus_of(100, 100)),
        ("0".into(), "0-2".into())
    );
    keeper.end();
    assert_eq!(guest.all(), before);

    guest.put("/proc/mounts", "proc /proc proc rw 0 0");
    let before = guest.all();
    drop(keeper);
    let mut keeper = guest.keeper(&settings);
    keeper.round();
    assert_eq!(keeper.report().applications, "threads");
    for (pid, tid) in [(1, 1), (100, 100), (100, 101)] {
        assert_eq!(guest.cpus_of(pid, tid), "1-2");
    }
    assert_eq!(
        (guest.cpus_of(50, 50), guest.cpus_of(52, 52)),
        ("0".into(), "0-2".into())
    );
    // a child inherits the affinity; a thread that was pinned by somebody else keeps its own
    for (child, cpus) in [(200, "1-2"), (201, "2")] {
        guest.task(child, child, 100, "child", 0x40_0000, "/");
        for at in [
            format!("/proc/{child}"),
            format!("/proc/{child}/task/{child}"),
        ] {
            guest.put(
                &format!("{at}/status"),
                &format!("Name: x\nCpus_allowed_list:\t{cpus}"),
            );
        }
    }
    keeper.end();
    assert_eq!(
        (guest.cpus_of(200, 200), guest.cpus_of(201, 201)),
        ("0-2".into(), "2".into())
    );
    let mut after = guest.all();
    after.retain(|path, _| !path.to_string_lossy().contains("/20"));
    assert_eq!(after, before);
}

#[test]
fn with_applications_left_only_kernel_threads_move() {
    let (_folder, guest, mut settings) = bed();
    settings.applications = Applications::Leave;
    settings.delay_ms = 0;
    settings.cpu = 2;
    let mut keeper = guest.keeper(&settings);
    keeper.round();
    assert_eq!(
        (guest.cpus_of(50, 50), guest.cpus_of(100, 100)),
        ("2".into(), "0-2".into())
    );
    assert_eq!(guest.get("/sys/fs/cgroup/cgroup.subtree_control"), "cpu");
    assert_eq!(guest.get("/proc/sys/net/core/rmem_max"), "212992");
    assert_eq!(keeper.report().applications, "left");
}

#[test]
fn devices_and_vcpus_that_come_and_go_are_followed() {
    let (_folder, guest, mut settings) = bed();
    settings.cpu = 1;
    let mut keeper = guest.keeper(&settings);
    keeper.round();
    guest.nic("eth1", 5, 1, 40);
    keeper.round();
    assert_eq!(irq(&guest, 41), "1");
    // another device has the number now: its settings are not the changed ones
    guest.remove_dir("/sys/devices/pci0000:00/0000:00:07.0/msi_irqs/41");
    guest.irq(41, "rtc0");
    // the kernel takes interrupts off a vCPU that goes
    guest.put("/sys/devices/system/cpu/online", "0,2");
    guest.put("/proc/irq/25/smp_affinity_list", "0,2");
    keeper.round();
    let report = keeper.report();
    assert_eq!(report.state, "off: vCPU 1 is offline");
    assert!(!report.active && report.changes.is_empty());
    assert_eq!(
        (irq(&guest, 24), irq(&guest, 25), irq(&guest, 41)),
        ("0-2".into(), "0-2".into(), "0-2".into())
    );
    assert!(!settings.journal.exists());
    guest.put("/sys/devices/system/cpu/online", "0-2");
    keeper.round();
    assert!(keeper.report().active);
    assert_eq!(
        (irq(&guest, 25), irq(&guest, 41)),
        ("1".into(), "0-2".into())
    );
    // drivers redistribute interrupts when a vCPU comes or goes
    guest.put("/sys/devices/system/cpu/online", "0-1");
    guest.put("/proc/irq/25/smp_affinity_list", "0");
    keeper.round();
    assert_eq!(irq(&guest, 25), "1");
    assert_eq!(why(&keeper.report(), Part::Interrupts), "");
    // some only a moment later
    guest.put("/proc/irq/25/smp_affinity_list", "0-1");
    keeper.round();
    assert_eq!(irq(&guest, 25), "1");
    assert_eq!(why(&keeper.report(), Part::Interrupts), "");
    // later changes are attributed to somebody else
    guest.put("/proc/irq/25/smp_affinity_list", "0");
    keeper.round_at(std::time::Instant::now() + std::time::Duration::from_secs(60));
    assert_eq!(irq(&guest, 25), "0");
    assert!(why(&keeper.report(), Part::Interrupts).contains("somebody else"));
    guest.put("/proc/irq/25/smp_affinity_list", "0-2");
    // a vCPU that went and is back already
    let later = std::time::Instant::now() + std::time::Duration::from_secs(120);
    keeper.cpus_changed(later);
    keeper.round_at(later);
    assert_eq!(irq(&guest, 25), "1");
    keeper.end();
    assert_eq!(irq(&guest, 25), "0-2");
}

#[test]
fn settings_of_a_removed_vcpu_are_restored_to_the_remaining_ones() {
    let (_folder, guest, settings) = bed();
    guest.put("/proc/irq/25/smp_affinity_list", "2");
    let mut keeper = guest.keeper(&settings);
    keeper.round();
    assert_eq!(irq(&guest, 25), "0");
    // the kernel refuses a mask without an online vCPU
    guest.put("/sys/devices/system/cpu/online", "0");
    keeper.round();
    let report = keeper.report();
    assert_eq!(
        report.state,
        "off: this VM has one vCPU; turbo needs a second one for the applications"
    );
    assert!(report.changes.is_empty());
    assert_eq!(irq(&guest, 25), "0");
}

#[test]
fn a_vm_with_one_vcpu_is_refused_and_nothing_is_changed() {
    let (_folder, guest, settings) = bed();
    guest.put("/sys/devices/system/cpu/online", "0");
    let before = guest.all();
    let mut keeper = guest.keeper(&settings);
    keeper.round();
    let says = "off: this VM has one vCPU; turbo needs a second one for the applications";
    assert_eq!(keeper.report().state, says);
    assert_eq!(guest.all(), before);
}

#[test]
fn irqbalance_keeps_the_bans_of_others() {
    let (_folder, guest, settings) = bed();
    guest.task(300, 300, 1, "irqbalance", 0x40_0000, "/system.slice");
    guest.routes.lock().unwrap().banned = Some(BTreeSet::from([9]));
    let banned = || guest.routes.lock().unwrap().banned.clone().unwrap();
    let mut keeper = guest.keeper(&settings);
    keeper.round();
    assert_eq!(banned(), BTreeSet::from([9, 24, 25, 26, 27, 28, 29]));
    assert_eq!(irq(&guest, 25), "0");
    guest
        .routes
        .lock()
        .unwrap()
        .banned
        .as_mut()
        .unwrap()
        .insert(77);
    keeper.end();
    assert_eq!(banned(), BTreeSet::from([9, 77]));
    drop(keeper);
    guest.routes.lock().unwrap().banned = None;
    let mut keeper = guest.keeper(&settings);
    keeper.round();
    assert_eq!(irq(&guest, 25), "0-2");
    let left = why(&keeper.report(), Part::Interrupts);
    assert!(
        left.contains("irqbalance (process 300) does not leave"),
        "{left}"
    );
    // RPS is set all the same
    assert_eq!(
        guest.get("/sys/class/net/eth0/queues/rx-1/rps_cpus"),
        "00000001"
    );
}

#[test]
fn nothing_is_changed_without_the_journal() {
    let (folder, guest, settings) = bed();
    let before = guest.all();
    let mut keeper = guest.keeper(&settings);
    let run = settings.journal.parent().unwrap();
    std::fs::remove_dir_all(run).unwrap();
    keeper.round();
    let state = keeper.report().state;
    assert!(
        state.starts_with("off: cannot write the old values: "),
        "{state}"
    );
    assert!(state.contains("turbo.json: No such file"), "{state}");
    assert_eq!(guest.all(), before);
    std::fs::create_dir(run).unwrap();
    keeper.round();
    assert!(keeper.report().active);
    assert!(Path::new(folder.path()).exists());
}
