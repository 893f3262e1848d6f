// SPDX-License-Identifier: Apache-2.0
//! The C library's functions, as the program sees them.

use std::ffi::{c_int, c_uint, c_void};

use libc::{epoll_event, iovec, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t};
use vpipe::engine::{Engine, marks};
use vpipe::file_id;

use crate::board::{self, Registration};
use crate::gate::{borrowed, closing, closing_range, guarded, is_held, shutting};
use crate::real::{self, failed};
use crate::{ahead, range, sendfile, spare, splice};

fn again() -> ssize_t {
    failed(libc::EAGAIN)
}

/// A call that waits at the gate.
macro_rules! gated {
    ($($name:ident($fd:ident, $($arg:ident: $kind:ty),*; $flags:expr);)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($fd: c_int, $($arg: $kind),*) -> ssize_t {
            if is_held($fd, $flags) {
                return again();
            }
            // SAFETY: the caller's word.
            unsafe { real::$name($fd, $($arg),*) }
        }
    )* };
}

gated! {
    read(fd, bytes: *mut c_void, count: size_t; 0);
    readv(fd, parts: *const iovec, count: c_int; 0);
    recv(fd, bytes: *mut c_void, count: size_t, flags: c_int; flags);
    recvfrom(fd, bytes: *mut c_void, count: size_t, flags: c_int, from: *mut sockaddr, length: *mut socklen_t; flags);
    recvmsg(fd, message: *mut msghdr, flags: c_int; flags);
    __read_chk(fd, bytes: *mut c_void, count: size_t, room: size_t; 0);
    __recv_chk(fd, bytes: *mut c_void, count: size_t, room: size_t, flags: c_int; flags);
    __recvfrom_chk(fd, bytes: *mut c_void, count: size_t, room: size_t, flags: c_int, from: *mut sockaddr, length: *mut socklen_t; flags);
}

/// A call that waits at the gate, and may write a head.
macro_rules! writing {
    ($($name:ident($fd:ident, $($arg:ident: $kind:ty),*; $flags:expr; $parts:expr);)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($fd: c_int, $($arg: $kind),*) -> ssize_t {
            if is_held($fd, $flags) {
                return again();
            }
            // SAFETY: the caller's word.
            let done = unsafe { real::$name($fd, $($arg),*) };
            if done > 0 {
                let (parts, count): (&[iovec], usize) = $parts;
                // SAFETY: the kernel has read what they name.
                unsafe { ahead::written($fd, done, parts.as_ptr(), count) };
            }
            done
        }
    )* };
}

fn part(bytes: *const c_void, count: size_t) -> [iovec; 1] {
    [iovec {
        iov_base: bytes.cast_mut(),
        iov_len: count,
    }]
}

/// # Safety
/// As of `std::slice::from_raw_parts`.
unsafe fn parts<'a>(parts: *const iovec, count: usize) -> (&'a [iovec], usize) {
    if count == 0 || parts.is_null() {
        return (&[], 0);
    }
    // SAFETY: the caller's word.
    (unsafe { std::slice::from_raw_parts(parts, count) }, count)
}

