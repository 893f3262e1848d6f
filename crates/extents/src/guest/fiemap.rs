// SPDX-License-Identifier: Apache-2.0
//! Reads a file's extents by FIEMAP and converts those that the host can use (Documentation/filesystems/fiemap.rst).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use super::disk::Partition;
use super::refusal::Refusal;
use crate::extent::{Extent, MAX_EXTENTS};
use crate::map::merged;

/// `FS_IOC_FIEMAP`, `_IOWR('f', 11, struct fiemap)`.
const FS_IOC_FIEMAP: u32 = 0xC020_660B;
const FIEMAP_FLAG_SYNC: u32 = 1;

const LAST: u32 = 0x1;
const UNKNOWN: u32 = 0x2;
const DELALLOC: u32 = 0x4;
const ENCODED: u32 = 0x8;
const DATA_ENCRYPTED: u32 = 0x80;
const NOT_ALIGNED: u32 = 0x100;
const DATA_INLINE: u32 = 0x200;
const DATA_TAIL: u32 = 0x400;
const UNWRITTEN: u32 = 0x800;
const MERGED: u32 = 0x1000;
const SHARED: u32 = 0x2000;

/// Extents returned by one call.
const EXTENTS_PER_CALL: usize = 512;

/// Maximum number of kernel extents read before adjacent ones are merged: ext4 splits extents every 128 MiB.
const MAX_RAW_EXTENTS: usize = 4 * MAX_EXTENTS;

/// `struct fiemap_extent`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RawExtent {
    pub(super) logical: u64,
    pub(super) physical: u64,
    pub(super) length: u64,
    reserved64: [u64; 2],
    pub(super) flags: u32,
    reserved: [u32; 3],
}

/// `struct fiemap` with room for its extents.
#[repr(C)]
struct Request {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
    extents: [RawExtent; EXTENTS_PER_CALL],
}

/// Reads the extents of the first `size` bytes of a file. FIEMAP_FLAG_SYNC makes the kernel allocate all of them
/// first.
pub(super) fn raw_extents(file: &File, size: u64) -> Result<Vec<RawExtent>, Refusal> {
    let mut all: Vec<RawExtent> = Vec::new();
    let mut request = Box::new(Request {
        start: 0,
        length: 0,
        flags: FIEMAP_FLAG_SYNC,
        mapped: 0,
        count: EXTENTS_PER_CALL as u32,
        reserved: 0,
        extents: [RawExtent::default(); EXTENTS_PER_CALL],
    });
    while request.start < size {
        request.length = size - request.start;
        request.mapped = 0;
        // SAFETY: the descriptor is open; the kernel writes at most `count` extents behind the header, for
        // which `Request`, laid out as its `struct fiemap`, has room.
        let done = unsafe {
            libc::ioctl(
                file.as_raw_fd(),
                FS_IOC_FIEMAP as _,
                std::ptr::from_mut(&mut *request),
            )
        };
        if done < 0 {
            let source = io::Error::last_os_error();
            return Err(Refusal::Io {
                call: "FIEMAP",
                source,
            });
        }
        let found = request
            .extents
            .get(..request.mapped as usize)
            .ok_or(Refusal::InvalidExtents)?;
        let Some(last) = found.last().copied() else {
            break;
        };
        if all.len() + found.len() > MAX_RAW_EXTENTS {
            return Err(Refusal::Fragmented);
        }
        all.extend_from_slice(found);
        let next = last.logical.saturating_add(last.length);
        if last.flags & LAST != 0 {
            break;
        }
        if next <= request.start {
            return Err(Refusal::InvalidExtents);
        }
        request.start = next;
    }
    Ok(all)
}

/// Converts the extents of a file of `size` bytes to places on the disk, merges adjacent ones and cuts them at the
/// end of the file.
pub(super) fn to_extents(
    raw: &[RawExtent],
    size: u64,
    partition: &Partition,
    writing: bool,
) -> Result<Vec<Extent>, Refusal> {
    let mut extents = Vec::new();
    let (mut at, mut written) = (0, 0);
    for found in raw {
        check_flags(found.flags)?;
        if writing && found.flags & SHARED != 0 {
            return Err(Refusal::Shared);
        }
        if found.logical < at {
            return Err(Refusal::InvalidExtents);
        }
        at = found
            .logical
            .checked_add(found.length)
            .ok_or(Refusal::InvalidExtents)?;
        // XFS also reports blocks preallocated beyond the end of the file.
        let length = at.min(size).saturating_sub(found.logical);
        if length == 0 {
            continue;
        }
        let end = found.physical.checked_add(length);
        if end.is_none_or(|end| end > partition.size) {
            return Err(Refusal::InvalidExtents);
        }
        let zero = found.flags & UNWRITTEN != 0;
        if !zero {
            written += length;
        }
        extents.push(Extent {
            logical: found.logical,
            physical: partition.start + found.physical,
            length,
            zero,
        });
    }
    if writing && written < size {
        return Err(Refusal::Unwritten);
    }
    let extents = merged(extents);
    if extents.len() > MAX_EXTENTS {
        return Err(Refusal::Fragmented);
    }
    Ok(extents)
}

