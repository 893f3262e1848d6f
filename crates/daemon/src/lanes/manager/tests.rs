// SPDX-License-Identifier: Apache-2.0
use std::path::PathBuf;

use viola_lanes::netns::NetnsGuest;
use viola_lanes::{GuestAccess, Pf, Stage};
use viola_netdev::Counters;

use super::*;
use viola_config::lanes::Pool as PoolConfig;

fn nic(name: &str, bridge: &str, mac: u8) -> Nic {
    Nic {
        id: format!("netns:{name}"),
        name: name.into(),
        interface: format!("v-{name}"),
        bridge: bridge.into(),
        mac: [2, 0, 0, 0, 0, mac],
        access: GuestAccess::Netns(NetnsGuest {
            netns: PathBuf::from("/run/netns/no-such-namespace"),
            bond: "bond0".into(),
            port: "eth0".into(),
        }),
        setting: None,
        di2: None,
        counters: Counters::default(),
    }
}

fn keeper(folder: &tempfile::TempDir) -> Keeper {
    Keeper::new(&folder.path().join("lanes.json"))
}

#[test]
fn two_guests_with_one_address_in_one_network_are_both_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let mut keeper = keeper(&folder);
    keeper.nics = vec![
        nic("a", "br0", 1),
        nic("b", "br0", 2),
        nic("c", "br0", 1),
        // the same address in another network is somebody else
        nic("d", "br1", 1),
    ];
    keeper.leave_out_twins();
    let left: Vec<&str> = keeper.nics.iter().map(|n| n.name.as_str()).collect();
    assert_eq!(left, ["b", "d"]);
    assert_eq!(
        keeper.left_out,
        ["a and c have the same address 02:00:00:00:00:01 at br0"]
    );
}

fn entry(name: &str, vf: u32) -> Entry {
    let nic = nic(name, "br0", 1);
    Entry {
        pf: "no-such-pf".into(),
        vf,
        address: format!("0000:01:10.{vf}"),
        guest: nic.id,
        access: nic.access,
        mac: nic.mac,
        stage: Stage::Held,
    }
}

#[test]
fn vfs_that_vanish_with_their_nic_are_nobodys_and_the_loop_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let mut keeper = keeper(&folder);
    keeper.pools = vec![Pool::new(PoolConfig {
        pf: "no-such-pf".into(),
        vfs: 2,
        bridge: "br0".into(),
        vlan: 0,
        mbit: 0,
        reserve_mbit: 0,
        vf_mbit: 0,
    })];
    keeper.pools[0].vfs = (0..2)
        .map(|index| VfDevice {
            pf: Pf::new("no-such-pf"),
            index,
            address: format!("0000:01:10.{index}"),
        })
        .collect();
    for (name, vf) in [("a", 0), ("b", 1)] {
        keeper.journal.record(entry(name, vf)).unwrap();
    }
    keeper.look_after_pools(&[]);
    assert!(keeper.pools[0].vfs.is_empty());
    assert!(keeper.pools[0].why.is_some());
    assert_eq!(keeper.journal.entries(), []);
    assert_eq!(keeper.totals.lost, 2);
    // again: nothing more is lost, and nothing is decided about a NIC that is not there
    keeper.look_after_pools(&[]);
    keeper.decide();
    assert_eq!((keeper.totals.lost, keeper.totals.granted), (2, 0));
}
