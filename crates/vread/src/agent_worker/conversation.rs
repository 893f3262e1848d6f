// SPDX-License-Identifier: Apache-2.0
//! The conversation with an agent: what may be said when, and what becomes of it.
//!
//! Everything that comes in is a guest's word. It is counted against bounds before it is kept, and nothing that it
//! says makes this side wait, write more than an answer, or read outside of the VM's own disks.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use viola_extents::CheckedMap;
use viola_proto::agent::{
    self, BlockKey, Bytes, DiskName, FileMap, FromAgent, FsId, MAX_EXTENTS, MAX_LEASES, Stats,
    ToAgent,
};

use super::images::{self, Disk};
use super::names::{self, Block, Lease, Names};
use super::rate::Rate;
use crate::control::{AgentStat, Limits, Reasons, Session};
use crate::journal::{Journal, Level};
use crate::lookup::Found;
use crate::table::Table;

/// Time between two pings, and between two hails while nobody says hello.
const PING: Duration = Duration::from_secs(2);
/// An agent that has said nothing for so long is taken for dead, and its blocks are not served any more.
const SILENCE: Duration = Duration::from_secs(10);
/// File systems of a VM.
const MAX_FS: usize = 64;
/// Proofs a second, over a longer time; each reads from the VM's disks.
const PROOFS: f64 = 4.0;
/// Names that may come at once.
const BURST_S: f64 = 4.0;
/// Kinds of refusals and ends that are counted apart.
const MAX_REASONS: usize = 64;

/// Who reads what now.
pub trait Readers {
    /// The reader that may be reading this slot of this table.
    fn of_slot(&self, table: u32, slot: u32) -> Option<&str>;
    /// The reader that may be reading any slot of this table.
    fn of_table(&self, table: u32) -> Option<&str>;
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Hello {
    session: u64,
    agent_version: String,
    boot_id: String,
}

#[derive(Debug)]
enum State {
    /// Reads under the old epoch may be in flight; then the agent is welcomed, if there is one.
    Ending {
        since: Instant,
        hello: Option<Hello>,
    },
    /// Nobody has said hello since the epoch began.
    Silent,
    /// The agent may name blocks of file systems that it has proved.
    Open { hello: Hello },
}

#[derive(Debug)]
struct Proved {
    image: u32,
    /// Length of the disk.
    size: u64,
    shown: String,
}

/// One VM's agent, as far as this worker is concerned.
#[derive(Debug)]
pub struct Conversation {
    table: Table,
    names: Names,
    disks: Vec<Disk>,
    limits: Limits,
    state: State,
    proved: BTreeMap<FsId, Proved>,
    name_rate: Rate,
    proof_rate: Rate,
    /// When the agent was last heard.
    heard: Instant,
    /// When it was last pinged or hailed.
    pinged: Instant,
    pings: u64,
    has_channel: bool,
    stat: AgentStat,
    journal: Journal,
}

impl Conversation {
    /// Ends the epoch of whoever kept this table before.
    pub fn new(table: Table, limits: Limits, journal: Journal, now: Instant) -> Self {
        table.end_epoch();
        let slots = table.slots().min(limits.blocks);
        Self {
            names: Names::new(slots),
            disks: Vec::new(),
            state: State::Ending {
                since: now,
                hello: None,
            },
            proved: BTreeMap::new(),
            name_rate: name_rate(limits, now),
            proof_rate: Rate::new(now, PROOFS, 4.0 * MAX_FS as f64),
            heard: now,
            pinged: now,
            pings: 0,
            has_channel: false,
            stat: AgentStat::default(),
            journal,
            limits: Limits {
                blocks: slots,
                ..limits
            },
            table,
        }
    }

    /// A new channel: whoever is there is asked to say hello.
    pub fn open(&mut self, now: Instant, out: &mut Vec<ToAgent>) {
        self.end(now, "new channel");
        self.has_channel = true;
        self.hail(now, out);
    }

    /// The channel is gone, and with it all names.
    pub fn close(&mut self, now: Instant, why: &str) {
        if std::mem::take(&mut self.has_channel) {
            self.journal.seldom(
                now,
                Level::Warning,
                "channel",
                &format!("the agent's channel is gone: {why}"),
            );
        }
        self.end(now, "channel gone");
        self.forget_hello();
    }

    /// Withdraws everything; the agent has to say hello again. `why` is one of few words: it is counted by it.
    pub fn end_epoch(&mut self, now: Instant, why: &str, out: &mut Vec<ToAgent>) {
        self.end(now, why);
        self.forget_hello();
        if self.has_channel {
            self.hail(now, out);
        }
    }

    /// The VM's disks are these from now on; nothing of what was named of the old ones holds.
    pub fn replace_disks(
        &mut self,
        now: Instant,
        disks: Vec<Disk>,
        why: &str,
        out: &mut Vec<ToAgent>,
    ) {
        self.end_epoch(now, why, out);
        self.disks = disks;
    }

