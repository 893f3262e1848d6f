// SPDX-License-Identifier: Apache-2.0
//! One process that runs a VM: what it is, and its VM as of the last refresh.

use std::time::{Duration, Instant};

use super::process::ProcessIdentity;
use crate::cgroup::{GroupCache, Mounts};
use crate::confirm::{Confirmation, Evidence};
use crate::cpuset::CpuSet;
use crate::error::HostError;
use crate::held_nics::HeldNics;
use crate::microvm::{self, MicroVm};
use crate::netns::{self, ConfiguredNic};
use crate::paths::absolute;
use crate::pidfd::ProcessFd;
use crate::proc::{self, Stat};
use crate::qemu::{self, Qemu, QemuArgs};
use crate::question::Awaited;
use crate::thread::{Thread, Tid};
use crate::uml::{self, UmlArgs};
use crate::vm::{Hypervisor, Vm, VmId, printable};

/// Interface numbers are resolved again after this time, in case an interface was created anew.
const NIC_REFRESH_INTERVAL: Duration = Duration::from_secs(60);

/// A process that runs a VM.
pub(super) struct VmProcess {
    pub(super) identity: ProcessIdentity,
    pub(super) id: Option<VmId>,
    pub(super) ppid: Tid,
    pub(super) single_threaded: bool,
    pub(super) vmm: Vmm,
    pub(super) nics: Vec<ConfiguredNic>,
    pub(super) nics_resolved: Option<Instant>,
    groups: GroupCache,
    pub(super) vm: Option<Vm>,
    /// `None` where the kernel gives none.
    pub(super) fd: Option<ProcessFd>,
    pub(super) first_seen: Instant,
    /// Who confirms the VM, or why nobody does.
    pub(super) confirmed: Result<Confirmation, String>,
}

/// What is known of the process, by hypervisor.
pub(super) enum Vmm {
    Uml(UmlArgs),
    Qemu(Box<Qemu>),
    MicroVm(Box<MicroVm>),
}

impl Vmm {
    pub(super) fn hypervisor(&self) -> Hypervisor {
        match self {
            Self::Uml(_) => Hypervisor::Uml,
            Self::Qemu(_) => Hypervisor::Qemu,
            Self::MicroVm(microvm) => microvm.hypervisor(),
        }
    }

    /// What it was asked, while no refresh has taken the answer.
    pub(super) fn open_question(&self) -> Option<&dyn Awaited> {
        match self {
            Self::Uml(_) => None,
            Self::Qemu(qemu) => qemu.open_question(),
            Self::MicroVm(microvm) => microvm.open_question(),
        }
    }
}

impl VmProcess {
    /// A process that [`identify`] took for a VM.
    pub(super) fn new(stat: &Stat, vmm: Vmm, now: Instant) -> Self {
        Self {
            identity: ProcessIdentity::of(stat),
            id: None,
            ppid: stat.ppid,
            single_threaded: stat.threads <= 1,
            vmm,
            nics: Vec::new(),
            nics_resolved: None,
            groups: GroupCache::default(),
            vm: None,
            fd: ProcessFd::open(stat),
            first_seen: now,
            confirmed: Err(String::new()),
        }
    }

    /// The identity that the VM has if no other one is called like it.
    pub(super) fn plain_id(&self) -> Option<VmId> {
        let vm = self.vm.as_ref()?;
        Some(VmId::new(vm.hypervisor, &vm.name))
    }

    /// Asks who confirms the VM, unless that is known; `true` when somebody newly does. A confirmed VM stays so until its
    /// process ends.
    pub(super) fn confirm(&mut self, evidence: &mut Evidence<'_>) -> bool {
        let Some(vm) = &self.vm else {
            return false;
        };
        let was_confirmed = self.confirmed.is_ok();
        if !was_confirmed {
            self.confirmed = evidence.confirm(vm);
        }
        self.confirmed.is_ok() && !was_confirmed
    }

    /// Reads the VM again; a failure becomes a warning. Returns `false` when it has ended.
    pub(super) fn refresh(
        &mut self,
        pid: Tid,
        kernel: &[Thread],
        mounts: &Mounts,
        warnings: &mut Vec<String>,
    ) -> bool {
        self.update(pid, kernel, mounts, warnings)
            .unwrap_or_else(|e| {
                let label = match &self.id {
                    Some(id) => id.to_string(),
                    None => format!("process {pid}"),
                };
                warnings.push(format!("{label}: {}", e.one_line()));
                true
            })
    }

