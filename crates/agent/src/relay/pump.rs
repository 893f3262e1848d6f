// SPDX-License-Identifier: Apache-2.0
//! The thread between the kernel and the stream. It waits for neither: both are asked in turn.

use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use viola_proto::relay::{Asked, Frame, Frames, Kind, answered};

use super::Shared;
use super::mount::{Fuse, Heard};
use super::session::{Millis, Session, Then};
use crate::agent::random;
use crate::io::channel::{Address, Channel};
use crate::io::worker::now;

/// Bytes for the host that may wait; the kernel keeps what is beyond.
const WAITING: usize = 256 << 10;
/// Requests taken from the kernel before the host is listened to again.
const TURN: usize = 64;
/// A stream that is not there is looked for again after so long.
const RETRY: Millis = 250;
/// Longest sleep.
const NAP: Millis = 1000;

/// The way to the host.
enum Way {
    /// To be opened at this time.
    Closed(Millis),
    /// Open, with nobody at the other end; looked at again at this time.
    Deaf(Channel, Millis),
    Open(Channel),
}

pub(super) struct Pump {
    path: PathBuf,
    address: Address,
    shared: Arc<Shared>,
    way: Way,
    frames: Frames,
    session: Session,
    fuse: Option<Fuse>,
    /// Not to be mounted any more: somebody has unmounted it.
    given_up: bool,
}

