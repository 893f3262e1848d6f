// SPDX-License-Identifier: Apache-2.0
//! Blocks of a DataNode on another host, through both daemons: two network namespaces with a veth pair between them, and real
//! VMs. Needs root and the lab's image.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use common::guests::{signal, within};
use common::hosts::{BLOCK_FOLDER, CHANGE_TIMEOUT, TwoHosts};
use common::stdout;
use rustix::process::Signal;

/// Longest time that a fault may delay a reader, including the guest's own time.
const MAX_READER_DELAY: Duration = Duration::from_secs(2);

/// One test at a time: the VMs share a core.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn a_block_of_another_host_is_read_byte_for_byte_and_what_is_not_allowed_is_not_there() {
    let _turn = turn();
    let two = TwoHosts::with_blocks("pc-way");
    for id in 1..=3 {
        two.reads_again(id, &two.sums(id), CHANGE_TIMEOUT);
    }
    within(CHANGE_TIMEOUT, "counts are shown", || {
        let (there, here) = (two.a.peer(), two.b.peer());
        let least = (300 + 600 + 900) << 10;
        there.connected && here.incoming && there.bytes_read >= least && here.bytes_served >= least
    });
    assert_eq!(two.a.shown().datanodes.len(), 0, "a lists DataNodes of b");
    let bytes = two.a.reader().bytes;
    assert!(bytes["uml:pc-way-dn@b"] >= 300 << 10, "{bytes:?}");
    let ls = stdout(&two.a.daemon.ask(&["vread", "ls"]));
    assert!(ls.contains("b     yes        "), "{ls}");
    let check = stdout(&two.a.daemon.ask(&["check"]));
    assert!(check.contains("vread: other hosts  yes"), "{check}");
    // The sandbox denies the worker everything else.
    let status = std::fs::read_to_string(format!("/proc/{}/status", two.a.worker())).unwrap();
    for line in ["CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"] {
        assert!(status.contains(line), "{line}: {status}");
    }
    // A block that is deleted on b is gone on a.
    two.dn(&format!(
        "rm {BLOCK_FOLDER}/blk_2 {BLOCK_FOLDER}/blk_2_1001.meta"
    ));
    within(CHANGE_TIMEOUT, "the deleted block is gone", || {
        two.is_absent(2)
    });
    two.reads_again(1, &two.sums(1), CHANGE_TIMEOUT);
    // A block that b does not allow is not there: another DataNode, another reader, another pool.
    for line in [
        "{ host = \"a\", datanode = \"other\" }",
        "{ host = \"a\", reader = \"other\", datanode = \"*\" }",
        "{ host = \"a\", datanode = \"*\", pools = [\"BP-2-*\"] }",
    ] {
        two.b.configure(line, &two.a.as_peer());
        within(CHANGE_TIMEOUT, line, || two.is_absent(3));
    }
    two.allow();
    two.reads_again(3, &two.sums(3), CHANGE_TIMEOUT);
    // A block that a's configuration does not include is not there, either.
    two.a.configure(
        "{ reader = \"pc-way-rd\", datanode = \"other\" }",
        &two.b.as_peer(),
    );
    within(CHANGE_TIMEOUT, "a includes other DataNodes only", || {
        two.is_absent(3)
    });
}

