// SPDX-License-Identifier: Apache-2.0
//! Blocks from the disk of one QEMU VM reach another one while QEMU changes either. The VMs are emulated: part of `make
//! test-beds`.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::{Duration, Instant};

use common::guests::within;
use common::qemu::{Bed, CHANGE_TIMEOUT, Disk, POOL, kill, plug, unplug};
use serde_json::json;

#[test]
#[ignore = "boots emulated PCs: make test-beds"]
fn a_raw_disk_is_read_and_followed_through_a_live_snapshot_and_a_mirror() {
    let bed = Bed::boot("qv-raw", Disk::Raw);
    for id in 1..=3 {
        bed.make(id, 200 * id);
    }
    bed.start_agent();
    bed.wait_blocks(3);
    for id in 1..=3 {
        bed.assert_same(id);
    }
    bed.begin_reading(&[1, 2, 3]);
    bed.wait_reads(3);
    // From now on the VM writes to another file; the old blocks stay in the backing file.
    let overlay = bed.folder.path().join("snap.qcow2");
    let snapshot = json!({"device": "d0", "snapshot-file": overlay, "format": "qcow2"});
    bed.dn
        .qmp("blockdev-snapshot-sync", Some(snapshot))
        .unwrap();
    bed.make(4, 300);
    bed.wait_blocks(4);
    bed.wait_same(4);
    let images = bed.shown().0.images;
    assert!(
        images.iter().any(|i| i.contains("snap.qcow2")),
        "{images:?}"
    );
    bed.wait_reads(3);
    // The VM moves to another file that has all blocks.
    let copy = bed.folder.path().join("copy.img");
    let mirror =
        json!({"device": "d0", "target": copy, "sync": "full", "format": "raw", "job-id": "m"});
    bed.dn.clear_events();
    bed.dn.qmp("drive-mirror", Some(mirror)).unwrap();
    bed.dn
        .wait_event("BLOCK_JOB_READY", |_| true, CHANGE_TIMEOUT)
        .unwrap();
    bed.make(5, 100);
    bed.dn
        .qmp("block-job-complete", Some(json!({"device": "m"})))
        .unwrap();
    bed.dn
        .wait_event("BLOCK_JOB_COMPLETED", |_| true, CHANGE_TIMEOUT)
        .unwrap();
    bed.make(6, 100);
    bed.wait_blocks(6);
    for id in [5, 6, 4, 1] {
        bed.wait_same(id);
    }
    let images = bed.shown().0.images;
    assert!(images.iter().all(|i| i.contains("copy.img")), "{images:?}");
    bed.wait_reads(3);
    let (right, none) = bed.end_reading();
    println!("read right {right} times, not there {none} times");
    let ends = bed.shown().0.ends;
    assert!(!ends.is_empty(), "{ends:?}");
}

#[test]
#[ignore = "boots emulated PCs: make test-beds"]
fn a_qcow2_disk_with_a_backing_file_is_read_and_reverted() {
    let bed = Bed::boot("qv-q2", Disk::Qcow2OverRaw);
    bed.make(1, 300);
    bed.start_agent();
    bed.wait_blocks(3);
    for id in [1, 101, 102] {
        bed.assert_same(id);
    }
    bed.begin_reading(&[1, 101]);
    bed.wait_reads(2);
    assert_eq!(bed.dn.hmp("savevm a").unwrap(), "");
    bed.wait_blocks(3);
    bed.make(2, 400);
    bed.wait_blocks(4);
    bed.wait_same(2);
    assert_eq!(bed.take_wrong_reads(), 0);
    // The disk reverts to a state before the second block. The block is gone, whatever has its place now.
    bed.dn.clear_events();
    assert_eq!(bed.dn.hmp("loadvm a").unwrap(), "");
    bed.dn
        .wait_event("RESUME", |_| true, CHANGE_TIMEOUT)
        .unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(bed.is_absent(2));
    // The loop compares no checksums. A client's cover what it reads before the leases have ended (docs/src/vread.md).
    let wrong = bed.take_wrong_reads();
    println!("{wrong} reads during the revert had other bytes");
    bed.make(3, 400);
    bed.wait_blocks(4);
    for id in [3, 1, 101, 102] {
        bed.wait_same(id);
    }
    assert!(bed.is_absent(2));
    let (right, none) = bed.end_reading();
    println!("read right {right} times, not there {none} times");
}

