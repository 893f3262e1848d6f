// SPDX-License-Identifier: Apache-2.0
//! What the host was asked and has not answered, and whether it is there. Without a clock, a file or a
//! descriptor.

use std::collections::HashMap;

use viola_proto::relay::{self, Asked, Frame, Hello, Kind};

use crate::clock::Millis;

/// A host that does not answer the agent's knocks is asked again after so long.
const KNOCK_INTERVAL: Millis = 500;
/// While something is waited for, the host is asked so often whether it still hears.
const PING_INTERVAL: Millis = 1000;
/// A host from which nothing comes for so long while something is waited for is gone, as is one that does not
/// end a frame in that time.
const HOST_SILENCE_TIMEOUT: Millis = 5000;
/// Room for bytes to the host that is kept.
const MAX_KEPT_OUT_BYTES: usize = 64 << 10;
/// Most entries of a FUSE_BATCH_FORGET that is cut.
const MAX_FORGETS_PER_REQUEST: usize = (relay::MAX_REQUEST - relay::IN_HEADER - 8) / 16;

/// How far it is with the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// There is nobody.
    Disconnected,
    /// A session was asked for.
    HelloSent(u64),
    /// The kernel's first request is sent once more, to a worker that does not know the mount.
    Replaying(u64),
    /// Requests are taken.
    Open(u64),
}

/// What a frame means for the mount.
#[derive(Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// Nothing.
    Nothing,
    /// A session begins. There has to be a mount.
    Begin,
    /// This goes to the kernel.
    Reply(&'a [u8]),
    /// The session is over: see [`Session::end`].
    End,
    /// The worker is another one than the mount was made for.
    Remount,
}

/// The kernel's first request of a mount and its reply, to be repeated to another worker.
#[derive(Debug, Default)]
struct Init {
    request: Vec<u8>,
    reply: Vec<u8>,
}

/// One host, one mount.
#[derive(Debug)]
pub struct Session {
    state: State,
    mount: u64,
    init: Init,
    pending: HashMap<u64, Asked>,
    out: Vec<u8>,
    /// Bytes at its begin that the stream has taken.
    sent: usize,
    /// Whether the host is not answered until it is knocked again.
    backing_off: bool,
    /// When it knocks or pings next.
    next_send: Millis,
    /// When something was heard last, or something began to be waited for.
    last_received: Millis,
    /// Since when a frame has begun and not ended.
    frame_since: Option<Millis>,
    refusal: Option<String>,
}

impl Session {
    /// For a mount that is to be made; `mount` is random.
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

    /// How far it is.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Whether requests of the kernel are taken.
    #[must_use]
    pub fn is_open(&self) -> bool {
        matches!(self.state, State::Open(_))
    }

    /// Whether only frames of the hand-shake are heard.
    #[must_use]
    pub fn is_handshaking(&self) -> bool {
        matches!(self.state, State::Disconnected | State::HelloSent(_))
    }

    /// Why the host wants no session.
    #[must_use]
    pub fn refusal(&self) -> Option<&str> {
        self.refusal.as_deref()
    }

    /// Bytes for the host.
    #[must_use]
    pub fn out(&self) -> &[u8] {
        &self.out[self.sent..]
    }

    /// So many of them were taken by the stream.
    pub fn sent(&mut self, count: usize) {
        self.sent += count;
        if self.sent >= self.out.len() {
            self.sent = 0;
            self.out.clear();
            // one that was long is not kept
            self.out.shrink_to(MAX_KEPT_OUT_BYTES);
        }
    }

    /// Requests that the host has to answer.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Whether the kernel has to wait with its requests: whether there will be somebody is known soon.
    #[must_use]
    pub fn is_replaying(&self) -> bool {
        matches!(self.state, State::Replaying(_))
    }

    /// The host is left alone for some seconds.
    pub fn back_off(&mut self, now: Millis) {
        self.next_send = now + HOST_SILENCE_TIMEOUT;
        self.backing_off = true;
    }

    /// The mount is another one from now on, which the kernel begins anew.
    pub fn remount(&mut self, mount: u64) {
        self.mount = mount;
        self.init = Init::default();
    }

    /// Whether the kernel's first request was answered; without that the mount is of no use.
    #[must_use]
    pub fn has_init_reply(&self) -> bool {
        !self.init.reply.is_empty()
    }

    /// There is a stream; it is knocked at once.
    pub fn stream_opened(&mut self) {
        self.state = State::Disconnected;
        self.out.clear();
        self.sent = 0;
        self.backing_off = false;
        self.next_send = 0;
        self.frame_since = None;
    }

    /// The session is over. What the host has not answered, to be refused.
    pub fn end(&mut self) -> Vec<Asked> {
        self.stream_opened();
        // the request that was sent once more has been answered long ago
        self.pending.drain().map(|(_, asked)| asked).collect()
    }

