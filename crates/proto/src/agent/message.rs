// SPDX-License-Identifier: Apache-2.0
//! The messages.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::key::BlockKey;
use super::proof::Challenge;
use crate::pipe::{PipeReply, PipeRequest};

/// Most extents of one file.
pub const MAX_EXTENTS: usize = 16_384;

/// Most leases in one message.
pub const MAX_LEASES: usize = 16_384;

/// Longest text, in bytes.
pub const MAX_TEXT_BYTES: usize = 1024;

/// Bytes that a guest's serial line holds while its reader does not read. The guest's kernel keeps 4095.
pub const SERIAL_LINE_BYTES: u32 = 3072;

/// Size of the file that proves a disk, in bytes.
pub const PROOF_BYTES: usize = 4096;

/// Number of a file system in the VM, chosen by the agent for one session.
pub type FsId = u32;

/// Number of a lease, chosen by the agent and never used twice in a session.
pub type Lease = u64;

/// A contiguous part of a file on the VM's disk, in bytes. On the wire `[logical, physical, length, zero]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(u64, u64, u64, bool)", into = "(u64, u64, u64, bool)")]
pub struct Extent {
    /// Offset in the file.
    pub logical: u64,
    /// Offset on the disk (not in the partition).
    pub physical: u64,
    /// Length.
    pub length: u64,
    /// Whether it reads as zeros regardless of the disk's content.
    pub zero: bool,
}

/// A file's size and extents. Bytes outside of all extents read as zeros.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileMap {
    /// Size of the file in bytes.
    pub size: u64,
    /// Sorted by `logical`, without overlaps, at most [`MAX_EXTENTS`].
    pub extents: Vec<Extent>,
}

/// A disk as the guest sees it. A proof shows which disk of the host it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskName {
    /// Name in the guest's kernel: `vda`, `sda`, `ubda`.
    pub name: String,
    /// Serial number, if the disk has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Size in bytes.
    pub size: u64,
}

/// Bytes, at most [`PROOF_BYTES`]; hexadecimal digits on the wire.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Bytes(pub Vec<u8>);

impl Bytes {
    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Why the agent withdraws a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WithdrawReason {
    /// The DataNode deleted the block.
    Deleted,
    /// The block left its directory: for the trash, `previous`, or another volume.
    Moved,
    /// The block has a newer generation: it was appended to, truncated or recovered.
    Changed,
    /// The file system moved the extents (defragmentation). The agent names the block again.
    Relocated,
    /// The host did not confirm the lease in time.
    Unanswered,
    /// The file system was frozen, remounted, trimmed or resized.
    Filesystem,
    /// The agent stops, or may not hold blocks any more.
    Stopping,
}

/// Counters of the agent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stats {
    /// Blocks under a lease.
    pub named: u64,
    /// Known blocks without a lease yet.
    pub waiting: u64,
    /// Blocks whose withdrawal the host has not confirmed.
    pub withdrawing: u64,
    /// Blocks that the agent does not name: they change, or a file system or the host refused them.
    pub refused: u64,
    /// Bytes of deleted or replaced files that the agent's links keep on the disk.
    pub held_bytes: u64,
    /// Limit of `held_bytes` above which the agent stops naming.
    pub held_limit: u64,
    /// Whether the agent stopped naming because of that limit.
    pub full: bool,
    /// Overflows of the kernel's event queue.
    pub overflows: u64,
    /// Full scans since the agent started.
    pub scans: u64,
    /// Leases given since the agent started.
    pub names: u64,
    /// Leases withdrawn since the agent started.
    pub withdrawals: u64,
    /// Why the agent may not name blocks, in one sentence; empty when it may.
    pub why: String,
}

/// Limits that the host sets and enforces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Most blocks under a lease.
    pub blocks: u32,
    /// Most extents of one file, at most [`MAX_EXTENTS`].
    pub extents: u32,
    /// Most new leases per second.
    pub names_per_s: u32,
}

