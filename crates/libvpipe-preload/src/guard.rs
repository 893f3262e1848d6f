// SPDX-License-Identifier: Apache-2.0
//! Keeps calls of the program away from sockets whose connection the host has.

use std::ffi::{c_int, c_uint};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::event::Timespec;
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::thread::nanosleep;
use vpipe::engine::{Engine, is_own, marks};
use vpipe::file_id;

use crate::deferred;
use crate::epoll_sets::{self, Try};
use crate::real::{errno, set_errno};

/// Time between two looks at a socket whose pipe another process may have.
const ALIAS_POLL_INTERVAL: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 10_000_000,
};
const REPLACE_INTERVAL: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 1_000_000,
};
const REPLACE_ATTEMPTS: u32 = 100;

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
/// `flags` are those of `recv(2)`. Takes no lock and allocates no memory.
#[inline]
pub fn must_fail_with_eagain(fd: c_int, flags: c_int) -> bool {
    marks::of(fd) & (marks::HELD | marks::ALIAS) != 0 && look(fd, flags)
}

#[cold]
fn look(fd: c_int, flags: c_int) -> bool {
    let Some(socket) = borrow(fd) else {
        return false;
    };
    let waits = flags & libc::MSG_DONTWAIT == 0 && !is_nonblocking(socket);
    while marks::of(fd) & marks::HELD != 0 {
        let (Some(engine), Ok(id)) = (Engine::peek(), file_id(socket)) else {
            return false;
        };
        if !engine.is_socket_of_pipe(fd, id) {
            deferred::defer(fd, marks::RESET); // closed past this library
            return false;
        }
        if !waits {
            return true;
        }
        marks::wait_for_end(fd);
    }
    while marks::of(fd) & marks::ALIAS != 0 && is_in_repair_mode(socket) {
        if !waits {
            return true;
        }
        // another process may have the pipe: there is no event to wait for
        let _ = nanosleep(&ALIAS_POLL_INTERVAL);
    }
    false
}

/// Whether the host has the socket's connection: the agent keeps the socket in repair mode meanwhile.
fn is_in_repair_mode(socket: BorrowedFd<'_>) -> bool {
    let mut on: c_int = 0;
    let mut length = size_of::<c_int>() as libc::socklen_t;
    let before = errno();
    // SAFETY: the kernel writes at most `length` bytes to `on`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_REPAIR,
            (&raw mut on).cast(),
            &raw mut length,
        )
    };
    set_errno(before);
    result == 0 && on != 0
}

/// What a call that closes a descriptor has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closing {
    /// Call the kernel.
    Now,
    /// Return 0: the descriptor is closed when the lock is free.
    Later,
    /// Fail with `EBADF`: the program has closed it before.
    Closed,
}

/// Resets the pipe of a descriptor that the program is about to close, and clears its marks. Neither waits for a lock
/// nor allocates nor frees memory.
#[inline]
pub fn before_close(fd: c_int) -> Closing {
    match marks::of(fd) {
        0 => Closing::Now,
        _ => catch_panic(Closing::Now, || close_marked(fd)),
    }
}

#[cold]
fn close_marked(fd: c_int) -> Closing {
    if !is_own() {
        return Closing::Now; // the child of a vfork closes its own descriptor, not its parent's
    }
    if marks::deferred(fd) & marks::CLOSE != 0 {
        return Closing::Closed;
    }
    if !release(fd) {
        deferred::defer(fd, marks::CLOSE);
        return Closing::Later;
    }
    Closing::Now
}

