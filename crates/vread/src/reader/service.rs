// SPDX-License-Identifier: Apache-2.0
//! State that all connections of a reader share: the DataNode VMs that it may read, and the blocks that it knows.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::time::Duration;

use viola_extents::host::Image;
use viola_proto::agent::BlockKey;

use super::block::{Block, Datanode, LocalBlock, Location};
use super::cache::Cache;
use super::gate::Gate;
use super::guest_buffers::{must_not_wait, will_be_retried, would_wait};
use super::remote::PeerLink;
use crate::control::{ReaderStat, StreamState};
use crate::hazard::{CellPool, Cells, HeldHazard};
use crate::lock::{lock, read, write};
use crate::lookup::ask_all;

/// Time limit for answers of agent workers. A healthy one needs far less than a millisecond.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(300);

/// Counts since the worker's start.
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
    /// Look-ups of a connection that the daemon has not confirmed.
    pub(super) not_confirmed: AtomicU64,
    pub(super) bad_answers: AtomicU64,
    /// Blocks on a disk that the daemon has not handed over yet, or has taken away.
    no_disk: AtomicU64,
    pub(super) too_many: AtomicU64,
    pub(super) io_errors: AtomicU64,
    /// Streams without and with a session.
    silent: AtomicU64,
    streams: AtomicU64,
}

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// The state that outlives a connection of the VM.
#[derive(Debug)]
pub struct Service {
    datanodes: RwLock<Arc<Vec<Arc<Datanode>>>>,
    cache: Mutex<Cache>,
    hazards: CellPool,
    /// The link to the peer worker.
    remote: RwLock<Option<Arc<PeerLink>>>,
    /// Which connections of a VMM find blocks; `None`: all.
    gate: Option<Gate>,
    pub(super) counts: Counts,
}

impl Service {
    /// Creates a reader with these hazard cells and without DataNode VMs.
    pub fn new(cells: Cells) -> Self {
        Self {
            datanodes: RwLock::default(),
            cache: Mutex::default(),
            hazards: CellPool::new(cells),
            remote: RwLock::default(),
            gate: None,
            counts: Counts::default(),
        }
    }

    /// Creates a reader whose VMM finds no block before [`Order::Serve`](crate::control::Order::Serve).
    pub(super) fn with_gate(cells: Cells) -> Self {
        Self {
            gate: Some(Gate::default()),
            ..Self::new(cells)
        }
    }

    /// The gate for connections of a VMM, if there is one.
    pub(super) fn gate(&self) -> Option<&Gate> {
        self.gate.as_ref()
    }

    /// Adds a DataNode VM, or replaces one with the same name.
    ///
    /// # Errors
    /// When `table` is not a lease table.
    pub fn add(&self, name: &str, socket: OwnedFd, table: OwnedFd) -> std::io::Result<()> {
        let new = Arc::new(Datanode::new(name.into(), socket, table)?);
        self.replace(name, Some(new));
        Ok(())
    }

    /// Removes a DataNode VM.
    pub fn remove(&self, name: &str) {
        self.replace(name, None);
    }

