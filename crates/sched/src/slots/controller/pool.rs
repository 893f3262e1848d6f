// SPDX-License-Identifier: Apache-2.0
//! Exchanges the VMs' times between the cores of vTurbo's pools.

use viola_policy::slices::Nanos;
use viola_policy::turbo::{OtherCoreUsage, PoolScheduler, portion};

use super::Core;
use crate::plan::Algorithm;
use crate::slots::shared::{SharedCore, SharedMemory};

/// Interval at which a core of a pool learns what its VMs ran on other cores, ns.
const POOL_EXCHANGE_INTERVAL: Nanos = 1_000_000;

impl Core {
    /// Reports to the core's scheduler what its VMs ran on other cores of the pools.
    pub(super) fn exchange_pool_usage(&mut self, shared: &SharedMemory, now: Nanos) {
        if !self.plan.algorithm.is_pooled()
            || now < self.exchanged_at.saturating_add(POOL_EXCHANGE_INTERVAL)
        {
            return;
        }
        self.exchanged_at = now;
        self.elsewhere.clear();
        for (i, &index) in self.indexes.iter().enumerate() {
            let all = self.ran_elsewhere(shared, i, index, now);
            let last = &mut self.exchanged[index as usize];
            self.elsewhere.push(OtherCoreUsage {
                turbo: all.turbo.saturating_sub(last.turbo),
                total: all.total.saturating_sub(last.total),
                due: all.due.saturating_sub(last.due),
                waits: all.waits,
            });
            last.turbo = last.turbo.max(all.turbo);
            last.total = last.total.max(all.total);
            // A core that starts anew counts from zero.
            last.due = all.due;
        }
        let scheduler: &mut dyn PoolScheduler = match self.plan.algorithm {
            Algorithm::Turbo => &mut self.turbo,
            _ => &mut self.regular,
        };
        scheduler.add_other_cores(&self.elsewhere);
    }

    /// All time (ns) that a VM ever ran on the other cores of the pools, and was ever due there.
    /// `i` is its position in the plan, `index` its index in the accounting program. For a VM
    /// without a cap only turbo cores count: time on regular cores matters for the cap alone.
    pub(super) fn ran_elsewhere(
        &self,
        shared: &SharedMemory,
        i: usize,
        index: u32,
        now: Nanos,
    ) -> OtherCoreUsage {
        let vm = &self.plan.vms[i];
        let mut all = OtherCoreUsage::default();
        for other in &self.plan.pool {
            if other.turbo || vm.params.cap_permille.is_some() {
                let ran = self.view.used_on(other.cpu, index, now);
                all.total += ran;
                all.turbo += if other.turbo { ran } else { 0 };
            }
        }
        let (here, of) = vm.regular_vcpus;
        all.turbo = portion(all.turbo, here, of);
        if self.plan.algorithm == Algorithm::Turbo {
            for core in shared.cores() {
                let (due, waits) = core.due(index);
                all.due += due;
                all.waits |= waits;
            }
        }
        all
    }

    /// Publishes what each VM is due on this core, if it is a regular one.
    pub(super) fn publish_dues(&self, own: &SharedCore) {
        if self.plan.algorithm == Algorithm::Regular {
            for (i, &index) in self.indexes.iter().enumerate() {
                own.set_due(index, self.regular.due(i));
            }
        }
    }
}
