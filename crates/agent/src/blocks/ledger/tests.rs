// SPDX-License-Identifier: Apache-2.0
//! The ledger against a model of the host, the workers and the DataNode.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use viola_proto::agent::{BlockKey, FileMap};

use super::*;
use crate::blocks::block::tests::T;
use crate::blocks::types::FileId;

const LIMITS: Limits = Limits {
    blocks: 4,
    extents: 10,
    names_per_s: 100,
};

const BOUNDS: Bounds = Bounds {
    max_held_bytes: 250,
    max_blocks: 6,
    max_names_per_s: 100,
};

fn location(id: i64, stamp: u64) -> Location {
    Location {
        fs: (id % 2) as u32,
        folder: Arc::from(Path::new(
            "/d/current/BP-1/current/finalized/subdir0/subdir0",
        )),
        key: BlockKey::new("BP-1", id, stamp).unwrap(),
    }
}

fn fingerprint() -> Fingerprint {
    let file = |size| FileId {
        inode: 5,
        size,
        mtime: 0,
    };
    Fingerprint {
        data: file(90),
        meta: file(10),
    }
}

fn maps(version: u64) -> BlockMaps {
    let map = FileMap {
        size: version,
        extents: Vec::new(),
    };
    BlockMaps {
        data: map.clone(),
        meta: map,
    }
}

/// A ledger and its surroundings; checks every action.
struct World {
    ledger: Ledger,
    now: Millis,
    /// Leases by which the model's host may read, and their entries.
    live: HashMap<Lease, EntryId>,
    used: HashSet<Lease>,
    jobs: Vec<Action>,
    links: HashSet<EntryId>,
    touched: HashMap<EntryId, Millis>,
    asked: HashSet<Lease>,
    open: bool,
}

impl World {
    fn new() -> Self {
        Self {
            ledger: Ledger::new(T, BOUNDS),
            now: 0,
            live: HashMap::new(),
            used: HashSet::new(),
            jobs: Vec::new(),
            links: HashSet::new(),
            touched: HashMap::new(),
            asked: HashSet::new(),
            open: false,
        }
    }

    fn appear(&mut self, location: Location) -> EntryId {
        let id = self.ledger.appeared(self.now, location);
        self.touched.insert(id, self.now);
        id
    }

    fn touch(&mut self, id: EntryId, then: Disposition) {
        if self.ledger.entry(id).is_some() {
            self.touched.insert(id, self.now);
            self.ledger
                .touched(self.now, id, then, WithdrawReason::Changed);
        }
    }

    fn welcome(&mut self) {
        self.live.clear();
        self.asked.clear();
        self.open = true;
        self.ledger.session_opened(self.now, LIMITS);
        self.ledger.fs_proven(0);
        self.ledger.fs_proven(1);
    }

    fn hello(&mut self) {
        self.open = false;
        self.ledger.session_closed();
    }

    /// The model's host confirms the end of a lease.
    fn confirm(&mut self, lease: Lease) {
        if self.open {
            self.live.remove(&lease);
            self.asked.remove(&lease);
            self.ledger.host_withdrew(self.now, lease);
        }
    }

    fn refuse(&mut self, lease: Lease) {
        if self.open {
            self.live.remove(&lease);
            self.ledger.host_refused(self.now, lease);
        }
    }

    fn advance(&mut self, by: Millis) {
        self.now += by;
        self.ledger.tick(self.now);
        self.take();
    }

    fn take(&mut self) {
        for action in self.ledger.take_actions() {
            match action {
                Action::Name(id, lease) => {
                    assert!(self.open, "named without a session");
                    assert!(self.used.insert(lease), "lease {lease} used twice");
                    assert!(self.links.contains(&id), "named without links");
                    let quiet = self.now - self.touched[&id];
                    assert!(quiet >= T.quiet, "named {quiet} ms after a change");
                    assert!(self.ledger.name_message_parts(id).is_some());
                    self.live.insert(lease, id);
                    assert!(self.live.len() <= LIMITS.blocks as usize);
                    let mut ids = HashSet::new();
                    assert!(self.live.values().all(|i| ids.insert(*i)), "named twice");
                    self.ledger.host_named(self.now, lease);
                }
                Action::Withdraw(lease, _) => {
                    assert!(self.open);
                    self.asked.insert(lease);
                }
                Action::Unlink(id) => {
                    assert!(
                        !self.live.values().any(|i| *i == id),
                        "links of {id} dropped while the host may read"
                    );
                    self.jobs.push(Action::Unlink(id));
                }
                Action::Link(id) => {
                    assert!(self.links.len() < BOUNDS.max_blocks);
                    self.links.insert(id);
                    self.jobs.push(Action::Link(id));
                }
                job @ Action::Map(..) => self.jobs.push(job),
            }
        }
        for id in self.links.iter().chain(self.live.values()) {
            assert!(self.ledger.entry(*id).is_some(), "{id} forgotten too early");
        }
    }

