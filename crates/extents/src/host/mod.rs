// SPDX-License-Identifier: Apache-2.0
//! On the host: extents of a guest's disk as bytes of the disk's image.

mod buffers;
mod file;
mod qcow2;
mod readahead;
mod types;

use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::extent::Extent;
use crate::map::{BadExtents, CheckedMap, Piece};
use buffers::Buffers;
use file::ImageFile;
use qcow2::{Run, Tables};

pub use readahead::Readahead;
pub use types::{Format, ImageError, Layer, Sink, Source};

/// An image of a guest's disk, open for reading, a raw one perhaps also for writing. May be shared among threads.
///
/// # qcow2 while a VM writes to it
///
/// Tables are read when the image is opened and kept. A VMM writes its own changes of them out when the guest
/// flushes its disk, which the guest's fsync does: so what a guest names after [fsync](crate::guest::Mapper)
/// is in the file's tables, but perhaps not yet in ours. Whoever takes new extents from a guest calls
/// [`Image::refresh`] before the first read of them. From then on the mapping of these bytes stays as it is for
/// as long as the guest neither rewrites nor discards them, and the VMM goes on with the same files. When it
/// does not (live snapshot, block commit, blockcopy), QMP says so and the caller opens the new chain. Images
/// that are marked dirty (`lazy_refcounts=on` while in use), encrypted, or use features imago does not know
/// (extended L2 entries, zstd) are refused.
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
    /// Opens an image by its files, the top one first, then its backing file and so on.
    ///
    /// # Errors
    /// What is wrong with them.
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

    /// Size of the guest's disk in bytes, as of opening or the last [`Image::refresh`].
    pub fn size(&self) -> u64 {
        match &self.inner {
            Inner::Raw { size, .. } => size.load(Ordering::Relaxed),
            Inner::Qcow2 { tables, .. } => current(tables).size(),
        }
    }

    /// Checks a guest's extents of a file of `file_len` bytes against this disk.
    ///
    /// # Errors
    /// The first thing that is wrong with them.
    pub fn check(&self, extents: &[Extent], file_len: u64) -> Result<CheckedMap, BadExtents> {
        CheckedMap::new(extents, file_len, self.size())
    }

    /// Reads bytes of a file, from `offset` of it; fewer than asked for only at the file's end. On an error
    /// the buffers hold anything.
    ///
    /// # Errors
    /// Those of reading the image; [`io::ErrorKind::UnexpectedEof`] when the image has become shorter;
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

    /// The file whose offsets are the disk's own, if the image is raw.
    pub fn raw_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.inner {
            Inner::Raw { file, .. } => Some(file.fd()),
            Inner::Qcow2 { .. } => None,
        }
    }

    /// Where `len` bytes of a file from `offset` come from, up to the file's end. Also for qcow2, whose
    /// clusters are bytes of a file too unless they are compressed.
    ///
    /// # Errors
    /// Those of [`Image::read`].
    pub fn sources(&self, map: &CheckedMap, offset: u64, len: u64) -> io::Result<Vec<Source<'_>>> {
        let mut sources: Vec<Source<'_>> = Vec::new();
        // the number of the file of the last source, and where that ends
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

    /// Where `len` bytes for a file from `offset` can be written to.
    ///
    /// # Errors
    /// [`io::ErrorKind::PermissionDenied`]: the image is not raw, or its file is not open for writing, or only around the page cache.
    /// [`io::ErrorKind::InvalidInput`]: the file does not have all these bytes, or some of them lie in a hole or in blocks
    /// that were never written.
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

    /// Looks at the image again: a raw one's size, a qcow2 one's tables. Reads that are under way go on with
    /// the old ones.
    ///
    /// # Errors
    /// What is wrong with the image; it goes on with the old tables.
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

    /// Asks the kernel to bring bytes of a file into the page cache. Nothing is waited for but the kernel's
    /// queue, and nothing is done for an image opened with `O_DIRECT`.
    pub fn prefetch(&self, map: &CheckedMap, bytes: Range<u64>) {
        let len = bytes.end.saturating_sub(bytes.start);
        // advice: what cannot be had ahead is reported when it is read
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
                "the map is of a larger disk",
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

/// The tables in use now.
fn current(tables: &RwLock<Arc<Tables>>) -> Arc<Tables> {
    Arc::clone(&tables.read().unwrap_or_else(PoisonError::into_inner))
}

#[cfg(test)]
mod tests;
