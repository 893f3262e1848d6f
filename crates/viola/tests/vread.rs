// SPDX-License-Identifier: Apache-2.0
//! Blocks from the disk of one VM reach another one through the daemon's workers, also when processes die. Needs root and the
//! lab's image.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use common::guests::{signal, within};
use common::{Daemon, stdout};
use rustix::process::Signal;

use viola_lab::testing::{GuestPermit, guest_permit};
use viola_lab::wire::Workload;
use viola_lab::{Guest, Lab, Paths, Spec};
use viola_proto::vread::{Datanode, Reader, Vread};

const POOL: &str = "BP-1-10.0.0.1-2";
const BLOCK_FOLDER: &str = "/tmp/d/dfs/current/BP-1-10.0.0.1-2/current/finalized/subdir0/subdir0";
const CHANGE_TIMEOUT: Duration = Duration::from_secs(30);

/// A DataNode VM with a disk of blocks and one of other files, a reader VM, and a daemon that permits the reads.
struct Rig {
    daemon: Daemon,
    lab: Option<Lab>,
    /// The DataNode VM's lab after its second start.
    dn_lab: Option<Lab>,
    folder: tempfile::TempDir,
    _permit: GuestPermit,
}

impl Rig {
    fn boot(name: &str, pools: &str) -> Self {
        let permit = guest_permit();
        let folder = tempfile::tempdir().unwrap();
        for image in ["d.img", "e.img"] {
            let image = folder.path().join(image);
            File::create(&image).unwrap().set_len(200 << 20).unwrap();
            let made = Command::new("/usr/sbin/mkfs.ext4")
                .args(["-q", image.to_str().unwrap()])
                .output()
                .unwrap();
            assert!(made.status.success(), "{made:?}");
        }
        let mut daemon = Daemon::start(&format!(
            "[slices]\nenabled = false\n[vread]\n\
             allow = [{{ reader = \"{name}-rd\", datanode = \"uml:{name}-d*\"{pools} }}]\n"
        ));
        let socket = daemon.run_dir().join(format!("mounts/{name}-rd.sock"));
        daemon.wait("socket for the reader", |_| socket.exists());
        let text = format!(
            "[lab]\nname='{name}'\n\
             [[guest]]\nname='{name}-dn'\ncores=[1]\ndisks=[{{image='d.img'}}, {{image='e.img'}}]\n\
             [[guest]]\nname='{name}-rd'\ncores=[1]\nkernel_args=['virtio_uml.device={}:26']\n",
            socket.display()
        );
        let lab = up(&text, name, folder.path());
        let rig = Self {
            daemon,
            lab: Some(lab),
            dn_lab: None,
            folder,
            _permit: permit,
        };
        rig.dn(&format!(
            "mkdir -p /tmp/d /tmp/e; mount /dev/ubda /tmp/d; mount /dev/ubdb /tmp/e; mkdir -p {BLOCK_FOLDER}"
        ));
        rig
    }

    fn lab(&self) -> &Lab {
        self.lab.as_ref().unwrap()
    }

    /// Boots the DataNode VM once more, in its own lab.
    fn boot_dn(&self, lab: &str, guest: &str) -> Lab {
        let text = format!(
            "[lab]\nname='{lab}'\n[[guest]]\nname='{guest}'\ncores=[1]\ndisks=[{{image='d.img'}}]\n"
        );
        up(&text, lab, self.folder.path())
    }

    fn guest(&self, what: &str) -> &Guest {
        let name = format!("{}-{what}", self.lab().name());
        match &self.dn_lab {
            Some(lab) if what == "dn" => lab.guest(&name).unwrap(),
            _ => self.lab().guest(&name).unwrap(),
        }
    }

    fn try_sh(&self, guest: &str, script: &str) -> (i32, String) {
        let output = self
            .guest(guest)
            .exec_for(&["sh", "-c", script], "", Duration::from_secs(60))
            .unwrap();
        (output.status, output.stdout + &output.stderr)
    }

