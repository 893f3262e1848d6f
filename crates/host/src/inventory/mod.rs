// SPDX-License-Identifier: Apache-2.0
//! All VMs of this host, found once and kept up to date cheaply.
//!
//! A look over the host reads one line per process. Only a process that was not seen before is examined
//! further, and of one that is no VM for ten seconds the line is read each ten seconds only. What was seen is recognised by number, start time, name and stack address: the first two tell
//! a reused number, the other two a process that has become another program since.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

use crate::cgroup::Mounts;
use crate::error::HostError;
use crate::libvirt::Domain;
use crate::microvm::{self, MicroVm};
use crate::netns::{self, ConfiguredNic};
use crate::paths::absolute;
use crate::proc::{self, Stat};
use crate::qemu::{self, Qemu, QemuArgs};
use crate::thread::{Thread, Tid};
use crate::uml::{self, UmlArgs};
use crate::vm::{Hypervisor, ServiceKind, ServiceThread, Vm, VmId, printable};

/// Interfaces are asked for their numbers again after this time, for one that was made anew.
const NIC_AGE: Duration = Duration::from_secs(60);

/// A process that is no VM hardly becomes one later: it is looked at each time until it is known for so long, and this often
/// afterwards.
const OTHER_AGE: Duration = Duration::from_secs(10);

/// One program in one process.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mark {
    start_time: u64,
    comm: String,
    start_stack: u64,
}

impl Mark {
    fn of(stat: &Stat) -> Self {
        Self {
            start_time: stat.start_time,
            comm: stat.comm.clone(),
            start_stack: stat.start_stack,
        }
    }

    /// Threads of a VM may be renamed (`-name process=`), so for what is a VM the name does not count.
    fn is_same_vm(&self, stat: &Stat) -> bool {
        self.start_time == stat.start_time && self.start_stack == stat.start_stack
    }
}

/// A process that is no VM, or a thread in the kernel.
struct Other {
    mark: Mark,
    /// The VM's process that it works for, if it is a thread in the kernel that does.
    serves: Option<Tid>,
    met: Instant,
    read: Instant,
}

impl Other {
    fn new(stat: &Stat, serves: Option<Tid>, at: Instant) -> Self {
        Self {
            mark: Mark::of(stat),
            serves,
            met: at,
            read: at,
        }
    }

    /// Whether it is believed to be what it was.
    fn is_settled(&self, at: Instant) -> bool {
        at.saturating_duration_since(self.met) >= OTHER_AGE
            && at.saturating_duration_since(self.read) < OTHER_AGE
    }

    fn thread(&self, pid: Tid) -> Thread {
        Thread {
            pid,
            tid: pid,
            start_time: self.mark.start_time,
        }
    }
}

/// What is remembered of a VM between two looks.
struct Track {
    mark: Mark,
    id: Option<VmId>,
    ppid: Tid,
    single_threaded: bool,
    kind: Kind,
    nics: Vec<ConfiguredNic>,
    nics_asked: Option<Instant>,
    vm: Option<Vm>,
}

enum Kind {
    Uml(UmlArgs),
    Qemu(Box<Qemu>),
    MicroVm(Box<MicroVm>),
}

impl Kind {
    fn hypervisor(&self) -> Hypervisor {
        match self {
            Self::Uml(_) => Hypervisor::Uml,
            Self::Qemu(_) => Hypervisor::Qemu,
            Self::MicroVm(micro) => micro.hypervisor(),
        }
    }
}

/// The VMs of this host.
pub struct Inventory {
    mounts: Mounts,
    /// Processes that are no VM.
    others: HashMap<Tid, Other>,
    tracks: HashMap<Tid, Track>,
    vms: Vec<Vm>,
    warnings: Vec<String>,
    /// Only VMs of this network namespace, by its inode number.
    netns: Option<u64>,
    /// Other processes that work for a VM.
    backends: BTreeMap<VmId, Vec<Tid>>,
    /// Domains of libvirt's that run, by UUID.
    domains: BTreeMap<String, Domain>,
}

