// SPDX-License-Identifier: Apache-2.0
//! `[daemon]`: paths, interval and scope of the daemon.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use viola_cli::client::read_socket_beside;
use viola_cli::quantities::INTERVAL;

use crate::value::{absolute, duration, read_socket};
use crate::{Conflict, DEFAULT_RUN_DIR, DEFAULT_SOCKET};

/// `[daemon]`: paths, interval and scope of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Daemon {
    /// Path of the control socket.
    #[serde(deserialize_with = "absolute")]
    pub socket: PathBuf,
    /// Group whose members may use the control socket.
    pub group: String,
    /// Socket that answers `GET` requests only.
    #[serde(deserialize_with = "read_socket")]
    pub read_socket: ReadSocket,
    /// Group whose members may use that socket.
    pub read_group: String,
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

/// Where the socket is that answers `GET` requests only.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ReadSocket {
    /// Beside the control socket: `viola-read.sock` for `viola.sock`.
    #[default]
    Beside,
    /// There is none.
    Off,
    /// At this path.
    At(PathBuf),
}

impl Daemon {
    /// Path of the socket that answers `GET` requests only; `None` when there is none.
    pub fn read_socket(&self) -> Option<PathBuf> {
        match &self.read_socket {
            ReadSocket::Beside => Some(read_socket_beside(&self.socket)),
            ReadSocket::Off => None,
            ReadSocket::At(path) => Some(path.clone()),
        }
    }

    pub(crate) fn check(&self) -> Result<(), Conflict> {
        match &self.read_socket {
            ReadSocket::At(path) if *path == self.socket => Err(Conflict {
                path: "daemon.read_socket".into(),
                what: "read_socket: this is the control socket; name another path, or \"none\""
                    .into(),
            }),
            _ => Ok(()),
        }
    }
}

impl Default for Daemon {
    fn default() -> Self {
        Self {
            socket: DEFAULT_SOCKET.into(),
            group: "viola".into(),
            read_socket: ReadSocket::default(),
            read_group: "viola-read".into(),
            interval: 100_000_000,
            state_dir: "/var/lib/viola".into(),
            run_dir: DEFAULT_RUN_DIR.into(),
            vms: VmScope::All,
            libvirt: true,
        }
    }
}