    /// A worker finishes its next job; `well` decides the result.
    fn work(&mut self, well: u8, version: u64) {
        if self.jobs.is_empty() {
            return;
        }
        match self.jobs.remove(0) {
            Action::Link(id) => {
                let result = match well {
                    0 => Err(Disposition::Forget),
                    1 => Err(Disposition::Relink),
                    _ => Ok(fingerprint()),
                };
                if result.is_err() {
                    self.links.remove(&id);
                }
                self.ledger.link_done(self.now, id, result);
            }
            Action::Map(id, attempt) => {
                let result = match well {
                    0 => Err(Disposition::Remap),
                    1 => Err(Disposition::Refuse),
                    _ => Ok(maps(version)),
                };
                self.ledger.map_done(self.now, id, attempt, result);
            }
            Action::Unlink(id) => {
                let done = well > 0;
                if done {
                    self.links.remove(&id);
                }
                self.ledger.unlink_done(self.now, id, done);
            }
            _ => unreachable!(),
        }
        self.take();
    }

    /// Host and workers do everything until nothing is left to do.
    fn calm(&mut self) {
        self.welcome();
        for _ in 0..400 {
            self.advance(500);
            while !self.jobs.is_empty() {
                self.work(9, 1);
            }
            let asked: Vec<Lease> = self.asked.iter().copied().collect();
            for lease in asked {
                self.confirm(lease);
            }
            self.take();
        }
    }
}

fn named_world() -> (World, EntryId) {
    let mut w = World::new();
    let id = w.appear(location(2, 1));
    w.calm();
    assert_eq!(w.live.len(), 1);
    (w, id)
}

#[test]
fn nothing_is_linked_before_the_host_knows_the_disk() {
    let mut w = World::new();
    w.appear(location(2, 1));
    w.advance(60_000);
    assert!(w.jobs.is_empty());
    w.open = true;
    w.ledger.session_opened(w.now, LIMITS);
    w.ledger.fs_proven(1);
    w.advance(60_000);
    assert!(w.jobs.is_empty(), "file system 0 is not proven");
    w.ledger.fs_proven(0);
    w.advance(1);
    assert_eq!(w.jobs, [Action::Link(1)]);
}

#[test]
fn too_many_held_bytes_stop_naming_and_unlink_nothing() {
    let mut w = World::new();
    let ids: Vec<_> = (0..3).map(|i| w.appear(location(i * 2, 1))).collect();
    w.calm();
    assert_eq!(w.live.len(), 3);
    for id in ids {
        w.touch(id, Disposition::Forget);
    }
    w.appear(location(8, 1));
    w.advance(100_000);
    assert_eq!(w.ledger.stats().held_bytes, 300);
    assert!(w.ledger.is_full());
    assert_eq!(w.live.len(), 3, "nothing new is named");
    assert!(w.jobs.is_empty(), "nothing is dropped");
    w.calm();
    assert_eq!(w.ledger.stats().held_bytes, 0);
    assert_eq!(w.live.len(), 1);
}

#[test]
fn bytes_held_by_a_dead_agents_links_count() {
    let (mut w, _) = named_world();
    w.ledger.set_earlier_bytes(1, 251);
    w.appear(location(4, 1));
    w.advance(100_000);
    assert!(w.jobs.iter().all(|j| !matches!(j, Action::Link(_))));
    w.ledger.set_earlier_bytes(1, 0);
    w.advance(1);
    assert!(w.jobs.iter().any(|j| matches!(j, Action::Link(_))));
}

#[test]
fn a_block_of_a_new_generation_is_another_block() {
    let (mut w, old) = named_world();
    w.touch(old, Disposition::Forget);
    let new = w.appear(location(2, 2));
    assert_ne!(new, old);
    assert_eq!(w.ledger.entries_of_block(0, 2), [old, new]);
    w.calm();
    assert_eq!(w.ledger.entries_of_block(0, 2), [new]);
    assert_eq!(w.live.values().copied().collect::<Vec<_>>(), [new]);
}

