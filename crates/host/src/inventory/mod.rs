// SPDX-License-Identifier: Apache-2.0
//! All VMs of this host: found once, then kept up to date cheaply.
//!
//! | file | what it has |
//! |---|---|
//! | `mod.rs` | [`Inventory`]: finds the processes, lists the VMs |
//! | `process.rs` | processes that are no VM |
//! | `vm_process.rs` | processes that run a VM |
//!
//! A refresh reads `/proc/PID/stat` of the processes, and examines only new ones further. Once a
//! process has been known for 10 s and is not a VM, the inventory reads its line only every 10 s.
//! It recognises a known process by number, start time, name and stack address: the first two
//! detect a reused number, the other two a process that has executed another program.

mod process;
mod vm_process;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

use crate::cgroup::Mounts;
use crate::confirm::{Evidence, Sources};
use crate::error::HostError;
use crate::libvirt::Domain;
use crate::proc::{self, Stat};
use crate::qemu;
use crate::thread::{Thread, Tid};
use crate::vm::{ServiceKind, ServiceThread, Vm, VmId};
use process::{NonVm, ProcessIdentity};
use vm_process::{VmProcess, Vmm, identify};

/// A process that looks like a VM may be confirmed within this time; a launcher registers it just after it starts.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a refresh waits for the answers of emulators. Those that are well answer in a millisecond or two.
const PROMPT_TIMEOUT: Duration = Duration::from_millis(50);
/// How long [`Inventory::refresh_fully`] waits for late answers. A query ends by itself in less.
const LATE_TIMEOUT: Duration = Duration::from_secs(3);

/// The VMs of this host.
pub struct Inventory {
    mounts: Mounts,
    /// Processes that are no VM, and kernel threads.
    non_vms: HashMap<Tid, NonVm>,
    vm_processes: HashMap<Tid, VmProcess>,
    vms: Vec<Vm>,
    warnings: Vec<String>,
    /// When set, the inventory lists only VMs of this network namespace (inode number).
    netns: Option<u64>,
    /// Other processes that serve a VM's devices.
    backends: BTreeMap<VmId, Vec<Tid>>,
    /// libvirt's running domains, by UUID; `None` while libvirt does not answer.
    domains: Option<BTreeMap<String, Domain>>,
    sources: Sources,
}

impl Inventory {
    /// An empty inventory; [`Inventory::refresh`] fills it.
    ///
    /// # Errors
    /// [`HostError::Read`] for `/proc/self/mountinfo`.
    pub fn new() -> Result<Self, HostError> {
        Ok(Self {
            mounts: Mounts::read()?,
            non_vms: HashMap::new(),
            vm_processes: HashMap::new(),
            vms: Vec::new(),
            warnings: Vec::new(),
            netns: None,
            backends: BTreeMap::new(),
            domains: None,
            sources: Sources::default(),
        })
    }

    /// Restricts the inventory to VMs in the caller's network namespace, or lifts the restriction. Takes effect at the
    /// next refresh.
    ///
    /// # Errors
    /// [`HostError::Read`] when the caller's own namespace cannot be read.
    pub fn restrict_to_own_netns(&mut self, own: bool) -> Result<(), HostError> {
        let netns = match own {
            true => proc::netns(std::process::id())?,
            false => None,
        };
        if self.netns != netns {
            self.netns = netns;
            self.non_vms.clear();
            self.vm_processes.clear();
        }
        Ok(())
    }

    /// Sets the processes that serve devices of a VM: from the next refresh on, their threads count as its service threads.
    /// The caller must remove an ended process before its number can be reused.
    pub fn set_backends(&mut self, backends: BTreeMap<VmId, Vec<Tid>>) {
        self.backends = backends;
    }

    /// Sets libvirt's running domains by UUID, `None` while libvirt does not answer. From the next refresh on, their state stands
    /// for VMs whose QMP socket libvirt holds.
    pub fn set_domains(&mut self, domains: Option<BTreeMap<String, Domain>>) {
        self.domains = domains;
    }

    /// Sets who may confirm VMs, from the next refresh on. VMs that are confirmed stay so.
    pub fn set_sources(&mut self, sources: Sources) {
        self.sources = sources;
    }

    /// An inventory as of now.
    ///
    /// # Errors
    /// As [`Inventory::refresh_fully`].
    pub fn scan() -> Result<Self, HostError> {
        let mut inventory = Self::new()?;
        inventory.refresh_fully()?;
        Ok(inventory)
    }

