// SPDX-License-Identifier: Apache-2.0
//! QEMU VMs, a DataNode VM with a disk of blocks and a reader VM, and a daemon that permits the reads.

#![allow(dead_code, clippy::unwrap_used)]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;
use viola_lab::qemu::{Image, QemuVm, VmSpec};
use viola_lab::wire::Workload;
use viola_proto::vread::{Datanode, Reader, Vread};

use super::Daemon;
use super::guests::within;

/// The block pool of all blocks.
pub const POOL: &str = "BP-1-10.0.0.1-2";
/// The folder of finished blocks in the DataNode VM.
pub const BLOCK_FOLDER: &str =
    "/tmp/d/dfs/current/BP-1-10.0.0.1-2/current/finalized/subdir0/subdir0";
/// Timeout of a step of an emulated VM.
pub const CHANGE_TIMEOUT: Duration = Duration::from_secs(90);

/// A daemon, a DataNode VM and a reader VM.
pub struct Bed {
    pub daemon: Daemon,
    pub dn: QemuVm,
    pub rd: QemuVm,
    pub folder: tempfile::TempDir,
    pub image: Image,
    pub name: String,
}

/// The format of the DataNode's disk on the host.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Disk {
    /// One raw file.
    Raw,
    /// A qcow2 file over a raw one that has the file system and blocks 101 and 102.
    Qcow2OverRaw,
}

impl Bed {
    /// Boots both VMs and mounts on both sides, without an agent.
    pub fn boot(name: &str, disk: Disk) -> Self {
        let bed = Self::boot_with(name, disk, "cloud");
        bed.rd.sh("mount -t virtiofs viola /mnt").unwrap();
        bed
    }

