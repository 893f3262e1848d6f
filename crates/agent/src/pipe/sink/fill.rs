// SPDX-License-Identifier: Apache-2.0
//! Allocates written blocks for every byte of a range: writes zeros into holes, into preallocated blocks, and behind
//! the end of the file.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, fallocate};
use viola_proto::agent::Extent;

use super::cache::Aligned;
use crate::pipe::reason::Reason;

/// Bytes of zeros in memory: few enough to stay in a CPU's cache.
const ZERO_BUFFER_BYTES: u64 = 1 << 20;
/// Buffers per write call; a stop waits for one call. More per call means that the VM waits for its core less often.
const MAX_BUFFERS_PER_WRITE: u64 = 16;

/// FALLOC_FL_WRITE_ZEROES (Linux 6.17): the disk makes the zeros.
const WRITE_ZEROES: FallocateFlags = FallocateFlags::from_bits_retain(0x80);
/// Maximum bytes per call of it.
const MAX_DISK_ZERO_BYTES: u64 = 64 << 20;

/// A range of bytes in a file: the first byte, and the one after the last.
pub type ByteRange = (u64, u64);

/// The ranges without written blocks within a range, for a file of `size` bytes with blocks of `block` bytes.
pub fn unwritten_ranges(
    extents: &[Extent],
    (from, to): ByteRange,
    size: u64,
    block: u64,
) -> Vec<ByteRange> {
    let (mut at, mut found) = (from, Vec::new());
    for e in extents.iter().filter(|e| !e.zero) {
        let end = match e.logical + e.length {
            // extents end at the file's size, the last block does not
            end if end == size => end.next_multiple_of(block),
            end => end,
        };
        if e.logical > at {
            found.push((at, e.logical.min(to)));
        }
        at = at.max(end);
        if at >= to {
            break;
        }
    }
    if at < to {
        found.push((at, to));
    }
    found.retain(|(from, to)| from < to);
    found
}

/// Splits a range into its whole blocks and the partial blocks at both ends.
fn pieces((from, to): ByteRange, block: u64) -> (ByteRange, [ByteRange; 2]) {
    let (first, last) = (from.next_multiple_of(block), to / block * block);
    match first < last {
        true => ((first, last), [(from, first), (last, to)]),
        false => ((from, from), [(from, to), (to, to)]),
    }
}

/// Lets the disk make zeros of a range of whole blocks. Returns how far it came: the rest is for the caller, whose
/// write reports the error, if any.
///
/// The disk is done when the call returns (ext4 waits for it before it marks the blocks as written), so it overwrites
/// nothing that is written there later.
fn zero_by_disk(file: &File, (from, to): ByteRange, stop: &AtomicBool) -> u64 {
    let mut at = from;
    while at < to && !stop.load(Ordering::Relaxed) {
        let length = MAX_DISK_ZERO_BYTES.min(to - at);
        if fallocate(file, WRITE_ZEROES, at, length).is_err() {
            break;
        }
        at += length;
    }
    at
}

/// Writes zeros into ranges. Whole blocks are made by the disk or written through `direct`, the file opened with
/// O_DIRECT. In partial blocks only the bytes of the range are written.
///
/// # Errors
/// [`Reason::NoSession`] after a stop, or the [`reason`] for a failed write.
pub fn write_zeros(
    file: &File,
    direct: &File,
    unwritten_ranges: &[ByteRange],
    block: u64,
    stop: &AtomicBool,
) -> Result<(), Reason> {
    let mut nothing = Aligned::new(ZERO_BUFFER_BYTES as usize);
    for gap in unwritten_ranges {
        let ((from, to), edges) = pieces(*gap, block);
        let mut at = zero_by_disk(file, (from, to), stop);
        while at < to {
            if stop.load(Ordering::Relaxed) {
                return Err(Reason::NoSession);
            }
            let zeros: &[u8] = nothing.get();
            let whole =
                (to - at).min(ZERO_BUFFER_BYTES * MAX_BUFFERS_PER_WRITE) / ZERO_BUFFER_BYTES;
            let parts: Vec<_> = match whole {
                0 => vec![IoSlice::new(&zeros[..(to - at) as usize])],
                _ => (0..whole).map(|_| IoSlice::new(zeros)).collect(),
            };
            let done = rustix::io::pwritev(direct, &parts, at);
            let done = done.map_err(|e| reason(&e.into()))? as u64;
            // a partly written block is written again
            at += done / block * block;
            if done < block {
                return Err(Reason::SystemError);
            }
        }
        for (from, to) in edges {
            let bytes = &nothing.get()[..(to - from) as usize];
            file.write_all_at(bytes, from).map_err(|e| reason(&e))?;
        }
    }
    Ok(())
}

/// The reason for a failed write.
pub fn reason(e: &io::Error) -> Reason {
    match e.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => Reason::NoSpace,
        _ => Reason::SystemError,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(logical: u64, length: u64, zero: bool) -> Extent {
        Extent {
            logical,
            physical: 1 << 30,
            length,
            zero,
        }
    }

    #[test]
    fn holes_preallocated_blocks_and_ranges_behind_the_end_are_unwritten() {
        let file = [
            extent(0, 4096, false),
            extent(8192, 4096, true),
            extent(12288, 4096, false),
            extent(16384, 100, false),
        ];
        let size = 16484;
        let unwritten_ranges = |from, to| unwritten_ranges(&file, (from, to), size, 4096);
        assert_eq!(unwritten_ranges(0, 4096), []);
        assert_eq!(unwritten_ranges(10, 4097), [(4096, 4097)]);
        assert_eq!(unwritten_ranges(4090, 16400), [(4096, 12288)]);
        assert_eq!(unwritten_ranges(13000, 20480), []);
        assert_eq!(unwritten_ranges(13000, 30000), [(20480, 30000)]);
        assert_eq!(unwritten_ranges(50000, 50001), [(50000, 50001)]);
        assert_eq!(super::unwritten_ranges(&[], (5, 9), 0, 4096), [(5, 9)]);
    }

    #[test]
    fn partial_blocks_are_split_from_whole_ones() {
        let block = 4096;
        let whole = (4096, 8192);
        assert_eq!(pieces(whole, block), (whole, [(4096, 4096), (8192, 8192)]));
        assert_eq!(
            pieces((4000, 9000), block),
            (whole, [(4000, 4096), (8192, 9000)])
        );
        assert_eq!(pieces((5, 9), block).1, [(5, 9), (9, 9)]);
        assert_eq!(pieces((4000, 8000), block).1, [(4000, 8000), (8000, 8000)]);
    }
}
