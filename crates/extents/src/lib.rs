// SPDX-License-Identifier: Apache-2.0
//! Maps a guest's files to extents of its disk, and reads those extents from the disk's image on the host.
//!
//! The guest names the place of a file's bytes on its own disk ([`guest::Mapper`]: FIEMAP after fsync). The host
//! checks the numbers ([`CheckedMap`]: bounds, order, overlap, count) and reads exactly those bytes from the disk's
//! image ([`host::Image`]). The host parses no file system and no partition table, so a hostile guest can only
//! misname its own data.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::fs::File;
//! use viola_extents::guest::Mapper;
//! use viola_extents::host::{Image, Layer};
//!
//! // in the guest
//! let map = Mapper::new().file_extents(&File::open("/data/blk_1")?)?;
//! // on the host, with the extents that the guest sent
//! let image = Image::open(vec![Layer::raw(File::open("/images/vm1.img")?)])?;
//! let checked = image.check(&map.extents, map.size)?;
//! let mut bytes = vec![0; 4096];
//! let n = image.read_at(&checked, 0, &mut bytes)?;
//! # Ok(()) }
//! ```
//!
//! # What is refused in the guest
//!
//! Files whose bytes have no fixed place on a disk that the host sees: [`guest::Refusal`] lists the reasons. Only
//! ext4 and XFS directly on a disk or a partition are accepted; LVM, RAID, dm-crypt and loop devices are not.
//!
//! # How long a map holds
//!
//! A map describes the file at the moment of the call. The caller must keep the file from being changed, truncated or
//! freed: viola's agent holds a hard link to an HDFS block, which HDFS never changes then. The caller must also map
//! the file again from time to time, because defragmentation moves extents and changes no time stamp. Reading an old
//! map of a reused disk area returns another file's bytes without an error.
//!
//! # Formats
//!
//! Raw files, block devices, and qcow2 with its backing chain. The caller states the format of each file, as libvirt,
//! QMP or the configuration report it. The crate probes nothing and never opens the backing file that a qcow2 header
//! names, so a guest cannot gain access by writing a header. [`host::Image::refresh`] says when the crate reads the
//! tables of a live qcow2 image again.

mod extent;
#[cfg(all(feature = "host", any(test, feature = "fuzzing")))]
pub mod fuzzing;
#[cfg(feature = "guest")]
pub mod guest;
#[cfg(feature = "host")]
pub mod host;
mod map;

pub use extent::{DiskName, Extent, FileMap, MAX_EXTENTS};
pub use map::{BadExtents, CheckedMap, MAX_FILE_BYTES, Piece, Pieces};
