// SPDX-License-Identifier: Apache-2.0
//! What `viola-agent status` shows of a lane.

use std::fmt;

use serde::{Deserialize, Serialize};

/// State of a lane.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// Name of the bond.
    pub bond: String,
    /// Name of the paravirtual port.
    pub nic: String,
    /// Name of the active port.
    pub active: String,
    /// Whether the agent made the bond.
    pub made: bool,
    /// How often a VF was made the active port.
    pub activations: u64,
    /// How often the host asked for the VF.
    pub releases: u64,
    /// The last error, if any.
    pub why: Option<String>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.bond.is_empty() {
            write!(f, "lane: no bond")?;
        } else {
            let made = if self.made { ", made here" } else { "" };
            write!(
                f,
                "lane: {} of {} and a VF{made}: by {}; {} VFs used, {} given back before",
                self.bond, self.nic, self.active, self.activations, self.releases
            )?;
        }
        match &self.why {
            Some(why) => writeln!(f, "\n  {why}"),
            None => writeln!(f),
        }
    }
}
