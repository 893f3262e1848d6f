// SPDX-License-Identifier: Apache-2.0
//! Blocks from the disk of one VM reach another one through the daemon's workers, also when processes die. Needs root and the
//! lab's image.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod hang;
mod rig;

use common::guests::{signal, within};
use common::{Daemon, stdout};
use rig::{BLOCK_FOLDER, CHANGE_TIMEOUT, POOL, Rig, up};
use rustix::process::Signal;
use viola_proto::vread::Vread;

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
