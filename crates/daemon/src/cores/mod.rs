// SPDX-License-Identifier: Apache-2.0
//! The cores that slices and turbo plan together: the input of a plan, and which vCPU runs on which core.

mod layout;

pub use layout::{Layout, TURBO_VCPU};

use std::collections::BTreeMap;

use viola_host::{CpuSet, Thread, Tid, Vcpu, Vm};
use viola_policy::slices::{Class, Nanos};
use viola_sched::Algorithm;

/// The CPUs on which threads are to be kept.
pub type DesiredPins = BTreeMap<Thread, CpuSet>;

/// What holds for the whole plan.
#[derive(Debug, Clone, Copy)]
pub struct PlanConfig<'a> {
    /// Regular cores: set aside for VMs, without those that are turbo cores now.
    pub cores: &'a CpuSet,
    /// Scheduling algorithm of a regular core without turbo VMs.
    pub algorithm: Algorithm,
    /// Slice of a batch VM, ns.
    pub batch_slice: Nanos,
    /// Turbo cores; `None` when the configuration names none.
    pub turbo: Option<TurboConfig<'a>>,
}

/// What holds for turbo cores.
#[derive(Debug, Clone, Copy)]
pub struct TurboConfig<'a> {
    /// The present turbo cores; may be empty.
    pub cores: &'a CpuSet,
    /// Slice of a turbo vCPU, ns.
    pub slot: Nanos,
    /// Thousandths of any 10 ms that real-time threads may use; set where the host runs on these
    /// cores as well.
    pub budget_permille: Option<u32>,
    /// Part of a VM's share that its regular vCPUs keep while they wait, thousandths.
    pub reserve_permille: u32,
    /// Why `cores` is empty, if it is.
    pub why_none: &'a str,
}

/// A VM as the plan sees it.
#[derive(Debug, Clone)]
pub struct Candidate<'a> {
    /// The VM.
    pub vm: &'a Vm,
    /// Its index in the accounting program.
    pub index: u32,
    /// Its class.
    pub class: Class,
    /// Whether it wants a turbo vCPU.
    pub turbo: bool,
    /// Its slice while it is latency-sensitive, ns.
    pub microslice: Nanos,
    /// Its weight, 1..=65535.
    pub weight: u32,
    /// Cap of all its vCPUs together, thousandths of one core.
    pub cap_permille: Option<u32>,
    /// Whether viola has to enforce that cap, since the kernel does not.
    pub capped_by_viola: bool,
    /// Quota of each vCPU in the control group, thousandths of one core.
    pub vcpu_quota: Option<u32>,
    /// CPUs that its threads may run on without viola's pins; at least those of all service threads.
    pub allowed: BTreeMap<Tid, CpuSet>,
    /// Why its threads cannot be managed, if so.
    pub blocked: Option<String>,
}

impl Candidate<'_> {
    /// CPUs that a vCPU may run on without viola's pins.
    pub fn allowed_of<'a>(&'a self, vcpu: &'a Vcpu) -> &'a CpuSet {
        let first = vcpu.threads.first().and_then(|t| self.allowed.get(&t.tid));
        first.unwrap_or(&vcpu.cores)
    }

    /// Why the cores of this VM have to be managed, if they have.
    pub fn reason_to_manage(&self) -> Option<String> {
        if self.class == Class::Ls {
            Some(format!("{} is latency-sensitive", self.vm.name))
        } else if self.capped_by_viola {
            Some(format!("{} has a cap", self.vm.name))
        } else {
            None
        }
    }
}
