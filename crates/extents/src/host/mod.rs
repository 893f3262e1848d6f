// SPDX-License-Identifier: Apache-2.0
//! The host side: reads extents of a guest's disk from the disk's image.

mod buffers;
mod file;
mod qcow2;
mod readahead;
mod types;

use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::extent::Extent;
use crate::map::{BadExtents, CheckedMap, Piece};
use buffers::Buffers;
use file::ImageFile;
use qcow2::{Run, Tables};

pub use readahead::Readahead;
pub use types::{Format, ImageError, Layer, Sink, Source};

/// An image of a guest's disk, open for reading; a raw image may also be open for writing. Threads may share it.
///
/// # qcow2 while a VM writes to it
///
/// [`Image::open`] reads the image's tables and keeps them. A VMM writes its changes of the tables
/// to the file when the guest flushes its disk, as fsync does. So extents that a guest names after
/// [fsync](crate::guest::Mapper) are in the file's tables, but perhaps not in the kept ones. Call
/// [`Image::refresh`] before the first read of new extents. The mapping of these bytes then stays
/// valid until the guest rewrites or discards them, or until the VMM uses other files (live
/// snapshot, block commit, blockcopy). QMP reports such a change, and the caller opens the new
/// chain. [`Image::open`] refuses images that are marked dirty (`lazy_refcounts=on` while in use),
/// encrypted, or use features unknown to imago (extended L2 entries, zstd).
#[derive(Debug)]
pub struct Image {
    inner: Inner,
}

#[derive(Debug)]
enum Inner {
    Raw {
        file: ImageFile,
        size: AtomicU64,
    },
    Qcow2 {
        layers: Vec<(Format, Arc<ImageFile>)>,
        tables: RwLock<Arc<Tables>>,
    },
}

impl Image {
    /// Opens an image by its files: the top one first, then its backing file and so on.
    ///
    /// # Errors
    /// [`ImageError`] with the layer that cannot be used.
    pub fn open(layers: Vec<Layer>) -> Result<Self, ImageError> {
        let mut files = Vec::new();
        let last = layers.len().checked_sub(1).ok_or(ImageError::Empty)?;
        for (layer, Layer { format, file }) in layers.into_iter().enumerate() {
            if format == Format::Raw && layer != last {
                return Err(ImageError::RawNotLast(layer));
            }
            let file = ImageFile::new(file)
                .map_err(|source| ImageError::Io { layer, source })?
                .ok_or(ImageError::NotAFile(layer))?;
            files.push((format, file));
        }
        if files[0].0 == Format::Raw {
            let (_, file) = files.remove(0);
            let size = file
                .size()
                .map_err(|source| ImageError::Io { layer: 0, source })?
                .into();
            let inner = Inner::Raw { file, size };
            return Ok(Self { inner });
        }
        let layers: Vec<_> = files
            .into_iter()
            .map(|(format, file)| (format, Arc::new(file)))
            .collect();
        let tables = RwLock::new(Arc::new(Tables::open(&layers)?));
        let inner = Inner::Qcow2 { layers, tables };
        Ok(Self { inner })
    }

    /// Size of the guest's disk in bytes, as of opening or of the last [`Image::refresh`].
    pub fn size(&self) -> u64 {
        match &self.inner {
            Inner::Raw { size, .. } => size.load(Ordering::Relaxed),
            Inner::Qcow2 { tables, .. } => current(tables).size(),
        }
    }

    /// Checks a guest's extents of a file of `file_len` bytes against this disk.
    ///
    /// # Errors
    /// [`BadExtents`] for the first extent that fails a check.
    pub fn check(&self, extents: &[Extent], file_len: u64) -> Result<CheckedMap, BadExtents> {
        CheckedMap::new(extents, file_len, self.size())
    }

    /// Reads bytes of a file from `offset`; returns fewer than requested only at the end of the file. After an error
    /// the content of the buffers is undefined.
    ///
    /// # Errors
    /// Errors of reading the image; [`io::ErrorKind::UnexpectedEof`] when the image has become shorter;
    /// [`io::ErrorKind::InvalidInput`] when the map was checked against a larger disk.
    pub fn read(
        &self,
        map: &CheckedMap,
        offset: u64,
        buffers: &mut [IoSliceMut<'_>],
    ) -> io::Result<usize> {
        let mut buffers = Buffers::new(buffers);
        let wanted = buffers.len();
        match &self.inner {
            Inner::Raw { file, .. } => {
                self.runs(map, offset, wanted, |run| match run {
                    Run::File { offset, len, .. } => file.read(offset, len, &mut buffers),
                    Run::Zero { len } | Run::Encoded { len, .. } => {
                        buffers.zero(len);
                        Ok(())
                    }
                })?;
            }
            Inner::Qcow2 { layers, tables } => {
                let tables = current(tables);
                self.runs(map, offset, wanted, |run| match run {
                    Run::File { file, offset, len } => {
                        layers[file].1.read(offset, len, &mut buffers)
                    }
                    Run::Zero { len } => {
                        buffers.zero(len);
                        Ok(())
                    }
                    Run::Encoded { disk, len } => tables.decode(disk, len, &mut buffers),
                })?;
            }
        }
        Ok((wanted - buffers.len()) as usize)
    }

    /// [`Image::read`] into one buffer.
    ///
    /// # Errors
    /// Those of [`Image::read`].
    pub fn read_at(&self, map: &CheckedMap, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        self.read(map, offset, &mut [IoSliceMut::new(buffer)])
    }

    /// Returns the sources of `len` bytes of a file from `offset`, up to the end of the file. Uncompressed qcow2
    /// clusters are bytes of a file, too.
    ///
    /// # Errors
    /// Those of [`Image::read`].
    pub fn sources(&self, map: &CheckedMap, offset: u64, len: u64) -> io::Result<Vec<Source<'_>>> {
        let mut sources: Vec<Source<'_>> = Vec::new();
        // The file number of the last source, and its end.
        let mut last = None;
        self.runs(map, offset, len, |run| {
            match (run, sources.last_mut()) {
                (Run::File { file, offset, len }, Some(Source::File { len: before, .. }))
                    if last == Some((file, offset)) =>
                {
                    *before += len;
                }
                (Run::Zero { len }, Some(Source::Zero { len: before })) => *before += len,
                (Run::File { file, offset, len }, _) => {
                    let fd = self.file(file).fd();
                    sources.push(Source::File { fd, offset, len });
                }
                (Run::Zero { len }, _) => sources.push(Source::Zero { len }),
                (Run::Encoded { len, .. }, _) => sources.push(Source::Encoded { len }),
            }
            last = match run {
                Run::File { file, offset, len } => Some((file, offset + len)),
                _ => None,
            };
            Ok(())
        })?;
        Ok(sources)
    }

