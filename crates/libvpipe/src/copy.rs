// SPDX-License-Identifier: Apache-2.0
//! What is done when nothing is piped: the ordinary system calls.

use std::os::fd::BorrowedFd;

use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, OFlags, copy_file_range, fcntl_getfl, fstat, sendfile};
use rustix::io::{Errno, pread, read, write};
use rustix::pipe::{PipeFlags, SpliceFlags, pipe_with, splice};

use crate::threshold;

/// Bytes that are read and written at a time.
const CHUNK: usize = 128 << 10;
/// Most bytes of one system call.
const MOST: usize = 0x7fff_f000;

/// Copies up to `length` bytes; from `offset` on, which is moved, or from the descriptor's position. Returns less at the end of
/// `from`, or when it could not go on.
pub(crate) fn copy(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    mut offset: Option<&mut u64>,
    length: usize,
) -> Result<usize, Errno> {
    let kind = |fd| fstat(fd).map(|stat| FileType::from_raw_mode(stat.st_mode));
    let (source, sink) = (kind(from)?, kind(to)?);
    if source == FileType::Socket && offset.is_some() {
        return Err(Errno::SPIPE);
    }
    let mut way = match (source, sink) {
        (FileType::RegularFile, FileType::RegularFile) => Way::Range,
        (FileType::RegularFile, _) => Way::Send,
        // splice(2) does not append
        (FileType::Socket, _) if appends(to) => Way::Bytes,
        (FileType::Socket, _) => Way::Splice,
        _ => Way::Bytes,
    };
    let mut done = 0;
    while done < length {
        let some = (length - done).min(MOST);
        let moved = match way {
            Way::Send => {
                let bytes = |sent: &Result<usize, Errno>| sent.map_or(0, |n| n as u64);
                let send = || sendfile(to, from, offset.as_deref_mut(), some);
                threshold::measured(some as u64, bytes, send)
            }
            Way::Range => copy_file_range(from, offset.as_deref_mut(), to, None, some),
            Way::Splice => through_a_pipe(from, to, some),
            Way::Bytes => by_bytes(from, to, offset.as_deref_mut(), some),
        };
        match moved {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(Errno::INTR) if done == 0 => return Err(Errno::INTR),
            // not between these two, or not on this kernel
            Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP)
                if way != Way::Bytes && done == 0 =>
            {
                way = Way::Bytes;
            }
            Err(e) if done == 0 => return Err(e),
            Err(_) => break, // the next call says why
        }
        if way == Way::Send {
            break; // as sendfile(2): what one call could do
        }
    }
    Ok(done)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Send,
    Range,
    Splice,
    Bytes,
}

fn appends(to: BorrowedFd<'_>) -> bool {
    fcntl_getfl(to).is_ok_and(|flags| flags.contains(OFlags::APPEND))
}

/// What was taken is never lost: a sink that takes nothing now is waited for.
fn through_a_pipe(from: BorrowedFd<'_>, to: BorrowedFd<'_>, most: usize) -> Result<usize, Errno> {
    let (out, into) = pipe_with(PipeFlags::CLOEXEC)?;
    let taken = splice(from, None, &into, None, most, SpliceFlags::MOVE)?;
    let mut given = 0;
    while given < taken {
        match splice(&out, None, to, None, taken - given, SpliceFlags::MOVE) {
            Ok(n) => given += n,
            Err(e) => patience(to, e)?,
        }
    }
    Ok(taken)
}

fn by_bytes(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    offset: Option<&mut u64>,
    most: usize,
) -> Result<usize, Errno> {
    let mut bytes = Vec::with_capacity(most.min(CHUNK));
    match offset {
        None => read(from, spare_capacity(&mut bytes))?,
        Some(at) => {
            let n = pread(from, spare_capacity(&mut bytes), *at)?;
            *at += n as u64;
            n
        }
    };
    let mut rest = bytes.as_slice();
    while !rest.is_empty() {
        match write(to, rest) {
            Ok(n) => rest = rest.get(n..).unwrap_or_default(),
            Err(e) => patience(to, e)?,
        }
    }
    Ok(bytes.len())
}

fn patience(to: BorrowedFd<'_>, e: Errno) -> Result<(), Errno> {
    match e {
        Errno::AGAIN => match poll(&mut [PollFd::new(&to, PollFlags::OUT)], None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(e),
        },
        Errno::INTR => Ok(()),
        e => Err(e),
    }
}
