// SPDX-License-Identifier: Apache-2.0
//! From what is known of the VMs to what is to be done: which core runs which of their threads, which cores viola
//! schedules at all, and which threads have to be kept where. Pure: no clock, no file, no system call.

use std::collections::{BTreeMap, BTreeSet};

use viola_host::{CpuSet, Thread, Tid, Vcpu, Vm, VmId};
use viola_policy::slices::{Class, MAX_VMS, Nanos, Params};
use viola_sched::slots::shared::MAX_THREADS;
use viola_sched::{Algorithm, CorePlan, Plan, ThreadPlan, VmPlan};

use crate::slices::apply::pins::Wanted;

use crate::turbo::decide::plan as pools;
pub use crate::turbo::decide::plan::TurboFrame;

/// What is asked for on the whole.
#[derive(Debug, Clone, Copy)]
pub struct Frame<'a> {
    /// Cores set aside for VMs.
    pub cores: &'a CpuSet,
    /// Who decides on a core.
    pub algorithm: Algorithm,
    /// Slice of a batch VM.
    pub batch_slice: Nanos,
    /// Cores for turbo vCPUs.
    pub turbo: Option<TurboFrame<'a>>,
}

/// One VM and what holds for it.
#[derive(Debug, Clone)]
pub struct Candidate<'a> {
    /// The VM.
    pub vm: &'a Vm,
    /// Index in the accounting program.
    pub index: u32,
    /// Class.
    pub class: Class,
    /// Whether it is to have a turbo vCPU.
    pub turbo: bool,
    /// Microslice.
    pub microslice: Nanos,
    /// Weight, 1..=65535.
    pub weight: u32,
    /// Cap of all its vCPUs together, thousandths of one core.
    pub cap_permille: Option<u32>,
    /// Whether that cap is one that the kernel does not enforce.
    pub capped_by_viola: bool,
    /// Quota of each vCPU, thousandths of one core.
    pub vcpu_quota: Option<u32>,
    /// CPUs that its threads may run on as far as others than viola are concerned; at least the first thread of
    /// each vCPU and all service threads.
    pub allowed: BTreeMap<Tid, CpuSet>,
    /// Why its threads cannot be managed, if so.
    pub blocked: Option<String>,
}

/// A vCPU that has to be placed on one of several cores.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    /// Whose, as an index of the candidates.
    pub vm: usize,
    /// Index of the vCPU in the VM's list.
    pub vcpu: usize,
    /// Cores it may be placed on, never empty.
    pub cores: CpuSet,
}

/// What is to be done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Draft {
    /// For the mechanism.
    pub plan: Plan,
    /// Threads that have to be kept on certain CPUs.
    pub pins: Wanted,
    /// Every core that is set aside, in ascending order.
    pub cores: Vec<CoreNote>,
    /// VMs that asked for something and do not get it.
    pub left_out: Vec<(VmId, String)>,
    /// Latency-sensitive VMs and the managed core on which each takes its interrupts: that of its first vCPU.
    pub interrupts: Vec<(VmId, u32)>,
}

impl Draft {
    /// Notes for which VMs the accounting program sees all packets.
    pub fn sees_packets_of(&mut self, served: &[VmId], vms: &[Vm]) {
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

/// What becomes of one core.
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

/// Where each vCPU goes, and what is in the way of which core.
pub struct Layout<'a> {
    pub frame: Frame<'a>,
    pub candidates: &'a [Candidate<'a>],
    /// Candidates with a turbo vCPU, and why others that want one have none.
    pub turbo: BTreeSet<usize>,
    pub no_turbo: BTreeMap<usize, String>,
    /// (candidate, vCPU) to core.
    pub placed: BTreeMap<(usize, usize), u32>,
    /// Cores to be managed, with the reason.
    pub managed: BTreeMap<u32, String>,
    /// Cores that should be managed and cannot, with the reason.
    pub spoiled: BTreeMap<u32, String>,
}