    /// Returns the places to which `len` bytes of a file from `offset` can be written.
    ///
    /// # Errors
    /// [`io::ErrorKind::PermissionDenied`]: the image is not raw, or its file is open only for reading or with
    /// `O_DIRECT`. [`io::ErrorKind::InvalidInput`]: the range exceeds the file, or part of it is a hole or was never
    /// written.
    pub fn sinks(&self, map: &CheckedMap, offset: u64, len: u64) -> io::Result<Vec<Sink<'_>>> {
        let Inner::Raw { file, .. } = &self.inner else {
            return Err(io::ErrorKind::PermissionDenied.into());
        };
        if !file.is_writable() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        if (offset.checked_add(len)).is_none_or(|end| end > map.len()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut sinks = Vec::new();
        self.runs(map, offset, len, |run| match run {
            Run::File { offset, len, .. } => {
                let fd = file.fd();
                sinks.push(Sink { fd, offset, len });
                Ok(())
            }
            Run::Zero { .. } | Run::Encoded { .. } => Err(io::ErrorKind::InvalidInput.into()),
        })?;
        Ok(sinks)
    }

    /// Reads a raw image's size or a qcow2 image's tables again. Reads in progress continue with the old tables.
    ///
    /// # Errors
    /// [`ImageError`]; the image continues with the old tables.
    pub fn refresh(&self) -> Result<(), ImageError> {
        match &self.inner {
            Inner::Raw { file, size } => {
                let now = file
                    .size()
                    .map_err(|source| ImageError::Io { layer: 0, source })?;
                size.store(now, Ordering::Relaxed);
            }
            Inner::Qcow2 { layers, tables } => {
                let new = Arc::new(Tables::open(layers)?);
                *tables.write().unwrap_or_else(PoisonError::into_inner) = new;
            }
        }
        Ok(())
    }

    /// Asks the kernel to read bytes of a file into the page cache (POSIX_FADV_WILLNEED). The call does not wait for
    /// the disk, and does nothing for an image opened with `O_DIRECT`.
    pub fn prefetch(&self, map: &CheckedMap, bytes: Range<u64>) {
        let len = bytes.end.saturating_sub(bytes.start);
        // This is advice: a failure shows in the read that follows.
        let _ = self.runs(map, bytes.start, len, |run| {
            if let Run::File { file, offset, len } = run {
                self.file(file).prefetch(offset, len);
            }
            Ok(())
        });
    }

    fn file(&self, number: usize) -> &ImageFile {
        match &self.inner {
            Inner::Raw { file, .. } => file,
            Inner::Qcow2 { layers, .. } => &layers[number].1,
        }
    }

    /// Calls `each` for the runs of `len` bytes of a file from `offset`, in order.
    fn runs(
        &self,
        map: &CheckedMap,
        offset: u64,
        len: u64,
        mut each: impl FnMut(Run) -> io::Result<()>,
    ) -> io::Result<()> {
        if map.disk_end() > self.size() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the map was checked against a larger disk",
            ));
        }
        let tables = match &self.inner {
            Inner::Raw { .. } => None,
            Inner::Qcow2 { tables, .. } => Some(current(tables)),
        };
        for piece in map.pieces(offset, len) {
            match (piece, &tables) {
                (Piece::Zero { len }, _) => each(Run::Zero { len })?,
                (Piece::At { offset, len }, None) => each(Run::File {
                    file: 0,
                    offset,
                    len,
                })?,
                (Piece::At { offset, len }, Some(tables)) => {
                    let (mut at, end) = (offset, offset + len);
                    while at < end {
                        let run = tables.run(at, end - at)?;
                        at += run.len();
                        each(run)?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Returns the current tables.
fn current(tables: &RwLock<Arc<Tables>>) -> Arc<Tables> {
    Arc::clone(&tables.read().unwrap_or_else(PoisonError::into_inner))
}

#[cfg(test)]
mod tests;
