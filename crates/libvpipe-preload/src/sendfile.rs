// SPDX-License-Identifier: Apache-2.0
//! What `sendfile` says: how many bytes the host has sent since it was asked last.

use std::cell::OnceCell;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use libc::{off_t, size_t, ssize_t};
use rustix::fs::{SeekFrom, seek};
use vpipe::engine::{Engine, News, Part, State, Table, marks};
use vpipe::{FileId, Route, candidate, file_id, settings, threshold};

use crate::gate::{borrowed, guarded, is_nonblocking};
use crate::head::Body;
use crate::real::{self, failed};
use crate::{ahead, board, spare};

/// How long a program that does not use epoll is kept from asking again.
pub const CALM: Duration = Duration::from_millis(10);
/// How often a program of epoll asks without news before it is taken for one that has the socket in a set and polls it.
/// Events that it fetched before the socket left the set explain some.
pub const STALE: u32 = 8;
/// How long the end of a pipe is waited for that the program has left behind.
const FAREWELL: Duration = Duration::from_secs(10);

enum Answer {
    /// So many bytes are sent.
    Sent(u64),
    Errno(c_int),
    /// Not the host's business.
    Ordinary,
}

/// `sendfile(2)`.
///
/// # Safety
/// `offset` is null, or good for reading and writing.
pub unsafe fn sendfile(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t {
    let marked = marks::of(to) & (marks::PIPE | marks::HEAD) != 0;
    if marked || count as u64 >= settings().minimum {
        // SAFETY: the caller's word.
        let place = unsafe { offset.as_mut() };
        match guarded(Answer::Errno(libc::EIO), || answer(to, from, place, count)) {
            Answer::Sent(n) => return n as ssize_t,
            Answer::Errno(errno) => return failed(errno),
            Answer::Ordinary => (),
        }
    }
    let bytes = |sent: &ssize_t| u64::try_from(*sent).unwrap_or(0);
    threshold::measured(count as u64, bytes, || {
        // SAFETY: the caller's word.
        unsafe { real::sendfile(to, from, offset, count) }
    })
}

fn answer(to: c_int, from: c_int, place: Option<&mut off_t>, count: size_t) -> Answer {
    let head = ahead::take(to);
    let (Some(socket), Some(file)) = (borrowed(to), borrowed(from)) else {
        return Answer::Ordinary;
    };
    let start = match &place {
        Some(at) => u64::try_from(**at).ok(),
        None => seek(file, SeekFrom::Current(0)).ok(),
    };
    let Some(start) = start else {
        return Answer::Ordinary; // which says what is wrong
    };
    let call = Call {
        file,
        socket,
        start,
        count: count as u64,
    };
    let mut answer = None;
    if marks::of(to) & marks::PIPE != 0 {
        answer = call.ask();
    }
    if answer.is_none() && call.begin(head).is_some() {
        answer = call.ask();
    }
    let answer = answer.unwrap_or(Answer::Ordinary);
    if let Answer::Sent(n) = answer {
        let end = start + n;
        match place {
            Some(at) => *at = off_t::try_from(end).unwrap_or(off_t::MAX),
            None => drop(seek(file, SeekFrom::Start(end))),
        }
    }
    answer
}

struct Call<'a> {
    file: BorrowedFd<'a>,
    socket: BorrowedFd<'a>,
    /// First byte that is wanted.
    start: u64,
    count: u64,
}

