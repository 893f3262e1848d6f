// SPDX-License-Identifier: Apache-2.0
//! Copies with ordinary system calls.

use std::os::fd::BorrowedFd;

use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, OFlags, copy_file_range, fcntl_getfl, fstat, sendfile};
use rustix::io::{Errno, pread, read, write};
use rustix::pipe::{PipeFlags, SpliceFlags, pipe_with, splice};

use crate::threshold;

/// Buffer of `read` and `write`.
const BUFFER_BYTES: usize = 128 << 10;
/// Most bytes of one system call.
const MAX_CALL_BYTES: usize = 0x7fff_f000;

/// Copies up to `length` bytes, from `offset`, which it advances, or from the descriptor's
/// position. Returns less at the end of `from`, or at an error after some bytes. Fails with the
/// kernel's error when no byte was copied.
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
    let mut method = match (source, sink) {
        (FileType::RegularFile, FileType::RegularFile) => Method::Range,
        (FileType::RegularFile, _) => Method::Send,
        // splice(2) does not append
        (FileType::Socket, _) if is_append(to) => Method::Bytes,
        (FileType::Socket, _) => Method::Splice,
        _ => Method::Bytes,
    };
    let mut done = 0;
    while done < length {
        let count = (length - done).min(MAX_CALL_BYTES);
        let moved = match method {
            Method::Send => {
                let bytes = |sent: &Result<usize, Errno>| sent.map_or(0, |n| n as u64);
                let send = || sendfile(to, from, offset.as_deref_mut(), count);
                threshold::time_sendfile(count as u64, bytes, send)
            }
            Method::Range => copy_file_range(from, offset.as_deref_mut(), to, None, count),
            Method::Splice => through_pipe(from, to, count),
            Method::Bytes => through_buffer(from, to, offset.as_deref_mut(), count),
        };
        match moved {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(Errno::INTR) if done == 0 => return Err(Errno::INTR),
            // the kernel cannot do it between these two files
            Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP)
                if method != Method::Bytes && done == 0 =>
            {
                method = Method::Bytes;
            }
            Err(e) if done == 0 => return Err(e),
            Err(_) => break, // the next call reports the error
        }
        if method == Method::Send {
            break; // one call, as sendfile(2)
        }
    }
    Ok(done)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Method {
    Send,
    Range,
    Splice,
    Bytes,
}

fn is_append(to: BorrowedFd<'_>) -> bool {
    fcntl_getfl(to).is_ok_and(|flags| flags.contains(OFlags::APPEND))
}

/// Moves bytes through a kernel pipe. A full sink is waited for, so no byte is lost.
fn through_pipe(from: BorrowedFd<'_>, to: BorrowedFd<'_>, most: usize) -> Result<usize, Errno> {
    let (out, into) = pipe_with(PipeFlags::CLOEXEC)?;
    let taken = splice(from, None, &into, None, most, SpliceFlags::MOVE)?;
    let mut given = 0;
    while given < taken {
        match splice(&out, None, to, None, taken - given, SpliceFlags::MOVE) {
            Ok(n) => given += n,
            Err(e) => wait_writable(to, e)?,
        }
    }
    Ok(taken)
}

fn through_buffer(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    offset: Option<&mut u64>,
    most: usize,
) -> Result<usize, Errno> {
    let mut bytes = Vec::with_capacity(most.min(BUFFER_BYTES));
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
            Err(e) => wait_writable(to, e)?,
        }
    }
    Ok(bytes.len())
}

fn wait_writable(to: BorrowedFd<'_>, e: Errno) -> Result<(), Errno> {
    match e {
        Errno::AGAIN => match poll(&mut [PollFd::new(&to, PollFlags::OUT)], None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(e),
        },
        Errno::INTR => Ok(()),
        e => Err(e),
    }
}
