// SPDX-License-Identifier: Apache-2.0
//! The pipes of a process, by number and by socket.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use viola_proto::pipe::library::{LibraryReply, LibraryRequest, LostConnections};

use super::change::Change;
use super::link::AgentLink;
use super::marks;
use crate::candidate::{FileId, file_id};
use crate::threshold;

/// Time before the library tries a transfer again that the agent refused for now: with any errno
/// except `EOPNOTSUPP`.
const REFUSED_FOR_NOW_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Time before the library tries a pair again that the agent cannot serve (`EOPNOTSUPP`). After
/// such a refusal of a send it never tries the socket again.
const REFUSED_PAIR_RETRY_INTERVAL: Duration = Duration::from_secs(60);
/// Most refusals that are kept.
const MAX_REFUSALS: usize = 4096;

/// State of a pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PipeState {
    /// The host has the connections.
    Active,
    /// The pipe has ended with this errno; 0 for none.
    Finished(i32),
    /// The agent refused the pipe with this errno.
    Refused(i32),
}

/// An event for a watcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PipeEvent {
    /// More bytes were moved.
    Progress,
    /// The pipe has ended.
    Finished,
    /// The agent refused the pipe.
    Refused,
}

/// A callback for the events of a pipe. The thread that calls it holds the lock of the table, so
/// the callback must neither call the engine nor wait.
pub type Watcher = Box<dyn Fn(PipeEvent) + Send>;

/// The bytes of a pipe. Offsets are in bytes, and 0 for a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ByteRange {
    /// Offset in a source that is a file.
    pub source_offset: u64,
    /// Number of bytes, above 0.
    pub length: u64,
    /// Offset in a sink that is a file.
    pub sink_offset: u64,
}

/// Source or sink of a pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endpoint {
    /// Identity: the program may have closed the descriptor past this library, and its number may be another file's.
    pub id: FileId,
    /// Descriptor of a socket.
    pub socket: Option<RawFd>,
}

/// A pipe.
pub struct Pipe {
    /// Its number.
    pub id: u64,
    /// The source.
    pub source: Endpoint,
    /// The sink.
    pub sink: Endpoint,
    /// The bytes to move.
    pub range: ByteRange,
    /// Bytes that the program knows to be sent.
    pub reported: u64,
    /// Bytes that the agent reported as moved. They reach the length of the range only when the
    /// connections are back, because the program then continues with its sockets.
    pub moved: u64,
    /// State.
    pub state: PipeState,
    /// Lost connections.
    pub lost: LostConnections,
    /// Calls of the program since the last update that found nothing new.
    pub idle_polls: u32,
    /// The source's descriptor as last checked, and [`marks::files_closed`] at that time.
    pub checked_file: Option<(RawFd, usize)>,
    /// Identity of the socket's descriptor as last checked, while unreported bytes remain.
    pub checked_socket: Option<FileId>,
    pub(super) link: u64,
    /// Start time and number of active pipes then, itself included, for [`threshold`].
    pub(super) begun: Option<(Instant, usize)>,
    pub(super) watcher: Watcher,
    pub(super) changed: Arc<Change>,
}

impl Pipe {
    /// Bytes sent that the program does not know of.
    pub fn unreported(&self) -> u64 {
        self.moved.saturating_sub(self.reported)
    }

    /// Whether the host has the connections.
    pub fn is_active(&self) -> bool {
        self.state == PipeState::Active
    }

    /// Whether the program needs a report: of moved bytes, or of the end of the pipe.
    pub fn has_update(&self) -> bool {
        !self.is_active() || self.unreported() > 0
    }

    /// Whether these bytes of a file are the next ones of the pipe.
    pub fn continues(&mut self, file: BorrowedFd<'_>, offset: u64) -> bool {
        if Some(offset) != self.range.source_offset.checked_add(self.reported) {
            return false;
        }
        // servers ask for 256 KiB at a time, and each check is a system call
        let known = (file.as_raw_fd(), marks::files_closed());
        if self.checked_file == Some(known) {
            return true;
        }
        let is_marked = marks::set(known.0, marks::FILE);
        let is_same = file_id(file) == Ok(self.source.id);
        self.checked_file = (is_same && is_marked).then_some(known);
        is_same
    }

    /// Removes the watcher.
    pub fn unwatch(&mut self) {
        self.watcher = Box::new(|_| ());
    }

    fn sockets(&self) -> impl Iterator<Item = (RawFd, FileId)> + use<> {
        let ends = [self.source, self.sink].into_iter();
        ends.filter_map(|end| Some((end.socket?, end.id)))
    }

