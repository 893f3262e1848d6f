// SPDX-License-Identifier: Apache-2.0
//! What happens when one side is gone, slow or wrong, and when the file system changes below the agent.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use support::host::{Host, State};
use support::{TestVm, wait_for};
use viola_lab::testing::sha256;
use viola_lab::wire::Workload;
use viola_proto::agent::WithdrawReason;

const F: &str = "/tmp/d/dfs/current/BP-1-10.0.0.1-2/current/finalized/subdir0/subdir0";

fn pause(seconds: u64) {
    std::thread::sleep(Duration::from_secs(seconds));
}

#[test]
fn links_of_a_dead_agent_stay_until_the_host_has_ended_its_session() {
    let vm = TestVm::boot("ag-dead", "ext4");
    vm.sh("make 1 1001 500; make 2 1002 50");
    vm.agent("");
    let host = vm.host();
    host.wait_named(&[(1, 1001), (2, 1002)]);
    let name = host.named(1);
    let sum = vm.sum(&format!("{F}/blk_1"));
    vm.kill_agent();
    host.state().silent = true;
    vm.sh("delete 1");
    vm.agent("");
    host.wait("the new agent has said hello twice", |s| s.hellos >= 3);
    assert_eq!(vm.links(), 4, "nobody has said that reads have ended");
    assert_eq!(sha256(&host.bytes(&name.data)), sum);
    assert!(vm.status().stats.held_bytes >= 500 << 10);
    host.state().silent = false;
    host.wait_named(&[(2, 1002)]);
    wait_for("the dead agent's links are gone", || vm.links() == 2);
    assert_eq!(vm.status().stats.held_bytes, 0);
}

#[test]
fn no_link_is_removed_while_no_host_is_connected() {
    let vm = TestVm::boot("ag-gone", "ext4");
    vm.sh("make 1 1001 50; make 2 1002 50");
    vm.agent("");
    pause(3);
    assert_eq!(vm.links(), 0, "without a host nothing is held");
    let host = vm.host();
    host.wait_named(&[(1, 1001), (2, 1002)]);
    drop(host);
    vm.sh("delete 1; make 3 1003 50");
    pause(3);
    assert!(
        vm.links() >= 4,
        "nobody has said that reads of 1 have ended"
    );
    for round in 0..3 {
        let host = vm.host();
        host.wait_named(&[(2, 1002), (3, 1003)]);
        wait_for("the links of 1 are gone", || vm.links() == 4);
        // garbage on the line is skipped
        if round == 1 {
            host.garbage();
            vm.sh("make 4 1004 50");
            host.wait_named(&[(2, 1002), (3, 1003), (4, 1004)]);
            vm.sh("delete 4");
            host.wait_named(&[(2, 1002), (3, 1003)]);
        }
    }
}

#[test]
fn too_many_held_bytes_stop_naming() {
    let vm = TestVm::boot("ag-hold", "xfs");
    vm.sh("make 1 1001 900; make 2 1002 900");
    vm.agent("max_held_mib = 1");
    let host = vm.host();
    host.wait_named(&[(1, 1001), (2, 1002)]);
    host.state().hold = true;
    vm.sh("delete 1 2; make 3 1003 100");
    host.wait("both are withdrawn", |s| s.held.len() == 2);
    host.wait("the agent says that it is full", |s| s.stats.full);
    pause(3);
    assert_eq!(host.state().names.len(), 2, "3 is not named");
    assert_eq!(vm.links(), 4, "nothing is dropped");
    host.release();
    host.wait_named(&[(3, 1003)]);
    wait_for("links are gone", || vm.links() == 2);
}

