// SPDX-License-Identifier: Apache-2.0
//! The requests that the host has not answered, and whether it is there. This module uses no clock,
//! no file and no descriptor.

use std::collections::HashMap;

use viola_proto::fuse_stream::{self, Frame, FrameKind, Hello, RequestHeader};

use crate::clock::Millis;

/// Between two probes of a host that does not answer.
const PROBE_INTERVAL: Millis = 500;
/// Between two pings while requests are pending.
const PING_INTERVAL: Millis = 1000;
/// A host that sends nothing for so long while requests are pending, or does not complete a frame, is lost.
const HOST_SILENCE_TIMEOUT: Millis = 5000;
/// Capacity of the output buffer that is kept when it is empty, in bytes.
const MAX_KEPT_OUT_BYTES: usize = 64 << 10;
/// Maximum number of entries in one part of a FUSE_BATCH_FORGET.
const MAX_FORGETS_PER_REQUEST: usize =
    (fuse_stream::MAX_REQUEST_BYTES - fuse_stream::FUSE_IN_HEADER_BYTES - 8) / 16;

/// State of the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// No session.
    Disconnected,
    /// A hello with this session number was sent.
    HelloSent(u64),
    /// The kernel's FUSE_INIT is sent again to a worker that does not know the mount.
    Replaying(u64),
    /// The session is open: requests are sent.
    Open(u64),
}

/// What follows from a frame.
#[derive(Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// Nothing.
    Nothing,
    /// A session has opened, and needs a mount.
    Begin,
    /// A reply for the kernel.
    Reply(&'a [u8]),
    /// The session has ended: see [`Session::end`].
    End,
    /// The worker cannot serve the present mount, which must be mounted again.
    Remount,
}

/// The mount's FUSE_INIT and its reply, to be repeated to another worker.
#[derive(Debug, Default)]
struct Init {
    request: Vec<u8>,
    reply: Vec<u8>,
}

/// The session of one mount with the host.
#[derive(Debug)]
pub struct Session {
    state: State,
    mount: u64,
    init: Init,
    pending: HashMap<u64, RequestHeader>,
    out: Vec<u8>,
    /// Bytes of `out` that the stream has taken.
    sent: usize,
    /// Challenges are ignored until the next probe.
    backing_off: bool,
    /// When the next probe or ping is due.
    next_send: Millis,
    /// When bytes were received last, or the first pending request was sent.
    last_received: Millis,
    /// Since when an incomplete frame has been received.
    frame_since: Option<Millis>,
    refusal: Option<String>,
}

impl Session {
    /// A session for a mount to be made, whose random number is `mount`.
    #[must_use]
    pub fn new(mount: u64) -> Self {
        Self {
            state: State::Disconnected,
            mount,
            init: Init::default(),
            pending: HashMap::new(),
            out: Vec::new(),
            sent: 0,
            backing_off: false,
            next_send: 0,
            last_received: 0,
            frame_since: None,
            refusal: None,
        }
    }

    /// The state.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Whether the kernel's requests are sent to the host.
    #[must_use]
    pub fn is_open(&self) -> bool {
        matches!(self.state, State::Open(_))
    }

    /// Whether only frames of the handshake are expected.
    #[must_use]
    pub fn is_handshaking(&self) -> bool {
        matches!(self.state, State::Disconnected | State::HelloSent(_))
    }

    /// Why the host has refused the session.
    #[must_use]
    pub fn refusal(&self) -> Option<&str> {
        self.refusal.as_deref()
    }

    /// Bytes to be sent to the host.
    #[must_use]
    pub fn out(&self) -> &[u8] {
        &self.out[self.sent..]
    }

    /// The stream has taken `count` bytes.
    pub fn sent(&mut self, count: usize) {
        self.sent += count;
        if self.sent >= self.out.len() {
            self.sent = 0;
            self.out.clear();
            // a large buffer is not kept
            self.out.shrink_to(MAX_KEPT_OUT_BYTES);
        }
    }

