// SPDX-License-Identifier: Apache-2.0
//! Why a file's bytes cannot be named.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::extent::MAX_EXTENTS;

/// Why the bytes of a file cannot be named. Each is one sentence for the operator; all but [`Refusal::Io`],
/// [`Refusal::Changed`] and [`Refusal::Fragmented`] hold for as long as the file system is set up as it is.
#[derive(Debug, Error)]
pub enum Refusal {
    /// Not a regular file.
    #[error("it is not a regular file")]
    NotAFile,
    /// Any file system but ext4 and XFS.
    #[error("its file system is {0}; only ext4 and XFS keep bytes at places that can be named")]
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
    /// Bytes within metadata.
    #[error("its bytes are inside the file system's metadata (inline data)")]
    Inline,
    /// XFS realtime.
    #[error("it is a realtime file of XFS, so its bytes are on another device")]
    Realtime,
    /// An extent whose place is not known yet.
    #[error("the file system has not placed all of its bytes yet")]
    NotPlaced,
    /// Encoded in another way.
    #[error("the file system stores its bytes encoded")]
    Encoded,
    /// An extent that does not begin or end at a block, or shares its block with another file's.
    #[error("its bytes share blocks with other data")]
    NotAligned,
    /// A flag of FIEMAP that this program does not know.
    #[error("the file system gives an extent the unknown flag {0:#x}")]
    UnknownFlag(u32),
    /// FIEMAP gave extents that make no sense: not sorted, or beyond the file system's partition.
    #[error("the file system gives extents that are not within its partition or not in order")]
    InvalidExtents,
    /// For writing: a clone shares the extent.
    #[error("it shares bytes with a clone, so they cannot be written in place")]
    Shared,
    /// For writing: holes and unwritten extents.
    #[error("not all of its bytes are written yet, so they cannot be written in place")]
    Unwritten,
    /// More than [`MAX_EXTENTS`].
    #[error("it is in more than {MAX_EXTENTS} pieces")]
    Fragmented,
    /// Size or time stamps changed meanwhile.
    #[error("it was changed while it was looked at")]
    Changed,
    /// LVM, dm-crypt, multipath.
    #[error(
        "its file system is on {name}, a device-mapper device ({kind}), whose places are not those of a disk"
    )]
    DeviceMapper {
        /// The kernel's name of the device.
        name: String,
        /// What made it, for example `LVM` or `CRYPT`, or `of unknown kind`.
        kind: String,
    },
    /// Software RAID.
    #[error("its file system is on {0}, a software RAID, whose places are not those of a disk")]
    Raid(String),
    /// A loop device.
    #[error("its file system is on {0}, a loop device, whose places are not those of a disk")]
    Loop(String),
    /// Another device that the kernel makes up: zram, nbd, brd, bcache, drbd.
    #[error("its file system is on {0}, which is not a disk that the host gave this guest")]
    NotADisk(String),
    /// What should be known about the device is not.
    #[error("{path} is not as expected, so the disk below its file system is not known")]
    Sysfs {
        /// The file or folder.
        path: PathBuf,
    },
    /// The journal mode of ext4 cannot be seen.
    #[error("{path} cannot be read, so the journal mode of its file system is not known: {source}")]
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
