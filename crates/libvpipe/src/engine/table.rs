// SPDX-License-Identifier: Apache-2.0
//! The pipes of a process, by their sockets' numbers.

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::{Arc, Condvar};
use std::time::{Duration, Instant};

use viola_proto::pipe::library::{Answer, Ask};

use super::link::Link;
use super::marks;
use crate::candidate::FileId;

/// How long a socket that was refused for now is left alone.
const NOT_NOW: Duration = Duration::from_secs(1);

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
pub type Watcher = Box<dyn Fn(RawFd, News) + Send>;

/// Bytes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// First byte.
    pub offset: u64,
    /// How many, above 0.
    pub length: u64,
}

/// A pipe.
pub struct Record {
    /// Its number.
    pub id: u64,
    /// The file.
    pub file: FileId,
    /// The socket: its descriptor may have been closed behind our back, and its number be another's.
    pub socket: FileId,
    /// What is to be sent.
    pub part: Part,
    /// What the program has been told is sent, in bytes.
    pub consumed: u64,
    /// What the agent said is sent. All of it only when the connection is back: a program that has been told so goes on with
    /// the socket.
    pub sent: u64,
    /// What it has come to.
    pub state: State,
    /// How often the program was told that nothing is new, since there was something.
    pub asked: u32,
    pub(super) link: u64,
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

    /// Whether these are the bytes that come next.
    pub fn continues(&self, file: FileId, offset: u64) -> bool {
        file == self.file && Some(offset) == self.part.offset.checked_add(self.consumed)
    }

    /// Nobody watches any more.
    pub fn unwatch(&mut self) {
        self.watcher = Box::new(|_, _| ());
    }

    fn end(&mut self, fd: RawFd, state: State) {
        self.state = state;
        self.changed.notify_all();
        let news = match state {
            State::Refused(_) => News::Refused,
            _ => News::Over,
        };
        (self.watcher)(fd, news);
    }
}

struct Refusal {
    socket: FileId,
    until: Option<Instant>,
}

/// The pipes of a process.
#[derive(Default)]
pub struct Table {
    records: HashMap<RawFd, Record>,
    numbers: HashMap<u64, RawFd>,
    refusals: HashMap<RawFd, Refusal>,
    pub(super) link: Option<Link>,
    pub(super) links: u64,
    pub(super) not_before: Option<Instant>,
    pub(super) last: u64,
}

impl Table {
    /// A socket's pipe.
    pub fn record(&mut self, fd: RawFd) -> Option<&mut Record> {
        self.records.get_mut(&fd)
    }

    /// A socket's pipe, of this very socket. One of another socket that had the number before is ended.
    pub fn record_of(&mut self, fd: RawFd, socket: FileId) -> Option<&mut Record> {
        if self.records.get(&fd)?.socket != socket {
            self.reset(fd);
        }
        self.records.get_mut(&fd)
    }

    /// Asks for an early end of a socket's pipe; it is still there until the agent says that it is over.
    pub fn stop(&mut self, fd: RawFd) {
        self.tell(fd, |id| Ask::Stop { id });
    }

    /// Forgets a socket's pipe, and ends it with the connection when the host has that.
    pub fn reset(&mut self, fd: RawFd) {
        self.tell(fd, |id| Ask::Reset { id });
        self.forget(fd);
    }

    fn tell(&self, fd: RawFd, ask: impl FnOnce(u64) -> Ask) {
        if let (Some(record), Some(link)) = (self.records.get(&fd), &self.link)
            && record.is_piping()
            && record.link == link.number
        {
            link.tell(ask(record.id));
        }
    }

    /// Forgets a socket's pipe.
    pub fn forget(&mut self, fd: RawFd) {
        marks::clear(fd, marks::PIPE);
        if let Some(record) = self.records.remove(&fd) {
            self.numbers.remove(&record.id);
            record.changed.notify_all();
        }
    }

    pub(super) fn insert(&mut self, fd: RawFd, record: Record) {
        marks::set(fd, marks::PIPE | marks::LENT);
        self.numbers.insert(record.id, fd);
        self.records.insert(fd, record);
    }

    pub(super) fn refuses(&mut self, fd: RawFd, socket: FileId) -> bool {
        let Some(refusal) = self.refusals.get(&fd) else {
            return false;
        };
        let holds = refusal.socket == socket && refusal.until.is_none_or(|t| Instant::now() < t);
        if !holds {
            self.refusals.remove(&fd);
        }
        holds
    }