    /// Number of requests without a reply.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Whether requests must wait, because the session is about to open or fail.
    #[must_use]
    pub fn is_replaying(&self) -> bool {
        matches!(self.state, State::Replaying(_))
    }

    /// Sends no probe for five seconds.
    pub fn back_off(&mut self, now: Millis) {
        self.next_send = now + HOST_SILENCE_TIMEOUT;
        self.backing_off = true;
    }

    /// Another mount has replaced the present one; the kernel starts it with a new FUSE_INIT.
    pub fn remount(&mut self, mount: u64) {
        self.mount = mount;
        self.init = Init::default();
    }

    /// Whether the mount's FUSE_INIT was answered; without that the mount is of no use.
    #[must_use]
    pub fn has_init_reply(&self) -> bool {
        !self.init.reply.is_empty()
    }

    /// A stream was opened; a probe is due at once.
    pub fn stream_opened(&mut self) {
        self.state = State::Disconnected;
        self.out.clear();
        self.sent = 0;
        self.backing_off = false;
        self.next_send = 0;
        self.frame_since = None;
    }

    /// Ends the session, and returns the requests without a reply, which the caller fails.
    pub fn end(&mut self) -> Vec<RequestHeader> {
        self.stream_opened();
        // a repeated FUSE_INIT was answered to the kernel before
        self.pending.drain().map(|(_, asked)| asked).collect()
    }

    /// Queues a request of the kernel. Returns it when it cannot be sent.
    pub fn ask(&mut self, now: Millis, request: &[u8]) -> Option<RequestHeader> {
        let asked = RequestHeader::decode(request)?;
        let State::Open(session) = self.state else {
            return asked.expects_reply().then_some(asked);
        };
        if asked.opcode == fuse_stream::FUSE_BATCH_FORGET
            && request.len() > fuse_stream::MAX_REQUEST_BYTES
        {
            self.forward_forgets(session, request);
            return None;
        }
        if request.len() > fuse_stream::MAX_REQUEST_BYTES {
            return Some(asked);
        }
        if asked.opcode == fuse_stream::FUSE_INIT {
            self.init.request = request.to_vec();
        }
        if asked.expects_reply() {
            if self.pending.is_empty() {
                self.last_received = now;
                self.next_send = now + PING_INTERVAL;
            }
            self.pending.insert(asked.unique, asked);
        }
        fuse_stream::push_frame(&mut self.out, FrameKind::Request, session, request);
        None
    }

    /// Sends a long FUSE_BATCH_FORGET in parts.
    fn forward_forgets(&mut self, session: u64, request: &[u8]) {
        let (header, entries) = request.split_at(fuse_stream::FUSE_IN_HEADER_BYTES);
        for some in entries[8..].chunks(MAX_FORGETS_PER_REQUEST * 16) {
            let mut part = header.to_vec();
            let length = (fuse_stream::FUSE_IN_HEADER_BYTES + 8 + some.len()) as u32;
            part[..4].copy_from_slice(&length.to_le_bytes());
            part.extend_from_slice(&((some.len() / 16) as u32).to_le_bytes());
            part.extend_from_slice(&[0; 4]);
            part.extend_from_slice(some);
            fuse_stream::push_frame(&mut self.out, FrameKind::Request, session, &part);
        }
    }

    /// Bytes were received; `within` says that a frame is incomplete, `whole` that one was completed.
    pub fn bytes_received(&mut self, now: Millis, within: bool, whole: bool) {
        self.last_received = now;
        self.frame_since = match self.frame_since {
            Some(at) if within && !whole => Some(at),
            _ => within.then_some(now),
        };
    }