    fn refusal_key(&self) -> RefusalKey {
        match (self.source.socket, self.sink.socket) {
            (None, Some(_)) => (None, self.sink.id),
            _ => (Some(self.source.id), self.sink.id),
        }
    }

    fn end(&mut self, state: PipeState) {
        self.state = state;
        for (fd, _) in self.sockets() {
            marks::clear(fd, marks::HELD);
        }
        self.changed.notify_all();
        let news = match state {
            PipeState::Refused(_) => PipeEvent::Refused,
            _ => PipeEvent::Finished,
        };
        (self.watcher)(news);
    }
}

/// Key of a refusal. A refusal of a send counts for the socket with any file.
pub(super) type RefusalKey = (Option<FileId>, FileId);

/// The pipes of a process.
#[derive(Default)]
pub struct Table {
    records: HashMap<u64, Pipe>,
    sockets: HashMap<RawFd, u64>,
    /// Pipes whose sockets were closed. [`Table::reset`] may run in a signal handler, which must not free memory.
    buried: Vec<Pipe>,
    /// Expiry of each refusal; `None` for never.
    refusals: HashMap<RefusalKey, Option<Instant>>,
    pub(super) link: Option<AgentLink>,
    pub(super) link_count: u64,
    pub(super) retry_at: Option<Instant>,
    pub(super) last_id: u64,
}

impl Table {
    /// Whether the last attempt to connect failed less than one second ago.
    pub fn is_agent_unreachable(&self) -> bool {
        self.retry_at.is_some_and(|t| Instant::now() < t)
    }

    /// A pipe.
    pub fn pipe(&mut self, id: u64) -> Option<&mut Pipe> {
        self.records.get_mut(&id)
    }

    /// The pipe of a descriptor.
    pub fn pipe_at(&mut self, fd: RawFd) -> Option<&mut Pipe> {
        self.records.get_mut(self.sockets.get(&fd)?)
    }

    /// The pipe of a socket. If the pipe of this descriptor belongs to an earlier socket of the
    /// same number, resets that pipe.
    pub fn pipe_of(&mut self, fd: RawFd, socket: FileId) -> Option<&mut Pipe> {
        if !self.pipe_at(fd)?.sockets().any(|it| it == (fd, socket)) {
            self.reset(fd);
        }
        self.pipe_at(fd)
    }

    /// Stops a pipe. It stays in the table until the agent reports the end.
    pub fn stop(&mut self, id: u64) {
        self.send(id, LibraryRequest::Stop { id });
    }

    /// Resets the pipe of a socket that is closed, with all connections that the host has. The other socket of the
    /// pipe gets `ECONNRESET`. Neither allocates nor frees memory.
    pub fn reset(&mut self, fd: RawFd) {
        let Some(&id) = self.sockets.get(&fd) else {
            marks::clear(fd, marks::PIPE | marks::HELD);
            return;
        };
        self.send(id, LibraryRequest::Reset { id });
        self.release_socket(fd);
        if let Some(record) = self.records.get_mut(&id)
            && record.is_active()
        {
            record.lost = LostConnections {
                source: true,
                sink: true,
            };
            record.end(PipeState::Finished(libc::ECONNRESET));
        }
    }

    fn send(&self, id: u64, request: LibraryRequest) {
        if let (Some(record), Some(link)) = (self.records.get(&id), &self.link)
            && record.is_active()
            && record.link == link.number
        {
            link.send_or_close(request);
        }
    }

    /// Number of active pipes.
    pub(super) fn active_pipes(&self) -> usize {
        self.records.values().filter(|r| r.is_active()).count()
    }

    /// Removes a pipe.
    pub fn remove(&mut self, id: u64) {
        drop(self.take(id));
    }

    fn take(&mut self, id: u64) -> Option<Pipe> {
        let record = self.records.remove(&id);
        if let Some(record) = &record {
            if let Some((file, _)) = record.checked_file {
                // another pipe of the same file checks it again
                marks::file_closing(file);
            }
            for (fd, _) in record.sockets() {
                self.detach(fd, id);
            }
            record.changed.notify_all();
        }
        record
    }

    /// Frees the pipes whose sockets were closed.
    pub(super) fn free_buried(&mut self) {
        self.buried.clear();
    }

