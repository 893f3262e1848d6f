// SPDX-License-Identifier: Apache-2.0
//! The running agent: one thread that listens to everything and never waits for a disk.

mod door;
mod events;
mod host;
mod pipes;
mod survey;
pub mod volume;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use viola_proto::agent::{FrameReader, FrameWriter, FsId, Stats, Why};
use viola_proto::pipe::FromGuest;

pub(crate) use host::random;

use crate::config::{Config, Mount, NO_DATANODE};
use crate::core::block::{After, Millis};
use crate::core::door::Door;
use crate::core::ledger::Ledger;
use crate::core::place::Action;
use crate::core::session::Session;
use crate::io::channel::{Address, Channel};
use crate::io::status::{self, Question, Wish};
use crate::io::watch::Watch;
use crate::io::worker::{self, Job, Outcome, now};
use crate::lane::service::{self as lane, Lane};
use crate::pipe::{Pipes, Woken};
use crate::relay::Relay;
use crate::turbo::service::{self, Turbo};
use volume::{Proof, Volume};

/// Most bytes that wait for the host.
const WAITING: usize = 4 << 20;
/// Blocks that are looked at again in one round.
const CHECKS: usize = 2000;
/// Longest wait for the host's confirmation when the agent is paused or ends.
const FAREWELL: Millis = 5000;
/// How long the host and the workers are waited for when something waits for its turn.
const TURN: Millis = 50;
/// A job of the hands that takes longer means that the file system is frozen.
const FROZEN: Millis = 10_000;

/// Why the agent cannot run; one sentence.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct CannotRun {
    what: String,
    source: std::io::Error,
}

pub(crate) fn cannot<T>(
    what: impl Into<String>,
    result: std::io::Result<T>,
) -> Result<T, CannotRun> {
    let what = what.into();
    result.map_err(|source| CannotRun { what, source })
}

/// See the module.
pub struct Agent {
    config: Config,
    address: Address,
    ledger: Ledger,
    session: Session,
    channel: Option<Channel>,
    /// When the channel is opened again.
    open_at: Millis,
    reader: FrameReader,
    writer: FrameWriter,
    watch: Watch,
    volumes: BTreeMap<FsId, Volume>,
    next_fs: FsId,
    missing: Vec<String>,
    /// Names that a copy is about to be renamed to, where the kernel tells the ends of a rename apart.
    copies: HashSet<(FsId, String)>,
    report: worker::Report,
    outcomes: Receiver<Outcome>,
    outcome_wake: Arc<OwnedFd>,
    questions: Receiver<Question>,
    question_wake: Arc<OwnedFd>,
    signals: OwnedFd,
    survey_at: Millis,
    stats_at: Millis,
    paused: bool,
    /// Whether the DataNode gives its blocks without a token.
    door: Door,
    door_at: Millis,
    /// The DataNode's lock in each data directory, as it was last seen there.
    locks: HashMap<PathBuf, door::Lock>,
    /// Those who want to know when no read is in flight, and until when they wait.
    patient: Vec<(Question, Millis)>,
    /// When the agent ends at the latest.
    ends: Option<Millis>,
    boot_id: String,
    /// Blocks of others, for this VM to read.
    relay: Option<Relay>,
    /// Bytes that the host moves for programs of this VM.
    pipes: Option<Pipes>,
    /// What the pipes still have to say, in this session.
    words: VecDeque<FromGuest>,
    /// What had something to say when the last wait ended.
    ready: Ready,
    /// Who of the pipes.
    woken: Woken,
    /// A number for the next session.
    fresh: u64,
    /// The vCPU that the kernel's I/O is on.
    turbo: Option<Turbo>,
    /// The bond with a virtual function of the host's NIC.
    lane: Option<Lane>,
}

/// Which descriptors are to be read. A program may wait, and in some guests a system call takes long: what has nothing to say is
/// not asked.
#[derive(Debug, Clone, Copy)]
struct Ready {
    events: bool,
    outcomes: bool,
    questions: bool,
    signals: bool,
    channel: bool,
}

/// When it is not known.
const ALL_READY: Ready = Ready {
    events: true,
    outcomes: true,
    questions: true,
    signals: true,
    channel: true,
};

