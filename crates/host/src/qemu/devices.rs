// SPDX-License-Identifier: Apache-2.0
//! Devices of a running QEMU: which there are, plugging one in, and taking it out.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::qmp::{Connection, QmpFailure, list};
use crate::vm::printable;

/// Longest wait for any other answer: QEMU's main loop may be busy with the device that comes or goes.
const ANSWER: Duration = Duration::from_secs(10);
/// Longest wait for a device to be plugged in: VFIO pins the whole memory of the guest before it answers.
const PLUG: Duration = Duration::from_secs(60);
/// Class of a PCI bridge.
const BRIDGE: u64 = 0x0604;

/// A connection to one VM's monitor.
pub struct Devices {
    connection: Connection,
}

impl std::fmt::Debug for Devices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Devices").finish_non_exhaustive()
    }
}

/// A virtio NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtioNic {
    /// Its identity.
    pub id: String,
    /// Its address, as QEMU writes it.
    pub mac: String,
    /// Whether a VF may stand in for it (`failover=on`).
    pub failover: bool,
}

impl Devices {
    /// Connects to a QMP socket.
    ///
    /// # Errors
    /// [`QmpFailure`].
    pub fn connect(reach: &Path) -> Result<Self, QmpFailure> {
        let connection = Connection::open_patiently(reach, ANSWER)?;
        Ok(Self { connection })
    }

    fn ask(&mut self, command: &'static str, arguments: Value) -> Result<Value, QmpFailure> {
        self.connection.go_on();
        self.connection
            .command_with(command, Some(arguments), ANSWER)
    }

    /// Devices with an identity, and what they are (`child<virtio-net-pci>`).
    ///
    /// # Errors
    /// [`QmpFailure`].
    pub fn named(&mut self) -> Result<Vec<(String, String)>, QmpFailure> {
        let found = self.ask("qom-list", json!({"path": "/machine/peripheral"}))?;
        let word = |item: &Value, key: &str| item[key].as_str().map(printable);
        Ok(list("qom-list", &found)?
            .iter()
            .filter_map(|item| Some((word(item, "name")?, word(item, "type")?)))
            .collect())
    }

    /// Whether there is a device of this identity.
    ///
    /// # Errors
    /// [`QmpFailure`].
    pub fn has(&mut self, id: &str) -> Result<bool, QmpFailure> {
        Ok(self.named()?.iter().any(|(name, _)| name == id))
    }

    fn property(&mut self, id: &str, name: &str) -> Result<Value, QmpFailure> {
        let path = format!("/machine/peripheral/{id}");
        self.ask("qom-get", json!({"path": path, "property": name}))
    }

    /// All virtio NICs with an identity.
    ///
    /// # Errors
    /// [`QmpFailure`].
    pub fn virtio_nics(&mut self) -> Result<Vec<VirtioNic>, QmpFailure> {
        let named = self.named()?;
        let mut nics = Vec::new();
        for (id, kind) in named {
            if !kind.starts_with("child<virtio-net") {
                continue;
            }
            let Some(mac) = self.property(&id, "mac")?.as_str().map(printable) else {
                continue;
            };
            // of old versions
            let failover = match self.property(&id, "failover") {
                Err(QmpFailure::Refused { .. }) => false,
                answer => answer?.as_bool().unwrap_or(false),
            };
            nics.push(VirtioNic { id, mac, failover });
        }
        Ok(nics)
    }

    /// Whether the guest has taken the standby feature of a NIC with `failover=on`. Before that QEMU would keep a VF back
    /// without a word, and plug it in when the guest takes it.
    ///
    /// # Errors
    /// [`QmpFailure`]; QEMU before 7.2 does not tell.
    pub fn has_standby(&mut self, id: &str) -> Result<bool, QmpFailure> {
        let path = format!("/machine/peripheral/{id}/virtio-backend");
        let status = self.ask("x-query-virtio-status", json!({"path": path}))?;
        Ok(status["guest-features"].to_string().contains("STANDBY"))
    }

    /// A PCIe root port behind which there is nothing.
    ///
    /// # Errors
    /// [`QmpFailure`].
    pub fn free_port(&mut self) -> Result<Option<String>, QmpFailure> {
        self.connection.go_on();
        let buses = self.connection.command("query-pci")?;
        let devices = list("query-pci", &buses)?
            .iter()
            .filter_map(|bus| bus["devices"].as_array())
            .flatten();
        let mut ports: Vec<String> = devices.filter_map(free_port).collect();
        ports.sort();
        Ok(ports.into_iter().next())
    }

    /// Memory of the guest, bytes.
    ///
    /// # Errors
    /// [`QmpFailure`].
    pub fn memory(&mut self) -> Result<u64, QmpFailure> {
        self.connection.go_on();
        let size = self.connection.command("query-memory-size-summary")?;
        let bytes = |key: &str| size[key].as_u64().unwrap_or(0);
        Ok(bytes("base-memory").saturating_add(bytes("plugged-memory")))
    }

    /// Plugs a device in; `arguments` as for `-device`.
    ///
    /// # Errors
    /// [`QmpFailure`].
    pub fn plug(&mut self, arguments: Value) -> Result<(), QmpFailure> {
        let connection = &mut self.connection;
        connection.go_on();
        connection
            .command_with("device_add", Some(arguments), PLUG)
            .map(drop)
    }

    /// Asks the guest to let go of a device, or asks once more. It is gone when [`Devices::has`] says so.
    ///
    /// # Errors
    /// [`QmpFailure`].
    pub fn unplug(&mut self, id: &str) -> Result<(), QmpFailure> {
        match self.ask("device_del", json!({"id": id})) {
            Err(QmpFailure::Refused { reason, .. })
                if reason.contains("in the process of unplug") =>
            {
                Ok(())
            }
            done => done.map(drop),
        }
    }
}

/// The identity of a device that is a root port with nothing behind it.
fn free_port(device: &Value) -> Option<String> {
    let is_bridge = device["class_info"]["class"].as_u64() == Some(BRIDGE);
    let id = device["qdev_id"].as_str().filter(|id| !id.is_empty())?;
    let behind = device["pci_bridge"]["devices"].as_array();
    (is_bridge && behind.is_none_or(Vec::is_empty)).then(|| printable(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_port_is_free_while_nothing_is_behind_it() {
        let port = |id: &str, behind: Value| json!({"qdev_id": id, "class_info": {"class": 1540}, "pci_bridge": {"devices": behind}});
        assert_eq!(free_port(&port("r1", json!([]))).as_deref(), Some("r1"));
        assert_eq!(free_port(&port("r1", json!([{"slot": 0}]))), None);
        assert_eq!(free_port(&port("", json!([]))), None);
        let nic = json!({"qdev_id": "net1", "class_info": {"class": 512}});
        assert_eq!(free_port(&nic), None);
    }
}
