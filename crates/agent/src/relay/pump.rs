// SPDX-License-Identifier: Apache-2.0
//! The thread between the FUSE device and the stream; it blocks on neither.

use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use viola_proto::fuse_stream::{Frame, FrameKind, FrameReader, RequestHeader, reply_unique};

use super::mount::{Fuse, FuseEvent};
use super::session::{Session, Step};
use super::shared::Shared;
use crate::clock::{Millis, now};
use crate::io::channel::{Address, Channel};
use crate::io::random::random;

/// Maximum bytes that wait for the host; further requests stay in the kernel.
const MAX_OUT_BYTES: usize = 256 << 10;
/// Maximum number of requests read before the host's frames are read again.
const MAX_REQUESTS_PER_ROUND: usize = 64;
/// Between two attempts to open the stream.
const RECONNECT_INTERVAL: Millis = 250;
/// Longest sleep of the thread, in milliseconds.
const MAX_SLEEP: Millis = 1000;

/// The transport to the host.
enum Transport {
    /// To be opened at this time.
    Closed(Millis),
    /// Open, but the host does not have its end open; polled again at this time.
    Unattended(Channel, Millis),
    Open(Channel),
}

pub(super) struct Pump {
    path: PathBuf,
    address: Address,
    shared: Arc<Shared>,
    transport: Transport,
    frames: FrameReader,
    session: Session,
    fuse: Option<Fuse>,
    /// Somebody has unmounted it, so it is not mounted again.
    unmounted_by_user: bool,
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
            transport: Transport::Closed(0),
            frames: FrameReader::from_worker(),
            session: Session::new(random()),
            fuse: None,
            unmounted_by_user: false,
        }
    }

    pub(super) fn run(mut self) {
        while !self.wait() {
            let time = now();
            self.open(time);
            self.read_host(time);
            self.read_kernel(time);
            if matches!(self.transport, Transport::Open(_)) && self.session.tick(time, random()) {
                self.end_session("the host does not answer");
            }
            self.flush(time);
        }
        self.end_session("viola-agent ends");
    }

    /// Sleeps until a descriptor is readable or something is due; `true` when the relay ends.
    fn wait(&self) -> bool {
        let time = now();
        let mut until = time + MAX_SLEEP;
        let mut fds = vec![PollFd::new(&self.shared.stop, PollFlags::IN)];
        match &self.transport {
            Transport::Closed(at) | Transport::Unattended(_, at) => until = until.min(*at),
            Transport::Open(channel) => {
                until = until.min(self.session.next_due());
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
        // an interrupted wait is harmless
        let _ = poll(&mut fds, Some(&limit));
        !fds[0].revents().is_empty()
    }

    fn has_room(&self) -> bool {
        self.session.out().len() < MAX_OUT_BYTES && !self.session.is_replaying()
    }

    fn open(&mut self, now: Millis) {
        let transport = std::mem::replace(
            &mut self.transport,
            Transport::Closed(now + RECONNECT_INTERVAL),
        );
        self.transport = match transport {
            Transport::Closed(at) if at <= now && !self.unmounted_by_user => {
                match Channel::open(&self.address) {
                    Ok(channel) => self.try_channel(now, channel),
                    Err(e) => {
                        let what = format!("{} cannot be opened: {e}", self.address);
                        self.shared.set_state(&what);
                        Transport::Closed(now + RECONNECT_INTERVAL)
                    }
                }
            }
            Transport::Unattended(channel, at) if at <= now => self.try_channel(now, channel),
            other => other,
        };
    }

    /// Uses a channel unless its other end is closed, which a port reports at once.
    fn try_channel(&mut self, now: Millis, channel: Channel) -> Transport {
        let mut fds = [PollFd::new(&channel, PollFlags::IN)];
        let _ = poll(&mut fds, Some(&Timespec::default()));
        if fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR) {
            self.shared.set_state("the host has not opened its end");
            return Transport::Unattended(channel, now + RECONNECT_INTERVAL);
        }
        self.frames.clear();
        self.session.stream_opened();
        self.shared.set_state("waiting for the host");
        Transport::Open(channel)
    }

    /// Reads and handles frames of the host.
    fn read_host(&mut self, now: Millis) {
        for _ in 0..MAX_REQUESTS_PER_ROUND {
            let Transport::Open(channel) = &mut self.transport else {
                return;
            };
            match self.frames.fill(channel) {
                Ok(None) => return,
                Ok(Some(0)) => return self.disconnect(now, "the host has closed the stream"),
                Ok(Some(_)) => {}
                Err(e) => return self.disconnect(now, &e.to_string()),
            }
            let whole = self.handle_frames(now);
            self.session
                .bytes_received(now, self.frames.is_partial(), whole);
        }
    }

    /// Handles all complete frames; `true` when there was one.
    fn handle_frames(&mut self, now: Millis) -> bool {
        let mut whole = false;
        loop {
            let handshaking = self.session.is_handshaking();
            let frame = match self.frames.next(handshaking) {
                Ok(Some(frame)) => frame,
                Ok(None) => return whole,
                Err(e) => {
                    self.frames.skip();
                    if !handshaking {
                        self.end_session(&format!("the stream is broken: {e}"));
                    }
                    continue;
                }
            };
            whole = true;
            match self.session.handle(now, frame, random()) {
                Step::Nothing => {
                    if let Some(why) = self.session.refusal() {
                        self.shared.set_state(&format!("the host refuses: {why}"));
                    }
                }
                Step::Reply(reply) => {
                    add(&self.shared.bytes, reply.len() as u64);
                    if let Some(fuse) = &mut self.fuse
                        && !fuse.reply(reply)
                    {
                        let unique = reply_unique(reply).unwrap_or(0);
                        let asked = RequestHeader { unique, opcode: 0 };
                        fail_request(&mut self.fuse, &self.shared, asked);
                    }
                }
                Step::Begin => self.begin(),
                Step::End => {
                    // the frame may be the challenge of the next session
                    let is_challenge = frame.kind == FrameKind::Challenge;
                    let (session, payload) = (frame.session, frame.payload.to_vec());
                    self.end_session("the host's worker has restarted");
                    if is_challenge {
                        let frame = Frame {
                            kind: FrameKind::Challenge,
                            session,
                            payload: &payload,
                        };
                        self.session.handle(now, frame, random());
                    }
                }
                Step::Remount => {
                    self.end_session("the host has a new worker: mounting again");
                    self.unmount();
                }
            }
        }
    }

    /// A session has opened: mounts, if needed.
    fn begin(&mut self) {
        add(&self.shared.sessions, 1);
        if self.fuse.is_none() {
            match Fuse::mount(&self.path) {
                Ok(fuse) => self.fuse = Some(fuse),
                Err(e) => {
                    let what = format!("{} cannot be mounted: {e}", self.path.display());
                    self.session.end();
                    self.session.back_off(now());
                    return self.shared.set_state(&what);
                }
            }
        }
        self.shared.set_state("served by the host");
    }

    /// Reads requests from the kernel.
    fn read_kernel(&mut self, now: Millis) {
        for _ in 0..MAX_REQUESTS_PER_ROUND {
            if !self.has_room() {
                return;
            }
            let Some(fuse) = &mut self.fuse else {
                return;
            };
            match fuse.read_request() {
                Ok(FuseEvent::Idle) => return,
                Ok(FuseEvent::Request(request)) => {
                    add(&self.shared.requests, 1);
                    if let Some(asked) = self.session.ask(now, request) {
                        fail_request(&mut self.fuse, &self.shared, asked);
                    }
                }
                Ok(FuseEvent::Unmounted) => {
                    self.unmounted_by_user = true;
                    self.fuse = None;
                    self.session.end();
                    self.transport = Transport::Closed(Millis::MAX);
                    let what = "somebody has unmounted it; restart viola-agent to mount it again";
                    return self.shared.set_state(what);
                }
                Err(e) => {
                    self.end_session(&format!("/dev/fuse: {e}"));
                    return self.unmount();
                }
            }
        }
    }

    /// The stream has ended.
    fn disconnect(&mut self, now: Millis, why: &str) {
        self.end_session(why);
        let transport = std::mem::replace(
            &mut self.transport,
            Transport::Closed(now + RECONNECT_INTERVAL),
        );
        // A port stays open: the host would see each close and open.
        if let (Transport::Open(channel), Address::Device(_)) = (transport, &self.address) {
            self.transport = Transport::Unattended(channel, now + RECONNECT_INTERVAL);
        }
    }

    /// Ends the session and fails all pending requests.
    fn end_session(&mut self, why: &str) {
        for asked in self.session.end() {
            fail_request(&mut self.fuse, &self.shared, asked);
        }
        if self.fuse.is_some() && !self.session.has_init_reply() {
            self.unmount();
        }
        self.shared.set_state(why);
    }

    fn unmount(&mut self) {
        self.fuse = None;
        self.session.remount(random());
    }

    fn flush(&mut self, now: Millis) {
        loop {
            let Transport::Open(channel) = &mut self.transport else {
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
                Err(e) => return self.disconnect(now, &e.to_string()),
            }
        }
    }
}

fn fail_request(fuse: &mut Option<Fuse>, shared: &Shared, asked: RequestHeader) {
    add(&shared.failed, 1);
    if let Some(fuse) = fuse {
        fuse.reply(&asked.error_reply(libc::EIO));
    }
}
