// SPDX-License-Identifier: Apache-2.0
//! The agent beside DataNodes that require tokens, hang up, or serve every client: a real guest, and a script that
//! answers as a DataNode does.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use support::host::Host;
use support::{TestVm, wait_for};

const GIVES: &str = r"printf '\004\010\000\042\000'";
const WANTS_TOKENS: &str = r"printf '\002\010\005'";
const HANGS_UP: &str = "exit 0";

/// Starts a DataNode process that answers like this.
fn begins(vm: &TestVm, answer: &str) {
    vm.sh(&format!(
        "cat >/tmp/answer.new <<'X'\n#!/bin/sh\nhead -c 40 >/dev/null\n{answer}\nX\n\
         chmod +x /tmp/answer.new; mv /tmp/answer.new /tmp/answer\n\
         [ -e /tmp/nc.pid ] || {{ setsid nc -ll -p 9866 -e /tmp/answer </dev/null >/dev/null 2>&1 & echo $! >/tmp/nc.pid; }}\n\
         echo $RANDOM >$D/in_use.lock"
    ));
}

fn wait_why(host: &Host, why: &str) {
    host.wait(&format!("it says: {why}"), |s| s.stats.why.contains(why));
}

#[test]
fn no_block_is_named_unless_the_datanode_gives_it_without_a_token() {
    let vm = TestVm::boot("ag-door", "ext4");
    vm.sh("ip link set lo up; make 1 1001 100; make 2 1002 3");
    vm.agent("datanode = '127.0.0.1:9866'");
    let host = vm.host();

    // the DataNode is not up yet
    wait_why(&host, "`datanode` in the agent's configuration");
    let report = vm.status();
    assert!(report.closed.contains("does not answer"), "{report}");
    assert!(report.to_string().contains(&report.closed), "{report}");

    // it requires tokens: a quiet block is not even linked
    begins(&vm, WANTS_TOKENS);
    wait_why(&host, "dfs.block.access.token.enable");
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!((vm.links(), vm.status().stats.names), (0, 0));

    // the next process serves every client
    begins(&vm, GIVES);
    host.wait_named(&[(1, 1001), (2, 1002)]);
    host.wait("nothing is wrong", |s| s.stats.why.is_empty());
    assert_eq!(vm.links(), 4);

    // the next one requires tokens again: everything is withdrawn, and links go after the host's confirmation
    host.state().hold = true;
    begins(&vm, WANTS_TOKENS);
    host.wait("all are withdrawn", |s| s.held.len() == 2);
    wait_why(&host, "dfs.block.access.token.enable");
    assert_eq!(vm.links(), 4);
    host.release();
    wait_for("no link is left", || vm.links() == 0);
    vm.sh("make 3 1003 20");
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(vm.links(), 0);
    host.wait_named(&[]);

    begins(&vm, GIVES);
    host.wait_named(&[(1, 1001), (2, 1002), (3, 1003)]);

    // the next one expects another handshake
    begins(&vm, HANGS_UP);
    host.wait_named(&[]);
    wait_why(&host, "dfs.data.transfer.protection");
    wait_for("no link is left", || vm.links() == 0);
}