/// Resets the pipe and clears the marks; false when a lock is not free.
fn release(fd: c_int) -> bool {
    let of_fd = marks::of(fd);
    if of_fd & marks::PIPE != 0
        && let Some(engine) = Engine::peek()
    {
        match engine.try_lock() {
            Some(mut table) => table.reset(fd),
            None => return false,
        }
    }
    if of_fd & (marks::PIPE | marks::LENT) != 0 {
        match epoll_sets::try_descriptor(fd) {
            Try::None => (),
            Try::Busy => return false,
            Try::Locked(mut descriptor) => descriptor.forget(fd),
        }
    }
    if of_fd & marks::FILE != 0 {
        marks::file_closing(fd);
    }
    marks::clear_all(fd);
    true
}

/// As [`before_close`] for a call that puts another file into the descriptor. Waits for a lock, for 0.1 s at most;
/// false when it stays locked, which happens only in a signal handler that has interrupted the thread that has it.
pub fn before_replace(fd: c_int) -> bool {
    if marks::of(fd) == 0 || !is_own() {
        return true;
    }
    (0..REPLACE_ATTEMPTS).any(|_| {
        let done = catch_panic(true, || release(fd));
        if !done {
            let _ = nanosleep(&REPLACE_INTERVAL);
        }
        done
    })
}

/// Calls [`before_close`] for the descriptors `first` to `last`, and `close` for the ranges of those that the kernel
/// has to close.
pub fn close_ranges(first: c_uint, last: c_uint, mut close: impl FnMut(c_uint, c_uint)) -> c_uint {
    let mut from = first;
    if marks::any() {
        let end = last.min(marks::MAX_DESCRIPTORS - 1);
        for fd in first..=end {
            if before_close(fd as c_int) != Closing::Now {
                if from < fd {
                    close(from, fd - 1);
                }
                from = fd + 1;
            }
        }
    }
    from
}

/// Resets the pipe of a socket that the program is about to shut down. Neither waits for a lock nor allocates nor frees
/// memory.
#[inline]
pub fn before_shutdown(fd: c_int) {
    if marks::of(fd) & marks::HELD != 0 {
        catch_panic((), || shut_marked(fd));
    }
}

#[cold]
fn shut_marked(fd: c_int) {
    if is_own() {
        deferred::defer(fd, marks::RESET | marks::ADD_AGAIN);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn an_alias_waits_while_the_kernel_has_the_socket_in_repair_mode() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let fd = near.as_raw_fd();
        let repair = |on: c_int| {
            let length = size_of::<c_int>() as libc::socklen_t;
            // SAFETY: an integer of that length.
            unsafe {
                let on = (&raw const on).cast();
                libc::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_REPAIR, on, length)
            }
        };
        assert!(!must_fail_with_eagain(fd, 0) && !is_in_repair_mode(near.as_fd()));
        if repair(1) != 0 {
            return; // needs CAP_NET_ADMIN
        }
        assert!(!must_fail_with_eagain(fd, libc::MSG_DONTWAIT));
        marks::set(fd, marks::ALIAS);
        assert!(must_fail_with_eagain(fd, libc::MSG_DONTWAIT));
        repair(0);
        assert!(!must_fail_with_eagain(fd, 0));
        assert_eq!((before_close(fd), marks::of(fd)), (Closing::Now, 0));
    }

    #[test]
    fn a_close_waits_for_the_thread_that_has_the_descriptor() {
        let kept = std::fs::File::open("/dev/null").unwrap();
        let fd = rustix::io::fcntl_dupfd_cloexec(&kept, 700_010)
            .unwrap_or_else(|_| rustix::io::dup(&kept).unwrap());
        let fd = std::os::fd::IntoRawFd::into_raw_fd(fd);
        let is_open = || file_id(borrow(fd).unwrap()).is_ok();
        vpipe::engine::set_unlock_hook(deferred::run);
        marks::set(fd, marks::LENT);
        let descriptor = epoll_sets::descriptor(fd);
        assert_eq!(
            (before_close(fd), before_close(fd)),
            (Closing::Later, Closing::Closed)
        );
        assert!(is_open() && !before_replace(fd));
        drop(descriptor);
        assert!(!is_open() && marks::of(fd) == 0);
    }
}
