// SPDX-License-Identifier: Apache-2.0
//! The main loop of an agent that serves blocks or pipes: one thread that waits for all events and never for a disk.
//!
//! | module | contents |
//! |---|---|
//! | `session`, `host` | the session and the messages of the host |
//! | `mounts`, [`volume`] | the file systems of the configured directories |
//! | `events` | what fanotify events mean for blocks |
//! | `access` | when the DataNode is probed |
//! | `jobs` | the ledger's decisions, and the workers' results |
//! | `pipes` | the pipes' messages |
//! | `requests` | `viola-agent status`, `pause` and `resume` |
//! | [`standalone`] | the agent without blocks and pipes |

mod access;
mod events;
mod host;
mod jobs;
mod mounts;
mod pipes;
mod requests;
mod session;
pub mod standalone;
pub mod volume;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::path::PathBuf;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use viola_proto::agent::{FrameReader, FrameWriter, FromAgent, FsId, WithdrawReason};
use viola_proto::pipe::PipeRequest;

use crate::blocks::access::Access;
use crate::blocks::block::Disposition;
use crate::blocks::ledger::Ledger;
use crate::blocks::watch::Watch;
use crate::blocks::worker::Outcome;
use crate::clock::{Millis, now};
use crate::config::{Config, NO_DATANODE};
use crate::error::{StartError, start_error};
use crate::io::channel::{Address, Channel};
use crate::io::queue;
use crate::io::random::random;
use crate::io::signals::{TERMINATION, signal_fd};
use crate::lane::service::{self as lane, Lane};
use crate::pipe::{Pipes, Wakeups};
use crate::relay::Relay;
use crate::status::{self, Request};
use crate::turbo::service::{self, Turbo};
use session::Session;
use volume::{ProofState, Volume};

/// Maximum bytes that wait to be sent to the host.
const MAX_OUTBOX_BYTES: usize = 4 << 20;
/// Maximum number of blocks whose files are checked in one round.
const MAX_CHECKS_PER_ROUND: usize = 2000;
/// How long a pause, or the end of the agent, waits for the host to confirm all withdrawals.
const WITHDRAW_TIMEOUT: Millis = 5000;
/// Longest sleep while blocks wait for the rate limit, or a pause or the end waits for the host.
const BUSY_POLL_INTERVAL: Millis = 50;
/// A link job that takes longer means that the file system is frozen.
const FROZEN_TIMEOUT: Millis = 10_000;

/// The agent with its channel, ledger, volumes and services.
pub struct Agent {
    config: Config,
    address: Address,
    ledger: Ledger,
    session: Session,
    channel: Option<Channel>,
    /// When the channel is opened again.
    reconnect_at: Millis,
    reader: FrameReader,
    writer: FrameWriter,
    watch: Watch,
    volumes: BTreeMap<FsId, Volume>,
    next_fs: FsId,
    unusable: Vec<String>,
    /// Names that a copy is about to be renamed to, on kernels that report the two ends of a rename as two
    /// events.
    copies: HashSet<(FsId, String)>,
    outcome_sender: queue::Sender<Outcome>,
    outcomes: queue::Receiver<Outcome>,
    requests: queue::Receiver<Request>,
    signals: OwnedFd,
    next_mount_check: Millis,
    next_stats: Millis,
    paused: bool,
    /// Whether the DataNode serves its blocks without a token.
    access: Access,
    next_access_check: Millis,
    /// The DataNode's lock file in each data directory, as last seen.
    locks: HashMap<PathBuf, access::LockStamp>,
    /// Pause requests that wait for the last read to end, and their deadlines.
    pause_waiters: Vec<(Request, Millis)>,
    end_by: Option<Millis>,
    boot_id: String,
    /// The mount of other VMs' blocks.
    relay: Option<Relay>,
    /// The pipes of this VM's programs.
    pipes: Option<Pipes>,
    /// Messages of the pipes that wait for room, in this session.
    pipe_outbox: VecDeque<PipeRequest>,
    /// Descriptors that were readable after the last wait.
    ready: Ready,
    /// The pipes' descriptors that were readable.
    wakeups: Wakeups,
    /// Number of the next session.
    next_session: u64,
    /// The turbo vCPU.
    turbo: Option<Turbo>,
    /// The bond with a VF.
    lane: Option<Lane>,
}

