// SPDX-License-Identifier: Apache-2.0
//! All blocks together: which is linked and named when, within the bounds, and what is to be sent.

mod host;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use viola_proto::agent::{FsId, Lease, Limits, Stats, Why};

use super::block::{After, Block, Do, Millis, State, Times};
use super::budget::Budget;
use super::place::{Action, Bounds, EntryId, Maps, Pin, Place};

/// One block.
#[derive(Debug)]
pub struct Entry {
    /// Where it lies, or lay.
    pub place: Place,
    /// What its files were, once they are linked.
    pub pin: Option<Pin>,
    block: Block<Maps>,
    /// Its files are gone from their place, so that our links alone may hold them.
    gone: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Ledger {
    times: Times,
    bounds: Bounds,
    limits: Option<Limits>,
    proven: BTreeSet<FsId>,
    entries: HashMap<EntryId, Entry>,
    by_block: HashMap<(FsId, i64), Vec<EntryId>>,
    by_lease: HashMap<Lease, EntryId>,
    due: BTreeSet<(Millis, EntryId)>,
    /// Blocks that may be linked as soon as there is room, by file system.
    wanting: BTreeMap<FsId, VecDeque<EntryId>>,
    /// Blocks that may be named.
    ready: VecDeque<EntryId>,
    actions: Vec<Action>,
    next_entry: EntryId,
    next_lease: Lease,
    linked: usize,
    held: u64,
    /// Held back by links of agents before this one, by file system.
    foreign: BTreeMap<FsId, u64>,
    budget: Budget,
    unanswered: usize,
    stats: Stats,
    paused: bool,
}

/// What cannot be said to an absent host is thought of again after so long.
const ABSENT: Millis = 10_000;

/// Most names that wait for the host's answer.
const UNANSWERED: usize = 256;

impl Ledger {
    /// An empty one.
    pub fn new(times: Times, bounds: Bounds) -> Self {
        Self {
            times,
            bounds,
            limits: None,
            proven: BTreeSet::new(),
            entries: HashMap::new(),
            by_block: HashMap::new(),
            by_lease: HashMap::new(),
            due: BTreeSet::new(),
            wanting: BTreeMap::new(),
            ready: VecDeque::new(),
            actions: Vec::new(),
            next_entry: 1,
            next_lease: 1,
            linked: 0,
            held: 0,
            foreign: BTreeMap::new(),
            budget: Budget::default(),
            unanswered: 0,
            stats: Stats::default(),
            paused: false,
        }
    }

    /// A block.
    pub fn entry(&self, id: EntryId) -> Option<&Entry> {
        self.entries.get(&id)
    }

    /// Extents and place of a block that is to be named now.
    pub fn named(&self, id: EntryId) -> Option<(&Place, &Maps)> {
        let entry = self.entries.get(&id)?;
        match entry.block.state() {
            State::Named { map, .. } => Some((&entry.place, map)),
            _ => None,
        }
    }

    /// Blocks of a file system with this number.
    pub fn of_block(&self, fs: FsId, id: i64) -> Vec<EntryId> {
        self.by_block.get(&(fs, id)).cloned().unwrap_or_default()
    }

    /// All blocks of a file system.
    pub fn of_fs(&self, fs: FsId) -> Vec<EntryId> {
        let mut all: Vec<EntryId> = self
            .entries
            .iter()
            .filter(|(_, e)| e.place.fs == fs)
            .map(|(id, _)| *id)
            .collect();
        all.sort_unstable();
        all
    }

    /// Leases that the host may read by.
    pub fn outstanding(&self) -> usize {
        self.by_lease.len()
    }

    /// Blocks that links of ours hold, or may.
    pub fn links(&self) -> usize {
        self.linked
    }

    /// What has been decided since the last call.
    pub fn actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// When [`Ledger::tick`] has something to do.
    pub fn next_due(&self) -> Option<Millis> {
        self.due.first().map(|(at, _)| *at)
    }

    /// A finished block was found in its place by an event.
    pub fn appeared(&mut self, now: Millis, place: Place) -> EntryId {
        let times = self.times;
        if let Some(id) = self.find(&place) {
            self.update(id, |b| b.appeared(now, &times));
            return id;
        }
        self.add(now, place)
    }

    /// A finished block was found in its place by a scan: news only if it is not known.
    pub fn scanned(&mut self, now: Millis, place: Place) -> Option<EntryId> {
        match self.find(&place) {
            Some(_) => None,
            None => Some(self.add(now, place)),
        }
    }

