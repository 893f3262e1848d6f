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
//! | [`crate::core::pipe`] | the life of one pipe |
//! | `map` | the thread that finds where files are |
//! | `work` | the thread that joins them |
//!
//! The thread talks with the main loop, which has the way to the host: messages go there as outcomes, and come back,
//! with what is known of session and disks, by a queue. It never waits for a disk: other threads find extents and write.
//!
//! A program whose connection is with the host when the session ends loses it, because the host resets it then. One
//! whose agent is killed is left with a socket that is silent for ever: it sees the agent's socket closed, and has to
//! close that one too.

pub mod hop;
pub mod lease;
mod map;
mod passing;
pub mod programs;
mod reason;
pub mod settings;
mod sink;
pub mod socket;
mod tally;
mod work;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use rustix::process::{Resource, getrlimit, setrlimit};
use viola_proto::agent::{FileMap, FsId};
use viola_proto::pipe::{FromGuest, PipeId, ToGuest};

pub use reason::Reason;

use crate::io::status::PipeReport;
use crate::io::worker::Report;
use settings::Settings;
use tally::Tally;

/// Longest wait for the thread's end.
const FAREWELL: Duration = Duration::from_secs(1);

/// What is known of the host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// The session, if there is one.
    pub epoch: Option<u64>,
    /// File systems by the number of their device (`MAJOR:MINOR`).
    pub volumes: BTreeMap<String, Disk>,
    /// No file may be read now: those that are, are to end.
    pub halt: bool,
}

/// A file system with files to be read or written by the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// Its number.
    pub fs: FsId,
    /// Where it is mounted.
    pub point: PathBuf,
    /// The host knows its disk now.
    pub is_good: bool,
    /// What may be done with it.
    pub uses: Uses,
}

/// What the configuration lets pipes do with a file system.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Uses {
    /// Its files may be read.
    pub from: bool,
    /// They may be written to.
    pub into: bool,
}

/// What the thread is told.
#[derive(Debug)]
enum In {
    Facts(Facts),
    Heard(ToGuest),
    /// A message of this pipe could not be said: the host has never heard of it.
    Unsaid(PipeId),
    /// Where a pipe's file is.
    Mapped(PipeId, Result<FileMap, Reason>),
    /// Where the bytes of a file will be that is ready to be written to.
    Prepared(PipeId, Result<FileMap, Reason>),
    /// Such a file is the program's again; an errno when what the agent has received is not in it.
    Settled(PipeId, i32),
    End,
}

/// A message for the host.
#[derive(Debug)]
pub struct Out {
    /// It means something in this session only.
    pub epoch: u64,
    /// The message.
    pub message: FromGuest,
}

/// A queue that wakes the thread.
#[derive(Debug, Clone)]
struct Inbox {
    queue: Sender<In>,
    wake: Arc<OwnedFd>,
}

impl Inbox {
    fn say(&self, what: In) -> bool {
        let said = self.queue.send(what).is_ok();
        // full: then it is readable anyway
        let _ = rustix::io::write(&*self.wake, &1_u64.to_ne_bytes());
        said
    }
}

/// As many descriptors as this program may have: each pipe takes four at most.
fn more_descriptors() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // with fewer, wishes are refused when there are none left
    let _ = setrlimit(Resource::Nofile, limit);
}

/// The thread's other end. Dropping it ends all pipes.
#[derive(Debug)]
pub struct Pipes {
    inbox: Inbox,
    facts: Facts,
    tally: Arc<Tally>,
    socket: PathBuf,
    ended: Receiver<()>,
}

impl Pipes {
    /// Listens for programs; nothing is given before there are [`Facts`]. Messages go out as
    /// [`crate::io::worker::Outcome::Pipe`].
    ///
    /// # Errors
    /// A user that is not there, or what the kernel refused.
    pub fn start(settings: &Settings, report: &Report) -> std::io::Result<Self> {
        more_descriptors();
        let uids = settings
            .uids("/etc/passwd".as_ref())
            .map_err(std::io::Error::other)?;
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (queue, messages) = channel();
        let inbox = Inbox { queue, wake };
        let tally = Arc::new(Tally::default());
        let work = work::Work::new(settings, uids, messages, &inbox, report, &tally)?;
        let (ends, ended) = channel();
        std::thread::Builder::new()
            .name("viola-pipe".into())
            .spawn(move || {
                work.run();
                let _ = ends.send(());
            })?;
        Ok(Self {
            inbox,
            facts: Facts::default(),
            tally,
            socket: settings.socket.clone(),
            ended,
        })
    }

    /// What is known now.
    pub fn know(&mut self, facts: Facts) {
        if facts != self.facts {
            self.facts = facts.clone();
            self.inbox.say(In::Facts(facts));
        }
    }

    /// What the host has said.
    pub fn hear(&self, message: ToGuest) {
        self.inbox.say(In::Heard(message));
    }

    /// The host was never given this pipe.
    pub fn unsaid(&self, pipe: PipeId) {
        self.inbox.say(In::Unsaid(pipe));
    }

    /// Pipes that the host has, or whose files it may touch.
    pub fn reading(&self) -> u64 {
        self.tally.reading()
    }

    /// Pipes that are not over.
    pub fn busy(&self) -> u64 {
        self.tally.busy()
    }

    /// For people.
    pub fn report(&self) -> PipeReport {
        self.tally.report(&self.socket)
    }
}

impl Drop for Pipes {
    fn drop(&mut self) {
        self.inbox.say(In::End);
        let _ = self.ended.recv_timeout(FAREWELL);
    }
}
