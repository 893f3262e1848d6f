// SPDX-License-Identifier: Apache-2.0
//! The kernel's pipe between two descriptors, by which bytes go without being copied to user space.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

/// Bytes it is to hold. The kernel counts the pages of all pipes of a user (`/proc/sys/fs/pipe-user-pages-soft`, 64 MiB), and
/// a pipe that does not get so much works with less.
const CAPACITY_BYTES: usize = 256 << 10;

/// See the module.
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

    /// Bytes that are in it.
    pub(super) fn len(&self) -> u64 {
        self.held
    }

    /// Takes up to `most` bytes of a socket that does not block into the empty pipe; 0 at its end.
    pub(super) fn fill(&mut self, from: BorrowedFd<'_>, most: u64) -> io::Result<u64> {
        let most = most.min(CAPACITY_BYTES as u64) as usize;
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        let got = retry(|| splice(from, None, self.into.as_fd(), None, most, flags))? as u64;
        self.held += got;
        Ok(got)
    }

    /// Gives what it holds, or a part of it, to a socket that does not block.
    pub(super) fn drain_to_socket(&mut self, to: BorrowedFd<'_>) -> io::Result<u64> {
        self.drain(to, None, self.held)
    }

    /// Gives up to `most` bytes of what it holds to a file, from `at` on; that is waited for.
    pub(super) fn drain_to_file(
        &mut self,
        to: BorrowedFd<'_>,
        at: u64,
        most: u64,
    ) -> io::Result<u64> {
        self.drain(to, Some(at), most.min(self.held))
    }

    fn drain(&mut self, to: BorrowedFd<'_>, mut at: Option<u64>, most: u64) -> io::Result<u64> {
        let flags = match at {
            None => SpliceFlags::NONBLOCK | SpliceFlags::MOVE,
            Some(_) => SpliceFlags::MOVE,
        };
        let out = self.out.as_fd();
        let gone = retry(|| splice(out, None, to, at.as_mut(), most as usize, flags))? as u64;
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
