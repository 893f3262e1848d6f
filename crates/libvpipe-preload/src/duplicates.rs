// SPDX-License-Identifier: Apache-2.0
//! Calls that make another descriptor of a file. The library never hands over a socket that has two descriptors, and a
//! duplicate of a socket that it has handed over is an [alias](marks::ALIAS).

use std::ffi::c_int;
use std::mem::size_of;

use libc::{FILE, msghdr};
use vpipe::engine::{is_own, marks};

use crate::guard::{before_replace, must_fail_with_eagain};
use crate::real::{self, failed};

/// Makes a duplicate by `call`. The old descriptor gets its mark first: a thread that hands it over at the same time
/// either sees that, or is seen by [`mark_new`].
fn duplicate(old: c_int, call: impl FnOnce() -> c_int) -> c_int {
    let own = is_own();
    if own {
        marks::set(old, marks::SHARED);
    }
    let new = call();
    if own && new >= 0 && new != old {
        mark_new(old, new);
    }
    new
}

fn mark_new(old: c_int, new: c_int) {
    let alias = marks::of(old) & (marks::LENT | marks::ALIAS) != 0;
    let more = if alias { marks::ALIAS } else { 0 };
    marks::set(new, marks::SHARED | more);
}

fn is_duplication(what: c_int) -> bool {
    matches!(what, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn dup(old: c_int) -> c_int {
    // SAFETY: the caller guarantees it.
    duplicate(old, || unsafe { real::dup(old) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    if old != new && !before_replace(new) {
        return failed(libc::EBUSY);
    }
    // SAFETY: the caller guarantees it.
    duplicate(old, || unsafe { real::dup2(old, new) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    if old != new && !before_replace(new) {
        return failed(libc::EBUSY);
    }
    // SAFETY: the caller guarantees it.
    duplicate(old, || unsafe { real::dup3(old, new, flags) })
}

// The C library's functions take a variable argument. On the architectures of this library a function with a fixed one
// finds it in the same register; there is none for some requests, and then none is used.
#[unsafe(no_mangle)]
unsafe extern "C" fn fcntl(fd: c_int, what: c_int, argument: usize) -> c_int {
    // SAFETY: the caller guarantees it.
    let call = || unsafe { real::fcntl(fd, what, argument) };
    if is_duplication(what) {
        duplicate(fd, call)
    } else {
        call()
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fcntl64(fd: c_int, what: c_int, argument: usize) -> c_int {
    // SAFETY: the caller guarantees it.
    let call = || unsafe { real::fcntl64(fd, what, argument) };
    if is_duplication(what) {
        duplicate(fd, call)
    } else {
        call()
    }
}

/// The C library closes the descriptor of a stream without the function `close`.
#[unsafe(no_mangle)]
unsafe extern "C" fn fclose(stream: *mut FILE) -> c_int {
    if marks::any() && !stream.is_null() {
        // SAFETY: the caller guarantees a stream.
        before_replace(unsafe { libc::fileno(stream) });
    }
    // SAFETY: the caller guarantees it.
    unsafe { real::fclose(stream) }
}

/// Whether a message with these descriptors (`SCM_RIGHTS`) must fail with `EAGAIN`, because the host has the connection
/// of one of them. A blocking call waits until it is back. The library never hands over a socket that was sent.
///
/// # Safety
/// `message` is null, or valid for `sendmsg(2)`.
pub unsafe fn must_keep_descriptors(message: *const msghdr, flags: c_int) -> bool {
    // SAFETY: the caller guarantees it.
    let Some(message) = (unsafe { message.as_ref() }) else {
        return false;
    };
    if message.msg_control.is_null() || message.msg_controllen == 0 || !is_own() {
        return false;
    }
    // SAFETY: the caller guarantees the control buffer of this length.
    let mut at = unsafe { libc::CMSG_FIRSTHDR(message) };
    // SAFETY: null, or a header within the control buffer.
    while let Some(header) = unsafe { at.as_ref() } {
        if header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: the header is within the control buffer.
            let first = unsafe { libc::CMSG_DATA(at) };
            let head = first as usize - at as usize;
            let count = header.cmsg_len.saturating_sub(head) / size_of::<c_int>();
            let first = first.cast::<c_int>();
            for i in 0..count {
                // SAFETY: the caller guarantees that many descriptors.
                let fd = unsafe { first.add(i).read_unaligned() };
                marks::set(fd, marks::SHARED);
                if must_fail_with_eagain(fd, flags) {
                    return true;
                }
            }
        }
        // SAFETY: as of CMSG_FIRSTHDR.
        at = unsafe { libc::CMSG_NXTHDR(message, at) };
    }
    false
}
