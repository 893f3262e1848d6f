// SPDX-License-Identifier: Apache-2.0
//! The pipes of a process, by their numbers; those with sockets by these, too.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, Condvar};
use std::time::{Duration, Instant};

use viola_proto::pipe::library::{LibraryReply, LibraryRequest, LostConnections};

use super::link::Link;
use super::marks;
use crate::candidate::{FileId, file_id};
use crate::threshold;

/// How long what was refused for now is left alone.
const NOT_NOW: Duration = Duration::from_secs(1);
/// How long a source and a sink are left alone that never fit; a socket that no file fits, for ever.
const NEVER: Duration = Duration::from_secs(60);
/// Refusals that are remembered.
const REFUSALS: usize = 4096;

/// What a pipe has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The host has the connection.
    Piping,
    /// The connection is in the socket again, or broken: an errno, 0 when it is not.
    Over(i32),
    /// The agent did nothing.
    Refused(i32),
}

/// What a watcher hears.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    /// More was sent.
    Progress,
    /// It is over.
    Over,
    /// The agent did nothing.
    Refused,
}

/// Called with the table locked, by the thread that hears the agent: it must not call the engine, and not wait.
pub type Watcher = Box<dyn Fn(News) + Send>;

/// What is to be moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Part {
    /// First byte of a source that is a file.
    pub offset: u64,
    /// How many, above 0.
    pub length: u64,
    /// First byte in a sink that is a file.
    pub to: u64,
}

/// One end of a pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    /// What it is: its descriptor may have been closed behind our back, and its number be another's.
    pub id: FileId,
    /// Of a socket.
    pub socket: Option<RawFd>,
}

/// A pipe.
pub struct Record {
    /// Its number.
    pub id: u64,
    /// Where bytes come from.
    pub source: End,
    /// Where they go.
    pub sink: End,
    /// What is to be moved.
    pub part: Part,
    /// What the program has been told is sent, in bytes.
    pub consumed: u64,
    /// What the agent said is sent. All of it only when the connection is back: a program that has been told so goes on with
    /// the socket.
    pub sent: u64,
    /// What it has come to.
    pub state: State,
    /// Connections that are gone.
    pub lost: LostConnections,
    /// How often the program was told that nothing is new, since there was something.
    pub asked: u32,
    /// Descriptor of the file that was looked at last, and what [`marks::closed`] said then.
    pub file: Option<(RawFd, usize)>,
    /// What its socket's descriptor was when it was looked at: not since there was news, nor when there is none.
    pub looked: Option<FileId>,
    pub(super) link: u64,
    /// When it was begun, and how many there were then, with itself: of one whose time [`threshold`] wants.
    pub(super) begun: Option<(Instant, usize)>,
    pub(super) watcher: Watcher,
    pub(super) changed: Arc<Condvar>,
}

impl Record {
    /// Bytes that are sent and that the program does not know of.
    pub fn available(&self) -> u64 {
        self.sent.saturating_sub(self.consumed)
    }

    /// Whether the host has the connection.
    pub fn is_piping(&self) -> bool {
        self.state == State::Piping
    }

    /// Whether there is something to tell the program.
    pub fn has_news(&self) -> bool {
        !self.is_piping() || self.available() > 0
    }

    /// Whether these bytes of a file are those that come next.
    pub fn continues(&mut self, file: BorrowedFd<'_>, offset: u64) -> bool {
        if Some(offset) != self.part.offset.checked_add(self.consumed) {
            return false;
        }
        // servers ask for 256 KiB at a time, and each look is a system call
        let known = (file.as_raw_fd(), marks::closed());
        if self.file == Some(known) {
            return true;
        }
        let is_marked = marks::set(known.0, marks::FILE);
        let is_same = file_id(file) == Ok(self.source.id);
        self.file = (is_same && is_marked).then_some(known);
        is_same
    }

    /// Nobody watches any more.
    pub fn unwatch(&mut self) {
        self.watcher = Box::new(|_| ());
    }