#[test]
#[ignore = "boots emulated PCs: make test-beds"]
fn a_reset_and_a_stop_end_all_leases() {
    let bed = Bed::boot("qv-rst", Disk::Raw);
    bed.make(1, 300);
    bed.start_agent();
    bed.wait_blocks(1);
    bed.assert_same(1);
    let before = bed.shown().0.epoch;
    bed.dn.qmp("stop", None).unwrap();
    within(CHANGE_TIMEOUT, "no block is served", || bed.is_absent(1));
    bed.dn.qmp("cont", None).unwrap();
    within(CHANGE_TIMEOUT, "a new epoch", || {
        bed.shown().0.epoch > before
    });
    bed.wait_blocks(1);
    bed.wait_same(1);
    bed.dn.sh("sync").unwrap();
    let boots = bed.dn.boots();
    bed.dn.qmp("system_reset", None).unwrap();
    within(Duration::from_secs(5), "no block is served", || {
        bed.is_absent(1)
    });
    bed.dn.wait_boot(boots).unwrap();
    assert!(bed.is_absent(1), "the block was named again");
    bed.mount_disk();
    bed.start_agent();
    bed.wait_blocks(1);
    bed.wait_same(1);
}

#[test]
#[ignore = "boots emulated PCs: make test-beds"]
fn a_killed_daemon_is_not_noticed_and_an_idle_mount_outlives_its_worker() {
    let mut bed = Bed::boot("qv-kill", Disk::Raw);
    for id in 1..=2 {
        bed.make(id, 200);
    }
    bed.start_agent();
    bed.wait_blocks(2);
    bed.assert_same(1);
    let (_, before) = bed.shown();
    bed.daemon.kill();
    bed.assert_same(2);
    bed.make(3, 200);
    bed.wait_same(3);
    bed.daemon.restart();
    bed.wait_blocks(3);
    assert_eq!(bed.shown().1.pid, before.pid);
    bed.assert_same(3);
    // A worker dies while the VM has no request under way. After unplugging and plugging the device works.
    end_worker(&bed);
    unplug(&bed.rd, "fs0");
    bed.rd.sh("umount -l /mnt").unwrap();
    plug(&bed.rd, "fs0", &bed.socket());
    bed.rd.sh("mount -t virtiofs viola /mnt").unwrap();
    for id in 1..=3 {
        bed.assert_same(id);
    }
}

/// QEMU does not reconnect its device, and a request under way waits without end: only the VM's kernel can abort it.
#[test]
#[ignore = "boots emulated PCs: make test-beds"]
fn the_vms_kernel_aborts_requests_of_a_dead_worker_and_reads_after_a_restart() {
    let mut bed = Bed::boot_with("qv-die", Disk::Raw, "new");
    bed.rd
        .sh("echo 2 >/proc/sys/fs/fuse/default_request_timeout && mount -t virtiofs viola /mnt")
        .unwrap();
    bed.make(1, 300);
    bed.make(2, 300);
    bed.start_agent();
    bed.wait_blocks(2);
    bed.assert_same(1);
    bed.begin_reading(&[1, 2]);
    bed.wait_reads(2);
    end_worker(&bed);
    // The kernel checks every 15 seconds for requests that have waited too long.
    let begin = Instant::now();
    let read = format!("cat /mnt/{POOL}/blk_2_1001 >/dev/null; cat /mnt/{POOL}/blk_1_1001 2>&1");
    let output = bed.rd.exec(&read, CHANGE_TIMEOUT).unwrap();
    println!(
        "the read has failed after {:.1} s",
        begin.elapsed().as_secs_f32()
    );
    assert!(
        !output.timed_out && output.stdout.contains("not connected"),
        "{output:?}"
    );
    // A process that was closing a file waits on: virtio-fs sends RELEASE and waits for its answer without a timeout (seen with
    // Linux 7.2). So the loop may count no failed read; all of its earlier reads were right.
    bed.end_reading();
    // The rest of the VM continues, as do the other VM and the daemon.
    assert_eq!(bed.rd.sh("echo well").unwrap(), "well\n");
    bed.make(3, 100);
    bed.wait_blocks(3);
    // The device is unusable until QEMU itself starts again.
    bed.start_reader_again("new");
    bed.rd.sh("mount -t virtiofs viola /mnt").unwrap();
    for id in 1..=3 {
        bed.assert_same(id);
    }
}

/// Kills the reader's worker and waits for the next one.
fn end_worker(bed: &Bed) {
    let (_, before) = bed.shown();
    kill(before.pid);
    within(CHANGE_TIMEOUT, "a new worker", || {
        let now = bed.shown().1;
        now.running && now.pid != before.pid && !now.datanodes.is_empty()
    });
}
