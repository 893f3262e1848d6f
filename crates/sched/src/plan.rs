// SPDX-License-Identifier: Apache-2.0
//! The plan that a mechanism carries out: which VMs run on which cores, and how.

use viola_policy::slices::{MS, Nanos, Params};

/// The algorithm of a core (see the `policy` crate).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Algorithm {
    /// The default: batch VMs get slices of exact length, and microslices of latency-sensitive VMs
    /// interrupt these slices.
    #[default]
    Interleaved,
    /// vSlicer's Algorithm 1 to the letter.
    Paper,
    /// The papers' baseline: Xen's credit scheduler.
    Credit {
        /// VMs that wake with credit preempt others.
        boost: bool,
    },
    /// vTurbo's regular pool: a VM's time on turbo cores counts here.
    Regular,
    /// vTurbo's turbo pool. A VM of class ls has its turbo vCPU here, with slots of its microslice; one of class batch has a
    /// regular vCPU here, which runs in the gaps.
    Turbo,
}

impl Algorithm {
    /// Whether the core is in one of vTurbo's two pools.
    pub fn is_pooled(self) -> bool {
        matches!(self, Self::Regular | Self::Turbo)
    }
}

/// A host thread of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadPlan {
    /// Thread.
    pub tid: i32,
    /// Whether it ranks one above the vCPU threads of its VM, so that a vCPU that polls cannot starve the thread that it polls
    /// for: vhost, I/O and emulator threads, and UML's kernel thread.
    pub service: bool,
}

/// One VM on one core.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmPlan {
    /// Class, weight, cap and microslice on this core.
    pub params: Params,
    /// Index of the VM in the accounting program.
    pub index: u32,
    /// Its main process.
    pub pid: i32,
    /// Whether all its packets pass interfaces that the accounting program watches (see
    /// [`viola_meter::Meter::watch_packets`]). If so, it gets the core for I/O only when a packet came.
    pub sees_packets: bool,
    /// Its threads on this core.
    pub threads: Vec<ThreadPlan>,
    /// Whether what its threads fork begins in the fair class (SCHED_RESET_ON_FORK) and gets a priority only from the controller.
    /// Not for UML: the guest's kernel forks guest processes, which it waits for.
    pub resets_on_fork: bool,
    /// On a core of a pool: the number of its regular vCPUs on this core, and on all cores.
    pub regular_vcpus: (u32, u32),
    /// For a VM whose turbo vCPU is on this core: a regular core of it, on which the turbo vCPU is held, below all others, while
    /// the VM's regular vCPUs are due the rest of its share. `None`: the filler thread holds this core instead.
    pub hold_cpu: Option<u32>,
}

/// One core and the VMs on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorePlan {
    /// CPU number.
    pub cpu: u32,
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Slice of a VM that is not latency-sensitive, ns.
    pub batch_slice: Nanos,
    /// Where the host works on the core too: most time of any 10 ms that the VMs' real-time threads may use, in thousandths.
    /// Beyond it they run as ordinary threads. `None`: the core is set aside for VMs.
    pub budget_permille: Option<u32>,
    /// On a turbo core: the part of its share that a VM keeps for its regular vCPUs while they wait, thousandths (see
    /// [`viola_policy::turbo::TurboConfig::reserve`]).
    pub reserve_permille: u32,
    /// The VMs, at most [`viola_policy::slices::MAX_VMS`].
    pub vms: Vec<VmPlan>,
}

/// All cores that viola schedules.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// One entry per core, each core once.
    pub cores: Vec<CorePlan>,
}

/// Default slice of batch VMs, ns: EEVDF's slice for a busy task at HZ=250.
pub const BATCH_SLICE: Nanos = 4 * MS;
/// The papers' slice, ns.
pub const PAPER_SLICE: Nanos = 30 * MS;