#[test]
fn a_paused_agent_names_nothing_until_it_is_resumed() {
    let (mut w, _) = named_world();
    w.ledger.pause(true);
    for fs in [0, 1] {
        w.ledger
            .fs_unproven(w.now, fs, Disposition::Remap, WithdrawReason::Filesystem);
    }
    w.take();
    assert_eq!(w.asked.len(), 1);
    w.calm();
    assert!(w.live.is_empty());
    assert_eq!(w.ledger.outstanding(), 0);
    w.ledger.pause(false);
    w.calm();
    assert_eq!(w.live.len(), 1);
}

#[test]
fn a_file_with_more_extents_than_the_host_accepts_is_refused() {
    let mut w = World::new();
    w.welcome();
    let id = w.appear(location(2, 1));
    w.advance(3000);
    w.work(9, 1);
    w.advance(500);
    let Some(Action::Map(_, attempt)) = w.jobs.pop() else {
        panic!("not mapped");
    };
    let mut many = maps(1);
    many.data.extents = vec![(0, 0, 1, false).into(); 11];
    w.ledger.map_done(w.now, id, attempt, Ok(many));
    w.take();
    assert_eq!(w.jobs, [Action::Unlink(id)]);
}

#[derive(Debug, Clone)]
enum Event {
    Appear(i64, u64),
    Touch(u64, u8),
    Advance(u64),
    Work(u8, u64),
    Confirm(u8),
    Refuse(u8),
    Hello,
    Welcome,
    Unproven(u32),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (0..4i64, 0..2u64).prop_map(|(i, s)| Event::Appear(i, s)),
        8 => (0..8u64, 0..4u8).prop_map(|(i, a)| Event::Touch(i, a)),
        30 => (0..4000u64).prop_map(Event::Advance),
        30 => (0..20u8, 0..2u64).prop_map(|(w, v)| Event::Work(w, v)),
        4 => any::<u8>().prop_map(Event::Confirm),
        1 => any::<u8>().prop_map(Event::Refuse),
        1 => Just(Event::Hello),
        2 => Just(Event::Welcome),
        1 => (0..2u32).prop_map(Event::Unproven),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn links_outlive_reads_and_everything_is_named_in_the_end(
        events in proptest::collection::vec(event(), 0..400)
    ) {
        let mut w = World::new();
        w.welcome();
        let pick = |w: &World, n: u8| {
            let mut all: Vec<Lease> = w.live.keys().copied().collect();
            all.sort_unstable();
            (!all.is_empty()).then(|| all[usize::from(n) % all.len()])
        };
        for event in events {
            match event {
                Event::Appear(id, stamp) => { w.appear(location(id, stamp)); }
                Event::Touch(id, after) => {
                    let after =
                        [Disposition::Remap, Disposition::Refuse, Disposition::Relink, Disposition::Forget][usize::from(after)];
                    // an existing entry
                    let all: Vec<EntryId> =
                        [0, 1].iter().flat_map(|fs| w.ledger.entries_of_fs(*fs)).collect();
                    if !all.is_empty() {
                        w.touch(all[id as usize % all.len()], after);
                    }
                }
                Event::Advance(by) => w.advance(by),
                Event::Work(well, version) => w.work(well, version),
                Event::Confirm(n) => if let Some(lease) = pick(&w, n) { w.confirm(lease) },
                Event::Refuse(n) => if let Some(lease) = pick(&w, n) { w.refuse(lease) },
                Event::Hello => w.hello(),
                Event::Welcome => w.welcome(),
                Event::Unproven(fs) => {
                    w.ledger.fs_unproven(w.now, fs, Disposition::Remap, WithdrawReason::Filesystem);
                    if w.open {
                        w.ledger.fs_proven(fs);
                    }
                }
            }
            w.take();
        }
        w.calm();
        let stats = w.ledger.stats();
        prop_assert_eq!(stats.held_bytes, 0);
        prop_assert_eq!(stats.withdrawing, 0);
        prop_assert_eq!(w.ledger.outstanding(), w.live.len());
        prop_assert_eq!(w.ledger.linked, w.links.len());
        prop_assert_eq!(w.ledger.unanswered, 0);
        prop_assert!(w.jobs.is_empty());
        // as many blocks as the limit allows are named
        let known = w.ledger.entries.len();
        let refused = stats.refused as usize;
        prop_assert_eq!(w.live.len(), (known - refused).min(LIMITS.blocks as usize));
    }
}
