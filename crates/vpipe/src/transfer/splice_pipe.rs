// SPDX-License-Identifier: Apache-2.0
//! A kernel pipe between two descriptors. Bytes pass through it without a copy to user space.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

/// Requested capacity. The kernel limits the pages of all pipes of a user (`/proc/sys/fs/pipe-user-pages-soft`, 64
/// MiB); a pipe that gets less works nevertheless.
const CAPACITY_BYTES: usize = 256 << 10;

/// A kernel pipe and its fill level.
#[derive(Debug)]
pub(super) struct SplicePipe {
    out: OwnedFd,
    into: OwnedFd,
    held: u64,
}

impl SplicePipe {
    pub(super) fn new() -> io::Result<Self> {
        let (out, into) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let _ = fcntl_setpipe_size(&into, CAPACITY_BYTES);
        Ok(Self { out, into, held: 0 })
    }

    /// Bytes in the pipe.
    pub(super) fn len(&self) -> u64 {
        self.held
    }

    /// Moves up to `max_bytes` bytes from a non-blocking socket into the empty pipe; 0 at the socket's end.
    pub(super) fn fill(&mut self, from: BorrowedFd<'_>, max_bytes: u64) -> io::Result<u64> {
        let max_bytes = max_bytes.min(CAPACITY_BYTES as u64) as usize;
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        let got = retry(|| splice(from, None, self.into.as_fd(), None, max_bytes, flags))? as u64;
        self.held += got;
        Ok(got)
    }

    /// Moves bytes from the pipe to a non-blocking socket. Returns how many.
    pub(super) fn drain_to_socket(&mut self, to: BorrowedFd<'_>) -> io::Result<u64> {
        self.drain(to, None, self.held)
    }

    /// Moves up to `max_bytes` bytes from the pipe to a file at offset `at`; waits for the disk.
    pub(super) fn drain_to_file(
        &mut self,
        to: BorrowedFd<'_>,
        at: u64,
        max_bytes: u64,
    ) -> io::Result<u64> {
        self.drain(to, Some(at), max_bytes.min(self.held))
    }

    fn drain(
        &mut self,
        to: BorrowedFd<'_>,
        mut at: Option<u64>,
        max_bytes: u64,
    ) -> io::Result<u64> {
        let flags = match at {
            None => SpliceFlags::NONBLOCK | SpliceFlags::MOVE,
            Some(_) => SpliceFlags::MOVE,
        };
        let out = self.out.as_fd();
        let gone = retry(|| splice(out, None, to, at.as_mut(), max_bytes as usize, flags))? as u64;
        if gone == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        self.held -= gone;
        Ok(gone)
    }
}

fn retry(mut call: impl FnMut() -> rustix::io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}
