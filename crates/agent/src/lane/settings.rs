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
    /// The paravirtual NIC; empty: the only virtio one.
    pub nic: String,
    /// The bond that is made of it, if it is in none yet.
    pub bond: String,
    /// Way to the host.
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
    /// Whether they are usable.
    ///
    /// # Errors
    /// One sentence.
    pub fn check(&self) -> Result<(), String> {
        for (key, name, least) in [("nic", &self.nic, 0), ("bond", &self.bond, 1)] {
            if !(least..=MAX_IFNAME_BYTES).contains(&name.len()) || name.contains(['/', ' ']) {
                return Err(format!(
                    "`{key}` in [lane]: `{name}` is no name of an interface"
                ));
            }
        }
        match Address::parse(&self.port) {
            Ok(_) => Ok(()),
            Err(what) => Err(format!("`port` in [lane]: {what}")),
        }
    }
}