#[test]
fn an_overflow_of_the_fanotify_queue_loses_no_block() {
    let vm = TestVm::boot("ag-over", "ext4");
    vm.sh("echo 16 >/proc/sys/fs/fanotify/max_queued_events");
    vm.sh("for i in 1 2 3 4 5 6; do make $i 100$i 20; done");
    vm.agent("");
    let host = vm.host();
    host.wait("all are named", |s| s.names.len() == 6);
    vm.signal("STOP");
    vm.sh("delete 1 2; for i in $(seq 10 40); do make $i 1000 4; done; delete 10 11; append 3 1003 2003 7");
    vm.signal("CONT");
    host.wait("those that are left are named", |s| s.names.len() == 33);
    let ids: Vec<i64> = {
        let state = host.state();
        assert!(state.names.values().all(|n| n.id != 3 || n.stamp == 2003));
        let mut ids: Vec<i64> = state.names.values().map(|n| n.id).collect();
        ids.sort_unstable();
        ids
    };
    assert_eq!(ids, (3..=6).chain(12..=40).collect::<Vec<_>>());
    let stats = vm.status().stats;
    assert!(stats.overflows > 0 && stats.scans > 1, "{stats:?}");
}

#[test]
fn a_host_that_does_not_find_the_disk_causes_no_links() {
    let vm = TestVm::boot("ag-blind", "ext4");
    vm.sh("make 1 1001 50");
    vm.agent("");
    let blind = State {
        blind: true,
        ..State::default()
    };
    let host = Host::with(vm.guest().agent_socket().to_owned(), vm.image(), blind);
    host.wait("a proof was sent", |s| s.proofs > 0);
    pause(3);
    assert_eq!(vm.links(), 0);
    assert!(vm.status().volumes[0].state.contains("no disk has it"));
    host.state().blind = false;
    host.wait_named(&[(1, 1001)]);
    // the images changed: everything is withdrawn, proven and named again
    let (proofs, names) = (host.state().proofs, vm.status().stats.names);
    host.prove_again(1);
    host.wait("proven again", |s| s.proofs > proofs);
    wait_for("named again", || vm.status().stats.names > names);
    host.wait_named(&[(1, 1001)]);
}

#[test]
fn remounts_unmounts_and_pauses_withdraw_everything() {
    let vm = TestVm::boot("ag-mount", "xfs");
    vm.sh("make 1 1001 50");
    vm.agent("");
    let host = vm.host();
    host.wait_named(&[(1, 1001)]);

    vm.sh("mount -o remount,noatime /tmp/d");
    host.wait("all is withdrawn", |s| {
        s.withdrawn_all == [WithdrawReason::Filesystem]
    });
    host.wait("and proven again", |s| s.proofs == 2);
    host.wait_named(&[(1, 1001)]);

    let program = vm.program(env!("CARGO_BIN_EXE_viola-agent"));
    let agent = |wish: &str| vm.bare(&format!("{program} --config /tmp/agent.toml {wish}"));
    agent("pause");
    assert!(
        host.state().names.is_empty(),
        "pause answers when all is withdrawn"
    );
    assert!(agent("status").contains("paused"));
    pause(3);
    assert!(host.state().names.is_empty());
    agent("resume");
    host.wait_named(&[(1, 1001)]);
    host.state().hold = true;
    vm.bare(&format!("! {program} --config /tmp/agent.toml pause"));
    agent("resume");
    host.release();
    host.wait_named(&[(1, 1001)]);

    // the agent keeps no file open that would prevent the unmount
    vm.bare("umount /tmp/d");
    host.wait_named(&[]);
    wait_for("the volume is gone", || vm.status().volumes.is_empty());
    vm.sh("true");
    host.wait_named(&[(1, 1001)]);
    wait_for("old links are swept", || vm.links() == 2);
}

#[test]
fn a_frozen_file_system_does_not_stop_the_agent() {
    let vm = TestVm::boot("ag-freeze", "ext4");
    vm.sh("make 1 1001 50; make 2 1002 50; make 3 1003 50");
    vm.agent("");
    let host = vm.host();
    host.wait_named(&[(1, 1001), (2, 1002), (3, 1003)]);
    let program = vm.program("/usr/sbin/fsfreeze");
    vm.sh("delete 1");
    host.wait_named(&[(2, 1002), (3, 1003)]);
    host.state().hold = true;
    vm.sh("delete 2");
    host.wait("2 is withdrawn", |s| s.held.len() == 1);
    vm.bare(&format!("sync; {program} -f /tmp/d"));
    // its links cannot be removed now
    host.release();
    host.wait("frozen, all is withdrawn", |s| s.names.is_empty());
    assert!(vm.status().volumes[0].state.contains("frozen"));
    vm.bare(&format!("{program} -u /tmp/d"));
    host.wait_named(&[(3, 1003)]);
    wait_for("the links of 2 are gone", || vm.links() == 2);
}

