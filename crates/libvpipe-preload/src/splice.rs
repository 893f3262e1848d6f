// SPDX-License-Identifier: Apache-2.0
//! What `splice` says between two connections: a proxy's large answers are relayed by the host.
//!
//! A proxy splices from one connection into a pipe of the kernel's, and from there into the other one. One that knows how
//! much is to come asks for all of it, and each time for what is left. Of whoever is seen to count down like that, the rest is
//! relayed as soon as the kernel's pipe is empty. From then on the pipe is one in the mind of the program only: bytes that the
//! host has moved come out of the first connection, and go into the second one, without being touched.
//!
//! One byte at least stays in that pipe while the host has nothing new. So the program waits for room in the second
//! connection, and is woken there.
//!
//! Who asks for as much as there may ever be does not say what is to come, and is left alone: such a connection may wait for
//! what the other side says.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use libc::{size_t, ssize_t};
use rustix::fs::{FileType, fstat};
use rustix::io::ioctl_fionread;
use vpipe::engine::{Engine, News, Part, PerProcess, State, Table, marks};
use vpipe::{FileId, Route, candidate, file_id, settings};

use crate::alone::{self, ENDLESS};
use crate::board;
use crate::gate::{borrowed, guarded, is_held, is_nonblocking};
use crate::real::{self, set_errno};
use crate::sendfile::{CALM, STALE};

/// Connections that are remembered.
const MOST: usize = 4096;

/// A connection that is spliced from.
#[derive(Debug, Default)]
struct Source {
    fd: RawFd,
    /// What the program asks for next when it counts down.
    expected: u64,
    /// It began with more than is ever to come.
    endless: bool,
    /// What it has still to get, when it counts down.
    rest: u64,
    /// Bytes of it in the kernel's pipe.
    inside: u64,
    /// The host's.
    relay: Option<u64>,
    /// Bytes that the program believes to be in its pipe, and that the second connection has.
    owed: u64,
}

#[derive(Default)]
struct Known {
    sources: HashMap<FileId, Source>,
    /// From which source the bytes in a pipe are.
    pipes: HashMap<FileId, FileId>,
}

static KNOWN: PerProcess<Mutex<Known>> = PerProcess::new();
/// Entries of all kinds, so that whoever splices little pays little.
static ENTRIES: AtomicUsize = AtomicUsize::new(0);
/// Small calls that were looked at although nothing is relayed, perhaps.
static LOOKS: AtomicUsize = AtomicUsize::new(0);
/// After so many of them it is looked whether the connections that are remembered are still there.
const SWEEP: usize = 64;

impl Known {
    fn lock() -> MutexGuard<'static, Self> {
        let known = KNOWN.get();
        known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_relayed(&self, source: &FileId) -> bool {
        let source = self.sources.get(source);
        source.is_some_and(Source::is_relayed)
    }

    fn count(&self) {
        let entries = self.sources.len() + self.pipes.len();
        ENTRIES.store(entries, Ordering::Relaxed);
    }

    /// Forgets connections that are closed: nobody says so. Of one that was relayed the engine has heard.
    fn sweep(&mut self) {
        let is_open = |id: &FileId, fd| borrowed(fd).is_some_and(|fd| file_id(fd) == Ok(*id));
        self.sources.retain(|id, source| is_open(id, source.fd));
        let sources = &self.sources;
        self.pipes.retain(|_, source| sources.contains_key(source));
        self.count();
    }

    fn room(&mut self) {
        if self.sources.len() >= MOST {
            self.sweep();
            self.sources.retain(|_, source| source.is_relayed());
            self.pipes
                .retain(|_, source| self.sources.contains_key(source));
        }
        if self.pipes.len() >= MOST {
            let sources = &self.sources;
            self.pipes
                .retain(|_, id| sources.get(id).is_some_and(|source| source.owed > 0));
        }
    }
}

enum Said {
    Bytes(u64),
    Errno(c_int),
}

impl Said {
    fn told(self) -> ssize_t {
        match self {
            Self::Bytes(n) => n as ssize_t,
            Self::Errno(errno) => {
                set_errno(errno);
                -1
            }
        }
    }
}

