// SPDX-License-Identifier: Apache-2.0
//! Reasons why a file cannot be mapped.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::extent::MAX_EXTENTS;

/// Why a file cannot be mapped. Each text completes "the file is refused: ...". All but [`Refusal::Io`],
/// [`Refusal::Changed`] and [`Refusal::Fragmented`] hold until the file system is set up differently.
#[derive(Debug, Error)]
pub enum Refusal {
    /// Not a regular file.
    #[error("it is not a regular file")]
    NotAFile,
    /// A file system other than ext4 and XFS.
    #[error("its file system is {0}; only ext4 and XFS are supported")]
    FileSystem(String),
    /// A file system without a block device of its own.
    #[error("its file system has no block device of its own")]
    NoDevice,
    /// The whole file system journals data.
    #[error(
        "its file system is mounted with data=journal, so its bytes may be in the journal only"
    )]
    DataJournal,
    /// `chattr +j`.
    #[error("it has the attribute j (chattr +j), so its bytes may be in the journal only")]
    JournalledFile,
    /// fscrypt.
    #[error("it is encrypted by the file system")]
    Encrypted,
    /// Compressed by the file system.
    #[error("it is compressed by the file system")]
    Compressed,
    /// The bytes are inside metadata.
    #[error("its bytes are inside the file system's metadata (inline data)")]
    Inline,
    /// XFS realtime.
    #[error("it is a realtime file of XFS, so its bytes are on another device")]
    Realtime,
    /// An extent without a place on the disk yet.
    #[error("the file system has not allocated all of its blocks yet")]
    NotPlaced,
    /// Encoded in another way.
    #[error("the file system stores its bytes encoded")]
    Encoded,
    /// An extent that does not begin or end at a block, or shares its block with another file's.
    #[error("its bytes share blocks with other data")]
    NotAligned,
    /// A FIEMAP flag unknown to this program.
    #[error("the file system gives an extent the unknown flag {0:#x}")]
    UnknownFlag(u32),
    /// FIEMAP returned extents that are not sorted or lie beyond the file system's partition.
    #[error("the file system reports extents that are outside its partition or not in order")]
    InvalidExtents,
    /// For writing: a clone shares an extent.
    #[error("it shares bytes with a clone, so they cannot be written in place")]
    Shared,
    /// For writing: the file has holes or unwritten extents.
    #[error("not all of its bytes are written yet, so they cannot be written in place")]
    Unwritten,
    /// More than [`MAX_EXTENTS`] extents.
    #[error("it is in more than {MAX_EXTENTS} pieces")]
    Fragmented,
    /// Size or time stamps changed during the call.
    #[error("it changed while it was being mapped")]
    Changed,
    /// LVM, dm-crypt, multipath.
    #[error(
        "its file system is on {name}, a device-mapper device ({kind}); offsets on it are not those of a disk"
    )]
    DeviceMapper {
        /// Kernel name of the device.
        name: String,
        /// The creator, for example `LVM` or `CRYPT`, or `of unknown kind`.
        kind: String,
    },
    /// Software RAID.
    #[error("its file system is on {0}, a software RAID; offsets on it are not those of a disk")]
    Raid(String),
    /// A loop device.
    #[error("its file system is on {0}, a loop device; offsets on it are not those of a disk")]
    Loop(String),
    /// Another virtual device: zram, nbd, brd, bcache, drbd.
    #[error("its file system is on {0}, which is not a disk of this VM")]
    NotADisk(String),
    /// A sysfs file of the device is missing or invalid.
    #[error("{path} is missing or invalid, so the disk below its file system is unknown")]
    Sysfs {
        /// The file or folder.
        path: PathBuf,
    },
    /// The journal mode of ext4 is unknown.
    #[error("cannot read {path} for the journal mode of its file system: {source}")]
    JournalMode {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A system call failed.
    #[error("{call}: {source}")]
    Io {
        /// The call.
        call: &'static str,
        /// Why.
        source: io::Error,
    },
}