impl Call<'_> {
    /// Gives it to the host, when that is possible.
    fn begin(&self, head: Option<Body>) -> Option<()> {
        let sure = head.map_or(0, |body| body.length());
        let engine = Engine::here();
        if !threshold::is_worth(self.count.max(sure)) || !engine.may_begin() {
            return None;
        }
        let fd = self.socket.as_raw_fd();
        // one look instead of eight at a socket that was refused
        if marks::of(fd) & marks::LENT != 0 && engine.refuses(file_id(self.socket).ok()?) {
            return None;
        }
        let found = candidate(self.file, self.socket).filter(|found| found.route == Route::Send)?;
        let body = head.and_then(|body| body.of_file(found.size, self.start));
        let left = found.size.checked_sub(self.start)?;
        let length = body.unwrap_or(self.count).min(left);
        if !threshold::is_worth(length) {
            return None;
        }
        let part = Part {
            offset: self.start,
            length,
            to: 0,
        };
        let watcher = Box::new(move |news| {
            if let Some(mut slot) = board::slot(fd) {
                // what came while the host had the connection was not reported by the kernel
                slot.unpark(fd, news != News::Progress);
            }
        });
        let fds = (self.file, self.socket);
        let begun = engine.begin(&mut engine.lock(), fds, found, part, watcher);
        begun.ok().map(drop)
    }

    /// What the socket's pipe has for the program; `None` when there is no pipe, or no more.
    fn ask(&self) -> Option<Answer> {
        let engine = Engine::peek()?;
        let fd = self.socket.as_raw_fd();
        // looked at when there is news, and then believed: of many calls that tell it only the first one costs a system call
        let mut table = engine.lock();
        let socket = match table.record(fd).and_then(|record| record.looked) {
            Some(socket) => socket,
            None => file_id(self.socket).ok()?,
        };
        // what is there is told without a question whether the program would wait
        let nonblocking = OnceCell::new();
        let nonblocking = || *nonblocking.get_or_init(|| is_nonblocking(self.socket));
        let mut calm_until = None;
        loop {
            let record = table.record_of(fd, socket)?;
            let id = record.id;
            if !record.continues(self.file, self.start) {
                return self.leave(engine, table, socket);
            }
            let available = record.available();
            record.looked = (available > 0).then_some(socket);
            let wanted = self.count.min(record.part.length - record.consumed);
            let enough = available >= wanted || available > 0 && nonblocking();
            if enough && wanted > 0 || available > 0 && !record.is_piping() {
                let n = available.min(wanted);
                record.consumed += n;
                record.asked = 0;
                spare::told(fd, record.available() > 0);
                if record.state == State::Over(0) && record.available() == 0 {
                    table.forget(id);
                }
                return Some(Answer::Sent(n));
            }
            match record.state {
                State::Over(0) | State::Refused(_) => {
                    table.forget(id);
                    return None;
                }
                State::Over(errno) => {
                    table.forget(id);
                    return Some(Answer::Errno(errno));
                }
                State::Piping => (),
            }
            if wanted == 0 {
                return Some(Answer::Sent(0));
            }
            if !nonblocking() {
                table = engine.wait(table, id, None);
                continue;
            }
            let parked = board::slot(fd).is_some_and(|mut slot| slot.park(fd));
            let patience = if parked { STALE } else { 0 };
            let restless = record.asked > patience;
            let until = *calm_until.get_or_insert_with(|| Instant::now() + CALM);
            if !restless || Instant::now() >= until {
                record.asked = record.asked.saturating_add(1);
                return Some(Answer::Errno(libc::EAGAIN));
            }
            table = engine.wait(table, id, Some(until));
        }
    }

    /// The program sends something else than it began: an early end, and an error when more was sent than it knows.
    fn leave(
        &self,
        engine: &Engine,
        mut table: MutexGuard<'_, Table>,
        socket: FileId,
    ) -> Option<Answer> {
        let fd = self.socket.as_raw_fd();
        let until = Instant::now() + FAREWELL;
        let id = table.record_of(fd, socket)?.id;
        table.stop(id);
        let clean = loop {
            let record = table.record_of(fd, socket)?;
            match record.state {
                State::Piping if Instant::now() < until => {
                    table = engine.wait(table, id, Some(until));
                }
                State::Piping => break false,
                State::Over(errno) => break errno == 0 && record.available() == 0,
                State::Refused(_) => break true,
            }
        };
        table.reset(fd);
        if let Some(mut slot) = board::slot(fd) {
            slot.unpark(fd, true);
        }
        (!clean).then_some(Answer::Errno(libc::ECONNRESET))
    }
}
