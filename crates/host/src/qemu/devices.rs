// SPDX-License-Identifier: Apache-2.0
//! Lists, plugs and unplugs devices of a running QEMU over QMP.

use std::path::Path;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::message::list;
use super::qmp::{Connection, QmpFailure};
use crate::monitor::{Request, Session};
use crate::thread::Tid;
use crate::vm::printable;

/// Timeout for an answer: QEMU's main loop may be busy with the device that comes or goes.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for plugging a device: VFIO pins the whole memory of the guest before QEMU answers.
const PLUG_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout for all questions about the virtio NICs.
const SERIES_TIMEOUT: Duration = Duration::from_secs(30);
/// PCI class of a PCI bridge.
const PCI_BRIDGE_CLASS: u64 = 0x0604;

/// A connection to one VM's monitor.
pub struct Devices {
    session: Session,
}

impl std::fmt::Debug for Devices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Devices").finish_non_exhaustive()
    }
}

/// A virtio NIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VirtioNic {
    /// Device id.
    pub id: String,
    /// MAC address as QEMU writes it.
    pub mac: String,
    /// Whether it is the standby of a VF (`failover=on`).
    pub failover: bool,
}

impl Devices {
    /// Connects to a QMP socket. `owner` is the process that has to listen there; `None` for a socket that the operator has
    /// named.
    ///
    /// # Errors
    /// [`QmpFailure`].
    pub fn connect(reach: &Path, owner: Option<Tid>) -> Result<Self, QmpFailure> {
        let session = Session::open(reach, owner, ANSWER_TIMEOUT)?;
        Ok(Self { session })
    }

    fn ask<T: DeserializeOwned>(&mut self, request: &Request) -> Result<T, QmpFailure> {
        self.session.ask(request, ANSWER_TIMEOUT)
    }

    /// Devices with an id, and their types (`child<virtio-net-pci>`).
    ///
    /// # Errors
    /// [`QmpFailure`].
    pub fn named(&mut self) -> Result<Vec<(String, String)>, QmpFailure> {
        self.ask(&Request::Named)
    }

    /// Whether a device of this id exists.
    ///
    /// # Errors
    /// [`QmpFailure`].
    pub fn has(&mut self, id: &str) -> Result<bool, QmpFailure> {
        Ok(self.named()?.iter().any(|(name, _)| name == id))
    }

    /// All virtio NICs with an id.
    ///
    /// # Errors
    /// [`QmpFailure`].
    pub fn virtio_nics(&mut self) -> Result<Vec<VirtioNic>, QmpFailure> {
        self.session.ask(&Request::VirtioNics, SERIES_TIMEOUT)
    }

    /// Whether the guest has negotiated the standby feature of a NIC with `failover=on`. Until then QEMU accepts a VF but
    /// plugs it in only when the guest negotiates the feature.
    ///
    /// # Errors
    /// [`QmpFailure`]; QEMU before 7.2 lacks the query.
    pub fn has_standby(&mut self, id: &str) -> Result<bool, QmpFailure> {
        self.ask(&Request::HasStandby(id.to_owned()))
    }

    /// The id of a PCIe root port without a device.
    ///
    /// # Errors
    /// [`QmpFailure`].
    pub fn free_port(&mut self) -> Result<Option<String>, QmpFailure> {
        self.ask(&Request::FreePort)
    }

    /// The guest's memory, bytes.
    ///
    /// # Errors
    /// [`QmpFailure`].
    pub fn memory(&mut self) -> Result<u64, QmpFailure> {
        self.ask(&Request::Memory)
    }

    /// Plugs a device; `arguments` as for `-device`.
    ///
    /// # Errors
    /// [`QmpFailure`].
    pub fn plug(&mut self, arguments: Value) -> Result<(), QmpFailure> {
        self.session.ask(&Request::Plug(arguments), PLUG_TIMEOUT)
    }

    /// Asks the guest to release a device; may be repeated. The device is gone when [`Devices::has`] returns `false`.
    ///
    /// # Errors
    /// [`QmpFailure`].
    pub fn unplug(&mut self, id: &str) -> Result<(), QmpFailure> {
        self.ask(&Request::Unplug(id.to_owned()))
    }
}