    /// The VMs as of the last refresh, sorted by identity.
    #[must_use]
    pub fn vms(&self) -> &[Vm] {
        &self.vms
    }

    /// The VM of this identity.
    #[must_use]
    pub fn get(&self, id: &VmId) -> Option<&Vm> {
        self.vms.iter().find(|vm| vm.id == *id)
    }

    /// The VM of this identity, or of this name when only one VM has it.
    #[must_use]
    pub fn find(&self, text: &str) -> Option<&Vm> {
        let by_id = self.vms.iter().find(|vm| vm.id.as_str() == text);
        by_id.or_else(|| {
            let mut named = self.vms.iter().filter(|vm| vm.name == text);
            named.next().filter(|_| named.next().is_none())
        })
    }

    /// The VMs that may get something by their name: confirmed ones whose name no other confirmed VM has. Sorted by identity.
    pub fn trusted(&self) -> impl Iterator<Item = &Vm> {
        let mut count: HashMap<&str, usize> = HashMap::new();
        for vm in self.vms.iter().filter(|vm| vm.confirmed.is_some()) {
            *count.entry(&vm.name).or_default() += 1;
        }
        let is_unique = move |vm: &&Vm| count.get(vm.name.as_str()) == Some(&1);
        let confirmed = self.vms.iter().filter(|vm| vm.confirmed.is_some());
        confirmed.filter(is_unique)
    }

    /// One sentence for each VM that could not be read in full, with the remedy.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Mount points of the control groups.
    #[must_use]
    pub fn mounts(&self) -> &Mounts {
        &self.mounts
    }

    /// Reads the whole host again.
    ///
    /// Takes some microseconds per process of the host and per thread of a VM. It queries a confirmed QEMU over QMP when the VM is
    /// new, when its threads have changed, and every minute. It waits for the answers of all of them for 50 ms; one that comes
    /// later counts at a later refresh.
    ///
    /// # Errors
    /// [`HostError::Read`] when `/proc` cannot be listed. Failures of one VM become warnings.
    pub fn refresh(&mut self) -> Result<&[Vm], HostError> {
        self.refresh_at(Instant::now())
    }

    /// As [`Inventory::refresh`], for who looks only once: waits for late answers too, for all of them for 3 s.
    ///
    /// # Errors
    /// As [`Inventory::refresh`].
    pub fn refresh_fully(&mut self) -> Result<&[Vm], HostError> {
        let until = Instant::now() + LATE_TIMEOUT;
        loop {
            self.refresh()?;
            let mut processes = self.vm_processes.values();
            let late = processes.find_map(|process| process.vmm.open_question());
            let is_answered = late.is_some_and(|question| question.is_answered(until));
            // The next refresh takes it, and others that have come meanwhile.
            if !is_answered || Instant::now() > until {
                return Ok(&self.vms);
            }
        }
    }

    fn refresh_at(&mut self, now: Instant) -> Result<&[Vm], HostError> {
        let pids = proc::processes()?;
        self.warnings.clear();
        let mut seen = HashSet::with_capacity(pids.len());
        for pid in pids {
            if self.non_vms.get(&pid).is_some_and(|o| o.is_settled(now)) {
                seen.insert(pid);
                continue;
            }
            let stat = match proc::stat(pid) {
                Ok(Some(stat)) if !stat.is_dead() => stat,
                Ok(_) => continue,
                Err(e) => {
                    self.warnings.push(e.one_line());
                    continue;
                }
            };
            seen.insert(pid);
            if stat.is_kernel_thread() {
                self.remember(&stat, qemu::vhost_owner(&stat.comm), now);
            } else {
                self.classify(&stat, now);
            }
        }
        self.non_vms.retain(|pid, _| seen.contains(pid));
        let mut vhosts: HashMap<Tid, Vec<Thread>> = HashMap::new();
        for (pid, other) in &self.non_vms {
            if let Some(owner) = other.vhost_owner {
                vhosts.entry(owner).or_default().push(other.thread(*pid));
            }
        }
        // Sorted as the kernel lists threads, by number.
        vhosts
            .values_mut()
            .for_each(|threads| threads.sort_by_key(|t| t.tid));
        self.vm_processes.retain(|pid, _| seen.contains(pid));
        self.drop_forks();
        let mut pids: Vec<Tid> = self.vm_processes.keys().copied().collect();
        pids.sort_unstable();
        let mut evidence = Evidence::new(&self.sources, &self.mounts, self.domains.as_ref());
        let mut asked = Vec::new();
        for pid in pids {
            let kernel = vhosts.remove(&pid).unwrap_or_default();
            let Some(process) = self.vm_processes.get_mut(&pid) else {
                continue;
            };
            let was_asked = process.vmm.open_question().is_some();
            let mut warnings = Vec::new();
            let mut lives = process.refresh(pid, &kernel, &self.mounts, &mut warnings);
            if lives && process.confirm(&mut evidence) {
                // Now its monitor may be queried.
                warnings.clear();
                lives = process.refresh(pid, &kernel, &self.mounts, &mut warnings);
            }
            if !lives {
                self.vm_processes.remove(&pid);
            } else if !was_asked && process.vmm.open_question().is_some() {
                asked.push((pid, kernel, warnings));
                continue;
            }
            self.warnings.append(&mut warnings);
        }
        self.take_prompt_answers(asked);
        self.build_list();
        self.warn_of_doubts(now);
        Ok(&self.vms)
    }