impl Inventory {
    /// An inventory that has not looked yet.
    ///
    /// # Errors
    /// [`HostError::Read`] for `/proc/self/mountinfo`.
    pub fn new() -> Result<Self, HostError> {
        Ok(Self {
            mounts: Mounts::read()?,
            others: HashMap::new(),
            tracks: HashMap::new(),
            vms: Vec::new(),
            warnings: Vec::new(),
            netns: None,
            backends: BTreeMap::new(),
            domains: BTreeMap::new(),
        })
    }

    /// Leaves out VMs whose process is in another network namespace than the caller, or takes them in again. It counts
    /// from the next look on.
    ///
    /// # Errors
    /// [`HostError::Read`] when the caller's own namespace is not known.
    pub fn restrict_to_own_netns(&mut self, own: bool) -> Result<(), HostError> {
        let netns = match own {
            true => proc::netns(std::process::id())?,
            false => None,
        };
        if self.netns != netns {
            self.netns = netns;
            self.others.clear();
            self.tracks.clear();
        }
        Ok(())
    }

    /// From the next look on the threads of these processes count as service threads of a VM: they carry one of its
    /// devices. Replaces what was said before. One that has ended has no threads; its number must not be said any
    /// more by the time that it may be another's.
    pub fn set_backends(&mut self, backends: BTreeMap<VmId, Vec<Tid>>) {
        self.backends = backends;
    }

    /// From the next look on these are libvirt's domains, by UUID: what it says of their state holds for VMs that QMP
    /// was not asked about, since libvirt keeps their monitors. Replaces what was said before.
    pub fn set_domains(&mut self, domains: BTreeMap<String, Domain>) {
        self.domains = domains;
    }

    /// An inventory of now.
    ///
    /// # Errors
    /// As [`Inventory::refresh`].
    pub fn scan() -> Result<Self, HostError> {
        let mut inventory = Self::new()?;
        inventory.refresh()?;
        Ok(inventory)
    }

    /// The VMs as of the last look, by identity.
    #[must_use]
    pub fn vms(&self) -> &[Vm] {
        &self.vms
    }

    /// The VM of this identity.
    #[must_use]
    pub fn get(&self, id: &VmId) -> Option<&Vm> {
        self.vms.iter().find(|vm| vm.id == *id)
    }

    /// The VM an operator means: by identity, or by its name alone when only one VM has it.
    #[must_use]
    pub fn find(&self, text: &str) -> Option<&Vm> {
        let by_id = self.vms.iter().find(|vm| vm.id.as_str() == text);
        by_id.or_else(|| {
            let mut named = self.vms.iter().filter(|vm| vm.name == text);
            named.next().filter(|_| named.next().is_none())
        })
    }

    /// One sentence for each VM that could not be read in full, with what to do about it.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Mount points of the control groups.
    #[must_use]
    pub fn mounts(&self) -> &Mounts {
        &self.mounts
    }

    /// Looks at the whole host again.
    ///
    /// It takes some microseconds per process of the host and per thread of a VM. A QEMU is asked over QMP
    /// when it is new, when its threads have changed, and each minute; one that does not answer holds this
    /// up by half a second, at growing intervals.
    ///
    /// # Errors
    /// [`HostError::Read`] when `/proc` cannot be listed. What concerns one VM is a warning.
    pub fn refresh(&mut self) -> Result<&[Vm], HostError> {
        self.refresh_at(Instant::now())
    }

