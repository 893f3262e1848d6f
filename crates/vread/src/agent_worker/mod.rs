// SPDX-License-Identifier: Apache-2.0
//! The agent worker of a DataNode VM. It owns the channel to the VM's agent, keeps the table of named blocks, and
//! answers the look-ups of readers.
//!
//! The worker has one thread and one `poll` loop. The guest controls what arrives on the channel, so the worker reads
//! at a bounded rate, keeps bounded memory, and never waits for the guest.
//!
//! | module | does |
//! |---|---|
//! | `session` | the state machine of the agent's messages |
//! | `named_blocks` | the named blocks, by lease number and by name |
//! | `images` | the VM's disks, and which of them holds a file system |
//! | `channel` | bytes to messages and back, at a bounded rate (`token_bucket`) |
//! | `send_window` | bytes that may be unread on a serial line |
//! | `readers` | the readers that may look blocks up, and their hazard cells |

mod channel;
mod images;
mod named_blocks;
mod readers;
mod send_window;
mod session;
#[cfg(test)]
mod tests;
mod token_bucket;

pub use images::{Disk, open as open_images};
pub use session::{AgentSession, Readers};

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use viola_proto::agent::ToAgent;
use viola_vpipe::pipes::{PauseProbe, PipeResources, Pipes};

use crate::control::{Inbox, Limits, Order, Received, Report, Role};
use crate::journal::{Journal, Level, LogSink};
use crate::poll;
use crate::table::Table;
use channel::{Channel, Incoming};
use readers::ConnectedReaders;

/// Longest sleep; the session needs a tick each second.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Sleep while a confirmation waits for a read to end, for the first [`SHORT_PENDING_POLLS`] polls.
const MIN_PENDING_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Sleep while a confirmation waits for a read to end, after these polls.
const MAX_PENDING_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Number of polls with the short sleep.
const SHORT_PENDING_POLLS: u32 = 200;

/// What the daemon gives an agent worker at its start.
#[derive(Debug)]
pub struct Params {
    /// Identity of the VM.
    pub vm: String,
    /// The VM's lease table, writable.
    pub table: OwnedFd,
    /// The source of the daemon's orders.
    pub inbox: Inbox,
    /// Limits for the agent.
    pub limits: Limits,
    /// The devices that vpipe uses; `None` if vpipe is off for this VM.
    pub pipes: Option<PipeResources>,
}

/// Runs the worker until the daemon orders it to quit.
///
/// # Errors
/// When the table is invalid, or `poll` fails.
pub fn run(params: Params, sink: LogSink) -> io::Result<()> {
    let mut worker = Worker::new(params, sink, Instant::now())?;
    while !worker.quit {
        worker.wait()?;
        worker.work(Instant::now());
    }
    Ok(())
}

struct Worker {
    vm: String,
    inbox: Inbox,
    session: AgentSession,
    channel: Option<Channel>,
    readers: ConnectedReaders,
    /// Consecutive polls with a pending confirmation.
    pending_polls: u32,
    quit: bool,
}

impl Worker {
    fn new(params: Params, sink: LogSink, now: Instant) -> io::Result<Self> {
        let table = Table::map(&params.table)?;
        let mut session = AgentSession::new(table, params.limits, Journal::new(sink), now);
        if let Some(place) = params.pipes {
            session.set_pipes(Pipes::spawn(place)?);
        }
        Ok(Self {
            vm: params.vm,
            inbox: params.inbox,
            session,
            channel: None,
            readers: ConnectedReaders::default(),
            pending_polls: 0,
            quit: false,
        })
    }

