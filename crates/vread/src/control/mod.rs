// SPDX-License-Identifier: Apache-2.0
//! What the daemon and its workers say to each other.
//!
//! Each worker listens on a socket of its own (SOCK_SEQPACKET, for root alone), so that a daemon that was started
//! again finds it there. The daemon sends an [`Order`], with the descriptors that belong to it, and the worker answers
//! each one with a [`Report`]. An order says what is to hold, not what is to change: giving it twice is once.

mod peer;
mod setup;
mod socket;
mod stream_state;

pub use peer::{Grant, PeerCounts, PeerSpec, PeerStat, Secret, Source};
pub use setup::{PipeSetup, WorkerSetup};
pub use socket::{Control, ControlError, Inbox, MAX_DATAGRAM, MAX_FDS, Received, listen};
pub use stream_state::StreamState;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use viola_proto::pipe::status::PipeStats;

/// Changes when an order or a report changes so that an older program would not understand it. A worker of another
/// version is replaced.
pub const VERSION: u32 = 3;

/// What a worker is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Listens to the agent in one VM.
    Agent,
    /// Serves blocks to one VM.
    Reader,
    /// Serves blocks to other hosts, and fetches theirs.
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

/// How the bytes of an image are laid out. It is told by the hypervisor or the operator, never found out by looking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// As on the disk.
    Raw,
    /// QEMU's format.
    Qcow2,
}

/// One disk of a VM, as it is handed to a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSpec {
    /// Number by which answers to look-ups name it; never used again for another one of the same VM.
    pub id: u32,
    /// Name of the disk in the guest (`ubda`, `vda`), where the hypervisor tells it.
    pub device: String,
    /// Serial number that the guest sees, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Formats of its files, the live one first, each lying on the next. One descriptor belongs to each.
    pub layers: Vec<Format>,
    /// Where the live one is; for people.
    pub path: String,
    /// Device and inode number of the live one, by which a changed image is noticed.
    pub file: (u64, u64),
}

/// Bounds that a VM's agent has to keep. They are told to it, and held against it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Blocks named at a time.
    pub blocks: u32,
    /// Extents of all of them together.
    pub extents: u32,
    /// New names a second, over some seconds.
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

/// What the daemon wants. Where descriptors belong to it they are named in this order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "kebab-case")]
pub enum Order {
    /// The first one on a connection; answered by [`Report::Hello`].
    Hello {
        /// [`VERSION`] of the daemon.
        version: u32,
    },
    /// Agent worker: the VM's agent is behind this descriptor (a connected stream socket). One that was there before
    /// is closed, and what its agent had named is withdrawn.
    Channel,
    /// Agent worker: close the channel, and withdraw what its agent had named.
    NoChannel {
        /// Why, for the journal.
        why: String,
    },
    /// The disks of the VM are these from now on. Descriptors: all layers of all images, in order. Agent worker: if
    /// they differ from those before, everything is withdrawn first. Reader or peer worker: those of `datanode`.
    Images {
        /// Reader worker: whose they are. Agent worker: its own VM.
        datanode: String,
        /// The disks.
        images: Vec<ImageSpec>,
        /// Why they are others than before, for the journal.
        why: String,
    },
    /// Agent worker: this reader may read. Descriptors: the socket on which it looks blocks up, its hazards (to be
    /// read only). One of that name that was there before is replaced.
    Reader {
        /// The reading VM.
        name: String,
        /// Block pools that it may read, as patterns with `*` and `?`.
        pools: Vec<String>,
    },
    /// Agent worker: this reader may not read any more.
    NoReader {
        /// The reading VM.
        name: String,
    },
    /// Reader or peer worker: this VM's blocks may be read. Descriptors: the socket on which to look blocks up, the VM's
    /// table (to be read only).
    Datanode {
        /// The VM whose blocks they are.
        name: String,
    },
    /// Reader or peer worker: its blocks may not be read any more.
    NoDatanode {
        /// The VM whose blocks they were.
        name: String,
    },
    /// Reader worker: blocks of other hosts may be asked for. Descriptors: the socket on which to ask the peer worker
    /// (SOCK_SEQPACKET), the memory into which it puts bytes ([`crate::peer::new_memory`]). What was there before is
    /// replaced.
    Remote,
    /// Reader worker: blocks of other hosts may not be read any more.
    NoRemote,
    /// Peer worker: all other hosts that there are. Connections of those that are not the same any more are closed.
    Peers {
        /// Each name once.
        peers: Vec<PeerSpec>,
    },
    /// Peer worker: this reader of this host may ask. Descriptors: the other end of [`Order::Remote`]'s socket, the
    /// same memory. One of that name that was there before is replaced.
    Asker {
        /// The reading VM.
        reader: String,
        /// Whom it may ask, and for what.
        sources: Vec<Source>,
    },
    /// Peer worker: this reader may not ask any more.
    NoAsker {
        /// The reading VM.
        reader: String,
    },
    /// Agent worker: everything is withdrawn, and the agent has to start anew.
    EndEpoch {
        /// Why, for the journal and for the agent.
        why: String,
    },
    /// Agent worker: by what it is seen whether the VM stands still. Descriptors: `/proc/PID/task/TID/stat` of its vCPUs, and
    /// `cgroup.events` of their control group if there is one.
    Pulse {
        /// How many vCPUs.
        threads: usize,
        /// Whether there is a control group.
        group: bool,
    },
    /// Reader worker: the agent in its VM is behind this descriptor (a connected unix stream socket), and hands FUSE
    /// requests over ([`viola_proto::relay`]). One that was there before is closed.
    Stream,
    /// What has been done so far: [`Report::Agent`], [`Report::Reader`] or [`Report::Peer`].
    Stat,
    /// Withdraw everything, and end. Answered before the end.
    Quit {
        /// Why, for the journal.
        why: String,
    },
}

