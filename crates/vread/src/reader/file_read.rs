// SPDX-License-Identifier: Apache-2.0
//! Reads of a file: finds its block, reads it from a local disk or another host, and checks the lease.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fuse_backend_rs::api::filesystem::ZeroCopyWriter;

use super::block::{Block, LocalBlock, Location};
use super::fs::{BlockFs, error};
use super::guest_buffers::{ReadOnly, is_first_attempt};
use super::local_file::LocalFile;
use super::nodes::FileNode;
use super::service::count;
use crate::lock::lock;

impl BlockFs {
    /// The block of a file, from its node or by a new look-up. A block of another length under the same name counts
    /// as gone.
    pub(super) fn block(&self, file: &FileNode) -> io::Result<Arc<Block>> {
        let mut kept = lock(&file.block);
        if let Some(block) = kept.upgrade().filter(|block| block.holds()) {
            return Ok(block);
        }
        let block = self.find(&file.key);
        let block = block.filter(|block| block.len(file.meta) == file.size);
        let block = block.ok_or_else(|| error(libc::ESTALE))?;
        *kept = Arc::downgrade(&block);
        Ok(block)
    }

    pub(super) fn read_file(
        &self,
        file: &FileNode,
        writer: &mut dyn ZeroCopyWriter,
        offset: u64,
        length: usize,
    ) -> io::Result<usize> {
        let counts = &self.service.counts;
        for _ in 0..2 {
            let block = self.block(file)?;
            let ahead = match is_first_attempt() {
                true => {
                    let mut ahead = lock(&file.ahead);
                    ahead.record(offset, length as u64, file.size)
                }
                false => None,
            };
            let read = match &block.location {
                Location::Local(local) => {
                    if let Some(range) = ahead {
                        local.image.prefetch(local.map(file.meta), range);
                    }
                    self.read_local(&block, local, file.meta, writer, offset, length)
                }
                Location::Remote(remote) => {
                    if let Some(range) = ahead {
                        remote.prefetch(file.meta, range);
                    }
                    remote.read(file.meta, writer, offset, length)
                }
            };
            return match read {
                Ok(length) => {
                    count(&counts.reads);
                    block.used.store(true, Ordering::Relaxed);
                    Ok(length)
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => Err(e),
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => Err(e),
                // The lease ended before the read: the agent may have named the block again or moved it.
                Err(e) if e.raw_os_error() == Some(libc::ESTALE) => {
                    self.service.forget(&block.key);
                    continue;
                }
                Err(e) if e.raw_os_error() == Some(libc::EKEYREVOKED) => {
                    count(&counts.withdrawn);
                    self.service.forget(&block.key);
                    Err(error(libc::ESTALE))
                }
                Err(_) => {
                    count(&counts.io_errors);
                    Err(error(libc::EIO))
                }
            };
        }
        count(&counts.withdrawn);
        Err(error(libc::ESTALE))
    }

    /// Reads from a disk of this host. ESTALE: the lease had ended before the read; EKEYREVOKED: it ended during the
    /// read.
    fn read_local(
        &self,
        block: &Block,
        local: &LocalBlock,
        meta: bool,
        writer: &mut dyn ZeroCopyWriter,
        offset: u64,
        length: usize,
    ) -> io::Result<usize> {
        let Some(hazard) = self.service.hazard(local) else {
            return Err(error(libc::EBUSY));
        };
        if !block.holds() {
            return Err(error(libc::ESTALE));
        }
        let filled = writer.write_from(
            &mut ReadOnly(&mut LocalFile { block: local, meta }),
            length,
            offset,
        );
        let held = block.holds();
        drop(hazard);
        if !held {
            return Err(error(libc::EKEYREVOKED));
        }
        if let Ok(length) = filled {
            let bytes = &local.datanode.bytes;
            bytes.fetch_add(length as u64, Ordering::Relaxed);
        }
        filled.map_err(|e| match e.raw_os_error() {
            // Only this function returns these codes.
            Some(libc::ESTALE | libc::EKEYREVOKED | libc::EBUSY) => error(libc::EIO),
            _ => e,
        })
    }
}
