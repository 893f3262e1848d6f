// SPDX-License-Identifier: Apache-2.0
//! `[daemon]`: paths, interval and scope of the daemon.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use viola_cli::quantities::INTERVAL;

use crate::value::{absolute, duration};
use crate::{DEFAULT_RUN_DIR, DEFAULT_SOCKET};

/// `[daemon]`: paths, interval and scope of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Daemon {
    /// Path of the control socket.
    #[serde(deserialize_with = "absolute")]
    pub socket: PathBuf,
    /// Group whose members may use the control socket.
    pub group: String,
    /// Interval of the control loop, 30 ms to 1 s, in ns.
    #[serde(deserialize_with = "duration::<_, { *INTERVAL.start() }, { *INTERVAL.end() }>")]
    pub interval: u64,
    /// Folder of settings that `viola set --keep` keeps.
    #[serde(deserialize_with = "absolute")]
    pub state_dir: PathBuf,
    /// Folder of the run-time state.
    #[serde(deserialize_with = "absolute")]
    pub run_dir: PathBuf,
    /// VMs that the daemon manages.
    pub vms: VmScope,
    /// Whether the daemon follows libvirt's events.
    pub libvirt: bool,
}

/// VMs that the daemon manages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VmScope {
    /// All VMs of this host.
    #[default]
    All,
    /// VMs whose process is in the daemon's network namespace.
    Own,
}

impl Default for Daemon {
    fn default() -> Self {
        Self {
            socket: DEFAULT_SOCKET.into(),
            group: "viola".into(),
            interval: 100_000_000,
            state_dir: "/var/lib/viola".into(),
            run_dir: DEFAULT_RUN_DIR.into(),
            vms: VmScope::All,
            libvirt: true,
        }
    }
}