    pub(super) fn hear(&mut self, answer: Answer) {
        let Some(&fd) = self.numbers.get(&answer.id()) else {
            return; // of a socket that was closed
        };
        let Some(record) = self.records.get_mut(&fd) else {
            return;
        };
        match answer {
            Answer::Progress { sent, .. } => {
                if sent <= record.sent || sent >= record.part.length {
                    return; // nothing new, or all: then the end follows
                }
                record.sent = sent;
                record.changed.notify_all();
                (record.watcher)(fd, News::Progress);
            }
            Answer::Over { sent, errno, .. } => {
                self.numbers.remove(&record.id);
                let sent = sent.min(record.part.length);
                // a program that was told of more than there is must not go on
                let torn = sent < record.consumed;
                record.sent = sent.max(record.consumed);
                let errno = if torn { libc::ECONNRESET } else { errno };
                record.end(fd, State::Over(errno));
            }
            Answer::Refused { errno, .. } => {
                self.numbers.remove(&record.id);
                let never = errno == libc::EOPNOTSUPP;
                let refusal = Refusal {
                    socket: record.socket,
                    until: (!never).then(|| Instant::now() + NOT_NOW),
                };
                self.refusals.insert(fd, refusal);
                record.end(fd, State::Refused(errno));
            }
        }
    }

    /// The agent is gone: whatever it had is reset.
    pub(super) fn lose(&mut self, number: u64) {
        if self.link.as_ref().is_some_and(|link| link.number == number) {
            self.link = None;
        }
        for (&fd, record) in &mut self.records {
            if record.link == number && record.is_piping() {
                self.numbers.remove(&record.id);
                record.end(fd, State::Over(libc::ECONNRESET));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    // Numbers that no descriptor of the test program has; the marks' own test has others.
    fn table(fd: RawFd) -> (Table, Arc<AtomicUsize>) {
        let mut table = Table::default();
        let heard = Arc::new(AtomicUsize::new(0));
        let count = heard.clone();
        let id = |inode| FileId { device: 1, inode };
        let record = Record {
            id: 7,
            file: id(1),
            socket: id(2),
            part: Part {
                offset: 10,
                length: 100,
            },
            consumed: 0,
            sent: 0,
            state: State::Piping,
            asked: 0,
            link: 1,
            watcher: Box::new(move |_, _| {
                count.fetch_add(1, Ordering::Relaxed);
            }),
            changed: Arc::default(),
        };
        table.numbers.insert(7, fd);
        table.records.insert(fd, record);
        (table, heard)
    }

    #[test]
    fn all_is_told_only_when_the_connection_is_back() {
        let (mut table, heard) = table(5);
        table.hear(Answer::Progress { id: 7, sent: 40 });
        table.hear(Answer::Progress { id: 7, sent: 30 });
        table.hear(Answer::Progress { id: 7, sent: 100 });
        table.hear(Answer::Progress { id: 8, sent: 50 });
        let record = table.record(5).unwrap();
        assert_eq!((record.available(), record.is_piping()), (40, true));
        assert_eq!(heard.load(Ordering::Relaxed), 1);
        record.consumed = 40;
        assert!(!record.has_news());
        let answer = Answer::Over {
            id: 7,
            sent: 1000,
            errno: 0,
        };
        table.hear(answer);
        let record = table.record(5).unwrap();
        assert_eq!((record.available(), record.state), (60, State::Over(0)));
        assert_eq!(heard.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn less_than_was_told_is_a_broken_connection() {
        let (mut table, _) = table(6);
        table.record(6).unwrap().consumed = 50;
        let answer = Answer::Over {
            id: 7,
            sent: 49,
            errno: 0,
        };
        table.hear(answer);
        let record = table.record(6).unwrap();
        assert_eq!(
            (record.available(), record.state),
            (0, State::Over(libc::ECONNRESET))
        );
    }

    #[test]
    fn a_lost_agent_breaks_what_it_had() {
        let (mut table, heard) = table(7);
        table.lose(2);
        assert!(table.record(7).unwrap().is_piping());
        table.lose(1);
        assert_eq!(
            table.record(7).unwrap().state,
            State::Over(libc::ECONNRESET)
        );
        table.lose(1);
        assert_eq!(heard.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_refusal_holds_for_the_socket_and_not_for_its_number() {
        let (mut table, _) = table(8);
        let errno = libc::EOPNOTSUPP;
        table.hear(Answer::Refused { id: 7, errno });
        let socket = table.record(8).unwrap().socket;
        assert!(table.refuses(8, socket));
        let other = FileId {
            inode: 99,
            ..socket
        };
        assert!(!table.refuses(8, other) && !table.refuses(8, socket));
    }

    #[test]
    fn a_number_that_another_socket_has_now_has_no_pipe() {
        let (mut table, _) = table(9);
        let socket = table.record(9).unwrap().socket;
        assert!(table.record_of(9, socket).is_some());
        let other = FileId {
            inode: 99,
            ..socket
        };
        assert!(table.record_of(9, other).is_none());
        assert!(table.record_of(9, socket).is_none());
    }
}
