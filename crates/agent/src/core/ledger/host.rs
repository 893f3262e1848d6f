// SPDX-License-Identifier: Apache-2.0
//! What the host says: leases, sessions, file systems that it knows.

use viola_proto::agent::{FsId, Lease, Limits, Why};

use super::Ledger;
use crate::core::block::{After, Millis};
use crate::core::budget::Budget;
use crate::core::place::EntryId;

impl Ledger {
    /// The host reads by this lease.
    pub fn host_named(&mut self, now: Millis, lease: Lease) {
        let times = self.times;
        if let Some(id) = self.of_lease(lease) {
            self.update(id, |b| {
                b.host_named(now, &times, lease);
                None
            });
        }
    }

    /// The host never reads by this lease.
    pub fn host_refused(&mut self, now: Millis, lease: Lease) {
        let times = self.times;
        if let Some(id) = self.of_lease(lease) {
            self.update(id, |b| b.host_refused(now, &times, lease));
        }
    }

    /// No read uses this lease any more.
    pub fn host_withdrew(&mut self, now: Millis, lease: Lease) {
        let times = self.times;
        if let Some(id) = self.of_lease(lease) {
            self.update(id, |b| b.host_withdrew(now, &times, lease));
        }
    }

    /// The host was greeted: until it answers nothing is named, and what it says is about sessions
    /// before.
    pub fn close(&mut self) {
        self.limits = None;
        self.proven.clear();
    }

    /// A new session: all leases before it are void.
    pub fn welcome(&mut self, now: Millis, limits: Limits) {
        let times = self.times;
        self.limits = Some(limits);
        self.proven.clear();
        self.budget = Budget::new(now, self.bounds.names_per_s.min(limits.names_per_s));
        let mut all: Vec<EntryId> = self.entries.keys().copied().collect();
        all.sort_unstable();
        for id in all {
            self.update(id, |b| b.welcome(now, &times));
        }
    }

    /// The host knows the disk of this file system.
    pub fn proven(&mut self, fs: FsId) {
        if self.limits.is_some() {
            self.proven.insert(fs);
        }
    }

    /// Whether it does.
    pub fn is_proven(&self, fs: FsId) -> bool {
        self.proven.contains(&fs)
    }

    /// What is known of a file system's blocks is void: they are withdrawn, and named again when it is
    /// proven; or, with `after` beyond [`After::Again`], dropped.
    pub fn unproven(&mut self, now: Millis, fs: FsId, after: After, why: Why) {
        self.proven.remove(&fs);
        for id in self.of_fs(fs) {
            let linked = self.entries.get(&id).is_some_and(|e| e.block.linked());
            if linked || after == After::Forget {
                self.touched(now, id, after, why);
            }
        }
    }
}