fn add(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

impl Pump {
    pub(super) fn new(path: PathBuf, address: Address, shared: Arc<Shared>) -> Self {
        Self {
            path,
            address,
            shared,
            way: Way::Closed(0),
            frames: Frames::of_worker(),
            session: Session::new(random()),
            fuse: None,
            given_up: false,
        }
    }

    pub(super) fn run(mut self) {
        while !self.wait() {
            let time = now();
            self.open(time);
            self.hear(time);
            self.ask(time);
            if matches!(self.way, Way::Open(_)) && self.session.tick(time, random()) {
                self.over("the host does not answer any more");
            }
            self.flush(time);
        }
        self.over("viola-agent ends");
    }

    /// Sleeps until there is something to do; `true` when it is the end.
    fn wait(&self) -> bool {
        let time = now();
        let mut until = time + NAP;
        let mut fds = vec![PollFd::new(&self.shared.stop, PollFlags::IN)];
        match &self.way {
            Way::Closed(at) | Way::Deaf(_, at) => until = until.min(*at),
            Way::Open(channel) => {
                until = until.min(self.session.due());
                let mut flags = PollFlags::IN;
                if !self.session.out().is_empty() {
                    flags |= PollFlags::OUT;
                }
                fds.push(PollFd::new(channel, flags));
            }
        }
        if let Some(fuse) = self.fuse.as_ref().filter(|_| self.has_room()) {
            fds.push(PollFd::new(fuse, PollFlags::IN));
        }
        let millis = until.saturating_sub(time);
        let limit = Timespec {
            tv_sec: (millis / 1000) as i64,
            tv_nsec: ((millis % 1000) * 1_000_000) as _,
        };
        // an interrupted wait is as good as a short one
        let _ = poll(&mut fds, Some(&limit));
        !fds[0].revents().is_empty()
    }

    fn has_room(&self) -> bool {
        self.session.out().len() < WAITING && !self.session.is_beginning()
    }

    fn open(&mut self, now: Millis) {
        let way = std::mem::replace(&mut self.way, Way::Closed(now + RETRY));
        self.way = match way {
            Way::Closed(at) if at <= now && !self.given_up => match Channel::open(&self.address) {
                Ok(channel) => self.try_way(now, channel),
                Err(e) => {
                    let what = format!("{} cannot be opened: {e}", self.address);
                    self.shared.say(&what);
                    Way::Closed(now + RETRY)
                }
            },
            Way::Deaf(channel, at) if at <= now => self.try_way(now, channel),
            other => other,
        };
    }

    /// A port of which nobody has the other end says so before anything is read from it.
    fn try_way(&mut self, now: Millis, channel: Channel) -> Way {
        let mut fds = [PollFd::new(&channel, PollFlags::IN)];
        let _ = poll(&mut fds, Some(&Timespec::default()));
        if fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR) {
            self.shared.say("the host does not listen at its end");
            return Way::Deaf(channel, now + RETRY);
        }
        self.frames.clear();
        self.session.opened();
        self.shared.say("the host is awaited");
        Way::Open(channel)
    }

    /// What the host has said.
    fn hear(&mut self, now: Millis) {
        for _ in 0..TURN {
            let Way::Open(channel) = &mut self.way else {
                return;
            };
            match self.frames.fill(channel) {
                Ok(None) => return,
                Ok(Some(0)) => return self.hang_up(now, "the host has hung up"),
                Ok(Some(_)) => {}
                Err(e) => return self.hang_up(now, &e.to_string()),
            }
            let whole = self.take(now);
            self.session.heard(now, self.frames.is_within(), whole);
        }
    }

    /// Takes all frames that are whole; whether there was one.
    fn take(&mut self, now: Millis) -> bool {
        let mut whole = false;
        loop {
            let greeting = self.session.is_greeting();
            let frame = match self.frames.next(greeting) {
                Ok(Some(frame)) => frame,
                Ok(None) => return whole,
                Err(e) => {
                    self.frames.skip();
                    if !greeting {
                        self.over(&format!("the stream is broken: {e}"));
                    }
                    continue;
                }
            };
            whole = true;
            match self.session.hear(now, frame, random()) {
                Then::Nothing => {
                    if let Some(why) = self.session.refusal() {
                        self.shared.say(&format!("the host refuses: {why}"));
                    }
                }
                Then::Reply(reply) => {
                    add(&self.shared.bytes, reply.len() as u64);
                    if let Some(fuse) = &mut self.fuse
                        && !fuse.reply(reply)
                    {
                        let unique = answered(reply).unwrap_or(0);
                        let asked = Asked { unique, opcode: 0 };
                        refuse(&mut self.fuse, &self.shared, asked);
                    }
                }
                Then::Begin => self.begin(),
                Then::Over => {
                    // it may be the hail of the next one
                    let hail = frame.kind == Kind::Hail;
                    let (session, payload) = (frame.session, frame.payload.to_vec());
                    self.over("the host has begun anew");
                    if hail {
                        let frame = Frame {
                            kind: Kind::Hail,
                            session,
                            payload: &payload,
                        };
                        self.session.hear(now, frame, random());
                    }
                }
                Then::Remount => {
                    self.over("the host has another program");
                    self.unmount();
                }
            }
        }
    }

    /// A session has begun: requests of the mount, or a mount.
    fn begin(&mut self) {
        add(&self.shared.sessions, 1);
        if self.fuse.is_none() {
            match Fuse::mount(&self.path) {
                Ok(fuse) => self.fuse = Some(fuse),
                Err(e) => {
                    let what = format!("{} cannot be mounted: {e}", self.path.display());
                    self.session.end();
                    self.session.rest(now());
                    return self.shared.say(&what);
                }
            }
        }
        self.shared.say("served by the host");
    }

    /// What the kernel wants.
    fn ask(&mut self, now: Millis) {
        for _ in 0..TURN {
            if !self.has_room() {
                return;
            }
            let Some(fuse) = &mut self.fuse else {
                return;
            };
            match fuse.hear() {
                Ok(Heard::Nothing) => return,
                Ok(Heard::Request(request)) => {
                    add(&self.shared.requests, 1);
                    if let Some(asked) = self.session.ask(now, request) {
                        refuse(&mut self.fuse, &self.shared, asked);
                    }
                }
                Ok(Heard::Unmounted) => {
                    self.given_up = true;
                    self.fuse = None;
                    self.session.end();
                    self.way = Way::Closed(Millis::MAX);
                    let what = "somebody has unmounted it; restart viola-agent to mount it again";
                    return self.shared.say(what);
                }
                Err(e) => {
                    self.over(&format!("/dev/fuse: {e}"));
                    return self.unmount();
                }
            }
        }
    }

    /// The stream has ended.
    fn hang_up(&mut self, now: Millis, why: &str) {
        self.over(why);
        let way = std::mem::replace(&mut self.way, Way::Closed(now + RETRY));
        // A port is kept: opening it again and again would be told to the host each time.
        if let (Way::Open(channel), Address::Device(_)) = (way, &self.address) {
            self.way = Way::Deaf(channel, now + RETRY);
        }
    }

    /// The session is over: nobody waits for what the host will not answer.
    fn over(&mut self, why: &str) {
        for asked in self.session.end() {
            refuse(&mut self.fuse, &self.shared, asked);
        }
        if self.fuse.is_some() && !self.session.is_begun() {
            self.unmount();
        }
        self.shared.say(why);
    }

    fn unmount(&mut self) {
        self.fuse = None;
        self.session.remount(random());
    }

    fn flush(&mut self, now: Millis) {
        loop {
            let Way::Open(channel) = &mut self.way else {
                return;
            };
            let out = self.session.out();
            if out.is_empty() {
                return;
            }
            match channel.write(out) {
                Ok(count) => self.session.sent(count),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return self.hang_up(now, &e.to_string()),
            }
        }
    }
}

fn refuse(fuse: &mut Option<Fuse>, shared: &Shared, asked: Asked) {
    add(&shared.failed, 1);
    if let Some(fuse) = fuse {
        fuse.reply(&asked.refusal(libc::EIO));
    }
}
