// SPDX-License-Identifier: Apache-2.0
//! What is special about a descriptor's number, so cheap to ask that every system call can.
//!
//! While nothing is piped that is one relaxed load of a counter.

use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use super::process::PerProcess;

/// It has a record: the host has its connection, or there is something left to be told.
pub const PIPE: u8 = 1;
/// The agent had it once since it was opened.
pub const LENT: u8 = 2;
/// The head of a response was written to it, and nothing since.
pub const HEAD: u8 = 4;

/// It was looked at, and is the file of a pipe; not since it was closed.
pub const FILE: u8 = 8;

/// How often one with that mark was closed.
static CLOSED: AtomicUsize = AtomicUsize::new(0);

static MARKS: Marks = Marks::new();

const CHUNK: usize = 1024;
const CHUNKS: usize = 1024;
/// Numbers of descriptors that may have marks are below this.
pub const NUMBERS: u32 = (CHUNK * CHUNKS) as u32;

/// Something for each descriptor by its number, below 2^20. Asking takes no lock.
pub struct Slots<T>(Box<[OnceLock<Box<[T]>>]>);

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self((0..CHUNKS).map(|_| OnceLock::new()).collect())
    }
}

impl<T: Default> Slots<T> {
    /// A descriptor's, when somebody has made it or one of its neighbours.
    pub fn get(&self, fd: RawFd) -> Option<&T> {
        let fd = usize::try_from(fd).ok()?;
        self.0.get(fd / CHUNK)?.get()?.get(fd % CHUNK)
    }

    /// A descriptor's; `None` for a number that is too large.
    pub fn make(&self, fd: RawFd) -> Option<&T> {
        let fd = usize::try_from(fd).ok()?;
        let chunk = self.0.get(fd / CHUNK)?;
        let chunk = chunk.get_or_init(|| (0..CHUNK).map(|_| T::default()).collect());
        chunk.get(fd % CHUNK)
    }
}

/// Marks of a process's descriptors.
struct Marks {
    /// Descriptors that have a mark.
    marked: AtomicUsize,
    slots: PerProcess<Slots<AtomicU8>>,
}

impl Marks {
    const fn new() -> Self {
        Self {
            marked: AtomicUsize::new(0),
            slots: PerProcess::new(),
        }
    }

    #[inline]
    fn any(&self) -> bool {
        self.marked.load(Ordering::Relaxed) != 0
    }

    #[inline]
    fn of(&self, fd: RawFd) -> u8 {
        if self.any() { self.look(fd) } else { 0 }
    }

    #[cold]
    fn look(&self, fd: RawFd) -> u8 {
        let slot = self.slots.peek().and_then(|slots| slots.get(fd));
        slot.map_or(0, |marks| marks.load(Ordering::Acquire))
    }

    fn set(&self, fd: RawFd, bit: u8) -> bool {
        let slots = self.slots.peek().unwrap_or_else(|| self.slots.get());
        let Some(marks) = slots.make(fd) else {
            return false;
        };
        if marks.fetch_or(bit, Ordering::AcqRel) == 0 {
            self.marked.fetch_add(1, Ordering::Relaxed);
        }
        true
    }

    fn clear(&self, fd: RawFd, bits: u8) {
        let Some(marks) = self.slots.peek().and_then(|slots| slots.get(fd)) else {
            return;
        };
        let before = marks.fetch_and(!bits, Ordering::AcqRel);
        if before != 0 && before & !bits == 0 {
            self.marked.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Whether any descriptor is marked.
#[inline]
pub fn any() -> bool {
    MARKS.any()
}

/// A descriptor's marks.
#[inline]
pub fn of(fd: RawFd) -> u8 {
    MARKS.of(fd)
}

/// Marks a descriptor; false when its number is too large. Not for children of vfork.
pub fn set(fd: RawFd, bit: u8) -> bool {
    MARKS.set(fd, bit)
}

/// Takes marks from a descriptor.
pub fn clear(fd: RawFd, bits: u8) {
    MARKS.clear(fd, bits);
}

/// Changes when the file of a pipe is closed: what was found at its number may not be there any more.
pub fn closed() -> usize {
    CLOSED.load(Ordering::Acquire)
}

/// The file of a pipe is about to be closed.
pub fn close(fd: RawFd) {
    CLOSED.fetch_add(1, Ordering::AcqRel);
    clear(fd, FILE);
}

/// Nothing is marked: this is the child of a fork.
pub(super) fn none() {
    MARKS.marked.store(0, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_counts_once_whatever_its_marks() {
        let marks = Marks::new();
        assert!(!marks.any());
        assert!(marks.set(700_000, PIPE) && marks.set(700_000, LENT));
        assert_eq!(marks.of(700_000), PIPE | LENT);
        assert_eq!((marks.of(700_001), marks.of(3), marks.of(-1)), (0, 0, 0));
        marks.clear(700_000, PIPE);
        assert!(marks.any());
        marks.clear(700_000, PIPE | LENT | HEAD);
        marks.clear(700_000, LENT);
        assert!(!marks.any());
        assert!(!marks.set(-1, PIPE) && !marks.set(1 << 20, PIPE));
    }
}