writing! {
    write(fd, bytes: *const c_void, count: size_t; 0; (&part(bytes, count), 1));
    // SAFETY: the kernel has written some of them.
    writev(fd, vector: *const iovec, count: c_int; 0; unsafe { parts(vector, count as usize) });
    send(fd, bytes: *const c_void, count: size_t, flags: c_int; flags; (&part(bytes, count), 1));
    sendto(fd, bytes: *const c_void, count: size_t, flags: c_int, to: *const sockaddr, length: socklen_t; flags; (&part(bytes, count), 1));
    // SAFETY: the kernel has read the message.
    sendmsg(fd, message: *const msghdr, flags: c_int; flags; unsafe { parts((*message).msg_iov, (*message).msg_iovlen) });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sendfile(to: c_int, from: c_int, at: *mut off_t, count: size_t) -> ssize_t {
    // SAFETY: the caller's word.
    unsafe { sendfile::sendfile(to, from, at, count) }
}

// The same: off_t has 64 bits here.
#[unsafe(no_mangle)]
unsafe extern "C" fn sendfile64(to: c_int, from: c_int, at: *mut off_t, count: size_t) -> ssize_t {
    // SAFETY: the caller's word.
    unsafe { sendfile::sendfile(to, from, at, count) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn copy_file_range(
    from: c_int,
    from_at: *mut off_t,
    to: c_int,
    to_at: *mut off_t,
    count: size_t,
    flags: c_uint,
) -> ssize_t {
    // SAFETY: the caller's word.
    unsafe { range::copy_file_range(from, from_at, to, to_at, count, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn splice(
    from: c_int,
    from_at: *mut off_t,
    to: c_int,
    to_at: *mut off_t,
    count: size_t,
    flags: c_uint,
) -> ssize_t {
    if from_at.is_null()
        && to_at.is_null()
        && let Some(said) = splice::splice(from, to, count, flags)
    {
        return said;
    }
    // SAFETY: the caller's word.
    unsafe { real::splice(from, from_at, to, to_at, count, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn close(fd: c_int) -> c_int {
    closing(fd);
    // SAFETY: the caller's word.
    unsafe { real::close(fd) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    if flags & libc::CLOSE_RANGE_CLOEXEC as c_int == 0 {
        closing_range(first, last);
    }
    // SAFETY: the caller's word.
    unsafe { real::close_range(first, last, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn closefrom(first: c_int) {
    let first = c_uint::try_from(first).unwrap_or(0);
    closing_range(first, c_uint::MAX);
    // SAFETY: the caller's word.
    unsafe { real::closefrom(first as c_int) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_wait(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: c_int,
) -> c_int {
    if most > 0
        && let Some(answer) = guarded(None, || spare::answer(set, timeout))
    {
        let Some(event) = answer else { return 0 };
        // SAFETY: the caller's word: there is room for one at least.
        unsafe { *events = event };
        return 1;
    }
    // SAFETY: the caller's word.
    unsafe { real::epoll_wait(set, events, most, timeout) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    if old != new {
        closing(new);
    }
    // SAFETY: the caller's word.
    unsafe { real::dup2(old, new) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    if old != new {
        closing(new);
    }
    // SAFETY: the caller's word.
    unsafe { real::dup3(old, new, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    shutting(fd);
    // SAFETY: the caller's word.
    unsafe { real::shutdown(fd, how) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_ctl(
    set: c_int,
    what: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    // SAFETY: the caller's word; a deletion needs no event.
    let wanted = match unsafe { event.as_ref() } {
        Some(event) => (event.events, event.u64),
        None => (0, 0),
    };
    let mut table = None;
    if marks::of(fd) & marks::PIPE != 0 {
        let held = guarded(Held::No, || held_back(set, what, fd, wanted));
        match held {
            Held::No => (),
            Held::Open(guard) => table = Some(guard),
            Held::Done(0) => return 0,
            Held::Done(errno) => return failed(errno),
        }
    }
    // SAFETY: the caller's word.
    let result = unsafe { real::epoll_ctl(set, what, fd, event) };
    if result == 0 {
        guarded((), || note(set, what, fd, wanted, true));
    }
    drop(table);
    result
}

enum Held {
    No,
    /// There is news: the call is made, and the table kept for it.
    Open(std::sync::MutexGuard<'static, vpipe::engine::Table>),
    /// The program was told this, and nothing was called.
    Done(c_int),
}

fn note(set: c_int, what: c_int, fd: c_int, (events, data): (u32, u64), real: bool) {
    let Some(mut slot) = board::slot(fd) else {
        return;
    };
    match what {
        libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD => slot.put(Registration {
            set,
            events,
            data,
            real,
        }),
        _ => slot.remove(set),
    }
}

/// A socket that waits for the host is in no set, whatever the program believes.
#[cold]
fn held_back(set: c_int, what: c_int, fd: c_int, wanted: (u32, u64)) -> Held {
    let (Some(engine), Some(socket), true) = (Engine::own(), borrowed(fd), set >= 0) else {
        return Held::No;
    };
    let Ok(id) = file_id(socket) else {
        return Held::No;
    };
    let mut table = engine.lock();
    match table.record_of(fd, id) {
        None => return Held::No,
        // nothing is to be read while the host has both connections
        Some(record) if record.is_piping() && record.source.socket == Some(fd) => (),
        Some(record) if record.has_news() => return Held::Open(table),
        Some(_) => (),
    }
    let there = board::slot(fd).and_then(|mut slot| slot.find(set).map(|at| at.real));
    let told = match (what, there) {
        (libc::EPOLL_CTL_ADD, None) => true,
        (libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL, Some(false)) => true,
        (libc::EPOLL_CTL_ADD, Some(false)) => return Held::Done(libc::EEXIST),
        // it has not asked yet, or it is of a time before this library, or a mistake
        _ => false,
    };
    if !told {
        return Held::Open(table);
    }
    note(set, what, fd, wanted, false);
    Held::Done(0)
}
