// SPDX-License-Identifier: Apache-2.0
//! The C library's functions that this library replaces.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use libc::{
    FILE, epoll_event, iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t,
    timespec,
};

/// The next symbol of a name. [`resolve`] looks up all names before `main`, because `dlsym` takes locks; a call that
/// another library makes before that looks up its own.
struct Next {
    name: &'static str,
    at: AtomicPtr<c_void>,
}

impl Next {
    fn at(&self) -> *mut c_void {
        let at = self.at.load(Ordering::Relaxed);
        if at.is_null() { self.find() } else { at }
    }

    #[cold]
    fn find(&self) -> *mut c_void {
        if RESOLVED.load(Ordering::Relaxed) {
            return null_mut(); // the C library has no such function
        }
        // SAFETY: the name ends with a zero byte.
        let at = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr().cast()) };
        self.at.store(at, Ordering::Relaxed);
        at
    }
}

/// Whether all names are looked up.
static RESOLVED: AtomicBool = AtomicBool::new(false);

/// This thread's errno.
pub fn errno() -> c_int {
    // SAFETY: the address of this thread's errno is always good.
    unsafe { *libc::__errno_location() }
}

/// Sets this thread's errno.
pub fn set_errno(errno: c_int) {
    // SAFETY: the address of this thread's errno is always good.
    unsafe { *libc::__errno_location() = errno };
}

/// Sets errno and returns -1.
pub fn failed<T: From<i8>>(errno: c_int) -> T {
    set_errno(errno);
    T::from(-1)
}

macro_rules! next {
    (variadic $name:ident($($arg:ident: $kind:ty),*; $last:ident)) => {
        /// The C library's function.
        ///
        /// # Safety
        /// As its manual page says.
        #[inline]
        pub unsafe fn $name($($arg: $kind),*, $last: usize) -> c_int {
            let at = names::$name.at();
            if at.is_null() {
                set_errno(libc::ENOSYS);
                return -1;
            }
            // SAFETY: it is the function of this name, which has this type.
            let next: unsafe extern "C" fn($($kind),*, ...) -> c_int = unsafe { std::mem::transmute(at) };
            // SAFETY: the caller guarantees it.
            unsafe { next($($arg),*, $last) }
        }
    };
    ($($name:ident($($arg:ident: $kind:ty),*) -> $result:ty;)*) => { $(
        /// The C library's function.
        ///
        /// # Safety
        /// As its manual page says.
        #[inline]
        pub unsafe fn $name($($arg: $kind),*) -> $result {
            let at = names::$name.at();
            if at.is_null() {
                set_errno(libc::ENOSYS);
                return -1;
            }
            // SAFETY: it is the function of this name, which has this type.
            let next: unsafe extern "C" fn($($kind),*) -> $result = unsafe { std::mem::transmute(at) };
            // SAFETY: the caller guarantees it.
            unsafe { next($($arg),*) }
        }
    )* };
}

macro_rules! names {
    ($($name:ident)*) => {
        #[allow(non_upper_case_globals)]
        mod names {
            use super::{AtomicPtr, Next, null_mut};
            $( pub(super) static $name: Next = Next {
                name: concat!(stringify!($name), "\0"),
                at: AtomicPtr::new(null_mut()),
            }; )*
        }

        /// Looks up all functions.
        pub fn resolve() {
            $( names::$name.at(); )*
            RESOLVED.store(true, Ordering::Relaxed);
        }
    };
}

names! {
    sendfile copy_file_range splice epoll_ctl epoll_wait
    close close_range closefrom fclose shutdown dup dup2 dup3 fcntl fcntl64
    write writev pwritev2 pwritev64v2 send sendto sendmsg sendmmsg
    read readv preadv2 preadv64v2 recv recvfrom recvmsg recvmmsg
    __read_chk __recv_chk __recvfrom_chk
}

next!(variadic fcntl(fd: c_int, what: c_int; argument));
next!(variadic fcntl64(fd: c_int, what: c_int; argument));

next! {
    sendfile(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t;
    copy_file_range(from: c_int, from_at: *mut off_t, to: c_int, to_at: *mut off_t, count: size_t, flags: c_uint) -> ssize_t;
    splice(from: c_int, from_at: *mut off_t, to: c_int, to_at: *mut off_t, count: size_t, flags: c_uint) -> ssize_t;
    epoll_ctl(set: c_int, what: c_int, fd: c_int, event: *mut epoll_event) -> c_int;
    epoll_wait(set: c_int, events: *mut epoll_event, most: c_int, timeout: c_int) -> c_int;
    close(fd: c_int) -> c_int;
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int;
    shutdown(fd: c_int, how: c_int) -> c_int;
    fclose(stream: *mut FILE) -> c_int;
    dup(old: c_int) -> c_int;
    dup2(old: c_int, new: c_int) -> c_int;
    dup3(old: c_int, new: c_int, flags: c_int) -> c_int;
    write(fd: c_int, bytes: *const c_void, count: size_t) -> ssize_t;
    writev(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t;
    pwritev2(fd: c_int, parts: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t;
    pwritev64v2(fd: c_int, parts: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t;
    send(fd: c_int, bytes: *const c_void, count: size_t, flags: c_int) -> ssize_t;
    sendto(fd: c_int, bytes: *const c_void, count: size_t, flags: c_int, to: *const sockaddr, length: socklen_t) -> ssize_t;
    sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t;
    sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int;
    read(fd: c_int, bytes: *mut c_void, count: size_t) -> ssize_t;
    readv(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t;
    preadv2(fd: c_int, parts: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t;
    preadv64v2(fd: c_int, parts: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t;
    recv(fd: c_int, bytes: *mut c_void, count: size_t, flags: c_int) -> ssize_t;
    recvfrom(fd: c_int, bytes: *mut c_void, count: size_t, flags: c_int, from: *mut sockaddr, length: *mut socklen_t) -> ssize_t;
    recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t;
    recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int;
    __read_chk(fd: c_int, bytes: *mut c_void, count: size_t, room: size_t) -> ssize_t;
    __recv_chk(fd: c_int, bytes: *mut c_void, count: size_t, room: size_t, flags: c_int) -> ssize_t;
    __recvfrom_chk(fd: c_int, bytes: *mut c_void, count: size_t, room: size_t, flags: c_int, from: *mut sockaddr, length: *mut socklen_t) -> ssize_t;
}

/// The C library's function, which cannot fail.
///
/// # Safety
/// As its manual page says.
pub unsafe fn closefrom(first: c_int) {
    let at = names::closefrom.at();
    if !at.is_null() {
        // SAFETY: it is the function of this name, which has this type.
        let next: unsafe extern "C" fn(c_int) = unsafe { std::mem::transmute(at) };
        // SAFETY: the caller guarantees it.
        unsafe { next(first) }
    }
}
