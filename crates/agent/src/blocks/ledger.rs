// SPDX-License-Identifier: Apache-2.0
//! All blocks: which are linked and named, within the bounds, and what to send to the host.

mod host;
mod outcomes;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use viola_proto::agent::{FsId, Lease, Limits, Stats, WithdrawReason};

use super::block::{Block, Disposition, Effect, State, Timing};
use super::rate::RateLimiter;
use super::types::{Action, BlockMaps, Bounds, EntryId, Fingerprint, Location};
use crate::clock::Millis;

/// One block of the ledger.
#[derive(Debug)]
pub struct Entry {
    /// Where the block lies, or lay.
    pub location: Location,
    /// The identity of its files, once they are linked.
    pub fingerprint: Option<Fingerprint>,
    block: Block<BlockMaps>,
    /// The files are gone from their directory, so that only the agent's links may hold them.
    gone: bool,
}

/// All blocks of this agent.
#[derive(Debug)]
pub struct Ledger {
    times: Timing,
    bounds: Bounds,
    limits: Option<Limits>,
    proven: BTreeSet<FsId>,
    entries: HashMap<EntryId, Entry>,
    by_block: HashMap<(FsId, i64), Vec<EntryId>>,
    by_lease: HashMap<Lease, EntryId>,
    due: BTreeSet<(Millis, EntryId)>,
    /// Blocks to be linked as soon as there is room, by file system.
    link_queue: BTreeMap<FsId, VecDeque<EntryId>>,
    /// Blocks that are ready to be named.
    name_queue: VecDeque<EntryId>,
    actions: Vec<Action>,
    next_entry: EntryId,
    next_lease: Lease,
    linked: usize,
    held_bytes: u64,
    /// Bytes that only links of earlier runs hold, by file system.
    earlier_bytes: BTreeMap<FsId, u64>,
    rate: RateLimiter,
    unanswered: usize,
    stats: Stats,
    paused: bool,
}

/// While the host is absent, the ledger checks due leases again after this time.
const ABSENT_HOST_RECHECK_INTERVAL: Millis = 10_000;

/// Maximum number of names without an answer of the host.
const MAX_UNANSWERED_NAMES: usize = 256;

impl Ledger {
    /// An empty ledger.
    pub fn new(times: Timing, bounds: Bounds) -> Self {
        Self {
            times,
            bounds,
            limits: None,
            proven: BTreeSet::new(),
            entries: HashMap::new(),
            by_block: HashMap::new(),
            by_lease: HashMap::new(),
            due: BTreeSet::new(),
            link_queue: BTreeMap::new(),
            name_queue: VecDeque::new(),
            actions: Vec::new(),
            next_entry: 1,
            next_lease: 1,
            linked: 0,
            held_bytes: 0,
            earlier_bytes: BTreeMap::new(),
            rate: RateLimiter::default(),
            unanswered: 0,
            stats: Stats::default(),
            paused: false,
        }
    }

    /// An entry.
    pub fn entry(&self, id: EntryId) -> Option<&Entry> {
        self.entries.get(&id)
    }

    /// Location and extents of a block that has just been named.
    pub fn name_message_parts(&self, id: EntryId) -> Option<(&Location, &BlockMaps)> {
        let entry = self.entries.get(&id)?;
        match entry.block.state() {
            State::Named { map, .. } => Some((&entry.location, map)),
            _ => None,
        }
    }

    /// All entries with this block id on a file system: one for each generation and directory.
    pub fn entries_of_block(&self, fs: FsId, id: i64) -> Vec<EntryId> {
        self.by_block.get(&(fs, id)).cloned().unwrap_or_default()
    }

    /// All entries of a file system, in ascending order.
    pub fn entries_of_fs(&self, fs: FsId) -> Vec<EntryId> {
        let mut all: Vec<EntryId> = self
            .entries
            .iter()
            .filter(|(_, e)| e.location.fs == fs)
            .map(|(id, _)| *id)
            .collect();
        all.sort_unstable();
        all
    }

    /// Number of leases by which the host may read.
    pub fn outstanding(&self) -> usize {
        self.by_lease.len()
    }

    /// Number of blocks that have links, or may.
    pub fn linked_count(&self) -> usize {
        self.linked
    }

    /// The decisions since the last call.
    pub fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// When [`Ledger::tick`] has something to do.
    pub fn next_due(&self) -> Option<Millis> {
        self.due.first().map(|(at, _)| *at)
    }

    /// A finished block was found by an event.
    pub fn appeared(&mut self, now: Millis, location: Location) -> EntryId {
        let times = self.times;
        if let Some(id) = self.find(&location) {
            self.update(id, |b| b.appeared(now, &times));
            return id;
        }
        self.add(now, location)
    }

