// SPDX-License-Identifier: Apache-2.0
//! Admits proofs of file systems and names of blocks.

use std::time::Instant;

use viola_extents::CheckedMap;
use viola_proto::agent::{self, BlockKey, DiskName, FileMap, FsId, ToAgent, truncate_text};

use super::super::images;
use super::super::named_blocks::{self, Block, LeaseId};
use super::{AgentSession, MAX_FILE_SYSTEMS, Proved, confirm, count};
use crate::journal::Level;

impl AgentSession {
    pub(super) fn proof(
        &mut self,
        now: Instant,
        fs: FsId,
        what: &str,
        disk: &DiskName,
        content: &[u8],
        map: &FileMap,
    ) -> ToAgent {
        let found = if !self.proof_rate.try_take(now, 1.0) {
            Err("proofs come too fast".to_owned())
        } else if self.proved.len() >= MAX_FILE_SYSTEMS && !self.proved.contains_key(&fs) {
            Err(format!("more than {MAX_FILE_SYSTEMS} file systems"))
        } else {
            images::find_proved_disk(&self.disks, disk, content, map)
        };
        match found {
            Ok(found) => {
                let (image, path) = (found.spec.id, &found.spec.path);
                let shown = format!("{what} on {path}");
                let size = found.image.size();
                let before = self.proved.get(&fs).map(|p| p.image);
                if before != Some(image) {
                    // Blocks with this file system number are on another disk.
                    for slot in self.blocks.end(fs) {
                        self.table.withdraw(slot);
                        self.stat.withdrawn += 1;
                    }
                }
                self.journal.log_limited(
                    now,
                    Level::Info,
                    "proof",
                    &format!("file system found: {shown}"),
                );
                self.proved.insert(fs, Proved { image, size, shown });
                ToAgent::ProofOk { fs }
            }
            Err(why) => {
                count(&mut self.stat.refusals, "proof");
                self.journal.log_limited(
                    now,
                    Level::Warning,
                    "proof-bad",
                    &format!("{what} is not served: {why}"),
                );
                ToAgent::ProofBad {
                    fs,
                    why: truncate_text(why),
                }
            }
        }
    }

    pub(super) fn name(
        &mut self,
        now: Instant,
        lease: LeaseId,
        fs: FsId,
        key: BlockKey,
        data: &FileMap,
        meta: &FileMap,
    ) -> Option<ToAgent> {
        // A refusal would tell the agent that nobody reads the lease.
        if self.blocks.knows(lease) {
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
                self.journal.log_limited(
                    now,
                    Level::Warning,
                    kind,
                    &format!("block refused: {why}"),
                );
                Some(ToAgent::Refused {
                    lease,
                    why: truncate_text(why),
                })
            }
        }
    }

    fn admit(
        &mut self,
        now: Instant,
        lease: LeaseId,
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
        if !self.name_rate.try_take(now, 1.0) {
            return Err(no("names too fast"));
        }
        let slot = self
            .blocks
            .free_slot()
            .ok_or_else(|| no("too many blocks"))?;
        let (image, size) = (proved.image, proved.size);
        let check = |map: &FileMap| {
            CheckedMap::new(&crate::images::extents(map), map.size, size)
                .map_err(|e| ("bad extents", format!("{key}: {e}")))
        };
        let (data, meta) = (check(data)?, check(meta)?);
        if self.blocks.extents() + named_blocks::extents(&data, &meta)
            > self.limits.extents as usize
        {
            return Err(no("too many extents"));
        }
        let grant = self
            .table
            .lease(slot)
            .ok_or_else(|| no("too many blocks"))?;
        self.block_disks.insert(image);
        self.blocks.insert(Block {
            id: lease,
            fs,
            key,
            data,
            meta,
            image,
            lease: grant,
        });
        Ok(())
    }

    pub(super) fn withdraw(
        &mut self,
        now: Instant,
        leases: Vec<LeaseId>,
        why: agent::WithdrawReason,
        out: &mut Vec<ToAgent>,
    ) {
        let mut unknown = Vec::new();
        for lease in leases {
            let (slot, is_unknown) = self.blocks.withdraw(lease, now);
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