/// Which descriptors to read after a wait. In some guests a system call takes long, and a program may be waiting: the
/// agent reads no descriptor that has nothing.
#[derive(Debug, Clone, Copy)]
struct Ready {
    events: bool,
    outcomes: bool,
    requests: bool,
    signals: bool,
    channel: bool,
}

/// All descriptors, for a wait that failed and so found no readable ones.
const ALL_READY: Ready = Ready {
    events: true,
    outcomes: true,
    requests: true,
    signals: true,
    channel: true,
};

impl Agent {
    /// Opens everything that the agent needs.
    ///
    /// # Errors
    /// One sentence: no fanotify, a socket or port that cannot be opened, or another running agent.
    pub fn new(config: Config) -> Result<Self, StartError> {
        let address = Address::parse(&config.channel).map_err(std::io::Error::other);
        let address = start_error("channel", address)?;
        let watch = start_error(
            "watching file systems (needs root and Linux 5.9 with fanotify)",
            Watch::new(),
        )?;
        // before the first thread starts, which inherits the signal mask
        let signals = start_error("signals", signal_fd(&TERMINATION))?;
        let relay = config.mount.as_ref().map(Relay::start).transpose()?;
        let (outcome_sender, outcomes) = start_error("workers", queue::queue())?;
        let requests = start_error(
            format!("status socket {}", config.status.display()),
            status::serve(&config.status),
        )?;
        let pipes = match config.pipes() {
            Some(settings) => {
                let what = format!("pipes at {}", settings.socket.display());
                Some(start_error(what, Pipes::start(settings))?)
            }
            None => None,
        };
        let turbo = start_error("turbo", service::start(config.turbo.as_ref()))?;
        let lane = start_error("lane", lane::start(config.lane.as_ref()))?;
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .unwrap_or_default()
            .trim()
            .to_owned();
        let access = Access::new(config.datanode == NO_DATANODE || config.data.is_empty());
        let mut ledger = Ledger::new(config.times(), config.bounds());
        ledger.pause(!access.is_open());
        Ok(Self {
            ledger,
            config,
            address,
            session: Session::new(now()),
            channel: None,
            reconnect_at: 0,
            reader: FrameReader::new(),
            writer: FrameWriter::new(MAX_OUTBOX_BYTES),
            watch,
            volumes: BTreeMap::new(),
            next_fs: 1,
            unusable: Vec::new(),
            copies: HashSet::new(),
            outcome_sender,
            outcomes,
            requests,
            signals,
            next_mount_check: 0,
            next_stats: 0,
            paused: false,
            access,
            next_access_check: 0,
            locks: HashMap::new(),
            pause_waiters: Vec::new(),
            end_by: None,
            boot_id,
            relay,
            pipes,
            pipe_outbox: VecDeque::new(),
            ready: ALL_READY,
            wakeups: Wakeups::default(),
            next_session: random(),
            turbo,
            lane,
        })
    }

    /// Runs until a signal ends it.
    ///
    /// # Errors
    /// When the fanotify queue cannot be read any more.
    pub fn run(mut self) -> Result<(), StartError> {
        loop {
            self.wait();
            // block events come first: nothing may be named before they are handled
            if self.ready.events {
                start_error("reading events", self.read_events())?;
            }
            let time = now();
            self.pipes.iter_mut().for_each(|pipes| pipes.set_time(time));
            self.handle_outcomes(time);
            self.read_host(time);
            self.run_pipes(time);
            self.answer_requests(time);
            self.check_mounts(time);
            self.check_access(time);
            self.recheck_blocks(time);
            self.drive_session(time);
            self.ledger.tick(time);
            self.dispatch_actions(time);
            self.update_pipes();
            self.flush(time);
            if self.is_finished(time) {
                let _ = std::fs::remove_file(&self.config.status);
                return Ok(());
            }
        }
    }

