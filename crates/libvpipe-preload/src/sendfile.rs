// SPDX-License-Identifier: Apache-2.0
//! `sendfile`: starts pipes, and reports how many bytes the host has sent since the last call.

use std::cell::OnceCell;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use libc::{off_t, size_t, ssize_t};
use rustix::fs::{SeekFrom, seek};
use vpipe::engine::{ByteRange, Engine, PipeEvent, PipeState, TableGuard, marks};
use vpipe::{FileId, TransferKind, classify, file_id, settings, threshold};

use crate::guard::{borrow, catch_panic, is_nonblocking, must_fail_with_eagain};
use crate::http_head::Body;
use crate::real::{self, failed};
use crate::{epoll_sets, epoll_shortcut, io_uring, pipe_ahead};

/// Longest wait for news in a call of a program that polls without epoll.
pub const MAX_NEWS_WAIT: Duration = Duration::from_millis(10);
/// Calls without news before a program with epoll counts as polling: events that it fetched before the socket left
/// the set explain some of them.
pub const MAX_IDLE_POLLS: u32 = 8;
/// Time to wait for the end of a pipe that the program has abandoned.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

enum Outcome {
    /// So many bytes are sent.
    Sent(u64),
    Errno(c_int),
    /// The kernel sends.
    NotPiped,
}

