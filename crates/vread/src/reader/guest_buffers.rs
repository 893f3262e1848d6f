// SPDX-License-Identifier: Apache-2.0
//! Reads bytes of an image directly into a VM's memory.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use fuse_backend_rs::file_buf::FileVolatileSlice;
use fuse_backend_rs::file_traits::FileReadWriteVolatile;

/// Maximum buffers in a system call (`UIO_MAXIOV`).
const MAX_BUFFERS: usize = 1024;

thread_local! {
    static WAITING: Cell<Waiting> = const { Cell::new(Waiting::Allowed) };
}

/// Whether this thread may wait for a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Waiting {
    /// It may.
    Allowed,
    /// It may not: a read of bytes that are not in memory ends the request.
    Forbidden,
    /// A read would have waited, which has ended the request: another thread serves it again.
    Needed,
    /// It may, and serves a request that ended as [`Waiting::Needed`] before.
    Retry,
}

/// Runs `serve` without waiting for a disk. Returns `None` if it had to wait; serving the request again is safe then.
pub(crate) fn without_waiting<T>(serve: impl FnOnce() -> T) -> Option<T> {
    WAITING.set(Waiting::Forbidden);
    let result = serve();
    (WAITING.replace(Waiting::Allowed) != Waiting::Needed).then_some(result)
}

/// Runs `serve`, which may wait, on a request that [`without_waiting`] has ended.
pub(super) fn retry_waiting<T>(serve: impl FnOnce() -> T) -> T {
    WAITING.set(Waiting::Retry);
    let result = serve();
    WAITING.set(Waiting::Allowed);
    result
}

/// Whether this thread is inside [`without_waiting`].
pub(super) fn must_not_wait() -> bool {
    matches!(WAITING.get(), Waiting::Forbidden | Waiting::Needed)
}

/// Whether the request has to be served again because it would have waited.
pub(super) fn will_be_retried() -> bool {
    WAITING.get() == Waiting::Needed
}

/// Whether this is the first attempt at the request.
pub(super) fn is_first_attempt() -> bool {
    WAITING.get() != Waiting::Retry
}

pub(super) fn would_wait() -> io::Error {
    WAITING.set(Waiting::Needed);
    io::ErrorKind::WouldBlock.into()
}

/// Buffers for an answer in a VM's memory, filled from the front.
pub(super) struct GuestBuffers<'a> {
    buffers: Vec<libc::iovec>,
    /// Index of the first buffer that is not full.
    first: usize,
    pub(super) left: usize,
    _memory: std::marker::PhantomData<&'a [FileVolatileSlice<'a>]>,
}