impl Order {
    /// Descriptors that have to come with it.
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

/// What a worker answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "kebab-case")]
pub enum Report {
    /// Who it is.
    Hello {
        /// [`VERSION`] of the worker.
        version: u32,
        /// Version of its program.
        program: String,
        /// What it is for.
        role: Role,
        /// Identity of its VM.
        vm: String,
        /// Its process.
        pid: u32,
    },
    /// It was done.
    Done,
    /// It was not done.
    Failed {
        /// Why.
        why: String,
    },
    /// Of an agent worker.
    Agent(Box<AgentStat>),
    /// Of a reader worker.
    Reader(ReaderStat),
    /// Of a peer worker.
    Peer(PeerStat),
}

/// How far the hand-shake with an agent has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Session {
    /// There is no channel.
    #[default]
    NoChannel,
    /// There is one, and nobody has said anything sensible.
    Silent,
    /// The agent has said hello, and reads of the old epoch are still being waited for.
    Ending,
    /// Welcomed, and no file system has been proved to be on a disk of the VM yet.
    Welcomed,
    /// Blocks may be named.
    Proved,
}

/// Counts by reason.
pub type Reasons = BTreeMap<String, u64>;

/// What an agent worker has done. Counts are since its start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AgentStat {
    /// How far the hand-shake is.
    pub session: Session,
    /// Version that the agent told of itself.
    pub agent_version: String,
    /// Epoch of the table.
    pub epoch: u64,
    /// File systems whose disk was proved, each with the disk it is on.
    pub proved: BTreeMap<String, String>,
    /// Blocks known now.
    pub blocks: u64,
    /// Bytes of these blocks.
    pub bytes: u64,
    /// Extents of these blocks and their checksum files.
    pub extents: u64,
    /// Readers that may look blocks up now.
    pub readers: Vec<String>,
    /// Blocks ever named.
    pub named: u64,
    /// Names ever withdrawn, whoever wanted it.
    pub withdrawn: u64,
    /// Withdrawn names that a read is still waited for.
    pub waiting: u64,
    /// The reader that is waited for longest, and for how many milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_by: Option<(String, u64)>,
    /// Look-ups answered, and those of blocks that are not known.
    pub lookups: u64,
    /// See `lookups`.
    pub unknown: u64,
    /// What the agent wanted and did not get, by reason.
    pub refusals: Reasons,
    /// Names withdrawn by the agent, by its reason.
    pub withdrawals: Reasons,
    /// Ends of epochs, by reason.
    pub ends: Reasons,
    /// Disks in use.
    pub images: Vec<ImageSpec>,
    /// What the agent tells of itself, as far as it does.
    pub agent: BTreeMap<String, u64>,
    /// Why it may name nothing, in its words; empty when it may.
    #[serde(default)]
    pub agent_why: String,
    /// What is sent for it; `None` where nothing may be.
    #[serde(default)]
    pub pipes: Option<PipeStats>,
}

/// What a reader worker has done. Counts are since its start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReaderStat {
    /// Whether a VM is connected.
    pub connected: bool,
    /// How the byte stream is, for a VM that has one.
    #[serde(rename = "line")]
    pub stream: StreamState,
    /// DataNode VMs that may be read.
    pub datanodes: Vec<String>,
    /// Requests of the VM.
    pub requests: u64,
    /// Reads among them.
    pub reads: u64,
    /// Bytes read, by DataNode VM.
    pub bytes: BTreeMap<String, u64>,
    /// Files open now.
    pub open: u64,
    /// Reads of blocks that were withdrawn while they were being read.
    pub withdrawn: u64,
    /// What was refused, by reason.
    pub refusals: Reasons,
    /// Numbers of the images in use, by DataNode VM.
    pub images: BTreeMap<String, Vec<u32>>,
    /// Whether blocks of other hosts may be asked for.
    pub remote: bool,
    /// Reads answered by other hosts, or from what was fetched ahead from them.
    pub remote_reads: u64,
    /// Bytes of them, by `DATANODE@HOST`.
    pub remote_bytes: BTreeMap<String, u64>,
    /// Reads that other hosts did not answer.
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
