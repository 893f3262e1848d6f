// SPDX-License-Identifier: Apache-2.0
//! The pipes of a process, by their numbers; those with sockets by these, too.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, Condvar};
use std::time::{Duration, Instant};

use viola_proto::pipe::library::{Answer, Ask, Lost};

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
    pub lost: Lost,
    /// How often the program was told that nothing is new, since there was something.
    pub asked: u32,
    /// Descriptor of the file that was looked at last, and what [`marks::closed`] said then.
    pub file: Option<(RawFd, usize)>,
    /// What its socket's descriptor was when it was looked at: not since there was news, nor when there is none.
    pub looked: Option<FileId>,
    pub(super) link: u64,
    /// When it was begun, and how many there were then, with itself.
    pub(super) begun: (Instant, usize),
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

    fn is_file_down_socket(&self) -> bool {
        self.source.socket.is_none() && self.sink.socket.is_some()
    }

    fn refusal(&self) -> Pair {
        match self.is_file_down_socket() {
            true => (None, self.sink.id),
            false => (Some(self.source.id), self.sink.id),
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
        self.tell(id, Ask::Stop { id });
    }

    /// A socket is closed: ends its pipe with all connections when the host has them. Another socket of the pipe is told.
    pub fn reset(&mut self, fd: RawFd) {
        let Some(&id) = self.sockets.get(&fd) else {
            marks::clear(fd, marks::PIPE);
            return;
        };
        self.tell(id, Ask::Reset { id });
        self.release(fd);
        if let Some(record) = self.records.get_mut(&id)
            && record.is_piping()
        {
            record.lost = Lost {
                source: true,
                sink: true,
            };
            record.end(State::Over(libc::ECONNRESET));
        }
    }

    fn tell(&self, id: u64, ask: Ask) {
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
        if record.lost != Lost::NONE {
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

    pub(super) fn hear(&mut self, answer: Answer) {
        let id = answer.id();
        // none: a socket of it was closed
        let Some(record) = self.records.get_mut(&id).filter(|r| r.is_piping()) else {
            return;
        };
        match answer {
            Answer::Progress { sent, .. } => {
                if sent <= record.sent || sent >= record.part.length {
                    return; // nothing new, or all: then the end follows
                }
                record.sent = sent;
                record.looked = None;
                record.changed.notify_all();
                (record.watcher)(News::Progress);
            }
            Answer::Over {
                sent,
                errno,
                lost,
                spent,
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
                    0 if lost != Lost::NONE => libc::ECONNRESET,
                    errno => errno,
                };
                let is_whole = errno == 0 && sent == record.part.length && spent > 0;
                if is_whole && record.is_file_down_socket() {
                    let (begun, beside) = record.begun;
                    threshold::piped(begun, Duration::from_micros(spent), beside);
                }
                record.end(State::Over(errno));
            }
            Answer::Refused { errno, .. } => {
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
                record.lost = Lost {
                    source: record.source.socket.is_some(),
                    sink: record.sink.socket.is_some(),
                };
                let errno = if record.lost == Lost::NONE {
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
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    // Numbers that no descriptor of the test program has; the marks' own test has others.
    fn table(fd: RawFd) -> (Table, Arc<AtomicUsize>) {
        piping(None, fd)
    }

    fn end(inode: u64, socket: Option<RawFd>) -> End {
        let id = FileId { device: 1, inode };
        End { id, socket }
    }

    fn piping(source: Option<RawFd>, fd: RawFd) -> (Table, Arc<AtomicUsize>) {
        let mut table = Table::default();
        let heard = Arc::new(AtomicUsize::new(0));
        let count = heard.clone();
        let record = Record {
            id: 7,
            source: end(1, source),
            sink: end(2, Some(fd)),
            part: Part {
                offset: 10,
                length: 100,
                to: 0,
            },
            consumed: 0,
            sent: 0,
            state: State::Piping,
            lost: Lost::NONE,
            asked: 0,
            file: None,
            looked: None,
            link: 1,
            begun: (Instant::now(), 1),
            watcher: Box::new(move |_| {
                count.fetch_add(1, Ordering::Relaxed);
            }),
            changed: Arc::default(),
        };
        // without marks: another test counts them
        for (fd, _) in record.sockets() {
            table.sockets.insert(fd, 7);
        }
        table.records.insert(7, record);
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
            lost: Lost::NONE,
            spent: 0,
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
            lost: Lost::NONE,
            spent: 0,
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
        let socket = table.record(8).unwrap().sink.id;
        assert!(table.refuses((None, socket)));
        assert!(!table.refuses((None, end(99, None).id)));
    }

    #[test]
    fn refusals_of_pairs_are_of_both_and_not_without_end() {
        let (mut table, _) = piping(Some(20), 21);
        let errno = libc::EOPNOTSUPP;
        table.hear(Answer::Refused { id: 7, errno });
        let id = |inode| end(inode, None).id;
        assert!(table.refuses((Some(id(1)), id(2))));
        assert!(!table.refuses((None, id(2))) && !table.refuses((Some(id(3)), id(2))));
        for inode in 0..2 * REFUSALS as u64 {
            table.refuse((None, id(inode)), errno);
        }
        assert!(table.refusals.len() <= REFUSALS);
    }

    #[test]
    fn a_file_is_looked_at_once_until_it_is_closed() {
        use std::os::fd::AsFd;
        let _alone = marks::ALONE.lock().unwrap();
        let (mut table, _) = table(10);
        let (file, other) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let record = table.record(10).unwrap();
        record.source.id = file_id(file.as_fd()).unwrap();
        assert!(!record.continues(other.as_fd(), 10) && record.file.is_none());
        assert!(!record.continues(file.as_fd(), 11));
        assert!(record.continues(file.as_fd(), 10));
        let number = file.as_raw_fd();
        assert_eq!(marks::of(number), marks::FILE);
        // as if another one had its number
        record.source.id.inode ^= 1;
        assert!(record.continues(file.as_fd(), 10), "no look");
        marks::close(number);
        assert!(!record.continues(file.as_fd(), 10) && record.file.is_none());
        // nothing stays of one that is over
        record.source.id.inode ^= 1;
        assert!(record.continues(file.as_fd(), 10));
        table.forget(7);
        assert_eq!(marks::of(number), 0);
    }

    #[test]
    fn a_number_that_another_socket_has_now_has_no_pipe() {
        let (mut table, _) = table(9);
        let socket = table.record(9).unwrap().sink.id;
        assert!(table.record_of(9, socket).is_some());
        assert!(table.record_of(9, end(99, None).id).is_none());
        assert!(table.record_of(9, socket).is_none());
    }

    #[test]
    fn who_closes_one_socket_of_two_breaks_the_other() {
        for (closed, other) in [(22, 23), (23, 22)] {
            let (mut table, heard) = piping(Some(22), 23);
            table.reset(closed);
            assert!(table.record(closed).is_none());
            let record = table.record(other).unwrap();
            assert_eq!(record.state, State::Over(libc::ECONNRESET));
            assert_eq!(heard.load(Ordering::Relaxed), 1);
            table.reset(other);
            assert!(table.records.is_empty() && table.sockets.is_empty());
        }
    }

    #[test]
    fn an_error_stays_where_the_connection_is_lost() {
        let (mut table, _) = piping(Some(24), 25);
        let lost = Lost {
            source: true,
            sink: false,
        };
        table.hear(Answer::Over {
            id: 7,
            sent: 10,
            errno: libc::ECONNRESET,
            lost,
            spent: 0,
        });
        table.keep_error(7);
        assert!(table.record(25).is_none() && table.record(24).is_some());
        table.forget(7);
        assert!(table.record(24).is_none());
    }

    #[test]
    fn a_pipe_between_files_has_no_sockets() {
        let (mut table, heard) = piping(None, 26);
        let mut record = table.records.remove(&7).unwrap();
        table.sockets.clear();
        record.sink.socket = None;
        table.records.insert(7, record);
        table.lose(1);
        assert_eq!(table.pipe(7).unwrap().state, State::Over(libc::EIO));
        table.keep_error(7);
        assert_eq!(heard.load(Ordering::Relaxed), 1);
        table.forget(7);
        assert!(table.pipe(7).is_none());
    }
}
