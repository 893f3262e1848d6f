// SPDX-License-Identifier: Apache-2.0
//! Records response heads as the program writes them, so that the next `sendfile` can start the whole body. A signal
//! handler may write, so this takes no lock and allocates no memory.

use std::ffi::c_int;

use libc::{iovec, ssize_t};
use vpipe::engine::{is_own, marks};
use vpipe::settings;

use crate::guard::catch_panic;
use crate::heads;
use crate::http_head::{BEGIN, Body, MAX_HEAD, announced, parse};
use crate::real::{errno, set_errno};

/// Checks whether the written bytes are a response head: it compares the first seven bytes, and
/// looks in a head for a `Content-Length` that is worth a pipe.
///
/// # Safety
/// `parts` is valid for reading `count` entries, and the kernel has just read `done` bytes of what they name.
#[inline]
pub unsafe fn note_write(fd: c_int, done: ssize_t, parts: *const iovec, count: usize) {
    if done <= 0 || count == 0 {
        return;
    }
    // SAFETY: there is at least one.
    let first = unsafe { &*parts };
    let length = first.iov_len.min(done as usize);
    if length < BEGIN.len() {
        return forget(fd);
    }
    // SAFETY: the kernel has read as many of its bytes.
    let bytes = unsafe { std::slice::from_raw_parts(first.iov_base.cast::<u8>(), length) };
    if bytes.starts_with(BEGIN) && may_be_worthwhile(bytes, count > 1) {
        // SAFETY: the caller guarantees it.
        let parts = unsafe { std::slice::from_raw_parts(parts, count) };
        let before = errno();
        // SAFETY: the caller guarantees it.
        catch_panic((), || unsafe { store_head(fd, done, parts) });
        set_errno(before);
    } else {
        forget(fd);
    }
}

/// Whether the body may be worth a pipe; `more` of the head is in other parts.
fn may_be_worthwhile(bytes: &[u8], more: bool) -> bool {
    let settings = settings();
    settings.pipes_ahead && announced(bytes).map_or(more, |length| length >= settings.min_bytes)
}

/// The bytes are no head: forgets the last one.
pub fn forget(fd: c_int) {
    if marks::of(fd) & marks::HEAD != 0 && is_own() {
        marks::clear(fd, marks::HEAD);
    }
}

/// Takes the body that the last written head announced.
pub fn take_head(fd: c_int) -> Option<Body> {
    if marks::of(fd) & marks::HEAD == 0 || !is_own() {
        return None;
    }
    let is_known = marks::clear(fd, marks::HEAD) != 0;
    is_known.then(|| heads::take(fd))?
}

/// # Safety
/// The kernel has just read `done` bytes of what `parts` name.
#[cold]
unsafe fn store_head(fd: c_int, done: ssize_t, parts: &[iovec]) {
    forget(fd);
    let total = parts
        .iter()
        .try_fold(0_usize, |sum, part| sum.checked_add(part.iov_len));
    // a short write, or more than a head
    if total.is_none_or(|n| n > MAX_HEAD || n as ssize_t != done) {
        return;
    }
    let slices = parts.iter().filter(|part| part.iov_len > 0).map(|part| {
        // SAFETY: the kernel has read all of it.
        unsafe { std::slice::from_raw_parts(part.iov_base.cast::<u8>(), part.iov_len) }
    });
    let body = heads::joined(slices, parse).flatten();
    if let Some(body) = body.filter(|body| body.length() >= settings().min_bytes)
        && is_own()
        && heads::store(fd, body)
    {
        marks::set(fd, marks::HEAD);
    }
}