    /// The disks in use.
    pub fn disks(&self) -> &[Disk] {
        &self.disks
    }

    /// Takes a message of the agent.
    pub fn hear(&mut self, now: Instant, message: FromAgent, out: &mut Vec<ToAgent>) {
        self.heard = now;
        match message {
            FromAgent::Hello {
                version,
                agent_version,
                boot_id,
                session,
            } => self.hello(
                now,
                version,
                Hello {
                    session,
                    agent_version: printable(&agent_version),
                    boot_id,
                },
            ),
            // What an agent says before its hello was welcomed belongs to a session that is over.
            _ if !matches!(self.state, State::Open { .. }) => {
                count(&mut self.stat.refusals, "said before hello")
            }
            FromAgent::Proof {
                fs,
                mount,
                kind,
                disk,
                content,
                map,
            } => {
                let what = format!("{} ({})", printable(&mount), printable(&kind));
                out.push(self.proof(now, fs, &what, &disk, &content, &map));
            }
            FromAgent::Name {
                lease,
                fs,
                key,
                data,
                meta,
            } => out.extend(self.name(now, lease, fs, key, &data, &meta)),
            FromAgent::Withdraw { leases, why } => self.withdraw(now, leases, why, out),
            FromAgent::WithdrawAll { fs, why } => {
                for slot in self.names.end(fs) {
                    self.table.withdraw(slot);
                    self.stat.withdrawn += 1;
                }
                if let Some(proved) = self.proved.remove(&fs) {
                    let what = format!("{} is not served for now: {why:?}", proved.shown);
                    self.journal.seldom(now, Level::Info, "withdraw-all", &what);
                }
            }
            FromAgent::Stats(stats) => self.stat.agent = flat(&stats),
            FromAgent::Pong { .. } => {}
        }
    }

    /// A frame that was no message.
    pub fn misheard(&mut self, now: Instant, why: &dyn std::error::Error) {
        count(&mut self.stat.refusals, "no message");
        let why = match why.source() {
            Some(source) => format!("{why}: {source}"),
            None => why.to_string(),
        };
        self.journal.seldom(
            now,
            Level::Warning,
            "misheard",
            &format!(
                "the agent sends what is not understood: {}",
                printable(&why)
            ),
        );
    }

    /// Confirms what nobody reads any more, and welcomes an agent when the old epoch is over.
    pub fn settle(&mut self, now: Instant, readers: &dyn Readers, out: &mut Vec<ToAgent>) {
        let table = self.table.id();
        let confirmed = self
            .names
            .confirm(|slot| readers.of_slot(table, slot).is_some());
        confirm(confirmed, out);
        if matches!(self.state, State::Ending { .. }) && readers.of_table(table).is_none() {
            let State::Ending { hello, .. } = std::mem::replace(&mut self.state, State::Silent)
            else {
                return;
            };
            if let Some(hello) = hello {
                self.welcome(now, hello, out);
            }
        }
    }

    /// What is to be done because time has passed; to be called at least each second.
    pub fn tick(&mut self, now: Instant, out: &mut Vec<ToAgent>) {
        if !self.has_channel {
            return;
        }
        if let State::Open { .. } = self.state
            && now.saturating_duration_since(self.heard) >= SILENCE
        {
            let what = format!("nothing heard of the agent for {} s", SILENCE.as_secs());
            self.journal.line(Level::Warning, &what);
            self.end_epoch(now, "silent agent", out);
        }
        if now.saturating_duration_since(self.pinged) < PING {
            return;
        }
        match &self.state {
            State::Open { hello } => {
                self.pings += 1;
                out.push(ToAgent::Ping {
                    n: self.pings,
                    session: hello.session,
                });
                self.pinged = now;
            }
            State::Silent => self.hail(now, out),
            State::Ending { .. } => {}
        }
    }

    /// Whether something waits for readers, so that [`Conversation::settle`] is to be called soon again.
    pub fn waits(&self) -> bool {
        matches!(self.state, State::Ending { .. }) || self.names.waiting().0 > 0
    }

    /// Where a block is.
    pub fn find(&mut self, key: &BlockKey) -> Option<Found> {
        self.stat.lookups += 1;
        let Some(block) = self.names.find(key) else {
            self.stat.unknown += 1;
            return None;
        };
        Some(Found {
            lease: block.grant,
            image: block.image,
            data: wire(&block.data),
            meta: wire(&block.meta),
        })
    }

    /// What has been done so far.
    pub fn stat(&self, now: Instant, readers: &dyn Readers) -> AgentStat {
        let (waiting, oldest) = self.names.waiting();
        let table = self.table.id();
        let held = match &self.state {
            State::Ending { since, .. } => readers.of_table(table).map(|r| (r, *since)),
            _ => oldest.and_then(|(slot, since)| Some((readers.of_slot(table, slot)?, since))),
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
                State::Open { hello } => hello.agent_version.clone(),
                _ => String::new(),
            },
            epoch: self.table.epoch(),
            proved: self
                .proved
                .iter()
                .map(|(fs, p)| (fs.to_string(), p.shown.clone()))
                .collect(),
            blocks: self.names.named() as u64,
            bytes: self.names.bytes(),
            extents: self.names.extents() as u64,
            waiting: waiting as u64,
            held_by: held.map(|(reader, since)| {
                let ms = now.saturating_duration_since(since).as_millis() as u64;
                (reader.to_owned(), ms)
            }),
            images: self.disks.iter().map(|d| d.spec.clone()).collect(),
            ..self.stat.clone()
        }
    }

