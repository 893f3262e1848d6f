// SPDX-License-Identifier: Apache-2.0
//! Live migration of the reader VM and of the DataNode VM between QEMU processes. The VMs are emulated: part of `make
//! test-beds`.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use common::guests::within;
use common::qemu::{BLOCK_FOLDER, Bed, CHANGE_TIMEOUT, Disk, POOL, plug, unplug};
use serde_json::json;
use viola_lab::qemu::{QemuVm, VmSpec};
use viola_proto::vread::Vread;

/// Migrates a running VM into a waiting process. Returns the VM's downtime in milliseconds.
fn migrate(from: &QemuVm, to: &QemuVm, folder: &Path, has_events: bool) -> u64 {
    let uri = format!("unix:{}", folder.join("migration").display());
    from.clear_events();
    to.qmp("migrate-incoming", Some(json!({ "uri": uri })))
        .unwrap();
    if has_events {
        let events = json!({"capabilities": [{"capability": "events", "state": true}]});
        from.qmp("migrate-set-capabilities", Some(events)).unwrap();
    }
    from.qmp("migrate", Some(json!({ "uri": uri }))).unwrap();
    let mut last = json!(null);
    within(CHANGE_TIMEOUT, "the migration ends", || {
        last = from.qmp("query-migrate", None).unwrap();
        let status = last["status"].as_str().unwrap_or_default().to_owned();
        assert!(status != "failed" && status != "cancelled", "{last}");
        status == "completed"
    });
    within(CHANGE_TIMEOUT, "the VM runs at the target", || {
        to.qmp("query-status", None).unwrap()["status"] == "running"
    });
    last["downtime"].as_u64().unwrap_or(0)
}

#[test]
#[ignore = "boots emulated PCs: make test-beds"]
fn a_reader_moves_without_its_device_and_reads_on_with_a_new_one() {
    let bed = Bed::boot("qm-rd", Disk::Raw);
    bed.make(1, 300);
    bed.make(2, 200);
    bed.start_agent();
    bed.wait_blocks(2);
    bed.assert_same(1);
    // While the device is plugged, QEMU refuses and gives the reason.
    let uri = json!({"uri": format!("unix:{}/nowhere", bed.folder.path().display())});
    let refused = bed.rd.qmp("migrate", Some(uri)).unwrap_err().to_string();
    println!("with the device: {refused}");
    assert!(
        refused.contains("vhost-user-fs") || refused.contains("migrat"),
        "{refused}"
    );
    // After an unplug with an open file the next read fails and does not hang.
    bed.rd
        .sh(&format!(
            "(exec 3</mnt/{POOL}/blk_2_1001; sleep 8; cat <&3 | wc -c) >/tmp/late 2>&1 &"
        ))
        .unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let begin = Instant::now();
    unplug(&bed.rd, "fs0");
    println!("unplugged in {:.2} s", begin.elapsed().as_secs_f32());
    within(CHANGE_TIMEOUT, "the worker sees the disconnect", || {
        !bed.shown().1.connected
    });
    within(Duration::from_secs(30), "the read has ended", || {
        !bed.rd.sh("cat /tmp/late").unwrap().is_empty()
    });
    let late = bed.rd.sh("cat /tmp/late").unwrap();
    assert!(
        late.contains("not connected") || late.trim() == "0",
        "{late}"
    );
    bed.rd.sh("umount -l /mnt").unwrap();
    // The VM keeps its name. Another name would have no mount here.
    let folder = bed.folder.path().join("target");
    std::fs::create_dir(&folder).unwrap();
    let there = VmSpec::new("qm-rd-rd").incoming();
    let there = QemuVm::start(&there, &bed.image, &folder).unwrap();
    let pause = migrate(&bed.rd, &there, bed.folder.path(), true);
    println!("paused for {pause} ms");
    bed.rd.kill();
    there.ping(CHANGE_TIMEOUT).unwrap();
    assert_eq!(
        there.sh("cat /tmp/late").unwrap(),
        late,
        "the VM at the target is not the same guest"
    );
    let begin = Instant::now();
    plug(&there, "fs0", &bed.socket());
    println!("plugged in {:.2} s", begin.elapsed().as_secs_f32());
    let bed = Bed { rd: there, ..bed };
    bed.rd.sh("mount -t virtiofs viola /mnt").unwrap();
    bed.assert_same(1);
    bed.assert_same(2);
    within(CHANGE_TIMEOUT, "the connection is shown", || {
        bed.shown().1.connected
    });
}

#[test]
#[ignore = "boots emulated PCs: make test-beds"]
fn a_datanode_migrates_and_is_read_at_its_new_place() {
    for has_events in [true, false] {
        let name = if has_events { "qm-dn" } else { "qm-ds" };
        let mut bed = Bed::boot(name, Disk::Raw);
        bed.make(1, 300);
        bed.make(2, 300);
        bed.start_agent();
        bed.wait_blocks(2);
        bed.assert_same(1);
        bed.begin_reading(&[1, 2]);
        bed.wait_reads(2);
        let disk = bed.folder.path().join("d.img");
        let there = VmSpec::new(&format!("{name}-dn2"))
            .disk("d0", &disk, "raw")
            .agent()
            .incoming();
        let there = QemuVm::start(&there, &bed.image, bed.folder.path()).unwrap();
        migrate(&bed.dn, &there, bed.folder.path(), has_events);
        // The source process still runs and holds no lease.
        let here = format!("qemu:{name}-dn");
        within(
            Duration::from_secs(10),
            "the source's leases have ended",
            || {
                let all: Vread = bed.daemon.json(&["vread", "stat"]);
                let old = all.datanodes.iter().find(|d| d.vm == here);
                old.is_none_or(|d| d.blocks == 0 || !d.serving)
            },
        );
        let old = std::mem::replace(&mut bed.dn, there);
        old.kill();
        bed.dn.ping(CHANGE_TIMEOUT).unwrap();
        bed.wait_blocks(2);
        bed.make(3, 100);
        bed.wait_blocks(3);
        for id in 1..=3 {
            bed.wait_same(id);
        }
        bed.dn
            .sh(&format!(
                "rm {BLOCK_FOLDER}/blk_2 {BLOCK_FOLDER}/blk_2_1001.meta"
            ))
            .unwrap();
        within(CHANGE_TIMEOUT, "the deleted block is gone", || {
            bed.is_absent(2)
        });
        let (right, none) = bed.end_reading();
        println!("read right {right} times, not there {none} times");
    }
}
