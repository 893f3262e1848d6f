// SPDX-License-Identifier: Apache-2.0
//! Statistics of a session.

use std::collections::BTreeMap;
use std::time::Instant;

use viola_proto::agent::Stats;
use viola_vpipe::pipes::Pipes;

use super::{AgentSession, Readers, State};
use crate::control::{AgentStat, Session};

impl AgentSession {
    /// Returns the current statistics.
    pub fn stat(&self, now: Instant, readers: &dyn Readers) -> AgentStat {
        let (waiting, oldest) = self.blocks.waiting();
        let table = self.table.id();
        let held = match &self.state {
            State::Ending { since, .. } => readers.reader_of_table(table).map(|r| (r, *since)),
            _ => {
                oldest.and_then(|(slot, since)| Some((readers.reader_of_slot(table, slot)?, since)))
            }
        };
        AgentStat {
            session: match &self.state {
                _ if !self.has_channel => Session::NoChannel,
                State::Silent | State::Ending { hello: None, .. } => Session::Silent,
                State::Ending { .. } => Session::Ending,
                State::Open { .. } if self.proved.is_empty() => Session::Welcomed,
                State::Open { .. } => Session::Proved,
            },
            agent_version: match &self.state {
                State::Open { hello, .. } => hello.agent_version.clone(),
                _ => String::new(),
            },
            epoch: self.table.epoch(),
            proved: self
                .proved
                .iter()
                .map(|(fs, p)| (fs.to_string(), p.shown.clone()))
                .collect(),
            block_disks: self
                .block_disks
                .iter()
                .copied()
                .filter(|id| self.proved.values().any(|p| p.image == *id))
                .collect(),
            blocks: self.blocks.named() as u64,
            bytes: self.blocks.bytes(),
            extents: self.blocks.extents() as u64,
            waiting: waiting as u64,
            held_by: held.map(|(reader, since)| {
                let ms = now.saturating_duration_since(since).as_millis() as u64;
                (reader.to_owned(), ms)
            }),
            pipes: self.pipes.as_ref().map(Pipes::stats),
            images: self.disks.iter().map(|d| d.spec.clone()).collect(),
            ..self.stat.clone()
        }
    }
}

/// Flattens the agent's own counts to a map by name.
pub(super) fn flat(stats: &Stats) -> BTreeMap<String, u64> {
    let Ok(serde_json::Value::Object(all)) = serde_json::to_value(stats) else {
        return BTreeMap::new();
    };
    let number = |v: &serde_json::Value| v.as_u64().or_else(|| v.as_bool().map(u64::from));
    all.iter()
        .filter_map(|(key, value)| Some((key.clone(), number(value)?)))
        .collect()
}
