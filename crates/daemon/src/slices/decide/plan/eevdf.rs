// SPDX-License-Identifier: Apache-2.0
//! The plan of the eevdf mechanism.

use std::collections::BTreeMap;

use viola_policy::slices::Class;
use viola_sched::{CorePlan, Plan, ThreadPlan};

use super::{Draft, service_thread, vcpu_thread, vm_plan};
use crate::cores::{Candidate, PlanConfig};

/// Plans for the eevdf mechanism, which gives latency-sensitive VMs shorter slices wherever they run, and pins nothing.
pub fn eevdf(config: PlanConfig<'_>, candidates: &[Candidate<'_>]) -> Draft {
    let mut cores: BTreeMap<u32, CorePlan> = BTreeMap::new();
    for c in candidates.iter().filter(|c| c.class == Class::Ls) {
        let mut threads: BTreeMap<u32, Vec<ThreadPlan>> = BTreeMap::new();
        let home = c.vm.cores.iter().next().unwrap_or(0);
        for v in &c.vm.vcpus {
            let cpu = v.cores.iter().next().unwrap_or(home);
            threads
                .entry(cpu)
                .or_default()
                .extend(v.threads.iter().map(|t| vcpu_thread(v, t)));
        }
        threads
            .entry(home)
            .or_default()
            .extend(c.vm.service.iter().map(|s| service_thread(&s.thread)));
        for (cpu, threads) in threads {
            let core = cores.entry(cpu).or_insert_with(|| CorePlan {
                cpu,
                algorithm: config.algorithm,
                batch_slice: config.batch_slice,
                budget_permille: None,
                reserve_permille: 0,
                vms: Vec::new(),
            });
            core.vms.push(vm_plan(c, None, threads));
        }
    }
    Draft {
        plan: Plan {
            cores: cores.into_values().collect(),
        },
        ..Draft::default()
    }
}
