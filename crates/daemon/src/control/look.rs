// SPDX-License-Identifier: Apache-2.0
//! Looking at the host: which VMs are there, what they do, and what stands in the way.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use viola_host::{Tid, Vm, VmId};
use viola_meter::{Snapshot, WaitHist};
use viola_policy::lanes::CpuTime;
use viola_policy::slices::Class;
use viola_policy::slices::classify::{self, Advice};
use viola_proto::ClassSetting;

use crate::control::Control;
use crate::host::libvirt::Libvirt;
use crate::slices::check;
use crate::slices::decide::classes::Observation;
use crate::supervisor::named;
use crate::vms::recent;
use crate::vms::settings::Controls;
use viola_cli::error::chain;
use viola_cli::log::{self, Level};
use viola_config::MechanismChoice;

/// A look at the whole host may take this part of the time, 1/500...
const LOOK_SHARE: u32 = 500;
/// ...but there is one so often. The ends of VMs are seen at once, and threads that they make are known to the accounting.
const LOOK_AGE: Duration = Duration::from_secs(3);
/// The same where libvirt says when one of its VMs starts, and all VMs are libvirt's: others may still come.
const TOLD_AGE: Duration = Duration::from_secs(10);

/// What VMs do is judged by windows of a tenth of a second, in which there is enough of it; one that is over a little early
/// is over. Times are read at each turn, what NICs count only then.
const WINDOW: Duration = Duration::from_millis(95);

impl Control {
    pub(super) fn somebody_died(&self) -> bool {
        self.alive.somebody_died()
    }

    /// Looks at the whole host.
    pub(super) fn look(&mut self, now: Instant) {
        let cpu_before = thread_cpu_time();
        let before: Vec<VmId> = self
            .inventory
            .vms()
            .iter()
            .map(|vm| vm.id.clone())
            .collect();
        self.lend_workers();
        let domains = self.libvirt.as_ref().and_then(Libvirt::domains);
        let is_told = domains.is_some();
        self.inventory.set_domains(domains.unwrap_or_default());
        if let Ok(online) = viola_host::topology::online() {
            self.online = online;
        }
        let looked = self.inventory.refresh().map(|_| ());
        self.alive.follow(self.inventory.vms());
        let cost = thread_cpu_time().saturating_sub(cpu_before);
        let is_told = is_told && self.inventory.vms().iter().all(|vm| vm.libvirt);
        let age = if is_told { TOLD_AGE } else { LOOK_AGE };
        self.next_look = now + (cost * LOOK_SHARE).clamp(self.interval(), age);
        let mut warnings: Vec<String> = looked.err().map(|e| e.one_line()).into_iter().collect();
        warnings.extend(self.inventory.warnings().iter().cloned());
        if let Some(vread) = &self.vread {
            vread.see(self.inventory.vms());
        }
        if let Some(lanes) = &self.lanes {
            lanes.see(self.inventory.vms(), self.cpu_times());
        }
        for vm in self
            .inventory
            .vms()
            .iter()
            .filter(|vm| !before.contains(&vm.id))
        {
            let cores = check::cores_text(&vm.cores);
            let vcpus = match vm.vcpus.len() {
                1 => "1 vCPU".to_owned(),
                n => format!("{n} vCPUs"),
            };
            log::about(
                Level::Info,
                &vm.id,
                format!("found: {vcpus}, cores {cores}"),
            );
        }
        for id in before.iter().filter(|id| self.inventory.get(id).is_none()) {
            log::about(Level::Info, id, "gone");
            self.classes.forget(id);
            self.turbos.forget(id);
            self.totals.forget(id);
        }
        let unaccounted = match self.meter.follow(self.inventory.vms()) {
            Ok(left_out) => left_out,
            Err(e) => {
                warnings.push(chain(&e));
                Vec::new()
            }
        };
        self.refused.retain(|_, (until, _)| now < *until);
        self.find_obstacles(&unaccounted, &mut warnings);
        self.find_affinities();
        for w in warnings.iter().filter(|w| !self.warnings.contains(w)) {
            log::line(Level::Warning, w);
        }
        self.warnings = warnings;
    }

