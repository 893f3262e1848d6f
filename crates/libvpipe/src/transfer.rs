// SPDX-License-Identifier: Apache-2.0
//! Transfers between files and sockets, by the host where it can.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, SeekFrom, fstat, seek};
use rustix::io::{Errno, ioctl_fionread};

use crate::candidate::{Candidate, TransferKind, classify, file_id};
use crate::copy::copy;
use crate::engine::{ByteRange, Engine, PipeState, Watcher, marks};
use crate::settings::settings;
use crate::threshold;

/// Maximum bytes of one copy from file to file; the caller asks again for the rest.
pub const MAX_COPY_BYTES: u64 = 1 << 30;

/// Offsets in bytes at which a transfer begins; `None` is the position of a file's descriptor.
#[derive(Debug, Clone, Copy, Default)]
pub struct Offsets {
    /// In the source.
    pub source: Option<u64>,
    /// In the sink.
    pub sink: Option<u64>,
}

/// Whether a descriptor is a socket.
pub(crate) fn is_socket(fd: BorrowedFd<'_>) -> bool {
    fstat(fd).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket)
}

/// Whether the socket has ended, or has an error that the system call must report.
fn is_ended(socket: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::new(&socket, PollFlags::RDHUP)];
    if poll(&mut polled, Some(&Timespec::default())) != Ok(1) {
        return false;
    }
    let found = polled[0].revents();
    found.intersects(PollFlags::ERR | PollFlags::HUP)
        || found.contains(PollFlags::RDHUP) && ioctl_fionread(socket) == Ok(0)
}

fn offset_or_position(fd: BorrowedFd<'_>, given: Option<u64>) -> Option<u64> {
    given.or_else(|| seek(fd, SeekFrom::Current(0)).ok())
}

/// Checks whether the host can move the bytes. Returns the candidate and the range, cut to what the file has; `None`
/// when the caller must copy.
fn plan(
    engine: &Engine,
    (source, sink): (BorrowedFd<'_>, BorrowedFd<'_>),
    offsets: Offsets,
    length: u64,
) -> Option<(Candidate, ByteRange)> {
    if !engine.may_start() {
        return None;
    }
    let found = classify(source, sink)?;
    let mut range = ByteRange {
        length,
        ..ByteRange::default()
    };
    if matches!(found.kind, TransferKind::Send | TransferKind::Copy) {
        range.source_offset = offset_or_position(source, offsets.source)?;
        range.length = range
            .length
            .min(found.size.checked_sub(range.source_offset)?);
    } else if offsets.source.is_some() || is_ended(source) {
        return None;
    }
    if matches!(found.kind, TransferKind::Receive | TransferKind::Copy) {
        range.sink_offset = offset_or_position(sink, offsets.sink)?;
        range.length = range
            .length
            .min((i64::MAX as u64).checked_sub(range.sink_offset)?);
    }
    if found.kind == TransferKind::Copy {
        range.length = range.length.min(MAX_COPY_BYTES);
    }
    let is_worth = match found.kind {
        TransferKind::Send => threshold::is_worthwhile(range.length),
        TransferKind::Relay => range.length >= settings().min_relay_bytes,
        TransferKind::Receive | TransferKind::Copy => range.length >= settings().min_bytes,
    };
    is_worth.then_some((found, range))
}

/// A started pipe.
#[derive(Clone, Copy)]
pub(crate) struct StartedPipe {
    engine: &'static Engine,
    pub id: u64,
    pub range: ByteRange,
    pub kind: TransferKind,
}

/// Starts a pipe; `None` when the caller must copy.
pub(crate) fn start(
    fds: (BorrowedFd<'_>, BorrowedFd<'_>),
    offsets: Offsets,
    length: u64,
    watcher: Watcher,
) -> Option<StartedPipe> {
    if length < settings().min_bytes {
        return None;
    }
    let engine = Engine::get();
    let (found, range) = plan(engine, fds, offsets, length)?;
    let mut table = engine.lock();
    let id = engine.start(&mut table, fds, found, range, watcher).ok()?;
    Some(StartedPipe {
        engine,
        id,
        range,
        kind: found.kind,
    })
}

