// SPDX-License-Identifier: Apache-2.0
//! Plans the cores: which of them viola manages, which threads run on each, and which threads are pinned. Pure: no clock, no file,
//! no system call.

use std::collections::{BTreeMap, BTreeSet};

use viola_host::{CpuSet, Hypervisor, Thread, Tid, Vcpu, Vm, VmId};
use viola_policy::slices::{Class, MAX_VMS, Params};
use viola_sched::slots::shared::MAX_THREADS;
use viola_sched::{Algorithm, CorePlan, Plan, ThreadPlan, VmPlan};

use crate::cores::{Candidate, DesiredPins, Layout, PlanConfig};
use crate::turbo::decide::plan::{regular_cores, turbo_vms};

mod eevdf;

pub use eevdf::eevdf;

/// A vCPU for which [`slots`] needs a core.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacementRequest {
    /// Index of its VM among the candidates.
    pub vm: usize,
    /// Index of the vCPU in the VM's list.
    pub vcpu: usize,
    /// Cores on which it may be placed, never empty.
    pub cores: CpuSet,
}

/// A plan of all cores.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Draft {
    /// What the mechanism schedules.
    pub plan: Plan,
    /// Threads that are kept on certain CPUs.
    pub pins: DesiredPins,
    /// Each core that is set aside for VMs, in ascending order.
    pub cores: Vec<CoreNote>,
    /// VMs that ask for something and do not get it, and why.
    pub left_out: Vec<(VmId, String)>,
    /// Latency-sensitive VMs, each with the managed core that takes its interrupts: the core of its first vCPU.
    pub interrupts: Vec<(VmId, u32)>,
}

impl Draft {
    /// Marks the VMs of which the accounting program reports all packets.
    pub fn set_sees_packets(&mut self, served: &[VmId], vms: &[Vm]) {
        for (id, cpu) in self.interrupts.iter().filter(|(id, _)| served.contains(id)) {
            let pid = vms.iter().find(|vm| vm.id == *id).map(|vm| vm.pid as i32);
            let cores = self.plan.cores.iter_mut().filter(|c| c.cpu == *cpu);
            for vm in cores
                .flat_map(|c| &mut c.vms)
                .filter(|vm| Some(vm.pid) == pid)
            {
                vm.sees_packets = true;
            }
        }
    }
}

/// What the plan says of one core.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoreNote {
    /// CPU number.
    pub cpu: u32,
    /// Whether viola schedules it.
    pub managed: bool,
    /// Why, or why not.
    pub why: String,
    /// VMs placed on it.
    pub vms: Vec<String>,
}