    /// For lines about other things than the agent's words.
    pub fn journal(&mut self) -> &mut Journal {
        &mut self.journal
    }

    fn hello(&mut self, now: Instant, version: u32, hello: Hello) {
        if version != agent::VERSION {
            count(&mut self.stat.refusals, "other version");
            let what = format!(
                "the agent speaks version {version}, this is {}: its blocks are not served; install the same release in the VM",
                agent::VERSION
            );
            self.journal.seldom(now, Level::Error, "version", &what);
            self.end(now, "other version");
            self.forget_hello();
            return;
        }
        // An agent repeats its hello, with another number, until it is welcomed.
        if !matches!(self.state, State::Ending { .. }) {
            self.end(now, "hello");
        }
        if let State::Ending { hello: to, .. } = &mut self.state {
            *to = Some(hello);
        }
    }

    fn welcome(&mut self, now: Instant, hello: Hello, out: &mut Vec<ToAgent>) {
        let what = format!(
            "agent {} welcomed, epoch {}",
            hello.agent_version,
            self.table.epoch()
        );
        self.journal.seldom(now, Level::Info, "welcome", &what);
        out.push(ToAgent::Welcome {
            version: agent::VERSION,
            session: hello.session,
            epoch: self.table.epoch(),
            limits: agent::Limits {
                blocks: self.limits.blocks,
                extents: self.limits.extents.min(MAX_EXTENTS as u32),
                names_per_s: self.limits.names_per_s,
            },
        });
        // It may take up its work at once.
        self.name_rate = name_rate(self.limits, now);
        self.heard = now;
        self.pinged = now;
        self.state = State::Open { hello };
    }

    fn proof(
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

    fn name(
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

    fn withdraw(
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

    fn end(&mut self, now: Instant, why: &str) {
        count(&mut self.stat.ends, why);
        let held = self.names.named();
        if held > 0 {
            let what = format!("{held} blocks withdrawn: {why}");
            self.journal.seldom(now, Level::Notice, "end", &what);
        }
        self.stat.withdrawn += held as u64;
        self.table.end_epoch();
        self.names.clear();
        self.proved.clear();
        self.stat.agent.clear();
        let hello = match std::mem::replace(&mut self.state, State::Silent) {
            State::Ending { hello, .. } => hello,
            _ => None,
        };
        self.state = State::Ending { since: now, hello };
    }

    fn forget_hello(&mut self) {
        if let State::Ending { hello, .. } = &mut self.state {
            *hello = None;
        }
    }

    fn hail(&mut self, now: Instant, out: &mut Vec<ToAgent>) {
        out.push(ToAgent::Hail {
            version: agent::VERSION,
        });
        self.pinged = now;
    }
}

fn name_rate(limits: Limits, now: Instant) -> Rate {
    let per_s = f64::from(limits.names_per_s);
    Rate::new(now, per_s, per_s * BURST_S)
}

fn confirm(leases: Vec<Lease>, out: &mut Vec<ToAgent>) {
    for some in leases.chunks(MAX_LEASES) {
        out.push(ToAgent::Withdrawn {
            leases: some.to_vec(),
        });
    }
}

fn wire(map: &CheckedMap) -> FileMap {
    FileMap {
        size: map.len(),
        extents: map
            .extents()
            .iter()
            .map(|e| agent::Extent {
                logical: e.logical,
                physical: e.physical,
                length: e.length,
                zero: e.zero,
            })
            .collect(),
    }
}

fn count(reasons: &mut Reasons, why: &str) {
    if reasons.len() < MAX_REASONS || reasons.contains_key(why) {
        *reasons.entry(why.to_owned()).or_default() += 1;
    }
}

fn flat(stats: &Stats) -> BTreeMap<String, u64> {
    let Ok(serde_json::Value::Object(all)) = serde_json::to_value(stats) else {
        return BTreeMap::new();
    };
    let number = |v: &serde_json::Value| v.as_u64().or_else(|| v.as_bool().map(u64::from));
    all.iter()
        .filter_map(|(key, value)| Some((key.clone(), number(value)?)))
        .collect()
}

/// A guest's text for the operator's terminal.
fn printable(text: &str) -> String {
    let clean = |c: char| {
        if c.is_control() {
            char::REPLACEMENT_CHARACTER
        } else {
            c
        }
    };
    text.chars().take(200).map(clean).collect()
}

/// A sentence that fits into a message.
fn short(mut text: String) -> String {
    let mut end = text.len().min(agent::MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text
}
