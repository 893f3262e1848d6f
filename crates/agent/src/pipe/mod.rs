// SPDX-License-Identifier: Apache-2.0
//! Bytes that the host moves for this VM's programs between files and connections: see [`viola_proto::pipe`].
//!
//! | module | room for |
//! |---|---|
//! | [`settings`] | `[pipe]` in the configuration |
//! | [`programs`] | the socket at which programs ask |
//! | [`lease`] | read leases: a file stays unchanged while the host reads it |
//! | `sink` | prepares a file for the host's writes, and returns it to the program |
//! | [`socket`] | extracts a connection from a program's socket, and restores it |
//! | `forward` | moves what a held connection has received |
//! | [`next_hop`] | the MAC address that a connection's packets go to |
//! | `life` | the life of one pipe, a state machine |
//! | `mapper` | the thread that finds extents |
//! | `engine` | joins all of them |
//! | [`report`], `counters`, `reason` | what `viola-agent status` shows |
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
//! The main loop runs the engine: it has the channel to the host, and a thread of its own would add a wake-up to each
//! step that a program waits for. The engine never waits for a disk: other threads find extents and write, and send
//! completions.
//!
//! When the session ends, the host resets the connections that it has, so their programs lose them. When the agent is
//! killed, the sockets of extracted connections stay silent: the program sees the agent's socket closed and must
//! close those sockets too.

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
use viola_proto::pipe::{PipeId, PipeReply, PipeRequest};

pub use engine::Wakeups;
pub use reason::Reason;

use crate::clock::Millis;
use crate::pipe::report::PipeReport;
use counters::Counters;
use settings::Settings;

/// What the pipes know of the host and the disks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostState {
    /// Epoch of the session, if one is open.
    pub epoch: Option<u64>,
    /// File systems by device number (`MAJOR:MINOR`).
    pub volumes: BTreeMap<String, PipeVolume>,
    /// No pipe may start, and running pipes must end.
    pub halt: bool,
}

/// A file system that pipes may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipeVolume {
    /// Number of the file system in the protocol.
    pub fs: FsId,
    /// Mount point.
    pub point: PathBuf,
    /// Whether the host knows its disk now.
    pub is_proven: bool,
    /// What the configuration allows on it.
    pub access: PipeAccess,
}

/// What the configuration lets pipes do on a file system.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PipeAccess {
    /// Pipes may read its files.
    pub read: bool,
    /// Pipes may write its files.
    pub write: bool,
}

/// What another thread has finished.
#[derive(Debug)]
enum Completion {
    /// The mapper has found the extents of a source file.
    Mapped(PipeId, Result<FileMap, Reason>),
    /// A sink file is prepared: its extents.
    Prepared(PipeId, Result<FileMap, Reason>),
    /// A sink file is the program's again; an errno when bytes that the agent has received are not in it.
    Settled(PipeId, i32),
}

/// A message for the host.
#[derive(Debug)]
pub struct Outgoing {
    /// The session that it belongs to.
    pub epoch: u64,
    /// The message.
    pub message: PipeRequest,
}

/// Sends completions to the main loop and wakes it.
#[derive(Debug, Clone)]
struct CompletionSender {
    queue: Sender<Completion>,
    wake: Arc<OwnedFd>,
}

impl CompletionSender {
    fn send(&self, completion: Completion) -> bool {
        let said = self.queue.send(completion).is_ok();
        // a full counter is readable anyway
        let _ = rustix::io::write(&*self.wake, &1_u64.to_ne_bytes());
        said
    }
}

/// Raises the limit of descriptors to the maximum: each pipe takes up to four.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // with fewer, requests are refused when none are left
    let _ = setrlimit(Resource::Nofile, limit);
}

/// All pipes of the agent. Dropping it ends them.
#[derive(Debug)]
pub struct Pipes {
    engine: engine::Engine,
    host_state: HostState,
    counters: Arc<Counters>,
    socket: PathBuf,
}

impl Pipes {
    /// Listens for programs. No pipe starts before the first [`HostState`]. The calling thread must make all
    /// other calls too: it gets the signals of broken leases.
    ///
    /// # Errors
    /// A user of `[pipe]` that does not exist, or the kernel's error.
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

    /// Sets the state of the host.
    pub fn set_host_state(&mut self, host_state: HostState) {
        if host_state != self.host_state {
            self.host_state = host_state.clone();
            self.engine.set_host_state(host_state);
        }
    }

    /// Sets the current time.
    pub fn set_time(&mut self, now: Millis) {
        self.engine.set_time(now);
    }

    /// Handles a message of the host.
    pub fn handle_message(&mut self, message: PipeReply) {
        self.engine.handle_host_message(message);
    }

    /// A hand-over could not be sent: the host never got this pipe.
    pub fn message_not_sent(&mut self, pipe: PipeId) {
        self.engine.message_not_sent(pipe);
    }

    /// The next message for the host.
    pub fn next_message(&mut self) -> Option<Outgoing> {
        self.engine.next_message()
    }

    /// Closes and releases what is not needed any more. Returns how long the main loop may sleep.
    pub fn housekeep(&mut self) -> Option<Duration> {
        self.engine.housekeep()
    }

    /// Descriptors to wait for.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.engine.fds()
    }

    /// Translates which of [`Pipes::fds`], in their order, are readable.
    pub fn wakeups(&self, ready: impl Iterator<Item = bool>) -> Wakeups {
        self.engine.wakeups(ready)
    }

    /// Handles what a wait has found.
    pub fn run(&mut self, wakeups: Wakeups) {
        self.engine.run(wakeups);
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
}

impl Drop for Pipes {
    fn drop(&mut self) {
        self.engine.end();
    }
}
