// SPDX-License-Identifier: Apache-2.0
//! `[turbo]` in the configuration.

use std::path::PathBuf;

use serde::Deserialize;

/// Default path of the journal.
pub const DEFAULT_JOURNAL: &str = "/run/viola/turbo.json";

/// `[turbo]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Number, in this VM, of the vCPU that the host runs on a turbo core, 0 to 8191.
    pub cpu: u32,
    /// Whether applications move off it.
    pub applications: Applications,
    /// Bandwidth to this VM in megabits per second, at most 1,000,000; 0: that of the fastest
    /// interface, if known.
    pub bandwidth_mbit: u32,
    /// Longest time that an application waits for its vCPU, in milliseconds, at most 1000; 0:
    /// receive buffers stay as they are.
    pub delay_ms: u32,
    /// Buffer size as a multiple of bandwidth times delay, 1 to 16.
    pub headroom: u32,
    /// Whether sockets without a buffer size of their own get the larger buffer too.
    pub default_buffers: bool,
    /// Path of the journal.
    pub journal: PathBuf,
}

/// What happens to programs on the turbo vCPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Applications {
    /// They move off it.
    #[default]
    Move,
    /// They stay.
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
    /// Checks that the values are usable.
    ///
    /// # Errors
    /// One sentence that names the key.
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
            return Err("`journal` in [turbo] must be an absolute path".into());
        }
        Ok(())
    }
}
