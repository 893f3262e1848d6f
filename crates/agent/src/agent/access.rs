// SPDX-License-Identifier: Apache-2.0
//! Asks the DataNode whether clients may read its blocks without a token. The agent names no block
//! before the DataNode has served one without a token.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use viola_proto::agent::{WithdrawReason, truncate_text};

use super::{Agent, Millis};
use crate::blocks::access::Probe;
use crate::blocks::block::Disposition;
use crate::blocks::{datanode, worker};

/// Time between two checks for a new DataNode process.
const RESTART_CHECK_INTERVAL: Millis = 1000;

/// What a DataNode process writes into a data directory: inode and modification time of the lock file.
pub(super) type LockStamp = (u64, i64, i64);

impl Agent {
    /// Checks for a new DataNode process, and starts a probe when one is due.
    pub(super) fn check_access(&mut self, now: Millis) {
        if self.next_access_check > now || self.end_by.is_some() {
            return;
        }
        let first = self.next_access_check == 0;
        self.next_access_check = now + RESTART_CHECK_INTERVAL;
        let before = self.access.why().to_owned();
        if self.datanode_restarted() && !first {
            self.access.datanode_restarted(now);
        }
        self.access.tick(now);
        if self.access.is_due(now) {
            self.probe_datanode(now);
        }
        self.apply_access(now, &before);
    }

    /// Handles the result of a probe.
    pub(super) fn handle_probe(&mut self, now: Millis, probe: Probe) {
        let before = self.access.why().to_owned();
        self.access.probe_finished(now, probe);
        // the next probe may be due at once
        self.next_access_check = now;
        self.apply_access(now, &before);
    }

    /// Whether naming is stopped.
    pub(super) fn is_paused(&self) -> bool {
        self.paused || self.end_by.is_some() || !self.access.is_open()
    }

    /// Why access is closed, for the status; empty while it is open.
    pub(super) fn why_closed(&self) -> String {
        truncate_text(self.access.why().to_owned())
    }

    /// Whether another DataNode process has started since the last check. Each writes its lock file
    /// into the data directories at its start, before it knows its NameNode, and may remove it at
    /// its end.
    fn datanode_restarted(&mut self) -> bool {
        let mut restarted = false;
        for data in &self.config.data {
            let Ok(lock) = std::fs::metadata(data.join("in_use.lock")) else {
                continue;
            };
            let lock = (lock.ino(), lock.mtime(), lock.mtime_nsec());
            let known: Option<LockStamp> = self.locks.insert(PathBuf::clone(data), lock);
            restarted |= known != Some(lock);
        }
        restarted
    }

    fn probe_datanode(&mut self, now: Millis) {
        let all: Vec<_> = self
            .volumes
            .keys()
            .flat_map(|fs| self.ledger.entries_of_fs(*fs))
            .collect();
        // another block each time: one may just be deleted
        let chosen = all.get(usize::try_from(now).unwrap_or_default() % all.len().max(1));
        let Some(entry) = chosen.and_then(|id| self.ledger.entry(*id)) else {
            return self.access.no_block_to_probe(now);
        };
        let (address, block) = (self.config.datanode.clone(), entry.location.key.clone());
        self.access.probe_started();
        let outcomes = self.outcome_sender.clone();
        let spawned = std::thread::Builder::new()
            .name("viola-datanode".into())
            .spawn(move || {
                outcomes.send(worker::Outcome::Probed(datanode::probe(&address, &block)));
            });
        if let Err(e) = spawned {
            let why = format!("no thread can be started ({e})");
            self.access.probe_finished(now, Probe::Unknown(why));
        }
    }

    /// Stops or resumes naming, and logs a changed reason.
    fn apply_access(&mut self, now: Millis, before: &str) {
        self.ledger.pause(self.is_paused());
        if self.access.is_open() {
            if !before.is_empty() {
                eprintln!("viola-agent: DataNode: serves blocks without a token: naming starts");
                self.next_stats = now;
            }
            return;
        }
        if self.access.why() == before {
            return;
        }
        eprintln!(
            "viola-agent: DataNode: no block is named: {}",
            self.access.why()
        );
        self.next_stats = now;
        // a link makes HDFS copy the block before an append, so the agent keeps none for a cluster that it
        // does not serve
        let after = match self.access.is_refused() {
            true if self.ledger.linked_count() > 0 => Disposition::Relink,
            false if before.is_empty() => Disposition::Remap,
            _ => return,
        };
        for fs in self.volumes.keys().copied().collect::<Vec<_>>() {
            self.withdraw_all(now, fs, after, WithdrawReason::Stopping);
        }
    }
}
