// SPDX-License-Identifier: Apache-2.0
//! Reads the host: what it can do, which VMs run, and when one of them ends.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use viola_host::facts::HostFacts;
use viola_host::{Tid, Vm, VmId};

use super::{Control, thread_cpu_time};
use crate::host::libvirt::Libvirt;
use crate::lanes;
use crate::vms::named;
use crate::vms::report::cores_text;
use viola_cli::error::chain;
use viola_cli::log::{self, Level};

/// Facts about the host are read again after this time: an operator may have changed a sysctl.
const FACTS_INTERVAL: Duration = Duration::from_secs(30);
/// The daemon spends at most 1/500 of the time on scans of the host, unless [`MAX_SCAN_INTERVAL`]
/// requires more.
const SCAN_TIME_DIVISOR: u32 = 500;
/// The same while a VM boots, which opens its NICs and disks one after the other.
const BOOT_SCAN_TIME_DIVISOR: u32 = 50;
/// A VM that was found less than this time ago may still boot.
const BOOT_TIME: Duration = Duration::from_secs(10);
/// Longest time between two scans. Between them the daemon sees the end of a VM at once, and the
/// accounting program sees new threads.
const MAX_SCAN_INTERVAL: Duration = Duration::from_secs(3);
/// The same while all VMs belong to libvirt, whose events announce new ones.
const MAX_SCAN_INTERVAL_WITH_EVENTS: Duration = Duration::from_secs(10);

impl Control {
    /// Reads the facts again when they are old.
    pub(crate) fn refresh_facts(&mut self, now: Instant) {
        if now.saturating_duration_since(self.facts_read) >= FACTS_INTERVAL {
            self.read_facts(now);
        }
    }

    pub(super) fn read_facts(&mut self, now: Instant) {
        self.facts_read = now;
        match HostFacts::read() {
            Ok(facts) => self.inputs.facts = facts,
            Err(e) => self.log_once(Level::Warning, e.one_line()),
        }
        self.slices.choose_mechanism(&self.inputs);
    }

    /// Whether the host has to be scanned: libvirt reported a change, a VM was registered or ended, or the last scan is old.
    pub(crate) fn scan_is_due(&self, now: Instant) -> bool {
        // Taken at every tick, so that one event causes one scan.
        let has_changed = self.libvirt.as_ref().is_some_and(Libvirt::take_changed);
        let has_registered = self.registrations.take_changed();
        has_changed || has_registered || now >= self.next_scan || self.exits.has_any()
    }

    /// Scans the host for VMs, and hands them to the meter and to every accelerator.
    pub(crate) fn scan_host(&mut self, now: Instant) {
        let cpu_time_before = thread_cpu_time();
        let before: Vec<VmId> = self.inputs.vms().iter().map(|vm| vm.id.clone()).collect();
        self.lend_workers();
        let domains = self.libvirt.as_ref().and_then(Libvirt::domains);
        let is_connected = domains.is_some();
        self.inputs.inventory.set_domains(domains);
        if let Ok(online) = viola_host::topology::online() {
            self.inputs.online = online;
        }
        let scanned = self.inputs.inventory.refresh().map(|_| ());
        self.exits.watch(self.inputs.vms());
        self.registrations.renew();
        let cpu_time = thread_cpu_time().saturating_sub(cpu_time_before);
        let has_events = is_connected && self.inputs.vms().iter().all(|vm| vm.libvirt);
        let max_interval = match has_events {
            true => MAX_SCAN_INTERVAL_WITH_EVENTS,
            false => MAX_SCAN_INTERVAL,
        };
        let mut warnings: Vec<String> = scanned.err().map(|e| e.one_line()).into_iter().collect();
        warnings.extend(self.inputs.inventory.warnings().iter().cloned());
        self.distribute_vms();
        self.log_changes(&before, now);
        let boots =
            (self.newest_vm).is_some_and(|at| now.saturating_duration_since(at) < BOOT_TIME);
        let divisor = match boots {
            true => BOOT_SCAN_TIME_DIVISOR,
            false => SCAN_TIME_DIVISOR,
        };
        self.next_scan = now + (cpu_time * divisor).clamp(self.interval(), max_interval);
        let unmetered = match self.meter.follow(self.inputs.vms()) {
            Ok(left_out) => left_out,
            Err(e) => {
                warnings.push(chain(&e));
                Vec::new()
            }
        };
        (self.slices).observe(now, &self.inputs, &unmetered, &mut warnings);
        for w in warnings.iter().filter(|w| !self.warnings.contains(w)) {
            log::line(Level::Warning, w);
        }
        self.warnings = warnings;
    }

    /// Gives the VMs to the threads of vread, vpipe and lanes: only those that may get what is granted to their name.
    fn distribute_vms(&self) {
        let vms: Vec<Vm> = self.inputs.inventory.trusted().cloned().collect();
        if let Some(lanes) = &self.lanes {
            let cpu_times = match self.inputs.config.lanes.pools.is_empty() {
                true => BTreeMap::new(),
                false => lanes::cpu_times(&self.recent(), &vms),
            };
            lanes.set_vms(vms.clone(), cpu_times);
        }
        if let Some(workers) = &self.workers {
            workers.set_vms(vms);
        }
    }

    /// Logs which VMs came and went since `before`; those that are gone are forgotten.
    fn log_changes(&mut self, before: &[VmId], now: Instant) {
        let is_new = |id: &VmId| !before.contains(id);
        for vm in self.inputs.vms().iter().filter(|vm| is_new(&vm.id)) {
            self.newest_vm = Some(now);
            let cores = cores_text(&vm.cores);
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
        let inventory = &self.inputs.inventory;
        for id in before.iter().filter(|id| inventory.get(id).is_none()) {
            log::about(Level::Info, id, "gone");
            self.slices.forget(id);
            self.turbo.forget(id);
            self.totals.forget(id);
            self.file_senders.forget(id);
            self.packet_loads.forget(id);
            self.block_readers.forget(id);
        }
    }

    /// Makes a reader's worker a service thread of its VM: it ranks with the VM, and the VM pays
    /// for its CPU time. A worker stays outside where the kernel would refuse it a real-time
    /// priority.
    fn lend_workers(&mut self) {
        let Some(workers) = &self.workers else {
            return;
        };
        let inventory = &self.inputs.inventory;
        let may_rank = |pid: Tid| {
            self.inputs.facts.rt_group_sched == Some(false)
                || matches!(inventory.mounts().rt_group_blocks(pid), Ok(None))
        };
        let trusted: Vec<&Vm> = inventory.trusted().collect();
        let mut lent: BTreeMap<VmId, Vec<Tid>> = BTreeMap::new();
        for (name, pid) in workers.readers() {
            let vm = trusted.iter().find(|vm| named(vm).is(&name));
            if let Some(vm) = vm.filter(|_| may_rank(pid)) {
                lent.entry(vm.id.clone()).or_default().push(pid);
            }
        }
        self.inputs.inventory.set_backends(lent);
    }
}