    /// Reads the VM again. Returns `false` when it has ended.
    fn update(
        &mut self,
        pid: Tid,
        kernel: &[Thread],
        mounts: &Mounts,
        warnings: &mut Vec<String>,
    ) -> Result<bool, HostError> {
        let is_new = self.vm.is_none();
        // The process chooses the sockets that a query connects to, and how long the answer takes.
        let may_query = self.confirmed.is_ok();
        let (vcpus, service, queried) = match &mut self.vmm {
            Vmm::Uml(args) => {
                let before = self.vm.as_ref().map_or(&[][..], |vm| &vm.service);
                let ncpus = args.ncpus.unwrap_or(1);
                let (vcpus, service) = uml::threads(pid, ncpus, before)?;
                let known = vcpus.len() as u32;
                if (1..ncpus).contains(&known) {
                    warnings.push(format!(
                        "process {pid}: found only {known} of this UML guest's {ncpus} vCPUs; \
                         wait if it is booting, else start it with ncpus={known}"
                    ));
                }
                (vcpus, service, false)
            }
            Vmm::Qemu(qemu) => {
                let now = qemu.update(pid, kernel, may_query)?;
                warnings.extend(now.warning);
                (now.vcpus, now.service, now.queried)
            }
            Vmm::MicroVm(microvm) => {
                let now = microvm.update(pid, may_query)?;
                (now.vcpus, now.service, now.queried)
            }
        };
        if vcpus.is_empty() && service.is_empty() {
            return Ok(false);
        }
        let (name, disks) = match (&self.vm, &self.vmm) {
            (Some(vm), _) if !queried => (vm.name.clone(), vm.disks.clone()),
            (Some(vm), Vmm::Qemu(qemu)) => (vm.name.clone(), qemu.disks(pid)),
            (_, Vmm::MicroVm(microvm)) => (microvm.name(pid), microvm.disks(pid)),
            (_, Vmm::Qemu(qemu)) => (printable(&qemu.name(pid)), qemu.disks(pid)),
            (_, Vmm::Uml(args)) => {
                let mut disks = args.disks.clone();
                for disk in &mut disks {
                    disk.path = absolute(pid, std::mem::take(&mut disk.path));
                }
                (uml::name(pid, args)?, disks)
            }
        };
        if is_new || queried {
            self.nics = match &self.vmm {
                Vmm::Uml(args) => args.nics.clone(),
                Vmm::Qemu(qemu) => qemu.nics(pid)?,
                Vmm::MicroVm(microvm) => microvm.nics(pid)?,
            };
        }
        let is_complete = |vm: &Vm| {
            vm.nics.len() == self.nics.len() && vm.nics.iter().all(|nic| nic.ifindex.is_some())
        };
        let is_fresh = !queried
            && self
                .nics_resolved
                .is_some_and(|at| at.elapsed() < NIC_REFRESH_INTERVAL);
        let nics = match &self.vm {
            Some(vm) if is_fresh && is_complete(vm) => vm.nics.clone(),
            _ => {
                self.nics_resolved = Some(Instant::now());
                let mut nics = netns::resolve(pid, &self.nics);
                let held = HeldNics::read(pid, &nics)?;
                nics.retain(|nic| held.has(nic));
                nics
            }
        };
        let first_threads: Vec<Tid> = vcpus
            .iter()
            .filter_map(|v| v.threads.first())
            .map(|t| t.tid)
            .collect();
        let mut cores = CpuSet::new();
        vcpus.iter().for_each(|vcpu| cores.extend(&vcpu.cores));
        if vcpus.is_empty() {
            cores = proc::affinity(pid)?.unwrap_or_default();
        }
        if self.fd.as_ref().is_some_and(ProcessFd::has_ended) {
            return Ok(false);
        }
        let hypervisor = self.vmm.hypervisor();
        self.vm = Some(Vm {
            id: VmId::new(hypervisor, &name),
            name,
            hypervisor,
            pid,
            start_time: self.identity.start_time,
            vcpus,
            service,
            disks,
            nics,
            cgroup: (self.groups).refresh(mounts, pid, &first_threads, Instant::now())?,
            cores,
            status: match &self.vmm {
                Vmm::Uml(_) => None,
                Vmm::Qemu(qemu) => qemu.status(),
                Vmm::MicroVm(microvm) => microvm.status(),
            },
            uuid: match &self.vmm {
                Vmm::Uml(_) | Vmm::MicroVm(_) => None,
                Vmm::Qemu(qemu) => qemu.uuid(),
            },
            libvirt: false,
            confirmed: self.confirmed.clone().ok(),
        });
        Ok(true)
    }
}

/// Whether a process runs a VM, by its program and command line.
pub(super) fn identify(stat: &Stat) -> Result<Option<Vmm>, HostError> {
    let Some(args) = proc::cmdline(stat.tid)? else {
        return Ok(None);
    };
    let after_name = args.get(1..).unwrap_or_default();
    if qemu::is_qemu(stat, &args)? {
        let qemu = Qemu::new(QemuArgs::parse(after_name));
        return Ok(Some(Vmm::Qemu(Box::new(qemu))));
    }
    if let Some(hypervisor) = microvm::hypervisor(stat, &args)? {
        let microvm = MicroVm::new(hypervisor, after_name);
        return Ok(Some(Vmm::MicroVm(Box::new(microvm))));
    }
    if uml::is_uml(stat.tid, &args)? {
        return Ok(Some(Vmm::Uml(UmlArgs::parse(after_name))));
    }
    Ok(None)
}
