// SPDX-License-Identifier: Apache-2.0
//! A guest's files as extents of its disk, and those extents as bytes of the disk's image on the host.
//!
//! The guest names where the bytes of a file lie on its own disk ([`guest::Mapper`]: FIEMAP, synced). The
//! host checks only the numbers ([`CheckedMap`]: bounds, order, overlap, count) and reads exactly those bytes
//! from the disk's image ([`host::Image`]). It parses no file system and no partition table, so a hostile
//! guest can only misname its own data.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::fs::File;
//! use viola_extents::guest::Mapper;
//! use viola_extents::host::{Image, Layer};
//!
//! // in the guest
//! let map = Mapper::new().file_extents(&File::open("/data/blk_1")?)?;
//! // on the host, with what the guest named
//! let image = Image::open(vec![Layer::raw(File::open("/images/vm1.img")?)])?;
//! let checked = image.check(&map.extents, map.size)?;
//! let mut bytes = vec![0; 4096];
//! let n = image.read_at(&checked, 0, &mut bytes)?;
//! # Ok(()) }
//! ```
//!
//! # What is refused in the guest
//!
//! Everything whose bytes are not at a fixed place of a disk that the host sees: see [`guest::Refusal`]. Only
//! ext4 and XFS straight on a disk or a partition are accepted; LVM, RAID, dm-crypt and loop devices are not.
//!
//! # How long a map holds
//!
//! A map is true for the moment it was made. Whoever keeps one has to keep the file from being changed,
//! truncated or freed (viola's agent holds a hard link to an HDFS block, which HDFS never changes then), and
//! has to name it again from time to time against defragmentation, which moves extents and changes no time
//! stamp. A disk that has been refilled meanwhile gives another file's bytes and no error.
//!
//! # Formats
//!
//! Raw files, block devices, and qcow2 with its backing chain. Which file is in which format says the caller,
//! who has it from libvirt, QMP or the configuration: nothing is probed, and the backing file that a qcow2
//! header names is never opened, so a guest cannot write itself a header. See [`host::Image::refresh`] for
//! when the tables of a qcow2 image that a VM writes to are read again.

mod extent;
#[cfg(feature = "guest")]
pub mod guest;
#[cfg(feature = "host")]
pub mod host;
mod map;

pub use extent::{DiskName, Extent, FileMap, MAX_EXTENTS};
pub use map::{BadExtents, CheckedMap, MAX_FILE_BYTES, Piece, Pieces};