    fn replace(&self, name: &str, new: Option<Arc<Datanode>>) {
        let mut datanodes = write(&self.datanodes);
        let (old, kept): (Vec<_>, Vec<_>) = datanodes.iter().cloned().partition(|d| d.name == name);
        // A replaced VM keeps its images until the daemon sends others.
        if let (Some(old), Some(new)) = (old.first(), &new) {
            let images = old.image_ids().into_iter();
            new.set_images(images.filter_map(|id| Some((id, old.image(id)?))).collect());
            new.bytes
                .store(old.bytes.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        old.iter().for_each(|datanode| datanode.close());
        *datanodes = Arc::new(kept.into_iter().chain(new).collect());
        drop(datanodes);
        self.close_images();
    }

    /// Closes images that the process may not hold any more. A read in flight closes its own when it ends.
    fn close_images(&self) {
        self.cache().retain(Block::has_image);
    }

    /// Sets the disk images of a DataNode VM and closes the previous ones; false when the VM is unknown.
    pub fn set_images(&self, name: &str, images: HashMap<u32, Arc<Image>>) -> bool {
        match self.datanodes().iter().find(|d| d.name == name) {
            Some(datanode) => {
                datanode.set_images(images);
                self.close_images();
                true
            }
            None => false,
        }
    }

    fn datanodes(&self) -> Arc<Vec<Arc<Datanode>>> {
        let datanodes = read(&self.datanodes);
        datanodes.clone()
    }

    /// Sets the socket and memory for blocks of other hosts; `None` disables them.
    ///
    /// # Errors
    /// When the memory is not one of [`crate::peer::new_memory`].
    pub fn set_remote(&self, ends: Option<(OwnedFd, OwnedFd)>) -> std::io::Result<()> {
        let new = match ends {
            Some((socket, memory)) => Some(Arc::new(PeerLink::new(socket, memory)?)),
            None => None,
        };
        let mut remote = write(&self.remote);
        if let (Some(new), Some(old)) = (&new, &*remote) {
            new.take_counts(old);
        }
        if let Some(old) = std::mem::replace(&mut *remote, new) {
            old.close();
        }
        Ok(())
    }

    fn remote(&self) -> Option<Arc<PeerLink>> {
        let remote = read(&self.remote);
        remote.clone()
    }

    /// Finds a block: on this host if possible, else on another one.
    pub(super) fn find(&self, key: &BlockKey) -> Option<Arc<Block>> {
        if let Some(block) = self.cache().get(key) {
            return Some(block);
        }
        let near = self.query_local(key, &|_| true);
        let block = near.or_else(|| {
            let remote = self.remote()?;
            if must_not_wait() {
                // This only marks the request: another thread serves it again.
                let _ = would_wait();
                return None;
            }
            let distant = PeerLink::find(&remote, key)?;
            Some(Arc::new(Block::with_location(
                key.clone(),
                Location::Remote(distant),
            )))
        });
        match &block {
            Some(block) => self.keep(block),
            None if will_be_retried() => {}
            None => count(&self.counts.unknown),
        }
        block
    }

    /// Asks the agent workers of the DataNode VMs accepted by `may` for a block.
    pub(super) fn query_local(
        &self,
        key: &BlockKey,
        may: &dyn Fn(&str) -> bool,
    ) -> Option<Arc<Block>> {
        let datanodes = self.datanodes();
        let allowed: Vec<_> = datanodes.iter().filter(|d| may(&d.name)).collect();
        let clients: Vec<_> = allowed.iter().map(|d| &d.client).collect();
        let (index, found) = ask_all(&clients, key, ANSWER_TIMEOUT)?;
        let block = Block::new(key.clone(), allowed[index], &found);
        if block.is_none() {
            count(match allowed[index].image(found.image) {
                Some(_) => &self.counts.bad_answers,
                None => &self.counts.no_disk,
            });
        }
        block.map(Arc::new)
    }

    /// Returns a block from the cache if its lease is valid.
    pub(super) fn cached(&self, key: &BlockKey) -> Option<Arc<Block>> {
        self.cache().get(key)
    }

    /// Adds a block to the cache, unless its disk was taken away meanwhile.
    pub(super) fn keep(&self, block: &Arc<Block>) {
        let mut cache = self.cache();
        // Under the lock: whoever takes the disk away goes through the cache afterwards.
        if block.has_image() {
            cache.put(block);
        }
    }

    /// Removes a block whose lease has ended from the cache.
    pub(super) fn forget(&self, key: &BlockKey) {
        self.cache().forget(key);
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        lock(&self.cache)
    }

    /// Takes a free hazard cell and publishes that a block is read; `None` when no cell is free.
    pub(super) fn hazard(&self, block: &LocalBlock) -> Option<HeldHazard<'_>> {
        let (table, slot) = (block.datanode.table_id(), block.lease.slot);
        self.hazards.take(table, slot)
    }

    /// Counts a stream's change of state; `None` stands for before its start and after its end.
    pub(super) fn record_stream_state(
        &self,
        before: Option<StreamState>,
        now: Option<StreamState>,
    ) {
        let of = |line: StreamState| match line {
            StreamState::Connected => Some(&self.counts.streams),
            StreamState::Silent => Some(&self.counts.silent),
            StreamState::NoStream => None,
        };
        if let Some(counter) = now.and_then(of) {
            count(counter);
        }
        if let Some(counter) = before.and_then(of) {
            counter.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Returns the statistics.
    pub fn stat(&self) -> ReaderStat {
        let counts = &self.counts;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let datanodes = self.datanodes();
        let remote = self.remote();
        let refusals = [
            ("not known", &counts.unknown),
            ("malformed", &counts.malformed),
            ("not allowed", &counts.not_allowed),
            ("not confirmed", &counts.not_confirmed),
            ("bad answer", &counts.bad_answers),
            ("disk not here", &counts.no_disk),
            ("too many files", &counts.too_many),
            ("i/o error", &counts.io_errors),
        ];
        let (connection, confirmed) = self.gate().map(Gate::state).unwrap_or_default();
        ReaderStat {
            connection,
            confirmed,
            connected: get(&counts.connected) + get(&counts.streams) > 0,
            stream: match (get(&counts.streams), get(&counts.silent)) {
                (0, 0) => StreamState::NoStream,
                (0, _) => StreamState::Silent,
                _ => StreamState::Connected,
            },
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
            remote: remote.is_some(),
            remote_reads: remote.as_ref().map_or(0, |r| r.reads()),
            remote_bytes: remote.as_ref().map(|r| r.bytes()).unwrap_or_default(),
            remote_errors: remote.as_ref().map_or(0, |r| r.errors()),
        }
    }

    /// Number of blocks in the cache.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn cached_blocks(&self) -> usize {
        self.cache().len()
    }
}
