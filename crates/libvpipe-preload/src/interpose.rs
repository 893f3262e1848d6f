// SPDX-License-Identifier: Apache-2.0
//! The C library's functions that the program calls.

use std::ffi::{c_int, c_uint, c_void};

use libc::{
    epoll_event, iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t, timespec,
};
use vpipe::engine::{Engine, TableGuard, marks};
use vpipe::file_id;

use crate::epoll_sets::{self, Registration};
use crate::guard::{
    Closing, before_close, before_shutdown, borrow, catch_panic, close_ranges,
    must_fail_with_eagain,
};
use crate::real::{self, failed};
use crate::{copy_file_range, duplicates, epoll_shortcut, pipe_ahead, sendfile, splice};

fn fail_with_eagain() -> ssize_t {
    failed(libc::EAGAIN)
}

/// A call that must wait while the host has the connection.
macro_rules! gated {
    ($($name:ident($fd:ident, $($arg:ident: $kind:ty),*; $flags:expr);)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($fd: c_int, $($arg: $kind),*) -> ssize_t {
            if must_fail_with_eagain($fd, $flags) {
                return fail_with_eagain();
            }
            // SAFETY: the caller guarantees it.
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
    preadv2(fd, parts: *const iovec, count: c_int, at: off_t, flags: c_int; 0);
    preadv64v2(fd, parts: *const iovec, count: c_int, at: off_t, flags: c_int; 0);
    __read_chk(fd, bytes: *mut c_void, count: size_t, room: size_t; 0);
    __recv_chk(fd, bytes: *mut c_void, count: size_t, room: size_t, flags: c_int; flags);
    __recvfrom_chk(fd, bytes: *mut c_void, count: size_t, room: size_t, flags: c_int, from: *mut sockaddr, length: *mut socklen_t; flags);
}

/// A call that must wait while the host has the connection, and may write a response head.
macro_rules! writing {
    ($($name:ident($fd:ident, $($arg:ident: $kind:ty),*; $flags:expr; $parts:expr);)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($fd: c_int, $($arg: $kind),*) -> ssize_t {
            if must_fail_with_eagain($fd, $flags) {
                return fail_with_eagain();
            }
            // SAFETY: the caller guarantees it.
            let done = unsafe { real::$name($fd, $($arg),*) };
            if done > 0 {
                let (parts, count): (&[iovec], usize) = $parts;
                // SAFETY: the kernel has read what they name.
                unsafe { pipe_ahead::note_write($fd, done, parts.as_ptr(), count) };
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
/// `parts` is null, or valid for `std::slice::from_raw_parts`.
unsafe fn parts<'a>(parts: *const iovec, count: usize) -> (&'a [iovec], usize) {
    if count == 0 || parts.is_null() {
        return (&[], 0);
    }
    // SAFETY: the caller guarantees it.
    (unsafe { std::slice::from_raw_parts(parts, count) }, count)
}

writing! {
    write(fd, bytes: *const c_void, count: size_t; 0; (&part(bytes, count), 1));
    // SAFETY: the kernel has written some of them.
    writev(fd, vector: *const iovec, count: c_int; 0; unsafe { parts(vector, count as usize) });
    send(fd, bytes: *const c_void, count: size_t, flags: c_int; flags; (&part(bytes, count), 1));
    sendto(fd, bytes: *const c_void, count: size_t, flags: c_int, to: *const sockaddr, length: socklen_t; flags; (&part(bytes, count), 1));
    // SAFETY: the kernel has written some of them.
    pwritev2(fd, vector: *const iovec, count: c_int, at: off_t, flags: c_int; 0; unsafe { parts(vector, count as usize) });
    // SAFETY: the kernel has written some of them.
    pwritev64v2(fd, vector: *const iovec, count: c_int, at: off_t, flags: c_int; 0; unsafe { parts(vector, count as usize) });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the caller guarantees it.
    let keeps = unsafe { duplicates::must_keep_descriptors(message, flags) };
    if keeps || must_fail_with_eagain(fd, flags) {
        return fail_with_eagain();
    }
    // SAFETY: the caller guarantees it.
    let done = unsafe { real::sendmsg(fd, message, flags) };
    if done > 0 {
        // SAFETY: the kernel has read the message.
        let (parts, count) = unsafe { parts((*message).msg_iov, (*message).msg_iovlen) };
        // SAFETY: the kernel has read what they name.
        unsafe { pipe_ahead::note_write(fd, done, parts.as_ptr(), count) };
    }
    done
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sendmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    let keeps = !messages.is_null()
        && (0..count as usize).any(|i| {
            // SAFETY: the caller guarantees that many.
            unsafe {
                duplicates::must_keep_descriptors(&raw const (*messages.add(i)).msg_hdr, flags)
            }
        });
    if keeps || must_fail_with_eagain(fd, flags) {
        return failed(libc::EAGAIN);
    }
    pipe_ahead::forget(fd);
    // SAFETY: the caller guarantees it.
    unsafe { real::sendmmsg(fd, messages, count, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    if must_fail_with_eagain(fd, flags) {
        return failed(libc::EAGAIN);
    }
    // SAFETY: the caller guarantees it.
    unsafe { real::recvmmsg(fd, messages, count, flags, timeout) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sendfile(to: c_int, from: c_int, at: *mut off_t, count: size_t) -> ssize_t {
    // SAFETY: the caller guarantees it.
    unsafe { sendfile::sendfile(to, from, at, count) }
}

// off_t has 64 bits here
#[unsafe(no_mangle)]
unsafe extern "C" fn sendfile64(to: c_int, from: c_int, at: *mut off_t, count: size_t) -> ssize_t {
    // SAFETY: the caller guarantees it.
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
    // SAFETY: the caller guarantees it.
    unsafe { copy_file_range::copy_file_range(from, from_at, to, to_at, count, flags) }
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
    // SAFETY: the caller guarantees it.
    unsafe { real::splice(from, from_at, to, to_at, count, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn close(fd: c_int) -> c_int {
    match before_close(fd) {
        // SAFETY: the caller guarantees it.
        Closing::Now => unsafe { real::close(fd) },
        Closing::Later => 0,
        Closing::Closed => failed(libc::EBADF),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let mut from = first;
    if flags & libc::CLOSE_RANGE_CLOEXEC as c_int == 0 {
        from = close_ranges(first, last, |first, last| {
            // SAFETY: the caller guarantees it.
            unsafe { real::close_range(first, last, flags) };
        });
    }
    if first <= last && from > last {
        return 0;
    }
    // SAFETY: the caller guarantees it.
    unsafe { real::close_range(from, last, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn closefrom(first: c_int) {
    let first = c_uint::try_from(first).unwrap_or(0);
    let from = close_ranges(first, c_uint::MAX, |first, last| {
        // SAFETY: the caller guarantees it.
        unsafe { real::close_range(first, last, 0) };
    });
    // SAFETY: the caller guarantees it.
    unsafe { real::closefrom(from as c_int) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_wait(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: c_int,
) -> c_int {
    if most > 0
        && let Some(answer) = catch_panic(None, || epoll_shortcut::event_without_wait(set, timeout))
    {
        let Some(event) = answer else { return 0 };
        // SAFETY: the caller guarantees room for one at least.
        unsafe { *events = event };
        return 1;
    }
    // SAFETY: the caller guarantees it.
    unsafe { real::epoll_wait(set, events, most, timeout) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    before_shutdown(fd);
    // SAFETY: the caller guarantees it.
    unsafe { real::shutdown(fd, how) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_ctl(
    set: c_int,
    what: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    // SAFETY: the caller guarantees it; a deletion needs no event.
    let wanted = match unsafe { event.as_ref() } {
        Some(event) => (event.events, event.u64),
        None => (0, 0),
    };
    let mut table = None;
    if marks::of(fd) & marks::PIPE != 0 {
        let held = catch_panic(Interception::None, || {
            intercept_epoll_ctl(set, what, fd, wanted)
        });
        match held {
            Interception::None => (),
            Interception::CallKernel(guard) => table = Some(guard),
            Interception::Return(0) => return 0,
            Interception::Return(errno) => return failed(errno),
        }
    }
    // SAFETY: the caller guarantees it.
    let result = unsafe { real::epoll_ctl(set, what, fd, event) };
    if result == 0 {
        catch_panic((), || record_registration(set, what, fd, wanted, true));
    }
    drop(table);
    result
}

enum Interception {
    None,
    /// The kernel gets the call while the table stays locked.
    CallKernel(TableGuard<'static>),
    /// The call returns this errno without the kernel.
    Return(c_int),
}

fn record_registration(
    set: c_int,
    what: c_int,
    fd: c_int,
    (events, data): (u32, u64),
    in_kernel: bool,
) {
    let Some(mut descriptor) = epoll_sets::descriptor(fd) else {
        return;
    };
    match what {
        libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD => descriptor.set_registration(Registration {
            set,
            events,
            data,
            in_kernel,
        }),
        _ => descriptor.remove_registration(set),
    }
}

/// Records `epoll_ctl` for a socket that the library has removed from the sets.
#[cold]
fn intercept_epoll_ctl(set: c_int, what: c_int, fd: c_int, wanted: (u32, u64)) -> Interception {
    let (Some(engine), Some(socket), true) = (Engine::own(), borrow(fd), set >= 0) else {
        return Interception::None;
    };
    let Ok(id) = file_id(socket) else {
        return Interception::None;
    };
    let mut table = engine.lock();
    match table.pipe_of(fd, id) {
        None => return Interception::None,
        // the program must not read while the host has both connections
        Some(record) if record.is_active() && record.source.socket == Some(fd) => (),
        Some(record) if record.has_update() => return Interception::CallKernel(table),
        Some(_) => (),
    }
    let there = epoll_sets::descriptor(fd)
        .and_then(|mut descriptor| descriptor.registration(set).map(|at| at.in_kernel));
    let told = match (what, there) {
        (libc::EPOLL_CTL_ADD, None) => true,
        (libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL, Some(false)) => true,
        (libc::EPOLL_CTL_ADD, Some(false)) => return Interception::Return(libc::EEXIST),
        // an unknown registration: from before the library was loaded, or a mistake of the program
        _ => false,
    };
    if !told {
        return Interception::CallKernel(table);
    }
    record_registration(set, what, fd, wanted, false);
    Interception::Return(0)
}