impl Agent {
    /// Opens everything that must be there.
    ///
    /// # Errors
    /// One sentence: no fanotify, or another agent.
    pub fn new(config: Config) -> Result<Self, CannotRun> {
        let address = Address::parse(&config.channel).map_err(|e| CannotRun {
            what: "channel".into(),
            source: std::io::Error::other(e),
        })?;
        let watch = cannot(
            "watching file systems (needs root and Linux 5.9 with fanotify)",
            Watch::new(),
        )?;
        // before there are threads, which inherit what is blocked
        let signals = cannot("signals", signals())?;
        let relay = config.mount.as_ref().map(Mount::start).transpose()?;
        let (report, outcomes, outcome_wake) = cannot("workers", worker::Report::new())?;
        let (questions, question_wake) = cannot(
            format!("status socket {}", config.status.display()),
            status::serve(&config.status),
        )?;
        let pipes = match config.pipes() {
            Some(settings) => {
                let started = Pipes::start(settings);
                Some(cannot(
                    format!("pipes at {}", settings.socket.display()),
                    started,
                )?)
            }
            None => None,
        };
        let turbo = cannot("turbo", service::begin(config.turbo.as_ref()))?;
        let lane = cannot("lane", lane::begin(config.lane.as_ref()))?;
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .unwrap_or_default()
            .trim()
            .to_owned();
        let door = Door::new(config.datanode == NO_DATANODE || config.data.is_empty());
        let mut ledger = Ledger::new(config.times(), config.bounds());
        ledger.pause(!door.is_open());
        Ok(Self {
            ledger,
            config,
            address,
            session: Session::new(now()),
            channel: None,
            open_at: 0,
            reader: FrameReader::new(),
            writer: FrameWriter::new(WAITING),
            watch,
            volumes: BTreeMap::new(),
            next_fs: 1,
            missing: Vec::new(),
            copies: HashSet::new(),
            report,
            outcomes,
            outcome_wake,
            questions,
            question_wake,
            signals,
            survey_at: 0,
            stats_at: 0,
            paused: false,
            door,
            door_at: 0,
            locks: HashMap::new(),
            patient: Vec::new(),
            ends: None,
            boot_id,
            relay,
            pipes,
            words: VecDeque::new(),
            ready: ALL_READY,
            woken: Woken::default(),
            fresh: random(),
            turbo,
            lane,
        })
    }

    /// Works until a signal ends it.
    ///
    /// # Errors
    /// When the kernel's queue of events cannot be read any more.
    pub fn run(mut self) -> Result<(), CannotRun> {
        loop {
            self.wait();
            // what happened to the blocks comes first: nothing may be named past it
            if self.ready.events {
                cannot("reading events", self.take_events())?;
            }
            let time = now();
            self.pipes.iter_mut().for_each(|pipes| pipes.at(time));
            self.take_outcomes(time);
            self.hear(time);
            self.turn_pipes(time);
            self.answer(time);
            self.survey(time);
            self.keep_door(time);
            self.check(time);
            self.greet(time);
            self.ledger.tick(time);
            self.act(time);
            self.keep_pipes();
            self.flush(time);
            if self.over(time) {
                let _ = std::fs::remove_file(&self.config.status);
                return Ok(());
            }
        }
    }

    /// Sleeps until there is something to do.
    fn wait(&mut self) {
        let time = now();
        let mut until = (time + 1000).min(self.survey_at);
        if self.channel.is_some() {
            until = until.min(self.session.due());
        }
        until = until.min(self.ledger.next_due().unwrap_or(until));
        if self.ledger.busy() || self.ends.is_some() || !self.patient.is_empty() {
            until = until.min(time + TURN);
        }
        if self.volumes.values().any(|v| !v.check.is_empty()) {
            until = time;
        }
        let rest = self.pipes.as_mut().and_then(Pipes::rest);
        let limit = Duration::from_millis(until.saturating_sub(time));
        let limit = rest.map_or(limit, |rest| rest.min(limit));
        let limit = Timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: limit.subsec_nanos().into(),
        };
        let mut fds = vec![
            PollFd::new(&self.watch, PollFlags::IN),
            PollFd::from_borrowed_fd(self.outcome_wake.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.question_wake.as_fd(), PollFlags::IN),
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
        let waited = poll(&mut fds, Some(&limit));
        let is_ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
        let (ready, woken) = match waited {
            Ok(_) => {
                let ready = Ready {
                    events: is_ready(0),
                    outcomes: is_ready(1),
                    questions: is_ready(2),
                    signals: is_ready(3),
                    channel: self.channel.is_some() && is_ready(4),
                };
                let spoke = (own..fds.len()).map(is_ready);
                (ready, self.pipes.as_ref().map(|pipes| pipes.woken(spoke)))
            }
            // an interrupted wait is as good as a short one
            Err(_) => (ALL_READY, None),
        };
        drop(fds);
        self.ready = ready;
        self.woken = woken.unwrap_or_default();
        let mut count = [0; 8];
        if ready.outcomes {
            let _ = rustix::io::read(&*self.outcome_wake, &mut count);
        }
        if ready.questions {
            let _ = rustix::io::read(&*self.question_wake, &mut count);
        }
    }