    /// Detaches a socket from its pipe, and removes a pipe without sockets.
    pub fn release_socket(&mut self, fd: RawFd) {
        let Some(&id) = self.sockets.get(&fd) else {
            return;
        };
        self.detach(fd, id);
        let left = self.records.get(&id).map(Pipe::sockets);
        if !left.is_some_and(|mut left| left.any(|(fd, _)| self.sockets.get(&fd) == Some(&id))) {
            let gone = self.take(id);
            self.buried.extend(gone); // `insert` has made room
        }
    }

    fn detach(&mut self, fd: RawFd, id: u64) {
        if self.sockets.get(&fd) == Some(&id) {
            self.sockets.remove(&fd);
            marks::clear(fd, marks::PIPE | marks::HELD);
        }
    }

    /// Keeps the error of a pipe for the sockets whose connection is lost, or for both when none is.
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
                    self.release_socket(fd);
                }
            }
        }
        if self.sockets.values().all(|&other| other != id) {
            self.remove(id);
        }
    }

    pub(super) fn insert(&mut self, record: Pipe) {
        for (fd, _) in record.sockets() {
            marks::set(fd, marks::PIPE | marks::LENT | marks::HELD);
            self.sockets.insert(fd, record.id);
        }
        self.buried.reserve(self.records.len() + 1);
        self.records.insert(record.id, record);
    }

    pub(super) fn refuses(&mut self, pair: RefusalKey) -> bool {
        let holds = match self.refusals.get(&pair) {
            None => return false,
            Some(until) => until.is_none_or(|t| Instant::now() < t),
        };
        if !holds {
            self.refusals.remove(&pair);
        }
        holds
    }

    fn refuse(&mut self, pair: RefusalKey, errno: i32) {
        let now = Instant::now();
        let until = match (errno == libc::EOPNOTSUPP, pair.0) {
            (false, _) => Some(now + REFUSED_FOR_NOW_RETRY_INTERVAL),
            (true, Some(_)) => Some(now + REFUSED_PAIR_RETRY_INTERVAL),
            (true, None) => None,
        };
        if self.refusals.len() >= MAX_REFUSALS {
            self.refusals
                .retain(|_, until| until.is_some_and(|t| now < t));
        }
        if self.refusals.len() >= MAX_REFUSALS {
            self.refusals.clear();
        }
        self.refusals.insert(pair, until);
    }

    pub(super) fn apply(&mut self, answer: LibraryReply) {
        let id = answer.id();
        // the pipe is gone when the program has closed one of its sockets
        let Some(record) = self.records.get_mut(&id).filter(|r| r.is_active()) else {
            return;
        };
        match answer {
            LibraryReply::Progress { sent, .. } => {
                if sent <= record.moved || sent >= record.range.length {
                    return; // nothing new, or all bytes: Finished follows
                }
                record.moved = sent;
                record.checked_socket = None;
                record.changed.notify_all();
                (record.watcher)(PipeEvent::Progress);
            }
            LibraryReply::Finished {
                sent,
                errno,
                lost,
                host_us,
                ..
            } => {
                let sent = sent.min(record.range.length);
                // a program that knows of more bytes than were sent must not go on
                let torn = sent < record.reported;
                record.moved = sent.max(record.reported);
                record.checked_socket = None;
                record.lost = lost;
                let errno = match errno {
                    _ if torn => libc::ECONNRESET,
                    0 if lost != LostConnections::NONE => libc::ECONNRESET,
                    errno => errno,
                };
                let is_whole = errno == 0 && sent == record.range.length && host_us > 0;
                if let Some((begun, beside)) = record.begun.filter(|_| is_whole) {
                    threshold::record_handover(begun, Duration::from_micros(host_us), beside);
                }
                record.end(PipeState::Finished(errno));
            }
            LibraryReply::Refused { errno, .. } => {
                let pair = record.refusal_key();
                record.end(PipeState::Refused(errno));
                self.refuse(pair, errno);
            }
        }
    }

    /// The agent is gone: its pipes are reset.
    pub(super) fn agent_lost(&mut self, number: u64) {
        if self.link.as_ref().is_some_and(|link| link.number == number) {
            self.link = None;
        }
        for record in self.records.values_mut() {
            if record.link == number && record.is_active() {
                record.lost = LostConnections {
                    source: record.source.socket.is_some(),
                    sink: record.sink.socket.is_some(),
                };
                let errno = if record.lost == LostConnections::NONE {
                    // the content of the file is unknown
                    record.moved = record.reported;
                    libc::EIO
                } else {
                    libc::ECONNRESET
                };
                record.end(PipeState::Finished(errno));
            }
        }
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
