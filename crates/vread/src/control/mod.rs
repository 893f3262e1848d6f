// SPDX-License-Identifier: Apache-2.0
//! The control protocol between the daemon and its workers.
//!
//! Each worker listens on its own socket (SOCK_SEQPACKET, root only), where a restarted daemon finds it again. The
//! daemon sends an [`Order`] with its descriptors, and the worker answers each order with a [`Report`]. An order
//! states the wanted result, not a change, so repeating it has no effect.

mod peer;
mod setup;
mod socket;
mod stream_state;

pub use peer::{Grant, PeerCounts, PeerSpec, PeerStat, Secret, Source};
pub use setup::{PipeSetup, WorkerSetup};
pub use socket::{
    Control, ControlError, Inbox, MAX_DATAGRAM, MAX_FDS, Received, listen, socket_pair,
};
pub use stream_state::StreamState;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use viola_proto::pipe::status::PipeStats;

/// Protocol version; raise it when an older program would misread an order or a report. The daemon replaces a worker
/// of another version.
pub const VERSION: u32 = 8;

/// The role of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Talks to the agent in one VM.
    Agent,
    /// Serves blocks to one VM.
    Reader,
    /// Serves blocks to other hosts and fetches theirs.
    Peer,
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Agent => "agent",
            Self::Reader => "reader",
            Self::Peer => "peer",
        })
    }
}

/// The format of an image file. The hypervisor or the operator states it; viola never probes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Byte for byte.
    Raw,
    /// QEMU's qcow2.
    Qcow2,
}

/// A disk of a VM, as the daemon describes it to a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSpec {
    /// Number in answers to look-ups; never reused within a VM.
    pub id: u32,
    /// Name of the disk in the guest (`ubda`, `vda`), if the hypervisor reports it.
    pub device: String,
    /// Serial number that the guest sees, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Formats of the image's files: the active one first, each followed by its backing file. One descriptor belongs
    /// to each.
    pub layers: Vec<Format>,
    /// Path of the active file, for messages only.
    pub path: String,
    /// Device and inode number of the active file, by which viola notices a changed image.
    pub file: (u64, u64),
}

/// Limits for a VM's agent. The worker reports them to the agent and enforces them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Maximum number of named blocks.
    pub blocks: u32,
    /// Maximum number of extents of all named blocks.
    pub extents: u32,
    /// Maximum number of new names per second, on average.
    pub names_per_s: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            blocks: 65_536,
            extents: 1 << 20,
            names_per_s: 2_000,
        }
    }
}

