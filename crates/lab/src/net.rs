// SPDX-License-Identifier: Apache-2.0
//! Bridges and cables of a lab, made in the calling thread's network namespace.

use crate::error::{Error, Result};
use crate::spec::Spec;
use viola_netdev::{add_veth, device};

/// Name of the host's device that is NIC number `nic` of guest number `guest`, both from 0. The guest reads and
/// writes it by a packet socket.
pub fn nic_name(guest: usize, nic: usize) -> String {
    format!("nic{guest}.{nic}")
}

/// Name of the other end of that NIC's cable, a port of its bridge.
pub fn port_name(guest: usize, nic: usize) -> String {
    format!("port{guest}.{nic}")
}

/// Loopback, bridges with their addresses, and for each NIC a cable whose other end is a port of its bridge. A bridge
/// that is there already, in the namespace of a [`crate::NetnsHost`], is used as it is.
pub(crate) fn build(spec: &Spec) -> Result<()> {
    device::up("lo").map_err(Error::net("taking lo up"))?;
    for bridge in spec.bridges.iter().filter(|b| !device::exists(&b.name)) {
        let made = |what: &str| Error::net(format!("{what} bridge {}", bridge.name));
        device::add_bridge(&bridge.name).map_err(made("making"))?;
        // an address of its own, or it would change with every port
        let [a, b, c, d] = bridge.address.octets();
        device::set_mac(&bridge.name, [2, 1, a, b, c, d]).map_err(made("naming"))?;
        device::set_address(&bridge.name, bridge.address, bridge.prefix)
            .map_err(made("addressing"))?;
    }
    for (guest, of) in spec.guests.iter().enumerate() {
        for (nic, tap) in of.taps.iter().enumerate() {
            let (end, port) = (nic_name(guest, nic), port_name(guest, nic));
            let made = |what: &str| Error::net(format!("{what} {end} of guest {}", of.name));
            add_veth(&end, &port, None).map_err(made("making"))?;
            device::add_port(&tap.bridge, &port).map_err(made("bridging"))?;
            device::up(&port).map_err(made("taking up"))?;
            device::up_for_packet_socket(&end).map_err(made("taking up"))?;
        }
    }
    Ok(())
}
