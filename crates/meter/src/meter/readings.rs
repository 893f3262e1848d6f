// SPDX-License-Identifier: Apache-2.0
//! Counters of a VM at a moment, and what they counted between two moments. Only the accounting program has them.

use viola_host::VmId;

use super::Meter;
use super::groups::now;
use crate::acct::HistCounters;
use crate::hist::{Histogram, Waits};

/// Counters of a VM at a moment. They grow from the moment at which the VM was first followed, and wrap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmCounters {
    /// The moment, ns of CLOCK_MONOTONIC.
    pub at: u64,
    /// CPU time of all its threads, ns.
    pub run: u64,
    /// The delays of its packets.
    pub packets: HistCounters,
    /// The waits of each vCPU.
    pub waits: Vec<HistCounters>,
}

/// What the counters of a VM counted between two moments.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Span {
    /// CPU time of all its threads, ns.
    pub run: u64,
    /// The delays of its packets.
    pub packets: Histogram,
    /// The waits of all vCPUs.
    pub waits: Waits,
}

impl VmCounters {
    /// What was counted since an earlier moment.
    pub fn since(&self, earlier: &Self) -> Span {
        let mut span = Span {
            run: self.run.saturating_sub(earlier.run),
            ..Span::default()
        };
        span.packets.add_difference(&self.packets, &earlier.packets);
        for (now, before) in self.waits.iter().zip(&earlier.waits) {
            span.waits.time += self.at.saturating_sub(earlier.at);
            span.waits.histogram.add_difference(now, before);
        }
        span
    }
}

impl Meter {
    /// The counters of a VM now; `None` for a VM that is not followed, and without the accounting program.
    pub fn counters(&self, id: &VmId) -> Option<VmCounters> {
        let (acct, vm) = self.counted(id)?;
        let at = now();
        let accounts = acct.accounts();
        let groups = vm.vcpus.iter().chain([&vm.service]);
        let run = groups.map(|group| accounts.times(group.account).run_until(at));
        let waits = vm.vcpus.iter();
        Some(VmCounters {
            at,
            run: run.sum(),
            packets: acct.delays().vm(vm.index).packets,
            waits: waits.map(|g| accounts.waits(g.account)).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_has_what_was_counted_between_two_moments() {
        let mut before = VmCounters {
            at: 1_000,
            run: 50,
            packets: HistCounters::ZERO,
            waits: vec![HistCounters::ZERO; 2],
        };
        before.packets.counts[7] = u32::MAX;
        let mut after = before.clone();
        (after.at, after.run) = (4_000, 90);
        after.packets.counts[7] = 2;
        after.packets.sums[7] = 12_000;
        after.waits[1].counts[3] = 5;
        let span = after.since(&before);
        assert_eq!(span.run, 40);
        assert_eq!((span.packets.count(), span.packets.sum()), (3, 12_000));
        assert_eq!((span.waits.time, span.waits.histogram.count()), (6_000, 5));
    }
}