    /// Reads VMs again whose emulators answer at once: process, vhost threads, and the warnings so far.
    fn take_prompt_answers(&mut self, asked: Vec<(Tid, Vec<Thread>, Vec<String>)>) {
        let until = Instant::now() + PROMPT_TIMEOUT;
        for (pid, kernel, mut warnings) in asked {
            let Some(process) = self.vm_processes.get_mut(&pid) else {
                continue;
            };
            let question = process.vmm.open_question();
            if question.is_some_and(|question| question.is_answered(until)) {
                warnings.clear();
                if !process.refresh(pid, &kernel, &self.mounts, &mut warnings) {
                    self.vm_processes.remove(&pid);
                }
            }
            self.warnings.append(&mut warnings);
        }
    }

    /// Records a process that is no VM.
    fn remember(&mut self, stat: &Stat, vhost_owner: Option<Tid>, now: Instant) {
        let new = NonVm::new(stat, vhost_owner, now);
        let known = self
            .non_vms
            .get(&stat.tid)
            .filter(|o| o.identity == new.identity);
        let first_seen = known.map_or(now, |o| o.first_seen);
        self.non_vms.insert(stat.tid, NonVm { first_seen, ..new });
    }

    /// Finds out whether a process runs a VM, unless that is known.
    fn classify(&mut self, stat: &Stat, now: Instant) {
        let pid = stat.tid;
        if let Some(process) = self.vm_processes.get_mut(&pid) {
            if process.identity.is_same_vm(stat) {
                process.ppid = stat.ppid;
                process.single_threaded = stat.threads <= 1;
                return;
            }
            self.vm_processes.remove(&pid);
        }
        let identity = ProcessIdentity::of(stat);
        if self
            .non_vms
            .get(&pid)
            .is_some_and(|o| o.identity == identity)
        {
            return self.remember(stat, None, now);
        }
        match identify(stat) {
            Ok(Some(_)) if !self.is_in_chosen_netns(pid) => self.remember(stat, None, now),
            Ok(Some(vmm)) => {
                self.non_vms.remove(&pid);
                let process = VmProcess::new(stat, vmm, now);
                self.vm_processes.insert(pid, process);
            }
            Ok(None) => self.remember(stat, None, now),
            // Not recorded: this program may get the right to read it later.
            Err(e) => self.warnings.push(e.one_line()),
        }
    }

    /// Whether a VM's process is in the network namespace that the inventory is restricted to.
    fn is_in_chosen_netns(&self, pid: Tid) -> bool {
        self.netns.is_none() || proc::netns(pid).ok().flatten() == self.netns
    }

    /// Removes one of two when a VM's process is the child of another VM's process of the same kind.
    ///
    /// The child is a fork that has not executed another program yet, with one exception: under `qemu -daemonize` the
    /// parent, then single-threaded, only waits for the child to be ready. UML never does that.
    fn drop_forks(&mut self) {
        let mut forks = Vec::new();
        for (pid, process) in &self.vm_processes {
            let Some(parent) = self.vm_processes.get(&process.ppid) else {
                continue;
            };
            if parent.vmm.hypervisor() != process.vmm.hypervisor() {
                continue;
            }
            let waits = matches!(parent.vmm, Vmm::Qemu(_)) && parent.single_threaded;
            forks.push(if waits { process.ppid } else { *pid });
        }
        for pid in forks {
            self.vm_processes.remove(&pid);
        }
    }

