// SPDX-License-Identifier: Apache-2.0
//! Sockets whose connection the host has are not touched, and not forgotten.

use std::ffi::{c_int, c_uint};
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::fs::{OFlags, fcntl_getfl};
use vpipe::engine::{Engine, marks};
use vpipe::file_id;

use crate::board;

/// Runs `work`; a panic does not go to a program that has never heard of it.
pub fn guarded<T>(otherwise: T, work: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(otherwise)
}

/// A descriptor of the program's, for the length of a call.
pub fn borrowed<'a>(fd: c_int) -> Option<BorrowedFd<'a>> {
    // SAFETY: not -1; it is used for system calls that say when it is not open, and never closed.
    (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Whether calls on it do not wait.
pub fn is_nonblocking(fd: BorrowedFd<'_>) -> bool {
    fcntl_getfl(fd).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK))
}

/// Whether a call on the descriptor has to say `EAGAIN`. Waits for the connection when the call may wait.
#[inline]
pub fn is_held(fd: c_int, flags: c_int) -> bool {
    marks::any() && look(fd, flags)
}

#[cold]
fn look(fd: c_int, flags: c_int) -> bool {
    if marks::of(fd) & marks::PIPE == 0 {
        return false;
    }
    guarded(true, || {
        let (Some(engine), Some(socket)) = (Engine::own(), borrowed(fd)) else {
            return false;
        };
        let Ok(id) = file_id(socket) else {
            return false;
        };
        let mut table = engine.lock();
        loop {
            let record = table.record_of(fd, id).filter(|record| record.is_piping());
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

/// The descriptor is about to be closed.
#[inline]
pub fn closing(fd: c_int) {
    match marks::of(fd) {
        0 => (),
        marks::FILE => marks::close(fd),
        _ => guarded((), || close_marked(fd)),
    }
}

/// All of these are about to be closed.
pub fn closing_range(first: c_uint, last: c_uint) {
    if marks::any() {
        let end = last.min(marks::NUMBERS - 1);
        (first..=end).for_each(|fd| closing(fd as c_int));
    }
}

#[cold]
fn close_marked(fd: c_int) {
    if !board::is_own() {
        return; // the child of a vfork closes its own descriptor, not its parent's
    }
    let leave = || {
        if let Some(mut slot) = board::slot(fd) {
            slot.leave(fd);
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
    marks::close(fd);
    marks::clear(fd, marks::PIPE | marks::LENT | marks::HEAD);
}

/// The socket is about to be shut down.
#[inline]
pub fn shutting(fd: c_int) {
    if marks::of(fd) & marks::PIPE != 0 {
        guarded((), || shut_marked(fd));
    }
}

#[cold]
fn shut_marked(fd: c_int) {
    let Some(engine) = Engine::own() else {
        return;
    };
    let mut table = engine.lock();
    if table.record(fd).is_some_and(|record| record.is_piping()) {
        table.reset(fd);
        if let Some(mut slot) = board::slot(fd) {
            slot.unpark(fd, true);
        }
    }
}
