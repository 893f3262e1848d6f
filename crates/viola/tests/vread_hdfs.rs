// SPDX-License-Identifier: Apache-2.0
//! Real HDFS, read past its DataNode while everything happens that may happen to a block. Needs root, the lab's image
//! and what `scripts/hadoop.sh` makes.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Mutex;
use std::time::Instant;

use common::guests::within;
use common::hdfs::{Bed, LONG, Seen, ask, check, check_local, tell};
use common::stdout;
use viola_lab::hadoop::{Client, FileSystem, ROOT};

const MIB: u64 = 1 << 20;

/// A step with its name and time, for whoever reads the output.
fn step<T>(name: &str, work: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    eprintln!("{name} ...");
    let result = work();
    eprintln!("{name}: {:.1} s", begun.elapsed().as_secs_f64());
    result
}

fn begin(client: &Mutex<Client>, path: &str) {
    for side in ["viola", "raw"] {
        tell(client, &format!("{side} watch {path} 262144 {side} 1"));
    }
}

/// Ends the readers; neither may ever have seen a wrong byte.
fn end(client: &Mutex<Client>) -> [Seen; 2] {
    ["viola", "raw"].map(|side| {
        let seen: Seen = ask(client, &format!("ended {side}"));
        eprintln!(
            "  {side}: {} reads, {} MiB, {} of them past the DataNode, longest gap {} ms, failures {:?} {}",
            seen.reads,
            seen.bytes / MIB,
            seen.local / MIB,
            seen.longest_ms,
            seen.failures,
            seen.said
        );
        assert_eq!(seen.wrong, 0, "{side}: {}", seen.said);
        seen
    })
}

fn changes_of_a_file(client: &Mutex<Client>) {
    // the last block is half full, and is written to again
    let (first, second) = ("/a_1", "/a_1_5242880_3");
    tell(
        client,
        &format!("stock fill {first} {} {}", 6 * MIB, 4 * MIB),
    );
    check_local(client, first, 6 * MIB);
    begin(client, first);
    for to in [7, 9] {
        tell(client, &format!("stock extend {first} {}", to * MIB));
        check(client, "viola", first, to * MIB);
    }
    // a writer that takes its time, and lets others see what it has
    tell(client, &format!("stock extend {first} {} 300", 14 * MIB));
    for seen in end(client) {
        assert!(seen.failures.is_empty() && seen.reads > 0, "{seen:?}");
    }
    check_local(client, first, 14 * MIB);
    begin(client, first);
    tell(client, &format!("stock truncate {first} {}", 5 * MIB));
    check(client, "viola", first, 5 * MIB);
    end(client);
    // other bytes where the old ones were
    tell(client, &format!("stock rename {first} {second}"));
    begin(client, second);
    tell(client, &format!("stock extend {second} {}", 8 * MIB));
    check(client, "viola", second, 8 * MIB);
    for seen in end(client) {
        assert!(seen.failures.is_empty() && seen.reads > 0, "{seen:?}");
    }
    check_local(client, second, 8 * MIB);
}

#[test]
#[ignore = "a test bed: make test-beds"]
fn hdfs_on_ext4() {
    let bed = Bed::boot("sf-ext4", FileSystem::Ext4, &["dn"], "d*");
    let hdfs = step("start", || bed.hdfs(&[]));
    bed.agent("dn");
    let client = &step("client", || bed.reader(&hdfs));
    step("read", || {
        tell(client, &format!("stock fill /f_7 {} {}", 24 * MIB, 4 * MIB));
        check_local(client, "/f_7", 24 * MIB);
    });
    step("append, truncate, concurrent writer", || {
        changes_of_a_file(client)
    });
}

const TOKENS: &str = "dfs.block.access.token.enable";

/// The host has no block of the DataNode and says why; the reader's VM does not find any, and HDFS serves its client.
fn refused(bed: &Bed, client: &Mutex<Client>, path: &str, bytes: u64) {
    within(LONG, "the daemon says why", || {
        let (datanode, _) = bed.shown("dn");
        !datanode.serving && datanode.blocks == 0 && datanode.why.contains(TOKENS)
    });
    let ls = stdout(&bed.daemon().ask(&["vread", "ls"]));
    assert!(ls.contains(TOKENS), "{ls}");
    for (name, there) in seen_by_reader(bed) {
        assert!(!there, "{name}: {ls}");
    }
    for side in ["viola", "raw", "stock"] {
        let seen = check(client, side, path, bytes);
        assert_eq!(seen.local, 0, "{side}: {seen:?}");
    }
}

/// The DataNode's finished blocks, and whether the reading guest can read them past it.
fn seen_by_reader(bed: &Bed) -> Vec<(String, bool)> {
    let names = bed.names("dn");
    assert!(!names.is_empty(), "there is no block");
    names
        .into_iter()
        .map(|name| {
            let (status, _) = bed.try_sh("rd", &format!("head -c 1 {ROOT}/vread/{name}"));
            (name, status == 0)
        })
        .collect()
}

#[test]
#[ignore = "a test bed: make test-beds"]
fn a_cluster_with_block_access_tokens_is_refused() {
    let bed = Bed::boot("sf-token", FileSystem::Ext4, &["dn"], "d*");
    let mut hdfs = step("start", || bed.hdfs(&[(TOKENS, "true")]));
    bed.agent("dn");
    let client = &step("client", || bed.reader(&hdfs));
    let (path, bytes) = ("/t_4", 6 * MIB);
    tell(client, &format!("stock fill {path} {bytes} {}", 4 * MIB));
    step("tokens", || refused(&bed, client, path, bytes));
    assert_eq!(bed.shown("dn").0.named, 0);

    step("start without tokens", || {
        hdfs.stop_daemons().unwrap();
        hdfs.set(TOKENS, "false").unwrap();
        hdfs.start_daemons()
            .unwrap_or_else(|e| panic!("{}", e.full()));
    });
    step("no tokens", || {
        check_local(client, path, bytes);
        for (name, there) in seen_by_reader(&bed) {
            assert!(there, "{name}");
        }
        within(LONG, "the daemon counts them", || {
            let (datanode, _) = bed.shown("dn");
            datanode.serving && datanode.blocks > 0 && !datanode.why.contains(TOKENS)
        });
    });

    step("start with tokens", || {
        hdfs.stop_daemons().unwrap();
        hdfs.set(TOKENS, "true").unwrap();
        hdfs.start_daemons()
            .unwrap_or_else(|e| panic!("{}", e.full()));
    });
    step("tokens again", || refused(&bed, client, path, bytes));
}
