// SPDX-License-Identifier: Apache-2.0
//! Bodies that written response heads have announced, in static memory: a signal handler may write while the program is
//! anywhere. A caller that finds a place busy goes without; then the library pipes each part by itself.

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

use crate::http_head::{Body, MAX_HEAD};

/// Descriptors that differ by a multiple of this share a place.
const PLACES: usize = 1024;
/// Heads of several parts that can be joined at a time.
const BUFFERS: usize = 8;

/// A place that one caller has at a time.
struct Busy(AtomicBool);

struct Free<'a>(&'a Busy);

impl Busy {
    fn take(&self) -> Option<Free<'_>> {
        (!self.0.swap(true, Acquire)).then_some(Free(self))
    }
}

impl Drop for Free<'_> {
    fn drop(&mut self) {
        self.0.0.store(false, Release);
    }
}

struct Place {
    busy: Busy,
    fd: AtomicI32,
    is_range: AtomicBool,
    length: AtomicU64,
    first: AtomicU64,
    size: AtomicU64,
}

static HEADS: [Place; PLACES] = [const {
    Place {
        busy: Busy(AtomicBool::new(false)),
        fd: AtomicI32::new(0),
        is_range: AtomicBool::new(false),
        length: AtomicU64::new(0),
        first: AtomicU64::new(0),
        size: AtomicU64::new(0),
    }
}; PLACES];

fn place(fd: c_int) -> Option<&'static Place> {
    HEADS.get(usize::try_from(fd).ok()? % PLACES)
}

/// Stores the body of a descriptor; false when its place is busy.
pub fn store(fd: c_int, body: Body) -> bool {
    let Some(place) = place(fd) else { return false };
    let Some(_free) = place.busy.take() else {
        return false;
    };
    let (first, size) = match body {
        Body::Whole { .. } => (0, 0),
        Body::Range { first, size, .. } => (first, size),
    };
    place.fd.store(fd, Relaxed);
    (place.is_range).store(matches!(body, Body::Range { .. }), Relaxed);
    place.length.store(body.length(), Relaxed);
    place.first.store(first, Relaxed);
    place.size.store(size, Relaxed);
    true
}

/// The body of a descriptor.
pub fn take(fd: c_int) -> Option<Body> {
    let place = place(fd)?;
    let _free = place.busy.take()?;
    let length = place.length.load(Relaxed);
    let body = match place.is_range.load(Relaxed) {
        false => Body::Whole { length },
        true => Body::Range {
            first: place.first.load(Relaxed),
            length,
            size: place.size.load(Relaxed),
        },
    };
    (place.fd.load(Relaxed) == fd).then_some(body)
}

struct Buffer {
    busy: Busy,
    bytes: UnsafeCell<[u8; MAX_HEAD]>,
}

// SAFETY: only the caller that has taken `busy` uses `bytes`.
unsafe impl Sync for Buffer {}

static JOINED: [Buffer; BUFFERS] = [const {
    Buffer {
        busy: Busy(AtomicBool::new(false)),
        bytes: UnsafeCell::new([0; MAX_HEAD]),
    }
}; BUFFERS];

/// Gives `work` the parts as one slice. `None` when they are longer than [`MAX_HEAD`], or all buffers are busy.
pub fn joined<'a, T>(
    mut parts: impl Iterator<Item = &'a [u8]>,
    work: impl FnOnce(&[u8]) -> T,
) -> Option<T> {
    let first = parts.next()?;
    let Some(second) = parts.next() else {
        return Some(work(first));
    };
    let (buffer, _free) = JOINED
        .iter()
        .find_map(|buffer| Some((buffer, buffer.busy.take()?)))?;
    // SAFETY: this call has the buffer until `_free` is dropped.
    let bytes = unsafe { &mut *buffer.bytes.get() };
    let mut used = 0;
    for part in [first, second].into_iter().chain(parts) {
        let end = used + part.len();
        bytes.get_mut(used..end)?.copy_from_slice(part);
        used = end;
    }
    Some(work(bytes.get(..used)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_has_its_own_head() {
        let whole = Body::Whole { length: 10 };
        let range = Body::Range {
            first: 5,
            length: 3,
            size: 9,
        };
        assert!(store(700, whole));
        assert_eq!(
            (take(700), take(700 + PLACES as c_int)),
            (Some(whole), None)
        );
        assert!(store(701, range) && !store(-1, range));
        assert_eq!(take(701), Some(range));
        let busy = place(702).unwrap().busy.take();
        assert!(!store(702, range) && take(702).is_none());
        drop(busy);
        assert!(store(702, range));
    }

    #[test]
    fn parts_are_joined_in_their_order() {
        let join = |parts: &[&[u8]]| joined(parts.iter().copied(), <[u8]>::to_vec);
        assert_eq!(join(&[b"abc"]), Some(b"abc".to_vec()));
        assert_eq!(join(&[b"abc", b"d", b"ef"]), Some(b"abcdef".to_vec()));
        assert_eq!((join(&[]), join(&[&[0; MAX_HEAD], b"x"])), (None, None));
    }
}