/// Plans cores that viola manages, for slots and sched_ext. `place` returns a core for each request, in their order.
pub fn slots(
    config: PlanConfig<'_>,
    candidates: &[Candidate<'_>],
    place: impl FnOnce(&[PlacementRequest]) -> Vec<u32>,
) -> Draft {
    let (turbo, no_turbo) = turbo_vms(config, candidates);
    let requests = requests(config, candidates, &turbo);
    let cores = place(&requests);
    let placed = requests.iter().zip(&cores).map(|(r, &cpu)| {
        let cpu = match r.cores.contains(cpu) {
            true => cpu,
            false => r.cores.iter().next().unwrap_or(cpu),
        };
        ((r.vm, r.vcpu), cpu)
    });
    let placed = placed.collect();
    let mut layout = Layout {
        config,
        candidates,
        turbo: turbo.into_keys().collect(),
        no_turbo,
        placed,
        managed: BTreeMap::new(),
        unmanageable: BTreeMap::new(),
    };
    layout.choose_managed();
    let mut cores = layout.core_plans();
    // A core with too many threads keeps stock scheduling, which changes what the other cores need.
    while let Some((cpu, why)) = cores
        .iter()
        .find_map(|c| overload(c).map(|why| (c.cpu, why)))
    {
        layout.unmanageable.insert(cpu, why);
        layout.choose_managed();
        cores = layout.core_plans();
    }
    let mut named = config.cores.clone();
    if let Some(turbo) = config.turbo {
        named.extend(turbo.cores);
    }
    Draft {
        pins: layout.pins(),
        cores: named.iter().map(|cpu| layout.note(cpu)).collect(),
        left_out: layout.left_out(),
        interrupts: layout.interrupts(),
        plan: Plan { cores },
    }
}

/// The vCPUs that may run on a core set aside for VMs.
fn requests(
    config: PlanConfig<'_>,
    candidates: &[Candidate<'_>],
    turbo: &BTreeMap<usize, CpuSet>,
) -> Vec<PlacementRequest> {
    let mut requests = Vec::new();
    for (vm, c) in candidates.iter().enumerate() {
        for (vcpu, v) in
            c.vm.vcpus
                .iter()
                .enumerate()
                .filter(|(_, v)| !v.threads.is_empty())
        {
            let fit = match turbo.get(&vm).filter(|_| vcpu == 0) {
                Some(cores) => cores.clone(),
                None => regular_cores(config, c.allowed_of(v)),
            };
            if !fit.is_empty() {
                requests.push(PlacementRequest {
                    vm,
                    vcpu,
                    cores: fit,
                });
            }
        }
    }
    requests
}

impl Layout<'_> {
    /// Chooses the cores that are managed: a VM on them needs it, and nothing prevents it.
    fn choose_managed(&mut self) {
        loop {
            self.managed.clear();
            let cpus: BTreeSet<u32> = self.placed.values().copied().collect();
            for cpu in cpus
                .into_iter()
                .filter(|c| !self.unmanageable.contains_key(c))
            {
                if let Some(why) = self.reason(cpu) {
                    self.managed.insert(cpu, why);
                }
            }
            self.leave_out_unmanageable();
            if !self.drop_turbo_without_managed_cores() {
                return;
            }
        }
    }

    /// Why a core should be managed, if it should.
    fn reason(&self, cpu: u32) -> Option<String> {
        if let Some(vm) = self.turbo_vm_on(cpu) {
            return Some(format!("{} has a turbo vCPU", self.candidates[vm].vm.name));
        }
        if self.is_turbo_core(cpu) {
            return None;
        }
        let mut manageable = self.vms_on(cpu).filter(|c| c.blocked.is_none());
        match self.config.algorithm {
            Algorithm::Paper => manageable.next().map(|_| "mode paper".to_owned()),
            Algorithm::Credit { .. } => manageable.next().map(|_| "mode credit".to_owned()),
            _ => manageable.find_map(Candidate::reason_to_manage),
        }
    }

    /// Leaves out cores that a VM which cannot be managed cannot leave: its threads would starve beside real-time threads.
    fn leave_out_unmanageable(&mut self) {
        loop {
            let found = self.candidates.iter().enumerate().find_map(|(i, c)| {
                let why = c.blocked.as_ref()?;
                let stuck = self
                    .all_allowed(i)
                    .find(|cpus| !cpus.is_empty() && cpus.iter().all(|cpu| self.is_full(cpu)))?;
                Some((
                    stuck.clone(),
                    format!("{} runs there and cannot be managed: {why}", c.vm.name),
                ))
            });
            let Some((cpus, why)) = found else { return };
            for cpu in cpus.iter() {
                self.managed.remove(&cpu);
                self.unmanageable.insert(cpu, why.clone());
            }
        }
    }

    fn core_plans(&self) -> Vec<CorePlan> {
        let mut cores: BTreeMap<u32, CorePlan> = BTreeMap::new();
        for (i, c) in self
            .candidates
            .iter()
            .enumerate()
            .filter(|(_, c)| c.blocked.is_none())
        {
            let mut threads: BTreeMap<u32, Vec<ThreadPlan>> = BTreeMap::new();
            let mut vcpus: BTreeMap<u32, u32> = BTreeMap::new();
            let mut used = BTreeSet::new();
            for (j, v) in c.vm.vcpus.iter().enumerate() {
                match self.placed.get(&(i, j)) {
                    Some(cpu) => {
                        used.insert(*cpu);
                        if self.managed.contains_key(cpu) {
                            *vcpus.entry(*cpu).or_default() += 1;
                        }
                        for t in &v.threads {
                            if let Some(cpu) = self
                                .core_of(i, j, t)
                                .filter(|c| self.managed.contains_key(c))
                            {
                                threads.entry(cpu).or_default().push(vcpu_thread(v, t));
                            }
                        }
                    }
                    // It runs on a core of the host, which counts as one of its cores for the cap.
                    None => used.extend(c.allowed_of(v).iter().next()),
                }
            }
            for s in &c.vm.service {
                if let Some(cpu) = self.core_of_service(i, s.thread.tid) {
                    threads
                        .entry(cpu)
                        .or_default()
                        .push(service_thread(&s.thread));
                }
            }
            for (cpu, threads) in threads {
                let core = cores.entry(cpu).or_insert_with(|| CorePlan {
                    cpu,
                    algorithm: self.algorithm(cpu),
                    batch_slice: self.config.batch_slice,
                    budget_permille: self.budget(cpu),
                    reserve_permille: self.reserve(cpu),
                    vms: Vec::new(),
                });
                let whole = c.cap_permille.map(|p| p / used.len().max(1) as u32);
                let each = c
                    .vcpu_quota
                    .map(|q| q.saturating_mul(vcpus.get(&cpu).copied().unwrap_or(1)));
                let cap = whole
                    .into_iter()
                    .chain(each)
                    .min()
                    .filter(|&p| p < 1000)
                    .map(|p| p.max(1));
                let mut plan = vm_plan(c, cap, threads);
                self.set_turbo_params(i, cpu, &mut plan);
                core.vms.push(plan);
            }
        }
        cores.into_values().collect()
    }

    /// The managed core of a service thread: that of the first vCPU of its VM whose core it may run on. A thread that may run only on
    /// managed cores gets the first of them.
    fn core_of_service(&self, vm: usize, tid: Tid) -> Option<u32> {
        let c = &self.candidates[vm];
        let allowed = c.allowed.get(&tid).unwrap_or(&c.vm.cores);
        let allowed_of = (0..c.vm.vcpus.len())
            .filter_map(|j| self.placed.get(&(vm, j)))
            .find(|cpu| self.managed.contains_key(cpu) && allowed.contains(**cpu));
        allowed_of.copied().or_else(|| {
            let stuck = !allowed.is_empty() && allowed.iter().all(|cpu| self.is_full(cpu));
            if stuck { allowed.iter().next() } else { None }
        })
    }

    /// Keeps threads on their managed core, and all other threads off full cores.
    fn pins(&self) -> DesiredPins {
        let mut pins = DesiredPins::new();
        let mut pin = |threads: &[Thread], allowed: &CpuSet, to: Option<u32>| {
            let cpus: CpuSet = match to {
                Some(cpu) => [cpu].into_iter().collect(),
                None => allowed.iter().filter(|cpu| !self.is_full(*cpu)).collect(),
            };
            if !cpus.is_empty() && cpus != *allowed {
                pins.extend(threads.iter().map(|t| (*t, cpus.clone())));
            }
        };
        if self.managed.is_empty() {
            return pins;
        }
        for (i, c) in self.candidates.iter().enumerate() {
            for (j, v) in c.vm.vcpus.iter().enumerate() {
                for t in &v.threads {
                    let to = self
                        .core_of(i, j, t)
                        .filter(|cpu| c.blocked.is_none() && self.managed.contains_key(cpu));
                    pin(&[*t], c.allowed_of(v), to);
                }
            }
            for s in &c.vm.service {
                let to = if c.blocked.is_none() {
                    self.core_of_service(i, s.thread.tid)
                } else {
                    None
                };
                pin(
                    &[s.thread],
                    c.allowed.get(&s.thread.tid).unwrap_or(&c.vm.cores),
                    to,
                );
            }
        }
        pins
    }

    fn note(&self, cpu: u32) -> CoreNote {
        let vms: Vec<String> = self.vms_on(cpu).map(|c| c.vm.name.clone()).collect();
        let (managed, why) = match (self.managed.get(&cpu), self.unmanageable.get(&cpu)) {
            (Some(why), _) => (true, why.clone()),
            (None, Some(why)) => (false, why.clone()),
            (None, None) if self.is_turbo_core(cpu) => {
                (false, "no VM has its turbo vCPU there".to_owned())
            }
            (None, None) if vms.is_empty() => (false, "no VM runs there".to_owned()),
            (None, None) => (
                false,
                "no VM there is latency-sensitive or has a cap".to_owned(),
            ),
        };
        CoreNote {
            cpu,
            managed,
            why,
            vms,
        }
    }

    fn interrupts(&self) -> Vec<(VmId, u32)> {
        let ls = self
            .candidates
            .iter()
            .enumerate()
            .filter(|(_, c)| c.class == Class::Ls && c.blocked.is_none());
        ls.filter_map(|(i, c)| {
            let (_, cpu) = self.placed.range((i, 0)..(i + 1, 0)).next()?;
            self.managed
                .contains_key(cpu)
                .then(|| (c.vm.id.clone(), *cpu))
        })
        .collect()
    }

    /// VMs that need managed cores and do not have one for each vCPU, and why.
    fn left_out(&self) -> Vec<(VmId, String)> {
        let mut left_out = Vec::new();
        for (i, c) in self.candidates.iter().enumerate() {
            if let Some(why) = self.turbo_remark(i) {
                left_out.push((c.vm.id.clone(), why));
                continue;
            }
            if c.reason_to_manage().is_none() {
                continue;
            }
            let why = if let Some(why) = &c.blocked {
                Some(why.clone())
            } else {
                (0..c.vm.vcpus.len()).find_map(|j| match self.placed.get(&(i, j)) {
                    Some(cpu) if self.managed.contains_key(cpu) => None,
                    Some(cpu) => Some(match self.unmanageable.get(cpu) {
                        Some(why) => format!("core {cpu} keeps stock scheduling: {why}"),
                        None => format!("core {cpu} keeps stock scheduling"),
                    }),
                    None => Some(format!(
                        "its vCPU {j} runs on {}, outside of the cores set aside for VMs ({})",
                        c.vm.vcpus[j].cores, self.config.cores
                    )),
                })
            };
            if let Some(why) = why {
                left_out.push((c.vm.id.clone(), why));
            }
        }
        left_out
    }
}

impl Layout<'_> {
    /// The CPUs that each placed vCPU and each service thread may run on.
    fn all_allowed(&self, vm: usize) -> impl Iterator<Item = &CpuSet> {
        let c = &self.candidates[vm];
        let vcpus = c.vm.vcpus.iter().enumerate();
        let vcpus = vcpus
            .filter(move |(j, _)| self.placed.contains_key(&(vm, *j)))
            .map(|(_, v)| c.allowed_of(v));
        let service = c.vm.service.iter();
        vcpus.chain(service.filter_map(|s| c.allowed.get(&s.thread.tid)))
    }
}

