// SPDX-License-Identifier: Apache-2.0
//! The engine of the pipes: it holds the programs' connections and carries out the actions of each pipe's
//! [`Life`](super::life::Life).
//!
//! | module | contents |
//! |---|---|
//! | `entry` | one pipe: its ends, and what the host has returned of them |
//! | `programs` | packets of the programs |
//! | `start` | from a program's request to ends that are ready |
//! | `drain` | empties a connection that the host holds |
//! | `handover` | extracts connections, and hands a pipe over to the host |
//! | `host` | messages of the host |

mod drain;
mod drain_poll;
mod entry;
mod handover;
mod host;
mod programs;
mod start;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit, setrlimit};
use viola_proto::pipe::library::LibraryReply;
use viola_proto::pipe::{PipeId, PipeRequest};

use super::counters::Counters;
use super::lease::Leases;
use super::mapper::{MapJob, run_mapper};
use super::next_hop::NextHopCache;
use super::programs::{ProgramId, Programs};
use super::reason::Reason;
use super::settings::Settings;
use super::sink::note::Notes;
use entry::{BOTH, Pipe, Sink, Source};

use super::report::PipeReport;
use super::state::{Completion, HostState, Outgoing};
use crate::clock::Millis;
use crate::io::queue;
use crate::io::random::random;
use crate::pipe::life::{Action, Event};

/// All pipes of the agent. Dropping it ends them.
#[derive(Debug)]
pub struct Pipes {
    max_pipes: usize,
    relay_allowed: bool,
    /// Identifies this run of the agent.
    run: u64,
    programs: Programs,
    leases: Leases,
    next_hops: NextHopCache,
    pipes: BTreeMap<PipeId, Pipe>,
    next: PipeId,
    host_state: HostState,
    completions: queue::Receiver<Completion>,
    completion_sender: queue::Sender<Completion>,
    /// Devices on which the files of earlier runs are restored.
    restored_devices: BTreeSet<String>,
    /// Programs' descriptors to be closed when no program waits for the agent.
    closable: Vec<OwnedFd>,
    /// Buffer for forwarded bytes.
    buffer: Vec<u8>,
    mapper: Sender<MapJob>,
    /// Messages for the host.
    outbox: VecDeque<Outgoing>,
    counters: Arc<Counters>,
    socket: PathBuf,
}

/// What a wait has found. Nothing else is read: a program waits, and a system call may take long.
#[derive(Debug, Default)]
pub struct Wakeups {
    /// Programs whose sockets are readable.
    programs: Vec<ProgramId>,
    /// Another thread has sent a completion.
    by_thread: bool,
    /// A writer waits for a lease.
    by_writer: bool,
    /// A program connects.
    connects: bool,
}

/// Number of descriptors before those of the programs.
const FIXED_FDS: usize = 3;
/// Time between two checks for idle leases.
const IDLE_LEASE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// How long the end of the agent waits for files to be settled. The next run settles the others by their notes.
const SETTLE_TIMEOUT: Duration = Duration::from_millis(700);

impl Pipes {
    /// Listens for programs and starts the mapper. No pipe starts before the first [`HostState`].
    /// The calling thread must make all other calls too: it gets the signals of broken leases.
    ///
    /// # Errors
    /// A user of `[pipe]` that does not exist, or the kernel's error.
    pub fn start(settings: &Settings) -> io::Result<Self> {
        raise_descriptor_limit();
        let uids = settings
            .uids("/etc/passwd".as_ref())
            .map_err(io::Error::other)?;
        // before the thread starts, which inherits the signal mask
        let leases = Leases::new()?;
        let (completion_sender, completions) = queue::queue()?;
        let counters = Arc::new(Counters::default());
        let (mapper, jobs) = channel();
        let (results, shared) = (completion_sender.clone(), Arc::clone(&counters));
        std::thread::Builder::new()
            .name("viola-pipe-map".into())
            .spawn(move || run_mapper(&jobs, &results, &shared))?;
        Ok(Self {
            max_pipes: settings.max_pipes as usize,
            relay_allowed: settings.relay,
            run: random(),
            programs: Programs::listen(&settings.socket, uids)?,
            leases,
            next_hops: NextHopCache::default(),
            pipes: BTreeMap::new(),
            next: 1,
            host_state: HostState::default(),
            completions,
            completion_sender,
            restored_devices: BTreeSet::new(),
            closable: Vec::new(),
            buffer: Vec::new(),
            mapper,
            outbox: VecDeque::new(),
            counters,
            socket: settings.socket.clone(),
        })
    }

