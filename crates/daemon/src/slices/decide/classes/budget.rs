// SPDX-License-Identifier: Apache-2.0
//! How often VMs may be tried again: a trial takes its VM and the neighbours through windows of both classes.

use std::collections::{BTreeSet, VecDeque};

use viola_host::VmId;
use viola_policy::slices::{MS, Nanos};

/// Most trials of an hour that concern one VM, first trials left out. A trial takes up to 72 s, so that is an eighth of the time.
pub const MAX_REPEATED_TRIALS: usize = 6;
/// Time over which they are counted, ns.
const SPAN: Nanos = 3_600_000 * MS;

/// The repeated trials of the last hour.
#[derive(Debug, Default)]
pub struct Budget {
    /// When each began, ns, and the VMs that it concerned; the oldest first.
    begun: VecDeque<(Nanos, BTreeSet<VmId>)>,
}

impl Budget {
    /// Whether another trial at `at` (ns) may concern this VM.
    pub fn has_room(&self, id: &VmId, at: Nanos) -> bool {
        let recent =
            (self.begun.iter()).filter(|(begun, vms)| at < begun + SPAN && vms.contains(id));
        recent.count() < MAX_REPEATED_TRIALS
    }

    /// Counts a trial that begins at `at` (ns).
    pub fn spend(&mut self, at: Nanos, concerned: BTreeSet<VmId>) {
        while self
            .begun
            .front()
            .is_some_and(|(begun, _)| at >= begun + SPAN)
        {
            self.begun.pop_front();
        }
        self.begun.push_back((at, concerned));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::vm;

    #[test]
    fn a_vm_is_concerned_by_six_trials_in_any_hour() {
        let [web, db, far] = ["web", "db", "far"].map(|name| vm(name, 7, &[&[1]]).id);
        let mut budget = Budget::default();
        for k in 0..6 {
            assert!(budget.has_room(&web, k * 60_000 * MS));
            budget.spend(k * 60_000 * MS, [web.clone(), db.clone()].into());
        }
        assert!(!budget.has_room(&web, 3_599_999 * MS) && !budget.has_room(&db, 3_599_999 * MS));
        assert!(budget.has_room(&far, 3_599_999 * MS) && budget.has_room(&web, 3_600_000 * MS));
    }
}
