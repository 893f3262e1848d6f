// SPDX-License-Identifier: Apache-2.0
//! What `viola-agent status` shows of it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How a lane is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// The bond, its paravirtual port, and the port that it sends by.
    pub bond: String,
    /// See there.
    pub nic: String,
    /// See there.
    pub active: String,
    /// Whether the agent made the bond.
    pub made: bool,
    /// How often a VF was made its active port.
    pub taken: u64,
    /// How often the host asked for one.
    pub left: u64,
    /// Why it does not work, or the last thing that did not.
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
                self.bond, self.nic, self.active, self.taken, self.left
            )?;
        }
        match &self.why {
            Some(why) => writeln!(f, "\n  {why}"),
            None => writeln!(f),
        }
    }
}
