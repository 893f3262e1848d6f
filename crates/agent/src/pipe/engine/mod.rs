// SPDX-License-Identifier: Apache-2.0
//! The engine of the pipes: it holds the programs' connections and carries out the actions of each pipe's
//! [`Life`](super::life::Life).
//!
//! | module | does |
//! |---|---|
//! | `ask` | from a program's request to ends that are made ready |
//! | `held` | empties a connection that the host holds |
//! | `handover` | takes connections out, and gives all to the host |

mod handover;
mod start;

mod drain;
mod entry;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use viola_proto::pipe::library::{LibraryReply, LibraryRequest};
use viola_proto::pipe::{PipeId, PipeReply, PipeRequest};

use super::counters::Counters;
use super::lease::Leases;
use super::mapper::{MapJob, run_mapper};
use super::next_hop::NextHopCache;
use super::programs::{Incoming, ProgramId, Programs};
use super::reason::Reason;
use super::settings::Settings;
use super::sink::note::Notes;
use entry::{BOTH, Endpoint, Pipe, Sink, Source};

use super::{Completion, CompletionSender, HostState, Outgoing};
use crate::clock::Millis;
use crate::io::random::random;
use crate::pipe::life::{Action, Event, Sides};

/// The engine of all pipes.
#[derive(Debug)]
pub struct Engine {
    most: usize,
    relay_allowed: bool,
    /// Identifies this run of the agent.
    run: u64,
    programs: Programs,
    leases: Leases,
    next_hops: NextHopCache,
    pipes: BTreeMap<PipeId, Pipe>,
    next: PipeId,
    host_state: HostState,
    completions: Receiver<Completion>,
    inbox: CompletionSender,
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
/// Between two looks for idle leases.
const IDLE_LEASE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// How long the end of the agent waits for files to be settled. The next run settles the others by their notes.
const SETTLE_TIMEOUT: Duration = Duration::from_millis(700);

impl Engine {
    /// Listens for programs and starts the mapper.
    pub fn new(
        settings: &Settings,
        uids: BTreeSet<u32>,
        completions: Receiver<Completion>,
        inbox: &CompletionSender,
        counters: &Arc<Counters>,
    ) -> io::Result<Self> {
        // before the thread starts, which inherits the signal mask
        let leases = Leases::new()?;
        let (mapper, jobs) = channel();
        let (results, said) = (inbox.clone(), Arc::clone(counters));
        std::thread::Builder::new()
            .name("viola-pipe-map".into())
            .spawn(move || run_mapper(&jobs, &results, &said))?;
        Ok(Self {
            most: settings.most as usize,
            relay_allowed: settings.relay,
            run: random(),
            programs: Programs::listen(&settings.socket, uids)?,
            leases,
            next_hops: NextHopCache::default(),
            pipes: BTreeMap::new(),
            next: 1,
            host_state: HostState::default(),
            completions,
            inbox: inbox.clone(),
            restored_devices: BTreeSet::new(),
            closable: Vec::new(),
            buffer: Vec::new(),
            mapper,
            outbox: VecDeque::new(),
            counters: Arc::clone(counters),
        })
    }

    /// Descriptors to wait for, in the order of [`Engine::wakeups`].
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let fixed: [_; FIXED_FDS] = [
            self.inbox.wake.as_fd(),
            self.leases.signals(),
            self.programs.listener(),
        ];
        let programs = self.programs.sockets().map(|(_, socket)| socket);
        fixed.into_iter().chain(programs)
    }