    /// Handles a frame; `random` is the number of the session that it may open.
    pub fn handle<'a>(&mut self, now: Millis, frame: Frame<'a>, random: u64) -> Step<'a> {
        let payload = frame.payload;
        match (frame.kind, self.state) {
            (FrameKind::Challenge, State::Disconnected) if self.backing_off => Step::Nothing,
            (FrameKind::Challenge, State::Disconnected | State::HelloSent(_)) => {
                let hello = Hello {
                    version: fuse_stream::VERSION,
                    session: random,
                    mount: self.mount,
                };
                fuse_stream::push_frame(
                    &mut self.out,
                    FrameKind::Hello,
                    frame.session,
                    &hello.encode(),
                );
                self.state = State::HelloSent(random);
                self.next_send = now + 2 * PROBE_INTERVAL;
                Step::Nothing
            }
            // The worker has started again.
            (FrameKind::Challenge, _) => Step::End,
            (FrameKind::Refused, State::HelloSent(_)) => {
                let text = String::from_utf8_lossy(payload);
                self.refusal = Some(text.chars().filter(|c| !c.is_control()).collect());
                self.state = State::Disconnected;
                self.next_send = now + 10 * PROBE_INTERVAL;
                Step::Nothing
            }
            (FrameKind::Welcome, State::HelloSent(own)) if own == frame.session => {
                self.refusal = None;
                self.last_received = now;
                if payload != [1] && self.has_init_reply() {
                    self.state = State::Replaying(own);
                    let request = std::mem::take(&mut self.init.request);
                    fuse_stream::push_frame(&mut self.out, FrameKind::Request, own, &request);
                    self.init.request = request;
                    self.next_send = now + PING_INTERVAL;
                    return Step::Nothing;
                }
                self.state = State::Open(own);
                Step::Begin
            }
            (FrameKind::Reply, State::Replaying(own)) if own == frame.session => {
                // what was negotiated with the kernel must hold with this worker too
                if payload != self.init.reply {
                    return Step::Remount;
                }
                self.state = State::Open(own);
                Step::Begin
            }
            (FrameKind::Reply, State::Open(own)) if own == frame.session => {
                let asked =
                    fuse_stream::reply_unique(payload).and_then(|u| self.pending.remove(&u));
                match asked {
                    None => Step::End,
                    Some(asked) => {
                        if asked.opcode == fuse_stream::FUSE_INIT {
                            self.init.reply = payload.to_vec();
                        }
                        Step::Reply(payload)
                    }
                }
            }
            (FrameKind::Pong, State::Open(own) | State::Replaying(own)) if own == frame.session => {
                Step::Nothing
            }
            // Left over from an earlier session.
            (_, State::Disconnected | State::HelloSent(_)) => Step::Nothing,
            (..) => Step::End,
        }
    }

    /// Sends probes and pings; `true` when the host is lost.
    pub fn tick(&mut self, now: Millis, random: u64) -> bool {
        let waits = !self.pending.is_empty() || matches!(self.state, State::Replaying(_));
        let late = |since: Millis| now >= since + HOST_SILENCE_TIMEOUT;
        if self.frame_since.is_some_and(late) || (waits && late(self.last_received)) {
            return true;
        }
        if self.next_send > now {
            return false;
        }
        match self.state {
            State::Disconnected | State::HelloSent(_) => {
                self.state = State::Disconnected;
                self.backing_off = false;
                fuse_stream::push_frame(&mut self.out, FrameKind::Probe, random, &[]);
                self.next_send = now + PROBE_INTERVAL;
            }
            State::Open(own) | State::Replaying(own) => {
                if waits {
                    fuse_stream::push_frame(
                        &mut self.out,
                        FrameKind::Ping,
                        own,
                        &random.to_le_bytes(),
                    );
                }
                self.next_send = now + PING_INTERVAL;
            }
        }
        false
    }

    /// When [`Session::tick`] must be called at the latest.
    #[must_use]
    pub fn next_due(&self) -> Millis {
        let idle = self.pending.is_empty() && self.is_open() && self.frame_since.is_none();
        if idle { Millis::MAX } else { self.next_send }
    }
}
