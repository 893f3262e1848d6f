// SPDX-License-Identifier: Apache-2.0
//! The blocks that an agent has named, by slot of the lease table. The number of slots is fixed.

use std::collections::HashMap;
use std::time::Instant;

use viola_extents::CheckedMap;
use viola_proto::agent::{BlockKey, FsId};

use crate::table::Lease;

/// The agent's number of a lease.
pub use viola_proto::agent::Lease as LeaseId;

/// A named block.
#[derive(Debug)]
pub struct Block {
    /// The agent's lease number.
    pub id: LeaseId,
    /// File system that holds the block.
    pub fs: FsId,
    /// Name of the block.
    pub key: BlockKey,
    /// Map of the data file.
    pub data: CheckedMap,
    /// Map of the checksum file.
    pub meta: CheckedMap,
    /// Number of the disk image.
    pub image: u32,
    /// The lease that readers get.
    pub lease: Lease,
}

impl Block {
    fn extents(&self) -> usize {
        extents(&self.data, &self.meta)
    }

    fn bytes(&self) -> u64 {
        self.data.len().saturating_add(self.meta.len())
    }
}

/// Number of extents that a block's two maps keep.
pub fn extents(data: &CheckedMap, meta: &CheckedMap) -> usize {
    data.extents().len() + meta.extents().len()
}

#[derive(Debug)]
enum Slot {
    Free,
    /// Readers may look the block up.
    Named(Box<Block>),
    /// The host withdrew the block; the agent has not withdrawn it yet.
    Ended,
    /// The agent withdrew the block; a read may still be in flight.
    Withdrawn {
        lease: LeaseId,
        since: Instant,
    },
}

/// All slots.
#[derive(Debug)]
pub struct NamedBlocks {
    slots: Vec<Slot>,
    free: Vec<u32>,
    by_lease: HashMap<LeaseId, u32>,
    by_key: HashMap<BlockKey, u32>,
    /// Slots in [`Slot::Withdrawn`].
    waiting: Vec<u32>,
    extents: usize,
    bytes: u64,
    named: usize,
}

impl NamedBlocks {
    /// Creates `slots` free slots.
    pub fn new(slots: u32) -> Self {
        Self {
            slots: (0..slots).map(|_| Slot::Free).collect(),
            free: (0..slots).rev().collect(),
            by_lease: HashMap::new(),
            by_key: HashMap::new(),
            waiting: Vec::new(),
            extents: 0,
            bytes: 0,
            named: 0,
        }
    }

    /// Frees all slots at the end of an epoch.
    pub fn clear(&mut self) {
        if self.by_lease.is_empty() {
            return;
        }
        *self = Self::new(self.slots.len() as u32);
    }

    /// Number of blocks that readers may look up.
    pub fn named(&self) -> usize {
        self.named
    }

    /// Number of slots that are not free.
    #[cfg(test)]
    pub fn held(&self) -> usize {
        self.by_lease.len()
    }

    /// Number of extents of the named blocks.
    pub fn extents(&self) -> usize {
        self.extents
    }

    /// Bytes of the named blocks and their checksum files.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether a lease number is in use.
    pub fn knows(&self, lease: LeaseId) -> bool {
        self.by_lease.contains_key(&lease)
    }

    /// The slot for the next block, if one is free.
    pub fn free_slot(&self) -> Option<u32> {
        self.free.last().copied()
    }

    /// Stores a block in the slot of its lease, which [`NamedBlocks::free_slot`] has returned. An older block of the
    /// same name stays readable for those who read it, but look-ups find the new one.
    pub fn insert(&mut self, block: Block) {
        let slot = block.lease.slot;
        if self.free.last() != Some(&slot) {
            debug_assert!(false, "slot {slot} was not returned by free_slot");
            return;
        }
        self.free.pop();
        self.by_lease.insert(block.id, slot);
        self.by_key.insert(block.key.clone(), slot);
        self.extents += block.extents();
        self.bytes = self.bytes.saturating_add(block.bytes());
        self.named += 1;
        if let Some(place) = self.slots.get_mut(slot as usize) {
            *place = Slot::Named(Box::new(block));
        }
    }

    /// Finds a block by its name.
    pub fn find(&self, key: &BlockKey) -> Option<&Block> {
        match self.slots.get(*self.by_key.get(key)? as usize)? {
            Slot::Named(block) => Some(block),
            _ => None,
        }
    }

