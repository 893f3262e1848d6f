// SPDX-License-Identifier: Apache-2.0
//! Real HDFS, read past its DataNode while its blocks change in every way. Needs root, the lab's image and the output of
//! `scripts/hadoop.sh`.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Mutex;

use common::guests::within;
use common::hdfs::{Bed, STEP_TIMEOUT, check, check_local, tell};
use common::stdout;
use common::steps::{MIB, changes_of_a_file, step};
use viola_lab::hadoop::{Client, FileSystem, ROOT};

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

/// Asserts that the host has no block of the DataNode and reports why, that the reader VM finds none, and that HDFS serves its
/// client.
fn refused(bed: &Bed, client: &Mutex<Client>, path: &str, bytes: u64) {
    within(STEP_TIMEOUT, "the daemon says why", || {
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

/// The DataNode's finished blocks, and whether the reader VM can read each past it.
fn seen_by_reader(bed: &Bed) -> Vec<(String, bool)> {
    let names = bed.names("dn");
    assert!(!names.is_empty(), "the DataNode has no block");
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
        within(STEP_TIMEOUT, "the daemon counts them", || {
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
