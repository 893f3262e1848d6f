// SPDX-License-Identifier: Apache-2.0
//! One file or block device of an image.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, OFlags, SeekFrom};

use super::buffers::Buffers;

/// `O_DIRECT` alignment that every disk and file system accepts.
const ALIGN_BYTES: u64 = 4096;

/// Maximum size of a bounce buffer.
const MAX_BOUNCE_BYTES: u64 = 256 << 10;

/// A file or block device, open for reading.
#[derive(Debug)]
pub(super) struct ImageFile {
    fd: OwnedFd,
    block: bool,
    direct: bool,
    writable: bool,
}

impl ImageFile {
    /// Inspects a descriptor; `None` if it is neither a file nor a block device.
    pub(super) fn new(fd: OwnedFd) -> io::Result<Option<Self>> {
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode);
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        let block = kind == FileType::BlockDevice;
        let file = Self {
            fd,
            block,
            direct: flags.contains(OFlags::DIRECT),
            writable: flags & OFlags::ACCMODE == OFlags::RDWR,
        };
        Ok((block || kind == FileType::RegularFile).then_some(file))
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Current size in bytes.
    pub(super) fn size(&self) -> io::Result<u64> {
        if self.block {
            // All reads are positioned, so the descriptor's own position is free to move.
            return Ok(rustix::fs::seek(&self.fd, SeekFrom::End(0))?);
        }
        Ok(rustix::fs::fstat(&self.fd)?.st_size as u64)
    }

    /// Whether bytes can be written through the page cache.
    pub(super) fn is_writable(&self) -> bool {
        self.writable && !self.direct
    }

    /// Reads `len` bytes from `offset` into the buffers.
    pub(super) fn read(
        &self,
        mut offset: u64,
        mut len: u64,
        buffers: &mut Buffers<'_, '_>,
    ) -> io::Result<()> {
        while len > 0 {
            let n = match self.direct {
                true => self.read_direct(offset, len, buffers)?,
                false => {
                    let n = retry(|| preadv(&self.fd, &mut buffers.next(len), offset))?;
                    buffers.advance(n);
                    n
                }
            };
            if n == 0 {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the image is shorter than it was",
                ));
            }
            offset += n as u64;
            len -= n as u64;
        }
        Ok(())
    }

    /// Makes one `O_DIRECT` call: into the caller's buffers if they are aligned, else through a bounce buffer.
    fn read_direct(
        &self,
        offset: u64,
        len: u64,
        buffers: &mut Buffers<'_, '_>,
    ) -> io::Result<usize> {
        if offset.is_multiple_of(ALIGN_BYTES) {
            let mut slices = buffers.next_aligned(len, ALIGN_BYTES as usize);
            if !slices.is_empty() {
                let n = retry(|| preadv(&self.fd, &mut slices, offset))?;
                drop(slices);
                buffers.advance(n);
                return Ok(n);
            }
        }
        let start = offset - offset % ALIGN_BYTES;
        let skip = (offset - start) as usize;
        let wanted = len.min(MAX_BOUNCE_BYTES);
        let room = (skip as u64 + wanted).next_multiple_of(ALIGN_BYTES) as usize;
        let mut memory = vec![0; room + ALIGN_BYTES as usize];
        let pad = memory.as_ptr().align_offset(ALIGN_BYTES as usize);
        let bounce = &mut memory[pad..pad + room];
        let n = retry(|| preadv(&self.fd, &mut [IoSliceMut::new(bounce)], start))?;
        let got = n.saturating_sub(skip).min(wanted as usize);
        buffers.copy(&bounce[skip..skip + got]);
        Ok(got)
    }

    /// Asks the kernel to read bytes into the page cache. An error is ignored: the read that follows reports it.
    pub(super) fn prefetch(&self, offset: u64, len: u64) {
        let Some(len) = std::num::NonZeroU64::new(len) else {
            return;
        };
        if !self.direct {
            let advice = rustix::fs::Advice::WillNeed;
            let _ = rustix::fs::fadvise(&self.fd, offset, Some(len), advice);
        }
    }
}

fn preadv(fd: &OwnedFd, slices: &mut [IoSliceMut<'_>], offset: u64) -> rustix::io::Result<usize> {
    rustix::io::preadv(fd, slices, offset)
}

fn retry(mut call: impl FnMut() -> rustix::io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}
