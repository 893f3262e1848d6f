// SPDX-License-Identifier: Apache-2.0
//! Exchange of the VMs' run time between the cores of the two pools.

use viola_policy::slices::Nanos;
use viola_policy::turbo::{OtherCoreUsage, portion};

use super::{Cpus, Pool};

impl Cpus {
    /// Passes to the schedulers of the pools what their VMs ran on other cores.
    pub fn exchange(&mut self, now: Nanos) {
        let vms = self.on_turbo.len();
        let (mut ran, mut turbo, mut regular) = (vec![0; vms], vec![0; vms], vec![0u32; vms]);
        for core in 0..self.cores.len() {
            self.advance(now, core);
        }
        for v in self
            .vcpus
            .iter()
            .filter(|v| self.cores[v.core].pool != Pool::Single)
        {
            let delta = v.usage.ran - v.ran_at_exchange;
            ran[v.vm] += delta;
            if v.turbo {
                turbo[v.vm] += delta;
            } else {
                regular[v.vm] += 1;
            }
        }
        let mut dues = vec![(0, false); vms];
        for core in self.cores.iter().filter(|c| c.pool == Pool::Regular) {
            for (slot, &id) in core.vcpus.iter().enumerate() {
                let (due, waits) = core.scheduler.due(slot);
                let of = &mut dues[self.vcpus[id].vm];
                *of = (of.0 + due, of.1 | waits);
            }
        }
        for core in &mut self.cores {
            if core.pool == Pool::Single {
                continue;
            }
            let told: Vec<OtherCoreUsage> = core
                .vcpus
                .iter()
                .map(|&id| {
                    let v = &self.vcpus[id];
                    let (before, after) = (self.on_turbo[v.vm], self.on_turbo[v.vm] + turbo[v.vm]);
                    let all = regular[v.vm];
                    OtherCoreUsage {
                        turbo: portion(after, 1, all) - portion(before, 1, all),
                        total: ran[v.vm] - (v.usage.ran - v.ran_at_exchange),
                        due: dues[v.vm].0.saturating_sub(self.due[v.vm]),
                        waits: dues[v.vm].1,
                    }
                })
                .collect();
            core.scheduler.add_other_cores(&told);
        }
        for (due, (all, _)) in self.due.iter_mut().zip(dues) {
            *due = all;
        }
        for v in &mut self.vcpus {
            v.ran_at_exchange = v.usage.ran;
        }
        for (sum, turbo) in self.on_turbo.iter_mut().zip(turbo) {
            *sum += turbo;
        }
        // The exchange forces no decision: a controller accounts at its next decision.
        for core in 0..self.cores.len() {
            self.arm(now, core);
        }
    }
}