    /// What the workers have done.
    fn take_outcomes(&mut self, now: Millis) {
        while let Ok(outcome) = self.outcomes.try_recv() {
            match outcome {
                Outcome::Linked(id, result) => {
                    if result.as_ref().is_err_and(|e| e.left) {
                        self.give(id, |_, place| Some(Job::Drop(id, place)));
                    }
                    self.ledger.linked(now, id, result.map_err(|e| e.after));
                }
                Outcome::Dropped(id, done) => self.ledger.dropped(now, id, done),
                Outcome::Mapped(id, turn, result) => {
                    if let Err((After::Refuse, why)) = &result
                        && let Some(volume) = self.volume_of(id)
                    {
                        volume.refusal = Some(why.clone());
                    }
                    let result = result.map_err(|(after, _)| after);
                    self.ledger.mapped(now, id, turn, result);
                }
                Outcome::Earlier(fs, bytes) => self.ledger.foreign(fs, bytes),
                Outcome::Door(answer) => self.take_answer(now, answer),
                Outcome::Proof(fs, result) => self.send_proof(now, fs, result),
                Outcome::Found(places) => {
                    for place in places {
                        if self.volumes.get(&place.fs).is_some_and(|v| !v.retiring) {
                            self.ledger.scanned(now, place);
                        }
                    }
                }
                Outcome::Scanned(fs) => {
                    self.ledger.count_scan();
                    let all = self.ledger.of_fs(fs);
                    if let Some(volume) = self.volumes.get_mut(&fs) {
                        volume.scanning = false;
                        volume.check = all.into();
                    }
                }
            }
        }
    }

    fn volume_of(&mut self, id: u64) -> Option<&mut Volume> {
        let fs = self.ledger.entry(id)?.place.fs;
        self.volumes.get_mut(&fs)
    }

    /// Carries out what the ledger has decided.
    fn act(&mut self, now: Millis) {
        let mut withdrawals: BTreeMap<Why, Vec<u64>> = BTreeMap::new();
        for action in self.ledger.actions() {
            match action {
                Action::Name(id, lease) => self.send_name(now, id, lease),
                Action::Withdraw(lease, why) => withdrawals.entry(why).or_default().push(lease),
                Action::Link(id) => self.give(id, |_, place| Some(Job::Link(id, place))),
                Action::Drop(id) => self.give(id, |_, place| Some(Job::Drop(id, place))),
                Action::Map(id, turn) => {
                    self.give(id, |pin, place| Some(Job::Map(id, turn, place, pin?)))
                }
                Action::Forget(..) => {}
            }
        }
        for (why, leases) in withdrawals {
            self.send_withdrawals(&leases, why);
        }
    }

    fn give(
        &mut self,
        id: u64,
        job: impl FnOnce(Option<crate::core::place::Pin>, crate::core::place::Place) -> Option<Job>,
    ) {
        if let Some(entry) = self.ledger.entry(id)
            && let Some(volume) = self.volumes.get(&entry.place.fs)
            && let Some(job) = job(entry.pin, entry.place.clone())
        {
            volume.workers.give(job);
        }
    }

