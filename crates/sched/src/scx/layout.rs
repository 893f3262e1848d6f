// SPDX-License-Identifier: Apache-2.0
//! The structures of bpf/scx.h, and the knobs.

use viola_policy::slices::{InterleavedConfig, MS, Nanos, US};

/// Name of the mechanism.
pub const NAME: &str = "sched_ext";
/// Most VMs on one core.
pub const ROWS: usize = viola_policy::slices::MAX_VMS;
/// VM ids on one host are `1..VM_IDS`.
pub const VM_IDS: u32 = 256;

/// Parameters of a VM: `struct vm_params`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VmParams {
    /// VM id; 0: the row is vacant.
    pub id: u32,
    /// 1: latency-sensitive.
    pub ls: u32,
    /// Weight, 1..=65535.
    pub weight: u32,
    /// Cap, thousandths of the core; 0: no cap.
    pub cap_permille: u32,
    /// Microslice, ns.
    pub microslice: Nanos,
    /// On a core of a pool: number of the VM's regular vCPUs on this core.
    pub here: u32,
    /// The same, on all cores.
    pub of: u32,
}

/// `enum kind`: the algorithm of a core.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Interleaved = 0,
    Regular = 1,
    Turbo = 2,
}

/// The plan of a core: `struct core_plan`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CoreRows {
    /// Slice of a batch VM, ns.
    pub batch_slice: Nanos,
    /// A [`Kind`].
    pub kind: u32,
    /// On a turbo core: the part of its share that a VM keeps for its regular vCPUs, thousandths.
    pub reserve: u32,
    /// The VMs, by row.
    pub vms: [VmParams; ROWS],
}

/// `struct vm_stats`: what a VM used of one core.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VmStats {
    /// Identity in the scheduler.
    pub id: u32,
    /// Unused.
    pub runnable: u32,
    /// Time it ran, ns.
    pub run: Nanos,
    /// Context switches to one of its threads.
    pub turns: u64,
    /// Waits for the core that have ended.
    pub waits: u64,
    /// Their sum, ns.
    pub wait_sum: Nanos,
    /// The longest, ns.
    pub wait_max: Nanos,
    /// Times that it preempted another VM when it woke.
    pub boosts: u64,
}

/// What scheduling cost on a core: `struct core_stats`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CoreStats {
    /// Decisions.
    pub decisions: u64,
    /// Changes from one VM to another.
    pub switches: u64,
    /// Interrupts that made the core decide.
    pub kicks: u64,
    /// Time spent in decisions, ns.
    pub decide_ns: Nanos,
    /// Longest lateness of a slice's end, ns.
    pub late_max: Nanos,
    /// Turns given to a VM only because it had waited for `starved_after`.
    pub starved: u64,
}

/// How the scheduler ended: `struct scx_end`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ExitInfo {
    /// The kernel's `scx_exit_kind`; 0: the scheduler runs.
    pub kind: u32,
    pub pad: u32,
    pub reason: [u8; 128],
    pub message: [u8; 256],
}

/// Assigns a thread to a VM, or with id 0 to none: `struct scx_enrol`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Enrol {
    pub tid: u32,
    pub id: u32,
    pub service: u32,
}

/// Knobs of the scheduler, fixed while it is loaded: `struct scx_knobs`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Knobs {
    /// Most service that a sleeping latency-sensitive VM is owed, ns.
    pub credit_ls: Nanos,
    /// The same for other VMs, ns.
    pub credit_batch: Nanos,
    /// Longest run of a vCPU while another vCPU of its VM waits on the same core, ns.
    pub vcpu_turn: Nanos,
    /// Head start of a VM's service threads over its vCPUs, ns.
    pub service_start: Nanos,
    /// A VM that has waited for this time runs next, whatever its weight, ns. Far below the kernel's watchdog (5 s).
    pub starved_after: Nanos,
    /// Length of that run, ns.
    pub starved_turn: Nanos,
    /// For tests: the VM with this id never runs; 0: none.
    pub starve_id: u32,
    /// For tests: 1 ends slices at the kernel's tick.
    pub no_timer: u32,
    /// Possible CPUs; the loader sets it.
    pub cpus: u32,
    /// Unused.
    pub pad: u32,
}

impl Default for Knobs {
    fn default() -> Self {
        let config = InterleavedConfig::default();
        Self {
            credit_ls: config.credit_ls,
            credit_batch: config.credit_batch,
            vcpu_turn: MS,
            service_start: 10 * MS,
            starved_after: 1000 * MS,
            starved_turn: 100 * US,
            starve_id: 0,
            no_timer: 0,
            cpus: 0,
            pad: 0,
        }
    }
}

/// Plain data that goes into maps and comes out of them.
///
/// # Safety
/// The type is `repr(C)` without padding, and any bytes are a valid value.
pub(super) unsafe trait Plain: Copy {
    fn bytes(&self) -> &[u8] {
        // SAFETY: by the contract of the trait all bytes are initialised.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        // SAFETY: the bytes are as long as the value, any bytes are a value, and the read is
        // unaligned.
        (bytes.len() == size_of::<Self>())
            .then(|| unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) })
    }
}

// SAFETY: integers only, the fields leave no gaps.
unsafe impl Plain for VmParams {}
// SAFETY: as above.
unsafe impl Plain for CoreRows {}
// SAFETY: as above.
unsafe impl Plain for VmStats {}
// SAFETY: as above.
unsafe impl Plain for CoreStats {}
// SAFETY: as above.
unsafe impl Plain for ExitInfo {}
// SAFETY: as above.
unsafe impl Plain for Enrol {}
// SAFETY: as above.
unsafe impl Plain for Knobs {}

const _: () = {
    assert!(size_of::<VmParams>() == 32);
    assert!(size_of::<CoreRows>() == 16 + 32 * ROWS);
    assert!(size_of::<VmStats>() == 56);
    assert!(size_of::<CoreStats>() == 48);
    assert!(size_of::<ExitInfo>() == 392);
    assert!(size_of::<Enrol>() == 12);
    assert!(size_of::<Knobs>() == 64);
};
