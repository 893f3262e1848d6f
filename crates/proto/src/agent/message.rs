// SPDX-License-Identifier: Apache-2.0
//! The messages themselves.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::key::BlockKey;
use crate::pipe::{PipeReply, PipeRequest};

/// Most extents of one file.
pub const MAX_EXTENTS: usize = 16_384;

/// Most leases in one message.
pub const MAX_LEASES: usize = 16_384;

/// Longest text, in bytes.
pub const MAX_TEXT_BYTES: usize = 1024;

/// Bytes that a guest's serial line holds for certain while nobody reads it: its kernel keeps 4095.
pub const SERIAL_LINE_BYTES: u32 = 3072;

/// Length of the file that proves a disk, in bytes.
pub const PROOF_BYTES: usize = 4096;

/// A file system of the guest; numbered by its agent, for one session.
pub type FsId = u32;

/// A name's number; chosen by the agent, never used twice in a session.
pub type Lease = u64;

/// A piece of a file on the guest's disk, in bytes. On the wire `[logical, physical, length, zero]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(u64, u64, u64, bool)", into = "(u64, u64, u64, bool)")]
pub struct Extent {
    /// Where it begins in the file.
    pub logical: u64,
    /// Where it begins on the disk (not on the partition).
    pub physical: u64,
    /// How long it is.
    pub length: u64,
    /// Whether it reads as zeros, whatever the disk has there.
    pub zero: bool,
}

/// A file's length and where its bytes are; what no extent covers reads as zeros.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileMap {
    /// Length of the file, in bytes.
    pub size: u64,
    /// Sorted by `logical`, not overlapping, at most [`MAX_EXTENTS`].
    pub extents: Vec<Extent>,
}

/// A disk as the guest sees it; which one it is on the host is found out by a proof.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskName {
    /// Kernel's name: `vda`, `sda`, `ubda`.
    pub name: String,
    /// Serial number, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Length in bytes.
    pub size: u64,
}

/// Bytes, as hexadecimal digits on the wire; at most [`PROOF_BYTES`].
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Bytes(pub Vec<u8>);

impl Bytes {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Why a block is withdrawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WithdrawReason {
    /// The DataNode deleted it.
    Deleted,
    /// It left its folder: trash, `previous`, another volume.
    Moved,
    /// It was appended to, truncated or recovered: there is a newer generation.
    Changed,
    /// Its extents are elsewhere now (defragmentation): it will be named again.
    Relocated,
    /// The host did not answer to its name in time.
    Unanswered,
    /// The file system is frozen, remounted, trimmed or resized.
    Filesystem,
    /// The agent ends, or is told to hold nothing.
    Stopping,
}

/// What the agent holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stats {
    /// Blocks that are named now.
    pub named: u64,
    /// Blocks seen, but not named yet.
    pub waiting: u64,
    /// Blocks whose withdrawal is not confirmed.
    pub withdrawing: u64,
    /// Blocks that it does not name: changed under its hands, refused by a file system or by the host.
    pub refused: u64,
    /// Bytes of deleted or replaced files that its links hold back now.
    pub held_bytes: u64,
    /// Most of them before it stops naming.
    pub held_limit: u64,
    /// Whether it stopped naming because of that limit.
    pub full: bool,
    /// How often the kernel's queue of events overflowed.
    pub overflows: u64,
    /// Full scans since its start.
    pub scans: u64,
    /// Names given since its start.
    pub names: u64,
    /// Names withdrawn since its start.
    pub withdrawals: u64,
    /// Why it may name nothing, one sentence; empty when it may.
    pub why: String,
}

/// Bounds that the host sets; the agent obeys them, and the host enforces them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Most blocks named at a time.
    pub blocks: u32,
    /// Most extents of one file, at most [`MAX_EXTENTS`].
    pub extents: u32,
    /// Most names in a second.
    pub names_per_s: u32,
}

/// What an agent says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromAgent {
    /// First message of a session: everything named before is void.
    Hello {
        /// [`super::VERSION`].
        version: u32,
        /// The program's version.
        agent_version: String,
        /// `/proc/sys/kernel/random/boot_id`.
        boot_id: String,
        /// Random, new in each hello.
        session: u64,
        /// Bytes that the host may send before the agent has answered a ping behind them: a serial line holds no
        /// more than [`SERIAL_LINE_BYTES`]. 0: any number.
        #[serde(default)]
        window: u32,
    },
    /// A small file whose bytes show which of the VM's disks holds a file system.
    Proof {
        /// The file system.
        fs: FsId,
        /// Where it is mounted in the guest, for people.
        mount: String,
        /// `ext4` or `xfs`.
        kind: String,
        /// The disk below it.
        disk: DiskName,
        /// The file's whole content: [`PROOF_BYTES`] random bytes, synced.
        content: Bytes,
        /// Where they are.
        map: FileMap,
    },
    /// A finished block and its checksum file.
    Name {
        /// The name's number.
        lease: Lease,
        /// The file system that holds both.
        fs: FsId,
        /// The block.
        key: BlockKey,
        /// Its data file.
        data: FileMap,
        /// Its checksum file.
        meta: FileMap,
    },
    /// These are not to be read any more; waits for [`ToAgent::Withdrawn`].
    Withdraw {
        /// At most [`MAX_LEASES`].
        leases: Vec<Lease>,
        /// The reason.
        why: WithdrawReason,
    },
    /// Nothing of a file system is to be read any more. The agent's withdrawals of the single leases
    /// follow and are confirmed one by one; the host stops reads at this message already. Its proof is
    /// void, too.
    WithdrawAll {
        /// The file system.
        fs: FsId,
        /// The reason.
        why: WithdrawReason,
    },
    /// Every few seconds.
    Stats(Stats),
    /// Answer to a [`ToAgent::Ping`].
    Pong {
        /// As in the ping.
        n: u64,
    },
    /// Of a file that the host is to send.
    Pipe(PipeRequest),
}

