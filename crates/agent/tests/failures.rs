// SPDX-License-Identifier: Apache-2.0
//! What happens when one side is gone, slow or wrong, and when the file system changes below the agent.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use support::host::{Host, State};
use support::{Bench, wait_for};
use viola_lab::testing::sha256;
use viola_lab::wire::Workload;
use viola_proto::agent::WithdrawReason;

const F: &str = "/tmp/d/dfs/current/BP-1-10.0.0.1-2/current/finalized/subdir0/subdir0";

fn pause(seconds: u64) {
    std::thread::sleep(Duration::from_secs(seconds));
}

#[test]
fn links_of_a_dead_agent_stay_until_the_host_has_ended_its_session() {
    let bench = Bench::boot("ag-dead", "ext4");
    bench.sh("make 1 1001 500; make 2 1002 50");
    bench.agent("");
    let host = bench.host();
    host.wait_named(&[(1, 1001), (2, 1002)]);
    let name = host.named(1);
    let sum = bench.sum(&format!("{F}/blk_1"));
    bench.kill_agent();
    host.state().silent = true;
    bench.sh("delete 1");
    bench.agent("");
    host.wait("the new agent has said hello twice", |s| s.hellos >= 3);
    assert_eq!(bench.links(), 4, "nobody has said that reads have ended");
    assert_eq!(sha256(&host.bytes(&name.data)), sum);
    assert!(bench.status().stats.held_bytes >= 500 << 10);
    host.state().silent = false;
    host.wait_named(&[(2, 1002)]);
    wait_for("the dead agent's links are gone", || bench.links() == 2);
    assert_eq!(bench.status().stats.held_bytes, 0);
}

#[test]
fn hosts_come_and_go_and_no_link_is_dropped_without_one() {
    let bench = Bench::boot("ag-gone", "ext4");
    bench.sh("make 1 1001 50; make 2 1002 50");
    bench.agent("");
    pause(3);
    assert_eq!(bench.links(), 0, "without a host nothing is held");
    let host = bench.host();
    host.wait_named(&[(1, 1001), (2, 1002)]);
    drop(host);
    bench.sh("delete 1; make 3 1003 50");
    pause(3);
    assert!(
        bench.links() >= 4,
        "nobody has said that reads of 1 have ended"
    );
    for round in 0..3 {
        let host = bench.host();
        host.wait_named(&[(2, 1002), (3, 1003)]);
        wait_for("the links of 1 are gone", || bench.links() == 4);
        // garbage on the line costs nothing but itself
        if round == 1 {
            host.garbage();
            bench.sh("make 4 1004 50");
            host.wait_named(&[(2, 1002), (3, 1003), (4, 1004)]);
            bench.sh("delete 4");
            host.wait_named(&[(2, 1002), (3, 1003)]);
        }
    }
}

#[test]
fn too_much_held_back_stops_naming() {
    let bench = Bench::boot("ag-hold", "xfs");
    bench.sh("make 1 1001 900; make 2 1002 900");
    bench.agent("hold_mib = 1");
    let host = bench.host();
    host.wait_named(&[(1, 1001), (2, 1002)]);
    host.state().hold = true;
    bench.sh("delete 1 2; make 3 1003 100");
    host.wait("both are withdrawn", |s| s.held.len() == 2);
    host.wait("the agent says that it is full", |s| s.stats.full);
    pause(3);
    assert_eq!(host.state().names.len(), 2, "3 is not named");
    assert_eq!(bench.links(), 4, "nothing is dropped");
    host.release();
    host.wait_named(&[(3, 1003)]);
    wait_for("links are gone", || bench.links() == 2);
}

#[test]
fn a_queue_that_overflows_loses_no_block() {
    let bench = Bench::boot("ag-over", "ext4");
    bench.sh("echo 16 >/proc/sys/fs/fanotify/max_queued_events");
    bench.sh("for i in 1 2 3 4 5 6; do make $i 100$i 20; done");
    bench.agent("");
    let host = bench.host();
    host.wait("all are named", |s| s.names.len() == 6);
    bench.signal("STOP");
    bench.sh("delete 1 2; for i in $(seq 10 40); do make $i 1000 4; done; delete 10 11; append 3 1003 2003 7");
    bench.signal("CONT");
    host.wait("those that are left are named", |s| s.names.len() == 33);
    let ids: Vec<i64> = {
        let state = host.state();
        assert!(state.names.values().all(|n| n.id != 3 || n.stamp == 2003));
        let mut ids: Vec<i64> = state.names.values().map(|n| n.id).collect();
        ids.sort_unstable();
        ids
    };
    assert_eq!(ids, (3..=6).chain(12..=40).collect::<Vec<_>>());
    let stats = bench.status().stats;
    assert!(stats.overflows > 0 && stats.scans > 1, "{stats:?}");
}

#[test]
fn a_host_that_does_not_find_the_disk_costs_nothing() {
    let bench = Bench::boot("ag-blind", "ext4");
    bench.sh("make 1 1001 50");
    bench.agent("");
    let blind = State {
        blind: true,
        ..State::default()
    };
    let host = Host::with(
        bench.guest().agent_socket().to_owned(),
        bench.image(),
        blind,
    );
    host.wait("a proof was sent", |s| s.proofs > 0);
    pause(3);
    assert_eq!(bench.links(), 0);
    assert!(bench.status().volumes[0].state.contains("no disk has it"));
    host.state().blind = false;
    host.wait_named(&[(1, 1001)]);
    // the images changed: everything is withdrawn, proven and named again
    let (proofs, names) = (host.state().proofs, bench.status().stats.names);
    host.prove_again(1);
    host.wait("proven again", |s| s.proofs > proofs);
    wait_for("named again", || bench.status().stats.names > names);
    host.wait_named(&[(1, 1001)]);
}

