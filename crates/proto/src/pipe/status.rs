// SPDX-License-Identifier: Apache-2.0
//! What is said about bytes that the host moves for VMs.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// All of them, `GET /v1/pipes`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pipes {
    /// VMs with `[vm.pipe]`.
    pub vms: Vec<PipeVm>,
}

/// A VM for which the host moves bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PipeVm {
    /// Identity of the VM.
    pub vm: String,
    /// Its name.
    pub name: String,
    /// Whether that can be done now.
    pub serving: bool,
    /// Why not, or of which disks.
    pub why: String,
    /// What is done for it.
    pub work: PipeStats,
}

/// What is done for one VM. Counts are since its worker started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PipeStats {
    /// Those under way.
    pub transfers: Vec<Transfer>,
    /// Those that were begun.
    pub begun: u64,
    /// Those that were not.
    pub refused: u64,
    /// Those whose connections were given back whole.
    pub returned: u64,
    /// Those that ended in a reset of a connection, or in an error of a disk.
    pub broken: u64,
    /// Bytes of those that are over.
    pub bytes: u64,
    /// CPU time of the host that all of it took, in milliseconds; without that of the kernel's interrupts.
    pub cpu_ms: u64,
    /// Connections that the host sent with another congestion control than the VM's, which it does not have.
    pub other_congestion: u64,
    /// Whether all of it waits because the VM is paused.
    pub paused: bool,
}

/// What goes where.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransferKind {
    /// A file down a connection.
    #[default]
    Send,
    /// What a connection brings into a file.
    Receive,
    /// What a connection brings down another one.
    Relay,
    /// A file into another one.
    Copy,
}

/// Bytes on their way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transfer {
    /// What goes where.
    #[serde(default)]
    pub kind: TransferKind,
    /// The VM's end of the connection: of the one that they go down, if there are two.
    pub local: Option<SocketAddr>,
    /// Its other end.
    pub peer: Option<SocketAddr>,
    /// Bytes to be moved.
    pub length: u64,
    /// Bytes moved so far.
    pub sent: u64,
    /// Since it was taken over, in milliseconds.
    pub age_ms: u64,
}
