// SPDX-License-Identifier: Apache-2.0
//! Sets of the VMs of a core.

use super::MAX_VMS;

/// Some of the VMs of a core, by index: one bit each, so that nobody walks through all of them to find a few.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Set(u64);

const _: () = assert!(MAX_VMS <= u64::BITS as usize);

impl Set {
    /// The first `n`.
    pub(crate) fn first(n: usize) -> Self {
        Self(match n {
            0 => 0,
            n => u64::MAX >> (MAX_VMS.saturating_sub(n)),
        })
    }

    pub(crate) fn has(self, i: usize) -> bool {
        self.0 & Self::bit(i) != 0
    }

    /// Puts one in, if so.
    pub(crate) fn add_if(&mut self, i: usize, so: bool) {
        self.0 |= u64::from(so) << (i % MAX_VMS);
    }

    /// Puts one in, or takes it out.
    pub(crate) fn put(&mut self, i: usize, is_in: bool) {
        self.0 = self.0 & !Self::bit(i) | u64::from(is_in) << (i % MAX_VMS);
    }

    fn bit(i: usize) -> u64 {
        1 << (i % MAX_VMS)
    }

    pub(crate) fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Those that are in both.
    pub(crate) fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Those that are not in the other one.
    pub(crate) fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// From the lowest to the highest.
    pub(crate) fn iter(self) -> impl Iterator<Item = usize> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let next = (left != 0).then(|| left.trailing_zeros() as usize);
            left &= left.wrapping_sub(1);
            next
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_finds_what_was_put_in_and_in_order() {
        let mut set = Set::default();
        assert!(set.is_empty() && set.iter().next().is_none());
        for i in [63, 5, 0] {
            set.put(i, true);
        }
        set.put(5, false);
        set.put(7, false);
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 63]);
        assert!(set.has(0) && !set.has(5) && set.len() == 2);
        let other = Set::first(6);
        assert_eq!(set.and(other).iter().collect::<Vec<_>>(), [0]);
        assert_eq!(set.without(other).iter().collect::<Vec<_>>(), [63]);
        assert_eq!((Set::first(0).len(), Set::first(64).len()), (0, 64));
    }
}
