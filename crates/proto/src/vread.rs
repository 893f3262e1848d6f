// SPDX-License-Identifier: Apache-2.0
//! State of vread: HDFS blocks that VMs read through the host, without the DataNode VM.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::pipe::status::Pipes;

/// Counters by reason.
pub type Reasons = BTreeMap<String, u64>;

/// A DataNode VM whose blocks other VMs may read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Datanode {
    /// Identity of the VM.
    pub vm: String,
    /// Its name.
    pub name: String,
    /// Whether the worker serves the VM's blocks now.
    pub serving: bool,
    /// Why it does not, or with which restrictions it does.
    pub why: String,
    /// Process ID of the worker; 0 for none.
    pub pid: u32,
    /// Version of the agent in the VM; empty when none is connected.
    pub agent: String,
    /// Number of the session between worker and agent. A higher number voids all leases of lower ones.
    pub epoch: u64,
    /// Blocks that readers can read now.
    pub blocks: u64,
    /// Total size of these blocks and their checksum files.
    pub bytes: u64,
    /// Extents of these files on the disk.
    pub extents: u64,
    /// Bytes of deleted files that the agent's links keep on the disk until no reader reads them.
    pub held_bytes: u64,
    /// Names of connected readers.
    pub readers: Vec<String>,
    /// Disk images and devices that the worker reads.
    pub images: Vec<String>,
    /// Blocks that the agent named since the worker started.
    pub named: u64,
    /// Leases that the agent withdrew since then.
    pub withdrawn: u64,
    /// Withdrawn leases that still have a read in progress.
    pub waiting: u64,
    /// Lookups of readers since the worker started.
    pub lookups: u64,
    /// Lookups of unknown blocks.
    pub unknown: u64,
    /// Requests of the agent that the worker refused, by reason.
    pub refusals: Reasons,
    /// Leases that the agent withdrew, by reason.
    pub withdrawals: Reasons,
    /// Sessions that ended, by reason.
    pub ends: Reasons,
}

/// A VM that may read blocks of other VMs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reader {
    /// Name or identity, as in the configuration.
    pub name: String,
    /// Whether the VM's reader worker runs.
    pub running: bool,
    /// If not, why.
    pub why: String,
    /// Process ID of the worker; 0 for none.
    pub pid: u32,
    /// Path of the socket for the VM's hypervisor.
    pub socket: String,
    /// Whether the hypervisor, or the agent in the VM, is connected.
    pub connected: bool,
    /// Transport of the blocks: `virtiofs` or `stream`; empty while not connected.
    pub transport: String,
    /// Running VMs whose blocks this VM may read.
    pub datanodes: Vec<String>,
    /// Requests since the worker started.
    pub requests: u64,
    /// Read requests.
    pub reads: u64,
    /// Bytes read, by DataNode VM.
    pub bytes: BTreeMap<String, u64>,
    /// Files that are open now.
    pub open: u64,
    /// Reads that failed because the block was withdrawn; the HDFS client reads it elsewhere.
    pub withdrawn: u64,
    /// Refused requests, by reason.
    pub refusals: Reasons,
    /// Reads that other hosts served; their bytes are in `bytes` as `DATANODE@HOST`.
    pub remote_reads: u64,
    /// Reads that other hosts failed to serve.
    pub remote_errors: u64,
}

/// The worker for other hosts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Host {
    /// Whether the worker runs.
    pub running: bool,
    /// If not, why.
    pub why: String,
    /// Process ID; 0 for none.
    pub pid: u32,
    /// SHA-256 of this host's certificate, which the other hosts have in their configuration.
    pub fingerprint: String,
    /// Addresses on which the worker listens.
    pub listening: Vec<String>,
    /// DataNode VMs of this host that other hosts may read.
    pub datanodes: Vec<String>,
    /// Connections that the worker refused since it started: no host in the configuration has that
    /// key, or no valid handshake came.
    pub strangers: u64,
    /// Connections that the worker refused since it started: too many were open, of one address or in all.
    pub over_limit: u64,
}

/// Another host. Counters start with the worker, and cover both directions unless the field says otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Peer {
    /// Name in the configuration.
    pub name: String,
    /// Address on which it listens; empty when this host never connects to it.
    pub address: String,
    /// Whether this host is connected to it, for reading.
    pub connected: bool,
    /// Whether it is connected to this host.
    pub incoming: bool,
    /// If this host should be connected and is not, why.
    pub why: String,
    /// Requests that this host sent.
    pub asked: u64,
    /// Requests of the other host that this host answered.
    pub answered: u64,
    /// Bytes of blocks that this host read there.
    pub bytes_read: u64,
    /// Bytes of blocks that the other host read here.
    pub bytes_served: u64,
    /// Replies that a block is unknown or not allowed.
    pub unknown: u64,
    /// Replies that a block was withdrawn during the read.
    pub withdrawn: u64,
    /// Other errors.
    pub errors: u64,
    /// Connections to it that ended after they were ready.
    pub broken: u64,
}

/// Answer to `GET /v1/vread`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Vread {
    /// Whether the configuration allows a reader, and the operator has not stopped vread.
    pub on: bool,
    /// If not, why.
    pub why: String,
    /// DataNode VMs, by identity.
    pub datanodes: Vec<Datanode>,
    /// Readers, in the order of the configuration.
    pub readers: Vec<Reader>,
    /// The worker for other hosts; absent without other hosts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<Host>,
    /// Other hosts, in the order of the configuration.
    pub peers: Vec<Peer>,
    /// Pipes of the same workers; `GET /v1/pipes` shows them.
    #[serde(skip)]
    pub pipes: Pipes,
}
