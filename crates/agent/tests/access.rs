// SPDX-License-Identifier: Apache-2.0
//! The agent beside DataNodes that want tokens, hang up, or give their blocks to whoever asks: real guests, and a script
//! that answers as the DataNode does.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use support::host::Host;
use support::{Bench, wait_for};

const GIVES: &str = r"printf '\004\010\000\042\000'";
const WANTS_TOKENS: &str = r"printf '\002\010\005'";
const HANGS_UP: &str = "exit 0";

/// A DataNode process begins that answers like this.
fn begins(bench: &Bench, answer: &str) {
    bench.sh(&format!(
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
    let bench = Bench::boot("ag-door", "ext4");
    bench.sh("ip link set lo up; make 1 1001 100; make 2 1002 3");
    bench.agent("datanode = '127.0.0.1:9866'");
    let host = bench.host();

    // it is not up yet
    wait_why(&host, "`datanode` in the agent's configuration");
    let report = bench.status();
    assert!(report.closed.contains("does not answer"), "{report}");
    assert!(report.to_string().contains(&report.closed), "{report}");

    // it wants tokens: a block that is quiet for long enough is not even linked
    begins(&bench, WANTS_TOKENS);
    wait_why(&host, "dfs.block.access.token.enable");
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!((bench.links(), bench.status().stats.names), (0, 0));

    // the next one does not
    begins(&bench, GIVES);
    host.wait_named(&[(1, 1001), (2, 1002)]);
    host.wait("nothing is wrong", |s| s.stats.why.is_empty());
    assert_eq!(bench.links(), 4);

    // and the next one does again: all is withdrawn, and links are dropped when the host has confirmed
    host.state().hold = true;
    begins(&bench, WANTS_TOKENS);
    host.wait("all are withdrawn", |s| s.held.len() == 2);
    wait_why(&host, "dfs.block.access.token.enable");
    assert_eq!(bench.links(), 4);
    host.release();
    wait_for("no link is left", || bench.links() == 0);
    bench.sh("make 3 1003 20");
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(bench.links(), 0);
    host.wait_named(&[]);

    begins(&bench, GIVES);
    host.wait_named(&[(1, 1001), (2, 1002), (3, 1003)]);

    // one that expects another handshake
    begins(&bench, HANGS_UP);
    host.wait_named(&[]);
    wait_why(&host, "dfs.data.transfer.protection");
    wait_for("no link is left", || bench.links() == 0);
}