    /// Sleeps until there is something to do.
    fn wait(&mut self) -> io::Result<()> {
        let now = Instant::now();
        let mut time = POLL_INTERVAL;
        self.pending_polls = match self.session.has_pending() {
            true => self.pending_polls.saturating_add(1),
            false => 0,
        };
        if self.pending_polls > 0 {
            time = if self.pending_polls < SHORT_PENDING_POLLS {
                MIN_PENDING_POLL_INTERVAL
            } else {
                MAX_PENDING_POLL_INTERVAL
            };
        }
        let mut fds: Vec<(BorrowedFd<'_>, PollFlags)> =
            self.inbox.fds().map(|fd| (fd, PollFlags::IN)).collect();
        fds.extend(self.readers.fds().map(|fd| (fd, PollFlags::IN)));
        let pipes = self.session.pipes();
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
        poll::wait(&mut fds, Some(time))
    }

    /// Does everything that is due.
    fn work(&mut self, now: Instant) {
        let mut out = Vec::new();
        while let Some((received, to)) = self.inbox.next() {
            let report = self.execute(now, received, &mut out);
            self.inbox.answer(to, &report);
            if self.quit {
                return;
            }
        }
        self.readers.answer(&mut self.session);
        self.receive(now, &mut out);
        self.session.complete_pending(now, &self.readers, &mut out);
        self.session.tick(now, &mut out);
        if let Some(pipes) = self.session.pipes() {
            out.extend(pipes.replies().map(ToAgent::Pipe));
        }
        self.send(now, &out);
    }

    fn receive(&mut self, now: Instant, out: &mut Vec<ToAgent>) {
        let Some(channel) = &mut self.channel else {
            return;
        };
        let session = &mut self.session;
        let ended = channel.receive(now, |heard| match heard {
            Incoming::Message(message) => session.handle(now, message, out),
            Incoming::Malformed(why) => session.handle_malformed(now, &why),
        });
        if let Err(why) = ended {
            self.close_channel(now, &why);
        }
    }

    fn send(&mut self, now: Instant, out: &[ToAgent]) {
        let Some(channel) = &mut self.channel else {
            return;
        };
        if let Err(why) = channel.send(now, out) {
            self.close_channel(now, &why);
        }
    }

    fn close_channel(&mut self, now: Instant, why: &str) {
        self.channel = None;
        self.session.close(now, why);
    }

    fn execute(
        &mut self,
        now: Instant,
        received: Received<Order>,
        out: &mut Vec<ToAgent>,
    ) -> Report {
        let mut fds = received.fds.into_iter();
        let done = match received.message {
            Order::Hello { .. } => {
                return Report::hello(Role::Agent, &self.vm);
            }
            Order::Stat => {
                let mut stat = self.session.stat(now, &self.readers);
                stat.readers = self.readers.names();
                return Report::Agent(Box::new(stat));
            }
            Order::Channel => match fds.next().map(Channel::new) {
                Some(Ok(channel)) => {
                    if self.channel.take().is_some() {
                        self.session.close(now, "replaced by a new channel");
                    }
                    self.channel = Some(channel);
                    self.session.open(now, out);
                    Ok(())
                }
                Some(Err(e)) => Err(e.to_string()),
                None => Err("the order has no descriptor".into()),
            },
            Order::NoChannel { why } => {
                if self.channel.take().is_some() {
                    self.session.close(now, &why);
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
                _ => Err("the order has no descriptors".into()),
            },
            Order::NoReader { name } => {
                self.readers.remove(&name);
                Ok(())
            }
            Order::EndEpoch { why } => {
                self.session.end_epoch(now, &why, out);
                Ok(())
            }
            Order::Pulse { threads, .. } => {
                let threads = fds.by_ref().take(threads).collect();
                if let Some(pipes) = self.session.pipes() {
                    pipes.watch_pause(PauseProbe::new(threads, fds.next()));
                }
                Ok(())
            }
            Order::Quit { why } => {
                self.session.end_epoch(now, &why, out);
                self.session
                    .journal()
                    .log(Level::Info, &format!("agent worker ends: {why}"));
                self.quit = true;
                Ok(())
            }
            other => Err(format!(
                "the agent worker of {} does not support the order {other:?}",
                self.vm
            )),
        };
        done.into()
    }

    fn replace_images(
        &mut self,
        now: Instant,
        images: Vec<crate::control::ImageSpec>,
        fds: Vec<OwnedFd>,
        why: &str,
        out: &mut Vec<ToAgent>,
    ) -> Result<(), String> {
        if self.session.disks().iter().map(|d| &d.spec).eq(&images) {
            return Ok(());
        }
        match images::open(images, fds) {
            Ok(disks) => {
                self.session.replace_disks(now, disks, why, out);
                Ok(())
            }
            Err(error) => {
                // The old disks are no longer the VM's.
                self.session.replace_disks(now, Vec::new(), why, out);
                Err(error)
            }
        }
    }
}
