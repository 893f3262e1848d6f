// SPDX-License-Identifier: Apache-2.0
//! A file into a socket, by the host when it can.

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::candidate::{Candidate, FileId, candidate, file_id};
use crate::copy::copy;
use crate::engine::{Engine, Part, State, Watcher, marks};
use crate::settings::settings;

/// What can be piped of what somebody wants to have sent.
pub(crate) fn pipeable(
    file: BorrowedFd<'_>,
    socket: BorrowedFd<'_>,
    offset: u64,
    length: u64,
) -> Option<(Candidate, Part)> {
    let minimum = settings().minimum;
    if length < minimum || !Engine::here().may_begin() {
        return None;
    }
    let found = candidate(file, socket)?;
    let length = length.min(found.size.checked_sub(offset)?);
    (length >= minimum).then_some((found, Part { offset, length }))
}

/// Begins a pipe; false when the caller has to copy.
pub(crate) fn begin(
    fds: (BorrowedFd<'_>, BorrowedFd<'_>),
    offset: u64,
    length: u64,
    watcher: Watcher,
) -> bool {
    let Some((found, part)) = pipeable(fds.0, fds.1, offset, length) else {
        return false;
    };
    let engine = Engine::here();
    let mut table = engine.lock();
    engine.begin(&mut table, fds, found, part, watcher).is_ok()
}

/// Waits until a socket's pipe is over. `None` when there is none, or the agent refused it.
///
/// An error after some bytes is kept for the next call on the socket, as the kernel does.
pub(crate) fn finish(fd: RawFd, id: FileId) -> Option<Result<u64, Errno>> {
    let engine = Engine::here();
    let mut table = engine.lock();
    loop {
        let record = table.record_of(fd, id)?;
        let ended = match record.state {
            State::Piping => {
                table = engine.wait(table, fd, None);
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
                        record.unwatch();
                        return Some(Ok(told));
                    }
                }
            }
        };
        table.forget(fd);
        return ended;
    }
}

/// Copies up to `length` bytes of `from` into `to`: from `offset` on, which is moved, or else from the position of `from`. A regular
/// file goes into a TCP socket by the host when it can; the call waits until the connection is back.
///
/// # Errors
/// Those of `sendfile(2)`, `copy_file_range(2)`, `splice(2)`, `read(2)` and `write(2)`; `ECONNRESET` when the host had the
/// connection and lost it.
pub fn send(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    mut offset: Option<&mut u64>,
    length: usize,
) -> Result<usize, Errno> {
    // What somebody else began, or an error that is left.
    if marks::of(to.as_raw_fd()) & marks::PIPE != 0 {
        match finish(to.as_raw_fd(), file_id(to)?) {
            Some(Err(e)) => return Err(e),
            Some(Ok(0)) | None => (),
            Some(Ok(_)) => return Err(Errno::CONNRESET), // bytes of which nobody was told
        }
    }
    let start = match &offset {
        Some(at) => Ok(**at),
        None => seek(from, SeekFrom::Current(0)),
    };
    if let Ok(start) = start
        && begin((from, to), start, length as u64, Box::new(|_, _| ()))
        && let Some(ended) = finish(to.as_raw_fd(), file_id(to)?)
    {
        let sent = ended?;
        match offset.as_deref_mut() {
            Some(at) => *at = start + sent,
            None => drop(seek(from, SeekFrom::Start(start + sent))?),
        }
        if sent > 0 {
            // not more than `length`, which is a usize
            return Ok(usize::try_from(sent).unwrap_or(length));
        }
    }
    copy(from, to, offset, length)
}