/// What the host says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToAgent {
    /// A new host end: say hello.
    #[serde(rename = "hail")]
    HelloRequest {
        /// [`super::VERSION`].
        version: u32,
    },
    /// Answer to a hello, after everything named before has ended: links of a dead agent may go.
    Welcome {
        /// [`super::VERSION`].
        version: u32,
        /// As in the hello.
        session: u64,
        /// The host's number for this session.
        epoch: u64,
        /// Bounds for it.
        limits: Limits,
    },
    /// The disk is found: blocks of this file system may be named.
    ProofOk {
        /// The file system.
        fs: FsId,
    },
    /// The disk is not found; a proof may be tried again later.
    ProofBad {
        /// The file system.
        fs: FsId,
        /// One sentence.
        why: String,
    },
    /// The disk images changed: prove this file system again. Its names are void until then, and are
    /// to be withdrawn and given again.
    ProveAgain {
        /// The file system.
        fs: FsId,
    },
    /// A name is in use.
    Named {
        /// Its number.
        lease: Lease,
    },
    /// A name is not accepted, and no read uses it.
    Refused {
        /// Its number.
        lease: Lease,
        /// One sentence.
        why: String,
    },
    /// No read uses these any more, and none will: their extents may be freed.
    Withdrawn {
        /// At most [`MAX_LEASES`]; unknown ones are confirmed, too.
        leases: Vec<Lease>,
    },
    /// Are you there?
    Ping {
        /// For the answer.
        n: u64,
        /// Session that the host is in, 0 for none.
        session: u64,
    },
    /// Of a file that the host sends.
    Pipe(PipeReply),
}

/// A message that can be framed.
pub trait Message: Serialize + DeserializeOwned {
    /// Whether all parts are within the limits; else which is not.
    fn check(&self) -> Result<(), &'static str>;
}

impl Message for FromAgent {
    fn check(&self) -> Result<(), &'static str> {
        match self {
            Self::Hello {
                agent_version,
                boot_id,
                ..
            } => texts(&[agent_version, boot_id]),
            Self::Proof {
                mount,
                kind,
                disk,
                content,
                map,
                ..
            } => {
                texts(&[mount, kind, &disk.name])?;
                texts(disk.serial.as_ref().as_slice())?;
                if content.0.len() != PROOF_BYTES {
                    return Err("a proof of another length");
                }
                map.check()
            }
            Self::Name { data, meta, .. } => data.check().and(meta.check()),
            Self::Withdraw { leases, .. } => few(leases),
            Self::Stats(stats) => texts(&[&stats.why]),
            Self::WithdrawAll { .. } | Self::Pong { .. } => Ok(()),
            Self::Pipe(message) => message.check(),
        }
    }
}

impl Message for ToAgent {
    fn check(&self) -> Result<(), &'static str> {
        match self {
            Self::ProofBad { why, .. } | Self::Refused { why, .. } => texts(&[why]),
            Self::Withdrawn { leases } => few(leases),
            Self::Pipe(message) => message.check(),
            _ => Ok(()),
        }
    }
}

impl FileMap {
    /// Only the count is bounded here; whether the extents make sense is judged with the disk at hand.
    fn check(&self) -> Result<(), &'static str> {
        if self.extents.len() > MAX_EXTENTS {
            return Err("too many extents");
        }
        Ok(())
    }
}

/// A text cut to [`MAX_TEXT_BYTES`] bytes, at a whole character.
pub fn truncate_text(mut text: String) -> String {
    let mut end = text.len().min(MAX_TEXT_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text
}

fn texts(all: &[&String]) -> Result<(), &'static str> {
    if all.iter().any(|text| text.len() > MAX_TEXT_BYTES) {
        return Err("a text is too long");
    }
    Ok(())
}

fn few(leases: &[Lease]) -> Result<(), &'static str> {
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
            r#"{"hail":{"version":1}}"#
        );
    }

    #[test]
    fn what_is_too_long_is_found() {
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
    fn bytes_that_are_none_are_refused() {
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
