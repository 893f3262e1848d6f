// SPDX-License-Identifier: Apache-2.0
//! The session with an agent: the state machine of its messages.
//!
//! Every message comes from a guest and is untrusted. The session checks it against limits before it keeps anything.
//! No message can make the worker wait, write more than an answer, or read outside the VM's own disks.

mod admit;
mod pipe;
mod stat;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use viola_proto::agent::{
    self, BlockKey, Challenge, FromAgent, FsId, MAX_EXTENTS, MAX_LEASES, ToAgent,
};

use viola_vpipe::pipes::Pipes;

use super::images::Disk;
use super::named_blocks::{LeaseId, NamedBlocks};
use super::token_bucket::TokenBucket;
use crate::control::{AgentStat, Limits, Reasons};
use crate::images::file_map;
use crate::journal::{Journal, Level};
use crate::lookup::Found;
use crate::random::random_bytes;
use crate::table::Table;
use stat::flat;

/// Interval between two pings, and between two hello requests until the agent answers.
const PING_INTERVAL: Duration = Duration::from_secs(2);
/// The worker stops serving the blocks of an agent from which no message came for this long.
const AGENT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of file systems of a VM.
const MAX_FILE_SYSTEMS: usize = 64;
/// Average number of proofs per second; each reads from the VM's disks.
const MAX_PROOFS_PER_S: f64 = 4.0;
/// Names that an agent may send at once, in seconds of its rate.
const NAME_BURST_SECONDS: f64 = 4.0;
/// Maximum number of different reasons that are counted separately.
const MAX_REASONS: usize = 64;

/// Tells which slots readers are reading now.
pub trait Readers {
    /// The reader that may be reading this slot of this table.
    fn reader_of_slot(&self, table: u32, slot: u32) -> Option<&str>;
    /// The reader that may be reading any slot of this table.
    fn reader_of_table(&self, table: u32) -> Option<&str>;
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Hello {
    session: u64,
    agent_version: String,
    boot_id: String,
}

#[derive(Debug)]
enum State {
    /// Reads of the old epoch may be in flight. When they end, the agent is welcomed if it has said hello.
    Ending {
        since: Instant,
        hello: Option<Hello>,
    },
    /// No hello has come in this epoch.
    Silent,
    /// The agent may name blocks of the file systems that it has proved, by files that contain what the challenge of
    /// this session demands.
    Open { hello: Hello, challenge: Challenge },
}

#[derive(Debug)]
struct Proved {
    image: u32,
    /// Size of the disk in bytes.
    size: u64,
    shown: String,
}

/// The session with the agent of one VM.
#[derive(Debug)]
pub struct AgentSession {
    table: Table,
    blocks: NamedBlocks,
    disks: Vec<Disk>,
    limits: Limits,
    state: State,
    proved: BTreeMap<FsId, Proved>,
    /// Numbers of the disks on which a block was named in this epoch.
    block_disks: BTreeSet<u32>,
    name_rate: TokenBucket,
    proof_rate: TokenBucket,
    /// Time of the agent's last message.
    last_message: Instant,
    /// Time of the last ping or hello request.
    last_ping: Instant,
    pings: u64,
    has_channel: bool,
    stat: AgentStat,
    journal: Journal,
    pipes: Option<Pipes>,
}

impl AgentSession {
    /// Starts a session and ends the epoch that a previous worker left in the table.
    pub fn new(table: Table, limits: Limits, journal: Journal, now: Instant) -> Self {
        table.end_epoch();
        let slots = table.slots().min(limits.blocks);
        Self {
            blocks: NamedBlocks::new(slots),
            disks: Vec::new(),
            state: State::Ending {
                since: now,
                hello: None,
            },
            proved: BTreeMap::new(),
            block_disks: BTreeSet::new(),
            name_rate: name_rate(limits, now),
            proof_rate: TokenBucket::new(now, MAX_PROOFS_PER_S, 4.0 * MAX_FILE_SYSTEMS as f64),
            last_message: now,
            last_ping: now,
            pings: 0,
            has_channel: false,
            stat: AgentStat::default(),
            journal,
            pipes: None,
            limits: Limits {
                blocks: slots,
                ..limits
            },
            table,
        }
    }

    /// Handles a new channel: asks the agent for its hello.
    pub fn open(&mut self, now: Instant, out: &mut Vec<ToAgent>) {
        self.end(now, "new channel");
        self.has_channel = true;
        self.send_hello_request(now, out);
    }

    /// Handles the end of the channel: withdraws all blocks.
    pub fn close(&mut self, now: Instant, why: &str) {
        if std::mem::take(&mut self.has_channel) {
            self.journal.log_limited(
                now,
                Level::Warning,
                "channel",
                &format!("agent channel closed: {why}"),
            );
        }
        self.end(now, "channel gone");
        self.forget_hello();
    }