fn ask(
    connection: &mut Connection,
    command: &'static str,
    arguments: Value,
) -> Result<Value, QmpFailure> {
    connection.restart_deadline();
    connection.command_with(command, Some(arguments), ANSWER_TIMEOUT)
}

/// [`Devices::named`] on a connection.
pub(crate) fn named(connection: &mut Connection) -> Result<Vec<(String, String)>, QmpFailure> {
    let found = ask(
        connection,
        "qom-list",
        json!({"path": "/machine/peripheral"}),
    )?;
    let word = |item: &Value, key: &str| item[key].as_str().map(printable);
    Ok(list("qom-list", &found)?
        .iter()
        .filter_map(|item| Some((word(item, "name")?, word(item, "type")?)))
        .collect())
}

fn property(connection: &mut Connection, id: &str, name: &str) -> Result<Value, QmpFailure> {
    let path = format!("/machine/peripheral/{id}");
    ask(
        connection,
        "qom-get",
        json!({"path": path, "property": name}),
    )
}

/// [`Devices::virtio_nics`] on a connection.
pub(crate) fn virtio_nics(connection: &mut Connection) -> Result<Vec<VirtioNic>, QmpFailure> {
    let named = named(connection)?;
    let mut nics = Vec::new();
    for (id, kind) in named {
        if !kind.starts_with("child<virtio-net") {
            continue;
        }
        let Some(mac) = property(connection, &id, "mac")?.as_str().map(printable) else {
            continue;
        };
        // Old versions of QEMU lack the property.
        let failover = match property(connection, &id, "failover") {
            Err(QmpFailure::Refused { .. }) => false,
            answer => answer?.as_bool().unwrap_or(false),
        };
        nics.push(VirtioNic { id, mac, failover });
    }
    Ok(nics)
}

/// [`Devices::has_standby`] on a connection.
pub(crate) fn has_standby(connection: &mut Connection, id: &str) -> Result<bool, QmpFailure> {
    let path = format!("/machine/peripheral/{id}/virtio-backend");
    let status = ask(connection, "x-query-virtio-status", json!({"path": path}))?;
    Ok(status["guest-features"].to_string().contains("STANDBY"))
}

/// [`Devices::free_port`] on a connection.
pub(crate) fn free_port(connection: &mut Connection) -> Result<Option<String>, QmpFailure> {
    let buses = connection.command("query-pci")?;
    let devices = list("query-pci", &buses)?
        .iter()
        .filter_map(|bus| bus["devices"].as_array())
        .flatten();
    let mut ports: Vec<String> = devices.filter_map(free_port_of).collect();
    ports.sort();
    Ok(ports.into_iter().next())
}

/// [`Devices::memory`] on a connection.
pub(crate) fn memory(connection: &mut Connection) -> Result<u64, QmpFailure> {
    let size = connection.command("query-memory-size-summary")?;
    let bytes = |key: &str| size[key].as_u64().unwrap_or(0);
    Ok(bytes("base-memory").saturating_add(bytes("plugged-memory")))
}

/// [`Devices::plug`] on a connection.
pub(crate) fn plug(connection: &mut Connection, arguments: Value) -> Result<(), QmpFailure> {
    connection
        .command_with("device_add", Some(arguments), PLUG_TIMEOUT)
        .map(drop)
}

/// [`Devices::unplug`] on a connection.
pub(crate) fn unplug(connection: &mut Connection, id: &str) -> Result<(), QmpFailure> {
    match ask(connection, "device_del", json!({"id": id})) {
        Err(QmpFailure::Refused { reason, .. }) if reason.contains("in the process of unplug") => {
            Ok(())
        }
        done => done.map(drop),
    }
}

/// The id of a device that is a root port without a device behind it.
fn free_port_of(device: &Value) -> Option<String> {
    let is_bridge = device["class_info"]["class"].as_u64() == Some(PCI_BRIDGE_CLASS);
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
        assert_eq!(free_port_of(&port("r1", json!([]))).as_deref(), Some("r1"));
        assert_eq!(free_port_of(&port("r1", json!([{"slot": 0}]))), None);
        assert_eq!(free_port_of(&port("", json!([]))), None);
        let nic = json!({"qdev_id": "net1", "class_info": {"class": 512}});
        assert_eq!(free_port_of(&nic), None);
    }
}
