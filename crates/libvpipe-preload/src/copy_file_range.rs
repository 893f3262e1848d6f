// SPDX-License-Identifier: Apache-2.0
//! `copy_file_range`: the host copies large ranges, at most 1 GiB in one call.

use std::ffi::{c_int, c_uint};

use libc::{off_t, size_t, ssize_t};
use rustix::fs::fstat;
use vpipe::{Offsets, TransferKind, classify, settings};

use crate::guard::{borrow, catch_panic};
use crate::real::{self, failed};

/// `copy_file_range(2)`.
///
/// # Safety
/// The offsets are null, or valid for reads and writes.
pub unsafe fn copy_file_range(
    from: c_int,
    from_at: *mut off_t,
    to: c_int,
    to_at: *mut off_t,
    count: size_t,
    flags: c_uint,
) -> ssize_t {
    if flags == 0 && count as u64 >= settings().min_bytes {
        // SAFETY: the caller guarantees it.
        let places = unsafe { (from_at.as_mut(), to_at.as_mut()) };
        if let Some(said) = catch_panic(Some(Err(libc::EIO)), || copy(from, to, places, count)) {
            return said.map_or_else(failed, |n| n as ssize_t);
        }
    }
    // SAFETY: the caller guarantees it.
    unsafe { real::copy_file_range(from, from_at, to, to_at, count, flags) }
}

fn copy(
    from: c_int,
    to: c_int,
    places: (Option<&mut off_t>, Option<&mut off_t>),
    count: usize,
) -> Option<Result<usize, c_int>> {
    let (source, sink) = (borrow(from)?, borrow(to)?);
    // programs that copy small files also ask for the largest count
    let size = fstat(source).ok()?.st_size;
    if u64::try_from(size).is_ok_and(|size| size < settings().min_bytes) {
        return None;
    }
    let given = |at: &Option<&mut off_t>| match at {
        Some(at) => u64::try_from(**at).ok().map(Some),
        None => Some(None),
    };
    let offsets = Offsets {
        source: given(&places.0)?, // the system call reports the error
        sink: given(&places.1)?,
    };
    if classify(source, sink)?.kind != TransferKind::Copy {
        return None;
    }
    let moved = match vpipe::pipe(source, sink, offsets, count)? {
        Ok(n) => n,
        Err(e) => return Some(Err(e.raw_os_error())),
    };
    for at in [places.0, places.1].into_iter().flatten() {
        *at = at.saturating_add_unsigned(moved as u64);
    }
    Some(Ok(moved))
}