    /// Descriptors to wait for, in the order of [`Pipes::wakeups`].
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let fixed: [_; FIXED_FDS] = [
            self.completions.as_fd(),
            self.leases.signals(),
            self.programs.listener(),
        ];
        let programs = self.programs.sockets().map(|(_, socket)| socket);
        fixed.into_iter().chain(programs)
    }

    /// Translates which of [`Pipes::fds`] are readable.
    pub fn wakeups(&self, mut ready: impl Iterator<Item = bool>) -> Wakeups {
        let mut next = || ready.next().unwrap_or(false);
        let (by_thread, by_writer, connects) = (next(), next(), next());
        let programs = self.programs.sockets().filter(|_| next());
        Wakeups {
            programs: programs.map(|(id, _)| id).collect(),
            by_thread,
            by_writer,
            connects,
        }
    }

    /// Sets the current time. In some guests reading the clock is a system call.
    pub fn set_time(&mut self, now: Millis) {
        self.next_hops.set_time(now);
        self.leases.set_time(now);
    }

    /// Handles what a wait has found.
    pub fn run(&mut self, wakeups: Wakeups) {
        // a writer waits for this
        if wakeups.by_writer {
            for pipe in self.leases.take_broken() {
                self.apply(pipe, Event::Halt, Reason::HasWriter);
            }
        }
        if wakeups.by_thread {
            self.completions.clear();
            while let Some(completion) = self.completions.try_recv() {
                self.handle_completion(completion);
            }
        }
        self.drain_held();
        for program in wakeups.programs {
            self.handle_program(program);
        }
        if wakeups.connects {
            self.programs.accept();
        }
    }

    /// Closes and releases what is not needed any more. Returns how long the main loop may sleep.
    pub fn housekeep(&mut self) -> Option<Duration> {
        self.closable.clear();
        let awaited = self.pipes.values().filter(|p| p.life.is_awaited());
        let read = self.pipes.values().filter(|p| p.life.uses_files());
        self.counters.set_active(awaited.count(), read.count());
        let idle_leases = self
            .leases
            .release_idle(self.host_state.halt)
            .then_some(IDLE_LEASE_CHECK_INTERVAL);
        [idle_leases, self.time_to_next_drain()]
            .into_iter()
            .flatten()
            .min()
    }

    /// The next message for the host.
    pub fn next_message(&mut self) -> Option<Outgoing> {
        self.outbox.pop_front()
    }

    /// A hand-over could not be sent: the host never got this pipe.
    pub fn message_not_sent(&mut self, pipe: PipeId) {
        self.apply(pipe, Event::Refused, Reason::ChannelFull);
    }

    /// Number of pipes whose files or connections the host may touch.
    pub fn active(&self) -> u64 {
        self.counters.active()
    }

    /// Number of pipes that have not ended.
    pub fn busy(&self) -> u64 {
        self.counters.busy()
    }

    /// The report for `viola-agent status`.
    pub fn report(&self) -> PipeReport {
        self.counters.report(&self.socket)
    }

    /// Ends all pipes, and settles the files that the host does not have.
    fn end(&mut self) {
        self.apply_to_all(Event::SessionClosed);
        let until = Instant::now() + SETTLE_TIMEOUT;
        while self.pipes.values().any(|p| p.life.is_settling()) {
            let rest = until.saturating_duration_since(Instant::now());
            match self.completions.recv_timeout(rest) {
                Some(completion) => self.handle_completion(completion),
                None => return,
            }
        }
    }

    fn handle_completion(&mut self, completion: Completion) {
        match completion {
            Completion::Mapped(pipe, result) => self.mapped(pipe, result),
            Completion::Prepared(pipe, result) => self.prepared(pipe, result),
            Completion::Settled(pipe, errno) => {
                self.apply(pipe, Event::Settled(errno), Reason::SystemError)
            }
        }
    }

    /// Sets the state of the host.
    pub fn set_host_state(&mut self, host_state: HostState) {
        if host_state == self.host_state {
            return;
        }
        let before = std::mem::replace(&mut self.host_state, host_state);
        if before.epoch != self.host_state.epoch {
            if before.epoch.is_some() {
                self.apply_to_all(Event::SessionClosed);
            }
            if self.host_state.epoch.is_some() {
                self.apply_to_all(Event::SessionOpened);
            }
        }
        if self.host_state.halt {
            self.apply_to_all(Event::Halt);
        }
        if self.host_state.epoch.is_some() {
            self.restore_earlier_files();
        }
    }

    /// Restores the files that a killed agent has left immutable: its session is over when another one is open.
    fn restore_earlier_files(&mut self) {
        for (device, disk) in &self.host_state.volumes {
            if !self.restored_devices.insert(device.clone()) {
                continue;
            }
            let notes = Notes::new(&disk.point, self.run);
            let counters = Arc::clone(&self.counters);
            let work = move || match notes.restore_earlier() {
                Ok(_) => {}
                Err(e) => counters.set_last_detail(format!(
                    "a file that an earlier agent has left immutable: {e}"
                )),
            };
            // without a thread they stay immutable, and a pipe into them reports that
            let thread = std::thread::Builder::new().name("viola-pipe-sweep".into());
            if thread.spawn(work).is_err() {
                self.restored_devices.clear();
                return;
            }
        }
    }

    fn send(&mut self, message: PipeRequest) {
        if let Some(epoch) = self.host_state.epoch {
            self.outbox.push_back(Outgoing { epoch, message });
        }
    }

    /// Applies an event to all pipes.
    fn apply_to_all(&mut self, event: Event) {
        for pipe in self.pipes.keys().copied().collect::<Vec<_>>() {
            self.apply(pipe, event, Reason::NoSession);
        }
    }

    /// Applies an event to a pipe and carries out the actions that follow. `reason` counts when the pipe is
    /// refused.
    fn apply(&mut self, id: PipeId, event: Event, reason: Reason) {
        let Some(pipe) = self.pipes.get_mut(&id) else {
            return;
        };
        let (mut outbox, mut is_gone) = (Vec::new(), false);
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            for action in pipe.life.apply(event) {
                match action {
                    Action::Answer(mut answer) => {
                        match &mut answer {
                            LibraryReply::Finished {
                                sent,
                                errno,
                                host_us,
                                ..
                            } => {
                                *host_us = pipe.host_us;
                                self.counters.count_ended(*sent, *errno);
                            }
                            LibraryReply::Refused { .. } => {
                                self.counters.count_refusal(pipe.reason.unwrap_or(reason));
                            }
                            LibraryReply::Progress { .. } => {}
                        }
                        is_gone |= !self.programs.answer(pipe.program, &answer);
                    }
                    Action::Tell(command) => outbox.extend(pipe.host_message(id, command)),
                    Action::Resume => pipe.socket_ends(BOTH).for_each(|end| end.stream.resume()),
                    Action::Drop(sides) => pipe.socket_ends(sides).for_each(|end| {
                        end.returned = None;
                        end.stream.drop_connection();
                    }),
                    Action::Reset => pipe.socket_ends(BOTH).for_each(|end| end.stream.reset()),
                    Action::Restore => {
                        let failed = pipe.restore(&self.counters);
                        events.push_back(Event::Restored(failed));
                    }
                    Action::ReleaseFile => {
                        if let Source::File { key, .. } = &pipe.source {
                            self.leases.release(*key, id);
                        }
                    }
                    Action::Settle(bytes) => {
                        pipe.reason.get_or_insert(reason);
                        let done = match &mut pipe.sink {
                            Sink::File { target, .. } => match target.settle(bytes) {
                                true => None,
                                false => Some(libc::EIO),
                            },
                            Sink::Socket(_) => Some(0),
                        };
                        events.extend(done.map(Event::Settled));
                    }
                }
            }
        }
        let program = pipe.program;
        if pipe.life.is_over() {
            self.pipes.remove(&id);
        }
        for command in outbox {
            self.send(command);
        }
        if is_gone {
            self.disconnect(program);
        }
    }
}

impl Drop for Pipes {
    fn drop(&mut self) {
        self.end();
    }
}

/// Raises the limit of descriptors to the maximum: each pipe takes up to four.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // with fewer, requests are refused when none are left
    let _ = setrlimit(Resource::Nofile, limit);
}