/// An order of the daemon. Descriptors come in the order named here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "kebab-case")]
pub enum Order {
    /// The first order on a connection; the answer is [`Report::Hello`].
    Hello {
        /// [`VERSION`] of the daemon.
        version: u32,
    },
    /// Agent worker: use this channel to the VM's agent. Descriptor: a connected stream socket. The worker closes a
    /// previous channel and withdraws the blocks named on it.
    Channel,
    /// Agent worker: close the channel and withdraw the blocks named on it.
    NoChannel {
        /// Why, for the journal.
        why: String,
    },
    /// Use these disk images. Descriptors: all layers of all images, in order. An agent worker gets all disks of its
    /// VM and first withdraws all blocks if the images differ. A reader or peer worker gets those of `datanode` that
    /// hold blocks, closes the previous ones, and refuses blocks on others.
    Images {
        /// The DataNode VM; for an agent worker its own VM.
        datanode: String,
        /// The disks.
        images: Vec<ImageSpec>,
        /// Why the images changed, for the journal.
        why: String,
    },
    /// Agent worker: this reader may look blocks up. Descriptors: the look-up socket, the reader's hazard cells
    /// (read-only). It replaces a reader of the same name.
    Reader {
        /// The reading VM.
        name: String,
        /// Block pools that it may read, as patterns with `*` and `?`.
        pools: Vec<String>,
    },
    /// Agent worker: remove this reader.
    NoReader {
        /// The reading VM.
        name: String,
    },
    /// Reader or peer worker: serve this VM's blocks. Descriptors: the look-up socket, the VM's lease table
    /// (read-only).
    Datanode {
        /// The DataNode VM.
        name: String,
    },
    /// Reader or peer worker: stop serving this VM's blocks.
    NoDatanode {
        /// The DataNode VM.
        name: String,
    },
    /// Reader worker: read blocks of other hosts through the peer worker. Descriptors: the socket to the peer worker
    /// (SOCK_SEQPACKET), the memory into which it writes bytes ([`crate::peer::new_memory`]). They replace the
    /// previous ones.
    Remote,
    /// Reader worker: stop reading blocks of other hosts.
    NoRemote,
    /// Peer worker: the complete list of other hosts. The worker closes connections of hosts that are no longer in it
    /// or have changed.
    Peers {
        /// Each name once.
        peers: Vec<PeerSpec>,
    },
    /// Peer worker: this reader of this host may ask other hosts. Descriptors: the other end of [`Order::Remote`]'s
    /// socket, the same memory. It replaces a reader of the same name.
    Asker {
        /// The reading VM.
        reader: String,
        /// The hosts that it may ask, and the blocks.
        sources: Vec<Source>,
    },
    /// Peer worker: remove this reader.
    NoAsker {
        /// The reading VM.
        reader: String,
    },
    /// Agent worker: withdraw all blocks; the agent has to say hello again.
    EndEpoch {
        /// Why, for the journal.
        why: String,
    },
    /// Agent worker: the files that show whether the VM is paused. Descriptors: `/proc/PID/task/TID/stat` of its
    /// vCPUs, and `cgroup.events` of its control group if there is one.
    Pulse {
        /// Number of vCPUs.
        threads: usize,
        /// Whether there is a control group.
        group: bool,
    },
    /// Reader worker: the other end of the VMM's connection with this number is the VM's process: let it find blocks. Without
    /// effect once another connection has begun.
    Serve {
        /// [`ReaderStat::connection`].
        connection: u64,
    },
    /// Reader worker: serve FUSE requests that the VM's agent forwards ([`viola_proto::fuse_stream`]). Descriptor: a
    /// connected unix stream socket. It replaces the previous one.
    Stream,
    /// Ask for statistics: the answer is [`Report::Agent`], [`Report::Reader`] or [`Report::Peer`].
    Stat,
    /// Withdraw all blocks and exit. The worker answers before it exits.
    Quit {
        /// Why, for the journal.
        why: String,
    },
}

impl Order {
    /// Number of descriptors that belong to the order.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        match self {
            Self::Channel | Self::Stream => 1,
            Self::Reader { .. } | Self::Datanode { .. } | Self::Remote | Self::Asker { .. } => 2,
            Self::Pulse { threads, group } => threads.saturating_add(usize::from(*group)),
            Self::Images { images, .. } => images.iter().map(|i| i.layers.len()).sum(),
            _ => 0,
        }
    }
}

/// A worker's answer to an order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "kebab-case")]
pub enum Report {
    /// The worker introduces itself.
    Hello {
        /// [`VERSION`] of the worker.
        version: u32,
        /// Version of the worker's program.
        program: String,
        /// The worker's role.
        role: Role,
        /// Identity of its VM.
        vm: String,
        /// Process ID.
        pid: u32,
    },
    /// The order was carried out.
    Done,
    /// The order failed.
    Failed {
        /// Why.
        why: String,
    },
    /// Statistics of an agent worker.
    Agent(Box<AgentStat>),
    /// Statistics of a reader worker.
    Reader(ReaderStat),
    /// Statistics of a peer worker.
    Peer(PeerStat),
}

impl Report {
    /// The introduction of this process.
    pub(crate) fn hello(role: Role, vm: &str) -> Self {
        Self::Hello {
            version: VERSION,
            program: env!("CARGO_PKG_VERSION").into(),
            role,
            vm: vm.into(),
            pid: std::process::id(),
        }
    }
}

impl From<Result<(), String>> for Report {
    fn from(done: Result<(), String>) -> Self {
        match done {
            Ok(()) => Self::Done,
            Err(why) => Self::Failed { why },
        }
    }
}

/// Progress of the handshake with an agent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Session {
    /// There is no channel.
    #[default]
    NoChannel,
    /// There is a channel, but no valid hello came.
    Silent,
    /// The agent has said hello; reads of the old epoch are still in flight.
    Ending,
    /// The agent is welcomed, but has not proved a file system yet.
    Welcomed,
    /// At least one file system is proved; the agent may name blocks.
    Proved,
}

/// Counts by reason.
pub type Reasons = BTreeMap<String, u64>;

