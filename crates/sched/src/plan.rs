// SPDX-License-Identifier: Apache-2.0
//! What a mechanism is asked to bring about.

use viola_policy::slices::{MS, Nanos, Params};

/// Which algorithm decides on a core (see the `policy` crate).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Algorithm {
    /// Exactly protected slices, LSVM microslices cut into the others' slices. The default.
    #[default]
    Interleaved,
    /// vSlicer's Algorithm 1 to the letter.
    Paper,
    /// The papers' baseline: Xen's credit scheduler.
    Credit {
        /// VMs that wake with credit preempt.
        boost: bool,
    },
    /// vTurbo's regular pool: what a VM runs on turbo cores counts here.
    Regular,
    /// vTurbo's turbo pool. A VM of class ls has its turbo vCPU here, with slots of its microslice; one of class batch
    /// an ordinary vCPU that runs in the gaps.
    Turbo,
}

impl Algorithm {
    /// Whether the core belongs to one of vTurbo's two pools.
    pub fn is_pooled(self) -> bool {
        matches!(self, Self::Regular | Self::Turbo)
    }
}

/// A host thread of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadPlan {
    /// Thread.
    pub tid: i32,
    /// Ranks one above the vCPU threads of its VM: vhost, I/O and emulator threads, and UML's kernel thread, so
    /// that a vCPU that polls cannot starve what it polls for.
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
    /// All its packets pass through interfaces that the accounting program watches (see
    /// [`viola_meter::Meter::watch_packets`]), so that it need not be given the core on suspicion.
    pub sees_packets: bool,
    /// Its threads on this core.
    pub threads: Vec<ThreadPlan>,
    /// Only on a core of a pool: how many of its regular vCPUs are placed on this core, and how many it has in all.
    pub regular_vcpus: (u32, u32),
    /// Only for a VM with its turbo vCPU on this core: a regular core of it, where the turbo vCPU waits, below all
    /// others, while the VM's regular vCPUs are due the rest of its share. `None`: a thread of ours then holds this core.
    pub hold_cpu: Option<u32>,
}

/// One core and the VMs on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorePlan {
    /// CPU number.
    pub cpu: u32,
    /// Who decides.
    pub algorithm: Algorithm,
    /// Slice of a VM that is not latency-sensitive.
    pub batch_slice: Nanos,
    /// Most that the VMs' real-time threads take of any 10 ms of the core, in thousandths, where the host works on
    /// it too; what they want beyond that they get as ordinary threads. `None`: the core is set aside for them.
    pub budget_permille: Option<u32>,
    /// On a turbo core: what a VM keeps of its share for its regular vCPUs while they wait, thousandths (see
    /// [`viola_policy::turbo::TurboConfig::reserve`]).
    pub reserve_permille: u32,
    /// At most [`viola_policy::slices::MAX_VMS`].
    pub vms: Vec<VmPlan>,
}

/// All cores that viola schedules.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// One entry per core, each core once.
    pub cores: Vec<CorePlan>,
}

/// Slice of batch VMs when nothing else is said: what EEVDF gives a busy task at HZ=250.
pub const BATCH_SLICE: Nanos = 4 * MS;
/// The papers' slice.
pub const PAPER_SLICE: Nanos = 30 * MS;
