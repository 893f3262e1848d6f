// SPDX-License-Identifier: Apache-2.0
//! Connections that are spliced from and left alone, by the numbers of their descriptors: what is not relayed costs no system call.
//!
//! A program that counts down is left alone as long as it goes on counting. What does not fit is looked at again: a number that is
//! another's meanwhile means one look more.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use vpipe::engine::PerProcess;
use vpipe::engine::marks::Slots;

/// Who asks for so much asks for all that may ever come.
pub const ENDLESS: u64 = 1 << 30;
/// Whoever was left alone for another reason is looked at again after so many bytes: 2^24.
const AGAIN: u32 = 24;

/// What is remembered of a descriptor, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Count {
    /// What the program asks for next when it goes on, in bytes; 0 when it is not left alone.
    next: u64,
    /// It began with [`ENDLESS`].
    endless: bool,
}

impl Count {
    fn from_word(word: u64) -> Self {
        Self {
            next: word >> 1,
            endless: word & 1 != 0,
        }
    }

    fn word(self) -> u64 {
        self.next << 1 | u64::from(self.endless)
    }

    /// What to make of somebody who asks for so much; `None` when it is to be looked at.
    fn asked(self, count: u64) -> Option<Self> {
        if count >= ENDLESS {
            return Some(Self {
                next: count,
                endless: true,
            });
        }
        (self.next != 0 && self.next == count).then_some(self)
    }

    /// So many bytes have come, no more than were asked for.
    fn moved(self, n: u64) -> Self {
        let next = self.next.saturating_sub(n);
        let far = self.next >> AGAIN != next >> AGAIN;
        if n == 0 || far && !self.endless {
            return Self::default();
        }
        Self { next, ..self }
    }
}

static ALL: PerProcess<Slots<AtomicU64>> = PerProcess::new();

fn word(fd: RawFd) -> Option<&'static AtomicU64> {
    ALL.peek()?.get(fd)
}

fn put(fd: RawFd, count: Count) {
    // without a system call when it is there
    let all = ALL.peek().unwrap_or_else(|| ALL.get());
    if let Some(word) = all.make(fd) {
        word.store(count.word(), Ordering::Relaxed);
    }
}

fn of(fd: RawFd) -> Count {
    word(fd).map_or(Count::default(), |word| {
        Count::from_word(word.load(Ordering::Relaxed))
    })
}

/// Whether whoever asks this descriptor for so much is left alone.
pub fn is_left(fd: RawFd, count: u64) -> bool {
    of(fd).asked(count).is_some()
}

/// Whether this is a part of what began with [`ENDLESS`].
pub fn is_endless(fd: RawFd, count: u64) -> bool {
    of(fd).asked(count).is_some_and(|count| count.endless)
}

/// So many bytes have come of a descriptor that is left alone.
pub fn moved(fd: RawFd, count: u64, n: u64) {
    if let Some(count) = of(fd).asked(count) {
        put(fd, count.moved(n));
    }
}

/// Leaves alone whoever asks for so much next.
pub fn leave(fd: RawFd, next: u64) {
    let endless = false;
    put(fd, Count { next, endless });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn who_counts_down_from_as_much_as_there_may_be_is_left_alone_for_ever() {
        let fd = 600_000;
        assert!(!is_left(fd, ENDLESS - 1) && is_left(fd, ENDLESS));
        let mut count = ENDLESS;
        while count > 100_000_000 {
            assert!(is_left(fd, count) && is_endless(fd, count));
            moved(fd, count, 65_536);
            count -= 65_536;
        }
        assert!(!is_left(fd, count + 1) && is_left(fd, count));
        // its end: what comes next is another answer
        moved(fd, count, 0);
        assert!(!is_left(fd, count));
    }

    #[test]
    fn who_could_not_be_relayed_is_looked_at_again() {
        let fd = 600_001;
        let mut count: u64 = 60 << 20;
        leave(fd, count);
        let mut looks = 0;
        while count > 1 << 20 {
            if is_left(fd, count) {
                assert!(!is_endless(fd, count));
                moved(fd, count, 65_536);
            } else {
                looks += 1;
                leave(fd, count - 65_536);
            }
            count -= 65_536;
        }
        assert_eq!(looks, 3);
    }

    proptest! {
        #[test]
        fn nobody_is_left_alone_who_asks_for_something_else(
            next in 0..ENDLESS, endless: bool, count in 0..ENDLESS, n: u64
        ) {
            let known = Count { next, endless };
            prop_assert_eq!(Count::from_word(known.word()), known);
            prop_assert_eq!(known.asked(count).is_some(), count == next && next != 0);
            let then = known.moved(n);
            prop_assert!(then.next < ENDLESS && then.next <= next);
            prop_assert!(then == Count::default() || then.endless == endless);
        }
    }
}
