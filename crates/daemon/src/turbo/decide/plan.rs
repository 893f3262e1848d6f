// SPDX-License-Identifier: Apache-2.0
//! The part of a plan that turbo decides: which VMs get their first vCPU on a turbo core, and what that changes on the cores of
//! their other vCPUs (vTurbo).

use std::collections::BTreeMap;

use viola_host::CpuSet;
use viola_policy::slices::Class;
use viola_policy::turbo::choose::Obstacle;
use viola_sched::VmPlan;

use crate::cores::{Candidate, Layout, PlanConfig, TURBO_VCPU};

/// Cores on which the turbo vCPU of a VM may be placed.
///
/// # Errors
/// Why there is none.
fn turbo_cores(config: PlanConfig<'_>, c: &Candidate<'_>) -> Result<CpuSet, String> {
    let Some(turbo) = config.turbo else {
        return Err("no cores are named in [turbo] cores".into());
    };
    if let Some(why) = &c.blocked {
        return Err(why.clone());
    }
    let [first, others @ ..] = c.vm.vcpus.as_slice() else {
        return Err(Obstacle::OneVcpu.to_string());
    };
    if others.is_empty() {
        return Err(Obstacle::OneVcpu.to_string());
    }
    if let Some(other) = others
        .iter()
        .find(|v| !c.allowed_of(v).iter().any(|cpu| config.cores.contains(cpu)))
    {
        return Err(format!(
            "its vCPU {} may run on {} only, outside of the cores set aside for VMs ({})",
            other.index,
            c.allowed_of(other),
            config.cores
        ));
    }
    if turbo.cores.is_empty() {
        return Err(turbo.why_none.to_owned());
    }
    let cores: CpuSet = c
        .allowed_of(first)
        .iter()
        .filter(|&cpu| turbo.cores.contains(cpu))
        .collect();
    match cores.is_empty() {
        true => Err(format!(
            "its vCPU {} may run on {} only, which are no turbo cores ({})",
            first.index,
            c.allowed_of(first),
            turbo.cores
        )),
        false => Ok(cores),
    }
}

/// Cores on which any other vCPU may be placed: regular cores, or else the time that turbo vCPUs leave on turbo cores.
pub fn regular_cores(config: PlanConfig<'_>, allowed: &CpuSet) -> CpuSet {
    let of = |cores: &CpuSet| -> CpuSet { allowed.iter().filter(|&c| cores.contains(c)).collect() };
    let regular = of(config.cores);
    match config.turbo {
        Some(turbo) if regular.is_empty() && turbo.budget_permille.is_none() => of(turbo.cores),
        _ => regular,
    }
}

/// VMs that get a turbo vCPU, each with the cores on which it may be placed; and why others that want one get none.
pub fn turbo_vms(
    config: PlanConfig<'_>,
    candidates: &[Candidate<'_>],
) -> (BTreeMap<usize, CpuSet>, BTreeMap<usize, String>) {
    let (mut yes, mut no) = (BTreeMap::new(), BTreeMap::new());
    for (i, c) in candidates.iter().enumerate().filter(|(_, c)| c.turbo) {
        match turbo_cores(config, c) {
            Ok(cores) => drop(yes.insert(i, cores)),
            Err(why) => drop(no.insert(i, why)),
        }
    }
    (yes, no)
}

impl Layout<'_> {
    /// Takes the turbo vCPU from the first VM whose cores are not all managed, since viola could
    /// not enforce its share there; `true` when there was one.
    pub fn drop_turbo_without_managed_cores(&mut self) -> bool {
        let lost = self.turbo.iter().copied().find_map(|vm| {
            let mut cores = self.cores_of(vm);
            let cpu = cores.find(|cpu| !self.managed.contains_key(cpu))?;
            Some((vm, cpu))
        });
        let Some((vm, cpu)) = lost else { return false };
        self.turbo.remove(&vm);
        let why = self.unmanageable.get(&cpu).cloned();
        let why = why.unwrap_or_else(|| "it is not managed".into());
        self.no_turbo
            .insert(vm, format!("core {cpu} keeps stock scheduling: {why}"));
        // Its first vCPU runs with its second one, if it may.
        let c = &self.candidates[vm];
        let home = self.placed.get(&(vm, TURBO_VCPU + 1)).copied();
        match home.filter(|&cpu| c.allowed_of(&c.vm.vcpus[TURBO_VCPU]).contains(cpu)) {
            Some(cpu) => self.placed.insert((vm, TURBO_VCPU), cpu),
            None => self.placed.remove(&(vm, TURBO_VCPU)),
        };
        true
    }

    /// Sets class, slice, cap and hold core of a VM on a core of [`Algorithm::Turbo`] or [`Algorithm::Regular`]. There the cap
    /// holds for all its cores together.
    ///
    /// [`Algorithm::Turbo`]: viola_sched::Algorithm::Turbo
    /// [`Algorithm::Regular`]: viola_sched::Algorithm::Regular
    pub fn set_turbo_params(&self, vm: usize, cpu: u32, plan: &mut VmPlan) {
        if !self.algorithm(cpu).is_pooled() {
            return;
        }
        let c = &self.candidates[vm];
        let vcpus = c.vm.vcpus.len() as u32;
        let each = c.vcpu_quota.map(|q| q.saturating_mul(vcpus));
        plan.params.cap_permille = c
            .cap_permille
            .into_iter()
            .chain(each)
            .min()
            .map(|p| p.max(1));
        plan.params.class = Class::Batch;
        if let (true, Some(turbo)) = (self.is_turbo_core(cpu), self.config.turbo)
            && self.turbo.contains(&vm)
        {
            plan.params.class = Class::Ls;
            plan.params.microslice = turbo.slot;
            let home = self.placed.get(&(vm, TURBO_VCPU + 1)).copied();
            plan.hold_cpu = home.filter(|&cpu| c.allowed_of(&c.vm.vcpus[TURBO_VCPU]).contains(cpu));
        }
        let mut regular = (0, 0);
        for ((_, vcpu), at) in self.placed.range((vm, 0)..(vm + 1, 0)) {
            if !self.is_turbo_vcpu(vm, *vcpu) {
                regular.0 += u32::from(*at == cpu);
                regular.1 += 1;
            }
        }
        plan.regular_vcpus = regular;
    }

    /// What a VM does not get because of turbo cores: its own turbo vCPU, or class ls beside the turbo vCPU of another VM.
    pub fn turbo_remark(&self, vm: usize) -> Option<String> {
        let c = &self.candidates[vm];
        if let Some(why) = self.no_turbo.get(&vm) {
            return Some(format!("it has no turbo vCPU: {why}"));
        }
        let mut cores = self.cores_of(vm);
        let pooled =
            cores.find(|cpu| self.managed.contains_key(cpu) && self.algorithm(*cpu).is_pooled());
        match pooled {
            Some(cpu) if c.class == Class::Ls => {
                let other = self
                    .turbo_vm_on(cpu)
                    .map(|vm| self.candidates[vm].vm.name.clone());
                Some(format!(
                    "class ls has no effect on core {cpu}, since {} has a turbo vCPU: give it class turbo too",
                    other.unwrap_or_default()
                ))
            }
            _ => None,
        }
    }
}