/// A message from the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromAgent {
    /// First message of a session. It voids all earlier leases.
    Hello {
        /// [`super::VERSION`].
        version: u32,
        /// Version of the agent.
        agent_version: String,
        /// `/proc/sys/kernel/random/boot_id`.
        boot_id: String,
        /// Session number: random, new in each hello.
        session: u64,
        /// Bytes that the host may send before the agent answers a ping behind them; 0 for any number. A serial line
        /// holds [`SERIAL_LINE_BYTES`].
        #[serde(default)]
        window: u32,
    },
    /// A file of [`PROOF_BYTES`] that shows which of the VM's disks holds a file system. The agent has written it in
    /// this session, with the content that the welcome's [`Challenge`] demands, and synced it.
    Proof {
        /// The file system.
        fs: FsId,
        /// Mount point in the guest, for messages.
        mount: String,
        /// `ext4` or `xfs`.
        kind: String,
        /// The disk of the file system.
        disk: DiskName,
        /// Extents of the file.
        map: FileMap,
    },
    /// A finalized block and its checksum file.
    Name {
        /// Number of the lease.
        lease: Lease,
        /// File system of both files.
        fs: FsId,
        /// The block.
        key: BlockKey,
        /// The block's data file.
        data: FileMap,
        /// The block's checksum file.
        meta: FileMap,
    },
    /// The host must stop reading under these leases. It answers with [`ToAgent::Withdrawn`].
    Withdraw {
        /// At most [`MAX_LEASES`].
        leases: Vec<Lease>,
        /// The reason.
        why: WithdrawReason,
    },
    /// The host must stop reading from a file system, whose proof is void too. [`FromAgent::Withdraw`] of the single
    /// leases follows, and the host confirms each of these.
    WithdrawAll {
        /// The file system.
        fs: FsId,
        /// The reason.
        why: WithdrawReason,
    },
    /// The agent's counters, every few seconds.
    Stats(Stats),
    /// Answer to a [`ToAgent::Ping`].
    Pong {
        /// As in the ping.
        n: u64,
    },
    /// A message about a pipe.
    Pipe(PipeRequest),
}

/// A message from the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToAgent {
    /// The host started and expects a hello.
    HelloRequest {
        /// [`super::VERSION`].
        version: u32,
    },
    /// Answer to a hello. All earlier leases have ended, and the agent may remove links of a former agent.
    Welcome {
        /// [`super::VERSION`].
        version: u32,
        /// As in the hello.
        session: u64,
        /// The host's number of this session.
        epoch: u64,
        /// Limits of this session.
        limits: Limits,
        /// What the proof files of this session must contain.
        challenge: Challenge,
    },
    /// The host found the disk: the agent may name blocks of this file system.
    ProofOk {
        /// The file system.
        fs: FsId,
    },
    /// The host did not find the disk. The agent may try again later.
    ProofBad {
        /// The file system.
        fs: FsId,
        /// One sentence.
        why: String,
    },
    /// The disk images changed. The leases of this file system are void: the agent withdraws them, proves the file
    /// system again and names its blocks again.
    ProveAgain {
        /// The file system.
        fs: FsId,
    },
    /// The host accepted a lease.
    Named {
        /// Number of the lease.
        lease: Lease,
    },
    /// The host refused a lease; no read uses it.
    Refused {
        /// Number of the lease.
        lease: Lease,
        /// One sentence.
        why: String,
    },
    /// No read uses these leases any more: their extents may be freed.
    Withdrawn {
        /// At most [`MAX_LEASES`], unknown ones included.
        leases: Vec<Lease>,
    },
    /// The agent answers with [`FromAgent::Pong`].
    Ping {
        /// Number for the answer.
        n: u64,
        /// Session of the host, 0 for none.
        session: u64,
    },
    /// A message about a pipe.
    Pipe(PipeReply),
}

/// A message that fits into a frame.
pub trait Message: Serialize + DeserializeOwned {
    /// Checks the limits of all parts.
    ///
    /// # Errors
    /// Which limit is exceeded.
    fn check(&self) -> Result<(), &'static str>;
}

impl Message for FromAgent {
    fn check(&self) -> Result<(), &'static str> {
        match self {
            Self::Hello {
                agent_version,
                boot_id,
                ..
            } => check_texts(&[agent_version, boot_id]),
            Self::Proof {
                mount,
                kind,
                disk,
                map,
                ..
            } => {
                check_texts(&[mount, kind, &disk.name])?;
                check_texts(disk.serial.as_ref().as_slice())?;
                map.check()
            }
            Self::Name { data, meta, .. } => data.check().and(meta.check()),
            Self::Withdraw { leases, .. } => check_lease_count(leases),
            Self::Stats(stats) => check_texts(&[&stats.why]),
            Self::WithdrawAll { .. } | Self::Pong { .. } => Ok(()),
            Self::Pipe(message) => message.check(),
        }
    }
}

impl Message for ToAgent {
    fn check(&self) -> Result<(), &'static str> {
        match self {
            Self::ProofBad { why, .. } | Self::Refused { why, .. } => check_texts(&[why]),
            Self::Withdrawn { leases } => check_lease_count(leases),
            Self::Pipe(message) => message.check(),
            _ => Ok(()),
        }
    }
}

impl FileMap {
    /// Checks the count only. The host checks the extents themselves against the disk.
    fn check(&self) -> Result<(), &'static str> {
        if self.extents.len() > MAX_EXTENTS {
            return Err("too many extents");
        }
        Ok(())
    }
}

