// SPDX-License-Identifier: Apache-2.0
//! From a file or a socket to another one, by the host when it can.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, SeekFrom, fstat, seek};
use rustix::io::{Errno, ioctl_fionread};

use crate::candidate::{Candidate, Route, candidate, file_id};
use crate::copy::copy;
use crate::engine::{Engine, Part, State, Watcher, marks};
use crate::settings::settings;
use crate::threshold;

/// Most bytes that are copied from file to file before the caller is asked whether it still wants that.
pub const PIECE: u64 = 1 << 30;

/// Where a transfer begins; of files, `None` is the descriptor's position.
#[derive(Debug, Clone, Copy, Default)]
pub struct Place {
    /// In the source.
    pub from: Option<u64>,
    /// In the sink.
    pub to: Option<u64>,
}

/// Whether it is a socket.
pub(crate) fn is_socket(fd: BorrowedFd<'_>) -> bool {
    fstat(fd).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket)
}

/// Whether nothing is to come any more, or the socket has an error, which the system call is to find there.
fn is_ended(socket: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::new(&socket, PollFlags::RDHUP)];
    if poll(&mut polled, Some(&Timespec::default())) != Ok(1) {
        return false;
    }
    let found = polled[0].revents();
    found.intersects(PollFlags::ERR | PollFlags::HUP)
        || found.contains(PollFlags::RDHUP) && ioctl_fionread(socket) == Ok(0)
}

fn start(fd: BorrowedFd<'_>, given: Option<u64>) -> Option<u64> {
    given.or_else(|| seek(fd, SeekFrom::Current(0)).ok())
}

/// What can be piped of what somebody wants to have moved.
fn pipeable(
    engine: &Engine,
    (source, sink): (BorrowedFd<'_>, BorrowedFd<'_>),
    place: Place,
    length: u64,
) -> Option<(Candidate, Part)> {
    if !engine.may_begin() {
        return None;
    }
    let found = candidate(source, sink)?;
    let mut part = Part {
        length,
        ..Part::default()
    };
    if matches!(found.route, Route::Send | Route::Copy) {
        part.offset = start(source, place.from)?;
        part.length = part.length.min(found.size.checked_sub(part.offset)?);
    } else if place.from.is_some() || is_ended(source) {
        return None;
    }
    if matches!(found.route, Route::Receive | Route::Copy) {
        part.to = start(sink, place.to)?;
        part.length = part.length.min((i64::MAX as u64).checked_sub(part.to)?);
    }
    if found.route == Route::Copy {
        part.length = part.length.min(PIECE);
    }
    let is_worth = match found.route {
        Route::Send => threshold::is_worth(part.length),
        Route::Relay => part.length >= settings().relayed,
        Route::Receive | Route::Copy => part.length >= settings().minimum,
    };
    is_worth.then_some((found, part))
}

/// A pipe that was begun.
#[derive(Clone, Copy)]
pub(crate) struct Begun {
    engine: &'static Engine,
    pub id: u64,
    pub part: Part,
    pub route: Route,
}

/// Begins a pipe; `None` when the caller has to copy.
pub(crate) fn begin(
    fds: (BorrowedFd<'_>, BorrowedFd<'_>),
    place: Place,
    length: u64,
    watcher: Watcher,
) -> Option<Begun> {
    if length < settings().minimum {
        return None;
    }
    let engine = Engine::here();
    let (found, part) = pipeable(engine, fds, place, length)?;
    let mut table = engine.lock();
    let id = engine.begin(&mut table, fds, found, part, watcher).ok()?;
    Some(Begun {
        engine,
        id,
        part,
        route: found.route,
    })
}

/// Waits until a pipe is over. `None` when there is none, or the agent refused it.
///
/// An error after some bytes is kept for the next call on the socket that is lost, as the kernel does.
pub(crate) fn finish(id: u64) -> Option<Result<u64, Errno>> {
    finish_of(Engine::here(), id)
}

/// As [`finish`], of a process that has just asked whether it is the same.
fn finish_of(engine: &Engine, id: u64) -> Option<Result<u64, Errno>> {
    let mut table = engine.lock();
    loop {
        let record = table.pipe(id)?;
        let ended = match record.state {
            State::Piping => {
                table = engine.wait(table, id, None);
                continue;
            }
            State::Refused(_) => None,
            State::Over(errno) => {
                let told = record.available();
                record.consumed = record.sent;
                match (errno, told) {
                    (0, _) => Some(Ok(told)),
                    (e, 0) => Some(Err(Errno::from_raw_os_error(e))),
                    (_, _) => {
                        table.keep_error(id);
                        return Some(Ok(told));
                    }
                }
            }
        };
        table.forget(id);
        return ended;
    }
}

/// Sets the positions that a transfer has moved.
pub(crate) fn advance(
    (source, sink): (BorrowedFd<'_>, BorrowedFd<'_>),
    begun: &Begun,
    place: Place,
    done: u64,
) -> Result<(), Errno> {
    let Begun { part, route, .. } = begun;
    if matches!(route, Route::Send | Route::Copy) && place.from.is_none() {
        seek(source, SeekFrom::Start(part.offset + done))?;
    }
    if matches!(route, Route::Receive | Route::Copy) && place.to.is_none() {
        seek(sink, SeekFrom::Start(part.to + done))?;
    }
    Ok(())
}

/// What somebody else began with the socket, or an error that is left.
fn left(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    if marks::of(fd.as_raw_fd()) & marks::PIPE == 0 {
        return Ok(());
    }
    let id = file_id(fd)?;
    let record = Engine::here()
        .lock()
        .record_of(fd.as_raw_fd(), id)
        .map(|record| record.id);
    match record.and_then(finish) {
        Some(Err(e)) => Err(e),
        Some(Ok(0)) | None => Ok(()),
        Some(Ok(_)) => Err(Errno::CONNRESET), // bytes of which nobody was told
    }
}

/// By the host alone: `None` when it does not, and nothing has happened.
///
/// # Errors
/// Those of a connection that was lost, or of a disk.
pub fn pipe(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    place: Place,
    length: usize,
) -> Option<Result<usize, Errno>> {
    let begun = begin((from, to), place, length as u64, Box::new(|_| ()))?;
    let moved = match finish_of(begun.engine, begun.id)? {
        Ok(0) => return None,
        Ok(n) => n,
        Err(e) => return Some(Err(e)),
    };
    let set = advance((from, to), &begun, place, moved);
    // not more than `length`, which is a usize
    Some(set.map(|()| usize::try_from(moved).unwrap_or(length)))
}

/// Copies up to `length` bytes of `from` into `to`, where that has its position: from `offset` on, which is moved, or else from the
/// position of `from`. What is a regular file or a TCP socket is piped by the host when it can; the call waits until the connections
/// are back.
///
/// # Errors
/// Those of `sendfile(2)`, `copy_file_range(2)`, `splice(2)`, `read(2)` and `write(2)`; `ECONNRESET` when the host had a
/// connection and lost it; `EIO` when the agent ended while the host copied between files.
pub fn send(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    offset: Option<&mut u64>,
    length: usize,
) -> Result<usize, Errno> {
    left(to)?;
    left(from)?;
    let place = Place {
        from: offset.as_deref().copied(),
        to: None,
    };
    if let Some(piped) = pipe(from, to, place, length) {
        let n = piped?;
        if let Some(at) = offset {
            *at += n as u64;
        }
        return Ok(n);
    }
    copy(from, to, offset, length)
}