    /// How the VMs spent the last second on each of their vCPUs, by which DI2 is found.
    fn cpu_times(&self) -> BTreeMap<VmId, Vec<CpuTime>> {
        if self.config.lanes.pools.is_empty() {
            return BTreeMap::new();
        }
        let recent = self.recent();
        let times = |vm: &Vm| {
            let vcpus = &recent.vm(&vm.id)?.vcpus;
            let time = |t: &viola_meter::Times| CpuTime {
                gotten: t.run,
                blocked: t.blocked,
            };
            Some((vm.id.clone(), vcpus.iter().map(time).collect()))
        };
        self.inventory.vms().iter().filter_map(times).collect()
    }

    /// Lets a reader's worker be part of its VM, so that it ranks with it and its time is the VM's; not where the
    /// kernel would refuse that.
    fn lend_workers(&mut self) {
        let Some(vread) = &self.vread else {
            return;
        };
        let may_rank = |pid: Tid| {
            self.facts.rt_group_sched == Some(false)
                || matches!(self.inventory.mounts().rt_group_blocks(pid), Ok(None))
        };
        let mut lent: BTreeMap<VmId, Vec<Tid>> = BTreeMap::new();
        for (name, pid) in vread.workers() {
            let vm = self.inventory.vms().iter().find(|vm| named(vm).is(&name));
            if let Some(vm) = vm.filter(|_| may_rank(pid)) {
                lent.entry(vm.id.clone()).or_default().push(pid);
            }
        }
        self.inventory.set_backends(lent);
    }

    fn find_obstacles(&mut self, unaccounted: &[VmId], warnings: &mut Vec<String>) {
        self.blocked.clear();
        let manages = self.manages_cores();
        // Real-time priorities are what slots are made of.
        let slots = self.choice == Ok(MechanismChoice::Slots);
        for vm in self.inventory.vms().iter().filter(|_| manages) {
            let tids = vm
                .vcpus
                .iter()
                .filter_map(|v| v.threads.first())
                .map(|t| t.tid);
            let why = if let Some((_, why)) = self.refused.get(&vm.id) {
                Some(why.clone())
            } else if vm.vcpus.is_empty() {
                Some("its vCPU threads cannot be told from its others".to_owned())
            } else if unaccounted.contains(&vm.id) {
                Some("the accounting program has no room for another VM".to_owned())
            } else if !slots || self.facts.rt_group_sched == Some(false) {
                None
            } else {
                let mut found = None;
                for tid in std::iter::once(vm.pid).chain(tids) {
                    match self.inventory.mounts().rt_group_blocks(tid) {
                        Ok(block) => found = found.or(block.map(|b| b.to_string())),
                        Err(e) => warnings.push(e.one_line()),
                    }
                }
                found
            };
            if let Some(why) = why {
                self.blocked.insert(vm.id.clone(), why);
            }
        }
    }

    fn find_affinities(&mut self) {
        self.allowed.clear();
        if !self.manages_cores() {
            return;
        }
        for vm in self.inventory.vms() {
            let mut allowed = BTreeMap::new();
            for v in &vm.vcpus {
                if let Some(thread) = v.threads.first() {
                    allowed.insert(
                        thread.tid,
                        self.engine.pins.before(vm, thread, v.cores.clone()),
                    );
                }
            }
            for s in &vm.service {
                // One that is gone, or not ours to ask about, is planned by what its VM may do.
                if let Ok(Some(cpus)) = self.engine.pins.allowed(vm, &s.thread) {
                    allowed.insert(s.thread.tid, cpus);
                }
            }
            self.allowed.insert(vm.id.clone(), allowed);
        }
    }