    fn dn(&self, script: &str) -> String {
        let (status, text) = self.try_sh("dn", script);
        assert_eq!(status, 0, "{script}: {text}");
        text
    }

    fn rd(&self, script: &str) -> String {
        let (status, text) = self.try_sh("rd", script);
        assert_eq!(status, 0, "{script}: {text}");
        text
    }

    /// Creates a finished block as a DataNode does.
    fn make(&self, id: u32, kib: u32) {
        self.dn(&format!(
            "mkdir -p /tmp/d/rbw; dd if=/dev/urandom of=/tmp/d/rbw/blk_{id} bs=1024 count={kib} 2>/dev/null; \
             head -c {} /dev/urandom >/tmp/d/rbw/blk_{id}_1001.meta; \
             mv /tmp/d/rbw/blk_{id}_1001.meta {BLOCK_FOLDER}/; mv /tmp/d/rbw/blk_{id} {BLOCK_FOLDER}/",
            kib * 8 + 7
        ));
    }

    fn start_agent(&self) {
        let agent = Workload::agent("data = ['/tmp/d/dfs']\nquiet_ms = 500\nsettle_ms = 200\n");
        self.guest("dn").start("agent", agent).unwrap();
    }

    fn shown(&self) -> (Datanode, Reader) {
        let all: Vread = self.daemon.json(&["vread", "stat"]);
        let datanode = all.datanodes.first().cloned().unwrap_or_default();
        (datanode, all.readers.first().cloned().unwrap_or_default())
    }