/// Draws up the plan of the slot mechanism. `place` gives each asked vCPU one of its cores, in the order asked.
pub fn slots(
    frame: Frame<'_>,
    candidates: &[Candidate<'_>],
    place: impl FnOnce(&[Ask]) -> Vec<u32>,
) -> Draft {
    let (turbo, no_turbo) = pools::chosen(frame, candidates);
    let asks = asks(frame, candidates, &turbo);
    let answers = place(&asks);
    let placed = asks
        .iter()
        .zip(&answers)
        .map(|(a, &cpu)| {
            (
                (a.vm, a.vcpu),
                if a.cores.contains(cpu) {
                    cpu
                } else {
                    a.cores.iter().next().unwrap_or(cpu)
                },
            )
        })
        .collect();
    let mut layout = Layout {
        frame,
        candidates,
        turbo: turbo.into_keys().collect(),
        no_turbo,
        placed,
        managed: BTreeMap::new(),
        spoiled: BTreeMap::new(),
    };
    layout.choose();
    let mut cores = layout.core_plans();
    // Whoever does not fit makes the core stock; what then becomes of the others has to be thought through again.
    while let Some((cpu, why)) = cores
        .iter()
        .find_map(|c| too_much(c).map(|why| (c.cpu, why)))
    {
        layout.spoiled.insert(cpu, why);
        layout.choose();
        cores = layout.core_plans();
    }
    let mut named = frame.cores.clone();
    if let Some(turbo) = frame.turbo {
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

/// Draws up the plan of the eevdf mechanism: latency-sensitive VMs, wherever they run; nothing is pinned.
pub fn eevdf(frame: Frame<'_>, candidates: &[Candidate<'_>]) -> Draft {
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
                algorithm: frame.algorithm,
                batch_slice: frame.batch_slice,
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

fn asks(
    frame: Frame<'_>,
    candidates: &[Candidate<'_>],
    turbo: &BTreeMap<usize, CpuSet>,
) -> Vec<Ask> {
    let mut asks = Vec::new();
    for (vm, c) in candidates.iter().enumerate() {
        for (vcpu, v) in
            c.vm.vcpus
                .iter()
                .enumerate()
                .filter(|(_, v)| !v.threads.is_empty())
        {
            let fit = match turbo.get(&vm).filter(|_| vcpu == 0) {
                Some(cores) => cores.clone(),
                None => pools::ordinary_cores(frame, c.of_vcpu(v)),
            };
            if !fit.is_empty() {
                asks.push(Ask {
                    vm,
                    vcpu,
                    cores: fit,
                });
            }
        }
    }
    asks
}

impl Candidate<'_> {
    pub fn of_vcpu<'a>(&'a self, vcpu: &'a Vcpu) -> &'a CpuSet {
        let first = vcpu.threads.first().and_then(|t| self.allowed.get(&t.tid));
        first.unwrap_or(&vcpu.cores)
    }

    /// Whether a core it is on has to be managed for its sake.
    fn asks_for(&self) -> Option<String> {
        if self.class == Class::Ls {
            Some(format!("{} is latency-sensitive", self.vm.name))
        } else if self.capped_by_viola {
            Some(format!("{} has a cap", self.vm.name))
        } else {
            None
        }
    }
}

impl Layout<'_> {
    fn on(&self, cpu: u32) -> impl Iterator<Item = &Candidate<'_>> {
        let vms: BTreeSet<usize> = self
            .placed
            .iter()
            .filter(|(_, c)| **c == cpu)
            .map(|((vm, _), _)| *vm)
            .collect();
        vms.into_iter().map(|vm| &self.candidates[vm])
    }

    /// Which cores somebody asks to be managed, and can be.
    fn choose(&mut self) {
        loop {
            self.managed.clear();
            let cpus: BTreeSet<u32> = self.placed.values().copied().collect();
            for cpu in cpus.into_iter().filter(|c| !self.spoiled.contains_key(c)) {
                if let Some(why) = self.reason(cpu) {
                    self.managed.insert(cpu, why);
                }
            }
            self.clear_spoiled();
            if !self.settle_pools() {
                return;
            }
        }
    }

    /// Why a core is to be managed, if it is.
    fn reason(&self, cpu: u32) -> Option<String> {
        if let Some(vm) = self.pooled_by(cpu) {
            return Some(format!("{} has a turbo vCPU", self.candidates[vm].vm.name));
        }
        if self.is_turbo_core(cpu) {
            return None;
        }
        let mut willing = self.on(cpu).filter(|c| c.blocked.is_none());
        match self.frame.algorithm {
            Algorithm::Paper => willing.next().map(|_| "mode paper".to_owned()),
            Algorithm::Credit { .. } => willing.next().map(|_| "mode credit".to_owned()),
            _ => willing.find_map(Candidate::asks_for),
        }
    }

    /// Threads that viola cannot manage would starve on a core that real-time slots fill. Where they cannot go
    /// anywhere else the core stays as it is.
    fn clear_spoiled(&mut self) {
        loop {
            let found = self.candidates.iter().enumerate().find_map(|(i, c)| {
                let why = c.blocked.as_ref()?;
                let stuck = c
                    .all_allowed(i, self)
                    .find(|cpus| !cpus.is_empty() && cpus.iter().all(|cpu| self.is_full(cpu)))?;
                Some((
                    stuck.clone(),
                    format!("{} runs there and cannot be managed: {why}", c.vm.name),
                ))
            });
            let Some((cpus, why)) = found else { return };
            for cpu in cpus.iter() {
                self.managed.remove(&cpu);
                self.spoiled.insert(cpu, why.clone());
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
                    // Runs on a core of the host's: one of its own as far as the cap is concerned.
                    None => used.extend(c.of_vcpu(v).iter().next()),
                }
            }
            for s in &c.vm.service {
                if let Some(cpu) = self.home_of_service(i, s.thread.tid) {
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
                    batch_slice: self.frame.batch_slice,
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
                self.pool(i, cpu, &mut plan);
                core.vms.push(plan);
            }
        }
        cores.into_values().collect()
    }

    /// The managed core that a service thread goes to: that of its VM's first vCPU which it can reach. A thread
    /// that can run only on managed cores goes to the first of them.
    fn home_of_service(&self, vm: usize, tid: Tid) -> Option<u32> {
        let c = &self.candidates[vm];
        let allowed = c.allowed.get(&tid).unwrap_or(&c.vm.cores);
        let of_vcpu = (0..c.vm.vcpus.len())
            .filter_map(|j| self.placed.get(&(vm, j)))
            .find(|cpu| self.managed.contains_key(cpu) && allowed.contains(**cpu));
        of_vcpu.copied().or_else(|| {
            let stuck = !allowed.is_empty() && allowed.iter().all(|cpu| self.is_full(cpu));
            if stuck { allowed.iter().next() } else { None }
        })
    }

    /// Threads that have to be kept on their core, or off the managed ones.
    fn pins(&self) -> Wanted {
        let mut pins = Wanted::new();
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
                    pin(&[*t], c.of_vcpu(v), to);
                }
            }
            for s in &c.vm.service {
                let to = if c.blocked.is_none() {
                    self.home_of_service(i, s.thread.tid)
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
        let vms: Vec<String> = self.on(cpu).map(|c| c.vm.name.clone()).collect();
        let (managed, why) = match (self.managed.get(&cpu), self.spoiled.get(&cpu)) {
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

    /// VMs that asked for something, and whose vCPUs are not all on managed cores.
    fn left_out(&self) -> Vec<(VmId, String)> {
        let mut left_out = Vec::new();
        for (i, c) in self.candidates.iter().enumerate() {
            if let Some(why) = self.pool_remark(i) {
                left_out.push((c.vm.id.clone(), why));
                continue;
            }
            if c.asks_for().is_none() {
                continue;
            }
            let why = if let Some(why) = &c.blocked {
                Some(why.clone())
            } else {
                (0..c.vm.vcpus.len()).find_map(|j| match self.placed.get(&(i, j)) {
                    Some(cpu) if self.managed.contains_key(cpu) => None,
                    Some(cpu) => Some(match self.spoiled.get(cpu) {
                        Some(why) => format!("core {cpu} keeps stock scheduling: {why}"),
                        None => format!("core {cpu} keeps stock scheduling"),
                    }),
                    None => Some(format!(
                        "its vCPU {j} runs on {}, outside of the cores set aside for VMs ({})",
                        c.vm.vcpus[j].cores, self.frame.cores
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

impl Candidate<'_> {
    /// What each of its vCPUs and service threads may run on; vCPUs only if they are placed at all.
    fn all_allowed<'a>(
        &'a self,
        index: usize,
        layout: &'a Layout<'_>,
    ) -> impl Iterator<Item = &'a CpuSet> {
        let vcpus = self.vm.vcpus.iter().enumerate();
        let vcpus = vcpus
            .filter(move |(j, _)| layout.placed.contains_key(&(index, *j)))
            .map(|(_, v)| self.of_vcpu(v));
        vcpus.chain(
            self.vm
                .service
                .iter()
                .filter_map(|s| self.allowed.get(&s.thread.tid)),
        )
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
        regular_vcpus: (0, 0),
        params,
        index: c.index,
        pid: c.vm.pid as i32,
        sees_packets: false,
        threads,
    }
}

/// Why a core has more on it than one controller can take.
fn too_much(core: &CorePlan) -> Option<String> {
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
