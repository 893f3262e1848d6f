// SPDX-License-Identifier: Apache-2.0
//! Heads of responses, noted when they are written: the next `sendfile` may begin the whole body.

use std::ffi::c_int;

use libc::{iovec, ssize_t};
use vpipe::engine::marks;
use vpipe::settings;

use crate::board;
use crate::gate::guarded;
use crate::head::{BEGIN, Body, MAX_HEAD, announced, parse};
use crate::real::{errno, set_errno};

/// Looks at what was written. Costs a comparison of seven bytes when it is no head, and a look for its `Content-Length` when
/// that is not worth a pipe.
///
/// # Safety
/// `parts` is good for reading `count` of them, and the kernel has just read `done` bytes of what they name.
#[inline]
pub unsafe fn written(fd: c_int, done: ssize_t, parts: *const iovec, count: usize) {
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
    if bytes.starts_with(BEGIN) && is_worth_it(bytes, count > 1) {
        // SAFETY: the caller's word.
        let parts = unsafe { std::slice::from_raw_parts(parts, count) };
        let before = errno();
        // SAFETY: the caller's word.
        guarded((), || unsafe { note(fd, done, parts) });
        set_errno(before);
    } else {
        forget(fd);
    }
}

/// Whether so much may follow that it is given away; `more` of the head is elsewhere.
fn is_worth_it(bytes: &[u8], more: bool) -> bool {
    let settings = settings();
    settings.ahead && announced(bytes).map_or(more, |length| length >= settings.minimum)
}

/// What is written now is no head.
fn forget(fd: c_int) {
    if marks::of(fd) & marks::HEAD != 0 {
        guarded((), || _ = take(fd));
    }
}

/// What follows the head that was written last, once.
pub fn take(fd: c_int) -> Option<Body> {
    if marks::of(fd) & marks::HEAD == 0 || !board::is_own() {
        return None;
    }
    marks::clear(fd, marks::HEAD);
    board::slot(fd)?.head.take()
}

/// # Safety
/// The kernel has just read `done` bytes of what `parts` name.
#[cold]
unsafe fn note(fd: c_int, done: ssize_t, parts: &[iovec]) {
    take(fd);
    let total = parts
        .iter()
        .try_fold(0_usize, |sum, part| sum.checked_add(part.iov_len));
    // cut short, or more than a head
    if total.is_none_or(|n| n > MAX_HEAD || n as ssize_t != done) {
        return;
    }
    let mut bytes = Vec::with_capacity(MAX_HEAD);
    for part in parts.iter().filter(|part| part.iov_len > 0) {
        // SAFETY: the kernel has read all of it.
        bytes.extend(unsafe {
            std::slice::from_raw_parts(part.iov_base.cast::<u8>(), part.iov_len)
        });
    }
    let Some(body) = parse(&bytes).filter(|body| body.length() >= settings().minimum) else {
        return;
    };
    if let Some(mut slot) = board::slot(fd) {
        slot.head = Some(body);
        marks::set(fd, marks::HEAD);
    }
}
