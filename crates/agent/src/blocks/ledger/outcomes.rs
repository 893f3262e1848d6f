// SPDX-License-Identifier: Apache-2.0
//! Results of the workers.

use super::Ledger;
use crate::blocks::block::Disposition;
use crate::blocks::types::{BlockMaps, EntryId, Fingerprint};
use crate::clock::Millis;

impl Ledger {
    /// The linker has made the links, or failed and left none.
    pub fn link_done(
        &mut self,
        now: Millis,
        id: EntryId,
        result: Result<Fingerprint, Disposition>,
    ) {
        let times = self.times;
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.fingerprint = result.ok();
            entry.gone &= entry.fingerprint.is_some();
            if entry.gone {
                self.held_bytes += entry.fingerprint.map_or(0, Fingerprint::bytes);
            }
        }
        self.update(id, |b| b.link_done(now, &times, result.map(drop)));
    }

    /// The mapper has found the extents, or failed.
    pub fn map_done(
        &mut self,
        now: Millis,
        id: EntryId,
        attempt: u64,
        result: Result<BlockMaps, Disposition>,
    ) {
        let times = self.times;
        let max_extents = self.limits.map_or(usize::MAX, |l| l.extents as usize);
        let result = result.and_then(|maps| {
            let longest = maps.data.extents.len().max(maps.meta.extents.len());
            if longest > max_extents {
                Err(Disposition::Refuse)
            } else {
                Ok(maps)
            }
        });
        self.update(id, |b| b.map_done(now, &times, attempt, result));
    }

    /// The linker has removed the links, or failed.
    pub fn unlink_done(&mut self, now: Millis, id: EntryId, done: bool) {
        let times = self.times;
        if done && let Some(entry) = self.entries.get_mut(&id) {
            let bytes = entry.fingerprint.take().map_or(0, Fingerprint::bytes);
            if std::mem::take(&mut entry.gone) {
                self.held_bytes -= bytes;
            }
        }
        self.update(id, |b| b.unlink_done(now, &times, done));
    }
}