/// `sendfile(2)`.
///
/// # Safety
/// `offset` is null, or valid for reads and writes.
pub unsafe fn sendfile(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t {
    let of_socket = marks::of(to);
    if of_socket & marks::ALIAS != 0 && must_fail_with_eagain(to, 0) {
        return failed(libc::EAGAIN);
    }
    let marked = of_socket & (marks::PIPE | marks::HEAD) != 0;
    if marked || count as u64 >= settings().min_bytes {
        // SAFETY: the caller guarantees it.
        let place = unsafe { offset.as_mut() };
        match catch_panic(Outcome::Errno(libc::EIO), || answer(to, from, place, count)) {
            Outcome::Sent(n) => return n as ssize_t,
            Outcome::Errno(errno) => return failed(errno),
            Outcome::NotPiped => (),
        }
    }
    let bytes = |sent: &ssize_t| u64::try_from(*sent).unwrap_or(0);
    threshold::time_sendfile(count as u64, bytes, || {
        // SAFETY: the caller guarantees it.
        unsafe { real::sendfile(to, from, offset, count) }
    })
}

fn answer(to: c_int, from: c_int, place: Option<&mut off_t>, count: size_t) -> Outcome {
    let head = pipe_ahead::take_head(to);
    let (Some(socket), Some(file)) = (borrow(to), borrow(from)) else {
        return Outcome::NotPiped;
    };
    let start = match &place {
        Some(at) => u64::try_from(**at).ok(),
        None => seek(file, SeekFrom::Current(0)).ok(),
    };
    let Some(start) = start else {
        return Outcome::NotPiped; // the kernel reports the error
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
    let answer = answer.unwrap_or(Outcome::NotPiped);
    if let Outcome::Sent(n) = answer {
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
    /// Offset of the first requested byte.
    start: u64,
    count: u64,
}

impl Call<'_> {
    /// Starts a pipe, if possible.
    fn begin(&self, head: Option<Body>) -> Option<()> {
        let sure = head.map_or(0, |body| body.length());
        let engine = Engine::get();
        if !threshold::is_worthwhile(self.count.max(sure)) || !engine.may_start() {
            return None;
        }
        let fd = self.socket.as_raw_fd();
        // one system call instead of eight for a socket that was refused
        if marks::of(fd) & marks::LENT != 0 && engine.refuses(file_id(self.socket).ok()?) {
            return None;
        }
        let found =
            classify(self.file, self.socket).filter(|found| found.kind == TransferKind::Send)?;
        let body = head.and_then(|body| body.of_file(found.size, self.start));
        let left = found.size.checked_sub(self.start)?;
        let length = body.unwrap_or(self.count).min(left);
        if !threshold::is_worthwhile(length) || io_uring::is_used() {
            return None;
        }
        let part = ByteRange {
            source_offset: self.start,
            length,
            sink_offset: 0,
        };
        let watcher = Box::new(move |news| {
            // the kernel did not report what arrived while the host had the connection
            epoll_sets::add_to_sets(fd, news != PipeEvent::Progress);
        });
        let fds = (self.file, self.socket);
        let begun = engine.start(&mut engine.lock(), fds, found, part, watcher);
        begun.ok().map(drop)
    }

    /// The answer of the socket's pipe; `None` when it has no pipe, or the pipe has ended.
    fn ask(&self) -> Option<Outcome> {
        let engine = Engine::peek()?;
        let fd = self.socket.as_raw_fd();
        // the socket is checked once per update: of many calls that report it only the first costs a system call
        let mut table = engine.lock();
        let socket = match table.pipe_at(fd).and_then(|record| record.checked_socket) {
            Some(socket) => socket,
            None => file_id(self.socket).ok()?,
        };
        // available bytes are reported whether or not the program would wait
        let nonblocking = OnceCell::new();
        let nonblocking = || *nonblocking.get_or_init(|| is_nonblocking(self.socket));
        let mut calm_until = None;
        loop {
            let record = table.pipe_of(fd, socket)?;
            let id = record.id;
            if !record.continues(self.file, self.start) {
                return self.leave(engine, table, socket);
            }
            let available = record.unreported();
            record.checked_socket = (available > 0).then_some(socket);
            let wanted = self.count.min(record.range.length - record.reported);
            let enough = available >= wanted || available > 0 && nonblocking();
            if enough && wanted > 0 || available > 0 && !record.is_active() {
                let n = available.min(wanted);
                record.reported += n;
                record.idle_polls = 0;
                epoll_shortcut::note_reported(fd, record.unreported() > 0);
                if record.state == PipeState::Finished(0) && record.unreported() == 0 {
                    table.remove(id);
                }
                return Some(Outcome::Sent(n));
            }
            match record.state {
                PipeState::Finished(0) | PipeState::Refused(_) => {
                    table.remove(id);
                    return None;
                }
                PipeState::Finished(errno) => {
                    table.remove(id);
                    return Some(Outcome::Errno(errno));
                }
                PipeState::Active => (),
            }
            if wanted == 0 {
                return Some(Outcome::Sent(0));
            }
            if !nonblocking() {
                table = engine.wait(table, id, None);
                continue;
            }
            let in_sets = epoll_sets::descriptor(fd)
                .is_some_and(|mut descriptor| descriptor.remove_from_sets(fd));
            let max_idle_polls = if in_sets { MAX_IDLE_POLLS } else { 0 };
            let restless = record.idle_polls > max_idle_polls;
            let until = *calm_until.get_or_insert_with(|| Instant::now() + MAX_NEWS_WAIT);
            if !restless || Instant::now() >= until {
                record.idle_polls = record.idle_polls.saturating_add(1);
                return Some(Outcome::Errno(libc::EAGAIN));
            }
            table = engine.wait(table, id, Some(until));
        }
    }

    /// Stops the pipe of a program that now sends other bytes. Returns `ECONNRESET` unless the pipe
    /// ends without an error and the program knows of all sent bytes.
    fn leave(
        &self,
        engine: &'static Engine,
        mut table: TableGuard<'static>,
        socket: FileId,
    ) -> Option<Outcome> {
        let fd = self.socket.as_raw_fd();
        let until = Instant::now() + STOP_TIMEOUT;
        let id = table.pipe_of(fd, socket)?.id;
        table.stop(id);
        let clean = loop {
            let record = table.pipe_of(fd, socket)?;
            match record.state {
                PipeState::Active if Instant::now() < until => {
                    table = engine.wait(table, id, Some(until));
                }
                PipeState::Active => break false,
                PipeState::Finished(errno) => break errno == 0 && record.unreported() == 0,
                PipeState::Refused(_) => break true,
            }
        };
        table.reset(fd);
        if let Some(mut descriptor) = epoll_sets::descriptor(fd) {
            descriptor.add_to_sets(fd, true);
        }
        (!clean).then_some(Outcome::Errno(libc::ECONNRESET))
    }
}