    /// Reads what all VMs spent, and looks, each [`WINDOW`], at what that means; `true` when one is of another class from now on.
    pub(super) fn classify(&mut self, now: Instant) -> bool {
        if now.saturating_duration_since(self.classified) < WINDOW {
            self.meter.read_times();
            return false;
        }
        self.classified = now;
        let snapshot = self.meter.snapshot().clone();
        self.totals.add(&snapshot);
        // Where nothing can be tried, class auto stays what it is.
        let idle = self.dry_run || self.engine.trouble.is_off() || self.engine.trouble.is_pending();
        let advice = if idle {
            vec![None; self.inventory.vms().len()]
        } else {
            self.advice()
        };
        let possible = !idle && !self.config.turbo.cores.is_empty();
        let possible = possible.then_some(self.config.turbo.reserve);
        let mut changed = self.count_turbo_cores(&snapshot);
        for (vm, advice) in self.inventory.vms().iter().zip(advice) {
            // Both are in the order of identities.
            let Ok(at) = snapshot.vms.binary_search_by(|s| s.id.cmp(&vm.id)) else {
                continue;
            };
            let sample = &snapshot.vms[at];
            let setting = self.settings.controls(&self.config, vm).class.value;
            // Adding ten seconds up at each turn is dear, and only class auto is decided by it.
            let waits = match setting {
                ClassSetting::Auto => self.meter.vm_waits(&vm.id),
                _ => WaitHist::default(),
            };
            let observation = Observation {
                vm,
                setting,
                sample,
                at: snapshot.at,
                span: snapshot.span,
                p99: waits.quantile(0.99),
                waits: waits.count(),
                advice,
            };
            let turbo = self.turbos.observe(
                vm,
                observation.setting,
                possible,
                sample,
                (snapshot.at, snapshot.span),
            );
            for what in self.classes.observe(&observation).into_iter().chain(turbo) {
                log::about(Level::Notice, &vm.id, what);
                changed = true;
            }
        }
        changed
    }

    /// How many turbo cores there are to be; `true` when that is another number from now on.
    fn count_turbo_cores(&mut self, snapshot: &Snapshot) -> bool {
        let (mut vms, mut run) = (0, 0);
        for vm in self.inventory.vms() {
            let setting = self.settings.controls(&self.config, vm).class.value;
            if vm.vcpus.len() < 2 || !self.turbos.has(&vm.id, setting) {
                continue;
            }
            vms += 1;
            let sample = snapshot.vms.iter().find(|s| s.id == vm.id);
            run += sample.map_or(0, |s| s.vcpus.first().map_or(0, |t| t.run) + s.service.run);
        }
        let said = self.pools.observe(
            (snapshot.at, snapshot.span),
            vms,
            run,
            (&self.config.slices.cores, &self.config.turbo),
            &self.online,
        );
        if let Some(said) = &said {
            log::line(Level::Notice, said);
        }
        said.is_some()
    }

    /// What class ls would bring each VM, in their order; only a mechanism that
    /// manages cores brings it about.
    pub(super) fn advice(&self) -> Vec<Option<Advice>> {
        let vms = self.inventory.vms();
        if !self.manages_cores() || self.stopped.is_some() {
            return vec![None; vms.len()];
        }
        let controls: Vec<Controls> = vms
            .iter()
            .map(|vm| self.settings.controls(&self.config, vm))
            .collect();
        let claims: Vec<_> = vms
            .iter()
            .zip(&controls)
            .map(|(vm, c)| (&vm.cores, vm.vcpus.len(), c.weight.value, c.cap.value))
            .collect();
        let shares = recent::shares(&claims);
        let homes: Vec<Option<u32>> = vms.iter().map(|vm| self.placement.home(&vm.id)).collect();
        let advise = |i: usize| {
            let home = homes[i]?;
            let others: Vec<usize> = (0..vms.len())
                .filter(|&j| j != i && homes[j] == Some(home))
                .collect();
            let ls = others
                .iter()
                .filter(|&&j| self.class(&vms[j], &controls[j]) == Class::Ls);
            // Of one core, for one vCPU.
            let share = shares[i] * vms[i].cores.len() as f64 / vms[i].vcpus.len().max(1) as f64;
            Some(classify::advise(
                self.meter.vm_waits(&vms[i].id).quantile(0.99),
                others.len() as u32,
                self.config.slices.batch_slice(),
                share.min(1.0),
                controls[i].microslice.value,
                ls.map(|&j| controls[j].microslice.value),
            ))
        };
        (0..vms.len()).map(advise).collect()
    }
}

/// CPU time of the loop so far; a loaded host does not make a look dearer.
fn thread_cpu_time() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec.unsigned_abs(), t.tv_nsec.unsigned_abs() as u32)
}