/// Refuses flags of extents whose bytes are not stored unchanged at a place of their own.
fn check_flags(flags: u32) -> Result<(), Refusal> {
    // Inline and tail extents also carry NOT_ALIGNED, and delayed ones UNKNOWN; the more specific flag comes first.
    let refused = [
        (DATA_ENCRYPTED, Refusal::Encrypted),
        (DATA_INLINE, Refusal::Inline),
        (ENCODED, Refusal::Encoded),
        (DELALLOC | UNKNOWN, Refusal::NotPlaced),
        (DATA_TAIL | NOT_ALIGNED, Refusal::NotAligned),
    ];
    for (bits, refusal) in refused {
        if flags & bits != 0 {
            return Err(refusal);
        }
    }
    match flags & !(LAST | UNWRITTEN | MERGED | SHARED) {
        0 => Ok(()),
        unknown => Err(Refusal::UnknownFlag(unknown)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: Partition = Partition {
        start: 1 << 20,
        size: 64 << 20,
    };

    fn raw(logical: u64, physical: u64, length: u64, flags: u32) -> RawExtent {
        RawExtent {
            logical,
            physical,
            length,
            flags,
            ..RawExtent::default()
        }
    }

    fn extent(logical: u64, physical: u64, length: u64, zero: bool) -> Extent {
        Extent {
            logical,
            physical,
            length,
            zero,
        }
    }

    fn name_all(raw: &[RawExtent], size: u64) -> Result<Vec<Extent>, Refusal> {
        to_extents(raw, size, &DISK, false)
    }

    #[test]
    fn the_structures_are_the_kernels() {
        assert_eq!(size_of::<RawExtent>(), 56);
        assert_eq!(size_of::<Request>(), 32 + EXTENTS_PER_CALL * 56);
        assert_eq!(std::mem::offset_of!(Request, extents), 32);
    }

    #[test]
    fn offsets_count_from_the_start_of_the_disk_and_adjacent_extents_merge() {
        let found = [
            raw(0, 8192, 4096, MERGED),
            raw(4096, 12288, 4096, SHARED),
            raw(8192, 16384, 4096, UNWRITTEN),
            raw(65536, 4096, 4096, LAST),
        ];
        assert_eq!(
            name_all(&found, 69632).unwrap(),
            [
                extent(0, DISK.start + 8192, 8192, false),
                extent(8192, DISK.start + 16384, 4096, true),
                extent(65536, DISK.start + 4096, 4096, false),
            ]
        );
    }

    #[test]
    fn extents_are_cut_at_the_end_of_the_file() {
        let found = [
            raw(0, 8192, 8192, 0),
            raw(8192, 65536, 1 << 20, UNWRITTEN | LAST),
        ];
        assert_eq!(
            name_all(&found, 4097).unwrap(),
            [extent(0, DISK.start + 8192, 4097, false)]
        );
        assert_eq!(name_all(&[], 0).unwrap(), []);
    }

    #[test]
    fn every_flag_that_hides_the_bytes_is_refused_with_its_reason() {
        let cases = [
            (UNKNOWN, "allocated"),
            (DELALLOC | UNKNOWN, "allocated"),
            (ENCODED, "encoded"),
            (ENCODED | DATA_ENCRYPTED, "encrypted"),
            (NOT_ALIGNED, "share blocks"),
            (NOT_ALIGNED | DATA_INLINE, "inline"),
            (NOT_ALIGNED | DATA_TAIL, "share blocks"),
            (0x4000, "unknown flag 0x4000"),
            (0x8000_0000 | LAST, "unknown flag 0x80000000"),
        ];
        for (flags, word) in cases {
            let error = name_all(&[raw(0, 4096, 4096, flags)], 4096).unwrap_err();
            assert!(error.to_string().contains(word), "{flags:#x}: {error}");
        }
    }

    #[test]
    fn invalid_extents_are_refused() {
        for found in [
            vec![raw(0, DISK.size - 4096, 8192, 0)],
            vec![raw(0, u64::MAX - 100, 4096, 0)],
            vec![raw(u64::MAX - 100, 0, 4096, 0)],
            vec![raw(4096, 0, 4096, 0), raw(4096, 8192, 4096, 0)],
        ] {
            assert!(
                matches!(name_all(&found, 8192), Err(Refusal::InvalidExtents)),
                "{found:?}"
            );
        }
    }

    #[test]
    fn writing_needs_written_and_unshared_extents() {
        let name = |found: &[RawExtent]| to_extents(found, 8192, &DISK, true);
        assert!(name(&[raw(0, 0, 8192, LAST)]).is_ok());
        assert!(matches!(
            name(&[raw(0, 0, 4096, LAST)]),
            Err(Refusal::Unwritten)
        ));
        assert!(matches!(
            name(&[raw(0, 0, 8192, UNWRITTEN)]),
            Err(Refusal::Unwritten)
        ));
        assert!(matches!(
            name(&[raw(0, 0, 8192, SHARED)]),
            Err(Refusal::Shared)
        ));
    }

    #[test]
    fn too_many_pieces_are_refused() {
        let found: Vec<_> = (0..=MAX_EXTENTS as u64)
            .map(|i| raw(i * 512, (i % 2) * 8192 + i * 512, 512, 0))
            .collect();
        let size = found.len() as u64 * 512;
        assert!(matches!(name_all(&found, size), Err(Refusal::Fragmented)));
        assert!(name_all(&found[1..], size).is_ok());
    }
}
