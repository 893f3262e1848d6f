// SPDX-License-Identifier: Apache-2.0
//! Blocks of this host's disks as plain bytes, for other hosts.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fuse_backend_rs::file_buf::FileVolatileSlice;
use viola_proto::agent::BlockKey;

use super::block::{Block, Near, Place};
use super::fill::{Fill, Fills, hurried};
use super::service::{Service, count};

/// Why there are no bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failed {
    /// The lease had ended before.
    Ended,
    /// It ended while they were read.
    Withdrawn,
    /// They are not in memory, and the thread does not wait.
    WouldWait,
    /// The disk, or a place outside of the file.
    Io,
}

/// A block that was looked up.
#[derive(Debug, Clone)]
pub(crate) struct Handle(Arc<Block>);

impl Handle {
    fn near(&self) -> Option<&Near> {
        match &self.0.place {
            Place::Near(near) => Some(near),
            Place::Distant(_) => None,
        }
    }

    /// Length of one of its two files, bytes.
    pub(crate) fn len(&self, meta: bool) -> u64 {
        self.0.len(meta)
    }

    /// Whose it is.
    pub(crate) fn datanode(&self) -> &str {
        self.near().map_or("", |near| &near.datanode.name)
    }

    /// Brings bytes into the page cache.
    pub(crate) fn prefetch(&self, meta: bool, range: Range<u64>) {
        if let Some(near) = self.near() {
            near.image.prefetch(near.map(meta), range);
        }
    }
}

impl Service {
    /// The block of this name, if it is known without asking and its DataNode VM is one of these.
    pub(crate) fn known_plain(&self, key: &BlockKey, may: &dyn Fn(&str) -> bool) -> Option<Handle> {
        let handle = Handle(self.known(key)?);
        handle
            .near()
            .is_some_and(|n| may(&n.datanode.name))
            .then_some(handle)
    }

    /// The block of this name, if one of these DataNode VMs has it. Waits for agent workers.
    pub(crate) fn find_plain(&self, key: &BlockKey, may: &dyn Fn(&str) -> bool) -> Option<Handle> {
        if let Some(handle) = self.known_plain(key, may) {
            return Some(handle);
        }
        let Some(block) = self.find_near(key, may) else {
            count(&self.counts.unknown);
            return None;
        };
        self.keep(&block);
        Some(Handle(block))
    }

    /// Reads as many bytes as fit into `bytes`, all of them within the file. The lease held before and after.
    ///
    /// # Errors
    /// [`Failed`]; what is in `bytes` then is not to be used.
    pub(crate) fn read_plain(
        &self,
        handle: &Handle,
        meta: bool,
        offset: u64,
        bytes: &mut [u8],
        waits: bool,
    ) -> Result<(), Failed> {
        let near = handle.near().ok_or(Failed::Io)?;
        let end = offset.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > handle.len(meta)) {
            return Err(Failed::Io);
        }
        // As many cells as threads that come here: one is free.
        let hazard = self.hazard(near).ok_or(Failed::Io)?;
        if !handle.0.holds() {
            self.forget(&handle.0.key);
            return Err(Failed::Ended);
        }
        // SAFETY: the slice outlives the call, and nobody else has it.
        let slice = unsafe { FileVolatileSlice::from_raw_ptr(bytes.as_mut_ptr(), bytes.len()) };
        let mut fill = Fill { block: near, meta };
        let filled = match waits {
            true => Some(fill.fill(&[slice], offset)),
            false => hurried(|| fill.fill(&[slice], offset)),
        };
        let held = handle.0.holds();
        drop(hazard);
        let Some(filled) = filled else {
            return Err(Failed::WouldWait);
        };
        if !held {
            count(&self.counts.withdrawn);
            self.forget(&handle.0.key);
            return Err(Failed::Withdrawn);
        }
        match filled {
            Ok(length) if length == bytes.len() => {
                handle.0.used.store(true, Ordering::Relaxed);
                let sum = &near.datanode.bytes;
                sum.fetch_add(length as u64, Ordering::Relaxed);
                Ok(())
            }
            _ => {
                count(&self.counts.io_errors);
                Err(Failed::Io)
            }
        }
    }
}
