// SPDX-License-Identifier: Apache-2.0
//! The limit that libvirt's `<outbound>` sets at a VM's tap holds for what the host sends. This needs the kernel's policer, so the
//! host is a QEMU VM in which this program runs its other test.
#![allow(clippy::unwrap_used)]

mod emulated;
mod tenant;

use std::process::Command;

use tenant::{TC, Tenant, tool};
use viola_netdev::Netns;
use viola_vpipe::Steering;

const TEST: &str = "the_policer_counts_and_drops_what_the_host_sends";

#[test]
#[ignore = "boots an emulated PC: make test-beds"]
fn what_the_host_sends_for_a_vm_meets_libvirts_limit() {
    emulated::run(TEST, &[TC], "bridge veth sch_ingress cls_u32 act_police");
}

/// Runs in the emulated host.
#[test]
#[ignore = "needs the kernel's policer: the other test runs it where there is one"]
fn the_policer_counts_and_drops_what_the_host_sends() {
    let (host, steering) = (Netns::new().unwrap(), Steering::load().unwrap());
    let tenant = Tenant::new(&host, &steering, "a");
    // The words of virNetDevBandwidthSet, for 2 MB/s.
    host.run(|| {
        tool(TC, "qdisc add dev tapa ingress");
        tool(
            TC,
            "filter add dev tapa parent ffff: protocol all u32 match u32 0 0 \
             police rate 2000kbps burst 256kb mtu 64kb drop flowid :1",
        );
    })
    .unwrap();
    emulated::serve(&tenant, &steering, 1, true);
    let shown = host
        .run(|| {
            let mut tc = Command::new(TC);
            tc.args(["-s", "filter", "show", "dev", "tapa", "parent", "ffff:"]);
            tc.output().unwrap()
        })
        .unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    let after = |word: &str| -> u64 {
        let (_, rest) = shown.split_once(word).unwrap_or_else(|| panic!("{shown}"));
        let digits = rest.split(|c: char| !c.is_ascii_digit()).next();
        digits.unwrap().parse().unwrap()
    };
    assert!(after("Sent ") > emulated::SIZE, "{shown}");
    assert!(after("dropped ") > 0, "{shown}");
}