/// Cuts a text to [`MAX_TEXT_BYTES`] bytes at a character boundary.
pub fn truncate_text(mut text: String) -> String {
    let mut end = text.len().min(MAX_TEXT_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text
}

fn check_texts(all: &[&String]) -> Result<(), &'static str> {
    if all.iter().any(|text| text.len() > MAX_TEXT_BYTES) {
        return Err("a text is too long");
    }
    Ok(())
}

fn check_lease_count(leases: &[Lease]) -> Result<(), &'static str> {
    if leases.len() > MAX_LEASES {
        return Err("too many leases");
    }
    Ok(())
}

impl From<(u64, u64, u64, bool)> for Extent {
    fn from((logical, physical, length, zero): (u64, u64, u64, bool)) -> Self {
        Self {
            logical,
            physical,
            length,
            zero,
        }
    }
}

impl From<Extent> for (u64, u64, u64, bool) {
    fn from(e: Extent) -> Self {
        (e.logical, e.physical, e.length, e.zero)
    }
}

impl TryFrom<String> for Bytes {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        if text.len() > 2 * PROOF_BYTES || text.len() % 2 == 1 {
            return Err("not a whole number of bytes, or too many");
        }
        let digit = |c: u8| (c as char).to_digit(16).ok_or("no hexadecimal digit");
        text.as_bytes()
            .chunks_exact(2)
            .map(|two| Ok((digit(two[0])? << 4 | digit(two[1])?) as u8))
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

impl From<Bytes> for String {
    fn from(bytes: Bytes) -> Self {
        use std::fmt::Write;
        let mut text = String::with_capacity(2 * bytes.0.len());
        for byte in bytes.0 {
            // writing into a string does not fail
            let _ = write!(text, "{byte:02x}");
        }
        text
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bytes({} long)", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_look_as_documented() {
        let name = FromAgent::Name {
            lease: 3,
            fs: 0,
            key: BlockKey::new("BP-1", 7, 1001).unwrap(),
            data: FileMap {
                size: 5,
                extents: vec![(0, 4096, 4096, false).into()],
            },
            meta: FileMap::default(),
        };
        assert_eq!(
            serde_json::to_string(&name).unwrap(),
            r#"{"name":{"lease":3,"fs":0,"key":{"pool":"BP-1","id":7,"stamp":1001},"data":{"size":5,"extents":[[0,4096,4096,false]]},"meta":{"size":0,"extents":[]}}}"#
        );
        assert_eq!(
            serde_json::to_string(&ToAgent::Ping { n: 1, session: 2 }).unwrap(),
            r#"{"ping":{"n":1,"session":2}}"#
        );
        assert_eq!(
            serde_json::to_string(&ToAgent::HelloRequest { version: 1 }).unwrap(),
            r#"{"hello_request":{"version":1}}"#
        );
    }

    #[test]
    fn oversized_messages_are_refused() {
        let many = FileMap {
            size: 0,
            extents: vec![(0, 0, 0, true).into(); MAX_EXTENTS + 1],
        };
        let name = FromAgent::Name {
            lease: 0,
            fs: 0,
            key: BlockKey::new("BP-1", 7, 1001).unwrap(),
            data: FileMap::default(),
            meta: many,
        };
        assert_eq!(name.check(), Err("too many extents"));
        let bad = ToAgent::ProofBad {
            fs: 0,
            why: "x".repeat(MAX_TEXT_BYTES + 1),
        };
        assert_eq!(bad.check(), Err("a text is too long"));
        let leases = vec![0; MAX_LEASES + 1];
        assert_eq!(
            ToAgent::Withdrawn { leases }.check(),
            Err("too many leases")
        );
    }

    #[test]
    fn invalid_hexadecimal_digits_are_refused() {
        for bad in ["\"0\"", "\"0g\"", "\"\u{e9}\"", "1"] {
            assert!(serde_json::from_str::<Bytes>(bad).is_err(), "{bad}");
        }
        let long = format!("\"{}\"", "00".repeat(PROOF_BYTES + 1));
        assert!(serde_json::from_str::<Bytes>(&long).is_err());
    }

    proptest! {
        #[test]
        fn bytes_are_read_back(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let bytes = Bytes(bytes);
            let text = serde_json::to_string(&bytes).unwrap();
            prop_assert_eq!(serde_json::from_str::<Bytes>(&text).unwrap(), bytes);
        }

        #[test]
        fn extents_are_read_back(all: [(u64, u64, u64, bool); 3]) {
            let all = all.map(Extent::from);
            let text = serde_json::to_string(&all).unwrap();
            prop_assert_eq!(serde_json::from_str::<[Extent; 3]>(&text).unwrap(), all);
        }
    }
}