    fn refresh_at(&mut self, now: Instant) -> Result<&[Vm], HostError> {
        let pids = proc::processes()?;
        self.warnings.clear();
        let mut seen = HashSet::with_capacity(pids.len());
        for pid in pids {
            if self.others.get(&pid).is_some_and(|o| o.is_settled(now)) {
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
                self.meet(&stat, now);
            }
        }
        self.others.retain(|pid, _| seen.contains(pid));
        let mut vhosts: HashMap<Tid, Vec<Thread>> = HashMap::new();
        for (pid, other) in &self.others {
            if let Some(owner) = other.serves {
                vhosts.entry(owner).or_default().push(other.thread(*pid));
            }
        }
        // In the order of their numbers, as the kernel lists them.
        vhosts
            .values_mut()
            .for_each(|threads| threads.sort_by_key(|t| t.tid));
        self.tracks.retain(|pid, _| seen.contains(pid));
        self.drop_forks();
        let mut pids: Vec<Tid> = self.tracks.keys().copied().collect();
        pids.sort_unstable();
        for pid in pids {
            let kernel = vhosts.remove(&pid).unwrap_or_default();
            self.look(pid, &kernel);
        }
        self.collect();
        Ok(&self.vms)
    }

    /// Looks again at the threads of one VM only, for the moment after one of its threads has forked.
    /// `None` when the VM is gone or was never found.
    pub fn refresh_vm(&mut self, id: &VmId) -> Option<&Vm> {
        let pid = self.vms.iter().find(|vm| vm.id == *id)?.pid;
        // Threads in the kernel are found by a look at the whole host only.
        let kernel: Vec<Thread> = self
            .get(id)?
            .service
            .iter()
            .map(|s| s.thread)
            .filter(|t| t.pid == t.tid && t.pid != pid)
            .filter(|t| matches!(proc::stat(t.tid), Ok(Some(s)) if s.is_kernel_thread()))
            .collect();
        let is_here = match (self.tracks.get(&pid), proc::stat(pid)) {
            (Some(track), Ok(Some(stat))) => track.mark.is_same_vm(&stat) && !stat.is_dead(),
            _ => false,
        };
        if is_here {
            self.look(pid, &kernel);
        } else {
            self.tracks.remove(&pid);
        }
        self.collect();
        self.get(id)
    }

    /// Notes that something is no VM.
    fn remember(&mut self, stat: &Stat, serves: Option<Tid>, now: Instant) {
        let new = Other::new(stat, serves, now);
        let known = self.others.get(&stat.tid).filter(|o| o.mark == new.mark);
        let met = known.map_or(now, |o| o.met);
        self.others.insert(stat.tid, Other { met, ..new });
    }

    /// Decides what a process is, unless that is known.
    fn meet(&mut self, stat: &Stat, now: Instant) {
        let pid = stat.tid;
        if let Some(track) = self.tracks.get_mut(&pid) {
            if track.mark.is_same_vm(stat) {
                track.ppid = stat.ppid;
                track.single_threaded = stat.threads <= 1;
                return;
            }
            self.tracks.remove(&pid);
        }
        let mark = Mark::of(stat);
        if self.others.get(&pid).is_some_and(|o| o.mark == mark) {
            return self.remember(stat, None, now);
        }
        match identify(stat) {
            Ok(Some(_)) if !self.is_near(pid) => self.remember(stat, None, now),
            Ok(Some(kind)) => {
                self.others.remove(&pid);
                let track = Track {
                    mark,
                    id: None,
                    ppid: stat.ppid,
                    single_threaded: stat.threads <= 1,
                    kind,
                    nics: Vec::new(),
                    nics_asked: None,
                    vm: None,
                };
                self.tracks.insert(pid, track);
            }
            Ok(None) => self.remember(stat, None, now),
            // Not remembered: the right to look may come.
            Err(e) => self.warnings.push(e.one_line()),
        }
    }

    /// Whether a VM's process is in the network namespace that was asked for.
    fn is_near(&self, pid: Tid) -> bool {
        self.netns.is_none() || proc::netns(pid).ok().flatten() == self.netns
    }

