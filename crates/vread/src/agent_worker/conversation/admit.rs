// SPDX-License-Identifier: Apache-2.0
//! What an agent may name: disks by a proof, blocks by extents within them.

use std::time::Instant;

use viola_extents::CheckedMap;
use viola_proto::agent::{self, BlockKey, Bytes, DiskName, FileMap, FsId, ToAgent, short};

use super::super::images;
use super::super::names::{self, Block, Lease};
use super::{Conversation, MAX_FS, Proved, confirm, count};
use crate::journal::Level;

impl Conversation {
    pub(super) fn proof(
        &mut self,
        now: Instant,
        fs: FsId,
        what: &str,
        disk: &DiskName,
        content: &Bytes,
        map: &FileMap,
    ) -> ToAgent {
        let found = if !self.proof_rate.take(now, 1.0) {
            Err("proofs come too fast".to_owned())
        } else if self.proved.len() >= MAX_FS && !self.proved.contains_key(&fs) {
            Err(format!("more than {MAX_FS} file systems"))
        } else {
            images::prove(&self.disks, disk, &content.0, map)
        };
        match found {
            Ok(found) => {
                let (image, path) = (found.spec.id, &found.spec.path);
                let shown = format!("{what} on {path}");
                let size = found.image.size();
                let before = self.proved.get(&fs).map(|p| p.image);
                if before != Some(image) {
                    // Names of the same number are of another disk.
                    for slot in self.names.end(fs) {
                        self.table.withdraw(slot);
                        self.stat.withdrawn += 1;
                    }
                }
                self.journal
                    .seldom(now, Level::Info, "proof", &format!("found {shown}"));
                self.proved.insert(fs, Proved { image, size, shown });
                ToAgent::ProofOk { fs }
            }
            Err(why) => {
                count(&mut self.stat.refusals, "proof");
                self.journal.seldom(
                    now,
                    Level::Warning,
                    "proof-bad",
                    &format!("{what} is not served: {why}"),
                );
                ToAgent::ProofBad {
                    fs,
                    why: short(why),
                }
            }
        }
    }

    pub(super) fn name(
        &mut self,
        now: Instant,
        lease: Lease,
        fs: FsId,
        key: BlockKey,
        data: &FileMap,
        meta: &FileMap,
    ) -> Option<ToAgent> {
        // Refusing it would say that nobody reads it.
        if self.names.knows(lease) {
            count(&mut self.stat.refusals, "number in use");
            return None;
        }
        match self.admit(now, lease, fs, key, data, meta) {
            Ok(()) => {
                self.stat.named += 1;
                Some(ToAgent::Named { lease })
            }
            Err((kind, why)) => {
                count(&mut self.stat.refusals, kind);
                self.journal.seldom(
                    now,
                    Level::Warning,
                    kind,
                    &format!("a block is refused: {why}"),
                );
                Some(ToAgent::Refused {
                    lease,
                    why: short(why),
                })
            }
        }
    }

    fn admit(
        &mut self,
        now: Instant,
        lease: Lease,
        fs: FsId,
        key: BlockKey,
        data: &FileMap,
        meta: &FileMap,
    ) -> Result<(), (&'static str, String)> {
        let no = |kind: &'static str| (kind, kind.to_owned());
        let proved = self
            .proved
            .get(&fs)
            .ok_or_else(|| no("file system not proved"))?;
        if !self.name_rate.take(now, 1.0) {
            return Err(no("names too fast"));
        }
        let slot = self
            .names
            .free_slot()
            .ok_or_else(|| no("too many blocks"))?;
        let (image, size) = (proved.image, proved.size);
        let check = |map: &FileMap| {
            CheckedMap::new(&images::extents(map), map.size, size)
                .map_err(|e| ("bad extents", format!("{key}: {e}")))
        };
        let (data, meta) = (check(data)?, check(meta)?);
        if self.names.extents() + names::extents(&data, &meta) > self.limits.extents as usize {
            return Err(no("too many extents"));
        }
        let grant = self
            .table
            .lease(slot)
            .ok_or_else(|| no("too many blocks"))?;
        self.names.insert(Block {
            lease,
            fs,
            key,
            data,
            meta,
            image,
            grant,
        });
        Ok(())
    }

    pub(super) fn withdraw(
        &mut self,
        now: Instant,
        leases: Vec<Lease>,
        why: agent::Why,
        out: &mut Vec<ToAgent>,
    ) {
        let mut unknown = Vec::new();
        for lease in leases {
            let (slot, is_unknown) = self.names.withdraw(lease, now);
            if let Some(slot) = slot {
                self.table.withdraw(slot);
                self.stat.withdrawn += 1;
                *self
                    .stat
                    .withdrawals
                    .entry(format!("{why:?}").to_lowercase())
                    .or_default() += 1;
            }
            if is_unknown {
                unknown.push(lease);
            }
        }
        confirm(unknown, out);
    }
}