/// `splice(2)` without places; `None` when it is the system call's business.
pub fn splice(from: c_int, to: c_int, count: size_t, flags: c_uint) -> Option<ssize_t> {
    let call = Call {
        from,
        to,
        count,
        flags,
    };
    if (marks::of(from) | marks::of(to)) & marks::PIPE == 0 {
        let many = count as u64;
        if many < settings().relayed {
            return call.small();
        }
        if alone::is_left(from, many) {
            let said = call.real();
            if let Said::Bytes(n) = said {
                guarded((), || alone::moved(from, many, n));
            }
            return Some(said.told());
        }
    }
    let said = guarded(Some(Said::Errno(libc::EIO)), || call.answer())?;
    Some(said.told())
}

struct Call {
    from: c_int,
    to: c_int,
    count: size_t,
    flags: c_uint,
}

fn look(fd: c_int) -> Option<(FileType, FileId)> {
    let stat = fstat(borrowed(fd)?).ok()?;
    let id = FileId {
        device: stat.st_dev,
        inode: stat.st_ino,
    };
    Some((FileType::from_raw_mode(stat.st_mode), id))
}

impl Call {
    /// Too little for a relay, and of no connection that the host has: what is left to be done is for those that are remembered.
    fn small(&self) -> Option<ssize_t> {
        if ENTRIES.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let said = guarded(Some(Said::Errno(libc::EIO)), || {
            let Some(known) = KNOWN.peek() else {
                ENTRIES.store(0, Ordering::Relaxed); // those of the process that this one is forked from
                return None;
            };
            let from = file_id(borrowed(self.from)?).ok()?;
            {
                let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
                if LOOKS.fetch_add(1, Ordering::Relaxed) % SWEEP == SWEEP - 1 {
                    known.sweep();
                }
                if !known.sources.contains_key(&from) && !known.pipes.contains_key(&from) {
                    return None;
                }
            }
            self.answer()
        });
        Some(said?.told())
    }

    fn answer(&self) -> Option<Said> {
        let ((from_kind, from), (to_kind, to)) = (look(self.from)?, look(self.to)?);
        match (from_kind, to_kind) {
            (FileType::Socket, FileType::Fifo) => self.take(from, to),
            (FileType::Fifo, FileType::Socket) => self.give(from),
            _ => None,
        }
    }

    fn real(&self) -> Said {
        // SAFETY: no places; the kernel says when a number is not open.
        let n = unsafe {
            real::splice(
                self.from,
                null_mut(),
                self.to,
                null_mut(),
                self.count,
                self.flags,
            )
        };
        match u64::try_from(n) {
            Ok(n) => Said::Bytes(n),
            Err(_) => Said::Errno(real::errno()),
        }
    }

    /// Out of a connection into a pipe.
    fn take(&self, source: FileId, pipe: FileId) -> Option<Said> {
        {
            let mut table = Engine::here().lock();
            let mut known = Known::lock();
            if let Some(at) = known.sources.get_mut(&source)
                && at.relay.is_some()
                && let Some(said) = at.relayed(&mut table, self.count as u64)
            {
                if let Said::Bytes(_) = said {
                    known.pipes.insert(pipe, source);
                    known.count();
                }
                return Some(said);
            }
        }
        if is_held(self.from, waiting(self.flags)) {
            return Some(Said::Errno(libc::EAGAIN));
        }
        let (count, minimum) = (self.count as u64, settings().relayed);
        let endless = count >= ENDLESS || alone::is_endless(self.from, count);
        let said = self.real();
        let mut known = Known::lock();
        match said {
            Said::Bytes(0) => {
                known.sources.remove(&source);
            }
            Said::Bytes(n) if count >= minimum || known.is_relayed(&source) => {
                known.room();
                let before = known.pipes.insert(pipe, source);
                let at = known.sources.entry(source).or_default();
                at.fd = self.from;
                let counting = at.expected == count;
                at.endless = endless || counting && at.endless;
                at.expected = count.saturating_sub(n);
                at.rest = if counting && !at.endless {
                    at.expected
                } else {
                    0
                };
                let more = before == Some(source);
                at.inside = if more { at.inside + n } else { n };
            }
            // too little is left for a relay
            Said::Bytes(_) => {
                known.sources.remove(&source);
                known.pipes.remove(&pipe);
            }
            Said::Errno(_) => (),
        }
        known.count();
        Some(said)
    }