    /// Leaves one of two when a VM's process is the child of another VM's process of the same kind.
    ///
    /// The child is a copy that has not become another program yet, except behind `qemu -daemonize`, where
    /// the parent only waits, in its single thread, for the child to be ready. UML never does that.
    fn drop_forks(&mut self) {
        let mut forks = Vec::new();
        for (pid, track) in &self.tracks {
            let Some(parent) = self.tracks.get(&track.ppid) else {
                continue;
            };
            if parent.kind.hypervisor() != track.kind.hypervisor() {
                continue;
            }
            let waits = matches!(parent.kind, Kind::Qemu(_)) && parent.single_threaded;
            forks.push(if waits { track.ppid } else { *pid });
        }
        for pid in forks {
            self.tracks.remove(&pid);
        }
    }

    /// Brings one VM up to date; a VM that ends meanwhile is left out.
    fn look(&mut self, pid: Tid, kernel: &[Thread]) {
        let Some(track) = self.tracks.get_mut(&pid) else {
            return;
        };
        match track.look(pid, kernel, &self.mounts, &mut self.warnings) {
            Ok(true) => {}
            Ok(false) => {
                self.tracks.remove(&pid);
            }
            Err(e) => {
                let label = track
                    .id
                    .as_ref()
                    .map_or_else(|| format!("process {pid}"), ToString::to_string);
                self.warnings.push(format!("{label}: {}", e.one_line()));
            }
        }
    }

    /// Gives every VM its identity and makes the list.
    fn collect(&mut self) {
        let mut taken: HashSet<VmId> = self.tracks.values().filter_map(|t| t.id.clone()).collect();
        let mut new: Vec<(u64, Tid)> = self
            .tracks
            .iter()
            .filter(|(_, t)| t.id.is_none() && t.vm.is_some())
            .map(|(pid, t)| (t.mark.start_time, *pid))
            .collect();
        new.sort_unstable();
        for (_, pid) in new {
            if let Some(track) = self.tracks.get_mut(&pid)
                && let Some(vm) = &track.vm
            {
                let plain = VmId::new(vm.hypervisor, &vm.name);
                let id = if taken.contains(&plain) {
                    VmId::with_pid(vm.hypervisor, &vm.name, pid)
                } else {
                    plain
                };
                taken.insert(id.clone());
                track.id = Some(id);
            }
        }
        self.vms = self
            .tracks
            .values()
            .filter_map(|track| {
                let mut vm = track.vm.clone()?;
                vm.id = track.id.clone()?;
                let backends = self.backends.get(&vm.id).into_iter().flatten();
                vm.service.extend(backends.flat_map(|pid| backend(*pid)));
                let domain = vm.uuid.as_ref().and_then(|uuid| self.domains.get(uuid));
                vm.libvirt = domain.is_some();
                if let (None, Some(domain)) = (&vm.status, domain) {
                    vm.status = Some(domain.state.text().to_owned());
                }
                Some(vm)
            })
            .collect();
        self.vms.sort_by(|a, b| a.id.cmp(&b.id));
    }
}

/// The threads of a process that carries a device; none when it has ended.
fn backend(pid: Tid) -> impl Iterator<Item = ServiceThread> {
    let kind = ServiceKind::Backend;
    let threads = proc::threads(pid).unwrap_or_default().into_iter();
    threads.map(move |(thread, _)| ServiceThread { thread, kind })
}

