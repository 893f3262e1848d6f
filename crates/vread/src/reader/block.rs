// SPDX-License-Identifier: Apache-2.0
//! A block that was looked up: its lease and the place of its bytes.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

use viola_extents::CheckedMap;
use viola_extents::host::Image;
use viola_proto::agent::{BlockKey, FileMap};

use super::remote::RemoteBlock;
use crate::images::extents;
use crate::lock::{read, write};
use crate::lookup::{Client, Found};
use crate::table::{self, Lease};

/// A DataNode VM whose blocks may be read.
#[derive(Debug)]
pub(super) struct Datanode {
    pub(super) name: String,
    pub(super) client: Client,
    table: table::View,
    images: RwLock<HashMap<u32, Arc<Image>>>,
    /// Set when the VM's blocks may no longer be read.
    closed: AtomicBool,
    /// Bytes read from its blocks.
    pub(super) bytes: AtomicU64,
}

impl Datanode {
    pub(super) fn new(name: String, socket: OwnedFd, table: OwnedFd) -> std::io::Result<Self> {
        Ok(Self {
            name,
            client: Client::new(socket),
            table: table::View::map(table)?,
            images: RwLock::default(),
            closed: AtomicBool::new(false),
            bytes: AtomicU64::new(0),
        })
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    pub(super) fn set_images(&self, images: HashMap<u32, Arc<Image>>) {
        *write(&self.images) = images;
    }

    pub(super) fn image(&self, id: u32) -> Option<Arc<Image>> {
        let images = read(&self.images);
        images.get(&id).cloned()
    }

    /// Whether the daemon lets this process hold the image.
    fn has(&self, image: &Arc<Image>) -> bool {
        let images = read(&self.images);
        !self.closed.load(Ordering::SeqCst) && images.values().any(|i| Arc::ptr_eq(i, image))
    }

    pub(super) fn image_ids(&self) -> Vec<u32> {
        let images = read(&self.images);
        let mut ids: Vec<u32> = images.keys().copied().collect();
        ids.sort_unstable();
        ids
    }

    pub(super) fn table_id(&self) -> u32 {
        self.table.id()
    }

    fn holds(&self, lease: Lease) -> bool {
        !self.closed.load(Ordering::SeqCst) && self.table.holds(lease)
    }
}

/// A block on a disk of this host.
#[derive(Debug)]
pub(super) struct LocalBlock {
    pub(super) datanode: Arc<Datanode>,
    pub(super) lease: Lease,
    pub(super) image: Arc<Image>,
    data: CheckedMap,
    meta: CheckedMap,
}

impl LocalBlock {
    /// The map of the data file or of the checksum file.
    pub(super) fn map(&self, meta: bool) -> &CheckedMap {
        if meta { &self.meta } else { &self.data }
    }
}

/// The place of a block.
#[derive(Debug)]
pub(super) enum Location {
    /// On a disk of this host.
    Local(LocalBlock),
    /// On another host.
    Remote(RemoteBlock),
}

/// A block and its checksum file, as the agent named them.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) key: BlockKey,
    pub(super) location: Location,
    /// Whether the block was read since it was last considered for eviction.
    pub(super) used: AtomicBool,
}

impl Block {
    /// Checks the answer of an agent worker; `None` when it names an unknown image or bytes outside the image.
    pub(super) fn new(key: BlockKey, datanode: &Arc<Datanode>, found: &Found) -> Option<Self> {
        let image = datanode.image(found.image)?;
        // The block may be newer than the image's tables; old tables would give wrong bytes.
        image.refresh().ok()?;
        let check = |map: &FileMap| image.check(&extents(map), map.size).ok();
        let local = LocalBlock {
            lease: found.lease,
            data: check(&found.data)?,
            meta: check(&found.meta)?,
            datanode: datanode.clone(),
            image,
        };
        Some(Self::with_location(key, Location::Local(local)))
    }

    /// Creates a block at a place.
    pub(super) fn with_location(key: BlockKey, location: Location) -> Self {
        Self {
            key,
            location,
            used: AtomicBool::new(true),
        }
    }

    /// Whether the block may be read. Bytes from a disk of this host are valid only if this is still true after the
    /// read; another host makes this check itself.
    pub(super) fn holds(&self) -> bool {
        match &self.location {
            Location::Local(local) => local.datanode.holds(local.lease),
            Location::Remote(remote) => remote.holds(),
        }
    }

    /// Whether the block's image may stay open in this process.
    pub(super) fn has_image(&self) -> bool {
        match &self.location {
            Location::Local(local) => local.datanode.has(&local.image),
            Location::Remote(_) => true,
        }
    }

    /// Length of the data file or of the checksum file, bytes.
    pub(super) fn len(&self, meta: bool) -> u64 {
        match &self.location {
            Location::Local(local) => local.map(meta).len(),
            Location::Remote(remote) => remote.len(meta),
        }
    }

    /// Number of extents that the block keeps in memory.
    pub(super) fn extents(&self) -> usize {
        match &self.location {
            Location::Local(local) => local.data.extents().len() + local.meta.extents().len(),
            Location::Remote(_) => 1,
        }
    }
}
