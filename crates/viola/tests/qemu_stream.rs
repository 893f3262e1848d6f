// SPDX-License-Identifier: Apache-2.0
//! Blocks from the disk of one QEMU VM reach another VM by a virtio-serial port, without memory shared with the host. The VMs
//! are emulated: part of `make test-beds`.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use common::Daemon;
use common::guests::within;
use common::qemu::{BLOCK_FOLDER, Bed, CHANGE_TIMEOUT, POOL, kill};
use serde_json::json;
use viola_lab::qemu::{Image, QemuVm, VmSpec};

/// A reader VM whose only path to blocks is a port.
fn reader(name: &str, port: &Path) -> VmSpec {
    VmSpec::new(&format!("{name}-rd")).arg(&format!(
        "-chardev socket,id=vr,path={},server=on,wait=off -device virtserialport,chardev=vr,name=org.viola.read.0",
        port.display()
    ))
}

fn boot(name: &str) -> Bed {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("d.img");
    std::fs::File::create(&disk)
        .unwrap()
        .set_len(200 << 20)
        .unwrap();
    let made = Command::new("/usr/sbin/mkfs.ext4")
        .arg("-q")
        .arg(&disk)
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    let daemon = Daemon::start(&format!(
        "[slices]\nenabled = false\n[vread]\nallow = [{{ reader = \"{name}-rd\", datanode = \"qemu:{name}-d*\" }}]\n\
         [[vm]]\nname = \"{name}-rd\"\n[vm.vread]\ntransport = \"stream\"\n"
    ));
    let image = Image::find_from([Path::new(env!("CARGO_MANIFEST_DIR"))], "cloud");
    let image = image.unwrap_or_else(|e| panic!("{e}"));
    let start = |spec: &VmSpec| {
        QemuVm::start(spec, &image, folder.path()).unwrap_or_else(|e| panic!("{e}"))
    };
    let dn = start(
        &VmSpec::new(&format!("{name}-dn"))
            .disk("d0", &disk, "raw")
            .agent(),
    );
    let rd = start(&reader(name, &folder.path().join("read.sock")));
    let bed = Bed {
        daemon,
        dn,
        rd,
        folder,
        image,
        name: name.to_owned(),
    };
    bed.mount_disk();
    bed
}

/// Starts an agent in reader mode; a previous one may still run.
fn start_relay(rd: &QemuVm) {
    rd.sh("printf '[mount]\\npath = \"/mnt\"\\n' >/tmp/relay.toml; \
           viola-agent --config /tmp/relay.toml </dev/null >>/tmp/relay.log 2>&1 &")
        .unwrap();
}