impl Track {
    /// `Ok(false)` when the VM has ended.
    fn look(
        &mut self,
        pid: Tid,
        kernel: &[Thread],
        mounts: &Mounts,
        warnings: &mut Vec<String>,
    ) -> Result<bool, HostError> {
        let is_new = self.vm.is_none();
        let (vcpus, service, asked) = match &mut self.kind {
            Kind::Uml(args) => {
                let before = self.vm.as_ref().map_or(&[][..], |vm| &vm.service);
                let ncpus = args.ncpus.unwrap_or(1);
                let (vcpus, service) = uml::threads(pid, ncpus, before)?;
                let known = vcpus.len() as u32;
                if (1..ncpus).contains(&known) {
                    warnings.push(format!(
                        "process {pid}: of this UML guest's {ncpus} vCPUs only {known} can be told; \
                         it may be booting, else start it with ncpus={known}"
                    ));
                }
                (vcpus, service, false)
            }
            Kind::Qemu(qemu) => {
                let look = qemu.look(pid, kernel)?;
                warnings.extend(look.warning);
                (look.vcpus, look.service, look.asked)
            }
            Kind::MicroVm(micro) => {
                let look = micro.look(pid)?;
                (look.vcpus, look.service, look.asked)
            }
        };
        if vcpus.is_empty() && service.is_empty() {
            return Ok(false);
        }
        let (name, disks) = match (&self.vm, &self.kind) {
            (Some(vm), _) if !asked => (vm.name.clone(), vm.disks.clone()),
            (Some(vm), Kind::Qemu(qemu)) => (vm.name.clone(), qemu.disks(pid)),
            (_, Kind::MicroVm(micro)) => (micro.name(pid), micro.disks(pid)),
            (_, Kind::Qemu(qemu)) => (printable(&qemu.name(pid)), qemu.disks(pid)),
            (_, Kind::Uml(args)) => {
                let mut disks = args.disks.clone();
                for disk in &mut disks {
                    disk.path = absolute(pid, std::mem::take(&mut disk.path));
                }
                (uml::name(pid, args)?, disks)
            }
        };
        if is_new || asked {
            self.nics = match &self.kind {
                Kind::Uml(args) => args.nics.clone(),
                Kind::Qemu(qemu) => qemu.nics(pid)?,
                Kind::MicroVm(micro) => micro.nics(pid)?,
            };
        }
        let is_complete = |vm: &Vm| {
            vm.nics.len() == self.nics.len() && vm.nics.iter().all(|nic| nic.ifindex.is_some())
        };
        let is_fresh = !asked && self.nics_asked.is_some_and(|at| at.elapsed() < NIC_AGE);
        let nics = match &self.vm {
            Some(vm) if is_fresh && is_complete(vm) => vm.nics.clone(),
            _ => {
                self.nics_asked = Some(Instant::now());
                netns::resolve(pid, &self.nics)
            }
        };
        let first_threads: Vec<Tid> = vcpus
            .iter()
            .filter_map(|v| v.threads.first())
            .map(|t| t.tid)
            .collect();
        let mut cores = crate::CpuSet::new();
        vcpus.iter().for_each(|vcpu| cores.extend(&vcpu.cores));
        if vcpus.is_empty() {
            cores = proc::affinity(pid)?.unwrap_or_default();
        }
        let hypervisor = self.kind.hypervisor();
        self.vm = Some(Vm {
            id: VmId::new(hypervisor, &name),
            name,
            hypervisor,
            pid,
            start_time: self.mark.start_time,
            vcpus,
            service,
            disks,
            nics,
            cgroup: mounts.of_vm(pid, &first_threads)?,
            cores,
            status: match &self.kind {
                Kind::Uml(_) => None,
                Kind::Qemu(qemu) => qemu.status(),
                Kind::MicroVm(micro) => micro.status(),
            },
            uuid: match &self.kind {
                Kind::Uml(_) | Kind::MicroVm(_) => None,
                Kind::Qemu(qemu) => qemu.uuid(),
            },
            libvirt: false,
        });
        Ok(true)
    }
}

fn identify(stat: &Stat) -> Result<Option<Kind>, HostError> {
    let Some(args) = proc::cmdline(stat.tid)? else {
        return Ok(None);
    };
    let after_name = args.get(1..).unwrap_or_default();
    if qemu::is_qemu(stat, &args)? {
        let qemu = Qemu::new(QemuArgs::parse(after_name));
        return Ok(Some(Kind::Qemu(Box::new(qemu))));
    }
    if let Some(hypervisor) = microvm::hypervisor(stat, &args)? {
        let micro = MicroVm::new(hypervisor, after_name);
        return Ok(Some(Kind::MicroVm(Box::new(micro))));
    }
    if uml::is_uml(stat.tid, &args)? {
        return Ok(Some(Kind::Uml(UmlArgs::parse(after_name))));
    }
    Ok(None)
}

#[cfg(test)]
mod tests;