    /// A request of the kernel, to be sent; what is not sent is given back.
    pub fn ask(&mut self, now: Millis, request: &[u8]) -> Option<Asked> {
        let asked = Asked::read(request)?;
        let State::Open(session) = self.state else {
            return asked.is_answered().then_some(asked);
        };
        if asked.opcode == relay::BATCH_FORGET && request.len() > relay::MAX_REQUEST {
            self.forward_forgets(session, request);
            return None;
        }
        if request.len() > relay::MAX_REQUEST {
            return Some(asked);
        }
        if asked.opcode == relay::INIT {
            self.init.request = request.to_vec();
        }
        if asked.is_answered() {
            if self.pending.is_empty() {
                self.last_received = now;
                self.next_send = now + PING_INTERVAL;
            }
            self.pending.insert(asked.unique, asked);
        }
        relay::push(&mut self.out, Kind::Request, session, request);
        None
    }

    /// A list of what the kernel has forgotten, cut.
    fn forward_forgets(&mut self, session: u64, request: &[u8]) {
        let (header, entries) = request.split_at(relay::IN_HEADER);
        for some in entries[8..].chunks(MAX_FORGETS_PER_REQUEST * 16) {
            let mut part = header.to_vec();
            let length = (relay::IN_HEADER + 8 + some.len()) as u32;
            part[..4].copy_from_slice(&length.to_le_bytes());
            part.extend_from_slice(&((some.len() / 16) as u32).to_le_bytes());
            part.extend_from_slice(&[0; 4]);
            part.extend_from_slice(some);
            relay::push(&mut self.out, Kind::Request, session, &part);
        }
    }

    /// Bytes have come; `within` says that a frame has begun and not ended, `whole` that one has ended.
    pub fn bytes_received(&mut self, now: Millis, within: bool, whole: bool) {
        self.last_received = now;
        self.frame_since = match self.frame_since {
            Some(at) if within && !whole => Some(at),
            _ => within.then_some(now),
        };
    }

    /// The host has said something; `random` is a session's number, if it comes to one.
    pub fn handle<'a>(&mut self, now: Millis, frame: Frame<'a>, random: u64) -> Step<'a> {
        let payload = frame.payload;
        match (frame.kind, self.state) {
            (Kind::Hail, State::Disconnected) if self.backing_off => Step::Nothing,
            (Kind::Hail, State::Disconnected | State::HelloSent(_)) => {
                let hello = Hello {
                    version: relay::VERSION,
                    session: random,
                    mount: self.mount,
                };
                relay::push(&mut self.out, Kind::Hello, frame.session, &hello.bytes());
                self.state = State::HelloSent(random);
                self.next_send = now + 2 * KNOCK_INTERVAL;
                Step::Nothing
            }
            // The worker has begun anew.
            (Kind::Hail, _) => Step::End,
            (Kind::Refused, State::HelloSent(_)) => {
                let text = String::from_utf8_lossy(payload);
                self.refusal = Some(text.chars().filter(|c| !c.is_control()).collect());
                self.state = State::Disconnected;
                self.next_send = now + 10 * KNOCK_INTERVAL;
                Step::Nothing
            }
            (Kind::Welcome, State::HelloSent(own)) if own == frame.session => {
                self.refusal = None;
                self.last_received = now;
                if payload != [1] && self.has_init_reply() {
                    self.state = State::Replaying(own);
                    let request = std::mem::take(&mut self.init.request);
                    relay::push(&mut self.out, Kind::Request, own, &request);
                    self.init.request = request;
                    self.next_send = now + PING_INTERVAL;
                    return Step::Nothing;
                }
                self.state = State::Open(own);
                Step::Begin
            }
            (Kind::Reply, State::Replaying(own)) if own == frame.session => {
                // whatever was agreed with the kernel has to hold with this worker, too
                if payload != self.init.reply {
                    return Step::Remount;
                }
                self.state = State::Open(own);
                Step::Begin
            }
            (Kind::Reply, State::Open(own)) if own == frame.session => {
                let asked = relay::answered(payload).and_then(|u| self.pending.remove(&u));
                match asked {
                    None => Step::End,
                    Some(asked) => {
                        if asked.opcode == relay::INIT {
                            self.init.reply = payload.to_vec();
                        }
                        Step::Reply(payload)
                    }
                }
            }
            (Kind::Pong, State::Open(own) | State::Replaying(own)) if own == frame.session => {
                Step::Nothing
            }
            // Left over from a session before.
            (_, State::Disconnected | State::HelloSent(_)) => Step::Nothing,
            (..) => Step::End,
        }
    }

    /// Knocks and pings; `true` when the session is over because nothing comes any more.
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
                relay::push(&mut self.out, Kind::Knock, random, &[]);
                self.next_send = now + KNOCK_INTERVAL;
            }
            State::Open(own) | State::Replaying(own) => {
                if waits {
                    relay::push(&mut self.out, Kind::Ping, own, &random.to_le_bytes());
                }
                self.next_send = now + PING_INTERVAL;
            }
        }
        false
    }

    /// When [`Session::tick`] is to be called at the latest.
    #[must_use]
    pub fn next_due(&self) -> Millis {
        let idle = self.pending.is_empty() && self.is_open() && self.frame_since.is_none();
        if idle { Millis::MAX } else { self.next_send }
    }
}
