// SPDX-License-Identifier: Apache-2.0
//! Where a block lies, what its files were, and what to do with it.

use std::path::Path;
use std::sync::Arc;

use viola_proto::agent::{BlockKey, FileMap, FsId, Lease, WithdrawReason};

/// Identifies a ledger entry within this process; never reused.
pub type EntryId = u64;

/// Where a finished block lies: file system, directory and name.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Location {
    /// The file system.
    pub fs: FsId,
    /// Directory of its two files.
    pub folder: Arc<Path>,
    /// Pool, block id and generation stamp.
    pub key: BlockKey,
}

/// Identity of a block's two files when they were linked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint {
    /// The data file.
    pub data: FileId,
    /// The checksum file.
    pub meta: FileId,
}

/// Identity of one file: a file with the same values has not been changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileId {
    /// Inode number.
    pub inode: u64,
    /// Length in bytes.
    pub size: u64,
    /// Modification time in nanoseconds since the epoch.
    pub mtime: i128,
}

/// The extents of a block's two files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockMaps {
    /// Of the data file.
    pub data: FileMap,
    /// Of the checksum file.
    pub meta: FileMap,
}

/// The ledger's bounds from the configuration.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Maximum bytes of deleted or replaced files that links hold before naming stops.
    pub max_held_bytes: u64,
    /// Maximum number of linked blocks.
    pub max_blocks: usize,
    /// Maximum number of names per second.
    pub max_names_per_s: u32,
}

/// A decision of the ledger. The agent carries it out and reports the outcome to the ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Link the block's files.
    Link(EntryId),
    /// Find the extents of the linked files; the number comes back with the result.
    Map(EntryId, u64),
    /// Name the block to the host under this lease.
    Name(EntryId, Lease),
    /// Tell the host to stop reading by this lease.
    Withdraw(Lease, WithdrawReason),
    /// Remove the block's links.
    Unlink(EntryId),
}

impl Fingerprint {
    /// Bytes of both files.
    pub fn bytes(self) -> u64 {
        self.data.size + self.meta.size
    }
}
