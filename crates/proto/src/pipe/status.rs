// SPDX-License-Identifier: Apache-2.0
//! State of vpipe: bytes that the host moves for VMs.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// Answer to `GET /v1/pipes`.
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
    /// Name of the VM.
    pub name: String,
    /// Whether the host can move bytes for it now.
    pub serving: bool,
    /// If not, why; else of which disks.
    pub why: String,
    /// Transfers and counters.
    pub work: PipeStats,
}

/// Transfers of one VM, and counters since its worker started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PipeStats {
    /// Active transfers.
    pub transfers: Vec<Transfer>,
    /// Started transfers.
    pub begun: u64,
    /// Refused transfers.
    pub refused: u64,
    /// Ended transfers whose connections all went back to the VM.
    pub returned: u64,
    /// Transfers that ended with a reset of a connection, or with an error of a disk.
    pub broken: u64,
    /// Bytes of ended transfers.
    pub bytes: u64,
    /// CPU time of the worker's threads for all transfers, in milliseconds, without the kernel's interrupts.
    pub cpu_ms: u64,
    /// Connections that the host served with another congestion control than the VM's, because the host does not have
    /// that one.
    pub other_congestion: u64,
    /// Whether all transfers wait because the VM is paused.
    pub paused: bool,
}

/// Source and sink of a transfer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransferKind {
    /// From a file to a connection.
    #[default]
    Send,
    /// From a connection to a file.
    Receive,
    /// From a connection to another connection.
    Relay,
    /// From a file to another file.
    Copy,
}

/// An active transfer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transfer {
    /// Source and sink of a transfer.
    #[serde(default)]
    pub kind: TransferKind,
    /// The VM's end of the connection, of the sink if there are two connections.
    pub local: Option<SocketAddr>,
    /// The peer's end of that connection.
    pub peer: Option<SocketAddr>,
    /// Bytes to move.
    pub length: u64,
    /// Bytes moved so far.
    pub sent: u64,
    /// Age of the transfer in milliseconds.
    pub age_ms: u64,
}
