// SPDX-License-Identifier: Apache-2.0
//! A connection to another host on behalf of one reader, and what is awaited from it.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};

use super::channel::{Broken, Channel};
use super::frames::{Frames, Sink};
use super::hosts::{Host, add};
use super::memory::Memory;
use super::tls::Identity;
use super::wire::{Bad, Code, Located, MAX_OUTSTANDING, Message, WIRE_VERSION};

/// How long it may take until the other host has said welcome.
const WELCOME: Duration = Duration::from_secs(3);
/// A host from which nothing has come for so long is asked for a sign of life, when something is awaited from it...
const QUIET: Duration = Duration::from_millis(150);
/// ...and when nothing is.
const IDLE: Duration = Duration::from_secs(5);
/// How long it may take to give one.
const DEAD: Duration = Duration::from_millis(500);

/// What is awaited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Awaited {
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
    Here,
    Failed(Code),
}

/// The connection.
pub(super) struct Line {
    channel: Channel,
    frames: Frames,
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
    awaited: HashMap<u64, Awaited>,
    answers: Vec<(Awaited, Answer)>,
}

impl AsFd for Line {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

fn dial(address: SocketAddr) -> io::Result<TcpStream> {
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

impl Line {
    /// Begins to connect.
    pub(super) fn open(
        identity: &Identity,
        host: &Host,
        address: SocketAddr,
        reader: &str,
    ) -> Result<Self, Broken> {
        let connection = identity
            .connect(host.fingerprints.clone())
            .map_err(io::Error::other)?;
        let mut channel = Channel::client(dial(address)?, connection);
        let hello = Message::Hello {
            version: WIRE_VERSION,
            reader: reader.into(),
        };
        let mut frame = Vec::new();
        hello.put(0, &mut frame);
        channel.send(frame);
        let now = Instant::now();
        let mut line = Self {
            channel,
            frames: Frames::default(),
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

    /// Whether answers are awaited.
    pub(super) fn busy(&self) -> bool {
        !self.state.awaited.is_empty()
    }

    /// Asks; false when too much is unanswered.
    pub(super) fn ask(&mut self, host: &Host, message: &Message, awaited: Awaited) -> bool {
        // One is left for the sign of life.
        if self.state.awaited.len() + 1 >= MAX_OUTSTANDING {
            return false;
        }
        if self.state.awaited.is_empty() {
            self.last = Instant::now();
        }
        self.next += 1;
        self.state.awaited.insert(self.next, awaited);
        self.say(self.next, message);
        add(&host.counts.asked, 1);
        true
    }

    fn say(&mut self, id: u64, message: &Message) {
        let mut frame = self.channel.buffer();
        message.put(id, &mut frame);
        self.channel.send(frame);
    }

    /// Takes what has come, and sends what is to be sent. Answers are left for [`Line::answers`].
    ///
    /// # Errors
    /// Why it is over.
    pub(super) fn work(&mut self, memory: &Memory) -> Result<(), Broken> {
        let mut taker = Taker {
            state: &mut self.state,
            memory,
        };
        let frames = &mut self.frames;
        self.channel
            .receive(&mut |bytes| frames.feed(bytes, &mut taker))?;
        let now = Instant::now();
        if self.channel.heard() {
            (self.last, self.pinged) = (now, None);
        }
        if !self.welcomed() && now.saturating_duration_since(self.begun) > WELCOME {
            return Err(Bad("it does not say welcome").into());
        }
        match self.pinged {
            Some(at) if now.saturating_duration_since(at) > DEAD => {
                return Err(Bad("it gives no sign of life").into());
            }
            None if self.welcomed() => {
                let quiet = if self.busy() { QUIET } else { IDLE };
                if now.saturating_duration_since(self.last) > quiet {
                    self.pinged = Some(now);
                    self.say(0, &Message::Ping);
                }
            }
            _ => {}
        }
        self.channel.flush()
    }

    /// What has been answered since this was last called.
    pub(super) fn answers(&mut self) -> Vec<(Awaited, Answer)> {
        std::mem::take(&mut self.state.answers)
    }

    /// What will not be answered any more.
    pub(super) fn close(self) -> impl Iterator<Item = Awaited> {
        self.state.awaited.into_values()
    }
}

/// Takes frames of the other host.
struct Taker<'a> {
    state: &'a mut State,
    memory: &'a Memory,
}

impl Sink for Taker<'_> {
    fn message(&mut self, id: u64, message: Message) -> Result<(), Bad> {
        let unasked = Bad("an answer that nobody asked for");
        if !self.state.welcomed {
            return match message {
                Message::Welcome { version } if version == WIRE_VERSION && id == 0 => {
                    self.state.welcomed = true;
                    Ok(())
                }
                Message::Failed(_) => Err(Bad("it speaks another version")),
                _ => Err(unasked),
            };
        }
        let answer = match message {
            Message::Pong => return Ok(()),
            Message::Data { length } => {
                return match self.state.awaited.get(&id) {
                    Some(Awaited::Read { length: asked, .. }) if *asked == length => Ok(()),
                    _ => Err(unasked),
                };
            }
            Message::Found(located) => {
                let most = i64::MAX as u64;
                if located.data > most || located.meta > most {
                    return Err(Bad("a file that is too long"));
                }
                Answer::Found(located)
            }
            Message::Failed(code) => Answer::Failed(code),
            _ => return Err(unasked),
        };
        let awaited = self.state.awaited.remove(&id).ok_or(unasked)?;
        if matches!(answer, Answer::Found(_)) && !matches!(awaited, Awaited::Find(_)) {
            return Err(unasked);
        }
        self.state.answers.push((awaited, answer));
        Ok(())
    }

    fn data(&mut self, id: u64, at: usize, bytes: &[u8]) -> Result<(), Bad> {
        let Some(Awaited::Read { slot, length, .. }) = self.state.awaited.get(&id) else {
            return Err(Bad("bytes that nobody asked for"));
        };
        let end = at + bytes.len();
        if end > *length as usize || !self.memory.put(usize::from(*slot), at, bytes) {
            return Err(Bad("more bytes than were asked for"));
        }
        if end == *length as usize
            && let Some(awaited) = self.state.awaited.remove(&id)
        {
            self.state.answers.push((awaited, Answer::Here));
        }
        Ok(())
    }
}

/// Feeds an asking side that awaits answers to requests 1 to 8 with any bytes, cut into parts of `cut` bytes; how many
/// were answered.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn take_answers(bytes: &[u8], cut: usize, memory: &Memory) -> usize {
    let read = |id: u64| Awaited::Read {
        id,
        slot: id as u16,
        length: 1 << id,
    };
    let mut state = State {
        welcomed: true,
        awaited: (1..=8)
            .map(|id| (id, if id < 5 { read(id) } else { Awaited::Find(id) }))
            .collect(),
        answers: Vec::new(),
    };
    let mut frames = Frames::default();
    for part in bytes.chunks(cut.max(1)) {
        let mut taker = Taker {
            state: &mut state,
            memory,
        };
        if frames.feed(part, &mut taker).is_err() {
            break;
        }
    }
    assert_eq!(state.answers.len() + state.awaited.len(), 8);
    state.answers.len()
}