    /// Out of a pipe into a connection.
    fn give(&self, pipe: FileId) -> Option<Said> {
        let engine = Engine::here();
        let mut table = engine.lock();
        let mut known = Known::lock();
        let Some(&source) = known.pipes.get(&pipe) else {
            drop((known, table));
            let held = is_held(self.to, waiting(self.flags));
            return held.then_some(Said::Errno(libc::EAGAIN));
        };
        let Some(at) = known.sources.get_mut(&source) else {
            known.pipes.remove(&pipe);
            known.count();
            return None;
        };
        if at.owed > 0 {
            let said = at.owing(&mut table, self.count as u64);
            let (owed, relay, expected) = (at.owed, at.relay, at.expected);
            if owed == 0 {
                known.pipes.remove(&pipe);
                // all of it is told, and what is left is too little
                if relay.is_none() && expected < settings().relayed {
                    known.sources.remove(&source);
                }
                known.count();
            }
            drop(known);
            let Some(n) = said else {
                self.wait(engine, table, relay);
                return Some(Said::Errno(libc::EAGAIN));
            };
            return Some(Said::Bytes(n));
        }
        drop((known, table));
        if is_held(self.to, waiting(self.flags)) {
            return Some(Said::Errno(libc::EAGAIN));
        }
        let said = self.real();
        let Said::Bytes(n) = said else {
            return Some(said);
        };
        let empty = borrowed(self.from).is_some_and(|fd| ioctl_fionread(fd) == Ok(0));
        let mut table = engine.lock();
        let mut known = Known::lock();
        let begun = known.sources.get_mut(&source).is_some_and(|at| {
            // somebody else's bytes are no sign of what is to come
            let theirs = n > 0 && n <= at.inside;
            at.inside = at.inside.saturating_sub(n);
            if !theirs || !empty || at.inside > 0 {
                return false;
            }
            let wanted = at.rest >= settings().relayed;
            let begun = at.begin(engine, &mut table, source, self.to).is_some();
            if wanted && !begun {
                alone::leave(at.fd, at.expected);
            }
            begun
        });
        if !begun {
            if known
                .sources
                .get(&source)
                .is_some_and(|at| !at.is_relayed() && empty && alone::is_left(at.fd, at.expected))
            {
                known.sources.remove(&source);
                known.count();
            }
            if empty {
                known.pipes.remove(&pipe);
                known.count();
            }
            return Some(said);
        }
        // the last byte is held back
        match n {
            1 => Some(Said::Errno(libc::EAGAIN)),
            n => Some(Said::Bytes(n - 1)),
        }
    }

    /// Nothing is new: the program is to hear of it when there is something, and not to ask too often.
    fn wait(&self, engine: &Engine, mut table: MutexGuard<'_, Table>, relay: Option<u64>) {
        let Some(record) = relay.and_then(|id| table.pipe(id)) else {
            return;
        };
        let id = record.id;
        let parked = board::slot(self.to).is_some_and(|mut slot| slot.park(self.to));
        let patience = if parked { STALE } else { 0 };
        let restless = record.asked > patience;
        record.asked = record.asked.saturating_add(1);
        if restless {
            drop(engine.wait(table, id, Some(Instant::now() + CALM)));
        }
    }
}

/// The same wish in flags of `recv` and `send`.
fn waiting(flags: c_uint) -> c_int {
    match flags & libc::SPLICE_F_NONBLOCK {
        0 => 0,
        _ => libc::MSG_DONTWAIT,
    }
}

impl Source {
    /// The host has it, or has had it and the program does not know all of that yet.
    fn is_relayed(&self) -> bool {
        self.relay.is_some() || self.owed > 0
    }

    /// What the host has moved and the program does not know of; `None` when the connection speaks for itself.
    fn relayed(&mut self, table: &mut Table, count: u64) -> Option<Said> {
        let id = self.relay?;
        let Some(record) = table.pipe(id) else {
            self.relay = None;
            return None;
        };
        let n = record.available().min(count);
        if n > 0 {
            record.consumed += n;
            record.asked = 0;
            self.owed += n;
            self.expected = self.expected.saturating_sub(n);
            return Some(Said::Bytes(n));
        }
        match record.state {
            State::Piping => Some(Said::Errno(libc::EAGAIN)),
            State::Over(errno) if errno != 0 && (record.lost.source || !record.lost.sink) => {
                self.end(table);
                Some(Said::Errno(errno))
            }
            State::Over(_) | State::Refused(_) => {
                self.end(table);
                None
            }
        }
    }