/// Waits until a pipe ends. `None` when there is no such pipe, or the agent refused it.
///
/// An error after some bytes stays for the next call on the lost socket, as in the kernel.
pub(crate) fn finish(id: u64) -> Option<Result<u64, Errno>> {
    finish_in(Engine::get(), id)
}

/// As [`finish`], for a caller that has just got this process's engine.
fn finish_in(engine: &Engine, id: u64) -> Option<Result<u64, Errno>> {
    let mut table = engine.lock();
    loop {
        let record = table.pipe(id)?;
        let ended = match record.state {
            PipeState::Active => {
                table = engine.wait(table, id, None);
                continue;
            }
            PipeState::Refused(_) => None,
            PipeState::Finished(errno) => {
                let unreported = record.unreported();
                record.reported = record.moved;
                match (errno, unreported) {
                    (0, _) => Some(Ok(unreported)),
                    (e, 0) => Some(Err(Errno::from_raw_os_error(e))),
                    (_, _) => {
                        table.keep_error(id);
                        return Some(Ok(unreported));
                    }
                }
            }
        };
        table.remove(id);
        return ended;
    }
}

/// Advances the file positions that the transfer used. Fails with the error of `lseek(2)`.
pub(crate) fn advance_positions(
    (source, sink): (BorrowedFd<'_>, BorrowedFd<'_>),
    begun: &StartedPipe,
    offsets: Offsets,
    done: u64,
) -> Result<(), Errno> {
    let StartedPipe { range, kind, .. } = begun;
    if matches!(kind, TransferKind::Send | TransferKind::Copy) && offsets.source.is_none() {
        seek(source, SeekFrom::Start(range.source_offset + done))?;
    }
    if matches!(kind, TransferKind::Receive | TransferKind::Copy) && offsets.sink.is_none() {
        seek(sink, SeekFrom::Start(range.sink_offset + done))?;
    }
    Ok(())
}

/// Takes the error that an earlier pipe has left for the socket.
///
/// # Errors
/// That error.
fn take_leftover_error(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    if marks::of(fd.as_raw_fd()) & marks::PIPE == 0 {
        return Ok(());
    }
    let id = file_id(fd)?;
    let record = Engine::get()
        .lock()
        .pipe_of(fd.as_raw_fd(), id)
        .map(|record| record.id);
    match record.and_then(finish) {
        Some(Err(e)) => Err(e),
        Some(Ok(0)) | None => Ok(()),
        Some(Ok(_)) => Err(Errno::CONNRESET), // bytes that were never reported to the program
    }
}

/// Has the host move up to `length` bytes, and returns their number. `None` when the host cannot
/// move them; then no byte was moved.
///
/// # Errors
/// `ECONNRESET` when the host lost a connection, `EIO` when the agent ended while the host copied
/// between files, or the error of a disk.
pub fn pipe(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    offsets: Offsets,
    length: usize,
) -> Option<Result<usize, Errno>> {
    let begun = start((from, to), offsets, length as u64, Box::new(|_| ()))?;
    let moved = match finish_in(begun.engine, begun.id)? {
        Ok(0) => return None,
        Ok(n) => n,
        Err(e) => return Some(Err(e)),
    };
    let set = advance_positions((from, to), &begun, offsets, moved);
    // at most `length`, which is a usize
    Some(set.map(|()| usize::try_from(moved).unwrap_or(length)))
}

/// Moves up to `length` bytes of `from` to `to` at its position. It begins at `offset`, which it advances, or at the
/// position of `from`. The host moves the bytes between regular files and TCP sockets where it can; the call waits
/// until the connections are back.
///
/// # Errors
/// Those of `sendfile(2)`, `copy_file_range(2)`, `splice(2)`, `read(2)` and `write(2)`; `ECONNRESET` when the host
/// had a connection and lost it; `EIO` when the agent ended while the host copied between files.
pub fn transfer(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    offset: Option<&mut u64>,
    length: usize,
) -> Result<usize, Errno> {
    take_leftover_error(to)?;
    take_leftover_error(from)?;
    let offsets = Offsets {
        source: offset.as_deref().copied(),
        sink: None,
    };
    if let Some(piped) = pipe(from, to, offsets, length) {
        let n = piped?;
        if let Some(at) = offset {
            *at += n as u64;
        }
        return Ok(n);
    }
    copy(from, to, offset, length)
}
