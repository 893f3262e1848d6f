// SPDX-License-Identifier: Apache-2.0
//! The two queues of one network in one decision (section 3.3.2).

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeSet, BinaryHeap};

use super::{Nic, Vf};

/// Priority of a NIC in a queue: pinned ones before all others, then by IF (of the k-th VF, IF/k). The IF of a VM that
/// is not network-bound is -1 here.
#[derive(Debug, Clone, Copy)]
pub(super) struct Priority {
    pub(super) pinned: bool,
    pub(super) intensity: f64,
}

impl Priority {
    /// Of a holder that does not need its VF.
    pub(super) const NONE: Priority = Priority {
        pinned: false,
        intensity: -1.0,
    };

    /// Whether a NIC of GQ with this priority takes the place of `other`: its IF must be higher by the part `margin`.
    pub(super) fn beats(self, other: Priority, margin: f64) -> bool {
        match (self.pinned, other.pinned) {
            (true, false) => true,
            (false, true) => false,
            _ => self.intensity > other.intensity * (1.0 + margin.max(0.0)),
        }
    }
}

impl PartialEq for Priority {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Priority {}

impl PartialOrd for Priority {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Priority {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_pin = self.pinned.cmp(&other.pinned);
        by_pin.then(self.intensity.total_cmp(&other.intensity))
    }
}

/// PQ: the ordered tree of the holders whose VF may be revoked.
#[derive(Debug, Default)]
pub(super) struct Pq(BTreeSet<(Priority, Reverse<Nic>, Vf)>);

impl Pq {
    pub(super) fn insert(&mut self, priority: Priority, nic: Nic, vf: Vf) {
        self.0.insert((priority, Reverse(nic), vf));
    }

    /// The holder that would lose its VF first.
    pub(super) fn lowest(&self) -> Option<(Priority, Nic, Vf)> {
        self.0
            .first()
            .map(|&(priority, Reverse(nic), vf)| (priority, nic, vf))
    }

    pub(super) fn pop_lowest(&mut self) {
        self.0.pop_first();
    }
}

/// GQ: the NICs that want a VF. Of equals the one of the lowest number comes first.
#[derive(Debug, Default)]
pub(super) struct Gq(BinaryHeap<(Priority, Reverse<Nic>)>);

impl Gq {
    pub(super) fn push(&mut self, priority: Priority, nic: Nic) {
        self.0.push((priority, Reverse(nic)));
    }

    /// Removes the NIC that gets a VF first.
    pub(super) fn pop_highest(&mut self) -> Option<(Priority, Nic)> {
        self.0.pop().map(|(priority, Reverse(nic))| (priority, nic))
    }
}