    /// Something happened to a block: see [`Block::touched`].
    pub fn touched(&mut self, now: Millis, id: EntryId, after: After, why: Why) {
        let times = self.times;
        self.update(id, |b| b.touched(now, &times, after, why));
        if let Some(entry) = self.entries.get_mut(&id)
            && after > After::Refuse
            && entry.block.linked()
            && !entry.gone
        {
            self.held += entry.pin.map_or(0, Pin::bytes);
            entry.gone = true;
        }
    }

    /// A worker has made the links, or not (then none are left).
    pub fn linked(&mut self, now: Millis, id: EntryId, result: Result<Pin, After>) {
        let times = self.times;
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.pin = result.ok();
            entry.gone &= entry.pin.is_some();
            if entry.gone {
                self.held += entry.pin.map_or(0, Pin::bytes);
            }
        }
        self.update(id, |b| b.linked_now(now, &times, result.map(drop)));
    }

    /// A worker has found the extents, or not.
    pub fn mapped(&mut self, now: Millis, id: EntryId, turn: u64, result: Result<Maps, After>) {
        let times = self.times;
        let most = self.limits.map_or(usize::MAX, |l| l.extents as usize);
        let result = result.and_then(|maps| {
            let most_here = maps.data.extents.len().max(maps.meta.extents.len());
            if most_here > most {
                Err(After::Refuse)
            } else {
                Ok(maps)
            }
        });
        self.update(id, |b| b.mapped(now, &times, turn, result));
    }

    /// A worker has removed the links, or not.
    pub fn dropped(&mut self, now: Millis, id: EntryId, done: bool) {
        let times = self.times;
        if done && let Some(entry) = self.entries.get_mut(&id) {
            let bytes = entry.pin.take().map_or(0, Pin::bytes);
            if std::mem::take(&mut entry.gone) {
                self.held -= bytes;
            }
        }
        self.update(id, |b| b.dropped(now, &times, done));
    }

    /// Something may have happened to a block that was not seen: its extents are compared now.
    pub fn recheck(&mut self, now: Millis, id: EntryId) {
        self.update(id, |b| {
            b.recheck(now);
            None
        });
    }

    /// Stops or goes on with naming.
    pub fn pause(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// Bytes that links of agents before this one hold back.
    pub fn foreign(&mut self, fs: FsId, bytes: u64) {
        self.foreign.insert(fs, bytes);
    }

    /// All bytes that links alone hold back.
    fn held(&self) -> u64 {
        self.held + self.foreign.values().sum::<u64>()
    }

    /// Whether naming has stopped because too much is held back.
    pub fn full(&self) -> bool {
        self.held() > self.bounds.hold
    }

    /// Whether something waits for nothing but its turn.
    pub fn busy(&self) -> bool {
        self.limits.is_some()
            && !self.paused
            && (!self.ready.is_empty()
                || self
                    .proven
                    .iter()
                    .any(|fs| self.wanting.get(fs).is_some_and(|queue| !queue.is_empty())))
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Millis) {
        let times = self.times;
        let mut absent = Vec::new();
        while let Some((at, id)) = self.due.first().copied().filter(|(at, _)| *at <= now) {
            self.due.remove(&(at, id));
            let Some(entry) = self.entries.get(&id) else {
                continue;
            };
            if entry.block.wants_link(now) {
                let fs = entry.place.fs;
                self.wanting.entry(fs).or_default().push_back(id);
            } else if entry.block.lease().is_some() && self.limits.is_none() {
                absent.push((now + ABSENT, id));
            } else {
                self.update(id, |b| b.tick(now, &times));
            }
        }
        self.due.extend(absent);
        self.budget.refill(now);
        self.link(now);
        self.name(now);
    }

    /// What it holds.
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
        stats.held_bytes = self.held();
        stats.held_limit = self.bounds.hold;
        stats.full = self.full();
        stats
    }

    /// Counts an overflow of the kernel's queue.
    pub fn count_overflow(&mut self) {
        self.stats.overflows += 1;
    }

    /// Counts a full scan.
    pub fn count_scan(&mut self) {
        self.stats.scans += 1;
    }

