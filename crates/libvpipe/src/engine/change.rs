// SPDX-License-Identifier: Apache-2.0
//! A condition that threads wait for without a lock: a condition variable would unlock the table without doing the work
//! that is [deferred](super::marks::defer) until then.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::thread::futex;

/// A counter of changes.
#[derive(Debug, Default)]
pub(super) struct Change(AtomicU32);

impl Change {
    pub const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// The number of changes, for [`Change::wait`].
    pub fn now(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }

    /// Counts a change and wakes no thread.
    pub fn note(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    /// Wakes all threads.
    pub fn wake(&self) {
        let _ = futex::wake(&self.0, futex::Flags::PRIVATE, i32::MAX as u32);
    }

    /// Counts a change and wakes all threads.
    pub fn notify_all(&self) {
        self.note();
        self.wake();
    }

    /// Waits until there are more changes than `seen`, for `time` at most; also returns at a signal, and without a
    /// reason.
    pub fn wait(&self, seen: u32, time: Option<Duration>) {
        let time = time.map(|time| rustix::event::Timespec {
            tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: time.subsec_nanos().into(),
        });
        let _ = futex::wait(&self.0, futex::Flags::PRIVATE, seen, time.as_ref());
    }
}