fn wait_stream(bed: &Bed) {
    let limit = Instant::now() + CHANGE_TIMEOUT;
    // The worker has the session a moment before the agent has mounted.
    let mounted = || bed.rd.sh("grep -q fuse.viola /proc/mounts").is_ok();
    while bed.shown().1.transport != "stream" || !mounted() {
        assert!(
            Instant::now() < limit,
            "{:?}\n{}\n{}",
            bed.shown().1,
            bed.daemon.log(),
            bed.rd
                .sh("cat /tmp/relay.log; ls /dev/virtio-ports")
                .unwrap_or_default()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Waits until the reader reads the block as the DataNode has it. On a busy host the agent may fail for a moment; wrong bytes
/// are an error.
fn assert_same(bed: &Bed, id: u32) {
    for (theirs, ours) in [
        (format!("blk_{id}"), format!("blk_{id}_1001")),
        (format!("blk_{id}_1001.meta"), format!("blk_{id}_1001.meta")),
    ] {
        let theirs = bed
            .dn
            .sh(&format!("sha256sum < {BLOCK_FOLDER}/{theirs}"))
            .unwrap();
        let read = format!("cat /mnt/{POOL}/{ours} >/tmp/b && sha256sum </tmp/b");
        within(CHANGE_TIMEOUT, "the block is read", || {
            let output = bed.rd.exec(&read, CHANGE_TIMEOUT).unwrap();
            assert!(!output.timed_out, "the mount hangs");
            if output.status == 0 {
                assert_eq!(output.stdout, theirs, "{ours}");
            }
            output.status == 0
        });
    }
}

#[test]
#[ignore = "boots emulated PCs: make test-beds"]
fn blocks_arrive_by_a_port_and_the_mount_survives_every_kill() {
    let bed = boot("qs-way");
    for id in 1..=3 {
        bed.make(id, 400 * id);
    }
    bed.make(4, 20 << 10);
    bed.start_agent();
    bed.wait_blocks(4);
    // The port has no peer: the reader's worker waits and reports that.
    within(CHANGE_TIMEOUT, "the port is found", || {
        bed.shown().1.why == "no agent answers at its port"
    });
    assert!(
        !bed.socket().exists(),
        "a reader with transport = \"stream\" has no socket"
    );
    start_relay(&bed.rd);
    wait_stream(&bed);
    for id in 1..=3 {
        assert_same(&bed, id);
    }
    let began = Instant::now();
    assert_same(&bed, 4);
    println!(
        "20 MiB read and summed on both sides in {:?}",
        began.elapsed()
    );
    let ls = common::stdout(&bed.daemon.ask(&["vread", "ls"]));
    assert!(ls.contains("qs-way-rd  yes        stream "), "{ls}");
    let status = bed
        .rd
        .sh("viola-agent --config /tmp/relay.toml status")
        .unwrap();
    assert!(
        status.contains("reads only\n/mnt by /dev/virtio-ports/org.viola.read.0: served"),
        "{status}"
    );
    // The mount has the same properties as with virtio-fs: read only, for one user.
    let refused = bed.rd.exec("touch /mnt/x", CHANGE_TIMEOUT).unwrap();
    assert!(refused.stderr.contains("Read-only"), "{refused:?}");

    // The worker is killed under load: no byte is wrong, and the mount stays.
    bed.begin_reading(&[1, 2, 3]);
    bed.wait_reads(3);
    let before = bed.shown().1.pid;
    kill(before);
    within(CHANGE_TIMEOUT, "a new worker", || {
        let (_, now) = bed.shown();
        now.pid != before && now.transport == "stream"
    });
    bed.wait_reads(3);
    // The reader's agent is killed under load, and the next one mounts again.
    bed.rd.sh("kill -9 $(pidof viola-agent)").unwrap();
    start_relay(&bed.rd);
    bed.wait_reads(3);
    let (right, none) = bed.end_reading();
    println!("read right {right} times, not there {none} times");
    wait_stream(&bed);
    assert_same(&bed, 2);
}

#[test]
#[ignore = "boots emulated PCs: make test-beds"]
fn a_reader_migrates_live_with_its_mount() {
    let mut bed = boot("qs-mig");
    for id in 1..=3 {
        bed.make(id, 300 * id);
    }
    bed.start_agent();
    bed.wait_blocks(3);
    start_relay(&bed.rd);
    wait_stream(&bed);
    assert_same(&bed, 1);
    bed.begin_reading(&[1, 2, 3]);
    bed.wait_reads(3);
    // The VM migrates to a process whose port has another host end, as on another host.
    let there = tempfile::tempdir().unwrap();
    let spec = reader("qs-mig", &there.path().join("read.sock")).incoming();
    let target = QemuVm::start(&spec, &bed.image, there.path()).unwrap_or_else(|e| panic!("{e}"));
    let way = format!("unix:{}", there.path().join("way").display());
    target
        .qmp("migrate-incoming", Some(json!({ "uri": way })))
        .unwrap();
    bed.rd.qmp("migrate", Some(json!({ "uri": way }))).unwrap();
    within(CHANGE_TIMEOUT, "the migration ends", || {
        let state = bed.rd.qmp("query-migrate", None).unwrap();
        assert_ne!(state["status"], "failed", "{state}");
        state["status"] == "completed"
    });
    let source = std::mem::replace(&mut bed.rd, target);
    source.kill();
    wait_stream(&bed);
    bed.wait_reads(3);
    let (right, none) = bed.end_reading();
    println!("read right {right} times, not there {none} times");
    for id in 1..=3 {
        assert_same(&bed, id);
    }
}
