// SPDX-License-Identifier: Apache-2.0
//! vTurbo's two pools in a plan: which VM has its first vCPU on a turbo core, and what that makes of the other cores.

use std::collections::BTreeMap;

use viola_host::{CpuSet, Thread};
use viola_policy::slices::{Class, Nanos};
use viola_policy::turbo::choose::Obstacle;
use viola_sched::{Algorithm, VmPlan};

use crate::slices::decide::plan::{Candidate, Frame, Layout};

/// Cores for turbo vCPUs.
#[derive(Debug, Clone, Copy)]
pub struct TurboFrame<'a> {
    /// Which.
    pub cores: &'a CpuSet,
    /// Slot of a turbo vCPU.
    pub slot: Nanos,
    /// Most of any 10 ms of them for real-time threads, where the host works on them too; thousandths.
    pub budget_permille: Option<u32>,
    /// What a VM keeps of its share for its other vCPUs while they wait, thousandths.
    pub reserve_permille: u32,
    /// Why there is none of these cores, if there is none.
    pub why_none: &'a str,
}

/// The vCPU that becomes the turbo vCPU: interrupts of a guest's devices come to its first one unless it moves them.
const TURBO_VCPU: usize = 0;

/// Cores that the turbo vCPU of a VM may be placed on.
pub fn turbo_cores(frame: Frame<'_>, c: &Candidate<'_>) -> Result<CpuSet, String> {
    let Some(turbo) = frame.turbo else {
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
        .find(|v| !c.of_vcpu(v).iter().any(|cpu| frame.cores.contains(cpu)))
    {
        return Err(format!(
            "its vCPU {} may run on {} only, outside of the cores set aside for VMs ({})",
            other.index,
            c.of_vcpu(other),
            frame.cores
        ));
    }
    if turbo.cores.is_empty() {
        return Err(turbo.why_none.to_owned());
    }
    let cores: CpuSet = c
        .of_vcpu(first)
        .iter()
        .filter(|&cpu| turbo.cores.contains(cpu))
        .collect();
    match cores.is_empty() {
        true => Err(format!(
            "its vCPU {} may run on {} only, which are no turbo cores ({})",
            first.index,
            c.of_vcpu(first),
            turbo.cores
        )),
        false => Ok(cores),
    }
}

/// Cores that any other vCPU may be placed on: those set aside, else turbo cores for the gaps.
pub fn ordinary_cores(frame: Frame<'_>, allowed: &CpuSet) -> CpuSet {
    let of = |cores: &CpuSet| -> CpuSet { allowed.iter().filter(|&c| cores.contains(c)).collect() };
    let regular = of(frame.cores);
    match frame.turbo {
        Some(turbo) if regular.is_empty() && turbo.budget_permille.is_none() => of(turbo.cores),
        _ => regular,
    }
}

/// Which of the candidates are to have a turbo vCPU, and why the others that want one cannot.
pub fn chosen(
    frame: Frame<'_>,
    candidates: &[Candidate<'_>],
) -> (BTreeMap<usize, CpuSet>, BTreeMap<usize, String>) {
    let (mut yes, mut no) = (BTreeMap::new(), BTreeMap::new());
    for (i, c) in candidates.iter().enumerate().filter(|(_, c)| c.turbo) {
        match turbo_cores(frame, c) {
            Ok(cores) => drop(yes.insert(i, cores)),
            Err(why) => drop(no.insert(i, why)),
        }
    }
    (yes, no)
}

impl Layout<'_> {
    /// Whether this vCPU is on a turbo core for its interrupts.
    pub fn is_turbo_vcpu(&self, vm: usize, vcpu: usize) -> bool {
        vcpu == TURBO_VCPU && self.turbo.contains(&vm)
    }

    pub fn is_turbo_core(&self, cpu: u32) -> bool {
        self.frame.turbo.is_some_and(|t| t.cores.contains(cpu))
    }

    /// Whether threads of the ordinary class would starve there.
    pub fn is_full(&self, cpu: u32) -> bool {
        let shared = self.budget(cpu).is_some();
        self.managed.contains_key(&cpu) && !shared
    }

    pub fn budget(&self, cpu: u32) -> Option<u32> {
        self.frame
            .turbo
            .filter(|_| self.is_turbo_core(cpu))
            .and_then(|t| t.budget_permille)
    }

    pub fn reserve(&self, cpu: u32) -> u32 {
        let turbo = self.frame.turbo.filter(|_| self.is_turbo_core(cpu));
        turbo.map_or(0, |t| t.reserve_permille)
    }

    /// A VM on this core that has a turbo vCPU, here or elsewhere.
    pub fn pooled_by(&self, cpu: u32) -> Option<usize> {
        let on = |(_, at): &(&(usize, usize), &u32)| **at == cpu;
        let mut vms = self.placed.iter().filter(on).map(|((vm, _), _)| *vm);
        vms.find(|vm| self.turbo.contains(vm))
    }

    /// Who decides on a core.
    pub fn algorithm(&self, cpu: u32) -> Algorithm {
        match self.pooled_by(cpu) {
            Some(_) if self.is_turbo_core(cpu) => Algorithm::Turbo,
            Some(_) => Algorithm::Regular,
            None => self.frame.algorithm,
        }
    }

    /// The core of a thread of a placed vCPU. Of a turbo vCPU only the thread that takes the interrupts is on the turbo
    /// core: a guest process of UML that was made there is an application, and goes where those are.
    pub fn core_of(&self, vm: usize, vcpu: usize, thread: &Thread) -> Option<u32> {
        let at = self.placed.get(&(vm, vcpu)).copied();
        let first = self.candidates[vm].vm.vcpus[vcpu].threads.first();
        if !self.is_turbo_vcpu(vm, vcpu) || first == Some(thread) {
            return at;
        }
        self.placed.get(&(vm, vcpu + 1)).copied()
    }

    /// A VM whose cores are not all managed has no turbo vCPU: its shares would not be kept. Answers whether there was
    /// one.
    pub fn settle_pools(&mut self) -> bool {
        let lost = self.turbo.iter().copied().find_map(|vm| {
            let vcpus = self.placed.range((vm, 0)..(vm + 1, 0));
            let mut cores = vcpus.map(|(_, cpu)| *cpu);
            let cpu = cores.find(|cpu| !self.managed.contains_key(cpu))?;
            Some((vm, cpu))
        });
        let Some((vm, cpu)) = lost else { return false };
        self.turbo.remove(&vm);
        let why = self.spoiled.get(&cpu).cloned();
        let why = why.unwrap_or_else(|| "it is not managed".into());
        self.no_turbo
            .insert(vm, format!("core {cpu} keeps stock scheduling: {why}"));
        // Its first vCPU goes where the next is, if it may.
        let c = &self.candidates[vm];
        let home = self.placed.get(&(vm, TURBO_VCPU + 1)).copied();
        match home.filter(|&cpu| c.of_vcpu(&c.vm.vcpus[TURBO_VCPU]).contains(cpu)) {
            Some(cpu) => self.placed.insert((vm, TURBO_VCPU), cpu),
            None => self.placed.remove(&(vm, TURBO_VCPU)),
        };
        true
    }

    /// What holds for a VM on a core of a pool: the cap counts on all cores together there.
    pub fn pool(&self, vm: usize, cpu: u32, plan: &mut VmPlan) {
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
        if let (true, Some(turbo)) = (self.is_turbo_core(cpu), self.frame.turbo)
            && self.turbo.contains(&vm)
        {
            plan.params.class = Class::Ls;
            plan.params.microslice = turbo.slot;
            let home = self.placed.get(&(vm, TURBO_VCPU + 1)).copied();
            plan.hold_cpu = home.filter(|&cpu| c.of_vcpu(&c.vm.vcpus[TURBO_VCPU]).contains(cpu));
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

    /// What a VM asked for and does not get because of the pools.
    pub fn pool_remark(&self, vm: usize) -> Option<String> {
        let c = &self.candidates[vm];
        if let Some(why) = self.no_turbo.get(&vm) {
            return Some(format!("it has no turbo vCPU: {why}"));
        }
        let placed = self.placed.range((vm, 0)..(vm + 1, 0));
        let mut cores = placed.map(|(_, cpu)| *cpu);
        let pooled =
            cores.find(|cpu| self.managed.contains_key(cpu) && self.algorithm(*cpu).is_pooled());
        match pooled {
            Some(cpu) if c.class == Class::Ls => {
                let other = self
                    .pooled_by(cpu)
                    .map(|vm| self.candidates[vm].vm.name.clone());
                Some(format!(
                    "class ls means nothing on core {cpu}, since {} has a turbo vCPU: give it class turbo too",
                    other.unwrap_or_default()
                ))
            }
            _ => None,
        }
    }
}
