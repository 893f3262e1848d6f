// SPDX-License-Identifier: Apache-2.0
//! A connection to another host on behalf of one reader, and its pending requests.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};

use super::frames::{FrameParser, FrameSink};
use super::hosts::{Host, add};
use super::shared_memory::SharedMemory;
use super::tls::Identity;
use super::tls_channel::{ChannelError, TlsChannel};
use super::versions::Versions;
use super::wire::{ErrorCode, Located, MAX_OUTSTANDING, Message, ProtocolError};

/// Time limit for the host's welcome.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(3);
/// Silence after which this host pings the other one while requests are pending.
const BUSY_PING_INTERVAL: Duration = Duration::from_millis(150);
/// Silence after which this host pings the other one while no request is pending.
const IDLE_PING_INTERVAL: Duration = Duration::from_secs(5);
/// Time limit for the answer to a ping.
const PING_TIMEOUT: Duration = Duration::from_millis(500);

/// A pending request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pending {
    /// The reader's look-up with this number.
    Find(u64),
    /// The reader's read with this number, into a slot.
    Read { id: u64, slot: u16, length: u32 },
}

/// The answer to a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Found(Located),
    /// All bytes are in the slot.
    Data,
    Failed(ErrorCode),
}

/// The connection.
pub(super) struct Connection {
    channel: TlsChannel,
    frames: FrameParser,
    state: State,
    begun: Instant,
    /// Time of the last received bytes.
    last: Instant,
    /// Time of the unanswered ping.
    pinged: Option<Instant>,
    next: u64,
}

struct State {
    /// What this host offers.
    versions: Versions,
    welcomed: bool,
    /// Whether the host speaks none of the versions.
    refused: bool,
    pending: HashMap<u64, Pending>,
    answers: Vec<(Pending, Answer)>,
}

impl State {
    fn new(versions: Versions) -> Self {
        Self {
            versions,
            welcomed: false,
            refused: false,
            pending: HashMap::new(),
            answers: Vec::new(),
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

fn connect_socket(address: SocketAddr) -> io::Result<TcpStream> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket: OwnedFd = socket_with(family, SocketType::STREAM, flags, None)?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    match connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket.into()),
        Err(e) => Err(e.into()),
    }
}

impl Connection {
    /// Starts to connect, without waiting.
    pub(super) fn open(
        identity: &Identity,
        host: &Host,
        address: SocketAddr,
        reader: &str,
        versions: Versions,
    ) -> Result<Self, ChannelError> {
        let connection = identity
            .connect(host.fingerprints.clone())
            .map_err(io::Error::other)?;
        let mut channel = TlsChannel::client(connect_socket(address)?, connection);
        let hello = Message::Hello {
            versions,
            reader: reader.into(),
        };
        let mut frame = Vec::new();
        hello.encode(0, &mut frame);
        channel.send(frame);
        let now = Instant::now();
        let mut line = Self {
            channel,
            frames: FrameParser::default(),
            state: State::new(versions),
            begun: now,
            last: now,
            pinged: None,
            next: 1,
        };
        line.channel.flush()?;
        Ok(line)
    }

    /// Whether the host has said welcome.
    pub(super) fn welcomed(&self) -> bool {
        self.state.welcomed
    }

    /// Whether the host speaks none of the versions that this one has offered.
    pub(super) fn refused(&self) -> bool {
        self.state.refused
    }

    pub(super) fn wants_write(&self) -> bool {
        self.channel.wants_write()
    }

    /// Whether requests are pending.
    pub(super) fn busy(&self) -> bool {
        !self.state.pending.is_empty()
    }

    /// Sends a request; false when too many requests are pending.
    pub(super) fn ask(&mut self, host: &Host, message: &Message, pending: Pending) -> bool {
        // One request number is reserved for the ping.
        if self.state.pending.len() + 1 >= MAX_OUTSTANDING {
            return false;
        }
        if self.state.pending.is_empty() {
            self.last = Instant::now();
        }
        self.next += 1;
        self.state.pending.insert(self.next, pending);
        self.send(self.next, message);
        add(&host.counts.asked, 1);
        true
    }

    fn send(&mut self, id: u64, message: &Message) {
        let mut frame = self.channel.buffer();
        message.encode(id, &mut frame);
        self.channel.send(frame);
    }