    /// A finished block was found by a scan; a known block is not touched.
    pub fn scanned(&mut self, now: Millis, location: Location) -> Option<EntryId> {
        match self.find(&location) {
            Some(_) => None,
            None => Some(self.add(now, location)),
        }
    }

    /// An event may have changed a block: see [`Block::touched`].
    pub fn touched(&mut self, now: Millis, id: EntryId, then: Disposition, why: WithdrawReason) {
        let times = self.times;
        self.update(id, |b| b.touched(now, &times, then, why));
        if let Some(entry) = self.entries.get_mut(&id)
            && then > Disposition::Refuse
            && entry.block.is_linked()
            && !entry.gone
        {
            self.held_bytes += entry.fingerprint.map_or(0, Fingerprint::bytes);
            entry.gone = true;
        }
    }

    /// An event may have been lost: compares the block's extents now.
    pub fn recheck(&mut self, now: Millis, id: EntryId) {
        self.update(id, |b| {
            b.recheck(now);
            None
        });
    }

    /// Stops or resumes linking and naming.
    pub fn pause(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// Sets the bytes that only links of earlier runs hold on a file system.
    pub fn set_earlier_bytes(&mut self, fs: FsId, bytes: u64) {
        self.earlier_bytes.insert(fs, bytes);
    }

    /// All bytes that only links hold.
    fn total_held_bytes(&self) -> u64 {
        self.held_bytes + self.earlier_bytes.values().sum::<u64>()
    }

    /// Whether naming has stopped because links hold too many bytes.
    pub fn is_full(&self) -> bool {
        self.total_held_bytes() > self.bounds.max_held_bytes
    }

    /// Whether a block waits only for the rate limit.
    pub fn has_queued(&self) -> bool {
        self.limits.is_some()
            && !self.paused
            && (!self.name_queue.is_empty()
                || self.proven.iter().any(|fs| {
                    self.link_queue
                        .get(fs)
                        .is_some_and(|queue| !queue.is_empty())
                }))
    }

    /// Does what is due at `now`, then links and names blocks.
    pub fn tick(&mut self, now: Millis) {
        let times = self.times;
        let mut absent = Vec::new();
        while let Some((at, id)) = self.due.first().copied().filter(|(at, _)| *at <= now) {
            self.due.remove(&(at, id));
            let Some(entry) = self.entries.get(&id) else {
                continue;
            };
            if entry.block.is_ready_to_link(now) {
                let fs = entry.location.fs;
                self.link_queue.entry(fs).or_default().push_back(id);
            } else if entry.block.lease().is_some() && self.limits.is_none() {
                absent.push((now + ABSENT_HOST_RECHECK_INTERVAL, id));
            } else {
                self.update(id, |b| b.tick(now, &times));
            }
        }
        self.due.extend(absent);
        self.rate.refill(now);
        self.link_waiting(now);
        self.name_ready(now);
    }

    /// Counts for the host and for `viola-agent status`.
    pub fn stats(&self) -> Stats {
        let mut stats = self.stats.clone();
        for entry in self.entries.values() {
            match entry.block.state() {
                State::Named { .. } => stats.named += 1,
                State::Withdrawing { .. } => stats.withdrawing += 1,
                State::Refused => stats.refused += 1,
                _ => stats.waiting += 1,
            }
        }
        stats.held_bytes = self.total_held_bytes();
        stats.held_limit = self.bounds.max_held_bytes;
        stats.full = self.is_full();
        stats
    }

    /// Counts an overflow of the fanotify queue.
    pub fn count_overflow(&mut self) {
        self.stats.overflows += 1;
    }

    /// Counts a completed scan.
    pub fn count_scan(&mut self) {
        self.stats.scans += 1;
    }

    /// Links blocks whose disk the host knows, as far as the bounds allow.
    fn link_waiting(&mut self, now: Millis) {
        let Some(limits) = self.limits.filter(|_| !self.paused && !self.is_full()) else {
            return;
        };
        let most = self.bounds.max_blocks.min(limits.blocks as usize);
        for fs in &self.proven {
            let Some(queue) = self.link_queue.get_mut(fs) else {
                continue;
            };
            while let Some(id) = queue.front().copied() {
                if let Some(entry) = self.entries.get_mut(&id)
                    && entry.block.is_ready_to_link(now)
                {
                    if self.linked >= most || !self.rate.take_link() {
                        return;
                    }
                    entry.block.start_linking();
                    self.linked += 1;
                    self.actions.push(Action::Link(id));
                }
                queue.pop_front();
            }
        }
    }

    /// Names ready blocks, as far as the bounds allow.
    fn name_ready(&mut self, now: Millis) {
        let Some(limits) = self.limits.filter(|_| !self.paused && !self.is_full()) else {
            return;
        };
        let times = self.times;
        for _ in 0..self.name_queue.len() {
            if self.by_lease.len() >= limits.blocks as usize
                || self.unanswered >= MAX_UNANSWERED_NAMES
            {
                break;
            }
            let Some(id) = self.name_queue.pop_front() else {
                break;
            };
            let Some(entry) = self
                .entries
                .get_mut(&id)
                .filter(|e| e.block.is_ready_to_name())
            else {
                continue;
            };
            if !self.proven.contains(&entry.location.fs) {
                self.name_queue.push_back(id);
                continue;
            }
            if !self.rate.take_name() {
                self.name_queue.push_front(id);
                break;
            }
            let lease = self.next_lease;
            if entry.block.start_naming(now, &times, lease).is_some() {
                self.next_lease += 1;
                self.unanswered += 1;
                self.by_lease.insert(lease, id);
                self.stats.names += 1;
                self.due.extend(entry.block.next_due().map(|at| (at, id)));
                self.actions.push(Action::Name(id, lease));
            }
        }
    }

    fn find(&self, location: &Location) -> Option<EntryId> {
        let same = self.by_block.get(&(location.fs, location.key.id()))?;
        same.iter().copied().find(|id| {
            self.entries
                .get(id)
                .is_some_and(|e| e.location == *location)
        })
    }

    fn add(&mut self, now: Millis, location: Location) -> EntryId {
        let id = self.next_entry;
        self.next_entry += 1;
        self.by_block
            .entry((location.fs, location.key.id()))
            .or_default()
            .push(id);
        let block = Block::new(now, &self.times);
        self.due.extend(block.next_due().map(|at| (at, id)));
        self.entries.insert(
            id,
            Entry {
                location,
                fingerprint: None,
                block,
                gone: false,
            },
        );
        id
    }

    /// The entry of a lease. `None` while no session is open: messages of the host then belong to
    /// an earlier session.
    pub fn entry_of_lease(&self, lease: Lease) -> Option<EntryId> {
        self.limits?;
        self.by_lease.get(&lease).copied()
    }

    /// Changes one block, and every index and count that depends on it.
    fn update(
        &mut self,
        id: EntryId,
        change: impl FnOnce(&mut Block<BlockMaps>) -> Option<Effect>,
    ) {
        let Some(entry) = self.entries.get_mut(&id) else {
            return;
        };
        let before = (
            entry.block.lease(),
            entry.block.is_linked(),
            entry.block.next_due(),
        );
        let was = Stage::of(&entry.block);
        let todo = change(&mut entry.block);
        let is = Stage::of(&entry.block);
        if was == Stage::Asked && is != Stage::Asked {
            self.unanswered -= 1;
        }
        if was <= Stage::Named && is == Stage::Withdrawing {
            self.stats.withdrawals += 1;
        }
        if let Some(lease) = before.0.filter(|_| entry.block.lease().is_none()) {
            self.by_lease.remove(&lease);
        }
        let linked = entry.block.is_linked() && todo != Some(Effect::Forget);
        if before.1 && !linked {
            self.linked -= 1;
        }
        if entry.block.is_ready_to_name() {
            self.name_queue.push_back(id);
        }
        let due = entry.block.next_due();
        if due != before.2 {
            before.2.map(|at| self.due.remove(&(at, id)));
        }
        self.due.extend(due.map(|at| (at, id)));
        match todo {
            None => {}
            Some(Effect::Map { attempt }) => self.actions.push(Action::Map(id, attempt)),
            Some(Effect::Unlink) => self.actions.push(Action::Unlink(id)),
            // an absent host gets no withdrawal; its next welcome ends the lease
            Some(Effect::Withdraw { lease, why }) if self.limits.is_some() => {
                self.actions.push(Action::Withdraw(lease, why));
            }
            Some(Effect::Withdraw { .. }) => {}
            Some(Effect::Forget) => self.forget(id),
        }
    }

    fn forget(&mut self, id: EntryId) {
        let Some(entry) = self.entries.remove(&id) else {
            return;
        };
        if let Some(at) = entry.block.next_due() {
            self.due.remove(&(at, id));
        }
        let key = (entry.location.fs, entry.location.key.id());
        if let Some(same) = self.by_block.get_mut(&key) {
            same.retain(|other| *other != id);
            if same.is_empty() {
                self.by_block.remove(&key);
            }
        }
    }
}

/// The states that the ledger counts apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Asked,
    Named,
    Withdrawing,
    Other,
}

impl Stage {
    fn of(block: &Block<BlockMaps>) -> Self {
        match block.state() {
            State::Named {
                answered: false, ..
            } => Self::Asked,
            State::Named { .. } => Self::Named,
            State::Withdrawing { .. } => Self::Withdrawing,
            _ => Self::Other,
        }
    }
}

#[cfg(test)]
mod tests;