#[test]
fn a_host_with_another_key_is_refused_and_both_sides_say_so() {
    let _turn = turn();
    let two = TwoHosts::with_blocks("pc-key");
    let sums = two.sums(1);
    two.reads_again(1, &sums, CHANGE_TIMEOUT);
    // b has a wrong key for a.
    let wrong = two.a.as_peer().replace(&two.a.fingerprint, &"0".repeat(64));
    two.b
        .configure("{ host = \"a\", datanode = \"*\" }", &wrong);
    within(CHANGE_TIMEOUT, "b refuses a", || {
        let strangers = two.b.shown().host.map_or(0, |h| h.strangers);
        let peer = two.a.peer();
        strangers > 0 && !peer.connected && !peer.why.is_empty()
    });
    within(CHANGE_TIMEOUT, "no block of b is read", || two.is_absent(1));
    let ls = stdout(&two.b.daemon.ask(&["vread", "ls"]));
    assert!(ls.contains("connections refused"), "{ls}");
    two.allow();
    two.reads_again(1, &sums, CHANGE_TIMEOUT);
    // a has a wrong key for b.
    let wrong = two.b.as_peer().replace(&two.b.fingerprint, &"0".repeat(64));
    two.a
        .configure("{ reader = \"pc-key-rd\", datanode = \"*\" }", &wrong);
    within(CHANGE_TIMEOUT, "a does not trust b", || {
        let peer = two.a.peer();
        !peer.connected && !peer.why.is_empty() && two.is_absent(1)
    });
    let ls = stdout(&two.a.daemon.ask(&["vread", "ls"]));
    assert!(ls.contains(&two.a.peer().why), "{ls}");
    two.allow();
    two.reads_again(1, &sums, CHANGE_TIMEOUT);
}

#[test]
fn after_every_death_readers_recover_without_a_long_wait() {
    let _turn = turn();
    let mut two = TwoHosts::with_blocks("pc-kill");
    let sums = two.sums(1);
    two.reads_again(1, &sums, CHANGE_TIMEOUT);
    let workers = (two.a.worker(), two.b.worker());
    // Daemons die: readers do not notice, also with blocks that they never read before, and the next daemons find the workers.
    two.a.daemon.kill();
    two.b.daemon.kill();
    let (read, took) = two.read(2);
    assert_eq!(read, Ok(two.sums(2)));
    assert!(took <= MAX_READER_DELAY, "{took:?}");
    two.a.restart();
    two.b.restart();
    within(CHANGE_TIMEOUT, "the workers are found", || {
        (two.a.worker(), two.b.worker()) == workers
    });
    two.reads_again(3, &two.sums(3), MAX_READER_DELAY);
    // Workers die.
    signal(workers.0, Signal::KILL);
    two.reads_again(1, &sums, MAX_READER_DELAY);
    signal(workers.1, Signal::KILL);
    two.reads_again(1, &sums, MAX_READER_DELAY);
    assert!(two.a.worker() != workers.0 && two.b.worker() != workers.1);
    // The worker of the DataNode's agent dies, and then the DataNode itself.
    let agent = two.b.shown().datanodes[0].pid;
    signal(agent, Signal::KILL);
    two.reads_again(1, &sums, MAX_READER_DELAY);
    two.stop_node();
    within(CHANGE_TIMEOUT, "its blocks are gone", || two.is_absent(1));
    two.boot_node("b");
    two.start_agent();
    two.reads_again(1, &sums, CHANGE_TIMEOUT);
}

#[test]
fn a_datanode_that_moves_to_another_host_is_found() {
    let _turn = turn();
    let mut two = TwoHosts::with_blocks("pc-move");
    let sums = two.sums(3);
    two.reads_again(3, &sums, CHANGE_TIMEOUT);
    two.stop_node();
    within(CHANGE_TIMEOUT, "the block is on neither host", || {
        two.is_absent(3)
    });
    two.boot_node("a");
    two.start_agent();
    two.reads_again(3, &sums, CHANGE_TIMEOUT);
    // A local block is read locally.
    let before = two.a.peer().bytes_read;
    two.reads_again(1, &two.sums(1), CHANGE_TIMEOUT);
    let bytes = two.a.reader().bytes;
    within(CHANGE_TIMEOUT, "local bytes are counted", || {
        two.a.reader().bytes.contains_key("uml:pc-move-dn")
    });
    assert_eq!(two.a.peer().bytes_read, before, "{bytes:?}");
    two.stop_node();
    two.boot_node("b");
    two.start_agent();
    two.reads_again(3, &sums, CHANGE_TIMEOUT);
}
