// SPDX-License-Identifier: Apache-2.0
//! Asking the DataNode whether its blocks may be read without a token, and naming nothing until it says so.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use viola_proto::agent::{Why, short};

use super::{Agent, Millis};
use crate::core::block::After;
use crate::core::door::Answer;
use crate::io::{datanode, worker};

/// So often it is looked whether the DataNode began anew.
const OFTEN: Millis = 1000;

/// What a DataNode process leaves in a data directory: the lock's inode and time of change.
pub(super) type Lock = (u64, i64, i64);

impl Agent {
    /// Looks whether the DataNode began anew, and asks it when that is due.
    pub(super) fn keep_door(&mut self, now: Millis) {
        if self.door_at > now || self.ends.is_some() {
            return;
        }
        let first = self.door_at == 0;
        self.door_at = now + OFTEN;
        let before = self.door.why().to_owned();
        if self.datanode_began() && !first {
            self.door.restarted(now);
        }
        self.door.tick(now);
        if self.door.due(now) {
            self.ask_datanode(now);
        }
        self.obey_door(now, &before);
    }

    /// What the DataNode has answered.
    pub(super) fn take_answer(&mut self, now: Millis, answer: Answer) {
        let before = self.door.why().to_owned();
        self.door.answered(now, answer);
        // what it asks for next may be due at once
        self.door_at = now;
        self.obey_door(now, &before);
    }

    /// Whether nothing is to be named now.
    pub(super) fn is_paused(&self) -> bool {
        self.paused || self.ends.is_some() || !self.door.is_open()
    }

    /// Why nothing may be named, as it is told; empty when it may.
    pub(super) fn closed(&self) -> String {
        short(self.door.why().to_owned())
    }

    /// Whether another DataNode process has begun since the last look. Each writes its lock into the data directories when
    /// it starts, before it knows its NameNode, and may take it away when it ends.
    fn datanode_began(&mut self) -> bool {
        let mut began = false;
        for data in &self.config.data {
            let Ok(lock) = std::fs::metadata(data.join("in_use.lock")) else {
                continue;
            };
            let lock = (lock.ino(), lock.mtime(), lock.mtime_nsec());
            let known: Option<Lock> = self.locks.insert(PathBuf::clone(data), lock);
            began |= known != Some(lock);
        }
        began
    }

    fn ask_datanode(&mut self, now: Millis) {
        let all: Vec<_> = self
            .volumes
            .keys()
            .flat_map(|fs| self.ledger.of_fs(*fs))
            .collect();
        // another one each time: some may just be going
        let chosen = all.get(usize::try_from(now).unwrap_or_default() % all.len().max(1));
        let Some(entry) = chosen.and_then(|id| self.ledger.entry(*id)) else {
            return self.door.nothing_to_ask(now);
        };
        let (address, block) = (self.config.datanode.clone(), entry.place.key.clone());
        self.door.asked();
        let report = self.report.clone();
        let asked = std::thread::Builder::new()
            .name("viola-datanode".into())
            .spawn(move || {
                report.say(worker::Outcome::Door(datanode::ask(&address, &block)));
            });
        if let Err(e) = asked {
            let why = format!("no thread can be started ({e})");
            self.door.answered(now, Answer::Unknown(why));
        }
    }

    /// Names, or takes back, and says why when that is new.
    fn obey_door(&mut self, now: Millis, before: &str) {
        self.ledger.pause(self.is_paused());
        if self.door.is_open() {
            if !before.is_empty() {
                eprintln!("viola-agent: the DataNode gives blocks without a token: they are named");
                self.stats_at = now;
            }
            return;
        }
        if self.door.why() == before {
            return;
        }
        eprintln!("viola-agent: no block is named: {}", self.door.why());
        self.stats_at = now;
        // links cost HDFS a copy when it appends, so none is kept for a cluster that is not served
        let after = match self.door.is_refused() {
            true if self.ledger.links() > 0 => After::Fresh,
            false if before.is_empty() => After::Again,
            _ => return,
        };
        for fs in self.volumes.keys().copied().collect::<Vec<_>>() {
            self.withdraw_all(now, fs, after, Why::Stopping);
        }
    }
}