#[test]
fn e4defrag_is_noticed() {
    let vm = TestVm::boot("ag-defrag", "ext4");
    // two files that grow in turns have many extents
    vm.sh("for i in $(seq 200); do for n in 1 2; do \
         dd if=/dev/urandom bs=4096 count=1 2>/dev/null >>$R/blk_$n; sync; done; done; \
         for n in 1 2; do echo sum >$F/blk_${n}_1001.meta; mv $R/blk_$n $F/; done");
    vm.agent("");
    let host = vm.host();
    host.wait_named(&[(1, 1001), (2, 1001)]);
    let (old, sum) = (host.named(1), vm.sum(&format!("{F}/blk_1")));
    assert!(old.data.extents.len() > 50, "{}", old.data.extents.len());
    let program = vm.program("/usr/sbin/e4defrag");
    let said = vm.sh(&format!(
        "ln -sfn /proc/mounts /etc/mtab 2>/dev/null || true; {program} -v $F/blk_1; sync"
    ));
    host.wait("1 is withdrawn", |s| s.withdrawn.iter().any(|w| w.0 == 1));
    assert_eq!(host.why(1), Some(WithdrawReason::Relocated), "{said}");
    host.wait_named(&[(1, 1001), (2, 1001)]);
    let new = host.named(1);
    assert!(new.data.extents.len() < 10, "{said}");
    assert_eq!(sha256(&host.bytes(&new.data)), sum);
}

#[test]
fn xfs_fsr_is_noticed() {
    let vm = TestVm::boot("ag-fsr", "xfs");
    // written from the end to the beginning with a sync each: no extent joins the next
    vm.sh(
        "for i in $(seq 100 -1 0); do dd if=/dev/urandom of=$R/blk_1 bs=4096 count=1 seek=$i conv=notrunc,fsync 2>/dev/null; \
         dd if=/dev/urandom of=$R/x$i bs=4096 count=1 conv=fsync 2>/dev/null; done; \
         echo sum >$F/blk_1_1001.meta; mv $R/blk_1 $F/",
    );
    vm.agent("");
    let host = vm.host();
    host.wait_named(&[(1, 1001)]);
    let (old, sum) = (host.named(1), vm.sum(&format!("{F}/blk_1")));
    assert!(old.data.extents.len() > 20, "{}", old.data.extents.len());
    assert_eq!(sha256(&host.bytes(&old.data)), sum);
    let program = vm.program("/usr/sbin/xfs_fsr");
    let said = vm.sh(&format!("{program} -v -d $F/blk_1 2>&1; sync"));
    host.wait("1 is withdrawn", |s| s.withdrawn.iter().any(|w| w.0 == 1));
    assert_eq!(host.why(1), Some(WithdrawReason::Relocated), "{said}");
    host.wait_named(&[(1, 1001)]);
    let new = host.named(1);
    assert_ne!(new.data.extents, old.data.extents, "{said}");
    assert_eq!(sha256(&host.bytes(&new.data)), sum);
}

#[test]
fn the_image_has_the_agent_which_refuses_a_bad_configuration() {
    let vm = TestVm::boot("ag-work", "ext4");
    vm.sh("make 1 1001 50");
    let error = vm
        .guest()
        .start("agent", Workload::agent("data = ['dfs']"))
        .unwrap_err();
    assert!(
        error.to_string().contains("must be an absolute path"),
        "{error}"
    );
    vm.guest()
        .start(
            "agent",
            Workload::agent("data = ['/tmp/d/dfs']\nquiet_ms = 500"),
        )
        .unwrap();
    let host = vm.host();
    host.wait_named(&[(1, 1001)]);
    assert_eq!(vm.guest().stat("agent").unwrap().units, 1);
    vm.guest().stop("agent").unwrap();
    let (status, text) = vm.run("viola-agent --config /nothing; echo $?");
    assert_eq!((status, text.lines().last()), (0, Some("2")), "{text}");
    assert_eq!(text.lines().count(), 2, "{text}");
}
