// SPDX-License-Identifier: Apache-2.0
//! A block that was looked up: its lease and where its bytes are.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use viola_extents::host::Image;
use viola_extents::{CheckedMap, Extent};
use viola_proto::agent::{BlockKey, FileMap};

use super::remote::RemoteBlock;
use crate::lookup::{Client, Found};
use crate::table::{self, Lease};

/// A VM whose blocks may be read.
#[derive(Debug)]
pub(super) struct Datanode {
    pub(super) name: String,
    pub(super) client: Client,
    table: table::View,
    images: RwLock<HashMap<u32, Arc<Image>>>,
    /// Set when its blocks may not be read any more.
    closed: AtomicBool,
    /// Bytes read of its blocks.
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
        *self.images.write().unwrap_or_else(PoisonError::into_inner) = images;
    }

    pub(super) fn image(&self, id: u32) -> Option<Arc<Image>> {
        let images = self.images.read().unwrap_or_else(PoisonError::into_inner);
        images.get(&id).cloned()
    }

    pub(super) fn image_ids(&self) -> Vec<u32> {
        let images = self.images.read().unwrap_or_else(PoisonError::into_inner);
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

/// Where on this host a block's bytes are.
#[derive(Debug)]
pub(super) struct LocalBlock {
    pub(super) datanode: Arc<Datanode>,
    pub(super) lease: Lease,
    pub(super) image: Arc<Image>,
    data: CheckedMap,
    meta: CheckedMap,
}

impl LocalBlock {
    /// Where the bytes of one of its two files are.
    pub(super) fn map(&self, meta: bool) -> &CheckedMap {
        if meta { &self.meta } else { &self.data }
    }
}

/// Where a block is.
#[derive(Debug)]
pub(super) enum Location {
    /// On a disk of this host.
    Local(LocalBlock),
    /// On another host.
    Remote(RemoteBlock),
}

/// A block and its checksums, as its agent named them.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) key: BlockKey,
    pub(super) location: Location,
    /// Whether it was read since it was last considered for eviction.
    pub(super) used: AtomicBool,
}

impl Block {
    /// Checks what an agent worker answered; `None` when it names an image that this worker does not
    /// have or bytes outside of it.
    pub(super) fn new(key: BlockKey, datanode: &Arc<Datanode>, found: &Found) -> Option<Self> {
        let image = datanode.image(found.image)?;
        // The block may be newer than what is known of the image; old tables would give old bytes.
        image.refresh().ok()?;
        let check = |map: &FileMap| {
            let extents: Vec<Extent> = map
                .extents
                .iter()
                .map(|e| Extent {
                    logical: e.logical,
                    physical: e.physical,
                    length: e.length,
                    zero: e.zero,
                })
                .collect();
            image.check(&extents, map.size).ok()
        };
        let local = LocalBlock {
            lease: found.lease,
            data: check(&found.data)?,
            meta: check(&found.meta)?,
            datanode: datanode.clone(),
            image,
        };
        Some(Self::with_location(key, Location::Local(local)))
    }

    /// A block at a place.
    pub(super) fn with_location(key: BlockKey, location: Location) -> Self {
        Self {
            key,
            location,
            used: AtomicBool::new(true),
        }
    }

    /// Whether it may be read. Bytes of a disk of this host count only when this holds after they were
    /// read, too; another host looks at that itself.
    pub(super) fn holds(&self) -> bool {
        match &self.location {
            Location::Local(local) => local.datanode.holds(local.lease),
            Location::Remote(remote) => remote.holds(),
        }
    }

    /// Length of one of its two files, bytes.
    pub(super) fn len(&self, meta: bool) -> u64 {
        match &self.location {
            Location::Local(local) => local.map(meta).len(),
            Location::Remote(remote) => remote.len(meta),
        }
    }

    /// What it costs to keep.
    pub(super) fn extents(&self) -> usize {
        match &self.location {
            Location::Local(local) => local.data.extents().len() + local.meta.extents().len(),
            Location::Remote(_) => 1,
        }
    }
}
