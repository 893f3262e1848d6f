// SPDX-License-Identifier: Apache-2.0
//! Decides what to read ahead for a sequential reader.

use std::ops::Range;

/// First window of a sequential reader, in bytes.
const MIN_WINDOW_BYTES: u64 = 512 << 10;
/// Largest window, in bytes.
const MAX_WINDOW_BYTES: u64 = 8 << 20;
/// A read this close to the end of the previous one still counts as sequential: a guest has several reads in flight,
/// which arrive in any order.
const MAX_REORDER_BYTES: u64 = 512 << 10;

/// Read-ahead state of one reader of one file.
///
/// The kernel's readahead works per descriptor, which all readers of an image share, and does not know where a file
/// continues after an extent.
#[derive(Clone, Debug, Default)]
pub struct Readahead {
    /// End of the bytes read.
    next: u64,
    /// End of the bytes requested ahead.
    ahead: u64,
    /// Bytes to stay ahead; 0 for a random reader.
    window: u64,
}

impl Readahead {
    /// Records a read of `len` bytes at `offset` of a file of `file_len` bytes. Returns the range for
    /// [`Image::prefetch`](super::Image::prefetch) when more should be read ahead. A file read from its start counts
    /// as sequential.
    pub fn record(&mut self, offset: u64, len: u64, file_len: u64) -> Option<Range<u64>> {
        let end = offset.saturating_add(len);
        if offset.abs_diff(self.next) > MAX_REORDER_BYTES {
            *self = Self {
                next: end,
                ahead: end,
                window: 0,
            };
            return None;
        }
        self.next = self.next.max(end);
        let from = self.ahead.max(self.next);
        if from - self.next > self.window / 2 {
            return None;
        }
        self.window = (self.window * 2).clamp(MIN_WINDOW_BYTES, MAX_WINDOW_BYTES);
        let to = self.next.saturating_add(self.window).min(file_len);
        if from >= to {
            return None;
        }
        self.ahead = to;
        Some(from..to)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_reader_in_order_is_served_ahead_and_nothing_is_asked_for_twice() {
        let mut readahead = Readahead::default();
        let file = 64 * MIB;
        let (mut asked, mut calls) = (128 << 10, 0);
        for i in 0..512 {
            if let Some(range) = readahead.record(i * (128 << 10), 128 << 10, file) {
                assert_eq!(range.start, asked);
                asked = range.end;
                calls += 1;
            }
            assert!(asked >= ((i + 1) * (128 << 10)).min(file));
        }
        assert_eq!(asked, file);
        assert!(calls < 24, "{calls} calls for 64 MiB");
    }

    #[test]
    fn a_reader_that_jumps_brings_nothing_in() {
        let mut readahead = Readahead::default();
        for i in 1..100 {
            assert_eq!(
                readahead.record(i * 37 % 64 * MIB + 3 * MIB, 4096, 128 * MIB),
                None
            );
        }
    }

    #[test]
    fn reads_out_of_order_by_a_little_are_in_order() {
        let mut readahead = Readahead::default();
        let mut asked = 0;
        for i in [1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12] {
            if let Some(range) = readahead.record(i * (128 << 10), 128 << 10, 64 * MIB) {
                asked = range.end;
            }
        }
        assert!(asked > 2 * MIB, "{asked}");
    }

    proptest! {
        #[test]
        fn never_beyond_the_file_nor_more_than_the_window(
            reads in prop::collection::vec((any::<u64>(), any::<u64>()), 0..50), file: u64, small: bool,
        ) {
            let mut readahead = Readahead::default();
            for (offset, len) in reads {
                let (offset, len) = if small { (offset % MIB, len % MIB) } else { (offset, len) };
                if let Some(range) = readahead.record(offset, len, file) {
                    prop_assert!(range.start < range.end && range.end <= file);
                    prop_assert!(range.end - range.start <= MAX_WINDOW_BYTES);
                }
            }
        }
    }
}
