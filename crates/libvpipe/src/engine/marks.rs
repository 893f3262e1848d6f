// SPDX-License-Identifier: Apache-2.0
//! Marks of descriptors, cheap enough for a check in every system call: while nothing is piped it is one relaxed load
//! of a counter.

use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use super::process::{PerProcess, in_child};

/// The descriptor has a pipe, or an error that the program must still get.
pub const PIPE: u8 = 1;
/// The library has sent the descriptor to the agent since the program opened it.
pub const LENT: u8 = 2;
/// The last write was the head of a response.
pub const HEAD: u8 = 4;

/// The descriptor was checked and is the file of a pipe; it has not been closed since.
pub const FILE: u8 = 8;

/// Number of closed descriptors with that mark.
static FILES_CLOSED: AtomicUsize = AtomicUsize::new(0);

static MARKS: Marks = Marks::new();

const CHUNK_LEN: usize = 1024;
const MAX_CHUNKS: usize = 1024;
/// Descriptors below this number can have marks.
pub const MAX_DESCRIPTORS: u32 = (CHUNK_LEN * MAX_CHUNKS) as u32;

/// A value per descriptor below 2^20. Reading takes no lock.
pub struct FdSlots<T>(Box<[OnceLock<Box<[T]>>]>);

impl<T> Default for FdSlots<T> {
    fn default() -> Self {
        Self((0..MAX_CHUNKS).map(|_| OnceLock::new()).collect())
    }
}

impl<T: Default> FdSlots<T> {
    /// The value of a descriptor, if its chunk exists.
    pub fn get(&self, fd: RawFd) -> Option<&T> {
        let fd = usize::try_from(fd).ok()?;
        self.0.get(fd / CHUNK_LEN)?.get()?.get(fd % CHUNK_LEN)
    }

    /// The value of a descriptor, made if needed; `None` for a number that is too large.
    pub fn get_or_make(&self, fd: RawFd) -> Option<&T> {
        let fd = usize::try_from(fd).ok()?;
        let chunk = self.0.get(fd / CHUNK_LEN)?;
        let chunk = chunk.get_or_init(|| (0..CHUNK_LEN).map(|_| T::default()).collect());
        chunk.get(fd % CHUNK_LEN)
    }
}

/// Marks of a process's descriptors.
struct Marks {
    /// Descriptors that have a mark.
    marked: AtomicUsize,
    slots: PerProcess<FdSlots<AtomicU8>>,
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
        if self.any() { self.load(fd) } else { 0 }
    }

    #[cold]
    fn load(&self, fd: RawFd) -> u8 {
        let slot = self.slots.peek().and_then(|slots| slots.get(fd));
        slot.map_or(0, |marks| marks.load(Ordering::Acquire))
    }

    fn set(&self, fd: RawFd, bit: u8) -> bool {
        let slots = self.slots.peek().unwrap_or_else(|| {
            in_child(reset_after_fork);
            self.slots.get()
        });
        let Some(marks) = slots.get_or_make(fd) else {
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

/// Sets a mark; false when the number is too large. Not for children of vfork.
pub fn set(fd: RawFd, bit: u8) -> bool {
    MARKS.set(fd, bit)
}

/// Clears marks.
pub fn clear(fd: RawFd, bits: u8) {
    MARKS.clear(fd, bits);
}

/// Number of closed files of pipes. While it stays the same, a descriptor that was checked before
/// is still the same file.
pub fn files_closed() -> usize {
    FILES_CLOSED.load(Ordering::Acquire)
}

/// The file of a pipe is about to be closed.
pub fn file_closing(fd: RawFd) {
    FILES_CLOSED.fetch_add(1, Ordering::AcqRel);
    clear(fd, FILE);
}

/// Clears all marks in the child of a fork.
fn reset_after_fork() {
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
