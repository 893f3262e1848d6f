// SPDX-License-Identifier: Apache-2.0
//! Real HDFS, read past its DataNode while its blocks are moved, deleted, corrupted and upgraded, and while its processes die.
//! The tests compare every byte. They need root, the lab's image and the output of `scripts/hadoop.sh`.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::guests::{signal, within};
use common::hdfs::{Bed, STEP_TIMEOUT, check, tell};
use common::steps::{self, MIB, assert_no_stall, check_past, step};
use rustix::process::Signal;
use viola_lab::hadoop::FileSystem;

/// Duration of the test that deletes blocks and reuses their extents while clients read.
const REFILL_TIME: Duration = Duration::from_secs(45);

#[test]
#[ignore = "a test bed: make test-beds"]
fn ext4_blocks_that_are_moved_deleted_or_corrupted() {
    let bed = Bed::boot("sa-ext4", FileSystem::Ext4, &["dn"], "d*");
    let hdfs = step("start", || bed.hdfs(&[]));
    bed.agent("dn");
    let client = &step("client", || bed.reader(&hdfs));
    step("read", || {
        tell(client, &format!("stock fill /f_7 {} {}", 24 * MIB, 4 * MIB));
        check_past(&bed, client, "/f_7", 24 * MIB);
    });
    step("e4defrag", || steps::defragment(&bed, client));
    step("delete and refill", || {
        steps::refill(&bed, client, REFILL_TIME)
    });
    step("a corrupt block", || {
        steps::corrupt(&bed, client);
        check_past(&bed, client, "/f_7", 24 * MIB);
    });
    step("data=journal", || steps::data_journal(&bed, &hdfs, client));
}

#[test]
#[ignore = "a test bed: make test-beds"]
fn ext4_deaths_and_upgrades() {
    let bed = Bed::boot("sb-ext4", FileSystem::Ext4, &["dn"], "d*");
    let hdfs = step("start", || bed.hdfs(&[]));
    bed.agent("dn");
    let client = &step("client", || bed.reader(&hdfs));
    let all = || check_past(&bed, client, "/f_7", 24 * MIB);
    step("read", || {
        tell(client, &format!("stock fill /f_7 {} {}", 24 * MIB, 4 * MIB));
        all();
    });
    step("deaths", || {
        assert_no_stall(client, "guest agent killed", "/f_7", || {
            bed.sh("dn", "kill -9 $(pidof viola-agent)");
            std::thread::sleep(Duration::from_secs(1));
            steps::restart_agent(&bed, "dn");
        });
        all();
        assert_no_stall(client, "agent's worker killed", "/f_7", || {
            signal(bed.shown("dn").0.pid, Signal::KILL);
        });
        all();
        assert_no_stall(client, "daemon killed", "/f_7", || bed.daemon().kill());
        // The workers have not noticed.
        let seen = check(client, "viola", "/f_7", 24 * MIB);
        assert_eq!(seen.local, 24 * MIB, "{seen:?}");
        bed.daemon().restart();
        all();
    });
    step("a corrupt block, upgrade and back", || {
        steps::corrupt(&bed, client);
        steps::upgrade(&bed, &hdfs, client, true);
    });
    step("reader's worker killed", || {
        assert_no_stall(client, "reader's worker killed", "/f_7", || {
            signal(bed.shown("dn").1.pid, Signal::KILL);
        });
        steps::end_of_the_mount(client);
    });
}

#[test]
#[ignore = "a test bed: make test-beds"]
fn xfs_on_two_datanodes() {
    let bed = Bed::boot("sx-xfs", FileSystem::Xfs, &["dn", "d2"], "d*");
    let mut hdfs = step("start", || bed.hdfs(&[]));
    bed.agent("dn");
    let client = &step("client", || bed.reader(&hdfs));
    step("read", || {
        tell(client, &format!("stock fill /m_4 {} {}", 96 * MIB, 4 * MIB));
        check_past(&bed, client, "/m_4", 96 * MIB);
    });
    step("append, truncate, concurrent writer", || {
        steps::changes_of_a_file(client);
    });
    step("extents swapped", || steps::defragment(&bed, client));
    step("delete and refill", || {
        steps::refill(&bed, client, REFILL_TIME / 3)
    });
    step("a second DataNode", || {
        hdfs.join(bed.guest("d2"), &bed.options(&[]))
            .unwrap_or_else(|e| panic!("{}", e.full()));
        bed.agent("d2");
    });
    step("replicas that move", || {
        steps::rebalance(&bed, client, "/m_4", 96 * MIB, 4 * MIB)
    });
    step("a DataNode's guest killed", || {
        tell(
            client,
            &format!("stock fill /k_8 {} {} 2", 16 * MIB, 4 * MIB),
        );
        check_past(&bed, client, "/k_8", 16 * MIB);
        assert_no_stall(client, "a DataNode's guest killed", "/k_8", || {
            bed.guest("d2").kill();
        });
        within(STEP_TIMEOUT, "the block is not served any more", || {
            !bed.shown("d2").0.serving
        });
        check_past(&bed, client, "/k_8", 16 * MIB);
    });
}
