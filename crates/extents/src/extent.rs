// SPDX-License-Identifier: Apache-2.0
//! The types in which guest and host describe a file: extents, disk and map.

use serde::{Deserialize, Serialize};

/// Maximum number of extents in a map. An HDFS block of 128 MiB on a badly fragmented disk has some hundreds.
pub const MAX_EXTENTS: usize = 16384;

/// A run of bytes of a file that is contiguous on the guest's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Extent {
    /// Offset in the file, in bytes.
    pub logical: u64,
    /// Offset on the disk (not on the partition), in bytes.
    pub physical: u64,
    /// Length in bytes, never 0.
    pub length: u64,
    /// The extent is allocated but was never written: it reads as zeros, whatever the disk holds there.
    pub zero: bool,
}

/// A disk as the guest sees it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskName {
    /// Kernel name: `vda`, `sda`, `nvme0n1`, `ubda`.
    pub name: String,
    /// Serial number, if the host set one and the guest can see it.
    pub serial: Option<String>,
    /// Size in bytes.
    pub size: u64,
}

/// The map of a file: its size, its extents and its disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileMap {
    /// Length of the file in bytes.
    pub size: u64,
    /// Sorted by [`Extent::logical`], not overlapping, within [`FileMap::size`]. Gaps are holes and read as zeros.
    pub extents: Vec<Extent>,
    /// The disk on which [`Extent::physical`] counts.
    pub disk: DiskName,
}
