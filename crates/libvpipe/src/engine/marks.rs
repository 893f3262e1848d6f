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

/// Descriptors that have a mark.
static MARKED: AtomicUsize = AtomicUsize::new(0);
static MARKS: PerProcess<Slots<AtomicU8>> = PerProcess::new();

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

/// Whether any descriptor is marked.
#[inline]
pub fn any() -> bool {
    MARKED.load(Ordering::Relaxed) != 0
}

/// A descriptor's marks.
#[inline]
pub fn of(fd: RawFd) -> u8 {
    if any() { look(fd) } else { 0 }
}

#[cold]
fn look(fd: RawFd) -> u8 {
    let slot = MARKS.peek().and_then(|slots| slots.get(fd));
    slot.map_or(0, |marks| marks.load(Ordering::Acquire))
}

/// Marks a descriptor; false when its number is too large. Not for children of vfork.
pub fn set(fd: RawFd, bit: u8) -> bool {
    let slots = MARKS.peek().unwrap_or_else(|| MARKS.get());
    let Some(marks) = slots.make(fd) else {
        return false;
    };
    if marks.fetch_or(bit, Ordering::AcqRel) == 0 {
        MARKED.fetch_add(1, Ordering::Relaxed);
    }
    true
}

/// Takes marks from a descriptor.
pub fn clear(fd: RawFd, bits: u8) {
    let Some(marks) = MARKS.peek().and_then(|slots| slots.get(fd)) else {
        return;
    };
    let before = marks.fetch_and(!bits, Ordering::AcqRel);
    if before != 0 && before & !bits == 0 {
        MARKED.fetch_sub(1, Ordering::Relaxed);
    }
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
    MARKED.store(0, Ordering::Relaxed);
}

/// For tests of this program that mark something.
#[cfg(test)]
pub static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_counts_once_whatever_its_marks() {
        let _alone = ALONE.lock().unwrap();
        assert!(!any());
        assert!(set(700_000, PIPE) && set(700_000, LENT));
        assert_eq!(of(700_000), PIPE | LENT);
        assert_eq!((of(700_001), of(3), of(-1)), (0, 0, 0));
        clear(700_000, PIPE);
        assert!(any());
        clear(700_000, PIPE | LENT | HEAD);
        clear(700_000, LENT);
        assert!(!any());
        assert!(!set(-1, PIPE) && !set(1 << 20, PIPE));
    }
}
