// SPDX-License-Identifier: Apache-2.0
//! What is known about a block's files, and what is to be done with them.

use std::path::Path;
use std::sync::Arc;

use viola_proto::agent::{BlockKey, FileMap, FsId, Lease, Why};

/// Number of a block within this process, never used twice.
pub type EntryId = u64;

/// Where a finished block lies.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Place {
    /// The file system.
    pub fs: FsId,
    /// Its folder.
    pub folder: Arc<Path>,
    /// Its name in HDFS.
    pub key: BlockKey,
}

/// What a block's files were when they were linked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pin {
    /// The data file.
    pub data: FileId,
    /// The checksum file.
    pub meta: FileId,
}

/// A file that has not changed since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileId {
    /// Inode number.
    pub inode: u64,
    /// Length in bytes.
    pub size: u64,
    /// Time of the last change of its bytes, in nanoseconds.
    pub mtime: i128,
}

/// Extents of a block's files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Maps {
    /// Of the data file.
    pub data: FileMap,
    /// Of the checksum file.
    pub meta: FileMap,
}

/// Bounds of the configuration.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Most bytes of deleted or replaced files that links hold back before naming stops.
    pub hold: u64,
    /// Most blocks with a link.
    pub blocks: usize,
    /// Most names in a second.
    pub names_per_s: u32,
}

/// What is to be done. The ledger is told the outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Link the block's files.
    Link(EntryId),
    /// Find the extents of the linked files.
    Map(EntryId, u64),
    /// Name it.
    Name(EntryId, Lease),
    /// Tell the host to stop reading.
    Withdraw(Lease, Why),
    /// Remove its links.
    Drop(EntryId),
    /// It is forgotten.
    Forget(EntryId, Place),
}

impl Pin {
    /// Bytes of both files.
    pub fn bytes(self) -> u64 {
        self.data.size + self.meta.size
    }
}