#[test]
fn remounts_unmounts_and_pauses_withdraw_everything() {
    let bench = Bench::boot("ag-mount", "xfs");
    bench.sh("make 1 1001 50");
    bench.agent("");
    let host = bench.host();
    host.wait_named(&[(1, 1001)]);

    bench.sh("mount -o remount,noatime /tmp/d");
    host.wait("all is withdrawn", |s| {
        s.withdrawn_all == [WithdrawReason::Filesystem]
    });
    host.wait("and proven again", |s| s.proofs == 2);
    host.wait_named(&[(1, 1001)]);

    let program = bench.program(env!("CARGO_BIN_EXE_viola-agent"));
    let agent = |wish: &str| bench.bare(&format!("{program} --config /tmp/agent.toml {wish}"));
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
    bench.bare(&format!("! {program} --config /tmp/agent.toml pause"));
    agent("resume");
    host.release();
    host.wait_named(&[(1, 1001)]);

    // the agent keeps nothing open that would be in the way
    bench.bare("umount /tmp/d");
    host.wait_named(&[]);
    wait_for("the volume is gone", || bench.status().volumes.is_empty());
    bench.sh("true");
    host.wait_named(&[(1, 1001)]);
    wait_for("old links are swept", || bench.links() == 2);
}

#[test]
fn a_frozen_file_system_does_not_stop_the_agent() {
    let bench = Bench::boot("ag-freeze", "ext4");
    bench.sh("make 1 1001 50; make 2 1002 50; make 3 1003 50");
    bench.agent("");
    let host = bench.host();
    host.wait_named(&[(1, 1001), (2, 1002), (3, 1003)]);
    let program = bench.program("/usr/sbin/fsfreeze");
    bench.sh("delete 1");
    host.wait_named(&[(2, 1002), (3, 1003)]);
    host.state().hold = true;
    bench.sh("delete 2");
    host.wait("2 is withdrawn", |s| s.held.len() == 1);
    bench.bare(&format!("sync; {program} -f /tmp/d"));
    // its links cannot be removed now
    host.release();
    host.wait("frozen, all is withdrawn", |s| s.names.is_empty());
    assert!(bench.status().volumes[0].state.contains("frozen"));
    bench.bare(&format!("{program} -u /tmp/d"));
    host.wait_named(&[(3, 1003)]);
    wait_for("the links of 2 are gone", || bench.links() == 2);
}

#[test]
fn e4defrag_is_noticed() {
    let bench = Bench::boot("ag-defrag", "ext4");
    // two files that grow in turns are in many pieces
    bench.sh("for i in $(seq 200); do for n in 1 2; do \
         dd if=/dev/urandom bs=4096 count=1 2>/dev/null >>$R/blk_$n; sync; done; done; \
         for n in 1 2; do echo sum >$F/blk_${n}_1001.meta; mv $R/blk_$n $F/; done");
    bench.agent("");
    let host = bench.host();
    host.wait_named(&[(1, 1001), (2, 1001)]);
    let (old, sum) = (host.named(1), bench.sum(&format!("{F}/blk_1")));
    assert!(old.data.extents.len() > 50, "{}", old.data.extents.len());
    let program = bench.program("/usr/sbin/e4defrag");
    let said = bench.sh(&format!(
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
    let bench = Bench::boot("ag-fsr", "xfs");
    // pieces written from the end to the beginning, each brought to the disk: none joins the next
    bench.sh(
        "for i in $(seq 100 -1 0); do dd if=/dev/urandom of=$R/blk_1 bs=4096 count=1 seek=$i conv=notrunc,fsync 2>/dev/null; \
         dd if=/dev/urandom of=$R/x$i bs=4096 count=1 conv=fsync 2>/dev/null; done; \
         echo sum >$F/blk_1_1001.meta; mv $R/blk_1 $F/",
    );
    bench.agent("");
    let host = bench.host();
    host.wait_named(&[(1, 1001)]);
    let (old, sum) = (host.named(1), bench.sum(&format!("{F}/blk_1")));
    assert!(old.data.extents.len() > 20, "{}", old.data.extents.len());
    assert_eq!(sha256(&host.bytes(&old.data)), sum);
    let program = bench.program("/usr/sbin/xfs_fsr");
    let said = bench.sh(&format!("{program} -v -d $F/blk_1 2>&1; sync"));
    host.wait("1 is withdrawn", |s| s.withdrawn.iter().any(|w| w.0 == 1));
    assert_eq!(host.why(1), Some(WithdrawReason::Relocated), "{said}");
    host.wait_named(&[(1, 1001)]);
    let new = host.named(1);
    assert_ne!(new.data.extents, old.data.extents, "{said}");
    assert_eq!(sha256(&host.bytes(&new.data)), sum);
}

#[test]
fn the_image_has_the_agent_and_a_bad_configuration_is_refused() {
    let bench = Bench::boot("ag-work", "ext4");
    bench.sh("make 1 1001 50");
    let error = bench
        .guest()
        .start("agent", Workload::agent("data = ['dfs']"))
        .unwrap_err();
    assert!(
        error.to_string().contains("must be an absolute path"),
        "{error}"
    );
    bench
        .guest()
        .start(
            "agent",
            Workload::agent("data = ['/tmp/d/dfs']\nquiet_ms = 500"),
        )
        .unwrap();
    let host = bench.host();
    host.wait_named(&[(1, 1001)]);
    assert_eq!(bench.guest().stat("agent").unwrap().units, 1);
    bench.guest().stop("agent").unwrap();
    let (status, text) = bench.run("viola-agent --config /nothing; echo $?");
    assert_eq!((status, text.lines().last()), (0, Some("2")), "{text}");
    assert_eq!(text.lines().count(), 2, "{text}");
}
