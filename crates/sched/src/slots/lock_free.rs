// SPDX-License-Identifier: Apache-2.0
//! What makes the shared memory safe to use without a lock: a sequence count, and a ring that loses the oldest.

use std::sync::atomic::Ordering;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, fence};

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, fence};

/// The value of a counter that no other thread writes.
#[cfg(not(loom))]
fn own(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// The value of a counter that no other thread writes; loom checks that. It is no load for loom, which forgets the loads of
/// other threads when a thread loads before it stores, and then leaves orders out.
#[cfg(loom)]
fn own(counter: &AtomicU64) -> u64 {
    // SAFETY: the only writer is the thread that calls this.
    unsafe { counter.unsync_load() }
}

/// Guards data that one process writes and others copy. It is odd during a write.
#[repr(transparent)]
pub(super) struct SequenceCount(AtomicU64);

impl SequenceCount {
    /// Lets `write` change the data; returns the new count and the result. Only one thread of one process may call this.
    pub(super) fn write<T>(&self, write: impl FnOnce() -> T) -> (u64, T) {
        let seq = own(&self.0);
        self.0.store(seq + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        let result = write();
        fence(Ordering::Release);
        self.0.store(seq + 2, Ordering::Release);
        (seq + 2, result)
    }

    /// Lets `copy` copy the data and returns its count; `None` when the copy may be torn. `copy` must cope with torn data.
    pub(super) fn read(&self, copy: impl FnOnce()) -> Option<u64> {
        let seq = self.0.load(Ordering::Acquire);
        if seq % 2 == 1 {
            return None;
        }
        copy();
        fence(Ordering::Acquire);
        (self.0.load(Ordering::Relaxed) == seq).then_some(seq)
    }

    /// The count of the newest data.
    pub(super) fn current(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// The last `N` rows that one process reported to another. A row is one word, so it is never torn.
#[repr(C)]
pub(super) struct LastRows<const N: usize> {
    rows: [AtomicU64; N],
    /// Number of rows ever written.
    written: AtomicU64,
}

impl<const N: usize> LastRows<N> {
    /// Adds a row, in the place of the oldest. Only one thread of one process may call this.
    pub(super) fn push(&self, row: u64) {
        let n = own(&self.written);
        // a reader that sees this row sees the count `n` too
        fence(Ordering::Release);
        self.rows[n as usize % N].store(row, Ordering::Relaxed);
        self.written.store(n + 1, Ordering::Release);
    }

    /// Passes the rows since the count `from` to `take`; returns the new count, and whether none was lost. Rows may be added
    /// during this call: a row counts as lost as soon as the next one that is added takes its place.
    pub(super) fn read(&self, from: u64, mut take: impl FnMut(u64)) -> (u64, bool) {
        let n = self.written.load(Ordering::Acquire);
        let first = from.max(n.saturating_sub(N as u64));
        for at in first..n {
            take(self.rows[at as usize % N].load(Ordering::Relaxed));
        }
        fence(Ordering::Acquire);
        // row `now` may be half added: it takes the place of row `now - N`
        let now = self.written.load(Ordering::Relaxed);
        let is_whole = n <= first || now - first < N as u64;
        (n, first == from && is_whole)
    }
}

#[cfg(test)]
impl SequenceCount {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(0))
    }
}

#[cfg(test)]
impl<const N: usize> LastRows<N> {
    pub(super) fn new() -> Self {
        Self {
            rows: std::array::from_fn(|_| AtomicU64::new(0)),
            written: AtomicU64::new(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_made_during_a_write_is_not_used() {
        let seq = SequenceCount::new();
        assert_eq!(seq.read(|| ()), Some(0));
        let (count, during) = seq.write(|| seq.read(|| ()));
        assert_eq!((count, during), (2, None));
        let across = seq.read(|| assert_eq!(seq.write(|| ()).0, 4));
        assert_eq!((across, seq.current()), (None, 4));
    }

    #[test]
    fn a_row_that_is_replaced_while_rows_are_read_is_lost() {
        let rows = LastRows::<4>::new();
        (0..3).for_each(|row| rows.push(row));
        assert_eq!(rows.read(0, |_| ()), (3, true));
        let (n, is_whole) = rows.read(0, |row| {
            if row == 0 {
                // the fifth row takes the place of the first
                rows.push(3);
                rows.push(4);
            }
        });
        assert_eq!((n, is_whole), (3, false));
        assert_eq!(rows.read(3, |_| ()), (5, true));
    }
}