impl<'a> GuestBuffers<'a> {
    pub(super) fn new(slices: &'a [FileVolatileSlice<'a>]) -> Self {
        let mut buffers: Vec<libc::iovec> = Vec::with_capacity(slices.len());
        for slice in slices.iter().filter(|slice| !slice.is_empty()) {
            let (base, len) = (slice.as_ptr(), slice.len());
            match buffers.last_mut() {
                // Adjacent pages form one buffer.
                Some(last) if last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == base => {
                    last.iov_len += len;
                }
                _ => buffers.push(libc::iovec {
                    iov_base: base.cast(),
                    iov_len: len,
                }),
            }
        }
        Self {
            left: buffers.iter().map(|b| b.iov_len).sum(),
            buffers,
            first: 0,
            _memory: std::marker::PhantomData,
        }
    }

    /// Returns the next buffers with at most `max` bytes. The last one is shortened; the second value is the number
    /// of bytes cut off.
    fn next(&mut self, max: usize) -> (&mut [libc::iovec], usize) {
        let rest = &mut self.buffers[self.first..];
        let (mut count, mut sum) = (0, 0);
        while count < rest.len().min(MAX_BUFFERS) && sum < max {
            sum += rest[count].iov_len;
            count += 1;
        }
        let hidden = sum.saturating_sub(max);
        if let Some(last) = rest[..count].last_mut() {
            last.iov_len -= hidden;
        }
        (&mut rest[..count], hidden)
    }

    /// Restores the bytes that [`GuestBuffers::next`] cut off the last of `count` buffers, and advances by `done`
    /// bytes.
    fn advance(&mut self, count: usize, hidden: usize, done: usize) {
        if count > 0 {
            self.buffers[self.first + count - 1].iov_len += hidden;
        }
        self.left -= done;
        let mut done = done;
        while done > 0 {
            let buffer = &mut self.buffers[self.first];
            if done < buffer.iov_len {
                buffer.iov_base = buffer.iov_base.wrapping_byte_add(done);
                buffer.iov_len -= done;
                return;
            }
            done -= buffer.iov_len;
            self.first += 1;
        }
    }

    pub(super) fn read(
        &mut self,
        fd: BorrowedFd<'_>,
        mut offset: u64,
        len: usize,
    ) -> io::Result<()> {
        let mut len = len.min(self.left);
        while len > 0 {
            let (buffers, hidden) = self.next(len);
            let (pointer, count) = (buffers.as_ptr(), buffers.len());
            let flags = if must_not_wait() { libc::RWF_NOWAIT } else { 0 };
            // SAFETY: the buffers lie in the guest's memory, which is mapped as long as the request
            // is being served, and this process has no references into it.
            let got = unsafe {
                libc::preadv2(
                    fd.as_raw_fd(),
                    pointer,
                    count as libc::c_int,
                    offset.cast_signed(),
                    flags,
                )
            };
            let error = io::Error::last_os_error();
            let done = usize::try_from(got).unwrap_or(0);
            self.advance(count, hidden, done);
            offset += done as u64;
            len -= done;
            if got < 0 {
                match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    // The file system does not support the flag, or the bytes are not in memory.
                    Some(libc::EAGAIN | libc::EOPNOTSUPP) if must_not_wait() => {
                        return Err(would_wait());
                    }
                    _ => return Err(error),
                }
            } else if done == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }

    pub(super) fn zero(&mut self, len: usize) {
        self.each(len, |at, len, _| {
            // SAFETY: as in `each`.
            unsafe { at.write_bytes(0, len) }
        });
    }

    pub(super) fn copy(&mut self, bytes: &[u8]) {
        // SAFETY: `bytes` is borrowed for the call.
        unsafe { self.copy_from(bytes.as_ptr(), bytes.len()) }
    }

    /// Copies `len` bytes from `from`.
    ///
    /// # Safety
    /// `len` bytes are mapped at `from`. Another process may change them meanwhile.
    pub(super) unsafe fn copy_from(&mut self, from: *const u8, len: usize) {
        self.each(len, |at, len, done| {
            // SAFETY: as in `each`; `done + len` is never beyond the length given to it.
            unsafe { at.copy_from_nonoverlapping(from.add(done), len) }
        });
    }

    /// Calls `write` for each buffer of the next `len` bytes, with its address, its length and the number of bytes
    /// before it. The address is valid for that many bytes of the guest's memory.
    fn each(&mut self, len: usize, mut write: impl FnMut(*mut u8, usize, usize)) {
        let mut len = len.min(self.left);
        let mut done = 0;
        while len > 0 {
            let (buffers, hidden) = self.next(len);
            let (mut sum, count) = (0, buffers.len());
            for buffer in buffers {
                write(buffer.iov_base.cast(), buffer.iov_len, done + sum);
                sum += buffer.iov_len;
            }
            self.advance(count, hidden, sum);
            done += sum;
            len -= sum;
        }
    }
}

/// A source of bytes for a VM's memory.
pub(super) trait FillGuest {
    /// Fills the slices with bytes from `offset` and returns their number.
    fn fill(&mut self, slices: &[FileVolatileSlice<'_>], offset: u64) -> io::Result<usize>;
}

/// Adapter to the library's file trait: supports only positioned reads.
pub(super) struct ReadOnly<'a, T>(pub(super) &'a mut T);

fn no_stream() -> io::Error {
    io::Error::from_raw_os_error(libc::ESPIPE)
}

fn read_only() -> io::Error {
    io::Error::from_raw_os_error(libc::EROFS)
}

impl<T: FillGuest> FileReadWriteVolatile for ReadOnly<'_, T> {
    fn read_volatile(&mut self, _: FileVolatileSlice<'_>) -> io::Result<usize> {
        Err(no_stream())
    }

    fn write_volatile(&mut self, _: FileVolatileSlice<'_>) -> io::Result<usize> {
        Err(read_only())
    }

    fn read_at_volatile(&mut self, slice: FileVolatileSlice<'_>, offset: u64) -> io::Result<usize> {
        self.0.fill(&[slice], offset)
    }

    fn read_vectored_at_volatile(
        &mut self,
        slices: &[FileVolatileSlice<'_>],
        offset: u64,
    ) -> io::Result<usize> {
        self.0.fill(slices, offset)
    }

    fn write_at_volatile(&mut self, _: FileVolatileSlice<'_>, _: u64) -> io::Result<usize> {
        Err(read_only())
    }
}