    /// Withdraws all blocks; the agent has to say hello again. `why` is one of few fixed words, because ends are
    /// counted by it.
    pub fn end_epoch(&mut self, now: Instant, why: &str, out: &mut Vec<ToAgent>) {
        self.end(now, why);
        self.forget_hello();
        if self.has_channel {
            self.send_hello_request(now, out);
        }
    }

    /// Replaces the VM's disks and withdraws all blocks of the old ones.
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

    /// The current disks.
    pub fn disks(&self) -> &[Disk] {
        &self.disks
    }

    /// Handles a message of the agent.
    pub fn handle(&mut self, now: Instant, message: FromAgent, out: &mut Vec<ToAgent>) {
        self.last_message = now;
        match message {
            FromAgent::Hello {
                version,
                agent_version,
                boot_id,
                session,
                window: _,
            } => self.hello(
                now,
                version,
                Hello {
                    session,
                    agent_version: printable(&agent_version),
                    boot_id,
                },
            ),
            message => match self.state {
                State::Open { challenge, .. } => self.handle_open(now, message, challenge, out),
                // Messages before the welcome belong to an earlier session.
                _ => count(&mut self.stat.refusals, "said before hello"),
            },
        }
    }

    /// Handles a message in an open session.
    fn handle_open(
        &mut self,
        now: Instant,
        message: FromAgent,
        challenge: Challenge,
        out: &mut Vec<ToAgent>,
    ) {
        match message {
            FromAgent::Proof {
                fs,
                mount,
                kind,
                disk,
                map,
            } => {
                let what = format!("{} ({})", printable(&mount), printable(&kind));
                let content = challenge.proof_content(fs);
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
                for slot in self.blocks.end(fs) {
                    self.table.withdraw(slot);
                    self.stat.withdrawn += 1;
                }
                if let Some(proved) = self.proved.remove(&fs) {
                    let what = format!("{}: blocks withdrawn by the agent: {why:?}", proved.shown);
                    self.journal
                        .log_limited(now, Level::Info, "withdraw-all", &what);
                }
            }
            FromAgent::Stats(stats) => {
                let why = printable(&stats.why);
                if !why.is_empty() && why != self.stat.agent_why {
                    let what = format!("the agent names no blocks: {why}");
                    self.journal
                        .log_limited(now, Level::Warning, "closed", &what);
                }
                self.stat.agent = flat(&stats);
                self.stat.agent_why = why;
            }
            FromAgent::Hello { .. } | FromAgent::Pong { .. } => {}
            FromAgent::Pipe(message) => self.pipe(message, out),
        }
    }

    /// Handles a frame that is not a valid message.
    pub fn handle_malformed(&mut self, now: Instant, why: &dyn std::error::Error) {
        count(&mut self.stat.refusals, "no message");
        let why = match why.source() {
            Some(source) => format!("{why}: {source}"),
            None => why.to_string(),
        };
        self.journal.log_limited(
            now,
            Level::Warning,
            "misheard",
            &format!("invalid message of the agent: {}", printable(&why)),
        );
    }

    /// Confirms the withdrawn blocks that no reader reads any more, and welcomes the agent when the last read of the
    /// old epoch has ended.
    pub fn complete_pending(
        &mut self,
        now: Instant,
        readers: &dyn Readers,
        out: &mut Vec<ToAgent>,
    ) {
        let table = self.table.id();
        let confirmed = self
            .blocks
            .confirm(|slot| readers.reader_of_slot(table, slot).is_some());
        confirm(confirmed, out);
        if matches!(self.state, State::Ending { .. }) && readers.reader_of_table(table).is_none() {
            let State::Ending { hello, .. } = std::mem::replace(&mut self.state, State::Silent)
            else {
                return;
            };
            if let Some(hello) = hello {
                self.welcome(now, hello, out);
            }
        }
    }

    /// Sends pings and hello requests, and ends the session of a silent agent; call it at least once per second.
    pub fn tick(&mut self, now: Instant, out: &mut Vec<ToAgent>) {
        if !self.has_channel {
            return;
        }
        // A paused VM is silent, but its disks do not change.
        if self.pipes.as_ref().is_some_and(Pipes::is_paused) {
            self.last_message = now;
        }
        if let State::Open { .. } = self.state
            && now.saturating_duration_since(self.last_message) >= AGENT_TIMEOUT
        {
            let what = format!(
                "no message of the agent for {} s; its blocks are withdrawn",
                AGENT_TIMEOUT.as_secs()
            );
            self.journal.log(Level::Warning, &what);
            self.end_epoch(now, "silent agent", out);
        }
        if now.saturating_duration_since(self.last_ping) < PING_INTERVAL {
            return;
        }
        match &self.state {
            State::Open { hello, .. } => {
                self.pings += 1;
                out.push(ToAgent::Ping {
                    n: self.pings,
                    session: hello.session,
                });
                self.last_ping = now;
            }
            State::Silent => self.send_hello_request(now, out),
            State::Ending { .. } => {}
        }
    }

