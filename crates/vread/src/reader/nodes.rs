// SPDX-License-Identifier: Apache-2.0
//! The files and directories that the VM knows, by node number.
//!
//! At most [`MAX_NODES`] exist. If a VM does not forget nodes, the oldest ones that are not open are evicted. The VM
//! then gets `ESTALE`, and its kernel looks the name up again.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};

use viola_extents::host::Readahead;
use viola_proto::agent::BlockKey;

use super::block::Block;

use crate::lock::{read, write};
use crate::random::random;

/// Maximum number of nodes; some 500 bytes each.
pub(super) const MAX_NODES: usize = 32_768;

/// Number of the root node.
pub(super) const ROOT: u64 = 1;

/// The kind of a node.
#[derive(Debug)]
pub(super) enum Kind {
    /// The root directory.
    Root,
    /// The directory of a block pool.
    Pool(String),
    /// A block or its checksum file.
    File(FileNode),
}

/// A file.
#[derive(Debug)]
pub(super) struct FileNode {
    pub(super) key: BlockKey,
    /// Whether this is the checksum file.
    pub(super) meta: bool,
    /// Length in bytes; fixed for a block of this name.
    pub(super) size: u64,
    pub(super) block: Mutex<Weak<Block>>,
    pub(super) ahead: Mutex<Readahead>,
    pub(super) opens: AtomicU64,
}

/// A node.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) id: u64,
    pub(super) kind: Kind,
    /// The kernel's look-up count of the node (FUSE nlookup).
    lookups: AtomicU64,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Name {
    Pool(String),
    File(BlockKey, bool),
}

impl Node {
    fn name(&self) -> Option<Name> {
        match &self.kind {
            Kind::Root => None,
            Kind::Pool(pool) => Some(Name::Pool(pool.clone())),
            Kind::File(file) => Some(Name::File(file.key.clone(), file.meta)),
        }
    }

    fn open(&self) -> bool {
        matches!(&self.kind, Kind::File(file) if file.opens.load(Ordering::Relaxed) > 0)
    }
}

#[derive(Debug)]
struct Inner {
    by_id: BTreeMap<u64, Arc<Node>>,
    by_name: HashMap<Name, u64>,
    next: u64,
}

/// All nodes of one connection.
#[derive(Debug)]
pub(super) struct Nodes {
    inner: RwLock<Inner>,
}

impl Nodes {
    /// Numbers nodes from 2, for a kernel without earlier nodes.
    pub(super) fn new() -> Self {
        Self::starting_after(ROOT)
    }

    /// Numbers nodes from a random start, so that a kernel with nodes of another worker gets ESTALE and never another
    /// file's bytes. The start is below 2^63, because numbers are directory offsets, too.
    pub(super) fn from_random() -> Self {
        Self::starting_after((random() >> 2).max(ROOT))
    }

    fn starting_after(last: u64) -> Self {
        let root = Node {
            id: ROOT,
            kind: Kind::Root,
            lookups: AtomicU64::new(1),
        };
        Self {
            inner: RwLock::new(Inner {
                by_id: BTreeMap::from([(ROOT, Arc::new(root))]),
                by_name: HashMap::new(),
                next: last + 1,
            }),
        }
    }

    pub(super) fn get(&self, id: u64) -> Option<Arc<Node>> {
        self.read().by_id.get(&id).cloned()
    }

    /// Returns the directory of a pool and increments its look-up count; `None` when there are too many nodes.
    pub(super) fn pool(&self, pool: &str) -> Option<Arc<Node>> {
        self.get_or_insert(
            Name::Pool(pool.into()),
            |_| true,
            || Kind::Pool(pool.into()),
        )
    }

    /// Returns a file of a block and increments its look-up count; `None` when there are too many nodes.
    pub(super) fn file(&self, block: &Arc<Block>, meta: bool) -> Option<Arc<Node>> {
        let size = block.len(meta);
        let name = Name::File(block.key.clone(), meta);
        let same = |kind: &Kind| matches!(kind, Kind::File(file) if file.size == size);
        self.get_or_insert(name, same, || {
            Kind::File(FileNode {
                key: block.key.clone(),
                meta,
                size,
                block: Mutex::new(Arc::downgrade(block)),
                ahead: Mutex::default(),
                opens: AtomicU64::new(0),
            })
        })
    }

    fn get_or_insert(
        &self,
        name: Name,
        same: impl Fn(&Kind) -> bool,
        kind: impl FnOnce() -> Kind,
    ) -> Option<Arc<Node>> {
        let mut inner = self.write();
        if let Some(node) = inner.by_name.get(&name).and_then(|id| inner.by_id.get(id))
            && same(&node.kind)
        {
            node.lookups.fetch_add(1, Ordering::Relaxed);
            return Some(node.clone());
        }
        if inner.by_id.len() >= MAX_NODES {
            inner.evict()?;
        }
        let id = inner.next;
        inner.next += 1;
        let node = Arc::new(Node {
            id,
            kind: kind(),
            lookups: AtomicU64::new(1),
        });
        inner.by_name.insert(name, id);
        inner.by_id.insert(id, node.clone());
        Some(node)
    }

    /// Decrements a look-up count (FUSE forget).
    pub(super) fn forget(&self, id: u64, times: u64) {
        let Some(node) = self.get(id).filter(|node| node.id != ROOT) else {
            return;
        };
        let less = |lookups: u64| Some(lookups.saturating_sub(times));
        let before = node
            .lookups
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        if before.is_ok_and(|before| before <= times) {
            let mut inner = self.write();
            // The VM may have looked the node up again, or still have it open.
            if node.lookups.load(Ordering::Relaxed) == 0 && !node.open() {
                inner.remove(&node);
            }
        }
    }

    /// Returns up to `max_count` entries of a directory with numbers above `after`, in order.
    pub(super) fn children(&self, folder: &Node, after: u64, max_count: usize) -> Vec<Arc<Node>> {
        let inner = self.read();
        let all = inner.by_id.range(after.saturating_add(1)..);
        all.map(|(_, node)| node)
            .filter(|node| match (&folder.kind, &node.kind) {
                (Kind::Root, Kind::Pool(_)) => true,
                (Kind::Pool(pool), Kind::File(file)) => file.key.pool() == pool,
                _ => false,
            })
            .take(max_count)
            .cloned()
            .collect()
    }

    /// Removes all nodes but the root. Numbers are not reused.
    pub(super) fn clear(&self) {
        let mut inner = self.write();
        inner.by_name.clear();
        inner.by_id.retain(|id, _| *id == ROOT);
    }

    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn len(&self) -> usize {
        self.read().by_id.len()
    }

    fn read(&self) -> RwLockReadGuard<'_, Inner> {
        read(&self.inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Inner> {
        write(&self.inner)
    }
}

impl Inner {
    /// Evicts an eighth of the nodes at once, so that a VM that needs more nodes does not cause a search for each.
    /// Returns `None` when all nodes are open.
    fn evict(&mut self) -> Option<()> {
        let old: Vec<Arc<Node>> = self
            .by_id
            .values()
            .filter(|node| node.id != ROOT && !node.open())
            .take(MAX_NODES / 8)
            .cloned()
            .collect();
        old.iter().for_each(|node| self.remove(node));
        (!old.is_empty()).then_some(())
    }

    fn remove(&mut self, node: &Node) {
        self.by_id.remove(&node.id);
        if let Some(name) = node.name()
            && self.by_name.get(&name) == Some(&node.id)
        {
            self.by_name.remove(&name);
        }
    }
}
