// SPDX-License-Identifier: Apache-2.0
//! What is said about files that the host sends for VMs.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// All of them, `GET /v1/pipes`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pipes {
    /// VMs with `[vm.pipe]`.
    pub vms: Vec<Sender>,
}

/// A VM whose files the host sends.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sender {
    /// Identity of the VM.
    pub vm: String,
    /// Its name.
    pub name: String,
    /// Whether its files can be sent now.
    pub serving: bool,
    /// Why not, or of which disks.
    pub why: String,
    /// What is done for it.
    pub work: Work,
}

/// What is done for one VM. Counts are since its worker started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Work {
    /// Those under way.
    pub transfers: Vec<Transfer>,
    /// Connections taken over.
    pub begun: u64,
    /// Connections that were not.
    pub refused: u64,
    /// Connections given back whole.
    pub returned: u64,
    /// Connections that ended in a reset.
    pub broken: u64,
    /// Bytes of files that are over.
    pub bytes: u64,
}

/// A file on its way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transfer {
    /// The VM's end of the connection.
    pub local: SocketAddr,
    /// Whoever gets it.
    pub peer: SocketAddr,
    /// Bytes to be sent.
    pub length: u64,
    /// Bytes given to the connection so far.
    pub sent: u64,
    /// Since it was taken over, in milliseconds.
    pub age_ms: u64,
}
