// SPDX-License-Identifier: Apache-2.0
//! The C interface, see `vpipe.h` and `vpipe_file(3)`.
//!
//! Each function returns -1 and sets errno when it fails.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};

use libc::{off_t, size_t, ssize_t};
use rustix::io::Errno;

use crate::{job, transfer};

/// Runs `call`. An error goes to errno. A panic becomes `EIO` and does not unwind into the C caller.
fn call_guarded<T>(failed: T, call: impl FnOnce() -> Result<T, Errno>) -> T {
    let result = catch_unwind(AssertUnwindSafe(call)).unwrap_or(Err(Errno::IO));
    result.unwrap_or_else(|errno| {
        // SAFETY: the address of this thread's errno is always good.
        unsafe { *libc::__errno_location() = errno.raw_os_error() };
        failed
    })
}

fn borrowed<'a>(fd: c_int) -> Result<BorrowedFd<'a>, Errno> {
    if fd < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: the caller keeps it open for the call; otherwise the kernel reports the error.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Moves up to `length` bytes of `in_fd` to `out_fd`. Returns their number, or -1.
///
/// # Safety
/// `offset` is null, or valid for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpipe_file(
    in_fd: c_int,
    out_fd: c_int,
    offset: *mut off_t,
    length: size_t,
) -> ssize_t {
    call_guarded(-1, || {
        let (from, to) = (borrowed(in_fd)?, borrowed(out_fd)?);
        // SAFETY: null, or the caller guarantees it.
        let place = unsafe { offset.as_mut() };
        let mut at = match &place {
            Some(at) => Some(u64::try_from(**at).map_err(|_| Errno::INVAL)?),
            None => None,
        };
        let sent = transfer::transfer(from, to, at.as_mut(), length);
        if let (Some(place), Some(at)) = (place, at) {
            *place = off_t::try_from(at).map_err(|_| Errno::OVERFLOW)?;
        }
        sent.map(|n| n as ssize_t)
    })
}

/// Starts to move `length` bytes of `in_fd`, from `offset` (0 for a socket), to `out_fd`. Returns a descriptor that
/// becomes readable at the end, or -1.
#[unsafe(no_mangle)]
pub extern "C" fn vpipe_begin(in_fd: c_int, out_fd: c_int, offset: off_t, length: size_t) -> c_int {
    call_guarded(-1, || {
        let offset = u64::try_from(offset).map_err(|_| Errno::INVAL)?;
        job::start(borrowed(in_fd)?, borrowed(out_fd)?, offset, length)
    })
}

/// Waits for the end and closes the descriptor of `vpipe_begin`. Returns the number of bytes, or -1.
#[unsafe(no_mangle)]
pub extern "C" fn vpipe_end(completion: c_int) -> ssize_t {
    call_guarded(-1, || job::end(completion).map(|n| n as ssize_t))
}
