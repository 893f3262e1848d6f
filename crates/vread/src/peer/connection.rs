// SPDX-License-Identifier: Apache-2.0
//! A connection to another host on behalf of one reader, and what is pending from it.

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
use super::wire::{ErrorCode, Located, MAX_OUTSTANDING, Message, ProtocolError, WIRE_VERSION};

/// How long it may take until the other host has said welcome.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(3);
/// A host from which nothing has come for so long is asked for a sign of life, when something is pending from it...
const BUSY_PING_INTERVAL: Duration = Duration::from_millis(150);
/// ...and when nothing is.
const IDLE_PING_INTERVAL: Duration = Duration::from_secs(5);
/// How long it may take to give one.
const PING_TIMEOUT: Duration = Duration::from_millis(500);

/// What is pending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pending {
    /// The answer to the reader's look-up of this number.
    Find(u64),
    /// The reader's read of this number, into a slot.
    Read { id: u64, slot: u16, length: u32 },
}

/// What became of it.
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
    /// When something came last.
    last: Instant,
    /// When a sign of life was asked for that has not come.
    pinged: Option<Instant>,
    next: u64,
}

#[derive(Default)]
struct State {
    welcomed: bool,
    pending: HashMap<u64, Pending>,
    answers: Vec<(Pending, Answer)>,
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
    /// Begins to connect.
    pub(super) fn open(
        identity: &Identity,
        host: &Host,
        address: SocketAddr,
        reader: &str,
    ) -> Result<Self, ChannelError> {
        let connection = identity
            .connect(host.fingerprints.clone())
            .map_err(io::Error::other)?;
        let mut channel = TlsChannel::client(connect_socket(address)?, connection);
        let hello = Message::Hello {
            version: WIRE_VERSION,
            reader: reader.into(),
        };
        let mut frame = Vec::new();
        hello.encode(0, &mut frame);
        channel.send(frame);
        let now = Instant::now();
        let mut line = Self {
            channel,
            frames: FrameParser::default(),
            state: State::default(),
            begun: now,
            last: now,
            pinged: None,
            next: 1,
        };
        line.channel.flush()?;
        Ok(line)
    }

    /// Whether it can be asked.
    pub(super) fn welcomed(&self) -> bool {
        self.state.welcomed
    }

    pub(super) fn wants_write(&self) -> bool {
        self.channel.wants_write()
    }

    /// Whether answers are pending.
    pub(super) fn busy(&self) -> bool {
        !self.state.pending.is_empty()
    }

    /// Asks; false when too much is unanswered.
    pub(super) fn ask(&mut self, host: &Host, message: &Message, pending: Pending) -> bool {
        // One is left for the sign of life.
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

    /// Takes what has come, and sends what is to be sent. Answers are left for [`Connection::answers`].
    ///
    /// # Errors
    /// Why it is over.
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
            return Err(ProtocolError("it does not say welcome").into());
        }
        match self.pinged {
            Some(at) if now.saturating_duration_since(at) > PING_TIMEOUT => {
                return Err(ProtocolError("it gives no sign of life").into());
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

    /// What has been answered since this was last called.
    pub(super) fn answers(&mut self) -> Vec<(Pending, Answer)> {
        std::mem::take(&mut self.state.answers)
    }

    /// What will not be answered any more.
    pub(super) fn close(self) -> impl Iterator<Item = Pending> {
        self.state.pending.into_values()
    }
}

/// Takes frames of the other host.
struct AnswerSink<'a> {
    state: &'a mut State,
    memory: &'a SharedMemory,
}

impl FrameSink for AnswerSink<'_> {
    fn message(&mut self, id: u64, message: Message) -> Result<(), ProtocolError> {
        let unexpected = ProtocolError("an answer that nobody asked for");
        if !self.state.welcomed {
            return match message {
                Message::Welcome { version } if version == WIRE_VERSION && id == 0 => {
                    self.state.welcomed = true;
                    Ok(())
                }
                Message::Failed(_) => Err(ProtocolError("it speaks another version")),
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
                let most = i64::MAX as u64;
                if located.data > most || located.meta > most {
                    return Err(ProtocolError("a file that is too long"));
                }
                Answer::Found(located)
            }
            Message::Failed(code) => Answer::Failed(code),
            _ => return Err(unexpected),
        };
        let pending = self.state.pending.remove(&id).ok_or(unexpected)?;
        if matches!(answer, Answer::Found(_)) && !matches!(pending, Pending::Find(_)) {
            return Err(unexpected);
        }
        self.state.answers.push((pending, answer));
        Ok(())
    }

    fn data(&mut self, id: u64, at: usize, bytes: &[u8]) -> Result<(), ProtocolError> {
        let Some(Pending::Read { slot, length, .. }) = self.state.pending.get(&id) else {
            return Err(ProtocolError("bytes that nobody asked for"));
        };
        let end = at + bytes.len();
        if end > *length as usize || !self.memory.write(usize::from(*slot), at, bytes) {
            return Err(ProtocolError("more bytes than were asked for"));
        }
        if end == *length as usize
            && let Some(pending) = self.state.pending.remove(&id)
        {
            self.state.answers.push((pending, Answer::Data));
        }
        Ok(())
    }
}

/// Feeds an asking side that awaits answers to requests 1 to 8 with any bytes, cut into parts of `cut` bytes; how many
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
        answers: Vec::new(),
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