    /// The same with another kernel in the reader VM and without its mount.
    pub fn boot_with(name: &str, disk: Disk, kernel: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (path, format) = make_disk(folder.path(), disk);
        let mut daemon = Daemon::start(&format!(
            "[slices]\nenabled = false\n[vread]\nallow = [{{ reader = \"{name}-rd\", datanode = \"qemu:{name}-d*\" }}]\n"
        ));
        let socket = daemon.run_dir().join(format!("mounts/{name}-rd.sock"));
        daemon.wait("socket for the reader", |_| socket.exists());
        let image = find("cloud");
        let dn = VmSpec::new(&format!("{name}-dn"))
            .disk("d0", &path, format)
            .agent();
        let rd = VmSpec::new(&format!("{name}-rd")).vhost_user_fs("fs0", &socket, "");
        let start = |spec: &VmSpec, image: &Image| {
            QemuVm::start(spec, image, folder.path()).unwrap_or_else(|e| panic!("{e}"))
        };
        let dn = start(&dn, &image);
        let rd = start(&rd, &find(kernel));
        let bed = Self {
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

    /// Stops the reader VM and starts it again.
    pub fn start_reader_again(&mut self, kernel: &str) {
        self.rd.kill();
        let spec =
            VmSpec::new(&format!("{}-rd", self.name)).vhost_user_fs("fs0", &self.socket(), "");
        self.rd = QemuVm::start(&spec, &find(kernel), self.folder.path())
            .unwrap_or_else(|e| panic!("{e}"));
    }

    /// Mounts the blocks' disk in the DataNode VM, which has just started.
    pub fn mount_disk(&self) {
        self.dn
            .sh(&format!(
                "mkdir -p /tmp/d && mount /dev/vda /tmp/d && mkdir -p {BLOCK_FOLDER}"
            ))
            .unwrap();
    }

    /// The reader's vhost-user socket.
    pub fn socket(&self) -> PathBuf {
        self.daemon
            .run_dir()
            .join(format!("mounts/{}-rd.sock", self.name))
    }

    /// Creates a finished block as a DataNode does.
    pub fn make(&self, id: u32, kib: u32) {
        make_block(&self.dn, id, kib);
    }

    /// Starts the agent. It names a block after 1.5 s, as [`viola`]'s limits for live snapshots demand.
    pub fn start_agent(&self) {
        let agent = Workload::agent("data = ['/tmp/d/dfs']\nquiet_ms = 1500\nsettle_ms = 200\n");
        self.dn.start_workload("agent", agent).unwrap();
    }

    pub fn shown(&self) -> (Datanode, Reader) {
        let all: Vread = self.daemon.json(&["vread", "stat"]);
        let datanode = all.datanodes.first().cloned().unwrap_or_default();
        (datanode, all.readers.first().cloned().unwrap_or_default())
    }

    pub fn wait_blocks(&self, count: u64) {
        let limit = Instant::now() + CHANGE_TIMEOUT;
        loop {
            let (datanode, _) = self.shown();
            if datanode.blocks == count && datanode.serving {
                return;
            }
            assert!(
                Instant::now() < limit,
                "not {count} blocks: {datanode:?}\n{}\n{}",
                self.daemon.log(),
                self.dn.sh("cat /run/viola/agent.log").unwrap_or_default()
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Asserts that the reader reads both files of a block as the DataNode has them.
    pub fn assert_same(&self, id: u32) {
        for (theirs, ours) in [
            (format!("blk_{id}"), format!("blk_{id}_1001")),
            (format!("blk_{id}_1001.meta"), format!("blk_{id}_1001.meta")),
        ] {
            let theirs = self
                .dn
                .sh(&format!("sha256sum < {BLOCK_FOLDER}/{theirs}"))
                .unwrap();
            let read = format!("sha256sum < /mnt/{POOL}/{ours}");
            assert_eq!(self.rd.sh(&read).unwrap(), theirs, "{ours}");
        }
    }

    /// Waits until the reader reads a block of the DataNode, with the right bytes.
    pub fn wait_same(&self, id: u32) {
        within(CHANGE_TIMEOUT, "the block is served", || {
            !self.is_absent(id)
        });
        self.assert_same(id);
    }

    pub fn is_absent(&self, id: u32) -> bool {
        let read = format!("cat /mnt/{POOL}/blk_{id}_1001 2>&1 | tail -c 60");
        let output = self.rd.exec(&read, CHANGE_TIMEOUT).unwrap();
        assert!(!output.timed_out, "the mount hangs");
        output.stdout.contains("No such file") || output.stdout.contains("tale")
    }

    /// Starts a loop in the reader VM that reads these blocks. Each read has to be right or fail with ENOENT.
    /// [`Bed::end_reading`] returns how often each was the case.
    pub fn begin_reading(&self, ids: &[u32]) {
        let mut sums = String::new();
        for id in ids {
            let sum = self
                .dn
                .sh(&format!("sha256sum < {BLOCK_FOLDER}/blk_{id}"))
                .unwrap();
            sums += &format!("{id} {}\n", sum.split(' ').next().unwrap());
        }
        self.rd
            .sh(&format!(
                "rm -f /tmp/stop /tmp/right /tmp/wrong /tmp/none; printf '{sums}' >/tmp/sums\n\
                 cat >/tmp/loop <<'END'\n\
                 while [ ! -e /tmp/stop ]; do while read id sum; do\n\
                 if got=$(set -o pipefail; cat /mnt/{POOL}/blk_${{id}}_1001 2>/dev/null | sha256sum); then\n\
                 [ \"${{got%% *}}\" = $sum ] && echo $id >>/tmp/right || echo $id $got >>/tmp/wrong\n\
                 else echo $id >>/tmp/none; fi; done </tmp/sums; done\n\
                 END\n\
                 sh /tmp/loop </dev/null >/dev/null 2>&1 &"
            ))
            .unwrap();
    }

    /// Ends the loop. Returns how often a block was right and how often it was absent.
    pub fn end_reading(&self) -> (u32, u32) {
        let text = self
            .rd
            .sh(
                "touch /tmp/stop; sleep 1; touch /tmp/right /tmp/wrong /tmp/none; cat /tmp/wrong; \
                 wc -l </tmp/wrong; wc -l </tmp/right; wc -l </tmp/none",
            )
            .unwrap();
        let counts: Vec<&str> = text.lines().collect();
        assert_eq!(counts[0], "0", "wrong bytes: {text}");
        (counts[1].parse().unwrap(), counts[2].parse().unwrap())
    }

    /// Returns how many reads of the loop gave wrong bytes so far, and forgets them. Each read that has begun counts.
    pub fn take_wrong_reads(&self) -> u32 {
        let number = |script: &str| -> u32 { self.rd.sh(script).unwrap().trim().parse().unwrap() };
        let all = || number("cat /tmp/right /tmp/none /tmp/wrong 2>/dev/null | wc -l");
        let before = all();
        // The read that has begun is the first of them.
        within(CHANGE_TIMEOUT, "reads end", || all() >= before + 2);
        number("touch /tmp/wrong; mv /tmp/wrong /tmp/forgotten; wc -l </tmp/forgotten")
    }

    /// Waits until the loop has read `more` blocks right.
    pub fn wait_reads(&self, more: u32) {
        let count = || -> u32 {
            let text = self.rd.sh("cat /tmp/right 2>/dev/null | wc -l").unwrap();
            text.trim().parse().unwrap()
        };
        let before = count();
        within(CHANGE_TIMEOUT, "blocks are read", || {
            count() >= before + more
        });
    }
}

fn find(kind: &str) -> Image {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    Image::find_from([here], kind).unwrap_or_else(|e| panic!("{e}"))
}

/// Creates a finished block as a DataNode does.
pub fn make_block(dn: &QemuVm, id: u32, kib: u32) {
    let meta = kib * 8 + 7;
    dn.sh(&format!(
        "mkdir -p /tmp/d/rbw; dd if=/dev/urandom of=/tmp/d/rbw/blk_{id} bs=1024 count={kib} 2>/dev/null; \
         head -c {meta} /dev/urandom >/tmp/d/rbw/blk_{id}_1001.meta; \
         mv /tmp/d/rbw/blk_{id}_1001.meta {BLOCK_FOLDER}/; mv /tmp/d/rbw/blk_{id} {BLOCK_FOLDER}/"
    ))
    .unwrap();
}

/// Creates the file that the VM writes to. Returns its path and format.
fn make_disk(folder: &Path, disk: Disk) -> (PathBuf, &'static str) {
    let raw = folder.join("d.img");
    File::create(&raw).unwrap().set_len(200 << 20).unwrap();
    let contents = folder.join("contents");
    let blocks = contents.join(BLOCK_FOLDER.strip_prefix("/tmp/d/").unwrap());
    std::fs::create_dir_all(&blocks).unwrap();
    if disk == Disk::Qcow2OverRaw {
        for id in [101_u32, 102] {
            let bytes: Vec<u8> = (0..400_000_u32).map(|n| ((n * id) >> 7) as u8).collect();
            std::fs::write(blocks.join(format!("blk_{id}")), &bytes).unwrap();
            std::fs::write(blocks.join(format!("blk_{id}_1001.meta")), &bytes[..3007]).unwrap();
        }
    }
    run(Command::new("/usr/sbin/mkfs.ext4")
        .args(["-q", "-d"])
        .arg(&contents)
        .arg(&raw));
    if disk == Disk::Raw {
        return (raw, "raw");
    }
    let top = folder.join("d.qcow2");
    run(Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"])
        .arg(&raw)
        .arg(&top));
    (top, "qcow2")
}

fn run(command: &mut Command) {
    let made = command.output().unwrap();
    assert!(made.status.success(), "{made:?}");
}

/// Kills a worker with SIGKILL.
pub fn kill(pid: u32) {
    super::guests::signal(pid, Signal::KILL);
}

/// Unplugs a mount's device from a VM and waits until it is gone.
pub fn unplug(rd: &QemuVm, id: &str) {
    rd.clear_events();
    rd.qmp("device_del", Some(json!({ "id": id }))).unwrap();
    rd.wait_event(
        "DEVICE_DELETED",
        |data| data["device"] == id,
        CHANGE_TIMEOUT,
    )
    .unwrap();
    // The connection ends a moment after the device.
    within(CHANGE_TIMEOUT, "the socket's device is free", || {
        let chardev = json!({"id": format!("chr-{id}")});
        rd.qmp("chardev-remove", Some(chardev)).is_ok()
    });
}

/// Plugs a mount's device into a VM.
pub fn plug(rd: &QemuVm, id: &str, socket: &Path) {
    let address = json!({"type": "unix", "data": {"path": socket}});
    let backend = json!({"type": "socket", "data": {"addr": address, "server": false}});
    let chardev = format!("chr-{id}");
    rd.qmp(
        "chardev-add",
        Some(json!({"id": chardev, "backend": backend})),
    )
    .unwrap();
    let device = json!({"driver": "vhost-user-fs-pci", "id": id, "chardev": chardev, "tag": "viola", "bus": "rp0"});
    rd.qmp("device_add", Some(device)).unwrap();
    // The guest's driver finds the device a moment later.
    rd.sh("for n in $(seq 100); do ls /sys/bus/virtio/drivers/virtiofs/virtio* >/dev/null 2>&1 && exit 0; usleep 100000; done; exit 1")
        .unwrap();
}
