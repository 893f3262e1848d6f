// SPDX-License-Identifier: Apache-2.0
//! The agent in real guests, with a script that changes blocks as a DataNode does.
#![allow(clippy::unwrap_used)]

mod support;

use support::host::Host;
use support::{TestVm, wait_for};
use viola_lab::testing::sha256;
use viola_proto::agent::WithdrawReason;

const F: &str = "/tmp/d/dfs/current/BP-1-10.0.0.1-2/current/finalized/subdir0/subdir0";

/// Checks that a named block's two files read the same from the disk's image and in the guest.
fn same(vm: &TestVm, host: &Host, id: i64) {
    let name = host.named(id);
    for (map, file) in [
        (&name.data, format!("{F}/blk_{id}")),
        (&name.meta, format!("{F}/blk_{id}_{}.meta", name.stamp)),
    ] {
        assert_eq!(sha256(&host.bytes(map)), vm.sum(&file), "{file}");
    }
}

fn life(kind: &'static str) {
    let vm = TestVm::boot(&format!("ag-{kind}"), kind);
    vm.sh("make 1 1001 700; make 2 1002 3; make 3 1003 64; make 4 1004 200; make 5 1005 100");
    vm.agent("");
    let host = vm.host();
    host.wait_named(&[(1, 1001), (2, 1002), (3, 1003), (4, 1004), (5, 1005)]);
    for id in 1..=5 {
        same(&vm, &host, id);
    }
    assert_eq!(vm.sh("stat -c %h $F/blk_1 $F/blk_1_1001.meta"), "2\n2\n");

    // a new block
    vm.sh("make 6 1006 300");
    host.wait("6 is named", |s| s.names.values().any(|n| n.id == 6));
    same(&vm, &host, 6);

    // deleted: its bytes stay in place until the host confirms, whatever fills the disk
    host.state().hold = true;
    let (name, sum) = (host.named(1), vm.sum(&format!("{F}/blk_1")));
    vm.sh("delete 1");
    host.wait("1 is withdrawn", |s| s.held.len() == 1);
    assert_eq!(host.why(1), Some(WithdrawReason::Deleted));
    vm.sh("dd if=/dev/zero of=/tmp/d/fill bs=1M 2>/dev/null || true; sync; rm /tmp/d/fill; sync");
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert_eq!(sha256(&host.bytes(&name.data)), sum);
    assert_eq!(vm.links(), 12);
    assert!(vm.status().stats.held_bytes >= 700 << 10);
    host.release();
    wait_for("links of 1 are gone", || vm.links() == 10);
    assert_eq!(vm.status().stats.held_bytes, 0);

    // append: HDFS copies the linked file; the named one keeps its bytes until the host confirms
    host.state().hold = true;
    let (name, sum) = (host.named(2), vm.sum(&format!("{F}/blk_2")));
    vm.sh("append 2 1002 1012 5");
    host.wait("2 is withdrawn", |s| s.held.len() == 1);
    assert_eq!(host.why(2), Some(WithdrawReason::Changed));
    assert_eq!(sha256(&host.bytes(&name.data)), sum);
    host.release();
    host.wait_named(&[(2, 1012), (3, 1003), (4, 1004), (5, 1005), (6, 1006)]);
    assert_eq!(host.named(2).data.size, 8 << 10);
    same(&vm, &host, 2);

    // truncate: HDFS changes its copy in place
    vm.sh("cut 4 1004 1014 9");
    host.wait_named(&[(2, 1012), (3, 1003), (4, 1014), (5, 1005), (6, 1006)]);
    assert_eq!(host.why(4), Some(WithdrawReason::Changed));
    assert_eq!(host.named(4).data.size, 9 << 10);
    same(&vm, &host, 4);

    // to the trash of a rolling upgrade, and back
    vm.sh("mv $F/blk_5* $D/trash/");
    host.wait_named(&[(2, 1012), (3, 1003), (4, 1014), (6, 1006)]);
    assert_eq!(host.why(5), Some(WithdrawReason::Moved));
    vm.sh("mv $D/trash/blk_5* $F/");
    host.wait_named(&[(2, 1012), (3, 1003), (4, 1014), (5, 1005), (6, 1006)]);

    // changed without a copy, as when the DataNode had counted the links just before
    vm.sh("mv $F/blk_3_1003.meta $R/blk_3_1013.meta; mv $F/blk_3 $R/; echo x >>$R/blk_3; mv $R/blk_3* $F/");
    host.wait_named(&[(2, 1012), (3, 1013), (4, 1014), (5, 1005), (6, 1006)]);
    same(&vm, &host, 3);

    // an upgrade: current becomes previous, and its blocks are linked into a new current
    vm.sh(
        "B=$D/current/BP-1-10.0.0.1-2; mv $P $B/previous.tmp; \
         mkdir -p $F $R; ln $B/previous.tmp/finalized/subdir0/subdir0/* $F/; mv $B/previous.tmp $B/previous",
    );
    host.wait("all are named again", |s| {
        s.names.len() == 5
            && s.names
                .values()
                .all(|n| s.withdrawn.iter().any(|w| w.0 == n.id))
    });
    host.wait_named(&[(2, 1012), (3, 1013), (4, 1014), (5, 1005), (6, 1006)]);
    // deletion counts although `previous` still has the file
    vm.sh("delete 6");
    host.wait_named(&[(2, 1012), (3, 1013), (4, 1014), (5, 1005)]);
    assert_eq!(vm.links(), 8);

    // the end: everything is withdrawn and nothing is left
    vm.signal("TERM");
    host.wait_named(&[]);
    wait_for("no link is left", || vm.links() == 0);
}

#[test]
fn the_life_of_blocks_on_ext4() {
    life("ext4");
}

#[test]
fn the_life_of_blocks_on_xfs() {
    life("xfs");
}
