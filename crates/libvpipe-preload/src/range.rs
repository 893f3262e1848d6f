// SPDX-License-Identifier: Apache-2.0
//! `copy_file_range`: large ranges are copied by the host, at most 1 GiB in one call.

use std::ffi::{c_int, c_uint};

use libc::{off_t, size_t, ssize_t};
use rustix::fs::fstat;
use vpipe::{Place, Route, candidate, settings};

use crate::gate::{borrowed, guarded};
use crate::real::{self, failed};

/// `copy_file_range(2)`.
///
/// # Safety
/// The places are null, or good for reading and writing.
pub unsafe fn copy_file_range(
    from: c_int,
    from_at: *mut off_t,
    to: c_int,
    to_at: *mut off_t,
    count: size_t,
    flags: c_uint,
) -> ssize_t {
    if flags == 0 && count as u64 >= settings().minimum {
        // SAFETY: the caller's word.
        let places = unsafe { (from_at.as_mut(), to_at.as_mut()) };
        if let Some(said) = guarded(Some(Err(libc::EIO)), || copy(from, to, places, count)) {
            return said.map_or_else(failed, |n| n as ssize_t);
        }
    }
    // SAFETY: the caller's word.
    unsafe { real::copy_file_range(from, from_at, to, to_at, count, flags) }
}

fn copy(
    from: c_int,
    to: c_int,
    places: (Option<&mut off_t>, Option<&mut off_t>),
    count: usize,
) -> Option<Result<usize, c_int>> {
    let (source, sink) = (borrowed(from)?, borrowed(to)?);
    // whoever copies small files asks for as much as there may be, too
    let size = fstat(source).ok()?.st_size;
    if u64::try_from(size).is_ok_and(|size| size < settings().minimum) {
        return None;
    }
    let given = |at: &Option<&mut off_t>| match at {
        Some(at) => u64::try_from(**at).ok().map(Some),
        None => Some(None),
    };
    let place = Place {
        from: given(&places.0)?, // the system call says what is wrong
        to: given(&places.1)?,
    };
    if candidate(source, sink)?.route != Route::Copy {
        return None;
    }
    let moved = match vpipe::pipe(source, sink, place, count)? {
        Ok(n) => n,
        Err(e) => return Some(Err(e.raw_os_error())),
    };
    for at in [places.0, places.1].into_iter().flatten() {
        *at = at.saturating_add_unsigned(moved as u64);
    }
    Some(Ok(moved))
}