    /// Withdraws a block for the agent. Returns the slot whose lease the caller must end if the block was not
    /// withdrawn before, and `true` if the lease number is unknown.
    pub fn withdraw(&mut self, lease: LeaseId, now: Instant) -> (Option<u32>, bool) {
        let Some(&slot) = self.by_lease.get(&lease) else {
            return (None, true);
        };
        if matches!(self.slots.get(slot as usize), Some(Slot::Withdrawn { .. })) {
            return (None, false);
        }
        self.take(slot, Slot::Withdrawn { lease, since: now });
        self.waiting.push(slot);
        (Some(slot), false)
    }

    /// Withdraws all blocks of a file system and returns their slots, whose leases the caller must end. The slots
    /// stay in use until the agent withdraws each block.
    pub fn end(&mut self, fs: FsId) -> Vec<u32> {
        let of_fs = |(i, slot): (usize, &Slot)| match slot {
            Slot::Named(block) if block.fs == fs => Some(i as u32),
            _ => None,
        };
        let ended: Vec<u32> = self.slots.iter().enumerate().filter_map(of_fs).collect();
        for slot in &ended {
            self.take(*slot, Slot::Ended);
        }
        ended
    }

    /// Frees the slots of withdrawn blocks that nobody reads any more, and returns their lease numbers.
    pub fn confirm(&mut self, is_read: impl Fn(u32) -> bool) -> Vec<LeaseId> {
        let mut confirmed = Vec::new();
        let mut still = Vec::new();
        for slot in std::mem::take(&mut self.waiting) {
            let Some(place) = self.slots.get_mut(slot as usize) else {
                continue;
            };
            match place {
                Slot::Withdrawn { .. } if is_read(slot) => still.push(slot),
                Slot::Withdrawn { lease, .. } => {
                    self.by_lease.remove(lease);
                    confirmed.push(*lease);
                    *place = Slot::Free;
                    self.free.push(slot);
                }
                _ => {}
            }
        }
        self.waiting = still;
        confirmed
    }

    /// Number of withdrawn blocks that are still being read, with the slot and time of the oldest.
    pub fn waiting(&self) -> (usize, Option<(u32, Instant)>) {
        let oldest = self
            .waiting
            .iter()
            .filter_map(|slot| match self.slots.get(*slot as usize) {
                Some(Slot::Withdrawn { since, .. }) => Some((*slot, *since)),
                _ => None,
            });
        (self.waiting.len(), oldest.min_by_key(|(_, since)| *since))
    }

