// SPDX-License-Identifier: Apache-2.0
//! The two queues of one network (section 3.3.2), as they stand in one decision.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeSet, BinaryHeap};

use super::{Nic, Vf};

/// What a place in a queue is worth: pinned before all others, then by IF (of the k-th VF, IF/k). A VM that is not
/// network-bound has an IF of -1 here.
#[derive(Debug, Clone, Copy)]
pub(super) struct Worth {
    pub(super) pinned: bool,
    pub(super) intensity: f64,
}

impl Worth {
    /// Of a holder that does not need its VF.
    pub(super) const NONE: Worth = Worth {
        pinned: false,
        intensity: -1.0,
    };

    /// Whether this one of GQ may take the place of `other`, which must be exceeded by the part `margin`.
    pub(super) fn beats(self, other: Worth, margin: f64) -> bool {
        match (self.pinned, other.pinned) {
            (true, false) => true,
            (false, true) => false,
            _ => self.intensity > other.intensity * (1.0 + margin.max(0.0)),
        }
    }
}

impl PartialEq for Worth {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Worth {}

impl PartialOrd for Worth {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Worth {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_pin = self.pinned.cmp(&other.pinned);
        by_pin.then(self.intensity.total_cmp(&other.intensity))
    }
}

/// PQ: the ordered tree of those that hold VFs, without those that must keep theirs.
#[derive(Debug, Default)]
pub(super) struct Pq(BTreeSet<(Worth, Reverse<Nic>, Vf)>);

impl Pq {
    pub(super) fn insert(&mut self, worth: Worth, nic: Nic, vf: Vf) {
        self.0.insert((worth, Reverse(nic), vf));
    }

    /// Who would lose its VF first.
    pub(super) fn lowest(&self) -> Option<(Worth, Nic, Vf)> {
        self.0
            .first()
            .map(|&(worth, Reverse(nic), vf)| (worth, nic, vf))
    }

    pub(super) fn pop_lowest(&mut self) {
        self.0.pop_first();
    }
}

/// GQ: those that would have a VF. Of equals the lowest number is first.
#[derive(Debug, Default)]
pub(super) struct Gq(BinaryHeap<(Worth, Reverse<Nic>)>);

impl Gq {
    pub(super) fn push(&mut self, worth: Worth, nic: Nic) {
        self.0.push((worth, Reverse(nic)));
    }

    /// Takes out who gets a VF first.
    pub(super) fn pop_highest(&mut self) -> Option<(Worth, Nic)> {
        self.0.pop().map(|(worth, Reverse(nic))| (worth, nic))
    }
}
