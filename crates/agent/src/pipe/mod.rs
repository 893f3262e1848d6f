// SPDX-License-Identifier: Apache-2.0
//! Bytes that the host moves for this VM's programs, from files and connections to others: see [`viola_proto::pipe`].
//!
//! | module | does |
//! |---|---|
//! | [`settings`] | `[pipe]` in the configuration |
//! | [`programs`] | the socket at which programs ask |
//! | [`lease`] | keeps a file as it is while the host reads it |
//! | `sink` | makes a file ready to be written to by the host, and gives it back |
//! | [`socket`] | a connection out of a program's socket and into it again |
//! | `passing` | what a connection has received before the host has it |
//! | [`hop`] | where the connection's packets go |
//! | [`crate::pipe::life`] | the life of one pipe |
//! | `map` | the thread that finds where files are |
//! | `work` | joins them |
//!
//! The main loop does it: it has the way to the host, by which each pipe goes, and a program that waits would wait for each step from
//! thread to thread. Nothing here waits for a disk: other threads find extents and write, and say so by a queue.
//!
//! A program whose connection is with the host when the session ends loses it, because the host resets it then. One
//! whose agent is killed is left with a socket that is silent for ever: it sees the agent's socket closed, and has to
//! close that one too.

mod counters;
mod engine;
mod forward;
pub mod lease;
mod life;
mod mapper;
pub mod next_hop;
pub mod programs;
mod reason;
pub mod report;
pub mod settings;
mod sink;
pub mod socket;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::process::{Resource, getrlimit, setrlimit};
use viola_proto::agent::{FileMap, FsId};
use viola_proto::pipe::{FromGuest, PipeId, ToGuest};

pub use engine::Wakeups;
pub use reason::Reason;

use crate::clock::Millis;
use crate::pipe::report::PipeReport;
use counters::Counters;
use settings::Settings;

/// What is known of the host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostState {
    /// The session, if there is one.
    pub epoch: Option<u64>,
    /// File systems by the number of their device (`MAJOR:MINOR`).
    pub volumes: BTreeMap<String, PipeVolume>,
    /// No file may be read now: those that are, are to end.
    pub halt: bool,
}

/// A file system with files to be read or written by the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipeVolume {
    /// Its number.
    pub fs: FsId,
    /// Where it is mounted.
    pub point: PathBuf,
    /// The host knows its disk now.
    pub is_proven: bool,
    /// What may be done with it.
    pub access: PipeAccess,
}

/// What the configuration lets pipes do with a file system.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PipeAccess {
    /// Its files may be read.
    pub read: bool,
    /// They may be written to.
    pub write: bool,
}

/// What other threads have done.
#[derive(Debug)]
enum Completion {
    /// Where a pipe's file is.
    Mapped(PipeId, Result<FileMap, Reason>),
    /// Where the bytes of a file will be that is ready to be written to.
    Prepared(PipeId, Result<FileMap, Reason>),
    /// Such a file is the program's again; an errno when what the agent has received is not in it.
    Settled(PipeId, i32),
}

/// A message for the host.
#[derive(Debug)]
pub struct Outgoing {
    /// It means something in this session only.
    pub epoch: u64,
    /// The message.
    pub message: FromGuest,
}

/// A queue that wakes the main loop.
#[derive(Debug, Clone)]
struct CompletionSender {
    queue: Sender<Completion>,
    wake: Arc<OwnedFd>,
}

impl CompletionSender {
    fn send(&self, completion: Completion) -> bool {
        let said = self.queue.send(completion).is_ok();
        // full: then it is readable anyway
        let _ = rustix::io::write(&*self.wake, &1_u64.to_ne_bytes());
        said
    }
}

/// As many descriptors as this program may have: each pipe takes four at most.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // with fewer, wishes are refused when there are none left
    let _ = setrlimit(Resource::Nofile, limit);
}

/// All pipes. Dropping it ends them.
#[derive(Debug)]
pub struct Pipes {
    engine: engine::Engine,
    host_state: HostState,
    counters: Arc<Counters>,
    socket: PathBuf,
}

impl Pipes {
    /// Listens for programs; nothing is given before there are [`HostState`]. The calling thread has to do the rest, too: it is the
    /// one that hears of writers.
    ///
    /// # Errors
    /// A user that is not there, or what the kernel refused.
    pub fn start(settings: &Settings) -> std::io::Result<Self> {
        raise_descriptor_limit();
        let uids = settings
            .uids("/etc/passwd".as_ref())
            .map_err(std::io::Error::other)?;
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (queue, messages) = channel();
        let inbox = CompletionSender { queue, wake };
        let counters = Arc::new(Counters::default());
        Ok(Self {
            engine: engine::Engine::new(settings, uids, messages, &inbox, &counters)?,
            host_state: HostState::default(),
            counters,
            socket: settings.socket.clone(),
        })
    }

    /// What is known now.
    pub fn set_host_state(&mut self, host_state: HostState) {
        if host_state != self.host_state {
            self.host_state = host_state.clone();
            self.engine.set_host_state(host_state);
        }
    }

    /// It is this late.
    pub fn set_time(&mut self, now: Millis) {
        self.engine.set_time(now);
    }

    /// What the host has said.
    pub fn handle_message(&mut self, message: ToGuest) {
        self.engine.handle_host_message(message);
    }

    /// The host was never given this pipe.
    pub fn message_not_sent(&mut self, pipe: PipeId) {
        self.engine.message_not_sent(pipe);
    }

    /// A message for the host, if there is one.
    pub fn next_message(&mut self) -> Option<Outgoing> {
        self.engine.next_message()
    }

    /// Tidies up; how long to sleep at most.
    pub fn housekeep(&mut self) -> Option<Duration> {
        self.engine.housekeep()
    }

    /// What to wait for.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.engine.fds()
    }

    /// What it is that some of [`Pipes::fds`], in their order, have to say.
    pub fn wakeups(&self, ready: impl Iterator<Item = bool>) -> Wakeups {
        self.engine.wakeups(ready)
    }

    /// Does what is to be done after a wait.
    pub fn run(&mut self, wakeups: Wakeups) {
        self.engine.run(wakeups);
    }

    /// Pipes that the host has, or whose files it may touch.
    pub fn active(&self) -> u64 {
        self.counters.active()
    }

    /// Pipes that are not over.
    pub fn busy(&self) -> u64 {
        self.counters.busy()
    }

    /// For people.
    pub fn report(&self) -> PipeReport {
        self.counters.report(&self.socket)
    }
}

impl Drop for Pipes {
    fn drop(&mut self) {
        self.engine.end();
    }
}
