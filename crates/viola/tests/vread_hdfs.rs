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
use viola_lab::hadoop::{Client, FileSystem, Hdfs, ROOT};

#[test]
#[ignore = "a test bed: make test-beds"]
fn hdfs_on_ext4() {
    let bed = Bed::boot("sf-ext4", FileSystem::Ext4, &["dn"], "d*");
    let hdfs = step("start", || bed.hdfs(&[]));
    an_hdfs_client_is_served_after_one_command_in_each_vm(&bed, &hdfs);
    let client = &step("client", || bed.reader(&hdfs));
    step("read", || {
        tell(client, &format!("stock fill /f_7 {} {}", 24 * MIB, 4 * MIB));
        check_local(client, "/f_7", 24 * MIB);
    });
    step("append, truncate, concurrent writer", || {
        changes_of_a_file(client)
    });
}

/// The first page's step in both VMs: `viola-agent setup` finds the DataNode and the HDFS client, and what it writes suffices.
/// systemd does not run in these VMs, so the test does what the units say.
fn an_hdfs_client_is_served_after_one_command_in_each_vm(bed: &Bed, hdfs: &Hdfs) {
    let said = bed.setup("dn", "");
    assert!(
        said.contains("found: a DataNode with data in /mnt/data\n"),
        "{said}"
    );
    bed.agent_with(
        "dn",
        &bed.sh("dn", &format!("cat {ROOT}/etc/viola/agent.toml")),
    );

    // A Hadoop as its archive unpacks it, with the libraries of this laboratory, and the package's jar.
    hdfs.prepare(bed.guest("rd")).unwrap();
    let (jars, java) = (
        bed.hadoop().folder().display(),
        bed.hadoop().java().display(),
    );
    bed.sh(
        "rd",
        &format!(
            "cd {ROOT}; mkdir -p opt/hadoop/etc opt/hadoop/share/hadoop/common/lib tmp/etc; cp -r run/conf opt/hadoop/etc/hadoop; \
             for j in .{jars}/jars/*.jar; do ln -s ${{j#.}} opt/hadoop/share/hadoop/common/lib; done; head -c 25165824 /dev/urandom >tmp/x; \
             mount -t tmpfs none mnt; mount -t tmpfs none usr/share/java; cp .{jars}/viola-hdfs.jar usr/share/java"
        ),
    );
    let before = bed.sh(
        "rd",
        &format!("cat {ROOT}/opt/hadoop/etc/hadoop/hdfs-site.xml"),
    );
    let said = bed.setup("rd", "");
    println!("{said}");
    assert!(
        said.contains("systemctl enable --now mnt-viola.mount"),
        "{said}"
    );
    bed.sh(
        "rd",
        &format!(
            "cd {ROOT}; u=etc/systemd/system/mnt-viola.mount; of() {{ sed -n \"s/^$1=//p\" $u; }}; mkdir -p .$(of Where); \
             mount -t $(of Type) -o $(of Options) $(of What) .$(of Where)"
        ),
    );
    let home = "/opt/hadoop";
    let hadoop = |words: &str| {
        bed.sh(
            "rd",
            &format!(
                "chroot {ROOT} sh -ec '{java}/bin/java -Xmx256m -cp \"{home}/etc/hadoop:{home}/share/hadoop/common/lib/*\" \
                 org.apache.hadoop.fs.FsShell {words}'"
            ),
        )
    };
    step("put", || hadoop("-put /tmp/x /x"));
    let past = || bed.shown("dn").1.bytes.values().sum::<u64>();
    within(STEP_TIMEOUT, "the block is named", || {
        bed.shown("dn").0.blocks > 0
    });
    step("read", || hadoop("-cat /x | cmp - /tmp/x"));
    // The block and its checksums; the worker reports them some time later.
    within(STEP_TIMEOUT, "the block was read past the DataNode", || {
        past() >= 24 * MIB
    });

    let said = bed.setup("rd", "--remove");
    assert!(said.contains("hdfs-site.xml is as it was"), "{said}");
    let after = bed.sh(
        "rd",
        &format!("cat {ROOT}/opt/hadoop/etc/hadoop/hdfs-site.xml"),
    );
    assert_eq!(after, before);
    let seen = past();
    step("read without it", || hadoop("-cat /x | cmp - /tmp/x"));
    assert_eq!(past(), seen);
    bed.sh(
        "rd",
        &format!("cd {ROOT}; umount mnt/viola mnt usr/share/java"),
    );
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
