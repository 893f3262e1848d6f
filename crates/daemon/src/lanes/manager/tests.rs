// SPDX-License-Identifier: Apache-2.0
use std::path::PathBuf;

use viola_lanes::netns::NetnsGuest;
use viola_lanes::{GuestAccess, Pf, Stage};
use viola_netdev::Counters;

use super::*;
use viola_config::lanes::Pool as PoolConfig;

fn nic(name: &str, bridge: &str, mac: u8) -> GuestNic {
    GuestNic {
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

fn manager(folder: &tempfile::TempDir) -> Manager {
    Manager::new(&folder.path().join("lanes.json"))
}

#[test]
fn two_guests_with_one_address_in_one_network_are_both_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let mut manager = manager(&folder);
    manager.nics = vec![
        nic("a", "br0", 1),
        nic("b", "br0", 2),
        nic("c", "br0", 1),
        // The same MAC address in another network belongs to another guest.
        nic("d", "br1", 1),
    ];
    manager.leave_out_duplicates();
    let left: Vec<&str> = manager.nics.iter().map(|n| n.name.as_str()).collect();
    assert_eq!(left, ["b", "d"]);
    assert_eq!(
        manager.left_out,
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
fn vfs_of_a_nic_that_is_gone_are_lost_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut manager = manager(&folder);
    manager.pools = vec![Pool::new(PoolConfig {
        pf: "no-such-pf".into(),
        vfs: 2,
        bridge: "br0".into(),
        vlan: 0,
        mbit: 0,
        reserve_mbit: 0,
        vf_mbit: 0,
    })];
    manager.pools[0].vfs = (0..2)
        .map(|index| VfDevice {
            pf: Pf::new("no-such-pf"),
            index,
            address: format!("0000:01:10.{index}"),
        })
        .collect();
    for (name, vf) in [("a", 0), ("b", 1)] {
        manager.journal.record(entry(name, vf)).unwrap();
    }
    manager.check_pools(&[]);
    assert!(manager.pools[0].vfs.is_empty());
    assert!(manager.pools[0].why.is_some());
    assert_eq!(manager.journal.entries(), []);
    assert_eq!(manager.totals.lost, 2);
    // A second check loses no further VF and decides nothing about the missing NIC.
    manager.check_pools(&[]);
    manager.decide();
    assert_eq!((manager.totals.lost, manager.totals.granted), (2, 0));
}
