// SPDX-License-Identifier: Apache-2.0
//! The worker of a DataNode VM: owns the channel to the agent in it, keeps its table of named blocks, answers
//! readers.
//!
//! One thread and one `poll`. The guest decides what arrives on the channel, so it is read at a bounded rate, kept in
//! bounded memory, and never waited for.
//!
//! | module | does |
//! |---|---|
//! | `conversation` | what may be said when, and what becomes of it |
//! | `names` | the named blocks, by number and by name |
//! | `images` | the VM's disks, and which one holds a file system |
//! | `channel` | bytes to messages and back, at a bounded rate |
//! | `window` | no more to the agent than its line holds |
//! | `readers` | who may look up, and who reads what |

mod channel;
mod conversation;
mod images;
mod names;
mod rate;
mod readers;
#[cfg(test)]
mod tests;
mod window;

pub use conversation::{Conversation, Readers};
pub use images::{Disk, open as open_images};

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use viola_proto::agent::ToAgent;
use viola_vpipe::work::{Pipes, Place, Pulse};

use crate::control::{Inbox, Limits, Order, Received, Report, Role, VERSION};
use crate::journal::{Journal, Level, Sink};
use crate::table::Table;
use channel::{Channel, Heard};
use readers::Connected;

/// Longest sleep; the conversation wants to know of the time at least each second.
const TICK: Duration = Duration::from_millis(500);
/// Sleep while a read is waited for...
const SHORT: Duration = Duration::from_millis(1);
/// ...and after so many of them.
const LONG: Duration = Duration::from_millis(20);
/// See `LONG`.
const SHORTS: u32 = 200;

/// What the daemon gives a worker at its start.
#[derive(Debug)]
pub struct Start {
    /// Identity of the VM.
    pub vm: String,
    /// The VM's table, to be read and written.
    pub table: OwnedFd,
    /// Where orders come from.
    pub inbox: Inbox,
    /// Bounds for the agent.
    pub limits: Limits,
    /// What sends the VM's files, where that is wanted.
    pub pipes: Option<Place>,
}

/// Runs until it is told to quit.
///
/// # Errors
/// When the table is none, or the kernel refuses to wait.
pub fn run(start: Start, sink: Sink) -> io::Result<()> {
    let mut worker = Worker::new(start, sink, Instant::now())?;
    while !worker.quits {
        worker.wait()?;
        worker.work(Instant::now());
    }
    Ok(())
}

struct Worker {
    vm: String,
    inbox: Inbox,
    conversation: Conversation,
    channel: Option<Channel>,
    readers: Connected,
    /// Sleeps in a row that waited for a reader.
    waited: u32,
    quits: bool,
}

impl Worker {
    fn new(start: Start, sink: Sink, now: Instant) -> io::Result<Self> {
        let table = Table::map(&start.table)?;
        let mut conversation = Conversation::new(table, start.limits, Journal::new(sink), now);
        if let Some(place) = start.pipes {
            conversation.set_pipes(Pipes::start(place)?);
        }
        Ok(Self {
            vm: start.vm,
            inbox: start.inbox,
            conversation,
            channel: None,
            readers: Connected::default(),
            waited: 0,
            quits: false,
        })
    }

