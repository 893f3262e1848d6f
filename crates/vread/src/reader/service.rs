// SPDX-License-Identifier: Apache-2.0
//! What the connections of one reader share: the DataNodes that it may read and the blocks it knows.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use viola_extents::host::Image;
use viola_proto::agent::BlockKey;

use super::block::{Block, Datanode};
use super::cache::Cache;
use crate::control::ReaderStat;
use crate::hazard::{Cells, Hazard};
use crate::lookup::ask_all;

/// How long agent workers may take to answer. A healthy one takes far below a millisecond.
const ANSWER: Duration = Duration::from_millis(300);

/// Counts since the start.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) connected: AtomicU64,
    pub(super) requests: AtomicU64,
    pub(super) reads: AtomicU64,
    pub(super) open: AtomicU64,
    pub(super) withdrawn: AtomicU64,
    pub(super) unknown: AtomicU64,
    pub(super) malformed: AtomicU64,
    pub(super) not_allowed: AtomicU64,
    pub(super) bad_answers: AtomicU64,
    pub(super) too_many: AtomicU64,
    pub(super) io_errors: AtomicU64,
}

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Everything that outlives a connection of the VM.
#[derive(Debug)]
pub struct Service {
    datanodes: RwLock<Arc<Vec<Arc<Datanode>>>>,
    cache: Mutex<Cache>,
    cells: Cells,
    /// Hazard cells that are free, one bit each.
    free: AtomicU64,
    pub(super) counts: Counts,
}

impl Service {
    /// A reader that publishes what it reads in these cells, and may read nothing yet.
    pub fn new(cells: Cells) -> Self {
        let free = u64::MAX >> (u64::BITS as usize - cells.count());
        Self {
            datanodes: RwLock::default(),
            cache: Mutex::default(),
            cells,
            free: AtomicU64::new(free),
            counts: Counts::default(),
        }
    }

    /// Lets the blocks of a DataNode VM be read. One of that name that was there before is replaced.
    ///
    /// # Errors
    /// When `table` is no table.
    pub fn add(&self, name: &str, socket: OwnedFd, table: OwnedFd) -> std::io::Result<()> {
        let new = Arc::new(Datanode::new(name.into(), socket, table)?);
        self.replace(name, Some(new));
        Ok(())
    }

    /// Lets the blocks of a DataNode VM not be read any more.
    pub fn remove(&self, name: &str) {
        self.replace(name, None);
    }

    fn replace(&self, name: &str, new: Option<Arc<Datanode>>) {
        let mut datanodes = self
            .datanodes
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let (old, kept): (Vec<_>, Vec<_>) = datanodes.iter().cloned().partition(|d| d.name == name);
        // Who replaces itself keeps its disks until it is told others.
        if let (Some(old), Some(new)) = (old.first(), &new) {
            let images = old.image_ids().into_iter();
            new.set_images(images.filter_map(|id| Some((id, old.image(id)?))).collect());
            new.bytes
                .store(old.bytes.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        old.iter().for_each(|datanode| datanode.close());
        *datanodes = Arc::new(kept.into_iter().chain(new).collect());
    }

    /// Sets the disk images of a DataNode VM; false when there is no such VM.
    pub fn set_images(&self, name: &str, images: HashMap<u32, Arc<Image>>) -> bool {
        match self.datanodes().iter().find(|d| d.name == name) {
            Some(datanode) => {
                datanode.set_images(images);
                true
            }
            None => false,
        }
    }

    fn datanodes(&self) -> Arc<Vec<Arc<Datanode>>> {
        let datanodes = self
            .datanodes
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        datanodes.clone()
    }

    /// The block of this name if some DataNode VM has it now.
    pub(super) fn find(&self, key: &BlockKey) -> Option<Arc<Block>> {
        if let Some(block) = self.cache().get(key) {
            return Some(block);
        }
        let datanodes = self.datanodes();
        let clients: Vec<_> = datanodes.iter().map(|d| &d.client).collect();
        let Some((index, found)) = ask_all(&clients, key, ANSWER) else {
            count(&self.counts.unknown);
            return None;
        };
        let Some(block) = Block::new(key.clone(), &datanodes[index], &found) else {
            count(&self.counts.bad_answers);
            return None;
        };
        let block = Arc::new(block);
        self.cache().put(&block);
        Some(block)
    }

    /// Forgets a block whose lease has ended.
    pub(super) fn forget(&self, key: &BlockKey) {
        self.cache().forget(key);
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes that a block is read, and takes a free cell for that. `None` when all are in use.
    pub(super) fn hazard(&self, block: &Block) -> Option<Held<'_>> {
        let mut free = self.free.load(Ordering::Relaxed);
        loop {
            let bit = free & free.wrapping_neg();
            if bit == 0 {
                return None;
            }
            let new = free & !bit;
            match self
                .free
                .compare_exchange_weak(free, new, Ordering::Acquire, Ordering::Relaxed)
            {
                Err(now) => free = now,
                Ok(_) => {
                    let cell = bit.trailing_zeros() as usize;
                    let (table, slot) = (block.datanode.table_id(), block.lease.slot);
                    return Some(Held {
                        hazard: self.cells.publish(cell, table, slot),
                        bit,
                        free: &self.free,
                    });
                }
            }
        }
    }

    /// What there is to tell.
    pub fn stat(&self) -> ReaderStat {
        let counts = &self.counts;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let datanodes = self.datanodes();
        let refusals = [
            ("not known", &counts.unknown),
            ("malformed", &counts.malformed),
            ("not allowed", &counts.not_allowed),
            ("bad answer", &counts.bad_answers),
            ("too many files", &counts.too_many),
            ("i/o error", &counts.io_errors),
        ];
        ReaderStat {
            connected: get(&counts.connected) > 0,
            datanodes: datanodes.iter().map(|d| d.name.clone()).collect(),
            requests: get(&counts.requests),
            reads: get(&counts.reads),
            bytes: datanodes
                .iter()
                .map(|d| (d.name.clone(), get(&d.bytes)))
                .collect(),
            open: get(&counts.open),
            withdrawn: get(&counts.withdrawn),
            refusals: refusals
                .iter()
                .filter(|(_, counter)| get(counter) > 0)
                .map(|(name, counter)| ((*name).to_owned(), get(counter)))
                .collect(),
            images: datanodes
                .iter()
                .map(|d| (d.name.clone(), d.image_ids()))
                .collect(),
        }
    }

    /// How many blocks are kept.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn cached(&self) -> usize {
        self.cache().len()
    }
}

/// A hazard and its cell; both are free again when this is dropped.
#[derive(Debug)]
pub(super) struct Held<'a> {
    hazard: Option<Hazard<'a>>,
    bit: u64,
    free: &'a AtomicU64,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        drop(self.hazard.take());
        self.free.fetch_or(self.bit, Ordering::Release);
    }
}
