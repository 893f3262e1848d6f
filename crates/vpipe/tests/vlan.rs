// SPDX-License-Identifier: Apache-2.0
//! Two VMs with equal addresses in two VLANs of one bridge, whose clients see tagged frames. This needs a bridge that filters
//! VLANs, so the host is a QEMU VM in which this program runs its other test.
#![allow(clippy::unwrap_used)]

mod emulated;
mod tenant;

use tenant::{BRIDGE, IP, Tenant, tool};
use viola_netdev::Netns;
use viola_vpipe::Steering;

const TEST: &str = "the_host_stays_in_the_vlan_of_the_vm";

#[test]
#[ignore = "boots an emulated PC: make test-beds"]
fn vms_of_equal_addresses_in_two_vlans_of_a_bridge_get_their_own_files() {
    emulated::run(TEST, &[BRIDGE, IP], "bridge veth 8021q");
}

/// Runs in the emulated host.
#[test]
#[ignore = "needs a bridge that filters VLANs: the other test runs it where there is one"]
fn the_host_stays_in_the_vlan_of_the_vm() {
    let (host, steering) = (Netns::new().unwrap(), Steering::load().unwrap());
    host.run(|| {
        tool(IP, "link add br0 type bridge vlan_filtering 1");
        tool(IP, "link set br0 up");
    })
    .unwrap();
    let tenants = [(10, "a"), (20, "b")]
        .map(|(vlan, name)| Tenant::on("br0", Some(vlan), &host, &steering, name));
    // The VMs alternate, so that each is tested after the bridge has learnt both.
    for (seed, ipv4) in [(1, true), (2, false)] {
        for (number, tenant) in tenants.iter().enumerate() {
            let seed = seed + 2 * number as u32;
            emulated::serve(tenant, &steering, seed, ipv4);
        }
    }
}