    /// Sleeps until a descriptor is readable or something is due.
    fn wait(&mut self) {
        let time = now();
        let mut until = (time + 1000).min(self.next_mount_check);
        if self.channel.is_some() {
            until = until.min(self.session.due());
        }
        until = until.min(self.ledger.next_due().unwrap_or(until));
        if self.ledger.has_queued() || self.end_by.is_some() || !self.pause_waiters.is_empty() {
            until = until.min(time + BUSY_POLL_INTERVAL);
        }
        if self.volumes.values().any(|v| !v.recheck.is_empty()) {
            until = time;
        }
        let rest = self.pipes.as_mut().and_then(Pipes::housekeep);
        let limit = Duration::from_millis(until.saturating_sub(time));
        let limit = rest.map_or(limit, |rest| rest.min(limit));
        let limit = Timespec::try_from(limit).ok();
        let mut fds = vec![
            PollFd::new(&self.watch, PollFlags::IN),
            PollFd::new(&self.outcomes, PollFlags::IN),
            PollFd::new(&self.requests, PollFlags::IN),
            PollFd::new(&self.signals, PollFlags::IN),
        ];
        if let Some(channel) = &self.channel {
            let mut flags = PollFlags::IN;
            if self.writer.waiting() > 0 {
                flags |= PollFlags::OUT;
            }
            fds.push(PollFd::new(channel, flags));
        }
        let own = fds.len();
        let pipes = self.pipes.iter().flat_map(Pipes::fds);
        fds.extend(pipes.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let waited = poll(&mut fds, limit.as_ref());
        let is_ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
        let (ready, wakeups) = match waited {
            Ok(_) => {
                let ready = Ready {
                    events: is_ready(0),
                    outcomes: is_ready(1),
                    requests: is_ready(2),
                    signals: is_ready(3),
                    channel: self.channel.is_some() && is_ready(4),
                };
                let program_fds = (own..fds.len()).map(is_ready);
                (
                    ready,
                    self.pipes.as_ref().map(|pipes| pipes.wakeups(program_fds)),
                )
            }
            // an interrupted wait is harmless
            Err(_) => (ALL_READY, None),
        };
        drop(fds);
        self.ready = ready;
        self.wakeups = wakeups.unwrap_or_default();
        if ready.outcomes {
            self.outcomes.clear();
        }
        if ready.requests {
            self.requests.clear();
        }
    }

    /// Whether the agent is done, after a signal. Links that the host has not confirmed stay for the next agent.
    fn is_finished(&mut self, now: Millis) -> bool {
        let mut info = [0; 128];
        if self.end_by.is_none()
            && self.ready.signals
            && rustix::io::read(&self.signals, &mut info).is_ok()
        {
            self.end_by = Some(now + WITHDRAW_TIMEOUT);
            self.ledger.pause(true);
            for fs in self.volumes.keys().copied().collect::<Vec<_>>() {
                self.ledger
                    .fs_unproven(now, fs, Disposition::Forget, WithdrawReason::Stopping);
                if let Some(volume) = self.volumes.get_mut(&fs) {
                    volume.retiring = true;
                }
            }
        }
        self.end_by
            .is_some_and(|end_by| end_by <= now || self.is_drained(now))
    }

    /// Whether no link and no pipe is left, and every message is sent.
    fn is_drained(&mut self, now: Millis) -> bool {
        let mut names = self.volumes.keys();
        if !names.all(|fs| self.ledger.entries_of_fs(*fs).is_empty())
            || self.pipes.as_ref().is_some_and(|pipes| pipes.busy() > 0)
        {
            return false;
        }
        // the last pipe may have put its connection back just now
        self.handle_outcomes(now);
        self.update_pipes();
        self.flush(now);
        self.channel.is_none() || self.pipe_outbox.is_empty() && self.writer.waiting() == 0
    }

    /// Withdraws all blocks of a file system and voids its proof.
    fn withdraw_all(&mut self, now: Millis, fs: FsId, after: Disposition, why: WithdrawReason) {
        if self.session.is_open() && self.ledger.outstanding() > 0 {
            self.send(&FromAgent::WithdrawAll { fs, why });
        }
        self.ledger.fs_unproven(now, fs, after, why);
        if let Some(volume) = self.volumes.get_mut(&fs) {
            volume.proof = ProofState::Unproven;
            volume.failures = 0;
        }
    }
}
