// SPDX-License-Identifier: Apache-2.0
//! Messages of the host: leases, sessions, proven file systems.

use viola_proto::agent::{FsId, Lease, Limits, WithdrawReason};

use super::Ledger;
use crate::blocks::block::Disposition;
use crate::blocks::rate::RateLimiter;
use crate::blocks::types::EntryId;
use crate::clock::Millis;

impl Ledger {
    /// The host has confirmed a name.
    pub fn host_named(&mut self, now: Millis, lease: Lease) {
        let times = self.times;
        if let Some(id) = self.entry_of_lease(lease) {
            self.update(id, |b| {
                b.host_named(now, &times, lease);
                None
            });
        }
    }

    /// The host has refused a name.
    pub fn host_refused(&mut self, now: Millis, lease: Lease) {
        let times = self.times;
        if let Some(id) = self.entry_of_lease(lease) {
            self.update(id, |b| b.host_refused(now, &times, lease));
        }
    }

    /// The host has confirmed the end of a lease: no read uses it any more.
    pub fn host_withdrew(&mut self, now: Millis, lease: Lease) {
        let times = self.times;
        if let Some(id) = self.entry_of_lease(lease) {
            self.update(id, |b| b.host_withdrew(now, &times, lease));
        }
    }

    /// The agent has sent a hello: until the host's welcome nothing is named, and the host's messages belong to
    /// earlier sessions.
    pub fn session_closed(&mut self) {
        self.limits = None;
        self.proven.clear();
    }

    /// A new session has begun: all earlier leases are void.
    pub fn session_opened(&mut self, now: Millis, limits: Limits) {
        let times = self.times;
        self.limits = Some(limits);
        self.proven.clear();
        self.rate = RateLimiter::new(now, self.bounds.max_names_per_s.min(limits.names_per_s));
        let mut all: Vec<EntryId> = self.entries.keys().copied().collect();
        all.sort_unstable();
        for id in all {
            self.update(id, |b| b.session_opened(now, &times));
        }
    }

    /// The host knows the disk of this file system.
    pub fn fs_proven(&mut self, fs: FsId) {
        if self.limits.is_some() {
            self.proven.insert(fs);
        }
    }

    /// Withdraws all blocks of a file system. With `Disposition::Remap` they are named again when the file system
    /// is proven; with a later one their links are removed.
    pub fn fs_unproven(&mut self, now: Millis, fs: FsId, then: Disposition, why: WithdrawReason) {
        self.proven.remove(&fs);
        for id in self.entries_of_fs(fs) {
            let linked = self.entries.get(&id).is_some_and(|e| e.block.is_linked());
            if linked || then == Disposition::Forget {
                self.touched(now, id, then, why);
            }
        }
    }
}
