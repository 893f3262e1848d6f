// SPDX-License-Identifier: Apache-2.0
//! What is said about blocks that are read past their DataNode VM.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::pipe::status::Pipes;

/// Counts by reason.
pub type Reasons = BTreeMap<String, u64>;

/// A VM whose blocks others may read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Datanode {
    /// Identity of the VM.
    pub vm: String,
    /// Its name.
    pub name: String,
    /// Whether its blocks are served now.
    pub serving: bool,
    /// Why not, or on what terms.
    pub why: String,
    /// Process of its worker, 0 for none.
    pub pid: u32,
    /// Version of the agent in it; empty when there is none.
    pub agent: String,
    /// Number of the agreement between worker and agent; a higher one ends all that was before.
    pub epoch: u64,
    /// Blocks that can be read now.
    pub blocks: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Pieces on the disk that these consist of.
    pub extents: u64,
    /// Bytes of deleted files that the agent holds back until nobody reads them.
    pub held_bytes: u64,
    /// Readers that are connected.
    pub readers: Vec<String>,
    /// Files and devices that are read.
    pub images: Vec<String>,
    /// Blocks named since the worker started.
    pub named: u64,
    /// Names withdrawn since then.
    pub withdrawn: u64,
    /// Withdrawn names that a read is waited for.
    pub waiting: u64,
    /// Look-ups of readers since then.
    pub lookups: u64,
    /// Those of blocks that were not known.
    pub unknown: u64,
    /// What the agent wanted and did not get, by reason.
    pub refusals: Reasons,
    /// Names withdrawn by the agent, by its reason.
    pub withdrawals: Reasons,
    /// Ends of epochs, by reason.
    pub ends: Reasons,
}

/// A VM that may read blocks of others.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reader {
    /// Name or identity, as the configuration has it.
    pub name: String,
    /// Whether its worker runs.
    pub running: bool,
    /// Why not.
    pub why: String,
    /// Process of its worker, 0 for none.
    pub pid: u32,
    /// Socket for its hypervisor.
    pub socket: String,
    /// Whether the hypervisor is connected, or the agent in the VM.
    pub connected: bool,
    /// How its blocks come to it: `virtiofs` or `stream`; empty while it is not connected.
    pub transport: String,
    /// VMs whose blocks it may read and that are there.
    pub datanodes: Vec<String>,
    /// Requests since the worker started.
    pub requests: u64,
    /// Reads among them.
    pub reads: u64,
    /// Bytes read, by DataNode VM.
    pub bytes: BTreeMap<String, u64>,
    /// Files open now.
    pub open: u64,
    /// Reads that came to nothing because the block was withdrawn; the client reads elsewhere.
    pub withdrawn: u64,
    /// What was refused, by reason.
    pub refusals: Reasons,
    /// Reads that other hosts answered; their bytes are among `bytes`, as `DATANODE@HOST`.
    pub remote_reads: u64,
    /// Reads that other hosts did not answer.
    pub remote_errors: u64,
}

/// The worker for other hosts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Host {
    /// Whether it runs.
    pub running: bool,
    /// Why not.
    pub why: String,
    /// Its process, 0 for none.
    pub pid: u32,
    /// SHA-256 of this host's certificate, by which the others know it.
    pub fingerprint: String,
    /// Addresses on which it listens.
    pub listening: Vec<String>,
    /// DataNode VMs of this host that others may read.
    pub datanodes: Vec<String>,
    /// Connections refused since the worker started: no host here has that key.
    pub strangers: u64,
}

/// Another host. Counts are since the worker started, and of both directions where nothing else is said.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Peer {
    /// What it is called in the configuration.
    pub name: String,
    /// Where it listens; empty when it is never asked.
    pub address: String,
    /// Whether this host is connected to it, for reading.
    pub connected: bool,
    /// Whether it is connected to this host.
    pub incoming: bool,
    /// Why this host is not connected to it, if it should be.
    pub why: String,
    /// Requests sent to it.
    pub asked: u64,
    /// Requests of it that were answered.
    pub answered: u64,
    /// Bytes of blocks read from it.
    pub bytes_read: u64,
    /// Bytes of blocks that it has read here.
    pub bytes_served: u64,
    /// Answers that a block is not known, or not allowed.
    pub unknown: u64,
    /// Answers that a block was withdrawn while it was read.
    pub withdrawn: u64,
    /// Other errors.
    pub errors: u64,
    /// Connections to it that broke.
    pub broken: u64,
}

/// Answer to `GET /v1/vread`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Vread {
    /// Whether anything is allowed, and not stopped.
    pub on: bool,
    /// Why not.
    pub why: String,
    /// VMs whose blocks may be read, by identity.
    pub datanodes: Vec<Datanode>,
    /// VMs that may read, in the order of the configuration.
    pub readers: Vec<Reader>,
    /// The worker for other hosts, where there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<Host>,
    /// Other hosts, in the order of the configuration.
    pub peers: Vec<Peer>,
    /// What the same workers send; shown apart, as `GET /v1/pipes`.
    #[serde(skip)]
    pub pipes: Pipes,
}
