// SPDX-License-Identifier: Apache-2.0
//! Keeps calls of the program away from sockets whose connection the host has.

use std::ffi::{c_int, c_uint};
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::fs::{OFlags, fcntl_getfl};
use vpipe::engine::{Engine, marks};
use vpipe::file_id;

use crate::epoll_sets;

/// Runs `work`. A panic becomes `otherwise` and does not unwind into the program.
pub fn catch_panic<T>(otherwise: T, work: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(otherwise)
}

/// Borrows a descriptor of the program for the length of a call.
pub fn borrow<'a>(fd: c_int) -> Option<BorrowedFd<'a>> {
    // SAFETY: not negative; it is used for system calls, which report one that is not open, and never closed.
    (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Whether the descriptor is non-blocking.
pub fn is_nonblocking(fd: BorrowedFd<'_>) -> bool {
    fcntl_getfl(fd).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK))
}

/// Whether a call on the descriptor must fail with `EAGAIN`. A blocking call waits here until the connection is back.
/// `flags` are those of `recv(2)`.
#[inline]
pub fn must_fail_with_eagain(fd: c_int, flags: c_int) -> bool {
    marks::any() && look(fd, flags)
}

#[cold]
fn look(fd: c_int, flags: c_int) -> bool {
    if marks::of(fd) & marks::PIPE == 0 {
        return false;
    }
    catch_panic(true, || {
        let (Some(engine), Some(socket)) = (Engine::own(), borrow(fd)) else {
            return false;
        };
        let Ok(id) = file_id(socket) else {
            return false;
        };
        let mut table = engine.lock();
        loop {
            let record = table.pipe_of(fd, id).filter(|record| record.is_active());
            let Some(number) = record.map(|record| record.id) else {
                return false;
            };
            if flags & libc::MSG_DONTWAIT != 0 || is_nonblocking(socket) {
                return true;
            }
            table = engine.wait(table, number, None);
        }
    })
}

/// Resets the pipe of a descriptor that the program is about to close, and clears its marks.
#[inline]
pub fn before_close(fd: c_int) {
    match marks::of(fd) {
        0 => (),
        marks::FILE => marks::file_closing(fd),
        _ => catch_panic((), || close_marked(fd)),
    }
}

/// Calls [`before_close`] for the descriptors `first` to `last`.
pub fn before_close_range(first: c_uint, last: c_uint) {
    if marks::any() {
        let end = last.min(marks::MAX_DESCRIPTORS - 1);
        (first..=end).for_each(|fd| before_close(fd as c_int));
    }
}

#[cold]
fn close_marked(fd: c_int) {
    if !epoll_sets::is_own() {
        return; // the child of a vfork closes its own descriptor, not its parent's
    }
    let leave = || {
        if let Some(mut descriptor) = epoll_sets::descriptor(fd) {
            descriptor.forget(fd);
        }
    };
    match Engine::own() {
        Some(engine) => {
            let mut table = engine.lock();
            table.reset(fd);
            leave();
        }
        None => leave(),
    }
    marks::file_closing(fd);
    marks::clear(fd, marks::PIPE | marks::LENT | marks::HEAD);
}

/// Resets the pipe of a socket that the program is about to shut down.
#[inline]
pub fn before_shutdown(fd: c_int) {
    if marks::of(fd) & marks::PIPE != 0 {
        catch_panic((), || shut_marked(fd));
    }
}

#[cold]
fn shut_marked(fd: c_int) {
    let Some(engine) = Engine::own() else {
        return;
    };
    let mut table = engine.lock();
    if table.pipe_at(fd).is_some_and(|record| record.is_active()) {
        table.reset(fd);
        if let Some(mut descriptor) = epoll_sets::descriptor(fd) {
            descriptor.add_to_sets(fd, true);
        }
    }
}
