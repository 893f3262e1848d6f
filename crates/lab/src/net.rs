// SPDX-License-Identifier: Apache-2.0
//! Bridges and taps of a lab, made in the calling thread's network namespace.

use crate::error::{Error, Result};
use crate::netdev::{NetDevices, add_tap};
use crate::spec::Spec;

/// Name of the tap behind NIC number `nic` of guest number `guest`, both from 0.
pub fn tap_name(guest: usize, nic: usize) -> String {
    format!("tap{guest}.{nic}")
}

/// Loopback, bridges with their addresses, and a tap for each NIC as a port of its bridge.
pub(crate) fn build(spec: &Spec) -> Result<()> {
    let devices = NetDevices::here().map_err(Error::net("asking for devices"))?;
    devices.up("lo").map_err(Error::net("taking lo up"))?;
    for bridge in &spec.bridges {
        let made = |what: &str| Error::net(format!("{what} bridge {}", bridge.name));
        devices.add_bridge(&bridge.name).map_err(made("making"))?;
        // an address of its own, or it would change with every port
        let [a, b, c, d] = bridge.address.octets();
        devices
            .set_mac(&bridge.name, [2, 1, a, b, c, d])
            .map_err(made("naming"))?;
        devices
            .set_address(&bridge.name, bridge.address, bridge.prefix)
            .map_err(made("addressing"))?;
    }
    for (guest, of) in spec.guests.iter().enumerate() {
        for (nic, tap) in of.taps.iter().enumerate() {
            let name = tap_name(guest, nic);
            let made = |what: &str| Error::net(format!("{what} {name} of guest {}", of.name));
            add_tap(&name).map_err(made("making"))?;
            devices
                .add_port(&tap.bridge, &name)
                .map_err(made("bridging"))?;
            devices.up(&name).map_err(made("taking up"))?;
        }
    }
    Ok(())
}
