// SPDX-License-Identifier: Apache-2.0
//! `[lane]` in the configuration.

use serde::Deserialize;
use viola_netdev::MAX_IFNAME_BYTES;
use viola_proto::lanes::guest::PORT;

use crate::io::channel::Address;

/// `[lane]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// The paravirtual NIC; empty: the VM's only virtio NIC.
    pub nic: String,
    /// Name of the bond that the agent makes when the NIC is in none.
    pub bond: String,
    /// Transport to the host.
    pub port: String,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            nic: String::new(),
            bond: "viola0".into(),
            port: format!("/dev/virtio-ports/{PORT}"),
        }
    }
}

impl Settings {
    /// Checks that the values are usable.
    ///
    /// # Errors
    /// One sentence that names the key.
    pub fn check(&self) -> Result<(), String> {
        for (key, name, least) in [("nic", &self.nic, 0), ("bond", &self.bond, 1)] {
            if !(least..=MAX_IFNAME_BYTES).contains(&name.len()) || name.contains(['/', ' ']) {
                return Err(format!(
                    "`{key}` in [lane]: `{name}` is not an interface name"
                ));
            }
        }
        match Address::parse(&self.port) {
            Ok(_) => Ok(()),
            Err(what) => Err(format!("`port` in [lane]: {what}")),
        }
    }
}