    /// Gives every VM its identity and builds the list.
    fn build_list(&mut self) {
        self.release_claimed_ids();
        let mut taken: HashSet<VmId> = self
            .vm_processes
            .values()
            .filter_map(|t| t.id.clone())
            .collect();
        let mut new: Vec<(bool, u64, Tid)> = self
            .vm_processes
            .iter()
            .filter(|(_, t)| t.id.is_none() && t.vm.is_some())
            .map(|(pid, t)| (t.confirmed.is_err(), t.identity.start_time, *pid))
            .collect();
        // Confirmed ones first, then the older ones.
        new.sort_unstable();
        for (_, _, pid) in new {
            if let Some(process) = self.vm_processes.get_mut(&pid)
                && let (Some(vm), Some(plain)) = (&process.vm, process.plain_id())
            {
                let id = if taken.contains(&plain) {
                    VmId::with_pid(vm.hypervisor, &vm.name, pid)
                } else {
                    plain
                };
                taken.insert(id.clone());
                process.id = Some(id);
            }
        }
        self.vms = self
            .vm_processes
            .values()
            .filter_map(|process| {
                let mut vm = process.vm.clone()?;
                vm.id = process.id.clone()?;
                let backends = self.backends.get(&vm.id).into_iter().flatten();
                vm.service.extend(backends.flat_map(|pid| backend(*pid)));
                let domains = self.domains.as_ref();
                let domain = domains.and_then(|domains| domains.get(vm.uuid.as_ref()?));
                vm.libvirt = domain.is_some();
                if let (None, Some(domain)) = (&vm.status, domain) {
                    vm.status = Some(domain.state.text().to_owned());
                }
                Some(vm)
            })
            .collect();
        self.vms.sort_by(|a, b| a.id.cmp(&b.id));
    }

    /// Takes an identity from a process that nobody confirms when a confirmed VM has that name: the VM gets it.
    fn release_claimed_ids(&mut self) {
        let processes = || self.vm_processes.values();
        let claimed: HashSet<VmId> = processes()
            .filter(|process| process.confirmed.is_err())
            .filter_map(|process| process.id.clone())
            .collect();
        let owed: HashSet<VmId> = processes()
            .filter(|process| process.confirmed.is_ok())
            .filter_map(VmProcess::plain_id)
            .filter(|id| claimed.contains(id))
            .collect();
        for process in self.vm_processes.values_mut() {
            if process.plain_id().is_some_and(|id| owed.contains(&id)) {
                process.id = None;
            }
        }
    }

    /// Says which VMs get nothing since nobody confirms them, or since another one has their name.
    fn warn_of_doubts(&mut self, now: Instant) {
        for process in self.vm_processes.values() {
            let is_old = now.saturating_duration_since(process.first_seen) >= CONFIRM_TIMEOUT;
            if let (Err(doubt), Some(id), Some(vm)) = (&process.confirmed, &process.id, &process.vm)
                && is_old
            {
                self.warnings.push(format!(
                    "{id}: process {} gets no accelerator: {doubt}; see \"Who is a VM\" in the book's page on safety",
                    vm.pid
                ));
            }
        }
        let trusted: HashSet<&VmId> = self.trusted().map(|vm| &vm.id).collect();
        let is_double = |vm: &&Vm| vm.confirmed.is_some() && !trusted.contains(&vm.id);
        let doubles = self.vms.iter().filter(is_double).map(|vm| {
            format!(
                "{}: another VM of this host has the same name, so it gets neither vread nor vpipe nor a lane; rename one of them",
                vm.id
            )
        });
        let doubles: Vec<String> = doubles.collect();
        self.warnings.extend(doubles);
        self.warnings.sort_unstable();
    }
}

/// The threads of a process that serves a device; none when it has ended.
fn backend(pid: Tid) -> impl Iterator<Item = ServiceThread> {
    let kind = ServiceKind::Backend;
    let threads = proc::threads(pid).unwrap_or_default().into_iter();
    threads.map(move |(thread, _)| ServiceThread { thread, kind })
}

#[cfg(test)]
mod tests;