    fn sockets(&self) -> impl Iterator<Item = (RawFd, FileId)> + use<> {
        let ends = [self.source, self.sink].into_iter();
        ends.filter_map(|end| Some((end.socket?, end.id)))
    }

    fn refusal(&self) -> Pair {
        match (self.source.socket, self.sink.socket) {
            (None, Some(_)) => (None, self.sink.id),
            _ => (Some(self.source.id), self.sink.id),
        }
    }

    fn end(&mut self, state: State) {
        self.state = state;
        self.changed.notify_all();
        let news = match state {
            State::Refused(_) => News::Refused,
            _ => News::Over,
        };
        (self.watcher)(news);
    }
}

/// Whose refusal it is: what does not go down a socket is not asked for again with another file.
pub(super) type Pair = (Option<FileId>, FileId);

/// The pipes of a process.
#[derive(Default)]
pub struct Table {
    records: HashMap<u64, Record>,
    sockets: HashMap<RawFd, u64>,
    /// Until when; for ever.
    refusals: HashMap<Pair, Option<Instant>>,
    pub(super) link: Option<Link>,
    pub(super) links: u64,
    pub(super) not_before: Option<Instant>,
    pub(super) last: u64,
}

impl Table {
    /// Whether no agent could be reached a moment ago.
    pub fn not_now(&self) -> bool {
        self.not_before.is_some_and(|t| Instant::now() < t)
    }

    /// A pipe.
    pub fn pipe(&mut self, id: u64) -> Option<&mut Record> {
        self.records.get_mut(&id)
    }

    /// A socket's pipe.
    pub fn record(&mut self, fd: RawFd) -> Option<&mut Record> {
        self.records.get_mut(self.sockets.get(&fd)?)
    }

    /// A socket's pipe, of this very socket. One of another socket that had the number before is ended.
    pub fn record_of(&mut self, fd: RawFd, socket: FileId) -> Option<&mut Record> {
        if !self.record(fd)?.sockets().any(|it| it == (fd, socket)) {
            self.reset(fd);
        }
        self.record(fd)
    }

    /// Asks for an early end of a pipe; it is still there until the agent says that it is over.
    pub fn stop(&mut self, id: u64) {
        self.tell(id, LibraryRequest::Stop { id });
    }

    /// A socket is closed: ends its pipe with all connections when the host has them. Another socket of the pipe is told.
    pub fn reset(&mut self, fd: RawFd) {
        let Some(&id) = self.sockets.get(&fd) else {
            marks::clear(fd, marks::PIPE);
            return;
        };
        self.tell(id, LibraryRequest::Reset { id });
        self.release(fd);
        if let Some(record) = self.records.get_mut(&id)
            && record.is_piping()
        {
            record.lost = LostConnections {
                source: true,
                sink: true,
            };
            record.end(State::Over(libc::ECONNRESET));
        }
    }

    fn tell(&self, id: u64, ask: LibraryRequest) {
        if let (Some(record), Some(link)) = (self.records.get(&id), &self.link)
            && record.is_piping()
            && record.link == link.number
        {
            link.tell(ask);
        }
    }

    /// Pipes that the host or the agent is at.
    pub(super) fn piping(&self) -> usize {
        self.records.values().filter(|r| r.is_piping()).count()
    }

    /// Forgets a pipe.
    pub fn forget(&mut self, id: u64) {
        if let Some(record) = self.records.remove(&id) {
            if let Some((file, _)) = record.file {
                // another pipe of the same file looks again
                marks::close(file);
            }
            for (fd, _) in record.sockets() {
                self.detach(fd, id);
            }
            record.changed.notify_all();
        }
    }

    /// A socket has no part in its pipe any more, which is forgotten when it was the last one.
    pub fn release(&mut self, fd: RawFd) {
        let Some(&id) = self.sockets.get(&fd) else {
            return;
        };
        self.detach(fd, id);
        let left = self.records.get(&id).map(Record::sockets);
        if !left.is_some_and(|mut left| left.any(|(fd, _)| self.sockets.get(&fd) == Some(&id))) {
            self.forget(id);
        }
    }

