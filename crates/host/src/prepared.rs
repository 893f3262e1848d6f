// SPDX-License-Identifier: Apache-2.0
//! QMP sockets that `viola prepare` gives to VMs of libvirt, which keeps its own monitor to itself. Their names say for what they
//! are, so that nobody else connects to them: QEMU serves one client of a socket at a time.

use std::path::Path;

/// Folder in which a QEMU of libvirt may make sockets.
const FOLDER: &str = "/var/lib/libvirt/qemu";
const PREFIX: &str = "viola-";

/// For what a QMP socket is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Events: resets, snapshots, migrations.
    Events,
    /// Plugging of devices.
    Devices,
}

impl Purpose {
    fn suffix(self) -> &'static str {
        match self {
            Self::Events => ".events.qmp",
            Self::Devices => ".lane.qmp",
        }
    }

    /// The path of this socket of a VM.
    pub fn socket(self, vm: &str) -> String {
        format!("{FOLDER}/{PREFIX}{vm}{}", self.suffix())
    }

    /// For what the socket is; `None` for one that `viola prepare` has not made.
    pub fn of(socket: &Path) -> Option<Self> {
        let name = socket.file_name()?.to_str()?;
        let is_prepared = socket
            .parent()
            .is_some_and(|p| p.ends_with(FOLDER.trim_start_matches('/')));
        if !is_prepared || !name.starts_with(PREFIX) {
            return None;
        }
        [Self::Events, Self::Devices]
            .into_iter()
            .find(|purpose| name.ends_with(purpose.suffix()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_socket_says_for_what_it_is() {
        let all = [Purpose::Events, Purpose::Devices];
        let names = ["db01", "x.lane", "x.events"];
        for (purpose, name) in all.into_iter().flat_map(|p| names.map(|name| (p, name))) {
            let path = purpose.socket(name);
            assert_eq!(Purpose::of(Path::new(&path)), Some(purpose));
            let through_root = format!("/proc/7/root{path}");
            assert_eq!(Purpose::of(Path::new(&through_root)), Some(purpose));
        }
        for other in [
            "/run/viola-db01.events.qmp",
            "/var/lib/libvirt/qemu/db01.qmp",
            "/var/lib/libvirt/qemu/viola-db01.sock",
            "/",
        ] {
            assert_eq!(Purpose::of(Path::new(other)), None, "{other}");
        }
    }
}