    /// Whether a confirmation or a welcome waits for a read to end; then call [`AgentSession::complete_pending`]
    /// soon.
    pub fn has_pending(&self) -> bool {
        matches!(self.state, State::Ending { .. }) || self.blocks.waiting().0 > 0
    }

    /// Looks up a block.
    pub fn find(&mut self, key: &BlockKey) -> Option<Found> {
        self.stat.lookups += 1;
        let Some(block) = self.blocks.find(key) else {
            self.stat.unknown += 1;
            return None;
        };
        Some(Found {
            lease: block.lease,
            image: block.image,
            data: file_map(&block.data),
            meta: file_map(&block.meta),
        })
    }

    /// The journal of this session.
    pub fn journal(&mut self) -> &mut Journal {
        &mut self.journal
    }

    fn hello(&mut self, now: Instant, version: u32, hello: Hello) {
        if version != agent::VERSION {
            count(&mut self.stat.refusals, "other version");
            let what = format!(
                "the agent has protocol version {version}, the host {}: its blocks are not served; install the same release in the VM",
                agent::VERSION
            );
            self.journal
                .log_limited(now, Level::Error, "version", &what);
            self.end(now, "other version");
            self.forget_hello();
            return;
        }
        // Until it is welcomed, an agent repeats its hello with another session number.
        if !matches!(self.state, State::Ending { .. }) {
            self.end(now, "hello");
        }
        if let State::Ending { hello: to, .. } = &mut self.state {
            *to = Some(hello);
        }
    }

    fn welcome(&mut self, now: Instant, hello: Hello, out: &mut Vec<ToAgent>) {
        let challenge = match random_bytes() {
            Ok(bytes) => Challenge(bytes),
            Err(e) => {
                let what = format!(
                    "the kernel gives no random bytes for the agent's proof: {e}; asking the agent for another hello"
                );
                self.journal.log_limited(now, Level::Error, "random", &what);
                return;
            }
        };
        let what = format!(
            "agent {} welcomed, epoch {}",
            hello.agent_version,
            self.table.epoch()
        );
        self.journal.log_limited(now, Level::Info, "welcome", &what);
        out.push(ToAgent::Welcome {
            version: agent::VERSION,
            session: hello.session,
            epoch: self.table.epoch(),
            limits: agent::Limits {
                blocks: self.limits.blocks,
                extents: self.limits.extents.min(MAX_EXTENTS as u32),
                names_per_s: self.limits.names_per_s,
            },
            challenge,
        });
        // The agent may send a burst of names at once.
        self.name_rate = name_rate(self.limits, now);
        self.last_message = now;
        self.last_ping = now;
        self.state = State::Open { hello, challenge };
    }

    fn end(&mut self, now: Instant, why: &str) {
        count(&mut self.stat.ends, why);
        let held = self.blocks.named();
        if held > 0 {
            let what = format!("{held} blocks withdrawn: {why}");
            self.journal.log_limited(now, Level::Notice, "end", &what);
        }
        self.stat.withdrawn += held as u64;
        self.table.end_epoch();
        self.blocks.clear();
        self.proved.clear();
        self.block_disks.clear();
        // The agent can no longer take these connections back.
        if let Some(pipes) = &mut self.pipes {
            pipes.reset_all();
        }
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

    fn send_hello_request(&mut self, now: Instant, out: &mut Vec<ToAgent>) {
        out.push(ToAgent::HelloRequest {
            version: agent::VERSION,
        });
        self.last_ping = now;
    }
}

fn name_rate(limits: Limits, now: Instant) -> TokenBucket {
    let per_s = f64::from(limits.names_per_s);
    TokenBucket::new(now, per_s, per_s * NAME_BURST_SECONDS)
}

fn confirm(leases: Vec<LeaseId>, out: &mut Vec<ToAgent>) {
    for some in leases.chunks(MAX_LEASES) {
        out.push(ToAgent::Withdrawn {
            leases: some.to_vec(),
        });
    }
}

fn count(reasons: &mut Reasons, why: &str) {
    if reasons.len() < MAX_REASONS || reasons.contains_key(why) {
        *reasons.entry(why.to_owned()).or_default() += 1;
    }
}

/// Makes a guest's text safe for a terminal: at most 200 characters, without control characters.
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
