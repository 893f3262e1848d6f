// SPDX-License-Identifier: Apache-2.0
//! Checks the extents that a guest sends. This module works on numbers only and reads nothing.

use thiserror::Error;

use crate::extent::{Extent, MAX_EXTENTS};

/// Maximum file length in bytes: the largest signed 64-bit offset.
pub const MAX_FILE_BYTES: u64 = i64::MAX as u64;

/// Why [`CheckedMap::new`] refused extents. Extent numbers count from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BadExtents {
    /// More than [`MAX_EXTENTS`] extents.
    #[error("{0} extents, at most {MAX_EXTENTS} are allowed")]
    TooMany(usize),
    /// A file longer than [`MAX_FILE_BYTES`].
    #[error("the file length of {0} bytes exceeds {MAX_FILE_BYTES}")]
    FileTooLong(u64),
    /// An extent of length 0.
    #[error("extent {0} is empty")]
    Empty(usize),
    /// An extent whose end does not fit into 64 bits.
    #[error("extent {0} ends beyond 64 bits")]
    Overflow(usize),
    /// An extent that begins before the end of the previous one.
    #[error("extent {0} begins before the end of the previous one")]
    Overlap(usize),
    /// An extent that ends beyond the end of the file.
    #[error("extent {0} ends beyond the file")]
    OutsideFile(usize),
    /// An extent that ends beyond the end of the disk.
    #[error("extent {0} ends beyond the disk")]
    OutsideDisk(usize),
}

/// Extents that were checked against a disk's size: every byte of the file is a zero or lies within the disk.
///
/// The content is the guest's responsibility. Two extents may share a place of the disk, as those of a cloned file
/// do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedMap {
    extents: Box<[Extent]>,
    len: u64,
    disk_end: u64,
}

/// A run of bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Zeros.
    Zero {
        /// Length in bytes.
        len: u64,
    },
    /// Bytes on the disk.
    At {
        /// Offset on the disk, in bytes.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
}

impl Piece {
    /// Length in bytes, never 0.
    pub fn len(&self) -> u64 {
        match *self {
            Self::Zero { len } | Self::At { len, .. } => len,
        }
    }

    /// Always false; present because clippy expects it beside `len`.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl CheckedMap {
    /// Checks a guest's extents of a file of `len` bytes against a disk of `disk` bytes, and merges adjacent extents.
    ///
    /// The function allocates only after all checks have passed, so a hostile list costs no memory beyond its own.
    ///
    /// # Errors
    /// [`BadExtents`] for the first extent that fails a check.
    pub fn new(extents: &[Extent], len: u64, disk: u64) -> Result<Self, BadExtents> {
        if len > MAX_FILE_BYTES {
            return Err(BadExtents::FileTooLong(len));
        }
        if extents.len() > MAX_EXTENTS {
            return Err(BadExtents::TooMany(extents.len()));
        }
        let (mut at, mut disk_end) = (0, 0);
        for (i, extent) in extents.iter().enumerate() {
            if extent.length == 0 {
                return Err(BadExtents::Empty(i));
            }
            let overflow = BadExtents::Overflow(i);
            let end = extent.logical.checked_add(extent.length).ok_or(overflow)?;
            if extent.logical < at {
                return Err(BadExtents::Overlap(i));
            }
            if end > len {
                return Err(BadExtents::OutsideFile(i));
            }
            at = end;
            // No read uses the place of an unwritten extent, but it must be valid, too.
            let end = extent.physical.checked_add(extent.length).ok_or(overflow)?;
            if end > disk {
                return Err(BadExtents::OutsideDisk(i));
            }
            if !extent.zero {
                disk_end = disk_end.max(end);
            }
        }
        Ok(Self {
            extents: merged(extents.iter().copied()).into(),
            len,
            disk_end,
        })
    }

    /// Length of the file in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the file has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The extents, with adjacent ones merged.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Offset on the disk, in bytes, behind the last byte that a read of this file can touch; 0 if
    /// a read touches none.
    pub fn disk_end(&self) -> u64 {
        self.disk_end
    }

    /// The runs that make up `len` bytes from `offset`; they end at the end of the file.
    pub fn pieces(&self, offset: u64, len: u64) -> Pieces<'_> {
        let end = offset.saturating_add(len).min(self.len);
        let first = self
            .extents
            .partition_point(|e| e.logical + e.length <= offset);
        Pieces {
            rest: &self.extents[first..],
            at: offset,
            end,
        }
    }
}

/// Iterator over the runs of a file, see [`CheckedMap::pieces`]. Their lengths add up to the requested length, cut at
/// the end of the file.
#[derive(Clone, Debug)]
pub struct Pieces<'a> {
    rest: &'a [Extent],
    at: u64,
    end: u64,
}

impl Iterator for Pieces<'_> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        if self.at >= self.end {
            return None;
        }
        let wanted = self.end - self.at;
        let piece = match self.rest.first() {
            None => Piece::Zero { len: wanted },
            Some(extent) if self.at < extent.logical => Piece::Zero {
                len: wanted.min(extent.logical - self.at),
            },
            Some(extent) => {
                let skip = self.at - extent.logical;
                let len = wanted.min(extent.length - skip);
                if skip + len == extent.length {
                    self.rest = &self.rest[1..];
                }
                match extent.zero {
                    true => Piece::Zero { len },
                    false => Piece::At {
                        offset: extent.physical + skip,
                        len,
                    },
                }
            }
        };
        self.at += piece.len();
        Some(piece)
    }
}

/// Merges extents that are adjacent in the file and on the disk.
pub(crate) fn merged(extents: impl IntoIterator<Item = Extent>) -> Vec<Extent> {
    let mut out: Vec<Extent> = Vec::new();
    for extent in extents {
        match out.last_mut() {
            Some(last)
                if last.zero == extent.zero
                    && last.logical + last.length == extent.logical
                    && last.physical + last.length == extent.physical =>
            {
                last.length += extent.length;
            }
            _ => out.push(extent),
        }
    }
    out
}

#[cfg(test)]
mod tests;
