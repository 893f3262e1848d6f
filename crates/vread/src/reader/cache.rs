// SPDX-License-Identifier: Apache-2.0
//! A bounded cache of blocks that were looked up.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use viola_proto::agent::BlockKey;

use super::block::Block;

/// Maximum number of blocks.
const MAX_BLOCKS: usize = 16_384;
/// Maximum number of extents of all blocks, 32 bytes each.
const MAX_EXTENTS: usize = 1 << 20;

/// Blocks by name. Eviction is by second chance: a block that was read since the last round stays.
#[derive(Debug, Default)]
pub(super) struct Cache {
    blocks: HashMap<BlockKey, Arc<Block>>,
    order: VecDeque<BlockKey>,
    extents: usize,
}

impl Cache {
    /// Returns a block whose lease is valid.
    pub(super) fn get(&mut self, key: &BlockKey) -> Option<Arc<Block>> {
        let block = self.blocks.get(key)?;
        if block.holds() {
            block.used.store(true, Ordering::Relaxed);
            return Some(block.clone());
        }
        self.forget(key);
        None
    }

    pub(super) fn put(&mut self, block: &Arc<Block>) {
        self.forget(&block.key);
        while self.blocks.len() >= MAX_BLOCKS || self.extents + block.extents() > MAX_EXTENTS {
            let Some(key) = self.order.pop_front() else {
                break;
            };
            match self.blocks.get(&key) {
                Some(old) if old.used.swap(false, Ordering::Relaxed) => self.order.push_back(key),
                _ => self.forget(&key),
            }
        }
        self.extents += block.extents();
        self.order.push_back(block.key.clone());
        self.blocks.insert(block.key.clone(), block.clone());
    }

    /// Forgets all blocks that `keep` does not accept.
    pub(super) fn retain(&mut self, keep: impl Fn(&Block) -> bool) {
        self.blocks.retain(|_, block| keep(block));
        self.order.retain(|key| self.blocks.contains_key(key));
        self.extents = self.blocks.values().map(|b| b.extents()).sum();
    }

    pub(super) fn forget(&mut self, key: &BlockKey) {
        if let Some(block) = self.blocks.remove(key) {
            self.extents -= block.extents();
        }
        // Stale names in the order are skipped when their turn comes; this keeps their number bounded.
        if self.order.len() > 2 * self.blocks.len() + 64 {
            self.order.retain(|key| self.blocks.contains_key(key));
        }
    }

    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }
}