    /// Links blocks: the host is there and knows their disk, and there is room.
    fn link(&mut self, now: Millis) {
        let Some(limits) = self.limits.filter(|_| !self.paused && !self.full()) else {
            return;
        };
        let most = self.bounds.blocks.min(limits.blocks as usize);
        for fs in &self.proven {
            let Some(queue) = self.wanting.get_mut(fs) else {
                continue;
            };
            while let Some(id) = queue.front().copied() {
                if let Some(entry) = self.entries.get_mut(&id)
                    && entry.block.wants_link(now)
                {
                    if self.linked >= most || !self.budget.link() {
                        return;
                    }
                    entry.block.linking();
                    self.linked += 1;
                    self.actions.push(Action::Link(id));
                }
                queue.pop_front();
            }
        }
    }

    /// Names blocks that are ready, as many as the bounds allow.
    fn name(&mut self, now: Millis) {
        let Some(limits) = self.limits.filter(|_| !self.paused && !self.full()) else {
            return;
        };
        let times = self.times;
        for _ in 0..self.ready.len() {
            if self.by_lease.len() >= limits.blocks as usize || self.unanswered >= UNANSWERED {
                break;
            }
            let Some(id) = self.ready.pop_front() else {
                break;
            };
            let Some(entry) = self.entries.get_mut(&id).filter(|e| e.block.wants_name()) else {
                continue;
            };
            if !self.proven.contains(&entry.place.fs) {
                self.ready.push_back(id);
                continue;
            }
            if !self.budget.name() {
                self.ready.push_front(id);
                break;
            }
            let lease = self.next_lease;
            if entry.block.naming(now, &times, lease).is_some() {
                self.next_lease += 1;
                self.unanswered += 1;
                self.by_lease.insert(lease, id);
                self.stats.names += 1;
                self.due.extend(entry.block.due().map(|at| (at, id)));
                self.actions.push(Action::Name(id, lease));
            }
        }
    }

    fn find(&self, place: &Place) -> Option<EntryId> {
        let same = self.by_block.get(&(place.fs, place.key.id()))?;
        same.iter()
            .copied()
            .find(|id| self.entries.get(id).is_some_and(|e| e.place == *place))
    }

    fn add(&mut self, now: Millis, place: Place) -> EntryId {
        let id = self.next_entry;
        self.next_entry += 1;
        self.by_block
            .entry((place.fs, place.key.id()))
            .or_default()
            .push(id);
        let block = Block::new(now, &self.times);
        self.due.extend(block.due().map(|at| (at, id)));
        self.entries.insert(
            id,
            Entry {
                place,
                pin: None,
                block,
                gone: false,
            },
        );
        id
    }

    /// The block of a lease. What the host says counts only within a session.
    pub fn of_lease(&self, lease: Lease) -> Option<EntryId> {
        self.limits?;
        self.by_lease.get(&lease).copied()
    }

    /// Changes one block, and everything that is kept about it.
    fn update(&mut self, id: EntryId, change: impl FnOnce(&mut Block<Maps>) -> Option<Do>) {
        let Some(entry) = self.entries.get_mut(&id) else {
            return;
        };
        let before = (entry.block.lease(), entry.block.linked(), entry.block.due());
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
        let linked = entry.block.linked() && todo != Some(Do::Forget);
        if before.1 && !linked {
            self.linked -= 1;
        }
        if entry.block.wants_name() {
            self.ready.push_back(id);
        }
        let due = entry.block.due();
        if due != before.2 {
            before.2.map(|at| self.due.remove(&(at, id)));
        }
        self.due.extend(due.map(|at| (at, id)));
        match todo {
            None => {}
            Some(Do::Map { turn }) => self.actions.push(Action::Map(id, turn)),
            Some(Do::Drop) => self.actions.push(Action::Drop(id)),
            // to an absent host nothing can be said; its welcome ends the lease
            Some(Do::Withdraw { lease, why }) if self.limits.is_some() => {
                self.actions.push(Action::Withdraw(lease, why));
            }
            Some(Do::Withdraw { .. }) => {}
            Some(Do::Forget) => self.forget(id),
        }
    }

    fn forget(&mut self, id: EntryId) {
        let Some(entry) = self.entries.remove(&id) else {
            return;
        };
        if let Some(at) = entry.block.due() {
            self.due.remove(&(at, id));
        }
        let key = (entry.place.fs, entry.place.key.id());
        if let Some(same) = self.by_block.get_mut(&key) {
            same.retain(|other| *other != id);
            if same.is_empty() {
                self.by_block.remove(&key);
            }
        }
        self.actions.push(Action::Forget(id, entry.place));
    }
}

/// As far as the counts tell blocks apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Asked,
    Named,
    Withdrawing,
    Other,
}

impl Stage {
    fn of(block: &Block<Maps>) -> Self {
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
#[path = "ledger_tests.rs"]
mod tests;
