// SPDX-License-Identifier: Apache-2.0
//! `[turbo]` in the configuration.

use std::path::PathBuf;

use serde::Deserialize;

/// Where the journal is, unless the configuration says otherwise.
pub const DEFAULT_JOURNAL: &str = "/run/viola/turbo.json";

/// `[turbo]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Number, in this VM, of the vCPU that the host runs on a turbo core.
    pub cpu: u32,
    /// Whether applications leave it.
    pub applications: Applications,
    /// Bandwidth of the way to this VM in megabits a second; 0: that of the fastest interface, where it says so.
    pub bandwidth_mbit: u32,
    /// Longest time that an application waits for its vCPU, in milliseconds; 0: receive buffers are left as they are.
    pub delay_ms: u32,
    /// How many times bandwidth times delay the buffers hold.
    pub headroom: u32,
    /// Whether sockets that ask for no buffer of their own get the larger one too.
    pub default_buffers: bool,
    /// Where the old values are kept.
    pub journal: PathBuf,
}

/// What is done with everything that is not the kernel's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Applications {
    /// They leave the turbo vCPU.
    #[default]
    Move,
    /// They stay as they are.
    Leave,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            cpu: 0,
            applications: Applications::default(),
            bandwidth_mbit: 0,
            delay_ms: 90,
            headroom: 4,
            default_buffers: false,
            journal: DEFAULT_JOURNAL.into(),
        }
    }
}

impl Settings {
    /// Whether they are usable.
    ///
    /// # Errors
    /// One sentence.
    pub fn check(&self) -> Result<(), String> {
        for (key, value, low, high) in [
            ("cpu", self.cpu, 0, 8191),
            ("bandwidth_mbit", self.bandwidth_mbit, 0, 1_000_000),
            ("delay_ms", self.delay_ms, 0, 1000),
            ("headroom", self.headroom, 1, 16),
        ] {
            if !(low..=high).contains(&value) {
                return Err(format!(
                    "`{key}` in [turbo] is {value}; it must be {low} to {high}"
                ));
            }
        }
        if !self.journal.is_absolute() {
            return Err("`journal` in [turbo] must be a whole path, beginning with /".into());
        }
        Ok(())
    }
}
