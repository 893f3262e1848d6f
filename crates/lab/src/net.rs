// SPDX-License-Identifier: Apache-2.0
//! Bridges and cables of a lab, created in the calling thread's network namespace.

use crate::error::{Error, Result};
use crate::spec::{Spec, Vmm};
use crate::tun;
use viola_netdev::{add_veth, device};

/// Name of the host's interface for NIC number `nic` of guest number `guest`, both from 0. The
/// guest's kernel reads and writes it by a packet socket.
pub fn nic_name(guest: usize, nic: usize) -> String {
    format!("nic{guest}.{nic}")
}

/// Name of the other end of that cable, a port of its bridge; of a QEMU guest, its TAP device.
pub fn port_name(guest: usize, nic: usize) -> String {
    format!("port{guest}.{nic}")
}

/// Sets loopback up, creates the bridges with their addresses, and for each NIC a cable from the
/// guest to its bridge, or a TAP device on the bridge. Leaves a bridge that exists already (in a [`crate::NetnsHost`]) as it is.
pub(crate) fn build(spec: &Spec) -> Result<()> {
    device::up("lo").map_err(Error::net("taking up lo"))?;
    for bridge in spec.bridges.iter().filter(|b| !device::exists(&b.name)) {
        let failed = |what: &str| Error::net(format!("{what} bridge {}", bridge.name));
        device::add_bridge(&bridge.name).map_err(failed("creating"))?;
        // a fixed address: a bridge otherwise changes it with every port
        let [a, b, c, d] = bridge.address.octets();
        device::set_mac(&bridge.name, [2, 1, a, b, c, d]).map_err(failed("setting the MAC of"))?;
        device::set_address(&bridge.name, bridge.address, bridge.prefix)
            .map_err(failed("addressing"))?;
    }
    for (guest, of) in spec.guests.iter().enumerate() {
        for (nic, tap) in of.taps.iter().enumerate() {
            let (end, port) = (nic_name(guest, nic), port_name(guest, nic));
            let failed = |what: &str| Error::net(format!("{what} {end} of guest {}", of.name));
            match spec.vmm {
                Vmm::Uml => add_veth(&end, &port, None),
                Vmm::Qemu(_) => tun::add_tap(&port),
            }
            .map_err(failed("creating"))?;
            device::add_port(&tap.bridge, &port).map_err(failed("bridging"))?;
            device::up(&port).map_err(failed("taking up"))?;
            if spec.vmm == Vmm::Uml {
                device::up_for_packet_socket(&end).map_err(failed("taking up"))?;
            }
        }
    }
    Ok(())
}