    fn wait_blocks(&mut self, count: u64) {
        let limit = std::time::Instant::now() + CHANGE_TIMEOUT;
        loop {
            let (datanode, _) = self.shown();
            if datanode.blocks == count && datanode.serving {
                return;
            }
            assert!(
                std::time::Instant::now() < limit,
                "not {count} blocks: {datanode:?}\n{}",
                self.daemon.log()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Asserts that the reader reads both files of a block as the DataNode has them.
    fn assert_same(&self, id: u32) {
        for (theirs, ours) in [
            (format!("blk_{id}"), format!("blk_{id}_1001")),
            (format!("blk_{id}_1001.meta"), format!("blk_{id}_1001.meta")),
        ] {
            let sum = |text: String| text.split(' ').next().unwrap().to_owned();
            assert_eq!(
                sum(self.rd(&format!("sha256sum < /mnt/{POOL}/{ours}"))),
                sum(self.dn(&format!("sha256sum < {BLOCK_FOLDER}/{theirs}"))),
                "{ours}"
            );
        }
    }

    fn is_absent(&self, id: u32) -> bool {
        let (status, text) = self.try_sh("rd", &format!("cat /mnt/{POOL}/blk_{id}_1001 | wc -c"));
        assert_eq!(status, 0, "{text}");
        text.contains("No such file") || text.contains("tale")
    }

    /// Boots with three named blocks and the mount.
    fn with_blocks(name: &str) -> Self {
        let mut rig = Self::boot(name, "");
        for id in 1..=3 {
            rig.make(id, 300 * id);
        }
        rig.start_agent();
        rig.wait_blocks(3);
        rig.rd("mount -t virtiofs viola /mnt");
        rig
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        for lab in [self.lab.take(), self.dn_lab.take()].into_iter().flatten() {
            let _ = lab.down();
        }
    }
}

fn up(text: &str, name: &str, folder: &Path) -> Lab {
    let spec = Spec::from_toml(text, name, folder).unwrap();
    let found = Paths::find_from([Path::new(env!("CARGO_MANIFEST_DIR"))]);
    let paths = Paths {
        run: folder.join("run"),
        ..found.unwrap_or_else(|e| panic!("{e}"))
    };
    Lab::up(&spec, &paths).unwrap_or_else(|e| panic!("{}", e.full()))
}

/// Names of the disk images that a process holds.
fn held_images(pid: u32) -> Vec<String> {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let links = fds.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
    let mut names: Vec<String> = links
        .filter(|path| path.extension().is_some_and(|e| e == "img"))
        .filter_map(|path| Some(path.file_name()?.to_str()?.to_owned()))
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn lives(pid: u32) -> bool {
    matches!(viola_host::proc::stat(pid), Ok(Some(s)) if !s.is_dead())
}

#[test]
fn blocks_are_read_from_the_disk_of_another_vm_and_deleted_ones_are_gone() {
    let mut rig = Rig::with_blocks("wk-way");
    for id in 1..=3 {
        rig.assert_same(id);
    }
    within(CHANGE_TIMEOUT, "counts are shown", || {
        let bytes = rig.shown().1.bytes;
        bytes
            .get("uml:wk-way-dn")
            .is_some_and(|n| *n >= (300 + 600 + 900) << 10)
    });
    let (datanode, reader) = rig.shown();
    assert_eq!(datanode.readers, ["wk-way-rd"]);
    assert!(reader.connected, "{reader:?}");
    // The agent's worker searches all disks of its VM for the proof.
    within(CHANGE_TIMEOUT, "the agent's worker has both disks", || {
        held_images(datanode.pid) == ["d.img", "e.img"]
    });
    assert_eq!(held_images(reader.pid), ["d.img"]);
    // The sandbox denies workers everything else, and each has a user of its own.
    let mut users = Vec::new();
    for pid in [datanode.pid, reader.pid] {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let user = status.lines().find_map(|l| l.strip_prefix("Uid:\t"));
        let user: u32 = user
            .and_then(|l| l.split('\t').next()?.parse().ok())
            .unwrap();
        assert!(
            (1_879_048_192..=1_879_052_287).contains(&user) && !users.contains(&user),
            "{status}"
        );
        users.push(user);
        for line in ["CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"] {
            assert!(status.contains(line), "{line}: {status}");
        }
    }
    let ls = stdout(&rig.daemon.ask(&["vread", "ls"]));
    assert!(ls.contains("wk-way-dn  yes     3 "), "{ls}");
    assert!(stdout(&rig.daemon.ask(&["check"])).contains("vread              yes"));
    // A deleted block's name is gone, and other names are not.
    rig.dn(&format!(
        "rm {BLOCK_FOLDER}/blk_2 {BLOCK_FOLDER}/blk_2_1001.meta"
    ));
    rig.wait_blocks(2);
    within(CHANGE_TIMEOUT, "the name is gone", || rig.is_absent(2));
    rig.assert_same(1);
    rig.assert_same(3);
    assert_eq!(rig.shown().0.withdrawals["deleted"], 1);
    // A block that is not allowed is not there.
    assert!(
        rig.try_sh("rd", "ls /mnt/BP-2-x/blk_1_1001")
            .1
            .contains("No such file")
    );
    // A new configuration revokes all permissions at once: the mount is empty and does not hang.
    assert!(rig.daemon.ask(&["stop", "--all"]).status.success());
    assert!(!lives(datanode.pid) && lives(reader.pid));
    assert!(held_images(reader.pid).is_empty());
    assert!(rig.is_absent(1));
    assert!(rig.daemon.ask(&["start"]).status.success());
    rig.wait_blocks(2);
    rig.assert_same(1);
}

#[test]
fn a_killed_daemon_is_not_noticed_and_the_next_one_finds_the_workers() {
    let mut rig = Rig::with_blocks("wk-kill");
    rig.assert_same(1);
    let (datanode, reader) = rig.shown();
    rig.daemon.kill();
    assert!(lives(datanode.pid) && lives(reader.pid));
    // Blocks that were never looked up before and newly named ones can be read, too.
    rig.assert_same(2);
    rig.make(4, 200);
    within(CHANGE_TIMEOUT, "the new block is there", || {
        !rig.is_absent(4)
    });
    rig.assert_same(4);
    rig.dn(&format!(
        "rm {BLOCK_FOLDER}/blk_1 {BLOCK_FOLDER}/blk_1_1001.meta"
    ));
    within(CHANGE_TIMEOUT, "the deleted block is gone", || {
        rig.is_absent(1)
    });
    rig.daemon.restart();
    rig.wait_blocks(3);
    let (datanode_now, reader_now) = rig.shown();
    assert_eq!(
        (datanode_now.pid, reader_now.pid),
        (datanode.pid, reader.pid)
    );
    // The agent did not have to name any block again.
    assert_eq!(datanode_now.epoch, datanode.epoch);
    rig.assert_same(3);
    rig.make(5, 100);
    rig.wait_blocks(4);
    rig.assert_same(5);
    // A normal stop leaves the mount, too; `restore` does not.
    assert!(rig.daemon.stop().success());
    rig.assert_same(4);
    let run_dir = rig.daemon.run_dir();
    let restored = common::output(&["restore", "--run-dir", run_dir.to_str().unwrap()]);
    assert!(
        stdout(&restored).contains("ended 2 left-behind processes"),
        "{restored:?}"
    );
    assert!(!lives(datanode.pid) && !lives(reader.pid) && !run_dir.join("vread").exists());
}

#[test]
fn a_killed_agents_worker_comes_back_and_no_byte_is_wrong_meanwhile() {
    let rig = Rig::with_blocks("wk-agent");
    rig.assert_same(1);
    let (before, _) = rig.shown();
    signal(before.pid, Signal::KILL);
    let sum = rig.dn(&format!("sha256sum < {BLOCK_FOLDER}/blk_3"));
    within(CHANGE_TIMEOUT, "the block is served again", || {
        // A read returns the right bytes or fails.
        let (_, text) = rig.try_sh(
            "rd",
            &format!("cat /mnt/{POOL}/blk_3_1001 >/tmp/b && sha256sum </tmp/b"),
        );
        let is_there = text.contains("  -");
        assert!(!is_there || text.contains(sum.trim()), "{text} {sum}");
        let (now, _) = rig.shown();
        is_there && now.pid != before.pid && now.serving && now.blocks == 3
    });
    let (now, _) = rig.shown();
    assert!(now.epoch > before.epoch, "{now:?}");
    rig.assert_same(2);
}

#[test]
fn block_names_disappear_with_their_datanode_vm() {
    let mut rig = Rig::with_blocks("wk-dead");
    rig.assert_same(1);
    let (before, reader) = rig.shown();
    rig.lab().guest("wk-dead-dn").unwrap().kill();
    within(CHANGE_TIMEOUT, "its names are gone", || {
        rig.is_absent(1) && rig.is_absent(2)
    });
    within(CHANGE_TIMEOUT, "its worker is gone", || !lives(before.pid));
    rig.daemon.wait("no DataNode", |d| {
        let all: Vread = d.json(&["vread", "ls"]);
        all.datanodes.is_empty()
    });
    assert_eq!(rig.shown().1.pid, reader.pid);
    // The VM returns with the same disk and with the links of its dead agent.
    let again = rig.boot_dn("wk-dead-2", "wk-dead-dn");
    rig.dn_lab = Some(again);
    rig.dn("mkdir -p /tmp/d; mount /dev/ubda /tmp/d");
    rig.start_agent();
    rig.wait_blocks(3);
    rig.assert_same(1);
}

#[test]
fn a_pool_that_is_not_allowed_is_absent() {
    let mut rig = Rig::boot("wk-pool", ", pools = [\"BP-2-*\"]");
    rig.make(1, 100);
    rig.start_agent();
    rig.wait_blocks(1);
    rig.rd("mount -t virtiofs viola /mnt");
    assert!(rig.is_absent(1));
    within(CHANGE_TIMEOUT, "the reader has looked the block up", || {
        rig.shown().0.lookups >= 1
    });
}

#[test]
fn a_killed_readers_worker_restarts_on_its_socket_and_the_datanode_continues() {
    let mut rig = Rig::with_blocks("wk-read");
    rig.assert_same(1);
    let (datanode, before) = rig.shown();
    signal(before.pid, Signal::KILL);
    rig.daemon.wait("a new worker", |d| {
        let all: Vread = d.json(&["vread", "ls"]);
        all.readers
            .first()
            .is_some_and(|r| r.running && r.pid != before.pid && !r.datanodes.is_empty())
    });
    assert!(std::os::unix::net::UnixStream::connect(&before.socket).is_ok());
    // Requests of the dead worker do not block others.
    rig.dn(&format!(
        "rm {BLOCK_FOLDER}/blk_2 {BLOCK_FOLDER}/blk_2_1001.meta"
    ));
    rig.wait_blocks(2);
    let (now, _) = rig.shown();
    assert_eq!(
        (now.pid, now.epoch, now.waiting),
        (datanode.pid, datanode.epoch, 0)
    );
    assert_eq!(now.readers, ["wk-read-rd"]);
}

#[test]
fn another_vm_at_a_readers_socket_finds_no_block() {
    let mut rig = Rig::with_blocks("wk-gate");
    rig.assert_same(1);
    let socket = rig.shown().1.socket;
    signal(rig.guest("rd").pid(), Signal::KILL);
    let text = format!(
        "[lab]\nname='wk-other'\n[[guest]]\nname='wk-other'\ncores=[1]\nkernel_args=['virtio_uml.device={socket}:26']\n"
    );
    let lab = up(&text, "wk-other", rig.folder.path());
    let other = lab.guest("wk-other").unwrap();
    let read = format!("mount -t virtiofs viola /mnt; cat /mnt/{POOL}/blk_1_1001 | wc -c");
    let read = other.exec_for(&["sh", "-c", &read], "", CHANGE_TIMEOUT);
    rig.daemon.wait("the warning", |d| {
        d.log().contains("another process than the VM's is")
    });
    let read = read.unwrap();
    let found = (read.status, read.stdout.trim(), &*read.stderr);
    assert!(
        matches!(found, (0, "0", error) if error.contains("No such file")),
        "{found:?}"
    );
    assert!(rig.shown().1.refusals["not confirmed"] > 0);
    lab.down().unwrap();
}

#[test]
fn a_hanging_reader_does_not_delay_the_daemon() {
    let mut rig = Rig::with_blocks("wk-hang");
    rig.assert_same(1);
    let (_, before) = rig.shown();
    signal(before.pid, Signal::STOP);
    rig.daemon.wait("a new worker", |d| {
        let begin = std::time::Instant::now();
        let all: Vread = d.json(&["vread", "ls"]);
        assert!(begin.elapsed() < Duration::from_secs(2));
        all.readers
            .first()
            .is_some_and(|r| r.running && r.pid != before.pid)
    });
    assert!(!lives(before.pid));
    rig.make(4, 50);
    rig.wait_blocks(4);
}

#[test]
fn a_wrong_configuration_is_refused_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    for (text, said) in [
        (
            "[vread]\nallow = [{ reader = \"a*\", datanode = \"b\" }]",
            "reader: \"a*\" is a pattern",
        ),
        ("[vread]\nallowed = []", "unknown key allowed"),
        ("[vread]\nuser = \"root\"", "root is not allowed"),
        (
            "[[vm]]\nname = \"a\"\n[vm.vread]\nimages = []",
            "unknown key images",
        ),
    ] {
        let file = common::write_config(dir.path(), text);
        for args in [&["check", "--config"][..], &["run", "-c"]] {
            let o = common::output(&[args, &[file.to_str().unwrap()]].concat());
            let sentence = common::refusal(&o, 2);
            assert!(
                sentence.contains(said) && sentence.contains("viola.toml:"),
                "{sentence}"
            );
        }
    }
}

#[test]
fn an_unknown_user_turns_vread_off_with_the_reason() {
    let mut daemon = Daemon::start(
        "[slices]\nenabled = false\n[vread]\nuser = \"no-such-user\"\nallow = [{ reader = \"a\", datanode = \"b\" }]\n",
    );
    daemon.wait("the reason", |d| {
        let all: Vread = d.json(&["vread", "ls"]);
        !all.on && all.why.contains("no user no-such-user")
    });
    let o = common::output(&["worker", "agent", "/x"]);
    assert!(common::refusal(&o, 2).contains("not for people"));
}
