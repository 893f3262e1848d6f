// SPDX-License-Identifier: Apache-2.0
//! Descriptors whose `splice` calls go straight to the kernel: a connection that is not relayed costs no extra system
//! call.
//!
//! A program that counts down asks each time for the rest of a known length. It keeps its bypass as
//! long as each request is the rest of the one before. The library checks the connection again at
//! any other request, for example when the descriptor's number now belongs to another connection.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use vpipe::engine::{FdSlots, PerProcess};

/// A request for this many bytes or more means that the program does not know the length.
pub const UNBOUNDED_BYTES: u64 = 1 << 30;
/// A bypass of a known length ends after 2^24 bytes (16 MiB); then the library checks the
/// connection again.
const RECHECK_SHIFT: u32 = 24;

/// The bypass of a descriptor, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Expected {
    /// The next request in bytes if the program counts down; 0 without a bypass.
    next: u64,
    /// The first request was [`UNBOUNDED_BYTES`] or more.
    unbounded: bool,
}

impl Expected {
    fn from_word(word: u64) -> Self {
        Self {
            next: word >> 1,
            unbounded: word & 1 != 0,
        }
    }

    fn word(self) -> u64 {
        self.next << 1 | u64::from(self.unbounded)
    }

    /// The bypass for a request of this size; `None` when the connection must be checked.
    fn on_request(self, count: u64) -> Option<Self> {
        if count >= UNBOUNDED_BYTES {
            return Some(Self {
                next: count,
                unbounded: true,
            });
        }
        (self.next != 0 && self.next == count).then_some(self)
    }

    /// The bypass after `n` bytes, at most as many as requested.
    fn after_bytes(self, n: u64) -> Self {
        let next = self.next.saturating_sub(n);
        let far = self.next >> RECHECK_SHIFT != next >> RECHECK_SHIFT;
        if n == 0 || far && !self.unbounded {
            return Self::default();
        }
        Self { next, ..self }
    }
}

static EXPECTED: PerProcess<FdSlots<AtomicU64>> = PerProcess::new();

fn word(fd: RawFd) -> Option<&'static AtomicU64> {
    EXPECTED.peek()?.get(fd)
}

fn store(fd: RawFd, count: Expected) {
    // `peek` makes no system call
    let all = EXPECTED.peek().unwrap_or_else(|| EXPECTED.get());
    if let Some(word) = all.get_or_make(fd) {
        word.store(count.word(), Ordering::Relaxed);
    }
}

fn load(fd: RawFd) -> Expected {
    word(fd).map_or(Expected::default(), |word| {
        Expected::from_word(word.load(Ordering::Relaxed))
    })
}

/// Whether a request for `count` bytes bypasses the library.
pub fn is_bypassed(fd: RawFd, count: u64) -> bool {
    load(fd).on_request(count).is_some()
}

/// Whether the request continues one for [`UNBOUNDED_BYTES`] or more.
pub fn is_unbounded(fd: RawFd, count: u64) -> bool {
    load(fd)
        .on_request(count)
        .is_some_and(|count| count.unbounded)
}

/// Counts `n` bytes that the kernel moved for a bypassed request for `count` bytes.
pub fn count_bytes(fd: RawFd, count: u64, n: u64) {
    if let Some(count) = load(fd).on_request(count) {
        store(fd, count.after_bytes(n));
    }
}

/// Starts a bypass that expects a request of `next` bytes.
pub fn bypass(fd: RawFd, next: u64) {
    let unbounded = false;
    store(fd, Expected { next, unbounded });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_unbounded_request_is_bypassed_until_its_end() {
        let fd = 600_000;
        assert!(!is_bypassed(fd, UNBOUNDED_BYTES - 1) && is_bypassed(fd, UNBOUNDED_BYTES));
        let mut count = UNBOUNDED_BYTES;
        while count > 100_000_000 {
            assert!(is_bypassed(fd, count) && is_unbounded(fd, count));
            count_bytes(fd, count, 65_536);
            count -= 65_536;
        }
        assert!(!is_bypassed(fd, count + 1) && is_bypassed(fd, count));
        // its end: what comes next is another answer
        count_bytes(fd, count, 0);
        assert!(!is_bypassed(fd, count));
    }

    #[test]
    fn a_bypass_of_a_bounded_request_ends_after_16_mib() {
        let fd = 600_001;
        let mut count: u64 = 60 << 20;
        bypass(fd, count);
        let mut looks = 0;
        while count > 1 << 20 {
            if is_bypassed(fd, count) {
                assert!(!is_unbounded(fd, count));
                count_bytes(fd, count, 65_536);
            } else {
                looks += 1;
                bypass(fd, count - 65_536);
            }
            count -= 65_536;
        }
        assert_eq!(looks, 3);
    }

    proptest! {
        #[test]
        fn only_the_expected_request_is_bypassed(
            next in 0..UNBOUNDED_BYTES, unbounded: bool, count in 0..UNBOUNDED_BYTES, n: u64
        ) {
            let known = Expected { next, unbounded };
            prop_assert_eq!(Expected::from_word(known.word()), known);
            prop_assert_eq!(known.on_request(count).is_some(), count == next && next != 0);
            let then = known.after_bytes(n);
            prop_assert!(then.next < UNBOUNDED_BYTES && then.next <= next);
            prop_assert!(then == Expected::default() || then.unbounded == unbounded);
        }
    }
}