/// Statistics of an agent worker. Counts begin at its start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AgentStat {
    /// Progress of the handshake.
    pub session: Session,
    /// Version that the agent reported.
    pub agent_version: String,
    /// Epoch of the table.
    pub epoch: u64,
    /// Proved file systems, each with its disk.
    pub proved: BTreeMap<String, String>,
    /// Numbers of the disks on which the agent has named blocks, each on a file system that is proved now. Readers get
    /// no other disk.
    pub block_disks: Vec<u32>,
    /// Blocks named now.
    pub blocks: u64,
    /// Bytes of these blocks and their checksum files.
    pub bytes: u64,
    /// Extents of these blocks and their checksum files.
    pub extents: u64,
    /// Readers that may look blocks up.
    pub readers: Vec<String>,
    /// Blocks ever named.
    pub named: u64,
    /// Blocks ever withdrawn, by the agent or by the host.
    pub withdrawn: u64,
    /// Withdrawn blocks that are still being read.
    pub waiting: u64,
    /// The reader that has delayed a withdrawal longest, and for how many milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_by: Option<(String, u64)>,
    /// Look-ups answered.
    pub lookups: u64,
    /// Look-ups of unknown blocks.
    pub unknown: u64,
    /// Refused requests of the agent, by reason.
    pub refusals: Reasons,
    /// Blocks withdrawn by the agent, by its reason.
    pub withdrawals: Reasons,
    /// Ends of epochs, by reason.
    pub ends: Reasons,
    /// Disks in use.
    pub images: Vec<ImageSpec>,
    /// The agent's own counts.
    pub agent: BTreeMap<String, u64>,
    /// Why the agent names no blocks, in its own words; empty if it does.
    #[serde(default)]
    pub agent_why: String,
    /// vpipe's statistics; `None` if vpipe is off.
    #[serde(default)]
    pub pipes: Option<PipeStats>,
}

/// Statistics of a reader worker. Counts begin at its start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReaderStat {
    /// Whether the VM is connected.
    pub connected: bool,
    /// Number of the VMM's connection, if there is one.
    pub connection: Option<u64>,
    /// Whether [`Order::Serve`] came for this connection.
    pub confirmed: bool,
    /// State of the byte stream, for a VM that uses one.
    pub stream: StreamState,
    /// DataNode VMs that the VM may read.
    pub datanodes: Vec<String>,
    /// Requests of the VM.
    pub requests: u64,
    /// Reads among them.
    pub reads: u64,
    /// Bytes read, by DataNode VM.
    pub bytes: BTreeMap<String, u64>,
    /// Files open now.
    pub open: u64,
    /// Reads that failed because the block was withdrawn meanwhile.
    pub withdrawn: u64,
    /// Refused requests, by reason.
    pub refusals: Reasons,
    /// Numbers of the disk images in use, by DataNode VM.
    pub images: BTreeMap<String, Vec<u32>>,
    /// Whether the VM may read blocks of other hosts.
    pub remote: bool,
    /// Reads answered by other hosts or from bytes fetched ahead from them.
    pub remote_reads: u64,
    /// Bytes of these reads, by `DATANODE@HOST`.
    pub remote_bytes: BTreeMap<String, u64>,
    /// Reads that other hosts failed to answer.
    pub remote_errors: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_one_object_with_its_name_in_it() {
        let order = Order::NoReader { name: "vm1".into() };
        let text = serde_json::to_string(&order).unwrap();
        assert_eq!(text, r#"{"order":"no-reader","name":"vm1"}"#);
        assert_eq!(serde_json::from_str::<Order>(&text).unwrap(), order);
        assert_eq!(
            serde_json::to_string(&Order::EndEpoch { why: "x".into() }).unwrap(),
            r#"{"order":"end-epoch","why":"x"}"#
        );
    }

    #[test]
    fn a_report_reads_back_as_it_was_written() {
        let report = Report::Agent(Box::new(AgentStat {
            session: Session::Proved,
            held_by: Some(("vm1".into(), 3)),
            refusals: [("names too fast".to_owned(), 2)].into(),
            ..AgentStat::default()
        }));
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
    }

    #[test]
    fn each_layer_of_an_image_has_a_descriptor() {
        let image = |layers: &[Format]| ImageSpec {
            id: 1,
            device: "vda".into(),
            serial: None,
            layers: layers.to_vec(),
            path: "/a".into(),
            file: (1, 2),
        };
        let order = Order::Images {
            datanode: "dn1".into(),
            images: vec![image(&[Format::Raw]), image(&[Format::Qcow2, Format::Raw])],
            why: String::new(),
        };
        assert_eq!(order.descriptors(), 3);
        assert_eq!(Order::Stat.descriptors(), 0);
    }
}