    fn detach(&mut self, fd: RawFd, id: u64) {
        if self.sockets.get(&fd) == Some(&id) {
            self.sockets.remove(&fd);
            marks::clear(fd, marks::PIPE);
        }
    }

    /// All was told but an error: it stays for those whose connections are lost, or for both when none is.
    pub fn keep_error(&mut self, id: u64) {
        let Some(record) = self.records.get_mut(&id) else {
            return;
        };
        record.unwatch();
        if record.lost != LostConnections::NONE {
            let ends = [
                (record.source, record.lost.source),
                (record.sink, record.lost.sink),
            ];
            for (end, lost) in ends {
                if let (Some(fd), false) = (end.socket, lost) {
                    self.release(fd);
                }
            }
        }
        if self.sockets.values().all(|&other| other != id) {
            self.forget(id);
        }
    }

    pub(super) fn insert(&mut self, record: Record) {
        for (fd, _) in record.sockets() {
            marks::set(fd, marks::PIPE | marks::LENT);
            self.sockets.insert(fd, record.id);
        }
        self.records.insert(record.id, record);
    }

    pub(super) fn refuses(&mut self, pair: Pair) -> bool {
        let holds = match self.refusals.get(&pair) {
            None => return false,
            Some(until) => until.is_none_or(|t| Instant::now() < t),
        };
        if !holds {
            self.refusals.remove(&pair);
        }
        holds
    }

    fn refuse(&mut self, pair: Pair, errno: i32) {
        let now = Instant::now();
        let until = match (errno == libc::EOPNOTSUPP, pair.0) {
            (false, _) => Some(now + NOT_NOW),
            (true, Some(_)) => Some(now + NEVER),
            (true, None) => None,
        };
        if self.refusals.len() >= REFUSALS {
            self.refusals
                .retain(|_, until| until.is_some_and(|t| now < t));
        }
        if self.refusals.len() >= REFUSALS {
            self.refusals.clear();
        }
        self.refusals.insert(pair, until);
    }

    pub(super) fn hear(&mut self, answer: LibraryReply) {
        let id = answer.id();
        // none: a socket of it was closed
        let Some(record) = self.records.get_mut(&id).filter(|r| r.is_piping()) else {
            return;
        };
        match answer {
            LibraryReply::Progress { sent, .. } => {
                if sent <= record.sent || sent >= record.part.length {
                    return; // nothing new, or all: then the end follows
                }
                record.sent = sent;
                record.looked = None;
                record.changed.notify_all();
                (record.watcher)(News::Progress);
            }
            LibraryReply::Finished {
                sent,
                errno,
                lost,
                host_us,
                ..
            } => {
                let sent = sent.min(record.part.length);
                // a program that was told of more than there is must not go on
                let torn = sent < record.consumed;
                record.sent = sent.max(record.consumed);
                record.looked = None;
                record.lost = lost;
                let errno = match errno {
                    _ if torn => libc::ECONNRESET,
                    0 if lost != LostConnections::NONE => libc::ECONNRESET,
                    errno => errno,
                };
                let is_whole = errno == 0 && sent == record.part.length && host_us > 0;
                if let Some((begun, beside)) = record.begun.filter(|_| is_whole) {
                    threshold::piped(begun, Duration::from_micros(host_us), beside);
                }
                record.end(State::Over(errno));
            }
            LibraryReply::Refused { errno, .. } => {
                let pair = record.refusal();
                record.end(State::Refused(errno));
                self.refuse(pair, errno);
            }
        }
    }

    /// The agent is gone: whatever it had is reset.
    pub(super) fn lose(&mut self, number: u64) {
        if self.link.as_ref().is_some_and(|link| link.number == number) {
            self.link = None;
        }
        for record in self.records.values_mut() {
            if record.link == number && record.is_piping() {
                record.lost = LostConnections {
                    source: record.source.socket.is_some(),
                    sink: record.sink.socket.is_some(),
                };
                let errno = if record.lost == LostConnections::NONE {
                    // nobody knows what is in the file
                    record.sent = record.consumed;
                    libc::EIO
                } else {
                    libc::ECONNRESET
                };
                record.end(State::Over(errno));
            }
        }
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