    /// Translates which of [`Engine::fds`] are readable.
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
            let _ = rustix::io::read(&*self.inbox.wake, &mut [0; 8]);
            while let Ok(completion) = self.completions.try_recv() {
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

    /// Ends all pipes, and settles the files that the host does not have.
    pub fn end(&mut self) {
        self.apply_to_all(Event::SessionClosed);
        let until = Instant::now() + SETTLE_TIMEOUT;
        while self.pipes.values().any(|p| p.life.is_settling()) {
            let rest = until.saturating_duration_since(Instant::now());
            match self.completions.recv_timeout(rest) {
                Ok(completion) => self.handle_completion(completion),
                Err(_) => return,
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

    /// Handles a message of the host.
    pub fn handle_host_message(&mut self, message: PipeReply) {
        match message {
            PipeReply::Refused { pipe, why } => {
                self.counters.set_last_detail(format!("the host: {why}"));
                self.apply(pipe, Event::Refused, Reason::RefusedByHost);
            }
            PipeReply::Held { pipe } => {
                self.apply(pipe, Event::Held, Reason::RefusedByHost);
                self.start_drain(pipe);
            }
            PipeReply::Progress { pipe, sent } => {
                let sent = self.clamp_sent(pipe, sent);
                self.apply(pipe, Event::Progress(sent), Reason::RefusedByHost);
            }
            PipeReply::Unread {
                pipe,
                source,
                bytes,
            } => {
                let side = Sides {
                    source,
                    sink: !source,
                };
                if let Some(pipe) = self.pipes.get_mut(&pipe) {
                    let endpoints = pipe.endpoints(side);
                    endpoints.for_each(|endpoint| endpoint.unread.extend_from_slice(&bytes.0));
                }
            }
            PipeReply::Finished {
                pipe,
                source,
                sink,
                sent,
                errno,
                host_us,
            } => {
                let sent = self.clamp_sent(pipe, sent);
                let came = Sides {
                    source: source.is_some(),
                    sink: sink.is_some(),
                };
                if let Some(pipe) = self.pipes.get_mut(&pipe) {
                    pipe.host_us = host_us;
                    if let Source::Socket(endpoint) = &mut pipe.source {
                        endpoint.returned = source;
                    }
                    if let Sink::Socket(endpoint) = &mut pipe.sink {
                        endpoint.returned = sink;
                    }
                }
                let event = Event::Returned { came, sent, errno };
                self.apply(pipe, event, Reason::RefusedByHost);
            }
        }
    }

    fn clamp_sent(&self, pipe: PipeId, sent: u64) -> u64 {
        self.pipes
            .get(&pipe)
            .map_or(0, |p| sent.min(p.length - p.moved))
    }

    /// Handles one packet of a program.
    fn handle_program(&mut self, program: ProgramId) {
        match self.programs.receive_from(program) {
            Incoming::Nothing => {}
            Incoming::Gone => self.disconnect(program),
            // a pipe that has ended needs no stop
            Incoming::Ask(LibraryRequest::Stop { id }, _) => {
                if let Some(pipe) = self.find(program, id) {
                    self.apply(pipe, Event::Stop, Reason::RefusedByHost);
                }
            }
            Incoming::Ask(LibraryRequest::Reset { id }, _) => {
                if let Some(pipe) = self.find(program, id) {
                    self.apply(pipe, Event::ProgramGone, Reason::RefusedByHost);
                }
            }
            Incoming::Ask(ask, Some(fds)) => {
                let Some(request) =
                    start::Request::of(ask).filter(|w| self.find(program, w.id).is_none())
                else {
                    return self.disconnect(program);
                };
                if let Err(reason) = self.begin(program, request, fds) {
                    self.counters.count_refusal(reason);
                    let (id, errno) = (request.id, reason.errno());
                    let refused = LibraryReply::Refused { id, errno };
                    if !self.programs.answer(program, &refused) {
                        self.disconnect(program);
                    }
                }
            }
            Incoming::Ask(_, None) => self.disconnect(program),
        }
    }

    fn find(&self, program: ProgramId, id: u64) -> Option<PipeId> {
        self.pipes
            .iter()
            .find(|(_, p)| p.program == program && p.life.id() == id && p.life.is_awaited())
            .map(|(pipe, _)| *pipe)
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

    /// Disconnects a program and ends its pipes.
    fn disconnect(&mut self, program: ProgramId) {
        self.programs.remove(program);
        let its = self.pipes.iter().filter(|(_, p)| p.program == program);
        for pipe in its.map(|(pipe, _)| *pipe).collect::<Vec<_>>() {
            self.apply(pipe, Event::ProgramGone, Reason::RefusedByHost);
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
                    Action::Resume => pipe
                        .endpoints(BOTH)
                        .for_each(|endpoint| endpoint.stream.resume()),
                    Action::Kill(sides) => pipe.endpoints(sides).for_each(|endpoint| {
                        endpoint.returned = None;
                        endpoint.stream.kill();
                    }),
                    Action::Reset => pipe
                        .endpoints(BOTH)
                        .for_each(|endpoint| endpoint.stream.reset()),
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