    /// What goes out of the pipe that is one in the mind only; `None` when that has to wait.
    fn owing(&mut self, table: &mut Table, count: u64) -> Option<u64> {
        let record = self.relay.and_then(|id| table.pipe(id));
        let waits = record.as_ref().is_some_and(|record| !record.has_news());
        let n = count.min(self.owed - u64::from(waits));
        if waits && n == 0 {
            return None;
        }
        self.owed -= n;
        // an error is told to whoever takes or gives next
        if self.owed == 0
            && let Some(record) = record
            && record.available() == 0
            && matches!(record.state, State::Over(0) | State::Refused(_))
        {
            self.end(table);
        }
        Some(n)
    }

    fn end(&mut self, table: &mut Table) {
        if let Some(id) = self.relay.take() {
            table.forget(id);
        }
    }

    /// Gives the rest to the host, when that is possible.
    fn begin(
        &mut self,
        engine: &'static Engine,
        table: &mut Table,
        id: FileId,
        to: RawFd,
    ) -> Option<()> {
        let length = std::mem::take(&mut self.rest);
        if length < settings().relayed || self.relay.is_some() {
            return None;
        }
        if table.not_now() {
            return None;
        }
        let (source, sink): (BorrowedFd<'_>, BorrowedFd<'_>) = (borrowed(self.fd)?, borrowed(to)?);
        if !is_nonblocking(source) || !is_nonblocking(sink) {
            return None;
        }
        let found = candidate(source, sink)
            .filter(|found| found.route == Route::Relay && found.source == id)?;
        let (from, to) = (source.as_raw_fd(), sink.as_raw_fd());
        let watcher = Box::new(move |news| {
            let over = news != News::Progress;
            if let Some(mut slot) = board::slot(to) {
                slot.unpark(to, over);
            }
            if over && let Some(mut slot) = board::slot(from) {
                slot.unpark(from, true);
            }
        });
        let part = Part {
            length,
            ..Part::default()
        };
        let begun = engine.begin(table, (source, sink), found, part, watcher);
        self.relay = Some(begun.ok()?);
        self.owed = 1;
        // its kernel's socket has nothing to say, whatever it looks like meanwhile
        if let Some(mut slot) = board::slot(from) {
            slot.park(from);
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    /// A connection from which bytes can be spliced, and its far end.
    fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (near, _) = listener.accept().unwrap();
        far.write_all(&[7; 3000]).unwrap();
        (near, far)
    }

    #[test]
    fn what_cannot_be_relayed_any_more_is_not_remembered() {
        let (out, into) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let (near, _far) = connection();
        let take = |from: &TcpStream, count| {
            splice(from.as_raw_fd(), into.as_raw_fd(), count, 0).map(|n| n > 0)
        };
        let large = settings().relayed as usize + 3000;
        assert_eq!(take(&near, 1000), None);
        assert_eq!(take(&near, large), Some(true));
        assert!(ENTRIES.load(Ordering::Relaxed) > 0);
        (&_far).write_all(&[7; 3000]).unwrap();
        assert_eq!(take(&near, 1000), Some(true));
        assert_eq!(ENTRIES.load(Ordering::Relaxed), 0);
        // one that is closed in the middle is found out by others' calls
        let (closed, _other) = connection();
        assert_eq!(take(&closed, large), Some(true));
        drop(closed);
        assert!(ENTRIES.load(Ordering::Relaxed) > 0);
        let mut looks = 0;
        while ENTRIES.load(Ordering::Relaxed) > 0 {
            looks += 1;
            assert!(looks <= 2 * SWEEP, "it is never forgotten");
            // not a connection: looked at, and left to the kernel
            assert_eq!(splice(out.as_raw_fd(), out.as_raw_fd(), 10, 0), None);
        }
        assert_eq!(take(&near, 1000), None);
    }
}
