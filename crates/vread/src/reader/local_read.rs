// SPDX-License-Identifier: Apache-2.0
//! Reads of local blocks for other hosts.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fuse_backend_rs::file_buf::FileVolatileSlice;
use viola_proto::agent::BlockKey;

use super::block::{Block, LocalBlock, Location};
use super::guest_buffers::{FillGuest, without_waiting};
use super::local_file::LocalFile;
use super::service::{Service, count};

/// Why a read failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadError {
    /// The lease had ended before the read.
    Ended,
    /// The lease ended during the read.
    Withdrawn,
    /// The bytes are not in memory, and the thread may not wait.
    WouldWait,
    /// The disk failed, or the range exceeds the file.
    Io,
}

/// A local block that was looked up.
#[derive(Debug, Clone)]
pub(crate) struct BlockHandle(Arc<Block>);

impl BlockHandle {
    fn local(&self) -> Option<&LocalBlock> {
        match &self.0.location {
            Location::Local(local) => Some(local),
            Location::Remote(_) => None,
        }
    }

    /// Length of the data file or of the checksum file, bytes.
    pub(crate) fn len(&self, meta: bool) -> u64 {
        self.0.len(meta)
    }

    /// Identity of the block's DataNode VM.
    pub(crate) fn datanode(&self) -> &str {
        self.local().map_or("", |local| &local.datanode.name)
    }

    /// Reads bytes into the page cache.
    pub(crate) fn prefetch(&self, meta: bool, range: Range<u64>) {
        if let Some(local) = self.local() {
            local.image.prefetch(local.map(meta), range);
        }
    }
}

impl Service {
    /// Returns a block that is in the cache, if `may` accepts its DataNode VM.
    pub(crate) fn cached_local(
        &self,
        key: &BlockKey,
        may: &dyn Fn(&str) -> bool,
    ) -> Option<BlockHandle> {
        let handle = BlockHandle(self.cached(key)?);
        handle
            .local()
            .is_some_and(|n| may(&n.datanode.name))
            .then_some(handle)
    }

    /// Returns a block that one of the DataNode VMs accepted by `may` has. Waits for agent workers.
    pub(crate) fn find_local(
        &self,
        key: &BlockKey,
        may: &dyn Fn(&str) -> bool,
    ) -> Option<BlockHandle> {
        if let Some(handle) = self.cached_local(key, may) {
            return Some(handle);
        }
        let Some(block) = self.query_local(key, may) else {
            count(&self.counts.unknown);
            return None;
        };
        self.keep(&block);
        Some(BlockHandle(block))
    }

    /// Fills `bytes` from `offset`, all within the file. The lease is valid before and after the read.
    ///
    /// # Errors
    /// [`ReadError`]; the content of `bytes` is invalid then.
    pub(crate) fn read_local(
        &self,
        handle: &BlockHandle,
        meta: bool,
        offset: u64,
        bytes: &mut [u8],
        waits: bool,
    ) -> Result<(), ReadError> {
        let local = handle.local().ok_or(ReadError::Io)?;
        let end = offset.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > handle.len(meta)) {
            return Err(ReadError::Io);
        }
        // There are as many cells as reading threads, so one is free.
        let hazard = self.hazard(local).ok_or(ReadError::Io)?;
        if !handle.0.holds() {
            self.forget(&handle.0.key);
            return Err(ReadError::Ended);
        }
        // SAFETY: the slice outlives the call and is borrowed exclusively.
        let slice = unsafe { FileVolatileSlice::from_raw_ptr(bytes.as_mut_ptr(), bytes.len()) };
        let mut fill = LocalFile { block: local, meta };
        let filled = match waits {
            true => Some(fill.fill(&[slice], offset)),
            false => without_waiting(|| fill.fill(&[slice], offset)),
        };
        let held = handle.0.holds();
        drop(hazard);
        let Some(filled) = filled else {
            return Err(ReadError::WouldWait);
        };
        if !held {
            count(&self.counts.withdrawn);
            self.forget(&handle.0.key);
            return Err(ReadError::Withdrawn);
        }
        match filled {
            Ok(length) if length == bytes.len() => {
                handle.0.used.store(true, Ordering::Relaxed);
                let sum = &local.datanode.bytes;
                sum.fetch_add(length as u64, Ordering::Relaxed);
                Ok(())
            }
            _ => {
                count(&self.counts.io_errors);
                Err(ReadError::Io)
            }
        }
    }
}