fn vcpu_thread(vcpu: &Vcpu, thread: &Thread) -> ThreadPlan {
    ThreadPlan {
        tid: thread.tid as i32,
        service: vcpu.kernel_thread == Some(thread.tid),
    }
}

fn service_thread(thread: &Thread) -> ThreadPlan {
    ThreadPlan {
        tid: thread.tid as i32,
        service: true,
    }
}

fn vm_plan(c: &Candidate<'_>, cap_permille: Option<u32>, threads: Vec<ThreadPlan>) -> VmPlan {
    let params = Params {
        id: c.index,
        class: c.class,
        weight: c.weight,
        cap_permille,
        microslice: c.microslice,
    };
    VmPlan {
        hold_cpu: None,
        resets_on_fork: c.vm.hypervisor != Hypervisor::Uml,
        regular_vcpus: (0, 0),
        params,
        index: c.index,
        pid: c.vm.pid as i32,
        sees_packets: false,
        threads,
    }
}

/// Why one controller cannot take all threads of a core, if so.
fn overload(core: &CorePlan) -> Option<String> {
    let threads: usize = core.vms.iter().map(|v| v.threads.len()).sum();
    if core.vms.len() > MAX_VMS {
        Some(format!(
            "{} VMs run there, and a controller takes {MAX_VMS}",
            core.vms.len()
        ))
    } else if threads > MAX_THREADS {
        Some(format!(
            "{threads} threads run there, and a controller takes {MAX_THREADS}"
        ))
    } else {
        None
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod turbo_tests;