    /// Replaces the block of a slot.
    fn take(&mut self, slot: u32, becomes: Slot) {
        let Some(place) = self.slots.get_mut(slot as usize) else {
            return;
        };
        if let Slot::Named(block) = std::mem::replace(place, becomes) {
            if self.by_key.get(&block.key) == Some(&slot) {
                self.by_key.remove(&block.key);
            }
            self.extents -= block.extents();
            self.bytes = self.bytes.saturating_sub(block.bytes());
            self.named -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};
    use viola_extents::Extent;

    fn block(lease: LeaseId, fs: FsId, id: i64, slot: u32) -> Block {
        let one = [Extent {
            logical: 0,
            physical: 4096,
            length: 10,
            zero: false,
        }];
        Block {
            id: lease,
            fs,
            key: BlockKey::new("BP-1", id, 1).unwrap(),
            data: CheckedMap::new(&one, 10, 1 << 20).unwrap(),
            meta: CheckedMap::new(&[], 0, 1 << 20).unwrap(),
            image: 1,
            lease: Lease {
                slot,
                generation: 0,
                epoch: 1,
            },
        }
    }

    fn name(blocks: &mut NamedBlocks, lease: LeaseId, fs: FsId, id: i64) -> bool {
        match blocks.free_slot() {
            Some(slot) => {
                blocks.insert(block(lease, fs, id, slot));
                true
            }
            None => false,
        }
    }

    fn key(id: i64) -> BlockKey {
        BlockKey::new("BP-1", id, 1).unwrap()
    }

    #[test]
    fn a_withdrawn_block_keeps_its_slot_until_nobody_reads_it() {
        let mut blocks = NamedBlocks::new(1);
        let now = Instant::now();
        assert!(name(&mut blocks, 5, 0, 7));
        assert_eq!(blocks.withdraw(5, now), (Some(0), false));
        assert!(blocks.find(&key(7)).is_none() && blocks.free_slot().is_none());
        assert!(blocks.confirm(|_| true).is_empty());
        assert_eq!(blocks.waiting(), (1, Some((0, now))));
        assert_eq!(blocks.withdraw(5, now), (None, false));
        assert_eq!(blocks.confirm(|_| false), [5]);
        assert_eq!((blocks.free_slot(), blocks.held()), (Some(0), 0));
        assert_eq!(blocks.withdraw(5, now), (None, true));
    }

    #[test]
    fn the_newest_name_of_a_block_is_the_one_that_is_found() {
        let mut blocks = NamedBlocks::new(4);
        name(&mut blocks, 1, 0, 7);
        name(&mut blocks, 2, 1, 7);
        assert_eq!(blocks.find(&key(7)).unwrap().id, 2);
        blocks.withdraw(1, Instant::now());
        assert_eq!(blocks.find(&key(7)).unwrap().id, 2);
        blocks.withdraw(2, Instant::now());
        assert!(blocks.find(&key(7)).is_none());
    }

    #[test]
    fn the_end_of_a_file_system_leaves_the_others_and_waits_for_the_agent() {
        let mut blocks = NamedBlocks::new(4);
        name(&mut blocks, 1, 0, 7);
        name(&mut blocks, 2, 1, 8);
        assert_eq!(blocks.end(0).len(), 1);
        assert!(blocks.find(&key(7)).is_none() && blocks.find(&key(8)).is_some());
        assert!(blocks.knows(1) && blocks.confirm(|_| false).is_empty());
        assert!(!blocks.withdraw(1, Instant::now()).1);
        assert_eq!(blocks.confirm(|_| false), [1]);
    }

    proptest! {
        /// Compares with a model: sets of leases by state.
        #[test]
        fn counts_are_right_and_no_slot_is_given_twice(
            steps in proptest::collection::vec((0u8..5, 0u64..12, 0u32..3, 0i64..6), 0..200),
        ) {
            let mut blocks = NamedBlocks::new(6);
            let now = Instant::now();
            let mut named: BTreeMap<LeaseId, (u32, FsId, i64)> = BTreeMap::new();
            let mut ended: BTreeMap<LeaseId, u32> = BTreeMap::new();
            let mut withdrawn: BTreeMap<LeaseId, u32> = BTreeMap::new();
            for (what, lease, fs, id) in steps {
                match what {
                    0 | 1 if !blocks.knows(lease) => if let Some(slot) = blocks.free_slot() {
                        blocks.insert(block(lease, fs, id, slot));
                        named.insert(lease, (slot, fs, id));
                    },
                    2 => {
                        let slot = named.remove(&lease).map(|(s, ..)| s).or_else(|| ended.remove(&lease));
                        let known = slot.is_some() || withdrawn.contains_key(&lease);
                        prop_assert_eq!(blocks.withdraw(lease, now), (slot, !known));
                        withdrawn.extend(slot.map(|s| (lease, s)));
                    }
                    3 => {
                        let mut slots = blocks.end(fs);
                        let of_fs: Vec<LeaseId> = named.iter().filter(|(_, v)| v.1 == fs).map(|(l, _)| *l).collect();
                        let mut expected = Vec::new();
                        for l in of_fs {
                            if let Some((s, ..)) = named.remove(&l) {
                                expected.push(s);
                                ended.insert(l, s);
                            }
                        }
                        slots.sort_unstable();
                        expected.sort_unstable();
                        prop_assert_eq!(slots, expected);
                    }
                    4 => {
                        let read = fs;
                        let confirmed: BTreeSet<LeaseId> = blocks.confirm(|s| s == read).into_iter().collect();
                        let expected: BTreeSet<LeaseId> = withdrawn.iter().filter(|(_, s)| **s != read).map(|(l, _)| *l).collect();
                        prop_assert_eq!(&confirmed, &expected);
                        withdrawn.retain(|l, _| !confirmed.contains(l));
                    }
                    _ => {}
                }
                prop_assert_eq!(blocks.named(), named.len());
                prop_assert_eq!(blocks.extents(), named.len());
                prop_assert_eq!(blocks.bytes(), 10 * named.len() as u64);
                prop_assert_eq!(blocks.held(), named.len() + ended.len() + withdrawn.len());
                let mut used: Vec<u32> = named.values().map(|v| v.0).chain(ended.values().copied()).chain(withdrawn.values().copied()).collect();
                used.sort_unstable();
                let before = used.len();
                used.dedup();
                prop_assert_eq!(used.len(), before);
                for id in 0..6 {
                    if let Some(found) = blocks.find(&key(id)) {
                        prop_assert!(named.get(&found.id).is_some_and(|v| v.2 == id));
                    }
                }
            }
        }
    }
}
