// SPDX-License-Identifier: Apache-2.0
//! A guest's word about a file, checked: numbers only, nothing is read.

use thiserror::Error;

use crate::extent::{Extent, MAX_EXTENTS};

/// Longest file: what a signed 64-bit offset can hold.
pub const MAX_FILE_BYTES: u64 = i64::MAX as u64;

/// Why a guest's extents were refused. Indices count from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BadExtents {
    /// More than [`MAX_EXTENTS`].
    #[error("{0} extents, at most {MAX_EXTENTS} are allowed")]
    TooMany(usize),
    /// A file beyond [`MAX_FILE_BYTES`].
    #[error("a file of {0} bytes is longer than a file can be")]
    FileTooLong(u64),
    /// A length of 0.
    #[error("extent {0} is empty")]
    Empty(usize),
    /// An end that does not fit into 64 bits.
    #[error("extent {0} ends beyond 64 bits")]
    Overflow(usize),
    /// Not sorted, or one begins before the one before it ends.
    #[error("extent {0} begins before the end of the one before it")]
    Overlap(usize),
    /// Beyond the end of the file.
    #[error("extent {0} ends beyond the file")]
    OutsideFile(usize),
    /// Beyond the end of the disk.
    #[error("extent {0} ends beyond the disk")]
    OutsideDisk(usize),
}

/// Extents that were checked against a disk's size: every byte of the file is either a zero or lies within
/// the disk.
///
/// What the disk holds there is the guest's own affair. Two extents may share a place of the disk, as those of
/// a cloned file do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedMap {
    extents: Box<[Extent]>,
    len: u64,
    disk_end: u64,
}

/// A run of a file's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Zeros.
    Zero {
        /// How many.
        len: u64,
    },
    /// Bytes of the disk.
    At {
        /// Where they begin on the disk.
        offset: u64,
        /// How many.
        len: u64,
    },
}

impl Piece {
    /// How many bytes of the file this is; never 0.
    pub fn len(&self) -> u64 {
        match *self {
            Self::Zero { len } | Self::At { len, .. } => len,
        }
    }

    /// Never: a piece has bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl CheckedMap {
    /// Checks a guest's extents of a file of `len` bytes against a disk of `disk` bytes.
    ///
    /// Nothing is allocated before all is found good, so hostile lists cost no memory but their own.
    /// Neighbours are merged.
    ///
    /// # Errors
    /// The first thing that is wrong.
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
            // Where unwritten bytes lie is never used, but a guest that names nonsense is not believed.
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

    /// The extents, neighbours merged.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// End of the last byte on the disk that reading this file can touch.
    pub fn disk_end(&self) -> u64 {
        self.disk_end
    }

    /// The runs that `len` bytes from `offset` consist of; ends at the end of the file.
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

/// Runs of a file, see [`CheckedMap::pieces`]. Their lengths add up to what was asked for, up to the file's end.
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

/// Joins extents that follow each other in the file and on the disk.
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
