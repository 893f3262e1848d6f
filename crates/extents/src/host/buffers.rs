// SPDX-License-Identifier: Apache-2.0
//! A list of buffers that is filled from the front.

use std::io::IoSliceMut;

/// Maximum number of buffers in a system call (`UIO_MAXIOV`).
const MAX_SLICES: usize = 1024;

/// The part of a caller's buffers that is not filled yet.
pub(super) struct Buffers<'a, 'b> {
    rest: &'a mut [IoSliceMut<'b>],
    /// Filled bytes of the first buffer.
    filled: usize,
}

impl<'a, 'b> Buffers<'a, 'b> {
    pub(super) fn new(buffers: &'a mut [IoSliceMut<'b>]) -> Self {
        Self {
            rest: buffers,
            filled: 0,
        }
    }

    /// Free bytes in all buffers.
    pub(super) fn len(&self) -> u64 {
        let all: u64 = self.rest.iter().map(|b| b.len() as u64).sum();
        all - self.filled as u64
    }

    /// The next `max` free bytes, or fewer if a system call cannot take them all.
    pub(super) fn next(&mut self, max: u64) -> Vec<IoSliceMut<'_>> {
        self.next_aligned(max, 1)
    }

    /// As [`Buffers::next`], up to the first buffer whose address or length is not a multiple of `align`.
    pub(super) fn next_aligned(&mut self, max: u64, align: usize) -> Vec<IoSliceMut<'_>> {
        let mut left = max;
        let mut skip = self.filled;
        let mut out = Vec::new();
        for buffer in self.rest.iter_mut() {
            if left == 0 || out.len() == MAX_SLICES {
                break;
            }
            let whole = &mut buffer[skip..];
            skip = 0;
            let fits = usize::try_from(left).map_or(whole.len(), |left| left.min(whole.len()));
            let take = fits - fits % align;
            if take > 0 && !(whole.as_ptr() as usize).is_multiple_of(align) {
                break;
            }
            let cut = take < whole.len();
            if take > 0 {
                out.push(IoSliceMut::new(&mut whole[..take]));
                left -= take as u64;
            }
            if cut {
                break;
            }
        }
        out
    }

    /// Marks the next `n` bytes as filled.
    pub(super) fn advance(&mut self, mut n: usize) {
        while n > 0 {
            let Some(first) = self.rest.first() else {
                return;
            };
            let room = first.len() - self.filled;
            if n < room {
                self.filled += n;
                return;
            }
            n -= room;
            self.filled = 0;
            self.rest = &mut std::mem::take(&mut self.rest)[1..];
        }
    }

    /// Fills the next `len` bytes with zeros.
    pub(super) fn zero(&mut self, mut len: u64) {
        while len > 0 {
            let mut done = 0;
            for mut slice in self.next(len) {
                slice.fill(0);
                done += slice.len();
            }
            if done == 0 {
                return;
            }
            self.advance(done);
            len -= done as u64;
        }
    }

    /// Copies a slice, as far as the buffers have room.
    pub(super) fn copy(&mut self, mut from: &[u8]) {
        while !from.is_empty() {
            let mut done = 0;
            for mut slice in self.next(from.len() as u64) {
                let (head, tail) = from.split_at(slice.len());
                slice.copy_from_slice(head);
                from = tail;
                done += head.len();
            }
            if done == 0 {
                return;
            }
            self.advance(done);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_filled_in_order_across_their_borders() {
        let (mut a, mut empty, mut b) = ([9; 3], [0; 0], [9; 5]);
        let mut slices = [&mut a[..], &mut empty[..], &mut b[..]].map(IoSliceMut::new);
        let mut buffers = Buffers::new(&mut slices);
        assert_eq!(buffers.len(), 8);
        buffers.copy(&[1, 2]);
        buffers.zero(2);
        assert_eq!(buffers.len(), 4);
        let sizes: Vec<usize> = buffers.next(u64::MAX).iter().map(|s| s.len()).collect();
        assert_eq!(sizes, [4]);
        buffers.copy(&[3, 4, 5, 6, 7]);
        buffers.zero(1);
        assert_eq!(buffers.len(), 0);
        assert_eq!((a, b), ([1, 2, 0], [0, 3, 4, 5, 6]));
    }

    #[test]
    fn one_call_takes_no_more_slices_than_the_kernel_does() {
        let mut bytes = vec![9; 3000];
        let mut slices: Vec<_> = bytes.chunks_mut(1).map(IoSliceMut::new).collect();
        let mut buffers = Buffers::new(&mut slices);
        assert_eq!(buffers.next(3000).len(), MAX_SLICES);
        buffers.zero(3000);
        assert!(bytes.iter().all(|b| *b == 0));
    }

    #[test]
    fn aligned_room_ends_at_the_first_slice_that_is_not() {
        #[repr(align(16))]
        struct Block([u8; 64]);
        let (mut a, mut b) = (Block([0; 64]), Block([0; 64]));
        let mut slices = [&mut a.0[..], &mut b.0[..40]].map(IoSliceMut::new);
        let mut buffers = Buffers::new(&mut slices);
        let lengths = |buffers: &mut Buffers<'_, '_>, max| -> Vec<usize> {
            let slices = buffers.next_aligned(max, 16);
            slices.iter().map(|s| s.len()).collect()
        };
        assert_eq!(lengths(&mut buffers, 1000), [64, 32]);
        assert_eq!(lengths(&mut buffers, 50), [48]);
        buffers.advance(8);
        assert!(lengths(&mut buffers, 1000).is_empty());
        buffers.advance(8);
        assert_eq!(lengths(&mut buffers, 1000), [48, 32]);
    }
}
