// SPDX-License-Identifier: Apache-2.0
//! Reads a block of this host from its disk image into a VM's memory.

use std::io;

use fuse_backend_rs::file_buf::FileVolatileSlice;
use viola_extents::host::Source;

use super::block::LocalBlock;
use super::guest_buffers::{FillGuest, GuestBuffers, must_not_wait, would_wait};

/// The data or checksum file of a local block. The caller holds the hazard.
pub(super) struct LocalFile<'a> {
    pub(super) block: &'a LocalBlock,
    pub(super) meta: bool,
}

impl FillGuest for LocalFile<'_> {
    fn fill(&mut self, bufs: &[FileVolatileSlice<'_>], offset: u64) -> io::Result<usize> {
        let mut buffers = GuestBuffers::new(bufs);
        let map = self.block.map(self.meta);
        let mut at = offset;
        for source in self.block.image.sources(map, offset, buffers.left as u64)? {
            match source {
                Source::Zero { len } => {
                    buffers.zero(size(len));
                    at += len;
                }
                Source::File { fd, offset, len } => {
                    buffers.read(fd, offset, size(len))?;
                    at += len;
                }
                Source::Encoded { len } => {
                    if must_not_wait() {
                        return Err(would_wait());
                    }
                    let mut bytes = vec![0; size(len)];
                    let got = self.block.image.read_at(map, at, &mut bytes)?;
                    if got < bytes.len() {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                    buffers.copy(&bytes);
                    at += len;
                }
            }
        }
        Ok(size(at - offset))
    }
}

/// Lengths are bounded by the buffers of a request, far below 4 GiB.
fn size(len: u64) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}