    /// Receives and sends what is possible without waiting. [`Connection::answers`] returns the answers.
    ///
    /// # Errors
    /// The reason why the connection has ended.
    pub(super) fn work(&mut self, memory: &SharedMemory) -> Result<(), ChannelError> {
        let mut sink = AnswerSink {
            state: &mut self.state,
            memory,
        };
        let frames = &mut self.frames;
        self.channel
            .receive(&mut |bytes| frames.feed(bytes, &mut sink))?;
        let now = Instant::now();
        if self.channel.take_received() {
            (self.last, self.pinged) = (now, None);
        }
        if !self.welcomed() && now.saturating_duration_since(self.begun) > WELCOME_TIMEOUT {
            return Err(ProtocolError("the host did not say welcome in time").into());
        }
        match self.pinged {
            Some(at) if now.saturating_duration_since(at) > PING_TIMEOUT => {
                return Err(ProtocolError("the host did not answer a ping in time").into());
            }
            None if self.welcomed() => {
                let quiet = if self.busy() {
                    BUSY_PING_INTERVAL
                } else {
                    IDLE_PING_INTERVAL
                };
                if now.saturating_duration_since(self.last) > quiet {
                    self.pinged = Some(now);
                    self.send(0, &Message::Ping);
                }
            }
            _ => {}
        }
        self.channel.flush()
    }

    /// Answers since the last call.
    pub(super) fn answers(&mut self) -> Vec<(Pending, Answer)> {
        std::mem::take(&mut self.state.answers)
    }

    /// Requests that will not be answered any more.
    pub(super) fn close(self) -> impl Iterator<Item = Pending> {
        self.state.pending.into_values()
    }
}

/// Handles frames of the other host.
struct AnswerSink<'a> {
    state: &'a mut State,
    memory: &'a SharedMemory,
}

impl FrameSink for AnswerSink<'_> {
    fn message(&mut self, id: u64, message: Message) -> Result<(), ProtocolError> {
        let unexpected = ProtocolError("an answer without a request");
        if !self.state.welcomed {
            return match message {
                Message::Welcome { version }
                    if self.state.versions.contains(version) && id == 0 =>
                {
                    self.state.welcomed = true;
                    Ok(())
                }
                Message::Failed(_) => {
                    self.state.refused = true;
                    Err(ProtocolError("the host has another protocol version"))
                }
                _ => Err(unexpected),
            };
        }
        let answer = match message {
            Message::Pong => return Ok(()),
            Message::Data { length } => {
                return match self.state.pending.get(&id) {
                    Some(Pending::Read { length: asked, .. }) if *asked == length => Ok(()),
                    _ => Err(unexpected),
                };
            }
            Message::Found(located) => {
                let max_length = i64::MAX as u64;
                if located.data > max_length || located.meta > max_length {
                    return Err(ProtocolError("a file length above 2^63 - 1"));
                }
                Answer::Found(located)
            }
            Message::Failed(code) => Answer::Failed(code),
            _ => return Err(unexpected),
        };
        // A request leaves the table with its answer only: the end of the connection fails those that are in it.
        let suits = match self.state.pending.get(&id) {
            Some(Pending::Find(_)) => true,
            Some(Pending::Read { .. }) => matches!(answer, Answer::Failed(_)),
            None => false,
        };
        if !suits {
            return Err(unexpected);
        }
        let pending = self.state.pending.remove(&id).ok_or(unexpected)?;
        self.state.answers.push((pending, answer));
        Ok(())
    }

    fn data(&mut self, id: u64, at: usize, bytes: &[u8]) -> Result<(), ProtocolError> {
        let Some(Pending::Read { slot, length, .. }) = self.state.pending.get(&id) else {
            return Err(ProtocolError("bytes without a request"));
        };
        let end = at + bytes.len();
        if end > *length as usize || !self.memory.write(usize::from(*slot), at, bytes) {
            return Err(ProtocolError("more bytes than requested"));
        }
        if end == *length as usize
            && let Some(pending) = self.state.pending.remove(&id)
        {
            self.state.answers.push((pending, Answer::Data));
        }
        Ok(())
    }
}

/// Feeds any bytes, cut into parts of `cut` bytes, to a connection with pending requests 1 to 8, and returns how many
/// were answered.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn take_answers(bytes: &[u8], cut: usize, memory: &SharedMemory) -> usize {
    let read = |id: u64| Pending::Read {
        id,
        slot: id as u16,
        length: 1 << id,
    };
    let mut state = State {
        welcomed: true,
        pending: (1..=8)
            .map(|id| (id, if id < 5 { read(id) } else { Pending::Find(id) }))
            .collect(),
        ..State::new(super::versions::VERSIONS)
    };
    let mut frames = FrameParser::default();
    for part in bytes.chunks(cut.max(1)) {
        let mut sink = AnswerSink {
            state: &mut state,
            memory,
        };
        if frames.feed(part, &mut sink).is_err() {
            break;
        }
    }
    assert_eq!(state.answers.len() + state.pending.len(), 8);
    state.answers.len()
}
