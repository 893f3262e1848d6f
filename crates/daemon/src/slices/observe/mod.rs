// SPDX-License-Identifier: Apache-2.0
//! What slices read of the host.

pub mod mechanisms;

use std::collections::BTreeMap;
use std::time::Instant;

use viola_host::{Tid, Vm, VmId};

use super::Slices;
use crate::vms::Inputs;
use viola_config::MechanismChoice;

impl Slices {
    /// Asks the mechanism how it is; `true` when the cores have to be planned again, since it lost a thread, failed, may be tried
    /// again, or gave way to another mechanism.
    pub fn check_health(&mut self, now: Instant, inputs: &Inputs) -> bool {
        let mut replan = !inputs.dry_run && self.engine.check_health(now);
        let retry = &self.engine.retry;
        replan |= retry.is_pending() && !retry.must_wait(now);
        replan |= self.fall_back(inputs);
        replan
    }

    /// Reads what keeps each VM from being managed, and what its threads may run on. `unmetered` are VMs for which the accounting
    /// program has no room.
    pub fn observe(
        &mut self,
        now: Instant,
        inputs: &Inputs,
        unmetered: &[VmId],
        warnings: &mut Vec<String>,
    ) {
        self.refused.retain(|_, (until, _)| now < *until);
        self.blocked.clear();
        self.allowed.clear();
        if !self.manages_cores() {
            return;
        }
        for vm in inputs.vms() {
            if let Some(why) = self.obstacle(vm, inputs, unmetered, warnings) {
                self.blocked.insert(vm.id.clone(), why);
            }
        }
        for vm in inputs.vms() {
            let mut allowed = BTreeMap::new();
            for v in &vm.vcpus {
                if let Some(thread) = v.threads.first() {
                    let cpus = self.engine.pins.without_pin(vm, thread, v.cores.clone());
                    allowed.insert(thread.tid, cpus);
                }
            }
            for s in &vm.service {
                // A thread that ended, or whose affinity cannot be read, is planned by the cores of its VM.
                if let Ok(Some(cpus)) = self.engine.pins.allowed(vm, &s.thread) {
                    allowed.insert(s.thread.tid, cpus);
                }
            }
            self.allowed.insert(vm.id.clone(), allowed);
        }
    }

    /// What keeps a VM from being managed, if anything does.
    fn obstacle(
        &self,
        vm: &Vm,
        inputs: &Inputs,
        unmetered: &[VmId],
        warnings: &mut Vec<String>,
    ) -> Option<String> {
        if vm.confirmed.is_none() {
            return Some("nothing confirms that its process is this VM".to_owned());
        }
        if let Some((_, why)) = self.refused.get(&vm.id) {
            return Some(why.clone());
        }
        if vm.vcpus.is_empty() {
            return Some("its vCPU threads cannot be told from its others".to_owned());
        }
        if unmetered.contains(&vm.id) {
            return Some("the accounting program has no room for another VM".to_owned());
        }
        // Only slots need real-time priorities, which groups with a real-time budget of their own refuse.
        let is_realtime = self.mechanism == Ok(MechanismChoice::Slots);
        if !is_realtime || inputs.facts.rt_group_sched == Some(false) {
            return None;
        }
        let first_threads = vm.vcpus.iter().filter_map(|v| v.threads.first());
        let tids: Vec<Tid> = first_threads.map(|t| t.tid).collect();
        let mut found = None;
        for tid in std::iter::once(vm.pid).chain(tids) {
            match inputs.inventory.mounts().rt_group_blocks(tid) {
                Ok(block) => found = found.or(block.map(|b| b.to_string())),
                Err(e) => warnings.push(e.one_line()),
            }
        }
        found
    }
}