    /// Answers those who ask at the socket, and those who wait for the last read to end.
    fn answer(&mut self, now: Millis) {
        while let Ok(question) = self.questions.try_recv() {
            match question.wish {
                Wish::Status => {
                    // whoever is told of a disk may ask for it at once
                    self.keep_pipes();
                    let _ = question.answer.send(self.describe());
                }
                Wish::Pause => {
                    self.pause(now, true);
                    self.patient.push((question, now + FAREWELL));
                }
                Wish::Resume => {
                    self.pause(now, false);
                    let _ = question.answer.send(self.describe());
                }
            }
        }
        let none = self.outstanding() == 0;
        let (done, patient): (Vec<_>, Vec<_>) = std::mem::take(&mut self.patient)
            .into_iter()
            .partition(|(_, until)| none || *until <= now);
        self.patient = patient;
        for (question, _) in done {
            let _ = question.answer.send(self.describe());
        }
    }

    fn pause(&mut self, now: Millis, paused: bool) {
        self.paused = paused;
        self.ledger.pause(self.is_paused());
        if paused {
            for fs in self.volumes.keys().copied().collect::<Vec<_>>() {
                self.withdraw_all(now, fs, After::Again, Why::Filesystem);
            }
        }
    }

    /// How it is.
    fn describe(&self) -> status::Report {
        status::Report {
            version: env!("CARGO_PKG_VERSION").into(),
            host: match &self.channel {
                Some(_) => self.session.describe(),
                None => format!("{} cannot be opened", self.address),
            },
            paused: self.paused,
            closed: self.closed(),
            outstanding: self.outstanding(),
            stats: self.stats(),
            volumes: self.volumes.values().map(Volume::report).collect(),
            missing: self.missing.clone(),
            mount: self.relay.as_ref().map(Relay::report),
            pipe: self.pipes.as_ref().map(Pipes::report),
            turbo: self.turbo.as_ref().map(Turbo::report),
            lane: self.lane.as_ref().map(Lane::report),
        }
    }

    /// What it holds, and why it names nothing.
    fn stats(&self) -> Stats {
        Stats {
            why: self.closed(),
            ..self.ledger.stats()
        }
    }

    /// Whether the agent has ended, after a signal: links that are not confirmed stay, for the next one.
    fn over(&mut self, now: Millis) -> bool {
        let mut info = [0; 128];
        if self.ends.is_none()
            && self.ready.signals
            && rustix::io::read(&self.signals, &mut info).is_ok()
        {
            self.ends = Some(now + FAREWELL);
            self.ledger.pause(true);
            for fs in self.volumes.keys().copied().collect::<Vec<_>>() {
                self.ledger.unproven(now, fs, After::Forget, Why::Stopping);
                if let Some(volume) = self.volumes.get_mut(&fs) {
                    volume.retiring = true;
                }
            }
        }
        self.ends
            .is_some_and(|ends| ends <= now || self.has_left(now))
    }

    /// Whether nothing is left to be done, and all is said.
    fn has_left(&mut self, now: Millis) -> bool {
        let mut names = self.volumes.keys();
        if !names.all(|fs| self.ledger.of_fs(*fs).is_empty())
            || self.pipes.as_ref().is_some_and(|pipes| pipes.busy() > 0)
        {
            return false;
        }
        // the last pipe may have said that its connection is back just now
        self.take_outcomes(now);
        self.keep_pipes();
        self.flush(now);
        self.channel.is_none() || self.words.is_empty() && self.writer.waiting() == 0
    }

    /// Stops all reads of a file system; its proof is void.
    fn withdraw_all(&mut self, now: Millis, fs: FsId, after: After, why: Why) {
        if self.session.open() && self.ledger.outstanding() > 0 {
            self.say(&viola_proto::agent::FromAgent::WithdrawAll { fs, why });
        }
        self.ledger.unproven(now, fs, after, why);
        if let Some(volume) = self.volumes.get_mut(&fs) {
            volume.proof = Proof::None;
            volume.failures = 0;
        }
    }
}

/// A descriptor that is readable when the program is to end.
pub(crate) fn signals() -> std::io::Result<OwnedFd> {
    use std::os::fd::FromRawFd;
    // SAFETY: the set is ours, made empty before use; the calls are checked where they can fail.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            libc::sigaddset(&raw mut set, signal);
        }
        if libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) < 0 {
            return Err(std::io::Error::last_os_error());
        }
        let raw = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if raw < 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(raw))
    }
}