    /// Sleeps until something is to be done.
    fn wait(&mut self) -> io::Result<()> {
        let now = Instant::now();
        let mut time = TICK;
        self.waited = match self.conversation.waits() {
            true => self.waited.saturating_add(1),
            false => 0,
        };
        if self.waited > 0 {
            time = if self.waited < SHORTS { SHORT } else { LONG };
        }
        let mut fds: Vec<(BorrowedFd<'_>, PollFlags)> =
            self.inbox.fds().map(|fd| (fd, PollFlags::IN)).collect();
        fds.extend(self.readers.fds().map(|fd| (fd, PollFlags::IN)));
        let pipes = self.conversation.pipes();
        fds.extend(pipes.map(|pipes| (pipes.fd(), PollFlags::IN)));
        if let Some(channel) = &mut self.channel {
            let (flags, pause) = channel.wants(now);
            if let Some(pause) = pause {
                time = time.min(pause);
            }
            fds.push((channel.fd(), flags));
        }
        let mut fds: Vec<PollFd<'_>> = fds
            .into_iter()
            .map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags))
            .collect();
        let time = time.try_into().map_err(io::Error::other)?;
        match poll(&mut fds, Some(&time)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Does all that is to be done now.
    fn work(&mut self, now: Instant) {
        let mut out = Vec::new();
        while let Some((received, to)) = self.inbox.next() {
            let report = self.obey(now, received, &mut out);
            self.inbox.answer(to, &report);
            if self.quits {
                return;
            }
        }
        self.readers.answer(&mut self.conversation);
        self.listen(now, &mut out);
        self.conversation.settle(now, &self.readers, &mut out);
        self.conversation.tick(now, &mut out);
        if let Some(pipes) = self.conversation.pipes() {
            out.extend(pipes.heard().map(ToAgent::Pipe));
        }
        self.say(now, &out);
    }

    fn listen(&mut self, now: Instant, out: &mut Vec<ToAgent>) {
        let Some(channel) = &mut self.channel else {
            return;
        };
        let conversation = &mut self.conversation;
        let ended = channel.listen(now, |heard| match heard {
            Heard::Message(message) => conversation.hear(now, message, out),
            Heard::Bad(why) => conversation.misheard(now, &why),
        });
        if let Err(why) = ended {
            self.hang_up(now, &why);
        }
    }

    fn say(&mut self, now: Instant, out: &[ToAgent]) {
        let Some(channel) = &mut self.channel else {
            return;
        };
        if let Err(why) = channel.say(now, out) {
            self.hang_up(now, &why);
        }
    }

    fn hang_up(&mut self, now: Instant, why: &str) {
        self.channel = None;
        self.conversation.close(now, why);
    }

    fn obey(&mut self, now: Instant, received: Received<Order>, out: &mut Vec<ToAgent>) -> Report {
        let mut fds = received.fds.into_iter();
        let done = match received.message {
            Order::Hello { .. } => {
                return Report::Hello {
                    version: VERSION,
                    program: env!("CARGO_PKG_VERSION").into(),
                    role: Role::Agent,
                    vm: self.vm.clone(),
                    pid: std::process::id(),
                };
            }
            Order::Stat => {
                let mut stat = self.conversation.stat(now, &self.readers);
                stat.readers = self.readers.names();
                return Report::Agent(Box::new(stat));
            }
            Order::Channel => match fds.next().map(Channel::new) {
                Some(Ok(channel)) => {
                    if self.channel.take().is_some() {
                        self.conversation.close(now, "there is a new one");
                    }
                    self.channel = Some(channel);
                    self.conversation.open(now, out);
                    Ok(())
                }
                Some(Err(e)) => Err(e.to_string()),
                None => Err("there is no descriptor".into()),
            },
            Order::NoChannel { why } => {
                if self.channel.take().is_some() {
                    self.conversation.close(now, &why);
                }
                Ok(())
            }
            Order::Images {
                datanode,
                images,
                why,
            } if datanode == self.vm => self.replace_images(now, images, fds.collect(), &why, out),
            Order::Reader { name, pools } => match (fds.next(), fds.next()) {
                (Some(socket), Some(hazards)) => self
                    .readers
                    .add(name, pools, socket, &hazards)
                    .map_err(|e| e.to_string()),
                _ => Err("there are no descriptors".into()),
            },
            Order::NoReader { name } => {
                self.readers.remove(&name);
                Ok(())
            }
            Order::EndEpoch { why } => {
                self.conversation.end_epoch(now, &why, out);
                Ok(())
            }
            Order::Pulse { threads, .. } => {
                let threads = fds.by_ref().take(threads).collect();
                if let Some(pipes) = self.conversation.pipes() {
                    pipes.watch(Pulse::new(threads, fds.next()));
                }
                Ok(())
            }
            Order::Quit { why } => {
                self.conversation.end_epoch(now, &why, out);
                self.conversation
                    .journal()
                    .line(Level::Info, &format!("the agent's worker ends: {why}"));
                self.quits = true;
                Ok(())
            }
            other => Err(format!(
                "this is the agent's worker of {}, which cannot do {other:?}",
                self.vm
            )),
        };
        match done {
            Ok(()) => Report::Done,
            Err(why) => Report::Failed { why },
        }
    }

    fn replace_images(
        &mut self,
        now: Instant,
        images: Vec<crate::control::ImageSpec>,
        fds: Vec<OwnedFd>,
        why: &str,
        out: &mut Vec<ToAgent>,
    ) -> Result<(), String> {
        if self
            .conversation
            .disks()
            .iter()
            .map(|d| &d.spec)
            .eq(&images)
        {
            return Ok(());
        }
        match images::open(images, fds) {
            Ok(disks) => {
                self.conversation.replace_disks(now, disks, why, out);
                Ok(())
            }
            Err((path, e)) => {
                // The old ones are not the VM's any more.
                self.conversation.replace_disks(now, Vec::new(), why, out);
                Err(format!("{path}: {e}"))
            }
        }
    }
}
