// SPDX-License-Identifier: Apache-2.0
//! A set of VMs of one core.

use super::MAX_VMS;

/// VMs of one core by index, one bit each, so that finding a few does not walk all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct VmSet(u64);

const _: () = assert!(MAX_VMS <= u64::BITS as usize);

impl VmSet {
    /// The first `n` VMs.
    pub(crate) fn first_n(n: usize) -> Self {
        Self(match n {
            0 => 0,
            n => u64::MAX >> (MAX_VMS.saturating_sub(n)),
        })
    }

    pub(crate) fn contains(self, i: usize) -> bool {
        self.0 & Self::bit(i) != 0
    }

    /// Inserts VM `i` if `so`.
    pub(crate) fn insert_if(&mut self, i: usize, so: bool) {
        self.0 |= u64::from(so) << (i % MAX_VMS);
    }

    /// Inserts or removes VM `i`.
    pub(crate) fn set(&mut self, i: usize, is_in: bool) {
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

    /// VMs that are in both sets.
    pub(crate) fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// VMs that are in this set but not in `other`.
    pub(crate) fn difference(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The indexes in ascending order.
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
    fn a_set_returns_its_members_in_order() {
        let mut set = VmSet::default();
        assert!(set.is_empty() && set.iter().next().is_none());
        for i in [63, 5, 0] {
            set.set(i, true);
        }
        set.set(5, false);
        set.set(7, false);
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 63]);
        assert!(set.contains(0) && !set.contains(5) && set.len() == 2);
        let other = VmSet::first_n(6);
        assert_eq!(set.intersection(other).iter().collect::<Vec<_>>(), [0]);
        assert_eq!(set.difference(other).iter().collect::<Vec<_>>(), [63]);
        assert_eq!((VmSet::first_n(0).len(), VmSet::first_n(64).len()), (0, 64));
    }
}
