// SPDX-License-Identifier: Apache-2.0
//! What guest and host tell each other about a file.

use serde::{Deserialize, Serialize};

/// Extents that a map may have. An HDFS block of 128 MiB on a badly fragmented disk has some hundreds.
pub const MAX_EXTENTS: usize = 16384;

/// A run of bytes of a file that lies at one place of the guest's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Extent {
    /// Where it begins in the file, in bytes.
    pub logical: u64,
    /// Where it begins on the disk (not the partition), in bytes.
    pub physical: u64,
    /// Its length in bytes, never 0.
    pub length: u64,
    /// Allocated but never written: reads as zeros, whatever the disk holds there.
    pub zero: bool,
}

/// A disk, as the guest that has it sees it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskName {
    /// The kernel's name: `vda`, `sda`, `nvme0n1`, `ubda`.
    pub name: String,
    /// The serial number that the host gave it, if it gave one and the guest can see it.
    pub serial: Option<String>,
    /// Size in bytes.
    pub size: u64,
}

/// Where the bytes of a file are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileMap {
    /// Length of the file in bytes.
    pub size: u64,
    /// Sorted by [`Extent::logical`], not overlapping, within [`FileMap::size`]; what lies between is a hole
    /// and reads as zeros.
    pub extents: Vec<Extent>,
    /// The disk that the extents count from the start of.
    pub disk: DiskName,
}
