// SPDX-License-Identifier: Apache-2.0
//! Adopts a new plan.

use std::sync::atomic::Ordering;

use viola_policy::slices::{Activity, CoreScheduler, Nanos, OpenRequests};
use viola_policy::turbo::{RegularConfig, TurboConfig};

use super::moderation::Moderation;
use super::{Core, LastCounters};
use crate::plan::Algorithm;
use crate::slots::shared::{LocalPlan, SharedCore, SharedMemory};
use crate::slots::threads::set_cpu;

impl Core {
    /// Adopts the newest plan. Keeps threads that it has learnt of since the plan was made.
    pub(super) fn adopt_plan(&mut self, shared: &SharedMemory, now: Nanos, own: &SharedCore) {
        let settings = |plan: &LocalPlan| (plan.algorithm, plan.batch_slice, plan.reserve_permille);
        let before = settings(&self.plan);
        let Some(seq) = own.read(&mut self.plan) else {
            return;
        };
        let same = self.seq != 0
            && before == settings(&self.plan)
            && self
                .plan
                .vms
                .iter()
                .map(|vm| vm.params)
                .eq(self.params.iter().copied());
        self.params.clear();
        self.indexes.clear();
        self.seen.clear();
        for vm in &self.plan.vms {
            if (vm.index as usize) < self.threads.len() {
                self.params.push(vm.params);
                self.indexes.push(vm.index);
                self.seen.push(Activity::default());
            }
        }
        for (index, table) in self.threads.iter_mut().enumerate() {
            let planned = self.indexes.contains(&(index as u32));
            if planned && !table.is_planned() {
                let index = index as u32;
                let vm = self.view.vm(index);
                self.last_counters[index as usize] = LastCounters {
                    used: self.view.used(index, now),
                    blocks: vm.blocks,
                    wakes: vm.wakes,
                    service_wakes: vm.service_wakes,
                    requests: OpenRequests::default(),
                    moderation: Moderation::default(),
                };
            } else if !planned && table.is_planned() {
                let cpu = own.cpu.load(Ordering::Relaxed);
                table.hold(false, |tid| set_cpu(tid, cpu));
                table.clear();
                own.set_due(index as u32, (0, false));
            }
            table.set_planned(planned);
        }
        for &(at, thread) in &self.plan.threads {
            if let Some(table) = self
                .plan
                .vms
                .get(at)
                .and_then(|vm| self.threads.get_mut(vm.index as usize))
                && !table.add(thread.tid, thread.service)
            {
                own.resync.store(1, Ordering::Release);
            }
        }
        let scheduler: &mut dyn CoreScheduler = match self.plan.algorithm {
            Algorithm::Interleaved => {
                self.interleaved.set_batch_slice(self.plan.batch_slice);
                &mut self.interleaved
            }
            Algorithm::Paper => {
                self.paper.set_slice(self.plan.batch_slice);
                &mut self.paper
            }
            Algorithm::Credit { boost } => {
                let c = if boost {
                    &mut self.credit
                } else {
                    &mut self.plain
                };
                c.set_slice(self.plan.batch_slice);
                c
            }
            Algorithm::Regular => {
                self.regular.set_config(RegularConfig {
                    slice: self.plan.batch_slice,
                    ..RegularConfig::default()
                });
                &mut self.regular
            }
            Algorithm::Turbo => {
                self.turbo.set_config(TurboConfig {
                    slice: self.plan.batch_slice,
                    reserve: self.plan.reserve_permille,
                    ..TurboConfig::default()
                });
                &mut self.turbo
            }
        };
        // Often only threads have changed, which do not concern the algorithm.
        if !same {
            scheduler.configure(now, &self.params);
        }
        // Start the exchange anew: the cores that count, and this core's part of a VM's turbo time, may have changed.
        for (i, &index) in self.indexes.iter().enumerate() {
            self.exchanged[index as usize] = self.ran_elsewhere(shared, i, index, now);
            own.set_due(index, (0, false));
        }
        self.exchanged_at = now;
        self.budget.set(self.plan.budget_permille);
        self.seq = seq;
        own.followed.store(seq, Ordering::Release);
    }
}
