// SPDX-License-Identifier: Apache-2.0
//! Which vCPU runs on which core, and which cores viola manages.

use std::collections::{BTreeMap, BTreeSet};

use viola_host::Thread;
use viola_sched::Algorithm;

use super::{Candidate, PlanConfig};

/// Index of the vCPU that becomes the turbo vCPU: a guest's devices interrupt its first vCPU unless the guest moves them.
pub const TURBO_VCPU: usize = 0;

/// A plan in the making. VMs are named by their index in `candidates`.
pub struct Layout<'a> {
    /// What holds for the whole plan.
    pub config: PlanConfig<'a>,
    /// The VMs.
    pub candidates: &'a [Candidate<'a>],
    /// VMs with a turbo vCPU.
    pub turbo: BTreeSet<usize>,
    /// VMs that want a turbo vCPU and have none, and why.
    pub no_turbo: BTreeMap<usize, String>,
    /// (VM, vCPU) to core.
    pub placed: BTreeMap<(usize, usize), u32>,
    /// Managed cores, each with the reason.
    pub managed: BTreeMap<u32, String>,
    /// Cores that should be managed and cannot, and why.
    pub unmanageable: BTreeMap<u32, String>,
}

impl Layout<'_> {
    /// VMs with a vCPU on this core.
    pub fn vms_on(&self, cpu: u32) -> impl Iterator<Item = &Candidate<'_>> {
        let on = self.placed.iter().filter(|(_, c)| **c == cpu);
        let vms: BTreeSet<usize> = on.map(|((vm, _), _)| *vm).collect();
        vms.into_iter().map(|vm| &self.candidates[vm])
    }

    /// Cores of a VM's placed vCPUs, by vCPU.
    pub fn cores_of(&self, vm: usize) -> impl Iterator<Item = u32> {
        self.placed.range((vm, 0)..(vm + 1, 0)).map(|(_, cpu)| *cpu)
    }

    /// Whether this is the turbo vCPU of its VM.
    pub fn is_turbo_vcpu(&self, vm: usize, vcpu: usize) -> bool {
        vcpu == TURBO_VCPU && self.turbo.contains(&vm)
    }

    /// Whether this is a turbo core now.
    pub fn is_turbo_core(&self, cpu: u32) -> bool {
        self.config.turbo.is_some_and(|t| t.cores.contains(cpu))
    }

    /// Whether real-time threads may take all of this core, so that threads of the fair class would starve there.
    pub fn is_full(&self, cpu: u32) -> bool {
        self.managed.contains_key(&cpu) && self.budget(cpu).is_none()
    }

    /// See [`super::TurboConfig::budget_permille`]; `None` on regular cores.
    pub fn budget(&self, cpu: u32) -> Option<u32> {
        let turbo = self.config.turbo.filter(|_| self.is_turbo_core(cpu));
        turbo.and_then(|t| t.budget_permille)
    }

    /// See [`super::TurboConfig::reserve_permille`]; 0 on regular cores.
    pub fn reserve(&self, cpu: u32) -> u32 {
        let turbo = self.config.turbo.filter(|_| self.is_turbo_core(cpu));
        turbo.map_or(0, |t| t.reserve_permille)
    }

    /// The first VM on this core that has a turbo vCPU, here or on another core.
    pub fn turbo_vm_on(&self, cpu: u32) -> Option<usize> {
        let on = self.placed.iter().filter(|(_, at)| **at == cpu);
        let mut vms = on.map(|((vm, _), _)| *vm);
        vms.find(|vm| self.turbo.contains(vm))
    }

    /// The algorithm that schedules a core.
    pub fn algorithm(&self, cpu: u32) -> Algorithm {
        match self.turbo_vm_on(cpu) {
            Some(_) if self.is_turbo_core(cpu) => Algorithm::Turbo,
            Some(_) => Algorithm::Regular,
            None => self.config.algorithm,
        }
    }

    /// The core of a thread of a placed vCPU. Only the thread of a turbo vCPU that takes the interrupts is on the turbo core.
    /// Processes of a UML guest that this vCPU made are applications, and run on the core of the next vCPU.
    pub fn core_of(&self, vm: usize, vcpu: usize, thread: &Thread) -> Option<u32> {
        let at = self.placed.get(&(vm, vcpu)).copied();
        let first = self.candidates[vm].vm.vcpus[vcpu].threads.first();
        if !self.is_turbo_vcpu(vm, vcpu) || first == Some(thread) {
            return at;
        }
        self.placed.get(&(vm, vcpu + 1)).copied()
    }
}
